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

from tenure.cli import demo, demo_books, output
from tenure.cli.demo_ledger import (
    PARTS,
    STEP_BYTES,
    STEPS,
    Ledger,
    as_expected,
    audit,
    kinds,
    percentile,
    promised,
    sold,
)
from tenure.cli.demo_panel import Panel
from tenure.cli.demo_processes import Child, kill_if, under_way
from tenure.engine.board import Board

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
    child, worker = (kill["running"] for kill in report["kills"])
    assert report["recovered"]["its process was killed by SIGKILL"] == child
    assert report["recovered"]["its worker's process is gone"] > 0
    assert sum(report["recovered"].values()) >= child + worker
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


def job(
    id: str,
    status: str = "completed",
    type: str = "ping",
    code: str | None = None,
    result: Any = None,
) -> Any:
    return SimpleNamespace(
        id=id, status=status, type=type, error_code=code, error=None, result=result, parent=None
    )


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


# -- reports made of parts


def a_report(number: int = 7) -> list[Any]:
    """A parent, its parts and its summary, all well."""
    family = [job(f"p{part}", type="count_part") for part in range(PARTS)]
    total = sum(sold(number, part) for part in range(PARTS))
    family.append(job("sum", type="sum_report", result=total))
    for child in family:
        child.parent = "plan"
    told = {"parts": [child.id for child in family[:-1]], "summary": "sum"}
    plan = job("plan", type="plan_report", result=told)
    plan.payload = {"report": number}
    return [plan, *family]


def its_trail() -> list[tuple[str, str]]:
    order = ["plan", *(f"p{part}" for part in range(PARTS)), "sum"]
    return [(id, kind) for id in order for kind in ("job.started", "job.succeeded")]


def fan_ins(jobs: list[Any], trail: list[tuple[str, str]]) -> demo_books.FanIns:
    ledger = Ledger(Trail(*trail))  # type: ignore[arg-type]
    ledger.read()
    return demo_books.fan_ins(jobs, ledger)


def test_a_report_that_adds_up() -> None:
    counted = fan_ins(a_report(), its_trail())

    assert counted.ok
    assert counted.check().ok
    assert counted.told() == (
        "1 reports of 12 parts each: every part once, every summary exactly once"
    )


def test_what_jobs_enqueued_is_promised_as_well() -> None:
    jobs = a_report()
    open_ = job("other", "queued", "plan_report")

    told = promised(["plan", "other"], [*jobs, open_])

    assert sorted(told) == sorted([*(each.id for each in jobs), "other"])


def without_a_part(jobs: list[Any], trail: list[tuple[str, str]]) -> None:
    jobs[:] = [each for each in jobs if each.id != "p3"]


def with_a_wrong_total(jobs: list[Any], trail: list[tuple[str, str]]) -> None:
    jobs[-1].result += 1


def with_two_summaries(jobs: list[Any], trail: list[tuple[str, str]]) -> None:
    jobs.append(SimpleNamespace(**vars(jobs[-1]) | {"id": "again"}))


def with_a_summary_run_twice(jobs: list[Any], trail: list[tuple[str, str]]) -> None:
    trail.append(("sum", "job.succeeded"))


def with_a_hasty_summary(jobs: list[Any], trail: list[tuple[str, str]]) -> None:
    trail.remove(("sum", "job.started"))
    trail.insert(4, ("sum", "job.started"))


@pytest.mark.parametrize(
    "spoil",
    [
        without_a_part,
        with_a_wrong_total,
        with_two_summaries,
        with_a_summary_run_twice,
        with_a_hasty_summary,
    ],
)
def test_a_report_that_does_not_add_up_is_found(spoil: Any) -> None:
    jobs, trail = a_report(), its_trail()
    spoil(jobs, trail)

    counted = fan_ins(jobs, trail)

    assert not counted.check().ok
    assert "exactly once," in counted.told()


# -- uploads made of steps


def uploads(path: Path, *lines: str, sent: int = len(STEPS) * STEP_BYTES) -> demo_books.Uploads:
    path.write_text("".join(f"a {line}\n" for line in lines))
    calls = demo_books.read_calls(str(path))
    return demo_books.uploads([job("a", type="upload", result=sent), job("b")], calls)


def test_an_upload_in_one_go(tmp_path: Path) -> None:
    counted = uploads(tmp_path / "log", "1", *(f"1 {step}" for step in STEPS))

    assert counted == (1, 5, 5, 0, 0, 0, 0, 1)
    assert counted.ok
    assert "no kill hit" in counted.told()


def test_steps_that_had_finished_are_skipped(tmp_path: Path) -> None:
    before = ["1", "1 open", "1 first", "1 second"]
    at_first = ["4"]  # cut short before it called anything
    after = ["9", "9 second", "9 third", "9 close"]

    counted = uploads(tmp_path / "log", *before, *at_first, *after)

    assert counted == (1, 5, 6, 1, 2, 1, 0, 1)
    assert counted.ok
    assert "2 steps skipped instead of repeated" in counted.told()


def test_an_upload_that_only_had_to_say_it_is_done(tmp_path: Path) -> None:
    counted = uploads(tmp_path / "log", "1", *(f"1 {step}" for step in STEPS), "2")

    assert counted.ok
    assert counted.skipped == 5


@pytest.mark.parametrize(
    ("lines", "sent"),
    [
        (["1", "1 open", "1 first", "2", *(f"2 {step}" for step in STEPS)], 5),  # repeated
        (["1", *(f"1 {step}" for step in STEPS[1:])], 5),  # never called
        (["1", *(f"1 {step}" for step in STEPS)], 4),  # bytes are missing
        ([], 5),
    ],
)
def test_an_upload_gone_wrong_is_found(tmp_path: Path, lines: list[str], sent: int) -> None:
    counted = uploads(tmp_path / "log", *lines, sent=sent * STEP_BYTES)

    assert not counted.check().ok


def test_no_upload_ever_ran(tmp_path: Path) -> None:
    assert demo_books.read_calls(str(tmp_path / "none")) == {}


# -- kills


def test_a_kill_that_is_not_worth_it_leaves_the_process_running() -> None:
    seen: list[int] = []
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert not kill_if(process.pid, lambda pid: bool(seen.append(pid)))
        said, _ = process.communicate(b"alive", timeout=10)

        assert said == b"alive"
        assert seen == [process.pid]
        assert process.returncode == 0
    assert not kill_if(process.pid, lambda pid: True)  # it has ended


def test_a_kill_that_is_worth_it() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        assert kill_if(process.pid, lambda pid: True)
        assert process.wait(10) == -signal.SIGKILL


def test_only_jobs_that_have_begun_are_under_way(tmp_path: Path) -> None:
    path = str(tmp_path / "board")
    board = Board(path, 3, create=True)
    for slot, name in enumerate("abc"):
        board.assign(slot, name * 26)
    board.start(1, 5.0)
    board.start(2, 5.0)
    board.end(2)

    found = under_way([Child(1, path, alone=False), Child(2, str(tmp_path / "gone"), alone=True)])

    board.close()
    assert found == {"b" * 26}


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
    panel.show(ledger, lambda: {"make_report": [10.0, 55.0, 100.0] * 5})

    lines = ESCAPES.sub("", capsys.readouterr().out).splitlines()
    assert len(lines) > len(kinds(5000))
    assert max(output.width(line) for line in lines) < columns
