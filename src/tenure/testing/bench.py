"""Jobs run in the thread of a test: the real store, claim, judgement and fenced finish, without the
worker around them."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

from tenure import policy
from tenure.app import App
from tenure.context import Lifecycle
from tenure.errors import JobCancelled, JobError, JobFailed
from tenure.job import ClaimedJob, NewJob, Receipt
from tenure.testing.assertions import refuse_transaction
from tenure.testing.clock import Clock, clock_of, milliseconds, replaced

if TYPE_CHECKING:  # pytest imports this module first of all: the engine only where it is used
    from tenure.engine.run import JobRun
    from tenure.engine.worker_options import Summary
    from tenure.outcome import Outcome

RUNAWAY = 1000  # runs, then a drain without a limit says that it does not end


@contextmanager
def inline(app: App, *, raise_failures: bool = True) -> Iterator[None]:
    """Inside the block an enqueue returns when its job, and whatever else is due, has run.
    A run that fails (for good, or to be retried) raises JobFailed from the enqueue, caused by the
    handler's own exception. What a handler enqueues runs after it, as it would in a worker."""
    refuse_transaction(app)
    with _Bench(app, None, raise_failures) as bench:
        doors = {"enqueue_many": bench.enqueue, "enqueue_jobs": bench.enqueue}
        with replaced(app, aenqueue_jobs=bench.aenqueue, **doors):
            yield


def drain(
    app: App,
    *,
    queues: str | Sequence[str] | None = None,
    limit: int | None = None,
    until_empty: bool = False,
    raise_failures: bool = False,
) -> Summary:
    """Run what is due, one job after another in this thread: critical first, then queue by queue
    in the order of a claim. `limit` stops after so many runs. `until_empty` also turns the clock
    (your `Clock`, else one for this call) on to what is due later, such as retries."""
    refuse_transaction(app)
    outer, clock = bench_of(app), clock_of(app)
    with ExitStack() as stack:
        if outer is not None and outer.busy.acquire(blocking=False):
            stack.callback(outer.busy.release)  # what handlers enqueue is left to this drain
        if clock is None and until_empty:
            clock = stack.enter_context(Clock(app))
        bench = stack.enter_context(_Bench(app, queues, raise_failures))
        return bench.work(limit, clock if until_empty else None)


def bench_of(app: App) -> _Bench | None:
    """Set while the app is in inline mode."""
    found = getattr(vars(app).get("enqueue_jobs"), "__self__", None)
    return found if isinstance(found, _Bench) else None


class _Bench(AbstractContextManager["_Bench"]):
    """A worker in the thread that asks: claims, runs and finishes one job after another. When it is
    asked while it works (by a handler, by another thread), the work is left to that thread."""

    def __init__(self, app: App, queues: str | Sequence[str] | None, raise_failures: bool) -> None:
        from asyncio import Runner, new_event_loop

        from tenure.engine.worker_options import parse_queues

        self._app, self._raise = app, raise_failures
        self._queues = parse_queues(queues)
        self._runner = Runner(loop_factory=new_event_loop)  # one: handlers keep things open in it
        self._asked, self.busy = False, threading.Lock()

    def __exit__(self, *error: object) -> None:
        _beside_loops(self._runner.close)

    def enqueue(self, jobs: Sequence[NewJob], *, conn: Any = None, **more: Any) -> list[Receipt]:
        joined = self._app._joined(conn)
        receipts = self._app.client.enqueue(jobs, conn=joined, **more)
        if joined is None:  # else its owner has to commit first
            self.work_now()
        elif conn is None and joined.in_atomic_block:  # Django's, which tells of the commit
            joined.on_commit(self.work_now)
        return receipts

    async def aenqueue(self, jobs: Sequence[NewJob], **more: Any) -> list[Receipt]:
        if more.get("conn") is not None:  # theirs: on their loop, and they have to commit first
            return await self._app.client.aenqueue(jobs, **more)
        return await self._app.client.in_thread(self.enqueue, jobs, **more)

    def work_now(self) -> None:
        self._asked = True
        # Again when another thread has asked between our last claim and the release.
        while self._asked and self.busy.acquire(blocking=False):
            try:
                self._asked = False
                self.work()
            finally:
                self.busy.release()

    def work(self, limit: int | None = None, clock: Clock | None = None) -> Summary:
        from tenure.engine.finisher import Finisher, Unwritten
        from tenure.engine.machine import identify, new_worker_id
        from tenure.engine.worker_options import Summary

        app, store, begun = self._app, self._app.store, time.monotonic()
        clock_of(app)
        info = identify(new_worker_id(), app.settings.lease_seconds, {"name": "testing"})
        self._worker, self._unwritten = store.register(info), Unwritten()
        counts: Counter[str] = Counter()
        self._finisher = Finisher(store, self._unwritten, counts)
        self._failures: list[JobFailed] = []
        try:
            for _ in range(RUNAWAY if limit is None else limit):
                if (job := self._next(clock)) is None:
                    break
                self._run(job)
        finally:
            store.retire(self._worker)
        if limit is None and job is not None:
            raise JobError(
                f"{RUNAWAY} jobs have run and it goes on: does a task enqueue or snooze itself for "
                "ever? drain(app, limit=…) stops after as many as you say"
            )
        if self._raise and self._failures:
            raise self._failures[0]
        known = {name: count for name, count in counts.items() if name in Summary._fields}
        queued = store.totals().jobs["queued"]
        left = {"queued": queued} if queued else {}
        return Summary(**known, seconds=time.monotonic() - begun, left=left)

    def _next(self, clock: Clock | None) -> ClaimedJob | None:
        """The next job due, after turning the clock if there is one to turn."""
        store, types = self._app.store, frozenset(self._app.tasks)
        while True:
            known = store.queue_names()
            names = [n for n in known if self._queues is None or n in self._queues]
            names.sort(key=lambda name: (-policy.QUEUE_WEIGHTS.get(name, 1.0), name))
            wants = [(name, 1) for name in names if not known[name]]
            worker = self._worker
            claim = store.claim(worker, wants, types, limit=1)
            if claim.suspects and not claim.jobs:
                claim = store.claim(worker, wants, types, suspects=True, limit=1)
            if claim.jobs:
                return claim.jobs[0]
            if claim.more or store.settle_dependants():
                continue
            if clock is None:
                return None
            # Not `store.next_due`: it counts types that this app does not know.
            queued = [j for j in self._app.find(status="queued") if j.type in types]
            later = [milliseconds(j.scheduled_at) for j in queued if (j.queue, 1) in wants]
            later = [due for due in later if due > clock()]
            if not later:
                return None
            clock.turn(min(later))

    # -- what `engine/executor.py` does, without its threads -------------------------------------
    def _run(self, job: ClaimedJob) -> None:
        from tenure import outcome
        from tenure.engine.hook_calls import tell_of_end
        from tenure.engine.run import JobRun

        run = JobRun(job, 0, self._app.tasks[job.type], self._app, self._worker)
        run.begun = time.monotonic()
        how: Outcome = outcome.Released("the test was interrupted")  # Ctrl-C, pytest.fail
        try:
            how, error = self._outcome(run)
            failure = getattr(how, "failure", None)
            tell_of_end(self._app.hooks, job, how, run.raised)
        finally:
            if run.lost:
                how = outcome.Released("its lease was lost")
            report = None if run.settled else run.progress
            ended = outcome.Ended(job.id, job.lease_no, run.lasted_ms(), how)
            self._unwritten.add([ended], [(job.id, job.lease_no, report)] if report else [])
            self._finisher.flush(self._worker)
        if failure is not None and (after := self._app.get(job.id)) is not None:
            message = f"job {job.id} ({job.type}) failed, now {after.status}: {failure.message}"
            self._failures.append(JobFailed(message, status=after.status, code=failure.code))
            self._failures[-1].__cause__ = error

    def _outcome(self, run: JobRun) -> tuple[Outcome, BaseException | None]:
        from asyncio import CancelledError

        from tenure.context import acting_for
        from tenure.engine.hook_calls import tell
        from tenure.engine.judgement import judge_error, judge_value

        try:
            with acting_for(run.job):
                tell(self._app.hooks, Lifecycle("start", run.job))
                value = run.call()
                if run.task.signature.is_async:
                    value = self._awaited(run, value)
            return judge_value(value, run), None
        except (Exception, CancelledError, JobCancelled, SystemExit) as error:
            return judge_error(error, run), error

    def _awaited(self, run: JobRun, handler: Coroutine[Any, Any, Any]) -> Any:
        import asyncio

        async def to_its_end() -> Any:
            async with asyncio.timeout(run.job.timeout_ms / 1000):
                return await handler

        return _beside_loops(self._runner.run, to_its_end(), context=copy_context())


def _beside_loops(call: Callable[..., Any], *args: Any, **more: Any) -> Any:
    """In this thread, unless a loop runs in it: an `async def` test that calls `enqueue`."""
    from asyncio import _get_running_loop
    from concurrent.futures import ThreadPoolExecutor

    if _get_running_loop() is None:
        return call(*args, **more)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call, *args, **more).result()
