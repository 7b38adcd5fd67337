"""The traceback of a failure: kept with the error it belongs to, and with no other."""

from __future__ import annotations

import pytest

from tenure.job import Job
from tenure.outcome import (
    Completed,
    Crashed,
    Dead,
    Failed,
    Failure,
    Outcome,
    Released,
    Retried,
    Snoozed,
)
from tenure.store import Store

from .builders import (
    OPERATOR,
    all_events,
    claim_one,
    find,
    finish,
    get,
    put,
    rescue,
    started_job,
    worker,
)

TRACED = Failure("boom", "BOOM", "ValueError at tasks.py:7", "Traceback …\n  \"ü\" \\ 'x'\nboom")
OTHER = Failure("bang", "BANG", "KeyError at tasks.py:9", "Traceback …\nbang")


def trouble(store: Store, *outcomes: Outcome) -> Job:
    """A job after these ends of its attempts, one after the other."""
    no = worker(store)
    id = put(store)
    for outcome in outcomes:
        assert finish(store, no, claim_one(store, no), outcome) == "accepted"
    return get(store, id)


@pytest.mark.parametrize("end", [Retried(0, TRACED), Failed(TRACED), Dead(TRACED)])
def test_a_traceback_is_kept_with_its_error(store: Store, end: Outcome) -> None:
    job = trouble(store, end)

    assert (job.error, job.traceback) == ("boom", TRACED.traceback)
    assert [found.traceback for found in find(store)] == [TRACED.traceback]


def test_it_is_that_of_the_latest_failure(store: Store) -> None:
    assert trouble(store, Retried(0, TRACED), Dead(OTHER)).traceback == OTHER.traceback


@pytest.mark.parametrize(
    "later", [Snoozed(0), Released("shutdown"), Completed("1")], ids=["snoozed", "released", "done"]
)
def test_what_is_no_failure_leaves_it(store: Store, later: Outcome) -> None:
    job = trouble(store, Retried(0, TRACED), later)

    assert (job.error, job.traceback) == ("boom", TRACED.traceback)


def test_a_failure_without_one_does_not_get_that_of_another(store: Store) -> None:
    """Nor its place: what it died of is one thing."""
    killed = Failure("still running", "TIMEOUT", "TimeoutError")

    for late in (Failed(killed), Crashed("killed", 1)):
        job = trouble(store, Retried(0, TRACED), late)
        assert job.error in ("still running", "killed")
        assert job.traceback is None
        assert job.error_place in ("TimeoutError", None)


def test_a_discarded_job_keeps_it_and_a_cancelled_one_has_another_reason(store: Store) -> None:
    dead = trouble(store, Dead(TRACED))
    store.discard([dead.id], actor=OPERATOR, reason="given up")
    waiting = trouble(store, Retried(0, TRACED))
    store.cancel([waiting.id], actor=OPERATOR, reason="not needed")

    discarded, cancelled = get(store, dead.id), get(store, waiting.id)
    assert (discarded.status, discarded.error) == ("cancelled", "boom")
    assert discarded.traceback == TRACED.traceback
    assert (cancelled.status, cancelled.error) == ("cancelled", "not needed")
    assert cancelled.traceback is None


def test_a_run_that_failed_while_it_was_to_be_cancelled_keeps_its_own(store: Store) -> None:
    no = worker(store)
    job = started_job(store, no)
    store.cancel([job.id], actor=OPERATOR, reason="not needed")
    finish(store, no, job, Retried(0, TRACED))

    after = get(store, job.id)
    assert (after.status, after.error, after.traceback) == ("cancelled", "boom", TRACED.traceback)


def test_a_replayed_job_shows_it_until_it_fails_anew(store: Store) -> None:
    dead = trouble(store, Dead(TRACED))
    store.replay([dead.id], actor=OPERATOR)
    again = get(store, dead.id)

    assert (again.status, again.error, again.traceback) == ("queued", "boom", TRACED.traceback)


def test_it_is_in_no_event(store: Store) -> None:
    trouble(store, Retried(0, TRACED), Dead(OTHER))

    assert not any("Traceback" in str(event.data) for event in all_events(store))


def test_a_lost_job_has_none(store: Store) -> None:
    id = trouble(store, Retried(0, TRACED)).id
    no = worker(store)
    claim_one(store, no)

    told = rescue(store, no, started=frozenset({id}), limit=1)

    assert told.set_aside == (id,)
    job = get(store, id)
    assert (job.status, job.error_code, job.traceback) == ("dead_letter", "lost", None)
    assert job.error_place is None
