"""Operators: cancel, replay, discard, pause and resume, within one org or over all."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tenure.ids import new_id
from tenure.outcome import (
    Cancelled,
    Completed,
    Crashed,
    Dead,
    Failed,
    Outcome,
    Released,
    Retried,
    Snoozed,
)
from tenure.store import Store

from .builders import (
    FAILURE,
    MINUTE,
    OPERATOR,
    SECOND,
    Clock,
    claim,
    claim_one,
    ended_job,
    finish,
    get,
    kinds,
    milliseconds,
    put,
    put_many,
    queue_info,
    snapshot,
    started_job,
    totals,
    worker,
)

DEATHS: list[Outcome] = [Failed(FAILURE), Dead(FAILURE)]
every_death = pytest.mark.parametrize("death", DEATHS, ids=lambda end: type(end).__name__)


def in_status(store: Store, no: int) -> dict[str, str]:
    """One job in every status there is: status -> id."""
    return {
        "completed": ended_job(store, no, Completed("1")),
        "cancelled": ended_job(store, no, Cancelled("x")),
        "failed": ended_job(store, no, Failed(FAILURE)),
        "dead_letter": ended_job(store, no, Dead(FAILURE)),
        "in_progress": started_job(store, no).id,
        "queued": ended_job(store, no, Retried(MINUTE, FAILURE)),
    }


# -- cancel -----------------------------------------------------------------------------------


def test_a_queued_job_is_cancelled_at_once(store: Store, clock: Clock) -> None:
    id = put(store)
    before = get(store, id)
    clock.advance(SECOND)

    assert store.cancel([id], actor=OPERATOR, reason="not needed") == {id: "done"}

    job = get(store, id)
    assert (job.status, job.attempts) == ("cancelled", 0)
    assert milliseconds(job.completed_at) == milliseconds(job.updated_at) == clock()
    assert job.lease_no == before.lease_no
    assert claim(store, worker(store)) == []


@pytest.mark.parametrize("wait", [Retried(60, FAILURE), Snoozed(60)], ids=["retry", "snooze"])
def test_a_job_waiting_for_its_next_attempt_is_cancelled_at_once(
    store: Store, clock: Clock, wait: Outcome
) -> None:
    no = worker(store)
    id = ended_job(store, no, wait)

    assert store.cancel([id], actor=OPERATOR, reason="x") == {id: "done"}

    clock.advance(2 * MINUTE)
    assert claim(store, no) == []
    assert get(store, id).status == "cancelled"


def test_a_running_job_is_asked_to_stop(store: Store) -> None:
    no = worker(store)
    job = started_job(store, no)
    assert get(store, job.id).cancel_requested is False

    assert store.cancel([job.id], actor=OPERATOR, reason="changed") == {job.id: "requested"}

    asked = get(store, job.id)
    assert (asked.status, asked.lease_no) == ("in_progress", job.lease_no)
    assert asked.cancel_requested is True
    assert store.cancel_requests(no) == {job.id: "changed"}
    assert finish(store, no, job, Cancelled("changed")) == "accepted"
    assert get(store, job.id).status == "cancelled"


@pytest.mark.parametrize(
    "outcome", [Completed("1"), Failed(FAILURE), Dead(FAILURE)], ids=lambda end: type(end).__name__
)
def test_a_job_that_ended_before_it_saw_the_request_has_ended(
    store: Store, outcome: Outcome
) -> None:
    no = worker(store)
    job = started_job(store, no)
    store.cancel([job.id], actor=OPERATOR, reason="too late")

    assert finish(store, no, job, outcome) == "accepted"

    assert get(store, job.id).status in ("completed", "failed", "dead_letter")
    assert store.cancel_requests(no) == {}


@pytest.mark.parametrize(
    "outcome",
    [Retried(0, FAILURE), Snoozed(0), Released("shutdown"), Crashed("killed", 3)],
    ids=lambda end: type(end).__name__,
)
def test_a_job_asked_to_be_cancelled_does_not_go_back_to_the_queue(
    store: Store, clock: Clock, outcome: Outcome
) -> None:
    no = worker(store)
    job = started_job(store, no)
    store.cancel([job.id], actor=OPERATOR, reason="stop")
    clock.advance(SECOND)

    assert finish(store, no, job, outcome) == "accepted"

    now = get(store, job.id)
    assert (now.status, now.lease_no) == ("cancelled", job.lease_no)
    assert milliseconds(now.completed_at) == clock()
    assert kinds(store, job.id)[-1] == "job.cancelled"
    assert claim(store, no) == []
    assert finish(store, no, job, outcome) == "repeated"


def test_asking_twice_is_allowed(store: Store) -> None:
    no = worker(store)
    job = started_job(store, no)

    for _ in range(2):
        assert store.cancel([job.id], actor=OPERATOR, reason="stop") == {job.id: "requested"}

    assert list(store.cancel_requests(no)) == [job.id]


def test_what_has_ended_cannot_be_cancelled(store: Store) -> None:
    jobs = in_status(store, worker(store))
    ended = [jobs[status] for status in ("completed", "cancelled", "failed", "dead_letter")]
    before = snapshot(store, *ended)

    told = store.cancel(ended, actor=OPERATOR, reason="x")

    assert told == {jobs[status]: status for status in jobs if jobs[status] in ended}
    assert snapshot(store, *ended) == before


def test_a_batch_of_all_kinds_is_told_one_by_one(store: Store) -> None:
    jobs = in_status(store, worker(store))
    absent = new_id()

    told = store.cancel([*jobs.values(), absent], actor=OPERATOR, reason="x")

    assert told == {
        jobs["completed"]: "completed",
        jobs["cancelled"]: "cancelled",
        jobs["failed"]: "failed",
        jobs["dead_letter"]: "dead_letter",
        jobs["in_progress"]: "requested",
        jobs["queued"]: "done",
        absent: "absent",
    }
    assert totals(store) == {
        "completed": 1, "cancelled": 2, "failed": 1, "dead_letter": 1, "in_progress": 1,
    }  # fmt: skip


# -- replay -----------------------------------------------------------------------------------


@every_death
def test_a_dead_job_is_replayed_under_its_id(store: Store, clock: Clock, death: Outcome) -> None:
    no = worker(store)
    id = put(store, payload='{"n":1}')
    finish(store, no, claim_one(store, no), Crashed("killed", 3))
    finish(store, no, claim_one(store, no), death)
    dead = get(store, id)
    assert (dead.attempts, dead.crashes) == (2, 1)
    clock.advance(MINUTE)

    assert store.replay([id], actor=OPERATOR) == {id: "done"}

    job = get(store, id)
    assert (job.status, job.attempts, job.crashes) == ("queued", 0, 0)
    assert job.completed_at is None
    assert job.lease_no >= dead.lease_no
    assert job.created_at == dead.created_at
    assert job.payload == {"n": 1}
    again = claim_one(store, no)
    assert (again.id, again.attempts, again.crashes) == (id, 1, 0)
    assert again.lease_no > dead.lease_no
    assert finish(store, no, again, Completed("2")) == "accepted"
    assert (get(store, id).status, get(store, id).result) == ("completed", 2)


def test_poison_is_replayed_with_a_clean_slate(store: Store) -> None:
    no = worker(store)
    id = ended_job(store, no, Crashed("killed", 1))
    assert get(store, id).status == "dead_letter"

    assert store.replay([id], actor=OPERATOR) == {id: "done"}

    assert finish(store, no, claim_one(store, no), Crashed("killed", 2)) == "accepted"
    assert (get(store, id).status, get(store, id).crashes) == ("queued", 1)


def test_a_replayed_job_may_carry_an_edited_payload(store: Store) -> None:
    no = worker(store)
    id = ended_job(store, no, Failed(FAILURE), payload='{"to":"typo"}')

    store.replay([id], actor=OPERATOR, payload='{"to":"a@b.c"}')

    assert get(store, id).payload == {"to": "a@b.c"}
    assert claim_one(store, no).payload == '{"to":"a@b.c"}'


def test_a_replayed_job_is_due_now_and_waits_its_turn(store: Store, clock: Clock) -> None:
    no = worker(store)
    dead = ended_job(store, no, Failed(FAILURE))
    clock.advance(SECOND)
    waiting = put(store)
    clock.advance(SECOND)

    store.replay([dead], actor=OPERATOR)

    assert milliseconds(get(store, dead).scheduled_at) == clock()
    assert [job.id for job in claim(store, no, 2)] == [waiting, dead]


def test_only_dead_jobs_are_replayed(store: Store) -> None:
    jobs = in_status(store, worker(store))
    others = {
        status: jobs[status] for status in ("queued", "in_progress", "completed", "cancelled")
    }
    absent = new_id()
    before = snapshot(store, *others.values())

    told = store.replay([*others.values(), absent], actor=OPERATOR, payload='{"n":9}')

    assert told == {id: status for status, id in others.items()} | {absent: "absent"}
    assert snapshot(store, *others.values()) == before


def test_a_lease_from_before_the_replay_stays_void(store: Store) -> None:
    no = worker(store)
    old = started_job(store, no)
    finish(store, no, old, Failed(FAILURE))
    store.replay([old.id], actor=OPERATOR)
    before = snapshot(store, old.id)

    assert finish(store, no, old, Completed()) != "accepted"
    assert snapshot(store, old.id) == before
    again = claim_one(store, no)
    assert finish(store, no, old, Failed(FAILURE)) != "accepted"
    assert finish(store, no, again, Completed()) == "accepted"


def test_a_cancel_request_of_an_earlier_life_does_not_haunt_a_replayed_job(store: Store) -> None:
    no = worker(store)
    job = started_job(store, no)
    store.cancel([job.id], actor=OPERATOR, reason="stop")
    finish(store, no, job, Failed(FAILURE))

    store.replay([job.id], actor=OPERATOR)
    claim_one(store, no)

    assert store.cancel_requests(no) == {}
    assert get(store, job.id).cancel_requested is False


def test_many_are_replayed_at_once(store: Store) -> None:
    no = worker(store)
    ids = [ended_job(store, no, death) for death in DEATHS * 10]

    assert store.replay(ids, actor=OPERATOR) == dict.fromkeys(ids, "done")
    assert {job.id for job in claim(store, no)} == set(ids)


# -- discard ----------------------------------------------------------------------------------


@every_death
def test_a_dead_job_is_discarded(store: Store, clock: Clock, death: Outcome) -> None:
    no = worker(store)
    id = ended_job(store, no, death)
    dead = get(store, id)
    clock.advance(MINUTE)

    # As with replay: the new status is what the caller is told.
    assert store.discard([id], actor=OPERATOR, reason="hopeless") == {id: "done"}

    job = get(store, id)
    assert job.status == "cancelled"
    assert job.completed_at is not None
    assert job.lease_no >= dead.lease_no
    assert claim(store, no) == []
    assert store.replay([id], actor=OPERATOR) == {id: "cancelled"}
    assert get(store, id).status == "cancelled"


def test_only_dead_jobs_are_discarded(store: Store) -> None:
    jobs = in_status(store, worker(store))
    others = {
        status: jobs[status] for status in ("queued", "in_progress", "completed", "cancelled")
    }
    absent = new_id()
    before = snapshot(store, *others.values())

    told = store.discard([*others.values(), absent], actor=OPERATOR, reason="x")

    assert told == {id: status for status, id in others.items()} | {absent: "absent"}
    assert snapshot(store, *others.values()) == before


# -- one tenant -------------------------------------------------------------------------------

Action = Callable[[Store, list[str], str | None], dict[str, str]]
ACTIONS: dict[str, Action] = {
    "cancel": lambda store, ids, org: store.cancel(ids, actor=OPERATOR, reason="x", org=org),
    "replay": lambda store, ids, org: store.replay(ids, actor=OPERATOR, org=org),
    "discard": lambda store, ids, org: store.discard(ids, actor=OPERATOR, reason="x", org=org),
}
every_action = pytest.mark.parametrize("action", ACTIONS.values(), ids=list(ACTIONS))


@every_action
def test_a_foreign_job_looks_like_no_job(store: Store, action: Action) -> None:
    no = worker(store)
    ids = [
        ended_job(store, no, outcome, org="acme")
        for outcome in (Failed(FAILURE), Dead(FAILURE), Completed(), Cancelled("x"))
    ]
    ids += [started_job(store, no, org="acme").id, put(store, org="acme")]
    before = snapshot(store, *ids)

    assert action(store, ids, "globex") == dict.fromkeys(ids, "absent")
    assert snapshot(store, *ids) == before
    assert store.cancel_requests(no) == {}


@every_action
def test_in_a_mixed_batch_only_ones_own_jobs_are_touched(store: Store, action: Action) -> None:
    no = worker(store)
    if action is ACTIONS["cancel"]:
        ours, theirs = put(store, org="acme"), put(store, org="globex")
    else:
        ours = ended_job(store, no, Failed(FAILURE), org="acme")
        theirs = ended_job(store, no, Failed(FAILURE), org="globex")
    before = snapshot(store, theirs)[0]

    told = action(store, [ours, theirs], "acme")

    assert told[theirs] == "absent"
    assert told[ours] == "done"
    assert snapshot(store, theirs)[0] == before


@every_action
def test_no_ids_no_work(store: Store, action: Action) -> None:
    id = ended_job(store, worker(store), Failed(FAILURE))
    before = snapshot(store, id)

    assert action(store, [], None) == {}
    assert snapshot(store, id) == before


# -- pause and resume -------------------------------------------------------------------------


def test_a_pause_is_on_record(store: Store, clock: Clock) -> None:
    put_many(store, 2)

    store.pause("default", actor=OPERATOR, reason="deploy")

    paused = queue_info(store)
    assert (paused.paused_at, paused.pause_reason) == (clock(), "deploy")
    assert paused.paused_by is not None
    assert OPERATOR.id in paused.paused_by
    assert paused.ready == 2
    assert store.queue_names()["default"] is True

    store.resume("default", actor=OPERATOR)

    resumed = queue_info(store)
    assert (resumed.paused_at, resumed.paused_by, resumed.pause_reason) == (None, None, None)
    assert store.queue_names()["default"] is False


def test_resuming_a_queue_nobody_has_heard_of_does_no_harm(store: Store) -> None:
    store.resume("unheard-of", actor=OPERATOR)

    put(store, queue="unheard-of")
    assert claim_one(store, worker(store), queue="unheard-of")


def test_a_pause_is_seen_by_every_store_on_the_database(
    store: Store, make_store: Callable[[], Store]
) -> None:
    other = make_store()
    no = worker(other)
    put_many(store, 2)
    assert len(claim(other, no, 1)) == 1

    store.pause("default", actor=OPERATOR, reason="deploy")

    assert claim(other, no) == []
