"""Enqueue on somebody else's connection: their transaction, or ours where none is open.

Whoever has begun a transaction may hold SQLite's write lock, and whoever stands in the gate may be
waiting for that: so the gate is only entered before a transaction begins, never inside one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tenure import errors
from tenure.stores.sqlite.gate import (
    IMPATIENT,
    SQLITE_BUSY_SNAPSHOT,
    begin_immediate,
    error_code,
    place_of,
)

if TYPE_CHECKING:
    import sqlite3

    from tenure.stores.sqlite.file import SqliteFile

LEGACY_CONTROL = -1  # sqlite3.LEGACY_TRANSACTION_CONTROL, from Python 3.12 on


@contextmanager
def joined(file: SqliteFile, connection: Any, lock: str) -> Iterator[sqlite3.Cursor]:
    """A cursor of the caller's connection, inside a transaction. `lock` is a statement that writes
    nothing and takes the write lock.

    Inside a transaction of theirs: a savepoint of it. Outside one: where an INSERT of theirs would
    begin one, so do we, for them to commit; on an autocommitting connection it is ours, committed
    at the end. What went wrong leaves everything as it was.
    """
    _require_kind(file, connection)
    cursor = connection.cursor()
    cursor.row_factory = None
    texts, connection.text_factory = connection.text_factory, str
    try:
        _require_file(file, cursor)
        if connection.in_transaction:
            with _savepoint(file, cursor, lock):
                yield cursor
        elif _autocommits(connection):
            with _own_transaction(file, cursor):
                yield cursor
        else:
            with _their_new_transaction(file, cursor):
                yield cursor
    except file.module.Error as error:
        raise _explain(file, connection, error) from error
    finally:
        connection.text_factory = texts


def _autocommits(connection: Any) -> bool:
    control = getattr(connection, "autocommit", LEGACY_CONTROL)
    if control == LEGACY_CONTROL:
        return connection.isolation_level is None
    return bool(control)


@contextmanager
def _savepoint(file: SqliteFile, cursor: sqlite3.Cursor, lock: str) -> Iterator[None]:
    cursor.execute("SAVEPOINT tenure_enqueue")
    try:
        # First: a transaction that has done nothing yet waits here for its turn. Had it read
        # before, it would be told at once that another has written since.
        cursor.execute(lock)
        if file.fragile and _automatic_checkpoints(cursor):
            # Theirs would run at their COMMIT, without the write lock, and could lose a commit.
            cursor.execute("PRAGMA wal_autocheckpoint=0")
        yield
    except BaseException:
        cursor.execute("ROLLBACK TO tenure_enqueue")
        raise
    finally:
        cursor.execute("RELEASE tenure_enqueue")
    if file.fragile:
        file.watch_log()


@contextmanager
def _their_new_transaction(file: SqliteFile, cursor: sqlite3.Cursor) -> Iterator[None]:
    with _impatient(cursor) as timeout, file.gated(timeout):
        begin_immediate(cursor, timeout)
    try:
        if file.fragile and _automatic_checkpoints(cursor):
            cursor.execute("PRAGMA wal_autocheckpoint=0")
        yield
    except BaseException:
        cursor.execute("ROLLBACK")
        raise
    if file.fragile:
        file.watch_log()


@contextmanager
def _own_transaction(file: SqliteFile, cursor: sqlite3.Cursor) -> Iterator[None]:
    every = _automatic_checkpoints(cursor) if file.fragile else 0
    with _impatient(cursor) as timeout, file.gated(timeout):
        begin_immediate(cursor, timeout)
        try:
            if every:
                cursor.execute("PRAGMA wal_autocheckpoint=0")
            yield
            cursor.execute("COMMIT")
        except BaseException:
            if cursor.connection.in_transaction:
                cursor.execute("ROLLBACK")
            raise
        finally:
            if every:
                cursor.execute(f"PRAGMA wal_autocheckpoint={every}")


@contextmanager
def _impatient(cursor: sqlite3.Cursor) -> Iterator[float]:
    """Their time-out in seconds, which we use up ourselves meanwhile (see `begin_immediate`)."""
    (milliseconds,) = cursor.execute("PRAGMA busy_timeout").fetchone()
    cursor.execute(IMPATIENT)
    try:
        yield milliseconds / 1000
    finally:
        cursor.execute(f"PRAGMA busy_timeout={milliseconds}")


def _automatic_checkpoints(cursor: sqlite3.Cursor) -> int:
    every: int = cursor.execute("PRAGMA wal_autocheckpoint").fetchone()[0]
    return every


# -- the right file --------------------------------------------------------------------------------


def _require_kind(file: SqliteFile, connection: Any) -> None:
    module = file.module
    if not isinstance(connection, module.Connection):
        raise errors.ConfigError(
            f"conn= got a {type(connection).__module__}.{type(connection).__name__}; this app "
            f"stores jobs in SQLite and can join a {module.__name__}.Connection only."
        )


def _require_file(file: SqliteFile, cursor: sqlite3.Cursor) -> None:
    if file.place is None or place_of(file.name) != file.place:
        file.open(waiting=not cursor.connection.in_transaction)
    if not any(
        row[1] == "main" and row[2] and (row[2] == file.path or place_of(row[2]) == file.place)
        for row in cursor.execute("PRAGMA database_list")
    ):
        raise errors.ConfigError(
            f"conn= is open on another database than this app's {file.path}: the job would "
            "not commit with your data. Connect to the same file."
        )
    if file.left:
        if _open_here(file.left):
            raise errors.StoreUnavailable(
                f"{file.path} was replaced, and this program still has a connection open on the "
                "file that was there before: what is written to it is lost. Close your connections "
                "to it and connect anew, or restart the program."
            )
        file.left.clear()


def _open_here(places: set[tuple[int, int]]) -> bool:
    """Has this process a handle on one of these files? (Not known where there is no /dev/fd.)"""
    try:
        handles = [int(name) for name in os.listdir("/dev/fd")]
    except OSError:
        return False
    for handle in handles:
        try:
            status = os.fstat(handle)
        except OSError:
            continue  # the one that listed them
        if (status.st_dev, status.st_ino) in places:
            return True
    return False


def _explain(file: SqliteFile, connection: Any, error: Exception) -> errors.StoreError:
    if error_code(error) == SQLITE_BUSY_SNAPSHOT:
        if connection.in_transaction:
            return errors.StoreBusy(
                "Your transaction has read from this file and can no longer write: another "
                "connection has written since. Start it with BEGIN IMMEDIATE, then enqueue."
            )
        return errors.StoreBusy(
            "A cursor of your connection is still reading this file, and another connection has "
            "written since. Fetch it to the end or close it, then enqueue."
        )
    return file.explain(error)
