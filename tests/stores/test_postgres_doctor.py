"""What the doctor finds on a real server, and that looking harms nobody."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

import servers
from servers import Databases, Pgbouncer, PostgresServer
from tenure.errors import ConfigError, StoreUnavailable
from tenure.store import Finding
from tenure.stores.postgres import PostgresStore, activity, doctor, grants, upkeep
from tenure.stores.postgres.database import Database
from tenure.stores.postgres.examining import Examination, settle_for_a_standby

SECRET = "ada@secret.example"


@contextmanager
def opened(url: str, **options: Any) -> Iterator[Database]:
    database = Database(url, **options)
    try:
        yield database
    finally:
        database.close()


def findings(url: str, check: str | None = None) -> list[Finding]:
    """What it says, or what it says under one heading. Nothing bad is said without a remedy."""
    with opened(url) as database:
        found = doctor.inspect(database)
    assert all(finding.remedy for finding in found if finding.level != "ok")
    return [finding for finding in found if check in (None, finding.check)]


def one(url: str, check: str) -> Finding:
    (found,) = findings(url, check)
    return found


def execute(url: str, statement: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(url, autocommit=True) as connection:
        cursor = connection.execute(statement)
        return cursor.fetchall() if cursor.description else []


@pytest.fixture
def url(make_database: Callable[..., str]) -> str:
    return make_database(migrated=True)


@pytest.fixture
def role(postgres: Databases, url: str) -> Iterator[str]:
    """The name of a role without any rights, which may log in."""
    name = f"tenure_{secrets.token_hex(4)}"
    postgres.execute(f"CREATE ROLE {name} LOGIN PASSWORD 'geheim'")
    yield name
    execute(url, f"DROP OWNED BY {name}")
    postgres.execute(f"DROP ROLE {name}")


def as_role(url: str, role: str) -> str:
    return f"postgresql://{role}:geheim@{url.partition('@')[2]}"


@pytest.fixture
def examination(url: str) -> Iterator[Examination]:
    with opened(url) as database:
        found = Examination(database)
        yield found
        found.close()


# -- the server -----------------------------------------------------------------------------------


def test_a_sound_database(url: str) -> None:
    found = findings(url)

    bad = [finding for finding in found if finding.level != "ok" and finding.check != "durability"]
    assert not bad
    assert {finding.check for finding in found} == {
        "server", "durability", "connections", "schema", "role", "sessions", "locks", "vacuum",
        "partitions", "events", "replication",
    }  # fmt: skip


def test_old_servers(examination: Examination) -> None:
    def said(major: int) -> tuple[str, str]:
        examination.server = examination.server._replace(major=major, version=f"{major}.1")
        (found,) = doctor.server(examination)
        return found.level, found.message

    assert said(12)[0] == "problem"
    assert "Tenure needs 13 or newer" in said(12)[1]
    assert said(13)[0] == "warning"
    assert "support for 13 ended on 2025-11-13" in said(13)[1]
    assert said(99)[0] == "ok"


def test_a_clock_that_is_off_and_a_narrow_encoding(examination: Examination) -> None:
    late = examination.server._replace(clock=time.time() - 60, encoding="SQL_ASCII")
    examination.server = late

    _server, encoding, clock = doctor.server(examination)

    assert "SQL_ASCII" in encoding.message
    assert "60 s behind this machine's" in clock.message


def test_settings_that_lose_jobs(url: str, postgres: Databases, examination: Examination) -> None:
    name = url.rpartition("/")[2]
    postgres.execute(f"ALTER DATABASE {name} SET synchronous_commit = off")

    lost = [each for each in findings(url, "durability") if "synchronous_commit" in each.message]
    assert [finding.level for finding in lost] == ["problem"]

    on = {"fsync": "on", "full_page_writes": "on", "synchronous_commit": "on"}
    examination.server = examination.server._replace(**on)
    assert [finding.level for finding in doctor.durability(examination)] == ["ok"]
    examination.server = examination.server._replace(fsync="off", full_page_writes="off")
    assert [f.level for f in doctor.durability(examination)] == ["problem", "warning"]


def test_few_connections_left(examination: Examination) -> None:
    (few,) = doctor.connections(examination)
    examination.server = examination.server._replace(max_connections=4, reserved=3)
    (many,) = doctor.connections(examination)

    assert (few.level, many.level) == ("ok", "warning")


def test_without_a_server_it_says_so_and_keeps_the_password() -> None:
    url = f"postgresql://ada:geheim@127.0.0.1:{servers.free_port()}/jobs"

    with pytest.raises(StoreUnavailable, match="cannot be reached") as refused, opened(url) as it:
        doctor.inspect(it)

    assert "geheim" not in str(refused.value)


def test_a_standby(monkeypatch: pytest.MonkeyPatch) -> None:
    with servers.require(lambda: PostgresServer(settings={"max_connections": 20})) as server:
        store = PostgresStore(server.url())
        store.migrate()
        store.close()
        server.stop()
        (server.data / "standby.signal").touch()

        def answers() -> bool:
            try:
                return bool(server.execute("SELECT pg_is_in_recovery()")[0][0])
            except psycopg.OperationalError:
                return False

        monkeypatch.setattr(server, "_is_ready", answers)
        server.start()
        with opened(server.url()) as database:
            with pytest.raises(StoreUnavailable, match="is read-only"):
                doctor.inspect(database)
            settle_for_a_standby(database)
            found = doctor.inspect(database)

    problems = [finding.message for finding in found if finding.check == "server"]
    assert "is a standby, so it is read-only" in problems[-1]
    assert not [finding for finding in found if "not known" in finding.message]


# -- a pooler -------------------------------------------------------------------------------------


def test_a_pooler_in_transaction_mode(url: str, pgbouncer: Pgbouncer) -> None:
    found = one(pgbouncer.url(url.rpartition("/")[2]), "pooler")

    assert (found.level, "in transaction mode" in found.message) == ("ok", True)
    assert "TENURE_LISTEN_URL" in found.message


def test_a_pooler_in_session_mode(url: str, postgres: Databases) -> None:
    with servers.require(lambda: Pgbouncer(postgres, settings={"pool_mode": "session"})) as bouncer:
        found = one(bouncer.url(url.rpartition("/")[2]), "pooler")

    assert "in session mode, as far as it can be told" in found.message


# -- schema and role ------------------------------------------------------------------------------


def test_no_tables(database: str) -> None:
    found = findings(database)

    assert found[-1] == Finding("schema", "problem", "no tables in schema tenure", "tenure migrate")
    assert not execute(database, "SELECT 1 FROM pg_namespace WHERE nspname = 'tenure'")


@pytest.mark.parametrize(
    ("version", "compatible_from", "level", "remedy"),
    [
        (0, 0, "problem", "tenure migrate"),
        (9, 1, "ok", None),
        (9, 9, "problem", "upgrade Tenure here"),
    ],
)
def test_other_versions(
    url: str, version: int, compatible_from: int, level: str, remedy: str | None
) -> None:
    execute(url, "DELETE FROM tenure.migrations WHERE version > 1")
    execute(
        url,
        f"UPDATE tenure.migrations SET version = {version}, compatible_from = {compatible_from}",
    )

    found = one(url, "schema")

    assert (found.level, found.remedy) == (level, remedy)


def test_what_a_role_lacks(url: str, role: str) -> None:
    stranger = findings(as_role(url, role))[-1]
    assert stranger.check == "schema"
    assert stranger.message == f"role {role} may not look into schema tenure"
    assert stranger.remedy == f"as the role that migrates: tenure migrate --grant {role}"

    with opened(url) as owner:
        grants.grant(owner, role)
    granted = one(as_role(url, role), "role")
    assert (granted.level, granted.message) == ("ok", f"{role} has what a worker needs")
    assert "it may also change and drop the tables" in one(url, "role").message

    execute(url, f"REVOKE INSERT, DELETE ON tenure.jobs FROM {role}")
    execute(url, f"REVOKE USAGE ON SEQUENCE tenure.events_seq FROM {role}")
    execute(url, f"REVOKE UPDATE ON SEQUENCE tenure.flushes FROM {role}")
    execute(url, f"REVOKE EXECUTE ON FUNCTION tenure.drop_day FROM {role}")
    less = one(as_role(url, role), "role")
    assert less.level == "problem"
    assert less.message.endswith(
        "lacks INSERT, DELETE on jobs; UPDATE on sequence flushes; USAGE on sequence events_seq; "
        "EXECUTE on drop_day()"
    )


def test_grants_are_for_roles_that_are_there(url: str, role: str) -> None:
    for name in ("", "public", "PUBLIC", "none", "a\0b", "x" * 64):
        with pytest.raises(ConfigError):
            grants.grant_sql("tenure", name)
    assert '"a""; DROP TABLE x; --"' in grants.grant_sql("tenure", 'a"; DROP TABLE x; --')
    with opened(url) as owner:
        with pytest.raises(ConfigError, match="has no role 'nobody_here'"):
            grants.require_role(owner, "nobody_here")
        grants.require_role(owner, role)
    with opened(as_role(url, role)) as stranger, pytest.raises(StoreUnavailable):
        grants.grant(stranger, role)


def test_not_everybody_may_drop_a_day(url: str, role: str) -> None:
    execute(url, f"GRANT USAGE ON SCHEMA tenure TO {role}")

    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        execute(as_role(url, role), "SELECT tenure.drop_day('history_20200101', 0, 0, '{}')")


# -- who stands in the way ------------------------------------------------------------------------


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activity, "OLD_SECONDS", 0.0)
    monkeypatch.setattr(activity, "WAIT_SECONDS", 0.0)


@pytest.mark.usefixtures("impatient")
def test_the_session_that_holds_back_vacuum_is_named(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with psycopg.connect(url, application_name="night report") as reader:
        reader.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        reader.execute(f"SELECT count(*) FROM tenure.jobs WHERE payload::text <> '{SECRET}'")
        pid = reader.info.backend_pid
        found = one(url, "sessions")
        monkeypatch.setattr(activity, "LONG_SECONDS", 0.0)
        later = one(url, "sessions")

    assert (found.level, later.level) == ("warning", "problem")
    assert found.message.startswith(f"pid {pid} 'night report' of ")
    assert "idle in transaction, has had a transaction open for 0 s and holds back vacuum: " in (
        found.message
    )
    assert found.message.endswith(": SELECT count(*) FROM tenure.jobs WHERE payload::text <> …")
    assert f"pg_terminate_backend({pid})" in str(found.remedy)
    assert SECRET not in str(found)


@pytest.mark.usefixtures("impatient")
def test_a_role_that_may_not_look_says_so(url: str, role: str) -> None:
    with opened(url) as owner:
        grants.grant(owner, role)
    with psycopg.connect(url) as reader:
        reader.execute("SELECT 1 FROM tenure.jobs")
        blind = one(as_role(url, role), "sessions")
        execute(url, f"GRANT pg_read_all_stats TO {role}")
        seeing = one(as_role(url, role), "sessions")
        pid = reader.info.backend_pid

    assert (blind.level, "is not known" in blind.message) == ("warning", True)
    assert f"GRANT pg_read_all_stats TO {role}" in str(blind.remedy)
    assert seeing.message.startswith(f"pid {pid} ")


@pytest.mark.usefixtures("impatient")
def test_a_prepared_transaction_outlives_its_session() -> None:
    settings = {"max_prepared_transactions": 2, "max_connections": 20}
    with servers.require(lambda: PostgresServer(settings=settings)) as server:
        store = PostgresStore(server.url())
        store.migrate()
        store.close()
        with psycopg.connect(server.url(), autocommit=True) as coordinator:
            coordinator.execute("BEGIN")
            coordinator.execute("LOCK TABLE tenure.jobs")
            coordinator.execute("PREPARE TRANSACTION 'it''s'")
        with waiting(server.url(), "SELECT 1 FROM tenure.jobs"):
            found = findings(server.url())
            execute(server.url(), "ROLLBACK PREPARED 'it''s'")

    (prepared,) = [each for each in found if "prepared for" in each.message]
    assert prepared.level == "problem"
    assert "ROLLBACK PREPARED 'it''s'" in str(prepared.remedy)
    (lock,) = [each for each in found if each.check == "locks"]
    assert "held by a prepared transaction" in lock.message


def test_a_slot_nobody_uses(examination: Examination, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows are made up: a real one takes a standby that fed back a snapshot and went away."""
    asked = examination.ask
    rows = [("slot", "old", False, 900_000), ("standby", "reports", True, 200_000)]
    monkeypatch.setattr(
        examination, "ask", lambda name, **how: rows if name == "standbys" else asked(name, **how)
    )

    slot, standby = activity.sessions(examination)

    assert (slot.level, standby.level) == ("problem", "warning")
    assert "pg_drop_replication_slot('old')" in str(slot.remedy)
    assert "hot_standby_feedback" in str(standby.remedy)


@contextmanager
def waiting(url: str, statement: str) -> Iterator[None]:
    """Somebody who waits for a lock while the block runs; the block must set them free."""
    with psycopg.connect(url, autocommit=True, application_name="waiter") as waiter:
        thread = threading.Thread(target=waiter.execute, args=(statement,))
        thread.start()
        deadline = time.monotonic() + 10
        blocked = f"SELECT 1 FROM pg_locks WHERE pid = {waiter.info.backend_pid} AND NOT granted"
        while not execute(url, blocked):
            assert time.monotonic() < deadline
        try:
            yield
        finally:
            thread.join(20)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("hold", "want"),
    [
        (f"LOCK TABLE tenure.queues /* {SECRET} */", "SELECT * FROM tenure.queues"),
        (
            f"UPDATE tenure.queues SET pause_reason = '{SECRET}'",
            "UPDATE tenure.queues SET created_at = 0",
        ),
    ],
    ids=["table", "row"],
)
def test_who_holds_a_lock_on_our_tables_is_named(url: str, hold: str, want: str) -> None:
    execute(url, "INSERT INTO tenure.queues (name, created_at) VALUES ('default', 0)")
    with psycopg.connect(url, application_name="holder") as holder:
        holder.execute(hold.encode())
        pid = holder.info.backend_pid
        with waiting(url, want):
            found = one(url, "locks")
            holder.rollback()

    assert found.message.startswith("1 session waits for a lock on our tables, the longest for 0 s")
    assert f"held by pid {pid} 'holder' of " in found.message
    assert f"pg_terminate_backend({pid})" in str(found.remedy)
    assert SECRET not in str(found)


def test_a_locked_table_hides_one_answer_and_holds_up_none(url: str) -> None:
    with psycopg.connect(url) as holder:
        holder.execute("LOCK TABLE tenure.history_other")
        begun = time.monotonic()
        found = findings(url)

    assert time.monotonic() - begun < 8
    (unknown,) = [finding for finding in found if finding.message.startswith("not known: ")]
    assert (unknown.check, unknown.level) == ("partitions", "warning")


@pytest.mark.parametrize(
    ("query", "shown"),
    [
        ("SELECT 1", "SELECT …"),
        ("COMMIT", "COMMIT"),
        (f"SELECT * FROM t\n WHERE x = '{SECRET}'", "SELECT * FROM t WHERE x = …"),
        ("UPDATE t2 SET a = $1 WHERE id = $2", "UPDATE t2 SET a = $1 WHERE id = $2"),
        (f"SELECT $tag${SECRET}$tag$", "SELECT …"),
        (f"SELECT $${SECRET}$$", "SELECT …"),
        ("SELECT a WHERE b=-7", "SELECT a WHERE b= …"),
        ("SELECT a WHERE b=.5", "SELECT a WHERE b= …"),
        (f"SELECT E'\\'{SECRET}'", "SELECT E …"),
        (f"/* {SECRET} */ -- {SECRET}\n  SELECT a", "SELECT a"),
        (f"SELECT a /* {SECRET} */", "SELECT a …"),
        (f"SELECT a -- {SECRET}", "SELECT a …"),
        (f"-- {SECRET}", ""),
        (f"/* cut off {SECRET}", " …"),
        ("SET app.token TO geheim", "SET …"),
        ("ALTER ROLE a PASSWORD 'geheim'", "ALTER ROLE a PASSWORD …"),
        ("SELECT " + "a, " * 100, ("SELECT " + "a, " * 100)[:80].rstrip() + " …"),
    ],
)
def test_of_a_statement_only_what_comes_before_its_first_value_is_shown(
    query: str, shown: str
) -> None:
    assert activity.shortened(query) == shown


# -- upkeep ---------------------------------------------------------------------------------------


def test_autovacuum_switched_off(url: str, examination: Examination) -> None:
    execute(url, "ALTER TABLE tenure.jobs SET (autovacuum_enabled = off)")

    found = one(url, "vacuum")

    assert (found.level, found.message) == ("problem", "autovacuum is switched off for jobs")
    examination.server = examination.server._replace(autovacuum="off", track_counts="off")
    assert [finding.level for finding in upkeep.vacuum(examination)] == ["problem"] * 3


def test_many_dead_rows(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "DEAD_TUPLES", 10)
    execute(url, "ALTER TABLE tenure.queues SET (autovacuum_vacuum_threshold = 1000000)")
    execute(url, "INSERT INTO tenure.queues SELECT 'q' || n, 0 FROM generate_series(1, 50) AS s(n)")
    execute(url, "DELETE FROM tenure.queues")
    deadline = time.monotonic() + 10
    while (found := one(url, "vacuum")).level == "ok":  # statistics arrive when sessions end
        assert time.monotonic() < deadline

    assert found.message == "queues has 50 dead rows beside 0 live ones, never vacuumed"
    assert "VACUUM tenure.queues" in str(found.remedy)

    execute(url, "VACUUM tenure.queues")
    assert one(url, "vacuum").level == "ok"


def test_days_without_a_partition(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    today = execute(url, "SELECT to_char(clock_timestamp() AT TIME ZONE 'UTC', 'YYYYMMDD')")[0][0]
    execute(url, f"DROP TABLE tenure.events_{today}")
    execute(
        url,
        "INSERT INTO tenure.events (at, kind, org, actor_type, actor_id) "
        "VALUES (tenure.clock(), 'x', 'default', 'a', 'b')",
    )

    found = one(url, "partitions")
    assert (found.level, found.message) == ("warning", f"not there yet: events_{today}")

    execute(url, "SELECT tenure.add_partitions(NULL)")
    assert one(url, "partitions").message.endswith("rows outside: 0 finished jobs, 0 events")
    execute(url, "INSERT INTO tenure.events (at, kind, org, actor_type, actor_id) "
                 "VALUES (1, 'x', 'default', 'a', 'b')")  # fmt: skip
    monkeypatch.setattr(upkeep, "OTHER_ROWS", 1)
    assert "outside the partitions by day: events_other" in one(url, "partitions").message


@pytest.mark.parametrize("zone", ["UTC", "America/Los_Angeles", "Pacific/Kiritimati"])
def test_days_are_those_of_utc_for_everybody(url: str, zone: str) -> None:
    with psycopg.connect(url, autocommit=True) as far_away:
        far_away.execute(f"SET timezone = '{zone}'")
        made = far_away.execute("SELECT tenure.add_partitions(NULL)").fetchone()

    assert made == (0,)
    assert one(url, "partitions").level == "ok"


# -- looking changes nothing ----------------------------------------------------------------------


def test_every_question_is_read_only(examination: Examination) -> None:
    examination._statements["version"] = "CREATE TABLE tenure.mine (x integer)"

    with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
        examination.ask("version")


def test_another_schema(database: str) -> None:
    store = PostgresStore(database, schema="other_jobs")
    store.migrate()
    found = store.inspect()
    store.close()

    bad = [finding for finding in found if finding.level != "ok" and finding.check != "durability"]
    assert not bad
    assert "partitions" in {finding.check for finding in found}
