"""schema.sql (and functions.sql) say what the migrations make, and can be taken back."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest

from tenure import sql
from tenure.stores.postgres import PostgresStore, grants
from tenure.stores.postgres import schema as postgres_schema
from tenure.stores.sqlite import SqliteStore
from tenure.stores.sqlite.file import SCHEMA_VERSION, split_statements

VERSIONS = {"sqlite": SCHEMA_VERSION, "postgres": postgres_schema.SCHEMA_VERSION}

# Everything that is not the server's own, one line an object. Partitions by day depend on the day.
CATALOG = """
SELECT 'schema ' || nspname || ' ' || coalesce(nspacl::text, '') FROM pg_namespace
 WHERE nspname !~ '^(pg_|information_schema)'
UNION ALL
SELECT format('%%s %%s.%%s %%s %%s %%s', c.relkind, n.nspname, c.relname, c.relacl, c.reloptions,
              pg_get_partkeydef(c.oid))
  FROM ours c JOIN pg_namespace n ON n.oid = c.relnamespace
UNION ALL
SELECT format('column %%s.%%s %%s %%s not null %%s identity %%s default %%s', c.relname, a.attnum,
              a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull, a.attidentity,
              pg_get_expr(d.adbin, d.adrelid))
  FROM pg_attribute a JOIN ours c ON c.oid = a.attrelid
       LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
 WHERE a.attnum > 0 AND NOT a.attisdropped
UNION ALL
SELECT pg_get_indexdef(i.indexrelid) FROM pg_index i JOIN ours c ON c.oid = i.indrelid
UNION ALL
SELECT format('constraint %%s %%s %%s', c.relname, o.conname, pg_get_constraintdef(o.oid))
  FROM pg_constraint o JOIN ours c ON c.oid = o.conrelid
UNION ALL
SELECT pg_get_triggerdef(t.oid) FROM pg_trigger t JOIN ours c ON c.oid = t.tgrelid
UNION ALL
SELECT format('view %%s', pg_get_viewdef(c.oid)) FROM ours c WHERE c.relkind = 'v'
UNION ALL
SELECT format('sequence %%s %%s %%s', s.seqtypid::regtype, s.seqincrement, s.seqcache)
  FROM pg_sequence s JOIN ours c ON c.oid = s.seqrelid
UNION ALL
SELECT pg_get_functiondef(p.oid) || coalesce(p.proacl::text, '') FROM pg_proc p
       JOIN pg_namespace n ON n.oid = p.pronamespace AND n.nspname !~ '^(pg_|information_schema)'
"""
OURS = """
WITH ours AS (
  SELECT c.* FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
   WHERE n.nspname !~ '^(pg_|information_schema)' AND c.relname !~ '_[0-9]{8}(_|$)')
"""


# Enough for what is done online, in each table that it is done for.
OLD_ROWS = """
INSERT INTO tenure.jobs (id, type, status, queue, priority, org, ready_at, max_attempts, timeout_ms,
  category, actor_type, actor_id, scheduled_at, created_at, updated_at, payload)
SELECT tenure.new_id(1), 'noop', 'queued', 'default', 5, 'default', n, 5, 1, 'default', 'system',
       'x', 1, 1, 1, '{}' FROM generate_series(1, 10001) n;
INSERT INTO tenure.events (at, kind, org, actor_type, actor_id)
SELECT extract(epoch FROM now())::bigint * 1000 + n, 'queue.paused', 'default', 'system', 'x'
  FROM generate_series(1, 100) n;
INSERT INTO tenure.keys (org, key, job_id, first_seen_at, last_seen_at, ttl_ms)
SELECT 'default', n::text, tenure.new_id(1), 1, 1, 1 FROM generate_series(1, 100) n;
"""


def objects(path: Path) -> dict[str, str]:
    """Every object's definition, without comments and differences in white space."""
    with sqlite3.connect(path) as db:
        rows = db.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
    db.close()
    return {name: plain(text) for name, text in rows}


def plain(text: str) -> str:
    """Without comments, differences in white space, and the quotes of a table that was renamed."""
    text = re.sub(r"\s+", " ", re.sub(r"--[^\n]*", "", text)).strip()
    text = text.replace(" ,", ",").replace(" )", ")").replace("( ", "(")
    return re.sub(r'^CREATE TABLE "(\w+)"', r"CREATE TABLE \1", text)


def catalog(url: str) -> list[str]:
    with psycopg.connect(url, autocommit=True) as connection:
        return sorted(line for (line,) in connection.execute(OURS + CATALOG, {}))


def run(url: str, script: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(script.encode())


def test_schema_is_what_the_migrations_make(tmp_path: Path) -> None:
    migrated, written = tmp_path / "migrated.db", tmp_path / "written.db"
    store = SqliteStore(str(migrated))
    store.migrate()
    store.close()
    with sqlite3.connect(written) as db:
        for statement in split_statements(sql.schema("sqlite"), sqlite3):
            db.execute(statement)
    db.close()

    assert objects(migrated) == objects(written)


def test_schema_and_functions_are_what_the_migrations_make(
    make_database: Callable[..., str],
) -> None:
    migrated, written = make_database(migrated=True), make_database()
    run(written, "CREATE SCHEMA tenure;" + sql.schema("postgres") + sql.functions())

    found = catalog(migrated)
    assert found == catalog(written)
    for kind in ("column ", "constraint ", "CREATE INDEX", "CREATE TRIGGER", "view ", "sequence "):
        assert any(line.startswith(kind) for line in found), kind
    made = ("CREATE OR REPLACE FUNCTION", "CREATE OR REPLACE PROCEDURE")
    assert sum(line.startswith(made) for line in found) == len(grants.functions())


@pytest.mark.parametrize("schema", ["tenure", "other_jobs"])
def test_what_is_printed_goes_forward_and_back(database: str, schema: str) -> None:
    before = catalog(database)
    store = PostgresStore(database, schema=schema)

    run(database, postgres_schema.forward_sql(schema))
    try:
        assert store.migrate() == []
        assert any(line.startswith(f"schema {schema}") for line in catalog(database))
        if schema != "tenure":
            assert not [line for line in catalog(database) if re.search(r"\btenure\.", line)]
    finally:
        store.close()
    run(database, postgres_schema.reverse_sql(schema))

    left = sorted(set(catalog(database)) - set(before))
    assert not left, "0001_initial.down.sql leaves:\n" + "\n".join(left)


def test_a_schema_with_something_else_in_it_stays(database: str) -> None:
    run(database, postgres_schema.forward_sql("tenure"))
    run(database, "CREATE TABLE tenure.theirs (x integer)")

    run(database, postgres_schema.reverse_sql("tenure"))

    tables = [line for line in catalog(database) if line.startswith("r ")]
    assert [line.split()[1] for line in tables] == ["tenure.theirs"]


def test_what_earlier_versions_have_made_is_dropped_before_it_is_made_anew() -> None:
    """By name, in `earlier.sql`: one that is missing there fails the next upgrade."""
    dropped = set(re.findall(r"'(\w+)'", sql.functions("earlier"))) - {"tenure"}
    plain = r"^CREATE (?:FUNCTION|PROCEDURE) tenure\.(\w+)"
    first = sql.migrations("postgres")[0].text
    made = set(re.findall(plain, first + sql.functions(), re.MULTILINE))
    kept = set(re.findall(r"^CREATE OR REPLACE FUNCTION tenure\.(\w+)", sql.functions(), re.M))
    assert made - kept - {"refuse_change"} == dropped


def test_an_upgrade_makes_the_same_as_an_installation(make_database: Callable[..., str]) -> None:
    """Rows and roles of version 1 are there, and a table is large enough to be prepared."""
    upgraded, installed = make_database(), make_database(migrated=True)
    (first, *_rest) = sql.migrations("postgres")
    run(upgraded, f"CREATE SCHEMA tenure; {first.text}; {postgres_schema._stamp(first, 'tenure')}")
    run(upgraded, OLD_ROWS)

    store = PostgresStore(upgraded)
    assert store.migrate() == ["0002_promises"]
    store.close()

    assert catalog(upgraded) == catalog(installed)


def test_every_migration_has_its_reverse() -> None:
    forward, back = sql.migrations("postgres"), sql.reversals("postgres")

    assert [each[:2] for each in back] == [each[:2] for each in forward]


@pytest.mark.parametrize("dialect", VERSIONS)
def test_migrations_are_numbered_without_gaps_up_to_the_version_we_know(dialect: str) -> None:
    versions = [migration.version for migration in sql.migrations(dialect)]

    assert versions == list(range(1, VERSIONS[dialect] + 1))


@pytest.mark.parametrize(
    ("dialect", "file"),
    [("sqlite", "queries.sql"), ("postgres", "queries.sql"), ("postgres", "doctor.sql")],
)
def test_every_statement_is_used(dialect: str, file: str) -> None:
    """A statement nobody runs is dead; one that is missing fails at run time."""
    source = Path(sql.__file__).parents[1] / "stores" / dialect
    paths = [*sorted(source.glob("*.py")), *sorted(source.parent.glob("*.py"))]
    code = "\n".join(path.read_text("utf-8") for path in paths)
    named = set(sql.statements(dialect, file))
    mentioned = {name for name in named if re.search(rf"""["']{name}["']""", code)}

    assert named == mentioned
