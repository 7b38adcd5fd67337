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
from typing import Any, NamedTuple

import pytest

from tenure.demo.processes import Child, kill_if, under_way
from tenure.engine.board import inherited_board, make_board
from tenure.ids import new_id

SOURCE = Path(__file__).resolve().parents[2] / "src"


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
    # What was under way, less the poison jobs among it, which are no matter of recovery.
    for kill, why in zip(
        report["kills"],
        ("its process was killed by SIGKILL", "its worker's process is gone"),
        strict=True,
    ):
        assert 0 < report["recovered"][why] <= kill["running"]
    assert report["retried"]["charge_card"] > 0
    assert {entry["code"] for entry in report["dead"]} == {"poison", "BAD_FILE", "ConnectionError"}
    assert report["runs"] > 600


def test_every_report_adds_up(played: Played) -> None:
    reports = played.report["reports"]

    assert reports["reports"] == reports["summaries_once"] == reports["in_order"] == 4
    assert reports["exact"] == 4
    assert reports["parts_once"] == 4 * reports["parts_each"] == 48
    assert "4 reports of 12 parts each: every part once, every summary exactly once" in played.said


def test_uploads_went_on_where_they_stopped(played: Played) -> None:
    uploads = played.report["uploads"]

    assert uploads["complete"] == uploads["uploads"] == 4
    assert uploads["repeated"] == 0
    assert uploads["cut_short"] > 0
    assert uploads["skipped"] > 0
    assert uploads["calls"] == 4 * uploads["steps_each"] + uploads["in_flight"]
    assert "went on where they stopped" in played.said


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
    assert said.count("✓") == 7
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


INTERRUPTED_IN_EXEC = """
import sys
from tenure.demo.processes import stopped_politely
try:
    with stopped_politely():
        exec("import os, signal; os.kill(os.getpid(), signal.SIGTERM); sum(range(1000))")
except KeyboardInterrupt:
    sys.exit(130)
"""


def test_an_interrupt_while_a_class_is_made_from_text(tmp_path: Path) -> None:
    """As NamedTuple does when it is imported. Whatever is done about a KeyboardInterrupt that has
    passed through exec(), `python -m` ends itself by SIGINT."""
    (tmp_path / "interrupted.py").write_text(INTERRUPTED_IN_EXEC)
    ran = subprocess.run([sys.executable, "-m", "interrupted"], cwd=tmp_path, check=False)
    assert ran.returncode == 130


@pytest.mark.parametrize("arguments", [["--jobs", "10"], ["--jobs", "x"], ["--url", "sqlite:///x"]])
def test_wrong_usage(tmp_path: Path, arguments: list[str]) -> None:
    process = start(tmp_path, *arguments)

    finish(process)

    assert process.returncode == 2
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------- kills


def test_a_kill_that_is_not_worth_it_leaves_the_process_running() -> None:
    seen: list[int] = []

    def not_worth_it(pid: int) -> bool:
        seen.append(pid)
        return False

    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert not kill_if(process.pid, not_worth_it)
        said, _ = process.communicate(b"alive", timeout=10)

        assert said == b"alive"
        assert seen == [process.pid]
        assert process.returncode == 0
    assert not kill_if(process.pid, lambda pid: True)  # it has ended


def test_a_kill_that_is_worth_it() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        assert kill_if(process.pid, lambda pid: True)
        assert process.wait(10) == -signal.SIGKILL


def test_only_jobs_that_have_begun_are_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    made = make_board("host:1:worker", 1, 3)
    board = inherited_board(made.lend())  # as the child has it
    ids = [new_id() for _ in range(3)]
    for slot, id in enumerate(ids):
        made.assign(slot, id)
    board.start(1, 5.0)
    board.start(2, 5.0)
    board.end(2)
    us = Child(os.getpid(), alone=False)

    found = under_way([us, Child(2, alone=True)], str(tmp_path))

    assert found == {ids[1]}
    assert under_way([Child(2, alone=True)], str(tmp_path)) == set()
    made.close()
    assert under_way([us], str(tmp_path)) == set()
