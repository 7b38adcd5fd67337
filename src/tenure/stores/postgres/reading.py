"""What people and programs read: jobs, events, queues, counts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tenure.job import STATUSES
from tenure.store import DeadGroup, EventPage, Filter, Page, QueueInfo, Rollup, Totals
from tenure.stores import listing
from tenure.stores.listing import CAP, WALK, Walked
from tenure.stores.postgres.base import PostgresBase
from tenure.stores.postgres.database import to_uuid_text, to_uuids
from tenure.stores.rows import event_from, groups_from, job_from, queues_from

if TYPE_CHECKING:
    from tenure.stored import Event, Job

LAST_ID = "ffffffff-ffff-ffff-ffff-ffffffffffff"
# What a listing may be narrowed by; only what was asked for is put into the statement.
CONDITIONS = {
    "status": "j.status = %(status)s",
    "type": "j.type = %(type)s",
    "queue": "j.queue = %(queue)s",
    "org": "j.org = %(org)s",
    "place": "j.error_place = %(place)s",
}


class Reading(PostgresBase):
    def get(self, id: str, *, org: str | None = None) -> Job | None:
        parameters = {"id": to_uuid_text(id), "org": org}
        for table in ("hot", "finished"):  # in this order: jobs move from one to the other
            statement = f"{self._columns(table, self._text(table))} {self._text('job_by_id')}"
            for row in self._read(statement, parameters):
                return _job(row)
        return None

    def find(self, where: Filter, *, before: str | None = None, limit: int = 100) -> Page:
        given: dict[str, Any] = {k: v for k, v in where._asdict().items() if v is not None}
        given["before"] = LAST_ID if before is None else to_uuid_text(before)
        if where.key is not None:
            asked = {"key": where.key, "org": where.org, "walk": WALK}
            owners = {id for (id,) in self._rows("key_owners", asked)}
            where = where._replace(
                ids=tuple(owners & set(where.ids) if where.ids is not None else owners)
            )
        if where.ids is not None:
            given["ids"] = to_uuids(where.ids)
            parts = [self._among(table, where, given, limit) for table in ("hot", "finished")]
        else:
            walks = listing.walks(where)
            given["walk"] = WALK // len(walks)
            parts = [self._walk(walk, where, given, limit) for walk in walks]
        rows, further = listing.merged(parts, limit)
        return Page([_job(row) for row in rows], further)

    def _walk(self, walk: str, where: Filter, given: dict[str, Any], limit: int) -> Walked:
        """The rows that fit among the next ones of a table, and where the walk stopped."""
        table = "finished" if walk in ("walk_finished", "walk_cancelled") else "hot"
        source = self._text(walk)
        parameters = given | {"most": limit}
        narrowing = _where([CONDITIONS[name] for name in listing.narrowing(walk, where)])
        ordered = f"{narrowing}{self._text('job_order')}"
        rows = self._read(f"{self._columns(table, source)} {ordered}", parameters)
        if len(rows) >= limit or not narrowing:
            return Walked(rows, None)  # a whole page, or everything there is
        stopped = self._read(self._text("walk_end").replace("{source}", source), parameters)
        return Walked(rows, stopped[0][0] if stopped else None)

    def _among(self, table: str, where: Filter, given: dict[str, Any], limit: int) -> Walked:
        conditions = [CONDITIONS[name] for name in listing.narrowing(table, where)]
        conditions += ["j.id = ANY (%(ids)s::uuid[])", "j.id < %(before)s::uuid"]
        ordered = f"{_where(conditions)}{self._text('job_order')}"
        statement = f"{self._columns(table, self._text(table))} {ordered}"
        return Walked(self._read(statement, given | {"most": limit}), None)

    def _columns(self, table: str, source: str) -> str:
        columns = self._text("job_hot" if table == "hot" else "job_history")
        return columns.replace("{source}", source)

    def _text(self, name: str) -> str:
        return self.database.sql(name)

    def _read(self, statement: str, parameters: dict[str, Any]) -> list[tuple[Any, ...]]:
        return self.database.checked(statement, parameters)

    def events(
        self,
        *,
        job_id: str | None = None,
        org: str | None = None,
        after: int = 0,
        limit: int = 100,
    ) -> EventPage:
        parameters: dict[str, Any] = {"org": org, "after": after, "most": limit}
        if job_id is not None:  # whoever writes of a job holds its row: they come in order
            of_job = parameters | {"job_id": to_uuid_text(job_id)}
            found = [_event(row) for row in self._rows("events_of_job", of_job)]
            return EventPage(found, found[-1].seq if found else after)
        final, held_by = self.horizon.final, None
        rows = self._rows("events_all", parameters | {"final": final}) if final > after else []
        if len(rows) < limit:  # all as far as we knew: how far is it by now?
            final, held_by = self.horizon.look()
            rows = self._rows("events_all", parameters | {"final": final})
        return EventPage([_event(row) for row in rows], final, held_by)

    def dead_groups(self, where: Filter, *, limit: int = 100) -> list[DeadGroup]:
        asked = {"queue": where.queue, "type": where.type, "org": where.org, "most": CAP + 1}
        return groups_from(self._rows("dead_groups", asked), where, limit)

    def queues(self, *, now_ms: int | None = None) -> list[QueueInfo]:
        counted = self._rows("queue_counts", {"now": self._now(now_ms), "most": CAP + 1})
        switches = self._rows("queue_switches", {})
        return queues_from(counted, switches)

    def queue_names(self) -> dict[str, bool]:
        return dict(self._rows("queue_names", {}))

    def unknown_types(self, types: frozenset[str]) -> dict[str, int]:
        rows = self._rows("unknown_types", {"types": sorted(types), "walk": WALK})
        return dict(rows)

    def rollups(self, *, since_ms: int) -> list[Rollup]:
        rows = self._rows("rollups", {"since": since_ms})
        return [Rollup._make((*row[:6], tuple(row[6]))) for row in rows]

    def totals(self) -> Totals:
        counts: dict[str, int] = dict.fromkeys(STATUSES, 0)
        return Totals(*listing.capped(counts | dict(self._rows("totals", {"most": CAP + 1}))))


def _where(conditions: list[str]) -> str:
    return f"WHERE {' AND '.join(conditions)} " if conditions else ""


def _job(row: tuple[Any, ...]) -> Job:
    """Where the row says nothing the job is its own request and correlation."""
    return job_from((*row[:26], row[26] or row[0], row[27] or row[0], *row[28:]))


def _event(row: tuple[Any, ...]) -> Event:
    return event_from((*row[:11], row[11] or row[3], row[12] or row[3], *row[13:]))
