"""Steps 4, 5 and 7 of the walk, one loop: finish what has ended, claim what there is room for,
hand it out, sleep until a hint or a poke. Where the store can do two things at once
(`Store.parallel`) the finishing is a loop of its own.
"""

from __future__ import annotations

import functools
import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping

from tenure import outcome, policy
from tenure.config import Settings
from tenure.engine.children import Child
from tenure.engine.finisher import Finisher
from tenure.engine.job_log import JobLog
from tenure.engine.worker_options import WorkerOptions
from tenure.engine.worker_state import WorkerState
from tenure.errors import StoreError
from tenure.job import ClaimedJob
from tenure.store import Store
from tenure.wakeup import Wakeup

log = logging.getLogger("tenure.worker")

MOST_CLAIM = 2000
# Under load a batch costs one commit whatever its size: outcomes gather for a moment, and room for
# more jobs until half of what children may hold is free.
ENOUGH = 350
GATHER_SECONDS = 0.02
STOPPED_PAUSE = 1.0  # nothing is claimed any more: only a poke has work for us
NAMES_SECONDS = 1.0  # a busy worker learns of new queues this often
REPORT_UNKNOWN_EVERY = 60.0
SUSPECTS_SECONDS = 1.0  # those we could not take are of types nobody here knows: ask seldom
CALM_SECONDS, ASK_SECONDS = 0.02, 0.25  # after a hint, until cancel requests are asked for


class Dispatcher:
    def __init__(
        self,
        store: Store,
        settings: Settings,
        wakeup: Wakeup,
        plan: WorkerOptions,
        roster: WorkerState,
        on_crew: Callable[[], None],
        on_done: Callable[[], None],
        on_idle: Callable[[], None],
        on_calm: Callable[[], None],
    ) -> None:
        self._store = store
        self._settings = settings
        self._wakeup = wakeup
        self._plan = plan
        self._roster = roster
        self._on_crew = on_crew  # there is something to do for who starts processes
        self._on_done = on_done  # drained, or max_jobs reached
        self._on_idle = on_idle  # nothing to write, or nothing to claim
        self._on_calm = on_calm  # a hint may have been about a cancel request
        self._poked = threading.Event()
        self._reported = threading.Event()
        self._asleep = False
        self._hinted = False  # and what it was about has not been asked
        self._awake = time.monotonic()  # since then, or since that was asked
        self._credit: dict[str, float] = {}
        self._unknown: dict[str, float] = {}  # type -> when it was last complained about
        self._look_again = False
        self._names: dict[str, bool] = {}  # queue -> paused, as last seen
        self._named = float("-inf")
        self._learned = False  # the names, in this turn
        self._suspects_in_vain = float("-inf")  # when we asked for some and got none
        self.types: frozenset[str] = frozenset()
        self.alone: frozenset[str] = frozenset()  # those of them that run in a process of their own
        self.finisher = Finisher(store)
        self.chronicle = JobLog(lambda: roster.worker.id)
        self.claiming = True
        self.busy = False  # a claim is on its way, or what it brought on its way to the children
        self.turns = 0  # claims that are over
        self.handed = 0  # jobs they have brought
        self.drained = False

    def poke(self) -> None:
        self._reported.set()
        self._wake()

    def _wake(self) -> None:
        self._poked.set()
        if self._asleep:
            self._wakeup.interrupt()

    def end(self, job: ClaimedJob, how: outcome.Outcome) -> None:
        """An outcome decided by the supervisor, not by the job's own run."""
        self.finisher.add([outcome.Ended(job.id, job.lease_no, 0, how)], [])
        self.poke()
        self.chronicle.ended(job, how, 0)

    def run(self, over: threading.Event) -> None:
        failures = 0
        while True:
            self._poked.clear()  # before we look whether it is over: the poke that says so stays
            if over.is_set() and not self._more_to_write():
                return
            try:
                if self._more_to_write():
                    self._gather(self._poked)
                    self._roster.drop(self.finisher.flush(self._roster.worker))
                # Said before `claiming` is read: whoever has stopped the claiming and sees us not
                # busy knows that no claimed job is on its way to a child.
                self.busy, self._look_again, self._learned = True, False, False
                # Before the claim looks: a job that ends meanwhile may leave one it does not see.
                idle = not self._roster.holding() and not self.finisher.pending
                try:
                    claimed = self._claim_and_hand() if self.claiming else 0
                finally:
                    self.turns += 1
                    self.busy = False
                if time.monotonic() - self._awake >= ASK_SECONDS:
                    # Nobody else reads hints. One may be younger than this claim.
                    self._look_again = self._wakeup.wait(0.0) or self._look_again
                    self._calm_down()
                failures = 0
                if claimed or self._look_again or self._more_to_write() or self._new_queues():
                    continue
                if idle:
                    self._check_drained()
                self._rest(self._pause() if self.claiming else self._stopped(), over)
            except StoreError as error:
                failures += 1
                _back_off(error, over, failures)

    def run_finishes(self, over: threading.Event) -> None:
        """The other half, where it is a thread of its own."""
        failures = 0
        while not over.is_set() or self.finisher.pending:
            self._reported.clear()
            try:
                while self.finisher.pending:
                    self._gather(self._reported)
                    self._roster.drop(self.finisher.flush(self._roster.worker))
                    self._wake()  # what a finish released may be claimed; a drain may be over
            except StoreError as error:
                failures += 1
                _back_off(error, over, failures)
                continue
            failures = 0
            self._on_idle()
            self._reported.wait(STOPPED_PAUSE)

    def _gather(self, reported: threading.Event) -> None:
        until = time.monotonic() + GATHER_SECONDS
        while self.finisher.waiting < ENOUGH and self._loaded() and self.claiming:
            left = until - time.monotonic()
            if left <= 0:
                return
            reported.clear()
            reported.wait(left)

    def _loaded(self) -> bool:
        """Children have enough to do for now, whatever we do meanwhile."""
        return self._roster.crowd() > 2 * self._plan.concurrency * self._plan.processes

    def _more_to_write(self) -> bool:
        return self.finisher.pending and not self._store.parallel

    def _stopped(self) -> float:
        """Nothing is claimed any more: whoever waits for us to be done may look now."""
        self._on_idle()
        return STOPPED_PAUSE

    # -- claiming -----------------------------------------------------------------------------
    def _claim_and_hand(self) -> int:
        rooms = self._roster.rooms()
        free = min(sum(rooms.values()), MOST_CLAIM)
        if self.finisher.behind or self._half_full(free):
            return 0  # a poke comes when that has changed
        if self._plan.max_jobs is not None:
            free = min(free, self._plan.max_jobs - self.handed)
            if self.handed >= self._plan.max_jobs:
                self._stop_claiming()
        if free <= 0 or self._suspect_is_next():
            return 0
        jobs: list[ClaimedJob] = []
        try:
            if self._claim(jobs, free):
                self._claim_suspects(jobs)
        finally:  # what one claim has brought is ours, whatever became of the next
            self.handed += len(jobs)
            together = self._set_apart(_in_turn(jobs))
            self._hand_out(together, rooms)
        return len(jobs)

    def _half_full(self, free: int) -> bool:
        return free < ENOUGH and free < self._roster.crowd() and self._loaded()

    # -- jobs that run alone ------------------------------------------------------------------
    def _set_apart(self, jobs: list[ClaimedJob]) -> list[ClaimedJob]:
        """Those that run alone go to the roster; the others. Mostly there is none: a call for each
        job would be a tenth of what the supervisor does for it."""
        special = self.alone
        marked = [job for job in jobs if job.crashes or job.losses or job.type in special]
        alone = [job for job in marked if self._runs_alone(job)]
        if not alone:
            return jobs
        self._roster.alone.extend(alone)
        self._on_crew()
        ids = {job.id for job in alone}
        return [job for job in jobs if job.id not in ids]

    def _runs_alone(self, job: ClaimedJob) -> bool:
        return job.type in self.alone or policy.suspect(job.crashes, job.losses)

    def _suspect_is_next(self) -> bool:
        """An embedded worker has no process to give to a suspect: it runs when nothing else does,
        and until then nothing else is claimed."""
        return self._roster.embedded is not None and bool(self._roster.alone)

    def _room_alone(self) -> int:
        """How many more may wait here to run alone: out of other workers' reach, so only a few."""
        if self._roster.embedded is not None:
            return 1
        return 2 * self._plan.solos - len(self._roster.alone)

    def _claim_suspects(self, jobs: list[ClaimedJob]) -> None:
        """They are claimed by themselves, so healthy jobs never stand behind them; nor they behind
        healthy ones, however many these are: they take no child's room. Added to `jobs`, which were
        claimed a moment ago."""
        now = time.monotonic()
        most = self._room_alone() - sum(map(self._runs_alone, jobs))
        if self._plan.max_jobs is not None:
            most = min(most, self._plan.max_jobs - self.handed - len(jobs))
        if not self._plan.drain and now - self._suspects_in_vain < SUSPECTS_SECONDS:
            return
        caps = self._caps()
        taken = Counter(job.queue for job in jobs)
        wants = [(name, min(most, cap - taken[name])) for name, cap in caps.items()]
        wants = [want for want in wants if want[1] > 0]
        if not wants:
            return
        worker = self._roster.worker
        found = self._store.claim(worker, wants, self.types, suspects=True, limit=most).jobs
        if not found:
            self._suspects_in_vain = now
        jobs += found

    # -- turns between queues -----------------------------------------------------------------

    def _claim(self, jobs: list[ClaimedJob], free: int) -> bool:
        """Turns between queues by weight first; then what they left, to whoever has more. Added to
        `jobs`; whether there are suspects."""
        caps = self._caps()
        weights = {name: policy.QUEUE_WEIGHTS.get(name, 1.0) for name, cap in caps.items() if cap}
        if not weights:
            return False
        turns = policy.shares(free, weights, self._credit)
        wants = [(name, min(turn, caps[name])) for name, turn in turns.items() if turn]
        suspects = self._take(jobs, wants, free)
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
            suspects = self._take(jobs, others, free - len(jobs)) or suspects
        return suspects

    def _take(self, jobs: list[ClaimedJob], wants: list[tuple[str, int]], limit: int) -> bool:
        types = self.types if self._room_alone() > 0 else self._together
        claim = self._store.claim(self._roster.worker, wants, types, limit=limit)
        self._complain(claim.unknown)
        self._look_again = self._look_again or claim.more
        jobs += claim.jobs
        return claim.suspects

    def learn(self, types: frozenset[str], alone: frozenset[str]) -> None:
        self.types, self.alone = types, alone
        self.__dict__.pop("_together", None)

    @functools.cached_property
    def _together(self) -> frozenset[str]:
        """The types that run beside others, for a worker that has enough of the rest."""
        return self.types - self.alone

    def _caps(self) -> dict[str, int]:
        """The queues to look at now, with how many more of each may run here. One who has nothing
        to do learns their names before it sleeps, and need not ask when a new job wakes it; one who
        is busy asks once a second."""
        if self._plan.queues is None:
            if time.monotonic() - self._named > NAMES_SECONDS:
                self._learn_names()
            return {name: MOST_CLAIM for name, paused in self._names.items() if not paused}
        running = self._roster.held_by_queue()
        return {
            name: MOST_CLAIM if cap is None else max(0, cap - running.get(name, 0))
            for name, cap in self._plan.queues.items()
        }

    def _new_queues(self) -> bool:
        """After a claim that found nothing: is there a queue it did not look at?"""
        free = sum(self._roster.rooms().values())
        if self._plan.queues is not None or not self.claiming or not free or self._half_full(free):
            return False
        return self._learn_names()

    def _learn_names(self) -> bool:
        """Whether they have changed."""
        before, self._names = self._names, self._store.queue_names()
        self._named, self._learned = time.monotonic(), True
        return self._names != before

    def _hand_out(self, jobs: list[ClaimedJob], rooms: dict[Child, int]) -> None:
        """To each child in proportion to its room."""
        left = sum(rooms.values())
        for child, room in rooms.items():
            count = -(-len(jobs) * room // left) if left else 0
            left -= room
            batch, jobs = jobs[:count], jobs[count:]
            if batch and not child.hand(batch, self._roster.worker):
                for job in batch:
                    self.end(job, outcome.Released("its process ended before it started"))
            if child.quota == 0:
                self._on_crew()  # it needs a successor

    def _complain(self, unknown: Mapping[str, int]) -> None:
        for type_, count in unknown.items():
            if type_ in self.types:
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

    # -- waiting ------------------------------------------------------------------------------
    def _rest(self, pause: float, over: threading.Event) -> None:
        """Until a poke or a hint, at most for so long. A hint is most likely about new jobs, and
        those are in a hurry: whether it was about a cancel request is asked a moment later, when
        there is no other, or four times a second. One who is awake needs no hint, and most are of
        our own writes."""
        until = time.monotonic() + pause
        hinted = slept = False
        self._asleep = True  # before the look at `_poked`: whoever sets it later interrupts us
        try:
            while not (hinted or self._poked.is_set() or over.is_set()):
                left = until - time.monotonic()
                if left <= 0:
                    break
                hinted = self._wakeup.wait(min(left, CALM_SECONDS) if self._hinted else left)
                slept = True
                if self._hinted and not hinted and not self._poked.is_set():
                    self._calm_down()
        finally:
            self._asleep = False
        now = time.monotonic()
        if slept and not self._hinted:  # pokes may be so dense that we never do
            self._hinted, self._awake = hinted, now
        if self._learned:  # it will do for a while: whoever is woken by a new job is in a hurry
            self._named = now

    def _calm_down(self) -> None:
        self._on_calm()
        self._hinted, self._awake = False, time.monotonic()

    def _pause(self) -> float:
        """Until the next look: never later than the next due job."""
        healthy = self._wakeup.healthy()
        poll = self._settings.hint_poll_interval_ms if healthy else self._settings.poll_interval_ms
        free = sum(self._roster.rooms().values())
        if free == 0 or self._half_full(free) or self._suspect_is_next():
            return poll / 1000  # whatever ends pokes us
        due = self._store.next_due([name for name, cap in self._caps().items() if cap])
        return (poll if due is None else min(poll, max(due, 1))) / 1000

    def _check_drained(self) -> None:
        """A claim with room to spare found nothing, and nothing of ours runs."""
        if not self._plan.drain or not self.claiming:
            return
        if self._roster.holding() or self.finisher.pending:
            return
        if any(self._roster.rooms().values()):
            self.drained = True
            self._stop_claiming()

    def _stop_claiming(self) -> None:
        if self.claiming:
            self.claiming = False
            self._on_done()

    # -- the end ------------------------------------------------------------------------------
    def left(self) -> dict[str, int]:
        """What a drain leaves behind, and why."""
        left: dict[str, int] = {}

        def add(why: str, count: int) -> None:
            if count:
                left[why] = left.get(why, 0) + count

        for info in self._store.queues():
            if self._plan.queues is not None and info.name not in self._plan.queues:
                add("in queues this worker does not serve", info.ready + info.later)
            else:
                add("due later", info.later)
                add("in paused queues", 0 if info.paused_at is None else info.ready)
            add("waiting for other jobs", info.waiting)
            add("running elsewhere", info.running)
        add("of unknown type", sum(self._store.unknown_types(self.types).values()))
        return left


def _in_turn(jobs: list[ClaimedJob]) -> list[ClaimedJob]:
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


def _back_off(error: StoreError, over: threading.Event, failures: int) -> None:
    """The store is away: nothing is lost, nobody exits, try again with jitter."""
    pause = min(5.0, 0.05 * 2 ** min(failures, 10)) * random.uniform(0.5, 1.5)
    log.warning("the store does not answer, trying again in %.1f s: %s", pause, error)
    over.wait(pause)
