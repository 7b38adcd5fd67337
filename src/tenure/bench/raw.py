"""`tenure bench`, the loops in this process: what our statements do with nothing around them, and
what every loop shares. The raw loops they are compared with are each store's own (`sqlite`,
`postgres`): the yardstick is measured in the same run, on the same disk, each round next to
the loop it is compared with.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tenure.terminal import output

if TYPE_CHECKING:
    from tenure.app import App
    from tenure.bench.place import Tell
    from tenure.job import ClaimedJob
    from tenure.store import Registration, Store

BATCH = 1000  # rows of a bulk insert
CLAIM = 500  # rows of a claim and of a finish
CLAIMS_TIMED = 60

Seconds = float


def wall_ms() -> int:
    return time.time_ns() // 1_000_000


def rate(count: int, began: float) -> float:
    return count / max(time.perf_counter() - began, 1e-9)


def percentile(values: list[float], share: float) -> float:
    """The value that `share` of all values do not exceed; no interpolation."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def machine() -> dict[str, Any]:
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    return {
        "date": output.stamp(output.utc_now()),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": len(affinity(0)) if affinity else os.cpu_count(),
        "load": os.getloadavg()[0],  # before the run adds its own
        "python": platform.python_version(),
    }


# ------------------------------------------------------------------------------- our statements


def enqueue_one_by_one(task: Any, count: int) -> float:
    task.enqueue({"n": 0})  # it connects; the raw loop has a connection already
    began = time.perf_counter()
    for number in range(1, count):
        task.enqueue({"n": number})
    return rate(count - 1, began)


def enqueue_in_batches(app: App, task: Any, count: int, tell: Tell) -> float:
    began = time.perf_counter()
    for first in range(0, count, BATCH):
        last = min(first + BATCH, count)
        app.enqueue_many([task.job({"n": number}) for number in range(first, last)])
        tell(last, count, "enqueue_many")
    return rate(count, began)


def register(store: Store) -> Registration:
    from tenure.engine import machine

    return store.register(machine.identify(machine.new_worker_id(), 600.0, {"name": "bench"}))


def own_loop(store: Store, count: int, tell: Tell) -> float:
    """Claim 500, finish 500, with the store's own statements and nothing around them."""
    worker, done, began = register(store), 0, time.perf_counter()
    while jobs := store.claim(worker, [("default", CLAIM)], limit=CLAIM).jobs:
        store.finish(worker, _completed(jobs))
        done += len(jobs)
        tell(done, count, "own claim and finish")
    found = rate(done, began)
    store.retire(worker)
    return found


def _completed(jobs: list[ClaimedJob]) -> list[Any]:
    from tenure.outcome import Completed, Ended

    how = Completed(None)
    return [Ended(job.id, job.lease_no, 0, how) for job in jobs]


# ------------------------------------------------------------------------------- scale


def claim_cost(store: Store, most: int) -> Seconds:
    """The median of many claims of `most`; each is given back, untimed, before the next."""
    worker = register(store)
    taken = list(_timed_claims(store, worker, most))
    store.retire(worker)
    return statistics.median(taken)


def _timed_claims(store: Store, worker: Registration, most: int) -> Iterator[Seconds]:
    from tenure.outcome import Ended, Released

    for _ in range(CLAIMS_TIMED):
        began = time.perf_counter()
        jobs = store.claim(worker, [("default", most)], limit=most).jobs
        yield time.perf_counter() - began
        given_back = Released("bench")
        store.finish(worker, [Ended(job.id, job.lease_no, 0, given_back) for job in jobs])
