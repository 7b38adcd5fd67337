"""What a call does must not grow with what has gathered: measured in work, not in time, which holds
on a busy machine. On PostgreSQL that is blocks touched, on SQLite steps of its machine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import growth_rows
import servers
from contract.builders import DAY, KINDS, new, worker
from plans.watching import buffers_of
from tenure.ids import new_id, new_ids
from tenure.job import ClaimedJob, NewJob
from tenure.outcome import Completed, Ended
from tenure.store import Filter, Prune
from tenure.stores.postgres import PostgresStore
from tenure.stores.sqlite import SqliteStore

STEPS = 5  # of SQLite's machine


@contextlib.contextmanager
def opened(kind: str, folder: Any) -> Iterator[Any]:
    if kind == "sqlite":
        store = SqliteStore(str(folder / f"{new_id()}.db"))
        try:
            yield store
        finally:
            store.close()
        return
    server = servers.require(servers.shared)
    name = server.create_database(migrated=True)
    found = PostgresStore(server.url(name), notify=False)
    try:
        yield found
    finally:
        found.close()
        server.drop_database(name)


def work(store: Any, call: Callable[[], Any]) -> int:
    """What a call costs, once its connections are open and its plans made."""
    if isinstance(store, PostgresStore):
        return buffers_of(store, call)
    steps = 0

    def count() -> int:
        nonlocal steps
        steps += STEPS
        return 0

    with store.file.write() as writing:
        pass
    with store.file.read() as reading:
        pass
    for db in (writing, reading):
        db.set_progress_handler(count, STEPS)
    try:
        call()
    finally:
        for db in (writing, reading):
            db.set_progress_handler(None, 0)
    assert steps, "nothing was observed"
    return steps


def finish(store: Any, no: Any, jobs: list[ClaimedJob]) -> None:
    store.finish(no, [Ended(job.id, job.lease_no, 1, Completed()) for job in jobs])


@pytest.mark.parametrize("kind", KINDS)
def test_a_claim_does_not_know_how_many_orgs_there_are(kind: str, tmp_path: Any) -> None:
    """Orgs that were served and have nothing, or nothing but a job due tomorrow."""
    cost = {}
    for orgs in (1, 1000):
        with opened(kind, tmp_path) as store:
            no = worker(store)
            for delay in (0, DAY):
                jobs = [new(org=f"org-{n}", delay_ms=delay) for n in range(orgs)]
                store.enqueue(jobs)
                while granted := store.claim(no, [("default", 200)]).jobs:
                    finish(store, no, granted)
            for _ in range(3):
                store.enqueue([new(org="acme")])
                finish(store, no, store.claim(no, [("default", 1)]).jobs)
            store.enqueue([new(org="acme")])
            cost[orgs] = work(store, lambda: store.claim(no, [("default", 1)]))  # noqa: B023
            if kind == "postgres":
                (memory,) = store._memory[None].values()
                assert len(repr(memory.parameters(sweep=False))) < 30_000  # 256 lanes at most
    assert cost[1000] <= 2 * cost[1] + 100  # the last few lanes are remembered


@pytest.mark.parametrize("kind", KINDS)
def test_a_fan_in_costs_what_its_parts_cost(kind: str, tmp_path: Any) -> None:
    """Stored by their parent's finish, all of them or none, and then the one that waits for all."""
    cost: dict[int, int] = {}
    with opened(kind, tmp_path) as store:
        no = worker(store)
        for parts in (10, 1000, 2000):
            store.enqueue([new(queue="parents")])
            (parent,) = store.claim(no, [("parents", 1)]).jobs
            ids, own = new_ids(parts), new(parent=parent.id).terms
            last = NewJob(new_id(), own, "{}", after=tuple(ids))
            children = (*(NewJob(id, own, "{}") for id in ids), last)
            end = Ended(parent.id, parent.lease_no, 1, Completed(None, children))
            cost[parts] = work(store, lambda: store.finish(no, [end]))  # noqa: B023
            served = 0
            while jobs := store.claim(no, [("default", 500)]).jobs:
                served += len(jobs)
                finish(store, no, jobs)
            assert served == parts + 1, "and the one after them is the last"
    assert cost[2000] < 3 * cost[1000]


@pytest.mark.parametrize("kind", KINDS)
def test_what_people_read_is_counted_and_walked_so_far(kind: str, tmp_path: Any) -> None:
    """Both sizes are above what is counted (10,000) and walked (20,000)."""
    keep = Prune(30 * 86_400, 90 * 86_400, 90 * 86_400)
    cost: list[dict[str, int]] = []
    for size in (30_000, 90_000):
        with opened(kind, tmp_path) as store:
            growth_rows.fill(store, finished=size, dead=size, queued=size, minutes=size // 1000)
            now = growth_rows.DAY_MS * 10_000_000
            calls: dict[str, Callable[[], Any]] = {
                "rollups": lambda: store.rollups(since_ms=now),  # noqa: B023
                "queues": store.queues,
                "totals": store.totals,
                "find by org": lambda: store.find(Filter(org="rare")),
                "find by key": lambda: store.find(Filter(key="key-7")),
                "prune": lambda: store.prune(keep),
            }
            for call in calls.values():
                call()
            cost.append({name: work(store, call) for name, call in calls.items()})
    small, large = cost
    grown = {name: (small[name], large[name]) for name in small if large[name] > 1.5 * small[name]}
    assert not grown
