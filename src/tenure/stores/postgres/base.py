"""What all parts of the PostgreSQL store share: the database, the hints, the horizon, the clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from tenure.stores.postgres.database import Database
from tenure.stores.postgres.horizon import Horizon
from tenure.stores.postgres.notices import Notices


def to_json(value: object) -> str:
    return msgspec.json.encode(value).decode()


class PostgresBase:
    def __init__(
        self,
        url: str,
        *,
        schema: str = "tenure",
        clock: Callable[[], int] | None = None,
        timeout: float = 15.0,
        audit: str = "all",
        notify: bool = True,
        connections: int = 8,
        enqueue_timeout: float | None = None,
    ) -> None:
        self.database = Database(url, schema=schema, timeout=timeout, clock=clock, most=connections)
        self.notices = Notices(self.database, enabled=notify)
        self.horizon = Horizon(self.database)
        self.audit = audit
        self.enqueue_timeout = min(timeout, enqueue_timeout or timeout)

    def _now(self, now_ms: int | None) -> int | None:
        """None: the server's clock. Tests bring their own."""
        if now_ms is None and self.database.clock is not None:
            return self.database.clock()
        return now_ms

    def _hint(self, queues: Iterable[str]) -> None:
        self.notices.hint(queues)

    def _rows(self, name: str, parameters: dict[str, Any], **how: Any) -> list[tuple[Any, ...]]:
        return self.database.rows(name, parameters, **how)
