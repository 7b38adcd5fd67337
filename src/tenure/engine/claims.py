"""Step 4 of the walk: which jobs this worker claims next. Queues take turns by weight; suspects,
which run alone, are claimed by themselves."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping

from tenure import policy
from tenure.engine.worker_state import WorkerState
from tenure.job import ClaimedJob
from tenure.store import Store

log = logging.getLogger("tenure.worker")

MOST_CLAIM = 2000
NAMES_SECONDS = 1.0  # a busy worker learns of new queues this often
REPORT_UNKNOWN_EVERY = 60.0
SUSPECTS_SECONDS = 1.0  # those we could not take are of types this worker does not know: ask seldom


class Claims:
    def __init__(self, store: Store, state: WorkerState) -> None:
        self._store = store
        self._state = state
        self._options = state.options
        self._credit: dict[str, float] = {}
        self._unknown: dict[str, float] = {}  # type -> when it was last complained about
        self._names: dict[str, bool] = {}  # queue -> paused, as last seen
        self._named = float("-inf")
        self._learned = False  # the names, since the last `begin`
        self._suspects_in_vain = float("-inf")  # when we asked for some and got none
        self.more = False  # a claim since `begin` stopped at its bound: claim again

    def begin(self) -> None:
        self.more = self._learned = False

    def take(self, jobs: list[ClaimedJob], free: int) -> None:
        """Claim up to `free` jobs, and suspects beside them. What one statement has brought is
        added to `jobs` at once: it is ours, whatever becomes of the next statement."""
        if self._take_turns(jobs, free):
            self._take_suspects(jobs)

    # -- turns between queues -----------------------------------------------------------------
    def _take_turns(self, jobs: list[ClaimedJob], free: int) -> bool:
        """Turns between queues by weight first; then what is left of them, to queues that have
        more. Whether there are suspects."""
        caps = self.caps()
        weights = {name: policy.QUEUE_WEIGHTS.get(name, 1.0) for name, cap in caps.items() if cap}
        if not weights:
            return False
        turns = policy.shares(free, weights, self._credit)
        wants = [(name, min(turn, caps[name])) for name, turn in turns.items() if turn]
        suspects = self._claim(jobs, wants, free)
        if len(jobs) == free:
            return suspects
        got = dict.fromkeys(caps, 0)
        for job in jobs:
            got[job.queue] += 1
        empty = {name for name, want in wants if got[name] < want}
        others = [
            (name, min(free, caps[name] - got[name])) for name in weights if name not in empty
        ]
        if others:
            others.sort(key=lambda want: -self._credit.get(want[0], 0.0))
            suspects = self._claim(jobs, others, free - len(jobs)) or suspects
        return suspects

    def _claim(self, jobs: list[ClaimedJob], wants: list[tuple[str, int]], limit: int) -> bool:
        state = self._state
        types = state.types if self._room_alone() > 0 else state.types_together
        claim = self._store.claim(state.worker, wants, types, limit=limit)
        self._complain(claim.unknown)
        self.more = self.more or claim.more
        jobs += claim.jobs
        return claim.suspects

    def caps(self) -> dict[str, int]:
        """The queues to look at now, and how many more jobs of each may run here. An idle worker
        learns their names before it sleeps, so that it need not ask when a new job wakes it; a
        busy one asks once a second."""
        if self._options.queues is None:
            if time.monotonic() - self._named > NAMES_SECONDS:
                self.learn_names()
            return {name: MOST_CLAIM for name, paused in self._names.items() if not paused}
        running = self._state.held_by_queue()
        return {
            name: MOST_CLAIM if cap is None else max(0, cap - running.get(name, 0))
            for name, cap in self._options.queues.items()
        }

    def learn_names(self) -> bool:
        """Whether the names of queues have changed."""
        before, self._names = self._names, self._store.queue_names()
        self._named, self._learned = time.monotonic(), True
        return self._names != before

    def slept(self) -> None:
        """Names learned before a sleep are good for a while after it: the job that has ended the
        sleep is in a hurry."""
        if self._learned:
            self._named = time.monotonic()

    # -- jobs that run alone ------------------------------------------------------------------
    def alone(self, jobs: list[ClaimedJob]) -> list[ClaimedJob]:
        """Those of `jobs` that run alone. Mostly there is none: a call for each job would be a
        tenth of what the supervisor does for it."""
        special = self._state.types_alone
        marked = [job for job in jobs if job.crashes or job.losses or job.type in special]
        return [job for job in marked if self._runs_alone(job)]

    def _runs_alone(self, job: ClaimedJob) -> bool:
        return job.type in self._state.types_alone or policy.suspect(job.crashes, job.losses)

    def _room_alone(self) -> int:
        """How many more may wait here to run alone: no other worker can run them meanwhile, so
        only a few."""
        if self._state.embedded is not None:
            return 1
        return 2 * self._options.solos - len(self._state.alone)

    def _take_suspects(self, jobs: list[ClaimedJob]) -> None:
        """They are claimed by themselves. So healthy jobs never stand behind them, nor they behind
        healthy ones, however many these are: they take no child's room. `jobs` were claimed a
        moment ago, and count as running here."""
        now = time.monotonic()
        most = self._room_alone() - sum(map(self._runs_alone, jobs))
        if self._options.max_jobs is not None:
            most = min(most, self._options.max_jobs - self._state.claimed_jobs - len(jobs))
        if not self._options.drain and now - self._suspects_in_vain < SUSPECTS_SECONDS:
            return
        taken = Counter(job.queue for job in jobs)
        wants = [(name, min(most, cap - taken[name])) for name, cap in self.caps().items()]
        wants = [want for want in wants if want[1] > 0]
        if not wants:
            return
        state = self._state
        found = self._store.claim(state.worker, wants, state.types, suspects=True, limit=most).jobs
        if not found:
            self._suspects_in_vain = now
        jobs += found

    # -- what is not claimed ------------------------------------------------------------------
    def _complain(self, unknown: Mapping[str, int]) -> None:
        for type_, count in unknown.items():
            if type_ in self._state.types:
                continue
            if time.monotonic() - self._unknown.get(type_, -60.0) < REPORT_UNKNOWN_EVERY:
                continue
            self._unknown[type_] = time.monotonic()
            log.warning(
                "%d job%s of type %r passed over: this worker does not know the type. Import the "
                "module of the task in the app's, start a worker whose app has it, or cancel them.",
                count,
                "" if count == 1 else "s",
                type_,
            )

    def left(self) -> dict[str, int]:
        """What a drain leaves behind, and why."""
        left: Counter[str] = Counter()
        served = self._options.queues
        for info in self._store.queues():
            if served is not None and info.name not in served:
                left["in queues this worker does not serve"] += info.ready + info.later
            else:
                left["due later"] += info.later
                left["in paused queues"] += 0 if info.paused_at is None else info.ready
            left["waiting for other jobs"] += info.waiting
            left["running elsewhere"] += info.running
        left["of unknown type"] += sum(self._store.unknown_types(self._state.types).values())
        return {why: count for why, count in left.items() if count}


def in_turn(jobs: list[ClaimedJob]) -> list[ClaimedJob]:
    """Queues take turns by weight within a batch too, however large it is; priorities come first
    and each queue keeps its own order."""
    if len({job.queue for job in jobs}) < 2:
        return jobs
    turns: dict[tuple[int, str], int] = {}
    placed = []
    for place, job in enumerate(jobs):
        turn = turns[job.priority, job.queue] = turns.get((job.priority, job.queue), 0) + 1
        when = turn / policy.QUEUE_WEIGHTS.get(job.queue, 1.0)
        placed.append((job.priority, when, place, job))
    placed.sort()
    return [entry[-1] for entry in placed]
