"""`tenure demo` in real processes: it survives its own kills, and its books add up."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from tenure.cli import demo, output
from tenure.cli.demo_ledger import Ledger, as_expected, audit, kinds, percentile
from tenure.cli.demo_panel import Panel

SOURCE = Path(__file__).resolve().parents[2] / "src"
ESCAPES = re.compile(r"\x1b\[[?0-9;]*[A-Za-z]")


class Played(NamedTuple):
    said: str
    report: dict[str, Any]
    environment: dict[str, str]


def environment(directory: Path) -> dict[str, str]:
    """A shell that has a database of its own, which the demo must leave alone."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TENURE_")}
    own = {"PYTHONPATH": str(SOURCE), "TMPDIR": str(directory), "PYTHONUTF8": "1"}
    return kept | own | {"TENURE_URL": f"sqlite:///{directory}/mine.db"}


def start(directory: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tenure", "demo", *arguments],
        env=environment(directory),
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], timeout: float = 90) -> str:
    try:
        said, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its workers, too
        said, _ = process.communicate()
        raise AssertionError(f"the demo did not end:\n{said}") from None
    return said


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    """Both ways at once: each spends most of its time waiting."""
    directory = tmp_path_factory.mktemp("demo")
    people, program = start(directory, "--jobs", "500"), start(directory, "--jobs", "600", "--json")
    said, report = finish(people), finish(program)
    assert people.returncode == 0, said
    assert program.returncode == 0, report
    yield Played(said, json.loads(report), environment(directory))
    assert not (directory / "mine.db").exists(), "the demo used this shell's own database"


# ------------------------------------------------------------------------------- the real thing


def test_the_ledger_adds_up(played: Played) -> None:
    ledger = played.report["ledger"]

    assert played.report["ok"]
    assert all(check["ok"] for check in played.report["checks"])
    assert ledger.pop("enqueued") == 600 == sum(ledger.values())
    assert ledger["failed"] == 4
    assert ledger["dead_letter"] == 5
    assert ledger["cancelled"] == 0


def test_both_kills_happened_and_jobs_were_recovered(played: Played) -> None:
    report = played.report

    assert [kill["what"] for kill in report["kills"]] == ["child", "worker"]
    assert all(kill["running"] > 0 for kill in report["kills"])
    assert sum(report["recovered"].values()) > 0
    assert report["retried"]["charge_card"] > 0
    assert {entry["code"] for entry in report["dead"]} == {"poison", "BAD_FILE", "ConnectionError"}
    assert report["runs"] > 600


def test_it_measures(played: Played) -> None:
    pick_up = played.report["pick_up_ms"]

    assert played.report["throughput"]["per_second"] > 0
    assert 0 < pick_up["p50"] <= pick_up["p95"]


def test_the_commands_to_try_next_work(played: Played) -> None:
    dead, poison, worker = played.report["next"]

    def run(command: str) -> str:
        done = subprocess.run(
            shlex.split(command), env=played.environment, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout

    assert run(dead).count("import_file") == 1  # one group
    assert "3 processes died running it" in run(poison)
    assert "in " in run(f"{worker} --drain")


def test_without_a_terminal_it_tells_a_story_in_plain_lines(played: Played) -> None:
    said = played.said

    assert "\x1b" not in said
    for words in ("with SIGKILL", "started another worker", "went back to the queue", "jobs/s"):
        assert words in said
    assert said.count("✓") == 5
    assert "✗" not in said
    assert "rm -r " in said


def test_an_interrupt_leaves_no_worker_behind(tmp_path: Path) -> None:
    process = start(tmp_path)
    assert process.stdout is not None
    for line in process.stdout:
        if "started a worker" in line:
            break
    pid = int(re.findall(r"supervisor, (\d+)", line)[0])
    process.send_signal(signal.SIGTERM)

    finish(process)

    assert process.returncode == 130
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize("arguments", [["--jobs", "10"], ["--jobs", "x"], ["--url", "sqlite:///x"]])
def test_wrong_usage(tmp_path: Path, arguments: list[str]) -> None:
    process = start(tmp_path, *arguments)

    finish(process)

    assert process.returncode == 2
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------- its parts


class Trail:
    """An audit trail, one page long."""

    def __init__(self, *events: tuple[str, str]) -> None:
        self._events = [
            SimpleNamespace(seq=seq, kind=kind, job_id=job, type="ping", data=None)
            for seq, (job, kind) in enumerate(events, start=1)
        ]

    def events(self, *, after: int, limit: int) -> list[SimpleNamespace]:
        return self._events[after : after + limit]


def job(id: str, status: str = "completed", type: str = "ping", code: str | None = None) -> Any:
    return SimpleNamespace(id=id, status=status, type=type, error_code=code, error=None)


def verdicts(acknowledged: list[str], jobs: list[Any], *events: tuple[str, str]) -> list[bool]:
    ledger = Ledger(Trail(*events))  # type: ignore[arg-type]
    ledger.read()
    return [check.ok for check in audit(acknowledged, jobs, ledger)]


def test_the_audit_accepts_books_that_add_up() -> None:
    events = [("a", "job.started"), ("a", "job.succeeded"), ("b", "job.deadlettered")]

    assert verdicts(["a", "b"], [job("a"), job("b", "dead_letter")], *events) == [True] * 3


@pytest.mark.parametrize(
    ("acknowledged", "jobs", "events", "expected"),
    [
        (["a", "b"], [job("a")], [("a", "job.succeeded")], [False, False, True]),  # lost
        (["a"], [job("a"), job("b")], [("a", "job.succeeded")], [False, True, False]),  # appeared
        (["a"], [job("a", "queued")], [], [False, False, True]),  # not ended
        (["a"], [job("a")], [("a", "job.succeeded")] * 2, [True, False, False]),  # ended twice
        (["a"], [job("a", "failed")], [("a", "job.succeeded")], [True, True, False]),  # disagree
    ],
)
def test_the_audit_finds_what_does_not_add_up(
    acknowledged: list[str],
    jobs: list[Any],
    events: list[tuple[str, str]],
    expected: list[bool],
) -> None:
    assert verdicts(acknowledged, jobs, *events) == expected


def test_a_job_that_ended_otherwise_than_its_kind_is_found() -> None:
    assert as_expected(kinds(500), [job("a"), job("b", "failed", "import_file", "BAD_FILE")]).ok
    assert not as_expected(kinds(500), [job("a", "failed")]).ok
    assert not as_expected(kinds(500), [job("b", "dead_letter", "resize_image", "crashed")]).ok


@pytest.mark.parametrize("jobs", [demo.FEWEST, 777, 5000])
def test_the_kinds_add_up(jobs: int) -> None:
    assert sum(kind.jobs for kind in kinds(jobs)) == jobs
    assert all(kind.jobs > 0 for kind in kinds(jobs))


def test_percentiles() -> None:
    values = [float(n) for n in range(1, 101)]

    assert percentile(values, 0.5) == 50
    assert percentile(values, 0.95) == 95
    assert percentile([7.0], 0.95) == 7


@pytest.mark.parametrize("columns", [40, 60, 80, 200])
def test_the_panel_fits_the_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("LINES", "30")
    monkeypatch.setattr(output, "is_terminal", lambda stream: True)
    ledger = Ledger(Trail(("a", "job.started"), ("b", "job.succeeded")))  # type: ignore[arg-type]
    ledger.read()
    panel = Panel(kinds(5000))

    panel.tell("something happened that takes a good many words to tell, more than one line holds")
    panel.show(ledger, lambda: [10.0, 55.0, 100.0] * 5)

    lines = ESCAPES.sub("", capsys.readouterr().out).splitlines()
    assert len(lines) > len(kinds(5000))
    assert max(output.width(line) for line in lines) < columns
