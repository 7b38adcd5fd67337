"""Timers: named, periodic, in lanes; a slow or failing one delays no other lane."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest

from crash.harness import eventually
from tenure.engine.timers import Timer, lanes
from tenure.engine.upkeep import Upkeep
from tenure.engine.worker_threads import FIRST_PAUSE, Failures, WorkerThreads
from tenure.errors import StoreError

from .parts import worker_state


class Passes:
    """When a timer ran."""

    def __init__(self, then: Callable[[], object] = lambda: None) -> None:
        self.times: list[float] = []
        self._then = then

    def __call__(self) -> None:
        self.times.append(time.monotonic())
        self._then()

    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.times)]


@contextmanager
def running(*timers: Timer) -> Iterator[Failures]:
    failures, over = Failures(), threading.Event()
    threads = WorkerThreads(lanes(timers, failures), failures, over)
    assert threads.start()
    try:
        yield failures
    finally:
        over.set()
        threads.join(5)


def test_a_slow_one_delays_its_own_lane_only() -> None:
    go = threading.Event()
    slow, neighbour, other = Passes(go.wait), Passes(), Passes()
    with running(
        Timer("slow", 0.01, slow, "slow"),
        Timer("neighbour", 0.01, neighbour, "slow", at_start=False),
        Timer("other", 0.01, other, "quick"),
    ):
        eventually(lambda: len(other.times) > 20, what="the other lane")
        assert (len(slow.times), len(neighbour.times)) == (1, 0)
        go.set()
        eventually(lambda: len(neighbour.times) > 5, what="its neighbour, when it has ended")


def test_a_failing_one_is_logged_counted_and_backed_off(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """While the timers of its lane go on."""

    def fail() -> None:
        raise ValueError("a bug")

    failing, neighbour = Passes(fail), Passes()
    with (
        caplog.at_level(logging.ERROR, logger="tenure.worker"),
        running(
            Timer("failing", 0.01, failing, "one"), Timer("neighbour", 0.01, neighbour, "one")
        ) as failures,
    ):
        eventually(lambda: len(failing.times) == 3, what="three failures")
        assert len(neighbour.times) > 20
    for gap, expected in zip(failing.gaps(), (1, 2), strict=True):
        assert expected * FIRST_PAUSE <= gap <= expected * FIRST_PAUSE + 0.5
    assert failures.told() == {"failures": 3, "last_failure": "ValueError in failing"}
    assert caplog.text.count("internal error in failing") == 3


def test_a_store_that_is_away_is_no_failure() -> None:
    def away() -> None:
        raise StoreError("away")

    away_passes = Passes(away)
    with running(Timer("away", 0.01, away_passes, "one")) as failures:
        eventually(lambda: len(away_passes.times) > 5, what="it is due again in its turn")
    assert failures.told() == {}


def test_a_pause_is_never_longer_than_its_period() -> None:
    """A bound such as "rescued within a second" holds."""
    pauses = [Timer("t", 1.0, lambda: None, "one", jitter=0.1).pause() for _ in range(1000)]
    assert max(pauses) <= 1.0
    assert min(pauses) >= 0.9
    assert max(pauses) - min(pauses) > 0.05


def test_the_duties_of_a_worker() -> None:
    """Rescue and the pulse have lanes of their own; an embedded worker has no pulse."""
    timers = Upkeep(None, worker_state()).timers(embedded=False)  # type: ignore[arg-type]
    names = [timer.name for timer in timers]
    assert len(set(names)) == len(names)
    for alone in ("rescue", "pulse", "retention"):
        assert [timer.name for timer in timers if timer.lane == alone] == [alone]
    embedded = Upkeep(None, worker_state()).timers(embedded=True)  # type: ignore[arg-type]
    assert {timer.name for timer in timers} - {timer.name for timer in embedded} == {"pulse"}
