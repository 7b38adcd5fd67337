"""What all parts of the SQLite store share: the file, the statements, the clock."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from tenure import sql
from tenure.stores.sqlite.file import SqliteFile, wall_ms


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
