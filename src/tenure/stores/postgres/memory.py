"""What a claim remembers of a queue. No guarantee rests on it.

A row that was claimed stays in the index until vacuum removes it, and a long transaction anywhere
in the database keeps vacuum from doing so: every claim would walk over all that was claimed before
(54.8 k jobs/s at first, 1.9 k after 500,000 jobs). So for each lane, a (priority, org), the place
of the last claimed row is remembered and the next claim starts there; see tenure.lanes. The same
for lanes that hold jobs which are not for this claim (types nobody here knows): what was looked at
once is not walked over again.

What could appear before a place is looked for by a sweep: a claim without places while that is
cheap, else a look beside the claims (`Claiming.sweep`, from the janitor's thread), which then stall
for nothing. Past the jobs of others a sweep goes by claims in any case, 4,000 rows each: only they
know what is for us. A lane is forgotten when it is empty, but for the last few: each costs every
claim a step or two (71 ms with 4,000 of them).
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from tenure.job import ClaimedJob
from tenure.stores.postgres.database import to_uuid_text

SWEEP_SECONDS = 0.1  # a sweep at most this often, and at most a twentieth of the time
SWEEP_SHARE = 20
CHEAP_SECONDS = 0.02  # what takes longer is done beside the claims
GRANT_SECONDS = 0.0002  # a granted job: 0.02 to 0.08 ms, more on a busy machine
SELDOM_SECONDS = 30.0  # or by them after all, when nobody else does it
MOST_LANES = 256
IDLE_LANES = 8  # that had nothing in the last claim, while sweeps are cheap
# A walk over a mixed lane that was at its end begins so much before it, the next time: what commits
# late stands there. As in other lanes, or shorter where that would be many rows of others.
TRAIL_MS, SHORT_TRAIL_MS, SHORT_FROM = 2000, 200, 500
FIRST_ID = "00000000-0000-0000-0000-000000000000"

Lane = tuple[int, str]  # priority, org
Place = tuple[int, str]  # ready_at, id
NOWHERE: Place = (-1, FIRST_ID)

_reports = msgspec.json.Decoder(list[Any]).decode


class News(NamedTuple):
    """What a claim says about a queue besides the jobs it grants."""

    unknown: dict[str, int]  # types passed over
    more: bool  # the walk stopped at its bound
    suspects: bool  # there are some


class Memory:
    """What one worker remembers of one queue, for claims of the same types."""

    def __init__(self) -> None:
        self.lanes: dict[Lane, Place] = {}  # the one served last is last
        self.mixed: dict[Lane, int] = {}  # with rows that are not for us: by how much places trail
        self.later: Place | None = None  # of jobs whose time has come
        self.turns: dict[int, str] = {}  # priority: org served last
        self.rewind = 0
        self.looked = -1  # up to when, in the store's milliseconds
        self.rounds: dict[int, str] = {}  # priority: where a round that finds nothing has begun
        self.swept = 0.0
        self.costs = (0.0, 0.0)  # of the last two sweeps, in seconds
        self.sweeping: float | None = None  # since when one is under way that takes several claims
        self.hidden = False  # something may be waiting before the remembered places
        self.stale: set[Lane] = set()  # lanes in which a sweep has found something

    # -- sweeps -------------------------------------------------------------------------------
    @property
    def cost(self) -> float:
        """The smaller of two: one may have waited for somebody's lock."""
        return min(self.costs)

    @property
    def cheap(self) -> bool:
        return self.cost < CHEAP_SECONDS

    def sweep_in(self) -> float:
        """Seconds until the next sweep may be."""
        return self.swept + max(SWEEP_SECONDS, SWEEP_SHARE * self.cost) - time.monotonic()

    @property
    def by_claims(self) -> bool:
        """Whether claims sweep, and not only when nobody else does."""
        return self.cheap or bool(self.mixed)

    def claim_sweeps(self) -> bool:
        """Whether the next claim is the sweep."""
        if self.sweeping is not None:
            return False
        if self.by_claims:
            return self.sweep_in() <= 0
        return time.monotonic() - self.swept > max(SELDOM_SECONDS, 2 * SWEEP_SHARE * self.cost)

    def was_swept(self, began: float, granted: int = 0) -> None:
        """`granted`: jobs, by the claim that was the sweep. What they cost is not the sweep's: a
        worker that takes 500 at a time would remember lanes for nothing."""
        self.swept = time.monotonic()
        self.costs = (self.costs[1], self.swept - began - GRANT_SECONDS * granted)
        self.sweeping = None

    def compare(self, lanes: Iterable[tuple[int, str, int]]) -> int:
        """(priority, org, first ready_at) as a look from their beginning found them; priority 0 is
        what was to run later. How many have something before their place."""
        behind = 0
        for priority, org, ready_at in lanes:
            if priority == 0:
                if self.later is not None and ready_at < self.later[0]:
                    self.later = None
                    behind += 1
            elif ready_at < self.lanes.get((priority, org), NOWHERE)[0]:
                self.stale.add((priority, org))
                behind += 1
        self.hidden = False
        return behind

    # -- to the claim -------------------------------------------------------------------------
    def parameters(self, *, sweep: bool) -> dict[str, Any]:
        """As tenure.claim_jobs reads it. A sweep begins at the beginning, but knows which lanes
        are mixed: there a claim walks step by step."""
        while self.stale:
            self.lanes.pop(self.stale.pop(), None)
        given: dict[str, Any] = {"turns": self.turns, "rewind": self.rewind}
        known = self.mixed.keys() if sweep else self.lanes.keys() | self.mixed.keys()
        if known:
            stones: dict[int, list[Any]] = {}
            for priority, org in sorted(known):
                place = NOWHERE if sweep else self.lanes.get((priority, org), NOWHERE)
                trail = self.mixed.get((priority, org))
                mixed = [] if trail is None else [trail]
                stones.setdefault(priority, []).append([org, *place, *mixed])
            given |= {"lanes": stones, "low": min(stones), "high": max(stones)}
        if self.later is not None and not sweep:
            given["later"] = self.later
        return given

    # -- from the claim -----------------------------------------------------------------------
    def learn(
        self, report: str, jobs: list[ClaimedJob], moment: int, room: bool, *, sweep: bool
    ) -> News:
        """What a claim at `moment` says of the queue, with the last job of each lane it granted;
        `room`: it could have granted more."""
        rewind, *details = _reports(report)
        if rewind != self.rewind:
            self.rewind, sweep = rewind, True
            self.lanes.clear()
            self.later = None
        self.looked = moment
        self._take(jobs, moment)
        news = self._note(details, granted=bool(jobs), sweep=sweep)
        if room and not news.more:
            # It has seen every lane and taken all that is due: what comes is younger than it.
            here = (moment, FIRST_ID)
            self.lanes = {lane: max(place, here) for lane, place in self.lanes.items()}
            self.later = here
            self.hidden = not sweep
        self._forget({(job.priority, job.org) for job in jobs})
        return news

    def _take(self, jobs: Iterable[ClaimedJob], moment: int) -> None:
        """The last of each lane that was granted, but nothing of the claim's own millisecond: an
        older job that is retried within it would stand before that. The turn is with the org that
        was served last: they are served from the one after the last turn on, and then from the
        first."""
        served: dict[int, list[str]] = {}
        for job in jobs:
            lane = (job.priority, job.org)
            place = min((job.ready_at, to_uuid_text(job.id)), (moment, FIRST_ID))
            self.lanes[lane] = max(place, self.lanes.pop(lane, place))
            served.setdefault(job.priority, []).append(job.org)
        for priority, orgs in served.items():
            turn = self.turns.get(priority, "")
            self.turns[priority] = max((org <= turn, org) for org in orgs)[1]

    def _note(self, details: list[Any], *, granted: bool, sweep: bool) -> News:
        unknown: dict[str, int] = {}
        more = suspects = False
        cuts: dict[int, str] = {}
        for detail in details:
            if "cut" in detail:
                priority, org = detail["cut"]
                cuts[priority] = org
            elif "suspects" in detail:
                suspects = True
            else:
                for type_, count in detail["passed"].items():
                    unknown[type_] = unknown.get(type_, 0) + count
                whole = detail["place"] is not None or "lane" not in detail
                more = more or (detail["more"] and whole)
                self._remember(detail, sweep=sweep)
        return News(unknown, self._go_round(cuts, granted) or more, suspects)

    def _remember(self, detail: dict[str, Any], *, sweep: bool) -> None:
        place = detail["place"]
        if "lane" not in detail:
            self.later = self.later if place is None else (place[0], place[1])
            return
        priority, org = detail["lane"]
        lane = (priority, org)
        before = self.mixed.pop(lane, None)
        passed = sum(detail["passed"].values())
        if passed or (before is not None and not (sweep and not detail["more"])):
            trail = TRAIL_MS if passed < SHORT_FROM else SHORT_TRAIL_MS
            self.mixed[lane] = 0 if detail["more"] else trail
        if place is not None:
            self.lanes[lane] = (place[0], place[1])

    def _go_round(self, cuts: dict[int, str], granted: bool) -> bool:
        """Lanes were not looked at because others came first that had nothing for us: the next
        claim goes on behind those, until it has been all the way round."""
        again = False
        for priority, org in cuts.items():
            turn = self.turns.get(priority, "")
            began = turn if granted else self.rounds.setdefault(priority, turn)
            self.turns[priority] = org
            passed = (turn < began <= org) if turn < org else (began > turn or began <= org)
            if passed and not granted:
                del self.rounds[priority]
            else:
                again = True
        for priority in [each for each in self.rounds if each not in cuts or granted]:
            del self.rounds[priority]
        return again

    def _forget(self, served: set[Lane]) -> None:
        if len(self.mixed) > MOST_LANES:
            for lane in list(self.mixed)[: len(self.mixed) - MOST_LANES]:
                del self.mixed[lane]
                self.lanes.pop(lane, None)
        idle = [lane for lane in self.lanes if lane not in served and lane not in self.mixed]
        kept = IDLE_LANES if self.cheap else MOST_LANES
        for lane in idle[: max(0, len(idle) - kept)]:
            del self.lanes[lane]
