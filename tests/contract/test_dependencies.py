"""Jobs that wait for jobs: released once, by the last need; or cancelled with a dead one."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

import pytest

from tenure.errors import JobError
from tenure.ids import new_id
from tenure.outcome import Cancelled, Completed, Crashed, Dead, Failed, Outcome, Retried
from tenure.policy import Keep
from tenure.store import Prune, Store

from .builders import (
    DAY,
    FAILURE,
    HOUR,
    OPERATOR,
    SECOND,
    Clock,
    all_events,
    begin,
    claim,
    claim_one,
    end,
    ended_job,
    finish,
    get,
    kinds,
    new,
    open_store,
    put,
    put_many,
    queue_info,
    rescue,
    started_job,
    table,
    totals,
    worker,
)

WAIT = 60  # seconds until a barrier gives up: somebody died before it
DYING = [Failed(FAILURE), Dead(FAILURE), Cancelled("x")]


def name_of(value: object) -> str:
    return type(value).__name__.lower()


def ids_of(jobs: list[Any]) -> list[str]:
    return [job.id for job in jobs]


# -- waiting and being released ---------------------------------------------------------------


def test_a_job_waits_until_all_its_needs_have_completed(store: Store, clock: Clock) -> None:
    no = worker(store)
    needs = put_many(store, 3)
    last = put(store, after=tuple(needs))
    assert get(store, last).after == tuple(sorted(needs))
    jobs = claim(store, no)
    assert ids_of(jobs) == needs
    for job in jobs[:2]:
        finish(store, no, job, Completed())
        assert claim(store, no) == []
    clock.advance(5 * SECOND)
    finish(store, no, jobs[2], Completed())

    again = claim_one(store, no)

    assert again.id == last
    assert again.ready_at == clock()  # it became runnable now, and takes its place in line by that
    assert kinds(store, last) == ["job.enqueued", "job.started"]


def test_needs_that_have_completed_already_count(store: Store) -> None:
    no = worker(store)
    done = [ended_job(store, no, Completed()) for _ in range(2)]
    free = put(store, after=tuple(done))
    assert claim_one(store, no).id == free
    need = put(store)
    partly = put(store, after=(*done, need))

    assert claim_one(store, no).id == need
    assert queue_info(store).waiting == 1
    assert get(store, partly).status == "queued"


def test_a_delay_counts_beside_the_needs(store: Store, clock: Clock) -> None:
    no = worker(store)
    need = put(store)
    later = put(store, after=(need,), delay_ms=10 * SECOND)
    finish(store, no, claim_one(store, no), Completed())
    assert claim(store, no) == []
    clock.advance(10 * SECOND)
    assert claim_one(store, no).id == later


@pytest.mark.parametrize("outcome", [Retried(0, FAILURE), Crashed("died", 3)], ids=name_of)
def test_a_need_that_runs_again_has_not_completed(store: Store, outcome: Outcome) -> None:
    no = worker(store)
    need = put(store)
    put(store, after=(need,))
    finish(store, no, claim_one(store, no), outcome)
    assert ids_of(claim(store, no)) == [need]


def test_a_refused_finish_releases_nobody(store: Store) -> None:
    no = worker(store)
    need = started_job(store, no)
    put(store, after=(need.id,))
    rescue(store, no)
    assert finish(store, no, need, Completed()) == "refused"
    assert ids_of(claim(store, worker(store))) == [need.id]


def test_a_chain_runs_in_order(store: Store) -> None:
    no = worker(store)
    chain = [new()]
    for _ in range(9):
        chain.append(new(after=(chain[-1].id,)))
    store.enqueue(chain)
    ran = []
    while jobs := claim(store, no):
        ran += ids_of(jobs)
        store.finish(no, [end(job, Completed()) for job in jobs])
    assert ran == ids_of(chain)


def test_one_need_releases_all_who_wait_for_it(store: Store) -> None:
    no = worker(store)
    need = started_job(store, no)
    waiting = put_many(store, 30, after=(need.id,))
    assert queue_info(store).waiting == 30
    finish(store, no, need, Completed())
    assert ids_of(claim(store, no)) == waiting
    assert queue_info(store).waiting == 0


def test_waiting_jobs_are_counted_apart(store: Store) -> None:
    need = put(store)
    put_many(store, 4, after=(need,), queue="exports")
    put(store, queue="exports")
    put(store, queue="exports", delay_ms=HOUR)

    exports = queue_info(store, "exports")

    assert (exports.ready, exports.later, exports.waiting) == (1, 1, 4)
    assert totals(store) == {"queued": 7}
    assert store.next_due(["exports"]) == HOUR


def test_a_waiting_job_is_due_at_no_time(store: Store) -> None:
    need = put(store, queue="elsewhere")
    put(store, after=(need,), delay_ms=SECOND)
    assert store.next_due(["default"]) is None


# -- results ----------------------------------------------------------------------------------


def test_the_results_of_needs_are_read_by_id(store: Store) -> None:
    no = worker(store)
    done = ended_job(store, no, Completed('{"rows":[1,2]}'))
    empty = ended_job(store, no, Completed())
    need = put(store)
    last = put(store, after=(done, empty, need))

    assert store.results(last) == {
        done: ("completed", {"rows": [1, 2]}),
        empty: ("completed", None),
        need: ("queued", None),
    }
    finish(store, no, claim_one(store, no), Completed("7"))
    assert store.results(last)[need] == ("completed", 7)
    assert store.results(need) == {}
    assert store.results(new_id()) == {}


def test_results_stay_readable_over_attempts(store: Store) -> None:
    no = worker(store)
    need = ended_job(store, no, Completed("7"))
    job = started_job(store, no, after=(need,))
    finish(store, no, job, Retried(0, FAILURE))
    assert claim_one(store, no).id == job.id
    assert store.results(job.id) == {need: ("completed", 7)}


# -- needs that die ---------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", [Failed(FAILURE), Dead(FAILURE)], ids=name_of)
def test_wait_waits_for_a_dead_need_to_be_replayed(
    store: Store, clock: Clock, outcome: Outcome
) -> None:
    no = worker(store)
    need = started_job(store, no)
    last = put(store, after=(need.id,), after_failed="wait")
    finish(store, no, need, outcome)
    for _ in range(3):
        clock.advance(DAY)
        assert store.settle_dependants() == 0
        assert claim(store, no) == []
    assert get(store, last).status == "queued"

    store.replay([need.id], actor=OPERATOR)
    finish(store, no, claim_one(store, no), Completed())

    assert claim_one(store, no).id == last


@pytest.mark.parametrize("outcome", DYING, ids=name_of)
def test_cancel_ends_with_its_need(store: Store, outcome: Outcome) -> None:
    no = worker(store)
    need = started_job(store, no)
    last = put(store, after=(need.id,), after_failed="cancel")

    finish(store, no, need, outcome)

    how = "cancelled" if isinstance(outcome, Cancelled) else "failed"
    job = get(store, last)
    assert (job.status, job.error_code) == ("cancelled", f"dependency_{how}")
    assert how in str(job.error)
    assert kinds(store, last) == ["job.enqueued", "job.cancelled"]
    assert queue_info(store).waiting == 0
    assert store.settle_dependants() == 0


def test_cancel_is_passed_on(store: Store) -> None:
    """need <- a (cancel) <- b (cancel) <- c (wait); d waits for a and another need. What waits for
    a job that was cancelled would wait for ever, whatever it was told."""
    no = worker(store)
    need = started_job(store, no)
    other = put(store, queue="elsewhere")
    a = put(store, after=(need.id,), after_failed="cancel")
    b = put(store, after=(a,), after_failed="cancel")
    c = put(store, after=(b,), after_failed="wait")
    d = put(store, after=(a, other), after_failed="cancel")

    finish(store, no, need, Failed(FAILURE))

    assert [get(store, id).status for id in (a, b, c, d)] == [
        "cancelled", "cancelled", "cancelled", "cancelled",
    ]  # fmt: skip
    assert [get(store, id).error_code for id in (a, b, c, d)] == [
        "dependency_failed", "dependency_cancelled", "dependency_cancelled",
        "dependency_cancelled",
    ]  # fmt: skip
    assert queue_info(store).waiting == 0
    assert [kinds(store, id).count("job.cancelled") for id in (a, b, c, d)] == [1, 1, 1, 1]


def test_a_long_chain_is_cancelled_to_its_end(store: Store) -> None:
    no = worker(store)
    need = started_job(store, no)
    chain = [new(after=(need.id,), after_failed="cancel")]
    for _ in range(99):
        chain.append(new(after=(chain[-1].id,), after_failed="cancel"))
    store.enqueue(chain)
    finish(store, no, need, Dead(FAILURE))
    assert totals(store) == {"dead_letter": 1, "cancelled": 100}


def test_a_lost_need_cancels_too_and_the_rescue_counts_right(store: Store) -> None:
    no = worker(store)
    need, harmless = started_job(store, no), started_job(store, no)
    last = put(store, after=(need.id,), after_failed="cancel")

    result = rescue(store, no, started=frozenset({need.id}), limit=1)

    assert (result.requeued, result.lost) == (1, 1)
    assert get(store, need.id).status == "dead_letter"
    assert get(store, harmless.id).status == "queued"
    assert get(store, last).status == "cancelled"


@pytest.mark.parametrize("how", ["cancelled", "discarded"])
def test_a_need_withdrawn_by_an_operator_cancels_whoever_waits(store: Store, how: str) -> None:
    """It will never complete: whoever waited for it would wait for ever."""
    no = worker(store)
    need = put(store) if how == "cancelled" else ended_job(store, no, Failed(FAILURE))
    patient = put(store, after=(need,), after_failed="wait")
    hasty = put(store, after=(need,), after_failed="cancel")
    last = put(store, after=(patient,), after_failed="wait")

    if how == "cancelled":
        store.cancel([need], actor=OPERATOR, reason="x")
    else:
        store.discard([need], actor=OPERATOR, reason="x")

    for id in (patient, hasty, last):
        job = get(store, id)
        assert (job.status, job.error_code) == ("cancelled", "dependency_cancelled")
        assert "was cancelled" in str(job.error)
    assert (queue_info(store).waiting, store.settle_dependants()) == (0, 0)


@pytest.mark.parametrize("how", ["cancelled", "discarded"])
def test_a_job_after_a_cancelled_one_is_refused(store: Store, how: str) -> None:
    no = worker(store)
    need = put(store) if how == "cancelled" else ended_job(store, no, Failed(FAILURE))
    if how == "cancelled":
        store.cancel([need], actor=OPERATOR, reason="x")
    else:
        store.discard([need], actor=OPERATOR, reason="x")
    before = (totals(store), len(all_events(store)))

    with pytest.raises(JobError, match="was cancelled"):
        store.enqueue([new(), new(after=(need,)), new(key="k")])

    assert (totals(store), len(all_events(store))) == before
    assert not store.enqueue([new(key="k")])[0].duplicate


def test_the_key_of_a_cancelled_job_as_a_need_is_refused(store: Store) -> None:
    """Known by its key alone: the job that holds it stands for the one not stored because of it."""
    need = put(store, key="need")
    store.cancel([need], actor=OPERATOR, reason="x")
    again = new(key="need")

    with pytest.raises(JobError, match="was cancelled"):
        store.enqueue([again, new(after=(again.id,))])


def test_many_needs_withdrawn_at_once_cancel_whoever_waits(store: Store) -> None:
    """Queued, running and dead ones, some of them needed by the same job."""
    no = worker(store)
    dead = [ended_job(store, no, Dead(FAILURE)) for _ in range(3)]
    running = started_job(store, no)
    queued = put_many(store, 20)
    pairs = [put(store, after=(queued[n], queued[-n - 1])) for n in range(10)]
    behind = put_many(store, 3, after=tuple(pairs))
    after_dead = [put(store, after=(id,), after_failed="wait") for id in dead]
    after_running = put(store, after=(running.id,))

    store.cancel([*queued, running.id], actor=OPERATOR, reason="all of it")
    store.discard(dead, actor=OPERATOR, reason="all of it")
    assert get(store, after_running).status == "queued"
    finish(store, no, running, Cancelled("asked to"))

    for id in (*pairs, *behind, *after_dead, after_running):
        assert (get(store, id).status, get(store, id).error_code) == (
            "cancelled", "dependency_cancelled",
        )  # fmt: skip
    assert (queue_info(store).waiting, store.settle_dependants()) == (0, 0)


def test_retention_strands_nobody(store: Store, clock: Clock) -> None:
    """What is past its time stays while somebody waits for it, or takes who waits with it."""
    no = worker(store)
    done = ended_job(store, no, Completed("7"))
    failed = ended_job(store, no, Failed(FAILURE))
    other = put(store, queue="elsewhere")
    patient = put(store, after=(failed,), after_failed="wait")
    partly = put(store, after=(done, other))
    clock.advance(400 * DAY)
    keep = Prune(completed=60, dead=60, events=60, tasks={"work": Keep(dead_last=0)})
    for _ in range(3):
        store.prune(keep)

    assert get(store, patient).status == "queued"
    assert store.results(partly)[done] == ("completed", 7)
    store.replay([failed], actor=OPERATOR)
    finish(store, no, claim_one(store, no), Completed())
    finish(store, no, claim_one(store, no, queue="elsewhere"), Completed())
    assert set(ids_of(claim(store, no))) == {patient, partly}


def test_a_need_that_is_no_more_strands_nobody(store: Store, connection: Any, kind: str) -> None:
    """However it went: by hand, or by a restore of half the tables."""
    need = put(store)
    last = put(store, after=(need,))
    connection.execute(f"DELETE FROM {table(kind, 'jobs')} WHERE waits = 0")

    assert store.settle_dependants() == 1

    assert (get(store, last).status, get(store, last).error_code) == (
        "cancelled", "dependency_cancelled",
    )  # fmt: skip


@pytest.mark.parametrize("how", ["cancelled", "discarded"])
def test_a_caller_s_job_after_a_cancelled_one_is_refused(
    store: Store, connection: Any, how: str
) -> None:
    no = worker(store)
    need = put(store) if how == "cancelled" else ended_job(store, no, Failed(FAILURE))
    if how == "cancelled":
        store.cancel([need], actor=OPERATOR, reason="x")
    else:
        store.discard([need], actor=OPERATOR, reason="x")
    begin(connection)
    with pytest.raises(JobError, match="was cancelled"):
        store.enqueue_on(connection, [new(after=(need,))])
    good = new()
    store.enqueue_on(connection, [good])
    connection.execute("COMMIT")
    assert totals(store) == {"queued": 1, "cancelled": 1}


def test_the_doctor_says_who_waits_for_a_dead_job(store: Store) -> None:
    no = worker(store)
    need = ended_job(store, no, Failed(FAILURE))
    assert [each for each in store.inspect() if each.check == "waiting"] == []
    last = put(store, after=(need,), after_failed="wait")

    (finding,) = [each for each in store.inspect() if each.check == "waiting"]

    assert finding.level == "warning"
    assert f"job {last} waits for {need}, which has failed" in finding.message
    assert f"tenure replay {need}" in str(finding.remedy)


@pytest.mark.parametrize("outcome", [Failed(FAILURE), Dead(FAILURE)], ids=name_of)
def test_the_janitor_cancels_what_came_after_the_death_of_its_need(
    store: Store, outcome: Outcome
) -> None:
    no = worker(store)
    need = ended_job(store, no, outcome)
    hasty = put(store, after=(need,), after_failed="cancel")
    transitive = put(store, after=(hasty,), after_failed="cancel")
    patient = put(store, after=(need,), after_failed="wait")

    assert store.settle_dependants() >= 1

    assert [get(store, id).status for id in (hasty, transitive, patient)] == [
        "cancelled", "cancelled", "queued",
    ]  # fmt: skip
    assert store.settle_dependants() == 0
    assert kinds(store, hasty) == ["job.enqueued", "job.cancelled"]


def test_the_janitor_gets_through_more_than_one_page(store: Store) -> None:
    no = worker(store)
    need = ended_job(store, no, Failed(FAILURE))
    put_many(store, 2500, after=(need,), after_failed="wait")
    doomed = put_many(store, 300, after=(need,), after_failed="cancel")

    changed = [store.settle_dependants() for _ in range(5)]

    assert sum(changed) == 300
    assert {get(store, id).status for id in doomed} == {"cancelled"}
    assert totals(store) == {"failed": 1, "queued": 2500, "cancelled": 300}


def test_a_need_that_completed_unseen_is_seen_by_the_janitor(
    store: Store, connection: Any, kind: str
) -> None:
    no = worker(store)
    need = put(store)
    last = put(store, after=(need,))
    finish(store, no, claim_one(store, no), Completed())
    # As if the finish had not seen the edge (another store's race): wind it back.
    connection.execute(f"UPDATE {table(kind, 'edges')} SET met = false")
    connection.execute(f"UPDATE {table(kind, 'jobs')} SET waits = 1")
    assert claim(store, no) == []

    assert store.settle_dependants() == 1

    assert claim_one(store, no).id == last


def test_nothing_waits_nothing_settles(store: Store) -> None:
    assert store.settle_dependants() == 0
    put(store)
    assert store.settle_dependants() == 0


# -- operators and waiting jobs ---------------------------------------------------------------


def test_a_waiting_job_can_be_cancelled(store: Store) -> None:
    no = worker(store)
    need = started_job(store, no)
    last = put(store, after=(need.id,))

    assert store.cancel([last], actor=OPERATOR, reason="not needed") == {last: "done"}
    finish(store, no, need, Completed())

    assert get(store, last).status == "cancelled"
    assert claim(store, no) == []
    assert queue_info(store).waiting == 0
    store.settle_dependants()
    assert get(store, last).status == "cancelled"


def test_cancelling_a_waiting_job_is_a_death_to_those_behind_it(store: Store) -> None:
    need = put(store)
    middle = put(store, after=(need,))
    last = put(store, after=(middle,), after_failed="cancel")
    store.cancel([middle], actor=OPERATOR, reason="x")
    assert get(store, last).status == "cancelled"
    assert get(store, need).status == "queued"


def test_a_job_that_ran_after_others_can_die_and_be_replayed(store: Store) -> None:
    no = worker(store)
    need = ended_job(store, no, Completed("1"))
    last = ended_job(store, no, Failed(FAILURE), after=(need,))
    store.replay([last], actor=OPERATOR)
    assert claim_one(store, no).id == last  # its needs are met for good
    assert store.results(last) == {need: ("completed", 1)}


# -- what is refused --------------------------------------------------------------------------


def refused(store: Store, *jobs: Any) -> str:
    """The batch is refused and nothing of it is stored; the message."""
    before = (totals(store), len(all_events(store)), store.queue_names())
    with pytest.raises(JobError) as caught:
        store.enqueue(jobs)
    assert (totals(store), len(all_events(store)), store.queue_names()) == before
    return str(caught.value)


def test_an_absent_need_is_refused_and_nothing_is_stored(store: Store) -> None:
    good = new(queue="never-used")
    message = refused(store, good, new(after=(new_id(),)))
    assert "no such job" in message
    assert store.get(good.id) is None


def test_a_need_of_another_org_is_as_absent(store: Store) -> None:
    theirs, absent = put(store, org="other"), new_id()
    texts = [refused(store, new(after=(id,), org="mine")).replace(id, "ID")
             for id in (theirs, absent)]  # fmt: skip
    assert texts[0] == texts[1]
    assert queue_info(store).waiting == 0


def test_a_need_of_another_org_in_the_same_batch_is_as_absent(store: Store) -> None:
    theirs = new(org="other")
    assert "no such job" in refused(store, theirs, new(after=(theirs.id,), org="mine"))


def test_a_job_after_itself_is_refused(store: Store) -> None:
    id = new_id()
    assert "circle" in refused(store, new(id=id, after=(id,)))


@pytest.mark.parametrize("size", [2, 3, 50])
def test_a_circle_in_a_batch_is_refused(store: Store, size: int) -> None:
    ids = [new_id() for _ in range(size)]
    circle = [new(id=id, after=(ids[index - 1],)) for index, id in enumerate(ids)]
    assert "circle" in refused(store, new(), *circle, new(after=(ids[0],)))


def test_forward_references_within_a_batch_work(store: Store) -> None:
    no = worker(store)
    parts = [new() for _ in range(3)]
    last = new(after=tuple(ids_of(parts)))
    store.enqueue([last, *parts])

    jobs = claim(store, no)
    assert set(ids_of(jobs)) == set(ids_of(parts))
    store.finish(no, [end(job, Completed()) for job in jobs])
    assert ids_of(claim(store, no)) == [last.id]


def test_the_same_need_twice_is_one_need(store: Store) -> None:
    no = worker(store)
    need = put(store)
    last = put(store, after=(need, need))
    finish(store, no, claim_one(store, no), Completed())
    assert claim_one(store, no).id == last


# -- keys and repeated calls ------------------------------------------------------------------


def test_a_keyed_duplicate_adds_no_edges(store: Store) -> None:
    no = worker(store)
    first = put(store, key="k")
    need = put(store, queue="elsewhere")

    (receipt,) = store.enqueue([new(key="k", after=(need,))])

    assert (receipt.id, receipt.duplicate) == (first, True)
    assert get(store, first).after == ()
    assert claim_one(store, no).id == first


def test_a_keyed_duplicate_is_a_duplicate_also_when_its_needs_are_gone(store: Store) -> None:
    """Sent again after retention has taken its needs: the first receipt, not an error."""
    first = put(store, key="k")
    (receipt,) = store.enqueue([new(key="k", after=(new_id(),))])
    assert (receipt.id, receipt.duplicate) == (first, True)


def test_after_a_keyed_duplicate_means_after_the_key_s_owner(store: Store) -> None:
    """The same batch sent twice, as a web handler does: a part by key, a report after it."""
    no = worker(store)
    reports = []
    for _ in range(2):
        part = new(key="part:7")
        report = new(after=(part.id,), queue="reports")
        store.enqueue([part, report])
        reports.append(report.id)
    assert queue_info(store, "reports").waiting == 2

    (part_run,) = claim(store, no)
    finish(store, no, part_run, Completed())

    assert ids_of(claim(store, no, queue="reports")) == reports


def test_a_repeated_call_adds_edges_once(store: Store) -> None:
    no = worker(store)
    batch = [new()]
    batch.append(new(after=(batch[0].id,)))
    store.enqueue(batch)
    store.enqueue(batch, retry=True)
    finish(store, no, claim_one(store, no), Completed())
    store.enqueue(batch, retry=True)

    assert claim_one(store, no).id == batch[1].id
    assert queue_info(store).waiting == 0


def test_a_rolled_back_caller_leaves_no_edges(store: Store, connection: Any) -> None:
    no = worker(store)
    need = started_job(store, no)
    begin(connection)
    store.enqueue_on(connection, [new(after=(need.id,))])
    connection.execute("ROLLBACK")
    begin(connection)
    kept = new(after=(need.id,))
    store.enqueue_on(connection, [kept])
    connection.execute("COMMIT")
    assert queue_info(store).waiting == 1

    finish(store, no, need, Completed())

    assert ids_of(claim(store, no)) == [kept.id]


def test_a_bad_need_leaves_a_caller_s_transaction_usable(store: Store, connection: Any) -> None:
    begin(connection)
    with pytest.raises(JobError):
        store.enqueue_on(connection, [new(), new(after=(new_id(),))])
    good = new()
    store.enqueue_on(connection, [good])
    connection.execute("COMMIT")
    assert totals(store) == {"queued": 1}
    assert get(store, good.id).status == "queued"


# -- fan-in, many at once ---------------------------------------------------------------------

FAN_IN = 50


def released_once(store: Store, last: str) -> None:
    """Released exactly once: one grant in all, and nothing waits any more."""
    no = worker(store)
    assert claim_one(store, no, queue="joined").id == last
    assert claim(store, no, queue="joined") == []
    assert kinds(store, last).count("job.started") == 1
    assert queue_info(store, "joined").waiting == 0
    assert set(status for status, _ in store.results(last).values()) == {"completed"}
    assert len(store.results(last)) == FAN_IN


@pytest.mark.parametrize("shared", [True, False], ids=["one store", "a store each"])
def test_threads_finishing_at_once_release_a_fan_in_once(
    store: Store, make_store: Callable[[], Store], shared: bool
) -> None:
    needs = put_many(store, FAN_IN)
    last = put(store, after=tuple(needs), queue="joined")
    stores = [store if shared else make_store() for _ in range(5)]
    barrier = threading.Barrier(len(stores))

    def work(own: Store) -> None:
        no = worker(own)
        jobs = claim(own, no, FAN_IN // len(stores))
        barrier.wait(WAIT)
        for job in jobs:
            own.settle_dependants()
            assert finish(own, no, job, Completed(f'"{job.id}"')) == "accepted"

    with ThreadPoolExecutor(len(stores)) as pool:
        list(pool.map(work, stores))

    released_once(store, last)


_barrier: Any = None


def _begin(barrier: Any) -> None:
    global _barrier
    _barrier = barrier


def _work_in_a_process(kind: str, location: str) -> int:
    store = open_store(kind, location, Clock())
    try:
        no = worker(store)
        jobs = claim(store, no, -(-FAN_IN // 3))
        _barrier.wait(WAIT)
        for job in jobs:
            assert finish(store, no, job, Completed()) == "accepted"
            store.settle_dependants()
        return len(jobs)
    finally:
        store.close()


@pytest.fixture
def processes() -> Iterator[ProcessPoolExecutor]:
    """Three real processes, started afresh (never forked), waiting for each other."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        3, mp_context=context, initializer=_begin, initargs=(context.Barrier(3),)
    ) as pool:
        yield pool


def test_processes_finishing_at_once_release_a_fan_in_once(
    store: Store, kind: str, location: str, processes: ProcessPoolExecutor
) -> None:
    needs = put_many(store, FAN_IN)
    last = put(store, after=tuple(needs), queue="joined")

    runs = [processes.submit(_work_in_a_process, kind, location) for _ in range(3)]

    assert sum(run.result(WAIT) for run in runs) == FAN_IN
    released_once(store, last)


def test_edges_made_while_their_needs_end_are_all_released(
    store: Store, make_store: Callable[[], Store]
) -> None:
    """One thread finishes what another, at the same time, makes jobs wait for."""
    no = worker(store)
    other = make_store()
    needs = put_many(store, 60)
    jobs = claim(store, no)
    barrier = threading.Barrier(2)

    def end_them() -> None:
        barrier.wait(WAIT)
        for job in jobs:
            finish(store, no, job, Completed())

    def wait_for_them() -> None:
        barrier.wait(WAIT)
        for need in reversed(needs):
            put(other, after=(need,), queue="joined")

    with ThreadPoolExecutor(2) as pool:
        for run in (pool.submit(end_them), pool.submit(wait_for_them)):
            run.result(WAIT)
    store.settle_dependants()

    assert len(claim(store, no, queue="joined")) == 60


# -- what retention has taken -----------------------------------------------------------------


@pytest.mark.parametrize("after_failed", ["wait", "cancel"])
def test_a_need_known_by_its_key_alone_is_met(
    store: Store, clock: Clock, after_failed: str
) -> None:
    """The key outlives its job: the receipt says completed, and so it was."""
    no = worker(store)
    store.enqueue([new(key="daily")])
    assert finish(store, no, claim_one(store, no), Completed()) == "accepted"
    clock.advance(3 * DAY)
    store.prune(Prune(completed=86_400, dead=86_400, events=86_400))

    again = new(key="daily")
    then = new(after=(again.id,), after_failed=after_failed)
    first, second = store.enqueue([again, then])

    assert (first.duplicate, first.status, second.duplicate) == (True, "completed", False)
    store.settle_dependants()
    assert ids_of(claim(store, no)) == [then.id]


@pytest.mark.parametrize("last", [None, 0], ids=["by age", "the last"])
def test_a_dead_job_somebody_waits_for_stays(store: Store, clock: Clock, last: int | None) -> None:
    """It can be replayed; without it the other would wait for ever."""
    no = worker(store)
    dead = ended_job(store, no, Dead(FAILURE))
    unwanted = ended_job(store, no, Dead(FAILURE))
    waiting = put(store, after=(dead,))
    clock.advance(100 * DAY)

    own = {} if last is None else {"noop": Keep(dead_last=last)}
    store.prune(Prune(completed=1, dead=86_400, events=86_400, tasks=own))

    assert (store.get(unwanted), get(store, dead).status) == (None, "dead_letter")
    store.replay([dead], actor=OPERATOR)
    assert finish(store, no, claim_one(store, no), Completed()) == "accepted"
    assert ids_of(claim(store, no)) == [waiting]
