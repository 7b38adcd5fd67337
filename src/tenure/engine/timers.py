"""The periodic duties of a worker: a list of named timers, run in lanes.

A lane is one thread. The timers of a lane run one after another, so a slow one delays its own lane
and no other: rescue has a lane to itself. What a timer does is one bounded pass. A pass that fails
is logged, counted, and its timer pauses longer and longer, as the threads of a worker do
(`worker_threads.py`); a store that does not answer is no failure: the pass is due again in its
turn.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

from tenure.engine.worker_threads import Failures, Loop
from tenure.errors import StoreError

log = logging.getLogger("tenure.worker")


class Timer(NamedTuple):
    name: str
    every: float  # seconds between the end of one pass and the begin of the next
    run: Callable[[], object]
    lane: str
    # The share of a pause by which it may be shorter, at random: workers that were started together
    # do not ask the store in step. Never longer: bounds on how soon a pass comes hold.
    jitter: float = 0.05
    at_start: bool = True  # the first pass comes when the worker starts, or after a first pause

    def pause(self) -> float:
        return self.every * (1.0 - self.jitter * random.random())


def lanes(timers: Iterable[Timer], failures: Failures) -> dict[str, Loop]:
    """The threads that run these timers, by the names of their lanes."""
    found: dict[str, list[Timer]] = {}
    for timer in timers:
        found.setdefault(timer.lane, []).append(timer)
    return {lane: partial(_run_lane, own, failures) for lane, own in found.items()}


def _run_lane(timers: list[Timer], failures: Failures, over: threading.Event) -> None:
    began = time.monotonic()
    due = {timer: began + (0.0 if timer.at_start else timer.pause()) for timer in timers}
    while True:
        timer = min(due, key=due.__getitem__)
        if over.wait(max(0.0, due[timer] - time.monotonic())):
            return
        pause = _run(timer, failures)
        due[timer] = time.monotonic() + pause


def _run(timer: Timer, failures: Failures) -> float:
    """One pass; seconds until the next."""
    try:
        timer.run()
    except StoreError as error:
        log.debug("%s postponed: %s", timer.name, error)
    except BaseException as error:
        return max(timer.pause(), failures.count(timer.name, error))
    return timer.pause()
