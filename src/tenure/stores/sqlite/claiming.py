"""Step 4 of the walk: grant leases. A plain read finds the lanes, one transaction picks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from tenure.job import ClaimedJob
from tenure.store import Claim
from tenure.stores.rows import in_order
from tenure.stores.sqlite.base import SqliteBase, to_json

if TYPE_CHECKING:
    import sqlite3

UNKNOWN_TYPE_LATER_MS = 10_000
LARGE_PAYLOAD = 8192  # characters; such a one is read by itself
ORGS_PER_LOOK = 256
LOOKS_PER_CLAIM = 16

_claimed = msgspec.json.Decoder(list[ClaimedJob]).decode

Lane = tuple[str, int, list[str]]  # queue, priority, the orgs with due rows, in turn


class Claiming(SqliteBase):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._turn: dict[tuple[str, int], str] = {}  # (queue, priority) -> org served last

    def claim(
        self,
        worker: int,
        wants: Sequence[tuple[str, int]],
        types: frozenset[str] | None = None,
        *,
        limit: int | None = None,
        now_ms: int | None = None,
    ) -> Claim:
        """First a plain read of where due rows are (no lock when there are none), then one write
        transaction that picks from there, checking everything again."""
        limits = {queue: most for queue, most in wants if most > 0}
        left = sum(limits.values()) if limit is None else limit
        with self.file.read() as db:
            lanes, more = self._due_lanes(db, limits, self._now(now_ms))
        if not lanes:
            return Claim([], {}, more)
        with self.file.write() as db:
            now = self._now(now_ms)
            if db.execute(self._sql["worker_alive"], {"worker": worker}).fetchone() is None:
                return Claim([], {}, False)
            db.execute("DELETE FROM temp.picked")
            picked = 0
            paused = {row[0] for row in db.execute(self._sql["paused_queues"])}
            for queue, priority, orgs in lanes:
                most = min(limits[queue], left)
                if queue not in paused and most > 0:
                    found = self._pick(db, queue, priority, orgs, most, now)
                    limits[queue] -= found
                    left -= found
                    picked += found
            if not picked:
                return Claim([], {}, more)
            jobs, unknown = self._sort_out(db, types, now)
            if jobs:
                self._grant(db, worker, jobs, now)
        return Claim(jobs, unknown, more)

    def _grant(self, db: sqlite3.Connection, worker: int, jobs: list[ClaimedJob], now: int) -> None:
        lanes = {(job.queue, job.priority, job.org): job for job in jobs}  # the last one of each
        for (queue, priority, org), job in lanes.items():
            db.execute(
                self._sql["claim_leave"],
                {
                    "queue": queue,
                    "priority": priority,
                    "org": org,
                    "ready_at": job.ready_at,
                    "id": job.id,
                },
            )
        parameters = {"worker": worker, "now": now}
        db.execute(self._sql["claim_grant"], parameters)
        if self.audit == "all":
            db.execute(self._sql["claim_events"], parameters)

    def _sort_out(
        self, db: sqlite3.Connection, types: frozenset[str] | None, now: int
    ) -> tuple[list[ClaimedJob], dict[str, int]]:
        """What was picked and can be run here, in order; the types, and how many, of the rest."""
        (text,) = db.execute(self._sql["claim_read"], {"large": LARGE_PAYLOAD}).fetchone()
        jobs = _claimed(text)
        unknown: dict[str, int] = {}
        foreign = [job for job in jobs if types is not None and job.type not in types]
        if foreign:
            for job in foreign:
                unknown[job.type] = unknown.get(job.type, 0) + 1
            parameters = {
                "ids": to_json([job.id for job in foreign]),
                "now": now,
                "later_ms": UNKNOWN_TYPE_LATER_MS,
            }
            db.execute(self._sql["claim_put_off"], parameters)
            db.execute(self._sql["claim_unpick"], parameters)
            jobs = [job for job in jobs if job.type not in unknown]
        for place, job in enumerate(jobs):
            if not job.payload:
                (payload,) = db.execute(self._sql["claim_large"], {"id": job.id}).fetchone()
                jobs[place] = job._replace(payload=payload)
        return in_order(jobs), unknown

    def _due_lanes(
        self, db: sqlite3.Connection, limits: Mapping[str, int], now: int
    ) -> tuple[list[Lane], bool]:
        lanes: list[Lane] = []
        more = False
        for queue, limit in limits.items():
            wanted = limit
            for (priority,) in db.execute(
                self._sql["claim_priorities"], {"queue": queue}
            ).fetchall():
                orgs, cut = self._due_orgs(db, queue, priority, wanted, now)
                more = more or cut
                if orgs:
                    lanes.append((queue, priority, orgs))
        return lanes, more

    def _due_orgs(
        self, db: sqlite3.Connection, queue: str, priority: int, wanted: int, now: int
    ) -> tuple[list[str], bool]:
        """Orgs with a due row, starting after the one served last; at most one round."""
        start = self._turn.get((queue, priority), "")
        due: list[str] = []
        at, wrapped = start, start == ""
        for _look in range(LOOKS_PER_CLAIM):
            found = db.execute(
                self._sql["claim_orgs"],
                {"queue": queue, "priority": priority, "org": at, "most": ORGS_PER_LOOK},
            ).fetchall()
            for org, ready_at in found:
                if wrapped and start and org > start:
                    return due, False
                if ready_at <= now:
                    due.append(org)
                    if len(due) >= wanted:
                        return due, False
            if len(found) < ORGS_PER_LOOK:
                if wrapped:
                    return due, False
                at, wrapped = "", True
            else:
                at = found[-1][0]
        self._turn[queue, priority] = at
        return due, True

    def _pick(
        self,
        db: sqlite3.Connection,
        queue: str,
        priority: int,
        orgs: list[str],
        most: int,
        now: int,
    ) -> int:
        """Fill `picked` from one lane: equal shares for the orgs, what one leaves to the others."""
        picked = 0
        taken = dict.fromkeys(orgs, 0)
        while orgs and picked < most:
            share, extra = divmod(most - picked, len(orgs))
            hungry = []
            for place, org in enumerate(orgs):
                want = share + (place < extra)
                if want == 0:
                    break
                got = db.execute(
                    self._sql["claim_pick"],
                    {
                        "queue": queue,
                        "priority": priority,
                        "org": org,
                        "now": now,
                        "most": want,
                        "skip": taken[org],
                    },
                ).rowcount
                taken[org] += got
                picked += got
                self._turn[queue, priority] = org
                if got == want:
                    hungry.append(org)
            orgs = hungry
        return picked

    def next_due(self, queues: Sequence[str], *, now_ms: int | None = None) -> int | None:
        now = self._now(now_ms)
        soonest: int | None = None
        with self.file.read() as db:
            paused = {row[0] for row in db.execute(self._sql["paused_queues"])}
            for queue in queues:
                if queue in paused:
                    continue
                lanes = db.execute(self._sql["claim_priorities"], {"queue": queue}).fetchall()
                for (priority,) in lanes:
                    ready_at = self._first_ready(db, queue, priority)
                    soonest = ready_at if soonest is None else min(soonest, ready_at)
        return None if soonest is None else max(0, soonest - now)

    def sweep(self, *, now_ms: int | None = None) -> int:
        """A claim here remembers nothing and passes nothing over."""
        return 0

    def _first_ready(self, db: sqlite3.Connection, queue: str, priority: int) -> int:
        """The soonest of all orgs of a lane; beyond 4,096 orgs polling has to do."""
        soonest, org = 1 << 62, ""
        for _look in range(LOOKS_PER_CLAIM):
            found = db.execute(
                self._sql["claim_orgs"],
                {"queue": queue, "priority": priority, "org": org, "most": ORGS_PER_LOOK},
            ).fetchall()
            soonest = min([soonest, *(ready_at for _org, ready_at in found)])
            if len(found) < ORGS_PER_LOOK:
                break
            org = found[-1][0]
        return soonest
