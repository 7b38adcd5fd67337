"""The supervisor is the engine: it alone claims, renews, finishes and listens.

It runs no user code, so nothing a handler does can starve a lease or sit on the store's write
lock. Its threads are loops that talk through one `WorkerState`:

    supervisor  (the caller's thread) starts and buries children, signals, the end;
                time-outs and children that do not answer                       -> child_watch.py
    dispatcher  finish what has ended, claim what there is room for, hand it
                out, sleep until a hint or a bell                               -> dispatcher.py
    finishes    the first part of that, where the store can do two things at once
    renewal     prove this worker alive, learn what the store thinks it holds   -> lease_renewal.py
    rescue, upkeep, retention, pulse
                the lanes of its timers                                         -> upkeep.py
    sources     with `--reload`: look for changed files                         -> reload.py

`worker_threads.py` keeps them going. An embedded worker is the same object with one child that is
not a process, and without a launcher.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Sequence
from functools import partial

from tenure import outcome
from tenure.config import Settings
from tenure.engine import machine
from tenure.engine.child_watch import ChildWatch
from tenure.engine.children import MOST_AHEAD_PARALLEL, Child
from tenure.engine.dispatcher import Dispatcher
from tenure.engine.launcher import CannotStart, Launcher
from tenure.engine.lease_renewal import LeaseRenewal
from tenure.engine.messages import CancelJobs, FromChild, Hello, Refused, Report
from tenure.engine.reload import Reload
from tenure.engine.timers import lanes
from tenure.engine.upkeep import Upkeep
from tenure.engine.worker_options import Summary, WorkerOptions
from tenure.engine.worker_state import ChildEnded, CodeChanged, DeclaredDead, News, WorkerState
from tenure.engine.worker_threads import Loop, WorkerThreads
from tenure.errors import StoreError
from tenure.job import ClaimedJob
from tenure.store import Registration, Store
from tenure.wakeup import Wakeup

log = logging.getLogger("tenure.worker")

LOOK_EVERY = 1.0
BUSY_LOOK_EVERY = 0.25  # time-outs are looked at this often while anything runs
RESTART_PAUSE = 1.0  # a child that dies before it ended or began any job is not restarted at once
LONGEST_PAUSE = 30.0  # between two tries, while the system has no process to give
SHUTTING_DOWN = outcome.Released("the worker is shutting down")


class Supervisor:
    def __init__(
        self,
        store: Store,
        settings: Settings,
        wakeup: Wakeup,
        options: WorkerOptions,
        launcher: Launcher | None = None,
    ) -> None:
        self.state = WorkerState(options, settings, wakeup)
        self._store = store
        self._settings = settings
        self._options = options
        self._launcher = launcher
        self._dispatcher = Dispatcher(store, self.state, wakeup)
        self._watch = ChildWatch(self.state)
        self._reload = Reload(self.state)
        self._threads = WorkerThreads(self._loops(), self.state.failures, self.state.over)
        self._not_before = 0.0  # no child is started before then
        self._start_pause = 0.0
        self._said_when_it_ends = False

    def _loops(self) -> dict[str, Loop]:
        timers = Upkeep(self._store, self.state).timers(embedded=self._launcher is None)
        loops: dict[str, Loop] = {
            "dispatcher": self._dispatcher.run,
            "renewal": LeaseRenewal(self._store, self.state).run,
            **lanes(timers, self.state.failures),
        }
        if self._options.reload:
            loops["sources"] = self._reload.run
        if self._store.parallel:
            loops["finishes"] = self._dispatcher.run_finishes
        return loops

    def learn(self, hello: Hello) -> None:
        """What the app is, as its first child tells it (and every one, where code changes)."""
        self._reload.sources.watch(hello.folders)
        self.state.learn(hello)

    def enlist(self, id: str | None = None) -> None:
        """Become a worker: a new row, a new number, never used before."""
        began = time.monotonic()
        id = id or machine.new_worker_id()
        info = machine.identify(id, self._settings.lease_seconds, self.state.description())
        self.state.registered(self._store.register(info), began)

    # -- the supervisor's thread --------------------------------------------------------------
    def run(self, first: Sequence[Child]) -> Summary:
        """Work until drained or stopped; `first` are children that were started before."""
        state = self.state
        state.begin()
        for child in first:
            try:
                self._adopt(child)
            except CannotStart as error:
                log.warning("no thread for a child (%s): starting another", error)
        try:
            while not state.finished():
                try:
                    self._one_turn()
                except Exception as error:
                    state.over.wait(state.failures.count("supervisor", error))
        finally:
            state.end()
            self._threads.join(timeout=5)
            state.job_log.sum_up(at_once=True)
            for child in state.children:
                child.close()
        self._sign_off()
        return self.summary()

    def _one_turn(self) -> None:
        state = self.state
        if not self._threads.start():
            time.sleep(LOOK_EVERY)
        try:
            news = state.news.get(timeout=BUSY_LOOK_EVERY if state.holding() else LOOK_EVERY)
        except queue.Empty:
            news = None
        self._hear(news)
        if not state.claiming:
            self._stop_children()
        for child in state.children:
            child.hang_up_if_dead()
        self._watch.look()
        state.job_log.sum_up()
        self._start_missing()
        self._run_alone()
        if state.phase == "stopping":
            self._give_up_waiting()

    def _hear(self, news: News) -> None:
        match news:
            case ChildEnded(child):
                self._bury(child)
            case DeclaredDead(worker):
                self._start_over(worker)
            case CodeChanged(path):
                self._reload.replace(path)
                self._not_before = 0.0

    def _stop_children(self) -> None:
        """draining: they end what they run, and leave."""
        if self.state.interrupted and not self._said_when_it_ends:
            self._said_when_it_ends = True
            self._say_when_it_ends()
        for child in self.state.children:
            if not child.leaving:
                child.stop()

    def _say_when_it_ends(self) -> None:
        _done, running, _waiting = self.state.census()
        if not running:
            log.info("stopping: nothing running")
            return
        left = round(max(0.0, self.state.stop_by - time.monotonic()), 1)
        log.info("stopping: %d running, up to %g s; Ctrl-C again ends now", running, left)

    def _give_up_waiting(self) -> None:
        """stopping: end what still runs, then give it back, uncharged."""
        stopped = outcome.Released("the worker was stopped")
        for child in self.state.children:
            if child.process is not None:
                child.kill(stopped.reason)
            else:
                child.channel.send(CancelJobs(dict.fromkeys(child.holds)))
                self.state.take_back(child, [(job, stopped) for job, _started in child.bury()])
        while self.state.alone:
            self.state.decide(self.state.alone[0], stopped)
            self.state.alone.popleft()

    def _sign_off(self) -> None:
        try:
            self._store.retire(self.state.worker)
        except StoreError as error:
            log.warning("could not sign off (%s); another worker will tidy up", error)

    def summary(self) -> Summary:
        state = self.state
        return Summary(
            **{name: state.counts[name] for name in Summary._fields if name in state.counts},
            seconds=time.monotonic() - (state.begun or time.monotonic()),
            left=self._dispatcher.claims.left() if self._dispatcher.drained else {},
        )

    # -- starting children --------------------------------------------------------------------
    def _start_missing(self) -> None:
        """As many children that take many jobs as planned. A child whose loop stands still, or
        that has had its jobs, has a successor, but there is a limit: handlers that hold the GIL
        for long, or run for long, would multiply them without end."""
        if self._launcher is None or not self.state.claiming:
            return
        many = [child for child in self.state.children if not child.solo]
        old = sum(child.halted is not None or child.worn for child in many)
        wanted = self._options.processes - max(0, old - self._options.processes)
        missing = wanted - sum(not (child.leaving or child.worn) for child in many)
        while missing > 0 and self._start_child(self._launcher):
            missing -= 1

    def _start_child(self, launcher: Launcher, job: ClaimedJob | None = None) -> bool:
        """A new child; with a job, one that runs it alone. False when there can be none now."""
        if self._reload.broken or time.monotonic() < self._not_before:
            return False
        worker, solo = self.state.worker, job is not None
        try:
            child = launcher.start(worker.id, 1 if solo else self._options.concurrency, solo=solo)
            self._adopt(child)
        except CannotStart as error:
            self._start_pause = min(2 * self._start_pause or RESTART_PAUSE, LONGEST_PAUSE)
            self._not_before = time.monotonic() + self._start_pause
            log.warning(
                "no process can be started (%s): trying again in %.0f s", error, self._start_pause
            )
            return False
        self._start_pause = 0.0
        if job is not None:
            child.hand([job], worker)  # waits in the pipe until the child is ready
        return True

    def _adopt(self, child: Child) -> None:
        """From now on it is one of ours, and is heard."""
        child.cancel_grace = self._settings.cancel_grace_seconds
        if child.process is not None and not child.solo:
            child.quota = self._settings.max_jobs_per_child or None
        if self._store.parallel:
            child.most_ahead = MOST_AHEAD_PARALLEL
        child.board.pulse(time.monotonic(), self.state.lease.until, partial=False)  # before any job
        try:
            child.channel.listen(partial(self._heard, child), partial(self._ended, child))
        except RuntimeError as error:  # no thread to listen in
            child.kill("there was no thread to listen to it")
            child.close()
            raise CannotStart(str(error)) from error
        self.state.add(child)

    def _run_alone(self) -> None:
        """Tasks with `process=True`, and jobs that were running when a process died: one process
        each. An embedded worker has none to give: there suspects run when nothing else does."""
        state = self.state
        unwanted = state.unwanted
        for job in list(state.alone):
            reason = unwanted.get((job.id, job.lease_no))
            if reason is not None:
                state.decide(job, outcome.Cancelled(reason))
                state.alone.remove(job)
        while state.alone and not state.claiming:
            state.decide(state.alone[0], SHUTTING_DOWN)
            state.alone.popleft()
        while state.alone and self._hand_alone(state.alone[0]):
            state.alone.popleft()  # only now: it is never nowhere
            state.wake_writers()  # there may be room for another

    def _hand_alone(self, job: ClaimedJob) -> bool:
        state = self.state
        if sum(child.solo for child in state.children) >= self._options.solos:
            return False
        if self._launcher is not None:
            return self._start_child(self._launcher, job)
        embedded = state.embedded
        return embedded is not None and not embedded.holds and embedded.hand([job], state.worker)

    # -- children that end --------------------------------------------------------------------
    def _bury(self, child: Child) -> None:
        """A process has ended. What had started in it is charged, the rest is given back."""
        held = child.bury()
        charged = child.killed is None and not child.board.left
        how = child.how_it_died()
        wait = RESTART_PAUSE if child.solo and not child.ready else 0.0
        crashed = outcome.Crashed(how, self._settings.crash_limit)
        released = outcome.Released(how, wait)
        ends = [(job, crashed if started and charged else released) for job, started in held]
        self.state.take_back(child, ends)
        self.state.remove(child)
        child.close()
        if not self.state.claiming or child.solo or child.leaving or self._reload.broken:
            return
        log.warning("child %s is gone: %s; starting another", child.pid, how)
        if not child.useful:
            self._not_before = max(self._not_before, time.monotonic() + RESTART_PAUSE)

    def _start_over(self, worker: Registration) -> None:
        """Another worker declared us dead and has our jobs: drop everything, begin anew. What our
        children still report is sent all the same: the store refuses it, and it is counted."""
        state = self.state
        if worker != state.worker:
            return
        log.warning("worker %s was declared dead; starting over under a new id", worker.id)
        try:
            self.enlist()
        except StoreError as error:
            log.warning("could not register anew, trying again: %s", error)
            return  # the next renewal says it again
        for child in state.children:
            held = [job for job, _slot in list(child.holds.values())]
            if child.process is None:
                child.lose({job.id: job.lease_no for job in held})
            else:
                child.leaving = True
                child.let_go([job for job, _started in child.bury()])
                child.kill("its lease was taken away")
        state.alone.clear()
        state.wake_writers()

    # -- messages from children, on their pipes' threads ---------------------------------------
    def _heard(self, child: Child, message: FromChild) -> None:
        match message:
            case Report():
                self._reported(child, message)
            case Hello():
                if self._options.reload and not child.leaving:
                    self.learn(message)
                child.greeted()
                self.state.wake_writers()
            case Refused():
                log.error("a child could not load the app: %s", message.message)
                if self._options.reload and not child.leaving:
                    self._reload.refused(message.folders)

    def _reported(self, child: Child, report: Report) -> None:
        state = self.state
        child.stuck = report.stuck
        state.reported(child, report)
        if child.solo and report.ended:
            child.stop()
        worn = bool(report.ended) and self._watch.weigh(child, time.monotonic())
        if worn or child.worn or not state.claiming or state.alone or report.stuck:
            state.wake_supervisor()

    def _ended(self, child: Child) -> None:
        self.state.news.put(ChildEnded(child))
