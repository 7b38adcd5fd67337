"""One SQLite file shared by many processes: transactions behind the gate, its log, migrations.

Why a gate: with SQLite's busy time-out alone, 8 writing processes saw "database is locked" and
between 46 and 37,341 commits each; behind `flock` on a file of our own, none and 7.7-15 k each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tenure import errors, sql
from tenure.stores.sqlite import explaining
from tenure.stores.sqlite.connections import Connections
from tenure.stores.sqlite.gate import Connection, place_of
from tenure.stores.sqlite.log import CHECKPOINT_BYTES, LONGEST_BYTES, LogWatch, wal_reset_bug

if TYPE_CHECKING:
    import sqlite3

SCHEMA_VERSION = 2


def wall_ms() -> int:
    return time.time_ns() // 1_000_000


class Writing:
    """`with file.write() as db:`; a generator would take 5 µs longer, a tenth of our part of an
    enqueue."""

    __slots__ = ("_connection", "_create", "_file")

    def __init__(self, file: SqliteFile, create: bool) -> None:
        self._file = file
        self._create = create

    def __enter__(self) -> sqlite3.Connection:
        self._connection = self._file.begin(self._create)
        return self._connection.db

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._file.end(self._connection, error)


class SqliteFile(Connections):
    def __init__(self, path: str, *, clock: Callable[[], int] = wall_ms, **options: Any) -> None:
        super().__init__(path, **options)
        self.clock = clock
        self.fragile = wal_reset_bug(self.module.sqlite_version_info)
        self._watcher: Connection | None = None
        self._log_watch: LogWatch | None = None

    # -- transactions -------------------------------------------------------------------------
    @contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """A connection outside any transaction: each statement sees the newest commit."""
        connection = self._in_place(self.busy_timeout)
        try:
            connection.wait_by_itself(self.busy_timeout)
            yield connection.db
        except self.module.Error as error:
            raise self.explain(error) from error
        finally:
            self._put(connection)

    def write(self, *, create: bool = False) -> Writing:
        """A write transaction: behind the gate, committed at the end of the block or not at all.
        Where the file has gone, only `create` makes another: whoever is about to put a backup
        there must not find an empty one in its place."""
        return Writing(self, create)

    def begin(self, create: bool = False) -> Connection:
        connection = self._inside(self.busy_timeout, create)
        try:
            connection.begin(self.busy_timeout)
            if self._log.full:
                self._empty_log(connection)
                connection.begin(self.busy_timeout)
        except BaseException as error:
            self._give_back(connection)
            if isinstance(error, self.module.Error):
                raise self.explain(error) from error
            raise
        return connection

    def end(self, connection: Connection, error: BaseException | None) -> None:
        """Commit, or roll back after an error, which is explained if it is SQLite's."""
        try:
            try:
                if error is None:
                    connection.db.execute("COMMIT")
            finally:
                self._give_back(connection)
        except self.module.Error as late:
            raise self.explain(late) from late
        if isinstance(error, self.module.Error):
            raise self.explain(error) from error

    @contextmanager
    def lend(self, limit: float) -> Iterator[sqlite3.Connection]:
        """A write transaction for somebody else's SQL, on a connection of its own. It holds the
        file's only write lock, so after `limit` seconds it is rolled back under their hands."""
        from tenure.stores.sqlite.lending import Loan, lent_connection

        connection = self._new(factory=lent_connection(self.module), cached_statements=0)
        loan = Loan(connection, limit, self.path)
        try:
            self._enter(connection, self.busy_timeout)
            connection.begin(self.busy_timeout)
            connection.wait_by_itself(self.busy_timeout)
            loan.start()
            yield connection.db
            loan.end()
            connection.db.execute("COMMIT")
        except (errors.StoreError, SystemError):
            loan.end()  # SystemError: Python's driver, when the rollback crosses another statement
            raise
        except self.module.Error as error:
            loan.end()
            raise self.explain(error) from error
        finally:
            loan.stop()
            self._close(connection)

    @contextmanager
    def gated(self, timeout: float) -> Iterator[None]:
        """The gate, for a transaction on somebody else's connection that is yet to begin."""
        connection = self._inside(timeout)
        try:
            if self._log.full:
                connection.begin(timeout)
                self._empty_log(connection)
            yield
        finally:
            self._give_back(connection)

    def shrink(self, pages: int, rounds: int = 10) -> None:
        """Give free pages back to the file system, in bounded rounds; a few are left for reuse."""
        for _ in range(rounds):
            with self.read() as db:
                free = db.execute("PRAGMA freelist_count").fetchone()[0]
            if free <= pages:
                return
            with self.write() as db:
                for _ in range(pages):  # Python's driver steps the pragma once: one page a call
                    db.execute("PRAGMA incremental_vacuum(1)")

    def data_version(self) -> int:
        """Moves when another connection commits, and when the file becomes another one."""
        watcher = self._watcher
        if watcher is None or watcher.place != place_of(self.name):
            self.open()
        if watcher is None or watcher.generation != self.generation:
            self._watcher = None
            if watcher is not None:
                self._close(watcher)
            self._watcher = watcher = self._new()
        version: int = watcher.db.execute("PRAGMA data_version").fetchone()[0]
        return self.generation << 32 | version

    def missing(self) -> bool:
        """No Tenure tables in the file yet; looks without taking any lock."""
        connection = self._connect()
        try:
            return self._version(connection.db) == 0
        except self.module.Error as error:
            raise self.explain(error) from error
        finally:
            self._close(connection)

    def close(self) -> None:
        if self._log_watch is not None:
            self._log_watch.stop()
        self._watcher, self._log_watch = None, None
        super().close()

    def after_fork(self) -> None:
        self._watcher, self._log_watch = None, None
        super().after_fork()

    # -- the log ------------------------------------------------------------------------------
    def _empty_log(self, holder: Connection) -> None:
        """While `holder` has the write lock, which it gives back: whoever writes next finds all of
        the log copied, and starts it anew."""
        other = self._borrow()
        try:
            _busy, frames, copied = other.db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
            holder.db.execute("ROLLBACK")
            self._log.emptied(frames == copied)
            if frames == copied and self._log.size >= LONGEST_BYTES:
                self._cut_log(holder)
        except self.module.Error:
            self._log.emptied(False)  # a full disk, perhaps: the write itself will tell
        finally:
            self._put(other)
            if holder.db.in_transaction:
                holder.db.execute("ROLLBACK")

    def _cut_log(self, holder: Connection) -> None:
        """By a commit that starts it anew: a TRUNCATE would need nobody to be writing."""
        db = holder.db
        db.execute(f"PRAGMA journal_size_limit={CHECKPOINT_BYTES}")
        try:
            holder.begin(self.busy_timeout)
            # A page must be written: SQLite sees through an UPDATE that changes nothing.
            statements = sql.statements("sqlite")
            db.execute(statements["add_queue"], {"queue": "", "now": 0})
            db.execute(statements["enqueue_lock"])
            db.execute("COMMIT")
            self._log.cut(self.path)
        finally:
            db.execute("PRAGMA journal_size_limit=-1")

    def empty_log_when_full(self, patience: float) -> None:
        self._log.look(self.path)
        if not self._log.full:
            return
        connection = self._inside(patience)
        try:
            connection.begin(patience)
            self._empty_log(connection)
        except self.module.Error as error:
            raise self.explain(error) from error
        finally:
            self._give_back(connection)

    def watch_log(self) -> None:
        """From now on this process keeps the log short, also while nobody calls."""
        if self._log_watch is None:
            self._log_watch = LogWatch(self)
        elif time.monotonic() >= self._log.look_at:
            self._log.look(self.path)
            if self._log.full:
                self._log_watch.tell()

    # -- first open and migrations ------------------------------------------------------------
    def _open_first(self, create: bool = True, *, waiting: bool = True) -> None:
        """Several processes may open a new file at once: all of it happens behind the gate."""
        connection = self._connect(create)
        try:
            (mode,) = connection.db.execute("PRAGMA journal_mode").fetchone()
            if self._version(connection.db) < SCHEMA_VERSION or mode != "wal":
                if not waiting:
                    raise errors.SchemaError(
                        f"{self.path} has no Tenure tables yet, or older ones, and your "
                        "transaction is open. Call app.migrate() once before it (at start-up)."
                    )
                self._migrate(connection)
        except BaseException as error:
            self._close(connection)
            if isinstance(error, self.module.Error):
                raise self.explain(error) from error
            raise
        self._opened(connection)

    def migrate(self) -> list[str]:
        connection = self._connect()
        try:
            names = self._migrate(connection)
        except BaseException as error:
            self._close(connection)
            if isinstance(error, self.module.Error):
                raise self.explain(error) from error
            raise
        self._opened(connection)
        return names

    def version(self) -> int:
        with self.read() as db:
            return self._version(db)

    def _migrate(self, connection: Connection) -> list[str]:
        """Each migration commits with its own stamp, so a killed run goes on where it stopped."""
        db, applied = connection.db, []
        self._enter(connection, self.busy_timeout)
        try:
            if db.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
                db.execute("PRAGMA auto_vacuum=INCREMENTAL")  # only a new, empty file takes it
                (mode,) = db.execute("PRAGMA journal_mode=WAL").fetchone()
                if mode != "wal":
                    raise explaining.no_log(self.path, mode)
            version = self._version(db)
            for migration in sql.migrations("sqlite"):
                if migration.version <= version:
                    continue
                db.execute("BEGIN IMMEDIATE")
                try:
                    for statement in split_statements(migration.text, self.module):
                        db.execute(statement)
                    db.execute(sql.stamp(migration), {"now": self.clock()})
                    if migration.version == 2:
                        db.execute(sql.statements("sqlite")["name_deaths"])
                    db.execute("COMMIT")
                except BaseException:
                    if db.in_transaction:
                        db.execute("ROLLBACK")
                    raise
                applied.append(f"{migration.version:04d}_{migration.name}")
        finally:
            connection.gate.leave()
        return applied

    def _version(self, db: sqlite3.Connection) -> int:
        known = db.execute(
            "SELECT 1 FROM sqlite_master WHERE name = 'tenure_migrations'"
        ).fetchone()
        if known is None:
            return 0
        version: int = db.execute(
            "SELECT coalesce(max(version), 0) FROM tenure_migrations"
        ).fetchone()[0]
        if version <= SCHEMA_VERSION:
            return version
        (needed,) = db.execute(
            "SELECT max(compatible_from) FROM tenure_migrations WHERE pack = 'tenure'"
        ).fetchone()
        if needed > SCHEMA_VERSION:
            raise errors.SchemaError(
                f"{self.path} has schema version {version} and needs a Tenure that knows version "
                f"{needed}; this one knows {SCHEMA_VERSION}. Upgrade Tenure here, or point it at "
                "another file."
            )
        return version


def split_statements(text: str, module: Any) -> list[str]:
    """Triggers contain semicolons, so ask SQLite where a statement ends."""
    found, buffer = [], ""
    for line in text.splitlines():
        if not buffer and (not line.strip() or line.startswith("--")):
            continue
        buffer += line + "\n"
        if module.complete_statement(buffer):
            found.append(buffer.strip())
            buffer = ""
    return found
