"""The board: memory that a supervisor shares with one child. It says which jobs have started.

When a process dies, only the jobs that had started in it are charged. A message about every start
would cost a system call and could be lost with the process; a store in shared memory costs 0.1 us
and survives it. The board is a small file: when the supervisor is dead too, a rescuer on the same
machine reads it.

    magic    8 bytes
    beat     when the child's loop last turned               written by the child
    pulse    when the supervisor last ran                    written by the supervisor
    until    when the lease ends that it has last renewed    written by the supervisor
    pid      the child's process                             written by the child
    halted   start nothing more                              written by the supervisor
    left     the child has given itself up                   written by the child
    partial  some child of the worker has a hidden board     written by the supervisor
    slots    job id (26 bytes, 6 unused) and its start: 0 while assigned, -1 when ended

Times are of the system's monotonic clock, the same in every process. Boards lie in a directory that
belongs to their user alone, where no other user can put a file. A supervisor holds a lock on its
boards as long as it lives: a process that gets that lock knows that the supervisor is dead.
"""

from __future__ import annotations

import mmap
import os
import stat
import struct
import sys
import tempfile
import time
from contextlib import suppress
from typing import Any, NamedTuple

from tenure.errors import JobError
from tenure.ids import parse_id

if sys.platform != "win32":
    import fcntl

MAGIC = b"tenure-1"
_HEADER = struct.Struct("8s3dqBBB")
HEADER, SLOT = 64, 40
START = HEADER + 32  # of the first slot
LARGEST = 16 << 20  # of what is read as a board; ours have half a megabyte
BEAT, PULSE, PID, HALTED, LEFT, PARTIAL = 8, 16, 32, 40, 41, 42
_SLOT = struct.Struct("26s6xd")
_TIME = struct.Struct("d")
_TIMES = struct.Struct("2d")
_PID = struct.Struct("q")


class Board:
    """`path` is None when it is hidden (no rescuer can find it), and `excuse` says why."""

    def __init__(
        self, memory: mmap.mmap, handle: int = -1, path: str | None = None, excuse: str = ""
    ) -> None:
        self._memory = memory
        self._handle = handle  # -1 when there is none
        self.path = path
        self.excuse = excuse

    # -- the supervisor's side ----------------------------------------------------------------
    def lend(self) -> int:
        """A handle for a child process. Of a file it is a new one, which does not share our lock:
        Python's mmap keeps a copy of its handle as long as it lives."""
        if self.path is None:
            return os.dup(self._handle)
        return os.open(self.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)

    def assign(self, slot: int, job_id: str) -> None:
        _SLOT.pack_into(self._memory, HEADER + slot * SLOT, job_id.encode(), 0.0)

    def started(self, slot: int) -> float:
        """When the job in this slot began to run; 0 when it has not, -1 when it has ended."""
        (when,) = _TIME.unpack_from(self._memory, START + slot * SLOT)
        return float(when)

    def last_beat(self) -> float:
        (when,) = _TIME.unpack_from(self._memory, BEAT)
        return float(when)

    def pulse(self, now: float, until: float, *, partial: bool) -> None:
        _TIMES.pack_into(self._memory, PULSE, now, until)
        self._memory[PARTIAL] = partial

    def halt(self) -> None:
        """Let the child start nothing more. The child marks a start before it looks at this. So
        after a moment (the processors' buffers take well below a millisecond) a job without a mark
        will not run, whatever the child is doing."""
        self._memory[HALTED] = 1

    @property
    def halted(self) -> bool:
        return bool(self._memory[HALTED])

    @property
    def left(self) -> bool:
        return bool(self._memory[LEFT])

    def touch(self) -> None:
        """Writes through memory do not move a file's time: say that it is in use."""
        if self.path is not None:
            with suppress(OSError):  # closed this moment
                os.utime(self._handle)

    def close(self) -> None:
        """The file goes now, the memory when no process uses it any more."""
        if self.path is not None:
            with suppress(OSError):  # gone already, perhaps with its directory
                os.unlink(self.path)
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)

    # -- the child's side ---------------------------------------------------------------------
    def start(self, slot: int, now: float) -> bool:
        """Mark a job as started; False when it must not be run after all."""
        _TIME.pack_into(self._memory, START + slot * SLOT, now)
        return not self._memory[HALTED]

    def end(self, slot: int) -> None:
        _TIME.pack_into(self._memory, START + slot * SLOT, -1.0)

    def beat(self, now: float) -> None:
        _TIME.pack_into(self._memory, BEAT, now)

    def last_pulse(self) -> tuple[float, float]:
        """When the supervisor last ran, and how long its lease lasts; 0 before the first."""
        when, until = _TIMES.unpack_from(self._memory, PULSE)
        return when, until

    def go_on(self) -> None:
        """The jobs that were taken back are forgotten here: starts count again."""
        self._memory[HALTED] = 0

    def leave(self) -> None:
        self._memory[LEFT] = 1

    def disown(self) -> None:
        """In a forked copy: from now on it writes to memory of its own."""
        self._memory = mmap.mmap(-1, len(self._memory))


# -- making and inheriting them -------------------------------------------------------------------


def make_board(worker_id: str, child: int, slots: int) -> Board:
    """A file that rescuers find; where there can be none, memory that only this worker sees."""
    if sys.platform == "win32":
        return Board(_begun(mmap.mmap(-1, HEADER + slots * SLOT)), excuse="Windows")
    size = HEADER + slots * SLOT
    try:
        path = os.path.join(_directory(), f"{_ulid(worker_id)}-{child}.board")
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        handle = os.open(path, flags, 0o600)
    except OSError as error:
        return _anonymous(size, error)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        _allocate(handle, size)
        return Board(_begun(mmap.mmap(handle, size)), handle, path)
    except OSError as error:
        os.close(handle)
        with suppress(OSError):
            os.unlink(path)
        return _anonymous(size, error)


def inherited_board(handle: int) -> Board:
    """In a child process, from the handle that its supervisor lent it."""
    try:
        memory = mmap.mmap(handle, os.fstat(handle).st_size)
    finally:
        os.close(handle)
    _PID.pack_into(memory, PID, os.getpid())
    return Board(memory)


def _anonymous(size: int, error: OSError) -> Board:
    if hasattr(os, "memfd_create"):
        handle = os.memfd_create("tenure-board", os.MFD_CLOEXEC)
    else:
        handle, path = tempfile.mkstemp(prefix="tenure-")
        os.unlink(path)
    try:
        _allocate(handle, size)
        return Board(_begun(mmap.mmap(handle, size)), handle, excuse=str(error))
    except OSError:
        os.close(handle)
        raise


def _allocate(handle: int, size: int) -> None:
    """Every page now: if the disk is full later, the process that writes to a page is ended by
    SIGBUS."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(handle, 0, size)
    elif os.write(handle, bytes(size)) < size:
        raise OSError("no space left for a board")


def _begun(memory: mmap.mmap) -> mmap.mmap:
    _HEADER.pack_into(memory, 0, MAGIC, 0.0, 0.0, 0.0, 0, 0, 0, 0)
    return memory


def _directory(temporary: str | None = None) -> str:
    """A directory of this user alone; refused when another user has put something in its place."""
    path = os.path.join(temporary or tempfile.gettempdir(), f"tenure-{os.geteuid()}")
    with suppress(FileExistsError):
        os.mkdir(path, 0o700)
    found = os.lstat(path)
    private = stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o077
    if not private or found.st_uid != os.geteuid():
        raise PermissionError(f"{path} is not a directory of ours alone (mode 0700): remove it")
    return path


# -- what others can read -------------------------------------------------------------------------


class Reading(NamedTuple):
    pid: int  # of the child
    running: frozenset[str]  # ids of jobs that had started
    partial: bool


def boards_of(worker_id: str | None = None, temporary: str | None = None) -> list[str]:
    """The files of this user on this machine: of one worker, or of all. `temporary`: below this
    directory instead of $TMPDIR."""
    if sys.platform == "win32":
        return []
    begin = "" if worker_id is None else f"{_ulid(worker_id)}-"
    try:
        directory = _directory(temporary)
        names = os.listdir(directory)
    except OSError:
        return []
    return [
        os.path.join(directory, name)
        for name in names
        if name.startswith(begin) and name.endswith(".board")
    ]


def read_board(path: str) -> Reading | None:
    """Nothing in it is trusted: its writer may have died half-way, or it is no board at all."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            return None
        content = os.read(handle, LARGEST + 1)
    except OSError:
        return None
    finally:
        os.close(handle)
    if not HEADER <= len(content) <= LARGEST or not content.startswith(MAGIC):
        return None
    *_, pid, _halted, _left, partial = _HEADER.unpack_from(content)
    running: set[str] = set()
    for offset in range(HEADER, len(content) - SLOT + 1, SLOT):
        name, start = _SLOT.unpack_from(content, offset)
        if start > 0:
            _add_id(running, name)
    return Reading(pid, frozenset(running), bool(partial))


def started_in(worker_id: str) -> frozenset[str] | None:
    """What had started in a dead worker of this machine; None when its boards do not tell."""
    found = [read_board(path) for path in boards_of(worker_id)]
    known = [each for each in found if each is not None]
    if not found or len(known) < len(found) or any(each.partial for each in known):
        return None
    return frozenset().union(*(each.running for each in known))


def remove_boards(worker_id: str) -> None:
    for path in boards_of(worker_id):
        _remove_if_forgotten(path, float("-inf"))  # whatever the clock says


def remove_forgotten_boards(unused: float) -> None:
    """Of workers that died so many seconds ago, with no other worker here to rescue them."""
    for path in boards_of():
        _remove_if_forgotten(path, unused)


def _remove_if_forgotten(path: str, unused: float) -> None:
    """Its lock tells whether its owner is dead."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return  # gone already, or not made by us
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if time.time() - os.fstat(handle).st_mtime >= unused:
            os.unlink(path)
    except OSError:
        return  # its owner lives
    finally:
        os.close(handle)


def _add_id(ids: set[str], name: Any) -> None:
    try:
        ids.add(parse_id(name.decode("ascii")))
    except (UnicodeDecodeError, JobError):
        return


def _ulid(worker_id: str) -> str:
    return os.path.basename(worker_id.rpartition(":")[2])
