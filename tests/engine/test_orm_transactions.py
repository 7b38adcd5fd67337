"""`ctx.transaction(conn=…)`: what a handler's ORM writes, its follow-ups and its job's end in one
transaction, on both stores, with each library that has one."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy
from sqlalchemy.ext.asyncio import async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, scoped_session
from sqlalchemy.orm import sessionmaker as make_sessions
from sqlalchemy.pool import NullPool

import tenure
from places import Place, only

from .callers import Django, sqlalchemy_url

ABSENT = "01ARZ3NDEKTSV4RRFFQ69G5FAV"
ONCE = tenure.Retry(attempts=1)


class Base(DeclarativeBase):
    pass


class Entry(Base):
    __tablename__ = "ledger"
    entry: Mapped[str] = mapped_column(primary_key=True)


INSERT = sqlalchemy.insert(Entry)


class Library:
    """How a handler of this library writes an entry. `open` gives what is handed to conn=."""

    is_async = False

    def __init__(self, url: str) -> None:
        self.engine: Any = sqlalchemy.create_engine(sqlalchemy_url(url, "psycopg"))

    def open(self) -> Any:
        raise NotImplementedError

    def write(self, conn: Any, entry: str) -> None:
        conn.add(Entry(entry=entry))  # flushed by the end of the block

    def commit(self, conn: Any) -> Any:
        return conn.commit()

    def release(self, conn: Any) -> Any:
        return conn.close()

    def close(self) -> None:
        self.engine.dispose()


class OfSession(Library):
    def open(self) -> Any:
        return Session(self.engine)


class OfScopedSession(Library):
    def open(self) -> Any:
        return scoped_session(make_sessions(self.engine))

    def release(self, conn: Any) -> None:
        conn.remove()


class OfConnection(Library):
    def open(self) -> Any:
        return self.engine.connect()

    def write(self, conn: Any, entry: str) -> Any:
        return conn.execute(INSERT, {"entry": entry})


class OfAsyncSession(Library):
    is_async = True
    driver = "psycopg_async"

    def __init__(self, url: str) -> None:
        self.engine = create_async_engine(sqlalchemy_url(url, self.driver), poolclass=NullPool)

    def open(self) -> Any:
        return async_sessionmaker(self.engine)()

    def close(self) -> None: ...


class OfAsyncScopedSession(OfAsyncSession):
    def open(self) -> Any:
        return async_scoped_session(async_sessionmaker(self.engine), scopefunc=lambda: 1)

    def release(self, conn: Any) -> Any:
        return conn.remove()


class OfAsyncConnection(OfAsyncSession):
    def open(self) -> Any:
        return self.engine.connect()

    def write(self, conn: Any, entry: str) -> Any:
        return conn.execute(INSERT, {"entry": entry})


class OfAsyncpg(OfAsyncSession):
    driver = "asyncpg"


class OfDjango(Library):
    def __init__(self, url: str) -> None:
        self.url = url
        self.opened: list[Any] = []

    def open(self) -> Any:
        self.opened.append(Django(self.url))  # a connection belongs to its thread
        return self.opened[-1].conn

    def write(self, conn: Any, entry: str) -> None:
        with conn.cursor() as cursor:
            cursor.execute("INSERT INTO ledger VALUES (%s)", [entry])

    def close(self) -> None: ...


LIBRARIES = [
    OfSession,
    OfScopedSession,
    OfConnection,
    OfAsyncSession,
    OfAsyncScopedSession,
    OfAsyncConnection,
    OfAsyncpg,
    OfDjango,
]
Make = Callable[..., tenure.Task[[], Any]]


@pytest.fixture(params=LIBRARIES, ids=lambda kind: kind.__name__)
def library(request: pytest.FixtureRequest, place: Place, app: tenure.App) -> Iterator[Library]:
    if request.param is OfAsyncpg and place.kind == "sqlite":
        pytest.skip("asyncpg is for PostgreSQL")
    app.migrate()
    place.sql("CREATE TABLE ledger (entry text PRIMARY KEY)")
    found = request.param(place.url)
    yield found
    found.close()


@pytest.fixture
def ledger(place: Place) -> Callable[[], list[str]]:
    return lambda: [row[0] for row in place.sql("SELECT entry FROM ledger ORDER BY 1")]


def nothing(*_: Any) -> None: ...


async def said(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


@pytest.fixture
def make(app: tenure.App, library: Library) -> Make:
    """A task that writes an entry within its transaction."""

    def make(
        *,
        before: Callable[..., Any] = nothing,
        inside: Callable[..., Any] = nothing,
        after: Callable[..., Any] = nothing,
        **options: Any,
    ) -> tenure.Task[[], Any]:
        def pay(ctx: tenure.Context) -> str:
            conn = library.open()
            try:
                before(ctx, conn)
                with ctx.transaction(conn=conn) as same:
                    assert same is conn
                    library.write(conn, f"attempt {ctx.attempt}")
                    inside(ctx, conn)
                after(ctx, conn)
            finally:
                library.release(conn)
            return "ignored"

        async def apay(ctx: tenure.Context) -> str:
            conn = await said(library.open())
            try:
                await said(before(ctx, conn))
                async with ctx.transaction(conn=conn) as same:
                    assert same is conn
                    await said(library.write(conn, f"attempt {ctx.attempt}"))
                    await said(inside(ctx, conn))
                await said(after(ctx, conn))
            finally:
                await said(library.release(conn))
            return "ignored"

        chosen: dict[str, Any] = {"retry": ONCE, "name": "pay"} | options
        return app.task(**chosen)(apay if library.is_async else pay)

    return make


def run(app: tenure.App, task: tenure.Task[[], Any]) -> tenure.Job:
    receipt = task.enqueue()
    app.run_worker(drain=True)
    job = app.get(receipt.id)
    assert job is not None
    return job


def test_it_ends_the_job_with_everything(
    app: tenure.App, make: Make, ledger: Callable[[], list[str]]
) -> None:
    ran: list[str] = []

    @app.task(queue="mails")
    def mail(to: str) -> None:
        ran.append(to)

    def inside(ctx: tenure.Context, _conn: Any) -> None:
        ctx.enqueue(mail, "a@b.c")
        ctx.result({"paid": True})

    job = run(app, make(inside=inside))

    assert (job.status, job.result) == ("completed", {"paid": True})
    assert ledger() == ["attempt 1"]
    assert ran == ["a@b.c"]
    assert [event.kind for event in app.events(job.id)] == [
        "job.enqueued",
        "job.started",
        "job.succeeded",
    ]


def test_nothing_of_a_block_that_raises_is_left(
    app: tenure.App, make: Make, ledger: Callable[[], list[str]]
) -> None:
    @app.task
    def mail(to: str) -> None: ...

    def inside(ctx: tenure.Context, _conn: Any) -> None:
        ctx.enqueue(mail, "a@b.c")
        raise ZeroDivisionError

    job = run(app, make(inside=inside))

    assert (job.status, job.error_code) == ("dead_letter", "ZeroDivisionError")
    assert ledger() == []
    assert [found.type for found in app.find()] == ["pay"]


def test_it_runs_again_after_an_error(
    app: tenure.App, make: Make, ledger: Callable[[], list[str]]
) -> None:
    def inside(ctx: tenure.Context, _conn: Any) -> None:
        if ctx.attempt == 1:
            raise ZeroDivisionError

    job = run(app, make(inside=inside, retry=tenure.Retry(2, backoff=tenure.Fixed(0))))

    assert (job.status, job.attempts) == ("completed", 2)
    assert ledger() == ["attempt 2"]


def test_a_commit_inside_is_refused(
    app: tenure.App, make: Make, library: Library, ledger: Callable[[], list[str]]
) -> None:
    job = run(app, make(inside=lambda _ctx, conn: library.commit(conn)))

    assert job.status == "dead_letter"
    assert job.error is not None
    assert "inside" in job.error or "atomic" in job.error
    assert ledger() == []


def test_a_rollback_inside_is_noticed(
    app: tenure.App, make: Make, library: Library, ledger: Callable[[], list[str]]
) -> None:
    job = run(app, make(inside=lambda _ctx, conn: conn.rollback()))

    assert job.status == "dead_letter"
    assert ledger() == []


def test_follow_ups_that_cannot_be_stored(
    app: tenure.App, make: Make, ledger: Callable[[], list[str]]
) -> None:
    @app.task
    def mail() -> None: ...

    def inside(ctx: tenure.Context, _conn: Any) -> None:
        ctx.enqueue(mail.options(after=[ABSENT]))

    job = run(app, make(inside=inside))

    assert job.status == "dead_letter"
    assert "no such job" in (job.error or "")
    assert ledger() == []


def test_a_run_that_lost_its_job_commits_nothing(
    app: tenure.App, make: Make, place: Place, ledger: Callable[[], list[str]]
) -> None:
    """The fence is the last statement: whoever has the job now is not disturbed."""
    table = "leases" if place.kind == "sqlite" else "jobs"

    def before(ctx: tenure.Context, _conn: Any) -> None:
        place.sql(f"UPDATE tenure_{table} SET lease_no = lease_no + 1")

    task = make(before=before)
    receipt = task.enqueue()
    with app.worker():
        deadline = time.monotonic() + 20
        while not (found := app.get(receipt.id)) or found.started_at is None:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    assert ledger() == []
    job = app.get(receipt.id)
    assert job is not None
    assert job.status != "completed"


def test_one_that_takes_too_long_is_refused(
    app: tenure.App, make: Make, ledger: Callable[[], list[str]]
) -> None:
    """A third of the lease of 3 s."""
    job = run(app, make(inside=lambda *_: time.sleep(1.3)))

    assert job.status == "dead_letter"
    assert ledger() == []


def test_an_error_that_was_caught_commits_nothing_by_itself(
    app: tenure.App, make: Make, library: Library, place: Place, ledger: Callable[[], list[str]]
) -> None:
    """On PostgreSQL the transaction is broken, and must not look like a success."""
    place.sql("INSERT INTO ledger VALUES ('there')")

    def inside(_ctx: tenure.Context, conn: Any) -> Any:
        if library.is_async:
            return again(conn)
        try:
            library.write(conn, "there")
            getattr(conn, "flush", nothing)()
        except Exception as error:
            assert "there" not in ledger()[1:], error
        return None

    async def again(conn: Any) -> None:
        try:
            await said(library.write(conn, "there"))
            await said(getattr(conn, "flush", nothing)())
        except Exception as error:
            assert "there" not in ledger()[1:], error

    job = run(app, make(inside=inside))

    if job.status == "completed":  # SQLite undoes the statement alone
        assert ledger() == ["attempt 1", "there"]
    else:
        assert ledger() == ["there"]


def test_after_it_the_connection_works_as_before(
    app: tenure.App, make: Make, library: Library, ledger: Callable[[], list[str]]
) -> None:
    def after(_ctx: tenure.Context, conn: Any) -> Any:
        if library.is_async:
            return again(conn)
        library.write(conn, "after")
        if not isinstance(library, OfDjango):
            conn.commit()
        return None

    async def again(conn: Any) -> None:
        await said(library.write(conn, "after"))
        await conn.commit()

    job = run(app, make(after=after))

    assert job.status == "completed"
    assert ledger() == ["after", "attempt 1"]


def test_another_database_is_refused(
    app: tenure.App, place: Place, request: pytest.FixtureRequest, tmp_path: Any
) -> None:
    other = (
        f"sqlite:///{tmp_path / 'other.db'}"
        if place.kind == "sqlite"
        else request.getfixturevalue("make_database")(migrated=True)
    )
    engine = sqlalchemy.create_engine(sqlalchemy_url(other, "psycopg"))

    @app.task(retry=ONCE)
    def pay(ctx: tenure.Context) -> None:
        with Session(engine) as session, ctx.transaction(conn=session):
            pass

    job = run(app, pay)
    engine.dispose()

    assert job.status == "dead_letter"
    assert "ConfigError" in (job.error or "")
    assert "would not commit" in (job.error or "")


@only("postgres", "on SQLite the block begins a transaction by itself")
@pytest.mark.parametrize(
    "library", [OfSession, OfConnection, OfAsyncSession, OfAsyncpg], indirect=True
)
def test_a_connection_in_autocommit_is_refused_before_anything_is_written(
    app: tenure.App, make: Make, library: Library, ledger: Callable[[], list[str]]
) -> None:
    """What it writes would be stored at once, and again by each attempt."""
    library.engine = library.engine.execution_options(isolation_level="AUTOCOMMIT")

    job = run(app, make(retry=tenure.Retry(2, backoff=tenure.Fixed(0))))

    assert ledger() == []
    assert "conn= is in autocommit" in (job.error or "")
    assert job.status != "completed"


@pytest.mark.parametrize("mode", ["conditional_savepoint", "rollback_only", "create_savepoint"])
@pytest.mark.parametrize("library", [OfConnection], indirect=True)
def test_a_session_inside_somebody_else_s_transaction_is_refused(
    app: tenure.App, library: Library, ledger: Callable[[], list[str]], mode: Any
) -> None:
    """Its commit would commit nothing: that is for whoever has begun the connection's."""
    raised: list[Exception] = []

    @app.task(retry=ONCE)
    def pay(ctx: tenure.Context) -> None:
        with library.open() as conn, conn.begin() as outer:
            session = Session(conn, join_transaction_mode=mode)
            try:
                with session, ctx.transaction(conn=session):
                    session.add(Entry(entry="once"))
            except tenure.ConfigError as error:
                raised.append(error)
                raise
            finally:
                if outer.is_active:
                    outer.rollback()

    job = run(app, pay)

    assert job.status == "dead_letter"
    assert "of the outermost transaction" in str(raised[0])
    assert ledger() == []


@pytest.mark.parametrize("library", [OfDjango], indirect=True)
def test_django_without_autocommit_is_refused(
    app: tenure.App, make: Make, ledger: Callable[[], list[str]]
) -> None:
    """Its atomic() would be a savepoint, and the job pass for finished before any commit."""
    job = run(
        app,
        make(
            before=lambda _ctx, conn: conn.set_autocommit(False),
            after=lambda _ctx, conn: conn.rollback(),
        ),
    )

    assert job.status == "dead_letter"
    assert "autocommit is off" in (job.error or "")
    assert ledger() == []


@pytest.mark.parametrize("given", [object(), "text"])
def test_something_else_is_refused(app: tenure.App, given: Any) -> None:
    @app.task(retry=ONCE)
    def pay(ctx: tenure.Context) -> None:
        with ctx.transaction(conn=given):
            pass

    job = run(app, pay)
    assert "it takes a Session or Connection of SQLAlchemy" in (job.error or "")


def test_a_hook_that_raises_after_the_commit_changes_nothing(
    app: tenure.App,
    place: Place,
    ledger: Callable[[], list[str]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Django runs what waits for the commit inside the call that commits."""
    from django.db import transaction

    app.migrate()
    place.sql("CREATE TABLE ledger (entry text PRIMARY KEY)")
    library = OfDjango(place.url)

    def broken() -> None:
        raise ZeroDivisionError

    @app.task(retry=ONCE)
    def pay(ctx: tenure.Context) -> None:
        conn = library.open()
        with ctx.transaction(conn=conn):
            library.write(conn, "once")
            transaction.on_commit(broken)
        conn.close()

    with caplog.at_level(logging.ERROR):
        job = run(app, pay)
    assert job.status == "completed"
    assert ledger() == ["once"]
    assert "ZeroDivisionError" in caplog.text
