"""Step 4 of the walk: grant leases. A plain read finds the lanes, one transaction picks."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from tenure.job import ClaimedJob
from tenure.store import Claim, Registration
from tenure.stores.rows import in_order
from tenure.stores.sqlite.base import SqliteBase, to_json

if TYPE_CHECKING:
    import sqlite3

LARGE_PAYLOAD = 8192  # characters; such a one is read by itself
ORGS_PER_LOOK = 256
LOOKS_PER_CLAIM = 16
PROMOTED_AT_ONCE = 1000
WALKED_AT_ONCE = 2000
# What was passed over is looked at again so often, and for at most a twentieth of the time: a job
# of ours may have gone back to a place among them.
AGAIN_SECONDS, AGAIN_SHARE = 0.25, 20
MOST_MIXED = 4096
FRUITLESS_SECONDS = 0.25

_claimed = msgspec.json.Decoder(list[ClaimedJob]).decode

Types = frozenset[str] | None
Lane = tuple[str, int, str]  # queue, priority, org


class Tier(NamedTuple):
    """A queue and priority, and its orgs with due rows, in turn."""

    queue: str
    priority: int
    orgs: list[str]


class Mixed:
    """A lane in which others have jobs too: up to which place nothing is left for us."""

    def __init__(self) -> None:
        self.since, self.since_id = -1, ""
        self.began = time.monotonic()  # this walk over it
        self.cost = 0.0

    def begin_again_when_due(self) -> None:
        now = time.monotonic()
        if now - self.began > max(AGAIN_SECONDS, AGAIN_SHARE * self.cost):
            self.since, self.since_id, self.began, self.cost = -1, "", now, 0.0


class Look(NamedTuple):
    """What a plain read has found: where to pick, without a lock."""

    tiers: list[Tier]
    cut: bool  # there may be orgs it has not looked at
    later: list[str]  # queues in which the time of some jobs has come
    suspects: bool


class Claiming(SqliteBase):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._turn: dict[tuple[str, int], str] = {}  # (queue, priority) -> org served last
        self._mixed: dict[Types, dict[Lane, Mixed]] = {}
        self._looked: dict[str, int] = {}  # queue -> up to when
        self._fruitless: float | None = None  # since when claims have found nothing, org after org

    def claim(
        self,
        worker: Registration,
        wants: Sequence[tuple[str, int]],
        types: Types = None,
        *,
        suspects: bool = False,
        limit: int | None = None,
        now_ms: int | None = None,
    ) -> Claim:
        """First a plain read of where due rows are (no lock when there are none), then one write
        transaction that picks from there, checking everything again."""
        limits = {queue: most for queue, most in wants if most > 0}
        left = sum(limits.values()) if limit is None else limit
        mixed = self._mixed.setdefault(types, {})
        for lane in list(mixed)[: max(0, len(mixed) - MOST_MIXED)]:
            del mixed[lane]
        with self.file.read() as db:
            look = self._look(db, limits, types, self._now(now_ms))
        if suspects and look.suspects:
            return self._claim_suspects(worker, limits, left, types, now_ms)
        if suspects or not (look.tiers or look.later):
            return Claim([], suspects=look.suspects)
        with self.file.write() as db:
            now = self._now(now_ms)
            if not self._alive(db, worker):
                return Claim([])
            promoted = self._promote(db, look.later, now)
            if promoted:
                look = self._look(db, limits, types, now)
            picked = self._pick_all(db, look.tiers, limits, left, types)
            jobs = self._read(db) if picked.any else []
            foreign = [job for job in jobs if types is not None and job.type not in types]
            if foreign:
                self._leave_alone(db, foreign, picked, mixed)
                jobs = [job for job in jobs if job.type not in picked.unknown]
            if jobs:
                self._grant(db, worker, jobs, now, apart=bool(foreign) or picked.apart)
        room = len(jobs) < left
        behind = picked.more or bool(foreign) or promoted >= PROMOTED_AT_ONCE
        more = room and (behind or (look.cut and self._go_on(bool(jobs))))
        return Claim(in_order(jobs), picked.unknown, more, look.suspects)

    def _go_on(self, granted: bool) -> bool:
        """Orgs were not looked at because others came first that had nothing for us: those are
        next, for a while."""
        now = time.monotonic()
        if granted or self._fruitless is None:
            self._fruitless = None if granted else now
            return True
        if now - self._fruitless < FRUITLESS_SECONDS:
            return True
        self._fruitless = None
        return False

    def _alive(self, db: sqlite3.Connection, worker: Registration) -> bool:
        named = {"worker": worker.no, "worker_id": worker.id}
        return db.execute(self._sql["worker_alive"], named).fetchone() is not None

    # -- looking ------------------------------------------------------------------------------
    def _look(
        self, db: sqlite3.Connection, limits: Mapping[str, int], types: Types, now: int
    ) -> Look:
        tiers: list[Tier] = []
        cut = suspects = False
        later = []
        for queue, limit in limits.items():
            asked = {"queue": queue, "now": now}
            paused, waiting, suspicious = db.execute(self._sql["claim_others"], asked).fetchone()
            if paused:
                continue
            self._looked[queue] = now
            suspects = suspects or bool(suspicious)
            if waiting:
                later.append(queue)
            for (priority,) in db.execute(self._sql["claim_priorities"], asked).fetchall():
                orgs, stopped = self._due_orgs(db, queue, priority, limit, types)
                cut = cut or stopped
                if orgs:
                    tiers.append(Tier(queue, priority, orgs))
        return Look(tiers, cut, later, suspects)

    def _due_orgs(
        self, db: sqlite3.Connection, queue: str, priority: int, wanted: int, types: Types
    ) -> tuple[list[str], bool]:
        """Orgs with a due row, starting after the one served last; at most one round. Whether
        there may be others."""
        start = self._turn.get((queue, priority), "")
        due: list[str] = []
        at, wrapped = start, start == ""
        for _look in range(LOOKS_PER_CLAIM):
            found = db.execute(
                self._sql["claim_orgs"],
                {"queue": queue, "priority": priority, "org": at, "most": ORGS_PER_LOOK},
            ).fetchall()
            for (org,) in found:
                if wrapped and start and org > start:
                    return due, False
                if self._anything_for_us(db, (queue, priority, org), types):
                    due.append(org)
            if len(due) >= wanted:
                return due, True
            if len(found) < ORGS_PER_LOOK:
                if wrapped:
                    return due, False
                at, wrapped = "", True
            else:
                at = found[-1][0]
        self._turn[queue, priority] = at
        return due, True

    def _anything_for_us(self, db: sqlite3.Connection, lane: Lane, types: Types) -> bool:
        """Mostly: nobody else has been met here. A lane may be mixed without our knowing."""
        mixed = self._mixed[types]
        if not mixed:
            return True
        place = mixed.get(lane)
        if place is None:
            (first,) = db.execute(self._sql["claim_first_type"], _named(lane)).fetchone()
            if types is None or first in types:
                return True
            place = mixed[lane] = Mixed()
        place.begin_again_when_due()
        return db.execute(self._sql["claim_behind"], _after(lane, place)).fetchone() is not None

    # -- picking ------------------------------------------------------------------------------
    def _promote(self, db: sqlite3.Connection, queues: list[str], now: int) -> int:
        moved = 0
        for queue in queues:
            asked = {"queue": queue, "now": now, "most": PROMOTED_AT_ONCE}
            moved += db.execute(self._sql["claim_promote"], asked).rowcount
            db.execute(self._sql["claim_promoted"], asked)
        return moved

    def _pick_all(
        self,
        db: sqlite3.Connection,
        tiers: list[Tier],
        limits: dict[str, int],
        left: int,
        types: Types,
    ) -> _Picked:
        """Fill `picked`, priority by priority; what stands behind jobs of others is walked to."""
        db.execute("DELETE FROM temp.picked")
        picked = _Picked()
        mixed = self._mixed[types]
        paused = {row[0] for row in db.execute(self._sql["paused_queues"])}
        for queue, priority, orgs in tiers:
            most = min(limits[queue], left)
            if queue in paused or most <= 0:
                continue
            plain = [org for org in orgs if (queue, priority, org) not in mixed]
            found = self._pick(db, queue, priority, plain, most) if plain else 0
            for org in orgs:
                lane = (queue, priority, org)
                if lane in mixed and found < most:
                    self._turn[queue, priority] = org
                    found += self._walk_past(db, lane, mixed[lane], most - found, types, picked)
            limits[queue] -= found
            left -= found
            picked.any = picked.any or found > 0
        return picked

    def _pick(
        self, db: sqlite3.Connection, queue: str, priority: int, orgs: list[str], most: int
    ) -> int:
        """From one priority's lanes: equal shares for the orgs, what one leaves to the others."""
        picked = 0
        taken = dict.fromkeys(orgs, 0)
        while orgs and picked < most:
            share, extra = divmod(most - picked, len(orgs))
            hungry = []
            for place, org in enumerate(orgs):
                want = share + (place < extra)
                if want == 0:
                    break
                asked = _named((queue, priority, org)) | {"most": want, "skip": taken[org]}
                got = db.execute(self._sql["claim_pick"], asked).rowcount
                taken[org] += got
                picked += got
                self._turn[queue, priority] = org
                if got == want:
                    hungry.append(org)
            orgs = hungry
        return picked

    def _walk_past(
        self,
        db: sqlite3.Connection,
        lane: Lane,
        place: Mixed,
        most: int,
        types: Types,
        picked: _Picked,
    ) -> int:
        """From a lane in which others have jobs too: a bounded number of rows is read."""
        began, from_the_beginning = time.monotonic(), place.since < 0
        asked = _after(lane, place) | {"most": WALKED_AT_ONCE}
        rows = db.execute(self._sql["claim_walk"], asked).fetchall()
        if from_the_beginning and types is not None and {row[2] for row in rows} <= types:
            del self._mixed[types][lane]  # the others have gone
        ours: list[str] = []
        for ready_at, id, type_ in rows:
            if types is None or type_ in types:
                if len(ours) == most:
                    break
                ours.append(id)
            else:
                picked.unknown[type_] = picked.unknown.get(type_, 0) + 1
            place.since, place.since_id = ready_at, id
        else:
            picked.more = picked.more or len(rows) == WALKED_AT_ONCE
        place.cost += time.monotonic() - began
        if ours:
            db.execute(self._sql["claim_pick_these"], {"ids": to_json(ours)})
            picked.apart = True
        return len(ours)

    def _leave_alone(
        self,
        db: sqlite3.Connection,
        foreign: list[ClaimedJob],
        picked: _Picked,
        mixed: dict[Lane, Mixed],
    ) -> None:
        """They are not for us, and not written to: the next claim walks past them."""
        db.execute(self._sql["claim_unpick"], {"ids": to_json([job.id for job in foreign])})
        for job in foreign:
            picked.unknown[job.type] = picked.unknown.get(job.type, 0) + 1
            mixed.setdefault((job.queue, job.priority, job.org), Mixed())

    # -- granting -----------------------------------------------------------------------------
    def _grant(
        self,
        db: sqlite3.Connection,
        worker: Registration,
        jobs: list[ClaimedJob],
        now: int,
        *,
        apart: bool,
    ) -> None:
        """`apart`: they are not the first ones of their lanes."""
        lanes = {} if apart else _last_of_each_lane(jobs)
        for lane, (ready_at, id) in lanes.items():
            last = {"ready_at": ready_at, "id": id}
            db.execute(self._sql["claim_leave"], _named(lane) | last)
        if apart:
            db.execute(self._sql["claim_leave_these"])
        self._lease(db, worker, now)

    def _lease(self, db: sqlite3.Connection, worker: Registration, now: int) -> None:
        parameters = {"worker": worker.no, "now": now}
        db.execute(self._sql["claim_grant"], parameters)
        if self._trail(db) == "all":
            db.execute(self._sql["claim_events"], parameters)

    def _read(self, db: sqlite3.Connection) -> list[ClaimedJob]:
        """What was picked, as it will be once granted."""
        (text,) = db.execute(self._sql["claim_read"], {"large": LARGE_PAYLOAD}).fetchone()
        jobs = _claimed(text)
        for place, job in enumerate(jobs):
            if not job.payload:
                (payload,) = db.execute(self._sql["claim_large"], {"id": job.id}).fetchone()
                jobs[place] = job._replace(payload=payload)
        return jobs

    def _claim_suspects(
        self,
        worker: Registration,
        limits: Mapping[str, int],
        left: int,
        types: Types,
        now_ms: int | None,
    ) -> Claim:
        """They run alone: neither lanes nor turns matter."""
        asked: dict[str, Any] = {"types": None if types is None else to_json(sorted(types))}
        with self.file.write() as db:
            now = self._now(now_ms)
            if not self._alive(db, worker):
                return Claim([])
            db.execute("DELETE FROM temp.picked")
            paused = {row[0] for row in db.execute(self._sql["paused_queues"])}
            for queue, limit in limits.items():
                most = min(limit, left)
                if queue not in paused and most > 0:
                    asked |= {"queue": queue, "now": now, "most": most}
                    left -= db.execute(self._sql["claim_pick_suspects"], asked).rowcount
            jobs = self._read(db)
            if jobs:
                db.execute(self._sql["claim_leave_suspects"])
                self._lease(db, worker, now)
        return Claim(in_order(jobs))

    # -- time ---------------------------------------------------------------------------------
    def next_due(self, queues: Sequence[str], *, now_ms: int | None = None) -> int | None:
        """What was due when claims looked last and is still there is not for this worker, or there
        was no room for it."""
        now = self._now(now_ms)
        soonest: list[int] = []
        with self.file.read() as db:
            paused = {row[0] for row in db.execute(self._sql["paused_queues"])}
            for queue in queues:
                if queue not in paused:
                    asked = {"queue": queue, "since": self._looked.get(queue, -1)}
                    (due,) = db.execute(self._sql["next_due"], asked).fetchone()
                    soonest += [] if due is None else [due]
        return max(0, min(soonest) - now) if soonest else None

    def sweep(self, *, now_ms: int | None = None) -> int:
        """What a claim here passes over it looks at again by itself."""
        return 0


class _Picked:
    """What the picking of one claim has come to."""

    def __init__(self) -> None:
        self.any = False
        self.apart = False  # some are not the first ones of their lanes
        self.more = False  # a walk stopped at its bound
        self.unknown: dict[str, int] = {}


def _named(lane: Lane) -> dict[str, Any]:
    queue, priority, org = lane
    return {"queue": queue, "priority": priority, "org": org}


def _after(lane: Lane, place: Mixed) -> dict[str, Any]:
    return _named(lane) | {"since": place.since, "since_id": place.since_id}


def _last_of_each_lane(jobs: list[ClaimedJob]) -> dict[Lane, tuple[int, str]]:
    lanes: dict[Lane, tuple[int, str]] = {}
    for job in jobs:
        lane, place = (job.queue, job.priority, job.org), (job.ready_at, job.id)
        if lane not in lanes or place > lanes[lane]:
            lanes[lane] = place
    return lanes
