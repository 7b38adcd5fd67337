"""Two sessions at once on PostgreSQL, one of them held in the middle of what it does."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from contract.builders import (
    FAILURE,
    OPERATOR,
    claim_one,
    ended_job,
    finish,
    get,
    new,
    put,
    started_job,
    worker,
    worker_row,
)
from tenure.engine.finisher import ALONE_AFTER, Finisher, Unwritten
from tenure.errors import JobError, StoreBusy
from tenure.outcome import Completed, Ended, Failed
from tenure.store import Prune
from tenure.stores.postgres import PostgresStore
from tenure.stores.postgres.database import to_uuid_text

DAY = 86_400_000
KEEP = Prune(completed=7 * 86_400, dead=7 * 86_400, events=7 * 86_400)


@pytest.fixture
def store(make_database: Callable[..., str]) -> Iterator[PostgresStore]:
    made = PostgresStore(make_database(migrated=True), notify=False)
    yield made
    made.close()


@pytest.fixture
def other(store: PostgresStore) -> Iterator[psycopg.Connection[Any]]:
    """Somebody else's session; a transaction begins with its first statement."""
    with psycopg.connect(store.database.url) as connection:
        yield connection
        connection.rollback()


@pytest.fixture
def aside() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def until_it_waits(connection: psycopg.Connection[Any], what: str) -> None:
    """For a lock: seen from the session that holds it."""
    deadline = time.monotonic() + 10
    waiting = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE %s"
    while not connection.execute(waiting, [f"%{what}%"]).fetchall():
        assert time.monotonic() < deadline
        connection.execute("SELECT pg_stat_clear_snapshot()")


@pytest.mark.timed
def test_a_taken_key_in_an_open_transaction_holds_up_nobody(
    store: PostgresStore, other: psycopg.Connection[Any]
) -> None:
    no = worker(store)
    store.enqueue([new(key="k")])
    job = claim_one(store, no)
    other.execute("SELECT 1")
    assert store.enqueue_on(other, [new(key="k")]) == [(job.id, True, "in_progress")]

    began = time.monotonic()
    assert finish(store, no, job, Completed()) == "accepted"
    assert time.monotonic() - began < 1


def test_an_expired_key_that_goes_while_a_caller_takes_it_over_is_theirs(
    store: PostgresStore, other: psycopg.Connection[Any], aside: ThreadPoolExecutor
) -> None:
    """Retention removes it between the look that finds it and the write that would have it."""
    ended_job(store, worker(store), Completed(), key="k", key_ttl_ms=0)
    other.execute("SELECT 1 FROM tenure.keys FOR UPDATE")
    with psycopg.connect(store.database.url) as caller:
        taking = aside.submit(store.enqueue_on, caller, [new(key="k")])
        until_it_waits(other, "enqueue_jobs")
        other.execute("DELETE FROM tenure.keys")
        other.commit()
        (first,) = taking.result(10)

    assert first.duplicate is False
    assert store.enqueue([new(key="k")]) == [(first.id, True, "queued")]


def test_a_caller_takes_keys_in_one_order_new_ones_and_expired_ones(
    store: PostgresStore, other: psycopg.Connection[Any], aside: ThreadPoolExecutor
) -> None:
    """Whoever waits for a key holds none after it."""
    ended_job(store, worker(store), Completed(), key="a", key_ttl_ms=0)
    other.execute("SELECT 1 FROM tenure.keys FOR UPDATE")
    with psycopg.connect(store.database.url) as caller:
        taking = aside.submit(store.enqueue_on, caller, [new(key="b"), new(key="a")])
        until_it_waits(other, "enqueue_jobs")
        a, b = store.enqueue_on(other, [new(key="a"), new(key="b")])
        other.commit()
        assert taking.result(10) == [(b.id, True, "queued"), (a.id, True, "queued")]


def test_a_repeated_call_does_not_bring_back_what_has_finished_meanwhile(
    store: PostgresStore, other: psycopg.Connection[Any], aside: ThreadPoolExecutor
) -> None:
    """It has looked, found nothing, and is held up; then the first try commits, its job ends."""
    no = worker(store)
    ended_job(store, no, Completed(), key="k", key_ttl_ms=0)
    other.execute("SELECT 1 FROM tenure.keys FOR UPDATE")
    job = new()
    again = "SELECT * FROM tenure.enqueue_jobs(%(jobs)s::json, true, 'all', NULL, true)"
    jobs = f'[{{"id": "{to_uuid_text(job.id)}", "type": "t", "key": "k"}}]'
    repeating: Future[Any] = aside.submit(store.database.run, again, {"jobs": jobs})
    until_it_waits(other, "enqueue_jobs")
    store.enqueue([job])
    finish(store, no, claim_one(store, no), Completed())
    other.rollback()
    repeating.result(10)

    assert get(store, job.id).status == "completed"
    assert store.claim(no, [("default", 10)]).jobs == []


def test_a_key_that_is_taken_was_seen(store: PostgresStore) -> None:
    seen = "SELECT first_seen_at, last_seen_at FROM tenure.keys"
    store.enqueue([new(key="k")], now_ms=1000)
    assert store.database.run(seen, {}) == [(1000, 1000)]
    store.enqueue([new(key="k")], now_ms=5000)
    assert store.database.run(seen, {}) == [(1000, 5000)]


def test_a_worker_does_not_sign_off_over_a_claim_under_way(
    store: PostgresStore, other: psycopg.Connection[Any], aside: ThreadPoolExecutor
) -> None:
    """Its client may be gone; the server goes on, and would leave jobs to a dead worker."""
    no = worker(store)
    put(store)
    other.execute("SELECT 1 FROM tenure.workers WHERE no = %s FOR KEY SHARE", [no.no])  # as claims
    other.execute(
        "UPDATE tenure.jobs SET status = 'in_progress', worker = %s, lease_no = 1", [no.no]
    )
    leaving: Future[None] = aside.submit(store.retire, no)
    until_it_waits(other, "tenure.sign_off")
    other.commit()
    leaving.result(10)

    assert worker_row(store, no).dead_at is None  # a rescue will find it, and the job
    assert worker_row(store, no).held == 1


def old_partition(store: PostgresStore) -> tuple[str, int]:
    """A day that is over, and its partition."""
    day = int(time.time() * 1000) - 30 * DAY
    store.database.run("SELECT tenure.add_partitions(%(day)s)", {"day": day})
    name = time.strftime("history_%Y%m%d", time.gmtime(day / 1000))
    return name, day


def partitions(store: PostgresStore) -> set[str]:
    found = "SELECT inhrelid::regclass::text FROM pg_inherits"
    return {row[0].removeprefix("tenure.") for row in store.database.run(found, {})}


def test_a_day_is_not_dropped_under_a_job_that_ends(
    store: PostgresStore, other: psycopg.Connection[Any], aside: ThreadPoolExecutor
) -> None:
    name, day = old_partition(store)
    no = worker(store)
    ((id,),) = store.database.run("SELECT tenure.ulid(tenure.new_id(%(day)s))", {"day": day})
    old = new(id=id)
    store.enqueue([old])
    job = claim_one(store, no)
    finishing = """SELECT * FROM tenure.complete_runs(%s, %s, ARRAY[%s]::uuid[], ARRAY[%s],
                                                      ARRAY[1], '[null]', 'all', NULL)"""
    other.execute(finishing, [no.no, no.id, to_uuid_text(job.id), job.lease_no])
    store.database.run("ALTER FUNCTION tenure.drop_day SET lock_timeout = '20s'", {})
    # Not by a whole pass: that would wait for the events of the same day, and look afterwards.
    dropping = "SELECT tenure.drop_day(%(name)s, %(since)s, %(since)s, '{}')"
    week_ago = {"name": name, "since": day + 23 * DAY}
    pruning: Future[Any] = aside.submit(store.database.run, dropping, week_ago)
    until_it_waits(other, "drop_day")
    other.commit()
    assert pruning.result(20) == [("wanted",)]

    assert name in partitions(store)
    found = store.get(old.id)
    assert found is not None and found.status == "completed"


def test_a_reader_delays_the_upkeep_of_partitions_once(
    store: PostgresStore, other: psycopg.Connection[Any]
) -> None:
    name, _day = old_partition(store)
    other.execute("SELECT count(*) FROM tenure.history")

    began = time.monotonic()
    store.prune(KEEP)
    assert time.monotonic() - began < 5  # half a second for each of two; repeated it was fifteen
    assert name in partitions(store)

    other.rollback()
    store.prune(KEEP)
    assert name not in partitions(store)


@pytest.mark.timed
def test_a_handlers_transaction_holds_up_no_finish(store: PostgresStore) -> None:
    no = worker(store)
    first, second = started_job(store, no), started_job(store, no)
    with store.transaction(5) as settlement:
        ended = Ended(first.id, first.lease_no, 1, Completed())
        assert settlement.finish(no, ended) == "accepted"  # written, not yet committed
        began = time.monotonic()
        assert finish(store, no, second, Completed()) == "accepted"
        assert time.monotonic() - began < 1

    assert sum(rollup.runs for rollup in store.rollups(since_ms=0)) == 2


def test_a_locked_job_holds_up_no_outcome_but_its_own(
    make_database: Callable[..., str],
) -> None:
    store = PostgresStore(make_database(migrated=True), notify=False, timeout=1.0)
    no = worker(store)
    jobs = [started_job(store, no) for _ in range(3)]
    unwritten, counts = Unwritten(), Counter()
    finisher = Finisher(store, unwritten, counts)
    unwritten.add([Ended(job.id, job.lease_no, 1, Completed()) for job in jobs], [])
    unwritten.add([Ended("of its own transaction", 1, 1, Completed(settled=True))], [])
    with psycopg.connect(store.database.url) as other:
        held = to_uuid_text(jobs[0].id)
        other.execute("SELECT 1 FROM tenure.jobs WHERE id = %s FOR UPDATE", [held])
        for _ in range(ALONE_AFTER):
            with pytest.raises(StoreBusy):
                finisher.flush(no)
        finisher.flush(no)
        assert [get(store, job.id).status for job in jobs] == [
            "in_progress", "completed", "completed",
        ]  # fmt: skip
        other.rollback()
    while unwritten.pending:
        assert finisher.flush(no) == []
    assert get(store, jobs[0].id).status == "completed"
    assert counts["completed"] == 4  # the settled one once, however often it was tried
    store.close()


def test_progress_that_could_not_be_written_is_written_next(
    make_database: Callable[..., str],
) -> None:
    store = PostgresStore(make_database(migrated=True), notify=False, timeout=1.0)
    no = worker(store)
    job = started_job(store, no)
    unwritten = Unwritten()
    finisher = Finisher(store, unwritten, Counter())
    unwritten.add([], [(job.id, job.lease_no, '{"percent":99}')])
    with psycopg.connect(store.database.url) as other:
        other.execute("LOCK TABLE tenure.jobs")
        with pytest.raises(StoreBusy):
            finisher.flush(no)
        other.rollback()
    finisher.flush(no)
    assert get(store, job.id).progress == {"percent": 99}
    store.close()


@pytest.mark.parametrize("how", ["cancel", "discard"])
def test_a_need_withdrawn_while_somebody_enqueues_after_it_strands_nobody(
    store: PostgresStore, aside: ThreadPoolExecutor, how: str
) -> None:
    """Either the enqueue is refused, or the job ends with its need: at once, or where neither could
    see the other by the next pass of the janitor, which every worker makes once a second."""
    no = worker(store)
    both = threading.Barrier(2, timeout=10)
    stored: list[str] = []
    for _ in range(100):
        need = put(store) if how == "cancel" else ended_job(store, no, Failed(FAILURE))

        def withdraw(need: str = need) -> None:
            both.wait()
            if how == "cancel":
                store.cancel([need], actor=OPERATOR, reason="x")
            else:
                store.discard([need], actor=OPERATOR, reason="x")

        going = aside.submit(withdraw)
        job = new(after=(need,), after_failed="wait")
        both.wait()
        with contextlib.suppress(JobError):
            store.enqueue([job])
            stored.append(job.id)
        going.result(10)
    store.settle_dependants()

    left = [id for id in stored if get(store, id).status != "cancelled"]
    assert (left, store.queues()[0].waiting) == ([], 0)


@pytest.mark.parametrize("how", ["completed", "cancelled"])
def test_a_need_that_ends_before_its_dependant_is_committed_is_seen_by_the_next_pass(
    store: PostgresStore, other: psycopg.Connection[Any], how: str
) -> None:
    no = worker(store)
    need = started_job(store, no) if how == "completed" else None
    needed = need.id if need is not None else put(store)
    last = new(after=(needed,), after_failed="wait")
    store.enqueue_on(other, [last])
    if need is not None:
        finish(store, no, need, Completed())
    else:
        store.cancel([needed], actor=OPERATOR, reason="x")
    other.commit()

    assert store.settle_dependants() == 1

    if how == "completed":
        assert claim_one(store, no).id == last.id
    else:
        assert get(store, last.id).error_code == "dependency_cancelled"
