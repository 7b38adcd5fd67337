"""Reads the `.sql` files: named statements, the schema, migrations in order.

A statement starts with `-- name: its_name`; everything up to the next name belongs to it.
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple

_HERE = os.path.dirname(__file__)  # importlib.resources takes 13 ms, a third of a cold enqueue


class Migration(NamedTuple):
    version: int
    name: str
    text: str


def statements(dialect: str) -> dict[str, str]:
    text = _read(dialect, "queries.sql")
    parts = re.split(r"^-- name: (\w+)\s*$", text, flags=re.MULTILINE)
    return {
        name: "\n".join(line for line in body.splitlines() if not line.startswith("--")).strip()
        for name, body in zip(parts[1::2], parts[2::2], strict=True)
    }


def schema(dialect: str) -> str:
    return _read(dialect, "schema.sql")


def migrations(dialect: str) -> list[Migration]:
    found = []
    for file in os.listdir(os.path.join(_HERE, dialect, "migrations")):
        match = re.fullmatch(r"(\d{4})_(\w+)\.sql", file)
        if match:
            text = _read(dialect, "migrations", file)
            found.append(Migration(int(match[1]), match[2], text))
    return sorted(found)


def _read(*path: str) -> str:
    with open(os.path.join(_HERE, *path), encoding="utf-8") as file:
        return file.read()
