"""Step 4 of the walk: grant leases, in one call of tenure.claim.

What the claim remembers. A row that was claimed stays in the index until vacuum removes it, and a
long transaction anywhere in the database keeps vacuum from doing so: every claim would walk over
all that was claimed before (54.8 k jobs/s at first, 1.9 k after 500,000 jobs). So for each lane, a
(queue, priority, org), the place of the last claimed row is remembered and the next claim starts
there; see tenure.lanes. What could appear before that place is looked for by a sweep: a claim
without memory while that is cheap, else a look beside the claims (`sweep`, from the janitor's
thread), which then stall for nothing. No guarantee rests on the memory.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from tenure.job import ClaimedJob
from tenure.store import Claim
from tenure.stores.postgres.base import PostgresBase, to_json
from tenure.stores.postgres.database import to_uuid_text
from tenure.stores.rows import in_order

UNKNOWN_TYPE_LATER_MS = 10_000
SWEEP_SECONDS = 0.1  # a sweep at most this often, and at most a twentieth of the time
SWEEP_SHARE = 20
CHEAP_SECONDS = 0.02  # what takes longer is done beside the claims
SELDOM_SECONDS = 30.0  # or by them after all, when nobody else does it
MOST_LANES = 4096
FIRST_ID = "00000000-0000-0000-0000-000000000000"

Row = tuple[Any, ...]
# Of the rows of tenure.claim that are no granted job; the lease_no of one that could not be.
LEASE_NO, TYPE, ATTEMPTS, QUEUE, PRIORITY, ORG, READY_AT = 1, 2, 4, 8, 9, 11, 22
UNKNOWN_TYPE = 0


class Memory:
    """What one worker remembers of one queue."""

    def __init__(self) -> None:
        self.lanes: dict[tuple[int, str], tuple[int, str]] = {}  # (priority, org): (ready_at, id)
        self.turns: dict[int, str] = {}  # priority: org served last
        self.rewind = 0
        self.start: tuple[int, str] | None = None  # where the walk over the lanes was cut
        self.swept = 0.0
        self.costs = (0.0, 0.0)  # of the last two sweeps, in seconds
        self.hidden = False  # something may be waiting before the remembered places
        self.stale: set[tuple[int, str]] = set()  # lanes in which a sweep has found something

    @property
    def cost(self) -> float:
        """The smaller of two: one may have waited for somebody's lock."""
        return min(self.costs)

    def sweep_in(self) -> float:
        """Seconds until the next sweep may be."""
        return self.swept + max(SWEEP_SECONDS, SWEEP_SHARE * self.cost) - time.monotonic()

    def claim_sweeps(self) -> bool:
        """Whether the next claim is the sweep."""
        if self.cost < CHEAP_SECONDS:
            return self.sweep_in() <= 0
        return time.monotonic() - self.swept > max(SELDOM_SECONDS, 2 * SWEEP_SHARE * self.cost)

    def was_swept(self, began: float) -> None:
        self.swept = time.monotonic()
        self.costs = (self.costs[1], self.swept - began)

    def parameters(self, *, sweep: bool) -> dict[str, Any]:
        while self.stale:
            self.lanes.pop(self.stale.pop(), None)
        given: dict[str, Any] = {"turns": self.turns, "rewind": self.rewind}
        if self.start is not None:
            given["from_priority"], given["from_org"] = self.start
        if self.lanes and not sweep:
            given["lanes"] = [[*lane, *self.lanes[lane]] for lane in sorted(self.lanes)]
        return given

    def learn(self, row: Row, *, sweep: bool) -> None:
        """What the claim says about the queue itself."""
        rewind = int(row[TYPE])
        if rewind != self.rewind:
            self.rewind, sweep = rewind, True
            self.lanes.clear()
        began, self.start = self.start, None if row[ORG] is None else (row[PRIORITY], row[ORG])
        if row[ATTEMPTS] and began is self.start is None:
            # It has seen every lane and taken all that is due: what comes is younger than it.
            moment = row[READY_AT]
            self.lanes = {
                lane: max(place, (moment, FIRST_ID)) for lane, place in self.lanes.items()
            }
            self.hidden = not sweep
        if len(self.lanes) > MOST_LANES:
            self.lanes.clear()

    def take(self, jobs: Iterable[ClaimedJob], moment: int) -> None:
        """The last of each lane that was granted, but nothing of the claim's own millisecond: an
        older job that is retried within it would stand before that. The turn is with the org that
        was served last: they are served from the one after the last turn on, and then from the
        first."""
        served: dict[int, list[str]] = {}
        for job in jobs:
            lane = (job.priority, job.org)
            place = min((job.ready_at, to_uuid_text(job.id)), (moment, FIRST_ID))
            self.lanes[lane] = max(place, self.lanes.get(lane, place))
            served.setdefault(job.priority, []).append(job.org)
        for priority, orgs in served.items():
            turn = self.turns.get(priority, "")
            self.turns[priority] = max((org <= turn, org) for org in orgs)[1]


class Claiming(PostgresBase):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._memory: dict[str, Memory] = {}
        self._types: tuple[frozenset[str] | None, list[str] | None] = (None, None)

    def claim(
        self,
        worker: int,
        wants: Sequence[tuple[str, int]],
        types: frozenset[str] | None = None,
        *,
        limit: int | None = None,
        now_ms: int | None = None,
    ) -> Claim:
        wants = [(queue, most) for queue, most in wants if most > 0]
        total = sum(most for _queue, most in wants) if limit is None else limit
        if not wants or total <= 0:
            return Claim([], {}, False)
        if types is not self._types[0]:
            self._types = (types, None if types is None else sorted(types))
        memories = {queue: self._memory.setdefault(queue, Memory()) for queue, _most in wants}
        sweeps = {queue for queue, memory in memories.items() if memory.claim_sweeps()}
        parameters = {
            "worker": worker,
            "queues": [queue for queue, _most in wants],
            "mosts": [most for _queue, most in wants],
            "total": total,
            "memory": to_json(
                {queue: m.parameters(sweep=queue in sweeps) for queue, m in memories.items()}
            ),
            "types": self._types[1],
            "later_ms": UNKNOWN_TYPE_LATER_MS,
            "audit": self.audit,
            "now": self._now(now_ms),
        }
        began = time.monotonic()
        # Not repeated when its reply is lost: the leases nobody heard of are given back by the
        # next renewals, and the next claim takes others.
        rows = self._rows("claim", parameters, repeatable=False)
        jobs = in_order([ClaimedJob._make(row) for row in rows if row[LEASE_NO] > 0])
        last = {(job.queue, job.priority, job.org): job for job in jobs}
        unknown: dict[str, int] = {}
        more = False
        for row in rows:
            if row[LEASE_NO] > 0:
                continue
            if row[LEASE_NO] == UNKNOWN_TYPE:
                unknown[row[TYPE]] = unknown.get(row[TYPE], 0) + 1
            else:  # a queue that was looked at, which one that is paused was not
                queue, memory = row[QUEUE], memories[row[QUEUE]]
                if queue in sweeps:
                    memory.was_swept(began)
                memory.take((job for lane, job in last.items() if lane[0] == queue), row[READY_AT])
                memory.learn(row, sweep=queue in sweeps)
                more = more or row[ORG] is not None
        return Claim(jobs, unknown, more)

    def next_due(self, queues: Sequence[str], *, now_ms: int | None = None) -> int | None:
        """Never later than the next sweep of a queue that may hide something."""
        known = {queue: self._memory[queue] for queue in queues if queue in self._memory}
        parameters = {
            "queues": list(queues),
            "memory": to_json({queue: m.parameters(sweep=False) for queue, m in known.items()}),
            "now": self._now(now_ms),
        }
        ((due,),) = self._rows("next_due", parameters)
        waits = [
            max(1, int(m.sweep_in() * 1000))
            for m in known.values()
            if m.hidden and m.cost < CHEAP_SECONDS
        ]
        return min([*waits, *([] if due is None else [due])], default=None)

    def sweep(self, *, now_ms: int | None = None) -> int:
        """Look for due rows before the remembered places of the queues where a claim should not."""
        found = 0
        for queue, memory in list(self._memory.items()):
            if memory.cost < CHEAP_SECONDS or memory.sweep_in() > 0:
                continue
            began = time.monotonic()
            lanes = self._rows("due_lanes", {"queue": queue, "now": self._now(now_ms)})
            places = memory.lanes
            behind = {
                (priority, org)
                for priority, org, ready_at in lanes
                if ready_at < places.get((priority, org), (-1, ""))[0]
            }
            memory.stale |= behind
            memory.hidden = False
            memory.was_swept(began)
            found += len(behind)
        return found
