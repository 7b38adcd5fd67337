"""What a worker's role can do to the trail: add to it. Tried with the real role, by every door that
it may use."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from psycopg import sql

from servers import Databases
from tenure.errors import StoreError
from tenure.store import Prune
from tenure.stores.postgres import PostgresStore, grants

DAY = 86_400_000
OLD, AGES_AHEAD = 10, 9 * 10**15
TRIES = {
    "bigint": [AGES_AHEAD, -AGES_AHEAD, None],
    "integer": [1_000_000, 0, -1, None],
    "text[]": [[], None],
    "boolean": [True, False],
}
DOORS = """
SELECT p.proname, ARRAY(SELECT format_type(a, NULL) FROM unnest(p.proargtypes) a)
  FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
 WHERE n.nspname = 'tenure' AND p.prosecdef AND has_function_privilege(p.oid, 'EXECUTE')
"""
DIRECT = (
    "DELETE FROM tenure.{table}",
    "TRUNCATE tenure.{table}",
    "DROP TABLE tenure.{table}",
    "UPDATE tenure.{table} SET org = 'x'",
    "ALTER TABLE tenure.{table} DISABLE TRIGGER ALL",
)
SETTINGS = (
    "INSERT INTO tenure.settings VALUES ('keep_history', '0', 0, 'me')",
    "UPDATE tenure.settings SET value = '0'",
    "DELETE FROM tenure.settings",
    "TRUNCATE tenure.settings",
)


@pytest.fixture
def owner(make_database: Callable[..., str]) -> Iterator[PostgresStore]:
    store = PostgresStore(make_database(migrated=True), notify=False)
    yield store
    store.close()


@pytest.fixture
def role(postgres: Databases, owner: PostgresStore) -> Iterator[str]:
    name = f"tenure_{secrets.token_hex(4)}"
    postgres.execute(f"CREATE ROLE {name} LOGIN PASSWORD 'geheim'")
    grants.grant(owner.database, name)
    yield name
    owner.close()
    with psycopg.connect(owner.database.url, autocommit=True) as connection:
        connection.execute(f"DROP OWNED BY {name}".encode())
    postgres.execute(f"DROP ROLE {name}")


@pytest.fixture
def theirs(owner: PostgresStore, role: str) -> Iterator[psycopg.Connection[Any]]:
    """A session of the worker's role on a trail of ten days, floors of 20 days above it."""
    now = int(time.time() * 1000)
    for day in range(OLD):
        at = now - day * DAY
        owner.database.run("SELECT tenure.add_partitions(%(at)s)", {"at": at})
        owner.database.run(
            """INSERT INTO tenure.history (id, type, status, queue, priority, org, lease_no,
                 attempts, max_attempts, crashes, timeout_ms, category, actor_type, actor_id,
                 scheduled_at, created_at, completed_at, payload)
               SELECT tenure.new_id(%(at)s), 'noop', 'completed', 'default', 5, 'default', 1,
                 1, 5, 0, 1000, 'default', 'system', 'x', %(at)s, %(at)s, %(at)s, '{}'""",
            {"at": at},
        )
        owner.database.run(
            """INSERT INTO tenure.events (at, kind, org, actor_type, actor_id)
               VALUES (%(at)s, 'queue.paused', 'default', 'system', 'x')""",
            {"at": at},
        )
    for name in ("keep_history", "keep_events"):
        owner.lay_down(name, str(20 * DAY), by="x")
    url = f"postgresql://{role}:geheim@{owner.database.url.partition('@')[2]}"
    with psycopg.connect(url, autocommit=True) as connection:
        yield connection


def trail(owner: PostgresStore) -> dict[str, int]:
    counted = "SELECT (SELECT count(*) FROM tenure.history), (SELECT count(*) FROM tenure.events)"
    ((history, events),) = owner.database.run(counted, {})
    return {"history": history, "events": events}


def test_no_function_of_the_owners_erases_it(
    owner: PostgresStore, theirs: psycopg.Connection[Any]
) -> None:
    tables = [row[0] for row in owner.database.run(
        "SELECT relname FROM pg_class WHERE relname ~ '^(history|events)_[0-9]+$'", {}
    )]  # fmt: skip
    tried = set()
    for name, types in theirs.execute(DOORS).fetchall():
        values = [
            [*tables[:3], tables[-1], "noop", None] if t == "text" else TRIES[t] for t in types
        ]
        for arguments in itertools.product(*values):
            given = sql.SQL(", ").join(sql.Placeholder() + sql.SQL(f"::{t}") for t in types)
            call = sql.SQL("SELECT * FROM tenure.{}({})").format(sql.Identifier(name), given)
            try:
                theirs.execute(call, arguments)
                tried.add(name)
            except psycopg.Error:
                continue  # refused is fine

    assert {"drop_day", "prune_history", "prune_events", "old_days"} <= tried
    assert trail(owner) == {"history": OLD, "events": OLD}


def test_nor_does_a_worker_that_asks_for_nothing_to_be_kept(
    owner: PostgresStore, theirs: psycopg.Connection[Any]
) -> None:
    store = PostgresStore(theirs.info.dsn + " password=geheim", notify=False)
    try:
        for now in (None, AGES_AHEAD):
            store.prune(Prune(completed=0, dead=0, events=0), now_ms=now)
        with pytest.raises(StoreError):
            store.lay_down("keep_history", None, by="x")
    finally:
        store.close()

    assert trail(owner) == {"history": OLD, "events": OLD}
    assert owner.settings() == {"keep_history": str(20 * DAY), "keep_events": str(20 * DAY)}


def test_the_role_has_no_right_to_change_it(
    owner: PostgresStore, theirs: psycopg.Connection[Any]
) -> None:
    today = time.strftime("%Y%m%d", time.gmtime())
    names = ("history", "events", "history_other", "events_other", f"history_{today}",
             f"events_{today}")  # fmt: skip
    for statement in (*SETTINGS, *(d.format(table=n) for d in DIRECT for n in names)):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            theirs.execute(statement.encode())

    assert trail(owner) == {"history": OLD, "events": OLD}


def test_jobs_given_by_sql_are_noted_too(
    owner: PostgresStore, theirs: psycopg.Connection[Any]
) -> None:
    owner.lay_down("audit", "all", by="x")
    job = '[{"type": "noop"}]'
    theirs.execute("SELECT * FROM tenure.enqueue(%s)", [job])
    theirs.execute("SELECT * FROM tenure.enqueue_jobs(%s, false, 'none', NULL, true)", [job])
    assert trail(owner)["events"] == OLD + 2
