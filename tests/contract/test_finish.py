"""Finish and progress: what each outcome does, and the fence around all of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tenure.ids import new_id
from tenure.job import ClaimedJob, Job
from tenure.outcome import (
    Cancelled,
    Completed,
    Crashed,
    Dead,
    Ended,
    Failed,
    Failure,
    Outcome,
    Released,
    Retried,
    Snoozed,
)
from tenure.store import Store

from .builders import (
    FAILURE,
    SECOND,
    Clock,
    all_events,
    claim,
    claim_one,
    end,
    ended_job,
    finish,
    get,
    kinds,
    milliseconds,
    put,
    put_many,
    rescue,
    snapshot,
    started_job,
    totals,
    worker,
)

OUTCOMES: list[Outcome] = [
    Completed('{"sent":true}'),
    Retried(1.5, FAILURE),
    Snoozed(30),
    Failed(FAILURE),
    Dead(FAILURE),
    Cancelled("asked to"),
    Released("shutdown"),
    Released("bystander", 2.5),
    Crashed("killed", 3),
    Crashed("killed", 1),
]
REQUEUING = [
    outcome
    for outcome in OUTCOMES
    if isinstance(outcome, Retried | Snoozed | Released) or outcome == Crashed("killed", 3)
]


def named(outcome: Outcome) -> str:
    return repr(outcome).split("(")[0] + (
        f"-{outcome.delay}"
        if isinstance(outcome, Released)
        else f"-{outcome.limit}"
        if isinstance(outcome, Crashed)
        else ""
    )


every_outcome = pytest.mark.parametrize("outcome", OUTCOMES, ids=named)
every_requeuing_outcome = pytest.mark.parametrize("outcome", REQUEUING, ids=named)

Run = Callable[[Outcome], tuple[Job, Job]]


@pytest.fixture
def run(store: Store, clock: Clock) -> Run:
    """Run a second attempt to this end: the job as it was while running, and as it is now."""

    def run(outcome: Outcome) -> tuple[Job, Job]:
        no = worker(store)
        first = started_job(store, no)
        clock.advance(SECOND)
        finish(store, no, first, Retried(0, Failure("earlier", "EARLIER")))
        clock.advance(SECOND)
        job = claim_one(store, no)
        running = get(store, job.id)
        clock.advance(40)
        assert finish(store, no, job, outcome) == "accepted"
        return running, get(store, job.id)

    return run


# -- each outcome -----------------------------------------------------------------------------


def test_completed(store: Store, clock: Clock, run: Run) -> None:
    running, job = run(Completed('{"sent":[1,"ü"]}'))

    assert (job.status, job.attempts, job.crashes) == ("completed", 2, 0)
    assert job.result == {"sent": [1, "ü"]}
    assert job.lease_no == running.lease_no
    assert milliseconds(job.completed_at) == milliseconds(job.updated_at) == clock()
    assert job.started_at == running.started_at


def test_completed_without_a_result(run: Run) -> None:
    _, job = run(Completed())

    assert (job.status, job.result) == ("completed", None)


def test_retried(clock: Clock, run: Run) -> None:
    running, job = run(Retried(1.5, FAILURE))

    assert (job.status, job.attempts, job.crashes) == ("queued", 2, 0)
    assert (job.error, job.error_code, job.error_place) == ("boom", "BOOM", FAILURE.place)
    assert milliseconds(job.scheduled_at) == clock() + 1500
    assert job.lease_no > running.lease_no
    assert job.completed_at is None
    assert job.started_at == running.started_at  # the start of the last attempt


def test_snoozed(clock: Clock, run: Run) -> None:
    running, job = run(Snoozed(30))

    assert (job.status, job.attempts, job.crashes) == ("queued", 1, 0)
    assert milliseconds(job.scheduled_at) == clock() + 30 * SECOND
    assert job.lease_no > running.lease_no
    assert job.completed_at is None


def test_failed(clock: Clock, run: Run) -> None:
    running, job = run(Failed(FAILURE))

    assert (job.status, job.attempts, job.crashes) == ("failed", 2, 0)
    assert (job.error, job.error_code, job.error_place) == ("boom", "BOOM", FAILURE.place)
    assert job.lease_no > running.lease_no
    assert milliseconds(job.completed_at) == clock()


def test_dead(clock: Clock, run: Run) -> None:
    running, job = run(Dead(FAILURE))

    assert (job.status, job.attempts, job.crashes) == ("dead_letter", 2, 0)
    assert (job.error, job.error_code, job.error_place) == ("boom", "BOOM", FAILURE.place)
    assert job.lease_no > running.lease_no
    assert milliseconds(job.completed_at) == clock()


def test_cancelled(store: Store, clock: Clock, run: Run) -> None:
    running, job = run(Cancelled("asked to"))

    assert (job.status, job.attempts, job.crashes) == ("cancelled", 2, 0)
    assert job.lease_no == running.lease_no
    assert milliseconds(job.completed_at) == clock()
    assert job.result is None


def test_released(run: Run) -> None:
    running, job = run(Released("shutdown"))

    assert (job.status, job.attempts, job.crashes) == ("queued", 1, 0)
    assert job.scheduled_at == running.scheduled_at
    assert job.lease_no > running.lease_no
    assert job.completed_at is None


def test_released_with_a_delay(clock: Clock, run: Run) -> None:
    running, job = run(Released("bystander", 2.5))

    assert (job.status, job.attempts, job.crashes) == ("queued", 1, 0)
    assert milliseconds(job.scheduled_at) == clock() + 2500
    assert job.lease_no > running.lease_no


def test_crashed_below_the_limit(run: Run) -> None:
    running, job = run(Crashed("killed", 3))

    # Like a rescue: the attempt is kept, the death is charged.
    assert (job.status, job.attempts, job.crashes) == ("queued", 2, 1)
    assert job.lease_no > running.lease_no
    assert job.completed_at is None


def test_crashed_at_the_limit(store: Store, clock: Clock) -> None:
    no = worker(store)
    id = put(store)

    for crashes in (1, 2, 3):
        job = claim_one(store, no)
        assert job.crashes == crashes - 1
        assert finish(store, no, job, Crashed("killed", 3)) == "accepted"
        assert get(store, id).crashes == crashes

    dead = get(store, id)
    assert (dead.status, dead.error_code, dead.attempts) == ("dead_letter", "poison", 3)
    assert dead.lease_no > job.lease_no
    assert milliseconds(dead.completed_at) == clock()
    assert claim(store, no) == []


def test_a_crash_never_dead_letters_by_attempts(store: Store) -> None:
    no = worker(store)
    job = started_job(store, no, max_attempts=1)

    finish(store, no, job, Crashed("killed", 3))

    assert get(store, job.id).status == "queued"
    assert claim_one(store, no).id == job.id


@every_outcome
def test_no_run_holds_its_lease_after_its_end(run: Run, outcome: Outcome) -> None:
    running, job = run(outcome)

    assert running.lease_owner is not None
    assert (job.lease_owner, job.lease_until) == (None, None)


@every_requeuing_outcome
def test_what_goes_back_to_the_queue_is_claimed_when_it_is_due(
    store: Store, clock: Clock, run: Run, outcome: Outcome
) -> None:
    _, job = run(outcome)
    no = worker(store)
    delay = getattr(outcome, "delay", 0) * SECOND

    if delay:
        clock.advance(int(delay) - 1)
        assert claim(store, no) == []
        clock.advance(1)
    again = claim_one(store, no)

    assert again.id == job.id
    assert again.attempts == job.attempts + 1
    assert again.lease_no > job.lease_no
    assert get(store, job.id).status == "in_progress"


def test_the_error_of_an_earlier_attempt_survives_a_snooze_and_a_release(
    store: Store, clock: Clock
) -> None:
    no = worker(store)
    id = put(store)
    for outcome in (Retried(0, FAILURE), Snoozed(0), Released("shutdown")):
        finish(store, no, claim_one(store, no), outcome)
        assert (get(store, id).error, get(store, id).error_code) == ("boom", "BOOM")


# -- batches ----------------------------------------------------------------------------------


def test_verdicts_come_in_the_order_of_the_batch(store: Store) -> None:
    no = worker(store)
    put_many(store, len(OUTCOMES) + 2)
    jobs = claim(store, no)
    stale, *good = jobs
    finish(store, no, stale, Released("shutdown"))
    again = claim_one(store, no)
    assert again.id == stale.id
    batch = [end(job, outcome) for job, outcome in zip(good, OUTCOMES, strict=False)]
    batch.insert(4, end(again._replace(lease_no=again.lease_no + 7), Completed()))
    batch.reverse()

    verdicts = store.finish(no, batch)

    accepted = [
        ended.id for ended, verdict in zip(batch, verdicts, strict=True) if verdict == "accepted"
    ]
    assert accepted == [ended.id for ended in batch if ended.id != stale.id]
    assert verdicts.count("refused") == 1
    assert get(store, stale.id).status == "in_progress"


def test_one_stale_row_does_not_hold_the_others(store: Store) -> None:
    no = worker(store)
    put_many(store, 5)
    jobs = claim(store, no)
    finish(store, no, jobs[2], Released("bystander", 60))
    before = snapshot(store, jobs[2].id)[0]

    verdicts = store.finish(no, [end(job, Failed(FAILURE)) for job in jobs[::-1]])

    assert sorted(verdicts) != ["accepted"] * 5
    assert [verdict == "accepted" for verdict in verdicts] == [True, True, False, True, True]
    assert snapshot(store, jobs[2].id)[0] == before
    assert totals(store) == {"failed": 4, "queued": 1}


def test_an_empty_batch(store: Store) -> None:
    assert store.finish(worker(store), []) == []


def test_a_large_batch(store: Store) -> None:
    no = worker(store)
    put_many(store, 2_000)
    jobs = claim(store, no, 2_000)
    assert len(jobs) == 2_000

    verdicts = store.finish(no, [end(job, Completed("1")) for job in jobs])

    assert set(verdicts) == {"accepted"}
    assert totals(store) == {"completed": 2_000}


def test_the_same_run_twice_in_one_batch_ends_once(store: Store) -> None:
    no = worker(store)
    job = started_job(store, no)

    verdicts = store.finish(no, [end(job, Completed("1"))] * 2)

    assert verdicts[0] == "accepted"
    assert verdicts[1] in ("accepted", "repeated")
    assert kinds(store, job.id).count("job.succeeded") == 1
    assert sum(rollup.runs for rollup in store.rollups(since_ms=0)) == 1


# -- the fence --------------------------------------------------------------------------------


@every_outcome
def test_after_a_rescue_a_finish_is_refused(store: Store, outcome: Outcome) -> None:
    no = worker(store)
    job = started_job(store, no)
    rescue(store, no)
    before = snapshot(store, job.id)

    assert finish(store, no, job, outcome) == "refused"
    assert snapshot(store, job.id) == before


@every_outcome
def test_a_finish_from_before_a_rescue_does_not_touch_the_next_run(
    store: Store, outcome: Outcome
) -> None:
    old, fresh = worker(store), worker(store)
    job = started_job(store, old)
    rescue(store, old)
    again = claim_one(store, fresh)
    before = snapshot(store, job.id)

    assert finish(store, old, job, outcome) == "refused"
    assert finish(store, fresh, job, outcome) == "refused"
    assert finish(store, old, again, outcome) == "refused"
    assert snapshot(store, job.id) == before
    assert finish(store, fresh, again, outcome) == "accepted"


@every_outcome
@pytest.mark.parametrize(
    "given_back", [Released("shutdown"), Snoozed(0), Retried(0, FAILURE)], ids=named
)
def test_a_lease_given_back_is_void_also_when_the_same_worker_runs_the_job_again(
    store: Store, given_back: Outcome, outcome: Outcome
) -> None:
    no = worker(store)
    old = started_job(store, no)
    finish(store, no, old, given_back)
    again = claim_one(store, no)
    before = snapshot(store, old.id)

    # An end of the first lease was accepted already: `repeated` when it is that very one.
    assert finish(store, no, old, outcome) != "accepted"
    assert snapshot(store, old.id) == before
    assert finish(store, no, again, outcome) == "accepted"


def test_a_release_makes_a_late_completion_void(store: Store) -> None:
    no = worker(store)
    job = started_job(store, no)
    finish(store, no, job, Released("shutdown", 60))
    before = snapshot(store, job.id)

    assert finish(store, no, job, Completed("1")) != "accepted"
    assert snapshot(store, job.id) == before


@every_outcome
def test_the_right_number_in_the_wrong_hands_is_refused(store: Store, outcome: Outcome) -> None:
    holder, other = worker(store), worker(store)
    job = started_job(store, holder)
    before = snapshot(store, job.id)

    assert finish(store, other, job, outcome) == "refused"
    assert snapshot(store, job.id) == before
    assert finish(store, holder, job, outcome) == "accepted"


@pytest.mark.parametrize("off_by", [-1, 1])
def test_a_number_that_was_not_granted_is_refused(store: Store, off_by: int) -> None:
    no = worker(store)
    job = started_job(store, no)
    before = snapshot(store, job.id)

    wrong = job._replace(lease_no=job.lease_no + off_by)

    assert finish(store, no, wrong, Completed("1")) == "refused"
    assert snapshot(store, job.id) == before


def test_a_job_that_never_ran_cannot_be_finished(store: Store) -> None:
    no = worker(store)
    id = put(store)
    before = snapshot(store, id)

    for lease_no in (0, 1):
        assert store.finish(no, [Ended(id, lease_no, 1, Completed())]) == ["refused"]
    assert snapshot(store, id) == before


def test_an_unknown_id_is_refused(store: Store) -> None:
    no = worker(store)
    job = started_job(store, no)

    verdicts = store.finish(no, [Ended(new_id(), 1, 1, Completed()), end(job, Completed())])

    assert verdicts == ["refused", "accepted"]
    assert totals(store) == {"completed": 1}


@pytest.mark.parametrize("last", [Completed("1"), Cancelled("x"), Failed(FAILURE), Dead(FAILURE)])
def test_what_has_ended_does_not_end_differently(store: Store, last: Outcome) -> None:
    no = worker(store)
    job = started_job(store, no)
    finish(store, no, job, last)
    before = snapshot(store, job.id)

    for outcome in OUTCOMES:
        # `repeated` or `refused`: a lease ends once, so the store need not compare the ends.
        if outcome != last:
            assert finish(store, no, job, outcome) != "accepted"
        assert finish(store, no, job._replace(lease_no=job.lease_no + 1), outcome) == "refused"
    assert snapshot(store, job.id) == before


def test_each_row_is_judged_by_its_own_number(store: Store) -> None:
    # An old run's end gathers in the same batch as the end of the run that replaced it.
    no = worker(store)
    old = started_job(store, no)
    rescue(store, no)
    no = worker(store)
    job = claim_one(store, no)

    verdicts = store.finish(no, [end(old, Failed(FAILURE)), end(job, Completed("1"))])

    assert verdicts == ["refused", "accepted"]
    assert get(store, job.id).status == "completed"


# -- a lost reply -----------------------------------------------------------------------------


@every_outcome
def test_the_same_finish_sent_twice_is_one_finish(
    store: Store, clock: Clock, outcome: Outcome
) -> None:
    no = worker(store)
    job = started_job(store, no)
    assert finish(store, no, job, outcome) == "accepted"
    before = snapshot(store, job.id)
    clock.advance(5 * SECOND)

    assert finish(store, no, job, outcome) == "repeated"
    assert finish(store, no, job, outcome) == "repeated"
    assert snapshot(store, job.id) == before


@every_requeuing_outcome
def test_a_repeated_finish_leaves_the_next_run_alone(
    store: Store, clock: Clock, outcome: Outcome
) -> None:
    no, other = worker(store), worker(store)
    job = started_job(store, no)
    finish(store, no, job, outcome)
    clock.advance(60 * SECOND)
    again = claim_one(store, other)
    before = snapshot(store, job.id)

    assert finish(store, no, job, outcome) == "repeated"
    assert snapshot(store, job.id) == before
    assert finish(store, other, again, Completed()) == "accepted"


def test_a_batch_sent_twice_is_one_batch(store: Store) -> None:
    no = worker(store)
    put_many(store, len(OUTCOMES))
    batch = [end(job, outcome) for job, outcome in zip(claim(store, no), OUTCOMES, strict=True)]
    assert set(store.finish(no, batch)) == {"accepted"}
    before = snapshot(store, *[ended.id for ended in batch])

    assert set(store.finish(no, batch)) == {"repeated"}
    assert snapshot(store, *[ended.id for ended in batch]) == before


def test_a_batch_half_known_is_finished_by_the_other_half(store: Store) -> None:
    no = worker(store)
    put_many(store, 4)
    jobs = claim(store, no)
    store.finish(no, [end(job, Completed("1")) for job in jobs[:2]])

    verdicts = store.finish(no, [end(job, Completed("1")) for job in jobs])

    assert verdicts == ["repeated", "repeated", "accepted", "accepted"]
    assert totals(store) == {"completed": 4}


def test_a_refused_finish_writes_no_events(store: Store) -> None:
    no = worker(store)
    job = started_job(store, no)
    rescue(store, no)
    before = len(all_events(store))

    finish(store, no, job, Completed())

    assert len(all_events(store)) == before


# -- progress ---------------------------------------------------------------------------------


def test_progress_is_stored(store: Store, clock: Clock) -> None:
    no = worker(store)
    job = started_job(store, no)

    assert store.progress(no, [(job.id, job.lease_no, '{"percent":40,"phase":"ü"}')]) == [True]
    assert get(store, job.id).progress == {"percent": 40, "phase": "ü"}
    assert store.progress(no, [(job.id, job.lease_no, '{"percent":80}')]) == [True]
    assert get(store, job.id).progress == {"percent": 80}


def test_progress_does_not_end_or_change_the_run(store: Store) -> None:
    no = worker(store)
    job = started_job(store, no)

    store.progress(no, [(job.id, job.lease_no, "1")])

    now = get(store, job.id)
    assert (now.status, now.lease_no, now.attempts) == ("in_progress", job.lease_no, 1)
    assert finish(store, no, job, Completed()) == "accepted"


def stale_leases(store: Store) -> list[tuple[int, ClaimedJob]]:
    """Leases that are gone, each in another way, with the worker that would use them."""
    no, other = worker(store), worker(store)
    rescued = worker(store)
    leases = [(rescued, started_job(store, rescued))]
    rescue(store, rescued)
    again = claim_one(store, no)
    assert again.id == leases[0][1].id
    leases.append((other, again))
    leases.append((no, again._replace(lease_no=again.lease_no + 1)))
    for outcome in (Completed(), Failed(FAILURE), Released("bystander", 60)):
        leases.append((no, started_job(store, no)))
        finish(store, *leases[-1], outcome)
    leases.append((no, again._replace(id=new_id())))
    return leases


def test_progress_is_fenced(store: Store) -> None:
    for no, job in stale_leases(store):
        before = store.get(job.id)
        assert store.progress(no, [(job.id, job.lease_no, '{"percent":99}')]) == [False]
        assert store.get(job.id) == before


def test_one_stale_report_does_not_hold_the_others(store: Store) -> None:
    no = worker(store)
    put_many(store, 3)
    jobs = claim(store, no)
    finish(store, no, jobs[1], Released("bystander", 60))

    told = store.progress(no, [(job.id, job.lease_no, "7") for job in jobs[::-1]])

    assert told == [True, False, True]
    assert [get(store, job.id).progress for job in jobs] == [7, None, 7]


def test_each_report_is_judged_by_its_own_number(store: Store) -> None:
    no = worker(store)
    job = started_job(store, no)

    told = store.progress(
        no, [(job.id, job.lease_no, "1"), (job.id, job.lease_no + 1, "2"), (job.id, 0, "3")]
    )

    assert told == [True, False, False]
    assert get(store, job.id).progress == 1


def test_of_two_reports_of_one_run_the_later_one_stands(store: Store) -> None:
    no = worker(store)
    put_many(store, 3)
    jobs = claim(store, no)

    reports = [(job.id, job.lease_no, str(percent)) for percent in (40, 90) for job in jobs]

    assert store.progress(no, reports) == [True] * 6
    assert [get(store, job.id).progress for job in jobs] == [90, 90, 90]


def test_the_last_progress_stays_readable_after_the_end(store: Store) -> None:
    no = worker(store)
    job = started_job(store, no)
    store.progress(no, [(job.id, job.lease_no, '{"percent":90}')])

    finish(store, no, job, Completed())

    assert get(store, job.id).progress == {"percent": 90}


# -- what a finish counts ---------------------------------------------------------------------


def test_each_accepted_finish_is_counted_once_in_the_rollups(store: Store, clock: Clock) -> None:
    no = worker(store)
    since = clock() - 60 * SECOND
    durations = [3, 20, 20, 700]
    for duration in durations:
        job = started_job(store, no, type="sum")
        store.finish(no, [end(job, Completed(), duration)])
        store.finish(no, [end(job, Completed(), duration)])  # a lost reply is not counted again
    ended_job(store, no, Failed(FAILURE), type="sum")

    rollups = [rollup for rollup in store.rollups(since_ms=since) if rollup.type == "sum"]

    assert {rollup.queue for rollup in rollups} == {"default"}
    by_outcome: dict[str, list[int]] = {}
    for rollup in rollups:
        count, duration = by_outcome.setdefault(rollup.outcome, [0, 0])
        by_outcome[rollup.outcome] = [count + rollup.runs, duration + rollup.duration_ms]
        assert sum(rollup.buckets) == rollup.runs
    assert sorted(by_outcome.values()) == [[1, 5], [4, sum(durations)]]


def test_a_batch_is_counted_run_by_run(store: Store) -> None:
    no = worker(store)
    put_many(store, 5)

    store.finish(no, [end(job, Completed(), 10) for job in claim(store, no)])

    rollups = store.rollups(since_ms=0)
    assert sum(rollup.runs for rollup in rollups) == 5
    assert sum(rollup.duration_ms for rollup in rollups) == 50
    assert sum(sum(rollup.buckets) for rollup in rollups) == 5
