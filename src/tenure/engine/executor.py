"""Step 6 of the walk: run claimed jobs and say how each ended.

One executor lives in each child (or, embedded, in a thread of the program): an asyncio loop for
`async def` handlers, threads for `def` ones. A run is five calls in a row: unpack the arguments,
call, wait (`run.py`), judge (`judgement.py`), report.

A handler may block the loop. Then another thread stands in for it (`loop_watch.py`), so that `def`
jobs go on. That is why the executor's books change under `lock`; the loop's own things (tasks,
timers, events) only the loop touches.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from tenure import outcome
from tenure.context import Lifecycle, act_for
from tenure.engine.board import Board
from tenure.engine.forks import end_copy
from tenure.engine.handler_threads import HandlerThreads
from tenure.engine.hook_calls import tell, tell_of_end
from tenure.engine.job_log import JobLog
from tenure.engine.judgement import judge_error, judge_value, why_stopped
from tenure.engine.messages import (
    Assignment,
    CancelJobs,
    ForgetWaiting,
    Report,
    RunJobs,
    Stop,
    ToChild,
)
from tenure.engine.run import JobRun, RunningApp
from tenure.store import Registration

log = logging.getLogger("tenure.worker")

TICK = 0.05  # how often time-outs and progress are looked at, while anything runs
BEAT, IDLE_BEAT = 0.25, 1.0  # how often the board hears that the loop turns
STOP_GRACE = 1.0  # after its time-out a handler has this long to end by itself
PROGRESS_EVERY = 0.25
NO_ANSWER = outcome.Released("its process did not answer")
SHUTTING_DOWN = outcome.Released("the worker is shutting down")
UNKNOWN_TYPE = outcome.Released("its type is not known here", delay=10.0)
LEASE_LOST = outcome.Released("its lease was lost")


_Call = TypeVar("_Call", bound=Callable[..., None])


def _locked(method: _Call) -> _Call:
    """Changes the books; a third of a microsecond, mostly once a batch."""

    @functools.wraps(method)
    def locked(self: Executor, *args: Any) -> None:
        with self.lock:
            method(self, *args)

    return locked  # type: ignore[return-value]


class Executor:
    def __init__(
        self, app: RunningApp, board: Board, concurrency: int, send: Callable[[Report], None]
    ) -> None:
        self._app = app
        self._board = board
        self._concurrency = concurrency
        self._send = send
        self._worker = Registration(0, "")  # under which jobs were claimed last
        self._backlog: deque[Assignment] = deque()
        self._running: dict[str, JobRun] = {}
        self._ended: list[outcome.Ended] = []
        self._said: list[tuple[str, int, str]] = []  # last words on progress of what has ended
        self._job_log = JobLog(lambda: self._worker.id)
        self._threads = HandlerThreads(self._run_in_thread)
        self._over: deque[tuple[JobRun, outcome.Outcome]] = deque()  # runs, not yet collected
        self._collecting = False
        self._loop: asyncio.AbstractEventLoop
        self._flushing = False
        self._ticking = False
        self._threadless = False  # jobs wait for a thread, and we will try again
        self._stuck = 0
        self._stopping = False
        self._standing_in = False  # the thread that holds the lock is not the loop's
        self._resuming = False  # when it turns again, the loop starts what is left
        self.lock = threading.RLock()
        self.turned = time.monotonic()  # when the loop last did
        self.working = False  # jobs run: it turns every TICK, else every IDLE_BEAT
        self.copied = False  # this is a process that a handler has forked
        self.idle = asyncio.Event()  # set when stopping and nothing runs any more

    def begin(self) -> None:
        """On the loop's thread, before any order."""
        self._loop = asyncio.get_running_loop()
        self._beat()

    # -- orders from the supervisor, on the loop's thread ------------------------------------
    def obey(self, order: ToChild) -> None:
        match order:
            case RunJobs():
                self.assign(order)
            case CancelJobs():
                self.cancel(order)
            case ForgetWaiting():
                self.forget()
            case Stop():
                self.stop()

    @_locked
    def assign(self, order: RunJobs) -> None:
        self._worker = order.worker
        self._job_log.look()
        urgent = self._backlog and order.jobs[0].job.priority < self._backlog[-1].job.priority
        self._backlog.extend(order.jobs)
        if urgent:  # what was claimed ahead must not stand before a more urgent job
            by_priority = sorted(self._backlog, key=lambda waiting: waiting.job.priority)
            self._backlog = deque(by_priority)
        if self._stopping:
            self.stop()  # they crossed with the order to stop
        else:
            self._start_next()

    @_locked
    def cancel(self, order: CancelJobs) -> None:
        for job_id, reason in order.ids.items():
            run = self._running.get(job_id)
            if run is not None:
                run.cancel_reason, run.lost = reason, reason is None
                run.cancel_by = time.monotonic() + self._app.settings.cancel_grace_seconds
                if run.waiter is not None:
                    self._on_loop(run.waiter.cancel)
            else:
                self._cancel_waiting(job_id, reason)

    @_locked
    def stop(self) -> None:
        """Start nothing more and give back what waits; `idle` is set when the rest has ended."""
        self._stopping = True
        while self._backlog:
            self._finish_unstarted(self._backlog.popleft(), SHUTTING_DOWN)
        self._when_idle()

    def close(self) -> None:
        """Nothing will be assigned any more, and nothing is heard of it."""
        self._threads.close()
        self._send = _unheard

    @_locked
    def forget(self) -> None:
        """Our loop stood still, and the jobs that wait here were taken back meanwhile."""
        while self._backlog:
            self._board.end(self._backlog.popleft().slot)
        self._board.go_on()

    def lose(self) -> None:
        """Our leases are not renewed any more. From any thread: the loop may be standing still."""
        for run in list(self._running.values()):
            run.lost = True

    def give_up(self) -> None:
        """The same on the loop: tasks are cancelled, what waits goes back."""
        self.cancel(CancelJobs(dict.fromkeys(self._running)))
        self.stop()

    def _cancel_waiting(self, job_id: str, reason: str | None) -> None:
        for waiting in self._backlog:
            if waiting.job.id == job_id:
                self._backlog.remove(waiting)
                if reason is not None:
                    self._finish_unstarted(waiting, outcome.Cancelled(reason))
                return

    # -- starting -----------------------------------------------------------------------------
    def _start_next(self) -> None:
        """As many as there is room for: after a batch of ends, not after each."""
        if not self._backlog:
            return
        threadless: list[Assignment] = []
        loopless: list[Assignment] = []  # which cannot start their tasks now
        while self._backlog and len(self._running) < self._concurrency and not self._stopping:
            assignment = self._backlog.popleft()
            task = self._app.tasks.get(assignment.job.type)
            if task is None:
                self._finish_unstarted(assignment, UNKNOWN_TYPE)
                continue
            is_async = task.signature.is_async
            if is_async and self._standing_in:
                loopless.append(assignment)
            elif is_async or self._threads.reserve():
                job, slot = assignment.job, assignment.slot
                self._start(JobRun(job, slot, task, self._app, self._worker), is_async)
            else:
                threadless.append(assignment)
        self._backlog.extendleft(reversed(loopless))
        self._backlog.extendleft(reversed(threadless))
        if self._standing_in:  # which looks again in a moment; and the loop, when it turns
            if not self._resuming:
                self._resuming = True
                self._loop.call_soon_threadsafe(self._resume)
            return
        if threadless and not self._threadless:
            self._threadless = True
            self._loop.call_later(self._threads.pause, self._try_threads)
        self._watch_runs()

    @_locked
    def _resume(self) -> None:
        self._resuming = False
        self._start_next()
        self._watch_runs()  # which were started for us

    @_locked
    def _try_threads(self) -> None:
        self._threadless = False
        self._start_next()

    def _start(self, run: JobRun, is_async: bool) -> None:
        run.begun = time.monotonic()
        run.deadline = run.begun + run.job.timeout_ms / 1000
        if not self._board.start(run.slot, run.begun):
            # We did not answer for so long that what had not started was taken back: this too.
            if not is_async:
                self._threads.release()
            self._finish_unstarted(run, NO_ANSWER)
            return
        self._running[run.job.id] = run
        if self._job_log.verbose:
            self._job_log.started(run.job)
        if is_async:
            run.waiter = self._loop.create_task(self._run_async(run))
        else:
            self._threads.put(run)

    async def _run_async(self, run: JobRun) -> None:
        try:
            act_for(run.job)
            self._announce_start(run)
            value = await run.call()
            ended = judge_value(value, run)
        except asyncio.CancelledError as error:
            ended = judge_error(why_stopped(run, error), run)
        except BaseException as error:
            if self.copied:
                end_copy(error)
            ended = judge_error(error, run)
        self._hand_in(run, ended, self._loop.call_soon)

    def _run_in_thread(self, run: JobRun) -> None:
        try:
            act_for(run.job)
            self._announce_start(run)
            value = run.call()
            ended = judge_value(value, run)
        except BaseException as error:
            if self.copied:
                end_copy(error)
            ended = judge_error(error, run)
        self._hand_in(run, ended, self._loop.call_soon_threadsafe)

    def _hand_in(self, run: JobRun, ended: outcome.Outcome, soon: Callable[..., object]) -> None:
        if self.copied:
            end_copy(None)
        if not run.done:
            self._announce_end(run, ended)
        self._over.append((run, ended))
        # A flag, not the queue's length: two threads may both see two entries.
        if not self._collecting:
            self._collecting = True
            soon(self._collect)

    @_locked
    def _collect(self) -> None:
        self._collecting = False  # before the queue is emptied: later entries ask again
        while self._over:
            self._end(*self._over.popleft())
        self._start_next()

    # -- hooks --------------------------------------------------------------------------------
    def _announce_start(self, run: JobRun) -> None:
        if self._app.hooks:
            tell(self._app.hooks, Lifecycle("start", run.job))

    def _announce_end(self, run: JobRun, how: outcome.Outcome) -> None:
        """The exception is held no longer: its traceback holds the run."""
        raised, run.raised = run.raised, None
        if self._app.hooks:
            tell_of_end(self._app.hooks, run.job, how, raised)

    # -- ending -------------------------------------------------------------------------------
    def _end(self, run: JobRun, how: outcome.Outcome) -> None:
        if run.done:  # its time-out was reported long ago; its thread is usable again
            self._stuck -= 1
        else:
            self._finish(run, how)

    def _finish(self, run: JobRun, how: outcome.Outcome) -> None:
        run.done = True
        self._board.end(run.slot)
        if self._running.get(run.job.id) is run:  # or a later lease of the same job runs here
            del self._running[run.job.id]
        if run.lost and not isinstance(how, outcome.Completed):
            how = LEASE_LOST  # the store refuses it; our slot is free
        elif run.progress is not None and not run.settled:
            self._said.append((run.job.id, run.job.lease_no, run.progress))
        lasted = run.lasted_ms()
        self._ended.append(outcome.Ended(run.job.id, run.job.lease_no, lasted, how))
        self._soon_flush()
        if type(how) is not outcome.Completed or self._job_log.verbose:
            self._job_log.ended(run.job, how, lasted)
        if self._stopping:
            self._when_idle()

    def _finish_unstarted(self, waiting: Assignment | JobRun, how: outcome.Outcome) -> None:
        self._board.end(waiting.slot)
        self._ended.append(outcome.Ended(waiting.job.id, waiting.job.lease_no, 0, how))
        self._soon_flush()

    def _when_idle(self) -> None:
        if not self._running:
            self._job_log.sum_up(at_once=True)
            self._flush()
            self._on_loop(self.idle.set)

    def _on_loop(self, call: Callable[[], object]) -> None:
        if self._standing_in:
            self._loop.call_soon_threadsafe(call)
        else:
            call()

    def _soon_flush(self) -> None:
        """All that ends in one turn of the loop goes into one message."""
        if not self._flushing and not self._standing_in:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    @_locked
    def _flush(self) -> None:
        self._flushing = False
        if self._ended:
            ended, self._ended = self._ended, []
            said, self._said = self._said, []
            self._send(Report(ended, said, self._stuck))

    # -- time ---------------------------------------------------------------------------------
    def stand_in(self, read: Callable[[], None]) -> None:
        """The loop does not turn: do from another thread what it would do for `def` jobs. `read`
        takes orders. While the lock is taken, another thread is doing something, and that will do.
        """
        if not self.lock.acquire(blocking=False):
            return
        try:
            self._standing_in = True
            read()
            self._collect()
            self._look_after_runs(time.monotonic())
            self._flush()
        finally:
            self._standing_in = False
            self.lock.release()

    def runs(self) -> list[JobRun]:
        return list(self._running.values())

    def _beat(self) -> None:
        self.turned = time.monotonic()
        self._board.beat(self.turned)
        self._job_log.sum_up()
        pause = BEAT if self._running or self._backlog else IDLE_BEAT
        self._loop.call_later(pause, self._beat)

    def _watch_runs(self) -> None:
        if self._running and not self._ticking:
            self._ticking = True
            self.turned = time.monotonic()
            self.working = True
            self._loop.call_later(TICK, self._tick)

    @_locked
    def _tick(self) -> None:
        self.turned = time.monotonic()
        self._look_after_runs(self.turned)
        self._start_next()
        self._ticking = bool(self._running)
        if self._ticking:
            self._loop.call_later(TICK, self._tick)
        else:
            self.working = False

    def _look_after_runs(self, now: float) -> None:
        progress = []
        for run in self.runs():
            if run.progress is not None and now >= run.progress_due:
                progress.append((run.job.id, run.job.lease_no, run.progress))
                run.progress, run.progress_due = None, now + PROGRESS_EVERY
            if now >= run.deadline or now >= run.cancel_by:
                self._overrun(run, now)
        if progress:
            self._send(Report([], progress, self._stuck))

    def _overrun(self, run: JobRun, now: float) -> None:
        """First ask: cancel the task, set the token. A handler that does not listen, to a time-out
        or to a cancellation, is given up and its outcome said for it; the child is then replaced. A
        loop that is blocked cannot even do this: its child is the supervisor's to kill."""
        if self._standing_in and (run.waiter is not None or run.timed_out):
            return
        if now >= run.deadline and not run.timed_out:
            run.timed_out = True
            run.cancel_reason = run.cancel_reason or "timed out"
            if run.waiter is not None:
                run.waiter.cancel()
        elif not self._standing_in and now >= min(run.deadline + STOP_GRACE, run.cancel_by):
            self._stuck += 1
            how = judge_error(why_stopped(run), run)
            self._announce_end(run, how)
            self._finish(run, how)


def _unheard(report: Report) -> None:
    """After `close`."""
