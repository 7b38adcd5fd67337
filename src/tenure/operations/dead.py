"""Dead jobs by what they died of, each group with a handle to act on it.

A group is a type, a status, an error code and the place that raised it. Its handle is a digest of
these, so it stays the same over calls, filters and databases.
"""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from tenure.errors import ConfigError, JobNotFound
from tenure.operations.listing import JobFilter
from tenure.operations.room import Room, time_of
from tenure.record import Record

if TYPE_CHECKING:
    from tenure.store import DeadGroup, Filter
    from tenure.stored import Job

HANDLE_DIGITS = 8
LEAST_DIGITS = 4
EVERY = 1_000_000  # there are as many groups as lines of code that raise: all of them are read


class Fingerprint(NamedTuple):
    """What a dead job died of; absent parts are empty."""

    type: str
    status: str
    code: str
    place: str

    @classmethod
    def of(cls, job: Job) -> Fingerprint:
        return cls(job.type, job.status, job.error_code or "", job.error_place or "")

    @property
    def digest(self) -> str:
        from hashlib import sha256

        return sha256("|".join(self).encode()).hexdigest()

    @property
    def handle(self) -> str:
        return self.digest[:HANDLE_DIGITS]

    @property
    def short_place(self) -> str:
        """`shop.py:11` beside the code ValueError, otherwise `ValueError at shop.py:11`."""
        return self.place.removeprefix(f"{self.code} at ")


class GroupCount(Record):
    """How many of some dead jobs died of the same thing."""

    group: str  # the handle
    count: int
    type: str
    status: str
    code: str | None
    place: str | None

    @property
    def fingerprint(self) -> Fingerprint:
        return Fingerprint(self.type, self.status, self.code or "", self.place or "")


class Group(GroupCount):
    """All dead jobs that died of the same thing, and one of them as a sample."""

    capped: bool  # there are more than were counted
    first_seen: datetime.datetime
    last_seen: datetime.datetime
    sample_id: str
    sample_error: str | None


def counts(marks: Iterable[Fingerprint]) -> list[GroupCount]:
    """The groups that some jobs belong to, largest first."""
    return [GroupCount(**_named(mark, jobs)) for mark, jobs in Counter(marks).most_common()]


def _named(mark: Fingerprint, jobs: int) -> dict[str, Any]:
    parts = {name: part or None for name, part in mark._asdict().items()}
    return {"group": mark.handle, "count": jobs, **parts}


def _group(row: DeadGroup) -> Group:
    return Group(
        **_named(Fingerprint(row.type, row.status, row.code, row.place), row.jobs),
        capped=row.capped,
        first_seen=time_of(row.first_ms),
        last_seen=time_of(row.last_ms),
        sample_id=row.sample_id,
        sample_error=row.sample_error,
    )


def is_handle(text: str) -> bool:
    """Whether it can be a group's handle, or the first digits of one; in lower case."""
    return LEAST_DIGITS <= len(text) <= 64 and set(text) <= set("0123456789abcdef")


class Dead(Room):
    def groups(self, where: JobFilter | None = None) -> list[Group]:
        """Largest first."""
        where = JobFilter() if where is None else where
        found = self.store.dead_groups(self._filter(where), limit=EVERY)
        return [_group(row) for row in found if row.status in (where.statuses or (row.status,))]

    def named(self, handle: str, where: JobFilter | None = None) -> Fingerprint:
        """The one group whose digest begins so."""
        found = [
            group.fingerprint
            for group in self.groups(where)
            if group.fingerprint.digest.startswith(handle)
        ]
        if not found:
            raise JobNotFound(
                f"there is no group {handle} among these dead jobs; `tenure jobs --dead` lists the "
                "groups there are"
            )
        if len(found) > 1:
            longer = ", ".join(mark.digest[:16] for mark in found[:5])
            raise ConfigError(f"{handle} may be any of {longer}: give more digits")
        return found[0]

    def narrowing(
        self, handle: str, where: JobFilter
    ) -> tuple[list[Filter], Callable[[Job], bool]]:
        """The members of a group: a store narrows by type, status and place, not by error code."""
        mark = self.named(handle, where)
        narrowed = self._filter(where)._replace(
            type=mark.type, status=mark.status, place=mark.place or None
        )
        return [narrowed], lambda job: Fingerprint.of(job) == mark

    def members(self, handle: str, where: JobFilter | None = None) -> Iterator[Job]:
        """The jobs of a group, newest first."""
        from tenure.operations.jobs import Jobs

        where = JobFilter() if where is None else where
        return Jobs(self.store, self.scope).find(where.replaced(group=handle))

    def _filter(self, where: JobFilter) -> Filter:
        return where.filters(self.scope.org)[0]._replace(status=None)
