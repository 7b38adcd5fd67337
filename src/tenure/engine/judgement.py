"""How a run is judged: its value or its exception becomes an outcome, by the task's policy, and
what it says is made fit to be stored."""

from __future__ import annotations

import asyncio
import logging
import random
import re
import sys
import traceback
from contextlib import suppress
from typing import Any

from tenure import context, outcome, policy
from tenure.engine.run import RESULT_ERROR, JobRun
from tenure.engine.tracebacks import Tracebacks
from tenure.errors import JobCancelled, LeaseLost, PayloadError, StoreError, TenureError
from tenure.scrubbing import MAX_TEXT, Scrubber, without_secrets

log = logging.getLogger("tenure.worker")
MOST_TEXT, MOST_CODE = 2000, 100
CONFLICT_SECONDS = (0.05, 0.5)  # until two that were in each other's way are tried again
OUR_CODES = (RESULT_ERROR, "FAILED", "PERMANENT_ERROR", "TRANSIENT_ERROR", "VALIDATION_ERROR")


def why_stopped(run: JobRun, by: BaseException | None = None) -> BaseException:
    """`by`: the exception that stopped the handler. Its traceback knows where the handler was."""
    run.stopped = _why_stopped(run)
    return run.stopped if by is None else run.stopped.with_traceback(by.__traceback__)


def _why_stopped(run: JobRun) -> BaseException:
    if run.timed_out:
        return TimeoutError(f"still running after its time-out of {run.job.timeout_ms / 1000:g} s")
    if run.lost:
        return LeaseLost("the lease was taken away")
    if run.cancel_reason is not None:
        return JobCancelled(run.cancel_reason)
    return asyncio.CancelledError("the handler was cancelled from within")


# -- judging ------------------------------------------------------------------------------------
def judge_value(value: Any, run: JobRun) -> outcome.Outcome:
    """A returned value as an outcome."""
    if run.settled:
        return outcome.Completed(run.result, settled=True)
    children = run.take_follow_ups()
    if value is None:
        return outcome.Completed(None, children)
    if isinstance(value, context.Snooze):
        return outcome.Snoozed(policy.delay_seconds(value.seconds))
    if isinstance(value, context.Cancel):
        return outcome.Cancelled(Words(run).storable(value.reason))
    if isinstance(value, context.Fail):
        words = Words(run)
        failure = outcome.Failure(words.storable(value.reason), words.code(_text(value.code)))
        return outcome.Failed(failure)
    try:
        return outcome.Completed(run.task.pack_result(value), children)
    except PayloadError as error:
        run.raised = error
        why = Words(run).storable(error)
        message = f"the job ran, but its result cannot be stored: {why}"
        return outcome.Failed(outcome.Failure(message, RESULT_ERROR))


def judge_error(error: BaseException, run: JobRun) -> outcome.Outcome:
    """A raised exception as an outcome, by the task's policy. There is one in any case: a run
    without an outcome would hold its slot until its time-out."""
    run.take_follow_ups()
    run.raised = error
    try:
        return _judge_error(error, run)
    except BaseException as broken:  # places only: the texts may hold payload values
        where = "".join(traceback.format_tb(broken.__traceback__))
        kind, name = type(broken).__name__, clean(type(error).__name__)[:MOST_CODE]
        log.error("the failure of job %s cannot be judged: %s\n%s", run.job.id, kind, where)
        return _by_default(outcome.Failure(name, "UNKNOWN", name), run)


def _judge_error(error: BaseException, run: JobRun) -> outcome.Outcome:
    if run.settled:
        what = Words(run).failure(error).message
        log.warning("job %s is over, its transaction committed; ignored: %s", run.job.id, what)
        return outcome.Completed(run.result, settled=True)
    if isinstance(error, JobCancelled) and not run.timed_out:
        return outcome.Cancelled(Words(run).storable(error))
    if isinstance(error, JobCancelled):
        error = run.raised = why_stopped(run, error)
    if isinstance(error, StoreError) and error.uncharged:
        log.warning("job %s goes back to the queue uncharged: %s", run.job.id, error)
        return outcome.Released(str(error), delay=random.uniform(*CONFLICT_SECONDS))
    failure = Words(run).failure(error)
    if isinstance(error, PayloadError) and error.code == RESULT_ERROR:
        return outcome.Failed(failure)
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
        return _by_default(failure, run)


def _by_default(failure: outcome.Failure, run: JobRun) -> outcome.Outcome:
    if run.job.attempts >= run.job.max_attempts:
        return outcome.Dead(failure)
    return outcome.Retried(policy.Exponential().delay(run.job.attempts), failure)


# -- words that may be stored -------------------------------------------------------------------
class Words:
    """What a run says, in a form that any store and the pipe take: the handler's words without
    payload values and without the secrets it has fetched. Our words are put around them later."""

    def __init__(self, run: JobRun) -> None:
        self._run = run
        self._scrubbed = Scrubber(run.job.payload, run.secrets)
        self._heard: dict[int, str] = {}  # by the error's id: all errors live as long as we do

    def failure(self, error: BaseException) -> outcome.Failure:
        """What may be stored of an exception: its type and scrubbed text, its code, its place."""
        name = self._name_of(type(error))
        code = _attribute(error, "code")
        default = "TIMEOUT" if isinstance(error, TimeoutError) else name
        at, trace = self._whereabouts(error)
        return outcome.Failure(
            self._said(error),
            self.code(_text(code)) if isinstance(code, (str, int)) else default,
            f"{name} at {at}" if at else name,
            trace,
        )

    def _said(self, error: BaseException) -> str:
        """Its type and scrubbed text; worked out once, though asked for twice."""
        if id(error) not in self._heard:
            name, text = self._name_of(type(error)), self.storable(error)
            self._heard[id(error)] = f"{name}: {text}" if text else name
        return self._heard[id(error)]

    def _whereabouts(self, error: BaseException) -> tuple[str, str | None]:
        """Its place and its traceback. An error that raises when it is looked at has neither."""
        secrets = self._run.secrets
        source = Scrubber("", secrets) if secrets else without_secrets
        traces = Tracebacks(self._run.task.function, self._said, self.storable, source)
        place, text = "", None
        with suppress(Exception):
            place = clean(traces.place(error))
            text = traces.text(error)
        return place, text

    def storable(self, said: object) -> str:
        text = _text(said)
        if self._not_the_handlers(said, text):
            return text[:MOST_TEXT]
        quoted = said.quoted if isinstance(said, TenureError) else None
        theirs = None if quoted is None else [clean(part) for part in quoted if part]
        if theirs is None or not all(part in text for part in theirs):
            return self._scrubbed(text)[:MOST_TEXT]  # a cut first could hide half a value
        for_them = "|".join(map(re.escape, theirs))
        scrubbed = re.sub(for_them, lambda part: self._scrubbed(part[0]), text) if theirs else text
        return scrubbed[:MOST_TEXT]

    def code(self, code: str) -> str:
        return code if code in OUR_CODES else self._scrubbed(code)[:MOST_CODE]

    def _not_the_handlers(self, said: object, text: str) -> bool:
        """Our own text: what the executor stopped the run with, or an operator's reason."""
        if isinstance(said, JobCancelled):
            return text == self._run.cancel_reason
        return isinstance(said, BaseException) and said is self._run.stopped

    def _name_of(self, kind: type[BaseException]) -> str:
        """The name of a class that is found in its module cannot come from a payload."""
        name = clean(kind.__name__)[:MOST_CODE]
        known = getattr(sys.modules.get(kind.__module__), kind.__name__, None) is kind
        return name if known else self._scrubbed(name)


def _text(said: object) -> str:
    try:
        return clean(str.__str__(str(said))[:MAX_TEXT])
    except BaseException:  # its own __str__ raises, or returns no text
        return ""


def _attribute(error: BaseException, name: str) -> object:
    try:
        return getattr(error, name, None)
    except BaseException:  # a property of its own that raises
        return None


def clean(text: str) -> str:
    """Without NUL and lone surrogates (a file name from `os.listdir` may hold some)."""
    return text.replace("\x00", "").encode("utf-8", "replace").decode()
