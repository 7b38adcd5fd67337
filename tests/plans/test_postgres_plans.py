"""The plans of what runs all the time on PostgreSQL, on tables that have lived.

100,000 jobs have passed, and either the statistics are those of that life, or there are none and
the plans were made when the tables were empty; nothing was vacuumed lately. The plans are the ones
really used, inside the functions and with their generic parameters, as auto_explain reports them:
which index each table is walked by, and how many rows that touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import servers
from contract.builders import FAILURE, OPERATOR, find, new, put_many, terms, worker
from plans.watching import WARM_UP, Call, Walk, watched
from tenure.ids import new_ids
from tenure.job import NewJob
from tenure.outcome import Completed, Dead, Ended, Retried
from tenure.store import Filter
from tenure.stores.postgres import PostgresStore

CHURN = 100_000
BATCH = 2_000


@pytest.fixture(scope="module", params=["analyzed", "planned when empty"])
def store(request: pytest.FixtureRequest) -> Iterator[PostgresStore]:
    server = servers.require(servers.shared)
    name = server.create_database(migrated=True)
    made = PostgresStore(server.url(name), notify=False)
    try:
        if request.param == "planned when empty":  # and nobody analyses it meanwhile
            made.database.run("ALTER TABLE tenure.jobs SET (autovacuum_enabled = off)")
        live(made)
        if request.param == "analyzed":
            made.database.run("ANALYZE")
        yield made
    finally:
        made.close()
        server.drop_database(name)


def live(store: PostgresStore) -> None:
    """Some retried, some dead, some waiting for tomorrow, most finished."""
    no = worker(store)
    store.enqueue([new(key="first")])
    lanes = [terms(priority=priority, org=org) for priority in (1, 5, 9) for org in ("a", "b")]
    later = terms(queue="later")
    store.enqueue([NewJob(id, later, "{}", 86_400_000) for id in new_ids(5000)])
    for start in range(0, CHURN, BATCH):
        ids = enumerate(new_ids(BATCH))
        store.enqueue([NewJob(id, lanes[place % len(lanes)], "{}") for place, id in ids])
        jobs = store.claim(no, [("default", BATCH)]).jobs
        ends = [
            Ended(job.id, job.lease_no, 1, Retried(3600, FAILURE) if n % 50 == 0 else Completed())
            for n, job in enumerate(jobs)
        ]
        if start % 10_000 == 0:
            ends[0] = Ended(jobs[0].id, jobs[0].lease_no, 1, Dead(FAILURE))
        store.finish(no, ends)


@pytest.fixture
def walk(store: PostgresStore) -> Callable[[Call], Walk]:
    """Run something often enough for generic plans, then once under observation."""

    def observe(call: Call) -> Walk:
        for _ in range(WARM_UP):
            call()
        return watched(store, call)

    return observe


Observe = Callable[[Call], Walk]


def test_a_claim_walks_its_lanes_and_nothing_else(store: PostgresStore, walk: Observe) -> None:
    no = worker(store)
    put_many(store, 2000)
    seen = walk(lambda: store.claim(no, [("default", 100)]))
    # By jobs_claim to find them, by the primary key to grant them, and a look each at what was to
    # run later and at suspects. Dead rows at a lane's head may be walked once more, the 100,000
    # that have passed may not.
    assert seen.by("jobs") <= {"jobs_claim", "jobs_later", "jobs_suspect", "jobs_pkey"}
    assert seen.rows("jobs") < 1000


def test_a_claim_that_finds_nothing_touches_next_to_nothing(
    store: PostgresStore, walk: Observe
) -> None:
    no = worker(store)
    seen = walk(lambda: store.claim(no, [("later", 100)]))
    assert seen.by("jobs") == {"jobs_claim", "jobs_later", "jobs_suspect"}
    assert seen.rows("jobs") < 10  # and not the 5,000 due tomorrow


def test_the_next_due_time_is_two_steps_a_queue(store: PostgresStore, walk: Observe) -> None:
    seen = walk(lambda: store.next_due(["default", "later"]))
    assert seen.by("jobs") == {"jobs_later", "jobs_suspect"}
    assert seen.rows("jobs") <= 4


@pytest.mark.parametrize("outcome", [Completed(), Retried(3600, FAILURE), Dead(FAILURE)])
def test_a_finish_looks_its_jobs_up_by_id(
    store: PostgresStore, walk: Observe, outcome: Any
) -> None:
    """Not by jobs_held: that would cost a walk over everything the worker holds for each row."""
    no = worker(store)
    put_many(store, 1600)
    jobs = store.claim(no, [("default", 1600)]).jobs
    batches = [jobs[place : place + 100] for place in range(0, 1600, 100)]

    def finish() -> None:
        batch = batches.pop()
        verdicts = store.finish(no, [Ended(j.id, j.lease_no, 1, outcome) for j in batch])
        assert set(verdicts) == {"accepted"}

    seen = walk(finish)
    assert seen.by("jobs") <= {"jobs_pkey", "Tid Scan"}  # of rows that are locked, where they stand
    assert seen.rows("jobs") <= 800  # eight look-ups a job at most, none of them a walk


def test_a_renewal_reads_what_the_worker_holds(store: PostgresStore, walk: Observe) -> None:
    no = worker(store)
    put_many(store, 50)
    store.claim(no, [("default", 50)])
    seen = walk(lambda: store.renew(no))
    assert seen.by("jobs") == {"jobs_held"} or seen.by("jobs_held") == {"bitmap"}
    assert seen.rows("jobs") < 200


def test_cancel_requests_are_asked_for_without_what_a_worker_has_held(
    store: PostgresStore, walk: Observe
) -> None:
    no = worker(store)
    put_many(store, 50)
    first, *_rest = store.claim(no, [("default", 50)]).jobs
    store.cancel([first.id], actor=OPERATOR, reason="stop")
    seen = walk(lambda: store.cancel_requests(no))
    assert seen.by("jobs") == {"jobs_cancel"} or seen.by("jobs_cancel") == {"bitmap"}
    assert seen.rows("jobs") < 20


def test_progress_is_written_by_id(store: PostgresStore, walk: Observe) -> None:
    no = worker(store)
    put_many(store, 50)
    jobs = store.claim(no, [("default", 50)]).jobs
    reports = [(job.id, job.lease_no, '{"percent":5}') for job in jobs]
    seen = walk(lambda: store.progress(no, reports))
    assert seen.by("jobs") == {"jobs_pkey"} or seen.by("jobs_pkey") == {"bitmap"}
    assert seen.rows("jobs") <= 100


def test_one_job_is_looked_up_in_one_partition(store: PostgresStore, walk: Observe) -> None:
    (done,) = find(store, Filter(status="completed"), limit=1)
    seen = walk(lambda: store.get(done.id))
    scans = [scan for scan in seen.scans if scan[0] == "history"]
    assert len(scans) == 1
    assert scans[0][1].endswith("_pkey")


def test_the_events_of_a_job_are_found_by_its_id(store: PostgresStore, walk: Observe) -> None:
    (done,) = find(store, Filter(status="completed"), limit=1)
    seen = walk(lambda: store.events(job_id=done.id))
    assert seen.rows("events") <= 3  # an empty partition may be looked at as it is
    assert any("job_id" in by for by in seen.by("events")), seen.scans


def test_a_page_of_events_reads_a_page(store: PostgresStore, walk: Observe) -> None:
    seen = walk(lambda: store.events(after=150_000, limit=100))
    assert seen.rows("events") <= 110 * len(seen.scans)
    assert all(by.endswith("_pkey") for by in seen.by("events")), seen.scans


def test_dead_jobs_are_listed_by_their_index(store: PostgresStore, walk: Observe) -> None:
    seen = walk(lambda: find(store, Filter(status="dead_letter"), limit=10))
    assert seen.by("jobs") == {"jobs_dead"}


def test_a_page_of_finished_jobs_reads_a_page(store: PostgresStore, walk: Observe) -> None:
    seen = walk(lambda: find(store, Filter(status="completed"), limit=10))
    assert seen.rows("history") <= 100


def test_one_job_is_stored_by_its_id(store: PostgresStore, walk: Observe) -> None:
    seen = walk(lambda: store.enqueue([new()]))
    assert {by[:8] for by in seen.by("history")} == {"history_"}, "its partitions by their keys"
    assert seen.rows("history") == 0
    assert seen.by("jobs") == set()


def test_a_key_is_looked_up(store: PostgresStore, walk: Observe) -> None:
    seen = walk(lambda: store.enqueue([new(key="the same")]))
    assert seen.by("jobs") <= {"jobs_pkey"}
    assert all(by.endswith("_pkey") for by in seen.by("history"))


def test_where_plans_are_forced_none_is_compiled(store: PostgresStore) -> None:
    """Before version 18 what is switched off and used all the same costs 10,000,000,000."""
    forced = """SELECT proname FROM pg_proc WHERE pronamespace = 'tenure'::regnamespace
                   AND proconfig::text LIKE '%%enable_%%' AND {} 'jit=off' = ANY (proconfig)"""
    assert store.database.run(forced.format(""), {})
    assert store.database.run(forced.format("NOT"), {}) == []
