"""Prune: what is past its age goes, nothing else, and never much at a time. The owner's floors."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from tenure.outcome import Cancelled, Completed, Dead, Failed, Outcome
from tenure.policy import Keep
from tenure.store import Prune, Store

from .builders import (
    DAY,
    FAILURE,
    HOUR,
    LATE,
    MINUTE,
    OPERATOR,
    SECOND,
    Clock,
    all_events,
    claim,
    end,
    ended_job,
    get,
    put,
    put_many,
    rescue,
    started_job,
    table,
    totals,
    worker,
    worker_row,
)

WEEK = 7 * DAY
KEEP = Prune(completed=7 * 86_400, dead=30 * 86_400, events=90 * 86_400)


def prune_all(store: Store, keep: Prune) -> None:
    """Pass after pass until there is nothing left to remove."""
    for _ in range(50):
        if not sum(store.prune(keep).removed.values()):
            return
    raise AssertionError("prune never comes to an end")


@pytest.mark.parametrize("outcome", [Completed(), Cancelled("x")], ids=["completed", "cancelled"])
def test_finished_jobs_go_when_they_are_past_their_age(
    kind: str, store: Store, clock: Clock, outcome: Outcome
) -> None:
    id = ended_job(store, worker(store), outcome)

    clock.advance(WEEK - MINUTE)
    store.prune(KEEP)
    assert store.get(id) is not None
    clock.advance(2 * MINUTE + LATE[kind])
    removed = store.prune(KEEP)

    assert store.get(id) is None
    assert totals(store) == {}
    assert sum(removed.removed.values()) >= 1


def test_the_age_counts_from_the_end_not_from_the_enqueue(store: Store, clock: Clock) -> None:
    no = worker(store)
    id = put(store)
    clock.advance(2 * WEEK)
    (job,) = claim(store, no)
    store.finish(no, [end(job, Completed())])

    store.prune(KEEP)

    assert get(store, id).status == "completed"


@pytest.mark.parametrize("outcome", [Failed(FAILURE), Dead(FAILURE)], ids=["failed", "dead_letter"])
def test_dead_jobs_have_their_own_age(store: Store, clock: Clock, outcome: Outcome) -> None:
    id = ended_job(store, worker(store), outcome)

    clock.advance(2 * WEEK)
    prune_all(store, KEEP)
    assert get(store, id).dead
    clock.advance(30 * DAY)
    prune_all(store, KEEP)

    assert store.get(id) is None
    assert totals(store) == {}


def test_finished_jobs_do_not_stay_for_the_age_of_dead_ones(store: Store, clock: Clock) -> None:
    no = worker(store)
    done, dead = ended_job(store, no, Completed()), ended_job(store, no, Failed(FAILURE))
    clock.advance(2 * DAY)

    store.prune(Prune(completed=10 * 86_400, dead=86_400, events=90 * 86_400))

    assert (store.get(done) is None, store.get(dead) is None) == (False, True)


def test_live_jobs_never_go(store: Store, clock: Clock) -> None:
    running = started_job(store, worker(store)).id
    queued = put(store)
    later = put(store, delay_ms=5000 * DAY)
    clock.advance(2000 * DAY)

    prune_all(store, Prune(completed=1, dead=1, events=1))

    assert [get(store, id).status for id in (running, queued, later)] == [
        "in_progress",
        "queued",
        "queued",
    ]


def test_a_replayed_job_is_alive_again(store: Store, clock: Clock) -> None:
    id = ended_job(store, worker(store), Failed(FAILURE))
    store.replay([id], actor=OPERATOR)
    clock.advance(365 * DAY)

    prune_all(store, KEEP)

    assert get(store, id).status == "queued"


@pytest.mark.parametrize("outcome", [Completed(), Failed(FAILURE)], ids=["completed", "failed"])
def test_one_pass_is_bounded_and_the_next_goes_on(
    store: Store, clock: Clock, outcome: Outcome
) -> None:
    no = worker(store)
    put_many(store, 25)
    store.finish(no, [end(job, outcome) for job in claim(store, no)])
    clock.advance(40 * DAY)
    keep = KEEP._replace(batch=10)

    store.prune(keep)
    left = sum(totals(store).values())
    assert 15 <= left < 25
    prune_all(store, keep)

    assert totals(store) == {}


@pytest.mark.parametrize("outcome", [Completed(), Dead(FAILURE)], ids=["completed", "dead"])
def test_what_somebody_waits_for_hides_nothing_behind_it(
    store: Store, clock: Clock, outcome: Outcome
) -> None:
    """More of them than a pass removes: each saw the same ones again, and kept them."""
    no = worker(store)

    def run(ids: list[str]) -> None:
        store.finish(no, [end(job, outcome) for job in claim(store, no) if job.id in ids])
        clock.advance(SECOND)

    needed = put_many(store, 3)
    last = put(
        store, queue="later", after=(*needed, put(store, queue="later")), after_failed="wait"
    )
    run(needed)
    free = put_many(store, 2)
    run(free)
    clock.advance(90 * DAY)

    prune_all(store, KEEP._replace(batch=2))

    assert [store.get(id) is None for id in (*needed, last, *free)] == [False] * 4 + [True] * 2


def test_events_have_their_own_age(store: Store, clock: Clock) -> None:
    id = ended_job(store, worker(store), Completed())
    clock.advance(2 * WEEK)

    prune_all(store, KEEP)
    assert store.get(id) is None
    assert len(all_events(store, job_id=id)) == 3
    recent = put(store)
    clock.advance(80 * DAY)
    prune_all(store, KEEP)

    assert all_events(store, job_id=id) == []
    assert len(all_events(store, job_id=recent)) == 1


def test_events_of_a_clock_that_was_ahead_hold_up_no_others(store: Store, clock: Clock) -> None:
    clock.advance(300 * DAY)
    ahead = put(store)
    clock.advance(-300 * DAY)
    old = put_many(store, 50)
    clock.advance(91 * DAY)
    put(store)  # the newest stays in any case

    prune_all(store, KEEP._replace(batch=10))

    assert len(all_events(store, job_id=ahead)) == 1
    assert [id for id in old if all_events(store, job_id=id)] == []


def test_a_reader_of_events_misses_nothing_because_of_a_prune(store: Store, clock: Clock) -> None:
    # It goes on with `after=` the last seq it has seen, however long ago: numbers only grow.
    put_many(store, 3)
    last = all_events(store)[-1].seq
    clock.advance(365 * DAY)
    prune_all(store, KEEP)

    id = put(store)

    assert [event.job_id for event in store.events(after=last).events] == [id]


def test_rows_of_dead_workers_go_and_those_of_living_ones_stay(store: Store, clock: Clock) -> None:
    dead, alive = worker(store), worker(store)
    rescue(store, dead)
    keep = KEEP._replace(workers=3600)

    clock.advance(HOUR - MINUTE)
    prune_all(store, keep)
    assert worker_row(store, dead).dead_at is not None
    clock.advance(2 * MINUTE)
    prune_all(store, keep)

    # However long it has not renewed: only a rescue declares a worker dead.
    assert [row.id for row in store.workers()] == [alive.id]
    clock.advance(30 * DAY)
    prune_all(store, keep)
    assert [row.id for row in store.workers()] == [alive.id]


def test_a_dead_worker_whose_row_is_gone_stays_dead(store: Store, clock: Clock) -> None:
    no = worker(store)
    job = started_job(store, no)
    rescue(store, no)
    clock.advance(30 * DAY)
    prune_all(store, KEEP._replace(workers=86_400))
    assert store.workers() == []

    assert store.renew(no) is None
    assert store.claim(no, [("default", 5)]).jobs == []
    assert store.finish(no, [end(job, Completed())]) == ["refused"]
    assert worker(store) > no


def test_counts_in_the_rollups_never_fall(store: Store, clock: Clock) -> None:
    no = worker(store)
    ended_job(store, no, Completed())
    before = sum(rollup.runs for rollup in store.rollups(since_ms=0))

    for _ in range(5):
        clock.advance(9 * DAY)
        prune_all(store, KEEP)
        assert sum(rollup.runs for rollup in store.rollups(since_ms=0)) == before


def test_a_fleet_of_many_tasks_that_was_away_folds_its_minutes(
    kind: str, store: Store, clock: Clock, connection: Any
) -> None:
    """A day of 80 tasks. Each compared with all rows they took more than the 15 s a statement has,
    so it was never done."""
    rows = 80 * 24 * 60
    buckets = ", ".join("1" for _ in range(13))
    minutes = (
        f"WITH RECURSIVE n (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM n WHERE n < {rows}) "
        f"INSERT INTO {table(kind, 'rollups')} SELECT 'minute', {clock.ms // HOUR * HOUR} "
        f"+ (n - 1) / 80 * {MINUTE}, 1, 'default', 'task' || (n % 80), 'completed', 13, 50, "
    )
    connection.execute(minutes + (buckets if kind == "sqlite" else f"ARRAY[{buckets}]") + " FROM n")
    clock.advance(3 * DAY)

    for _ in range(8):  # bounded passes
        store.prune(KEEP)

    found = store.rollups(since_ms=0)
    assert len(found) == 80 * 24
    assert {(r.runs, r.duration_ms, *r.buckets) for r in found} == {(780, 3000, *[60] * 13)}


def test_pruning_an_empty_store_removes_nothing(store: Store) -> None:
    assert sum(store.prune(KEEP).removed.values()) == 0


def test_now_ms_decides_about_age(kind: str, store: Store, clock: Clock) -> None:
    id = ended_job(store, worker(store), Completed())

    store.prune(KEEP, now_ms=clock() + WEEK + MINUTE + LATE[kind])

    assert store.get(id) is None


# -- the owner's floors ---------------------------------------------------------------------------


def keep_at_least(store: Store, **days: int) -> None:
    for name, number in days.items():
        store.lay_down(f"keep_{name}", str(number * DAY), by="the owner")


def days_ago(store: Store, clock: Clock, days: int) -> str:
    """A job that ended then, by the real clock too: a floor is held by the server's."""
    clock.ms = int(time.time() * 1000) - days * DAY
    id = ended_job(store, worker(store), Completed())
    clock.ms = int(time.time() * 1000)
    return id


def test_a_floor_holds_whatever_is_asked_for(store: Store, clock: Clock) -> None:
    keep_at_least(store, history=20, events=60)
    ids = [days_ago(store, clock, days) for days in (61, 59, 21, 19)]
    less = Prune(completed=0, dead=0, events=0, tasks={"noop": Keep(completed=0)})

    prune_all(store, less)

    assert [store.get(id) is not None for id in ids] == [False, False, False, True]
    assert [len(all_events(store, job_id=id)) for id in ids] == [0, 3, 3, 3]


def test_to_keep_the_last_so_many_is_no_way_around_it(store: Store, clock: Clock) -> None:
    keep_at_least(store, history=20)
    ids = [days_ago(store, clock, days) for days in (21, 19, 1)]
    (type_,) = {get(store, id).type for id in ids}

    prune_all(store, KEEP._replace(tasks={type_: Keep(completed_last=0)}))

    assert [store.get(id) is not None for id in ids] == [False, True, True]


def test_a_floor_shortens_nothing_and_can_be_taken_back(store: Store, clock: Clock) -> None:
    keep_at_least(store, history=1, events=1)
    id = days_ago(store, clock, 5)
    prune_all(store, KEEP)
    assert store.get(id) is not None

    keep_at_least(store, history=300)
    assert store.settings()["keep_history"] == str(300 * DAY)
    store.lay_down("keep_history", None, by="the owner")
    assert "keep_history" not in store.settings()
    prune_all(store, KEEP._replace(completed=4 * 86_400 - 3600))
    assert store.get(id) is None


def test_nobody_writes_less_to_the_trail_than_the_owner_says(
    make_store: Callable[[], Store], store: Store
) -> None:
    sparing = make_store()
    sparing.audit = "errors"  # type: ignore[attr-defined]
    no = worker(sparing)
    quiet = ended_job(sparing, no, Completed())
    assert all_events(store, job_id=quiet) == []

    store.lay_down("audit", "all", by="the owner")
    single = ended_job(sparing, no, Completed())
    several = put_many(sparing, 2)
    sparing.finish(no, [end(job, Completed()) for job in claim(sparing, no)])
    crashed = started_job(sparing, no).id
    rescue(sparing, no)

    started = ["job.enqueued", "job.started"]
    for id, last in {single: "job.succeeded", several[0]: "job.succeeded",
                     several[1]: "job.succeeded", crashed: "job.rescued"}.items():  # fmt: skip
        assert [event.kind for event in all_events(store, job_id=id)] == [*started, last]


# -- one pass for all workers ---------------------------------------------------------------------


def test_one_turn_for_all_and_what_was_said_at_its_end(
    make_store: Callable[[], Store], store: Store, clock: Clock
) -> None:
    other = make_store()

    assert store.take_turn("retention", 60)
    store.end_turn("retention", {"removed": {"keys": 3}, "held": "Ünïcode"})
    assert not store.take_turn("retention", 60) and not other.take_turn("retention", 60)
    began = other.turns()["retention"].at
    assert other.turns()["retention"].note == {"removed": {"keys": 3}, "held": "Ünïcode"}
    clock.advance(61_000)

    assert [s.take_turn("retention", 60) for s in (other, store)] == [True, False]
    assert store.turns()["retention"].at >= began + 60_000
