"""What people and programs read: jobs, events, queues, counts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from tenure.job import STATUSES
from tenure.store import DeadGroup, EventPage, Filter, Page, QueueInfo, Rollup, Totals
from tenure.stores import listing
from tenure.stores.listing import CAP, WALK, Walked
from tenure.stores.rows import event_from, groups_from, job_from, queues_from
from tenure.stores.sqlite.base import to_json
from tenure.stores.sqlite.connections import lenient
from tenure.stores.sqlite.retention import Retention

if TYPE_CHECKING:
    import sqlite3

    from tenure.stored import Job

LAST_ID = "~"  # behind every ULID
MOST_GROUPS = 1000
MOST_ORGS = 256  # of a priority, in which the oldest due job is looked for
# What a listing may be narrowed by; only what was asked for is put into the statement.
CONDITIONS = {
    "status": "j.status = :status",
    "type": "j.type = :type",
    "queue": "j.queue = :queue",
    "org": "j.org = :org",
    "place": "j.error_place = :place",
}
# What a walk goes through, besides.
WALKS = {
    "walk_dead": ["j.completed_at IS NOT NULL", "j.status = :status"],
    "walk_cancelled": ["j.status = 'cancelled'"],
}
QUEUED = "j.status = 'queued' AND l.id IS NULL"  # the row of a running job says so, too


class Reading(Retention):
    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        """Whatever bytes a row has for text, it is shown."""
        with self.file.read() as db:
            db.text_factory = lenient
            try:
                yield db
            finally:
                db.text_factory = self.file.text

    def get(self, id: str, *, org: str | None = None) -> Job | None:
        with self._reading() as db:
            for table in ("hot", "finished"):  # in this order: jobs move from one to the other
                columns = self._columns(table, self._sql[table])
                statement = f"{columns} {self._sql['job_by_id']}"
                row = db.execute(statement, {"id": id, "org": org}).fetchone()
                if row is not None:
                    return _job(row)
        return None

    def find(self, where: Filter, *, before: str | None = None, limit: int = 100) -> Page:
        given = where._asdict() | {"before": before or LAST_ID, "most": limit, "walk": WALK}
        with self._reading() as db:
            if where.key is not None:
                owners = {row[0] for row in db.execute(self._sql["key_owners"], given)}
                where = where._replace(
                    ids=tuple(owners & set(where.ids) if where.ids is not None else owners)
                )
            if where.ids is not None:
                given["ids"] = to_json(where.ids)
                parts = [self._among(db, table, where, given) for table in ("hot", "finished")]
            else:
                walks = listing.walks(where)
                given["walk"] = WALK // len(walks)
                parts = [self._walk(db, walk, where, given) for walk in walks]
        rows, further = listing.merged(parts, limit)
        return Page([_job(row) for row in rows], further)

    def _walk(
        self, db: sqlite3.Connection, walk: str, where: Filter, given: dict[str, Any]
    ) -> Walked:
        """The rows that fit among the next ones of a table, and where the walk stops."""
        table = "finished" if walk in ("walk_finished", "walk_cancelled") else "hot"
        source = self._sql[walk]
        walked = [*WALKS.get(walk, ()), "j.id < :before"]
        narrowing = _conditions(walk, where)
        end = None
        if narrowing:  # or a page is a page
            ends = self._sql["walk_end"].replace("{source}", source)
            stopped = db.execute(ends.replace("{where}", _where(walked)), given).fetchone()
            end = None if stopped is None else stopped[0]
        if end is not None:
            walked.append("j.id >= :end")
        ordered = f"{_where([*walked, *narrowing])}{self._sql['job_order']}"
        statement = f"{self._columns(table, source)} {ordered}"
        rows = db.execute(statement, given | {"end": end}).fetchall()
        return Walked(rows, None if len(rows) >= given["most"] else end)

    def _among(
        self, db: sqlite3.Connection, table: str, where: Filter, given: dict[str, Any]
    ) -> Walked:
        if where.status == "in_progress":
            running = "l.id IS NOT NULL" if table == "hot" else "false"
            conditions = [*_conditions("walk_held", where), running]
        else:
            conditions = _conditions(table, where)
        conditions += ["j.id IN (SELECT value FROM json_each(:ids))", "j.id < :before"]
        columns = self._columns(table, self._sql[table])
        statement = f"{columns} {_where(conditions)}{self._sql['job_order']}"
        return Walked(db.execute(statement, given).fetchall(), None)

    def _columns(self, table: str, source: str) -> str:
        columns = self._sql["job_hot" if table == "hot" else "job_history"]
        return columns.replace("{source}", source)

    def events(
        self,
        *,
        job_id: str | None = None,
        org: str | None = None,
        after: int = 0,
        limit: int = 100,
    ) -> EventPage:
        """One writer: numbers appear in their order, so whatever is there is final."""
        name = "events_all" if job_id is None else "events_of_job"
        parameters = {"job_id": job_id, "org": org, "after": after, "most": limit}
        with self._reading() as db:
            rows = db.execute(self._sql[name], parameters).fetchall()
            (final,) = db.execute(self._sql["last_event"]).fetchone()
        return EventPage([event_from(row) for row in rows], final)

    def dead_groups(self, where: Filter, *, limit: int = 100) -> list[DeadGroup]:
        rows: list[tuple[Any, ...]] = []
        counted = self._sql["dead_group" if where.org is None else "dead_group_of_org"]
        with self._reading() as db:
            for number, (queue, type_, death) in enumerate(self._deaths(db)):
                if number >= MOST_GROUPS:
                    break
                if where.queue in (None, queue) and where.type in (None, type_):
                    group = {"queue": queue, "type": type_, "death": death, "org": where.org}
                    asked = group | {"most": CAP + 1}
                    rows += db.execute(counted, asked).fetchall()
        return groups_from(rows, where, limit)

    def queues(self, *, now_ms: int | None = None) -> list[QueueInfo]:
        now = self._now(now_ms)
        with self._reading() as db:
            switches = db.execute(self._sql["queue_switches"]).fetchall()
            counted = db.execute(self._sql["running_counts"], {"now": now}).fetchall()
            for name, *_switch in switches:
                asked = {"queue": name, "now": now, "most": CAP + 1}
                counts = db.execute(self._sql["queue_counts"], asked).fetchone()
                counted.append(counts)
                if counts[1] > CAP:  # the oldest may stand behind what was counted
                    counted += self._first_ready(db, name, now)
        return queues_from(counted, switches)

    def _first_ready(self, db: sqlite3.Connection, queue: str, now: int) -> list[tuple[Any, ...]]:
        """As `queues_from` reads it: nothing counted, the first due time of each priority."""
        asked = {"queue": queue, "most": MOST_ORGS}
        first = []
        for (priority,) in db.execute(self._sql["claim_priorities"], asked).fetchall():
            parameters = asked | {"priority": priority}
            first += db.execute(self._sql["first_ready"], parameters).fetchone()
        return [(queue, 0, 0, 0, 0, 0, ready_at, now) for ready_at in first]

    def queue_names(self) -> dict[str, bool]:
        with self._reading() as db:
            return {name: bool(p) for name, p in db.execute(self._sql["queue_names"]).fetchall()}

    def unknown_types(self, types: frozenset[str]) -> dict[str, int]:
        with self._reading() as db:
            parameters = {"types": to_json(sorted(types)), "walk": WALK}
            return dict(db.execute(self._sql["unknown_types"], parameters).fetchall())

    def rollups(self, *, since_ms: int) -> list[Rollup]:
        with self._reading() as db:
            rows = db.execute(self._sql["rollups"], {"since": since_ms}).fetchall()
        return [Rollup._make((*row[:6], tuple(row[6:]))) for row in rows]

    def totals(self) -> Totals:
        counts: dict[str, int] = dict.fromkeys(STATUSES, 0)
        with self._reading() as db:
            counts |= dict(db.execute(self._sql["totals"], {"most": CAP + 1}).fetchall())
        return Totals(*listing.capped(counts))


def _conditions(walk: str, where: Filter) -> list[str]:
    """On a hot table `queued` is said of what is running, too."""
    names = listing.narrowing(walk, where)
    if walk in ("hot", "walk_hot") and where.status == "queued":
        return [QUEUED, *(CONDITIONS[name] for name in names if name != "status")]
    return [CONDITIONS[name] for name in names]


def _where(conditions: list[str]) -> str:
    return f"WHERE {' AND '.join(conditions)} " if conditions else ""


def _job(row: tuple[Any, ...]) -> Job:
    """The ids it ran after come as one JSON text."""
    return job_from((*row[:-1], msgspec.json.decode(row[-1])))
