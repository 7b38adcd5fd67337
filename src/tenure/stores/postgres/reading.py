"""What people and programs read: jobs, events, queues, counts."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

from tenure.job import DEAD, FINISHED, STATUSES
from tenure.store import DeadGroup, Filter, QueueInfo, Rollup
from tenure.stores.postgres.base import PostgresBase
from tenure.stores.postgres.database import to_uuid_text, to_uuids
from tenure.stores.rows import event_from, job_from, queues_from

if TYPE_CHECKING:
    from tenure.stored import Event, Job

# What a listing may be narrowed by; only what was asked for is put into the statement.
CONDITIONS = {
    "before": "j.id < %(before)s::uuid",
    "status": "j.status = %(status)s",
    "type": "j.type = %(type)s",
    "queue": "j.queue = %(queue)s",
    "org": "j.org = %(org)s",
    "key": "j.key = %(key)s",
    "place": "j.error_place = %(place)s",
    "ids": "j.id = ANY (%(ids)s::uuid[])",
}


class Reading(PostgresBase):
    def get(self, id: str, *, org: str | None = None) -> Job | None:
        parameters = {"id": to_uuid_text(id), "org": org}
        for part in ("job_hot", "job_history"):  # in this order: jobs move from one to the other
            for row in self._read(part, self.database.sql("job_by_id"), parameters):
                return _job(row)
        return None

    def find(self, where: Filter, *, before: str | None = None, limit: int = 100) -> list[Job]:
        if where.place is not None and where.status is None:
            both = [
                self.find(where._replace(status=status), before=before, limit=limit)
                for status in sorted(DEAD)
            ]
            return sorted(chain(*both), key=lambda job: job.id, reverse=True)[:limit]
        given: dict[str, Any] = {k: v for k, v in where._asdict().items() if v is not None}
        if where.ids is not None:
            given["ids"] = to_uuids(where.ids)
        if before is not None:
            given["before"] = to_uuid_text(before)
        conditions = [CONDITIONS[name] for name in given]
        if where.status in DEAD:
            conditions.append("j.completed_at IS NOT NULL")  # walks jobs_dead
        narrowing = f"WHERE {' AND '.join(conditions)} " if conditions else ""
        rest = narrowing + self.database.sql("job_order")
        rows: list[tuple[Any, ...]] = []
        if where.status not in FINISHED:
            rows += self._read("job_hot", rest, given | {"most": limit})
        if where.status is None or where.status in FINISHED:
            rows += self._read("job_history", rest, given | {"most": limit})
        # A job may move to history between the two reads: keep one row an id, the finished one.
        newest = {row[0]: row for row in rows}
        return [_job(newest[id]) for id in sorted(newest, reverse=True)[:limit]]

    def _read(self, part: str, rest: str, parameters: dict[str, Any]) -> list[tuple[Any, ...]]:
        return self.database.run(f"{self.database.sql(part)} {rest}", parameters)

    def events(
        self,
        *,
        job_id: str | None = None,
        org: str | None = None,
        after: int = 0,
        limit: int = 100,
    ) -> list[Event]:
        parameters: dict[str, Any] = {"org": org, "after": after, "most": limit}
        if job_id is None:
            rows = self._rows("events_all", parameters)
        else:
            rows = self._rows("events_of_job", parameters | {"job_id": to_uuid_text(job_id)})
        return [
            event_from((*row[:11], row[11] or row[3], row[12] or row[3], *row[13:])) for row in rows
        ]

    def dead_groups(self, where: Filter, *, limit: int = 100) -> list[DeadGroup]:
        names = ("status", "type", "queue", "org", "place")
        parameters = {name: getattr(where, name) for name in names} | {"most": limit}
        return [DeadGroup(*row) for row in self._rows("dead_groups", parameters)]

    def queues(self, *, now_ms: int | None = None) -> list[QueueInfo]:
        counted = self._rows("queue_counts", {"now": self._now(now_ms)})
        switches = self._rows("queue_switches", {})
        return queues_from(counted, switches)

    def queue_names(self) -> dict[str, bool]:
        return dict(self._rows("queue_names", {}))

    def unknown_types(self, types: frozenset[str]) -> dict[str, int]:
        rows = self._rows("unknown_types", {"types": sorted(types)})
        return dict(rows)

    def rollups(self, *, since_ms: int) -> list[Rollup]:
        rows = self._rows("rollups", {"since": since_ms})
        return [Rollup._make((*row[:6], tuple(row[6]))) for row in rows]

    def totals(self) -> dict[str, int]:
        counts: dict[str, int] = dict.fromkeys(STATUSES, 0)
        return counts | dict(self._rows("totals", {}))


def _job(row: tuple[Any, ...]) -> Job:
    """Where the row says nothing the job is its own request and correlation."""
    return job_from((*row[:26], row[26] or row[0], row[27] or row[0], *row[28:]))
