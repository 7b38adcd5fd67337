"""One SQLite file shared by many processes: connections, the write gate, checkpoints, migrations.

Why a gate: with SQLite's busy time-out alone, 8 writing processes saw "database is locked" and
between 46 and 37,341 commits each; behind `flock` on a file of our own, none and 7.7-15 k each.
Why our own checkpoints: before 3.51.3 an automatic checkpoint racing a commit can lose it, so
automatic ones are off and we truncate the log ourselves, under the gate.
"""

from __future__ import annotations

import fcntl
import importlib
import os
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from tenure import errors, sql
from tenure.stores.rows import death_handle
from tenure.stores.sqlite import explaining
from tenure.stores.sqlite.gate import Connection, GateWaiter

if TYPE_CHECKING:
    import sqlite3

SCHEMA_VERSION = 2
CHECKPOINT_BYTES = 8 * 1024 * 1024
LOOK_AT_LOG_EVERY = 0.02
FIXED_VERSIONS = ((3, 51, 3), (3, 50, 7), (3, 44, 6))


def wall_ms() -> int:
    return time.time_ns() // 1_000_000


def wal_reset_bug(version: tuple[int, ...]) -> bool:
    """SQLite 3.7.0 to 3.51.2 can lose a commit that races an automatic checkpoint."""
    if version >= (3, 51, 3):
        return False
    return not any(version[:2] == fixed[:2] and version >= fixed for fixed in FIXED_VERSIONS)


class Writing:
    """`with file.write() as db:`; a generator would take 5 µs longer, a tenth of our part of an
    enqueue."""

    __slots__ = ("_connection", "_file")

    def __init__(self, file: SqliteFile) -> None:
        self._file = file

    def __enter__(self) -> sqlite3.Connection:
        self._connection = self._file.begin()
        return self._connection.db

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._file.end(self._connection, error)


class SqliteFile:
    def __init__(
        self,
        path: str,
        *,
        clock: Callable[[], int] = wall_ms,
        busy_timeout: float = 15.0,
        module: str = "sqlite3",
    ) -> None:
        self.path = os.path.abspath(path)
        self.clock = clock
        self.busy_timeout = busy_timeout
        self.module: Any = importlib.import_module(module)
        self._idle: list[Connection] = []
        self._all: list[Connection] = []
        self._inherited: list[Connection] = []
        self._watcher: Connection | None = None
        self._ready = False
        self._look_at_log = 0.0
        self._next_checkpoint = 0  # unknown until the first write
        this = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _forget(this()))

    # -- connections --------------------------------------------------------------------------
    @contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """A connection outside any transaction: each statement sees the newest commit."""
        connection = self._borrow()
        try:
            yield connection.db
        except self.module.Error as error:
            raise self.explain(error) from error
        finally:
            self._idle.append(connection)

    def write(self) -> Writing:
        """A write transaction: behind the gate, committed at the end of the block or not at all."""
        return Writing(self)

    def begin(self) -> Connection:
        connection = self._borrow()
        try:
            self._enter(connection)
            try:
                self._checkpoint_when_large(connection.db)
                connection.db.execute("BEGIN IMMEDIATE")
            except BaseException:
                fcntl.flock(connection.gate, fcntl.LOCK_UN)
                raise
        except BaseException as error:
            self._idle.append(connection)
            if isinstance(error, self.module.Error):
                raise self.explain(error) from error
            raise
        return connection

    def end(self, connection: Connection, error: BaseException | None) -> None:
        """Commit, or roll back after an error, which is explained if it is SQLite's."""
        db = connection.db
        try:
            try:
                if error is None:
                    db.execute("COMMIT")
            finally:
                try:
                    if db.in_transaction:
                        db.execute("ROLLBACK")
                finally:
                    fcntl.flock(connection.gate, fcntl.LOCK_UN)
        except self.module.Error as late:
            raise self.explain(late) from late
        finally:
            self._idle.append(connection)
        if isinstance(error, self.module.Error):
            raise self.explain(error) from error

    @contextmanager
    def lend(self, limit: float) -> Iterator[sqlite3.Connection]:
        """A write transaction for somebody else's SQL, on a connection of its own. It holds the
        file's only write lock, so after `limit` seconds it is rolled back under their hands."""
        from tenure.stores.sqlite.lending import Loan, lent_connection

        if not self._ready:
            self._open_first()
        connection = self._connect(factory=lent_connection(self.module), cached_statements=0)
        loan = Loan(connection, limit, self.path)
        try:
            self._enter(connection)
            connection.db.execute("BEGIN IMMEDIATE")
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
            connection.db.close()  # an open transaction is rolled back
            os.close(connection.gate)  # and the gate opened

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

    @property
    def ready(self) -> bool:
        """This process has seen the schema up to date."""
        return self._ready

    def missing(self) -> bool:
        """No Tenure tables in the file yet; looks without taking any lock."""
        connection = self._connect()
        try:
            return self._version(connection.db) == 0
        except self.module.Error as error:
            raise self.explain(error) from error
        finally:
            connection.db.close()
            os.close(connection.gate)

    def close(self) -> None:
        connections, self._all, self._idle = self._all, [], []
        self._ready, self._watcher = False, None
        for connection in connections:
            connection.db.close()
            os.close(connection.gate)

    def _borrow(self) -> Connection:
        if not self._ready:
            self._open_first()
        try:
            return self._idle.pop()
        except IndexError:
            connection = self._connect()
            self._all.append(connection)
            return connection

    def _connect(self, **options: Any) -> Connection:
        try:
            gate = os.open(f"{self.path}-tenure.lock", os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise explaining.explain_open(self.path, error) from error
        db = None
        try:
            db = self.module.connect(
                self.path,
                timeout=self.busy_timeout,
                isolation_level=None,
                check_same_thread=False,
                **({"cached_statements": 256} | options),
            )
            db.execute("PRAGMA synchronous=FULL")
            db.execute("PRAGMA temp_store=MEMORY")
            db.execute("PRAGMA wal_autocheckpoint=0")
            db.execute("PRAGMA cache_size=-16000")
            db.create_function("tenure_death", 4, death_handle, deterministic=True)
            db.executescript(sql.statements("sqlite")["temporary_tables"])
        except self.module.Error as error:
            if db is not None:
                db.close()
            os.close(gate)
            raise self.explain(error) from error
        return Connection(db, gate)

    def data_version(self) -> int:
        if self._watcher is None:
            self._watcher = self._connect()
            self._all.append(self._watcher)
        version: int = self._watcher.db.execute("PRAGMA data_version").fetchone()[0]
        return version

    # -- the gate -----------------------------------------------------------------------------
    def _enter(self, connection: Connection) -> None:
        try:
            fcntl.flock(connection.gate, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            pass
        # flock cannot time out, so a thread of its own waits in it. Waiting in the kernel, not
        # polling, is what makes the gate fair: a poller never hits the gap between two batches.
        waiter = GateWaiter(connection.gate)
        if not waiter.wait(self.busy_timeout):
            connection.gate = os.open(f"{self.path}-tenure.lock", os.O_RDWR | os.O_CREAT, 0o666)
            raise errors.StoreBusy(
                f"Another process has been writing to {self.path} for more than "
                f"{self.busy_timeout:g} s. Nothing was changed; try again. If it stays so, "
                "`tenure doctor` shows who holds the file (a stopped process, a long transaction)."
            )

    def _checkpoint_when_large(self, db: sqlite3.Connection) -> None:
        """Before our own write, which then starts the log anew while we hold the gate.

        The file is kept and written over: a log that grows makes every commit's fsync journal the
        new size as well (single commits: 3.2 k/s growing, 5.5 k/s in place). It is full again
        when a commit had to make it longer.
        """
        now = time.monotonic()
        if now < self._look_at_log:
            return
        self._look_at_log = now + LOOK_AT_LOG_EVERY
        try:
            size = os.stat(f"{self.path}-wal").st_size
        except FileNotFoundError:
            return
        if self._next_checkpoint == 0 or size == 0:  # ours is new, or another process truncated
            self._next_checkpoint = max(CHECKPOINT_BYTES, size + 1)
        if size < self._next_checkpoint:
            return
        mode = "RESTART" if size < 4 * CHECKPOINT_BYTES else "TRUNCATE"
        # A reader's open snapshot keeps the log from being started anew: do not wait for it with
        # the gate held, come back when the log has grown again.
        db.execute("PRAGMA busy_timeout=50")
        try:
            (busy, *_rest) = db.execute(f"PRAGMA wal_checkpoint({mode})").fetchone()
        finally:
            db.execute(f"PRAGMA busy_timeout={int(self.busy_timeout * 1000)}")
        if busy:
            self._next_checkpoint = size + CHECKPOINT_BYTES
        else:
            self._next_checkpoint = size + 1 if mode == "RESTART" else CHECKPOINT_BYTES

    # -- first open and migrations ------------------------------------------------------------
    def _open_first(self) -> None:
        """Several processes may open a new file at once: all of it happens behind the gate."""
        connection = self._connect()
        try:
            if self._version(connection.db) < SCHEMA_VERSION:
                self._migrate(connection)
        except self.module.Error as error:
            raise self.explain(error) from error
        finally:
            connection.db.close()
            os.close(connection.gate)
        self._ready = True

    def migrate(self) -> list[str]:
        connection = self._connect()
        try:
            names = self._migrate(connection)
        except self.module.Error as error:
            raise self.explain(error) from error
        finally:
            connection.db.close()
            os.close(connection.gate)
        self._ready = True
        return names

    def version(self) -> int:
        with self.read() as db:
            return self._version(db)

    def _migrate(self, connection: Connection) -> list[str]:
        """Each migration commits with its own stamp, so a killed run goes on where it stopped."""
        db, applied = connection.db, []
        self._enter(connection)
        try:
            if db.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
                db.execute("PRAGMA auto_vacuum=INCREMENTAL")  # only a new, empty file takes it
                db.execute("PRAGMA journal_mode=WAL")
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
            fcntl.flock(connection.gate, fcntl.LOCK_UN)
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

    # -- errors -------------------------------------------------------------------------------
    def explain(self, error: Exception) -> errors.StoreError:
        return explaining.explain(self.path, self.busy_timeout, error)


def _forget(file: SqliteFile | None) -> None:
    """In a forked child: the parent's connections must be neither used nor closed here."""
    if file is None:
        return
    for connection in file._all:
        with suppress(OSError):
            os.close(connection.gate)
    file._inherited += file._all  # kept referenced, so never finalised
    file._all, file._idle, file._ready, file._watcher = [], [], False, None


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
