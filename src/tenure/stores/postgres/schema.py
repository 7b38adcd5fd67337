"""Tenure's schema in a PostgreSQL database: applied when told to, never by itself.

Each migration is one transaction with its stamp, under an advisory lock of that transaction, so
several may run it at once, a killed run goes on where it stopped, and it works through a pooler.
With the last one come the functions of this version, all anew, and what roles need to use them.
A migration's stamp says which is the oldest program that still works with it (a line
`-- compatible from: 3` in its file; without one, only its own version): older workers run on
while a fleet is upgraded. What would take long is done before, while everybody works: its
`.online.sql`, mostly indexes.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any
from zlib import crc32

import psycopg

from tenure import sql
from tenure.errors import SchemaError

if TYPE_CHECKING:
    from tenure.stores.postgres.database import Database

SCHEMA_VERSION = 2
MIGRATE_SECONDS = 600.0
# A migration waits this long for a table's lock and then lets those pass that queue behind it, for
# longer each time.
LOCK_SECONDS = 0.3
PAUSE_SECONDS, LONGEST_PAUSE = 0.3, 10.0
# Somebody is in the way, or does the same this moment.
AGAIN = (
    psycopg.errors.LockNotAvailable,
    psycopg.errors.DeadlockDetected,
    psycopg.errors.DuplicateTable,
    psycopg.errors.UniqueViolation,
    psycopg.errors.UndefinedTable,
)
LARGE = 10_000  # rows; what has fewer is changed faster than prepared


def migrate(database: Database) -> list[str]:
    """Bring the schema up to date; the names of what ran."""
    deadline = time.monotonic() + MIGRATE_SECONDS
    applied: list[str] = []
    pause = PAUSE_SECONDS
    while True:
        with database.connection(timeout=max(1.0, deadline - time.monotonic())) as connection:
            try:
                _prepare_next(connection, database)
                name = _apply_next(connection, database)
            except AGAIN:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(pause)
                pause = min(pause * 1.5, LONGEST_PAUSE)
                continue
        if name is None:
            return applied
        applied.append(name)
        pause = PAUSE_SECONDS


def version(database: Database) -> int:
    """The version of the tables; 0 when there are none."""
    return _read(database)[0]


def check(database: Database, timeout: float | None = None) -> None:
    """Raise SchemaError unless this program works with the tables as they are."""
    found, compatible_from = _read(database, timeout)
    _refuse_newer(database, found, compatible_from)
    if found == 0:
        raise SchemaError(
            f"{database.place} has no Tenure tables in schema {database.schema}: run "
            "`tenure migrate` (or `tenure migrate --sql` and hand it to who may)"
        )
    if found < SCHEMA_VERSION:
        raise SchemaError(
            f"schema {database.schema} in {database.place} has version {found}; this Tenure needs "
            f"{SCHEMA_VERSION}: run `tenure migrate`"
        )


def forward_sql(schema: str, since: int = 0) -> str:
    """A script for a DBA: what `migrate` would run on a schema of version `since`."""
    quoted = sql.with_schema("SCHEMA tenure", schema)
    pending = [each for each in sql.migrations("postgres") if each.version > since]
    parts = []
    for migration in pending:
        parts += [
            f"-- migration {migration.version:04d}_{migration.name}",
            "BEGIN;",
            f"SELECT pg_advisory_xact_lock({_lock_key(schema)});",
            f"CREATE {quoted.replace('SCHEMA', 'SCHEMA IF NOT EXISTS')};",
            sql.with_schema(migration.text, schema).strip(),
            *([_functions(schema)] if migration is pending[-1] else []),
            f"{_stamp(migration, schema)};",
            "COMMIT;\n",
        ]
    return "\n".join(parts) or "-- up to date: nothing is pending\n"


def drop(database: Database) -> None:
    """All of it at once, for a schema that was made for a test."""
    database.rows("drop_schema", {})


def reverse_sql(schema: str, to: int = 0) -> str:
    """A script that takes every migration after version `to` back, newest first. Jobs in tables
    that it drops are gone."""
    parts = []
    for migration in reversed(sql.reversals("postgres")):
        if migration.version > to:
            unstamp = f"DELETE FROM tenure.migrations WHERE version = {migration.version};"  # noqa: S608  ours
            texts = [unstamp, migration.text.strip()]
            if migration.version == 2:
                texts = [
                    unstamp,
                    sql.functions("earlier"),
                    migration.text.strip(),
                    sql.view_and_functions_of_version_1(),
                ]
            parts += [
                f"-- take back {migration.version:04d}_{migration.name}",
                "BEGIN;",
                f"SELECT pg_advisory_xact_lock({_lock_key(schema)});",
                *(sql.with_schema(text, schema) for text in texts),
                "COMMIT;\n",
            ]
    return "\n".join(parts) or "-- nothing to take back\n"


def _prepare_next(connection: psycopg.Connection[Any], database: Database) -> None:
    """What can be done before the first migration that is missing, while everybody works. A first
    installation has nobody to wait for."""
    schema = database.schema
    found, _compatible_from = _read_on(connection, schema)
    pending = [each for each in sql.migrations("postgres") if each.version > found]
    if found == 0 or not pending or not _large(connection, schema):
        return
    for statement in sql.online("postgres", pending[0]):
        names = _partitions(connection, schema) if "{partition}" in statement else [""]
        for name in names:
            text = sql.with_schema(statement.replace("{partition}", name), schema)
            _run_online(connection, schema, text)


def _large(connection: psycopg.Connection[Any], schema: str) -> bool:
    tables = (f"{_quoted(schema)}.{table}" for table in ("jobs", "events", "keys"))
    parts = [f"(SELECT 1 FROM {table} OFFSET {LARGE} LIMIT 1)" for table in tables]  # noqa: S608
    return connection.execute(" UNION ALL ".join(parts)).fetchone() is not None


def _run_online(connection: psycopg.Connection[Any], schema: str, text: str) -> None:
    index = re.search(r"INDEX CONCURRENTLY IF NOT EXISTS (\w+)", text)
    if index is None:
        done = re.search(r"ADD CONSTRAINT (\w+)", text)
        known = (
            "SELECT 1 FROM pg_constraint WHERE connamespace = to_regnamespace(%s) AND conname = %s"
        )
        if done and connection.execute(known, [_quoted(schema), done[1]]).fetchone():
            return
        with connection.transaction():
            connection.execute(f"SET LOCAL lock_timeout = '{LOCK_SECONDS:g}s'")
            connection.execute(text)
        return
    broken = connection.execute(  # what a run that was cut off has left behind
        "SELECT 1 FROM pg_index WHERE indexrelid = to_regclass(%s) AND NOT indisvalid",
        [f"{_quoted(schema)}.{index[1]}"],
    ).fetchone()
    if broken:
        connection.execute(f"DROP INDEX CONCURRENTLY {_quoted(schema)}.{index[1]}")
    connection.execute(text)


def _partitions(connection: psycopg.Connection[Any], schema: str) -> list[str]:
    rows = connection.execute(
        "SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid "
        "WHERE i.inhparent = to_regclass(%s) ORDER BY 1",
        [f"{_quoted(schema)}.events"],
    )
    return [name for (name,) in rows]


def _functions(schema: str) -> str:
    """The functions of this version, and the rights of the roles that had some before."""
    from tenure.stores.postgres import grants

    return f"{sql.with_schema(sql.functions(), schema).strip()}\n{grants.regrant_sql(schema)}"


def _apply_next(connection: psycopg.Connection[Any], database: Database) -> str | None:
    """Apply the first migration that is missing; None when there is none."""
    schema = database.schema
    with connection.transaction():
        connection.execute(f"SELECT pg_advisory_xact_lock({_lock_key(schema)})")
        found, compatible_from = _read_on(connection, schema)
        _refuse_newer(database, found, compatible_from)
        pending = [each for each in sql.migrations("postgres") if each.version > found]
        if not pending:
            return None
        connection.execute(f"SET LOCAL lock_timeout = '{LOCK_SECONDS:g}s'")
        # Asked first: IF NOT EXISTS alone wants the right to create schemas in any case.
        present = connection.execute("SELECT to_regnamespace(%s)", [_quoted(schema)]).fetchone()
        if present is None or present[0] is None:
            connection.execute(f"CREATE SCHEMA {_quoted(schema)}")
        connection.execute(sql.with_schema(pending[0].text, schema))
        if len(pending) == 1:
            connection.execute(_functions(schema))
        connection.execute(_stamp(pending[0], schema))
    return f"{pending[0].version:04d}_{pending[0].name}"


def _read(database: Database, timeout: float | None = None) -> tuple[int, int]:
    with database.connection(timeout) as connection:
        return _read_on(connection, database.schema)


def _read_on(connection: psycopg.Connection[Any], schema: str) -> tuple[int, int]:
    """(version, oldest program that works with it); (0, 0) without tables."""
    table = f"{_quoted(schema)}.migrations"
    row = connection.execute("SELECT to_regclass(%s)", [table]).fetchone()
    if row is None or row[0] is None:
        return 0, 0
    row = connection.execute(
        # As JSON: tables of version 1 know no packs.
        f"SELECT coalesce(max(version), 0), coalesce(max(compatible_from), 0) FROM {table} m"  # noqa: S608
        " WHERE coalesce(to_json(m) ->> 'pack', 'tenure') = 'tenure'"
    ).fetchone()
    return (row[0], row[1]) if row else (0, 0)


def _refuse_newer(database: Database, found: int, compatible_from: int) -> None:
    if compatible_from > SCHEMA_VERSION:
        raise SchemaError(
            f"schema {database.schema} in {database.place} has version {found} and needs a Tenure "
            f"that knows version {compatible_from}; this one knows {SCHEMA_VERSION}. Upgrade "
            "Tenure here."
        )


def _stamp(migration: sql.Migration, schema: str) -> str:
    return sql.with_schema(
        "INSERT INTO tenure.migrations (version, name, compatible_from) "  # noqa: S608  ours
        f"VALUES ({migration.version}, '{migration.name}', {sql.compatible_from(migration)})",
        schema,
    )


def _lock_key(schema: str) -> int:
    return crc32(f"tenure migrate {schema}".encode())


def _quoted(schema: str) -> str:
    return '"' + schema.replace('"', '""') + '"'
