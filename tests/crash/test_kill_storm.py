"""Workers are killed at random while thousands of jobs run: nothing is lost, nothing ends twice."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from .harness import Worker, Workshop, eventually

JOBS = """
    @app.task
    async def short(ctx: tenure.Context, n: int) -> int:
        say("start", ctx.job.id, ctx.attempt, ctx.job.lease_no, os.getpid())
        await asyncio.sleep(0.01 + n % 7 * 0.01)
        say("end", ctx.job.id, ctx.attempt, ctx.job.lease_no, os.getpid())
        return n

    @app.task(queue="frozen")
    async def frozen(ctx: tenure.Context, n: int) -> int:
        say("start", ctx.job.id, ctx.attempt, ctx.job.lease_no, os.getpid())
        while not there("thaw"):
            await asyncio.sleep(0.02)
        say("end", ctx.job.id, ctx.attempt, ctx.job.lease_no, os.getpid())
        return n
"""


def in_flight(shop: Workshop, worker: Worker) -> int:
    """Jobs this worker holds at this moment."""
    row = shop.row_of(worker)
    return 0 if row is None else int(row.held)


def storm(
    shop: Workshop,
    total: int,
    kills: int,
    dice: random.Random,
    *,
    concurrency: int = 5,
    lone: bool = True,
) -> dict[str, int]:
    """Kill `kills` times, evenly over the work: a third supervisors, every second one with all
    that it has started, as the end of a container does; else random children (`lone`: also such
    as run one job). A dead supervisor is replaced. How many kills of each kind, and jobs in flight
    at them."""
    counts = {"supervisors": 0, "workers": 0, "children": 0, "in flight": 0}
    stormed: dict[str, Any] = {"queues": "default", "ready": False, "concurrency": concurrency}
    workers = [shop.worker(**stormed) for _ in range(2)]
    for number in range(kills):
        goal = total * (number + 1) // (kills + 2)
        eventually(
            lambda goal=goal: shop.statuses()["completed"] >= goal,
            within=60,
            what=f"{goal} completed before kill {number + 1}",
            every=0.05,
        )
        workers = [worker for worker in workers if worker.alive]
        victim = dice.choice(workers)
        if number % 3 == 0:
            counts["in flight"] += in_flight(shop, victim)
            whole = number % 6 == 3
            victim.kill(whole=whole)
            counts["workers" if whole else "supervisors"] += 1
            workers.remove(victim)
            workers.append(shop.worker(**stormed))
        else:
            pids = eventually(
                lambda alive=workers: [
                    (one, pid) for one in alive for pid in one.children(lone=lone)
                ],
                what="a child to kill",
            )
            parent, pid = dice.choice(pids)
            counts["in flight"] += in_flight(shop, parent)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            counts["children"] += 1
    return counts


def killed(counts: dict[str, int]) -> str:
    kinds = {"supervisors", "workers", "children"}
    return ", ".join(f"{count} {kind}" for kind, count in counts.items() if kind in kinds)


def freeze_and_thaw(shop: Workshop, count: int) -> tuple[int, Worker]:
    """Stop a supervisor for longer than its lease while its children finish what they run: it
    hears of that when others have the jobs, and each of those finishes comes too late. How many
    were refused."""
    sleeper = shop.worker(queues="frozen", concurrency=count)
    receipts = shop.app.enqueue_many([shop.jobs.frozen.job(n) for n in range(count)])
    ids = {receipt.id for receipt in receipts}
    eventually(lambda: in_flight(shop, sleeper) == count, what="all frozen jobs running")
    before = shop.count("end")
    shop.freeze(sleeper)
    shop.touch("thaw")
    eventually(lambda: shop.count("end") >= before + count, what="the stale runs ended")
    other = shop.worker(queues="frozen", concurrency=count)
    eventually(
        lambda: ids <= shop.events("job.rescued").keys(),
        within=20,
        what="the stopped worker's jobs put back",
    )
    sleeper.signal(signal.SIGCONT)
    eventually(lambda: sleeper.refused() >= 50, within=15, what="stale finishes refused")
    return sleeper.refused(), other


def run_storm(shop: Workshop, total: int, kills: int) -> None:
    seed = int(os.environ.get("TENURE_TEST_SEED", "0")) or random.randrange(1, 10**6)
    print(f"\nseed {seed} (TENURE_TEST_SEED repeats it)")
    dice = random.Random(seed)
    began = time.monotonic()
    ids = {r.id for r in shop.app.enqueue_many([shop.jobs.short.job(n) for n in range(total)])}

    try:
        counts = storm(shop, total, kills, dice)
        shop.wait_for("completed", total, within=120)
    except AssertionError:
        print(shop.autopsy())
        raise
    stormed = time.monotonic() - began
    short_runs = Counter(line[1] for line in shop.said() if line[0] == "start")
    refused, _other = freeze_and_thaw(shop, 60)
    everything = total + 60
    shop.wait_for("completed", everything, within=60)
    for worker in shop.workers:
        if worker.alive:
            worker.stop()

    extra = sum(short_runs.values()) - total
    ended_twice = [id for id, n in shop.events("job.succeeded").items() if n != 1]
    rows = shop.sql("SELECT id, status FROM job_queue")
    print(
        f"{everything} jobs, killed {killed(counts)}, {stormed:.1f} s; "
        f"extra runs {extra}, in flight at kills {counts['in flight']}; "
        f"stale finishes refused {refused}; {time.monotonic() - began:.1f} s in all"
    )
    assert {id for id, _status in rows} >= ids
    assert len(rows) == everything  # lost 0
    assert {status for _id, status in rows} == {"completed"}
    assert len(shop.events("job.succeeded")) == everything
    assert ended_twice == []
    assert set(short_runs) == ids
    assert extra <= counts["in flight"]
    assert refused >= 50
    check_fences(shop)


def check_fences(shop: Workshop) -> None:
    """No lease ran twice, and the one accepted finish belongs to the last lease of its job."""
    starts = Counter((line[1], line[3]) for line in shop.said() if line[0] == "start")
    assert set(starts.values()) == {1}
    leases: dict[str, list[int]] = defaultdict(list)
    for id, lease in starts:
        leases[id].append(int(lease))
    accepted = dict(
        shop.sql("SELECT job_id, lease_no FROM tenure_events WHERE kind = 'job.succeeded'")
    )
    late = {id for id, lease in accepted.items() if lease != max(leases[id])}
    assert late == set()  # stale finishes accepted 0


def test_kill_storm(workshop: Callable[..., Workshop]) -> None:
    run_storm(workshop(JOBS, crash_limit=100), 2000, 20)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_long_kill_storm(workshop: Callable[..., Workshop]) -> None:
    run_storm(workshop(JOBS, crash_limit=100), 5000, 200)
