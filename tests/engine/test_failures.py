"""A failing job is heard: in the log, by hooks, and with the job itself."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tenure
from crash.harness import Workshop, eventually
from tenure.engine import job_log
from tenure.ids import new_id

NOW = tenure.Retry(attempts=3, backoff=tenure.Fixed(0))
ONCE = tenure.Retry(attempts=1)
HERE = Path(__file__).name


def run(app: tenure.App, task: tenure.Task[..., Any], *args: Any) -> tenure.Job:
    receipt = task.enqueue(*args)
    app.run_worker(drain=True)
    job = app.get(receipt.id)
    assert job is not None
    return job


def said(caplog: pytest.LogCaptureFixture, level: str = "DEBUG") -> list[logging.LogRecord]:
    least = getattr(logging, level)
    return [r for r in caplog.records if r.name == "tenure.job" and r.levelno >= least]


def marked(marker: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    (number,) = [n for n, text in enumerate(lines, 1) if text.endswith(f"# {marker}")]
    return number


# -- the log ------------------------------------------------------------------------------------


def test_each_failed_attempt_and_the_end(app: tenure.App, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "tenure")

    @app.task(retry=NOW)
    def work(to: str) -> None:
        raise ValueError(f"no mailbox {to}")  # no mailbox

    job = run(app, work, "gertrude@example.com")

    records = said(caplog)
    place = f"{HERE}:{marked('no mailbox')}"
    ending = f"ValueError: no mailbox [redacted] ({place})"
    assert [(r.levelname, r.getMessage()) for r in records] == [
        ("WARNING", f"work {job.id}: attempt 1 of 3 failed, next try in 0.0 s: {ending}"),
        ("WARNING", f"work {job.id}: attempt 2 of 3 failed, next try in 0.0 s: {ending}"),
        ("ERROR", f"work {job.id}: attempt 3 of 3 failed, now a dead letter: {ending}"),
    ]
    assert [bool(r.exc_text) for r in records] == [True, False, True], "once for each level"
    assert records[0].exc_text == job.traceback
    assert not any(r.exc_info for r in records), "the exception itself is not scrubbed"
    facts = vars(records[2])
    assert (facts["type"], facts["job_id"], facts["attempt"]) == ("work", job.id, 3)
    assert (facts["max_attempts"], facts["will_retry"]) == (3, False)
    assert facts["exception"] == job.error
    assert facts["error_place"] == place
    assert "gertrude" not in caplog.text


def test_success_is_silent_unless_asked_for(
    app: tenure.App, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "tenure")

    @app.task
    async def work() -> int:
        return 1

    run(app, work)
    assert said(caplog) == []

    caplog.set_level("DEBUG", "tenure")
    job = run(app, work)
    first, last = (r.getMessage() for r in said(caplog))
    assert first == f"work {job.id}: attempt 1 of 5 started"
    assert re.fullmatch(rf"work {job.id}: attempt 1 of 5 ended: completed, \d+ ms", last)


def returns_failure() -> Any:
    return tenure.Fail("no such user", code="NO_USER")


def is_permanent() -> Any:
    raise tenure.PermanentError("closed", code="CLOSED")


def returns_nonsense() -> Any:
    return object()


async def takes_too_long() -> Any:
    await asyncio.sleep(60)


@pytest.mark.parametrize(
    ("handler", "code"),
    [
        (returns_failure, "NO_USER"),
        (is_permanent, "CLOSED"),
        (returns_nonsense, "RESULT_ERROR"),
        (takes_too_long, "TIMEOUT"),
    ],
)
def test_every_end_for_good_is_an_error(
    app: tenure.App,
    caplog: pytest.LogCaptureFixture,
    handler: Callable[[], Any],
    code: str,
) -> None:
    job = run(app, app.task(name="work", retry=ONCE, timeout=0.2)(handler))

    (record,) = said(caplog, "WARNING")
    assert record.levelname == "ERROR"
    assert (vars(record)["error_code"], vars(record)["job_id"]) == (code, job.id)
    assert str(job.error) in record.getMessage()
    assert job.dead


def test_bad_arguments_are_at_the_task(app: tenure.App, caplog: pytest.LogCaptureFixture) -> None:
    @app.task(retry=ONCE)
    def work(count: int) -> None: ...  # the task

    receipt = work.enqueue(1)
    app.store.cancel([receipt.id], actor=tenure.Actor("user", "7"), reason="")

    @app.task(name="other")
    def other(count: str) -> None: ...

    stored = other.job("many")
    app.store.enqueue([stored._replace(terms=stored.terms._replace(type="work"))])
    app.run_worker(drain=True)
    job = app.get(stored.id)

    assert job is not None
    assert (job.status, job.error_code) == ("failed", "VALIDATION_ERROR")
    assert str(job.error_place).endswith(f" at {HERE}:{marked('the task')}")
    assert job.traceback is None
    (record,) = said(caplog, "ERROR")
    assert f"({HERE}:{marked('the task')})" in record.getMessage()


def test_a_storm_of_failures_is_no_storm_of_lines(
    app: tenure.App, caplog: pytest.LogCaptureFixture
) -> None:
    """3,000 equal ones: a hundred lines a second at most, and the rest are counted."""

    @app.task(retry=ONCE)
    async def work(n: int) -> None:
        raise ValueError("no such order")

    app.enqueue_many([work.job(n) for n in range(3000)])
    app.run_worker(drain=True)

    records = said(caplog, "ERROR")
    lines = [r for r in records if hasattr(r, "job_id")]
    sums = [r.getMessage() for r in records if not hasattr(r, "job_id")]
    found = [re.match(r"([\d,]+) more within a second, not shown one by one: ", s) for s in sums]
    told = sum(int(match[1].replace(",", "")) for match in found if match)
    seconds = records[-1].created - records[0].created
    assert len(lines) + told == 3000
    assert len(lines) <= job_log.MOST_LINES * (seconds + 2)
    assert len(sums) <= seconds + 2
    assert f"work: ValueError at {HERE}:" in sums[0]
    assert sum(bool(r.exc_text) for r in records) == 1


# -- the traceback ------------------------------------------------------------------------------


def test_a_huge_one_is_cut(app: tenure.App) -> None:
    @app.task(retry=ONCE)
    def work() -> None:
        def ping(n: int) -> None:
            pong(n + 1)

        def pong(n: int) -> None:
            ping(n + 1)

        try:
            ping(0)
        except RecursionError as error:
            raise ValueError("ü" * 50_000) from error

    job = run(app, work)

    text = str(job.traceback)
    assert 4000 < len(text.encode()) <= 8192
    assert "direct cause" in text or "\n  ...\n" in text
    assert text.endswith("ü")


def test_an_exception_that_bites(app: tenure.App) -> None:
    """Whatever it does when it is looked at: the job has failed of it."""

    class Biting(Exception):
        @property
        def __notes__(self) -> list[str]:
            raise RuntimeError("do not look")

        def __str__(self) -> str:
            raise RuntimeError("do not ask")

    @app.task(retry=ONCE)
    def work() -> None:
        raise Biting

    job = run(app, work)

    assert job.status == "dead_letter"
    assert str(job.error) == "Biting"
    assert str(job.error_place).startswith(f"Biting at {HERE}:")
    assert str(job.traceback).endswith("raise Biting\nBiting")


# -- hooks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("hook", ["def", "async"])
@pytest.mark.parametrize("handler", ["def", "async"])
def test_a_hook_gets_the_exception_itself(app: tenure.App, hook: str, handler: str) -> None:
    """With its traceback, in its process, and as what is being handled: what error trackers ask
    for when they are not told."""
    raised = ValueError("no such order 4711")
    told: list[tuple[Any, ...]] = []

    def look(event: tenure.Lifecycle) -> None:
        frames = [step.name for step in traceback.extract_tb(event.exception.__traceback__)]  # type: ignore[union-attr]
        told.append((event.kind, event.exception, sys.exc_info()[1], frames, os.getpid()))

    async def alook(event: tenure.Lifecycle) -> None:
        await asyncio.sleep(0)
        look(event)

    def body(order: int) -> None:
        raise raised

    async def abody(order: int) -> None:
        body(order)

    for kind in ("failed", "final_failure"):
        app.on(kind)(look if hook == "def" else alook)
    run(app, app.task(name="work", retry=ONCE)(body if handler == "def" else abody), 4711)
    eventually(lambda: len(told) == 2, what="both told")

    assert [line[0] for line in told] == ["failed", "final_failure"]
    for _kind, given, handled, frames, pid in told:
        assert given is raised
        assert handled is raised
        assert frames[-1] == "body"
        assert frames.count("body") == 1
        assert not {"_handling", "_handled", "look"} & set(frames), "and no trace of ours"
        assert pid == os.getpid()


def test_a_hook_is_told_of_time_outs_and_results_that_cannot_be_stored(app: tenure.App) -> None:
    told: list[BaseException | None] = []
    app.on("final_failure")(lambda event: told.append(event.exception))

    run(app, app.task(name="slow", retry=ONCE, timeout=0.2)(takes_too_long))
    run(app, app.task(name="odd", retry=ONCE)(returns_nonsense))
    run(app, app.task(name="fail", retry=ONCE)(returns_failure))

    late, odd, nothing = told
    assert isinstance(late, TimeoutError)
    assert traceback.extract_tb(late.__traceback__)[-2].name == "takes_too_long"
    assert isinstance(odd, tenure.PayloadError)
    assert nothing is None


def test_a_hook_that_raises_the_exception_again_changes_nothing(
    app: tenure.App, caplog: pytest.LogCaptureFixture
) -> None:
    @app.on("failed")
    def again(event: tenure.Lifecycle) -> None:
        assert event.exception is not None
        raise event.exception

    @app.task(retry=NOW)
    def work(ctx: tenure.Context) -> str:
        if ctx.attempt < 2:
            raise ValueError("not yet")
        return "done"

    job = run(app, work)

    assert (job.status, job.result, job.attempts) == ("completed", "done", 2)
    assert "hook again for 'failed' raised ValueError; the job goes on" in caplog.text


# -- real workers -------------------------------------------------------------------------------


def heard(shop: Workshop, level: str) -> list[dict[str, Any]]:
    """JSON lines of children; the harness's supervisor has a format of its own."""
    found = []
    for worker in shop.workers:
        for line in worker.log.splitlines():
            if line.startswith("{"):
                found.append(json.loads(line))
    return [line for line in found if line["level"] == level and line["logger"] == "tenure.job"]


def test_worker_processes_say_it_in_json(workshop: Callable[..., Workshop]) -> None:
    shop = workshop(
        """
        @app.task(retry=tenure.Retry(attempts=2, backoff=tenure.Fixed(0)))
        def work(to: str) -> None:
            raise ValueError(f"no mailbox {to}\\x1b[2J\\n12:00:00 ERROR forged")
        """,
        log_format="json",
    )
    receipt = shop.jobs.work.enqueue("gertrude@example.com")
    assert shop.worker(ready=False, drain=True).wait(60) == 0

    (retried,), (dead,) = heard(shop, "WARNING"), heard(shop, "ERROR")
    for line in (retried, dead):
        assert (line["type"], line["job_id"]) == ("work", receipt.id)
        assert "[redacted]" in line["exception"]
        assert "\\x1b[2J" in line["traceback"]
        assert "jobs.py" in line["traceback"]
    assert "next_try" in retried and "next_try" not in dead
    assert dead["traceback"] == shop.job(receipt.id).traceback


def test_crashes_poison_and_killed_time_outs_are_heard(workshop: Callable[..., Workshop]) -> None:
    shop = workshop(
        """
        @app.task
        async def poison() -> None:
            os._exit(1)

        @app.task(timeout=0.5, retry=tenure.Retry(attempts=1))
        async def stuck() -> None:
            hold_the_gil(4)

        @app.task(timeout=0.5, retry=tenure.Retry(attempts=1))
        def asleep() -> None:
            time.sleep(60)
        """
    )
    poison, stuck = shop.jobs.poison.enqueue(), shop.jobs.stuck.enqueue()
    asleep = shop.jobs.asleep.enqueue()
    worker = shop.worker()
    shop.wait_for("dead_letter", 3, within=60)
    worker.stop()

    log = worker.log
    assert log.count(f"poison {poison.id}: attempt") == 3
    assert f"poison {poison.id}: attempt 1 of 5 crashed, next try alone: its process exited" in log
    assert f"poison {poison.id}: attempt 3 of 5 crashed, now a dead letter (poison): its" in log
    for name, receipt in (("stuck", stuck), ("asleep", asleep)):
        told = (
            rf"{name} {receipt.id}: attempt \d of 1 failed, now a dead letter: TimeoutError: still"
        )
        assert re.search(told, log), "(it may have been beside the poison before)"


def test_a_lost_job_is_heard(workshop: Callable[..., Workshop]) -> None:
    shop = workshop(
        """
        @app.task(timeout=60)
        def work() -> None:
            say("running")
            time.sleep(60)
        """,
        loss_limit=1,
    )
    receipt = shop.jobs.work.enqueue()
    first = shop.worker()
    shop.wait_said("running")
    first.kill(whole=True)
    second = shop.worker()
    shop.wait_for("dead_letter", 1)
    second.signal(signal.SIGTERM)
    second.wait()

    told = (
        f"work {receipt.id}: attempt 1 of 5, now a dead letter (lost): its worker's process is gone"
    )
    assert told in second.log


def test_a_job_whose_follow_ups_are_refused_is_heard(
    app: tenure.App, caplog: pytest.LogCaptureFixture
) -> None:
    @app.task
    def work(ctx: tenure.Context) -> None:
        ctx.enqueue(work.options(after=[new_id()]))

    job = run(app, work)

    (record,) = said(caplog, "WARNING")
    assert record.levelname == "ERROR"
    assert (job.status, vars(record)["error_code"]) == ("failed", "BAD_CHILDREN")
    assert f"work {job.id}: attempt 1 of 5, now failed (BAD_CHILDREN): its follow" in record.message
