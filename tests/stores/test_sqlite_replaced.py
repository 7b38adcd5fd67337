"""The file, its log or its gate becomes another one under running programs."""

from __future__ import annotations

import os
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

import tenure
from tenure import errors
from tenure.stores.sqlite import SqliteStore
from tenure.wakeups.sqlite import SqliteWakeup

from .sqlite_files import TERMS, jobs, python

Replace = Callable[[Path], None]
ALL = ("", "-wal", "-shm")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "jobs.db"


@pytest.fixture
def store(path: Path) -> Iterator[SqliteStore]:
    store = SqliteStore(str(path), busy_timeout=2)
    yield store
    store.close()


def ids_at(path: Path) -> set[str]:
    """What somebody finds who opens the file that is at the path now."""
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        return {row[0] for row in db.execute("SELECT id FROM tenure_jobs")}


def copy_of(path: Path) -> Path:
    """A whole copy, as a backup makes it."""
    copy = path.with_name("backup.db")
    with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(copy)) as target:
        source.backup(target)
    return copy


def deleted(path: Path) -> None:
    for ending in ALL:
        path.with_name(path.name + ending).unlink(missing_ok=True)


def only_the_file_deleted(path: Path) -> None:
    path.unlink()


def moved_away(path: Path) -> None:
    path.rename(path.with_name("old.db"))


def emptied(path: Path) -> None:
    deleted(path)
    path.touch()


def restored(path: Path) -> None:
    deleted(path)
    path.with_name("backup.db").rename(path)


def restored_over_its_log(path: Path) -> None:
    """What people do: the -wal and -shm of the old file stay."""
    path.with_name("backup.db").replace(path)


WAYS = [deleted, only_the_file_deleted, moved_away, emptied, restored, restored_over_its_log]


@pytest.mark.parametrize("replace", WAYS)
def test_what_is_enqueued_afterwards_is_in_the_file_at_the_path(
    store: SqliteStore, path: Path, replace: Replace
) -> None:
    kept = {r.id for r in store.enqueue(jobs(50))}
    copy_of(path)
    lost = {r.id for r in store.enqueue(jobs(50))}
    replace(path)

    fresh = {r.id for r in store.enqueue(jobs(20))}
    fresh |= {r.id for r in store.enqueue([jobs(1)[0]._replace(key="k")])}

    expected = fresh | (kept if "restored" in replace.__name__ else set())
    assert ids_at(path) == expected
    assert store.totals().jobs["queued"] == len(expected)
    assert not lost & expected
    assert python(COUNT, path) == f"{len(expected)}\n"
    assert store.queue_names() == {TERMS.queue: False}
    if replace is moved_away:  # with what was in its log
        assert ids_at(path.with_name("old.db")) == kept | lost


COUNT = """
import sys
from tenure.stores.sqlite import SqliteStore
print(SqliteStore(sys.argv[1]).totals().jobs["queued"])
"""


@pytest.mark.parametrize("replace", [emptied, restored, restored_over_its_log])
def test_whoever_reads_sees_the_file_at_the_path(
    store: SqliteStore, path: Path, replace: Replace
) -> None:
    store.enqueue(jobs(50))
    copy_of(path)
    store.enqueue(jobs(50))
    replace(path)

    assert store.totals().jobs["queued"] == (0 if replace is emptied else 50)


@pytest.mark.parametrize("replace", [deleted, only_the_file_deleted, moved_away])
def test_only_an_enqueue_makes_a_file_where_one_was(
    store: SqliteStore, path: Path, replace: Replace
) -> None:
    """Whoever is about to put a backup there must not find a worker's empty one in its place."""
    store.enqueue(jobs(1))
    replace(path)
    for call in (
        store.totals,
        store.queue_names,
        store.data_version,
        lambda: store.renew(1),
        lambda: store.claim(1, [("default", 1)]),
    ):
        with pytest.raises(errors.StoreUnavailable, match="deleted or moved away"):
            call()
    assert not path.exists()

    assert len(store.enqueue(jobs(1))) == 1
    assert store.totals().jobs["queued"] == 1


def test_a_symbolic_link_that_leads_elsewhere_now(tmp_path: Path) -> None:
    first, second, link = (tmp_path / name for name in ("first.db", "second.db", "jobs.db"))
    link.symlink_to(first)
    store, other = SqliteStore(str(link)), SqliteStore(str(first))
    store.enqueue(jobs(3))
    other.enqueue(jobs(1))
    logs = [os.stat(f"{first}{ending}").st_ino for ending in ALL[1:]]
    link.unlink()
    link.symlink_to(second)
    second.touch()
    store.enqueue(jobs(2))
    other.enqueue(jobs(1))  # the first is still in use, with its log

    assert [os.stat(f"{first}{ending}").st_ino for ending in ALL[1:]] == logs
    assert (len(ids_at(first)), len(ids_at(second))) == (5, 2)
    store.close()
    other.close()


def test_threads_that_write_all_the_while(path: Path) -> None:
    """What is acknowledged after the replacement is in the new file, whoever wrote it."""
    store = SqliteStore(str(path), busy_timeout=30)
    store.enqueue(jobs(1))
    replaced, enough = threading.Event(), threading.Event()
    stored: list[str] = []
    failures: list[Exception] = []

    def enqueue() -> None:
        try:
            while not enough.is_set():
                begun_after = replaced.is_set()
                ids = [r.id for r in store.enqueue(jobs(2))]
                if begun_after:
                    stored.extend(ids)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=enqueue) for _ in range(4)]
    for thread in threads:
        thread.start()
    copy = copy_of(path)
    os.replace(copy, path)
    replaced.set()
    while len(stored) < 200 and not failures:
        threads[0].join(0.01)
    enough.set()
    for thread in threads:
        thread.join()

    assert failures == []
    assert set(stored) <= ids_at(path)
    store.close()


# -- a caller's connection ---------------------------------------------------------------------


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
def test_a_caller_s_connection_to_the_replaced_file_is_refused(path: Path, inside: bool) -> None:
    """Its job would be lost with the caller's own data."""
    app = tenure.App(f"sqlite:///{path}")

    @app.task
    def work(n: int) -> None: ...

    app.migrate()
    db = sqlite3.connect(path, isolation_level=None)
    work.options(conn=db).enqueue(1)
    restored(copy_of(path).with_name("jobs.db"))
    if inside:
        db.execute("BEGIN IMMEDIATE")
    for _ in range(2):
        with pytest.raises(tenure.StoreUnavailable, match="connect anew"):
            work.options(conn=db).enqueue(2)
    db.close()

    db = sqlite3.connect(path, isolation_level=None)
    receipt = work.options(conn=db).enqueue(3)
    db.close()
    assert receipt.id in ids_at(path)
    app.close()


# -- the log -----------------------------------------------------------------------------------


@pytest.mark.parametrize("endings", [("-wal",), ("-shm",), ("-wal", "-shm")], ids=" ".join)
def test_a_log_that_somebody_deletes(
    store: SqliteStore, path: Path, endings: tuple[str, ...]
) -> None:
    """Whoever has it open saves what is in it: commits go into the file, and a new log begins."""
    first = {r.id for r in store.enqueue(jobs(50))}
    for ending in endings:
        os.unlink(f"{path}{ending}")
    second: set[str] = set()
    while not all(os.path.exists(f"{path}{ending}") for ending in endings):
        second |= {r.id for r in store.enqueue(jobs(1))}
    second |= {r.id for r in store.enqueue(jobs(50))}

    assert python(COUNT, path) == f"{len(first | second)}\n"
    third = {r.id for r in store.enqueue(jobs(50))}
    assert ids_at(path) == first | second | third


def test_a_log_that_somebody_deletes_beside_another_program(store: SqliteStore, path: Path) -> None:
    other = SqliteStore(str(path), busy_timeout=2)
    stored = {r.id for r in store.enqueue(jobs(50))} | {r.id for r in other.enqueue(jobs(50))}
    os.unlink(f"{path}-wal")
    os.unlink(f"{path}-shm")
    while not os.path.exists(f"{path}-wal"):
        stored |= {r.id for r in store.enqueue(jobs(1))}
    for each in (other, store, other):
        stored |= {r.id for r in each.enqueue(jobs(10))}

    assert ids_at(path) == stored
    other.close()


# -- hints -------------------------------------------------------------------------------------


@pytest.mark.parametrize("replace", [emptied, restored, restored_over_its_log])
@pytest.mark.parametrize("watching", ["inotify", "counter"])
def test_hints_come_from_the_file_at_the_path(
    store: SqliteStore,
    path: Path,
    replace: Replace,
    watching: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if watching == "counter":
        monkeypatch.setattr("tenure.wakeups.sqlite._open_inotify", lambda _path: None)
    store.enqueue(jobs(1))
    hints = SqliteWakeup(str(path), store)
    copy_of(path)
    replace(path)
    assert hints.wait(10)  # of the replacement
    while hints.wait(0.3):
        pass
    other = SqliteStore(str(path))
    try:
        for _ in range(3):
            other.enqueue(jobs(1))
            assert hints.wait(10)
            while hints.wait(0.3):
                pass
        assert (hints.describe() == "hints: inotify on the write-ahead log") == (
            watching == "inotify"
        )
    finally:
        other.close()
        hints.close()


def test_another_mode_or_owner_is_no_replacement(store: SqliteStore, path: Path) -> None:
    """As root SQLite sets the owner of a log each time it opens one."""
    store.enqueue(jobs(1))
    hints = SqliteWakeup(str(path), store)
    while hints.wait(0.3):
        pass
    for name in (path, Path(f"{path}-wal")):
        name.chmod(0o600)
        os.chown(name, os.getuid(), os.getgid())
    assert not hints.wait(0.3)
    other = SqliteStore(str(path))
    other.enqueue(jobs(1))
    assert hints.wait(10)
    other.close()
    hints.close()


def test_a_hint_about_a_file_that_is_gone_does_not_spin(store: SqliteStore, path: Path) -> None:
    store.enqueue(jobs(1))
    hints = SqliteWakeup(str(path), store)
    saved = path.with_name("saved.db")
    deleted_copy = copy_of(path)
    shutil.copy(deleted_copy, saved)
    deleted(path)
    assert hints.wait(10)
    for _ in range(3):
        with pytest.raises(errors.StoreUnavailable):
            hints.wait(10)
    saved.rename(path)
    assert hints.wait(10)
    store.enqueue(jobs(1))
    assert store.totals().jobs["queued"] == 2
    hints.close()
