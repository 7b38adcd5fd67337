"""`ctx.transaction()`: the handler's own SQL, its follow-up jobs and, as the last statement, the
fenced finish of its job, in one transaction of the store."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from tenure.context import Transaction
from tenure.engine.run import JobRun, made_by_the_handler
from tenure.errors import ConfigError, LeaseLost, StoreError
from tenure.outcome import Completed, Ended
from tenure.store import Accepted, Store

log = logging.getLogger("tenure.job")


class RunTransaction(Transaction):
    def __init__(self, run: JobRun, result: Callable[[], Any], conn: Any) -> None:
        super().__init__(run)
        self._run: JobRun = run
        self._result = result
        self._conn = conn

    @property
    def _store(self) -> Store:
        return self._run.app.client.store

    @property
    def _longest(self) -> float:
        """Seconds that a handler's transaction may take: its lease is renewed for longer."""
        return self._run.app.settings.lease_seconds / 3

    @contextmanager
    def blocking(self) -> Iterator[Any]:
        if self._run.waiter is not None:
            self._refuse_blocking()
        with self._ending_the_run():
            try:
                with self._store.transaction(self._longest, self._conn) as settlement:
                    yield settlement.connection
                    _require(settlement.finish(self._run.worker, self._end()))
            except Exception as error:
                if not self._may_have_committed(error) or not self._committed(error):
                    raise

    @asynccontextmanager
    async def awaited(self) -> AsyncIterator[Any]:
        """A run that is told to stop during the COMMIT has perhaps made it: then the run is over,
        and there is nothing left to stop."""
        in_thread, ending = self._run.in_thread, False
        with self._ending_the_run():
            try:
                async with self._store.atransaction(self._longest, self._conn) as settlement:
                    yield settlement.connection
                    end = self._end()
                    ending = True
                    _require(await settlement.finish(self._run.worker, end))
            except asyncio.CancelledError as error:
                if not ending or not await in_thread(self._committed, error):
                    raise
            except Exception as error:
                may_have = self._may_have_committed(error)
                if not may_have or not await in_thread(self._committed, error):
                    raise

    @contextmanager
    def _ending_the_run(self) -> Iterator[None]:
        """What the end of the block means for the run: the job is over, or not ours any more. One
        at a time: a second block inside the first could only wait for it, or end the job twice."""
        run = self._run
        self._refuse_second(run.settling)
        run.settling, before = True, len(run.follow_ups)
        try:
            yield
        except BaseException as error:
            run.lost = run.lost or isinstance(error, LeaseLost)
            with run.lock:
                # Nothing of the block was stored, nor will be: the handler may go on, and a block
                # that it tries again enqueues its follow-ups again.
                del run.follow_ups[before:]
                run.closed = False
            raise
        finally:
            run.settling = False
        run.settled = True

    def _end(self) -> Ended:
        run, value = self._run, self._result()
        with made_by_the_handler():
            run.result = None if value is None else run.task.pack_result(value)
        done = Completed(run.result, run.take_follow_ups())
        return Ended(run.job.id, run.job.lease_no, run.lasted_ms(), done)

    def _may_have_committed(self, error: Exception) -> bool:
        """The error may have come with the COMMIT, or after it: on the connection of a library the
        commit also runs the library's hooks."""
        return self._conn is not None or isinstance(error, StoreError)

    def _committed(self, error: BaseException) -> bool:
        """The reply to a COMMIT may be lost although it happened: (id, lease_no) tells. A store
        that cannot say so now is told the outcome later, and knows a run that has ended."""
        job = self._run.job
        try:
            settled = self._store.settled(job.id, job.lease_no)
        except StoreError:
            return False
        if settled and not isinstance(error, (StoreError, asyncio.CancelledError)):
            # Types only, as of hooks.
            kind = type(error).__name__
            log.error("job %s is over, its transaction committed; then it raised %s", job.id, kind)
        return settled

    def _refuse_blocking(self) -> None:
        """`with` in an `async def` handler."""
        self._store.atransaction(self._longest)  # a store that has none says so
        raise ConfigError(
            "this `async def` handler shares its thread with others, and `with ctx.transaction()` "
            "would block it: write `async with ctx.transaction() as conn:` and await what it runs"
        )


def _require(accepted: Accepted) -> None:
    if accepted != "accepted":
        raise LeaseLost("this run lost its job before its transaction could commit")
