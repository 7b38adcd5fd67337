"""Step 2 of the walk: hand jobs to the store, wait for results."""

from __future__ import annotations

import contextvars
import functools
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from tenure import policy
from tenure.errors import ConfigError, DuplicateKey, JobFailed, JobNotFound
from tenure.job import NewJob, Receipt
from tenure.store import Store

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

    from tenure.stored import Job

T = TypeVar("T")
THREADLESS_SECONDS = 0.2  # between two tries, while the system has no thread to give


class _Work:
    """A call for a pool of threads. The pool may run it although it has refused it: then `wanted`
    is False, and nothing is called."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self.wanted = True

    def __call__(self) -> Any:
        return self._call() if self.wanted else None


class Client:
    def __init__(self, store: Store) -> None:
        self.store = store
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def enqueue(
        self, jobs: Sequence[NewJob], *, conn: Any = None, on_conflict: policy.OnConflict = "return"
    ) -> list[Receipt]:
        if on_conflict != "return":
            policy.choice(on_conflict, "on_conflict", ("return", "error"))
        if conn is None:
            if on_conflict == "error" and len(jobs) > 1:
                raise ConfigError(
                    "on_conflict='error' is for one job at a time: the others of a batch would be "
                    "stored all the same. With conn= your transaction takes them back; else look "
                    "at `duplicate` of each receipt"
                )
            try:
                receipts = self.store.enqueue(jobs)
            except (AttributeError, TypeError):
                _require_new(jobs)
                raise
            return _accepted(jobs, receipts, on_conflict)
        _require_new(jobs)
        told = self.store.enqueue_on(conn, jobs) if jobs else []
        if not isinstance(told, list):
            _give_up(told)
            raise ConfigError(
                f"conn= is a {type(conn).__module__}.{type(conn).__name__}, which has to be "
                "awaited: call `await task.options(conn=conn).aenqueue(…)`, for several jobs "
                "`await app.aenqueue_jobs([task.job(…), …], conn=conn)`"
            )
        return _accepted(jobs, told, on_conflict)

    async def aenqueue(
        self, jobs: Sequence[NewJob], *, conn: Any = None, on_conflict: policy.OnConflict = "return"
    ) -> list[Receipt]:
        """On a connection of our own: in a thread of ours. On the caller's connection: in the
        caller's thread. An async connection is awaited on the caller's loop; a sync one blocks that
        loop for one round trip, because many belong to the thread that opened them."""
        policy.choice(on_conflict, "on_conflict", ("return", "error"))
        _require_new(jobs)
        if conn is None:
            return await self.in_thread(self.enqueue, jobs, on_conflict=on_conflict)
        receipts = self.store.enqueue_on(conn, jobs) if jobs else []
        if not isinstance(receipts, list):
            receipts = await receipts
        return _accepted(jobs, receipts, on_conflict)

    def result(self, id: str, timeout: float | None, org: str | None = None) -> Any:
        """Wait for the end of a job; looks often at first, then ten times a second."""
        for pause in _pauses(timeout):
            job = _ended(id, self.store.get(id, org=org))
            if job is not None:
                return job.result
            time.sleep(pause)
        raise _too_late(id, timeout)

    async def aresult(self, id: str, timeout: float | None, org: str | None = None) -> Any:
        """The same; no thread waits meanwhile."""
        import asyncio

        for pause in _pauses(timeout):
            job = _ended(id, await self.in_thread(self.store.get, id, org=org))
            if job is not None:
                return job.result
            await asyncio.sleep(pause)
        raise _too_late(id, timeout)

    async def in_thread(self, call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """The async twins: the same call on a small pool of ours, the context copied."""
        import asyncio
        from concurrent.futures import ThreadPoolExecutor

        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(4, thread_name_prefix="tenure")
            pool = self._pool
        loop = asyncio.get_running_loop()
        while True:
            work = _Work(functools.partial(contextvars.copy_context().run, call, *args, **kwargs))
            try:
                done = loop.run_in_executor(pool, work)
            except RuntimeError as error:
                work.wanted = False  # it may be in the pool's queue all the same
                if "start new thread" not in str(error):
                    raise  # the pool was closed meanwhile
                await asyncio.sleep(THREADLESS_SECONDS)
                continue
            result: T = await done
            return result

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


def _require_new(jobs: Sequence[object]) -> None:
    if not hasattr(jobs, "__len__"):  # an iterator would be empty after this
        raise ConfigError("several jobs are given as a list: [task.job(…) for … in …]")
    for kind in set(map(type, jobs)) - {NewJob}:
        hint = ": `.enqueue(…)` has stored that one already" if kind is Receipt else ""
        raise ConfigError(
            f"several jobs are made by `task.job(…)`, one of these is a {kind.__name__}{hint}"
        )


def _accepted(
    jobs: Sequence[NewJob], receipts: list[Receipt], on_conflict: policy.OnConflict
) -> list[Receipt]:
    if on_conflict == "error":
        for job, receipt in zip(jobs, receipts, strict=True):
            if receipt.duplicate:
                raise DuplicateKey(
                    f"key {job.key!r} is taken by job {receipt.id} ({receipt.status}) in org "
                    f"{job.terms.org!r}; use another key, or on_conflict='return' to get that "
                    "job's receipt instead"
                )
    return receipts


def _give_up(awaitable: Awaitable[list[Receipt]]) -> None:
    """Nothing of it has run. When it is closed, Python does not warn that it was never awaited."""
    close = getattr(awaitable, "close", None)
    if close is not None:
        close()


def _pauses(timeout: float | None) -> Iterator[float]:
    deadline = float("inf") if timeout is None else time.monotonic() + timeout
    pause = 0.002
    while True:
        left = deadline - time.monotonic()
        yield max(0.0, min(pause, left))
        if left <= 0:
            return
        pause = min(pause * 1.5, 0.1)


def _ended(id: str, job: Job | None) -> Job | None:
    """The job if it has completed; None while it may still complete. Any other end is raised."""
    if job is None:
        raise JobNotFound(f"there is no job {id}")
    if job.terminal and job.status != "completed":
        raise JobFailed(
            f"job {id} ({job.type}) ended {job.status}: {job.error or 'no reason given'}",
            status=job.status,
            code=job.error_code,
        )
    return job if job.terminal else None


def _too_late(id: str, timeout: float | None) -> TimeoutError:
    return TimeoutError(
        f"job {id} has not ended within {timeout:g} s; it goes on without you: ask again later, or "
        f"`tenure job {id}` to see why"
    )
