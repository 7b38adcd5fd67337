"""Reads the `.sql` files: named statements, the schema, migrations in order.

A statement starts with `-- name: its_name`; everything up to the next name belongs to it.
Files for PostgreSQL name the schema literally, `tenure.`; `with_schema` puts in another one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

_HERE = os.path.dirname(__file__)  # importlib.resources takes 13 ms, a third of a cold enqueue
# `tenure.jobs`, `SCHEMA tenure`, `search_path = tenure`; not `tenure` alone, which is a word.
_SCHEMA = r"\btenure(?=\.\S)|(?<=\bSCHEMA )tenure\b|(?<=\bEXISTS )tenure\b(?!\.)"
_SCHEMA += r"|(?<=\bsearch_path = )tenure\b|(?<=\bsearch_path TO )tenure\b"


_NAME = re.compile(r":(\w+)")
FUNCTIONS = (
    "earlier", "ids", "enqueue", "claim", "finish", "waiting", "leases", "reading", "operators",
    "upkeep", "older_programs",
)  # fmt: skip


class Numbered(NamedTuple):
    """A statement whose parameters have numbers: first those that many calls share."""

    text: str
    shared: Callable[[Mapping[str, Any]], tuple[Any, ...]]
    own: Callable[[Sequence[Any]], tuple[Any, ...]]


class Migration(NamedTuple):
    version: int
    name: str
    text: str


def statements(dialect: str, file: str = "queries.sql") -> dict[str, str]:
    text = _read(dialect, file)
    parts = re.split(r"^-- name: (\w+)\s*$", text, flags=re.MULTILINE)
    return {
        name: "\n".join(line for line in body.splitlines() if not line.startswith("--")).strip()
        for name, body in zip(parts[1::2], parts[2::2], strict=True)
    }


def numbered(text: str, own: Sequence[str], absent: Collection[str] = ()) -> Numbered:
    """A statement of `:names` as one of `?1`s, with NULL for those that are absent: binding by
    name, and binding None, takes the driver longer than storing a row. A call's own values are
    given in the order of `own`."""
    names = [name for name in dict.fromkeys(_NAME.findall(text)) if name not in absent]
    names.sort(key=lambda name: name in own)
    places = {name: f"?{place}" for place, name in enumerate(names, 1)}
    return Numbered(
        _NAME.sub(lambda m: places.get(m[1], "NULL"), text),
        _getter([name for name in names if name not in own]),
        _getter([own.index(name) for name in names if name in own]),
    )


def _getter(keys: Sequence[Any]) -> Callable[[Any], tuple[Any, ...]]:
    if len(keys) > 1:
        return itemgetter(*keys)
    return lambda values: tuple([values[key] for key in keys])


def schema(dialect: str) -> str:
    return _read(dialect, "schema.sql")


def functions(*parts: str) -> str:
    """What changes anything on PostgreSQL, in the order of store.py; or some parts of it."""
    return "\n".join(_read("postgres", "functions", f"{part}.sql") for part in parts or FUNCTIONS)


def view_and_functions_of_version_1() -> str:
    """As 0001_initial made them, for whoever takes 0002 back."""
    (first, *_later) = migrations("postgres")
    return first.text[first.text.index("CREATE VIEW tenure.job_queue") :]


def online(dialect: str, migration: Migration) -> list[str]:
    """The statements that can be run before a migration while everybody works; mostly none."""
    name = f"{migration.version:04d}_{migration.name}.online.sql"
    if not os.path.exists(os.path.join(_HERE, dialect, "migrations", name)):
        return []
    text = re.sub(r"^--.*\n", "", _read(dialect, "migrations", name), flags=re.MULTILINE)
    return [statement.strip() for statement in text.split(";") if statement.strip()]


def migrations(dialect: str) -> list[Migration]:
    return _migrations(dialect, r"(\d{4})_(\w+)\.sql")


def reversals(dialect: str) -> list[Migration]:
    """What takes each migration back (`0001_initial.down.sql`), in the order of their numbers."""
    return _migrations(dialect, r"(\d{4})_(\w+)\.down\.sql")


def compatible_from(migration: Migration) -> int:
    """The oldest program that works with what it makes; without a line about it, its own."""
    match = re.search(r"^-- compatible from: (\d+)", migration.text, re.MULTILINE)
    return int(match[1]) if match else migration.version


def stamp(migration: Migration) -> str:
    """What says in an SQLite file that a migration ran, `:now`. The first one has a table of its
    own for that."""
    version, name = migration.version, migration.name
    if version == 1:
        return f"INSERT INTO tenure_migrations VALUES (1, '{name}', :now)"  # noqa: S608  ours
    return (
        "INSERT INTO tenure_migrations (version, name, compatible_from, applied_at) "  # noqa: S608
        f"VALUES ({version}, '{name}', {compatible_from(migration)}, :now)"
    )


def with_schema(text: str, schema: str) -> str:
    """`text` for tables that live in `schema` instead of `tenure`."""
    if schema == "tenure":
        return text
    return re.sub(_SCHEMA, '"' + schema.replace('"', '""') + '"', text)


def _migrations(dialect: str, pattern: str) -> list[Migration]:
    found = []
    for file in os.listdir(os.path.join(_HERE, dialect, "migrations")):
        match = re.fullmatch(pattern, file)
        if match:
            text = _read(dialect, "migrations", file)
            found.append(Migration(int(match[1]), match[2], text))
    return sorted(found)


def _read(*path: str) -> str:
    with open(os.path.join(_HERE, *path), encoding="utf-8") as file:
        return file.read()
