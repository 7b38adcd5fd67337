"""A live job is never taken away: not by a held lock, a stopped supervisor or a held GIL."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from .harness import Workshop, eventually, write_lock_held

LEASE = 3.0
LONG = """
    @app.task(timeout=120)
    async def long(ctx: tenure.Context, n: int) -> int:
        say("start", ctx.job.id, ctx.job.lease_no)
        while not there("go"):
            await asyncio.sleep(0.02)
        return n

    @app.task(timeout=120)
    def gil(ctx: tenure.Context, seconds: float) -> None:
        say("start", ctx.job.id, ctx.job.lease_no)
        hold_the_gil(seconds)
"""


def nothing_was_taken(shop: Workshop, ids: list[str]) -> None:
    for id in ids:
        job = shop.job(id)
        assert (job.status, job.lease_no, job.attempts, job.crashes) == ("completed", 1, 1, 0)
    assert shop.events("job.rescued") == {}
    assert shop.count("start") == len(ids)
    assert set(shop.events("job.succeeded").values()) == {1}


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


def test_a_handler_holds_the_gil_for_three_leases(workshop: Callable[..., Workshop]) -> None:
    shop = workshop(LONG)
    workers = [shop.worker(concurrency=4) for _ in range(2)]
    ids = [shop.jobs.gil.enqueue(3 * LEASE).id for _ in range(2)]
    ids += [r.id for r in shop.app.enqueue_many([shop.jobs.long.job(n) for n in range(2)])]
    shop.touch("go")

    shop.wait_for("completed", 4, within=45)

    nothing_was_taken(shop, ids)
    assert [worker.stop()["rescued"] for worker in workers] == [0, 0]
