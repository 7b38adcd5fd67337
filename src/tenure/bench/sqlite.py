"""`tenure bench` on SQLite: fresh files in a temporary directory beside the database of the URL.

The raw loop is the least a queue on SQLite could be: one bare table, one index, the same
durability.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import tempfile
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tenure.app import sqlite_path
from tenure.bench import raw
from tenure.bench.place import DAY_MS, FILL_STEP, Caller, Completions, Place, Tell
from tenure.config import Settings
from tenure.errors import ConfigError
from tenure.ids import new_ids

if TYPE_CHECKING:
    from tenure.stores.sqlite import SqliteStore

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

COMPLETIONS = """
SELECT count(*), coalesce(min(completed_at), 0), coalesce(max(completed_at), 0)
  FROM tenure_history WHERE completed_at > ?
"""
BEFORE_LAST = "SELECT completed_at FROM tenure_history ORDER BY completed_at DESC LIMIT 1 OFFSET ?"

FILL_JOBS = """
WITH RECURSIVE number (n) AS (VALUES (?1) UNION ALL SELECT n + 1 FROM number WHERE n < ?2 - 1)
INSERT INTO tenure_jobs (id, type, status, queue, priority, org, ready_at, max_attempts, timeout_ms,
  category, actor_type, actor_id, scheduled_at, created_at, updated_at, payload)
SELECT printf('%s%023d', ?3, n), 'nothing', 'queued', ?5, 5, 'default', ?4 + n / 1000,
       5, 300000, 'default', 'system', 'tenure', ?4, ?4, ?4, '{"data":{"n":1}}' FROM number
"""
FILL_DUE = """
WITH RECURSIVE number (n) AS (VALUES (?1) UNION ALL SELECT n + 1 FROM number WHERE n < ?2 - 1)
INSERT INTO tenure_due (queue, priority, org, ready_at, id)
SELECT ?5, 5, 'default', ?4 + n / 1000, printf('%s%023d', ?3, n) FROM number
"""
FILL_LATER = """
WITH RECURSIVE number (n) AS (VALUES (?1) UNION ALL SELECT n + 1 FROM number WHERE n < ?2 - 1)
INSERT INTO tenure_later (queue, ready_at, id)
SELECT ?5, ?4 + n / 1000, printf('%s%023d', ?3, n) FROM number
"""
FILL_HISTORY = """
WITH RECURSIVE number (n) AS (VALUES (?1) UNION ALL SELECT n + 1 FROM number WHERE n < ?2 - 1)
INSERT INTO tenure_history (id, type, status, queue, priority, org, lease_no, worker, attempts,
  max_attempts, crashes, timeout_ms, category, actor_type, actor_id, scheduled_at,
  created_at, updated_at, started_at, completed_at, payload)
SELECT printf('%s%023d', ?3, n), 'nothing', 'completed', ?5, 5, 'default', 1, 1, 1,
       5, 0, 300000, 'default', 'system', 'tenure', ?4, ?4, ?4, ?4, ?4 + n, '{"data":{"n":1}}'
  FROM number
"""


BARS = {
    "drain / raw loop": 0.2,
    "drain / own statements": 0.7,
    "enqueue one / raw": 0.6,
    "enqueue_many / raw bulk": 0.2,
    "pick-up, idle worker, p95": 10,
    "cold process enqueues one job, p95": 100,
}
RAW_TITLES = {"raw_bulk": "raw: insert in bulk"}


@contextlib.contextmanager
def sqlite_place(settings: Settings) -> Iterator[SqlitePlace]:
    beside = os.path.dirname(os.path.abspath(sqlite_path(settings.url)))
    if not os.path.isdir(beside):
        raise ConfigError(
            f"there is no directory {beside} to measure in: create it, or correct --url"
        )
    module = importlib.import_module(settings.sqlite_module)
    with tempfile.TemporaryDirectory(
        prefix="tenure-bench-", dir=beside, ignore_cleanup_errors=True
    ) as directory:
        yield SqlitePlace(module, directory)


class SqlitePlace(Place):
    bars = BARS
    raw_titles = RAW_TITLES

    def __init__(self, module: Any, directory: str) -> None:
        self.directory = directory
        self.machine = {"sqlite": module.sqlite_version}
        self.headline = f"SQLite {module.sqlite_version}, in {os.path.dirname(directory)}"
        self._module = module
        self._files = 0

    @contextlib.contextmanager
    def fresh(self) -> Iterator[Settings]:
        with self._fresh_file() as path:
            yield Settings(url=f"sqlite:///{path}", sqlite_module=self._module.__name__)

    @contextlib.contextmanager
    def _fresh_file(self) -> Iterator[str]:
        self._files += 1
        path = os.path.join(self.directory, f"bench-{self._files}.db")
        try:
            yield path
        finally:
            for ending in ("", "-wal", "-shm", "-tenure.lock"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path + ending)

    # -- the raw loop -------------------------------------------------------------------------
    def raw_loop(self, jobs: int, singles: int, tell: Tell) -> dict[str, float]:
        with self._fresh_file() as path, self._connected(path) as db:
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("PRAGMA synchronous=FULL")
            db.executescript(RAW_SCHEMA)
            found = {"single": _raw_single(db, singles), "bulk": _raw_bulk(db, jobs, tell)}
            found["loop"] = _raw_claim_and_finish(db, jobs + singles, tell)
        return found

    @contextlib.contextmanager
    def _connected(self, path: str) -> Iterator[Any]:
        db = self._module.connect(path, isolation_level=None)
        try:
            yield db
        finally:
            db.close()

    # -- what only a benchmark asks -----------------------------------------------------------
    def completions(self, store: SqliteStore, after: int = 0) -> Completions:
        with store.file.read() as db:
            return Completions._make(db.execute(COMPLETIONS, (after,)).fetchone())

    def before_last(self, store: SqliteStore, count: int) -> int:
        with store.file.read() as db:
            row = db.execute(BEFORE_LAST, (count,)).fetchone()
        return int(row[0]) if row else 0

    def fill(self, store: SqliteStore, each: int, queue: str, tell: Tell) -> None:
        now = raw.wall_ms()
        kinds = (
            ("finished", [FILL_HISTORY], "00A", now - DAY_MS, "default"),
            ("queued", [FILL_JOBS, FILL_DUE], "00B", now - DAY_MS // 2, queue),
            ("due tomorrow", [FILL_JOBS, FILL_LATER], "00C", now + DAY_MS, "default"),
        )
        with self._connected(store.file.path) as db:
            db.execute("PRAGMA synchronous=OFF")  # of this connection, while it fills
            for name in {queue, "default"}:
                db.execute(
                    "INSERT INTO tenure_queues (name, created_at) VALUES (?, ?)", (name, now)
                )
            for what, statements, prefix, when, where in kinds:
                for first in range(0, each, FILL_STEP):
                    last = min(first + FILL_STEP, each)
                    for statement in statements:
                        db.execute(statement, (first, last, prefix, when, where))
                    tell(last, each, f"writing {each:,} {what}")
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    @contextlib.contextmanager
    def caller(self, store: SqliteStore) -> Iterator[Caller]:
        with self._connected(store.file.path) as db:
            db.execute("CREATE TABLE IF NOT EXISTS orders (n INTEGER)")
            yield Caller(db, "BEGIN IMMEDIATE", "INSERT INTO orders VALUES (?)")

    @contextlib.contextmanager
    def snapshot(self, store: SqliteStore) -> Iterator[None]:
        with self._connected(store.file.path) as db:
            db.execute("BEGIN")
            db.execute("SELECT count(*) FROM tenure_queues").fetchone()
            yield


def _raw_single(db: Any, count: int) -> float:
    began = time.perf_counter()
    for number, id in enumerate(new_ids(count)):
        db.execute("BEGIN IMMEDIATE")
        db.execute(RAW_INSERT, (id, raw.wall_ms(), json.dumps({"data": {"n": number}})))
        db.execute("COMMIT")
    return raw.rate(count, began)


def _raw_bulk(db: Any, count: int, tell: Tell) -> float:
    began = time.perf_counter()
    for first in range(0, count, raw.BATCH):
        now = raw.wall_ms()
        rows = [
            (id, now, json.dumps({"data": {"n": first + place}}))
            for place, id in enumerate(new_ids(min(raw.BATCH, count - first)))
        ]
        db.execute("BEGIN IMMEDIATE")
        db.executemany(RAW_INSERT, rows)
        db.execute("COMMIT")
        tell(first, count, "raw insert")
    return raw.rate(count, began)


def _raw_claim_and_finish(db: Any, count: int, tell: Tell) -> float:
    done, began = 0, time.perf_counter()
    while True:
        db.execute("BEGIN IMMEDIATE")
        claimed = db.execute(RAW_CLAIM, (raw.wall_ms(), raw.CLAIM)).fetchall()
        db.execute("COMMIT")
        if not claimed:
            return raw.rate(done, began)
        db.execute("BEGIN IMMEDIATE")
        db.execute(RAW_FINISH, (json.dumps([row[0] for row in claimed]),))
        db.execute("COMMIT")
        done += len(claimed)
        tell(done, count, "raw claim and finish")
