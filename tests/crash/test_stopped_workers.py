"""Supervisors are stopped for several leases (SIGSTOP, a suspended machine): jobs stay theirs."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from .harness import Workshop, eventually
from .long_jobs import LEASE, LONG, nothing_was_taken


def test_a_lonely_supervisor_is_stopped_for_three_leases(
    workshop: Callable[..., Workshop],
) -> None:
    shop = workshop(LONG)
    worker = shop.worker(concurrency=4)
    ids = [r.id for r in shop.app.enqueue_many([shop.jobs.long.job(n) for n in range(4)])]
    shop.wait_said("start", times=4)

    shop.freeze(worker)
    time.sleep(3 * LEASE)  # the length of the stop is the test
    worker.signal(signal.SIGCONT)
    (beat,) = [row.beat for row in shop.app.workers()]
    eventually(lambda: shop.app.workers()[0].beat >= beat + 2, what="it renewing again")
    shop.touch("go")
    shop.wait_for("completed", 4)

    nothing_was_taken(shop, ids)
    assert len(shop.app.workers()) == 1


def test_everybody_is_stopped_for_three_leases(workshop: Callable[..., Workshop]) -> None:
    """A suspended machine: whoever wakes first must not take the other's jobs."""
    shop = workshop(LONG)
    workers = [shop.worker(concurrency=3) for _ in range(2)]
    ids = [r.id for r in shop.app.enqueue_many([shop.jobs.long.job(n) for n in range(6)])]
    shop.wait_said("start", times=6)

    for worker in workers:
        shop.freeze(worker)
    time.sleep(2 * LEASE)  # the length of the stop is the test
    workers[0].signal(signal.SIGCONT)
    beat = shop.row_of(workers[0]).beat
    eventually(lambda: shop.row_of(workers[0]).beat > beat, what="the first one awake")
    workers[1].signal(signal.SIGCONT)
    beat = shop.row_of(workers[1]).beat
    eventually(lambda: shop.row_of(workers[1]).beat >= beat + 4, what="the second one awake")
    shop.touch("go")
    shop.wait_for("completed", 6)

    nothing_was_taken(shop, ids)
