"""A run without a worker, a queue or a store: the context that `tenure.testing.context` gives a
unit test, so that a task that takes one is called like any function, and what it said can be seen.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

from tenure import payload, policy
from tenure.context import Context, Transaction, checked_actor
from tenure.errors import ConfigError
from tenure.ids import id_time_ms, new_id
from tenure.job import SYSTEM, ClaimedJob, NewJob, moment

if TYPE_CHECKING:
    from tenure.signature import Signature
    from tenure.stored import Job
    from tenure.task import Task

PROGRESS_BYTES = 8192


class Rehearsal(Context):
    """A `Context` that keeps what its task says. Values pass the same checks as in a worker, so a
    step's result comes back as JSON has it; nothing is stored, and no other process hears of it."""

    __slots__ = ("_rehearsed",)

    def __init__(self, run: RehearsedRun) -> None:
        super().__init__(run)
        self._rehearsed = run

    @property
    def enqueued(self) -> list[Job]:
        """What `ctx.enqueue` was asked for, in order; `assert_enqueued(ctx, …)` looks here."""
        return [_as_job(each) for each in self._rehearsed.follow_ups]

    @property
    def reports(self) -> list[dict[str, Any]]:
        """What `ctx.progress` was told, each time."""
        return self._rehearsed.reports

    @property
    def finished_steps(self) -> dict[str, Any]:
        """Results of steps by name: those given and those that ran here."""
        return {name: payload.decode(text) for name, text in self._rehearsed.stored.items()}

    @property
    def given_result(self) -> Any:
        """What `ctx.result` was told."""
        return self._result

    def cancel(self, reason: str = "cancelled by the test") -> None:
        """As if an operator had asked for the job to be cancelled, from now on."""
        self._rehearsed.cancel_reason = reason

    def lose(self) -> None:
        """As if the lease were gone, from now on."""
        self._rehearsed.lost = True


class RehearsedRun:
    """What `Context` asks of its run, answered from memory."""

    def __init__(
        self,
        job: ClaimedJob,
        task: Task[..., Any] | None,
        steps: Mapping[str, Any],
        results: Mapping[str, Any],
        secrets: Mapping[str, str],
        conn: Any,
    ) -> None:
        self.job = job
        self.cancel_reason: str | None = None
        self.lost = self.settled = False
        self.follow_ups: list[NewJob] = []
        self.reports: list[dict[str, Any]] = []
        self._task, self._results, self._secrets, self.conn = task, results, secrets, conn
        self.stored = {name: self.pack(value, name) for name, value in steps.items()}

    def adopt(self, follow_up: NewJob) -> None:
        self.follow_ups.append(follow_up)

    def report(self, progress: dict[str, Any]) -> None:
        text = payload.encode(progress, what="progress", max_bytes=PROGRESS_BYTES)
        self.reports.append(payload.decode(text))

    def steps(self) -> dict[str, str]:
        return dict(self.stored)

    def save_step(self, name: str, result: str) -> bool:
        if not self.lost:
            self.stored[name] = result
        return not self.lost

    def results(self) -> dict[str, tuple[str, Any]]:
        return {id: ("completed", value) for id, value in self._results.items()}

    def secret(self, ref: str) -> str:
        if ref not in self._secrets:
            raise ConfigError(f"this test gives no secret {ref!r}: context(secrets={{{ref!r}: …}})")
        return self._secrets[ref]

    def pack(self, value: Any, step: str) -> str:
        return self._signature().encode(value, f"the result of step {step!r}")

    def _signature(self) -> Signature:
        if self._task is not None:
            return self._task.signature
        from tenure.signature import Signature

        return Signature(_nothing, self.job.type, payload.MAX_BYTES)

    def transaction(self, result: Callable[[], Any], conn: Any) -> Transaction:
        return RehearsedTransaction(self, conn)

    async def in_thread(self, call: Callable[..., Any], *args: Any) -> Any:
        return call(*args)  # nothing here waits for anything


class RehearsedTransaction(Transaction):
    def __init__(self, run: RehearsedRun, conn: Any) -> None:
        super().__init__(run)
        self._run: RehearsedRun = run
        self._conn = conn

    @contextmanager
    def blocking(self) -> Iterator[Any]:
        from tenure.stores import libraries  # not for every run of pytest

        with self._ending_the_run():
            if libraries.known_as(self._conn, libraries.SQLALCHEMY) is None:
                yield self._lent()
                return
            unit = libraries.unit_of(self._conn)
            unit.begin()
            try:
                yield self._conn
                unit.complete()
            except BaseException as error:
                unit.rollback(error)
                raise
            unit.commit()

    @asynccontextmanager
    async def awaited(self) -> AsyncIterator[Any]:
        from tenure.stores import libraries

        with self._ending_the_run():
            if libraries.known_as(self._conn, libraries.SQLALCHEMY_ASYNC) is None:
                yield self._lent()
                return
            unit = libraries.AsyncUnit(self._conn)
            await unit.begin()
            try:
                yield self._conn
                await unit.complete()
            except BaseException as error:
                await unit.rollback(error)
                raise
            await unit.commit()

    def _lent(self) -> Any:
        """The connection that the test gave, which it commits itself. A session of the handler's
        own is committed here: as a rule it is closed when the handler returns, and what it wrote
        would be gone without a word."""
        conn = self._run.conn if self._conn is None else self._conn
        if conn is None:
            raise ConfigError(
                "ctx.transaction() needs a database: give this test's connection, "
                "context(conn=…), or run the job through its queue with drain(app)"
            )
        return conn

    @contextmanager
    def _ending_the_run(self) -> Iterator[None]:
        """The job is over, or nothing of the block counts."""
        run = self._run
        before = len(run.follow_ups)
        try:
            yield
        except BaseException:
            del run.follow_ups[before:]
            raise
        run.settled = True


def context(
    task: Task[..., Any] | None = None,
    *,
    attempt: int = 1,
    org: str = "default",
    project: str | None = None,
    actor: tuple[str, str] = SYSTEM,
    key: str | None = None,
    steps: Mapping[str, Any] | None = None,
    results: Mapping[str, Any] | None = None,
    secrets: Mapping[str, str] | None = None,
    cancelled: str | None = None,
    conn: Any = None,
) -> Rehearsal:
    """A context for `task(context(), …)` in a unit test.

    `task` gives the job its type, queue and limits. `attempt`, `org`, `project`, `actor` and `key`
    are the job's. `steps` have been finished by an earlier run: they are not called again.
    `results` are what the jobs it ran after returned, by id, `secrets` what `ctx.secret` gives.
    `cancelled` is the reason of a cancel request. `conn` is the connection that
    `ctx.transaction()` lends: it is neither committed nor rolled back. A session of SQLAlchemy's
    that the task itself gives, `ctx.transaction(conn=session)`, is, as in a worker."""
    chosen = None if task is None else task.settings
    by, id = checked_actor(actor), new_id()
    at = id_time_ms(id)
    job = ClaimedJob(
        id=id,
        lease_no=attempt,
        type="rehearsal" if chosen is None else chosen.name,
        payload="{}",
        attempts=attempt,
        max_attempts=policy.Retry().attempts if chosen is None else chosen.retry.attempts,
        crashes=0,
        timeout_ms=300_000 if chosen is None else int(chosen.timeout * 1000),
        queue="default" if chosen is None else chosen.queue,
        priority=5 if chosen is None else chosen.priority,
        category="default" if chosen is None else chosen.category.name,
        org=policy.name(org, "org"),
        project=project,
        actor_type=by.type,
        actor_id=by.id,
        request=None,
        correlation=None,
        traceparent=None,
        key=key,
        parent=None,
        scheduled_at=at,
        created_at=at,
        ready_at=at,
        losses=0,
    )
    run = RehearsedRun(job, task, steps or {}, results or {}, secrets or {}, conn)
    run.cancel_reason = cancelled
    return Rehearsal(run)


def _nothing() -> None: ...


def _as_job(new: NewJob) -> Job:
    """A job as it would be in the store the moment it is stored."""
    from tenure.stored import Job

    terms, at = new.terms, moment(id_time_ms(new.id))
    asked = new.at_ms if new.at_ms is not None else id_time_ms(new.id) + new.delay_ms
    due = moment(asked)
    assert at is not None and due is not None  # noqa: S101  both are numbers
    return Job(
        id=new.id,
        type=terms.type,
        status="queued",
        queue=terms.queue,
        priority=terms.priority,
        category=terms.category,
        payload=payload.decode(new.payload),
        result=None,
        error=None,
        error_code=None,
        attempts=0,
        max_attempts=terms.max_attempts,
        crashes=0,
        lease_no=0,
        lease_owner=None,
        lease_until=None,
        scheduled_at=due,
        created_at=at,
        updated_at=at,
        started_at=None,
        completed_at=None,
        timeout=terms.timeout_ms / 1000,
        org=terms.org,
        project=terms.project,
        actor=terms.actor,
        request_id=terms.request_id or new.id,
        correlation_id=terms.correlation_id or new.id,
        traceparent=terms.traceparent,
        key=new.key,
        progress=None,
        parent=terms.parent,
        after=new.after,
        scheduled_for=due if new.at_ms is not None or new.delay_ms else None,
        after_failed=terms.after_failed,
    )
