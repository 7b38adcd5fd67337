"""While a handler runs: its context, its progress, its time-out, its cancellation."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from typing import Any

import pytest

import tenure
from crash.harness import eventually
from places import Place

# Beside the table: what is written while a job runs.
NOTE_PROGRESS = {
    "sqlite": [
        "CREATE TRIGGER note AFTER UPDATE OF progress ON tenure_jobs WHEN new.progress IS NOT NULL"
        " BEGIN INSERT INTO seen VALUES (1); END"
    ],
    "postgres": [
        "CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN INSERT INTO public.seen VALUES (1); RETURN NULL; END $$",
        "CREATE TRIGGER note AFTER UPDATE OF progress ON tenure_jobs FOR EACH ROW"
        " WHEN (new.progress IS NOT NULL) EXECUTE FUNCTION note()",
    ],
}


def context_task(app: tenure.App, handler: Any, **options: Any) -> tenure.Task[..., Any]:
    """A task whose first parameter is the context, though annotations here are strings."""
    handler.__annotations__ = {"ctx": tenure.Context}
    task: tenure.Task[..., Any] = app.task(**options)(handler)
    return task


def job_of(app: tenure.App, receipt: tenure.Receipt) -> tenure.Job:
    job = app.get(receipt.id)
    assert job is not None
    return job


def test_threads_end_with_the_worker_that_started_them(app: tenure.App) -> None:
    """Or a program that starts one now and then has ever more of them."""
    both = threading.Barrier(2)

    @app.task
    def wait() -> int:
        both.wait(10)
        return threading.get_native_id()

    receipts = [wait.enqueue(), wait.enqueue()]
    with app.worker():
        ran = {app.result(receipt.id, timeout=10) for receipt in receipts}

    def left() -> set[int | None]:
        return ran & {thread.native_id for thread in threading.enumerate()}

    assert len(ran) == 2
    eventually(lambda: not left(), within=5, what="the threads end")


def test_the_context_knows_its_run(app: tenure.App, caplog: pytest.LogCaptureFixture) -> None:
    seen: dict[str, Any] = {}

    def work(ctx: tenure.Context) -> None:
        seen.update(id=ctx.job.id, attempt=ctx.attempt, org=ctx.org, key=ctx.key)
        seen["cancelled"] = ctx.cancelled
        ctx.check()
        ctx.log.info("at work")

    with tenure.acting(org="acme", request_id="r-9"):
        receipt = context_task(app, work).enqueue()
    with caplog.at_level(logging.INFO, logger="tenure.job"):
        app.run_worker(drain=True)

    assert seen == {
        "id": receipt.id, "attempt": 1, "org": "acme", "key": f"work:{receipt.id}",
        "cancelled": False,
    }  # fmt: skip
    (record,) = [record for record in caplog.records if record.getMessage() == "at work"]
    assert record.name == "tenure.job.work"
    extra = vars(record)
    assert (extra["job_id"], extra["org_id"], extra["request_id"]) == (receipt.id, "acme", "r-9")


def test_the_key_is_stable_over_attempts(app: tenure.App) -> None:
    keys: list[str] = []

    def work(ctx: tenure.Context) -> None:
        keys.append(ctx.key)
        if len(keys) < 3:
            raise RuntimeError

    retry = tenure.Retry(backoff=tenure.Fixed(0))
    receipt = context_task(app, work, retry=retry).enqueue()
    with app.worker():
        app.result(receipt.id, timeout=10)

    assert len(keys) == 3
    assert len(set(keys)) == 1


def test_what_a_handler_enqueues_acts_for_whoever_enqueued_it(app: tenure.App) -> None:
    @app.task
    def inner() -> None: ...

    @app.task
    async def outer() -> None:
        await inner.aenqueue()

    with tenure.acting(org="acme", actor=("user", "7"), correlation_id="c"):
        outer.enqueue()
    app.run_worker(drain=True)

    (job,) = app.find(type="inner")
    assert (job.org, job.actor, job.correlation_id, job.status) == (
        "acme", ("user", "7"), "c", "completed",
    )  # fmt: skip


def test_progress_is_seen_while_it_runs_and_the_last_word_is_kept(app: tenure.App) -> None:
    go = threading.Event()

    def work(ctx: tenure.Context) -> None:
        ctx.progress(40, phase="embedding", done=4)
        go.wait(10)
        ctx.progress(100, phase="finished")

    task = context_task(app, work)
    with app.worker():
        receipt = task.enqueue()
        eventually(lambda: job_of(app, receipt).progress, what="progress while it runs")
        assert job_of(app, receipt).progress == {"percent": 40, "phase": "embedding", "done": 4}
        go.set()
        app.result(receipt.id, timeout=10)

    assert job_of(app, receipt).progress == {"percent": 100, "phase": "finished"}


def test_progress_is_written_four_times_a_second_at_most(app: tenure.App, place: Place) -> None:
    app.migrate()
    place.sql("CREATE TABLE seen (percent integer)")
    for statement in NOTE_PROGRESS[place.kind]:
        place.sql(statement)
    took: list[float] = []

    def work(ctx: tenure.Context) -> None:
        began = time.monotonic()
        for n in range(1, 100):
            ctx.progress(n)
            time.sleep(0.01)
        took.append(time.monotonic() - began)

    receipt = context_task(app, work).enqueue()
    app.run_worker(drain=True)

    written = place.sql("SELECT count(*) FROM seen")[0][0]
    assert 2 <= written <= took[0] / 0.25 + 2
    assert job_of(app, receipt).progress == {"percent": 99}


def test_progress_of_a_job_too_quick_to_be_seen_is_kept(app: tenure.App) -> None:
    async def work(ctx: tenure.Context) -> None:
        ctx.progress(99)

    receipt = context_task(app, work).enqueue()
    app.run_worker(drain=True)

    assert job_of(app, receipt).progress == {"percent": 99}


def test_bad_progress_is_the_handler_s_error(app: tenure.App) -> None:
    def work(ctx: tenure.Context) -> None:
        ctx.progress(101)

    receipt = context_task(app, work).enqueue()
    app.run_worker(drain=True)

    assert "0 to 100" in str(job_of(app, receipt).error)


@pytest.mark.timed
def test_an_async_handler_is_cancelled_at_its_time_out(app: tenure.App) -> None:
    cleaned = threading.Event()

    @app.task(timeout=0.3, retry=tenure.Retry(attempts=1))
    async def slow() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            cleaned.set()

    @app.task
    async def neighbour() -> str:
        await asyncio.sleep(1)
        return "fine"

    with app.worker():
        began = time.monotonic()
        receipt, other = slow.enqueue(), neighbour.enqueue()
        with pytest.raises(tenure.JobFailed, match=r"time-out of 0.3 s"):
            app.result(receipt.id, timeout=10)
        took = time.monotonic() - began
        assert app.result(other.id, timeout=10) == "fine"

    assert took <= 0.3 + 2
    assert cleaned.is_set()
    job = job_of(app, receipt)
    assert (job.status, job.error_code) == ("dead_letter", "TIMEOUT")
    assert (job_of(app, other).attempts, job_of(app, other).crashes) == (1, 0)


@pytest.mark.timed
@pytest.mark.parametrize("listens", [True, False], ids=["listening", "deaf"])
def test_a_def_handler_is_asked_then_given_up_at_its_time_out(
    app: tenure.App, listens: bool
) -> None:
    release = threading.Event()

    def slow(ctx: tenure.Context) -> None:
        while not release.wait(0.01):
            if listens:
                ctx.check()

    task = context_task(app, slow, timeout=0.3, retry=tenure.Retry(attempts=1))

    @app.task
    def neighbour() -> str:
        time.sleep(0.5)
        return "fine"

    with app.worker(concurrency=4):
        began = time.monotonic()
        receipt, other = task.enqueue(), neighbour.enqueue()
        with pytest.raises(tenure.JobFailed, match="time-out"):
            app.result(receipt.id, timeout=10)
        took = time.monotonic() - began
        assert app.result(other.id, timeout=10) == "fine"
        release.set()
        assert app.result(neighbour.enqueue().id, timeout=10) == "fine"

    assert took <= 0.3 + 2
    assert job_of(app, receipt).error_code == "TIMEOUT"
    assert (job_of(app, other).attempts, job_of(app, other).crashes) == (1, 0)


@pytest.mark.timed
def test_a_running_async_handler_is_cancelled_at_its_next_await(app: tenure.App) -> None:
    started = threading.Event()

    @app.task
    async def slow() -> None:
        started.set()
        await asyncio.sleep(60)

    with app.worker():
        receipt = slow.enqueue()
        assert started.wait(10)
        began = time.monotonic()
        assert app.cancel(receipt.id, actor=("user", "7"), reason="changed my mind") == "requested"
        with pytest.raises(tenure.JobFailed, match="changed my mind"):
            app.result(receipt.id, timeout=10)
        took = time.monotonic() - began

    assert took <= 1.0  # one renewal; in fact the hint brings it at once
    job = job_of(app, receipt)
    assert (job.status, job.error) == ("cancelled", "changed my mind")
    kinds = [event.kind for event in app.events(receipt.id)]
    assert kinds == ["job.enqueued", "job.started", "job.cancel_requested", "job.cancelled"]


def test_a_running_def_handler_sees_its_cancellation(app: tenure.App) -> None:
    started = threading.Event()
    saw: list[bool] = []

    def slow(ctx: tenure.Context) -> None:
        started.set()
        while True:
            saw[:] = [ctx.cancelled]
            try:
                ctx.check()
            except Exception:  # a careless handler must not swallow it
                saw.append(False)
            time.sleep(0.005)

    task = context_task(app, slow)
    with app.worker():
        receipt = task.enqueue()
        assert started.wait(10)
        began = time.monotonic()
        app.cancel(receipt.id, reason="stop")
        with pytest.raises(tenure.JobFailed, match="cancelled: stop"):
            app.result(receipt.id, timeout=10)

    assert time.monotonic() - began <= 5
    assert saw == [True]


def test_a_cancelled_job_that_ends_first_has_ended(app: tenure.App) -> None:
    started, go = threading.Event(), threading.Event()

    @app.task
    def work() -> str:
        started.set()
        go.wait(10)
        return "too late to cancel"

    with app.worker():
        receipt = work.enqueue()
        assert started.wait(10)
        app.cancel(receipt.id)
        go.set()
        assert app.result(receipt.id, timeout=10) == "too late to cancel"


def test_a_cancelled_job_that_fails_is_cancelled_not_retried(app: tenure.App) -> None:
    started, go = threading.Event(), threading.Event()

    @app.task
    def work() -> None:
        started.set()
        go.wait(10)
        raise RuntimeError("failed anyway")

    with app.worker():
        receipt = work.enqueue()
        assert started.wait(10)
        app.cancel(receipt.id)
        go.set()
        with pytest.raises(tenure.JobFailed, match="cancelled"):
            app.result(receipt.id, timeout=10)


def test_an_embedded_worker_declared_dead_starts_over_and_the_old_run_is_void(
    app: tenure.App,
) -> None:
    """Its job is taken while a thread still runs it; the same worker claims it again."""
    started, go = threading.Semaphore(0), threading.Event()
    checks: list[str] = []

    def work(ctx: tenure.Context) -> int:
        started.release()
        go.wait(20)
        try:
            ctx.check()
        except tenure.LeaseLost:
            checks.append("lost")
            raise
        return ctx.job.lease_no

    task = context_task(app, work)
    with app.worker(concurrency=4):
        receipt = task.enqueue()
        assert started.acquire(timeout=10)
        (row,) = app.store.workers()
        done = app.store.rescue(
            row.registration, row.beat, started=frozenset(), limit=3, reason="for a test"
        )  # as another worker would, had this one stopped for a lease
        assert done is not None
        assert done.requeued == 1
        assert started.acquire(timeout=15)  # the second run, beside the first
        go.set()
        lease_no = app.result(receipt.id, timeout=10)

    assert checks == ["lost"]
    job = job_of(app, receipt)
    assert (job.lease_no, job.crashes) == (lease_no, 0)
    assert [event.kind for event in app.events(receipt.id)].count("job.succeeded") == 1
    assert len(app.workers()) == 2


def test_a_thousand_sleeping_jobs_run_at_once(app: tenure.App) -> None:
    gate = asyncio.Event()
    most = 0
    running = 0

    @app.task
    async def sleeps() -> None:
        nonlocal most, running
        running += 1
        most = max(most, running)
        if running == 1000:
            gate.set()
        await gate.wait()  # all of them wait for the last one: 999 would wait for ever
        running -= 1

    app.enqueue_many([sleeps.job() for _ in range(1000)])

    summary = app.run_worker(drain=True, concurrency=1000)

    assert (summary.completed, most) == (1000, 1000)
