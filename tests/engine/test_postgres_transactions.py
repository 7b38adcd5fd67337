"""`ctx.transaction()` on PostgreSQL: a handler's own SQL, its follow-ups and its job's end in one
transaction, in `def` handlers (`with`) and in `async def` handlers (`async with`)."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

import tenure
from crash.harness import eventually
from proxy import Proxy

ABSENT = "01ARZ3NDEKTSV4RRFFQ69G5FAV"
ONCE = tenure.Retry(attempts=1)
NOW = tenure.Retry(attempts=5, backoff=tenure.Fixed(0))

Make = Callable[..., tenure.Task[[], Any]]
Ledger = Callable[[], list[str]]


@pytest.fixture
def url(make_database: Callable[..., str]) -> str:
    return make_database(migrated=True)


@pytest.fixture
def app(url: str) -> Iterator[tenure.App]:
    app = tenure.App(url, lease_seconds=3, lease_renew_seconds=1)
    yield app
    app.close()


@pytest.fixture
def ledger(url: str) -> Iterator[Ledger]:
    """A table of the user's own, and what is committed in it."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE TABLE ledger (entry text)")
        yield lambda: [row[0] for row in connection.execute("SELECT entry FROM ledger ORDER BY 1")]


def nothing(*_: Any) -> None: ...


@pytest.fixture(params=["def", "async def"])
def make(request: pytest.FixtureRequest, app: tenure.App, ledger: Ledger) -> Make:
    """A task that writes into the ledger within its transaction, in both kinds of handler. What
    it does before, inside and after the block may be awaited."""

    def make(
        *,
        before: Callable[..., Any] = nothing,
        inside: Callable[..., Any] = nothing,
        after: Callable[..., Any] = nothing,
        **options: Any,
    ) -> tenure.Task[[], Any]:
        def entry(ctx: tenure.Context) -> tuple[str, list[str]]:
            return "INSERT INTO ledger VALUES (%s)", [f"lease {ctx.job.lease_no}"]

        async def said(value: Any) -> None:
            if inspect.isawaitable(value):
                await value

        def pay(ctx: tenure.Context) -> str:
            before(ctx)
            with ctx.transaction() as conn:
                conn.execute(*entry(ctx))
                inside(ctx, conn)
            after(ctx)
            return "ignored"

        async def apay(ctx: tenure.Context) -> str:
            await said(before(ctx))
            async with ctx.transaction() as conn:
                await conn.execute(*entry(ctx))
                await said(inside(ctx, conn))
            await said(after(ctx))
            return "ignored"

        chosen: dict[str, Any] = {"retry": ONCE, "name": "pay"} | options
        decorate = app.task(**chosen)
        return decorate(pay if request.param == "def" else apay)

    return make


def run(app: tenure.App, task: tenure.Task[[], Any]) -> tenure.Job:
    receipt = task.enqueue()
    app.run_worker(drain=True)
    return job_of(app, receipt)


def job_of(app: tenure.App, receipt: tenure.Receipt) -> tenure.Job:
    job = app.get(receipt.id)
    assert job is not None
    return job


def open_transactions(url: str) -> int:
    with psycopg.connect(url) as connection:
        found = connection.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
            " AND state LIKE 'idle in transaction%' AND pid <> pg_backend_pid()"
        ).fetchone()
    assert found is not None
    return int(found[0])


def test_it_ends_the_job_with_everything(app: tenure.App, make: Make, ledger: Ledger) -> None:
    given: list[Any] = []

    @app.task(queue="mails")
    def mail(to: str) -> None: ...

    def inside(ctx: tenure.Context, conn: Any) -> None:
        given.append(conn)
        ctx.enqueue(mail, "b")
        ctx.result({"paid": 5})

    job = run(app, make(before=lambda ctx: ctx.enqueue(mail, "a"), inside=inside))

    assert (job.status, job.result, job.attempts) == ("completed", {"paid": 5}, 1)
    assert ledger() == ["lease 1"]
    mails = [*app.find(type="mail")]
    assert sorted(job.payload["to"] for job in mails) == ["a", "b"]
    assert {each.parent for each in mails} == {job.id}
    kinds = [event.kind for event in app.events(job.id)]
    assert kinds == ["job.enqueued", "job.started", "job.succeeded"]
    assert isinstance(given[0], psycopg.Connection | psycopg.AsyncConnection)


def test_each_kind_of_handler_gets_its_kind_of_connection(app: tenure.App) -> None:
    given: list[Any] = []

    @app.task
    def blocking(ctx: tenure.Context) -> None:
        with ctx.transaction() as conn:
            given.append(conn)

    @app.task
    async def awaiting(ctx: tenure.Context) -> None:
        async with ctx.transaction() as conn:
            given.append(conn)

    assert run(app, blocking).status == run(app, awaiting).status == "completed"
    assert isinstance(given[0], psycopg.Connection)
    assert isinstance(given[1], psycopg.AsyncConnection)


def test_nothing_is_seen_before_the_end(app: tenure.App, make: Make, ledger: Ledger) -> None:
    seen: list[Any] = []

    def inside(ctx: tenure.Context, conn: Any) -> None:
        job = app.get(ctx.job.id)
        seen.append((job and job.status, ledger()))

    assert run(app, make(inside=inside)).status == "completed"
    assert seen == [("in_progress", [])]


def test_an_exception_inside_undoes_everything_and_is_retried(
    app: tenure.App, make: Make, ledger: Ledger
) -> None:
    @app.task
    def mail() -> None: ...

    def inside(ctx: tenure.Context, conn: Any) -> None:
        ctx.enqueue(mail)
        if ctx.attempt < 3:
            raise RuntimeError("not yet")

    job = run(app, make(inside=inside, retry=NOW))

    assert (job.status, job.attempts) == ("completed", 3)
    assert ledger() == [f"lease {job.lease_no}"]
    assert len([*app.find(type="mail")]) == 1


def test_an_sql_error_is_the_driver_s(app: tenure.App, make: Make, ledger: Ledger) -> None:
    job = run(app, make(inside=lambda ctx, conn: conn.execute("SELECT 1 / 0")))

    assert (job.status, job.error_code) == ("dead_letter", "DivisionByZero")
    assert ledger() == []


def test_an_exception_after_the_block_is_only_logged(
    app: tenure.App, make: Make, ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    def after(ctx: tenure.Context) -> None:
        raise RuntimeError("could not say thanks")

    job = run(app, make(after=after))

    assert (job.status, job.error, job.attempts) == ("completed", None, 1)
    assert ledger() == ["lease 1"]
    assert "could not say thanks" in caplog.text


def second(ctx: tenure.Context, *_: Any) -> Any:
    """Another block, of the kind this handler can have."""

    async def again() -> None:
        async with ctx.transaction() as conn:
            await conn.execute("INSERT INTO ledger VALUES ('second')")

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        with ctx.transaction() as conn:
            conn.execute("INSERT INTO ledger VALUES ('second')")
        return None
    return again()


def test_a_second_block_is_refused(
    app: tenure.App, make: Make, ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    job = run(app, make(after=second))

    assert job.status == "completed"
    assert ledger() == ["lease 1"]
    assert "use it once in a run" in caplog.text


def test_a_block_inside_the_block_is_refused(app: tenure.App, make: Make, ledger: Ledger) -> None:
    job = run(app, make(inside=second))

    assert (job.status, job.error_code) == ("dead_letter", "ConfigError")
    assert "use it once in a run" in str(job.error)
    assert ledger() == []


@pytest.mark.parametrize("how", ["commit", "rollback", "close"])
def test_the_handler_cannot_end_it(app: tenure.App, make: Make, ledger: Ledger, how: str) -> None:
    job = run(app, make(inside=lambda ctx, conn: getattr(conn, how)()))

    assert (job.status, job.error_code) == ("dead_letter", "StoreError")
    assert "leave that to the end of the block" in str(job.error)
    assert ledger() == []


@pytest.mark.parametrize("when", ["before", "inside"])
def test_without_its_lease_it_is_refused(
    app: tenure.App, make: Make, ledger: Ledger, when: str
) -> None:
    """Taken away before the block, or before its end: the other run's entry is the only one."""

    def lose(ctx: tenure.Context, *_: Any) -> None:
        if ctx.job.lease_no > 1:
            return
        rescued = None
        while rescued is None:
            (info,) = [row for row in app.store.workers() if row.dead_at is None]
            rescued = app.store.rescue(
                info.registration, info.beat, started=frozenset(), limit=3, reason="test"
            )

    task = make(**{when: lose})
    with app.worker():
        receipt = task.enqueue()
        app.result(receipt.id, timeout=15)

    assert len(ledger()) == 1
    assert ledger() != ["lease 1"]
    assert job_of(app, receipt).status == "completed"


def test_losing_its_lease_is_an_error_of_its_own(app: tenure.App, ledger: Ledger) -> None:
    raised: list[BaseException] = []

    @app.task
    async def pay(ctx: tenure.Context) -> None:
        if ctx.job.lease_no > 1:
            return
        (info,) = app.store.workers()
        while not app.store.rescue(
            info.registration, info.beat, started=frozenset(), limit=3, reason="test"
        ):
            (info,) = app.store.workers()
        try:
            async with ctx.transaction() as conn:
                await conn.execute("INSERT INTO ledger VALUES ('x')")
        except BaseException as error:
            raised.append(error)
            raise

    with app.worker():
        app.result(pay.enqueue().id, timeout=15)

    assert [type(error) for error in raised] == [tenure.LeaseLost]
    assert ledger() == []


def test_bad_follow_ups_undo_everything(app: tenure.App, make: Make, ledger: Ledger) -> None:
    @app.task
    def mail() -> None: ...

    def inside(ctx: tenure.Context, conn: Any) -> None:
        ctx.enqueue(mail.options(after=[ABSENT]))

    job = run(app, make(inside=inside))

    assert (job.status, job.error_code) == ("dead_letter", "JobError")
    assert "no such job" in str(job.error)
    assert ledger() == []


def test_a_job_on_its_connection_commits_with_it(
    app: tenure.App, make: Make, ledger: Ledger
) -> None:
    @app.task
    def mail(attempt: int) -> None: ...

    def inside(ctx: tenure.Context, conn: Any) -> Any:
        bound = mail.options(conn=conn)
        if isinstance(conn, psycopg.AsyncConnection):
            return first_time_fails(ctx, bound.aenqueue(ctx.attempt))
        bound.enqueue(ctx.attempt)
        return fails(ctx)

    def fails(ctx: tenure.Context) -> None:
        if ctx.attempt == 1:
            raise RuntimeError("not yet")

    async def first_time_fails(ctx: tenure.Context, enqueue: Any) -> None:
        await enqueue
        fails(ctx)

    assert run(app, make(inside=inside, retry=NOW)).status == "completed"
    assert [job.payload for job in app.find(type="mail")] == [{"attempt": 2}]


def test_past_a_third_of_the_lease_it_is_rolled_back(
    app: tenure.App, make: Make, ledger: Ledger
) -> None:
    job = run(app, make(inside=lambda ctx, conn: conn.execute("SELECT pg_sleep(1.5)")))

    assert (job.status, job.error_code) == ("dead_letter", "StoreBusy")
    assert "do slow work before the block" in str(job.error)
    assert ledger() == []


def test_a_lost_reply_to_the_commit_is_no_lost_job(
    url: str, proxy: Proxy, app: tenure.App, make: Make, ledger: Ledger
) -> None:
    """The server has committed, the handler's process does not hear of it: (id, lease_no) tells."""
    app.settings = tenure.App(proxy.url(url), lease_seconds=3, lease_renew_seconds=1).settings
    task = make(inside=lambda ctx, conn: ctx.result("paid"))
    proxy.lose_reply(lambda message: message[5:].startswith(b"COMMIT"))
    job = run(app, task)

    assert proxy.counts["lost_replies"] == 1
    assert (job.status, job.result, job.attempts) == ("completed", "paid", 1)
    assert ledger() == ["lease 1"]


def test_a_lost_commit_is_done_again(
    url: str, proxy: Proxy, app: tenure.App, make: Make, ledger: Ledger
) -> None:
    app.settings = tenure.App(proxy.url(url), lease_seconds=3, lease_renew_seconds=1).settings
    task = make(inside=lambda ctx, conn: ctx.result("paid"), retry=ONCE)
    proxy.lose_request(lambda message: message[5:].startswith(b"COMMIT"))
    receipt = task.enqueue()
    with app.worker():
        eventually(lambda: job_of(app, receipt).terminal, within=30, what="its second run")
    job = job_of(app, receipt)

    assert proxy.counts["lost_requests"] == 1
    assert (job.status, job.result, job.attempts) == ("completed", "paid", 1), "uncharged"
    assert len(ledger()) == 1


# -- async handlers -------------------------------------------------------------------------------


def test_a_with_in_an_async_handler_is_refused(app: tenure.App, ledger: Ledger) -> None:
    @app.task(retry=ONCE)
    async def pay(ctx: tenure.Context) -> None:
        with ctx.transaction() as conn:
            conn.execute("INSERT INTO ledger VALUES ('x')")

    job = run(app, pay)

    assert (job.status, job.error_code) == ("dead_letter", "ConfigError")
    assert "write `async with ctx.transaction() as conn:`" in str(job.error)
    assert ledger() == []


@pytest.mark.parametrize("waits_for", ["itself", "the server"])
def test_a_time_out_inside_the_block_rolls_back(
    app: tenure.App, url: str, ledger: Ledger, waits_for: str
) -> None:
    @app.task(retry=ONCE, timeout=0.3)
    async def pay(ctx: tenure.Context) -> None:
        async with ctx.transaction() as conn:
            await conn.execute("INSERT INTO ledger VALUES ('x')")
            if waits_for == "itself":
                await asyncio.sleep(30)
            await conn.execute("SELECT pg_sleep(30)")

    began = time.monotonic()
    job = run(app, pay)

    assert (job.status, job.error_code) == ("dead_letter", "TIMEOUT")
    assert time.monotonic() - began < 5
    assert ledger() == []
    assert open_transactions(url) == 0


def test_a_cancelled_job_s_block_rolls_back(app: tenure.App, url: str, ledger: Ledger) -> None:
    inside = threading.Event()

    @app.task(retry=ONCE)
    async def pay(ctx: tenure.Context) -> None:
        async with ctx.transaction() as conn:
            await conn.execute("INSERT INTO ledger VALUES ('x')")
            inside.set()
            await asyncio.sleep(30)

    with app.worker():
        receipt = pay.enqueue()
        assert inside.wait(10)
        app.cancel(receipt.id, reason="changed my mind")
        eventually(lambda: job_of(app, receipt).status == "cancelled")

    assert ledger() == []
    assert open_transactions(url) == 0


def test_many_at_once(app: tenure.App, ledger: Ledger) -> None:
    @app.task
    async def pay(ctx: tenure.Context, n: int) -> None:
        async with ctx.transaction() as conn:
            await conn.execute("INSERT INTO ledger VALUES (%s)", [str(n)])

    app.enqueue_many([pay.job(n) for n in range(50)])
    app.run_worker(drain=True, concurrency=8)

    assert sorted(ledger(), key=int) == [str(n) for n in range(50)]
    assert app.stats()["jobs"]["completed"] == 50


SLOW_COMMIT = """
    CREATE FUNCTION dawdle() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
      PERFORM pg_sleep(1.5);
      RETURN NULL;
    EXCEPTION WHEN query_canceled THEN
      RETURN NULL;
    END $$;
    CREATE CONSTRAINT TRIGGER dawdle AFTER INSERT ON ledger DEFERRABLE INITIALLY DEFERRED
      FOR EACH ROW EXECUTE FUNCTION dawdle();
"""


def test_a_time_out_during_the_commit_that_happened_is_no_failure(
    app: tenure.App, url: str, ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(SLOW_COMMIT)
    told: list[str] = []
    for kind in ("complete", "failed"):
        app.on(kind)(lambda event: told.append(event.kind))

    @app.task(timeout=0.5, retry=ONCE)
    async def pay(ctx: tenure.Context) -> None:
        async with ctx.transaction() as connection:
            await connection.execute("INSERT INTO ledger VALUES ('paid')")
            ctx.result("paid")

    id = pay.enqueue().id
    with app.worker():
        assert app.result(id, timeout=10) == "paid"
        eventually(lambda: bool(told), what="the hook told")

    assert ledger() == ["paid"]
    assert told == ["complete"]
    assert "refused" not in caplog.text and "failed" not in caplog.text
