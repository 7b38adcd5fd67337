"""What the statements that run all the time really touch on PostgreSQL, in blocks.

A plan can name the right index and still walk all of it: before version 18 a scan is not ended by a
second row comparison, and EXPLAIN looks the same. So blocks are counted, beside 20,000 jobs due
tomorrow in 2,100 lanes of the same queue and 8,000 due now; once with statistics of that, and once
with plans a session has made and kept while the tables were empty, vacuumed and analysed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import servers
from contract.builders import DAY, FAILURE, new, put_many, rescue, terms, worker
from plans.watching import WARM_UP, buffers_of, watched
from tenure.ids import new_id, new_ids
from tenure.job import ClaimedJob, NewJob
from tenure.outcome import Completed, Crashed, Dead, Ended, Outcome, Retried
from tenure.store import Registration
from tenure.stores.postgres import PostgresStore

FUTURE, DUE = 20_000, 8_000
OUTCOMES: dict[str, Outcome] = {
    "completed": Completed(),
    "retried": Retried(3600, FAILURE),
    "dead": Dead(FAILURE),
    "crashed": Crashed("SIGSEGV", 3),
}
TABLES = ("jobs", "history", "events", "edges", "keys", "steps", "queues", "workers")


class Scene:
    """A store with one connection, whose plans are kept, and a worker that holds jobs."""

    def __init__(self, store: PostgresStore) -> None:
        self.store = store
        self.worker: Registration = worker(store)
        self.held: list[ClaimedJob] = []

    def hold(self, count: int) -> None:
        if len(self.held) < count:
            wanted = count - len(self.held)
            self.held += self.store.claim(self.worker, [("default", wanted)]).jobs
        assert len(self.held) >= count

    def finish(self, outcome: Outcome, jobs: list[ClaimedJob]) -> list[Any]:
        ends = [Ended(job.id, job.lease_no, 1, outcome) for job in jobs]
        return list(self.store.finish(self.worker, ends))

    def rehearse(self) -> None:
        """Every statement once: nothing is claimed, found, finished or rescued."""
        self.store.claim(self.worker, [("default", 5)])
        self.store.claim(self.worker, [("default", 5)], frozenset({"other"}))
        self.store.claim(self.worker, [("default", 5)], suspects=True)
        self.store.next_due(["default"])
        self.store.renew(self.worker)
        rescue(self.store, worker(self.store), started=None)
        (some,) = self.store.enqueue([new(queue="elsewhere", key=new_id())])
        nobody = ClaimedJob._make([some.id, 1, *[None] * (len(ClaimedJob._fields) - 2)])
        for outcome in OUTCOMES.values():
            assert "accepted" not in self.finish(outcome, [nobody])
        put_many(self.store, 2, queue="elsewhere")

    def fill(self) -> None:
        later = [terms(priority=p, org=f"org-{n}") for p in (1, 5, 9) for n in range(700)]
        now = [terms(priority=p, org=org) for p in (1, 5, 9) for org in ("a", "b")]
        for lanes, count, delay in ((later, FUTURE, DAY), (now, DUE, 0)):
            for first in range(0, count, 4000):
                ids = enumerate(new_ids(4000), first)
                self.store.enqueue(
                    [NewJob(id, lanes[place % len(lanes)], "{}", delay) for place, id in ids]
                )


@pytest.fixture(scope="module", params=["analysed", "emptied, vacuumed, analysed, then filled"])
def scene(request: pytest.FixtureRequest) -> Iterator[Scene]:
    server = servers.require(servers.shared)
    name = server.create_database(migrated=True)
    store = PostgresStore(server.url(name), notify=False)
    try:
        # Nobody analyses it but us: a new plan would hide what an old one does.
        store.database.run("ALTER TABLE tenure.jobs SET (autovacuum_enabled = off)")
        made = Scene(store)
        if request.param == "analysed":
            made.fill()
            server.execute("ANALYZE", database=name)
            for _ in range(WARM_UP):
                made.store.enqueue([new(queue="elsewhere", key=new_id())])
                put_many(store, 5)
                made.hold(4)
                for outcome in OUTCOMES.values():
                    made.finish(outcome, [made.held.pop()])
        else:
            put_many(store, 3000)
            made.hold(3000)
            made.finish(Completed(), made.held)
            made.held.clear()
            for table in TABLES:
                server.execute(f"VACUUM (ANALYZE) tenure.{table}", database=name)
            for db in (*store.database._pool._idle, *store.database._reserved._idle):
                db.execute("DISCARD PLANS")
            for _ in range(WARM_UP):
                made.rehearse()
            made.fill()
        yield made
    finally:
        store.close()
        server.drop_database(name)


@pytest.mark.parametrize(("most", "bound"), [(1, 150), (100, 3000), (500, 13_000)])
def test_a_claim_touches_what_it_takes(scene: Scene, most: int, bound: int) -> None:
    """Some 15 blocks a job, of which most are the new row's in its indexes."""
    blocks = buffers_of(scene.store, lambda: scene.hold(len(scene.held) + most))
    assert blocks < bound


def test_a_claim_that_finds_nothing_looks_at_a_few(scene: Scene) -> None:
    scene.store.enqueue([new(queue="tomorrow", org=f"o{n}", delay_ms=DAY) for n in range(2000)])
    wants = [("tomorrow", 100)]
    assert scene.store.claim(scene.worker, wants).jobs == []
    assert buffers_of(scene.store, lambda: scene.store.claim(scene.worker, wants)) < 40


def test_what_is_not_for_us_is_walked_by_so_many(scene: Scene) -> None:
    wants, types = [("default", 100)], frozenset({"other"})
    assert scene.store.claim(scene.worker, wants, types).jobs == []
    blocks = buffers_of(scene.store, lambda: scene.store.claim(scene.worker, wants, types))
    assert blocks < 6000  # 4,000 rows a lane, and no more


def test_the_next_due_time_is_a_step(scene: Scene) -> None:
    assert buffers_of(scene.store, lambda: scene.store.next_due(["default"])) < 30


@pytest.mark.parametrize("name", OUTCOMES)
@pytest.mark.parametrize("count", [1, 500])
def test_a_finish_touches_its_own_jobs(scene: Scene, name: str, count: int) -> None:
    """Some 16 blocks a job that completes, 30 of one that stays; all of jobs_pkey would be 28,000
    rows more."""
    scene.hold(2 * count)
    taken = [[scene.held.pop() for _ in range(count)] for _ in range(2)]
    verdicts: list[Any] = []

    def finish() -> None:
        verdicts.extend(scene.finish(OUTCOMES[name], taken.pop()))

    blocks = buffers_of(scene.store, finish)
    seen = watched(scene.store, finish)
    assert set(verdicts) == {"accepted"}
    assert blocks < 100 + 40 * count
    assert seen.by("jobs") <= {"jobs_pkey", "Tid Scan"}
    assert seen.rows("jobs") <= 8 * count


def test_suspects_are_found_apart(scene: Scene) -> None:
    scene.hold(20)
    scene.finish(OUTCOMES["crashed"], [scene.held.pop() for _ in range(20)])
    granted: list[ClaimedJob] = []

    def claim() -> None:
        granted.extend(scene.store.claim(scene.worker, [("default", 10)], suspects=True).jobs)

    assert buffers_of(scene.store, claim) < 600
    assert len(granted) == 10


def test_a_renewal_reads_what_is_held(scene: Scene) -> None:
    scene.hold(100)
    scene.store.renew(scene.worker)
    assert buffers_of(scene.store, lambda: scene.store.renew(scene.worker)) < 5000


def test_a_rescue_touches_what_was_held(scene: Scene) -> None:
    gone = worker(scene.store)
    assert len(scene.store.claim(gone, [("default", 100)]).jobs) == 100
    assert buffers_of(scene.store, lambda: rescue(scene.store, gone, started=None)) < 5000


@pytest.mark.parametrize(("count", "bound"), [(1, 150), (100, 5000)])
def test_an_enqueue_with_keys_looks_them_up(scene: Scene, count: int, bound: int) -> None:
    blocks = buffers_of(
        scene.store, lambda: scene.store.enqueue([new(key=new_id()) for _ in range(count)])
    )
    assert blocks < bound


def test_an_enqueue_of_many_looks_its_ids_up(scene: Scene) -> None:
    assert buffers_of(scene.store, lambda: put_many(scene.store, 100)) < 3000


@pytest.mark.parametrize(("most", "granted"), [(500, 200), (10, 10)])
def test_a_claim_takes_what_has_come_due_and_nothing_behind_it(
    scene: Scene, most: int, granted: int
) -> None:
    """With room for all of them they are granted where they stand; else they get into lanes."""
    queue = f"soon-{most}"
    scene.store.enqueue([new(queue=queue, org=f"o{n}", delay_ms=DAY) for n in range(4000)])
    scene.store.enqueue([new(queue=queue, org=f"o{n}", delay_ms=1) for n in range(200)])
    found: list[ClaimedJob] = []

    def claim() -> None:
        found.extend(scene.store.claim(scene.worker, [(queue, most)]).jobs)

    assert buffers_of(scene.store, claim) < 200 * 40
    assert len(found) == granted
