"""Step 6 of the walk: run claimed jobs and say how each ended.

One executor lives in each child (or, embedded, in a thread of the program): an asyncio loop for
`async def` handlers, threads for `def` ones. It never touches the store. A run is five calls in a
row: unpack the arguments, call, wait, judge, report.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import Any

from tenure import context, outcome, payload, policy
from tenure.engine.board import Board
from tenure.engine.wire import Assignment, Cancel, Report
from tenure.errors import JobCancelled, LeaseLost, PayloadError
from tenure.job import Actor, ClaimedJob
from tenure.task import Task

TICK = 0.05  # how often time-outs and progress are looked at, while anything runs
STOP_GRACE = 1.0  # after its time-out a handler has this long to end by itself
PROGRESS_EVERY = 0.25

Thunk = Callable[[], None]


class JobRun:
    """One assignment on its way through the executor."""

    __slots__ = (
        "begun",
        "cancel_reason",
        "deadline",
        "done",
        "job",
        "lost",
        "progress",
        "progress_due",
        "slot",
        "task",
        "timed_out",
        "waiter",
    )

    def __init__(self, assignment: Assignment, task: Task[..., Any]) -> None:
        self.job: ClaimedJob = assignment.job
        self.slot = assignment.slot
        self.task = task
        self.begun = 0.0
        self.deadline = 0.0
        self.cancel_reason: str | None = None
        self.lost = False
        self.timed_out = False
        self.done = False
        self.progress: str | None = None
        self.progress_due = 0.0
        self.waiter: asyncio.Task[None] | None = None  # None for a thread's run

    def report(self, progress: dict[str, Any]) -> None:
        self.progress = payload.encode(progress, what="progress", max_bytes=8192)


class Executor:
    def __init__(
        self,
        tasks: Mapping[str, Task[..., Any]],
        board: Board,
        concurrency: int,
        send: Callable[[Report], None],
    ) -> None:
        self._tasks = tasks
        self._board = board
        self._concurrency = concurrency
        self._send = send
        self._backlog: deque[Assignment] = deque()
        self._running: dict[str, JobRun] = {}
        self._ended: list[outcome.Ended] = []
        self._threads = _Threads(self._run_in_thread)
        self._from_threads: deque[tuple[JobRun, outcome.Outcome]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._flushing = False
        self._ticking = False
        self._stuck = 0
        self._stopping = False
        self.idle = asyncio.Event()  # set when stopping and nothing runs any more

    # -- orders from the supervisor, on the loop's thread ------------------------------------
    def assign(self, jobs: list[Assignment]) -> None:
        self._backlog.extend(jobs)
        self._start_next()

    def cancel(self, order: Cancel) -> None:
        for job_id, reason in order.ids.items():
            run = self._running.get(job_id)
            if run is not None:
                run.cancel_reason, run.lost = reason, reason is None
                if run.waiter is not None:
                    run.waiter.cancel()
            else:
                self._cancel_waiting(job_id, reason)

    def stop(self) -> None:
        """Start nothing more and give back what waits; `idle` is set when the rest has ended."""
        self._stopping = True
        while self._backlog:
            waiting = self._backlog.popleft()
            self._finish_unstarted(waiting, outcome.Released("the worker is shutting down"))
        self._when_idle()

    def _cancel_waiting(self, job_id: str, reason: str | None) -> None:
        for waiting in self._backlog:
            if waiting.job.id == job_id:
                self._backlog.remove(waiting)
                if reason is not None:
                    self._finish_unstarted(waiting, outcome.Cancelled(reason))
                return

    # -- starting -----------------------------------------------------------------------------
    def _start_next(self) -> None:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        while self._backlog and len(self._running) < self._concurrency and not self._stopping:
            assignment = self._backlog.popleft()
            task = self._tasks.get(assignment.job.type)
            if task is None:
                gone = outcome.Released("its type is not known here", delay=10.0)
                self._finish_unstarted(assignment, gone)
                continue
            self._start(JobRun(assignment, task))
        if self._running and not self._ticking:
            self._ticking = True
            self._loop.call_later(TICK, self._tick)

    def _start(self, run: JobRun) -> None:
        assert self._loop is not None  # noqa: S101  set by _start_next
        run.begun = time.monotonic()
        run.deadline = run.begun + run.job.timeout_ms / 1000
        self._running[run.job.id] = run
        self._board.start(run.slot, run.begun)
        if run.task.signature.is_async:
            run.waiter = self._loop.create_task(self._run_async(run))
        else:
            self._threads.put(run)

    async def _run_async(self, run: JobRun) -> None:
        try:
            with _acting_as(run.job):
                value = await _call(run)
            ended = judge_value(value, run)
        except asyncio.CancelledError:
            ended = judge_error(_why_stopped(run), run)
        except BaseException as error:
            ended = judge_error(error, run)
        self._finish(run, ended)

    def _run_in_thread(self, run: JobRun) -> None:
        try:
            with _acting_as(run.job):
                value = _call(run)
            ended = judge_value(value, run)
        except BaseException as error:
            ended = judge_error(error, run)
        self._from_threads.append((run, ended))
        assert self._loop is not None  # noqa: S101  it started this run
        if len(self._from_threads) == 1:
            self._loop.call_soon_threadsafe(self._collect)

    def _collect(self) -> None:
        while self._from_threads:
            run, ended = self._from_threads.popleft()
            if run.done:  # its time-out was reported long ago; the thread is usable again
                self._stuck -= 1
            else:
                self._finish(run, ended)

    # -- ending -------------------------------------------------------------------------------
    def _finish(self, run: JobRun, how: outcome.Outcome) -> None:
        run.done = True
        self._board.end(run.slot)
        del self._running[run.job.id]
        if not run.lost:
            lasted = int((time.monotonic() - run.begun) * 1000)
            self._ended.append(outcome.Ended(run.job.id, run.job.lease_no, lasted, how))
        self._soon_flush()
        if self._stopping:
            self._when_idle()
        elif self._backlog:
            self._start_next()

    def _finish_unstarted(self, waiting: Assignment, how: outcome.Outcome) -> None:
        self._board.end(waiting.slot)
        self._ended.append(outcome.Ended(waiting.job.id, waiting.job.lease_no, 0, how))
        self._soon_flush()

    def _when_idle(self) -> None:
        if not self._running:
            self._flush()
            self.idle.set()

    def _soon_flush(self) -> None:
        """All that ends in one turn of the loop goes into one message."""
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        if self._ended:
            ended, self._ended = self._ended, []
            self._send(Report(ended, [], self._stuck))

    # -- time ---------------------------------------------------------------------------------
    def _tick(self) -> None:
        now = time.monotonic()
        progress = []
        for run in list(self._running.values()):
            if run.progress is not None and now >= run.progress_due:
                progress.append((run.job.id, run.job.lease_no, run.progress))
                run.progress, run.progress_due = None, now + PROGRESS_EVERY
            if now >= run.deadline:
                self._overrun(run, now)
        if progress:
            self._send(Report([], progress, self._stuck))
        self._ticking = bool(self._running)
        if self._ticking:
            assert self._loop is not None  # noqa: S101  it runs this
            self._loop.call_later(TICK, self._tick)

    def _overrun(self, run: JobRun, now: float) -> None:
        """First ask: cancel the task, set the token. A thread that does not listen is given up
        and its outcome said for it; a loop that does not listen is the supervisor's to kill."""
        if not run.timed_out:
            run.timed_out = True
            run.cancel_reason = run.cancel_reason or "timed out"
            if run.waiter is not None:
                run.waiter.cancel()
        elif run.waiter is None and now >= run.deadline + STOP_GRACE:
            self._stuck += 1
            self._finish(run, judge_error(_why_stopped(run), run))


class _Threads:
    """As many threads as run `def` handlers at once: a new one whenever none is free."""

    def __init__(self, work: Callable[[JobRun], None]) -> None:
        self._work = work
        self._queue: SimpleQueue[JobRun] = SimpleQueue()
        self._lock = threading.Lock()
        self._free = 0  # threads waiting for work

    def put(self, run: JobRun) -> None:
        with self._lock:
            self._free -= 1
            short = self._free < 0
            if short:
                self._free = 0
        if short:
            threading.Thread(target=self._serve, name="tenure-job", daemon=True).start()
        self._queue.put(run)

    def _serve(self) -> None:
        while True:
            run = self._queue.get()
            self._work(run)
            with self._lock:
                self._free += 1


def _call(run: JobRun) -> Any:
    signature = run.task.signature
    return signature.call(
        run.task.function, context.Context(run), signature.unpack(run.job.payload)
    )


def _acting_as(job: ClaimedJob) -> Any:
    """What a handler enqueues carries its own job's org, actor and request."""
    return context.acting_exactly(
        context.Acting(
            job.org,
            job.project,
            Actor(job.actor_type, job.actor_id),
            job.request_id,
            job.correlation_id,
            job.traceparent,
        )
    )


def _why_stopped(run: JobRun) -> BaseException:
    if run.timed_out:
        return TimeoutError(f"still running after its time-out of {run.job.timeout_ms / 1000:g} s")
    if run.lost:
        return LeaseLost("the lease was taken away")
    if run.cancel_reason is not None:
        return JobCancelled(run.cancel_reason)
    return asyncio.CancelledError("the handler was cancelled from within")


def judge_value(value: Any, run: JobRun) -> outcome.Outcome:
    """A returned value as an outcome."""
    if value is None:
        return outcome.Completed(None)
    if isinstance(value, context.Snooze):
        return outcome.Snoozed(policy.delay_seconds(value.seconds))
    if isinstance(value, context.Cancel):
        return outcome.Cancelled(value.reason)
    if isinstance(value, context.Fail):
        return outcome.Failed(outcome.Failure(value.reason, value.code))
    try:
        return outcome.Completed(run.task.pack_result(value))
    except PayloadError as error:
        message = f"the job ran, but its result cannot be stored: {error}"
        return outcome.Failed(outcome.Failure(message, "RESULT_ERROR"))


def judge_error(error: BaseException, run: JobRun) -> outcome.Outcome:
    """A raised exception as an outcome, by the task's policy."""
    if isinstance(error, JobCancelled) and not run.timed_out:
        return outcome.Cancelled(str(error))
    if isinstance(error, JobCancelled):
        error = _why_stopped(run)
    failure = describe(error)
    verdict = run.task.settings.retry.verdict(error, run.job.attempts, run.job.max_attempts)
    if verdict == "failed":
        return outcome.Failed(failure)
    if verdict == "dead":
        return outcome.Dead(failure)
    return outcome.Retried(verdict, failure)


def describe(error: BaseException) -> outcome.Failure:
    """What may be stored of an exception: its type and text, its code, and where it was raised."""
    name = type(error).__name__
    text = str(error).replace("\x00", "")[:2000].encode("utf-8", "replace").decode()
    code = getattr(error, "code", None)
    frames = traceback.extract_tb(error.__traceback__)
    at = f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""
    default = "TIMEOUT" if isinstance(error, TimeoutError) else name
    return outcome.Failure(
        f"{name}: {text}" if text else name,
        str(code)[:100] if isinstance(code, (str, int)) else default,
        f"{name} at {at}" if at else name,
    )
