"""The write gate's moving parts: a connection with its handle, and waiting with a time-out."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import sqlite3


ASK_SECONDS = 0.005  # between two questions, where nobody can wait for the answer


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
        try:
            threading.Thread(target=self._run, name="tenure-gate", daemon=True).start()
            self._threadless = False
        except RuntimeError:
            self._threadless = True  # the system has none to give

    def wait(self, timeout: float) -> bool:
        if self._threadless:
            return self._ask_until(time.monotonic() + timeout)
        if self._granted.wait(timeout):
            return True
        with self._state:
            self._abandoned = not self._granted.is_set()
            return not self._abandoned

    def _ask_until(self, deadline: float) -> bool:
        while time.monotonic() < deadline:
            try:
                fcntl.flock(self._gate, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                time.sleep(ASK_SECONDS)
        os.close(self._gate)
        return False

    def _run(self) -> None:
        fcntl.flock(self._gate, fcntl.LOCK_EX)
        with self._state:
            if not self._abandoned:
                self._granted.set()
                return
        os.close(self._gate)  # too late: closing the handle gives the lock back
