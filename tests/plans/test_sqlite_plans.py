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


def plan(db: sqlite3.Connection, *parts: str, source: str = "") -> str:
    text = " ".join(STATEMENTS[part] for part in parts)
    if source:
        text = text.replace("{source}", STATEMENTS[source])
    parameters = {
        "queue": "default", "priority": 5, "org": "a", "now": 2**60, "most": 100, "skip": 0,
        "worker": 1, "rows": "[]", "types": '["noop"]', "id": "X", "status": "dead_letter",
        "before": None, "type": None, "key": None, "ids": None, "place": None, "job": "X",
        "audit": "all", "job_id": "X", "after": 0, "later_ms": 1, "ready_at": 1, "name": "s",
        "result": "1", "lease_no": 1, "worker_id": "h:1:X", "walk": 20_000, "since": 0,
        "death": "d", "last": 1, "since_id": "",
    }  # fmt: skip
    rows = db.execute(f"EXPLAIN QUERY PLAN {text}", parameters).fetchall()
    return "\n".join(row[3] for row in rows)


@pytest.mark.parametrize("name", ["claim_pick", "claim_leave", "claim_walk", "claim_behind"])
def test_the_claim_reads_a_range_of_its_queue(db: sqlite3.Connection, name: str) -> None:
    found = plan(db, name)

    assert "SEARCH tenure_due USING PRIMARY KEY (queue=? AND priority=? AND org=?" in found.replace(
        "SEARCH d ", "SEARCH tenure_due "
    )
    assert "TEMP B-TREE" not in found, "it must not sort: the queue has the order"


@pytest.mark.parametrize("name", ["claim_priorities", "claim_orgs"])
def test_the_look_for_lanes_seeks_and_never_scans(db: sqlite3.Connection, name: str) -> None:
    found = plan(db, name)

    assert "SEARCH tenure_due USING PRIMARY KEY" in found
    assert "SCAN tenure_due" not in found


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
    assert "SEARCH tenure_keys USING PRIMARY KEY (key=? AND org=?)" in plan(db, "finish_keys")
    assert "SEARCH tenure_keys USING PRIMARY KEY (key=?" in plan(db, "key_owners")


def test_renewal_reads_leases_and_cancel_requests_only(db: sqlite3.Connection) -> None:
    assert plan(db, "held") == "SCAN tenure_leases"
    assert "tenure_jobs_cancel" in plan(db, "cancel_requests")


@pytest.mark.parametrize("place", ["due", "later", "suspects"])
def test_a_withdrawn_job_leaves_its_queue_by_the_key(db: sqlite3.Connection, place: str) -> None:
    found = plan(db, f"operator_leave_{place}")

    assert f"SEARCH tenure_{place} USING PRIMARY KEY (queue=? AND " in found


def test_one_job_is_found_by_its_key(db: sqlite3.Connection) -> None:
    for columns, table in (("job_hot", "hot"), ("job_history", "finished")):
        found = plan(db, columns, "job_by_id", source=table)
        assert "SEARCH j USING PRIMARY KEY (id=?)" in found


@pytest.mark.parametrize(
    ("walk", "where", "by"),
    [
        ("walk_hot", "", "SEARCH j USING PRIMARY KEY (id<?)"),
        ("walk_dead", "j.completed_at IS NOT NULL AND j.status = :status AND ",
         "SEARCH j USING INDEX tenure_jobs_dead (status=? AND id<?)"),
        ("walk_all_dead", "", "tenure_jobs_dead (status=? AND id<?)"),
        ("walk_held", "", "SEARCH tenure_leases USING PRIMARY KEY (id<?)"),
        ("walk_finished", "", "SEARCH j USING PRIMARY KEY (id<?)"),
        ("walk_cancelled", "j.status = 'cancelled' AND ", "tenure_history_cancelled (id<?)"),
    ],
)  # fmt: skip
def test_a_listing_walks_in_the_order_of_its_index(
    db: sqlite3.Connection, walk: str, where: str, by: str
) -> None:
    text = STATEMENTS["walk_end"].replace("{source}", STATEMENTS[walk])
    text = text.replace("{where}", f"WHERE {where}j.id < :before ")
    given = {"before": "~", "status": "dead_letter", "walk": 20_000}
    found = "\n".join(row[3] for row in db.execute(f"EXPLAIN QUERY PLAN {text}", given))

    assert by in found
    assert "SCAN tenure_jobs" not in found
    assert "SCAN tenure_history" not in found


def test_the_next_group_of_the_dead_is_a_step(db: sqlite3.Connection) -> None:
    """Scalar bounds: a comparison of rows walks over all that died of the same thing."""
    found = plan(db, "death_after")

    assert "tenure_jobs_death (queue=? AND type=? AND death>?)" in found
    assert "tenure_jobs_death (queue=? AND type>?)" in found
    assert "tenure_jobs_death (queue>?)" in found


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("claim_others", "later"),
        ("claim_others", "suspects"),
        ("claim_promote", "later"),
        ("claim_promoted", "later"),
        ("claim_pick_suspects", "suspects"),
        ("next_due", "later"),
        ("next_due", "suspects"),
    ],
)
def test_what_is_not_due_yet_is_never_walked(db: sqlite3.Connection, name: str, table: str) -> None:
    found = plan(db, name)

    assert f"tenure_{table} USING PRIMARY KEY (queue=? AND ready_at" in found.replace(
        "SEARCH s ", "SEARCH tenure_suspects "
    )
    assert f"SCAN tenure_{table}" not in found


def test_events_of_a_job_are_found_by_it(db: sqlite3.Connection) -> None:
    assert "tenure_events_job (job_id=? AND rowid>?)" in plan(db, "events_of_job")


def test_counts_are_of_the_first_so_many(db: sqlite3.Connection) -> None:
    """What a figure is counted in is cut off within the count: each part has a limit of its own."""
    text = STATEMENTS["totals"]
    assert text.count("LIMIT") == text.count("FROM tenure_") == 9
    text = STATEMENTS["queue_counts"]
    assert text.count("LIMIT") == text.count("FROM tenure_") == 6
    assert "SCAN tenure_jobs\n" not in plan(db, "totals") + "\n"
    assert "tenure_jobs_death (queue=? AND type=? AND death=? AND" in plan(db, "dead_group_of_org")
    counted = plan(db, "dead_group")
    assert "COVERING INDEX tenure_jobs_death (queue=? AND type=? AND death=?" in counted


def test_retention_takes_the_oldest_of_a_task(db: sqlite3.Connection) -> None:
    assert "tenure_history_age (type=? AND completed_at<?)" in plan(db, "prune_history")
