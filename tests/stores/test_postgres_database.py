"""One PostgreSQL database: time-outs, repetition, bounds, loans, migrations."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

import servers
from proxy import Proxy
from tenure import errors, sql
from tenure.ids import new_ids, to_uuid
from tenure.stores.postgres import explaining, lending, schema
from tenure.stores.postgres.connecting import CannotConnect
from tenure.stores.postgres.database import Database, to_uuid_text, to_uuids

FAST = 3.0  # seconds a call may take here


@pytest.fixture
def opened(database: str) -> Iterator[Callable[..., Database]]:
    """`opened(timeout=1)`: a Database on this test's own database, closed afterwards."""
    made: list[Database] = []

    def make(url: str = database, **options: Any) -> Database:
        made.append(Database(url, **{"timeout": FAST} | options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def db(opened: Callable[..., Database]) -> Database:
    return opened()


def backend(db: Database, **how: Any) -> int:
    return int(db.run("SELECT pg_backend_pid()", **how)[0][0])


def others(db: Database, name: str = "tenure") -> int:
    return int(
        db.run(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
            "AND application_name = %(name)s AND pid <> pg_backend_pid()",
            {"name": name},
        )[0][0]
    )


class Locked:
    """A table whose lock somebody else holds for the length of a block."""

    def __init__(self, url: str) -> None:
        self.connection = psycopg.connect(url)

    def __enter__(self) -> Locked:
        self.connection.execute("CREATE TABLE IF NOT EXISTS held (n int)")
        self.connection.commit()
        self.connection.execute("LOCK TABLE held")
        return self

    def __exit__(self, *exc: object) -> None:
        self.connection.close()


# -- values ---------------------------------------------------------------------------------------


def test_ids_travel_as_uuids_and_are_ulids_here(db: Database) -> None:
    ids = [*new_ids(50), "00000000000000000000000000", "7ZZZZZZZZZZZZZZZZZZZZZZZZZ"]

    found = db.run("SELECT unnest(%(ids)s::uuid[])", {"ids": to_uuids(ids)})
    (array,) = db.run("SELECT %(ids)s::uuid[]", {"ids": to_uuids(ids)})[0]
    with db.connection() as connection:
        texts = connection.execute("SELECT unnest(%s::uuid[])", [to_uuids(ids)]).fetchall()

    assert [row[0] for row in found] == ids == array == [row[0] for row in texts]
    assert to_uuid_text(ids[0]) == to_uuid(ids[0]).hex
    assert to_uuids([]) == "{}"


def test_json_stays_the_text_it_was(db: Database) -> None:
    text = '{"b": 1.10,  "a": "ü\\u0041"}'

    plain, binary, nothing = db.run("SELECT %(t)s::json, %(t)s::jsonb, NULL::json", {"t": text})[0]

    assert plain == text
    assert isinstance(binary, str)
    assert json.loads(binary) == json.loads(text)
    assert nothing is None


def test_a_statement_without_rows_gives_none(db: Database) -> None:
    assert db.run("CREATE TABLE t (n int)") == []
    assert db.run("INSERT INTO t VALUES (1)") == []
    assert db.run("SELECT n FROM t WHERE n > 5") == []


# -- what is tried again --------------------------------------------------------------------------


def kill_soon(postgres: servers.Databases, pid: int) -> threading.Timer:
    timer = threading.Timer(0.2, lambda: postgres.execute("SELECT pg_terminate_backend(%s)", [pid]))
    timer.start()
    return timer


SLEEP_ONCE = """
  SELECT pg_sleep(CASE WHEN pg_backend_pid() = %(pid)s THEN 30 ELSE 0 END), pg_backend_pid()
"""


def test_a_killed_backend_is_replaced_within_the_call(
    db: Database, postgres: servers.Databases, caplog: pytest.LogCaptureFixture
) -> None:
    pid = backend(db)
    timer = kill_soon(postgres, pid)

    with caplog.at_level(logging.WARNING, "tenure.store"):
        other = db.run(SLEEP_ONCE, {"pid": pid})[0][1]
    timer.join()

    assert other != pid
    assert db.retries == 1
    assert db.reconnects == 1
    assert len(caplog.records) == 2  # it was lost, it is back


def test_what_may_have_happened_is_not_repeated_unless_twice_is_once(
    db: Database, postgres: servers.Databases
) -> None:
    pid = backend(db)
    timer = kill_soon(postgres, pid)

    with pytest.raises(errors.StoreUnavailable):
        db.run(SLEEP_ONCE, {"pid": pid}, repeatable=False)
    timer.join()

    assert db.retries == 0
    assert backend(db, repeatable=False) != pid


def test_connections_that_died_while_idle_cost_no_error(
    db: Database, postgres: servers.Databases
) -> None:
    pid = backend(db)
    postgres.execute("SELECT pg_terminate_backend(%s, 5000)", [pid])

    assert backend(db, repeatable=False) != pid
    assert db.retries == 0


def test_a_deadlock_is_tried_again_even_when_not_repeatable(db: Database) -> None:
    db.run("CREATE TABLE t (id int PRIMARY KEY, n int)")
    db.run("INSERT INTO t VALUES (1, 0), (2, 0)")
    db.run("CREATE SEQUENCE turns")
    # The first run of it fails as a deadlock's victim does, the second does not.
    db.run(
        """
        CREATE FUNCTION once() RETURNS int LANGUAGE plpgsql AS $$ BEGIN
          IF nextval('turns') = 1 THEN RAISE EXCEPTION 'no' USING ERRCODE = '40P01'; END IF;
          RETURN 7;
        END $$
        """
    )

    assert db.run("SELECT once()", repeatable=False) == [(7,)]
    assert db.retries == 1


def test_a_lost_reply(db: Database, opened: Callable[..., Database], proxy: Proxy) -> None:
    db.run("CREATE TABLE t (n int)")
    through = opened(proxy.url(db.url))
    through.run("SELECT 1")
    proxy.lose_reply(b"INSERT INTO t")

    with pytest.raises(errors.StoreUnavailable, match="lost"):
        through.run("INSERT INTO t VALUES (1)", repeatable=False)

    assert db.run("SELECT count(*) FROM t") == [(1,)]


# -- time-outs ------------------------------------------------------------------------------------


@pytest.mark.timed
def test_a_held_lock_ends_in_a_cancelled_statement(db: Database, database: str) -> None:
    with Locked(database):
        began = time.monotonic()
        with pytest.raises(errors.StoreBusy, match="nothing was changed"):
            db.run("INSERT INTO held VALUES (1)", timeout=0.5)
        took = time.monotonic() - began

    assert 0.4 < took < 1.5
    assert db.run("SELECT count(*) FROM held") == [(0,)]


def test_a_stopped_server_ends_in_a_time_out(own_postgres: servers.PostgresServer) -> None:
    db = Database(own_postgres.url(), timeout=1.0)
    db.run("SELECT 1")
    own_postgres.pause()
    try:
        began = time.monotonic()
        with pytest.raises(errors.StoreUnavailable, match="did not answer within 1 s"):
            db.run("SELECT 1")
        with pytest.raises(errors.StoreUnavailable, match="cannot be reached"):
            db.run("SELECT 1")
        took = time.monotonic() - began
    finally:
        own_postgres.resume()

    assert took < 6.0
    assert db.run("SELECT 1") == [(1,)]
    db.close()


def test_a_black_hole_ends_in_a_time_out(
    opened: Callable[..., Database], proxy: Proxy, database: str
) -> None:
    through = opened(proxy.url(database), timeout=0.5)
    through.run("SELECT 1")
    proxy.black_hole()

    began = time.monotonic()
    with pytest.raises(errors.StoreUnavailable):
        through.run("SELECT 1")
    took = time.monotonic() - began
    proxy.heal(closed=True)

    assert took < 3.5
    assert through.run("SELECT 1") == [(1,)]


def test_a_server_that_is_away_is_waited_for(own_postgres: servers.PostgresServer) -> None:
    db = Database(own_postgres.url(), timeout=10.0)
    db.run("SELECT 1")
    own_postgres.stop()
    timer = threading.Timer(0.5, own_postgres.start)
    timer.start()

    assert db.run("SELECT 1", repeatable=False) == [(1,)]
    timer.join()
    assert db.retries > 1

    own_postgres.stop()
    with pytest.raises(errors.StoreUnavailable, match=r"cannot be reached, tried for 0\.3 s"):
        db.run("SELECT 1", timeout=0.3)
    db.close()


def test_times_are_said_as_people_do() -> None:
    refused = explaining.explain(CannotConnect("refused"), "db/shop", "tenure", 3.9999873)
    assert "tried for 4 s: refused" in str(refused)


# -- servers that say no --------------------------------------------------------------------------


def test_a_server_that_became_read_only(own_postgres: servers.PostgresServer) -> None:
    db = Database(own_postgres.url(), timeout=1.0)
    db.run("CREATE TABLE t (n int)")
    with ThreadPoolExecutor(3) as threads:  # three idle connections
        list(threads.map(lambda _: db.run("SELECT pg_sleep(0.05)"), range(3)))
    with psycopg.connect(own_postgres.url(), autocommit=True) as keeper:
        keeper.execute("ALTER SYSTEM SET default_transaction_read_only = on")
        keeper.execute("SELECT pg_reload_conf()")
        deadline = time.monotonic() + 10  # until its processes have read the file again
        with pytest.raises(errors.StoreUnavailable, match="read-only"):
            while time.monotonic() < deadline:
                db.run("INSERT INTO t VALUES (1)")
        assert len(db._pool) == 0

        keeper.execute("SET default_transaction_read_only = off")
        keeper.execute("ALTER SYSTEM RESET default_transaction_read_only")
        keeper.execute("SELECT pg_reload_conf()")
    assert db.run("INSERT INTO t VALUES (1) RETURNING n", timeout=5.0) == [(1,)]
    db.close()


def test_too_many_connections_are_waited_for() -> None:
    server = servers.require(lambda: servers.PostgresServer(max_connections=10))
    with server:
        url = server.url().replace("tenure@", "plain@")
        server.execute("CREATE ROLE plain LOGIN")
        held = []
        with pytest.raises(psycopg.OperationalError):
            while True:
                held.append(psycopg.connect(url))
        db = Database(url, timeout=0.5)

        with pytest.raises(errors.StoreBusy, match="no connection left"):
            db.run("SELECT 1")
        timer = threading.Timer(0.3, held.pop().close)
        timer.start()
        assert db.run("SELECT 1", timeout=5.0) == [(1,)]

        timer.join()
        db.close()
        for connection in held:
            connection.close()


@pytest.mark.timed
def test_refusals_are_not_tried_again(db: Database, database: str) -> None:
    began = time.monotonic()
    absent = Database(f"{database}_absent", timeout=5.0)
    with pytest.raises(errors.StoreUnavailable, match="no such database"):
        absent.run("SELECT 1")
    stranger = Database(database.replace("tenure@", "stranger:geheim@"), timeout=5.0)
    with pytest.raises(errors.StoreUnavailable, match="refuses this user") as raised:
        stranger.run("SELECT 1")
    assert time.monotonic() - began < 1.0

    assert "geheim" not in str(raised.value) + repr(stranger)
    with pytest.raises(errors.ConfigError, match="cannot be read"):
        Database("postgresql://user:geh@im@host:port/x")
    absent.close()
    stranger.close()


def test_errors_say_what_to_do_and_show_no_values(db: Database) -> None:
    db.run("CREATE TABLE t (name text PRIMARY KEY)")
    db.run("INSERT INTO t VALUES ('secret')")

    with pytest.raises(errors.StoreError, match="23505") as raised:
        db.run("INSERT INTO t VALUES (%(v)s)", {"v": "secret"})
    assert "secret" not in str(raised.value)
    assert raised.value.__cause__ is None
    with pytest.raises(errors.StoreError, match="22P02") as raised:
        db.run("SELECT %(v)s::int", {"v": "secret"})
    assert "secret" not in str(raised.value)
    for statement in ("SELECT 1 FROM absent.t", "SELECT 1 FROM absent", "SELECT absent()"):
        with pytest.raises(errors.SchemaError, match="tenure migrate"):
            db.run(statement)
    for code, kind in (("TN001", errors.JobError), ("TN002", errors.SchemaError)):
        with pytest.raises(kind, match=r"^for the user$"):
            db.run(f"DO $$ BEGIN RAISE 'for the user' USING ERRCODE = '{code}'; END $$")
    db.run("CREATE ROLE nobody_here_" + db.place.rpartition("/")[2])
    with pytest.raises(
        errors.StoreUnavailable, match=r"permission denied for table t.*--grant ROLE"
    ):
        db.run(
            "DO $$ BEGIN SET LOCAL ROLE nobody_here_"
            + db.place.rpartition("/")[2]
            + "; PERFORM * FROM t; END $$"
        )
    db.run("DROP ROLE nobody_here_" + db.place.rpartition("/")[2])


# -- connections ----------------------------------------------------------------------------------


@pytest.mark.timed
def test_connections_are_bounded_and_one_is_reserved(opened: Callable[..., Database]) -> None:
    db, spectator = opened(most=2), opened()
    with ThreadPoolExecutor(6) as threads:
        busy = [threads.submit(db.run, "SELECT pg_sleep(0.2)") for _ in range(6)]
        time.sleep(0.1)
        seen = others(spectator)
        began = time.monotonic()
        db.run("SELECT 1", reserved=True)
        reserved_took = time.monotonic() - began
        with pytest.raises(errors.StoreBusy, match="all 2 connections"):
            db.run("SELECT 1", timeout=0.05)
        for each in busy:
            each.result()

    assert seen == 2
    assert reserved_took < 0.15
    assert len(db._pool) == 2


def test_threads_share_without_loss(opened: Callable[..., Database]) -> None:
    db = opened(most=3)

    def many(_: int) -> set[int]:
        return {backend(db) for _ in range(50)}

    with ThreadPoolExecutor(12) as threads:
        pids = set().union(*threads.map(many, range(12)))

    assert 1 <= len(pids) <= 3
    assert len(db._pool._idle) == len(db._pool) <= 3


def test_closed_and_used_again(db: Database, opened: Callable[..., Database]) -> None:
    spectator = opened()
    first = backend(db)
    db.close()
    db.close()
    deadline = time.monotonic() + 5
    while others(spectator) and time.monotonic() < deadline:
        time.sleep(0.01)

    assert others(spectator) == 0
    assert backend(db) != first


def test_a_borrowed_connection_left_in_a_transaction_is_dropped(db: Database) -> None:
    with pytest.raises(RuntimeError), db.connection() as connection:
        connection.execute("BEGIN")
        raise RuntimeError
    with pytest.raises(errors.SchemaError), db.connection() as connection:
        connection.execute("SELECT 1 FROM absent")

    assert len(db._pool) == 1
    with db.connection() as connection, connection.cursor() as cursor:
        connection.execute("CREATE TABLE t (n int)")
        with cursor.copy("COPY t FROM STDIN") as copy:
            copy.write_row([1])
    assert db.run("SELECT n FROM t") == [(1,)]


def test_a_fork_leaves_the_parents_connections_alone(db: Database) -> None:
    pid, reserved = backend(db), backend(db, reserved=True)
    with db.lend(5.0) as connection:
        connection.execute("SELECT 1")

    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if backend(db) not in (pid, reserved) else 2
            db.close()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    assert backend(db) == pid
    assert backend(db, reserved=True) == reserved
    with db.lend(5.0) as connection:
        connection.execute("SELECT 1")


def test_a_pooler_is_noticed_and_nothing_is_prepared(
    opened: Callable[..., Database], pgbouncer: servers.Pgbouncer, database: str
) -> None:
    direct = opened()
    through = opened(pgbouncer.url(database.rpartition("/")[2]))
    for db in (direct, through):
        for _ in range(12):
            db.run("SELECT %(n)s::int", {"n": 1})
    with through.lend(5.0) as connection:
        connection.execute("SELECT %s::int", [1])

    assert (direct.pooled, through.pooled) == (False, True)
    assert direct.run("SELECT count(*) > 0 FROM pg_prepared_statements") == [(True,)]
    with through.connection() as connection:
        assert connection.prepare_threshold is None


def test_tables_changed_under_a_prepared_statement(db: Database) -> None:
    db.run("CREATE TABLE t (n int)")
    for _ in range(8):
        db.run("SELECT * FROM t", repeatable=False)
    psycopg.connect(db.url, autocommit=True).execute(
        "ALTER TABLE t ADD COLUMN m text"
    ).connection.close()

    assert db.run("SELECT * FROM t", repeatable=False) == []


# -- loans ----------------------------------------------------------------------------------------


@pytest.fixture
def lender(db: Database) -> Database:
    db.run("CREATE TABLE t (n int)")
    return db


def count(db: Database) -> int:
    return int(db.run("SELECT count(*) FROM t")[0][0])


def test_a_loan_commits_or_rolls_back_with_its_block(lender: Database) -> None:
    with lender.lend(5.0) as connection:
        connection.execute("INSERT INTO t VALUES (1)")
        first = connection.info.backend_pid
        value = connection.execute("SELECT gen_random_uuid(), '{}'::json").fetchone()
    assert value is not None
    assert isinstance(value[0], uuid.UUID)
    assert value[1] == {}
    with pytest.raises(RuntimeError), lender.lend(5.0) as connection:
        connection.execute("INSERT INTO t VALUES (2)")
        assert connection.info.backend_pid == first  # no new connection for every loan
        raise RuntimeError

    assert count(lender) == 1


def test_a_loan_leaves_nothing_in_the_session_for_the_next(lender: Database) -> None:
    with lender.lend(5.0) as kept:
        kept.row_factory = psycopg.rows.dict_row
        kept.execute("SET work_mem = '1MB'")
        kept.execute("CREATE TEMP TABLE mine (n int)")
    with lender.lend(5.0) as connection:
        assert connection.execute("SHOW work_mem").fetchone() != ("1MB",)
        assert connection.execute("SELECT to_regclass('mine')").fetchone() == (None,)
        with pytest.raises(psycopg.OperationalError, match="closed"):
            kept.execute("SELECT 1")


@pytest.mark.parametrize(
    "end",
    [
        lambda connection: connection.commit(),
        lambda connection: connection.rollback(),
        lambda connection: connection.close(),
        lambda connection: connection.__exit__(None, None, None),
        lambda connection: connection.execute("COMMIT"),
        lambda connection: connection.execute("ROLLBACK"),
    ],
    ids=["commit", "rollback", "close", "with", "COMMIT", "ROLLBACK"],
)
def test_a_loan_cannot_be_ended_by_the_borrower(
    lender: Database, end: Callable[[Any], object]
) -> None:
    with pytest.raises(errors.StoreError, match="leave that to the end"):  # noqa: SIM117
        with lender.lend(5.0) as connection:
            connection.execute("SELECT 1")
            end(connection)

    with lender.lend(5.0) as connection, connection.transaction():
        connection.execute("INSERT INTO t VALUES (1)")
    assert count(lender) == 1


def test_an_error_that_was_swallowed_does_not_look_like_a_commit(lender: Database) -> None:
    with pytest.raises(errors.StoreError, match="nothing was committed"):  # noqa: SIM117
        with lender.lend(5.0) as connection:
            connection.execute("INSERT INTO t VALUES (1)")
            with pytest.raises(psycopg.errors.DivisionByZero):
                connection.execute("SELECT 1/0")
    with pytest.raises(psycopg.errors.DivisionByZero), lender.lend(5.0) as connection:
        connection.execute("SELECT 1/0")  # the handler's own errors stay what they are

    assert count(lender) == 0


@pytest.mark.timed
@pytest.mark.parametrize("how", ["sleeps", "computes", "waits", "goes on"])
def test_a_loan_has_a_time_limit(lender: Database, how: str) -> None:
    began = time.monotonic()
    with pytest.raises(errors.StoreBusy, match=r"more than 0\.3 s and was rolled back"):  # noqa: SIM117
        with lender.lend(0.3) as connection:
            connection.execute("INSERT INTO t VALUES (1)")
            if how == "computes":
                connection.execute("SELECT pg_sleep(5)")
            time.sleep(0.5 if how != "goes on" else 0.0)
            if how == "waits":
                connection.execute("SELECT 1")
            while how == "goes on":
                connection.execute("SELECT 1")

    assert time.monotonic() - began < 1.5
    assert count(lender) == 0


def test_the_server_ends_a_loan_whose_borrower_hangs(lender: Database) -> None:
    with pytest.raises(errors.StoreBusy), lender.lend(0.2) as connection:
        connection.execute("LOCK TABLE t")
        time.sleep(0.4)
        assert count(lender) == 0  # the lock is gone before the block is


def test_a_lost_connection_in_a_loan(
    lender: Database, opened: Callable[..., Database], proxy: Proxy
) -> None:
    through = opened(proxy.url(lender.url))
    with pytest.raises(errors.StoreUnavailable), through.lend(5.0) as connection:
        connection.execute("INSERT INTO t VALUES (1)")
        proxy.cut()
        connection.execute("SELECT 1")
    proxy.lose_reply(b"COMMIT")
    with pytest.raises(lending.CommitUnknown), through.lend(5.0) as connection:
        connection.execute("INSERT INTO t VALUES (2)")

    assert lender.run("SELECT n FROM t") == [(2,)]


async def test_loans_to_async_handlers(lender: Database) -> None:
    async with lender.alend(5.0) as connection:
        await connection.execute("INSERT INTO t VALUES (1)")
    with pytest.raises(RuntimeError):
        async with lender.alend(5.0) as connection:
            await connection.execute("INSERT INTO t VALUES (2)")
            raise RuntimeError
    with pytest.raises(errors.StoreError, match="leave that to the end"):
        async with lender.alend(5.0) as connection:
            await connection.execute("INSERT INTO t VALUES (3)")
            await connection.commit()
    for pause in ("SELECT pg_sleep(2)", "SELECT 1"):
        with pytest.raises(errors.StoreBusy, match="rolled back"):
            async with lender.alend(0.2) as connection:
                await connection.execute("INSERT INTO t VALUES (4)")
                await connection.execute(pause)
                await asyncio.sleep(0.3)

    assert await asyncio.to_thread(count, lender) == 1


# -- migrations -----------------------------------------------------------------------------------


def test_nothing_is_created_silently(db: Database) -> None:
    with pytest.raises(errors.SchemaError, match="tenure migrate"):
        db.check()
    assert schema.version(db) == 0
    assert db.run("SELECT to_regnamespace('tenure')") == [(None,)]

    assert schema.migrate(db) == ["0001_initial", "0002_promises"]
    assert schema.migrate(db) == []
    assert schema.version(db) == schema.SCHEMA_VERSION
    db.check()


def test_four_processes_migrate_at_once(db: Database) -> None:
    program = """
import sys
from tenure.stores.postgres.database import Database
from tenure.stores.postgres import schema
db = Database(sys.argv[1])
sys.stdin.readline()
print(len(schema.migrate(db)))
"""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", program, db.url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for _ in range(4)
    ]
    for process in started:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    applied = [int(process.communicate(timeout=60)[0]) for process in started]

    assert sum(applied) == schema.SCHEMA_VERSION  # each migration is its own transaction
    assert db.run("SELECT count(*) FROM tenure.migrations") == [(schema.SCHEMA_VERSION,)]


def stamp(db: Database, version: int, compatible_from: int) -> None:
    db.run(
        "INSERT INTO tenure.migrations (version, name, compatible_from) "
        "VALUES (%(version)s, 'later', %(from)s)",
        {"version": version, "from": compatible_from},
    )


def test_older_programs_run_on_with_the_next_schema_that_lets_them(db: Database) -> None:
    schema.migrate(db)
    stamp(db, schema.SCHEMA_VERSION + 1, schema.SCHEMA_VERSION)
    db.check()
    assert schema.migrate(db) == []

    stamp(db, schema.SCHEMA_VERSION + 2, schema.SCHEMA_VERSION + 1)
    for call in (db.check, lambda: schema.migrate(db)):
        with pytest.raises(errors.SchemaError, match="Upgrade"):
            call()


def test_a_killed_migration_leaves_nothing_and_the_next_goes_on(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = sql.migrations("postgres")
    broken = sql.Migration(3, "broken", "CREATE TABLE tenure.half (n int); SELECT 1/0;")
    monkeypatch.setattr(sql, "migrations", lambda _: [*real, broken])
    with pytest.raises(errors.StoreError):
        schema.migrate(db)
    assert schema.version(db) == 2
    assert db.run("SELECT to_regclass('tenure.half')") == [(None,)]

    whole = sql.Migration(3, "whole", "-- compatible from: 2\nCREATE TABLE tenure.half (n int);")
    monkeypatch.setattr(sql, "migrations", lambda _: [*real, whole])
    assert schema.migrate(db) == ["0003_whole"]
    assert db.run("SELECT version, compatible_from FROM tenure.migrations ORDER BY 1") == [
        (1, 1),
        (2, 1),
        (3, 2),
    ]
    db.check()


def objects(db: Database, name: str) -> list[Any]:
    """What the catalog knows of a schema, whatever its name."""
    found = db.run(
        """
        SELECT 'table', c.relname::text, a.attname::text, format_type(a.atttypid, a.atttypmod)
          FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid
         WHERE c.relnamespace = to_regnamespace(%(name)s) AND a.attnum > 0
        UNION ALL
        SELECT 'function', p.proname::text, pg_get_function_arguments(p.oid), md5(p.prosrc)
          FROM pg_proc p WHERE p.pronamespace = to_regnamespace(%(name)s)
        """,
        {"name": name},
    )
    plain = name.strip('"')
    return sorted(
        tuple(text.replace(f'"{plain}".', "").replace(f"{plain}.", "") for text in row[:3])
        for row in found
    )


def test_another_schema_holds_the_same(opened: Callable[..., Database]) -> None:
    db, other = opened(), opened(schema="user")  # a reserved word
    schema.migrate(db)
    schema.migrate(other)

    assert len(objects(db, "tenure")) > 100
    assert objects(db, "tenure") == objects(other, '"user"')
    bodies = other.run(
        "SELECT proname::text FROM pg_proc WHERE pronamespace = to_regnamespace('\"user\"') "
        "AND prosrc LIKE '%%tenure.%%' AND prosrc NOT LIKE '%%hashtext%%'",
        {},
    )
    assert bodies == []


def test_the_printed_scripts_do_the_same(db: Database) -> None:
    db.run("SELECT 1")
    with psycopg.connect(db.url, autocommit=True) as connection:
        connection.execute(schema.forward_sql("tenure").encode())
        db.check()
        assert schema.migrate(db) == []
        if not sql.reversals("postgres"):
            pytest.skip("there is no 0001_initial.down.sql yet")
        connection.execute(schema.reverse_sql("tenure").encode())
    assert objects(db, "tenure") == []
    assert schema.migrate(db) == ["0001_initial", "0002_promises"]
