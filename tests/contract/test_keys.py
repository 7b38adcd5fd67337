"""Idempotency keys: the second enqueue of the same thing is the first one."""

from __future__ import annotations

from typing import Any

import pytest

from tenure.job import STATUSES
from tenure.outcome import Cancelled, Completed, Dead, Failed, Outcome, Retried
from tenure.store import Prune, Store

from .builders import (
    DAY,
    FAILURE,
    HOUR,
    OPERATOR,
    Clock,
    begin,
    claim,
    claim_one,
    ended_job,
    finish,
    get,
    kinds,
    new,
    put,
    put_many,
    snapshot,
    totals,
    worker,
)

ENDS: list[Outcome] = [Completed("1"), Cancelled("x"), Failed(FAILURE), Dead(FAILURE)]
every_end = pytest.mark.parametrize("outcome", ENDS, ids=lambda end: type(end).__name__)


def test_a_duplicate_yields_the_first_receipt(store: Store) -> None:
    first = put(store, key="k", payload='{"n":1}')
    before = snapshot(store, first)
    second = new(key="k", payload='{"n":2}')

    (receipt,) = store.enqueue([second])

    assert receipt == (first, True, "queued")
    assert store.get(second.id) is None
    assert totals(store) == {"queued": 1}
    assert snapshot(store, first) == before
    assert kinds(store, second.id) == []


def test_another_key_is_another_job(store: Store) -> None:
    put(store, key="k")

    assert store.enqueue([new(key="K")])[0].duplicate is False
    assert store.enqueue([new(key="k ")])[0].duplicate is False
    assert totals(store) == {"queued": 3}


def test_jobs_without_a_key_are_never_duplicates(store: Store) -> None:
    receipts = store.enqueue([new(), new(), new()]) + store.enqueue([new()])

    assert [receipt.duplicate for receipt in receipts] == [False] * 4


def test_keys_belong_to_their_org(store: Store) -> None:
    ours = put(store, key="k", org="acme")
    theirs = store.enqueue([new(key="k", org="globex")])[0]

    assert theirs.duplicate is False
    assert store.enqueue([new(key="k", org="acme")])[0].id == ours
    assert store.enqueue([new(key="k", org="globex")])[0].id == theirs.id


def test_a_key_is_one_key_over_all_types_and_queues(store: Store) -> None:
    first = put(store, key="k", type="a", queue="one")

    (receipt,) = store.enqueue([new(key="k", type="b", queue="two")])

    assert (receipt.id, receipt.duplicate) == (first, True)


def test_duplicates_within_one_batch_are_the_first_of_them(store: Store) -> None:
    batch = [
        new(key="k"),
        new(),
        new(key="k", type="other"),
        new(key="k", org="acme"),
        new(key="l"),
        new(key="k"),
    ]

    receipts = store.enqueue(batch)

    first = batch[0].id
    assert [(receipt.id, receipt.duplicate) for receipt in receipts] == [
        (first, False),
        (batch[1].id, False),
        (first, True),
        (batch[3].id, False),
        (batch[4].id, False),
        (first, True),
    ]
    assert totals(store) == {"queued": 4}


def test_the_first_in_the_batch_is_the_first_however_the_store_groups_it(store: Store) -> None:
    batch = [new(type="a"), new(type="b", key="k"), new(type="a", key="k")]

    receipts = store.enqueue(batch)

    assert [(receipt.id, receipt.duplicate) for receipt in receipts] == [
        (batch[0].id, False),
        (batch[1].id, False),
        (batch[1].id, True),
    ]
    assert get(store, batch[1].id).type == "b"
    assert store.get(batch[2].id) is None


@pytest.mark.parametrize(
    "key",
    ["007", "1e3", "null", "true", "", " ", "a'b", 'a"b', "a\\b", "ü\u2028", "[1]", "{}", "%"],
)
def test_a_key_is_any_text(store: Store, key: str) -> None:
    first = put(store, key=key)

    assert get(store, first).key == key
    assert store.enqueue([new(key=key), new(key=key + "x")])[0].id == first
    assert totals(store) == {"queued": 2}


def test_known_and_new_keys_in_one_batch(store: Store) -> None:
    known = put(store, key="known")
    batch = [new(key="new"), new(key="known"), new(key="new")]

    receipts = store.enqueue(batch)

    assert [(receipt.id, receipt.duplicate) for receipt in receipts] == [
        (batch[0].id, False),
        (known, True),
        (batch[0].id, True),
    ]


def test_the_receipt_of_a_duplicate_says_how_the_first_job_is_doing(store: Store) -> None:
    no = worker(store)
    id = put(store, key="k")
    seen = []

    def duplicate() -> str:
        (receipt,) = store.enqueue([new(key="k")])
        assert (receipt.id, receipt.duplicate) == (id, True)
        assert receipt.status == get(store, id).status
        return receipt.status

    seen.append(duplicate())
    job = claim_one(store, no)
    seen.append(duplicate())
    finish(store, no, job, Failed(FAILURE))
    seen.append(duplicate())
    store.replay([id], actor=OPERATOR)
    seen.append(duplicate())
    finish(store, no, claim_one(store, no), Completed())
    seen.append(duplicate())

    assert seen == ["queued", "in_progress", "failed", "queued", "completed"]


# -- expiry -----------------------------------------------------------------------------------


@every_end
def test_the_key_of_a_job_that_has_ended_holds_for_its_time_and_no_longer(
    store: Store, clock: Clock, outcome: Outcome
) -> None:
    no = worker(store)
    first = put(store, key="k", key_ttl_ms=DAY)
    clock.advance(3 * HOUR)  # it counts from the end, not from the enqueue
    finish(store, no, claim_one(store, no), outcome)

    clock.advance(DAY - 1)
    (held,) = store.enqueue([new(key="k")])
    clock.advance(2)
    fresh = new(key="k")
    (reused,) = store.enqueue([fresh])

    assert (held.id, held.duplicate) == (first, True)
    assert reused == (fresh.id, False, "queued")
    assert claim_one(store, no).id == fresh.id


def test_a_duplicate_does_not_prolong_the_key(store: Store, clock: Clock) -> None:
    ended_job(store, worker(store), Completed(), key="k", key_ttl_ms=DAY)
    for _ in range(4):
        clock.advance(DAY // 4 - 1)
        assert store.enqueue([new(key="k", key_ttl_ms=30 * DAY)])[0].duplicate

    clock.advance(10)

    assert store.enqueue([new(key="k")])[0].duplicate is False


def test_the_key_of_a_queued_job_that_was_cancelled_expires_too(store: Store, clock: Clock) -> None:
    first = put(store, key="k", key_ttl_ms=DAY)
    store.cancel([first], actor=OPERATOR, reason="x")

    assert store.enqueue([new(key="k")])[0].id == first
    clock.advance(DAY + 1)
    assert store.enqueue([new(key="k")])[0].duplicate is False


@pytest.mark.parametrize("state", ["queued", "running", "retrying", "due later"])
def test_a_key_never_expires_while_its_job_is_alive(store: Store, clock: Clock, state: str) -> None:
    no = worker(store)
    later = 400 * DAY if state == "due later" else 0
    first = put(store, key="k", key_ttl_ms=HOUR, delay_ms=later)
    if state in ("running", "retrying"):
        job = claim_one(store, no)
        if state == "retrying":
            finish(store, no, job, Retried(0, FAILURE))

    clock.advance(90 * DAY)
    store.prune(Prune(completed=1, dead=1, events=1))

    assert [receipt.id for receipt in store.enqueue([new(key="k")])] == [first]


def test_the_key_of_a_replayed_job_does_not_expire_while_it_is_alive_again(
    store: Store, clock: Clock
) -> None:
    no = worker(store)
    first = ended_job(store, no, Failed(FAILURE), key="k", key_ttl_ms=DAY)
    clock.advance(DAY // 2)
    store.replay([first], actor=OPERATOR)

    clock.advance(DAY)
    assert store.enqueue([new(key="k")])[0].id == first

    # Its second end starts the time again.
    finish(store, no, claim_one(store, no), Completed())
    clock.advance(DAY - 1)
    assert store.enqueue([new(key="k")])[0].id == first
    clock.advance(2)
    assert store.enqueue([new(key="k")])[0].duplicate is False


def test_a_replay_does_not_take_a_key_back_that_another_job_has_now(
    store: Store, clock: Clock
) -> None:
    no = worker(store)
    old = ended_job(store, no, Failed(FAILURE), key="k", key_ttl_ms=DAY)
    clock.advance(2 * DAY)
    fresh = put(store, key="k", key_ttl_ms=DAY)

    store.replay([old], actor=OPERATOR)
    assert store.enqueue([new(key="k")])[0].id == fresh

    # Nor does the end of the old job start the clock of the new one's key.
    for job in claim(store, no):
        if job.id == old:
            finish(store, no, job, Completed())
    clock.advance(3 * DAY)
    assert store.enqueue([new(key="k")])[0].id == fresh


@every_end
def test_a_key_outlives_the_row_of_its_job(store: Store, clock: Clock, outcome: Outcome) -> None:
    # Keys and jobs have their own retention; a pruned job is still not to be run a second time.
    no = worker(store)
    first = ended_job(store, no, outcome, key="k", key_ttl_ms=7 * DAY)
    clock.advance(2 * DAY)
    store.prune(Prune(completed=86_400, dead=86_400, events=86_400))
    assert store.get(first) is None

    (receipt,) = store.enqueue([new(key="k")])

    assert (receipt.id, receipt.duplicate) == (first, True)
    assert receipt.status in STATUSES
    assert claim(store, no) == []


def test_each_job_keeps_the_time_it_was_enqueued_with(store: Store, clock: Clock) -> None:
    no = worker(store)
    ended_job(store, no, Completed(), key="short", key_ttl_ms=HOUR)
    ended_job(store, no, Completed(), key="long", key_ttl_ms=DAY)
    clock.advance(2 * HOUR)

    receipts = store.enqueue([new(key="long"), new(key="short")])

    assert [receipt.duplicate for receipt in receipts] == [True, False]


# -- only while the first job is unfinished -----------------------------------------------------


@every_end
def test_a_pending_key_is_free_the_moment_its_job_has_ended(store: Store, outcome: Outcome) -> None:
    no = worker(store)
    first = put(store, key="k", key_ttl_ms=0)
    assert store.enqueue([new(key="k", key_ttl_ms=0)])[0] == (first, True, "queued")
    job = claim_one(store, no)
    assert store.enqueue([new(key="k", key_ttl_ms=0)])[0] == (first, True, "in_progress")
    finish(store, no, job, outcome)

    fresh = new(key="k", key_ttl_ms=0)

    assert store.enqueue([fresh, new(key="k", key_ttl_ms=0)]) == [
        (fresh.id, False, "queued"),
        (fresh.id, True, "queued"),
    ]


def test_a_pending_key_holds_over_retries_and_snoozes(store: Store, clock: Clock) -> None:
    no = worker(store)
    first = put(store, key="k", key_ttl_ms=0)
    finish(store, no, claim_one(store, no), Retried(HOUR, FAILURE))
    clock.advance(HOUR // 2)

    assert store.enqueue([new(key="k", key_ttl_ms=0)])[0] == (first, True, "queued")


@pytest.mark.parametrize("ttl", [0, DAY])
def test_who_began_before_the_end_of_a_pending_keys_job_does_not_take_it_for_held(
    store: Store, clock: Clock, ttl: int
) -> None:
    """It waited for the lock with the time at which it began, or its clock is behind."""
    no = worker(store)
    ended_job(store, no, Completed(), key="k", key_ttl_ms=0)

    (receipt,) = store.enqueue([new(key="k", key_ttl_ms=ttl)], now_ms=clock() - HOUR)

    assert receipt.duplicate is False


def test_who_asks_for_unfinished_jobs_only_is_not_held_up_by_a_key_that_lives_on(
    store: Store,
) -> None:
    no = worker(store)
    ended_job(store, no, Completed(), key="k", key_ttl_ms=7 * DAY)
    assert store.enqueue([new(key="k", key_ttl_ms=DAY)])[0].duplicate

    assert store.enqueue([new(key="k", key_ttl_ms=0)])[0].duplicate is False


def test_a_pending_key_on_the_callers_connection(store: Store, connection: Any) -> None:
    no = worker(store)
    first = put(store, key="k", key_ttl_ms=0)
    job = claim_one(store, no)
    begin(connection)
    assert store.enqueue_on(connection, [new(key="k", key_ttl_ms=0)]) == [
        (first, True, "in_progress")
    ]
    connection.rollback()
    finish(store, no, job, Completed())

    begin(connection)
    (receipt,) = store.enqueue_on(connection, [new(key="k", key_ttl_ms=0)])
    connection.commit()

    assert receipt.duplicate is False
    assert get(store, receipt.id).key == "k"


def test_a_pending_key_comes_back_with_a_replay_unless_it_has_another_owner(store: Store) -> None:
    no = worker(store)
    first = ended_job(store, no, Dead(FAILURE), key="k", key_ttl_ms=0)
    store.prune(Prune(completed=1e6, dead=1e6, events=1e6))  # the key's row goes, the job stays
    store.replay([first], actor=OPERATOR)
    assert store.enqueue([new(key="k", key_ttl_ms=0)])[0].id == first

    finish(store, no, claim_one(store, no), Dead(FAILURE))
    fresh = put(store, key="k", key_ttl_ms=0)
    store.replay([first], actor=OPERATOR)

    assert store.enqueue([new(key="k", key_ttl_ms=0)])[0].id == fresh


def test_the_key_is_found_on_the_job_and_by_the_claim(store: Store) -> None:
    put_many(store, 1, key="k")

    assert claim_one(store, worker(store)).key == "k"
