"""A store that has been in use for long, written by SQL within seconds: finished, dead and queued
jobs by the hundred thousand, idempotency keys, and a day of rollups. For tests and figures.

Of the queued ones half are due tomorrow; the dead are in 20 groups, one with half of them; every
50,000th row belongs to the org `rare`, the others to 1,000 orgs.
"""

from __future__ import annotations

import time
from typing import Any

from tenure.stores.postgres import PostgresStore
from tenure.stores.sqlite import SqliteStore

DAY_MS = 86_400_000
STEP = 100_000
ROLLUPS_A_MINUTE = 80  # 115,200 a day

# In both dialects: %s stands for the number n of a row, which these are computed from.
TYPE = "'task-' || (CASE WHEN n %% 2 = 0 THEN 0 ELSE n %% 4 END)"
ORG = "CASE WHEN n %% 50000 = 7 THEN 'rare' ELSE 'org-' || (n %% 1000) END"
DEATH = "'death-' || (CASE WHEN n %% 2 = 0 THEN 0 ELSE n %% 19 END)"

POSTGRES_NUMBERS = "generate_series(%(first)s::bigint, %(last)s::bigint - 1) n"
POSTGRES_ID = (
    "(lpad(to_hex(%(made)s::bigint + n / 1000), 12, '0') || %(kind)s || lpad(to_hex(n), 19, '0'))"
    "::uuid"
)
POSTGRES = {
    "finished": f"""
INSERT INTO tenure.history (id, type, status, queue, priority, org, lease_no, worker, attempts,
  max_attempts, crashes, timeout_ms, category, actor_type, actor_id, scheduled_at, created_at,
  started_at, completed_at, payload)
SELECT {POSTGRES_ID}, {TYPE}, 'completed', 'default', 5, {ORG}, 1, 1, 1, 5, 0, 300000, 'default',
       'system', 'tenure', %(made)s, %(made)s, %(made)s, %(made)s + n / 1000, '{{}}'
  FROM {POSTGRES_NUMBERS}""",
    "dead": f"""
INSERT INTO tenure.jobs (id, type, status, queue, priority, org, ready_at, max_attempts, timeout_ms,
  category, actor_type, actor_id, scheduled_at, created_at, updated_at, completed_at, error,
  error_code, error_place, death, payload)
SELECT {POSTGRES_ID}, {TYPE}, 'dead_letter', 'default', 5, {ORG}, %(made)s, 5, 300000, 'default',
       'system', 'tenure', %(made)s, %(made)s, %(made)s, %(made)s + n / 1000, 'boom', 'BOOM',
       'E at a.py:1', {DEATH}, '{{}}'
  FROM {POSTGRES_NUMBERS}""",
    "queued": f"""
INSERT INTO tenure.jobs (id, type, status, queue, priority, org, ready_at, max_attempts, timeout_ms,
  category, actor_type, actor_id, scheduled_at, created_at, updated_at, payload)
SELECT {POSTGRES_ID}, {TYPE}, 'queued', 'default', 5, {ORG},
       %(made)s + CASE WHEN n %% 2 = 0 THEN 0 ELSE 2 * {DAY_MS} END, 5, 300000, 'default',
       'system', 'tenure', %(made)s, %(made)s, %(made)s, '{{}}'
  FROM {POSTGRES_NUMBERS}""",
    "keys": """
INSERT INTO tenure.keys (org, key, job_id, first_seen_at, last_seen_at, ttl_ms, expires_at, status)
SELECT 'org-' || (n %% 1000), 'key-' || n, gen_random_uuid(), %(made)s, %(made)s, 1000,
       %(made)s + 900000000, 'succeeded'
  FROM generate_series(%(first)s::bigint, %(last)s::bigint - 1) n""",
    "rollups": f"""
INSERT INTO tenure.rollups (grain, start, worker, queue, type, outcome, count, duration_ms, buckets)
SELECT 'minute', (%(made)s / 60000 + n / {ROLLUPS_A_MINUTE}) * 60000, n %% 20, 'default',
       'task-' || ((n %% {ROLLUPS_A_MINUTE}) / 20), 'completed', 7, 70, array_fill(1, ARRAY[13])
  FROM generate_series(%(first)s::bigint, %(last)s::bigint - 1) n""",
}

SQLITE_NUMBERS = "number"
SQLITE_WITH = "WITH RECURSIVE number (n) AS (VALUES (:first) UNION ALL SELECT n + 1 FROM number"
SQLITE_WITH += " WHERE n < :last - 1)"
SQLITE_ID = "printf('00%s%023d', :kind, n)"
SQLITE = {
    "finished": f"""
{SQLITE_WITH} INSERT INTO tenure_history (id, type, status, queue, priority, org, lease_no, worker,
  attempts, max_attempts, crashes, timeout_ms, category, actor_type, actor_id, scheduled_at,
  created_at, updated_at, started_at, completed_at, payload)
SELECT {SQLITE_ID}, {TYPE}, 'completed', 'default', 5, {ORG}, 1, 1, 1, 5, 0, 300000, 'default',
       'system', 'tenure', :made, :made, :made, :made, :made + n / 1000, '{{}}' FROM number""",
    "dead": f"""
{SQLITE_WITH} INSERT INTO tenure_jobs (id, type, status, queue, priority, org, ready_at,
  max_attempts, timeout_ms, category, actor_type, actor_id, scheduled_at, created_at, updated_at,
  completed_at, error, error_code, error_place, death, payload)
SELECT {SQLITE_ID}, {TYPE}, 'dead_letter', 'default', 5, {ORG}, :made, 5, 300000, 'default',
       'system', 'tenure', :made, :made, :made, :made + n / 1000, 'boom', 'BOOM', 'E at a.py:1',
       {DEATH}, '{{}}' FROM number""",
    "queued": f"""
{SQLITE_WITH} INSERT INTO tenure_jobs (id, type, status, queue, priority, org, ready_at,
  max_attempts, timeout_ms, category, actor_type, actor_id, scheduled_at, created_at, updated_at,
  payload)
SELECT {SQLITE_ID}, {TYPE}, 'queued', 'default', 5, {ORG},
       :made + CASE WHEN n %% 2 = 0 THEN 0 ELSE 2 * {DAY_MS} END, 5, 300000, 'default', 'system',
       'tenure', :made, :made, :made, '{{}}' FROM number""",
    "keys": f"""
{SQLITE_WITH} INSERT INTO tenure_keys (org, key, job_id, first_seen_at, last_seen_at, ttl_ms,
  expires_at, status)
SELECT 'org-' || (n %% 1000), 'key-' || n, 'X', :made, :made, 1000, :made + 900000000, 'succeeded'
  FROM number""",
    "rollups": f"""
{SQLITE_WITH} INSERT INTO tenure_rollups
SELECT 'minute', (:made / 60000 + n / {ROLLUPS_A_MINUTE}) * 60000, n %% 20, 'default',
       'task-' || ((n %% {ROLLUPS_A_MINUTE}) / 20), 'completed', 7, 70,
       1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1 FROM number""",
}
SQLITE_PLACES = f"""
INSERT INTO tenure_due SELECT queue, priority, org, ready_at, id FROM tenure_jobs
 WHERE status = 'queued' AND ready_at <= created_at;
INSERT INTO tenure_later SELECT queue, ready_at, id FROM tenure_jobs
 WHERE status = 'queued' AND ready_at > created_at + {DAY_MS}"""


def fill(store: Any, *, finished: int, dead: int, queued: int, minutes: int = 1440) -> None:
    """So many of each, `dead` keys, and rollups of so many minutes."""
    now = int(time.time() * 1000)
    postgres = isinstance(store, PostgresStore)
    counts = {"finished": finished, "dead": dead, "queued": queued, "keys": dead}
    counts["rollups"] = minutes * ROLLUPS_A_MINUTE
    for number, (kind, count) in enumerate(counts.items()):
        made = now - (minutes * 60_000 if kind == "rollups" else DAY_MS // 2)
        for first in range(0, count, STEP):
            given = {"first": first, "last": min(first + STEP, count), "made": made}
            given["kind"] = "ABCDE"[number]  # type: ignore[assignment]
            if postgres:
                _run_postgres(store, POSTGRES[kind], given)
            else:
                _run_sqlite(store, SQLITE[kind].replace("%%", "%"), given)
    if postgres:
        _run_postgres(store, "INSERT INTO tenure.queues VALUES ('default', 0)", {})
        _run_postgres(store, "VACUUM (ANALYZE)", {})
    else:
        _run_sqlite(store, "INSERT INTO tenure_queues VALUES ('default', 0, NULL, NULL, NULL)", {})
        for statement in SQLITE_PLACES.split(";"):
            _run_sqlite(store, statement, {})


def _run_postgres(store: PostgresStore, statement: str, given: dict[str, Any]) -> None:
    import psycopg

    with psycopg.connect(store.database.url, autocommit=True) as connection:
        connection.execute("SET synchronous_commit = off")
        connection.execute(statement.encode(), given if given else None)


def _run_sqlite(store: SqliteStore, statement: str, given: dict[str, Any]) -> None:
    with store.file.write() as db:
        db.execute(statement, given)
