"""The supervisor is the engine: it alone claims, renews, finishes and listens.

It runs no user code, so nothing a handler does can starve a lease or sit on the store's write
lock. Four threads, each one loop (five where the store can finish and claim at once):

    crew     (the caller's)  starts and buries children, time-outs, signals, the end
    pump     finish what has ended, claim what there is room for, hand it out,
             sleep until a hint or a poke                                       -> pump.py
    renewal  prove this worker alive, learn what the store thinks it holds      -> renewal.py
    janitor  rescue the jobs of dead workers, retention                         -> janitor.py

An embedded worker is the same object with one child that is not a process.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tenure import outcome, policy
from tenure.config import Settings
from tenure.engine import host
from tenure.engine.crew import MOST_AHEAD_PARALLEL, Child
from tenure.engine.janitor import Janitor
from tenure.engine.plan import Plan, Summary
from tenure.engine.pump import Pump
from tenure.engine.renewal import Renewal
from tenure.engine.roster import Roster
from tenure.engine.wire import FromChild, Hello, Refused, Report
from tenure.errors import StoreError
from tenure.job import ClaimedJob
from tenure.store import Registration, Store
from tenure.wakeup import Wakeup

log = logging.getLogger("tenure.worker")

LOOK_EVERY = 1.0
BUSY_LOOK_EVERY = 0.25  # time-outs are looked at this often while anything runs
HARD_GRACE = 1.5  # past its time-out plus this, a silent child is killed
RESTART_PAUSE = 1.0  # a child that dies before it ended or began any job is not restarted at once


CANCELLED = outcome.Cancelled("cancelled; its process had to be killed")


class Starter(Protocol):
    """How children come to be."""

    def __call__(self, concurrency: int, *, solo: bool = False) -> Child: ...


class Supervisor:
    def __init__(self, store: Store, settings: Settings, wakeup: Wakeup, plan: Plan) -> None:
        self._store = store
        self._settings = settings
        self._plan = plan
        self._events: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._roster = Roster()
        self._janitor = Janitor(store, settings)
        self._pump = Pump(
            store,
            settings,
            wakeup,
            plan,
            self._roster,
            on_alone=lambda: self._events.put(("tick", None)),
            on_done=self.stop,
            on_idle=self._look,
            on_calm=self._ask_for_cancels,
        )
        self._renewal = Renewal(
            store,
            settings.lease_renew_seconds,
            self._roster,
            on_renewed=self._janitor.wrote,
            on_declared_dead=lambda worker: self._events.put(("declared-dead", worker)),
            give_back=self._give_back,
            unwritten=self._pump.finisher.holds,
            claims=lambda: (self._pump.turns, self._pump.busy),
        )
        self._over = threading.Event()  # the threads may end
        self._stopping = False  # plain: set by signal handlers, which must take no lock
        self._stop_by = float("inf")
        self._begun = time.monotonic()

    @property
    def worker_id(self) -> str:
        return self._roster.worker.id

    def learn(self, hello: Hello) -> None:
        """What the app is, as its first child tells it."""
        self._pump.types = frozenset(hello.types)
        self._pump.alone = frozenset(hello.alone)
        self._janitor.keep = hello.keep

    def enlist(self, id: str | None = None) -> None:
        """Become a worker: a new row, a new number, never used before."""
        plan = self._plan
        info = host.identify(
            id or host.new_worker_id(),
            self._settings.lease_seconds,
            {
                "name": plan.name,
                "queues": None if plan.queues is None else sorted(plan.queues),
                "types": sorted(self._pump.types),
                "concurrency": plan.concurrency,
                "processes": plan.processes,
            },
        )
        self._roster.worker = self._store.register(info)

    # -- the crew's thread --------------------------------------------------------------------
    def run(self, start: Starter, first: Sequence[Child]) -> Summary:
        """Work until drained or stopped; `first` are children that were started before."""
        self._start = start
        for child in first:
            self._instruct(child)
            self._roster.add(child)
        loops = {
            "pump": self._pump.run,
            "renewal": self._renewal.run,
            "janitor": self._tidy,
        }
        if self._store.parallel:
            loops["finishes"] = self._pump.run_finishes
        threads = [
            threading.Thread(target=self._guard, args=(loop,), name=f"tenure-{name}", daemon=True)
            for name, loop in loops.items()
        ]
        for thread in threads:
            thread.start()
        try:
            while len(self._roster.children) < self._plan.processes:
                self._add_child()
            while not self._finished():
                self._one_event()
        finally:
            self._over.set()
            self._pump.poke()
            for thread in threads:
                thread.join(timeout=5)
            for child in self._roster.children:
                child.close()
        self._sign_off()
        return self.summary()

    def stop(self, grace: float | None = None) -> None:
        """Safe in a signal handler. A second call ends it now."""
        if self._stopping and grace is None:
            grace = 0.0
        seconds = self._settings.shutdown_timeout if grace is None else grace
        self._stop_by = min(self._stop_by, time.monotonic() + seconds)
        self._pump.claiming = False
        self._stopping = True
        self._events.put(("stop", None))

    def _one_event(self) -> None:
        pause = BUSY_LOOK_EVERY if self._roster.holding() else LOOK_EVERY
        try:
            kind, value = self._events.get(timeout=pause)
        except queue.Empty:
            kind, value = "tick", None
        if kind == "died":
            self._bury(value)
        elif kind == "declared-dead":
            self._start_over(value)
        elif kind == "stop":
            for child in self._roster.children:
                child.stop()
        elif kind == "failed":
            raise value
        for child in self._roster.children:
            child.hang_up_if_dead()
        self._kill_overdue()
        self._replace_stuck()
        self._run_alone()
        if self._stopping and time.monotonic() >= self._stop_by:
            self._give_up_waiting()

    def _finished(self) -> bool:
        if not self._stopping or self._pump.busy:
            return False
        return not self._roster.holding() and not self._pump.finisher.pending

    def _add_child(self, job: ClaimedJob | None = None) -> None:
        """A new child; with a job, one that runs it alone."""
        solo = job is not None
        child = self._start(1 if solo else self._plan.concurrency, solo=solo)
        self._instruct(child)
        if job is not None:
            child.hand([job], self._roster.worker)  # waits in the pipe until the child is ready
        self._roster.add(child)

    def _instruct(self, child: Child) -> None:
        child.cancel_grace = self._settings.cancel_grace_seconds
        if self._store.parallel:
            child.most_ahead = MOST_AHEAD_PARALLEL

    def _bury(self, child: Child) -> None:
        """A process has ended. What had started in it is charged, the rest is given back."""
        self._roster.burying = True
        self._roster.remove(child)
        charged = child.killed is None
        how = child.how_it_died()
        for job, started in child.bury():
            if started and charged:
                self._pump.end(job, outcome.Crashed(how, self._settings.crash_limit))
            else:
                wait = RESTART_PAUSE if child.solo and not child.ready else 0.0
                self._pump.end(job, outcome.Released(how, wait))
        self._roster.burying = False
        child.close()
        if self._stopping or child.solo or child.leaving:
            return
        log.warning("child %s is gone: %s; starting another", child.pid, how)
        if not child.useful:
            self._over.wait(RESTART_PAUSE)
        self._add_child()

    def _kill_overdue(self) -> None:
        """Asking did not help: end the process. Its other jobs are given back, uncharged."""
        now = time.monotonic()
        for child in self._roster.children:
            if child.process is None or child.killed is not None:
                continue  # nobody can end a thread of an embedded worker; it was asked
            job = child.overdue(now, HARD_GRACE)
            if job is not None:
                log.warning("job %s does not end when told to: killing its process", job.id)
                child.kill("a neighbour in its process did not end when told to")
                asked = job.id in child.cancels
                child.ended([(job.id, job.lease_no)])
                self._pump.end(job, CANCELLED if asked else self._timed_out(job))

    def _timed_out(self, job: ClaimedJob) -> outcome.Outcome:
        """The task's own policy died with the process: the default curve takes its place."""
        message = f"still running after its time-out of {job.timeout_ms / 1000:g} s; killed"
        failure = outcome.Failure(f"TimeoutError: {message}", "TIMEOUT", "TimeoutError")
        if job.attempts >= job.max_attempts:
            return outcome.Dead(failure)
        return outcome.Retried(policy.Exponential().delay(job.attempts), failure)

    def _replace_stuck(self) -> None:
        """A child that has lost threads to handlers that do not end gets a successor."""
        for child in self._roster.children:
            if not child.stuck or child.leaving or child.process is None:
                continue
            log.warning("child %s has %d stuck handlers: replacing it", child.pid, child.stuck)
            child.stop()
            if not child.solo and not self._stopping:
                self._add_child()

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
                self._add_child(job)
            else:
                embedded.hand([job], roster.worker)
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
        replace = 0
        for child in self._roster.children:
            if child.process is None:
                held = list(child.holds.values())
                self._roster.drop([(job.id, job.lease_no) for job, _slot in held])
            else:
                replace += not child.solo and not child.leaving
                child.leaving = True
                child.bury()
                child.kill("its lease was taken away")
        self._roster.alone.clear()
        for _ in range(replace):
            self._add_child()
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
            # First added, then no longer held: in between nobody may think all is done.
            self._pump.finisher.add(message.ended, message.progress)
            child.ended([(end.id, end.lease_no) for end in message.ended])
            self._pump.poke()
            if child.solo and message.ended:
                child.stop()
            if self._stopping or self._roster.alone or message.stuck:
                self._events.put(("tick", None))
        elif isinstance(message, Hello):
            child.ready = True
            self._pump.poke()
        elif isinstance(message, Refused):
            log.error("a child could not load the app: %s", message.message)

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
                self._janitor.prune_when_due()
            except StoreError as error:
                log.debug("upkeep postponed: %s", error)
            if over.wait(LOOK_EVERY):
                return

    def _guard(self, loop: Callable[[threading.Event], None]) -> None:
        """A thread that dies of a bug takes the worker down with it, loudly."""
        try:
            loop(self._over)
        except BaseException as error:
            log.exception("internal error in %s", threading.current_thread().name)
            self._events.put(("failed", error))

    def summary(self) -> Summary:
        counts = self._pump.finisher.counts
        return Summary(
            **{name: counts[name] for name in Summary._fields if name in counts},
            rescued=self._janitor.rescued,
            seconds=time.monotonic() - self._begun,
            left=self._pump.left() if self._pump.drained else {},
        )
