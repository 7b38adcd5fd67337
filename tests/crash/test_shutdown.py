"""SIGTERM: claim nothing more, finish what runs, give back the rest at no cost, exit 0."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from .harness import Workshop, eventually

MIXED = """
    @app.task
    async def hold(n: int) -> int:
        say("start", n)
        while not there("go"):
            await asyncio.sleep(0.01)
        say("end", n)
        return n

    @app.task
    def quick() -> None:
        time.sleep(0.0005)
"""


def test_sigterm_finishes_what_runs_and_gives_back_the_rest(
    workshop: Callable[..., Workshop],
) -> None:
    shop = workshop(MIXED)
    worker = shop.worker(concurrency=2)
    ids = [
        receipt.id for receipt in shop.app.enqueue_many([shop.jobs.hold.job(n) for n in range(8)])
    ]
    shop.wait_said("start", times=2)

    worker.signal(signal.SIGTERM)
    shop.touch("go")

    assert worker.wait() == 0
    assert shop.statuses() == {"completed": 2, "queued": 6}
    assert shop.count("start") == shop.count("end") == 2
    for id in ids:
        job = shop.job(id)
        assert job.attempts == (1 if job.status == "completed" else 0)
        assert job.crashes == 0
    (row,) = [row for row in shop.app.workers() if row.pid == worker.pid]
    assert row.dead_reason == "signed off"


def test_sigterm_in_the_middle_of_a_fast_queue_leaves_nothing_in_progress(
    workshop: Callable[..., Workshop],
) -> None:
    shop = workshop(MIXED)
    jobs = 40_000  # more than three workers get done before they are told to stop
    shop.app.enqueue_many([shop.jobs.quick.job() for _ in range(jobs)])
    for _ in range(3):
        worker = shop.worker(concurrency=8, processes=2, ready=False)
        before = shop.statuses()["completed"]
        eventually(lambda past=before: shop.statuses()["completed"] > past + 50, what="some work")
        worker.stop()
        counts = shop.statuses()
        assert counts["in_progress"] == 0
        assert counts["queued"] + counts["completed"] == jobs
    charged = shop.sql("SELECT count(*) FROM job_queue WHERE status = 'queued' AND attempts > 0")
    assert charged == [(0,)]
    assert set(shop.events("job.succeeded").values()) == {1}


def test_a_second_sigterm_means_now_and_the_job_is_not_charged(
    workshop: Callable[..., Workshop],
) -> None:
    shop = workshop(MIXED)
    worker = shop.worker(concurrency=2)
    receipt = shop.jobs.hold.enqueue(1)
    shop.wait_said("start", 1)

    worker.signal(signal.SIGTERM)
    time.sleep(0.3)  # it must still be waiting for the job: nothing can signal that
    assert worker.alive
    began = time.monotonic()
    worker.signal(signal.SIGTERM)

    assert worker.wait(10) == 0
    assert time.monotonic() - began < 5
    job = shop.job(receipt.id)
    assert (job.status, job.attempts, job.crashes) == ("queued", 0, 0)


def test_the_grace_ends_what_does_not_end(workshop: Callable[..., Workshop]) -> None:
    shop = workshop(MIXED, shutdown_timeout=0.5)
    worker = shop.worker(concurrency=2)
    receipt = shop.jobs.hold.enqueue(1)
    shop.wait_said("start", 1)
    began = time.monotonic()

    worker.stop(within=10)

    assert time.monotonic() - began < 5
    job = shop.job(receipt.id)
    assert (job.status, job.attempts, job.crashes) == ("queued", 0, 0)


def test_suspects_are_given_back_at_shutdown_instead_of_started(
    workshop: Callable[..., Workshop],
) -> None:
    """Jobs that run alone wait for a process of their own; those still waiting do not start."""
    shop = workshop(MIXED)
    ids = [
        receipt.id for receipt in shop.app.enqueue_many([shop.jobs.hold.job(n) for n in range(8)])
    ]
    shop.sql("UPDATE tenure_jobs SET crashes = 1")
    worker = shop.worker(concurrency=8)
    shop.wait_said("start", times=4)  # four at a time

    worker.signal(signal.SIGTERM)
    eventually(lambda: shop.statuses()["queued"] == 4, what="the waiting ones given back")
    shop.touch("go")

    assert worker.wait() == 0
    assert shop.count("start") == 4
    assert shop.statuses() == {"completed": 4, "queued": 4}
    assert all(shop.job(id).crashes == 1 for id in ids)
