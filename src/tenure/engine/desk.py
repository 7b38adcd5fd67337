"""A run's desk: what a handler may ask of its app while it runs, and what its app asks of it.

The only way from a handler to the store: steps, results of dependencies, the transaction that
ends the job. Opened at first use; most handlers never do.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any, NoReturn, Protocol

from tenure import reference
from tenure.config import Settings
from tenure.context import Lifecycle
from tenure.engine.client import Client
from tenure.errors import ConfigError, LeaseLost, StoreError
from tenure.job import ClaimedJob
from tenure.outcome import Completed, Ended
from tenure.store import Registration
from tenure.task import Task

log = logging.getLogger("tenure.job")

Hook = Callable[[Lifecycle], Any]
LOST = "this run lost its job before its transaction could commit"


class Employer(Protocol):
    """The part of an app that running a job needs."""

    settings: Settings
    tasks: dict[str, Task[..., Any]]
    hooks: dict[str, list[Hook]]
    secrets: tuple[str, ...]  # the references it may ask for
    secret_provider: Callable[[str], str | None] | None
    around: Callable[[Callable[..., Any]], Callable[..., Any]] | None

    @property
    def client(self) -> Client: ...


class Desk:
    def __init__(self, app: Employer) -> None:
        self._app = app
        self.worker = Registration(0, "")  # whom we run under, as the store knows it
        self.tasks: Mapping[str, Task[..., Any]] = app.tasks
        self.family = threading.Lock()  # for the follow-ups of runs: held for a moment
        self.cancel_grace = app.settings.cancel_grace_seconds
        self.around = app.around

    # -- the store ----------------------------------------------------------------------------
    def steps(self, job: ClaimedJob) -> dict[str, str]:
        return self._app.client.store.steps(job.id)

    def save_step(self, job: ClaimedJob, name: str, result: str) -> bool:
        run = (job.id, job.lease_no)
        return self._app.client.store.save_step(self.worker, run, name, result)

    def results(self, job: ClaimedJob) -> dict[str, tuple[str, Any]]:
        return self._app.client.store.results(job.id)

    @contextmanager
    def transaction(
        self, job: ClaimedJob, completed: Callable[[], tuple[Completed, int]], conn: Any
    ) -> Iterator[Any]:
        """The handler's own SQL, its follow-ups and, as the last statement, the fenced finish."""
        try:
            with self._app.client.store.transaction(self._longest(), conn) as settlement:
                yield settlement.connection
                end = _end_of(job, completed)
                if settlement.finish(self.worker, end) != "accepted":
                    raise LeaseLost(LOST)
        except Exception as error:
            if not _of_the_end(error, conn) or not self._committed(job, error):
                raise

    @asynccontextmanager
    async def atransaction(
        self, job: ClaimedJob, completed: Callable[[], tuple[Completed, int]], conn: Any
    ) -> AsyncIterator[Any]:
        """The same on the handler's own event loop. Who is told to stop during the COMMIT has
        perhaps made it: then the run is over, and there is nothing left to stop."""
        ending = False
        try:
            async with self._app.client.store.atransaction(self._longest(), conn) as settlement:
                yield settlement.connection
                end = _end_of(job, completed)
                ending = True
                if await settlement.finish(self.worker, end) != "accepted":
                    raise LeaseLost(LOST)
        except asyncio.CancelledError as error:
            if not ending or not await self.in_thread(self._committed, job, error):
                raise
        except Exception as error:
            ours = _of_the_end(error, conn)
            if not ours or not await self.in_thread(self._committed, job, error):
                raise

    def refuse_blocking(self) -> NoReturn:
        """`with` in an `async def` handler."""
        self._app.client.store.atransaction(self._longest())  # a store that has none says so
        raise ConfigError(
            "this `async def` handler shares its thread with others, and `with ctx.transaction()` "
            "would block it: write `async with ctx.transaction() as conn:` and await what it runs"
        )

    def _longest(self) -> float:
        """Seconds a handler's transaction may take: its lease is renewed for longer than that."""
        return self._app.settings.lease_seconds / 3

    def _committed(self, job: ClaimedJob, error: BaseException) -> bool:
        """The reply to a COMMIT may be lost although it happened: (id, lease_no) tells. A store
        that cannot say so now is told the outcome later, and knows a run that has ended."""
        try:
            settled = self._app.client.store.settled(job.id, job.lease_no)
        except StoreError:
            return False
        if settled and not isinstance(error, (StoreError, asyncio.CancelledError)):
            # Types only, as of hooks.
            kind = type(error).__name__
            log.error("job %s is over, its transaction committed; then it raised %s", job.id, kind)
        return settled

    async def in_thread(self, call: Callable[..., Any], *args: Any) -> Any:
        return await self._app.client.in_thread(call, *args)

    def secret(self, ref: str) -> str:
        app = self._app
        return reference.resolve(ref, app.secrets, app.secret_provider, os.environ)

    # -- lifecycle hooks ----------------------------------------------------------------------
    def hooked(self, kind: str) -> bool:
        return bool(self._app.hooks.get(kind))

    def tell(self, event: Lifecycle) -> None:
        """A hook that raises, `sys.exit()` included, is logged and changes nothing. What the run
        has failed of is being handled meanwhile: `sys.exc_info()` has it."""
        here = os.getpid()
        for hook in self._app.hooks.get(event.kind, ()):
            try:
                said = _handling(event.exception, hook, event)
                if inspect.iscoroutine(said):
                    _finish_hook(hook, event, said)
            except BaseException as error:
                if os.getpid() != here:
                    raise  # in a process that the hook has forked: it ends
                _complain(hook, event.kind, error)


def _of_the_end(error: Exception, conn: Any) -> bool:
    """It may have come with the COMMIT, or after it: whoever commits on a library's connection
    runs the library's hooks as well."""
    return conn is not None or isinstance(error, StoreError)


def _end_of(job: ClaimedJob, completed: Callable[[], tuple[Completed, int]]) -> Ended:
    outcome, lasted = completed()
    return Ended(job.id, job.lease_no, lasted, outcome)


def _handling(raised: BaseException | None, call: Callable[..., Any], *args: Any) -> Any:
    """Call it as if from where `raised` is caught, which leaves no trace in it."""
    if raised is None:
        return call(*args)
    trace = raised.__traceback__
    try:
        raise raised
    except BaseException:
        raised.__traceback__ = trace
        return call(*args)


def _finish_hook(hook: Hook, event: Lifecycle, said: Coroutine[Any, Any, Any]) -> None:
    """An `async def` hook: on the loop when there is one here, else to its end right now."""

    async def guarded() -> None:
        try:
            await _handled(event.exception, said)
        except asyncio.CancelledError:
            raise  # the loop ends
        except BaseException as error:
            _complain(hook, event.kind, error)

    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(guarded())
    else:
        loop.create_task(guarded())  # noqa: RUF006  held by the loop while it runs


async def _handled(raised: BaseException | None, said: Coroutine[Any, Any, Any]) -> None:
    if raised is None:
        await said
        return
    trace = raised.__traceback__
    try:
        raise raised
    except BaseException:
        raised.__traceback__ = trace
        await said


def _complain(hook: Hook, kind: str, error: BaseException) -> None:
    """Types only: the text may hold payload values, and a partial shows what it was given."""
    name = getattr(hook, "__name__", type(hook).__name__)
    log.error("hook %s for %r raised %s; the job goes on", name, kind, type(error).__name__)
