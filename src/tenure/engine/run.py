"""One run of one job: the lease it runs under, what it asks of its desk, and how it is judged."""

from __future__ import annotations

import asyncio
import logging
import os
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from typing import Any

from tenure import context, outcome, payload, policy, secrecy
from tenure.engine.desk import Desk
from tenure.engine.wire import Assignment
from tenure.errors import ConfigError, JobCancelled, LeaseLost, PayloadError
from tenure.job import ClaimedJob, NewJob
from tenure.task import Task

log = logging.getLogger("tenure.worker")
MOST_TEXT, MOST_CODE = 2000, 100


class JobRun:
    """One assignment on its way through the executor."""

    __slots__ = (
        "begun", "cancel_by", "cancel_reason", "children", "deadline", "desk", "done", "job",
        "lost", "progress", "progress_due", "result", "settled", "settling", "slot", "task",
        "timed_out", "waiter",
    )  # fmt: skip

    def __init__(self, assignment: Assignment, task: Task[..., Any], desk: Desk) -> None:
        self.job: ClaimedJob = assignment.job
        self.slot = assignment.slot
        self.task = task
        self.desk = desk
        self.begun = 0.0
        self.deadline = 0.0
        self.cancel_reason: str | None = None
        self.cancel_by = float("inf")  # when patience with a cancelled handler ends
        self.lost = False
        self.timed_out = False
        self.done = False
        self.settled = False
        self.settling = False  # inside its transaction's block
        self.result: str | None = None  # what its own transaction has stored
        self.children: list[NewJob] = []
        self.progress: str | None = None
        self.progress_due = 0.0
        self.waiter: asyncio.Task[None] | None = None  # None for a thread's run

    # -- what `Context` asks ------------------------------------------------------------------
    def report(self, progress: dict[str, Any]) -> None:
        self.progress = payload.encode(progress, what="progress", max_bytes=8192)
        if self.desk.hooked("progress"):
            self.desk.tell(context.Lifecycle("progress", self.job, progress=progress))

    def steps(self) -> dict[str, str]:
        return self.desk.steps(self.job)

    def save_step(self, name: str, result: str) -> bool:
        return self.desk.save_step(self.job, name, result)

    def results(self) -> dict[str, tuple[str, Any]]:
        return self.desk.results(self.job)

    def secret(self, ref: str) -> str:
        return self.desk.secret(ref)

    def pack(self, value: Any, what: str) -> str:
        return self.task.signature.encode(value, what)

    def transaction(self, result: Callable[[], Any]) -> AbstractContextManager[Any]:
        if self.waiter is not None:
            self.desk.refuse_blocking()
        return self._transaction(result)

    @contextmanager
    def _transaction(self, result: Callable[[], Any]) -> Iterator[Any]:
        with (
            self._settling(),
            self.desk.transaction(self.job, lambda: self._completed(result)) as connection,
        ):
            yield connection

    @asynccontextmanager
    async def atransaction(self, result: Callable[[], Any]) -> AsyncIterator[Any]:
        with self._settling():
            async with self.desk.atransaction(
                self.job, lambda: self._completed(result)
            ) as connection:
                yield connection

    @contextmanager
    def _settling(self) -> Iterator[None]:
        """What a transaction's end means for the run: the job is over, or not ours any more. One
        at a time: a second block inside the first could only wait for it, or end the job twice."""
        if self.settling:
            raise ConfigError("ctx.transaction() is the end of a job: use it once in a run")
        self.settling = True
        try:
            yield
        except LeaseLost:
            self.lost = True
            raise
        finally:
            self.settling = False
        self.settled = True

    def _completed(self, result: Callable[[], Any]) -> tuple[outcome.Completed, int]:
        value = result()
        self.result = None if value is None else self.task.pack_result(value)
        return outcome.Completed(self.result, tuple(self.children)), self.lasted_ms()

    async def in_thread(self, call: Callable[..., Any], *args: Any) -> Any:
        return await self.desk.in_thread(call, *args)

    def lasted_ms(self) -> int:
        return int((time.monotonic() - self.begun) * 1000)


def call(run: JobRun) -> Any:
    signature = run.task.signature
    return signature.call(
        run.task.function, context.Context(run), signature.unpack(run.job.payload)
    )


def why_stopped(run: JobRun) -> BaseException:
    if run.timed_out:
        return TimeoutError(f"still running after its time-out of {run.job.timeout_ms / 1000:g} s")
    if run.lost:
        return LeaseLost("the lease was taken away")
    if run.cancel_reason is not None:
        return JobCancelled(run.cancel_reason)
    return asyncio.CancelledError("the handler was cancelled from within")


def judge_value(value: Any, run: JobRun) -> outcome.Outcome:
    """A returned value as an outcome."""
    if run.settled:
        return outcome.Completed(run.result, settled=True)
    if value is None:
        return outcome.Completed(None, tuple(run.children))
    if isinstance(value, context.Snooze):
        return outcome.Snoozed(policy.delay_seconds(value.seconds))
    if isinstance(value, context.Cancel):
        return outcome.Cancelled(storable(value.reason, run.job.payload))
    if isinstance(value, context.Fail):
        reason = storable(value.reason, run.job.payload)
        code = storable(value.code, run.job.payload, most=MOST_CODE)
        return outcome.Failed(outcome.Failure(reason, code))
    try:
        return outcome.Completed(run.task.pack_result(value), tuple(run.children))
    except PayloadError as error:
        message = f"the job ran, but its result cannot be stored: {error}"
        return outcome.Failed(outcome.Failure(message, "RESULT_ERROR"))


def judge_error(error: BaseException, run: JobRun) -> outcome.Outcome:
    """A raised exception as an outcome, by the task's policy. Whatever happens, there is one: a
    run without an outcome would hold its slot until its time-out."""
    try:
        return _judge_error(error, run)
    except Exception:
        log.exception("the failure of job %s could not be judged; it is retried", run.job.id)
        failure = outcome.Failure(type(error).__name__, "UNKNOWN", type(error).__name__)
        return outcome.Retried(policy.Exponential().delay(run.job.attempts), failure)


def _judge_error(error: BaseException, run: JobRun) -> outcome.Outcome:
    if run.settled:
        what = describe(error, run.job.payload).message
        log.warning("job %s is over, its transaction committed; ignored: %s", run.job.id, what)
        return outcome.Completed(run.result, settled=True)
    if isinstance(error, JobCancelled) and not run.timed_out:
        return outcome.Cancelled(storable(error, run.job.payload))
    if isinstance(error, JobCancelled):
        error = why_stopped(run)
    failure = describe(error, run.job.payload)
    try:
        verdict = run.task.settings.retry.verdict(error, run.job.attempts, run.job.max_attempts)
        if verdict == "failed":
            return outcome.Failed(failure)
        if verdict == "dead":
            return outcome.Dead(failure)
        return outcome.Retried(policy.delay_seconds(verdict), failure)
    except Exception as broken:  # a backoff of the user's own: keep the failure all the same
        kind = type(broken).__name__
        log.warning("the backoff of task %r raised %s: using the default", run.job.type, kind)
        return outcome.Retried(policy.Exponential().delay(run.job.attempts), failure)


def describe(error: BaseException, arguments: str) -> outcome.Failure:
    """What may be stored of an exception: its type and scrubbed text, its code, its place."""
    name = clean(type(error).__name__)
    try:
        text = storable(error, arguments)
        code = getattr(error, "code", None)
    except Exception:  # its own __str__ or a property of it raises
        text, code = "", None
    frames = traceback.extract_tb(error.__traceback__)
    at = f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""
    default = "TIMEOUT" if isinstance(error, TimeoutError) else name
    return outcome.Failure(
        f"{name}: {text}" if text else name,
        storable(code, arguments, most=MOST_CODE) if isinstance(code, (str, int)) else default,
        clean(f"{name} at {at}") if at else name,
    )


def storable(said: object, arguments: str, *, most: int = MOST_TEXT) -> str:
    """A handler's own words as any store and the pipe take them, without payload values."""
    return secrecy.scrub(clean(str(said)), arguments)[:most]  # a cut first could hide half a value


def clean(text: str) -> str:
    """Without NUL and lone surrogates (a file name from `os.listdir` may hold some)."""
    return text.replace("\x00", "").encode("utf-8", "replace").decode()
