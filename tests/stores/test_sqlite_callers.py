"""`options(conn=…)` on SQLite beside other writers: whose transaction it is, and what stays as it
was on the caller's connection."""

from __future__ import annotations

import os
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import tenure
from crash.harness import eventually
from tenure.stores.sqlite import SqliteStore
from tenure.stores.sqlite.log import CHECKPOINT_BYTES, wal_reset_bug

from .sqlite_files import BUSY_WRITER, jobs, program

fragile = pytest.mark.skipif(
    not wal_reset_bug(sqlite3.sqlite_version_info),
    reason="this SQLite's automatic checkpoints are safe: they are left alone",
)
from_312 = pytest.mark.skipif(
    sys.version_info < (3, 12), reason="sqlite3.connect(autocommit=…) is new in Python 3.12"
)
ABSENT = "01ARZ3NDEKTSV4RRFFQ69G5FAV"
Task = tenure.Task[[int], None]
Connect = Callable[..., sqlite3.Connection]

ENQUEUER = """
import sys, tenure
app = tenure.App("sqlite:///" + sys.argv[1])

@app.task
def work(n: int) -> None: ...

work.enqueue(0)
print("ready", flush=True)
while True:
    work.enqueue(1)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "jobs.db"


@pytest.fixture
def app(path: Path) -> Iterator[tenure.App]:
    app = tenure.App(f"sqlite:///{path}")
    app.migrate()
    yield app
    app.close()


@pytest.fixture
def work(app: tenure.App) -> Task:
    @app.task
    def work(n: int) -> None: ...

    return work


@pytest.fixture
def connect(path: Path, app: tenure.App) -> Iterator[Connect]:
    opened: list[sqlite3.Connection] = []

    def connect(**options: Any) -> sqlite3.Connection:
        opened.append(sqlite3.connect(path, **options))
        return opened[-1]

    yield connect
    for db in opened:
        db.close()


def value(db: sqlite3.Connection, pragma: str) -> Any:
    return db.execute(f"PRAGMA {pragma}").fetchone()[0]


# -- beside writers that never pause -----------------------------------------------------------


@pytest.mark.parametrize("writer", [BUSY_WRITER, ENQUEUER], ids=["foreign", "ours"])
@pytest.mark.parametrize("keyed", [False, True], ids=["plain", "keyed"])
def test_an_autocommit_connection_waits_for_its_turn(
    app: tenure.App, work: Task, path: Path, connect: Connect, writer: str, keyed: bool
) -> None:
    db = connect(isolation_level=None)
    with program(writer, path):
        ids = [
            work.options(conn=db, key=f"k{n}" if keyed else None).enqueue(n).id for n in range(200)
        ]

    assert not db.in_transaction
    assert all(app.get(id) is not None for id in ids)


@pytest.mark.parametrize("writer", [BUSY_WRITER, ENQUEUER], ids=["foreign", "ours"])
@pytest.mark.parametrize("begin", [None, "BEGIN", "BEGIN IMMEDIATE"])
def test_a_transaction_that_has_not_read_waits_for_its_turn(
    app: tenure.App, work: Task, path: Path, connect: Connect, writer: str, begin: str | None
) -> None:
    db = connect(timeout=30)
    ids = []
    with program(writer, path):
        for n in range(50):
            if begin is not None:
                db.execute(begin)
            ids.append(work.options(conn=db, key=f"k{n}").enqueue(n).id)
            assert db.in_transaction
            db.commit()

    assert all(app.get(id) is not None for id in ids)


def test_two_autocommit_connections_of_two_threads(
    app: tenure.App, work: Task, connect: Connect
) -> None:
    failures: list[Exception] = []

    def enqueue(db: sqlite3.Connection) -> None:
        try:
            for n in range(100):
                work.options(conn=db, key=f"{id(db)}:{n}").enqueue(n)
        except Exception as error:
            failures.append(error)

    connections = [connect(isolation_level=None, check_same_thread=False) for _ in range(2)]
    threads = [threading.Thread(target=enqueue, args=(db,)) for db in connections]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert failures == []
    assert app.stats()["jobs"]["queued"] == 200


def test_the_caller_s_own_time_out_counts(work: Task, connect: Connect, path: Path) -> None:
    """For the gate as for the lock; and nobody who waits keeps others from the gate afterwards."""
    db, holder = connect(isolation_level=None, timeout=0.3), connect(isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    began = time.monotonic()
    with pytest.raises(tenure.StoreBusy):
        work.options(conn=db).enqueue(1)
    waited = time.monotonic() - began
    holder.execute("ROLLBACK")
    work.options(conn=db).enqueue(2)

    assert 0.3 <= waited < 5
    assert value(db, "busy_timeout") == 300


def test_a_caller_inside_a_transaction_never_waits_for_the_gate(
    app: tenure.App, work: Task, connect: Connect
) -> None:
    """Whoever stands in the gate waits for the write lock, and the caller holds that."""
    db = connect()
    db.execute("BEGIN IMMEDIATE")
    writing = threading.Thread(target=work.enqueue, args=(1,))
    writing.start()
    store: Any = app.store
    eventually(lambda: _is_shut(f"{store.file.path}-tenure.lock"), what="a writer in the gate")
    receipt = work.options(conn=db).enqueue(2)
    assert writing.is_alive()
    db.commit()
    writing.join(10)

    assert app.get(receipt.id) is not None
    assert app.stats()["jobs"]["queued"] == 2


def _is_shut(gate: str) -> bool:
    import fcntl

    handle = os.open(gate, os.O_RDWR)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


# -- Python 3.12's autocommit ------------------------------------------------------------------


@from_312
def test_autocommit_true_commits_at_once(app: tenure.App, work: Task, connect: Connect) -> None:
    db = connect(autocommit=True)
    first = work.options(conn=db).enqueue(1)
    assert not db.in_transaction
    assert app.get(first.id) is not None

    db.execute("BEGIN IMMEDIATE")
    second = work.options(conn=db).enqueue(2)
    db.execute("ROLLBACK")
    assert app.get(second.id) is None


@from_312
def test_autocommit_false_is_always_inside_a_transaction(
    app: tenure.App, work: Task, connect: Connect, path: Path
) -> None:
    db = connect(autocommit=False)
    with program(BUSY_WRITER, path):
        for n in range(20):
            kept = work.options(conn=db, key=f"k{n}").enqueue(n)
            db.commit()
            dropped = work.options(conn=db).enqueue(n)
            db.rollback()
            assert app.get(kept.id) is not None
            assert app.get(dropped.id) is None


# -- what stays as it was ----------------------------------------------------------------------


class Rows(sqlite3.Connection):
    """A connection whose cursors make rows of their own."""

    def cursor(self, *args: Any, **named: Any) -> Any:
        cursor = super().cursor(*args, **named)
        cursor.row_factory = lambda _cursor, row: {"row": row}
        return cursor


@pytest.mark.parametrize("style", [None, "", "IMMEDIATE"], ids=["autocommit", "plain", "immediate"])
@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("refused", [False, True], ids=["stored", "refused"])
def test_the_connection_is_left_as_it_was(
    app: tenure.App, work: Task, connect: Connect, style: str | None, inside: bool, refused: bool
) -> None:
    db = connect(isolation_level=style, timeout=7, factory=Rows)
    db.row_factory = sqlite3.Row
    db.text_factory = bytes
    if inside:
        db.execute("BEGIN")
    task = work.options(conn=db, key="k", after=[ABSENT] if refused else [])
    if refused:
        with pytest.raises(tenure.JobError, match="no such job"):
            task.enqueue(1)
        assert db.in_transaction == inside  # one that we began is not left holding the write lock
    else:
        first, second = task.enqueue(1), task.enqueue(2)
        assert second == tenure.Receipt(first.id, True, "queued")
        assert db.in_transaction == (inside or style is not None)
    if db.in_transaction:
        db.commit()

    assert (db.row_factory, db.text_factory) == (sqlite3.Row, bytes)
    assert db.isolation_level == style
    assert value(db, "busy_timeout") == 7000
    assert app.stats()["jobs"]["queued"] == (0 if refused else 1)


def test_an_open_cursor_goes_on(app: tenure.App, work: Task, connect: Connect) -> None:
    db = connect(isolation_level=None)
    db.execute("CREATE TABLE rows (n INTEGER)")
    db.executemany("INSERT INTO rows VALUES (?)", [(n,) for n in range(1000)])
    cursor = db.execute("SELECT n FROM rows ORDER BY n")
    assert cursor.fetchone() == (0,)

    work.options(conn=db).enqueue(1)
    with pytest.raises(tenure.JobError):
        work.options(conn=db, after=[ABSENT]).enqueue(2)

    assert [n for (n,) in cursor] == list(range(1, 1000))
    assert app.stats()["jobs"]["queued"] == 1


def test_a_cursor_that_reads_an_older_state_is_named(
    app: tenure.App, work: Task, connect: Connect
) -> None:
    db = connect(isolation_level=None)
    db.execute("CREATE TABLE rows (n INTEGER)")
    db.executemany("INSERT INTO rows VALUES (?)", [(n,) for n in range(1000)])
    cursor = db.execute("SELECT n FROM rows")
    cursor.fetchone()
    work.enqueue(1)

    with pytest.raises(tenure.StoreBusy, match="Fetch it to the end or close it"):
        work.options(conn=db).enqueue(2)
    cursor.close()
    work.options(conn=db).enqueue(3)
    assert app.stats()["jobs"]["queued"] == 2


# -- the log -----------------------------------------------------------------------------------


@fragile
def test_automatic_checkpoints_come_back_after_a_transaction_of_ours(
    work: Task, connect: Connect
) -> None:
    db = connect(isolation_level=None)
    db.execute("PRAGMA wal_autocheckpoint=321")
    work.options(conn=db).enqueue(1)
    assert value(db, "wal_autocheckpoint") == 321
    with pytest.raises(tenure.JobError):
        work.options(conn=db, after=[ABSENT]).enqueue(2)
    assert value(db, "wal_autocheckpoint") == 321


@fragile
@pytest.mark.parametrize("begin", [True, False], ids=["theirs", "begun for them"])
def test_they_stay_off_where_the_caller_commits(work: Task, connect: Connect, begin: bool) -> None:
    """At their COMMIT one would run without the write lock, and could lose a commit."""
    db = connect()
    if begin:
        db.execute("BEGIN IMMEDIATE")
    work.options(conn=db).enqueue(1)
    assert value(db, "wal_autocheckpoint") == 0
    db.commit()


@pytest.mark.parametrize("style", ["autocommit", "begun for them", "theirs"])
def test_producers_alone_keep_the_log_short(
    app: tenure.App, connect: Connect, path: Path, style: str
) -> None:
    """No worker, and nothing but enqueues on callers' connections: 80 MB of them. The watch has to
    find the gap between two transactions: a tenth of a millisecond, as short as they get."""
    db = connect(isolation_level=None if style == "autocommit" else "", timeout=60)
    longest = 0
    for _ in range(1600):
        job = jobs(1, size=50_000)
        if style == "theirs":
            db.execute("BEGIN IMMEDIATE")
        app.store.enqueue_on(db, job)
        if db.in_transaction:
            db.commit()
        longest = max(longest, os.path.getsize(f"{path}-wal"))

    assert longest < 7 * CHECKPOINT_BYTES


@fragile
def test_a_connection_that_enqueued_once_keeps_its_log_short(
    app: tenure.App, work: Task, connect: Connect, path: Path
) -> None:
    """Its automatic checkpoints are off, and it never calls us again."""
    db = connect(timeout=60)
    db.execute("CREATE TABLE mine (text TEXT)")
    with db:
        work.options(conn=db).enqueue(1)
    assert value(db, "wal_autocheckpoint") == 0
    db.execute("PRAGMA synchronous=OFF")
    for _ in range(3 * CHECKPOINT_BYTES // 1_000_000):
        with db:
            db.execute("INSERT INTO mine VALUES (?)", ("x" * 1_000_000,))
    full = os.path.getsize(f"{path}-wal")
    assert full > CHECKPOINT_BYTES

    def in_place() -> bool:
        """The log has been copied, so the next commit starts it anew and makes it no longer."""
        before = os.path.getsize(f"{path}-wal")
        with db:
            db.execute("INSERT INTO mine VALUES (?)", ("x" * 100_000,))
        return os.path.getsize(f"{path}-wal") == before

    eventually(in_place, within=20, every=0.1, what="a log that is written over")
    names = [thread.name for thread in threading.enumerate()]
    assert names.count("tenure-log") == 1
    app.close()
    eventually(
        lambda: "tenure-log" not in {thread.name for thread in threading.enumerate()},
        what="the end of the log's watch",
    )


def test_short_programs_beside_an_idle_one_keep_the_log_short(
    app: tenure.App, work: Task, path: Path
) -> None:
    """Each opens the file, enqueues a little and leaves, while another keeps it open and idles."""
    work.enqueue(0)
    with closing(sqlite3.connect(path, isolation_level=None)) as idle:
        idle.execute("SELECT count(*) FROM tenure_jobs").fetchone()
        longest = 0
        for _ in range(60):
            other = SqliteStore(str(path))
            other.enqueue(jobs(1, size=1_000_000))
            other.close()
            longest = max(longest, os.path.getsize(f"{path}-wal"))

    assert longest < 4 * CHECKPOINT_BYTES
