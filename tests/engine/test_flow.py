"""What a handler can do beyond returning: steps, follow-ups, one transaction; and what
is done to it: hooks, cancellation, a process of its own.
"""

from __future__ import annotations

import asyncio
import datetime
import functools
import os
import sqlite3
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import tenure
from crash.harness import Workshop, eventually, gone
from places import Place, only

NOW = tenure.Retry(attempts=5, backoff=tenure.Fixed(0))
ONCE = tenure.Retry(attempts=1)


def job_of(app: tenure.App, receipt: tenure.Receipt) -> tenure.Job:
    job = app.get(receipt.id)
    assert job is not None
    return job


def run(app: tenure.App, task: tenure.Task[..., Any], *args: Any) -> tenure.Job:
    """Enqueue one and work until nothing is left to do now."""
    receipt = task.enqueue(*args)
    app.run_worker(drain=True)
    return job_of(app, receipt)


# -- steps ------------------------------------------------------------------------------------


def test_a_finished_step_is_not_called_again(app: tenure.App) -> None:
    calls: list[str] = []

    def call(name: str) -> dict[str, Any]:
        calls.append(name)
        return {"name": name, "list": [1, None]}

    @app.task(retry=NOW)
    def work(ctx: tenure.Context) -> list[Any]:
        first = ctx.step("first", call, "a")
        second = ctx.step("second", call, name="b")  # its name is no business of the step's
        if ctx.attempt < 3:
            raise RuntimeError
        return [first, second, ctx.step("third", call, "c")]

    job = run(app, work)

    assert calls == ["a", "b", "c"]
    assert job.result == [{"name": name, "list": [1, None]} for name in "abc"]
    assert job.attempts == 3


def test_a_finished_async_step_is_not_called_again(app: tenure.App) -> None:
    calls: list[str] = []

    async def call(name: str) -> str:
        await asyncio.sleep(0)
        calls.append(name)
        return name * 2

    @app.task(retry=NOW)
    async def work(ctx: tenure.Context) -> list[str]:
        results = [await ctx.step(name, call, name) for name in "ab"]
        results.append(await ctx.step("partial", functools.partial(call, "c")))
        results.append(ctx.step("plain", lambda: "def steps work too"))
        if ctx.attempt < 2:
            raise RuntimeError
        return results

    job = run(app, work)

    assert calls == ["a", "b", "c"]
    assert job.result == ["aa", "bb", "cc", "def steps work too"]


@pytest.mark.parametrize("value", [None, 0, "", [], {"a": {"b": [1.5, True]}}, "ü\u2028"])
def test_a_step_returns_the_same_the_second_time(app: tenure.App, value: Any) -> None:
    seen: list[Any] = []

    @app.task(retry=NOW)
    def work(ctx: tenure.Context) -> None:
        seen.append(ctx.step("only", lambda: value))
        if ctx.attempt < 2:
            raise RuntimeError

    run(app, work)

    assert seen == [value, value]


def test_what_json_has_no_word_for_is_converted_at_once(app: tenure.App) -> None:
    """The first run sees what every later run will see."""
    moment = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)
    seen: list[Any] = []

    @app.task(retry=NOW)
    def work(ctx: tenure.Context) -> None:
        seen.append(ctx.step("only", lambda: (moment, {7: "seven"})))
        if ctx.attempt < 2:
            raise RuntimeError

    run(app, work)

    assert seen[0] == seen[1] == ["2026-01-02T00:00:00Z", {"7": "seven"}]


def test_a_step_s_result_that_cannot_be_stored_fails_the_job(app: tenure.App) -> None:
    """At once: the step has done its work, and a retry would do it again."""

    @app.task(retry=NOW)
    def work(ctx: tenure.Context) -> None:
        ctx.step("only", object)

    job = run(app, work)

    assert (job.status, job.error_code, job.attempts) == ("failed", "RESULT_ERROR", 1)
    assert "the result of step 'only'" in str(job.error)


def test_the_same_name_twice_is_an_error(app: tenure.App) -> None:
    @app.task(retry=ONCE)
    def work(ctx: tenure.Context) -> None:
        ctx.step("upload", lambda: 1)
        ctx.step("upload", lambda: 2)

    @app.task(retry=ONCE)
    async def awork(ctx: tenure.Context) -> None:
        async def call() -> int:
            return 1

        await ctx.step("upload", call)
        await ctx.step("upload", call)

    for task in (work, awork):
        job = run(app, task)
        assert (job.status, job.error_code) == ("dead_letter", "ConfigError")
        assert "two steps of this run are named 'upload'" in str(job.error)


def test_a_step_that_raises_is_called_again_in_the_next_run(app: tenure.App) -> None:
    calls: list[int] = []

    def flaky() -> str:
        calls.append(1)
        if len(calls) < 3:
            raise OSError
        return "at last"

    @app.task(retry=NOW)
    def work(ctx: tenure.Context) -> str:
        return str(ctx.step("flaky", flaky))

    assert run(app, work).result == "at last"
    assert len(calls) == 3


def test_steps_outlive_a_snooze_and_a_replay_and_an_edited_replay_clears_them(
    app: tenure.App,
) -> None:
    calls: list[int] = []

    @app.task(retry=ONCE)
    def work(ctx: tenure.Context, n: int) -> Any:
        ctx.step("only", lambda: calls.append(n))
        if len(runs := [*runs_of(ctx)]) == 1:
            return tenure.Snooze(0)
        if len(runs) == 2:
            raise tenure.PermanentError("dies")
        return "done"

    def runs_of(ctx: tenure.Context) -> list[Any]:
        return [event for event in app.events(ctx.job.id) if event.kind == "job.started"]

    job = run(app, work, 1)
    assert (job.status, calls) == ("failed", [1])
    app.replay(job.id)
    app.run_worker(drain=True)
    assert app.result(job.id) == "done"
    assert calls == [1]


def test_an_edited_replay_runs_every_step_again(app: tenure.App) -> None:
    calls: list[int] = []

    @app.task(retry=ONCE)
    def work(ctx: tenure.Context, n: int) -> None:
        ctx.step("only", lambda: calls.append(n))
        if n == 1:
            raise tenure.PermanentError("bad arguments")

    job = run(app, work, 1)
    app.replay(job.id)
    app.run_worker(drain=True)
    assert calls == [1]
    app.replay(job.id, {"n": 2})
    app.run_worker(drain=True)

    assert calls == [1, 2]
    assert app.result(job.id) is None


def test_a_cancelled_handler_starts_no_further_step(app: tenure.App) -> None:
    started = threading.Event()
    calls: list[str] = []

    @app.task
    def work(ctx: tenure.Context) -> None:
        ctx.step("first", lambda: calls.append("first"))
        started.set()
        while not ctx.cancelled:
            time.sleep(0.005)
        ctx.step("second", lambda: calls.append("second"))

    with app.worker():
        receipt = work.enqueue()
        assert started.wait(10)
        app.cancel(receipt.id, reason="enough")
        with pytest.raises(tenure.JobFailed, match="cancelled: enough"):
            app.result(receipt.id, timeout=10)

    assert calls == ["first"]


def test_a_step_of_a_run_that_lost_its_lease_stops_it(app: tenure.App) -> None:
    """The store refuses the step: the handler goes no further."""
    started, go, ended = threading.Event(), threading.Event(), threading.Event()
    went_on: list[int] = []

    @app.task
    def work(ctx: tenure.Context) -> None:
        if ctx.job.lease_no > 1:
            return
        started.set()
        go.wait(10)
        try:
            ctx.step("late", lambda: 1)
            went_on.append(1)
        except tenure.LeaseLost:
            ended.set()
            raise

    with app.worker():
        receipt = work.enqueue()
        assert started.wait(10)
        (info,) = [row for row in app.store.workers() if row.dead_at is None]
        rescued = app.store.rescue(
            info.registration, info.beat, started=frozenset(), limit=3, reason="test"
        )
        beat = info.beat
        while rescued is None:  # it renewed at that moment
            beat += 1
            rescued = app.store.rescue(
                info.registration, beat, started=frozenset(), limit=3, reason="test"
            )
        go.set()
        assert ended.wait(10)
        app.result(receipt.id, timeout=15)

    assert went_on == []
    assert app.store.steps(receipt.id) == {}


# -- follow-ups -------------------------------------------------------------------------------


def test_a_follow_up_comes_with_the_completion(app: tenure.App) -> None:
    @app.task(queue="exports")
    def export(day: str, rows: int = 0) -> str:
        return f"{day}: {rows}"

    receipts: list[tenure.Receipt] = []

    @app.task
    def work(ctx: tenure.Context) -> None:
        receipts.append(ctx.enqueue(export, "monday", rows=3))
        receipts.append(
            ctx.enqueue(export.options(priority=1, delay=60, key="tue", queue="maintenance"), "tue")
        )
        assert app.get(receipts[0].id) is None  # not yet

    with tenure.acting(org="acme", actor=("user", "7"), correlation_id="c-1"):
        parent = work.enqueue()
    app.run_worker(drain=True)

    first, second = (job_of(app, receipt) for receipt in receipts)
    assert (first.status, first.result, first.queue) == ("completed", "monday: 3", "exports")
    assert (second.priority, second.key, second.queue) == (1, "tue", "maintenance")
    assert second.status == "queued"
    for job in (first, second):
        assert (job.parent, job.org, job.actor) == (parent.id, "acme", ("user", "7"))
        assert job.correlation_id == "c-1"
    assert (receipts[0].duplicate, receipts[0].status) == (False, "queued")


def test_follow_ups_with_different_options_keep_them_apart(app: tenure.App) -> None:
    """Each `.options()` is a passing object: what one says must not stick to the next."""

    @app.task(queue="exports", priority=2)
    def one(n: int) -> None: ...

    @app.task(queue="planning", priority=9)
    def other(n: int) -> None: ...

    @app.task
    def work(ctx: tenure.Context) -> None:
        for n in range(50):
            ctx.enqueue(one.options(timeout=10 + n), n)
            ctx.enqueue(other.options(timeout=100 + n), n)

    work.enqueue()
    app.run_worker(drain=True, queues="default")

    ones, others = [*app.find(type="one")], [*app.find(type="other")]
    assert sorted((job.payload["n"], job.timeout) for job in ones) == [
        (n, 10.0 + n) for n in range(50)
    ]
    assert sorted((job.payload["n"], job.timeout) for job in others) == [
        (n, 100.0 + n) for n in range(50)
    ]
    assert {(job.queue, job.priority) for job in ones} == {("exports", 2)}
    assert {(job.queue, job.priority) for job in others} == {("planning", 9)}


@pytest.mark.parametrize("how", ["raise", "snooze", "fail", "cancel"])
def test_without_a_completion_no_follow_up(app: tenure.App, how: str) -> None:
    @app.task
    def export() -> None: ...

    @app.task(retry=ONCE)
    def work(ctx: tenure.Context) -> Any:
        ctx.enqueue(export)
        if how == "raise":
            raise RuntimeError
        return {"snooze": tenure.Snooze(60), "fail": tenure.Fail("x")}.get(how, tenure.Cancel("x"))

    run(app, work)

    assert [*app.find(type="export")] == []


def test_a_retried_run_enqueues_its_follow_ups_once(app: tenure.App) -> None:
    @app.task
    def export(attempt: int) -> int:
        return attempt

    @app.task(retry=NOW)
    def work(ctx: tenure.Context) -> None:
        ctx.enqueue(export, ctx.attempt)
        if ctx.attempt < 3:
            raise RuntimeError

    run(app, work)

    assert [job.result for job in app.find(type="export")] == [3]


def test_a_bad_follow_up_is_the_handler_s_error(app: tenure.App) -> None:
    @app.task
    def export(day: str) -> None: ...

    @app.task(retry=ONCE)
    def work(ctx: tenure.Context) -> None:
        ctx.enqueue(export, 7)

    job = run(app, work)

    assert (job.status, job.error_code) == ("failed", "VALIDATION_ERROR")


def test_a_fan_in_reads_the_results_of_its_parts(app: tenure.App) -> None:
    @app.task
    def part(n: int) -> int:
        return n * n

    @app.task
    async def join(ctx: tenure.Context) -> Any:
        return sum(ctx.results().values())

    @app.task
    def work(ctx: tenure.Context) -> str:
        parts = [ctx.enqueue(part, n) for n in range(10)]
        return ctx.enqueue(join.options(after=parts)).id

    job = run(app, work)

    joined = app.get(job.result)
    assert joined is not None
    assert (joined.status, joined.result) == ("completed", sum(n * n for n in range(10)))
    assert len(joined.after) == 10
    assert [event.kind for event in app.events(joined.id)].count("job.started") == 1


def test_results_are_by_id(app: tenure.App) -> None:
    @app.task
    def part(n: int) -> dict[str, int]:
        return {"n": n}

    @app.task
    def join(ctx: tenure.Context) -> Any:
        return ctx.results()

    a, b = part.enqueue(1), part.enqueue(2)
    joined = join.options(after=[a, b.id]).enqueue()
    app.run_worker(drain=True)

    assert app.result(joined.id) == {a.id: {"n": 1}, b.id: {"n": 2}}


def test_a_chain_through_options_stops_or_waits_at_a_failure(app: tenure.App) -> None:
    @app.task(retry=ONCE)
    def broken() -> None:
        raise RuntimeError

    @app.task
    def then() -> str:
        return "ran"

    need = broken.enqueue()
    patient = then.options(after=[need]).enqueue()
    hasty = then.options(after=[need], after_failed="cancel").enqueue()
    behind = then.options(after=[hasty], after_failed="cancel").enqueue()
    summary = app.run_worker(drain=True)

    assert [job_of(app, r).status for r in (need, patient, hasty, behind)] == [
        "dead_letter", "queued", "cancelled", "cancelled",
    ]  # fmt: skip
    assert summary.left == {"waiting for other jobs": 1}
    with app.worker():  # enqueued after the death: the timer of dependants sees to it
        late = then.options(after=[need], after_failed="cancel").enqueue()
        with pytest.raises(tenure.JobFailed):
            app.result(late.id, timeout=10)


def test_needs_are_checked_at_the_door(app: tenure.App, count: Callable[[], int]) -> None:
    @app.task
    def work() -> None: ...

    with tenure.acting(org="theirs"):
        theirs = work.enqueue()
    before = count()
    for after in (["01ARZ3NDEKTSV4RRFFQ69G5FAV"], [theirs]):
        with pytest.raises(tenure.JobError, match="no such"):
            work.options(after=after).enqueue()
    with pytest.raises(tenure.TenureError):
        work.options(after=["not an id"])
    with pytest.raises(tenure.ConfigError, match="after_failed"):
        work.options(after=[theirs], after_failed="explode")
    assert count() == before


# -- one transaction --------------------------------------------------------------------------


@pytest.fixture
def ledger(app: tenure.App, place: Place) -> Callable[[], list[str]]:
    """A table of the user's own in the same database; what is in it."""
    app.migrate()
    place.sql("CREATE TABLE ledger (entry TEXT)")
    return lambda: [entry for (entry,) in place.sql("SELECT entry FROM ledger")]


def enter(connection: Any, entry: str) -> None:
    """Write into the ledger, with the placeholder of whichever driver a handler got."""
    mark = "?" if isinstance(connection, sqlite3.Connection) else "%s"
    connection.execute(f"INSERT INTO ledger VALUES ({mark})", (entry,))


def test_a_transaction_ends_the_job_with_everything(
    app: tenure.App, ledger: Callable[[], list[str]]
) -> None:
    @app.task
    def mail(to: str) -> None: ...

    @app.task
    def pay(ctx: tenure.Context, amount: int) -> str:
        ctx.enqueue(mail, "a")
        with ctx.transaction() as conn:
            enter(conn, f"paid {amount}")
            ctx.enqueue(mail, "b")
            ctx.result({"paid": amount})
        return "ignored"

    job = run(app, pay, 5)

    assert (job.status, job.result, job.attempts) == ("completed", {"paid": 5}, 1)
    assert ledger() == ["paid 5"]
    assert sorted(job.payload["to"] for job in app.find(type="mail")) == ["a", "b"]
    kinds = [event.kind for event in app.events(job.id)]
    assert kinds == ["job.enqueued", "job.started", "job.succeeded"]


def test_without_a_result_the_result_is_none(
    app: tenure.App, ledger: Callable[[], list[str]]
) -> None:
    @app.task
    def pay(ctx: tenure.Context) -> int:
        with ctx.transaction():
            pass
        return 7

    job = run(app, pay)
    assert (job.status, job.result) == ("completed", None)


def test_an_exception_inside_the_block_undoes_everything_and_is_retried(
    app: tenure.App, ledger: Callable[[], list[str]]
) -> None:
    @app.task
    def mail() -> None: ...

    @app.task(retry=NOW)
    def pay(ctx: tenure.Context) -> None:
        with ctx.transaction() as conn:
            enter(conn, f"attempt {ctx.attempt}")
            ctx.enqueue(mail)
            if ctx.attempt < 3:
                raise RuntimeError("not yet")

    job = run(app, pay)

    assert (job.status, job.attempts) == ("completed", 3)
    assert ledger() == ["attempt 3"]
    assert len([*app.find(type="mail")]) == 1


def test_an_exception_after_the_block_is_only_logged(
    app: tenure.App, ledger: Callable[[], list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    @app.task
    def pay(ctx: tenure.Context, card: str) -> None:
        with ctx.transaction() as conn:
            conn.execute("INSERT INTO ledger VALUES ('paid')")
        raise RuntimeError(f"could not thank the owner of {card}")

    job = run(app, pay, "4111-1111-1111")

    assert (job.status, job.error, job.attempts) == ("completed", None, 1)
    assert ledger() == ["paid"]
    (record,) = [r for r in caplog.records if job.id in r.getMessage()]
    assert "RuntimeError: could not thank the owner" in record.getMessage()
    assert "4111" not in caplog.text


def test_a_second_block_is_refused(
    app: tenure.App, ledger: Callable[[], list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    @app.task
    def pay(ctx: tenure.Context) -> None:
        with ctx.transaction() as conn:
            conn.execute("INSERT INTO ledger VALUES ('first')")
        with ctx.transaction() as conn:
            conn.execute("INSERT INTO ledger VALUES ('second')")

    job = run(app, pay)

    assert job.status == "completed"
    assert ledger() == ["first"]
    assert "use it once in a run" in caplog.text


@only("sqlite", "PostgreSQL has a connection for async handlers: test_postgres_transactions.py")
def test_an_async_handler_is_told_to_be_a_def(
    app: tenure.App, ledger: Callable[[], list[str]]
) -> None:
    @app.task(retry=ONCE)
    async def asynchronous(ctx: tenure.Context) -> None:
        async with ctx.transaction() as conn:  # type: ignore[attr-defined]
            conn.execute("INSERT INTO ledger VALUES ('x')")

    @app.task(retry=ONCE)
    async def plain(ctx: tenure.Context) -> None:
        with ctx.transaction() as conn:
            conn.execute("INSERT INTO ledger VALUES ('x')")

    for task in (asynchronous, plain):
        job = run(app, task)
        assert (job.status, job.error_code) == ("dead_letter", "ConfigError")
        assert "Make the handler a `def`" in str(job.error)
    assert ledger() == []


def test_a_commit_of_its_own_is_an_error_and_undoes_everything(
    app: tenure.App, ledger: Callable[[], list[str]]
) -> None:
    @app.task(retry=ONCE)
    def pay(ctx: tenure.Context) -> None:
        with ctx.transaction() as conn:
            conn.execute("INSERT INTO ledger VALUES ('x')")
            conn.commit()

    job = run(app, pay)

    assert (job.status, job.error_code) == ("dead_letter", "StoreError")
    assert "leave that to the end of the block" in str(job.error)
    assert ledger() == []


def test_a_transaction_without_its_lease_is_refused(
    app: tenure.App, ledger: Callable[[], list[str]]
) -> None:
    """Taken away just before the block: the other run's entry is the only one."""
    started, go, ended = threading.Event(), threading.Event(), threading.Event()
    raised: list[BaseException] = []

    @app.task
    def pay(ctx: tenure.Context) -> None:
        if ctx.job.lease_no == 1:
            started.set()
            go.wait(10)
        try:
            with ctx.transaction() as conn:
                enter(conn, f"lease {ctx.job.lease_no}")
        except BaseException as error:
            raised.append(error)
            raise
        finally:
            if ctx.job.lease_no == 1:
                ended.set()

    with app.worker():
        receipt = pay.enqueue()
        assert started.wait(10)
        rescued = None
        while rescued is None:
            (info,) = [row for row in app.store.workers() if row.dead_at is None]
            rescued = app.store.rescue(
                info.registration, info.beat, started=frozenset(), limit=3, reason="test"
            )
        go.set()
        assert ended.wait(10)
        app.result(receipt.id, timeout=15)

    assert [type(error) for error in raised] == [tenure.LeaseLost]
    assert len(ledger()) == 1
    assert ledger() != ["lease 1"]
    assert job_of(app, receipt).status == "completed"


def test_bad_follow_ups_in_a_transaction_undo_everything(
    app: tenure.App, ledger: Callable[[], list[str]]
) -> None:
    @app.task
    def mail() -> None: ...

    @app.task(retry=ONCE)
    def pay(ctx: tenure.Context) -> None:
        with ctx.transaction() as conn:
            conn.execute("INSERT INTO ledger VALUES ('x')")
            ctx.enqueue(mail.options(after=["01ARZ3NDEKTSV4RRFFQ69G5FAV"]))

    job = run(app, pay)

    assert job.status == "dead_letter"
    assert "no such job" in str(job.error)
    assert ledger() == []


def test_a_transaction_past_a_third_of_the_lease_is_rolled_back(
    app: tenure.App,
    place: Place,
    ledger: Callable[[], list[str]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    @app.task(retry=ONCE)
    def pay(ctx: tenure.Context) -> None:
        with ctx.transaction() as conn:
            conn.execute("INSERT INTO ledger VALUES ('x')")
            time.sleep(app.settings.lease_seconds / 3 + 0.5)

    job = run(app, pay)

    assert (job.status, job.error_code) == ("dead_letter", "StoreBusy")
    assert "do slow work before the block" in str(job.error)
    if place.kind == "sqlite":  # nobody else waits for its rows on PostgreSQL
        assert "holding the only write lock" in caplog.text
    assert ledger() == []


def test_many_transactions_at_once_wait_for_each_other(
    app: tenure.App, ledger: Callable[[], list[str]]
) -> None:
    @app.task
    def pay(ctx: tenure.Context, n: int) -> None:
        with ctx.transaction() as conn:
            enter(conn, str(n))

    app.enqueue_many([pay.job(n) for n in range(100)])
    app.run_worker(drain=True, concurrency=16)

    assert sorted(ledger(), key=int) == [str(n) for n in range(100)]
    assert app.stats()["jobs"]["completed"] == 100


# -- hooks ------------------------------------------------------------------------------------


def record_hooks(app: tenure.App, kind: str) -> list[tenure.Lifecycle]:
    """Every hook there is, each telling the same list; `def` or `async def`."""
    told: list[tenure.Lifecycle] = []

    async def listen(event: tenure.Lifecycle) -> None:
        await asyncio.sleep(0)
        told.append(event)

    for name in ("start", "complete", "failed", "progress", "final_failure"):
        app.on(name)(told.append if kind == "def" else listen)
    return told


@pytest.mark.parametrize("hook", ["def", "async"])
@pytest.mark.parametrize("handler", ["def", "async"])
def test_hooks_are_told_what_happens(app: tenure.App, hook: str, handler: str) -> None:
    told = record_hooks(app, hook)

    def body(ctx: tenure.Context, n: int) -> int:
        ctx.progress(50, phase="half")
        if ctx.attempt < 2:
            raise RuntimeError("not yet")
        return n * 2

    async def abody(ctx: tenure.Context, n: int) -> int:
        return body(ctx, n)

    work = app.task(name="work", retry=NOW)(body if handler == "def" else abody)
    receipt = work.enqueue(21)
    with app.worker():
        app.result(receipt.id, timeout=10)
        eventually(lambda: len(told) >= 6, what="all hooks told")

    assert [event.kind for event in told] == [
        "start", "progress", "failed", "start", "progress", "complete",
    ]  # fmt: skip
    assert {event.job.id for event in told} == {receipt.id}
    assert told[2].error == "RuntimeError: not yet"
    assert told[4].progress == {"percent": 50, "phase": "half"}
    assert told[5].result == 42


@pytest.mark.parametrize("how", ["attempts used up", "permanent", "returned"])
def test_a_final_failure_is_told_after_its_failure(app: tenure.App, how: str) -> None:
    told = record_hooks(app, "def")

    @app.task(retry=ONCE)
    def work() -> Any:
        if how == "returned":
            return tenure.Fail("no such user")
        if how == "permanent":
            raise tenure.PermanentError("no such user")
        raise RuntimeError("no such user")

    run(app, work)

    assert [event.kind for event in told] == ["start", "failed", "final_failure"]
    assert "no such user" in str(told[2].error)


def test_a_completion_by_transaction_is_told_with_its_result(
    app: tenure.App, ledger: Callable[[], list[str]]
) -> None:
    told = record_hooks(app, "def")

    @app.task
    def pay(ctx: tenure.Context) -> None:
        with ctx.transaction():
            ctx.result({"paid": 5})

    run(app, pay)

    assert [(event.kind, event.result) for event in told] == [
        ("start", None), ("complete", {"paid": 5}),
    ]  # fmt: skip


@pytest.mark.parametrize("hook", ["def", "async"])
@pytest.mark.parametrize("handler", ["def", "async"])
def test_a_hook_that_raises_changes_nothing_and_says_no_value(
    app: tenure.App, hook: str, handler: str, caplog: pytest.LogCaptureFixture
) -> None:
    for kind in ("start", "complete", "failed", "progress", "final_failure"):

        def bad(event: tenure.Lifecycle) -> None:
            raise RuntimeError(f"cannot handle {event.job.payload}")

        async def abad(event: tenure.Lifecycle) -> None:
            raise RuntimeError(f"cannot handle {event.job.payload}")

        app.on(kind)(bad if hook == "def" else abad)

    def body(ctx: tenure.Context, who: str) -> str:
        ctx.progress(50)
        if ctx.attempt < 2:
            raise RuntimeError("not yet")
        return "done"

    async def abody(ctx: tenure.Context, who: str) -> str:
        return body(ctx, who)

    work = app.task(name="work", retry=NOW)(body if handler == "def" else abody)
    job = run(app, work, "gertrude@example.com")

    assert (job.status, job.result, job.attempts) == ("completed", "done", 2)
    complaints = [r for r in caplog.records if "hook" in r.getMessage()]
    assert len(complaints) == 6
    assert "RuntimeError" in complaints[0].getMessage()
    assert "gertrude" not in caplog.text


@pytest.mark.parametrize(
    "error", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()], ids=repr
)
@pytest.mark.parametrize("hook", ["def", "async"])
@pytest.mark.parametrize("handler", ["def", "async"])
def test_a_hook_that_wants_to_end_the_program_changes_nothing(
    app: tenure.App, hook: str, handler: str, error: BaseException
) -> None:
    """The job has run: it must not run again for what a hook raises, nor hold its place."""

    def bad(event: tenure.Lifecycle) -> None:
        raise error

    async def abad(event: tenure.Lifecycle) -> None:
        raise error

    for kind in ("start", "complete", "failed"):
        app.on(kind)(bad if hook == "def" else abad)

    def body(ctx: tenure.Context) -> str:
        if ctx.attempt < 2:
            raise RuntimeError("not yet")
        return "done"

    async def abody(ctx: tenure.Context) -> str:
        return body(ctx)

    work = app.task(name="work", retry=NOW, timeout=5)(body if handler == "def" else abody)
    job = run(app, work)

    assert (job.status, job.result, job.attempts, job.crashes) == ("completed", "done", 2, 0)


def test_an_unknown_hook_is_refused(app: tenure.App) -> None:
    with pytest.raises(tenure.ConfigError, match="hooks are start, complete"):
        app.on("finished")


def test_hooks_run_in_worker_processes(workshop: Callable[..., Workshop]) -> None:
    shop = workshop(
        """
        for kind in ("start", "complete", "failed", "final_failure", "progress"):
            app.on(kind)(lambda event: say(event.kind, event.job.id))

        @app.task(retry=tenure.Retry(attempts=1))
        def work(ctx: tenure.Context, fail: bool) -> None:
            ctx.progress(1)
            if fail:
                raise ValueError
        """
    )
    good, bad = shop.jobs.work.enqueue(False), shop.jobs.work.enqueue(True)
    shop.worker(drain=True, ready=False).wait()

    def told(receipt: tenure.Receipt) -> list[str]:
        return [line[0] for line in shop.said() if line[1] == receipt.id]

    assert told(good) == ["start", "progress", "complete"]
    assert told(bad) == ["start", "progress", "failed", "final_failure"]


# -- cancellation -----------------------------------------------------------------------------


def test_a_queued_job_is_cancelled_at_once_and_on_record(app: tenure.App) -> None:
    @app.task
    def work() -> None: ...

    receipt = work.options(delay=3600).enqueue()

    assert app.cancel(receipt.id, actor=("user", "7"), reason="not needed") == "cancelled"

    assert job_of(app, receipt).status == "cancelled"
    *_, event = app.events(receipt.id)
    assert (event.kind, event.actor, event.data) == (
        "job.cancelled", ("user", "7"), {"reason": "not needed"},
    )  # fmt: skip


def test_a_request_to_cancel_is_on_record_with_actor_and_reason(app: tenure.App) -> None:
    started = threading.Event()

    @app.task
    async def slow() -> None:
        started.set()
        await asyncio.sleep(60)

    with app.worker():
        receipt = slow.enqueue()
        assert started.wait(10)
        app.cancel(receipt.id, actor=("api_key", "k1"), reason="first")
        with pytest.raises(tenure.JobFailed, match="first"):
            app.result(receipt.id, timeout=10)

    (asked,) = [e for e in app.events(receipt.id) if e.kind == "job.cancel_requested"]
    assert (asked.actor, asked.data) == (("api_key", "k1"), {"reason": "first"})


def test_a_waiting_job_is_cancelled_at_once(app: tenure.App) -> None:
    @app.task
    def work() -> None: ...

    need = work.options(delay=3600).enqueue()
    last = work.options(after=[need]).enqueue()
    assert app.cancel(last.id) == "cancelled"
    assert job_of(app, need).status == "queued"


@pytest.mark.timed
@pytest.mark.parametrize("handler", ["thread", "coroutine"])
def test_a_handler_that_ignores_its_cancellation_is_given_up(
    workshop: Callable[..., Workshop], handler: str
) -> None:
    """After the grace its job is cancelled, its child replaced, and the neighbours go on."""
    shop = workshop(
        """
        @app.task(timeout=120)
        def thread() -> None:
            say("deaf", os.getpid())
            time.sleep(90)

        @app.task(timeout=120)
        async def coroutine() -> None:
            say("deaf", os.getpid())
            while True:
                try:
                    await asyncio.sleep(90)
                except asyncio.CancelledError:
                    say("ignored")

        @app.task
        async def neighbour() -> int:
            say("neighbour", os.getpid())
            while not there("go"):
                await asyncio.sleep(0.01)
            return os.getpid()

        @app.task
        async def where() -> int:
            return os.getpid()
        """,
        cancel_grace_seconds=0.5,
    )
    worker = shop.worker(concurrency=10)
    neighbour = shop.jobs.neighbour.enqueue()
    shop.wait_said("neighbour")
    deaf = getattr(shop.jobs, handler).enqueue()
    shop.wait_said("deaf")
    old = int(next(line for line in shop.said() if line[0] == "deaf")[1])
    began = time.monotonic()

    assert shop.app.cancel(deaf.id, actor=("user", "7"), reason="enough") == "requested"
    with pytest.raises(tenure.JobFailed, match="enough"):
        shop.app.result(deaf.id, timeout=20)
    took = time.monotonic() - began

    assert shop.job(deaf.id).status == "cancelled"
    assert took <= 0.5 + 1 + 2.5, "the grace, a renewal, and patience with a busy machine"
    eventually(
        lambda: shop.app.result(shop.jobs.where.enqueue().id, timeout=15) != old,
        what="a new process",
        within=20,
    )
    shop.touch("go")
    assert shop.app.result(neighbour.id, timeout=15) == old  # it went on where it was
    assert (shop.job(neighbour.id).attempts, shop.job(neighbour.id).crashes) == (1, 0)
    assert worker.alive
    eventually(lambda: gone(old), within=15, what="the old process gone")
    kinds = [event.kind for event in shop.app.events(deaf.id)]
    assert kinds == ["job.enqueued", "job.started", "job.cancel_requested", "job.cancelled"]


def test_a_handler_that_blocks_its_loop_is_killed_after_its_cancellation(
    workshop: Callable[..., Workshop],
) -> None:
    """Not even the executor can answer: the supervisor ends the process, neighbours run again."""
    shop = workshop(
        """
        @app.task(timeout=120)
        async def blocks() -> None:
            say("blocks")
            time.sleep(90)

        @app.task
        async def neighbour() -> None:
            say("neighbour")
            while not there("go"):
                await asyncio.sleep(0.01)
        """,
        cancel_grace_seconds=0.3,
    )
    shop.worker(concurrency=10)
    neighbour = shop.jobs.neighbour.enqueue()
    shop.wait_said("neighbour")
    blocks = shop.jobs.blocks.enqueue()
    shop.wait_said("blocks")
    shop.app.cancel(blocks.id, reason="enough")

    with pytest.raises(tenure.JobFailed):
        shop.app.result(blocks.id, timeout=20)
    shop.touch("go")
    shop.app.result(neighbour.id, timeout=20)

    assert shop.job(blocks.id).status == "cancelled"
    assert (shop.job(neighbour.id).attempts, shop.job(neighbour.id).crashes) == (1, 0)


# -- a process of its own ---------------------------------------------------------------------


def test_a_process_job_runs_apart_from_the_others(workshop: Callable[..., Workshop]) -> None:
    shop = workshop(
        """
        @app.task(process=True)
        def heavy(n: int) -> list[int]:
            return [n, os.getpid()]

        @app.task(process=True)
        async def aheavy(n: int) -> list[int]:
            return [n, os.getpid()]

        @app.task
        def light() -> int:
            return os.getpid()
        """
    )
    light = shop.jobs.light.enqueue()
    heavy = shop.app.enqueue_many(
        [shop.jobs.heavy.job(1), shop.jobs.heavy.job(2), shop.jobs.aheavy.job(3)]
    )
    worker = shop.worker(concurrency=4)
    shop.wait_for("completed", 4)

    results = [shop.app.result(receipt.id) for receipt in heavy]
    assert [n for n, _pid in results] == [1, 2, 3]
    pids = {pid for _n, pid in results} | {shop.app.result(light.id)}
    assert len(pids) == 4, "one process each"
    assert worker.pid not in pids
    eventually(
        lambda: all(gone(pid) for _n, pid in results), within=15, what="their processes gone"
    )


def test_an_embedded_worker_runs_process_jobs_in_a_thread(app: tenure.App) -> None:
    @app.task(process=True)
    def heavy() -> int:
        return os.getpid()

    assert run(app, heavy).result == os.getpid()
