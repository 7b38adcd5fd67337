"""What surrounds a call: the context of a request (`acting`), the context of a run (`Context`),
and the values a handler may return to say what should happen next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from tenure import payload, policy
from tenure.errors import ConfigError, JobCancelled, LeaseLost
from tenure.job import SYSTEM, Actor, ClaimedJob, NewJob, Receipt, Terms
from tenure.record import Record

if TYPE_CHECKING:
    import logging


# -- what a handler may return ------------------------------------------------------------------
class Snooze(Record):
    """Run me again in so many seconds; costs no attempt."""

    seconds: float


class Cancel(Record):
    """I am not needed any more: the job becomes `cancelled`."""

    reason: str = ""


class Fail(Record):
    """Trying again cannot help: the job becomes `failed`."""

    reason: str = ""
    code: str = "FAILED"


# -- what a lifecycle hook is told --------------------------------------------------------------
class Lifecycle(Record):
    """Passed to `@app.on(kind)` hooks. `failed` comes with every failure, `final_failure` with
    the last one; the store has not written the outcome yet and may still refuse it. `error` is
    scrubbed; `exception` is what was raised, with its traceback and whatever its text says. None:
    the handler has returned its failure."""

    kind: str
    job: ClaimedJob
    result: Any = None
    error: str | None = None
    progress: dict[str, Any] | None = None
    exception: BaseException | None = None

    @classmethod
    def ended(
        cls,
        kind: str,
        job: ClaimedJob,
        result: str | None,
        error: str | None,
        exception: BaseException | None = None,
    ) -> Lifecycle:
        value = None if result is None else payload.decode(result)
        return cls(kind, job, value, error, exception=exception)


HOOKS = ("start", "complete", "failed", "progress", "final_failure")


# -- the context of a request -------------------------------------------------------------------
class Acting(NamedTuple):
    org: str = "default"
    project: str | None = None
    actor: Actor = SYSTEM
    request_id: str = ""
    correlation_id: str = ""
    traceparent: str | None = None


NOBODY = Acting()
_acting: ContextVar[Acting | ClaimedJob] = ContextVar("tenure_acting", default=NOBODY)


def current() -> Acting:
    """Within a run: whoever enqueued its job. Worked out when first asked; most runs never ask."""
    who = _acting.get()
    if isinstance(who, Acting):
        return who
    actor = Actor(who.actor_type, who.actor_id)
    known = (who.org, who.project, actor, who.request_id, who.correlation_id, who.traceparent)
    acting = Acting(*known)
    _acting.set(acting)
    return acting


def act_for(job: ClaimedJob) -> None:
    """For the engine, at the start of a run: what it enqueues carries its job's org, actor and
    request. A task has a context of its own and a thread runs only jobs, so nothing is undone."""
    _acting.set(job)


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
    """Everything enqueued inside the block carries these, and what an operator does in it
    (`cancel`, `replay`, `pause`, …) is audited as its actor; what is not given is inherited."""
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
    token = _acting.set(current()._replace(**changes))
    try:
        yield
    finally:
        _acting.reset(token)


@contextmanager
def acting_for(job: ClaimedJob) -> Iterator[None]:
    """The same for a block, where others use the thread too."""
    token = _acting.set(job)
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
class CurrentRun(Protocol):
    """What a `Context` asks of the run behind it: a real one, or a rehearsed one in a test."""

    job: ClaimedJob
    cancel_reason: str | None
    lost: bool  # its lease is gone
    settled: bool  # its finish was written by a transaction: the job is over

    def adopt(self, follow_up: NewJob) -> None: ...

    def report(self, progress: dict[str, Any]) -> None: ...

    def steps(self) -> dict[str, str]: ...

    def save_step(self, name: str, result: str) -> bool: ...

    def results(self) -> dict[str, tuple[str, Any]]: ...

    def secret(self, ref: str) -> str: ...

    def pack(self, value: Any, step: str) -> str: ...

    def transaction(self, result: Callable[[], Any], conn: Any) -> Transaction: ...

    async def in_thread(self, call: Callable[..., Any], *args: Any) -> Any: ...


class Context:
    """A handler's view of its own run; declare it as the first parameter to receive it."""

    __slots__ = ("_log", "_result", "_run", "_steps", "_terms", "_used")

    def __init__(self, run: CurrentRun) -> None:
        self._run = run
        self._log: logging.LoggerAdapter[logging.Logger] | None = None
        self._steps: dict[str, str] | None = None
        self._used: set[str] = set()
        self._terms: dict[Terms, Terms] = {}
        self._result: Any = None

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

    # -- stopping -----------------------------------------------------------------------------
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

    # -- saying -------------------------------------------------------------------------------
    def progress(
        self, percent: float | None = None, *, phase: str | None = None, **more: Any
    ) -> None:
        """Say how far it is; stored at most a few times a second, the last word always."""
        if percent is not None and not 0 <= percent <= 100:
            raise ConfigError(f"progress is a percentage from 0 to 100, got {percent!r}")
        said = {"percent": percent, "phase": phase} | more
        self._run.report({name: value for name, value in said.items() if value is not None})

    def enqueue(self, task: Any, /, *args: Any, **kwargs: Any) -> Receipt:
        """A follow-up job, stored in the transaction of this job's completion, or not at all; what
        a block of `transaction()` asks for goes with the block where that raises.
        `task` is a task or one with options: `ctx.enqueue(report.options(after=ids), day)`."""
        job: NewJob = task.job(*args, **kwargs)
        terms = self._terms.get(job.terms)  # one object for equal ones: stores group by identity
        if terms is None:
            terms = self._terms[job.terms] = job.terms._replace(parent=self._run.job.id)
        self._run.adopt(job._replace(terms=terms))
        return Receipt(job.id, False, "queued")

    # -- checkpoints --------------------------------------------------------------------------
    def step(self, name: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call `function` once over all runs of this job: its result is stored and returned
        without a call when the job runs again. Await it when the function is a coroutine."""
        if name in self._used:
            raise ConfigError(f"two steps of this run are named {name!r}: give each its own name")
        self._used.add(policy.name(name, "a step's name"))
        from inspect import iscoroutinefunction  # 7 ms, which a producer need not pay

        if iscoroutinefunction(function):
            return self._step_async(name, function, args, kwargs)
        stored = self._finished_steps().get(name)
        if stored is None:
            self.check()
            stored = self._run.pack(function(*args, **kwargs), name)
            self._saved(self._run.save_step(name, stored))
        return payload.decode(stored)

    async def _step_async(
        self, name: str, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        stored = (await self._run.in_thread(self._finished_steps)).get(name)
        if stored is None:
            self.check()
            stored = self._run.pack(await function(*args, **kwargs), name)
            self._saved(await self._run.in_thread(self._run.save_step, name, stored))
        return payload.decode(stored)

    def _finished_steps(self) -> dict[str, str]:
        if self._steps is None:
            self._steps = self._run.steps()
        return self._steps

    def _saved(self, accepted: bool) -> None:
        if not accepted:
            self._run.lost = True
            self.check()

    # -- reading ------------------------------------------------------------------------------
    def results(self) -> dict[str, Any]:
        """What the jobs this one ran `after` returned: id -> result."""
        return {id: result for id, (_status, result) in self._run.results().items()}

    def secret(self, ref: str) -> str:
        """A secret by a reference that the app declares (`App(secrets=[…])`): from its provider,
        the environment or a file. Kept out of whatever this run says about a failure."""
        return self._run.secret(ref)

    # -- one transaction ----------------------------------------------------------------------
    def result(self, value: Any) -> None:
        """What this job returns when it ends by `transaction()`."""
        self._result = value

    def transaction(self, *, conn: Any = None) -> Transaction:
        """`with ctx.transaction() as conn:` the job's end, its follow-ups and your own SQL in
        one transaction: all of it happens, once, or nothing does. In an `async def` handler
        `async with`; on SQLite in `def` handlers only. With `conn=` it is the transaction of your
        ORM: a Session or Connection of SQLAlchemy's (an async one also on SQLite), or Django's
        connection."""
        return self._run.transaction(lambda: self._result, conn)


class Transaction:
    """`ctx.transaction()`, to be entered by `with` or `async with`. One block a run; at its end the
    job is over. `blocking` and `awaited` are the two forms of that block."""

    def __init__(self, run: CurrentRun) -> None:
        self._run = run
        self._used = False
        self._blocking: AbstractContextManager[Any] | None = None
        self._awaited: AbstractAsyncContextManager[Any] | None = None

    def blocking(self) -> AbstractContextManager[Any]:
        raise NotImplementedError

    def awaited(self) -> AbstractAsyncContextManager[Any]:
        raise NotImplementedError

    def __enter__(self) -> Any:
        self._use()
        self._blocking = self.blocking()
        return self._blocking.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        assert self._blocking is not None  # noqa: S101  entered
        return self._blocking.__exit__(*error)

    async def __aenter__(self) -> Any:
        self._use()
        self._awaited = self.awaited()
        return await self._awaited.__aenter__()

    async def __aexit__(self, *error: Any) -> bool | None:
        assert self._awaited is not None  # noqa: S101  entered
        return await self._awaited.__aexit__(*error)

    def _use(self) -> None:
        self._refuse_second(self._used or self._run.settled)
        self._used = True

    def _refuse_second(self, block: bool) -> None:
        if block:
            raise ConfigError("ctx.transaction() is the end of a job: use it once in a run")
