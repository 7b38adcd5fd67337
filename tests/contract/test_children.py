"""Follow-up jobs: stored in the transaction of their parent's completion, or not at all."""

from __future__ import annotations

import pytest

from tenure.ids import new_id
from tenure.job import NewJob
from tenure.outcome import Completed, Released, Retried
from tenure.store import Store

from .builders import (
    FAILURE,
    OPERATOR,
    Clock,
    all_events,
    claim,
    claim_one,
    end,
    ended_job,
    finish,
    get,
    kinds,
    new,
    put,
    put_many,
    queue_info,
    rescue,
    snapshot,
    started_job,
    totals,
    worker,
)


def child(parent: str, **over: object) -> NewJob:
    return new(type="follow-up", parent=parent, **over)


def test_children_are_there_when_their_parent_has_completed(store: Store, clock: Clock) -> None:
    no = worker(store)
    job = started_job(store, no)
    children = (
        child(job.id, payload='{"n":1}'),
        child(job.id, queue="exports", priority=2, delay_ms=5000, key="k"),
    )

    assert finish(store, no, job, Completed('"done"', children)) == "accepted"

    assert get(store, job.id).result == "done"
    first, second = (get(store, each.id) for each in children)
    assert (first.status, first.parent, first.payload) == ("queued", job.id, {"n": 1})
    assert (second.queue, second.priority, second.key) == ("exports", 2, "k")
    assert (second.scheduled_at - second.created_at).total_seconds() == 5
    assert kinds(store, first.id) == ["job.enqueued"]
    assert [each.id for each in claim(store, no)] == [first.id]


def test_a_child_in_a_queue_nobody_has_used_makes_it_known(store: Store) -> None:
    no = worker(store)
    job = started_job(store, no)
    finish(store, no, job, Completed(None, (child(job.id, queue="new-one"),)))

    assert store.queue_names()["new-one"] is False
    assert queue_info(store, "new-one").ready == 1


def test_many_children_of_many_parents_in_one_batch(store: Store) -> None:
    no = worker(store)
    put_many(store, 20)
    jobs = claim(store, no)
    ended = [end(job, Completed(None, tuple(child(job.id) for _ in range(10)))) for job in jobs]

    assert store.finish(no, ended) == ["accepted"] * 20

    assert totals(store) == {"completed": 20, "queued": 200}
    parents = [each.parent for each in claim(store, no, 500)]
    assert {parent: parents.count(parent) for parent in parents} == {j.id: 10 for j in jobs}


# -- all or nothing ---------------------------------------------------------------------------


def test_a_refused_finish_stores_no_children(store: Store) -> None:
    no = worker(store)
    job = started_job(store, no)
    rescue(store, no)
    late = child(job.id)
    before = snapshot(store, job.id)

    assert finish(store, no, job, Completed(None, (late,))) == "refused"

    assert store.get(late.id) is None
    assert snapshot(store, job.id) == before
    assert all_events(store, job_id=late.id) == []


@pytest.mark.parametrize("children_end_first", [False, True])
def test_a_repeated_finish_stores_its_children_once(store: Store, children_end_first: bool) -> None:
    """Its reply was lost: the same finish is sent again, also when its child has run meanwhile."""
    no = worker(store)
    job = started_job(store, no)
    only = child(job.id)
    assert finish(store, no, job, Completed("1", (only,))) == "accepted"
    if children_end_first:
        assert finish(store, no, claim_one(store, no), Completed()) == "accepted"
    before = snapshot(store, job.id, only.id)

    assert finish(store, no, job, Completed("1", (only,))) == "repeated"

    assert snapshot(store, job.id, only.id) == before
    assert len(claim(store, no)) == (0 if children_end_first else 1)


def test_a_repeated_finish_does_not_hold_up_the_batch_it_comes_in(store: Store) -> None:
    no = worker(store)
    first, second = started_job(store, no), started_job(store, no)
    known = end(first, Completed(None, (child(first.id),)))
    fresh = end(second, Completed(None, (child(second.id),)))
    store.finish(no, [known])

    assert store.finish(no, [known, fresh]) == ["repeated", "accepted"]

    assert totals(store) == {"completed": 2, "queued": 2}


def test_a_child_of_a_later_lease_is_another_child(store: Store) -> None:
    """A zombie's children and those of the run that replaced it: one set of them."""
    no, other = worker(store), worker(store)
    zombie = started_job(store, no)
    rescue(store, no)
    present = claim_one(store, other)
    theirs, ours = child(zombie.id), child(present.id)

    verdicts = [
        finish(store, no, zombie, Completed(None, (theirs,))),
        finish(store, other, present, Completed(None, (ours,))),
        finish(store, no, zombie, Completed(None, (theirs,))),
    ]

    assert verdicts == ["refused", "accepted", "refused"]
    assert [each.id for each in claim(store, other)] == [ours.id]


@pytest.mark.parametrize("outcome", [Retried(0, FAILURE), Released("x")], ids=["retry", "release"])
def test_only_a_completion_has_children(store: Store, outcome: Retried | Released) -> None:
    no = worker(store)
    job = started_job(store, no)
    finish(store, no, job, outcome)
    again = claim_one(store, no)
    only = child(job.id)
    finish(store, no, again, Completed(None, (only,)))
    assert totals(store) == {"completed": 1, "queued": 1}


# -- children that cannot be stored -----------------------------------------------------------


def bad_needs(store: Store) -> dict[str, str]:
    """What a child cannot be after: nothing there, and a job of somebody else."""
    return {"absent": new_id(), "foreign": put(store, org="other", queue="theirs")}


@pytest.mark.parametrize("kind_of_need", ["absent", "foreign"])
def test_bad_children_fail_their_own_run_only(store: Store, kind_of_need: str) -> None:
    no = worker(store)
    need = bad_needs(store)[kind_of_need]
    put_many(store, 3)
    before, bad, after = claim(store, no)
    good, lost, sibling = child(before.id), child(bad.id, after=(need,)), child(bad.id)

    verdicts = store.finish(
        no,
        [
            end(before, Completed(None, (good,))),
            end(bad, Completed('"result"', (sibling, lost))),
            end(after, Completed()),
        ],
    )

    assert verdicts == ["accepted", "disowned", "accepted"]
    assert [get(store, job.id).status for job in (before, bad, after)] == [
        "completed", "failed", "completed",
    ]  # fmt: skip
    failed = get(store, bad.id)
    assert failed.error_code == "BAD_CHILDREN"
    assert "no such job" in str(failed.error)
    assert get(store, good.id).status == "queued"
    assert store.get(lost.id) is None
    assert store.get(sibling.id) is None  # all or nothing
    assert [event.kind for event in all_events(store, job_id=bad.id)][-1] == "job.failed"
    assert all_events(store, job_id=lost.id) == []


def test_foreign_needs_look_like_absent_ones(store: Store) -> None:
    no = worker(store)
    texts = []
    for need in bad_needs(store).values():
        job = started_job(store, no)
        finish(store, no, job, Completed(None, (child(job.id, after=(need,)),)))
        texts.append(str(get(store, job.id).error).replace(need, "ID"))
    assert texts[0] == texts[1]


def test_a_run_with_bad_children_can_be_replayed(store: Store) -> None:
    no = worker(store)
    job = started_job(store, no)
    finish(store, no, job, Completed(None, (child(job.id, after=(new_id(),)),)))

    store.replay([job.id], actor=OPERATOR)
    good = child(job.id)

    assert finish(store, no, claim_one(store, no), Completed(None, (good,))) == "accepted"
    assert get(store, job.id).status == "completed"
    assert get(store, good.id).status == "queued"


@pytest.mark.parametrize("how", ["stale", "refused"])
def test_a_follow_up_that_is_not_stored_holds_no_key(store: Store, clock: Clock, how: str) -> None:
    """Nor for an enqueue that began before, and had to wait for a lock until now: it was told of
    a duplicate of a job that never was."""
    no = worker(store)
    job = started_job(store, no)
    bad = child(job.id, after=(new_id(),)) if how == "refused" else child(job.id)
    if how == "stale":
        rescue(store, no)

    finish(store, no, job, Completed(None, (child(job.id, key="k"), bad)))

    later = new(key="k")
    assert store.enqueue([later], now_ms=clock() - 1000) == [(later.id, False, "queued")]
    assert get(store, later.id).key == "k"


def test_a_stale_run_with_bad_children_changes_nothing(store: Store) -> None:
    no = worker(store)
    job = started_job(store, no)
    rescue(store, no)
    before = snapshot(store, job.id)

    bad = Completed(None, (child(job.id, after=(new_id(),)),))
    assert finish(store, no, job, bad) == "refused"

    assert snapshot(store, job.id) == before


# -- children and what they wait for ----------------------------------------------------------


def test_a_child_after_its_own_parent_runs(store: Store) -> None:
    no = worker(store)
    job = started_job(store, no)
    only = child(job.id, after=(job.id,))
    finish(store, no, job, Completed('"p"', (only,)))

    assert claim_one(store, no).id == only.id
    assert store.results(only.id) == {job.id: ("completed", "p")}


def test_a_child_after_a_job_that_ends_in_the_same_batch_runs(store: Store) -> None:
    no = worker(store)
    put_many(store, 2)
    one, other = claim(store, no)
    joined = child(one.id, after=(one.id, other.id))

    store.finish(no, [end(one, Completed(None, (joined,))), end(other, Completed())])

    assert [each.id for each in claim(store, no)] == [joined.id]


def test_children_may_wait_for_each_other(store: Store) -> None:
    """A fan-out with its fan-in, enqueued by one handler: forward references too."""
    no = worker(store)
    job = started_job(store, no)
    parts = tuple(child(job.id) for _ in range(5))
    last = child(job.id, after=tuple(part.id for part in parts))
    finish(store, no, job, Completed(None, (last, *parts)))
    assert queue_info(store).waiting == 1

    running = claim(store, no)
    assert {each.id for each in running} == {part.id for part in parts}
    store.finish(no, [end(each, Completed()) for each in running])

    assert [each.id for each in claim(store, no)] == [last.id]


def test_a_keyed_child_that_exists_already_is_not_stored_again(store: Store) -> None:
    no = worker(store)
    first = put(store, key="once", delay_ms=60_000)
    job = started_job(store, no)

    finish(store, no, job, Completed(None, (child(job.id, key="once"),)))

    assert totals(store) == {"completed": 1, "queued": 1}
    assert get(store, first).key == "once"


def test_a_child_may_wait_for_a_keyed_sibling_that_exists_already(store: Store) -> None:
    """The sibling's id was never stored: what counts is the job that owns its key."""
    no = worker(store)
    first = put(store, key="once", queue="elsewhere")
    job = started_job(store, no)
    sibling = child(job.id, key="once")
    last = child(job.id, after=(sibling.id,))

    finish(store, no, job, Completed(None, (sibling, last)))

    assert get(store, job.id).status == "completed"
    assert get(store, last.id).after == (first,)
    assert claim(store, no) == []
    finish(store, no, claim_one(store, no, queue="elsewhere"), Completed())
    assert claim_one(store, no).id == last.id


def test_children_outlive_whatever_becomes_of_their_parent_s_row(store: Store) -> None:
    no = worker(store)
    id = ended_job(store, no, Completed(None, (new(type="follow-up"),)))
    assert get(store, id).status == "completed"
    assert totals(store) == {"completed": 1, "queued": 1}
