"""What surrounds a call: the context of a request (`acting`), the context of a run (`Context`),
and the values a handler may return to say what should happen next.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from tenure import policy
from tenure.errors import ConfigError, JobCancelled, LeaseLost
from tenure.job import SYSTEM, Actor, ClaimedJob

if TYPE_CHECKING:
    import logging


# -- what a handler may return ------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Snooze:
    """Run me again in so many seconds; costs no attempt."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Cancel:
    """I am not needed any more: the job becomes `cancelled`."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class Fail:
    """Trying again cannot help: the job becomes `failed`."""

    reason: str = ""
    code: str = "FAILED"


# -- the context of a request -------------------------------------------------------------------
class Acting(NamedTuple):
    org: str = "default"
    project: str | None = None
    actor: Actor = SYSTEM
    request_id: str = ""
    correlation_id: str = ""
    traceparent: str | None = None


NOBODY = Acting()
_acting: ContextVar[Acting] = ContextVar("tenure_acting", default=NOBODY)


def current() -> Acting:
    return _acting.get()


@contextmanager
def acting(
    *,
    org: str | None = None,
    project: str | None = None,
    actor: tuple[str, str] | None = None,
    request_id: str | None = None,
    correlation_id: str | None = None,
    traceparent: str | None = None,
) -> Iterator[None]:
    """Everything enqueued inside the block carries these; what is not given is inherited."""
    changes: dict[str, Any] = {}
    for what, value in (
        ("org", org),
        ("project", project),
        ("request_id", request_id),
        ("correlation_id", correlation_id),
        ("traceparent", traceparent),
    ):
        if value is not None:
            changes[what] = policy.name(value, what)
    if actor is not None:
        changes["actor"] = checked_actor(actor)
    token = _acting.set(_acting.get()._replace(**changes))
    try:
        yield
    finally:
        _acting.reset(token)


@contextmanager
def acting_exactly(who: Acting) -> Iterator[None]:
    """For the engine: a run acts for whoever enqueued its job."""
    token = _acting.set(who)
    try:
        yield
    finally:
        _acting.reset(token)


def checked_actor(actor: object) -> Actor:
    if not isinstance(actor, tuple) or len(actor) != 2:
        raise ConfigError("actor must be a pair such as ('user', '7')")
    if actor[0] not in ("user", "system", "api_key"):
        raise ConfigError(f"actor type must be user, system or api_key, got {actor[0]!r}")
    return Actor(actor[0], policy.name(str(actor[1]), "actor id"))


# -- the context of a run -----------------------------------------------------------------------
class Run(Protocol):
    """What the executor gives a context: the lease it runs under and the way back."""

    job: ClaimedJob
    cancel_reason: str | None
    lost: bool

    def report(self, progress: dict[str, Any]) -> None: ...


class Context:
    """A handler's view of its own run; declare it as the first parameter to receive it."""

    __slots__ = ("_log", "_run")

    def __init__(self, run: Run) -> None:
        self._run = run
        self._log: logging.LoggerAdapter[logging.Logger] | None = None

    @property
    def job(self) -> ClaimedJob:
        return self._run.job

    @property
    def attempt(self) -> int:
        """1 for the first run."""
        return self._run.job.attempts

    @property
    def org(self) -> str:
        return self._run.job.org

    @property
    def key(self) -> str:
        """The same over all attempts of this job: hand it to external services as their
        idempotency key."""
        return f"{self._run.job.type}:{self._run.job.id}"

    @property
    def log(self) -> logging.LoggerAdapter[logging.Logger]:
        if self._log is None:
            import logging

            job = self._run.job
            self._log = logging.LoggerAdapter(
                logging.getLogger(f"tenure.job.{job.type}"),
                {
                    "job_id": job.id,
                    "job_type": job.type,
                    "org_id": job.org,
                    "project_id": job.project,
                    "request_id": job.request_id,
                    "correlation_id": job.correlation_id,
                    "attempt": job.attempts,
                },
            )
        return self._log

    @property
    def cancelled(self) -> bool:
        """Somebody asked for this job to be cancelled, or its lease is gone: stop soon."""
        return self._run.lost or self._run.cancel_reason is not None

    def check(self) -> None:
        """Raise if this run should stop: call it between steps of a long `def` handler."""
        if self._run.lost:
            raise LeaseLost(
                "this run no longer owns its job: another worker has it; stop, whatever this run "
                "returns is ignored"
            )
        if self._run.cancel_reason is not None:
            raise JobCancelled(self._run.cancel_reason)

    def progress(
        self, percent: float | None = None, *, phase: str | None = None, **more: Any
    ) -> None:
        """Say how far it is; stored at most a few times a second, the last word always."""
        if percent is not None and not 0 <= percent <= 100:
            raise ConfigError(f"progress is a percentage from 0 to 100, got {percent!r}")
        said = {"percent": percent, "phase": phase} | more
        self._run.report({name: value for name, value in said.items() if value is not None})
