"""What all parts of the SQLite store share: the file, the statements, the clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from tenure import sql
from tenure.stores.sqlite.file import SqliteFile, wall_ms

if TYPE_CHECKING:
    import sqlite3


def to_json(value: object) -> str:
    return msgspec.json.encode(value).decode()


class SqliteBase:
    def __init__(
        self,
        path: str,
        *,
        clock: Callable[[], int] = wall_ms,
        busy_timeout: float = 15.0,
        module: str = "sqlite3",
        allow_network: bool = False,
        audit: str = "all",
    ) -> None:
        self.file = SqliteFile(
            path,
            clock=clock,
            busy_timeout=busy_timeout,
            module=module,
            allow_network=allow_network,
        )
        self.audit = audit
        self._sql = sql.statements("sqlite")

    def _now(self, now_ms: int | None) -> int:
        return self.file.clock() if now_ms is None else now_ms

    def _trail(self, db: sqlite3.Connection | sqlite3.Cursor) -> str:
        """What is written to the audit trail: what this program asks for, or more where the owner
        says so."""
        if self.audit == "all":
            return "all"
        laid_down = db.execute(self._sql["audit_floor"]).fetchone()
        return self.audit if laid_down is None else str(laid_down[0])
