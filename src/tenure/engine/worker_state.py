"""The state of one worker, and every way in which it changes. The worker's threads talk through it.

**The worker** goes one way through its phases:

    starting ──▶ working ──▶ draining ──▶ stopping ──▶ over

    starting   its first children import the app; nothing is claimed
    working    it claims jobs whenever a child has room
    draining   it claims nothing more; what runs may end until `stop_by`
    stopping   `stop_by` has passed: what still runs is ended and given back
    over       no job is left here; its threads end

No field holds the phase. It follows from facts that change one way only, so threads and signal
handlers may change them at the same moment, without a lock, and the phase never goes back.

Another worker may declare this one dead and take its jobs. Then it drops them all and goes on in
the same phase under a new id (`registered`).

**A job** goes one way through the places of a worker:

    being claimed ──▶ waiting to run alone ──▶ held by a child ──▶ unwritten ──▶ in the store

It is put into the next place before it is taken out of the one before, so it is never nowhere. A
thread that looks through the places in this order and finds them empty knows that no job is left.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

from tenure.config import Settings
from tenure.engine.children import Child, RunKey
from tenure.engine.finisher import Unwritten
from tenure.engine.job_log import JobLog
from tenure.engine.messages import Hello, Report
from tenure.engine.worker_options import ENDS, WorkerOptions
from tenure.engine.worker_threads import Failures
from tenure.job import ClaimedJob
from tenure.outcome import Ended, Outcome
from tenure.store import Registration
from tenure.wakeup import Wakeup

Phase = Literal["starting", "working", "draining", "stopping", "over"]


class ChildEnded(NamedTuple):
    """The pipe of a child has ended."""

    child: Child


class DeclaredDead(NamedTuple):
    """Another worker has declared this one dead, as it was registered then."""

    worker: Registration


class CodeChanged(NamedTuple):
    path: str


# What the supervisor's thread is told. None: look, something has changed.
News: TypeAlias = ChildEnded | DeclaredDead | CodeChanged | None


class Bell(threading.Event):
    """Wakes a thread that sleeps in something else than the event itself, too."""

    def __init__(self, interrupt: Callable[[], None]) -> None:
        super().__init__()
        self._interrupt = interrupt
        self.asleep = False

    def set(self) -> None:
        super().set()
        if self.asleep:
            self._interrupt()


class Lease:
    """This worker's own lease, by the monotonic clock."""

    def __init__(self, seconds: float, renew_every: float) -> None:
        self._seconds = seconds
        self._longest_gap = 1.5 * renew_every
        self._renewed = time.monotonic()  # when the last renewal that succeeded had begun
        self.until = 0.0  # no other worker takes our jobs before then
        self.gaps = 0  # how often renewals were further apart than they may be

    def granted(self, began: float) -> None:
        """The store has granted or prolonged it, some time after `began`."""
        self.until = began + self._seconds

    def renewed(self, began: float) -> None:
        """Evidence that this worker can write to the store."""
        self.granted(began)
        if time.monotonic() - self._renewed > self._longest_gap:
            self.gaps += 1
        self._renewed = max(began, self._renewed)

    def steady(self) -> bool:
        """The last renewal was not too long ago."""
        return time.monotonic() - self._renewed <= self._longest_gap


class WorkerState:
    def __init__(self, options: WorkerOptions, settings: Settings, wakeup: Wakeup) -> None:
        self.options = options
        self.settings = settings
        self.worker = Registration(0, "")  # what this worker is to the store
        self.lease = Lease(settings.lease_seconds, settings.lease_renew_seconds)
        self.failures = Failures()
        self.counts: Counter[str] = Counter()  # runs that have ended here, by how they ended
        self.job_log = JobLog(lambda: self.worker.id)

        # The phase. Deadlines are only ever added: of two threads that stop the worker at the same
        # moment neither takes back what the other has said.
        self.begun: float | None = None
        self.interrupted = False  # by a signal
        self._deadlines: list[float] = []
        self.over = threading.Event()

        # What wakes each thread.
        self.news: queue.SimpleQueue[News] = queue.SimpleQueue()  # the supervisor's
        self.dispatcher_bell = Bell(wakeup.interrupt)
        self.finisher_bell = threading.Event()

        # The app, as its children describe it.
        self.types: frozenset[str] = frozenset()
        self.types_alone: frozenset[str] = frozenset()  # each job in a process of its own
        self.types_together: frozenset[str] = frozenset()  # the others
        self.app = Hello(0, [], {}, [], {}, {})

        # The places of jobs.
        self.claim_under_way = False  # or what it has brought is on its way to the children
        self.claims_over = 0
        self.claimed_jobs = 0
        self.alone: deque[ClaimedJob] = deque()  # claimed, to run alone, not yet handed out
        self.unwanted: dict[RunKey, str] = {}  # of `alone`: cancel requests with their reasons
        self.children: tuple[Child, ...] = ()  # replaced, never changed: any thread may walk it
        self.unwritten = Unwritten()

    # -- phases: any thread, and signal handlers, so they take no lock ---------------------------
    @property
    def phase(self) -> Phase:
        if self.over.is_set():
            return "over"
        if self._deadlines:
            return "draining" if time.monotonic() < self.stop_by else "stopping"
        return "starting" if self.begun is None else "working"

    @property
    def claiming(self) -> bool:
        """False from the moment in which the worker is told to stop."""
        return not self._deadlines

    @property
    def stop_by(self) -> float:
        return min(self._deadlines, default=float("inf"))

    def begin(self) -> None:
        """starting -> working"""
        self.begun = time.monotonic()

    def stop(self, grace: float | None = None) -> None:
        """working -> draining, and after `grace` seconds (`shutdown_timeout`) -> stopping."""
        seconds = self.settings.shutdown_timeout if grace is None else grace
        self._deadlines.append(time.monotonic() + seconds)
        self.news.put(None)

    def interrupt(self) -> None:
        """A signal stops the worker, a second one at once."""
        grace = 0.0 if self.interrupted else None
        self.interrupted = True
        self.stop(grace)

    def finished(self) -> bool:
        """Told to stop, and no job is left here: see the order of the places above."""
        if self.claiming or self.claim_under_way:
            return False
        return not self.holding() and not self.unwritten.pending

    def end(self) -> None:
        """draining, stopping -> over"""
        self.over.set()
        self.wake_writers()

    # -- what this worker is ----------------------------------------------------------------------
    def registered(self, worker: Registration, began: float) -> None:
        """Under an id that was never used before."""
        self.worker = worker
        self.lease.granted(began)

    def learn(self, hello: Hello) -> None:
        """What the app is: from its first child, and from every one where code changes."""
        self.app = hello
        self.types = frozenset(hello.types)
        self.types_alone = frozenset(hello.alone)
        self.types_together = self.types - self.types_alone

    def description(self) -> dict[str, object]:
        """What others may read about this worker."""
        options, settings = self.options, self.settings
        return {
            "name": options.name,
            "queues": None if options.queues is None else sorted(options.queues),
            "types": sorted(self.types),
            "concurrency": options.concurrency,
            "processes": options.processes,
            "audit": settings.audit,
            "keep": [settings.keep_completed_seconds, settings.keep_events_seconds],
            **self.failures.told(),
        }

    def new_description(self) -> dict[str, object] | None:
        """The same where it may have changed since it was registered."""
        changed = self.options.reload or bool(self.failures.told())
        return self.description() if changed else None

    # -- waking threads ---------------------------------------------------------------------------
    def wake_supervisor(self) -> None:
        self.news.put(None)

    def wake_writers(self) -> None:
        """There is something to write, or to claim."""
        self.finisher_bell.set()
        self.dispatcher_bell.set()

    # -- claims: the dispatcher -------------------------------------------------------------------
    def begin_claim(self) -> bool:
        """Whether there may be one. Said before `claiming` is read: a thread that has stopped the
        worker and then sees no claim under way knows that no claimed job is on its way here."""
        self.claim_under_way = True
        return self.claiming

    def end_claim(self) -> None:
        self.claims_over += 1
        self.claim_under_way = False

    def claims(self) -> tuple[int, bool]:
        """How many are over, and whether one is under way."""
        return self.claims_over, self.claim_under_way

    def claimed(self) -> int | None:
        """How many jobs this worker has taken so far; None while a claim is under way."""
        return None if self.claim_under_way else self.claimed_jobs

    # -- children: the supervisor -----------------------------------------------------------------
    def add(self, child: Child) -> None:
        self.children = (*self.children, child)

    def remove(self, child: Child) -> None:
        self.children = tuple(other for other in self.children if other is not child)

    @property
    def embedded(self) -> Child | None:
        """The one child of an embedded worker: an executor in this process."""
        first = self.children[0] if self.children else None
        return first if first is not None and first.process is None else None

    # -- jobs move on: any thread -----------------------------------------------------------------
    def set_apart(self, jobs: Sequence[ClaimedJob]) -> None:
        """being claimed -> waiting to run alone"""
        self.alone.extend(jobs)
        self.wake_supervisor()

    def reported(self, child: Child, report: Report) -> None:
        """held by a child -> unwritten, as the child says"""
        ended = report.ended
        if child.withdrawn:  # what it gives back now was taken back while it did not answer
            ended = [end for end in ended if (end.id, end.lease_no) not in child.withdrawn]
        self.unwritten.add(ended, report.progress)
        child.ended([(end.id, end.lease_no) for end in ended])
        self.wake_writers()

    def decide(self, job: ClaimedJob, how: Outcome) -> None:
        """anywhere -> unwritten, with an outcome that its own run did not give. The caller then
        takes it out of the place where it was."""
        self.unwritten.add([Ended(job.id, job.lease_no, 0, how)], [])
        self.wake_writers()
        self.job_log.ended(job, how, 0)

    def take_back(self, child: Child, ends: Iterable[tuple[ClaimedJob, Outcome]]) -> None:
        """held by a child -> unwritten, though the child says nothing"""
        taken = list(ends)
        for job, how in taken:
            self.decide(job, how)
        child.let_go([job for job, _how in taken])

    def give_back(self, ended: list[Ended]) -> None:
        """Runs that are held in the store and nowhere here -> unwritten."""
        if ended:
            self.unwritten.add(ended, [])
            self.wake_writers()

    def lose(self, runs: Iterable[RunKey]) -> None:
        """The leases of these runs are gone: stop them. A later lease of the same job, perhaps
        held by the same child, is none of them."""
        lost = dict(runs)
        for child in self.children if lost else ():
            child.lose(lost)

    def cancel(self, requests: Mapping[str, str]) -> None:
        """Pass cancel requests on (id -> reason), each once, to the children that run the jobs."""
        for child in self.children if requests else ():
            child.cancel(requests)
        # The process of a job that waits to run alone may be starting this moment. So it stays on
        # this list until it has been taken out, or a child holds it when the store names it again.
        self.unwanted = {
            (job.id, job.lease_no): requests[job.id]
            for job in list(self.alone)
            if job.id in requests
        }

    # -- what is here: any thread -----------------------------------------------------------------
    def holding(self) -> bool:
        return bool(self.alone) or any(child.holds for child in self.children)

    def idle(self) -> bool:
        return not self.holding() and not self.unwritten.pending

    def held(self) -> set[str]:
        """Ids of all jobs that are here, but for those of a claim that is under way."""
        known = {job.id for job in list(self.alone)}
        for child in self.children:
            known.update(child.holds)
        return known | self.unwritten.ids()

    def held_by_queue(self) -> Counter[str]:
        """Jobs that run, or wait to run. One may be in two places for a moment."""
        held = {job.id: job.queue for job in list(self.alone)}
        for child in self.children:
            held.update((job.id, job.queue) for job, _slot in list(child.holds.values()))
        return Counter(held.values())

    def rooms(self) -> dict[Child, int]:
        return {child: child.room() for child in self.children if not child.solo}

    def crowd(self) -> int:
        """How many jobs run or wait in the children that take many."""
        return sum(len(child.holds) for child in self.children if not child.solo)

    def loaded(self) -> bool:
        """The children have enough to do for now, whatever the dispatcher does meanwhile."""
        return self.crowd() > 2 * self.options.concurrency * self.options.processes

    def census(self) -> tuple[int, int, int]:
        """Jobs that this worker has done, that run here (or are being recorded), and that wait
        here to run."""
        done = sum(self.counts[how] for how in ENDS)
        marks = [mark for child in self.children for mark in child.marks()]
        running = sum(mark > 0 for mark in marks) + len(self.unwritten.ids())
        return done, running, marks.count(0.0) + len(self.alone)
