"""The threads that `def` handlers run in."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

from tenure.engine.run import JobRun

log = logging.getLogger("tenure.worker")


class HandlerThreads:
    """As many threads as run `def` handlers at once: a new one whenever none is free."""

    LONGEST_PAUSE = 5.0

    def __init__(self, work: Callable[[JobRun], None]) -> None:
        self._work = work
        self._queue: SimpleQueue[JobRun | None] = SimpleQueue()
        self._free: deque[None] = deque()  # one entry for each thread that waits for work
        self._closed = False
        self._not_before = 0.0
        self.put = self._queue.put  # a run, once a thread is reserved for it
        self.pause = 0.0  # how long to wait, when there is none to be had

    def reserve(self) -> bool:
        """One thread for the run that is put next; False when the system has none to give."""
        if self._free:  # only the executor takes from it, one at a time
            self._free.pop()
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
        self._free.append(None)

    def close(self) -> None:
        """Free threads end now, the others when their handler has ended."""
        self._closed = True  # before we count: a thread that is free later looks at it
        for _ in range(len(self._free)):
            self._queue.put(None)

    def _serve(self) -> None:
        while (run := self._queue.get()) is not None:
            self._work(run)
            self.release()
            if self._closed:
                return
