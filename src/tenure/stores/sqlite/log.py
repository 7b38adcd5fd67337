"""How full the write-ahead log is, and who empties it.

Before 3.51.3 SQLite can lose a commit when a checkpoint that does not hold the write lock (an
automatic one, or PASSIVE, or RESTART and TRUNCATE which become that beside a writer) meets a writer
that starts the log anew. So automatic checkpoints are off on our connections, and ours run while
another connection of ours holds the write lock: nobody can write meanwhile, inside the gate or not.
Whoever writes next starts the log anew, in place.
"""

from __future__ import annotations

import threading
import time
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING

from tenure.errors import StoreError
from tenure.stores.sqlite.gate import Place, place_at, status_of

if TYPE_CHECKING:
    from tenure.stores.sqlite.file import SqliteFile

# A log that grows makes every commit's fsync journal the new size as well (single commits: 3.2 k/s
# growing, 5.5 k/s in place), so the file is kept and written over. It is full again when a commit
# had to make it longer. One that is longer than LONGEST_BYTES by then is cut (a large batch, a long
# reader; and who comes a little late each time would make it longer and longer).
CHECKPOINT_BYTES = 8 * 1024 * 1024
LONGEST_BYTES = 2 * CHECKPOINT_BYTES
LOOK_EVERY = 0.02
WATCH_EVERY = 1.0
PATIENCE = 1.0  # seconds: a caller's transaction is open most of the time
FIXED_VERSIONS = ((3, 51, 3), (3, 50, 7), (3, 44, 6))


def wal_reset_bug(version: tuple[int, ...]) -> bool:
    """SQLite 3.7.0 to 3.51.2 can lose a commit that meets a checkpoint."""
    if version >= (3, 51, 3):
        return False
    return not any(version[:2] == fixed[:2] and version >= fixed for fixed in FIXED_VERSIONS)


class Log:
    """What this process knows of the log, and when it looks again."""

    def __init__(self) -> None:
        self.full = False
        self.size = 0
        self._full_at = 0  # bytes; unknown until the first look
        self.look_at = 0.0  # by the monotonic clock

    def look(self, path: str) -> Place | None:
        """How full it is, and which file."""
        self.look_at = time.monotonic() + LOOK_EVERY
        status = status_of(f"{path}-wal")
        self.size = size = 0 if status is None else status.st_size
        if self._full_at == 0 or size == 0:  # we are new, or the log is
            left_so = size >= LONGEST_BYTES
            self._full_at = CHECKPOINT_BYTES if left_so else max(CHECKPOINT_BYTES, size + 1)
        self.full = size >= self._full_at
        return None if status is None else place_at(status)

    def emptied(self, whole: bool) -> None:
        """A reader's open snapshot keeps a part from being copied, and the log from being started
        anew: come back when it has grown again."""
        self._full_at = self.size + (1 if whole else CHECKPOINT_BYTES)
        self.full = False

    def cut(self, path: str) -> None:
        """Unless another was faster to start it anew, or a reader is in the way."""
        self._full_at = max(CHECKPOINT_BYTES, log_size(path)) + 1

    def forget(self) -> None:
        self.full, self._full_at, self.look_at = False, 0, 0.0


class LogWatch:
    """Looks once a second, or when told, in a process that has switched automatic checkpoints off
    on somebody else's connection: their commits may be the only ones, and none of them passes
    through us."""

    def __init__(self, file: SqliteFile) -> None:
        self._file = weakref.ref(file)
        self._told = threading.Event()
        self._over = False
        self._thread = threading.Thread(target=self._run, name="tenure-log", daemon=True)
        self._thread.start()

    def tell(self) -> None:
        self._told.set()

    def stop(self) -> None:
        """Before the connections are closed."""
        self._over = True
        self._told.set()
        if self._thread is not threading.current_thread():
            self._thread.join(2 * PATIENCE + 1)

    def _run(self) -> None:
        while True:
            self._told.wait(WATCH_EVERY)
            self._told.clear()
            file = self._file()
            if file is None or self._over:
                return
            # Somebody may be in the way, or the file gone: a second later.
            with suppress(StoreError):
                file.empty_log_when_full(PATIENCE)
            del file


def log_size(path: str) -> int:
    status = status_of(f"{path}-wal")
    return 0 if status is None else status.st_size
