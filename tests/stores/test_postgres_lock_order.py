"""One order of locks everywhere: whoever changes the same rows at once waits, and no more.

Each test is 200 rounds of a few calls that start at the same moment on the same rows; the
server counts the deadlocks it had to end, and the store what it had to repeat.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from contract.builders import FAILURE, OPERATOR, claim, end, new, worker
from tenure.ids import new_id
from tenure.outcome import Completed, Ended, Failed, Released
from tenure.store import Prune
from tenure.stores.postgres import PostgresStore
from tenure.stores.postgres.database import to_uuid_text

ROUNDS = 200
KEYS = 12
NOTHING_KEPT = Prune(completed=0, dead=0, events=9e6)

Call = Callable[[], Any]


class Ring:
    """Calls that start together; errors of any of them are the test's."""

    def __init__(self, store: PostgresStore) -> None:
        self.store = store
        self._deadlocks = self._counted()

    def round(self, *calls: Call) -> None:
        start = threading.Barrier(len(calls))
        failures: list[BaseException] = []

        def run(call: Call) -> None:
            start.wait()
            try:
                call()
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=run, args=(call,)) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]

    def assert_no_deadlock(self) -> None:
        assert self._counted() == self._deadlocks
        assert self.store.database.retries == 0

    def _counted(self) -> int:
        # A session tells what it has counted at its end, or after a while without work.
        self.store.database.close()
        asked = (
            "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database() "
            "AND pg_stat_clear_snapshot() IS NOT NULL"
        )
        ((number,),) = self.store.database.run(asked, {})
        return int(number)


@pytest.fixture
def store(make_database: Callable[..., str]) -> Iterator[PostgresStore]:
    made = PostgresStore(make_database(migrated=True), notify=False)
    yield made
    made.close()


@pytest.fixture
def ring(store: PostgresStore) -> Ring:
    return Ring(store)


def shuffled(keys: list[str]) -> list[str]:
    return random.sample(keys, len(keys))


def test_finish_of_keyed_jobs_beside_enqueues_of_the_same_keys(ring: Ring) -> None:
    store, no = ring.store, worker(ring.store)
    for number in range(ROUNDS):
        keys = [f"{number}:{place}" for place in range(KEYS)]
        store.enqueue([new(key=key) for key in shuffled(keys)])
        jobs = claim(store, no)
        assert len(jobs) == KEYS
        completed = [end(job, Completed()) for job in jobs[: KEYS // 2]]
        mixed = [end(job, Failed(FAILURE)) for job in jobs[KEYS // 2 : -1]]
        mixed.append(
            Ended(jobs[-1].id, jobs[-1].lease_no, 1,
                  Completed(children=tuple(new(key=key, delay_ms=10**9) for key in keys)))
        )  # fmt: skip
        ring.round(
            lambda completed=completed: store.finish(no, completed),
            lambda mixed=mixed: store.finish(no, mixed),
            lambda keys=keys: store.enqueue([new(key=key) for key in shuffled(keys)]),
            lambda keys=keys: store.enqueue([new(key=key) for key in reversed(keys)]),
        )
    ring.assert_no_deadlock()


def test_finish_with_keyed_follow_ups_beside_those_who_wait_for_it(ring: Ring) -> None:
    """Those who wait have the keys of the follow-ups, or keys before theirs and end with it."""
    store, no = ring.store, worker(ring.store)
    for number in range(ROUNDS):
        early, late = ([f"{number}:{side}{place}" for place in range(KEYS)] for side in "az")
        store.enqueue([new(), new()])
        first, second = claim(store, no)
        waiting = [new(key=key, after=(first.id,), after_failed="wait") for key in late]
        doomed = [new(key=key, after=(second.id,), after_failed="cancel") for key in early]
        store.enqueue([*waiting, *doomed])
        children = tuple(new(key=key, delay_ms=10**9) for key in late)
        ends = [end(first, Completed(children=children)), end(second, Failed(FAILURE))]
        ring.round(
            lambda ends=ends: store.finish(no, ends),
            lambda waiting=waiting: cancel(store, [job.id for job in waiting]),
            lambda keys=early + late: store.enqueue([new(key=key, delay_ms=10**9) for key in keys]),
        )
        cancel(store, [job.id for job in waiting])
    ring.assert_no_deadlock()


def test_cancel_of_a_parent_beside_cancels_of_its_children(ring: Ring) -> None:
    store = ring.store
    for _ in range(ROUNDS):
        first, *ids = random.sample(sorted(new_id() for _ in range(7)), 7)
        parent = new(id=first)
        middle = [new(id=id, after=(first,), key=id) for id in ids[:4]]
        last = [new(id=id, after=tuple(ids[:4])) for id in ids[4:]]
        store.enqueue([parent, *middle, *last])
        ring.round(
            lambda parent=parent: cancel(store, [parent.id]),
            lambda ids=ids: cancel(store, ids),
            lambda ids=ids: [cancel(store, [id]) for id in ids],
            store.settle_dependants,
        )
    ring.assert_no_deadlock()


def test_the_walk_over_waiting_jobs_beside_cancels_of_them(ring: Ring) -> None:
    """A need that has ended unseen, as when its edge and its end commit at the same time."""
    store = ring.store
    gone = new()
    store.enqueue([gone])
    cancel(store, [gone.id])
    unseen = """WITH edge AS (INSERT INTO tenure.edges VALUES (%(needs)s, %(job)s, false))
                UPDATE tenure.jobs SET waits = 1 WHERE id = %(job)s RETURNING 1"""
    for _ in range(ROUNDS):
        early, middle, late = (new_id() for _ in range(3))
        store.enqueue([new(id=late), new(id=middle, after=(late,)), new(id=early, after=(middle,))])
        needs = {"needs": to_uuid_text(gone.id), "job": to_uuid_text(late)}
        assert store.database.run(unseen, needs) == [(1,)]
        ids = [early, middle, late]
        ring.round(
            store.settle_dependants,
            lambda ids=ids: cancel(store, ids),
            lambda ids=ids: cancel(store, ids[:2]),
            store.settle_dependants,
        )
        cancel(store, ids)
    ring.assert_no_deadlock()


def test_replay_and_discard_beside_finishes(ring: Ring) -> None:
    store, no = ring.store, worker(ring.store)
    for number in range(ROUNDS):
        keys = [f"{number}:{place}" for place in range(KEYS)]
        store.enqueue([new(key=key) for key in keys])
        jobs = claim(store, no)
        dead, running = jobs[: KEYS // 2], jobs[KEYS // 2 :]
        store.finish(no, [end(job, Failed(FAILURE)) for job in dead])
        waiting = [new(after=(dead[n].id, running[n].id)) for n in range(KEYS // 2)]
        store.enqueue(waiting)
        ids = [job.id for job in dead]
        ended = [end(job, Completed()) for job in running[:4]]
        ended += [end(job, Released("the worker is shutting down")) for job in running[4:]]
        ring.round(
            lambda ids=ids: store.replay(ids[:4], actor=OPERATOR),
            lambda ids=ids: store.discard(ids[::-1], actor=OPERATOR, reason="x"),
            lambda ended=ended: store.finish(no, ended),
            lambda keys=keys: store.enqueue([new(key=key) for key in reversed(keys)]),
        )
        cancel(store, [job.id for job in jobs + waiting])
        store.finish(no, [end(job, Completed()) for job in claim(store, no)])
    ring.assert_no_deadlock()


def test_prune_beside_enqueues_and_finishes(ring: Ring) -> None:
    """Keys whose time ends at once; the day's dead go too."""
    store, no = ring.store, worker(ring.store)
    for number in range(ROUNDS):
        keys = [f"{number % 5}:{place}" for place in range(KEYS)]
        store.enqueue([new(key=key, key_ttl_ms=0) for key in keys])
        jobs = claim(store, no)
        half = len(jobs) // 2
        store.finish(no, [end(job, Failed(FAILURE)) for job in jobs[:half]])
        ended = [end(job, Completed()) for job in jobs[half:]]
        ring.round(
            lambda: store.prune(NOTHING_KEPT),
            lambda: store.prune(NOTHING_KEPT._replace(days=False)),
            lambda keys=keys: store.enqueue([new(key=k, key_ttl_ms=0) for k in shuffled(keys)]),
            lambda ended=ended: store.finish(no, ended) if ended else None,
        )
        store.finish(no, [end(job, Completed()) for job in claim(store, no)])
    ring.assert_no_deadlock()


def cancel(store: PostgresStore, ids: list[str]) -> None:
    store.cancel(ids, actor=OPERATOR, reason="x")
