"""The audit trail: one line for every change, with who, what, for whom and when."""

from __future__ import annotations

import pytest

from tenure.ids import new_id
from tenure.job import Actor
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
    all_events,
    claim_one,
    ended_job,
    finish,
    holds,
    kinds,
    milliseconds,
    new,
    put,
    put_many,
    rescue,
    started_job,
    worker,
    worker_row,
)

CALLER = Actor("api_key", "k-9")


def start(store: Store, no: int) -> str:
    return started_job(
        store, no, type="t", org="acme", project="p", actor=CALLER,
        request_id="r", correlation_id="c",
    ).id  # fmt: skip


def test_an_enqueued_job_is_on_record(store: Store, clock: Clock) -> None:
    id = put(
        store, type="t", org="acme", project="p", actor=CALLER, request_id="r", correlation_id="c"
    )

    (event,) = all_events(store, job_id=id)

    assert (event.kind, event.job_id, event.type) == ("job.enqueued", id, "t")
    assert (event.org, event.project, event.actor) == ("acme", "p", CALLER)
    assert (event.request_id, event.correlation_id) == ("r", "c")
    assert milliseconds(event.at) == clock()


def test_a_start_is_on_record_with_its_attempt_and_lease(store: Store, clock: Clock) -> None:
    no = worker(store)
    clock.advance(SECOND)
    job = started_job(store, no, org="acme")

    event = all_events(store, job_id=job.id)[-1]

    assert (event.kind, event.attempt, event.lease_no) == ("job.started", 1, job.lease_no)
    assert (event.org, event.worker) == ("acme", worker_row(store, no).id)
    assert milliseconds(event.at) == clock()


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (Completed("1"), "job.succeeded"),
        (Failed(FAILURE), "job.failed"),
        (Retried(1, FAILURE), "job.retried"),
        (Snoozed(1), "job.snoozed"),
        (Released("shutdown"), "job.released"),
        (Released("bystander", 1), "job.released"),
        (Dead(FAILURE), "job.deadlettered"),
        (Crashed("killed", 1), "job.deadlettered"),
        (Cancelled("asked to"), "job.cancelled"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_end_is_on_record(
    store: Store, clock: Clock, outcome: Outcome, expected: str
) -> None:
    no = worker(store)
    id = put(
        store, type="t", org="acme", project="p", actor=CALLER, request_id="r", correlation_id="c"
    )
    finish(store, no, claim_one(store, no), Retried(0, FAILURE))
    job = claim_one(store, no)
    before = len(all_events(store))
    clock.advance(SECOND)

    finish(store, no, job, outcome)

    (event,) = all_events(store)[before:]
    assert (event.kind, event.job_id, event.type) == (expected, id, "t")
    # The run that ended: its attempt and its lease, not what the job has afterwards.
    assert (event.attempt, event.lease_no) == (2, job.lease_no)
    assert (event.org, event.project) == ("acme", "p")
    assert (event.request_id, event.correlation_id) == ("r", "c")
    assert event.worker == worker_row(store, no).id
    assert milliseconds(event.at) == clock()


def test_a_crash_that_is_not_the_last_is_on_record(store: Store) -> None:
    # The kinds name no word of their own for it; the job is back in the queue like a rescued one.
    no = worker(store)
    job = started_job(store, no)
    before = len(all_events(store))

    finish(store, no, job, Crashed("killed", 3))

    (event,) = all_events(store)[before:]
    assert (event.job_id, event.attempt, event.lease_no) == (job.id, 1, job.lease_no)
    assert event.kind in ("job.rescued", "job.crashed")


@pytest.mark.parametrize("outcome", [Retried(1, FAILURE), Failed(FAILURE), Dead(FAILURE)], ids=str)
def test_the_trail_of_a_failure_names_its_code(store: Store, outcome: Outcome) -> None:
    id = ended_job(store, worker(store), outcome)

    assert holds(all_events(store, job_id=id)[-1].data, "BOOM")


def test_a_rescue_is_on_record_for_every_job(store: Store) -> None:
    no = worker(store)
    jobs = [started_job(store, no, org="acme") for _ in range(2)]

    rescue(store, no)

    for job in jobs:
        event = all_events(store, job_id=job.id)[-1]
        assert (event.kind, event.org, event.attempt) == ("job.rescued", "acme", 1)


def test_poison_is_on_record_as_a_dead_letter(store: Store) -> None:
    no = worker(store)
    job = started_job(store, no, org="acme")

    rescue(store, no, started=None, limit=1)

    event = all_events(store, job_id=job.id)[-1]
    assert (event.kind, event.org, event.attempt) == ("job.deadlettered", "acme", 1)


def test_what_operators_do_is_on_record_with_their_name(store: Store) -> None:
    no = worker(store)
    queued = put(store, org="acme", delay_ms=MINUTE)
    running = start(store, no)
    dead = ended_job(store, no, Failed(FAILURE), org="acme")
    hopeless = ended_job(store, no, Dead(FAILURE), org="acme")

    store.cancel([queued], actor=OPERATOR, reason="because-1")
    store.cancel([running], actor=OPERATOR, reason="because-2")
    store.replay([dead], actor=OPERATOR)
    store.discard([hopeless], actor=OPERATOR, reason="because-3")

    for id, kind, reason in (
        (queued, "job.cancelled", "because-1"),
        (running, "job.cancel_requested", "because-2"),
        (dead, "job.replayed", None),
        (hopeless, "job.discarded", "because-3"),
    ):
        (event,) = [event for event in all_events(store, job_id=id) if event.kind == kind]
        assert (event.org, event.actor) == ("acme", OPERATOR)
        assert reason is None or holds(event.data, reason)


def test_each_cancel_request_is_on_record(store: Store) -> None:
    id = start(store, worker(store))

    store.cancel([id], actor=OPERATOR, reason="first")
    store.cancel([id], actor=CALLER, reason="second")

    requests = [
        event for event in all_events(store, job_id=id) if event.kind == "job.cancel_requested"
    ]
    assert [event.actor for event in requests] == [OPERATOR, CALLER]


def test_pausing_and_resuming_is_on_record(store: Store, clock: Clock) -> None:
    store.pause("planning", actor=OPERATOR, reason="deploy")
    clock.advance(SECOND)
    store.resume("planning", actor=OPERATOR)

    paused, resumed = all_events(store)

    assert (paused.kind, resumed.kind) == ("queue.paused", "queue.resumed")
    assert (paused.actor, resumed.actor) == (OPERATOR, OPERATOR)
    assert (paused.job_id, resumed.job_id) == (None, None)
    assert holds(paused.data, "planning")
    assert holds(paused.data, "deploy")
    assert holds(resumed.data, "planning")
    assert milliseconds(resumed.at) == clock()


def test_the_life_of_a_job_reads_from_top_to_bottom(store: Store) -> None:
    no = worker(store)
    id = put(store)
    for outcome in (Retried(0, FAILURE), Snoozed(0), Released("shutdown"), Failed(FAILURE)):
        finish(store, no, claim_one(store, no), outcome)
    store.replay([id], actor=OPERATOR)
    finish(store, no, claim_one(store, no), Completed())

    assert kinds(store, id) == [
        "job.enqueued",
        "job.started",
        "job.retried",
        "job.started",
        "job.snoozed",
        "job.started",
        "job.released",
        "job.started",
        "job.failed",
        "job.replayed",
        "job.started",
        "job.succeeded",
    ]
    started = [event for event in all_events(store, job_id=id) if event.kind == "job.started"]
    # Given back: the snoozed and the released attempt are counted again. Replay starts anew.
    assert [event.attempt for event in started] == [1, 2, 2, 2, 1]
    numbers = [event.lease_no or 0 for event in started]
    assert numbers == sorted(set(numbers))


def test_what_changes_nothing_is_not_on_record(store: Store) -> None:
    no = worker(store)
    done = started_job(store, no, key="k")
    finish(store, no, done, Completed())
    before = all_events(store)

    finish(store, no, done, Completed())
    finish(store, no, done._replace(lease_no=77), Completed())
    store.cancel([done.id, new_id()], actor=OPERATOR, reason="x")
    store.replay([done.id], actor=OPERATOR)
    store.discard([done.id], actor=OPERATOR, reason="x")
    store.enqueue([new(key="k")])
    store.claim(no, [("default", 5)])
    store.renew(no)

    assert all_events(store) == before


def test_a_batch_of_jobs_is_a_batch_of_events(store: Store) -> None:
    ids = put_many(store, 30)

    events = all_events(store)

    assert sorted(event.job_id or "" for event in events) == sorted(ids)
    assert {event.kind for event in events} == {"job.enqueued"}


def test_events_are_read_page_by_page_oldest_first(store: Store) -> None:
    put_many(store, 25)
    seen: list[int] = []

    while page := store.events(after=seen[-1] if seen else 0, limit=10).events:
        assert len(page) <= 10
        seen += [event.seq for event in page]

    assert len(seen) == 25
    assert seen == sorted(set(seen))
    assert seen[0] > 0


def test_events_of_one_job(store: Store) -> None:
    one, two = put_many(store, 2)

    assert {event.job_id for event in all_events(store, job_id=one)} == {one}
    assert all_events(store, job_id=new_id()) == []
    assert len(all_events(store, job_id=two)) == 1


def test_events_do_not_cross_orgs(store: Store) -> None:
    ours, theirs = put(store, org="acme"), put(store, org="globex")

    assert [event.job_id for event in all_events(store, org="acme")] == [ours]
    assert all_events(store, org="acme", job_id=theirs) == []
    assert all_events(store, org="nobody") == []


def test_the_trail_stays_when_its_job_moves_to_history(store: Store) -> None:
    id = ended_job(store, worker(store), Completed())

    assert kinds(store, id) == ["job.enqueued", "job.started", "job.succeeded"]
