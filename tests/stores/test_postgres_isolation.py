"""A role or a database whose default is SERIALIZABLE or REPEATABLE READ: that is for programs of
their own. Our statements run READ COMMITTED, and what a conflict ended is done again, uncharged."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

import servers
import tenure
from crash.harness import eventually

LEVELS = ["repeatable read", "serializable"]
JOBS = 63
ONCE = tenure.Retry(attempts=1)


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def url(level: str, make_database: Callable[..., str], postgres: servers.Databases) -> str:
    """Every session on it begins with that default."""
    url = make_database(migrated=True)
    name = url.rpartition("/")[2]
    postgres.execute(f"ALTER DATABASE {name} SET default_transaction_isolation = '{level}'")
    return url


@pytest.fixture
def app(url: str) -> Iterator[tenure.App]:
    app = tenure.App(url, lease_seconds=6, lease_renew_seconds=1)
    yield app
    app.close()


@pytest.fixture
def ask(url: str) -> Iterator[Callable[..., Any]]:
    with psycopg.connect(url, autocommit=True) as connection:

        def ask(statement: str) -> Any:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []

        yield ask


def outcomes(app: tenure.App) -> set[tuple[str, int]]:
    return {(job.status, job.attempts) for job in app.find()}


# -- our own connections --------------------------------------------------------------------------


def test_our_sessions_are_read_committed(app: tenure.App, level: str, ask: Any) -> None:
    assert ask("SHOW default_transaction_isolation") == [(level,)]
    assert app.store.database.run("SHOW transaction_isolation") == [("read committed",)]
    assert app.store.database.retries == 0


def test_behind_a_pooler_each_statement_says_so(
    url: str, level: str, pgbouncer: servers.Pgbouncer, ask: Any
) -> None:
    """Sessions are shared there: what we set would be there for everybody."""
    app = tenure.App(pgbouncer.url(url.rpartition("/")[2]), listen_url=url)
    app.task(retry=ONCE)(plus_one)
    assert app.store.database.run("SHOW transaction_isolation") == [("read committed",)]
    with psycopg.connect(app.settings.url, autocommit=True, prepare_threshold=None) as other:
        assert other.execute("SHOW transaction_isolation").fetchall() == [(level,)]
    first = app.enqueue("plus_one", {"n": 1})
    app.enqueue_many([app.tasks["plus_one"].job(n) for n in range(2, 20)])
    assert app.enqueue("plus_one", {"n": 20}, key="k").id != first.id
    with pytest.raises(tenure.JobError):
        app.enqueue("plus_one", {"n": 21}, after=["01ARZ3NDEKTSV4RRFFQ69G5FAV"])
    app.run_worker(drain=True)
    assert outcomes(app) == {("completed", 1)}
    app.close()


def plus_one(n: int) -> int:
    return n + 1


def test_jobs_of_one_attempt_are_none_the_worse(app: tenure.App, url: str) -> None:
    """Two workers beside a program that enqueues and looks: each of them in everybody's way."""
    app.task(retry=ONCE)(plus_one)
    other = tenure.App(url, lease_seconds=6, lease_renew_seconds=1)
    other.task(retry=ONCE)(plus_one)
    with app.worker(concurrency=8), other.worker(concurrency=8):
        for n in range(JOBS):
            app.enqueue("plus_one", {"n": n}, key=f"key {n // 2}" if n % 3 == 0 else None)
        eventually(lambda: {job.status for job in app.find()} == {"completed"}, within=60)
    assert outcomes(app) == {("completed", 1)}
    assert app.store.database.retries + other.store.database.retries == 0
    other.close()


# -- a handler's transaction ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_handlers_transaction_has_the_roles_default_and_costs_nothing_when_it_conflicts(
    app: tenure.App, level: str, ask: Any, kind: str
) -> None:
    """Its SQL was written for that default. Each reads what the others write: in SERIALIZABLE any
    statement may be the one that is told so, theirs, ours or the COMMIT."""
    ask("CREATE TABLE ledger (n integer, level text)")
    insert = """
        INSERT INTO ledger SELECT %s, current_setting('transaction_isolation')
          FROM (SELECT count(*) FROM ledger) looked"""

    def pay(ctx: tenure.Context, n: int) -> None:
        with ctx.transaction() as conn:
            conn.execute(insert, [n])

    async def apay(ctx: tenure.Context, n: int) -> None:
        async with ctx.transaction() as conn:
            await conn.execute(insert, [n])

    task: Any = app.task(name="pay", retry=ONCE)(pay if kind == "def" else apay)
    app.enqueue_many([task.job(n) for n in range(JOBS)])
    app.run_worker(concurrency=8, drain=True)
    with app.worker(concurrency=8):  # a drain does not wait for those that go back
        eventually(lambda: {job.status for job in app.find()} == {"completed"}, within=60)
    assert outcomes(app) == {("completed", 1)}
    assert sorted(ask("SELECT * FROM ledger")) == [(n, level) for n in range(JOBS)]


def test_a_conflict_for_certain_goes_back_uncharged(
    app: tenure.App, url: str, ask: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Between its first statement and its end somebody changes the row that it is to end."""
    ask("CREATE TABLE ledger (n integer)")

    @app.task(retry=ONCE)
    def pay(ctx: tenure.Context) -> None:
        with ctx.transaction() as conn:
            conn.execute("INSERT INTO ledger VALUES (%s)", [ctx.job.lease_no])
            if ctx.job.lease_no == 1:
                ask("UPDATE tenure.jobs SET progress = '1'")

    id = pay.enqueue().id
    with app.worker():
        eventually(lambda: app.get(id).status != "queued", what="its first run")
        eventually(lambda: app.get(id).terminal, within=30, what="its end")
    job = app.get(id)
    assert (job.status, job.attempts, job.error) == ("completed", 1, None)
    assert len(ask("SELECT n FROM ledger")) == 1
    assert "uncharged" in caplog.text
    assert [event.kind for event in app.events(id)].count("job.released") == 1


# -- a caller's transaction -----------------------------------------------------------------------


def test_a_new_queue_name_leaves_a_callers_transaction_alone(
    app: tenure.App, url: str, ask: Any
) -> None:
    """Their snapshot is older than the name, whoever has stored it."""
    app.task(retry=ONCE)(plus_one)
    task = app.tasks["plus_one"]
    ask("CREATE TABLE orders (n integer)")
    with psycopg.connect(url) as mine:
        mine.execute("INSERT INTO orders VALUES (1)")
        ask("INSERT INTO tenure.queues (name, created_at) VALUES ('by-others', 0)")
        stored = [
            task.options(conn=mine, queue=queue, key=queue).enqueue(1).id
            for queue in ("by-others", "by-us", "by-us")
        ]
        mine.execute("INSERT INTO orders VALUES (2)")
        mine.commit()
    assert ask("SELECT count(*) FROM orders") == [(2,)]
    assert stored[1] == stored[2]
    assert {job.id for job in app.find()} == set(stored)


def test_callers_meet_in_no_row_of_ours(make_database: Callable[..., str]) -> None:
    """Many at once, in queues that all of them use for the first time. (SERIALIZABLE may refuse
    whom it cannot place, as with any table: those are theirs to repeat.)"""
    url = make_database(migrated=True)
    app = tenure.App(url)
    app.task(retry=ONCE)(plus_one)
    began = threading.Barrier(3)
    done: list[int] = []

    def enqueue(who: int) -> None:
        with psycopg.connect(url) as mine:
            mine.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            for n in range(20):
                mine.execute("SELECT 1")  # their snapshot
                began.wait(30)
                app.tasks["plus_one"].options(conn=mine, queue=f"q{n}").enqueue(who)
                mine.commit()
                done.append(n)

    threads = [threading.Thread(target=enqueue, args=[who]) for who in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(done) == len(list(app.find())) == 60
    app.close()
