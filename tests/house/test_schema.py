"""schema.sql says what the migrations make."""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path

from tenure import sql
from tenure.stores.sqlite import SqliteStore
from tenure.stores.sqlite.file import SCHEMA_VERSION, split_statements


def objects(path: Path) -> dict[str, str]:
    """Every object's definition, without comments and differences in white space."""
    with sqlite3.connect(path) as db:
        rows = db.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
    db.close()
    return {
        name: re.sub(r"\s+", " ", re.sub(r"--[^\n]*", "", text)).replace(" ,", ",").strip()
        for name, text in rows
    }


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


def test_migrations_are_numbered_without_gaps_up_to_the_version_we_know() -> None:
    versions = [migration.version for migration in sql.migrations("sqlite")]

    assert versions == list(range(1, SCHEMA_VERSION + 1))


def test_every_statement_is_used() -> None:
    """A statement nobody runs is dead; one that is missing fails at run time."""
    source = Path(sql.__file__).parents[1] / "stores" / "sqlite"
    code = "\n".join(path.read_text("utf-8") for path in sorted(source.glob("*.py")))
    named = set(sql.statements("sqlite"))
    mentioned = {name for name in named if re.search(rf"""["']{name}["']""", code)}

    assert named == mentioned
