"""Checkpoints: a step's result is stored behind the fence and outlives every kind of new run."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tenure.ids import new_id
from tenure.job import ClaimedJob
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
from tenure.store import Registration, Store

from .builders import (
    FAILURE,
    OPERATOR,
    SECOND,
    Clock,
    claim_one,
    finish,
    get,
    put,
    rescue,
    save_step,
    snapshot,
    started_job,
    worker,
)

BACK = [Retried(0, FAILURE), Snoozed(0), Released("given back"), Crashed("its process died", 3)]


def name_of(value: object) -> str:
    return type(value).__name__.lower()


def test_a_step_is_stored_and_read_back(store: Store) -> None:
    no = worker(store)
    job = started_job(store, no)

    assert store.steps(job.id) == {}
    assert save_step(store, no, job, "upload", '{"part":7}')
    assert save_step(store, no, job, "notify", "null")

    assert store.steps(job.id) == {"upload": '{"part":7}', "notify": "null"}


@pytest.mark.parametrize("text", ["null", "0", '""', '"ü\\u2028"', json.dumps("x" * 100_000), "[]"])
def test_results_come_back_as_they_went_in(store: Store, text: str) -> None:
    no = worker(store)
    job = started_job(store, no)
    save_step(store, no, job, "a step, named 'so'", text)
    assert store.steps(job.id) == {"a step, named 'so'": text}


def test_steps_belong_to_their_job(store: Store) -> None:
    no = worker(store)
    one, other = started_job(store, no), started_job(store, no)
    save_step(store, no, one, "a", "1")

    assert store.steps(other.id) == {}
    assert store.steps(new_id()) == {}


def test_a_step_changes_nothing_else_of_the_run(store: Store) -> None:
    no = worker(store)
    job = started_job(store, no)
    before = snapshot(store, job.id)

    save_step(store, no, job, "a", "1")

    assert snapshot(store, job.id) == before
    assert finish(store, no, job, Completed()) == "accepted"


# -- the fence --------------------------------------------------------------------------------


def rescued(store: Store, no: Registration, job: ClaimedJob) -> None:
    rescue(store, no)


def rescued_and_run_again(store: Store, no: Registration, job: ClaimedJob) -> None:
    rescue(store, no)
    assert claim_one(store, worker(store)).id == job.id


def ended_by(outcome: Outcome) -> Callable[[Store, Registration, ClaimedJob], None]:
    def end(store: Store, no: Registration, job: ClaimedJob) -> None:
        assert finish(store, no, job, outcome) == "accepted"

    return end


def released_and_claimed_by_the_same_worker(
    store: Store, no: Registration, job: ClaimedJob
) -> None:
    finish(store, no, job, Released("given back"))
    assert claim_one(store, no).id == job.id


WAYS = {
    "rescued": rescued,
    "rescued and run again": rescued_and_run_again,
    "released and run again": released_and_claimed_by_the_same_worker,
} | {
    name_of(outcome): ended_by(outcome)
    for outcome in (*BACK, Completed(), Failed(FAILURE), Dead(FAILURE), Cancelled("x"))
}


@pytest.mark.parametrize("lose", WAYS.values(), ids=WAYS)
def test_without_its_lease_a_run_saves_no_step(
    store: Store, lose: Callable[[Store, Registration, ClaimedJob], None]
) -> None:
    no = worker(store)
    job = started_job(store, no)
    lose(store, no, job)
    before = snapshot(store, job.id)

    assert not save_step(store, no, job, "late", "1")

    assert store.steps(job.id) == {}
    assert snapshot(store, job.id) == before


def test_a_stale_step_does_not_replace_the_one_of_the_present_run(store: Store) -> None:
    no = worker(store)
    zombie = started_job(store, no)
    rescue(store, no)
    other = worker(store)
    present = claim_one(store, other)
    assert save_step(store, other, present, "a", '"present"')

    assert not save_step(store, no, zombie, "a", '"zombie"')

    assert store.steps(present.id) == {"a": '"present"'}


@pytest.mark.parametrize("off_by", [-1, 1])
def test_a_number_that_was_not_granted_saves_nothing(store: Store, off_by: int) -> None:
    no = worker(store)
    job = started_job(store, no)
    assert not store.save_step(no, (job.id, job.lease_no + off_by), "a", "1")
    assert store.steps(job.id) == {}


def test_no_step_without_a_run(store: Store) -> None:
    no, queued = worker(store), put(store)
    for lease_no in (0, 1):
        assert not store.save_step(no, (queued, lease_no), "a", "1")
        assert not store.save_step(no, (new_id(), lease_no), "a", "1")
    assert store.steps(queued) == {}


# -- how long they live -----------------------------------------------------------------------


@pytest.mark.parametrize("outcome", BACK, ids=name_of)
def test_steps_outlive_a_run_that_goes_back_to_the_queue(store: Store, outcome: Outcome) -> None:
    no = worker(store)
    job = started_job(store, no)
    save_step(store, no, job, "a", "1")
    finish(store, no, job, outcome)

    again = claim_one(store, no)

    assert again.id == job.id
    assert store.steps(job.id) == {"a": "1"}
    assert save_step(store, no, again, "b", "2")
    assert store.steps(job.id) == {"a": "1", "b": "2"}


def test_steps_outlive_a_rescue(store: Store) -> None:
    no = worker(store)
    job = started_job(store, no)
    save_step(store, no, job, "a", "1")
    rescue(store, no, started=None)

    assert store.steps(job.id) == {"a": "1"}
    assert claim_one(store, worker(store)).id == job.id
    assert store.steps(job.id) == {"a": "1"}


@pytest.mark.parametrize("outcome", [Failed(FAILURE), Dead(FAILURE)], ids=name_of)
def test_a_plain_replay_keeps_steps_and_an_edited_one_clears_them(
    store: Store, outcome: Outcome
) -> None:
    no = worker(store)
    job = started_job(store, no, payload='{"n":1}')
    save_step(store, no, job, "a", "1")
    finish(store, no, job, outcome)
    assert store.steps(job.id) == {"a": "1"}

    store.replay([job.id], actor=OPERATOR)
    assert store.steps(job.id) == {"a": "1"}
    finish(store, no, claim_one(store, no), outcome)
    store.replay([job.id], actor=OPERATOR, payload='{"n":2}')

    assert store.steps(job.id) == {}
    assert get(store, job.id).payload == {"n": 2}


def test_an_edited_replay_clears_the_steps_of_no_other_job(store: Store) -> None:
    no = worker(store)
    one, other = started_job(store, no), started_job(store, no)
    for job in (one, other):
        save_step(store, no, job, "a", "1")
        finish(store, no, job, Failed(FAILURE))

    store.replay([one.id], actor=OPERATOR, payload="{}")

    assert store.steps(other.id) == {"a": "1"}


def test_a_replay_that_is_not_allowed_clears_nothing(store: Store) -> None:
    no = worker(store)
    job = started_job(store, no)
    save_step(store, no, job, "a", "1")

    assert store.replay([job.id], actor=OPERATOR, payload="{}") == {job.id: "in_progress"}

    assert store.steps(job.id) == {"a": "1"}


@pytest.mark.parametrize("outcome", [Completed(), Cancelled("x")], ids=name_of)
def test_steps_go_when_the_job_is_over(store: Store, outcome: Outcome) -> None:
    no = worker(store)
    job, other = started_job(store, no), started_job(store, no)
    for each in (job, other):
        save_step(store, no, each, "a", "1")

    finish(store, no, job, outcome)

    assert store.steps(job.id) == {}
    assert store.steps(other.id) == {"a": "1"}


def test_steps_go_with_a_cancelled_and_with_a_discarded_job(store: Store) -> None:
    no = worker(store)
    cancelled, discarded = started_job(store, no), started_job(store, no)
    for job, outcome in ((cancelled, Retried(60, FAILURE)), (discarded, Failed(FAILURE))):
        save_step(store, no, job, "a", "1")
        finish(store, no, job, outcome)

    store.cancel([cancelled.id], actor=OPERATOR, reason="x")
    store.discard([discarded.id], actor=OPERATOR, reason="x")

    assert (store.steps(cancelled.id), store.steps(discarded.id)) == ({}, {})


# -- a step is a sign of life -----------------------------------------------------------------


def test_a_step_forgets_the_crashes_before_it(store: Store) -> None:
    no = worker(store)
    job = started_job(store, no)
    for number in range(10):  # far beyond the limit of 3, a step between any two crashes
        finish(store, no, job, Crashed("its process died", 3))
        job = claim_one(store, no)
        assert job.crashes == 1
        assert save_step(store, no, job, f"step {number}", "1")
        assert get(store, job.id).crashes == 0


def test_a_step_forgets_the_losses_before_it(store: Store) -> None:
    no = worker(store)
    started_job(store, no)
    rescue(store, no, started=None)
    no = worker(store)
    job = claim_one(store, no)
    assert job.losses == 1

    assert save_step(store, no, job, "a", "1")

    assert get(store, job.id).losses == 0


def test_the_number_of_another_worker_saves_nothing(store: Store) -> None:
    """After a restore a worker may find its number given to another one, with the same job under
    the same lease_no."""
    no = worker(store)
    job = started_job(store, no)

    assert not save_step(store, no._replace(id="host:1:restored"), job, "a", "1")

    assert store.steps(job.id) == {}


def test_a_step_of_another_job_forgives_nothing(store: Store) -> None:
    no = worker(store)
    suspect = started_job(store, no)
    finish(store, no, suspect, Crashed("its process died", 3))
    suspect, other = claim_one(store, no), started_job(store, no)

    save_step(store, no, other, "a", "1")

    assert get(store, suspect.id).crashes == 1


def test_a_stale_step_forgives_nothing(store: Store) -> None:
    no = worker(store)
    job = started_job(store, no)
    finish(store, no, job, Crashed("its process died", 3))

    assert not save_step(store, no, job, "late", "1")

    assert get(store, job.id).crashes == 1


def test_now_ms_is_taken(store: Store, clock: Clock) -> None:
    no = worker(store)
    job = started_job(store, no)
    run = (job.id, job.lease_no)
    assert store.save_step(no, run, "a", "1", now_ms=clock() + SECOND)
