"""The claim's memory on PostgreSQL: it starts where the last one ended, and nothing that appears
before that place is overlooked for long.

Each test first makes the store remember a place and lets two seconds of the store's clock pass,
so that the place does not trail any more; then something appears before it. Sweeps are held off
by hand: what a claim finds here it finds by itself, or a test asks for the sweep.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import psycopg
import pytest

import servers
from contract.builders import (
    FAILURE,
    HOUR,
    OPERATOR,
    SECOND,
    Clock,
    claim,
    claim_one,
    finish,
    new,
    put,
    put_many,
    rescue,
    started_job,
    worker,
)
from tenure.outcome import Completed, Dead, Released, Retried, Snoozed
from tenure.store import Registration
from tenure.stores.postgres import PostgresStore
from tenure.stores.postgres.memory import Memory

MANY_LANES = """
INSERT INTO tenure.jobs (id, type, status, queue, priority, org, ready_at, scheduled_at, created_at,
  updated_at, timeout_ms, max_attempts, category, actor_type, actor_id, payload)
SELECT tenure.new_id(1), 'strange', 'queued', 'default', 5, 'org-' || lpad(n::text, 6, '0'),
       1, 1, 1, 1, 1, 1, 'default', 'system', 'x', '{}' FROM generate_series(1, 5000) n
"""

KNOWN = frozenset({"noop"})


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make_store(
    make_database: Callable[..., str], clock: Clock
) -> Iterator[Callable[[], PostgresStore]]:
    url = make_database(migrated=True)
    opened: list[PostgresStore] = []

    def make() -> PostgresStore:
        opened.append(PostgresStore(url, clock=clock, notify=False))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


@pytest.fixture
def store(make_store: Callable[[], PostgresStore]) -> PostgresStore:
    return make_store()


@pytest.fixture
def no(store: PostgresStore, clock: Clock) -> Registration:
    """A worker that has a place to remember, more than two seconds behind the clock."""
    number = worker(store)
    walk_on(store, number, clock)
    return number


def walk_on(store: PostgresStore, no: Registration, clock: Clock, **over: object) -> None:
    put_many(store, 3, **over)
    for job in claim(store, no, queue=str(over.get("queue", "default"))):
        finish(store, no, job, Completed())
    clock.advance(10 * SECOND)
    claim(store, no, queue=str(over.get("queue", "default")))
    forbid_sweeps(store)


def memories(store: PostgresStore) -> list[Memory]:
    return [memory for queues in store._memory.values() for memory in queues.values()]


def forbid_sweeps(store: PostgresStore) -> None:
    for memory in memories(store):
        memory.swept, memory.costs = 1e12, (0.0, 0.0)


def sweep(store: PostgresStore) -> None:
    for memory in memories(store):
        memory.swept = 0.0


def late_row(store: PostgresStore, clock: Clock, **over: object) -> str:
    """A job whose transaction commits half a minute after it was enqueued."""
    now = clock()
    id = new(**over)
    store.enqueue([id], now_ms=now - 30 * SECOND)
    return id.id


def test_the_place_is_remembered_and_used(
    store: PostgresStore, no: Registration, clock: Clock
) -> None:
    """Without this the other tests would prove nothing."""
    hidden = late_row(store, clock)
    assert claim(store, no) == []
    sweep(store)
    assert [job.id for job in claim(store, no)] == [hidden]


def test_a_late_commit_is_found_by_a_sweep_that_comes_by_itself(
    store: PostgresStore, no: Registration, clock: Clock
) -> None:
    for memory in memories(store):
        memory.swept = 0.0
    claim(store, no)
    hidden = late_row(store, clock)
    assert claim(store, no) == []  # just swept
    due = store.next_due(["default"])
    assert due is not None and 0 < due <= 110  # never later than the next sweep
    for memory in memories(store):
        memory.swept -= 0.2
    assert [job.id for job in claim(store, no)] == [hidden]


def make_sweeps_dear(store: PostgresStore) -> None:
    """As beside a long transaction, when they walk over everything that was ever claimed."""
    for memory in memories(store):
        memory.swept, memory.costs = time.monotonic() - 3.0, (0.1, 0.1)


def test_a_dear_sweep_is_left_to_a_look_beside_the_claims(
    store: PostgresStore, no: Registration, clock: Clock
) -> None:
    make_sweeps_dear(store)
    hidden = late_row(store, clock)
    assert claim(store, no) == []
    assert store.next_due(["default"]) is None  # whoever sweeps will poke us
    assert store.sweep() == 1
    assert [job.id for job in claim(store, no)] == [hidden]
    make_sweeps_dear(store)
    put_many(store, 3)  # where claims are looking anyway
    assert store.sweep() == 0
    assert len(claim(store, no)) == 3


def test_a_dear_sweep_is_made_by_a_claim_when_nobody_else_does(
    store: PostgresStore, no: Registration, clock: Clock
) -> None:
    make_sweeps_dear(store)
    hidden = late_row(store, clock)
    for memory in memories(store):
        memory.swept -= 60.0
    assert [job.id for job in claim(store, no)] == [hidden]


def test_one_sweep_that_waited_for_a_lock_makes_none_dear(
    store: PostgresStore, no: Registration
) -> None:
    for memory in memories(store):
        memory.was_swept(time.monotonic())
        memory.was_swept(time.monotonic() - 30.0)
        assert memory.sweep_in() <= 0.1
        assert memory.cost < 0.02


def test_an_idle_queue_asks_for_no_sweep_after_a_sweep(
    store: PostgresStore, no: Registration
) -> None:
    sweep(store)
    claim(store, no)
    assert store.next_due(["default"]) is None


def test_a_commit_within_two_seconds_needs_no_sweep(
    store: PostgresStore, no: Registration, clock: Clock
) -> None:
    job = new()
    store.enqueue([job], now_ms=clock() - 1500)
    assert [found.id for found in claim(store, no)] == [job.id]


def beside_strangers(store: PostgresStore, no: Registration, clock: Clock) -> None:
    """A lane that others have jobs in too, walked to its end."""
    put_many(store, 300, type="strange")
    put(store)
    while store.claim(no, [("default", 9)], KNOWN).more:
        pass
    clock.advance(10 * SECOND)
    claim(store, no, types=KNOWN)
    forbid_sweeps(store)


def test_a_commit_within_two_seconds_needs_no_sweep_beside_jobs_of_others(
    store: PostgresStore, no: Registration, clock: Clock
) -> None:
    beside_strangers(store, no, clock)
    job = new()
    store.enqueue([job], now_ms=clock() - 1500)
    assert [found.id for found in claim(store, no, types=KNOWN)] == [job.id]


def test_a_dear_sweep_beside_jobs_of_others_is_made_by_claims(
    store: PostgresStore, no: Registration, clock: Clock
) -> None:
    """In pieces: a look beside them could not tell whose rows they are."""
    beside_strangers(store, no, clock)
    hidden = late_row(store, clock)
    assert claim(store, no, types=KNOWN) == []
    for memory in memories(store):
        memory.swept, memory.costs = time.monotonic() - 1.9, (0.1, 0.1)
    due = store.next_due(["default"])
    assert due is not None and 0 < due <= 110
    for memory in memories(store):
        memory.swept -= 0.2
    assert [job.id for job in claim(store, no, types=KNOWN)] == [hidden]


@pytest.mark.parametrize("outcome", [Released("x"), Retried(0, FAILURE), Snoozed(0)])
@pytest.mark.parametrize("delay", [0, SECOND])
def test_what_goes_back_is_claimed_at_once(
    store: PostgresStore, no: Registration, clock: Clock, outcome: object, delay: int
) -> None:
    id = put(store, delay_ms=delay)
    clock.advance(delay)
    job = claim_one(store, no)
    assert job.id == id
    clock.advance(HOUR)
    walk_on(store, no, clock)
    finish(store, no, job, outcome)  # type: ignore[arg-type]
    assert [found.id for found in claim(store, no)] == [job.id]


@pytest.mark.parametrize("outcome", [Retried(0, FAILURE), Snoozed(0), Dead(FAILURE)])
def test_what_goes_back_in_the_millisecond_of_the_claim_is_not_passed_over(
    store: PostgresStore, no: Registration, clock: Clock, outcome: object
) -> None:
    """Its id is smaller than that of the last one claimed, and it is due at the same time now."""
    put_many(store, 2)
    older, _younger = claim(store, no)
    finish(store, no, older, outcome)  # type: ignore[arg-type]
    store.replay([older.id], actor=OPERATOR)
    clock.advance(HOUR)
    assert [found.id for found in claim(store, no)] == [older.id]


def test_a_pause_is_no_sweep(store: PostgresStore, no: Registration, clock: Clock) -> None:
    hidden = late_row(store, clock)
    store.pause("default", actor=OPERATOR, reason="x")
    sweep(store)
    assert claim(store, no) == []
    store.resume("default", actor=OPERATOR)
    assert [found.id for found in claim(store, no)] == [hidden]


@pytest.mark.parametrize("delay", [0, SECOND])
def test_rescued_jobs_are_claimed_at_once(
    store: PostgresStore,
    make_store: Callable[[], PostgresStore],
    no: Registration,
    clock: Clock,
    delay: int,
) -> None:
    other = make_store()
    dying = worker(other)
    put(other, delay_ms=delay)
    clock.advance(delay)
    job = claim_one(other, dying)
    clock.advance(HOUR)
    walk_on(store, no, clock)
    rescue(other, dying)
    assert [found.id for found in claim(store, no)] == [job.id]


def test_a_replayed_job_is_claimed_at_once(
    store: PostgresStore, no: Registration, clock: Clock
) -> None:
    job = started_job(store, no)
    finish(store, no, job, Dead(FAILURE))
    clock.advance(HOUR)
    walk_on(store, no, clock)
    store.replay([job.id], actor=OPERATOR)
    assert [found.id for found in claim(store, no)] == [job.id]


def test_a_met_dependency_is_claimed_at_once(
    store: PostgresStore, no: Registration, clock: Clock
) -> None:
    need = started_job(store, no)
    waiting = put(store, after=(need.id,))
    clock.advance(HOUR)
    walk_on(store, no, clock)
    finish(store, no, need, Completed())
    assert [found.id for found in claim(store, no)] == [waiting]


def test_a_job_dated_in_the_past_is_claimed_at_once(
    store: PostgresStore, no: Registration, clock: Clock
) -> None:
    id = put(store, at_ms=clock() - HOUR)
    assert [found.id for found in claim(store, no)] == [id]


@pytest.mark.parametrize(
    "over", [{"priority": 1}, {"priority": 9}, {"org": "acme"}, {"org": "zoo"}]
)
def test_a_new_lane_is_seen_at_once_however_old_its_rows(
    store: PostgresStore, no: Registration, clock: Clock, over: dict[str, object]
) -> None:
    hidden = late_row(store, clock, **over)
    assert [found.id for found in claim(store, no)] == [hidden]


def test_the_more_urgent_of_two_lanes_comes_first(
    store: PostgresStore, no: Registration, clock: Clock
) -> None:
    walk_on(store, no, clock, priority=1)
    late = put(store, priority=5)
    soon = put(store, priority=1)
    assert claim_one(store, no).id == soon
    assert claim_one(store, no).id == late


def test_a_pause_leaves_the_place_where_it_was(
    store: PostgresStore, no: Registration, clock: Clock
) -> None:
    waiting = put_many(store, 3)
    store.pause("default", actor=OPERATOR, reason="x")
    clock.advance(HOUR)
    assert claim(store, no) == []
    clock.advance(HOUR)
    assert claim(store, no) == []
    store.resume("default", actor=OPERATOR)
    assert [job.id for job in claim(store, no)] == waiting


def test_a_limit_leaves_the_rest_claimable(
    store: PostgresStore, no: Registration, clock: Clock
) -> None:
    waiting = put_many(store, 10)
    got = []
    for _ in range(10):
        clock.advance(HOUR)
        got += [job.id for job in claim(store, no, 1)]
    assert got == waiting


def test_unknown_types_come_back_when_they_are_due(
    store: PostgresStore, no: Registration, clock: Clock
) -> None:
    strange, known = put(store, type="strange"), put(store)
    types = frozenset({"noop"})
    assert [job.id for job in claim(store, no, types=types)] == [known]
    clock.advance(HOUR)
    later = put(store)
    assert [job.id for job in claim(store, no, types=types)] == [later]
    clock.advance(HOUR)
    assert [job.id for job in claim(store, no)] == [strange]


def test_what_another_claim_locked_and_let_go_is_found_by_a_sweep(
    store: PostgresStore, no: Registration, clock: Clock
) -> None:
    """The other one dies in the middle: its rows were passed over and are before our place."""
    first, *rest = put_many(store, 3)
    clock.advance(SECOND)
    with psycopg.connect(store.database.url) as stranger:
        stranger.execute(
            "SELECT 1 FROM tenure.jobs WHERE tenure.ulid(id) = %s FOR UPDATE", (first,)
        )
        assert [job.id for job in claim(store, no)] == rest
        stranger.rollback()
    clock.advance(HOUR)
    assert claim(store, no) == []
    sweep(store)
    assert [job.id for job in claim(store, no)] == [first]


def test_several_workers_take_each_job_once_and_all(
    make_store: Callable[[], PostgresStore], store: PostgresStore, clock: Clock
) -> None:
    others = [make_store() for _ in range(4)]
    numbers = [worker(each) for each in others]
    wanted, got = [], []
    for turn in range(20):
        wanted += put_many(store, 25, org=f"org-{turn % 3}", priority=1 + turn % 4)
        clock.advance(SECOND * (turn % 4))
        for each, number in zip(others, numbers, strict=True):
            got += [job.id for job in claim(each, number, 7)]
    while some := [job.id for e, n in zip(others, numbers, strict=True) for job in claim(e, n, 9)]:
        got += some
    assert sorted(got) == sorted(wanted)


def test_more_lanes_than_one_walk_takes(store: PostgresStore) -> None:
    """Orgs with nothing for us: a walk is bounded, says that there is more, and the next one goes
    on where it was cut."""
    no = worker(store)
    with psycopg.connect(store.database.url, autocommit=True) as db:
        db.execute(MANY_LANES)
    last = put(store, org="zoo")
    got, walks = [], 0
    while not got:
        found = store.claim(no, [("default", 500)], KNOWN)
        got, walks = [job.id for job in found.jobs], walks + 1
        assert got or (found.more and found.unknown)
    assert got == [last]
    assert 1 < walks < 50


def test_the_turn_is_with_the_org_served_last(store: PostgresStore) -> None:
    """Whatever the order their jobs came in: five orgs, two places a claim, everybody's turn."""
    no = worker(store)
    for org in ("e", "b", "d", "a", "c"):
        put_many(store, 4, org=org)
    served = [[job.org for job in claim(store, no, 2)] for _ in range(5)]
    assert [sorted(pair) for pair in served] == [
        ["a", "b"], ["c", "d"], ["a", "e"], ["b", "c"], ["d", "e"],
    ]  # fmt: skip


def test_a_walk_that_was_cut_moves_no_place(store: PostgresStore, clock: Clock) -> None:
    """It has not looked at the lanes behind the cut: what is due there must not be hidden."""
    no = worker(store)
    put(store, org="zoo")
    (job,) = store.claim(no, [("default", 10)], KNOWN).jobs
    finish(store, no, job, Completed())
    clock.advance(10 * SECOND)
    store.claim(no, [("default", 10)], KNOWN)
    forbid_sweeps(store)
    before = store._memory[KNOWN]["default"].lanes[5, "zoo"]
    with psycopg.connect(store.database.url, autocommit=True) as db:
        db.execute(MANY_LANES)
    waiting = put(store, org="zoo")
    clock.advance(HOUR)
    found = store.claim(no, [("default", 10)], KNOWN)
    assert found.more and not found.jobs
    assert store._memory[KNOWN]["default"].lanes[5, "zoo"] == before
    got: list[str] = []
    while not got:
        got = [job.id for job in store.claim(no, [("default", 10)], KNOWN).jobs]
    assert got == [waiting]


@pytest.mark.parametrize("count", [1, 2])
def test_a_queue_that_a_restored_backup_does_not_know_is_named_again(
    store: PostgresStore, count: int
) -> None:
    """Who enqueues has seen its name committed, and does not send it again; but workers ask for
    names: jobs acknowledged after the restore stayed queued, unseen."""
    put_many(store, count, queue="exports")
    store.database.run("DELETE FROM tenure.queues", {})

    put_many(store, count, queue="exports")

    assert store.queue_names() == {"exports": False}


# -- any encoding ---------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["SQL_ASCII", "EUC_JP", "WIN1252"])
def test_a_database_of_another_encoding_gives_jobs_too(
    postgres: servers.Databases, encoding: str
) -> None:
    """SQL_ASCII is what initdb makes where no locale is set. No text is the last in all of them."""
    name = f"tenure_{encoding.lower()}"
    how = f"ENCODING '{encoding}' TEMPLATE template0 LC_COLLATE 'C' LC_CTYPE 'C'"
    postgres.execute(f"CREATE DATABASE {name} {how}")
    store = PostgresStore(postgres.url(name), notify=False)
    try:
        store.migrate()
        no = worker(store)
        orgs = ["a", "b", "c", "~"]
        store.enqueue([new(org=org) for org in orgs for _ in range(3)])
        given = [claim_one(store, no) for _ in range(12)]  # each remembers the lanes of the last
        assert sorted(job.org for job in given) == sorted(orgs * 3)
        assert [job.org for job in given[:4]] == orgs
        assert claim(store, no) == []
        assert finish(store, no, given[0], Dead(FAILURE)) == "accepted"
        assert finish(store, no, given[1], Completed()) == "accepted"
    finally:
        store.close()
        postgres.drop_database(name)


def test_a_claim_of_one_job_sees_that_the_only_lane_has_nothing_for_it(
    store: PostgresStore,
) -> None:
    """It was the lane's turn, and it is the lane's turn again: that is all the way round."""
    no = worker(store)
    put(store, type="noop")
    put(store, type="strange")
    finish(store, no, store.claim(no, [("default", 1)], KNOWN).jobs[0], Completed())

    found = [store.claim(no, [("default", 1)], KNOWN) for _ in range(3)]

    assert [claim.unknown for claim in found if claim.unknown], "it was passed over"
    assert not found[-1].more


def test_what_a_dead_worker_was_refused_is_there_for_the_next(
    store: PostgresStore, clock: Clock
) -> None:
    """A worker that stood still for longer than its lease asks once more before it hears of its
    death, and goes on under another number, in the same process and with the same memory."""
    dead, alive = worker(store), worker(store)
    rescue(store, dead)
    first, second = put(store), put(store)
    clock.advance(7 * SECOND)
    assert claim_one(store, alive).id == first

    assert claim(store, dead) == []

    assert [job.id for job in claim(store, alive)] == [second]
