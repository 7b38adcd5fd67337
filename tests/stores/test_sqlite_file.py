"""What the contract does not see: the log, the gate, the file itself."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tenure import errors
from tenure.stores.sqlite import SqliteStore
from tenure.stores.sqlite.log import CHECKPOINT_BYTES, wal_reset_bug

from .sqlite_files import jobs


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "jobs.db"


@pytest.fixture
def store(path: Path) -> Iterator[SqliteStore]:
    store = SqliteStore(str(path), busy_timeout=0.2)
    yield store
    store.close()


def test_the_file_is_durable_by_default(store: SqliteStore) -> None:
    store.migrate()
    with store.file.read() as db:
        assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert db.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL
        assert db.execute("PRAGMA wal_autocheckpoint").fetchone() == (0,)
        assert db.execute("PRAGMA auto_vacuum").fetchone() == (2,)  # incremental


def test_the_log_stays_bounded(store: SqliteStore, path: Path) -> None:
    for _ in range(40):  # about 80 MB of writes
        store.enqueue(jobs(200, size=8_000))

    assert os.path.getsize(f"{path}-wal") < 3 * CHECKPOINT_BYTES
    assert store.totals().jobs["queued"] == 8_000


def test_an_old_reader_delays_the_log_but_nobody_waits_for_it(
    store: SqliteStore, path: Path
) -> None:
    store.migrate()
    reader = sqlite3.connect(path, isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM tenure_jobs").fetchone()
    for _ in range(20):
        store.enqueue(jobs(200, size=8_000))
    grown = os.path.getsize(f"{path}-wal")
    reader.execute("COMMIT")
    reader.close()
    for _ in range(20):
        store.enqueue(jobs(200, size=8_000))

    assert grown > CHECKPOINT_BYTES  # it could not be reset then
    assert os.path.getsize(f"{path}-wal") < 3 * CHECKPOINT_BYTES  # and was cut afterwards
    assert store.totals().jobs["queued"] == 8_000


def test_a_writer_that_stands_in_the_gate_is_named_after_the_time_out(store: SqliteStore) -> None:
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with store.file.write():
            inside.set()
            leave.wait(10)

    holder = threading.Thread(target=hold)
    holder.start()
    inside.wait(10)
    with pytest.raises(errors.StoreBusy, match="Nothing was changed"):
        store.enqueue(jobs(1))
    leave.set()
    holder.join()

    assert len(store.enqueue(jobs(1))) == 1  # the gate given up late is open again


def test_a_foreign_transaction_is_waited_for_and_then_named(store: SqliteStore, path: Path) -> None:
    store.migrate()
    foreign = sqlite3.connect(path, isolation_level=None)
    foreign.execute("BEGIN IMMEDIATE")
    with pytest.raises(errors.StoreBusy, match="keep transactions on this file short"):
        store.enqueue(jobs(1))
    foreign.execute("ROLLBACK")
    foreign.close()

    assert store.totals().jobs["queued"] == 0
    assert len(store.enqueue(jobs(1))) == 1


def test_a_killed_migration_goes_on_where_it_stopped(store: SqliteStore, path: Path) -> None:
    assert store.migrate() == ["0001_initial", "0002_promises"]
    assert store.migrate() == []
    with sqlite3.connect(path) as db:
        db.execute("DELETE FROM tenure_migrations")  # as if it had died before its stamp
    db.close()

    with pytest.raises(errors.StoreUnavailable):
        store.migrate()  # the tables are there: this is not silently taken for done


@pytest.mark.parametrize(
    ("version", "affected"),
    [
        ((3, 40, 1), True),
        ((3, 44, 5), True),
        ((3, 44, 6), False),
        ((3, 50, 6), True),
        ((3, 50, 7), False),
        ((3, 51, 2), True),
        ((3, 51, 3), False),
        ((3, 53, 0), False),
    ],
)
def test_which_versions_lose_commits(version: tuple[int, ...], affected: bool) -> None:
    assert wal_reset_bug(version) is affected
