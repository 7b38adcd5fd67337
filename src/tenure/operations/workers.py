"""The workers of a store, as operators see them."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tenure.job import moment
from tenure.operations.room import time_of
from tenure.record import Record

if TYPE_CHECKING:
    from tenure.store import WorkerInfo

# A worker is given up a little after its lease ends (promise 4); until then it counts as live.
GRACE_MS = 10_000


class Worker(Record):
    """One start of a worker process. `meta` is what the worker says about itself."""

    id: str
    host: str
    pid: int
    started_at: datetime.datetime
    seen_at: datetime.datetime
    dead_at: datetime.datetime | None
    dead_reason: str | None
    held: int  # jobs that the store has leased to it
    live: bool
    meta: Mapping[str, Any]

    @classmethod
    def of(cls, row: WorkerInfo, now: datetime.datetime) -> Worker:
        silent_ms = now.timestamp() * 1000 - row.seen_at
        return cls(
            row.id,
            row.host,
            row.pid,
            time_of(row.started_at),
            time_of(row.seen_at),
            moment(row.dead_at),
            row.dead_reason,
            row.held,
            row.dead_at is None and silent_ms <= row.lease_ms + GRACE_MS,
            row.meta,
        )

    @property
    def name(self) -> str | None:
        """The name its operator gave it (`tenure worker -n`)."""
        return self.meta.get("name")

    @property
    def queues(self) -> list[str] | None:
        """None: every queue."""
        return self.meta.get("queues")

    def serves(self, queue: str) -> bool:
        return self.queues is None or queue in self.queues

    def knows(self, type: str) -> bool:
        types = self.meta.get("types")
        return types is None or type in types
