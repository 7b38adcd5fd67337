"""The queues of a store, as operators see them."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING

from tenure.job import moment
from tenure.record import Record

if TYPE_CHECKING:
    from tenure.store import QueueInfo


class Queue(Record):
    """What lies in a queue. A figure is counted to 10,000 and no further: then its name is in
    `capped`."""

    name: str
    ready: int  # due now
    later: int  # due later
    waiting: int  # for other jobs
    running: int
    dead: int
    oldest: datetime.timedelta | None  # how long its oldest due job has been waiting
    paused_at: datetime.datetime | None
    paused_by: str | None
    pause_reason: str | None
    capped: tuple[str, ...] = ()

    @classmethod
    def of(cls, row: QueueInfo) -> Queue:
        values = row._asdict() | {"paused_at": moment(row.paused_at)}
        oldest = values.pop("oldest_ms")
        return cls(**values, oldest=None if oldest is None else _length(oldest))

    @property
    def paused(self) -> bool:
        return self.paused_at is not None


def _length(ms: int) -> datetime.timedelta:
    """A row written by other hands may hold a number that is no length of time."""
    longest = datetime.timedelta.max // datetime.timedelta(milliseconds=1)
    return datetime.timedelta(milliseconds=max(0, min(ms, longest)))
