"""`options(conn=…)` on SQLite with the connections of other libraries: the same promises as on
PostgreSQL (test_postgres_callers.py), so that a program may be developed on a file."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tenure
from places import only

from .callers import (
    SQLITE_CALLERS,
    Aiosqlite,
    Caller,
    Django,
    SqlalchemyAsyncSession,
    SqlalchemyConnection,
    SqlalchemySession,
)

pytestmark = only("sqlite", "on PostgreSQL: test_postgres_callers.py")
ABSENT = "01ARZ3NDEKTSV4RRFFQ69G5FAV"

Work = tenure.Task[[Any], Any]
Open = Callable[..., Any]


@pytest.fixture
def work(app: tenure.App) -> Work:
    @app.task
    def work(n: Any) -> Any:
        return n

    app.migrate()
    return work


@pytest.fixture
def ask(path: Path, work: Work) -> Iterator[Callable[..., Any]]:
    """SQL from outside: what others see."""
    db = sqlite3.connect(path, timeout=5, isolation_level=None)
    yield lambda statement: db.execute(statement).fetchall()
    db.close()


@pytest.fixture
def open_caller(path: Path, work: Work) -> Iterator[Open]:
    opened: list[Caller] = []

    def make(kind: type[Caller], at: str | Path = path) -> Caller:
        opened.append(kind(f"sqlite:///{at}"))
        return opened[-1]

    yield make
    for caller in opened:
        caller.close()


@pytest.fixture(params=SQLITE_CALLERS, ids=lambda kind: kind.__name__)
def caller(request: pytest.FixtureRequest, open_caller: Open, ask: Callable[..., Any]) -> Any:
    ask("CREATE TABLE orders (n integer)")
    return open_caller(request.param)


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
    work: Work, caller: Caller, ask: Callable[..., Any], count: Callable[[], int]
) -> None:
    caller.begin()
    caller.execute("INSERT INTO orders VALUES (1)")
    caller.enqueue(work, 1, key="k")
    caller.rollback()

    assert count() == 0  # no key and no event either
    assert ask("SELECT count(*) FROM orders") == [(0,)]
    assert not work.options(key="k").enqueue(2).duplicate


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_the_enqueue_may_come_first(
    app: tenure.App, work: Work, caller: Caller, ask: Callable[..., Any], end: str
) -> None:
    """Libraries begin late: on a session where nothing was written there is no transaction yet, in
    the driver's eyes, and a commit of one that knows of none does nothing."""
    caller.begin()
    receipt = caller.enqueue(work, 1)
    assert app.get(receipt.id) is None
    caller.execute("INSERT INTO orders VALUES (1)")
    getattr(caller, end)()

    there = 1 if end == "commit" else 0
    assert ask("SELECT count(*) FROM orders") == [(there,)]
    assert (app.get(receipt.id) is not None) == bool(there)


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_the_enqueue_may_be_all_there_is(
    app: tenure.App, work: Work, caller: Caller, end: str
) -> None:
    caller.begin()
    receipt = caller.enqueue(work, 1)
    getattr(caller, end)()

    assert (app.get(receipt.id) is not None) == (end == "commit")


def test_a_caller_that_has_read_may_enqueue(
    app: tenure.App, work: Work, caller: Caller, ask: Callable[..., Any]
) -> None:
    caller.begin()
    caller.execute("SELECT * FROM orders")
    receipt = caller.enqueue(work, 1)
    caller.commit()

    assert app.get(receipt.id) is not None


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
    app: tenure.App, work: Work, caller: Caller, ask: Callable[..., Any]
) -> None:
    caller.begin()
    caller.execute("INSERT INTO orders VALUES (1)")
    with pytest.raises(tenure.JobError, match="no such job"):
        caller.enqueue(work, 2, after=[ABSENT])
    last = caller.enqueue(work, 3)
    caller.commit()

    assert [job.id for job in app.find()] == [last.id]
    assert ask("SELECT count(*) FROM orders") == [(1,)]


def test_a_key_seen_before_and_a_batch(app: tenure.App, work: Work, caller: Caller) -> None:
    caller.begin()
    first = caller.enqueue(work, 1, key="k")
    jobs = [work.job(n) for n in range(10)] + [work.options(key="k").job(0)]
    receipts = caller.enqueue_many(app, jobs)
    with pytest.raises(tenure.DuplicateKey):
        caller.enqueue(work, 4, key="k", on_conflict="error")
    caller.commit()

    assert receipts[-1] == tenure.Receipt(first.id, True, "queued")
    assert app.stats()["jobs"]["queued"] == 11


def test_one_transaction_after_another(app: tenure.App, work: Work, caller: Caller) -> None:
    """A library that took the first commit for its own knows of the second transaction too."""
    for n in range(3):
        caller.begin()
        caller.execute(f"INSERT INTO orders VALUES ({n})")
        caller.enqueue(work, n)
        caller.commit() if n != 1 else caller.rollback()

    assert [job.payload for job in app.find()] == [{"n": 2}, {"n": 0}]


def test_a_worker_is_woken_by_the_commit(app: tenure.App, work: Work, caller: Caller) -> None:
    """By the write to the log, as after a commit of ours, and not by its poll."""
    app.settings = type(app.settings).load(
        url=app.settings.url, poll_interval_ms=30_000, hint_poll_interval_ms=30_000
    )
    with app.worker():
        app.result(work.enqueue(0).id, timeout=20)
        caller.begin()
        receipt = caller.enqueue(work, 7)
        begun = time.monotonic()
        caller.commit()
        assert caller.wait(lambda: app.result(receipt.id, timeout=20)) == 7
    assert time.monotonic() - begun < 5


# -- the right file -------------------------------------------------------------------------------


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "kind" in metafunc.fixturenames:
        metafunc.parametrize("kind", SQLITE_CALLERS, ids=lambda kind: kind.__name__)


def test_another_file_is_refused_by_name(
    app: tenure.App, work: Work, open_caller: Open, kind: Any, path: Path, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "other.db"
    caller = open_caller(kind, elsewhere)
    caller.begin()
    with pytest.raises(tenure.ConfigError, match="Connect to the same file") as raised:
        caller.enqueue(work, 1)
    assert str(elsewhere) in str(raised.value)
    assert str(path) in str(raised.value)
    caller.rollback()
    assert list(app.find()) == []


def test_a_database_in_memory_is_refused(
    app: tenure.App, work: Work, open_caller: Open, kind: Any, path: Path
) -> None:
    caller = open_caller(kind, ":memory:")
    caller.begin()
    with pytest.raises(tenure.ConfigError, match="a database in memory, and this app's jobs are"):
        caller.enqueue(work, 1)
    caller.rollback()


def test_something_else_is_refused_by_name(app: tenure.App, work: Work, open_caller: Open) -> None:
    engine = open_caller(SqlalchemyConnection).engine
    for given, named in ((engine, "a sqlalchemy.engine.base.Engine"), ("text", "a str")):
        with pytest.raises(tenure.ConfigError, match=f"conn= got {named}; .* sqlite3 Connection"):
            work.options(conn=given).enqueue(1)


def test_other_kinds_of_database_are_refused(app: tenure.App, work: Work) -> None:
    import sqlalchemy
    from django.db.backends.postgresql.base import DatabaseWrapper
    from sqlalchemy.orm import Session

    engine = sqlalchemy.create_engine("postgresql+psycopg://", creator=lambda: None)
    django = DatabaseWrapper({"NAME": "shop", "OPTIONS": {}}, "other")
    with pytest.raises(tenure.ConfigError, match=r"another kind \(postgresql\)"):
        work.options(conn=django).enqueue(1)

    class Elsewhere(Session):
        def connection(self, *_args: Any, **_more: Any) -> Any:
            return type("Bound", (), {"dialect": engine.dialect})()

    with pytest.raises(tenure.ConfigError, match=r"another kind \(postgresql\)"):
        work.options(conn=Elsewhere()).enqueue(1)


# -- ways of the libraries ------------------------------------------------------------------------


def test_an_async_connection_has_to_be_awaited(work: Work, open_caller: Open) -> None:
    for kind in (Aiosqlite, SqlalchemyAsyncSession):
        with pytest.raises(tenure.ConfigError, match="has to be awaited"):
            work.options(conn=open_caller(kind).conn).enqueue(1)


def test_django_in_autocommit_commits_at_once(
    app: tenure.App, work: Work, open_caller: Open
) -> None:
    caller = open_caller(Django)
    receipt = caller.enqueue(work, 1)
    assert app.get(receipt.id) is not None


def test_django_without_autocommit(app: tenure.App, work: Work, open_caller: Open) -> None:
    caller = open_caller(Django)
    caller.conn.set_autocommit(False)
    dropped = caller.enqueue(work, 1)
    caller.conn.rollback()
    kept = caller.enqueue(work, 2)
    caller.conn.commit()
    caller.conn.set_autocommit(True)

    assert app.get(dropped.id) is None
    assert app.get(kept.id) is not None


def test_django_says_itself_that_it_does_not_work_on_a_loop(
    app: tenure.App, work: Work, open_caller: Open
) -> None:
    from django.core.exceptions import SynchronousOnlyOperation
    from django.db import connections

    open_caller(Django)
    conn = connections["default"]
    with pytest.raises(SynchronousOnlyOperation):
        asyncio.run(work.options(conn=conn).aenqueue(1))
    assert [*app.find()] == []


def test_django_says_itself_that_a_transaction_is_broken(
    app: tenure.App, work: Work, open_caller: Open
) -> None:
    from django.db.transaction import TransactionManagementError

    caller = open_caller(Django)
    caller.begin()
    caller.conn.set_rollback(True)
    with pytest.raises(TransactionManagementError):
        caller.enqueue(work, 1)
    caller.rollback()


@pytest.mark.parametrize("begin", ["BEGIN", "BEGIN IMMEDIATE"])
def test_sqlalchemy_that_begins_as_its_manual_says(
    app: tenure.App, work: Work, open_caller: Open, begin: str
) -> None:
    """The driver's own transactions switched off, and a listener that begins them."""
    from sqlalchemy import event

    caller = open_caller(SqlalchemySession)

    @event.listens_for(caller.engine, "connect")
    def connected(connection: Any, _record: Any) -> None:
        connection.isolation_level = None

    @event.listens_for(caller.engine, "begin")
    def begun(connection: Any) -> None:
        connection.exec_driver_sql(begin)

    dropped = caller.enqueue(work, 1)
    caller.rollback()
    kept = caller.enqueue(work, 2)
    with caller.conn.begin_nested():
        caller.enqueue(work, 3)
    assert app.get(kept.id) is None
    caller.commit()

    assert app.get(dropped.id) is None
    assert [job.payload for job in app.find()] == [{"n": 3}, {"n": 2}]


def test_sqlalchemy_in_autocommit_commits_at_once(
    app: tenure.App, work: Work, open_caller: Open
) -> None:
    caller = open_caller(SqlalchemyConnection)
    caller.conn.execution_options(isolation_level="AUTOCOMMIT")
    receipt = caller.enqueue(work, 1)
    assert app.get(receipt.id) is not None


def test_a_transaction_that_has_read_is_told_what_to_do(
    app: tenure.App, work: Work, open_caller: Open, ask: Callable[..., Any]
) -> None:
    ask("CREATE TABLE orders (n integer)")
    caller = open_caller(Django)
    caller.begin()
    caller.execute("SELECT * FROM orders")
    work.enqueue(1)  # somebody else writes meanwhile
    with pytest.raises(tenure.StoreBusy, match="transaction_mode"):
        caller.enqueue(work, 2)
    caller.rollback()


def test_a_writer_that_waits_for_the_caller(
    app: tenure.App, work: Work, caller: Caller, ask: Callable[..., Any]
) -> None:
    """An enqueue of ours beside a caller's open transaction waits for its commit."""
    caller.begin()
    caller.enqueue(work, 1)
    beside = threading.Thread(target=work.enqueue, args=(2,))
    beside.start()
    caller.execute("INSERT INTO orders VALUES (1)")
    caller.commit()
    beside.join(10)

    assert not beside.is_alive()
    assert sorted(job.payload["n"] for job in app.find()) == [1, 2]
