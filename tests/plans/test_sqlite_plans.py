"""The plans of the statements that run all the time, on a table that has lived.

On a fresh table every plan looks good; after 100,000 jobs have passed, the planner has statistics
of its own and could pick another index. Each test says which walk a statement must take.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from tenure import sql
from tenure.ids import new_ids
from tenure.job import NewJob, Terms
from tenure.outcome import Completed, Dead, Ended, Failure, Retried
from tenure.store import WorkerInfo
from tenure.stores.sqlite import SqliteStore

CHURN = 100_000
BATCH = 2_000
STATEMENTS = sql.statements("sqlite")
FAILURE = Failure("boom", "BOOM", "ValueError at jobs.py:1")


def terms(**over: object) -> Terms:
    given: dict[str, object] = {
        "type": "noop",
        "queue": "default",
        "priority": 5,
        "category": "default",
        "max_attempts": 5,
        "timeout_ms": 300_000,
        "key_ttl_ms": 1000,
    }
    return Terms(**(given | over))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sqlite3.Connection]:
    """100,000 jobs through the store, some retried, some dead, some waiting for tomorrow."""
    path: Path = tmp_path_factory.mktemp("plans") / "jobs.db"
    store = SqliteStore(str(path))
    worker = store.register(
        WorkerInfo(0, "h:1:X", "h", "b", 1, "1", 0, 30_000, 0, 0, None, None, {}, 0)
    )
    lanes = [terms(priority=priority, org=org) for priority in (1, 5, 9) for org in ("a", "b")]
    later = terms(queue="later")
    store.enqueue([NewJob(id, later, "{}", 86_400_000) for id in new_ids(5000)])
    for start in range(0, CHURN, BATCH):
        batch = [
            NewJob(id, lanes[place % len(lanes)], "{}") for place, id in enumerate(new_ids(BATCH))
        ]
        store.enqueue(batch)
        jobs = store.claim(worker, [("default", BATCH)]).jobs
        ends = [
            Ended(job.id, job.lease_no, 1, Retried(3600, FAILURE) if n % 50 == 0 else Completed())
            for n, job in enumerate(jobs)
        ]
        if start % 10_000 == 0:
            ends[0] = Ended(jobs[0].id, jobs[0].lease_no, 1, Dead(FAILURE))
        store.finish(worker, ends)
    store.enqueue([NewJob(id, lanes[0], "{}") for id in new_ids(1000)])
    store.claim(worker, [("default", 500)])
    with store.file.read() as connection:
        connection.execute("ANALYZE")
        yield connection
    store.close()


def plan(db: sqlite3.Connection, *parts: str) -> str:
    text = " ".join(STATEMENTS[part] for part in parts)
    parameters = {
        "queue": "default", "priority": 5, "org": "a", "now": 2**60, "most": 100, "skip": 0,
        "worker": 1, "rows": "[]", "types": '["noop"]', "id": "X", "status": "dead_letter",
        "before": None, "type": None, "key": None, "ids": None, "place": None, "job": "X",
        "audit": "all", "job_id": "X", "after": 0, "later_ms": 1, "ready_at": 1, "name": "s",
        "result": "1", "lease_no": 1,
    }  # fmt: skip
    rows = db.execute(f"EXPLAIN QUERY PLAN {text}", parameters).fetchall()
    return "\n".join(row[3] for row in rows)


@pytest.mark.parametrize("name", ["claim_pick", "claim_leave"])
def test_the_claim_reads_a_range_of_its_queue(db: sqlite3.Connection, name: str) -> None:
    found = plan(db, name)

    assert "SEARCH tenure_ready USING PRIMARY KEY (queue=? AND priority=? AND org=? AND" in found
    assert "TEMP B-TREE" not in found, "it must not sort: the queue has the order"


@pytest.mark.parametrize("name", ["claim_priorities", "claim_orgs"])
def test_the_look_for_lanes_seeks_and_never_scans(db: sqlite3.Connection, name: str) -> None:
    found = plan(db, name)

    assert "SEARCH tenure_ready USING PRIMARY KEY" in found
    assert "SCAN tenure_ready" not in found


@pytest.mark.parametrize(
    "name",
    ["claim_grant", "claim_events", "finish_fence", "finish_fence_completed", "finish_history",
     "finish_events", "finish_leases", "finish_leave", "finish_stay", "progress", "save_step"],
)  # fmt: skip
def test_a_batch_goes_by_the_primary_key(db: sqlite3.Connection, name: str) -> None:
    found = plan(db, name)

    assert "USING PRIMARY KEY (id=?)" in found
    for table in ("tenure_jobs", "tenure_leases", "j", "l"):
        assert f"SCAN {table}\n" not in f"{found}\n"


def test_keys_are_found_by_org_and_key(db: sqlite3.Connection) -> None:
    assert "SEARCH tenure_keys USING PRIMARY KEY (org=? AND key=?)" in plan(db, "finish_keys")


def test_renewal_reads_leases_and_cancel_requests_only(db: sqlite3.Connection) -> None:
    assert plan(db, "held") == "SCAN tenure_leases"
    assert "tenure_jobs_cancel" in plan(db, "cancel_requests")


def test_a_withdrawn_job_leaves_its_queue_by_the_key(db: sqlite3.Connection) -> None:
    assert "SEARCH tenure_ready USING PRIMARY KEY (queue=? AND priority=? AND org=?" in plan(
        db, "operator_leave"
    )


def test_one_job_is_found_by_its_key(db: sqlite3.Connection) -> None:
    assert "SEARCH j USING PRIMARY KEY (id=?)" in plan(db, "job_hot", "job_by_id")
    assert "SEARCH j USING PRIMARY KEY (id=?)" in plan(db, "job_history", "job_by_id")


def test_dead_jobs_are_listed_from_their_index(db: sqlite3.Connection) -> None:
    found = plan(db, "job_hot", "job_status_dead", "job_filter")

    assert "tenure_jobs_dead (status=? AND id<?)" in found
    assert "TEMP B-TREE" not in found


def test_events_of_a_job_are_found_by_it(db: sqlite3.Connection) -> None:
    assert "tenure_events_job (job_id=? AND rowid>?)" in plan(db, "events_of_job")


def test_counts_read_no_job(db: sqlite3.Connection) -> None:
    """Queued, running and finished jobs are counted on an index or a table of their own; the row
    may be looked at only of the few that are dead, waiting or cancelled."""
    few = ("tenure_jobs_dead", "tenure_jobs_waiting", "tenure_history_cancelled")
    few += ("SCAN tenure_ready", "SCAN tenure_leases")
    for line in plan(db, "totals").splitlines():
        if "tenure_" in line and not any(index in line for index in few):
            assert "COVERING INDEX" in line, line


def test_retention_takes_the_oldest_of_a_task(db: sqlite3.Connection) -> None:
    assert "tenure_history_age (type=? AND completed_at<?)" in plan(db, "prune_history")
