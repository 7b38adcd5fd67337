"""Watch what calls of a PostgreSQL store really do, as auto_explain reports it from within their
functions: which index each table is walked by, how many rows that touched, how many buffers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tenure.stores.postgres import PostgresStore

TABLES = ("jobs", "history", "events")
WARM_UP = 7  # calls until a session uses the plans it keeps
SETTINGS = (
    "auto_explain.log_min_duration = 0",
    "auto_explain.log_analyze = on",
    "auto_explain.log_buffers = on",
    "auto_explain.log_timing = off",
    "auto_explain.log_format = json",
    "client_min_messages = log",
)

Call = Callable[[], Any]


class Walk:
    """The scans of one call: (table, index or kind of scan, rows it touched)."""

    def __init__(self) -> None:
        self.scans: list[tuple[str, str, float]] = []
        self.buffers = 0
        self.compiled = False

    def note(self, report: dict[str, Any]) -> None:
        plan = report["Plan"]
        self.compiled = self.compiled or "JIT" in report
        self.buffers += plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]
        self._read(plan)

    def _read(self, node: dict[str, Any]) -> None:
        relation = node.get("Relation Name", "")
        table = next((t for t in TABLES if relation == t or relation.startswith(f"{t}_")), None)
        kind = node["Node Type"]
        if kind.startswith("Bitmap Index"):
            rows = node.get("Actual Rows", 0) * node.get("Actual Loops", 1)
            self.scans.append((node["Index Name"], "bitmap", rows))
        if table is not None and "Scan" in kind and node.get("Actual Loops", 1):
            rows = node.get("Actual Rows", 0) + node.get("Rows Removed by Filter", 0)
            rows += node.get("Rows Removed by Index Recheck", 0)
            by = node.get("Index Name", kind)
            self.scans.append((table, by, rows * node.get("Actual Loops", 1)))
        for child in node.get("Plans", ()):
            self._read(child)

    def by(self, table: str) -> set[str]:
        return {by for where, by, _rows in self.scans if where == table}

    def rows(self, table: str) -> float:
        return sum(rows for where, _by, rows in self.scans if where == table)


def watched(store: PostgresStore, call: Call) -> Walk:
    """Every statement of a call, those within functions too."""
    found = _watch(store, call, nested=True)
    assert found.scans, "nothing was observed"
    assert not found.compiled, "the compiler took longer than the plan"
    return found


def buffers_of(store: PostgresStore, call: Call) -> int:
    """Blocks a call has looked at, in whatever statement: those of the outermost have them all."""
    found = _watch(store, call, nested=False)
    assert found.buffers, "nothing was observed"
    return found.buffers


def _watch(store: PostgresStore, call: Call, *, nested: bool) -> Walk:
    found = Walk()

    def notice(diagnostic: Any) -> None:
        text = diagnostic.message_primary or ""
        start = text.find("plan:")
        if start >= 0:
            found.note(json.loads(text[start + 5 :]))

    # Whichever connection the call takes: the only one of each pool.
    connections = [*store.database._pool._idle, *store.database._reserved._idle]
    for db in connections:
        db.execute("LOAD 'auto_explain'")
        for setting in SETTINGS:
            db.execute(f"SET {setting}")
        db.execute(f"SET auto_explain.log_nested_statements = {'on' if nested else 'off'}")
        db.add_notice_handler(notice)
    try:
        call()
    finally:
        for db in connections:
            db.remove_notice_handler(notice)
            db.execute("RESET ALL")
    return found
