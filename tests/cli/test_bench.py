"""`tenure bench` runs, measures what it says, and leaves nothing behind. Figures are not judged."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tenure.cli import bench, bench_raw
from tenure.cli.bench import Figure
from tenure.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


def run_bench(directory: Path, *options: str, seconds: float = 100) -> dict[str, Any]:
    environment = {name: v for name, v in os.environ.items() if not name.startswith("TENURE_")}
    url = f"sqlite:///{directory}/jobs.db"
    finished = subprocess.run(
        [sys.executable, "-m", "tenure", "bench", "--url", url, "--json", *options],
        env={**environment, "PYTHONPATH": str(ROOT / "src")},
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert finished.returncode in (0, 1), finished.stderr  # 1: a bar was missed
    report: dict[str, Any] = json.loads(finished.stdout)
    assert finished.returncode == (0 if report["ok"] else 1)
    return report


def test_a_tiny_run_measures_every_rate(tmp_path: Path) -> None:
    (tmp_path / "jobs.db").write_bytes(b"somebody's data")

    report = run_bench(
        tmp_path, "--jobs", "2000", "--rounds", "1", "--only", "raw,own,enqueue,drain"
    )

    assert (report["jobs"], report["processes"]) == (2000, 1)
    assert set(report["machine"]) >= {"date", "cores", "python", "sqlite"}
    assert {name: len(values) for name, values in report["rounds"].items()} == {
        "raw_single": 2,
        "raw_bulk": 2,
        "raw_loop": 2,
        "own_loop": 1,
        "enqueue_one": 2,
        "enqueue_many": 2,
        "drain": 1,
    }
    assert all(value > 10 for values in report["rounds"].values() for value in values)
    ratios = {name: figure for name, figure in report["figures"].items() if figure["bar"]}
    assert {name: figure["bar"] for name, figure in ratios.items()} == {
        "drain / raw loop": 0.2,
        "drain / own statements": 0.7,
        "enqueue one / raw": 0.6,
        "enqueue_many / raw bulk": 0.2,
    }
    assert all(figure["ok"] is (figure["value"] >= figure["bar"]) for figure in ratios.values())
    # The database that the URL names was not opened, and nothing else is left.
    assert [path.name for path in tmp_path.iterdir()] == ["jobs.db"]
    assert (tmp_path / "jobs.db").read_bytes() == b"somebody's data"


@pytest.mark.bench
def test_the_figures(tmp_path: Path) -> None:
    report = run_bench(tmp_path, "--all", seconds=1700)

    for name, figure in report["figures"].items():
        bar = "" if figure["bar"] is None else f" (bar {figure['bar']:g}, ok: {figure['ok']})"
        print(f"{name}: {figure['value']:,.2f} {figure['unit']}{bar}")
    missed = [name for name, figure in report["figures"].items() if figure["ok"] is False]
    assert not missed


def chosen(only: str | None, every: bool = False) -> tuple[str, ...]:
    return bench._chosen(argparse.Namespace(only=only, all=every))


def test_sections_are_chosen_by_name() -> None:
    assert chosen(None) == ("raw", "own", "enqueue", "drain", "pickup")
    assert chosen("scale, raw") == ("raw", "scale")
    assert set(chosen(None, every=True)) == {*bench.DEFAULT, *bench.ON_REQUEST}


@pytest.mark.parametrize("only", ["raws", "raw,nothing", " , "])
def test_an_unknown_section_is_named(only: str) -> None:
    with pytest.raises(ConfigError, match="it has raw, own"):
        chosen(only)


def test_a_url_without_a_directory_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match="no directory"),
        bench._place(f"sqlite:///{tmp_path}/no/x"),
    ):
        pass


def test_a_bar_is_a_floor_or_a_ceiling() -> None:
    assert Figure("drain / raw", 0.25, "", 0.2, at_least=True).ok is True
    assert Figure("pick-up", 12.0, "ms", 10).ok is False
    assert Figure("rate", 12.0, "jobs/s").ok is None


def test_percentiles_are_values_that_occurred() -> None:
    values = [float(number) for number in range(1, 101)]

    assert bench_raw.percentile(values, 0.5) == 51
    assert bench_raw.percentile(values, 0.95) == 96
    assert bench_raw.percentile([7.0], 0.99) == 7
