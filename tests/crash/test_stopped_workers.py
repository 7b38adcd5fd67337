"""Processes are stopped for longer than a lease (SIGSTOP, a suspended machine): whatever wakes up,
no job runs twice at the same time, and a whole machine that was asleep goes on where it was."""

from __future__ import annotations

import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise

import pytest

from .harness import Worker, Workshop, eventually, gone
from .long_jobs import LEASE, LONG, nothing_was_taken

# Each says all the time that it runs, and where.
RUNS = """
    def runs(ctx):
        say("runs", ctx.job.id, os.getpid(), time.monotonic())

    @app.task(timeout=120)
    async def polite(ctx: tenure.Context) -> int:
        while not there("go"):
            runs(ctx)
            await asyncio.sleep(0.02)
        return os.getpid()

    @app.task(timeout=120)
    def deaf(ctx: tenure.Context) -> int:
        while not there("go"):
            runs(ctx)
            time.sleep(0.02)
        return os.getpid()

    @app.task(timeout=120)
    def attentive(ctx: tenure.Context) -> int:
        while not there("go"):
            runs(ctx)
            time.sleep(0.02)
            if ctx.cancelled:
                say("told", ctx.job.id)
                ctx.check()
        return os.getpid()

    @app.task(timeout=120)
    async def blocking(ctx: tenure.Context) -> int:
        while not there("go"):
            runs(ctx)
            time.sleep(0.02)
        return os.getpid()
"""


def spans(shop: Workshop) -> dict[str, list[tuple[float, float, int]]]:
    """For each job, from when to when it ran in which process."""
    seen: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for word, id, *rest in shop.said():
        if word == "runs":
            seen[id][int(rest[0])].append(float(rest[1]))
    return {
        id: sorted((min(times), max(times), pid) for pid, times in by_pid.items())
        for id, by_pid in seen.items()
    }


def ran_one_after_the_other(shop: Workshop, ids: list[str]) -> None:
    for id in ids:
        found = spans(shop)[id]
        for (_, end, _), (begin, _, _) in pairwise(found):
            assert end < begin, found


def wait_for_processes(shop: Workshop, ids: list[str], count: int) -> None:
    def each_ran() -> bool:
        found = spans(shop)
        return all(len(found.get(id, [])) >= count for id in ids)

    eventually(each_ran, within=30, what=f"each job run by {count} processes")


def wait_for_beats(shop: Workshop, worker: Worker, count: int) -> None:
    beat = shop.row_of(worker).beat + count
    eventually(lambda: shop.row_of(worker).beat >= beat, what=f"{count} renewals")


def stop_wholly(shop: Workshop, worker: Worker) -> list[int]:
    shop.freeze(worker)
    children = worker.children()
    for child in children:
        os.kill(child, signal.SIGSTOP)
    return children


@pytest.mark.parametrize("kinds", [("polite", "deaf", "attentive"), ("blocking",)])
def test_only_a_supervisor_is_stopped(
    workshop: Callable[..., Workshop], kinds: tuple[str, ...]
) -> None:
    """It does not renew, so another worker gets its jobs: its children must have stopped by then,
    even one whose loop is blocked, and even where a handler does not listen."""
    shop = workshop(RUNS)
    stopped = shop.worker(concurrency=4)
    jobs = [shop.jobs.app.tasks[kind].job() for kind in kinds]
    ids = [receipt.id for receipt in shop.app.enqueue_many(jobs)]
    wait_for_processes(shop, ids, 1)
    (child,) = stopped.children()
    other = shop.worker(concurrency=4)

    shop.freeze(stopped)
    wait_for_processes(shop, ids, 2)
    assert gone(child)
    row = shop.row_of(stopped)
    stopped.signal(signal.SIGCONT)
    eventually(lambda: shop.row_of(stopped).no != row.no, what="the stopped one under a new id")
    shop.touch("go")
    shop.wait_for("completed", len(ids))

    ran_one_after_the_other(shop, ids)
    for id in ids:
        assert shop.job(id).attempts == 2
        assert shop.job(id).crashes <= 1  # who knows what stopped it
    assert set(shop.events("job.succeeded").values()) == {1}
    assert shop.count("told") == ("attentive" in kinds)
    assert other.stop()["rescued"] == len(ids)
    assert stopped.alive


def test_a_lonely_supervisor_is_stopped_for_three_leases(
    workshop: Callable[..., Workshop],
) -> None:
    """Its children cannot know that nobody else is there. What they ran is run again, uncharged."""
    shop = workshop(RUNS)
    worker = shop.worker(concurrency=4)
    kinds = ("polite", "deaf", "attentive")
    jobs = [shop.jobs.app.tasks[kind].job() for kind in kinds]
    ids = [receipt.id for receipt in shop.app.enqueue_many(jobs)]
    wait_for_processes(shop, ids, 1)
    (child,) = worker.children()

    shop.freeze(worker)
    eventually(lambda: gone(child), within=LEASE, what="its child gone before the lease ends")
    time.sleep(2 * LEASE)  # the length of the stop is the test
    worker.signal(signal.SIGCONT)
    wait_for_processes(shop, ids, 2)
    shop.touch("go")
    shop.wait_for("completed", 3)

    ran_one_after_the_other(shop, ids)
    for id in ids:
        assert (shop.job(id).attempts, shop.job(id).crashes) == (1, 0)
    assert shop.events("job.rescued") == {}
    assert len(shop.app.workers()) == 1
    assert worker.stop()["completed"] == 3


def test_a_supervisor_is_stopped_for_a_moment(workshop: Callable[..., Workshop]) -> None:
    shop = workshop(LONG)
    worker = shop.worker(concurrency=4)
    ids = [r.id for r in shop.app.enqueue_many([shop.jobs.long.job(n) for n in range(4)])]
    shop.wait_said("start", times=4)

    shop.freeze(worker)
    time.sleep(LEASE / 4)  # the length of the stop is the test
    worker.signal(signal.SIGCONT)
    wait_for_beats(shop, worker, 4)
    shop.touch("go")
    shop.wait_for("completed", 4)

    nothing_was_taken(shop, ids)
    assert worker.stop()["completed"] == 4


def test_everybody_is_stopped_for_three_leases(workshop: Callable[..., Workshop]) -> None:
    """A suspended machine: whoever wakes first must not take the other's jobs, and no child takes
    the sleep of all for its supervisor's."""
    shop = workshop(LONG)
    workers = [shop.worker(concurrency=3) for _ in range(2)]
    ids = [r.id for r in shop.app.enqueue_many([shop.jobs.long.job(n) for n in range(6)])]
    shop.wait_said("start", times=6)

    children = [stop_wholly(shop, worker) for worker in workers]
    time.sleep(3 * LEASE)  # the length of the stop is the test
    for worker, its in zip(workers, children, strict=True):
        for child in its:
            os.kill(child, signal.SIGCONT)
        time.sleep(LEASE / 6)  # the child is awake first
        worker.signal(signal.SIGCONT)
        wait_for_beats(shop, worker, 1)
    wait_for_beats(shop, workers[1], 4)
    shop.touch("go")
    shop.wait_for("completed", 6)

    nothing_was_taken(shop, ids)
