"""Tables of version 1 are brought up to date beside programs that go on working."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from contract.builders import claim, end, totals, worker
from tenure.outcome import Completed
from tenure.store import Filter
from tenure.stores.postgres import PostgresStore, schema
from tenure.stores.postgres.explaining import STALE

MANY = 12_000  # more than are changed faster than prepared: indexes are built beside everybody
ROW = """[{"type": "work"}]"""
# A migration waits 0.3 s for a lock, and whoever comes behind it so long with it; the rest is for a
# busy machine.
WORST_SECONDS = 2.0


@pytest.fixture
def store(make_database: Callable[..., str]) -> Iterator[PostgresStore]:
    made = PostgresStore(make_database(migrated=True), notify=False)
    with psycopg.connect(made.database.url, autocommit=True) as owner:
        owner.execute(schema.reverse_sql("tenure", to=1).encode())
    yield made
    made.close()


class OldProgram:
    """Enqueues by the door that both versions have, until it is told to end."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._over = threading.Event()
        self.stored = 0
        self.worst = 0.0
        self.broken: list[str] = []

    def run(self) -> None:
        with psycopg.connect(self._url, autocommit=True, prepare_threshold=None) as connection:
            while not self._over.wait(0.005):
                began = time.monotonic()
                try:
                    connection.execute("SELECT * FROM tenure.enqueue(%s::jsonb)", [ROW])
                    self.stored += 1
                except psycopg.Error as error:
                    self.broken.append(str(error.sqlstate))
                self.worst = max(self.worst, time.monotonic() - began)

    def end(self) -> None:
        self._over.set()

    def until(self, more: int, beside: Future[Any]) -> None:
        goal, deadline = self.stored + more, time.monotonic() + 60
        while self.stored < goal:
            assert time.monotonic() < deadline
            if beside.done():
                beside.result()
                return
            time.sleep(0.01)


@pytest.mark.timed
@pytest.mark.parametrize("rows", [100, MANY])
def test_a_migration_beside_a_long_transaction_holds_nobody_up(
    store: PostgresStore, rows: int
) -> None:
    url = store.database.url
    old = OldProgram(url)
    with psycopg.connect(url) as long, ThreadPoolExecutor(2) as pool:
        many = "SELECT count(*) FROM tenure.enqueue((SELECT jsonb_agg(%s::jsonb -> 0) "
        long.execute(many + f"FROM generate_series(1, {rows})))", [ROW])
        long.commit()
        long.execute("SELECT * FROM tenure.enqueue(%s::jsonb)", [ROW])  # and stays open
        long.execute("SELECT count(*) FROM tenure.history")
        working = pool.submit(old.run)
        migrating = pool.submit(store.migrate)
        old.until(100, beside=working)
        for _ in range(3):  # it tries, again and again
            old.until(100, beside=working)
            assert not migrating.done()
            assert schema.version(store.database) == 1
        long.commit()
        assert migrating.result(90) == ["0002_promises"]
        old.until(20, beside=working)
        old.end()
        working.result(10)

    assert old.worst < WORST_SECONDS
    # The call that waited for the migration's lock found its function replaced, and was rolled
    # back: our programs repeat it.
    assert len(old.broken) <= 1
    assert set(old.broken) <= STALE
    no = worker(store)
    done = 0
    while jobs := claim(store, no, 1000):
        store.finish(no, [end(job, Completed()) for job in jobs])
        done += len(jobs)
    assert done == rows + 1 + old.stored
    assert totals(store) == {"completed": min(done, 10_000)}


def test_dead_letters_are_sorted_while_everybody_works(store: PostgresStore) -> None:
    """What they died of is worked out before the tables are locked: 100,000 of them held every
    enqueue up for ten seconds."""
    url = store.database.url
    with psycopg.connect(url, autocommit=True) as owner, ThreadPoolExecutor(2) as pool:
        many = f"(SELECT jsonb_agg(%s::jsonb -> 0) FROM generate_series(1, {MANY}))"
        owner.execute(f"SELECT count(*) FROM tenure.enqueue({many})", [ROW])
        owner.execute("UPDATE tenure.jobs SET status = 'failed', completed_at = updated_at")
        with psycopg.connect(url) as reader:  # the migration itself cannot begin
            reader.execute("SELECT count(*) FROM tenure.history")
            migrating = pool.submit(store.migrate)
            deadline = time.monotonic() + 60
            sorted_out = "SELECT to_jsonb(j) ->> 'death' <> '' FROM tenure.jobs j LIMIT 1"
            while owner.execute(sorted_out).fetchone() != (True,):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            assert schema.version(store.database) == 1
        assert migrating.result(90) == ["0002_promises"]

    (group,) = store.dead_groups(Filter())
    assert (group.jobs, group.capped) == (10_000, True)


def test_a_migration_that_was_cut_off_goes_on(store: PostgresStore) -> None:
    """Between its indexes: one of them half-built, as a killed CREATE INDEX CONCURRENTLY leaves
    it."""
    with psycopg.connect(store.database.url, autocommit=True) as owner:
        many = f"(SELECT jsonb_agg(%s::jsonb -> 0) FROM generate_series(1, {MANY}))"
        owner.execute(f"SELECT count(*) FROM tenure.enqueue({many})", [ROW])
        owner.execute(
            "CREATE INDEX jobs_death ON tenure.jobs (queue, type) WHERE completed_at IS NOT NULL"
        )
        owner.execute(
            "UPDATE pg_index SET indisvalid = false "
            "WHERE indexrelid = 'tenure.jobs_death'::regclass"
        )

    assert store.migrate() == ["0002_promises"]

    with psycopg.connect(store.database.url) as owner:
        (made,) = owner.execute("SELECT pg_get_indexdef('tenure.jobs_death'::regclass)").fetchall()
    assert "(queue, type, death, completed_at, id)" in made[0]
