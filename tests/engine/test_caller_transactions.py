"""`options(conn=…)`: a job shares the fate of the caller's own transaction, on SQLite."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import tenure
from crash.harness import eventually
from places import only
from tenure.stores.sqlite.log import wal_reset_bug

pytestmark = only("sqlite", "connections of other drivers: test_postgres_callers.py")


@pytest.fixture
def work(app: tenure.App) -> tenure.Task[[int], int]:
    @app.task
    def work(n: int) -> int:
        return n

    app.migrate()
    return work


@pytest.fixture
def conn(path: Path, work: tenure.Task[[int], int]) -> Iterator[sqlite3.Connection]:
    db = sqlite3.connect(path, timeout=0.2)
    db.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, n INTEGER)")
    db.commit()
    yield db
    db.close()


def test_it_commits_with_the_caller(
    app: tenure.App, work: tenure.Task[[int], int], conn: sqlite3.Connection
) -> None:
    conn.execute("INSERT INTO orders (n) VALUES (1)")
    receipt = work.options(conn=conn).enqueue(1)

    assert conn.in_transaction
    assert app.get(receipt.id) is None
    conn.commit()
    job = app.get(receipt.id)
    assert job is not None
    assert (job.status, job.payload) == ("queued", {"n": 1})
    app.run_worker(drain=True)
    assert app.result(receipt.id) == 1


def test_it_rolls_back_with_the_caller(
    app: tenure.App,
    work: tenure.Task[[int], int],
    conn: sqlite3.Connection,
    count: Callable[[], int],
) -> None:
    conn.execute("INSERT INTO orders (n) VALUES (1)")
    receipt = work.options(conn=conn, key="k").enqueue(1)
    conn.rollback()

    assert app.get(receipt.id) is None
    assert count() == 0  # no key and no event either
    assert conn.execute("SELECT count(*) FROM orders").fetchone() == (0,)
    assert not work.options(key="k").enqueue(2).duplicate


def test_it_begins_a_transaction_where_an_insert_would(
    app: tenure.App, work: tenure.Task[[int], int], conn: sqlite3.Connection
) -> None:
    receipt = work.options(conn=conn).enqueue(1)

    assert conn.in_transaction
    conn.rollback()
    assert app.get(receipt.id) is None


def test_an_autocommit_connection_commits_at_once(
    app: tenure.App, work: tenure.Task[[int], int], path: Path
) -> None:
    db = sqlite3.connect(path, isolation_level=None)
    receipt = work.options(conn=db).enqueue(1)

    assert not db.in_transaction
    assert app.get(receipt.id) is not None
    db.execute("BEGIN IMMEDIATE")
    kept = work.options(conn=db).enqueue(2)
    db.execute("ROLLBACK")
    assert app.get(kept.id) is None
    db.close()


def test_a_row_factory_is_left_alone(
    app: tenure.App, work: tenure.Task[[int], int], conn: sqlite3.Connection
) -> None:
    conn.row_factory = sqlite3.Row

    first = work.options(conn=conn, key="k").enqueue(1)
    second = work.options(conn=conn, key="k").enqueue(2)
    conn.commit()

    assert second == tenure.Receipt(first.id, True, "queued")
    assert conn.row_factory is sqlite3.Row
    assert app.get(first.id) is not None


def test_a_savepoint_of_the_caller_can_be_rolled_back(
    app: tenure.App, work: tenure.Task[[int], int], conn: sqlite3.Connection
) -> None:
    conn.execute("BEGIN IMMEDIATE")
    kept = work.options(conn=conn).enqueue(1)
    conn.execute("SAVEPOINT mine")
    dropped = work.options(conn=conn).enqueue(2)
    conn.execute("ROLLBACK TO mine")
    conn.commit()

    assert app.get(kept.id) is not None
    assert app.get(dropped.id) is None


def test_a_batch_on_a_connection(
    app: tenure.App, work: tenure.Task[[int], int], conn: sqlite3.Connection
) -> None:
    with conn:
        conn.execute("INSERT INTO orders (n) VALUES (1)")
        receipts = app.enqueue_many([work.job(n) for n in range(10)], conn=conn)

    assert len(receipts) == 10
    assert app.stats()["jobs"]["queued"] == 10


def test_another_file_is_refused(
    app: tenure.App,
    work: tenure.Task[[int], int],
    tmp_path: Path,
    count: Callable[[], int],
) -> None:
    for target in (str(tmp_path / "other.db"), ":memory:"):
        db = sqlite3.connect(target)
        with pytest.raises(tenure.ConfigError, match="Connect to the same file"):
            work.options(conn=db).enqueue(1)
        db.close()
    assert count() == 0


def test_the_same_file_by_another_name_is_accepted(
    app: tenure.App, work: tenure.Task[[int], int], path: Path
) -> None:
    link = path.parent / "link.db"
    link.symlink_to(path)
    db = sqlite3.connect(link)
    with db:
        receipt = work.options(conn=db).enqueue(1)
    db.close()

    assert app.get(receipt.id) is not None


def test_a_transaction_that_has_read_is_told_to_begin_immediate(
    app: tenure.App, work: tenure.Task[[int], int], conn: sqlite3.Connection
) -> None:
    conn.isolation_level = None
    conn.execute("BEGIN")  # deferred
    conn.execute("SELECT * FROM orders").fetchall()
    work.enqueue(1)  # somebody else writes meanwhile

    with pytest.raises(tenure.StoreBusy, match="BEGIN IMMEDIATE"):
        work.options(conn=conn).enqueue(2)

    conn.execute("ROLLBACK")
    assert app.stats()["jobs"]["queued"] == 1


def test_a_file_without_tables_inside_a_transaction(
    path: Path, make_app: Callable[..., tenure.App]
) -> None:
    app = make_app()

    @app.task
    def work(n: int) -> None: ...

    db = sqlite3.connect(path)
    db.execute("CREATE TABLE orders (n INTEGER)")
    db.execute("INSERT INTO orders VALUES (1)")
    with pytest.raises(tenure.SchemaError, match=r"app.migrate\(\)"):
        work.options(conn=db).enqueue(1)
    db.commit()

    receipt = work.options(conn=db).enqueue(1)  # outside one, it migrates by itself
    db.commit()
    db.close()
    assert app.get(receipt.id) is not None


def test_a_bad_argument_leaves_the_caller_s_transaction_usable(
    app: tenure.App, work: tenure.Task[[int], int], conn: sqlite3.Connection
) -> None:
    conn.execute("INSERT INTO orders (n) VALUES (1)")
    with pytest.raises(tenure.ArgumentError):
        work.options(conn=conn).enqueue("one")  # type: ignore[arg-type]
    job = work.job(1)
    with pytest.raises(tenure.JobError, match="in this batch 2 times"):
        app.enqueue_many([job, job], conn=conn)
    receipt = work.options(conn=conn).enqueue(2)
    conn.commit()

    assert conn.execute("SELECT count(*) FROM orders").fetchone() == (1,)
    assert [found.id for found in app.find()] == [receipt.id]


def test_a_worker_sees_the_job_as_soon_as_the_caller_commits(
    app: tenure.App, work: tenure.Task[[int], int], conn: sqlite3.Connection
) -> None:
    with app.worker():
        conn.execute("INSERT INTO orders (n) VALUES (1)")
        receipt = work.options(conn=conn).enqueue(7)
        conn.commit()
        assert eventually(lambda: app.result(receipt.id, timeout=10)) == 7

    job = app.get(receipt.id)
    assert job is not None
    assert job.attempts == 1


def test_a_connection_we_join_makes_no_automatic_checkpoints(app: tenure.App) -> None:
    """Before SQLite 3.51.3 one that races a commit can lose it."""

    @app.task
    def work() -> None: ...

    app.migrate()
    db = sqlite3.connect(app.store.file.path)  # type: ignore[attr-defined]
    with db:
        work.options(conn=db).enqueue()
    (every,) = db.execute("PRAGMA wal_autocheckpoint").fetchone()
    db.close()

    assert every == (0 if wal_reset_bug(sqlite3.sqlite_version_info) else 1000)
