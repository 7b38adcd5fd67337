"""A live job is never taken away: not by a held lock, not by a held GIL."""

from __future__ import annotations

import time
from collections.abc import Callable

from .harness import Workshop, eventually, write_lock_held
from .long_jobs import LEASE, LONG, nothing_was_taken


def test_the_write_lock_is_held_for_three_leases(workshop: Callable[..., Workshop]) -> None:
    shop = workshop(LONG)
    workers = [shop.worker(concurrency=4) for _ in range(2)]
    ids = [r.id for r in shop.app.enqueue_many([shop.jobs.long.job(n) for n in range(8)])]
    shop.wait_said("start", times=8)

    with write_lock_held(shop.place / "jobs.db"):
        time.sleep(3 * LEASE)  # the length of the outage is the test
    beats = {row.no: row.beat for row in shop.app.workers()}
    eventually(
        lambda: all(row.beat >= beats[row.no] + 4 for row in shop.app.workers()),
        within=30,
        what="both renewing again for more than a lease",
    )
    assert all(row.dead_at is None for row in shop.app.workers())
    shop.touch("go")
    shop.wait_for("completed", 8)

    nothing_was_taken(shop, ids)
    assert [worker.stop()["rescued"] for worker in workers] == [0, 0]


def test_a_handler_holds_the_gil_for_three_leases(workshop: Callable[..., Workshop]) -> None:
    shop = workshop(LONG)
    workers = [shop.worker(concurrency=4) for _ in range(2)]
    ids = [shop.jobs.gil.enqueue(3 * LEASE).id for _ in range(2)]
    ids += [r.id for r in shop.app.enqueue_many([shop.jobs.long.job(n) for n in range(2)])]
    shop.touch("go")

    shop.wait_for("completed", 4, within=45)

    nothing_was_taken(shop, ids)
    assert [worker.stop()["rescued"] for worker in workers] == [0, 0]
