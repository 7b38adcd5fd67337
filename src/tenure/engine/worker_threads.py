"""A supervisor's threads, each one loop. One that fails takes nobody with it.

It is logged, counted, and goes on after a pause that grows while it keeps failing, so that a bug
costs no processor. What was counted travels with the worker's lease, and `tenure doctor` tells.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

log = logging.getLogger("tenure.worker")

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
WELL_AGAIN = 60.0  # after so many seconds without a failure the pauses begin anew


class WorkerThreads:
    def __init__(self, loops: Mapping[str, Callable[[threading.Event], None]]) -> None:
        self.over = threading.Event()  # they may end
        self._loops = loops
        self._threads: dict[str, threading.Thread] = {}
        self._lock = threading.Lock()
        self._pauses: dict[str, tuple[float, float]] = {}  # name -> the last pause, when it failed
        self._failures = 0
        self._last = ""

    def start(self) -> bool:
        """Those that do not run yet; False when the system has no thread to give: ask again."""
        for name, loop in self._loops.items():
            if name in self._threads:
                continue
            thread = threading.Thread(
                target=self._keep, args=(name, loop), name=f"tenure-{name}", daemon=True
            )
            try:
                thread.start()
            except RuntimeError as error:
                log.warning("no thread for %s (%s): trying again", name, error)
                return False
            self._threads[name] = thread
        return True

    def join(self, timeout: float) -> None:
        self.over.set()
        for thread in self._threads.values():
            thread.join(timeout)

    def failed(self, name: str, error: BaseException) -> None:
        """Say so, and wait before it goes on."""
        with self._lock:
            self._failures += 1
            self._last = f"{type(error).__name__} in {name}"
            pause, when = self._pauses.get(name, (0.0, 0.0))
            now = time.monotonic()
            fresh = not pause or now - when > WELL_AGAIN + pause
            pause = FIRST_PAUSE if fresh else min(2 * pause, LONGEST_PAUSE)
            self._pauses[name] = pause, now
        log.error("internal error in %s, going on in %.1f s", name, pause, exc_info=error)
        self.over.wait(pause)

    def trouble(self) -> dict[str, object]:
        """What has failed, for the worker's row; empty when nothing has."""
        if not self._failures:
            return {}
        return {"failures": self._failures, "last_failure": self._last}

    def _keep(self, name: str, loop: Callable[[threading.Event], None]) -> None:
        while True:
            try:
                loop(self.over)
                return
            except BaseException as error:
                self.failed(name, error)
                if self.over.is_set():
                    return  # nobody waits any more: it would fail again and again
