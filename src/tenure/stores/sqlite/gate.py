"""The write gate: a file beside the database that every write of ours locks first (`flock`).

Whoever may write the database may lock its gate, and nobody else may open it at all: for `flock` a
handle that only reads is enough, so one that others can read is one that others can hold shut.
"""

from __future__ import annotations

import fcntl
import os
import stat
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from tenure import errors
from tenure.stores.sqlite import explaining

if TYPE_CHECKING:
    import sqlite3

GATE = "-tenure.lock"
LOGS = ("-wal", "-shm")
Place = tuple[int, int]  # device and inode: which file it is, whatever its name
Logs = tuple[Place | None, ...]

SQLITE_BUSY, SQLITE_BUSY_SNAPSHOT = 5, 517
# SQLite's own waiting sleeps up to 0.1 s between two looks. Beside a program that writes without a
# pause that found no gap for 8 s; looking this often it takes milliseconds.
FIRST_PAUSE, LONGEST_PAUSE = 0.0002, 0.002
# And once after a millisecond without the interpreter's lock, which a writer in another thread
# mostly holds just when it does not hold SQLite's.
IMPATIENT = "PRAGMA busy_timeout=1"


class Gate:
    """A handle on the gate of one file: flock belongs to the handle. It is opened at the first
    write; who only reads needs none."""

    __slots__ = ("_place", "handle")

    def __init__(self) -> None:
        self.handle = -1
        self._place: Place | None = None  # the file that it is a handle on

    def enter(self, path: str, timeout: float) -> bool:
        """False when it was shut for so long."""
        if self.handle < 0:
            self.handle = open_gate(path)
            self._place = place_at(os.fstat(self.handle))
        try:
            fcntl.flock(self.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            pass
        # flock cannot time out, so a thread of its own waits in it. Waiting in the kernel, not
        # polling, is what makes the gate fair: a poller never hits the gap between two batches.
        if GateWaiter(self.handle).wait(timeout):
            return True
        self.handle = -1  # the waiter closes it
        return False

    def leave(self) -> None:
        if self.handle >= 0:
            fcntl.flock(self.handle, fcntl.LOCK_UN)

    def is_at(self, path: str) -> bool:
        """Or has somebody deleted it, and others stand in another one?"""
        return self.handle < 0 or place_of(path + GATE) == self._place

    def close(self) -> None:
        """Unlocked first: a forked child may have a copy of the handle."""
        if self.handle >= 0:
            handle, self.handle = self.handle, -1
            fcntl.flock(handle, fcntl.LOCK_UN)
            os.close(handle)


ASK_SECONDS = 0.005  # between two questions, where nobody can wait for the answer


class Connection:
    """A database connection, which file and which logs it is open on, and its gate."""

    __slots__ = ("db", "gate", "generation", "logs", "patient", "place")

    def __init__(self, db: sqlite3.Connection, path: str, place: Place, generation: int) -> None:
        self.db = db
        self.place = place
        self.logs = logs_of(path)
        self.generation = generation
        self.gate = Gate()
        self.patient = True  # SQLite waits for locks; before a write we do (begin_immediate)

    def wait_by_itself(self, timeout: float) -> None:
        if not self.patient:
            self.db.execute(f"PRAGMA busy_timeout={int(timeout * 1000)}")
            self.patient = True

    def begin(self, timeout: float) -> None:
        """BEGIN IMMEDIATE, inside the gate."""
        if self.patient:
            self.db.execute(IMPATIENT)
            self.patient = False
        try:
            self.db.execute("BEGIN IMMEDIATE")
        except Exception as error:
            if error_code(error) != SQLITE_BUSY:
                raise
            begin_immediate(self.db, timeout)

    def close(self) -> None:
        try:
            self.db.close()  # an open transaction is rolled back
        finally:
            self.gate.close()


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


def begin_immediate(db: sqlite3.Connection | sqlite3.Cursor, timeout: float) -> None:
    """Take SQLite's write lock, from whoever does not know the gate, within `timeout` seconds. On
    a connection that is IMPATIENT."""
    deadline, pause = time.monotonic() + timeout, FIRST_PAUSE
    while True:
        try:
            db.execute("BEGIN IMMEDIATE")
            return
        except Exception as error:
            if error_code(error) != SQLITE_BUSY or time.monotonic() >= deadline:
                raise
        time.sleep(pause)
        pause = min(1.05 * pause, LONGEST_PAUSE)


def error_code(error: BaseException) -> int | None:
    """SQLite's own code of a driver's error; by its text where the driver does not tell."""
    code: int | None = getattr(error, "sqlite_errorcode", None)
    if code is None and "database is locked" in str(error):
        return SQLITE_BUSY
    return code


# -- which file it is ------------------------------------------------------------------------------


def place_at(status: os.stat_result) -> Place:
    return status.st_dev, status.st_ino


def status_of(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None


def place_of(path: str) -> Place | None:
    status = status_of(path)
    return None if status is None else place_at(status)


def logs_of(path: str) -> Logs:
    return tuple([place_of(path + ending) for ending in LOGS])


# -- the file --------------------------------------------------------------------------------------


def gate_mode(database_mode: int) -> int:
    """Read and write for those who may write the database, nothing for others."""
    mode = 0o600
    for shift in (3, 0):
        if database_mode >> shift & 0o2:
            mode |= 0o6 << shift
    return mode


def open_gate(path: str) -> int:
    """A handle on the gate of the database at `path`, which is made if there is none."""
    name = path + GATE
    # No link is followed: in a directory others can write to it could lead anywhere.
    flags = os.O_RDWR | os.O_NOFOLLOW
    for last in (False,) * 20 + (True,):
        try:
            try:
                handle = os.open(name, flags)
            except FileNotFoundError:
                handle = os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            continue  # somebody was faster
        except OSError as error:
            if last or not isinstance(error, PermissionError) or not os.access(path, os.W_OK):
                raise explaining.explain_gate(path, name, error) from error
            time.sleep(0.01)  # whoever makes it gives it its mode a moment later
            continue
        try:
            with suppress(FileNotFoundError):  # a database that was deleted
                _follow(handle, os.stat(path))
        except OSError as error:
            os.close(handle)
            raise explaining.explain_gate(path, name, error) from error
        return handle
    raise errors.StoreUnavailable(f"{name} comes and goes: something is deleting it. Stop that.")


def _follow(handle: int, database: os.stat_result) -> None:
    """Give the gate the owner, the group and the write permissions of its database, as far as this
    user may. (A second name would be somebody else's file, put there to be given away.)"""
    gate = os.fstat(handle)
    if not stat.S_ISREG(gate.st_mode):
        raise OSError("it is no plain file")
    me, mode = os.geteuid(), gate_mode(database.st_mode)
    if gate.st_nlink != 1 or me not in (0, gate.st_uid):
        return
    if me == 0 and gate.st_uid != database.st_uid:
        os.fchown(handle, database.st_uid, -1)
    if gate.st_gid != database.st_gid:
        with suppress(PermissionError):  # not a member of that group
            os.fchown(handle, -1, database.st_gid)
        if os.fstat(handle).st_gid != database.st_gid:
            mode &= ~0o070
    if stat.S_IMODE(gate.st_mode) != mode:
        os.fchmod(handle, mode)
