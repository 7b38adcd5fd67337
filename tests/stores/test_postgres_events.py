"""Readers of the trail see every event once, however late it is committed; and tables that are
published to somebody else."""

from __future__ import annotations

import os
import random
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

import servers
from contract.builders import (
    FAILURE,
    OPERATOR,
    claim_one,
    ended_job,
    finish,
    get,
    new,
    put,
    save_step,
    worker,
)
from tenure.outcome import Completed, Dead, Retried
from tenure.policy import Keep
from tenure.store import Prune
from tenure.stores.postgres import PostgresStore, schema

KEEP = Prune(completed=86_400, dead=86_400, events=86_400)
SETTINGS: dict[str, str | int] = {
    "wal_level": "logical",
    "max_prepared_transactions": 4,
    "max_connections": 40,
}


@pytest.fixture(scope="module")
def server() -> Iterator[servers.PostgresServer]:
    """One that can be replicated from, and that prepares transactions."""
    asked = os.environ.get("TENURE_TEST_POSTGRES_MAJOR")
    major = int(asked) if asked else None
    with servers.require(lambda: servers.PostgresServer(major=major, settings=SETTINGS)) as made:
        yield made


@pytest.fixture
def url(server: servers.PostgresServer) -> Iterator[str]:
    name = server.create_database()
    yield server.url(name)
    server.drop_database(name)


@pytest.fixture
def open_store(url: str) -> Iterator[Callable[[], PostgresStore]]:
    made: list[PostgresStore] = []

    def opened() -> PostgresStore:
        made.append(PostgresStore(url, notify=False))
        return made[-1]

    yield opened
    for each in made:
        each.close()


@pytest.fixture
def store(open_store: Callable[[], PostgresStore]) -> PostgresStore:
    store = open_store()
    store.migrate()
    return store


@pytest.fixture
def late(url: str, store: PostgresStore) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(url, application_name="billing") as connection:
        yield connection
        connection.rollback()


def seen(store: PostgresStore, after: int = 0) -> list[str | None]:
    """The jobs of the events that are shown."""
    return [event.job_id for event in store.events(after=after, limit=1000).events]


# -- the horizon ----------------------------------------------------------------------------------


def test_an_event_that_is_committed_late_is_shown_once_and_in_its_place(
    store: PostgresStore, late: psycopg.Connection[Any]
) -> None:
    first = put(store)
    assert seen(store) == [first]
    slow, quick = new(), new()
    store.enqueue_on(late, [slow])
    store.enqueue([quick])
    page = store.events()
    assert [event.job_id for event in page.events] == [first]
    pid = late.info.backend_pid
    held_by = rf"pid {pid} 'billing' of tenure, idle in transaction, since \d{{4}}-.*Z"
    assert re.fullmatch(held_by, str(page.held_by))

    late.commit()

    last = page.events[-1].seq
    after = store.events(after=last)
    assert [event.job_id for event in after.events] == [slow.id, quick.id]
    assert after.held_by is None
    assert after.final >= after.events[-1].seq


def test_what_is_rolled_back_holds_nobody_up_afterwards(
    store: PostgresStore, late: psycopg.Connection[Any]
) -> None:
    store.enqueue_on(late, [new()])
    quick = put(store)
    assert seen(store) == []
    late.rollback()
    assert seen(store) == [quick]


def test_a_savepoint_that_was_rolled_back_and_a_snapshot_hold_nobody_up(
    store: PostgresStore, late: psycopg.Connection[Any]
) -> None:
    late.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    late.execute("SELECT count(*) FROM tenure.events")
    late.execute("SAVEPOINT a")
    store.enqueue_on(late, [new()])
    late.execute("ROLLBACK TO a")
    quick = put(store)

    page = store.events()

    assert ([event.job_id for event in page.events], page.held_by) == ([quick], None)


def test_events_of_one_job_wait_for_nobody(
    store: PostgresStore, late: psycopg.Connection[Any]
) -> None:
    store.enqueue_on(late, [new()])
    quick = put(store)
    assert [event.job_id for event in store.events(job_id=quick).events] == [quick]


def test_a_prepared_transaction_holds_them_until_it_is_decided(
    store: PostgresStore, url: str
) -> None:
    slow = new()
    with psycopg.connect(url, autocommit=True) as coordinator:
        coordinator.execute("BEGIN")
        store.enqueue_on(coordinator, [slow])
        coordinator.execute("PREPARE TRANSACTION 'both'")
        quick = put(store)
        page = store.events()
        assert (page.events, page.final) == ([], 0)
        assert str(page.held_by).startswith("prepared transaction 'both' of tenure, since ")
        coordinator.execute("COMMIT PREPARED 'both'")
    assert seen(store) == [slow.id, quick]


def test_a_program_that_meets_a_holder_begins_where_retention_stood(
    store: PostgresStore,
    late: psycopg.Connection[Any],
    open_store: Callable[[], PostgresStore],
) -> None:
    first = put(store)
    store.prune(KEEP)
    store.enqueue_on(late, [new()])
    put(store)
    store.prune(KEEP)  # stands still, and says nothing wrong
    assert seen(open_store()) == [first]


def test_numbers_that_are_drawn_again_after_a_restore_are_shown(
    store: PostgresStore, late: psycopg.Connection[Any]
) -> None:
    for _ in range(5):
        put(store)
    assert len(seen(store)) == 5
    late.execute("DELETE FROM tenure.events WHERE seq > 2")
    late.execute("SELECT setval('tenure.events_seq', 2)")
    late.commit()
    again = put(store)
    assert seen(store, after=2) == [again]


def test_a_reader_among_late_writers_misses_none_and_sees_none_twice(
    store: PostgresStore, url: str
) -> None:
    """Four writers that hold their transactions for a while, out of order, or roll them back."""
    kept: list[set[str]] = [set() for _ in range(4)]
    over = threading.Event()

    def write(mine: set[str], chance: random.Random) -> None:
        with psycopg.connect(url) as connection:
            for _ in range(60):
                jobs = [new() for _ in range(chance.randint(1, 3))]
                store.enqueue_on(connection, jobs)
                over.wait(chance.random() * 0.02)  # the transaction stays open
                if chance.random() < 0.2:
                    connection.rollback()
                else:
                    connection.commit()
                    mine |= {job.id for job in jobs}

    found: list[tuple[int, str]] = []

    def read() -> None:
        done = False
        while not done:
            done = over.is_set()  # then once more, to the end
            after = found[-1][0] if found else 0
            while page := store.events(after=after, limit=50).events:
                found.extend((event.seq, str(event.job_id)) for event in page)
                after = page[-1].seq

    with ThreadPoolExecutor(5) as pool:
        reading = pool.submit(read)
        writing = [pool.submit(write, mine, random.Random(n)) for n, mine in enumerate(kept)]
        for each in writing:
            each.result(60)
        over.set()
        reading.result(60)

    numbers = [seq for seq, _id in found]
    assert numbers == sorted(set(numbers))
    ids = [id for _seq, id in found]
    assert len(ids) == len(set(ids))
    assert set(ids) == set().union(*kept)


def test_the_doctor_names_who_holds_them(
    store: PostgresStore, late: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenure.stores.postgres.activity.HELD_SECONDS", 0.0)
    store.enqueue_on(late, [new()])

    (finding,) = [each for each in store.inspect() if each.check == "events"]

    assert finding.level == "warning"
    assert f"pid {late.info.backend_pid} 'billing'" in finding.message
    late.commit()
    (finding,) = [each for each in store.inspect() if each.check == "events"]
    assert finding.level == "ok"


# -- logical replication --------------------------------------------------------------------------

PUBLISH = "CREATE PUBLICATION everything FOR ALL TABLES"
DAY_MS = 86_400_000


def life(store: PostgresStore) -> None:
    """What changes and removes rows of every table, so far as it takes a published identity."""
    no = worker(store)
    need = put(store, key="k")
    last = put(store, after=(need,))
    job = claim_one(store, no)
    save_step(store, no, job, "one", "1")
    finish(store, no, job, Retried(0, FAILURE))
    finish(store, no, claim_one(store, no), Completed("1"))
    finish(store, no, claim_one(store, no), Completed())
    dead = ended_job(store, no, Dead(FAILURE))
    store.replay([dead], actor=OPERATOR)
    store.cancel([dead], actor=OPERATOR, reason="x")
    store.pause("default", actor=OPERATOR, reason="x")
    store.resume("default", actor=OPERATOR)
    assert get(store, last).status == "completed"
    store.retire(no)
    execute = store.database.run
    # An event and a job of a day without a partition, which then gets one.
    long_ago = 1_000 * DAY_MS
    execute(f"UPDATE tenure.workers SET dead_at = {long_ago}")
    execute(
        "INSERT INTO tenure.events (at, kind, org, actor_type, actor_id) "
        f"VALUES ({long_ago}, 'odd', 'default', 'system', 'x')"
    )
    execute(f"SELECT tenure.add_partitions({long_ago})")
    execute(
        "INSERT INTO tenure.events (at, kind, org, actor_type, actor_id) "
        f"VALUES ({long_ago - 10 * DAY_MS}, 'odd', 'default', 'system', 'x')"
    )
    execute("UPDATE tenure.keys SET expires_at = 1")
    own = {"work": Keep(completed=0.0, dead=0.0)}
    removed = store.prune(Prune(completed=0, dead=0, events=86_400, tasks=own)).removed
    assert removed["history"] >= 3
    assert (removed["events"], removed["keys"], removed["workers"]) == (1, 1, 1)
    left = execute("SELECT relname FROM pg_class WHERE relname LIKE 'events_1972%'")
    assert left == []  # the day of long ago was dropped as a whole


@pytest.mark.parametrize("when", ["before", "after"])
def test_all_tables_can_be_published(
    open_store: Callable[[], PostgresStore], url: str, when: str
) -> None:
    with psycopg.connect(url, autocommit=True) as owner:
        store = open_store()
        if when == "before":
            owner.execute(PUBLISH)
            store.migrate()
        else:
            store.migrate()
            owner.execute(PUBLISH)
    life(store)
    (finding,) = [each for each in store.inspect() if each.check == "replication"]
    assert finding.level == "ok", finding


def test_tables_of_version_1_that_are_published_are_migrated(
    open_store: Callable[[], PostgresStore], url: str
) -> None:
    store = open_store()
    store.migrate()
    with psycopg.connect(url, autocommit=True) as owner:
        owner.execute(schema.reverse_sql("tenure", to=1).encode())
        owner.execute(PUBLISH)
    store.close()
    assert store.migrate() == ["0002_promises"]
    life(store)


def test_the_doctor_names_what_stands_in_the_way_of_replication(
    store: PostgresStore, url: str
) -> None:
    """A table whose identity somebody took away, and a slot that nobody reads."""
    with psycopg.connect(url, autocommit=True) as owner:
        owner.execute(PUBLISH)
        owner.execute("ALTER TABLE tenure.edges REPLICA IDENTITY NOTHING")
        owner.execute("SELECT pg_create_logical_replication_slot('forgotten', 'pgoutput')")
        try:
            found = [each for each in store.inspect() if each.check == "replication"]
        finally:
            owner.execute("SELECT pg_drop_replication_slot('forgotten')")

    identity, slot = found
    assert identity.level == "problem"
    assert "edges" in identity.message
    assert "ALTER TABLE tenure.edges REPLICA IDENTITY DEFAULT" in str(identity.remedy)
    assert slot.level == "warning"
    assert "'forgotten'" in slot.message
    assert "pg_drop_replication_slot('forgotten')" in str(slot.remedy)
