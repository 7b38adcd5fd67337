"""What people and programs read: jobs, events, queues, counts."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import msgspec

from tenure.job import DEAD
from tenure.store import DeadGroup, Filter, QueueInfo, Rollup
from tenure.stores.rows import event_from, job_from, queues_from
from tenure.stores.sqlite.base import SqliteBase, to_json

if TYPE_CHECKING:
    from tenure.stored import Event, Job


class Reading(SqliteBase):
    def get(self, id: str, *, org: str | None = None) -> Job | None:
        with self.file.read() as db:
            for part in (
                "job_hot",
                "job_history",
            ):  # in this order: jobs move from one to the other
                statement = f"{self._sql[part]} {self._sql['job_by_id']}"
                row = db.execute(statement, {"id": id, "org": org}).fetchone()
                if row is not None:
                    return _job(row)
        return None

    def find(self, where: Filter, *, before: str | None = None, limit: int = 100) -> list[Job]:
        parameters = where._asdict() | {
            "ids": None if where.ids is None else to_json(where.ids),
            "before": before,
            "most": limit,
        }
        rows: list[tuple[Any, ...]] = []
        if where.place is not None and where.status is None:
            both = [
                self.find(where._replace(status=status), before=before, limit=limit)
                for status in sorted(DEAD)
            ]
            return sorted(chain(*both), key=lambda job: job.id, reverse=True)[:limit]
        with self.file.read() as db:
            if where.status not in ("completed", "cancelled"):
                status = "job_status_dead" if where.status in DEAD else "job_status_hot"
                rows += db.execute(self._listing("job_hot", status), parameters)
            if where.status is None or where.status in ("completed", "cancelled"):
                rows += db.execute(self._listing("job_history", "job_status"), parameters)
        # A job may move to history between the two reads: keep one row an id, the finished one.
        newest = {row[0]: row for row in rows}
        return [_job(newest[id]) for id in sorted(newest, reverse=True)[:limit]]

    def _listing(self, columns: str, status: str) -> str:
        return f"{self._sql[columns]} {self._sql[status]} {self._sql['job_filter']}"

    def events(
        self,
        *,
        job_id: str | None = None,
        org: str | None = None,
        after: int = 0,
        limit: int = 100,
    ) -> list[Event]:
        name = "events_all" if job_id is None else "events_of_job"
        parameters = {"job_id": job_id, "org": org, "after": after, "most": limit}
        with self.file.read() as db:
            return [event_from(row) for row in db.execute(self._sql[name], parameters).fetchall()]

    def dead_groups(self, where: Filter, *, limit: int = 100) -> list[DeadGroup]:
        with self.file.read() as db:
            rows = db.execute(self._sql["dead_groups"], where._asdict() | {"most": limit})
            return [DeadGroup(*row) for row in rows.fetchall()]

    def queues(self, *, now_ms: int | None = None) -> list[QueueInfo]:
        now = self._now(now_ms)
        with self.file.read() as db:
            counted = db.execute(self._sql["queue_counts"], {"now": now}).fetchall()
            switches = db.execute(self._sql["queue_switches"]).fetchall()
        return queues_from(counted, switches)

    def queue_names(self) -> dict[str, bool]:
        with self.file.read() as db:
            return {name: bool(p) for name, p in db.execute(self._sql["queue_names"]).fetchall()}

    def unknown_types(self, types: frozenset[str]) -> dict[str, int]:
        with self.file.read() as db:
            parameters = {"types": to_json(sorted(types))}
            return dict(db.execute(self._sql["unknown_types"], parameters).fetchall())

    def rollups(self, *, since_ms: int) -> list[Rollup]:
        with self.file.read() as db:
            rows = db.execute(self._sql["rollups"], {"since": since_ms}).fetchall()
        return [Rollup._make((*row[:6], tuple(row[6:]))) for row in rows]

    def totals(self) -> dict[str, int]:
        with self.file.read() as db:
            return dict(db.execute(self._sql["totals"]).fetchall())


def _job(row: tuple[Any, ...]) -> Job:
    """The ids it ran after come as one JSON text."""
    return job_from((*row[:-1], msgspec.json.decode(row[-1])))
