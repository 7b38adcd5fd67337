"""The threads of a supervisor. One that fails does not end, and takes none of the others with it.

Its failure is logged and counted, and it goes on after a pause that grows while it keeps failing,
so that a bug costs no processor. The counts travel with the worker's lease: `tenure doctor` tells.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

log = logging.getLogger("tenure.worker")

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
WELL_AGAIN = 60.0  # after so many seconds without a failure the pauses begin anew

Loop = Callable[[threading.Event], None]  # runs until the event is set


class Failures:
    """Of all threads and timers of one worker."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pauses: dict[str, tuple[float, float]] = {}  # name -> the last pause, when it failed
        self._count = 0
        self._last = ""

    def count(self, name: str, error: BaseException) -> float:
        """Log it; how many seconds to wait before `name` goes on."""
        with self._lock:
            self._count += 1
            self._last = f"{type(error).__name__} in {name}"
            pause, when = self._pauses.get(name, (0.0, 0.0))
            now = time.monotonic()
            fresh = not pause or now - when > WELL_AGAIN + pause
            pause = FIRST_PAUSE if fresh else min(2 * pause, LONGEST_PAUSE)
            self._pauses[name] = pause, now
        log.error("internal error in %s, going on in %.1f s", name, pause, exc_info=error)
        return pause

    def told(self) -> dict[str, object]:
        """For the worker's row; empty when nothing has failed."""
        if not self._count:
            return {}
        return {"failures": self._count, "last_failure": self._last}


class WorkerThreads:
    def __init__(
        self, loops: Mapping[str, Loop], failures: Failures, over: threading.Event
    ) -> None:
        self._loops = loops
        self._failures = failures
        self._over = over
        self._threads: dict[str, threading.Thread] = {}

    def start(self) -> bool:
        """Those that do not run yet; False when the system has no thread to give: call it again."""
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
        """Once it is over: wait for each, at most so long."""
        for thread in self._threads.values():
            thread.join(timeout)

    def _keep(self, name: str, loop: Loop) -> None:
        while True:
            try:
                loop(self._over)
                return
            except BaseException as error:
                pause = self._failures.count(name, error)
                if self._over.wait(pause):
                    return  # or it would fail again and again, and the worker never end
