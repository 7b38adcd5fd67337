"""What a worker's log says about its jobs: no values of arguments, and a bounded number of lines.

    WARNING  an attempt that failed, and when the next one is
    ERROR    a job that has ended failed or as a dead letter
    DEBUG    every start and every end

Each failure is a line. The first of its kind (level, task, exception, place) has the traceback, and
then one a minute. Beyond 100 lines a second of one level the rest are counted, and one line says
how many there were of which kind. All failures are on record in the store.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from tenure import outcome
from tenure.job import ClaimedJob, rfc3339

if TYPE_CHECKING:
    from tenure.stored import Job

log = logging.getLogger("tenure.job")
SAME_SECONDS = 60.0  # until a traceback that was shown is shown again
MOST_KINDS = 1000  # of them are remembered
MOST_LINES = 100  # a second, of a level
NAMED = 3  # kinds that the line about the rest names


class JobLog:
    """The log of one process. `worker` gives the worker's id."""

    def __init__(self, worker: Callable[[], str]) -> None:
        self._worker = worker
        self._lock = threading.Lock()
        self._shown: dict[tuple[int, str, str], float] = {}  # kind -> when its traceback was
        self._levels = {level: _Second() for level in (logging.WARNING, logging.ERROR)}
        self.verbose = False

    def look(self) -> None:
        """Whether every run is logged (DEBUG): asked once a batch, not for each job."""
        self.verbose = log.isEnabledFor(logging.DEBUG)

    def started(self, job: ClaimedJob) -> None:
        self._write(logging.DEBUG, job, f"attempt {_attempt(job)} started", {})

    def ended(self, job: ClaimedJob, how: outcome.Outcome, lasted_ms: int) -> None:
        facts: dict[str, object] = {"duration_ms": lasted_ms}
        match how:
            case outcome.Retried(delay=delay, failure=why):
                facts["next_try"] = rfc3339(int((time.time() + delay) * 1000))
                what = f"failed, next try in {delay:.{0 if delay >= 10 else 1}f} s"
                self._failed(logging.WARNING, job, what, why, facts)
            case outcome.Failed(failure=why):
                self._failed(logging.ERROR, job, "failed for good", why, facts)
            case outcome.Dead(failure=why):
                self._failed(logging.ERROR, job, "failed, now a dead letter", why, facts)
            case outcome.Crashed(reason=reason, limit=limit):
                dead = job.crashes + 1 >= limit
                what = "crashed, now a dead letter (poison)" if dead else "crashed, next try alone"
                why = outcome.Failure(reason, "poison" if dead else "crashed")
                self._failed(logging.ERROR if dead else logging.WARNING, job, what, why, facts)
            case _ if log.isEnabledFor(logging.DEBUG):
                kind = type(how).__name__.lower()
                text = f"attempt {_attempt(job)} ended: {kind}, {lasted_ms} ms"
                self._write(logging.DEBUG, job, text, facts)

    def sum_up(self, *, at_once: bool = False) -> None:
        """When a second is over: how many lines there was no room for."""
        for level, second in self._levels.items():
            if second.untold and (at_once or second.over()):
                with self._lock:
                    untold = second.begin()
                self._say(level, _summary(untold), {}, None)

    def _failed(
        self,
        level: int,
        job: ClaimedJob,
        what: str,
        why: outcome.Failure,
        facts: dict[str, object],
    ) -> None:
        if not log.isEnabledFor(level):
            return
        second = self._levels[level]
        if second.over():
            self.sum_up()
        with self._lock:
            if not second.room(f"{job.type}: {why.place or why.code}"):
                return
            traceback = why.traceback if self._first((level, job.type, why.place)) else None
        place = why.place.rpartition(" at ")[2] if " at " in why.place else ""
        facts |= {
            "max_attempts": job.max_attempts,
            "error_code": why.code,
            "error_place": place or None,
            "exception": why.message,
            "will_retry": level == logging.WARNING,
        }
        where = f" ({place})" if place else ""
        text = f"attempt {_attempt(job)} {what}: {why.message}{where}"
        self._write(level, job, text, facts, traceback)

    def _first(self, kind: tuple[int, str, str]) -> bool:
        now = time.monotonic()
        if now - self._shown.get(kind, -SAME_SECONDS) < SAME_SECONDS:
            return False
        if len(self._shown) >= MOST_KINDS:
            self._shown.clear()
        self._shown[kind] = now
        return True

    def _write(
        self,
        level: int,
        job: ClaimedJob,
        text: str,
        facts: dict[str, object],
        traceback: str | None = None,
    ) -> None:
        self._say(level, f"{job.type} {job.id}: {text}", _about(job) | facts, traceback)

    def _say(self, level: int, text: str, facts: dict[str, object], traceback: str | None) -> None:
        """With the text of a traceback, which any formatter shows. Not with the exception, which
        was not scrubbed."""
        facts = facts | {"worker_id": self._worker()}
        record = log.makeRecord(log.name, level, __file__, 0, text, (), None, None, facts)
        record.exc_text = traceback
        log.handle(record)


def died(job: Job | None, worker: str) -> None:
    """A death that the store decided (too many losses, refused follow-ups): there are few."""
    if job is None or not job.dead:
        return  # replayed or discarded meanwhile
    now = "failed" if job.status == "failed" else "a dead letter"
    tries = f"attempt {job.attempts} of {job.max_attempts}"
    facts = _about(job) | {
        "max_attempts": job.max_attempts,
        "error_code": job.error_code,
        "exception": job.error,
        "will_retry": False,
        "worker_id": worker,
    }
    said = (job.type, job.id, tries, now, job.error_code, job.error)
    log.error("%s %s: %s, now %s (%s): %s", *said, extra=facts)


class _Second:
    """The lines of one level within one second, and what there was no room for."""

    def __init__(self) -> None:
        self._until = 0.0
        self._lines = 0
        self.untold: Counter[str] = Counter()

    def over(self) -> bool:
        return time.monotonic() >= self._until

    def begin(self) -> Counter[str]:
        untold, self.untold = self.untold, Counter()
        self._until, self._lines = time.monotonic() + 1.0, 0
        return untold

    def room(self, kind: str) -> bool:
        if self.over():
            self._until, self._lines = time.monotonic() + 1.0, 0
        self._lines += 1
        if self._lines <= MOST_LINES:
            return True
        self.untold[kind] += 1
        return False


def _attempt(job: ClaimedJob) -> str:
    return f"{job.attempts} of {job.max_attempts}"


def _summary(untold: Counter[str]) -> str:
    named = [f"{kind} ({count:,})" for kind, count in untold.most_common(NAMED)]
    others = untold.total() - sum(count for _kind, count in untold.most_common(NAMED))
    if others:
        named.append(f"others ({others:,})")
    return f"{untold.total():,} more within a second, not shown one by one: {', '.join(named)}"


def _about(job: ClaimedJob | Job) -> dict[str, object]:
    return {
        "job_id": job.id,
        "job_type": job.type,
        "type": job.type,
        "org_id": job.org,
        "project_id": job.project,
        "request_id": job.request_id,
        "correlation_id": job.correlation_id,
        "attempt": job.attempts,
    }
