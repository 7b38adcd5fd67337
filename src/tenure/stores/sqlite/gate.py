"""The write gate's moving parts: a connection with its handle, waiting with a time-out, lending."""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from typing import TYPE_CHECKING

from tenure import errors

if TYPE_CHECKING:
    import sqlite3

SQLITE_DENY, SQLITE_TRANSACTION = 1, 22


class Connection:
    """A database connection and its own handle on the gate (flock belongs to the handle)."""

    __slots__ = ("db", "gate")

    def __init__(self, db: sqlite3.Connection, gate: int) -> None:
        self.db = db
        self.gate = gate


class GateWaiter:
    """Waits in flock on a thread; whoever gives up first decides what a late grant is worth."""

    def __init__(self, gate: int) -> None:
        self._gate = gate
        self._state = threading.Lock()
        self._granted = threading.Event()
        self._abandoned = False
        threading.Thread(target=self._run, name="tenure-gate", daemon=True).start()

    def wait(self, timeout: float) -> bool:
        if self._granted.wait(timeout):
            return True
        with self._state:
            self._abandoned = not self._granted.is_set()
            return not self._abandoned

    def _run(self) -> None:
        fcntl.flock(self._gate, fcntl.LOCK_EX)
        with self._state:
            if not self._abandoned:
                self._granted.set()
                return
        os.close(self._gate)  # too late: closing the handle gives the lock back


class Loan:
    """The clock that runs while a handler holds the write lock."""

    WARN_AFTER = 1.0

    def __init__(self, connection: Connection, limit: float, path: str) -> None:
        self._connection = connection
        self._limit = limit
        self._path = path
        self._lock = threading.Lock()
        self._ended = False
        self._expired = False
        self._timers = [
            threading.Timer(min(self.WARN_AFTER, limit / 2), self._warn),
            threading.Timer(limit, self._expire),
        ]

    def start(self) -> None:
        for timer in self._timers:
            timer.daemon = True
            timer.start()

    def end(self) -> None:
        """The block is over; raises if its time was up before."""
        with self._lock:
            self._ended = True
        if self._expired:
            raise errors.StoreBusy(
                f"the transaction held the only write lock of {self._path} for more than "
                f"{self._limit:g} s and was rolled back: do slow work before the block"
            )

    def stop(self) -> None:
        for timer in self._timers:
            timer.cancel()

    def _warn(self) -> None:
        logging.getLogger("tenure.job").warning(
            "a transaction has been holding the only write lock of %s for %.1f s: everybody else "
            "waits; do slow work before the block",
            self._path,
            min(self.WARN_AFTER, self._limit / 2),
        )

    def _expire(self) -> None:
        with self._lock:
            if self._ended:
                return
            self._expired = True
            db = self._connection.db
            # From here on nothing but a rollback gets through: what the handler still sends
            # must not commit by itself.
            db.set_authorizer(_only_rollback)
            db.interrupt()
            if db.in_transaction:
                db.execute("ROLLBACK")
            fcntl.flock(self._connection.gate, fcntl.LOCK_UN)


def _only_rollback(action: int, what: str | None, *_rest: object) -> int:
    return 0 if action == SQLITE_TRANSACTION and what == "ROLLBACK" else SQLITE_DENY
