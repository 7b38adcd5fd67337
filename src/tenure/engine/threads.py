"""The threads that `def` handlers run in."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

from tenure.engine.run import JobRun

log = logging.getLogger("tenure.worker")


class Threads:
    """As many threads as run `def` handlers at once: a new one whenever none is free."""

    LONGEST_PAUSE = 5.0

    def __init__(self, work: Callable[[JobRun], None]) -> None:
        self._work = work
        self._queue: SimpleQueue[JobRun | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._free = 0  # threads waiting for work
        self._closed = False
        self._not_before = 0.0
        self.pause = 0.0  # how long to wait, when there is none to be had

    def reserve(self) -> bool:
        """One thread for what is put next; False when the system has none to give."""
        with self._lock:
            if self._free > 0:
                self._free -= 1
                return True
        now = time.monotonic()
        if now < self._not_before:
            return False
        try:
            threading.Thread(target=self._serve, name="tenure-job", daemon=True).start()
        except RuntimeError as error:
            self.pause = min(self.pause * 2 or 0.1, self.LONGEST_PAUSE)
            self._not_before = now + self.pause
            log.warning(
                "no thread for a job (%s): it waits, trying again in %.1f s", error, self.pause
            )
            return False
        self.pause = 0.0
        return True

    def release(self) -> None:
        with self._lock:
            self._free += 1

    def put(self, run: JobRun) -> None:
        self._queue.put(run)

    def close(self) -> None:
        """Those that are free end now, the others after what they run."""
        with self._lock:
            self._closed = True
            for _ in range(self._free):
                self._queue.put(None)

    def _serve(self) -> None:
        while (run := self._queue.get()) is not None:
            self._work(run)
            with self._lock:
                if self._closed:
                    return
                self._free += 1
