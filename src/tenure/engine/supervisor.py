"""The supervisor is the engine: it alone claims, renews, finishes and listens.

It runs no user code, so nothing a handler does can starve a lease or sit on the store's write
lock. Six threads, each one loop (seven where the store can finish and claim at once):

    crew     (the caller's)  starts and buries children, signals, the end;
             time-outs and children that do not answer                          -> watch.py
    pump     finish what has ended, claim what there is room for, hand it out,
             sleep until a hint or a poke                                       -> pump.py
    renewal  prove this worker alive, learn what the store thinks it holds      -> renewal.py
    janitor  rescue the jobs of dead workers                                    -> janitor.py
    retention  remove what is past its time                                     -> retention.py
    pulse    tell the children that this process does not stand still           -> renewal.py

`loops.py` keeps them going. An embedded worker is the same object with one child that is not a
process.
"""

from __future__ import annotations

import functools
import logging
import queue
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

from tenure import outcome
from tenure.config import Settings
from tenure.engine import machine
from tenure.engine.child_watch import ChildWatch
from tenure.engine.children import MOST_AHEAD_PARALLEL, CannotStart, Child
from tenure.engine.dispatcher import Dispatcher
from tenure.engine.lease_renewal import LeaseRenewal
from tenure.engine.messages import FromChild, Hello, Refused, Report
from tenure.engine.reload import Reload
from tenure.engine.rescue import Rescuer
from tenure.engine.retention import Retention
from tenure.engine.worker_options import ENDS, Summary, WorkerOptions
from tenure.engine.worker_state import WorkerState
from tenure.engine.worker_threads import WorkerThreads
from tenure.errors import StoreError
from tenure.job import ClaimedJob
from tenure.store import Registration, Store
from tenure.wakeup import Wakeup

log = logging.getLogger("tenure.worker")

LOOK_EVERY = 1.0
BUSY_LOOK_EVERY = 0.25  # time-outs are looked at this often while anything runs
RESTART_PAUSE = 1.0  # a child that dies before it ended or began any job is not restarted at once
LONGEST_PAUSE = 30.0  # between two tries, while the system has no process to give


class Starter(Protocol):
    """How children come to be."""

    def __call__(self, concurrency: int, *, solo: bool = False) -> Child: ...


class Supervisor:
    def __init__(
        self, store: Store, settings: Settings, wakeup: Wakeup, plan: WorkerOptions
    ) -> None:
        self._store = store
        self._settings = settings
        self._plan = plan
        self._events: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._roster = WorkerState()
        self._janitor = Rescuer(store, settings)
        self._retention = Retention(store, settings)
        self._pump = Dispatcher(
            store,
            settings,
            wakeup,
            plan,
            self._roster,
            on_crew=lambda: self._events.put(("tick", None)),
            on_done=self.stop,
            on_idle=self._look,
            on_calm=self._ask_for_cancels,
        )
        self._renewal = LeaseRenewal(
            store,
            settings.lease_renew_seconds,
            self._roster,
            lease=settings.lease_seconds,
            news=lambda: self._meta() if plan.reload or self._loops.trouble() else None,
            on_renewed=self._janitor.wrote,
            on_declared_dead=lambda worker: self._events.put(("declared-dead", worker)),
            give_back=self._give_back,
            unwritten=self._pump.finisher.holds,
            claims=lambda: (self._pump.turns, self._pump.busy),
        )
        self._watch = ChildWatch(self._roster, settings, self._pump.end)
        loops = {
            "pump": self._pump.run,
            "renewal": self._renewal.run,
            "janitor": self._tidy,
            "retention": self._retention.run,
            "pulse": self._renewal.run_pulse,
        }
        self._reload = Reload(self._roster, settings.shutdown_timeout)
        if plan.reload:
            loops["sources"] = functools.partial(
                self._reload.run, lambda path: self._events.put(("changed", path))
            )
        if store.parallel:
            loops["finishes"] = self._pump.run_finishes
        self._loops = WorkerThreads(loops)
        self._not_before = 0.0  # no child is started before then
        self._start_pause = 0.0
        self._stopping = False  # plain: set by signal handlers, which must take no lock
        self._stop_by = float("inf")
        self._interrupted = False
        self._begun = time.monotonic()

    @property
    def worker_id(self) -> str:
        return self._roster.worker.id

    def learn(self, hello: Hello) -> None:
        """What the app is, as its first child tells it (and every one, where code changes)."""
        self._reload.sources.watch(hello.folders)
        self._pump.learn(frozenset(hello.types), frozenset(hello.alone))
        self._watch.time_outs = hello.time_outs
        self._retention.keep = hello.keep

    def enlist(self, id: str | None = None) -> None:
        """Become a worker: a new row, a new number, never used before."""
        began = time.monotonic()
        name = id or machine.new_worker_id()
        info = machine.identify(name, self._settings.lease_seconds, self._meta())
        self._roster.worker = self._store.register(info)
        self._renewal.holds_from(began)

    def _meta(self) -> dict[str, object]:
        """What others may read about this worker."""
        plan, settings = self._plan, self._settings
        return {
            "name": plan.name,
            "queues": None if plan.queues is None else sorted(plan.queues),
            "types": sorted(self._pump.types),
            "concurrency": plan.concurrency,
            "processes": plan.processes,
            "audit": settings.audit,
            "keep": [settings.keep_completed_seconds, settings.keep_events_seconds],
            **self._loops.trouble(),
        }

    # -- the crew's thread --------------------------------------------------------------------
    def run(self, start: Starter, first: Sequence[Child]) -> Summary:
        """Work until drained or stopped; `first` are children that were started before."""
        self._start = start
        for child in first:
            self._instruct(child)
            self._roster.add(child)
        if self._interrupted:  # before there was anything to stop
            self._say_when_it_ends()
        try:
            while not self._finished():
                try:
                    self._one_event()
                except Exception as error:
                    self._loops.failed("crew", error)
        finally:
            self._loops.over.set()
            self._pump.poke()
            self._loops.join(timeout=5)
            self._pump.chronicle.sum_up(at_once=True)
            for child in self._roster.children:
                child.close()
        self._sign_off()
        return self.summary()

    def interrupt(self) -> None:
        """A signal: stop, and say so. A second one ends it now. Takes no lock."""
        if self._interrupted:
            self.stop(0.0)
            return
        self._interrupted = True
        self._events.put(("interrupted", None))
        self.stop()

    def stop(self, grace: float | None = None) -> None:
        """Claim nothing more, end what runs. Takes no lock."""
        seconds = self._settings.shutdown_timeout if grace is None else grace
        self._stop_by = min(self._stop_by, time.monotonic() + seconds)
        self._pump.claiming = False
        self._stopping = True
        self._events.put(("stop", None))

    def _one_event(self) -> None:
        if not self._loops.start():
            time.sleep(LOOK_EVERY)
        pause = BUSY_LOOK_EVERY if self._roster.holding() else LOOK_EVERY
        try:
            kind, value = self._events.get(timeout=pause)
        except queue.Empty:
            kind, value = "tick", None
        if kind == "died":
            self._bury(value)
        elif kind == "declared-dead":
            self._start_over(value)
        elif kind == "changed":
            self._reload.replace(value)
            self._not_before = 0.0
        elif kind == "interrupted":
            self._say_when_it_ends()
        elif kind == "stop":
            for child in self._roster.children:
                child.stop()
        for child in self._roster.children:
            child.hang_up_if_dead()
        self._watch.look()
        self._pump.chronicle.sum_up()
        self._man()
        self._run_alone()
        if self._stopping and time.monotonic() >= self._stop_by:
            self._give_up_waiting()

    def _say_when_it_ends(self) -> None:
        _done, running, _waiting = self.census()
        if not running:
            log.info("stopping: nothing running")
            return
        left = round(max(0.0, self._stop_by - time.monotonic()), 1)
        log.info("stopping: %d running, up to %g s; Ctrl-C again ends now", running, left)

    def _finished(self) -> bool:
        if not self._stopping or self._pump.busy:
            return False
        return not self._roster.holding() and not self._pump.finisher.pending

    def _man(self) -> None:
        """As many children that take many jobs as planned. Those whose loops stand still, or that
        have had their jobs, have successors, but not without end: handlers that hold the GIL for
        long, or run for long, would multiply them."""
        if self._stopping or self._roster.embedded is not None:
            return
        many = [child for child in self._roster.children if not child.solo]
        old = sum(child.halted is not None or child.worn for child in many)
        wanted = self._plan.processes - max(0, old - self._plan.processes)
        missing = wanted - sum(not (child.leaving or child.worn) for child in many)
        while missing > 0 and self._add_child():
            missing -= 1

    def _add_child(self, job: ClaimedJob | None = None) -> bool:
        """A new child; with a job, one that runs it alone. False when there can be none now."""
        if self._reload.broken or time.monotonic() < self._not_before:
            return False
        solo = job is not None
        try:
            child = self._start(1 if solo else self._plan.concurrency, solo=solo)
        except CannotStart as error:
            self._start_pause = min(2 * self._start_pause or RESTART_PAUSE, LONGEST_PAUSE)
            self._not_before = time.monotonic() + self._start_pause
            log.warning(
                "no process can be started (%s): trying again in %.0f s", error, self._start_pause
            )
            return False
        self._start_pause = 0.0
        self._instruct(child)
        if job is not None:
            child.hand([job], self._roster.worker)  # waits in the pipe until the child is ready
        self._roster.add(child)
        return True

    def _instruct(self, child: Child) -> None:
        child.cancel_grace = self._settings.cancel_grace_seconds
        child.board.pulse(time.monotonic(), self._renewal.until, partial=False)  # before any job
        if child.process is not None and not child.solo:
            child.quota = self._settings.max_jobs_per_child or None
        if self._store.parallel:
            child.most_ahead = MOST_AHEAD_PARALLEL

    def _bury(self, child: Child) -> None:
        """A process has ended. What had started in it is charged, the rest is given back."""
        self._roster.burying = True
        try:
            self._roster.remove(child)
            charged = child.killed is None and not child.board.left
            how = child.how_it_died()
            for job, started in child.bury():
                if started and charged:
                    self._pump.end(job, outcome.Crashed(how, self._settings.crash_limit))
                else:
                    wait = RESTART_PAUSE if child.solo and not child.ready else 0.0
                    self._pump.end(job, outcome.Released(how, wait))
        finally:
            self._roster.burying = False
        child.close()
        if self._stopping or child.solo or child.leaving or self._reload.broken:
            return
        log.warning("child %s is gone: %s; starting another", child.pid, how)
        if not child.useful:
            self._not_before = max(self._not_before, time.monotonic() + RESTART_PAUSE)

    def _run_alone(self) -> None:
        """Tasks with `process=True`, and jobs that were running when a process died: one process
        each. An embedded worker has none to give: there suspects run when nothing else does."""
        roster = self._roster
        embedded = roster.embedded
        unwanted = roster.unwanted
        for job in list(roster.alone):
            reason = unwanted.get((job.id, job.lease_no))
            if reason is not None:
                self._pump.end(job, outcome.Cancelled(reason))
                roster.alone.remove(job)
        while roster.alone:
            if self._stopping:
                self._pump.end(roster.alone[0], outcome.Released("the worker is shutting down"))
                roster.alone.popleft()
                continue
            busy = sum(child.solo for child in roster.children)
            if busy >= self._plan.solos or (embedded is not None and embedded.holds):
                return
            job = roster.alone[0]
            if embedded is None:
                handed = self._add_child(job)
            else:
                handed = embedded.hand([job], roster.worker)
            if not handed:
                return
            roster.alone.popleft()  # only now: it is never nowhere
            self._pump.poke()  # there may be room for another

    def _give_up_waiting(self) -> None:
        """The grace is over: end what still runs, then give it back, uncharged."""
        why = "the worker was stopped"
        for child in self._roster.children:
            if child.process is not None:
                child.kill(why)
            else:
                child.cancel(dict.fromkeys(child.holds))
                for job, _started in child.bury():
                    self._pump.end(job, outcome.Released(why))
        while self._roster.alone:
            self._pump.end(self._roster.alone.popleft(), outcome.Released(why))

    def _start_over(self, worker: Registration) -> None:
        """Another worker declared us dead and has our jobs: drop everything, begin anew. What our
        children still report is sent all the same: the store refuses it, and it is counted."""
        if worker != self._roster.worker:
            return
        log.warning("worker %s was declared dead; starting over under a new id", self.worker_id)
        try:
            self.enlist()
        except StoreError as error:
            log.warning("could not register anew, trying again: %s", error)
            return  # the next renewal says it again
        for child in self._roster.children:
            if child.process is None:
                held = list(child.holds.values())
                self._roster.drop([(job.id, job.lease_no) for job, _slot in held])
            else:
                child.leaving = True
                child.bury()
                child.kill("its lease was taken away")
        self._roster.alone.clear()
        self._pump.poke()

    def _sign_off(self) -> None:
        try:
            self._store.retire(self._roster.worker)
        except StoreError as error:
            log.warning("could not sign off (%s); another worker will tidy up", error)

    # -- messages from children, on their pipes' threads ---------------------------------------
    def on_message(self, child: Child, message: FromChild) -> None:
        if isinstance(message, Report):
            child.stuck = message.stuck
            ended = message.ended
            if child.withdrawn:  # what it gives back now went back when it did not answer
                ended = [end for end in ended if (end.id, end.lease_no) not in child.withdrawn]
            # First added, then no longer held: in between nobody may think all is done.
            self._pump.finisher.add(ended, message.progress)
            child.ended([(end.id, end.lease_no) for end in ended])
            self._pump.poke()
            if child.solo and message.ended:
                child.stop()
            worn = bool(ended) and self._watch.weigh(child, time.monotonic())
            if worn or child.worn or self._stopping or self._roster.alone or message.stuck:
                self._events.put(("tick", None))
        elif isinstance(message, Hello):
            if self._plan.reload and not child.leaving:
                self.learn(message)
            child.greeted()
            self._pump.poke()
        elif isinstance(message, Refused):
            log.error("a child could not load the app: %s", message.message)
            if self._plan.reload and not child.leaving:
                self._reload.refused(message.folders)

    def on_end(self, child: Child) -> None:
        self._events.put(("died", child))

    def _give_back(self, ended: list[outcome.Ended]) -> None:
        if ended:
            self._pump.finisher.add(ended, [])
            self._pump.poke()

    def _look(self) -> None:
        """The pump has nothing to do: if we are stopping, that may be the end."""
        if self._stopping:
            self._events.put(("tick", None))

    def _ask_for_cancels(self) -> None:
        self._renewal.pass_on(self._store.cancel_requests(self._roster.worker))

    # -- upkeep -------------------------------------------------------------------------------
    def _tidy(self, over: threading.Event) -> None:
        while True:
            try:
                found = self._janitor.look(self._roster.worker) + self._janitor.settle()
                if found + self._store.sweep():
                    self._pump.poke()
            except StoreError as error:
                log.debug("upkeep postponed: %s", error)
            if over.wait(LOOK_EVERY):
                return

    def claimed(self) -> int | None:
        """How many jobs this worker has taken so far; None while a claim is on its way."""
        return None if self._pump.busy else self._pump.handed

    def census(self) -> tuple[int, int, int]:
        """Jobs that this worker has done, that run here (or are being recorded), and that wait
        here to run."""
        finisher = self._pump.finisher
        done = sum(finisher.counts[how] for how in ENDS)
        marks = [mark for child in self._roster.children for mark in child.marks()]
        running = sum(mark > 0 for mark in marks) + len(finisher.holds())
        return done, running, marks.count(0.0) + len(self._roster.alone)

    def summary(self) -> Summary:
        counts = self._pump.finisher.counts
        return Summary(
            **{name: counts[name] for name in Summary._fields if name in counts},
            rescued=self._janitor.rescued,
            seconds=time.monotonic() - self._begun,
            left=self._pump.left() if self._pump.drained else {},
        )
