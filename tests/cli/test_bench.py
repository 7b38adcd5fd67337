"""`tenure bench` runs, measures what it says, and leaves nothing behind. Figures are not judged."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import servers
from tenure.app import open_store
from tenure.bench import raw
from tenure.bench.figures import DEFAULT, ON_REQUEST, SECTIONS, Figure, chosen, judged
from tenure.bench.place import open_place
from tenure.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


def start_bench(directory: Path, url: str, *options: str) -> subprocess.Popen[str]:
    environment = {name: v for name, v in os.environ.items() if not name.startswith("TENURE_")}
    return subprocess.Popen(
        [sys.executable, "-m", "tenure", "bench", "--url", url, "--json", *options],
        env={**environment, "PYTHONPATH": str(ROOT / "src")},
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_bench(
    directory: Path, *options: str, url: str | None = None, seconds: float = 100
) -> dict[str, Any]:
    with start_bench(directory, url or f"sqlite:///{directory}/jobs.db", *options) as process:
        try:
            output, errors = process.communicate(timeout=seconds)
        finally:
            process.terminate()  # it cleans up
    assert process.returncode in (0, 1), errors  # 1: a bar was missed
    assert output, errors
    report: dict[str, Any] = json.loads(output)
    assert process.returncode == (0 if report["ok"] else 1)
    return report


def bars(report: dict[str, Any]) -> dict[str, float]:
    return {name: each["bar"] for name, each in report["figures"].items() if each["bar"]}


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
    assert bars(report) == {
        "drain / raw loop": 0.2,
        "drain / own statements": 0.7,
        "enqueue one / raw": 0.6,
        "enqueue_many / raw bulk": 0.2,
    }
    ratios = [figure for figure in report["figures"].values() if figure["bar"]]
    assert all(figure["ok"] is (figure["value"] >= figure["bar"]) for figure in ratios)
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


@pytest.mark.bench
def test_the_figures_on_postgres(tmp_path: Path, own_postgres: servers.PostgresServer) -> None:
    report = run_bench(tmp_path, "--all", url=own_postgres.url(), seconds=3400)

    for name, figure in report["figures"].items():
        bar = "" if figure["bar"] is None else f" (bar {figure['bar']:g}, ok: {figure['ok']})"
        print(f"{name}: {figure['value']:,.2f} {figure['unit']}{bar}")
    missed = [name for name, figure in report["figures"].items() if figure["ok"] is False]
    assert not missed


# -- PostgreSQL -----------------------------------------------------------------------------------


def left_behind(server: servers.Databases) -> list[str]:
    names = server.execute("SELECT datname FROM pg_database WHERE datname LIKE 'tenure_bench_%'")
    return [name for (name,) in names]


def schemas(server: servers.Databases, database: str) -> set[str]:
    return {
        name for (name,) in server.execute("SELECT nspname FROM pg_namespace", database=database)
    }


@pytest.fixture
def named(postgres: servers.Databases) -> Iterator[str]:
    """The database that the URL names, which is to stay as it is."""
    name = postgres.create_database()
    yield name
    postgres.drop_database(name)


def test_a_tiny_run_on_postgres(tmp_path: Path, postgres: servers.Databases, named: str) -> None:
    before = schemas(postgres, named)

    report = run_bench(
        tmp_path,
        "--jobs", "400", "--rounds", "1", "--only", "raw,own,enqueue,drain,rush",
        url=postgres.url(named),
    )  # fmt: skip

    assert report["machine"]["postgres"]
    assert report["machine"]["fsync"] in ("on", "off")
    assert {name: len(values) for name, values in report["rounds"].items()} == {
        "raw_single": 2,
        "raw_bulk": 2,
        "raw_loop": 2,
        "raw_copy": 2,
        "own_loop": 1,
        "enqueue_one": 3,
        "enqueue_many": 3,
        "drain": 1,
        "drain_p2": 1,
    }
    assert all(value > 10 for values in report["rounds"].values() for value in values)
    assert bars(report) == {
        "drain / raw loop": 0.5,
        "drain, -p 2 / -p 1": 1.0,
        "enqueue one / raw": 0.7,
        "enqueue_many / raw bulk": 0.4,
        "100 jobs one by one, all finished, worst": 1,
    }
    assert 0 < report["details"]["rush"]["p50"] <= report["details"]["rush"]["max"]
    assert left_behind(postgres) == []
    assert schemas(postgres, named) == before
    assert list(tmp_path.iterdir()) == []


def test_without_the_right_to_create_databases_a_schema_has_to_do(
    tmp_path: Path, postgres: servers.Databases, named: str
) -> None:
    role = f"tenure_{secrets.token_hex(4)}"
    postgres.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'x'")
    postgres.execute(f"ALTER DATABASE {named} OWNER TO {role}")
    before = schemas(postgres, named)
    address = postgres.url(named).rpartition("@")[2]
    try:
        report = run_bench(
            tmp_path,
            "--jobs", "300", "--rounds", "1", "-p", "1", "--only", "raw,drain",
            url=f"postgresql://{role}:x@{address}",
        )  # fmt: skip

        assert set(report["rounds"]) >= {"raw_loop", "drain"}
        assert schemas(postgres, named) == before
    finally:
        postgres.execute(f"ALTER DATABASE {named} OWNER TO CURRENT_USER")
        postgres.execute(f"DROP ROLE {role}")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_nothing(
    tmp_path: Path, postgres: servers.Databases, named: str, number: signal.Signals
) -> None:
    options = ("--jobs", "1000000", "--only", "own")
    with start_bench(tmp_path, postgres.url(named), *options) as process:
        deadline = time.monotonic() + 30
        while not left_behind(postgres):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)

        process.send_signal(number)
        process.communicate(timeout=30)

    assert process.returncode == 130
    assert left_behind(postgres) == []


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("postgresql://ada:x@db:5433/shop", "postgresql://ada:x@db:5433/fresh"),
        ("postgres://one,two/shop?sslmode=require", "postgres://one,two/fresh?sslmode=require"),
        ("postgresql://db", "postgresql://db/fresh"),
        ("postgresql:///shop?host=/run/pg", "postgresql:///fresh?host=/run/pg"),
        ("postgresql://db?dbname=shop&user=ada", "postgresql://db/fresh?user=ada"),
    ],
)
def test_a_url_is_pointed_at_another_database(url: str, expected: str) -> None:
    from tenure.bench.postgres import with_database

    assert with_database(url, "fresh") == expected


# -- places ---------------------------------------------------------------------------------------


@pytest.fixture(params=["sqlite", "postgres"])
def place_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/jobs.db"
    url: str = request.getfixturevalue("database")
    return url


def test_a_place_fills_a_database_and_reads_its_history(place_url: str) -> None:
    told: list[str] = []
    with open_place(place_url) as place, place.fresh() as settings:
        store = open_store(settings)
        try:
            store.migrate()
            place.fill(store, 30, "another", lambda done, total, what: told.append(what))

            found = {queue.name: (queue.ready, queue.later) for queue in store.queues()}
            assert found == {"another": (30, 0), "default": (0, 30)}
            history = place.completions(store)
            assert (history.jobs, history.last - history.first) == (30, 29)
            assert place.before_last(store, 10) == history.last - 10
            assert place.before_last(store, 30) == 0
            assert place.completions(store, history.last - 10).jobs == 10
            with place.snapshot(store):
                assert place.completions(store) == history
        finally:
            store.close()
    assert told


def test_a_held_snapshot_is_one(database: str, postgres: servers.Databases) -> None:
    """Without a horizon of its own the section would measure nothing."""
    with open_place(database) as place, place.fresh() as settings:
        store = open_store(settings)
        try:
            store.migrate()
            with place.snapshot(store):
                held = postgres.execute(
                    "SELECT state, backend_xmin IS NOT NULL FROM pg_stat_activity"
                    " WHERE datname LIKE 'tenure_bench_%' AND backend_xmin IS NOT NULL"
                )
        finally:
            store.close()
    assert held == [("idle in transaction", True)]


# -- sections and figures -------------------------------------------------------------------------


def test_sections_are_chosen_by_name() -> None:
    assert chosen(None, False) == ("raw", "own", "enqueue", "drain", "pickup")
    assert chosen("scale, raw", False) == ("raw", "scale")
    assert set(chosen(None, True)) == {*DEFAULT, *ON_REQUEST}


@pytest.mark.parametrize("only", ["raws", "raw,nothing", " , "])
def test_an_unknown_section_is_named(only: str) -> None:
    with pytest.raises(ConfigError, match="it has raw, own"):
        chosen(only, False)


def test_a_url_without_a_directory_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match="no directory"),
        open_place(f"sqlite:///{tmp_path}/no/x"),
    ):
        pass


def test_a_store_it_cannot_measure_is_refused() -> None:
    with pytest.raises(ConfigError, match="SQLite and PostgreSQL"):
        open_place("redis://localhost/0")


def test_bars_are_those_of_the_store(tmp_path: Path, database: str) -> None:
    with open_place(f"sqlite:///{tmp_path}/x.db") as file, open_place(database) as server:
        places = (file, server)
        for name, unit, expected in (
            ("drain / raw loop", "", [(0.2, True), (0.5, True)]),
            ("pick-up, idle worker, p99", "ms", [(None, False), (20, False)]),
            ("claim of 1: ratio", "", [(1.5, False), (1.5, False)]),
            ("sleeping at once in one child", "jobs", [(1000, True), (1000, True)]),
        ):
            figures = [judged(place, name, 1.0, unit) for place in places]
            assert [(f.bar, f.at_least and f.bar is not None) for f in figures] == expected


def test_every_bar_belongs_to_a_figure() -> None:
    """A name with a typing mistake would be a bar that nothing is held against."""
    from tenure.bench import command, figures, postgres, scale, sqlite

    known = {title for rows in SECTIONS.values() for _key, title, _unit in rows}
    known |= {"claim of 1: ratio", "claim of 100: ratio", "drain, -p 2 / -p 1"}
    texts = "".join(Path(module.__file__).read_text() for module in (command, scale))
    for table in (figures.BARS, postgres.BARS, sqlite.BARS):
        assert [name for name in table if name not in known and f'"{name}"' not in texts] == []


def test_a_bar_is_a_floor_or_a_ceiling() -> None:
    assert Figure("drain / raw", 0.25, "", 0.2, at_least=True).ok is True
    assert Figure("pick-up", 12.0, "ms", 10).ok is False
    assert Figure("rate", 12.0, "jobs/s").ok is None


def test_percentiles_are_values_that_occurred() -> None:
    values = [float(number) for number in range(1, 101)]

    assert raw.percentile(values, 0.5) == 51
    assert raw.percentile(values, 0.95) == 96
    assert raw.percentile([7.0], 0.99) == 7
