"""Workers and what they hold: register, renew, rescue, retire."""

from __future__ import annotations

import pytest

from tenure.outcome import Cancelled, Completed, Released, Retried
from tenure.store import Rescue, Store

from .builders import (
    FAILURE,
    LEASE_MS,
    OPERATOR,
    SECOND,
    Clock,
    claim,
    claim_one,
    finish,
    get,
    milliseconds,
    put,
    put_many,
    rescue,
    snapshot,
    started_job,
    totals,
    worker,
    worker_info,
    worker_row,
)

# -- register ---------------------------------------------------------------------------------


def test_a_registered_worker_is_listed_as_it_introduced_itself(store: Store, clock: Clock) -> None:
    info = worker_info(
        host="h1", boot="b1", pid=77, pid_started="12:30", lease_ms=60_000, meta={"queues": ["a"]}
    )

    no = store.register(info)

    row = worker_row(store, no)
    assert (row.id, row.host, row.boot) == (info.id, "h1", "b1")
    assert (row.pid, row.pid_started) == (77, "12:30")
    assert (row.lease_ms, row.meta) == (60_000, {"queues": ["a"]})
    assert (row.dead_at, row.dead_reason, row.held) == (None, None, 0)
    # Liveness is decided by the store's clock, whatever the worker's own says.
    assert row.seen_at == row.started_at == clock()


def test_numbers_are_never_used_again(store: Store) -> None:
    first = worker(store)
    second = worker(store)
    store.retire(second)
    third = worker(store)

    assert first < second < third


def test_held_counts_the_leases(store: Store) -> None:
    put_many(store, 5)
    one, two = worker(store), worker(store)
    jobs = claim(store, one, 3)
    claim(store, two, 1)
    finish(store, one, jobs[0], Completed())

    assert (worker_row(store, one).held, worker_row(store, two).held) == (2, 1)


# -- renew ------------------------------------------------------------------------------------


def test_renewing_proves_the_worker_alive(store: Store, clock: Clock) -> None:
    no = worker(store)
    job = started_job(store, no)
    before = worker_row(store, no)
    assert milliseconds(get(store, job.id).lease_until) == clock() + LEASE_MS
    clock.advance(10 * SECOND)

    store.renew(no)

    row = worker_row(store, no)
    assert row.beat > before.beat
    assert row.seen_at == clock()
    assert row.started_at == before.started_at
    assert milliseconds(get(store, job.id).lease_until) == clock() + LEASE_MS


def test_a_renewal_may_bring_news_of_its_worker(store: Store) -> None:
    no, other = worker(store), worker(store)
    before = worker_row(store, no).meta

    store.renew(no)
    assert worker_row(store, no).meta == before
    store.renew(no, meta={"name": "Ünïcode", "failures": 3})
    assert worker_row(store, no).meta == {"name": "Ünïcode", "failures": 3}
    store.renew(no)
    assert worker_row(store, no).meta == {"name": "Ünïcode", "failures": 3}
    assert worker_row(store, other).meta == before


def test_a_renewal_concerns_one_worker(store: Store, clock: Clock) -> None:
    one, two = worker(store), worker(store)
    before = worker_row(store, two)
    clock.advance(SECOND)

    store.renew(one)

    assert worker_row(store, two) == before


def test_a_renewal_lists_what_the_worker_holds(store: Store) -> None:
    one, two = worker(store), worker(store)
    assert store.renew(one) == ({}, {})
    put_many(store, 4)
    mine = claim(store, one, 3)
    claim(store, two, 1)
    finish(store, one, mine[0], Completed())
    finish(store, one, mine[1], Released("bystander", 60))

    renewal = store.renew(one)

    assert renewal == ({mine[2].id: mine[2].lease_no}, {})


def test_a_renewal_lists_a_lease_whose_grant_never_arrived(store: Store) -> None:
    # The reply to a claim was lost: the worker learns of the lease here and gives it back.
    no = worker(store)
    id = put(store)
    claim(store, no)

    renewal = store.renew(no)

    assert renewal is not None
    assert renewal.leases == {id: get(store, id).lease_no}


def test_a_renewal_does_not_touch_the_jobs(store: Store, clock: Clock) -> None:
    no = worker(store)
    job = started_job(store, no)
    before = get(store, job.id)
    clock.advance(SECOND)

    store.renew(no)

    after = get(store, job.id)
    assert (after.lease_no, after.attempts, after.updated_at) == (
        before.lease_no,
        before.attempts,
        before.updated_at,
    )


def test_a_renewal_lists_cancel_requests(store: Store) -> None:
    one, two = worker(store), worker(store)
    asked = started_job(store, one)
    started_job(store, one)
    foreign = started_job(store, two)
    store.cancel([asked.id], actor=OPERATOR, reason="changed my mind")
    store.cancel([foreign.id], actor=OPERATOR, reason="other")

    renewal = store.renew(one)

    assert renewal is not None
    assert renewal.cancels == {asked.id: "changed my mind"}
    assert store.cancel_requests(one) == {asked.id: "changed my mind"}
    assert store.cancel_requests(two) == {foreign.id: "other"}


def test_an_obeyed_cancel_request_is_over(store: Store) -> None:
    no = worker(store)
    job = started_job(store, no)
    store.cancel([job.id], actor=OPERATOR, reason="stop")
    finish(store, no, job, Cancelled("stop"))

    assert store.cancel_requests(no) == {}
    assert store.renew(no) == ({}, {})


def test_a_dead_worker_cannot_renew(store: Store) -> None:
    no = worker(store)
    rescue(store, no)
    before = worker_row(store, no)

    assert store.renew(no) is None
    assert store.renew(no) is None
    assert worker_row(store, no) == before


def test_a_retired_or_unknown_worker_cannot_renew(store: Store) -> None:
    no = worker(store)
    store.retire(no)

    assert store.renew(no) is None
    assert store.renew(no._replace(no=no.no + 1000)) is None


def test_a_worker_whose_number_another_one_has_cannot_renew(store: Store) -> None:
    """After a restore, or a failover that lost its row: the number is not the worker."""
    no = worker(store)
    before = worker_row(store, no)

    assert store.renew(no._replace(id="host:1:restored")) is None

    assert worker_row(store, no) == before


def test_a_worker_whose_number_another_one_has_finishes_nothing(store: Store) -> None:
    no = worker(store)
    stranger = no._replace(id="host:1:restored")
    job = started_job(store, no)
    before = snapshot(store, job.id)

    assert finish(store, stranger, job, Completed()) == "refused"
    assert finish(store, stranger, job, Retried(5, FAILURE)) == "refused"
    assert store.progress(stranger, [(job.id, job.lease_no, "1")]) == [False]
    assert store.rescue(stranger, 0, started=None, limit=3, reason="gone") is None
    store.retire(stranger)

    assert snapshot(store, job.id) == before
    assert finish(store, no, job, Completed()) == "accepted"
    assert finish(store, stranger, job, Completed()) == "refused"


# -- rescue -----------------------------------------------------------------------------------


def test_a_rescue_puts_the_jobs_back(store: Store, clock: Clock) -> None:
    no = worker(store)
    put_many(store, 3)
    jobs = claim(store, no)
    clock.advance(60 * SECOND)

    assert rescue(store, no) == Rescue(3, 0)

    for job in jobs:
        now = get(store, job.id)
        assert (now.status, now.lease_owner, now.lease_until) == ("queued", None, None)
        assert now.lease_no > job.lease_no
        assert now.completed_at is None
        assert milliseconds(now.scheduled_at) == job.scheduled_at
    assert {job.id for job in claim(store, worker(store))} == {job.id for job in jobs}


def test_a_rescue_declares_the_worker_dead(store: Store, clock: Clock) -> None:
    no = worker(store)
    clock.advance(SECOND)

    assert store.rescue(no, 0, started=None, limit=3, reason="pid is gone") == Rescue(0, 0)

    row = worker_row(store, no)
    assert (row.dead_at, row.dead_reason, row.held) == (clock(), "pid is gone", 0)


def test_a_worker_that_has_renewed_since_is_left_alone(store: Store) -> None:
    no = worker(store)
    job = started_job(store, no)
    beat = worker_row(store, no).beat
    store.renew(no)
    before = (get(store, job.id), worker_row(store, no))

    assert rescue(store, no, beat=beat, started=None) is None

    assert (get(store, job.id), worker_row(store, no)) == before
    assert store.renew(no) is not None
    assert finish(store, no, job, Completed()) == "accepted"


def test_a_second_rescue_finds_nothing_to_do(store: Store) -> None:
    # Two rescuers see the same dead worker; its job may be running elsewhere by now.
    no, other = worker(store), worker(store)
    job = started_job(store, no)
    beat = worker_row(store, no).beat
    rescue(store, no, beat=beat, started=None)
    again = claim_one(store, other)
    before = snapshot(store, job.id)

    assert rescue(store, no, beat=beat, started=None) in (None, Rescue(0, 0))

    assert snapshot(store, job.id) == before
    assert finish(store, other, again, Completed()) == "accepted"


def test_rescuing_an_unknown_worker_does_nothing(store: Store) -> None:
    no = worker(store)
    job = started_job(store, no)

    unknown = no._replace(no=no.no + 1000)
    result = store.rescue(unknown, 0, started=None, limit=3, reason="gone")

    assert result in (None, Rescue(0, 0))
    assert get(store, job.id).status == "in_progress"


def test_a_rescue_touches_only_what_its_worker_holds(store: Store) -> None:
    dead, alive = worker(store), worker(store)
    other = started_job(store, alive)
    put_many(store, 3)
    jobs = claim(store, dead)
    finish(store, dead, jobs[0], Completed())
    finish(store, dead, jobs[1], Retried(60, FAILURE))
    untouched = [other.id, jobs[0].id, jobs[1].id]
    before = [store.get(id) for id in untouched]

    assert rescue(store, dead, started=None) == Rescue(1, 0)

    assert [store.get(id) for id in untouched] == before
    assert get(store, jobs[2].id).status == "queued"


def test_only_jobs_that_had_started_are_charged(store: Store) -> None:
    no, other = worker(store), worker(store)
    bystander = started_job(store, other)
    put_many(store, 3)
    jobs = claim(store, no)

    rescue(store, no, started=frozenset({jobs[0].id, bystander.id}))

    assert [get(store, job.id).losses for job in jobs] == [1, 0, 0]
    assert get(store, bystander.id).losses == 0


def test_nobody_is_charged_when_nothing_had_started(store: Store) -> None:
    no = worker(store)
    job = started_job(store, no)

    rescue(store, no, started=frozenset())

    assert get(store, job.id).losses == 0


def test_all_are_charged_when_nobody_knows_what_had_started(store: Store) -> None:
    no = worker(store)
    put_many(store, 3)
    jobs = claim(store, no)

    rescue(store, no, started=None)

    assert [get(store, job.id).losses for job in jobs] == [1, 1, 1]


def test_a_rescue_keeps_the_attempt_and_never_dead_letters_by_attempts(store: Store) -> None:
    id = put(store, max_attempts=1)

    for attempt in (1, 2, 3):
        no = worker(store)
        assert claim_one(store, no).attempts == attempt
        assert rescue(store, no, started=frozenset()) == Rescue(1, 0)
        assert (get(store, id).status, get(store, id).attempts) == ("queued", attempt)


def test_a_rescue_is_no_crash(store: Store) -> None:
    """Whatever ended the worker, an eviction or a machine's death, says little about its jobs."""
    no = worker(store)
    job = started_job(store, no)

    rescue(store, no, started=None)

    assert get(store, job.id).crashes == 0
    assert claim_one(store, worker(store)).crashes == 0


@pytest.mark.parametrize(("losses", "alone"), [(1, False), (2, False), (3, True), (4, True)])
def test_a_job_runs_alone_from_its_third_loss_on(store: Store, losses: int, alone: bool) -> None:
    id = put(store)
    for _ in range(losses):
        no = worker(store)
        claim_one(store, no)
        rescue(store, no, started=None)

    no = worker(store)
    beside_others = store.claim(no, [("default", 5)])
    assert beside_others.suspects is alone
    assert [job.id for job in beside_others.jobs] == ([] if alone else [id])
    by_itself = store.claim(no, [("default", 5)], suspects=True)
    assert [job.id for job in by_itself.jobs] == ([id] if alone else [])


def test_the_next_run_knows_of_the_loss(store: Store) -> None:
    no = worker(store)
    started_job(store, no)
    rescue(store, no, started=None)

    assert claim_one(store, worker(store)).losses == 1


@pytest.mark.parametrize("limit", [1, 3])
def test_at_the_limit_a_job_is_lost(store: Store, clock: Clock, limit: int) -> None:
    id = put(store)
    for loss in range(1, limit + 1):
        no = worker(store)
        job = claim_one(store, no)
        clock.advance(SECOND)
        result = rescue(store, no, started=frozenset({id}), limit=limit)
        assert result == (Rescue(0, 1, (id,)) if loss == limit else Rescue(1, 0))

    dead = get(store, id)
    assert (dead.status, dead.error_code, dead.losses) == ("dead_letter", "lost", limit)
    assert dead.lease_no > job.lease_no
    assert milliseconds(dead.completed_at) == clock()
    assert dead.lease_owner is None
    assert claim(store, worker(store)) == []


def test_a_lost_job_does_not_take_its_neighbours_with_it(store: Store) -> None:
    lost, *others = put_many(store, 3)
    no = worker(store)
    claim(store, no)

    assert rescue(store, no, started=frozenset({lost}), limit=1) == Rescue(2, 1, (lost,))

    assert totals(store) == {"dead_letter": 1, "queued": 2}
    assert [get(store, id).losses for id in others] == [0, 0]


def test_a_job_not_charged_is_not_lost_however_often_its_worker_died_before(store: Store) -> None:
    id = put(store)
    for _ in range(2):
        no = worker(store)
        claim_one(store, no)
        rescue(store, no, started=None, limit=3)
    no = worker(store)
    claim_one(store, no)

    assert rescue(store, no, started=frozenset(), limit=2) == Rescue(1, 0)
    assert (get(store, id).status, get(store, id).losses) == ("queued", 2)


def test_a_job_asked_to_be_cancelled_is_cancelled_by_the_rescue(store: Store, clock: Clock) -> None:
    # It does not go back to the queue: a request is never lost with the worker that had it.
    no = worker(store)
    job = started_job(store, no)
    store.cancel([job.id], actor=OPERATOR, reason="stop")
    clock.advance(SECOND)

    rescue(store, no)

    now = get(store, job.id)
    assert (now.status, now.lease_owner) == ("cancelled", None)
    assert milliseconds(now.completed_at) == clock()
    # The run that was rescued has no say any more.
    assert finish(store, no, job, Completed()) == "refused"
    assert get(store, job.id) == now


def test_a_rescuer_the_store_kept_waiting_does_nothing(store: Store) -> None:
    # Any wait is longer than no patience at all: a stall proves nothing about the worker.
    no = worker(store)
    job = started_job(store, no)
    before = (get(store, job.id), worker_row(store, no))

    told = store.rescue(no, 0, started=None, limit=3, reason="gone", patience=0.0)

    assert told is None
    assert (get(store, job.id), worker_row(store, no)) == before


def test_a_rescuer_served_in_time_acts(store: Store) -> None:
    no = worker(store)
    started_job(store, no)

    told = store.rescue(no, 0, started=None, limit=3, reason="gone", patience=60.0)

    assert told == Rescue(1, 0)


# -- retire -----------------------------------------------------------------------------------


def test_a_worker_that_leaves_is_on_record_as_signed_off(store: Store, clock: Clock) -> None:
    stays, leaves = worker(store), worker(store)
    clock.advance(SECOND)

    store.retire(leaves)

    row = worker_row(store, leaves)
    assert (row.dead_at, row.dead_reason, row.held) == (clock(), "signed off", 0)
    assert worker_row(store, stays).dead_at is None
    assert store.renew(leaves) is None


def test_retiring_twice_is_retiring_once(store: Store, clock: Clock) -> None:
    no = worker(store)
    store.retire(no)
    before = worker_row(store, no)
    clock.advance(SECOND)

    store.retire(no)

    assert worker_row(store, no) == before


def test_there_is_nothing_to_rescue_from_a_worker_that_signed_off(store: Store) -> None:
    no = worker(store)
    store.retire(no)
    before = worker_row(store, no)

    assert rescue(store, no, started=None) in (None, Rescue(0, 0))
    assert worker_row(store, no) == before


def test_a_worker_that_retires_with_jobs_in_hand_does_not_strand_them(store: Store) -> None:
    # It should have given them back. Whatever the store does about it (keep the row, put them
    # back): somebody must be able to run them again.
    no = worker(store)
    job = started_job(store, no)

    store.retire(no)

    if get(store, job.id).status == "in_progress":
        assert rescue(store, no) == Rescue(1, 0)
    assert claim_one(store, worker(store)).id == job.id
