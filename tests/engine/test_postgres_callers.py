"""`options(conn=…)` on PostgreSQL: a job shares the fate of the caller's own transaction, in every
library that has one."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

import tenure
from proxy import Proxy

from .callers import (
    CALLERS,
    Asyncpg,
    AsyncpgPool,
    Caller,
    Django,
    Psycopg,
    PsycopgAsync,
    SqlalchemyAsyncpgSession,
    SqlalchemyConnection,
    SqlalchemySession,
)

ABSENT = "01ARZ3NDEKTSV4RRFFQ69G5FAV"
SECRET = "4111-1111-1111-1111"

Work = tenure.Task[[Any], Any]
Open = Callable[..., Any]


@pytest.fixture
def url(make_database: Callable[..., str]) -> str:
    return make_database(migrated=True)


@pytest.fixture
def app(url: str) -> Iterator[tenure.App]:
    app = tenure.App(url, lease_seconds=3, lease_renew_seconds=1)
    yield app
    app.close()


@pytest.fixture
def work(app: tenure.App) -> Work:
    @app.task
    def work(n: Any) -> Any:
        return n

    return work


@pytest.fixture
def open_caller(url: str) -> Iterator[Open]:
    opened: list[Caller] = []

    def make(kind: type[Caller], at: str = url) -> Caller:
        opened.append(kind(at))
        return opened[-1]

    yield make
    for caller in opened:
        caller.close()


@pytest.fixture(params=CALLERS, ids=lambda kind: kind.__name__)
def caller(request: pytest.FixtureRequest, open_caller: Open, ask: Callable[..., Any]) -> Any:
    ask("CREATE TABLE orders (n integer)")
    return open_caller(request.param)


@pytest.fixture
def ask(url: str) -> Iterator[Callable[..., Any]]:
    """SQL from outside: what others see."""
    with psycopg.connect(url, autocommit=True) as connection:

        def ask(statement: str) -> Any:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []

        yield ask


def test_it_commits_with_the_caller(
    app: tenure.App, work: Work, caller: Caller, ask: Callable[..., Any]
) -> None:
    caller.begin()
    caller.execute("INSERT INTO orders VALUES (1)")
    receipt = caller.enqueue(work, 1)

    assert receipt == tenure.Receipt(receipt.id, False, "queued")
    assert app.get(receipt.id) is None
    caller.commit()
    job = app.get(receipt.id)
    assert job is not None
    assert (job.status, job.payload) == ("queued", {"n": 1})
    assert ask("SELECT n FROM orders") == [(1,)]
    app.run_worker(drain=True)
    assert app.result(receipt.id, timeout=0) == 1


def test_it_rolls_back_with_the_caller(
    app: tenure.App, work: Work, caller: Caller, ask: Callable[..., Any]
) -> None:
    caller.begin()
    caller.execute("INSERT INTO orders VALUES (1)")
    receipt = caller.enqueue(work, 1, key="k")
    caller.rollback()

    assert app.get(receipt.id) is None
    for table in ("jobs", "keys", "events"):
        assert ask(f"SELECT count(*) FROM tenure.{table}") == [(0,)]
    assert ask("SELECT count(*) FROM orders") == [(0,)]
    assert not work.options(key="k").enqueue(2).duplicate


def test_a_savepoint_can_be_rolled_back(app: tenure.App, work: Work, caller: Caller) -> None:
    caller.begin()
    kept = caller.enqueue(work, 1)
    caller.execute("SAVEPOINT mine")
    dropped = caller.enqueue(work, 2)
    caller.execute("ROLLBACK TO mine")
    last = caller.enqueue(work, 3)
    caller.commit()

    assert [job.id for job in app.find()] == [last.id, kept.id]
    assert app.get(dropped.id) is None


def test_a_refused_job_leaves_the_transaction_usable(
    app: tenure.App, work: Work, caller: Caller
) -> None:
    caller.begin()
    with pytest.raises(tenure.JobError, match="no such job") as raised:
        caller.enqueue(work, SECRET, after=[ABSENT])
    assert SECRET not in "".join(traceback.format_exception(raised.value))
    last = caller.enqueue(work, 3)
    caller.commit()

    assert [job.id for job in app.find()] == [last.id]


def test_after_an_error_only_a_savepoint_helps(
    app: tenure.App, work: Work, caller: Caller, ask: Callable[..., Any]
) -> None:
    ask("ALTER TABLE tenure.jobs ADD CHECK (payload::text NOT LIKE '%4111%')")
    caller.begin()
    caller.execute("SAVEPOINT mine")
    with pytest.raises(tenure.StoreError, match="values are not shown") as raised:
        caller.enqueue(work, SECRET)
    assert SECRET not in "".join(traceback.format_exception(raised.value))
    with pytest.raises(tenure.StoreError, match="roll it back, or back to a savepoint"):
        caller.enqueue(work, 2)
    caller.execute("ROLLBACK TO mine")
    caller.enqueue(work, 3)
    caller.commit()

    assert [job.payload for job in app.find()] == [{"n": 3}]


def test_a_key_seen_before_and_a_batch(app: tenure.App, work: Work, caller: Caller) -> None:
    caller.begin()
    first = caller.enqueue(work, 1, key="k")
    second = caller.enqueue(work, 2, key="k")
    jobs = [work.job(n) for n in range(10)] + [work.options(key="k").job(0)]
    receipts = caller.enqueue_many(app, jobs)
    with pytest.raises(tenure.DuplicateKey):
        caller.enqueue(work, 4, key="k", on_conflict="error")
    caller.commit()

    assert second == receipts[-1] == tenure.Receipt(first.id, True, "queued")
    assert [receipt.id for receipt in receipts[:-1]] == [job.id for job in jobs[:-1]]
    assert app.stats()["jobs"]["queued"] == 11


def test_values_of_every_kind_arrive(app: tenure.App, work: Work, caller: Caller) -> None:
    value = {"text": "50% of %(jobs)s :now $1 ' \" \\ {} ü 🦉", "list": [1, None, True, 1.5]}
    caller.begin()
    receipt = caller.enqueue(work, value, delay=60, priority=1, org="acme")
    caller.commit()

    job = app.get(receipt.id)
    assert job is not None
    assert (job.payload, job.priority, job.org) == ({"n": value}, 1, "acme")
    assert (job.scheduled_at - job.created_at).total_seconds() == 60


def test_an_enqueue_is_one_round_trip(
    work: Work,
    url: str,
    proxy: Proxy,
    open_caller: Open,
    kind: type[Caller],
) -> None:
    asked: Counter[bytes] = Counter()

    def count(message: bytes) -> bool:
        asked[message[:1]] += 1
        return False

    caller = open_caller(kind, proxy.url(url))
    caller.begin()
    for n in range(8):  # drivers prepare what they see again
        caller.enqueue(work, n)
    proxy.lose_request(count)
    caller.enqueue(work, 9)
    proxy.heal()
    caller.rollback()

    assert asked[b"Q"] + asked[b"S"] == 1  # what the server answers with a ReadyForQuery


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "kind" in metafunc.fixturenames:
        metafunc.parametrize("kind", CALLERS, ids=lambda kind: kind.__name__)


# -- hints ----------------------------------------------------------------------------------------


def test_the_hint_goes_out_when_the_caller_has_committed(
    work: Work, caller: Caller, url: str, ask: Callable[..., Any]
) -> None:
    with psycopg.connect(url, autocommit=True) as listener:
        listener.execute("LISTEN tenure")

        def heard() -> str:
            return next(iter(listener.notifies(timeout=10, stop_after=1))).payload

        work.enqueue(0)
        assert heard() == "default"
        caller.begin()
        caller.execute("SAVEPOINT mine")
        caller.enqueue(work, 1)
        caller.execute("RELEASE mine")
        caller.wait(lambda: time.sleep(0.05))  # time to hint too early, for whoever would
        ask("SELECT pg_notify('tenure', 'nothing before this')")
        assert caller.wait(heard) == "nothing before this"
        caller.commit()
        assert caller.wait(heard) == "default"


@pytest.mark.timed
def test_a_worker_is_woken_by_the_commit(app: tenure.App, work: Work, caller: Caller) -> None:
    with app.worker():
        app.result(work.enqueue(0).id, timeout=10)
        caller.begin()
        receipt = caller.enqueue(work, 7)
        caller.commit()
        committed = time.monotonic()
        assert caller.wait(lambda: app.result(receipt.id, timeout=10)) == 7
        took = time.monotonic() - committed

    assert took < 0.9, "as late as the next poll"


def test_a_session_that_lives_long_has_one_listener(
    app: tenure.App, work: Work, open_caller: Open
) -> None:
    from sqlalchemy import event

    from tenure.stores.postgres import callers

    caller = open_caller(SqlalchemySession)
    for n in range(3):
        caller.enqueue(work, n)
        with caller.conn.begin_nested():
            caller.enqueue(work, n)
        assert callers.HINTS in caller.conn.info  # a savepoint's release is no commit
        caller.commit()
        assert callers.HINTS not in caller.conn.info
    assert event.contains(caller.conn, "after_commit", callers.hint_after_commit)
    assert len(caller.conn.dispatch.after_commit) == 1


# -- autocommit, and settings of the caller's own -------------------------------------------------


def test_in_autocommit_it_is_there_at_once(app: tenure.App, work: Work, open_caller: Open) -> None:
    sync, other, django = open_caller(Psycopg), open_caller(PsycopgAsync), open_caller(Django)
    sync.conn.autocommit = True
    other.run(other.conn.set_autocommit(True))
    core = open_caller(SqlalchemyConnection)
    core.conn = core.conn.execution_options(isolation_level="AUTOCOMMIT")
    session = open_caller(SqlalchemySession)
    session.conn.connection(execution_options={"isolation_level": "AUTOCOMMIT"})
    for caller in (sync, other, open_caller(Asyncpg), open_caller(AsyncpgPool), django, core):
        assert app.get(caller.enqueue(work, 1).id) is not None
    assert app.get(session.enqueue(work, 1).id) is not None


def test_django_without_autocommit(app: tenure.App, work: Work, open_caller: Open) -> None:
    caller = open_caller(Django)
    caller.conn.set_autocommit(False)
    receipt = caller.enqueue(work, 1)
    assert app.get(receipt.id) is None
    caller.conn.commit()
    assert app.get(receipt.id) is not None


def test_a_psycopg_connection_keeps_its_ways(
    app: tenure.App, work: Work, open_caller: Open
) -> None:
    from psycopg.rows import dict_row

    conn = open_caller(Psycopg).conn
    conn.row_factory = dict_row
    conn.cursor_factory = psycopg.RawCursor
    conn.prepare_threshold = None
    conn.adapters.register_loader("uuid", psycopg.types.string.TextLoader)
    first = work.options(conn=conn, key="k").enqueue(1)
    second = work.options(conn=conn, key="k").enqueue(2)
    with conn.pipeline():
        third = work.options(conn=conn, key="k").enqueue(3)
    conn.commit()

    assert second == third == tenure.Receipt(first.id, True, "queued")
    assert (conn.row_factory, conn.cursor_factory) == (dict_row, psycopg.RawCursor)
    assert (conn.autocommit, conn.prepare_threshold) == (False, None)
    assert app.get(first.id) is not None


def test_an_asyncpg_connection_with_codecs_of_its_own(
    app: tenure.App, work: Work, open_caller: Open
) -> None:
    import json

    caller = open_caller(Asyncpg)

    async def teach() -> None:
        for kind in ("json", "jsonb"):
            await caller.conn.set_type_codec(
                kind, encoder=json.dumps, decoder=json.loads, schema="pg_catalog"
            )
        await caller.conn.set_type_codec(
            "uuid", encoder=str, decoder=str, schema="pg_catalog", format="text"
        )

    caller.run(teach())
    receipt = caller.enqueue(work, {"a": [1]})
    job = app.get(receipt.id)
    assert job is not None
    assert job.payload == {"n": {"a": [1]}}


def test_a_task_by_name_takes_a_connection_too(
    app: tenure.App, work: Work, open_caller: Open
) -> None:
    sync, other = open_caller(Psycopg), open_caller(PsycopgAsync)
    first = app.enqueue("work", {"n": 1}, conn=sync.conn, key="k")
    second = other.run(app.aenqueue("work", {"n": 2}, conn=other.conn))
    assert [*app.find()] == []
    with pytest.raises(tenure.DuplicateKey):
        app.enqueue("work", {"n": 3}, conn=sync.conn, key="k", on_conflict="error")
    sync.commit()
    other.rollback()

    assert app.get(first.id) is not None
    assert app.get(second.id) is None


# -- what cannot be joined ------------------------------------------------------------------------


def test_an_async_connection_has_to_be_awaited(
    app: tenure.App, work: Work, open_caller: Open
) -> None:
    for kind in (PsycopgAsync, AsyncpgPool, SqlalchemyAsyncpgSession):
        conn = open_caller(kind).conn
        with pytest.raises(tenure.ConfigError, match="aenqueue"):
            work.options(conn=conn).enqueue(1)
        with pytest.raises(tenure.ConfigError, match="aenqueue_jobs"):
            app.enqueue_many([work.job(1)], conn=conn)
    assert [*app.find()] == []


def test_a_sync_connection_is_used_in_its_own_thread(
    app: tenure.App, work: Work, open_caller: Open
) -> None:
    caller = open_caller(SqlalchemySession)
    receipt = asyncio.run(work.options(conn=caller.conn).aenqueue(1))
    caller.commit()
    assert app.get(receipt.id) is not None


def test_something_else_is_refused_by_name(
    app: tenure.App, work: Work, url: str, open_caller: Open
) -> None:
    lite = sqlite3.connect(":memory:")
    core = open_caller(SqlalchemyConnection)
    for given, named in (
        (lite, "a sqlite3.Connection"),
        (url, "a str"),
        (core.engine, "a sqlalchemy.engine.base.Engine"),
        (psycopg, "a module"),
    ):
        with pytest.raises(tenure.ConfigError, match=f"conn= got {named}; .* psycopg Connection"):
            work.options(conn=given).enqueue(1)
    lite.close()


def test_other_kinds_of_database_are_refused(app: tenure.App, work: Work) -> None:
    import sqlalchemy
    from django.db.backends.sqlite3.base import DatabaseWrapper
    from sqlalchemy.orm import Session

    engine = sqlalchemy.create_engine("sqlite://")
    django = DatabaseWrapper({"NAME": ":memory:", "OPTIONS": {}}, "other")
    with engine.connect() as connection, Session(engine) as session:
        for given in (connection, session, django):
            with pytest.raises(tenure.ConfigError, match=r"another kind \(sqlite\)"):
                work.options(conn=given).enqueue(1)
    engine.dispose()


def test_a_database_without_tables(
    app: tenure.App, work: Work, make_database: Callable[..., str], open_caller: Open, kind: Any
) -> None:
    caller = open_caller(kind, make_database())
    caller.begin()
    with pytest.raises(tenure.SchemaError, match="tenure migrate") as raised:
        caller.enqueue(work, SECRET)
    assert SECRET not in "".join(traceback.format_exception(raised.value))
    caller.rollback()


def test_another_database_with_tables_of_its_own(
    app: tenure.App, work: Work, make_database: Callable[..., str], open_caller: Open, kind: Any
) -> None:
    """The statement asks first, in the same round trip: nothing is stored there, no worker of
    this app would ever see it."""
    elsewhere = make_database(migrated=True)
    caller = open_caller(kind, elsewhere)
    caller.begin()
    with pytest.raises(tenure.ConfigError, match="open on another database than this app's"):
        caller.enqueue(work, 1)
    caller.commit()
    other = tenure.App(elsewhere)
    assert list(other.find()) == list(app.find()) == []
    other.close()


def test_a_connection_that_was_lost(
    app: tenure.App, work: Work, ask: Callable[..., Any], caller: Caller
) -> None:
    caller.begin()
    caller.enqueue(work, 0)
    ask(
        "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
        " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        " AND state = 'idle in transaction'"
    )
    with pytest.raises(tenure.StoreUnavailable, match="is closed or was lost") as raised:
        caller.enqueue(work, SECRET)
    assert SECRET not in "".join(traceback.format_exception(raised.value))
    with contextlib.suppress(Exception):  # each library has its own word for it
        caller.rollback()
    assert [*app.find()] == []


def test_django_says_itself_that_it_does_not_work_on_a_loop(
    app: tenure.App, work: Work, open_caller: Open
) -> None:
    from django.core.exceptions import SynchronousOnlyOperation
    from django.db import connections

    open_caller(Django)
    conn = connections["default"]  # the proxy would look for another one on a loop
    with pytest.raises(SynchronousOnlyOperation):
        asyncio.run(work.options(conn=conn).aenqueue(1))
    assert [*app.find()] == []
