"""`tenure.testing.context`: a task that takes a Context, called like the function it is."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

import tenure
from tenure.testing import assert_enqueued, context, enqueued, refute_enqueued

app = tenure.App("sqlite:///never-made.db", secrets=["KEY"])
INSERT = text("INSERT INTO payments VALUES (:cents)")


@app.task(queue="exports", timeout=9, retry=tenure.Retry(attempts=4))
def export(ctx: tenure.Context, rows: int) -> dict[str, object]:
    ctx.log.info("exporting %d rows", rows)
    for done in (0, 50):
        ctx.check()
        ctx.progress(done, phase="writing")
    pages = ctx.step("pages", lambda: (rows, rows + 1))
    ctx.enqueue(mail.options(delay=60, key="once"), "a@b.c")
    return {"pages": pages, "attempt": ctx.attempt, "org": ctx.org}


@app.task
async def gather(ctx: tenure.Context) -> int:
    async def count() -> int:
        await asyncio.sleep(0)
        return 7

    return int(await ctx.step("count", count)) + sum(ctx.results().values())


@app.task
def mail(to: str, template: str = "welcome") -> None: ...


@app.task
def charge(ctx: tenure.Context, cents: int) -> None:
    with ctx.transaction() as db:
        db.execute("INSERT INTO payments VALUES (?)", (cents,))
        ctx.result({"charged": cents, "with": ctx.secret("KEY")})


def test_what_the_task_said_can_be_looked_at(caplog: pytest.LogCaptureFixture) -> None:
    ctx = context(export, attempt=2, org="acme", actor=("user", "7"), key="k")
    with caplog.at_level(logging.INFO):
        assert export(ctx, rows=3) == {"pages": [3, 4], "attempt": 2, "org": "acme"}

    assert ctx.reports == [
        {"percent": 0, "phase": "writing"},
        {"percent": 50, "phase": "writing"},
    ]
    assert ctx.finished_steps == {"pages": [3, 4]}
    assert caplog.messages == ["exporting 3 rows"]
    job = ctx.job
    assert (job.type, job.queue, job.max_attempts, job.timeout_ms) == ("export", "exports", 4, 9000)
    assert (job.actor_type, job.actor_id, job.key) == ("user", "7", "k")
    assert ctx.key == f"export:{job.id}"


def test_what_it_enqueued_is_asserted_like_an_apps() -> None:
    ctx = context()
    export(ctx, rows=3)

    (job,) = assert_enqueued(ctx, mail, args={"to": "a@b.c"}, key="once", times=1)
    assert (job.parent, job.status) == (ctx.job.id, "queued")
    assert (job.scheduled_at - job.created_at).total_seconds() == 60
    assert enqueued(ctx) == enqueued(ctx, mail) == [job]
    refute_enqueued(ctx, mail, queue="exports")
    refute_enqueued(ctx, export)
    with pytest.raises(
        AssertionError, match=r"found 1\. There are 1 jobs, the last:\n  mail {'to'"
    ):
        refute_enqueued(ctx, mail)
    with pytest.raises(tenure.ConfigError, match="give the task itself"):
        assert_enqueued(ctx, "mail")


def test_arguments_of_a_follow_up_are_checked_as_ever() -> None:
    with pytest.raises(tenure.ArgumentError, match="argument to: expected str"):
        context().enqueue(mail, 7)


def test_steps_of_an_earlier_run_are_not_called_again() -> None:
    ctx = context(steps={"pages": [1]})
    assert export(ctx, rows=3)["pages"] == [1]
    with pytest.raises(tenure.ConfigError, match="two steps"):
        export(ctx, rows=3)


def test_an_async_task_and_the_results_it_waited_for() -> None:
    assert asyncio.run(gather(context(results={"a": 1, "b": 2}))) == 10


def test_a_cancelled_run_and_a_lost_one() -> None:
    with pytest.raises(tenure.JobCancelled, match="no longer needed"):
        export(context(cancelled="no longer needed"), rows=1)

    ctx = context()
    assert not ctx.cancelled
    ctx.cancel()
    assert ctx.cancelled
    with pytest.raises(tenure.JobCancelled, match="by the test"):
        ctx.check()
    lost = context()
    lost.lose()
    with pytest.raises(tenure.LeaseLost):
        export(lost, rows=1)


def test_a_transaction_on_the_tests_own_connection() -> None:
    db = sqlite3.connect(":memory:")
    db.execute("CREATE TABLE payments (cents INTEGER)")
    ctx = context(charge, conn=db, secrets={"KEY": "sk"})

    charge(ctx, 5)

    assert db.execute("SELECT * FROM payments").fetchall() == [(5,)]
    assert ctx.given_result == {"charged": 5, "with": "sk"}
    with pytest.raises(tenure.ConfigError, match="once in a run"):
        charge(ctx, 6)
    db.close()
    with pytest.raises(tenure.ConfigError, match=r"context\(conn=…\)"):
        charge(context(secrets={"KEY": "sk"}), 5)
    with pytest.raises(tenure.ConfigError, match=r"context\(secrets={'KEY': …}\)"):
        context().secret("KEY")


@pytest.mark.parametrize("asynchronous", [False, True], ids=["session", "async session"])
def test_what_a_session_of_the_tasks_own_writes_is_there_afterwards(
    asynchronous: bool, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path}/shop.db"
    engine = create_engine(url)
    with engine.begin() as db:
        db.exec_driver_sql("CREATE TABLE payments (cents INTEGER UNIQUE)")

    def pay(ctx: tenure.Context, cents: int) -> None:
        with Session(engine) as session, ctx.transaction(conn=session):
            session.execute(INSERT, {"cents": cents})
            ctx.enqueue(mail, "a@b.c")

    async def awaited(ctx: tenure.Context, cents: int) -> None:
        apart = create_async_engine(url.replace("sqlite:", "sqlite+aiosqlite:"))
        try:
            async with AsyncSession(apart) as session, ctx.transaction(conn=session):
                await session.execute(INSERT, {"cents": cents})
                ctx.enqueue(mail, "a@b.c")
        finally:
            await apart.dispose()

    def call(ctx: tenure.Context, cents: int) -> None:
        asyncio.run(awaited(ctx, cents)) if asynchronous else pay(ctx, cents)

    ctx = context()
    call(ctx, 5)

    assert_enqueued(ctx, mail, times=1)
    with pytest.raises(tenure.ConfigError, match="once in a run"):
        call(ctx, 6)
    failed = context()
    with pytest.raises(IntegrityError):
        call(failed, 5)
    assert failed.enqueued == []
    with engine.connect() as db:
        assert db.exec_driver_sql("SELECT cents FROM payments").scalars().all() == [5]
    engine.dispose()


def test_follow_ups_of_a_block_that_raises_are_none() -> None:
    ctx = context()

    with pytest.raises(ZeroDivisionError), ctx.transaction(conn=object()):
        ctx.enqueue(mail, "a@b.c")
        raise ZeroDivisionError

    assert ctx.enqueued == []


def test_what_cannot_be_stored_is_refused_here_too() -> None:
    with pytest.raises(tenure.PayloadError, match="step 'x'"):
        context().step("x", object)
    with pytest.raises(tenure.PayloadError, match="progress"):
        context().progress(phase="x" * 9000)


def test_a_call_without_its_context_says_what_to_do() -> None:
    with pytest.raises(tenure.ArgumentError, match=r"export\(tenure\.testing\.context\(\), …\)"):
        export(rows=3)
