"""How fast many jobs are changed, and how far that is."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from tenure.record import Record

TICK_SECONDS = 0.2  # with a rate, a batch is what may be done in this time
TELL_SECONDS = 1.0


class Progress(Record):
    done: int
    total: int
    per_second: float | None  # None before the first batch
    seconds_left: float | None


class Pace:
    """Never faster than `rate` jobs a second, not even after a stall."""

    def __init__(
        self,
        total: int,
        rate: float | None,
        *,
        most: int,
        stop: Callable[[float], bool] | None = None,
        tell: Callable[[Progress, Sequence[Any]], None] | None = None,
    ) -> None:
        self.batch = most if rate is None else min(max(int(rate * TICK_SECONDS), 1), most)
        self._total, self._rate = total, rate
        self._stop = _sleep if stop is None else stop
        self._tell = _say_nothing if tell is None else tell
        self._began = self._due = time.monotonic()
        self._done = 0

    def turn(self, done: int) -> bool:
        """With so many jobs done, wait for the turn of the next batch; False when told to stop."""
        if self._rate is not None:
            self._due = max(self._due + (done - self._done) / self._rate, time.monotonic())
        self._done = done
        while True:
            self.told(done)
            wait = 0.0 if self._rate is None else max(self._due - time.monotonic(), 0.0)
            if self._stop(min(wait, TELL_SECONDS)):
                return False
            if wait <= TELL_SECONDS:
                return True

    def told(self, done: int, verdicts: Sequence[Any] = ()) -> None:
        speed = left = None
        if done:
            speed = done / max(time.monotonic() - self._began, 0.001)
            speed = speed if self._rate is None else min(speed, self._rate)
            left = (self._total - done) / speed
        self._tell(Progress(done, self._total, speed, left), verdicts)


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def _say_nothing(progress: Progress, verdicts: Sequence[Any]) -> None:
    """For callers that want to hear nothing."""
