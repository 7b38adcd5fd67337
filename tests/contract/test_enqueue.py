"""Enqueue: all or nothing, never lost, never twice."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tenure.errors import JobError
from tenure.ids import new_id
from tenure.job import SYSTEM, Actor
from tenure.outcome import Completed, Failed, Failure
from tenure.store import Filter, Store

from .builders import (
    FAILURE,
    MINUTE,
    Clock,
    all_events,
    begin,
    claim,
    claim_one,
    find,
    finish,
    get,
    in_transaction,
    kinds,
    milliseconds,
    new,
    put,
    put_many,
    snapshot,
    totals,
    worker,
)


def test_a_new_job_is_queued_and_carries_what_it_was_given(store: Store, clock: Clock) -> None:
    given = new(
        type="send_email",
        queue="notifications",
        priority=3,
        category="notification",
        max_attempts=10,
        timeout_ms=30_500,
        org="acme",
        project="p-1",
        actor=Actor("api_key", "k-9"),
        request_id="r-1",
        correlation_id="c-1",
        traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        parent=new_id(),
        payload='{"to":"a@b.c","größe":[1,2.5,null,true]}',
        key="welcome:7",
    )

    (receipt,) = store.enqueue([given])

    assert receipt == (given.id, False, "queued")
    job = get(store, given.id)
    assert (job.id, job.type, job.status) == (given.id, "send_email", "queued")
    assert (job.queue, job.priority, job.category) == ("notifications", 3, "notification")
    assert job.payload == {"to": "a@b.c", "größe": [1, 2.5, None, True]}
    assert (job.attempts, job.max_attempts, job.crashes) == (0, 10, 0)
    assert job.timeout == 30.5
    assert (job.org, job.project, job.actor) == ("acme", "p-1", ("api_key", "k-9"))
    assert (job.request_id, job.correlation_id) == ("r-1", "c-1")
    assert (job.traceparent, job.parent) == (given.terms.traceparent, given.terms.parent)
    assert job.key == "welcome:7"
    assert (job.result, job.error, job.error_code, job.progress) == (None, None, None, None)
    assert (job.lease_owner, job.lease_until) == (None, None)
    assert (job.started_at, job.completed_at, job.cancel_requested) == (None, None, False)
    now = clock()
    assert milliseconds(job.created_at) == milliseconds(job.updated_at) == now
    assert milliseconds(job.scheduled_at) == now


def test_what_is_claimed_is_what_was_enqueued(store: Store, clock: Clock) -> None:
    given = new(
        type="send_email",
        category="notification",
        priority=2,
        max_attempts=10,
        timeout_ms=30_500,
        org="acme",
        project="p-1",
        actor=Actor("api_key", "k-9"),
        request_id="r-1",
        correlation_id="c-1",
        traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        parent=new_id(),
        payload='{"to":"ü\\u0001"}',
        key="welcome:7",
    )
    store.enqueue([given])

    job = claim_one(store, worker(store))

    terms = given.terms
    assert (job.id, job.type, job.payload) == (given.id, "send_email", '{"to":"ü\\u0001"}')
    assert (job.attempts, job.max_attempts, job.crashes, job.timeout_ms) == (1, 10, 0, 30_500)
    assert (job.queue, job.priority, job.category) == ("default", 2, "notification")
    assert (job.org, job.project) == ("acme", "p-1")
    assert (job.actor_type, job.actor_id) == ("api_key", "k-9")
    assert (job.request_id, job.correlation_id) == ("r-1", "c-1")
    assert (job.traceparent, job.key, job.parent) == (terms.traceparent, "welcome:7", terms.parent)
    assert (job.scheduled_at, job.created_at, job.ready_at) == (clock(), clock(), clock())


def test_a_job_in_a_single_tenant_world_needs_no_tenant(store: Store) -> None:
    job = get(store, put(store))

    assert (job.org, job.project, job.actor) == ("default", None, SYSTEM)


def test_delay_counts_from_the_clock_of_the_store(store: Store, clock: Clock) -> None:
    job = get(store, put(store, delay_ms=90_001))

    assert milliseconds(job.created_at) == clock()
    assert milliseconds(job.scheduled_at) == clock() + 90_001


def test_at_is_the_moment_it_names(store: Store, clock: Clock) -> None:
    job = get(store, put(store, at_ms=clock() + 12_345))

    assert milliseconds(job.scheduled_at) == clock() + 12_345


def test_now_ms_stands_in_for_the_clock(store: Store, clock: Clock) -> None:
    now = clock() + 5 * MINUTE
    given = new(delay_ms=1)

    store.enqueue([given], now_ms=now)

    job = get(store, given.id)
    assert (milliseconds(job.created_at), milliseconds(job.scheduled_at)) == (now, now + 1)


def test_an_empty_batch_is_no_batch(store: Store) -> None:
    assert store.enqueue([]) == []
    assert totals(store) == {}


def test_receipts_come_in_the_order_of_the_jobs(store: Store) -> None:
    # Neither sorted by id nor grouped by terms: a store that groups must put them back in order.
    jobs = [
        new(type=f"t{number % 3}", queue=f"q{number % 2}", key=f"k{number}" if number % 4 else None)
        for number in range(60)
    ]
    jobs = jobs[::2] + jobs[1::2][::-1]

    receipts = store.enqueue(jobs)

    assert [receipt.id for receipt in receipts] == [job.id for job in jobs]
    assert {(receipt.duplicate, receipt.status) for receipt in receipts} == {(False, "queued")}
    for job in jobs:
        assert (get(store, job.id).type, get(store, job.id).key) == (job.terms.type, job.key)


def test_equal_terms_need_not_be_the_same_object(store: Store) -> None:
    shared = new()
    jobs = [shared, shared._replace(id=new_id(), terms=shared.terms._replace()), new(priority=4)]

    receipts = store.enqueue(jobs)

    assert [receipt.id for receipt in receipts] == [job.id for job in jobs]
    assert [get(store, job.id).priority for job in jobs] == [5, 5, 4]


@pytest.mark.parametrize("text", ["it's", 'say "hi"', "a\\b", "ü\u2028😀", "1", "null", "x; DROP"])
def test_names_are_any_text(store: Store, text: str) -> None:
    id = put(
        store, type=text, queue=text, org=text, project=text, category=text,
        actor=Actor("user", text), request_id=text, correlation_id=text,
    )  # fmt: skip
    no = worker(store)

    job = claim_one(store, no, queue=text)

    assert (job.id, job.type, job.queue, job.org) == (id, text, text, text)
    assert finish(store, no, job, Failed(Failure(text, text, text))) == "accepted"
    failed = get(store, id)
    assert (failed.error, failed.error_code, failed.error_place) == (text, text, text)
    assert (failed.project, failed.category, failed.actor.id) == (text, text, text)
    assert (failed.request_id, failed.correlation_id) == (text, text)
    assert find(store, Filter(type=text, queue=text, org=text)) == [failed]


@pytest.mark.parametrize(
    "payload",
    [
        '{"a":1.10,"b":1e5,"c":-0.0,"d":9007199254740991}',
        '{"deep":' + "[" * 62 + "]" * 62 + "}",
        '{"":{"\\u0001":"\\u2028 ü 😀 \\"quoted\\" \\\\"}}',
        '{"text":"' + "x" * 200_000 + '"}',
    ],
    ids=["numbers", "nesting", "characters", "size"],
)
def test_payloads_come_back_as_they_went_in(store: Store, payload: str) -> None:
    id = put(store, payload=payload)
    no = worker(store)

    job = claim_one(store, no)

    assert json.loads(job.payload) == json.loads(payload)
    assert finish(store, no, job, Completed(payload)) == "accepted"
    assert get(store, id).payload == json.loads(payload)
    assert get(store, id).result == json.loads(payload)


def test_a_large_batch_is_stored_whole(store: Store) -> None:
    ids = put_many(store, 5_000)

    assert len(set(ids)) == 5_000
    assert totals(store) == {"queued": 5_000}


@pytest.mark.parametrize("place", [0, 1, 2], ids=["first", "middle", "last"])
def test_one_bad_job_leaves_nothing_of_its_batch(store: Store, place: int) -> None:
    batch = [new(key="a"), new(key="b", queue="unheard-of"), new(queue="other")]
    batch[place] = new(priority=11, key="bad")

    with pytest.raises(Exception):  # noqa: B017  each store has its own word for it
        store.enqueue(batch)

    assert totals(store) == {}
    assert [job.id for job in batch if store.get(job.id)] == []
    assert all_events(store) == []
    # Not even the keys: the same jobs without the bad one are no duplicates.
    again = [new(key=job.key) for job in batch]
    assert [receipt.duplicate for receipt in store.enqueue(again)] == [False, False, False]


@pytest.mark.parametrize("priority", [0, -1, 11])
def test_priorities_outside_1_to_10_are_refused(store: Store, priority: int) -> None:
    with pytest.raises(Exception):  # noqa: B017
        store.enqueue([new(priority=priority)])

    assert totals(store) == {}


def test_an_id_already_stored_never_overwrites_its_job(store: Store) -> None:
    id = put(store, payload='{"n":1}')
    before = snapshot(store, id)

    again = new(id=id, payload='{"n":2}', priority=1)
    for jobs in ([again], [again, new(priority=1)], [again, new(key="k")]):
        with pytest.raises(JobError, match="stored already"):
            store.enqueue(jobs)

    assert snapshot(store, id) == before


@pytest.mark.parametrize("key", [None, "k"], ids=["without key", "with key"])
def test_the_same_job_twice_in_a_batch_is_refused(store: Store, key: str | None) -> None:
    twin = new(key=key)

    with pytest.raises(JobError, match="2 times"):
        store.enqueue([twin, new(), twin])

    assert totals(store) == {}


@pytest.mark.parametrize("key", [None, "k"], ids=["without key", "with key"])
@pytest.mark.parametrize("among", [0, 2], ids=["alone", "among others"])
def test_a_finished_job_is_not_acknowledged_as_a_new_one(
    store: Store, among: int, key: str | None
) -> None:
    """It would run a second time, and its second end would find the place of the first taken."""
    given, no = new(key=key), worker(store)
    store.enqueue([given])
    assert finish(store, no, claim_one(store, no), Completed()) == "accepted"
    before = snapshot(store, given.id)

    with pytest.raises(JobError, match="stored already"):
        store.enqueue([*[new() for _ in range(among)], given])

    assert snapshot(store, given.id) == before
    assert claim(store, no) == []


# -- a repeated call --------------------------------------------------------------------------


def test_a_repeated_call_stores_what_its_lost_first_try_did_not(store: Store) -> None:
    jobs = [new(), new(key="k")]

    receipts = store.enqueue(jobs, retry=True)

    assert [tuple(receipt) for receipt in receipts] == [
        (jobs[0].id, False, "queued"),
        (jobs[1].id, False, "queued"),
    ]
    assert totals(store) == {"queued": 2}


def test_a_repeated_call_stores_nothing_twice(store: Store) -> None:
    jobs = [new(payload='{"n":1}'), new(key="k"), new(queue="other")]
    store.enqueue(jobs)
    before = snapshot(store, *[job.id for job in jobs])

    receipts = store.enqueue(jobs, retry=True)

    assert [receipt.id for receipt in receipts] == [job.id for job in jobs]
    assert snapshot(store, *[job.id for job in jobs]) == before


def test_a_repeated_call_gets_the_answer_that_was_lost(store: Store) -> None:
    # A job whose key is its own is no duplicate of itself; a duplicate still is one.
    first = put(store, key="taken")
    jobs = [new(key="mine"), new(key="taken")]
    answer = store.enqueue(jobs)
    assert [(receipt.id, receipt.duplicate) for receipt in answer] == [
        (jobs[0].id, False),
        (first, True),
    ]

    assert store.enqueue(jobs, retry=True) == answer
    assert totals(store) == {"queued": 2}


def test_a_repeated_call_with_new_jobs_among_the_old_ones_adds_only_those(store: Store) -> None:
    old, fresh = new(), new()
    store.enqueue([old])

    receipts = store.enqueue([fresh, old], retry=True)

    assert [receipt.id for receipt in receipts] == [fresh.id, old.id]
    assert totals(store) == {"queued": 2}
    assert kinds(store, old.id) == ["job.enqueued"]


@pytest.mark.parametrize("key", [None, "k"], ids=["without key", "with key"])
@pytest.mark.parametrize("end", [Completed("1"), Failed(FAILURE)], ids=["completed", "failed"])
def test_a_repeated_call_after_the_job_has_ended_does_not_run_it_twice(
    store: Store, end: Completed | Failed, key: str | None
) -> None:
    given = new(key=key)
    store.enqueue([given])
    no = worker(store)
    assert finish(store, no, claim_one(store, no), end) == "accepted"
    before = snapshot(store, given.id)

    (receipt,) = store.enqueue([given], retry=True)

    assert (receipt.id, receipt.duplicate) == (given.id, False)
    assert snapshot(store, given.id) == before
    assert claim(store, no) == []


def test_a_repeated_call_after_a_cancel_does_not_bring_the_job_back(store: Store) -> None:
    given = new()
    store.enqueue([given])
    store.cancel([given.id], actor=SYSTEM, reason="not needed")

    store.enqueue([given], retry=True)

    assert get(store, given.id).status == "cancelled"
    assert claim(store, worker(store)) == []


# -- in the caller's transaction --------------------------------------------------------------


def test_a_job_of_a_callers_transaction_is_there_after_its_commit(
    store: Store, connection: Any
) -> None:
    connection.execute("CREATE TABLE orders (id INTEGER)")
    jobs = [new(key="k"), new(queue="other")]

    begin(connection)
    connection.execute("INSERT INTO orders VALUES (1)")
    receipts = store.enqueue_on(connection, jobs)
    assert in_transaction(connection)
    connection.execute("COMMIT")

    assert [tuple(receipt) for receipt in receipts] == [
        (jobs[0].id, False, "queued"),
        (jobs[1].id, False, "queued"),
    ]
    assert totals(store) == {"queued": 2}
    assert kinds(store, jobs[0].id) == ["job.enqueued"]
    assert claim_one(store, worker(store)).id == jobs[0].id


def test_a_rolled_back_transaction_leaves_no_job(store: Store, connection: Any) -> None:
    connection.execute("CREATE TABLE orders (id INTEGER)")
    given = new(key="k")

    begin(connection)
    connection.execute("INSERT INTO orders VALUES (1)")
    store.enqueue_on(connection, [given])
    connection.execute("ROLLBACK")

    assert store.get(given.id) is None
    assert totals(store) == {}
    assert all_events(store) == []
    assert connection.execute("SELECT count(*) FROM orders").fetchone() == (0,)
    assert store.enqueue([new(key="k")])[0].duplicate is False


def test_a_job_is_invisible_until_its_transaction_commits(store: Store, connection: Any) -> None:
    given = new()

    begin(connection)
    store.enqueue_on(connection, [given])

    assert store.get(given.id) is None
    assert find(store, Filter()) == []
    connection.execute("COMMIT")
    assert get(store, given.id).status == "queued"


def test_a_duplicate_in_a_callers_transaction_yields_the_first_receipt(
    store: Store, connection: Any
) -> None:
    first = put(store, key="k")

    begin(connection)
    (receipt,) = store.enqueue_on(connection, [new(key="k")])
    connection.execute("COMMIT")

    assert (receipt.id, receipt.duplicate) == (first, True)
    assert totals(store) == {"queued": 1}


def test_a_bad_batch_leaves_nothing_in_a_transaction_its_caller_still_commits(
    store: Store, connection: Any
) -> None:
    # "All jobs or none" holds here too: the batch is undone, the caller's own work is not.
    connection.execute("CREATE TABLE orders (id INTEGER)")
    begin(connection)
    connection.execute("INSERT INTO orders VALUES (1)")

    with pytest.raises(Exception):  # noqa: B017
        store.enqueue_on(connection, [new(key="k"), new(queue="other"), new(priority=11)])
    connection.execute("COMMIT")

    assert connection.execute("SELECT count(*) FROM orders").fetchone() == (1,)
    assert totals(store) == {}
    assert all_events(store) == []
    assert store.enqueue([new(key="k")])[0].duplicate is False
