"""How many, how fast, how well. Read from rollups, never by walking over jobs."""

from __future__ import annotations

import datetime
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tenure.errors import ConfigError
from tenure.operations.queues import Queue
from tenure.operations.room import Room, time_of
from tenure.operations.workers import Worker
from tenure.record import Record

if TYPE_CHECKING:
    from tenure.store import Rollup

# Upper bounds of the duration buckets in seconds; one more bucket holds everything above.
BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300)
RUNS = ("completed", "retried", "failed", "dead")  # outcomes whose duration says something
# Every way a run may end, so that what has not happened is 0 and not absent.
OUTCOMES = (*RUNS, "snoozed", "cancelled", "released", "crashed", "rescued")
MINUTE = datetime.timedelta(minutes=1)
HOUR = datetime.timedelta(hours=1)
SHORT = datetime.timedelta(minutes=5)
FINE = datetime.timedelta(hours=24)  # older minutes are folded into hours
KEPT = datetime.timedelta(days=90)  # older hours are folded into one total


class Totals(Record):
    """Jobs by status. A figure is counted to 10,000 and no further: then it is in `capped`."""

    jobs: Mapping[str, int]
    capped: tuple[str, ...]


class Figures(Record):
    """What became of the runs of a length of time. Durations are in seconds and estimated from
    counts per bucket; 300 stands for five minutes and more. The success rate is that of jobs that
    ended: completed against failed and dead."""

    outcomes: Mapping[str, int]
    runs: int
    success_rate: float | None
    p50: float | None
    p95: float | None
    p99: float | None


class Bucket(Record):
    """One point of a chart: the runs that ended from `start` on, for the length of a step."""

    start: datetime.datetime
    figures: Figures


class Overview(Record):
    jobs: Mapping[str, int]
    capped: tuple[str, ...]
    last_hour: Figures
    last_5_min: Figures
    types: Mapping[str, Figures]  # of the last hour, the busiest first
    workers: tuple[Worker, ...]  # live ones, and those that are gone and still hold jobs


class Statistics(Room):
    def totals(self) -> Totals:
        self.for_operators("totals")
        return Totals(*self.store.totals())

    def queues(self) -> list[Queue]:
        self.for_operators("queues")
        return [Queue.of(row) for row in self.store.queues()]

    def queue_names(self) -> list[str]:
        self.for_operators("queues")
        return list(self.store.queue_names())

    def workers(self) -> list[Worker]:
        """Dead ones too, as long as the store keeps them."""
        self.for_operators("workers")
        now = self.now()
        return [Worker.of(row, now) for row in self.store.workers()]

    def counts(self) -> dict[str, Any]:
        """What `app.stats()` gives: plain numbers and texts."""
        totals = self.totals()
        return {
            "jobs": totals.jobs,
            "capped": list(totals.capped),
            "queues": [row._asdict() for row in self.store.queues()],
            "workers": sum(row.dead_at is None for row in self.store.workers()),
        }

    def overview(self) -> Overview:
        """All that `tenure stats` shows, with one look at the rollups."""
        totals, recent = self.totals(), self._rollups(HOUR)
        short = self._start(SHORT)
        return Overview(
            totals.jobs,
            totals.capped,
            summarized(recent),
            summarized(rollup for rollup in recent if rollup.start >= short),
            _grouped(recent, "type"),
            tuple(worker for worker in self.workers() if worker.live or worker.held),
        )

    # -- runs ---------------------------------------------------------------------------------
    def figures(
        self,
        last: datetime.timedelta = HOUR,
        *,
        type: str | None = None,
        queue: str | None = None,
    ) -> Figures:
        """Of all runs, or of those of one type or queue."""
        return summarized(_narrowed(self._rollups(last), type, queue))

    def by_type(self, last: datetime.timedelta = HOUR) -> dict[str, Figures]:
        """The busiest first."""
        return _grouped(self._rollups(last), "type")

    def by_queue(self, last: datetime.timedelta = HOUR) -> dict[str, Figures]:
        """The busiest first."""
        return _grouped(self._rollups(last), "queue")

    def series(
        self,
        last: datetime.timedelta = HOUR,
        *,
        step: datetime.timedelta = MINUTE,
        type: str | None = None,
        queue: str | None = None,
    ) -> list[Bucket]:
        """The points of a chart, oldest first, also where nothing ran. The last one goes on."""
        if step % MINUTE or step <= datetime.timedelta(0):
            raise ConfigError("the step of a series is a whole number of minutes")
        if last > FINE and step % HOUR:
            raise ConfigError(
                "of what is older than a day only hours are known: give a step of whole hours"
            )
        step_ms = step // datetime.timedelta(milliseconds=1)
        first, end = self._start(last, step_ms), self._now_ms()
        by_start: dict[int, list[Rollup]] = {at: [] for at in range(first, end + 1, step_ms)}
        for rollup in _narrowed(self._rollups(last, step_ms), type, queue):
            by_start.setdefault(rollup.start // step_ms * step_ms, []).append(rollup)
        return [Bucket(time_of(at), summarized(of)) for at, of in sorted(by_start.items())]

    def _rollups(self, last: datetime.timedelta, step_ms: int = 60_000) -> list[Rollup]:
        self.for_operators("figures of runs")
        start = self._start(last, step_ms)
        # The total of long ago is kept under minute 0, and always returned.
        return [rollup for rollup in self.store.rollups(since_ms=start) if rollup.start >= start]

    def _start(self, last: datetime.timedelta, step_ms: int = 60_000) -> int:
        """The beginning of the step that this length of time began in."""
        if not datetime.timedelta(0) < last <= KEPT:
            raise ConfigError(f"figures are kept for {KEPT.days} days")
        return (self._now_ms() - last // datetime.timedelta(milliseconds=1)) // step_ms * step_ms


# ------------------------------------------------------------------------------- numbers


def quantile(buckets: Sequence[int], q: float) -> float | None:
    """The duration in seconds that the fraction q stays below, interpolated within its bucket;
    infinite when that is the last one, None without any."""
    rank = q * sum(buckets)
    if rank == 0:
        return None
    seen = 0
    for place, number in enumerate(buckets):
        if number and seen + number >= rank:
            if place == len(BOUNDS):
                return math.inf
            low = BOUNDS[place - 1] if place else 0.0
            return low + (BOUNDS[place] - low) * (rank - seen) / number
        seen += number
    return math.inf


def summarized(rollups: Iterable[Rollup]) -> Figures:
    outcomes: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
    buckets, lasted_ms = [0] * (len(BOUNDS) + 1), 0
    for rollup in rollups:
        outcomes[rollup.outcome] += rollup.runs
        if rollup.outcome in RUNS:
            buckets = [a + b for a, b in zip(buckets, rollup.buckets, strict=True)]
            lasted_ms += rollup.duration_ms
    ended = outcomes["completed"] + outcomes["failed"] + outcomes["dead"]
    durations = [_finite(quantile(buckets, q)) for q in (0.5, 0.95, 0.99)]
    if sum(buckets) == 1:  # known to the millisecond, not only to its bucket
        durations = [lasted_ms / 1000] * 3
    runs = sum(outcomes[name] for name in RUNS)
    rate = outcomes["completed"] / ended if ended else None
    return Figures(dict(outcomes), runs, rate, *durations)


def _finite(seconds: float | None) -> float | None:
    """JSON has no infinity: 300 stands for five minutes or more."""
    return None if seconds is None else round(min(seconds, float(BOUNDS[-1])), 4)


def _grouped(rollups: Iterable[Rollup], field: str) -> dict[str, Figures]:
    """By type or queue, the busiest first."""
    groups: dict[str, list[Rollup]] = defaultdict(list)
    for rollup in rollups:
        groups[getattr(rollup, field)].append(rollup)
    found = {name: summarized(group) for name, group in groups.items()}
    return dict(sorted(found.items(), key=lambda item: (-item[1].runs, item[0])))


def _narrowed(rollups: Iterable[Rollup], type: str | None, queue: str | None) -> Iterable[Rollup]:
    return (
        rollup
        for rollup in rollups
        if type in (None, rollup.type) and queue in (None, rollup.queue)
    )
