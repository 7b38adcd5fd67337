"""`keep=`: retention by task, by age or by number, apart for completed and for dead jobs."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tenure.job import NewJob
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
    claim,
    end,
    ended_job,
    finish,
    get,
    new,
    put,
    put_many,
    started_job,
    totals,
    worker,
)

ALL = Prune(completed=7 * 86_400, dead=30 * 86_400, events=90 * 86_400)


def keep(**tasks: Keep) -> Prune:
    return ALL._replace(tasks=tasks)


def prune_all(store: Store, policy: Prune) -> None:
    """Pass after pass until there is nothing left to remove."""
    for _ in range(500):
        if not sum(store.prune(policy).removed.values()):
            return
    raise AssertionError("prune never comes to an end")


def ended(store: Store, clock: Clock, outcome: Outcome, count: int, **over: Any) -> list[str]:
    """So many ended jobs, a second apart."""
    no = worker(store)
    ids = []
    for _ in range(count):
        ids.append(ended_job(store, no, outcome, **over))
        clock.advance(SECOND)
    return ids


def left(store: Store, ids: list[str]) -> list[str]:
    return [id for id in ids if store.get(id) is not None]


# -- the last so many -------------------------------------------------------------------------


@pytest.mark.parametrize("last", [0, 1, 3, 10])
def test_the_last_completed_of_a_task_stay(store: Store, clock: Clock, last: int) -> None:
    ids = ended(store, clock, Completed(), 5, type="report")
    others = ended(store, clock, Completed(), 5, type="other")

    prune_all(store, keep(report=Keep(completed_last=last)))

    assert left(store, ids) == ids[max(0, 5 - last) :]
    assert left(store, others) == others


def test_cancelled_ones_count_with_the_completed(store: Store, clock: Clock) -> None:
    first = ended(store, clock, Completed(), 2, type="report")
    second = ended(store, clock, Cancelled("x"), 2, type="report")
    prune_all(store, keep(report=Keep(completed_last=3)))
    assert left(store, first + second) == [first[1], *second]


def test_the_last_dead_of_a_task_stay(store: Store, clock: Clock) -> None:
    dead = ended(store, clock, Failed(FAILURE), 3, type="report")
    dead += ended(store, clock, Dead(FAILURE), 3, type="report")
    others = ended(store, clock, Failed(FAILURE), 4, type="other")
    done = ended(store, clock, Completed(), 4, type="report")

    prune_all(store, keep(report=Keep(dead_last=2)))

    assert left(store, dead) == dead[-2:]
    assert left(store, others) == others
    assert left(store, done) == done


def test_a_number_for_completed_says_nothing_about_dead_ones(store: Store, clock: Clock) -> None:
    dead = ended(store, clock, Failed(FAILURE), 4, type="report")
    done = ended(store, clock, Completed(), 4, type="report")
    prune_all(store, keep(report=Keep(completed_last=0)))
    assert left(store, dead) == dead
    assert left(store, done) == []


def test_live_jobs_are_no_part_of_the_number(store: Store, clock: Clock) -> None:
    no = worker(store)
    running = started_job(store, no, type="report")
    queued = put(store, type="report")
    prune_all(store, keep(report=Keep(completed_last=0, dead_last=0, completed=0, dead=0)))
    assert get(store, running.id).status == "in_progress"
    assert get(store, queued).status == "queued"
    assert finish(store, no, running, Completed()) == "accepted"


def test_a_pass_by_number_is_bounded_too(store: Store, clock: Clock) -> None:
    ended(store, clock, Completed(), 25, type="report")
    policy = keep(report=Keep(completed_last=5))._replace(batch=8)
    store.prune(policy)
    assert 12 <= totals(store)["completed"] < 25
    prune_all(store, policy)
    assert totals(store) == {"completed": 5}


# -- by age -----------------------------------------------------------------------------------


def test_a_task_has_its_own_age(kind: str, store: Store, clock: Clock) -> None:
    short = ended(store, clock, Completed(), 1, type="short")
    long = ended(store, clock, Completed(), 1, type="long")
    usual = ended(store, clock, Completed(), 1, type="usual")
    policy = keep(short=Keep(completed=3600), long=Keep(completed=30 * 86_400))

    clock.advance(HOUR + MINUTE)
    prune_all(store, policy)
    assert left(store, short + long + usual) == long + usual
    clock.advance(7 * DAY + LATE[kind])
    prune_all(store, policy)
    assert left(store, long + usual) == long
    clock.advance(30 * DAY)
    prune_all(store, policy)
    assert left(store, long) == []


@pytest.mark.parametrize("outcome", [Failed(FAILURE), Dead(FAILURE)], ids=["failed", "dead_letter"])
def test_nothing_failed_goes_before_its_own_time(
    store: Store, clock: Clock, outcome: Outcome
) -> None:
    """Whatever is said about completed jobs, about other tasks, and in general."""
    ids = ended(store, clock, outcome, 3, type="report")
    policy = Prune(
        completed=0, dead=60, events=0, tasks={"report": Keep(completed=0, dead=90 * 86_400)}
    )
    clock.advance(90 * DAY - MINUTE)
    prune_all(store, policy)
    assert left(store, ids) == ids
    clock.advance(2 * MINUTE)
    prune_all(store, policy)
    assert left(store, ids) == []


def test_a_task_with_an_age_for_completed_keeps_the_general_age_for_dead(
    store: Store, clock: Clock
) -> None:
    ids = ended(store, clock, Failed(FAILURE), 1, type="report")
    policy = keep(report=Keep(completed=60))
    clock.advance(29 * DAY)
    prune_all(store, policy)
    assert left(store, ids) == ids
    clock.advance(2 * DAY)
    prune_all(store, policy)
    assert left(store, ids) == []


def test_a_replayed_job_has_no_age(store: Store, clock: Clock) -> None:
    (id,) = ended(store, clock, Failed(FAILURE), 1, type="report")
    store.replay([id], actor=OPERATOR)
    clock.advance(365 * DAY)
    prune_all(store, keep(report=Keep(dead=0, dead_last=0)))
    assert get(store, id).status == "queued"


def test_a_dead_job_s_steps_go_with_it(store: Store, clock: Clock) -> None:
    no = worker(store)
    job = started_job(store, no, type="report")
    store.save_step(no, (job.id, job.lease_no), "a", "1")
    finish(store, no, job, Failed(FAILURE))
    clock.advance(DAY)
    prune_all(store, ALL)
    assert store.steps(job.id) == {"a": "1"}
    prune_all(store, keep(report=Keep(dead=60)))
    assert store.get(job.id) is None
    assert store.steps(job.id) == {}


# -- what others still need -------------------------------------------------------------------


def test_a_result_stays_while_a_job_that_ran_after_it_may_read_it(
    store: Store, clock: Clock
) -> None:
    no = worker(store)
    need = ended_job(store, no, Completed('"result"'), type="part")
    other = put(store, queue="elsewhere")
    last = put(store, after=(need, other), queue="joined")
    policy = keep(part=Keep(completed_last=0, completed=0))
    clock.advance(DAY)

    prune_all(store, policy)
    assert store.results(last)[need] == ("completed", "result")
    (job,) = claim(store, no, queue="elsewhere")
    finish(store, no, job, Completed())
    (joined,) = claim(store, no, queue="joined")
    prune_all(store, policy)
    assert store.results(last)[need] == ("completed", "result")
    finish(store, no, joined, Completed())
    clock.advance(DAY)
    prune_all(store, policy)

    assert store.get(need) is None


# -- keys -------------------------------------------------------------------------------------


def test_a_key_does_not_expire_before_its_job_is_terminal(store: Store, clock: Clock) -> None:
    no = worker(store)
    id = put(store, key="k", key_ttl_ms=HOUR)
    for _ in range(3):
        clock.advance(30 * DAY)
        prune_all(store, ALL)
        assert store.enqueue([duplicate()])[0] == (id, True, "queued")
    (job,) = claim(store, no)
    finish(store, no, job, Completed())

    clock.advance(HOUR - MINUTE)
    prune_all(store, ALL)
    assert store.enqueue([duplicate()])[0][:2] == (id, True)
    clock.advance(2 * MINUTE)
    assert store.prune(ALL).removed["keys"] == 1

    assert not store.enqueue([duplicate()])[0].duplicate


def duplicate() -> NewJob:
    return new(key="k", key_ttl_ms=HOUR)


@pytest.mark.parametrize("outcome", [Failed(FAILURE), Dead(FAILURE)], ids=["failed", "dead_letter"])
def test_a_key_of_a_dead_job_lives_again_with_its_replay(
    store: Store, clock: Clock, outcome: Outcome
) -> None:
    (id,) = ended(store, clock, outcome, 1, key="k", key_ttl_ms=HOUR)
    store.replay([id], actor=OPERATOR)
    clock.advance(30 * DAY)
    prune_all(store, ALL)
    assert store.enqueue([duplicate()])[0][:2] == (id, True)


def test_a_key_outlives_the_row_of_its_job(store: Store, clock: Clock) -> None:
    (id,) = ended(store, clock, Completed(), 1, key="k", key_ttl_ms=HOUR)
    clock.advance(MINUTE)
    prune_all(store, ALL._replace(completed=1))
    assert store.get(id) is None
    assert store.enqueue([duplicate()])[0] == (id, True, "completed")


# -- the file ---------------------------------------------------------------------------------


def fill(store: Store, no: int, count: int, size: int) -> None:
    payload = '{"text":"' + "x" * size + '"}'
    for _ in range(count // 50):
        put_many(store, 50, payload=payload)
        store.finish(no, [end(job, Completed()) for job in claim(store, no, 50)])


def test_the_file_shrinks_after_a_large_prune(
    store: Store, kind: str, location: str, clock: Clock
) -> None:
    if kind != "sqlite":
        pytest.skip("SQLite's file")
    no = worker(store)
    fill(store, no, 1000, 20_000)
    store.close()  # everything into the file
    before = os.path.getsize(location)
    assert before > 20_000_000
    clock.advance(8 * DAY)

    removed = store.prune(ALL).removed
    assert removed["history"] == 1000
    for _ in range(10):  # as the janitor does, once a minute: nothing more is removed
        store.prune(ALL)
    store.close()

    after = os.path.getsize(location)
    print(f"{before / 1e6:.1f} MB before, {after / 1e6:.1f} MB after")
    assert after < before / 4


def test_the_log_stays_bounded(store: Store, kind: str, location: str) -> None:
    if kind != "sqlite":
        pytest.skip("SQLite's write-ahead log")
    no = worker(store)
    largest = 0
    for _ in range(12):  # about 100 MB through the log
        fill(store, no, 100, 40_000)
        largest = max(largest, os.path.getsize(f"{location}-wal"))
    print(f"log at most {largest / 1e6:.1f} MB")
    assert largest < 40_000_000
