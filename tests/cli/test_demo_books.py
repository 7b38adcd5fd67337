"""The books of `tenure demo`: they accept what adds up, and find what does not."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tenure.demo import books, command
from tenure.demo.ledger import (
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
from tenure.demo.panel import Panel
from tenure.terminal import output

ESCAPES = re.compile(r"\x1b\[[?0-9;]*[A-Za-z]")


class Trail:
    """An audit trail, one page long."""

    def __init__(self, *events: tuple[str, str]) -> None:
        self._events = [
            SimpleNamespace(seq=seq, kind=kind, job_id=job, type="ping", data=None)
            for seq, (job, kind) in enumerate(events, start=1)
        ]

    def events(self, *, after: int, limit: int) -> SimpleNamespace:
        return SimpleNamespace(events=self._events[after : after + limit])


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


def fan_ins(jobs: list[Any], trail: list[tuple[str, str]]) -> books.FanIns:
    ledger = Ledger(Trail(*trail))  # type: ignore[arg-type]
    ledger.read()
    return books.fan_ins(jobs, ledger)


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


def uploads(path: Path, *lines: str, sent: int = len(STEPS) * STEP_BYTES) -> books.Uploads:
    path.write_text("".join(f"a {line}\n" for line in lines))
    calls = books.read_calls(str(path))
    return books.uploads([job("a", type="upload", result=sent), job("b")], calls)


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
    assert books.read_calls(str(tmp_path / "none")) == {}


@pytest.mark.parametrize("jobs", [command.FEWEST, 777, 5000])
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
