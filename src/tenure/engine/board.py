"""The board: shared memory in which a child says, job by job, "started" and "ended".

Who is charged when a process dies? Only jobs that had started in it. A message about every start
would cost a system call and could be lost with the process; a store in shared memory costs 0.1 us
and survives it. The board is a small file, so that after a supervisor died too, a rescuer on the
same machine can read it. A slot is (job id as 26 bytes, 6 unused, start): start is 0 while
assigned, the monotonic time while running, -1 when ended.
"""

from __future__ import annotations

import glob
import mmap
import os
import struct
import tempfile
import time

SLOT = 40
_SLOT = struct.Struct("26s6xd")
_ID = struct.Struct("26s6x")
_START = struct.Struct("d")


class Board:
    def __init__(self, path: str, slots: int, *, create: bool) -> None:
        self.path = path
        flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0)
        handle = os.open(path, flags, 0o600)
        try:
            if create:
                os.ftruncate(handle, slots * SLOT)
            self._memory = mmap.mmap(handle, slots * SLOT)
        finally:
            os.close(handle)

    def assign(self, slot: int, job_id: str) -> None:
        _SLOT.pack_into(self._memory, slot * SLOT, job_id.encode(), 0.0)

    def start(self, slot: int, now: float) -> None:
        _START.pack_into(self._memory, slot * SLOT + 32, now)

    def end(self, slot: int) -> None:
        _START.pack_into(self._memory, slot * SLOT + 32, -1.0)

    def started(self, slot: int) -> float:
        """When the job in this slot began to run; 0 when it has not, -1 when it has ended."""
        (when,) = _START.unpack_from(self._memory, slot * SLOT + 32)
        return float(when)

    def running(self) -> set[str]:
        found = set()
        for offset in range(0, len(self._memory), SLOT):
            if _START.unpack_from(self._memory, offset + 32)[0] > 0:
                (job_id,) = _ID.unpack_from(self._memory, offset)
                found.add(job_id.decode())
        return found

    def close(self, *, remove: bool = False) -> None:
        self._memory.close()
        if remove:
            try:
                os.unlink(self.path)
            except FileNotFoundError:
                return


def board_path(worker_id: str, child: int) -> str:
    ulid = worker_id.rpartition(":")[2]
    return os.path.join(tempfile.gettempdir(), f"tenure-{ulid}-{child}.board")


def boards_of(worker_id: str) -> list[str]:
    ulid = worker_id.rpartition(":")[2]
    pattern = os.path.join(
        glob.escape(tempfile.gettempdir()), f"tenure-{glob.escape(ulid)}-*.board"
    )
    return glob.glob(pattern)


def started_in(worker_id: str) -> frozenset[str] | None:
    """What had started in a dead worker of this machine; None when its boards are not here."""
    paths = boards_of(worker_id)
    if not paths:
        return None
    running: set[str] = set()
    for path in paths:
        try:
            board = Board(path, os.path.getsize(path) // SLOT, create=False)
        except (OSError, ValueError):
            return None
        running |= board.running()
        board.close()
    return frozenset(running)


def remove_boards(worker_id: str) -> None:
    for path in boards_of(worker_id):
        try:
            os.unlink(path)
        except FileNotFoundError:
            continue


def remove_forgotten_boards(older_than: float) -> None:
    """Boards of workers that died when nobody was left to rescue them here."""
    for path in glob.glob(os.path.join(glob.escape(tempfile.gettempdir()), "tenure-*.board")):
        try:
            if time.time() - os.path.getmtime(path) > older_than:
                os.unlink(path)
        except OSError:
            continue  # gone already, or another user's
