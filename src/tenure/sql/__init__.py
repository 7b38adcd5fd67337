"""Reads the `.sql` files: named statements, the schema, migrations in order.

A statement starts with `-- name: its_name`; everything up to the next name belongs to it.
"""

from __future__ import annotations

import re
from importlib.resources import files
from typing import NamedTuple


class Migration(NamedTuple):
    version: int
    name: str
    text: str


def statements(dialect: str) -> dict[str, str]:
    text = (files(__name__) / dialect / "queries.sql").read_text("utf-8")
    parts = re.split(r"^-- name: (\w+)\s*$", text, flags=re.MULTILINE)
    return {
        name: "\n".join(line for line in body.splitlines() if not line.startswith("--")).strip()
        for name, body in zip(parts[1::2], parts[2::2], strict=True)
    }


def schema(dialect: str) -> str:
    return (files(__name__) / dialect / "schema.sql").read_text("utf-8")


def migrations(dialect: str) -> list[Migration]:
    found = []
    for entry in (files(__name__) / dialect / "migrations").iterdir():
        match = re.fullmatch(r"(\d{4})_(\w+)\.sql", entry.name)
        if match:
            found.append(Migration(int(match[1]), match[2], entry.read_text("utf-8")))
    return sorted(found)
