"""`tenure bench`, the loops in this process: what the database can do, and what our statements do.

The raw loop is the least a queue on this store could be: one bare table, one index, the same
durability. It is the yardstick, so it is measured in the same run, on the same disk, each round
next to the loop it is compared with.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from tenure.cli import output
from tenure.ids import new_ids

if TYPE_CHECKING:
    from tenure.app import App
    from tenure.job import ClaimedJob
    from tenure.store import Store
    from tenure.stores.sqlite import SqliteStore

BATCH = 1000  # rows of a bulk insert
CLAIM = 500  # rows of a claim and of a finish
DAY_MS = 86_400_000
CLAIMS_TIMED = 60
FILL_STEP = 100_000

Tell = Callable[[int, int, str], None]  # done, total, what
Seconds = float

RAW_SCHEMA = """
CREATE TABLE jobs (id TEXT PRIMARY KEY, queue TEXT NOT NULL, priority INTEGER NOT NULL,
                   ready_at INTEGER NOT NULL, status TEXT NOT NULL, payload TEXT NOT NULL);
CREATE INDEX jobs_ready ON jobs (queue, priority, ready_at, id) WHERE status = 'queued';
"""
RAW_INSERT = "INSERT INTO jobs VALUES (?, 'default', 5, ?, 'queued', ?)"
RAW_CLAIM = """
UPDATE jobs SET status = 'in_progress'
 WHERE id IN (SELECT id FROM jobs WHERE status = 'queued' AND queue = 'default' AND ready_at <= ?
               ORDER BY priority, ready_at, id LIMIT ?)
RETURNING id, payload
"""
RAW_FINISH = "UPDATE jobs SET status = 'completed' WHERE id IN (SELECT value FROM json_each(?))"


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


# ------------------------------------------------------------------------------- the raw loop


def raw_loop(module: Any, path: str, jobs: int, singles: int, tell: Tell) -> dict[str, float]:
    """Jobs a second of a bare table: insert one by one, insert in bulk, claim and finish."""
    db = module.connect(path, isolation_level=None)
    try:
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=FULL")
        db.executescript(RAW_SCHEMA)
        found = {"single": _raw_single(db, singles), "bulk": _raw_bulk(db, jobs, tell)}
        found["loop"] = _raw_claim_and_finish(db, jobs + singles, tell)
    finally:
        db.close()
    return found


def _raw_single(db: Any, count: int) -> float:
    began = time.perf_counter()
    for number, id in enumerate(new_ids(count)):
        db.execute("BEGIN IMMEDIATE")
        db.execute(RAW_INSERT, (id, wall_ms(), json.dumps({"data": {"n": number}})))
        db.execute("COMMIT")
    return rate(count, began)


def _raw_bulk(db: Any, count: int, tell: Tell) -> float:
    began = time.perf_counter()
    for first in range(0, count, BATCH):
        now = wall_ms()
        rows = [
            (id, now, json.dumps({"data": {"n": first + place}}))
            for place, id in enumerate(new_ids(min(BATCH, count - first)))
        ]
        db.execute("BEGIN IMMEDIATE")
        db.executemany(RAW_INSERT, rows)
        db.execute("COMMIT")
        tell(first, count, "raw insert")
    return rate(count, began)


def _raw_claim_and_finish(db: Any, count: int, tell: Tell) -> float:
    done, began = 0, time.perf_counter()
    while True:
        db.execute("BEGIN IMMEDIATE")
        claimed = db.execute(RAW_CLAIM, (wall_ms(), CLAIM)).fetchall()
        db.execute("COMMIT")
        if not claimed:
            return rate(done, began)
        db.execute("BEGIN IMMEDIATE")
        db.execute(RAW_FINISH, (json.dumps([row[0] for row in claimed]),))
        db.execute("COMMIT")
        done += len(claimed)
        tell(done, count, "raw claim and finish")


# ------------------------------------------------------------------------------- our statements


def enqueue_one_by_one(task: Any, count: int) -> float:
    began = time.perf_counter()
    for number in range(count):
        task.enqueue({"n": number})
    return rate(count, began)


def enqueue_in_batches(app: App, task: Any, count: int, tell: Tell) -> float:
    began = time.perf_counter()
    for first in range(0, count, BATCH):
        last = min(first + BATCH, count)
        app.enqueue_many([task.job({"n": number}) for number in range(first, last)])
        tell(last, count, "enqueue_many")
    return rate(count, began)


def register(store: Store) -> int:
    from tenure.engine import host

    return store.register(host.identify(host.new_worker_id(), 600.0, {"name": "bench"}))


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

FILL_JOBS = """
WITH RECURSIVE number (n) AS (VALUES (?1) UNION ALL SELECT n + 1 FROM number WHERE n < ?2 - 1)
INSERT INTO tenure_jobs (id, type, status, queue, priority, org, ready_at, max_attempts, timeout_ms,
  category, actor_type, actor_id, request_id, correlation_id, scheduled_at, created_at, updated_at,
  payload)
SELECT printf('%s%023d', ?3, n), 'nothing', 'queued', 'default', 5, 'default', ?4 + n / 1000,
       5, 300000, 'default', 'system', 'tenure', printf('%s%023d', ?3, n),
       printf('%s%023d', ?3, n), ?4, ?4, ?4, '{"data":{"n":1}}' FROM number
"""
FILL_HISTORY = """
WITH RECURSIVE number (n) AS (VALUES (?1) UNION ALL SELECT n + 1 FROM number WHERE n < ?2 - 1)
INSERT INTO tenure_history (id, type, status, queue, priority, org, lease_no, worker, attempts,
  max_attempts, crashes, timeout_ms, category, actor_type, actor_id, request_id, correlation_id,
  scheduled_at, created_at, updated_at, started_at, completed_at, payload)
SELECT printf('%s%023d', ?3, n), 'nothing', 'completed', 'default', 5, 'default', 1, 1, 1,
       5, 0, 300000, 'default', 'system', 'tenure', printf('%s%023d', ?3, n),
       printf('%s%023d', ?3, n), ?4, ?4, ?4, ?4, ?4 + n, '{"data":{"n":1}}' FROM number
"""


def fill(store: SqliteStore, each: int, tell: Tell) -> None:
    """So many queued, so many due tomorrow, so many finished; written by SQL, not enqueued."""
    store.migrate()
    now = wall_ms()
    kinds = (
        ("finished", FILL_HISTORY, "00A", now - DAY_MS),
        ("queued", FILL_JOBS, "00B", now - DAY_MS // 2),
        ("due tomorrow", FILL_JOBS, "00C", now + DAY_MS),
    )
    db = store.file.module.connect(store.file.path, isolation_level=None)
    try:
        db.execute("PRAGMA synchronous=OFF")  # of this connection, while it fills
        db.execute("INSERT INTO tenure_queues (name, created_at) VALUES ('default', ?)", (now,))
        for what, statement, prefix, when in kinds:
            for first in range(0, each, FILL_STEP):
                last = min(first + FILL_STEP, each)
                db.execute(statement, (first, last, prefix, when))
                tell(last, each, f"writing {each:,} {what}")
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    finally:
        db.close()


def claim_cost(store: Store, most: int) -> Seconds:
    """The median of many claims of `most`; each is given back, untimed, before the next."""
    worker = register(store)
    taken = list(_timed_claims(store, worker, most))
    store.retire(worker)
    return statistics.median(taken)


def _timed_claims(store: Store, worker: int, most: int) -> Iterator[Seconds]:
    from tenure.outcome import Ended, Released

    for _ in range(CLAIMS_TIMED):
        began = time.perf_counter()
        jobs = store.claim(worker, [("default", most)], limit=most).jobs
        yield time.perf_counter() - began
        given_back = Released("bench")
        store.finish(worker, [Ended(job.id, job.lease_no, 0, given_back) for job in jobs])
