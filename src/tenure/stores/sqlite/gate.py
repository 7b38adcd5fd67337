"""The write gate's moving parts: a connection with its handle, waiting with a time-out, lending."""

from __future__ import annotations

import fcntl
import os
import threading
from typing import TYPE_CHECKING

from tenure import errors

if TYPE_CHECKING:
    import sqlite3

SQLITE_OK, SQLITE_DENY = 0, 1
SQLITE_PRAGMA, SQLITE_TRANSACTION = 19, 22


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
    """The rules and the clock while a handler holds the write lock: neither a commit or rollback
    of its own nor anything outside the transaction gets through, and after `limit` seconds the
    transaction is rolled back under its hands."""

    WARN_AFTER = 1.0
    LOOK_EVERY = 100_000  # steps of SQLite's machine, about a millisecond

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
        # Now, by the borrower's own thread: both calls hold the GIL while they wait for SQLite's
        # mutex, and its holder may wait for the GIL.
        self._connection.db.set_authorizer(self._may)
        self._connection.db.set_progress_handler(lambda: self._expired, self.LOOK_EVERY)
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
        """After this no timer touches the connection or the gate."""
        with self._lock:
            self._ended = True
        for timer in self._timers:
            timer.cancel()

    def _may(self, action: int, what: str | None, *_rest: object) -> int:
        """Asked about each statement when it is prepared (lent connections cache none)."""
        if self._expired:
            ours = action == SQLITE_PRAGMA or (action, what) == (SQLITE_TRANSACTION, "ROLLBACK")
            return SQLITE_OK if ours else SQLITE_DENY
        if self._ended:
            return SQLITE_OK
        inside = self._connection.db.in_transaction and action != SQLITE_TRANSACTION
        return SQLITE_OK if inside else SQLITE_DENY

    def _warn(self) -> None:
        import logging  # 3 ms of a cold enqueue, for a warning it cannot get

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
            try:
                # What runs ends at its next look; what was prepared before (an executemany) must
                # not go on and commit by itself. No interrupt(): with a cursor open it would hit
                # the rollback as well.
                db.execute("PRAGMA query_only = 1")
                if db.in_transaction:
                    db.execute("ROLLBACK")
            finally:
                fcntl.flock(self._connection.gate, fcntl.LOCK_UN)
