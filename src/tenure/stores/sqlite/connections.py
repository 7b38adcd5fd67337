"""Connections to the file that is at a path, also when that becomes another one.

The file may be replaced under us (deleted, renamed, restored), and a connection would go on in one
that nobody finds. So each use first asks whether the file at the path is the one that is open
(`stat`, 1.2 µs), a write inside the gate. Its logs and the gate itself are looked at every 20 ms.
"""

from __future__ import annotations

import importlib
import os
import time
import weakref
from contextlib import suppress
from typing import Any

from tenure import errors, sql
from tenure.stores.rows import death_handle
from tenure.stores.sqlite import explaining, mounts
from tenure.stores.sqlite.gate import LOGS, Connection, Gate, Logs, Place, logs_of, place_of
from tenure.stores.sqlite.log import Log

# Where inode numbers do not last, a file must not be reopened for ever.
REOPENINGS = 3
SAVE_MS = 2000  # to copy the log of a file that is left


class Connections:
    def __init__(
        self,
        path: str,
        *,
        busy_timeout: float = 15.0,
        module: str = "sqlite3",
        allow_network: bool = False,
    ) -> None:
        self.name = os.path.abspath(path)
        # Logs and gate stand beside the file itself, whatever the names that lead to it.
        self.path = os.path.realpath(path)
        self.busy_timeout = busy_timeout
        self.module: Any = importlib.import_module(module)
        self.queues: set[str] = set()  # names that this process has seen committed in this file
        self.generation = 0  # grows when what is at the path is no longer what we have open
        self.place: Place | None = None  # the file whose schema was seen up to date
        self.left: set[Place] = set()  # files that were replaced, which may still be open here
        self._allow_network = allow_network
        self._logs: Logs = (None, None)
        self._had_file = False
        self._touched = 0
        # Who writes waits for locks in its own way, who reads as SQLite does. A connection that is
        # switched between the two compiles a statement each time: 15 µs, and 70 in an idle process.
        self._writers: list[Connection] = []
        self._readers: list[Connection] = []
        self._all: list[Connection] = []
        self._inherited: list[Connection] = []
        self._log = Log()
        self.text: Any = str  # what makes text of bytes
        this = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _after_fork(this()))

    def explain(self, error: Exception) -> errors.StoreError:
        if "Could not decode" in str(error):
            # A row by other hands: whoever calls again gets past it. Not from the start: a claim's
            # text would be decoded by Python, 3 times as slowly.
            self.text = lenient
            for connection in self._all:
                connection.db.text_factory = lenient
        return explaining.explain(self.path, self.busy_timeout, error)

    def open(self, *, waiting: bool = True) -> None:
        """See that this process has the file at the path open, with its schema up to date. One who
        cannot wait for others (`waiting=False`) gets an error where that takes a write."""
        if self.place is None:
            self._open_first(waiting=waiting)
        else:
            self._put(self._in_place(self.busy_timeout if waiting else 0.0))

    def close(self) -> None:
        connections, self._all, self._writers, self._readers = self._all, [], [], []
        self.place, self._had_file = None, False
        self.queues.clear()
        self._log.forget()
        for connection in connections:
            connection.close()

    def after_fork(self) -> None:
        """In the child: the parent's connections must be neither used nor closed here."""
        for connection in self._all:
            if connection.gate.handle >= 0:
                with suppress(OSError):
                    os.close(connection.gate.handle)  # not unlocked: that is the parent's business
        self._inherited += self._all  # kept referenced, so never finalised
        self._all, self._writers, self._readers, self.place = [], [], [], None

    def _open_first(self, create: bool = True, *, waiting: bool = True) -> None:
        """See that the schema is up to date; ends with `_opened`."""
        raise NotImplementedError

    def _opened(self, connection: Connection) -> None:
        # A new file has no logs before it is migrated.
        connection.logs = self._logs = logs_of(self.path)
        self.place, self._had_file = connection.place, True
        self._put(connection)

    # -- to the right file ----------------------------------------------------------------------
    def _in_place(self, timeout: float) -> Connection:
        """A connection to read with, to the file that is at the path."""
        for _ in range(REOPENINGS):
            connection = self._borrow(reading=True)
            try:
                if self._is_in_place(connection):
                    return connection
                with suppress(errors.StoreUnavailable):  # who may not write has no gate
                    self._enter(connection, timeout)
                self._abandon(connection)
            except BaseException:
                self._give_back(connection)
                raise
        return self._borrow(reading=True)

    def _inside(self, timeout: float, create: bool = False) -> Connection:
        """One to write with, inside the gate."""
        for _ in range(REOPENINGS):
            connection = self._borrow(create)
            try:
                if not connection.gate.enter(self.path, timeout):
                    raise explaining.shut(self.path, timeout)
                if self._is_in_place(connection, create):
                    return connection
                self._abandon(connection)
            except BaseException:
                self._give_back(connection)
                raise
        connection = self._borrow(create)
        self._enter(connection, timeout)
        return connection

    def _is_in_place(self, connection: Connection, create: bool = False) -> bool:
        try:
            here = os.stat(self.name)
        except FileNotFoundError:
            if create:
                return False
            raise explaining.gone(self.path) from None
        if here.st_ino != connection.place[1] or here.st_dev != connection.place[0]:
            return False
        # Whoever finds a log deleted touches the file, so that the others look at once.
        if here.st_mtime_ns == self._touched and time.monotonic() < self._log.look_at:
            return True
        self._touched = here.st_mtime_ns
        logs = (self._log.look(self.path), place_of(f"{self.path}-shm"))
        return logs == connection.logs and connection.gate.is_at(self.path)

    def _abandon(self, connection: Connection) -> None:
        """Inside the gate: what is at the path is another file, log or gate than we have open."""
        if connection.generation == self.generation:
            replaced = place_of(self.path) != connection.place
            _save_log(connection, self.path, replaced, self.module)
            if replaced:
                _remove_logs(self.path, connection.logs)
            else:
                with suppress(OSError):
                    os.utime(self.path)
            self._forget_place(connection.place)
        self._close(connection)

    def _forget_place(self, place: Place) -> None:
        if place_of(self.name) != place:
            self.left.add(place)
        self.generation += 1
        self.place = None
        self.queues.clear()
        self._log.forget()

    # -- from the pool --------------------------------------------------------------------------
    def _borrow(self, create: bool = False, *, reading: bool = False) -> Connection:
        while True:
            try:
                connection = (self._readers if reading else self._writers or self._readers).pop()
            except IndexError:
                return self._new(create)
            if connection.generation == self.generation:
                return connection
            self._close(connection)

    def _put(self, connection: Connection) -> None:
        (self._readers if connection.patient else self._writers).append(connection)

    def _give_back(self, connection: Connection) -> None:
        """Out of the gate, with no transaction open."""
        try:
            if connection.db.in_transaction:
                connection.db.execute("ROLLBACK")
        finally:
            connection.gate.leave()
            self._put(connection)

    def _new(self, create: bool = False, **options: Any) -> Connection:
        """A new connection, to a file whose schema is up to date."""
        for _ in range(REOPENINGS):
            if self.place is None:
                self._open_first(create)
                if not options:
                    return self._borrow(create)
            connection = self._connect(create, **options)
            if connection.place == self.place:
                return connection
            self._close(connection)
        raise explaining.restless(self.path)

    def _connect(self, create: bool = True, **options: Any) -> Connection:
        """A connection to the file at the path. SQLite opens a file at once, and its log by name at
        the first statement: by then it must be the file we take it for, or a log that stayed behind
        would be applied to another one."""
        for _ in range(REOPENINGS):
            path = os.path.realpath(self.name)
            if path != self.path or self.place is None:
                self.path = path
                self._look_at_mount()
            before = place_of(path)
            if before is None and self._had_file and not create:
                raise explaining.gone(path)
            db = self._open(path, options)
            place = place_of(path)
            if place is None or before not in (None, place):
                db.close()
                continue
            if self.place not in (None, place):
                db.close()
                self._abandon_unheld(self.place, self._logs)
                continue
            self._prepare(db)
            connection = Connection(db, path, place, self.generation)
            self._all.append(connection)
            if place_of(path) == place:
                return connection
            self._close(connection)
        raise explaining.restless(self.path)

    def _abandon_unheld(self, place: Place | None, logs: Logs) -> None:
        """As `_abandon`, by one who has no connection to the file that was replaced."""
        gate = Gate()
        try:
            if not gate.enter(self.path, self.busy_timeout):
                raise explaining.shut(self.path, self.busy_timeout)
            if place is not None and self.place == place:
                if place_of(self.path) != place:
                    _remove_logs(self.path, logs)
                self._forget_place(place)
        finally:
            gate.close()

    def _open(self, path: str, options: dict[str, Any]) -> Any:
        try:
            return self.module.connect(
                path,
                timeout=self.busy_timeout,
                isolation_level=None,
                check_same_thread=False,
                **({"cached_statements": 256} | options),
            )
        except self.module.Error as error:
            raise self.explain(error) from error

    def _prepare(self, db: Any) -> None:
        try:
            db.execute("PRAGMA synchronous=FULL")
            db.execute("PRAGMA temp_store=MEMORY")
            db.execute("PRAGMA wal_autocheckpoint=0")
            db.execute("PRAGMA cache_size=-16000")
            db.text_factory = self.text
            db.create_function("tenure_death", 4, death_handle, deterministic=True)
            db.executescript(sql.statements("sqlite")["temporary_tables"])
            db.execute("SELECT 1 FROM sqlite_master").fetchone()  # opens the logs
        except self.module.Error as error:
            db.close()
            raise self.explain(error) from error

    def _look_at_mount(self) -> None:
        mount = mounts.mount_of(self.path)
        if mount is not None and mount.risk:
            if mount.risk == "refused" and not self._allow_network:
                raise explaining.on_network(self.path, mount.kind, mount.at)
            import logging  # 3 ms of a cold enqueue, for a warning it does not get

            logging.getLogger("tenure.store").warning(
                "%s is on %s (mounted at %s): SQLite needs memory and locks that all who open the "
                "file share. Let one machine only open it, or use a local disk",
                self.path, mount.kind, mount.at,
            )  # fmt: skip

    def _enter(self, connection: Connection, timeout: float) -> None:
        if not connection.gate.enter(self.path, timeout):
            raise explaining.shut(self.path, timeout)

    def _close(self, connection: Connection) -> None:
        with suppress(ValueError):
            self._all.remove(connection)
        connection.close()


def lenient(text: bytes) -> str:
    """SQLite takes any bytes for text."""
    return text.decode("utf-8", "replace")


def _save_log(connection: Connection, path: str, replaced: bool, module: Any) -> None:
    """Copy the log into its file before both are let go. A file that was replaced may have been
    renamed; if only its log was deleted, nobody else will ever find what is in it."""
    here = logs_of(path)
    if not replaced:
        if here == connection.logs:
            return  # it was the gate
        if any(now not in (None, ours) for now, ours in zip(here, connection.logs, strict=True)):
            import logging

            logging.getLogger("tenure.store").error(
                "the -wal or -shm file of %s was deleted while in use, and another program has "
                "begun a new one: commits since then may be lost. Never delete these by hand",
                path,
            )
            return
    connection.patient = False
    try:
        connection.db.execute(f"PRAGMA busy_timeout={SAVE_MS}")
        busy = bool(connection.db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0])
    except module.Error:
        busy = True
    if busy and not replaced:
        raise errors.StoreBusy(
            f"the log of {path} was deleted while in use, and a reader keeps it from being saved. "
            "Nothing was changed; try again."
        )


def _remove_logs(path: str, logs: Logs) -> None:
    """Those of a file that was replaced, if they stayed behind: SQLite would apply them to the file
    that is there now."""
    for ending, ours in zip(LOGS, logs, strict=True):
        if ours is not None and place_of(path + ending) == ours:
            with suppress(OSError):
                os.unlink(path + ending)


def _after_fork(file: Connections | None) -> None:
    if file is not None:
        file.after_fork()
