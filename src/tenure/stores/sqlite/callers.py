"""Enqueue on somebody else's connection: their transaction, or ours where none is open.

Whatever library it belongs to, the statements go to the driver's connection behind it, on the
thread that it is used from; the library only has to know that a transaction is open. Whoever waits
for the commit is woken by the write to the log, as after a commit of ours.

Whoever has begun a transaction may hold SQLite's write lock, and whoever stands in the gate may be
waiting for that: so the gate is only entered before a transaction begins, never inside one.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from tenure import errors
from tenure.stores import libraries
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
JOINED = (
    "an aiosqlite Connection, a SQLAlchemy Connection, Session, AsyncConnection or AsyncSession, "
    "or Django's connection"
)
AIOSQLITE = {"aiosqlite.core.Connection": "aiosqlite"}
T = TypeVar("T")


def run_on(
    file: SqliteFile, connection: Any, lock: str, work: Callable[[sqlite3.Cursor], T]
) -> T | Awaitable[T]:
    """`work`, with a cursor in the caller's transaction; a coroutine where it has to be awaited."""
    if libraries.known_as(connection, AIOSQLITE) is not None:
        return _on_aiosqlite(file, connection, lock, work)
    if libraries.known_as(connection, libraries.SQLALCHEMY_ASYNC) is not None:
        return _on_async(file, connection, lock, work)
    return _on_driver(file, driver_of(file, connection), lock, work)


def _on_driver(
    file: SqliteFile, connection: Any, lock: str, work: Callable[[sqlite3.Cursor], T]
) -> T:
    with joined(file, connection, lock) as cursor:
        return work(cursor)


async def _on_aiosqlite(
    file: SqliteFile, connection: Any, lock: str, work: Callable[[sqlite3.Cursor], T]
) -> T:
    """On its own thread, which alone may use the driver's connection."""
    call = partial(_on_driver, file, connection._conn, lock, work)
    found: T = await connection._execute(call)
    return found


async def _on_async(
    file: SqliteFile, target: Any, lock: str, work: Callable[[sqlite3.Cursor], T]
) -> T:
    if libraries.known_as(target, libraries.SQLALCHEMY_ASYNC) == "registry":
        target = target()
    return await _on_aiosqlite(file, await target.run_sync(partial(driver_of, file)), lock, work)


def driver_of(file: SqliteFile, connection: Any) -> Any:
    """The driver's connection behind a library's, which knows that a transaction is open on it:
    a commit of one that knows of none would do nothing."""
    if isinstance(connection, file.module.Connection):
        return connection
    if (kind := libraries.known_as(connection, libraries.SQLALCHEMY)) is not None:
        target = connection() if kind == "registry" else connection
        if hasattr(target, "flush"):  # a Session
            target = target.connection()
        if target.dialect.name != "sqlite":
            libraries.refuse_database(connection, target.dialect.name, "SQLite")
        if not target.in_transaction():
            target.begin()
        return target.connection.driver_connection
    if libraries.known_as(connection, libraries.DJANGO) is not None:
        if connection.vendor != "sqlite":
            libraries.refuse_database(connection, connection.vendor, "SQLite")
        with connection.cursor():  # connects; refuses other threads and event loops
            connection.validate_no_broken_transaction()
        return connection.connection
    raise errors.ConfigError(
        f"conn= got {libraries.described(connection)}; this app stores jobs in SQLite and can join "
        f"a {file.module.__name__} Connection, {JOINED}."
    )


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


def take_write_lock(file: SqliteFile, connection: Any, lock: str) -> None:
    """Make the transaction that is open on their connection, or a new one, a write transaction,
    for them to end."""
    _require_kind(file, connection)
    cursor = connection.cursor()
    cursor.row_factory = None
    try:
        _require_file(file, cursor)
        if connection.in_transaction:
            cursor.execute(lock)
        else:
            with _impatient(cursor) as timeout, file.gated(timeout):
                begin_immediate(cursor, timeout)
        if file.fragile and _automatic_checkpoints(cursor):
            cursor.execute("PRAGMA wal_autocheckpoint=0")
    except file.module.Error as error:
        raise _explain(file, connection, error) from error


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
    """Two copies of SQLite in one process, on one file, would lose each other's locks."""
    if not isinstance(connection, file.module.Connection):
        raise errors.ConfigError(
            f"behind conn= is {libraries.described(connection)}, but this app uses the module "
            f"{file.module.__name__} (TENURE_SQLITE_MODULE): use the same one in both"
        )


def _require_file(file: SqliteFile, cursor: sqlite3.Cursor) -> None:
    if file.place is None or place_of(file.name) != file.place:
        file.open(waiting=not cursor.connection.in_transaction)
    theirs = next(row[2] for row in cursor.execute("PRAGMA database_list") if row[1] == "main")
    if not theirs or (theirs != file.path and place_of(theirs) != file.place):
        raise errors.ConfigError(
            f"conn= is open on {theirs or 'a database in memory'}, and this app's jobs are in "
            f"{file.path}: they would not commit with your data. Connect to the same file."
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
                "connection has written since. Start it with BEGIN IMMEDIATE (Django: "
                '"transaction_mode": "IMMEDIATE" in OPTIONS; SQLAlchemy: docs/sqlalchemy.md), '
                "then enqueue."
            )
        return errors.StoreBusy(
            "A cursor of your connection is still reading this file, and another connection has "
            "written since. Fetch it to the end or close it, then enqueue."
        )
    return file.explain(error)
