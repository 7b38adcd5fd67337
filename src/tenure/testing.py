"""For tests of programs that use Tenure: a fresh file, a clock to turn, jobs run in the test's
own thread, and assertions about what was enqueued. With pytest, the fixtures come by themselves.

Nothing here pretends: jobs go through the real store, the claim, the run's own judgement and the
fenced finish. What is missing is the worker around it: no processes, no lease renewal. For tests
about those use `app.worker()` or `app.run_worker(drain=True)`.

pytest loads this module before it does anything else, so the engine is imported where it is used.
"""

from __future__ import annotations

import contextvars
import inspect
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import TYPE_CHECKING, Any

from tenure import payload, policy
from tenure.app import App
from tenure.context import Lifecycle
from tenure.errors import ConfigError, JobCancelled, JobError, JobFailed, PayloadError
from tenure.job import ClaimedJob, Job, NewJob, Receipt
from tenure.task import Task

if TYPE_CHECKING:
    from tenure.engine.plan import Summary
    from tenure.engine.run import JobRun
    from tenure.outcome import Outcome

RUNAWAY = 1000  # runs, then a drain without a limit says that it will not end
SHOWN = 20  # jobs listed by a failed assertion


# -- a fresh file -------------------------------------------------------------------------------
@contextmanager
def use(app: App, path: str | os.PathLike[str] | None = None) -> Iterator[App]:
    """Point an app at a fresh file for the length of a block, then back at its own store.

    `path` is a directory (pytest's `tmp_path`) or a file that does not exist yet; without one the
    file lives in a temporary directory and goes with it.
    """
    with ExitStack() as stack:
        if path is None:
            from tempfile import TemporaryDirectory

            path = stack.enter_context(TemporaryDirectory(prefix="tenure-"))
        before = app.settings
        app.close()
        app.settings = replace(before, url=f"sqlite:///{_fresh_file(os.path.abspath(path))}")
        stack.callback(setattr, app, "settings", before)
        stack.callback(app.close)
        clock = _clock_of(app)
        stack.enter_context(_replaced(app, {"now_ms": clock} if clock else {}))
        if clock is not None:
            clock.attach()
        yield app
        if clock is None:  # one that was made inside the block and never restored
            vars(app).pop("now_ms", None)


def _fresh_file(path: str) -> str:
    if os.path.isdir(path):
        names = (os.path.join(path, f"tenure-{number}.db") for number in count(1))
        return next(name for name in names if not os.path.exists(name))
    if os.path.exists(path):
        raise ConfigError(
            f"{path} exists, and a test wants a fresh file: give a directory, such as tmp_path"
        )
    return path


@contextmanager
def _replaced(app: App, attributes: Mapping[str, Any]) -> Iterator[None]:
    """Attributes of this one app object, in front of those of its class."""
    own = vars(app)
    before = {name: own[name] for name in attributes if name in own}
    own.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            own.pop(name, None)
        own.update(before)


# -- the clock ----------------------------------------------------------------------------------
class Clock:
    """The time by which an app's store decides what is due. It stands still until it is turned;
    with `ticking=True` it runs on from where it was set. `with Clock(app) as clock:` puts the
    real one back at the end, as does `restore()`."""

    def __init__(self, app: App, at: datetime | None = None, *, ticking: bool = False) -> None:
        self._app = app
        self._ticking = ticking
        self._move(app.now_ms() if at is None else _ms(at))
        self._restore = ExitStack()
        self._restore.enter_context(_replaced(app, {"now_ms": self}))
        self.attach()

    def __call__(self) -> int:
        """Milliseconds since 1970, as stores want them."""
        if not self._ticking:
            return self._ms
        return self._ms + int((time.monotonic() - self._since) * 1000)

    def now(self) -> datetime:
        return datetime.fromtimestamp(self() / 1000, UTC)

    def set(self, to: datetime) -> None:
        """Any time, also an earlier one."""
        self.turn(_ms(to))
        _work_inline(self._app)

    def advance(self, by: float | timedelta) -> datetime:
        """So many seconds on; the new time. In inline mode what is due then has run."""
        seconds = by.total_seconds() if isinstance(by, timedelta) else by
        if seconds < 0:
            raise ConfigError("advance() goes forward; set() can go back")
        self.turn(self() + round(seconds * 1000))
        _work_inline(self._app)
        return self.now()

    def turn(self, ms: int) -> None:
        self._move(ms)
        self.attach()

    def attach(self) -> None:
        """An app that was closed has opened another store since: that one gets the clock too."""
        file: Any = getattr(self._app.store, "file", None)
        if file is None:
            raise ConfigError("tenure.testing.Clock works on SQLite stores only")
        if file.clock is not self:
            self._restore.callback(setattr, file, "clock", file.clock)
            file.clock = self

    def restore(self) -> None:
        self._restore.close()

    def _move(self, ms: int) -> None:
        self._ms, self._since = ms, time.monotonic()

    def __enter__(self) -> Clock:
        return self

    def __exit__(self, *error: object) -> None:
        self.restore()


def _ms(at: datetime) -> int:
    return round(policy.aware(at) * 1000)


def _clock_of(app: App) -> Clock | None:
    found = vars(app).get("now_ms")
    return found if isinstance(found, Clock) else None


# -- running jobs here --------------------------------------------------------------------------
@contextmanager
def inline(app: App, *, raise_failures: bool = True) -> Iterator[None]:
    """Inside the block an enqueue returns when its job, and whatever else is due, has run.

    A run that fails (for good, or to be retried) raises JobFailed from the enqueue, caused by the
    handler's own exception. What a handler enqueues runs after it, as it would in a worker.
    """
    with _Bench(app, raise_failures=raise_failures) as bench:
        doors = {
            "enqueue_many": bench.enqueue,
            "enqueue_jobs": bench.enqueue,
            "aenqueue_jobs": bench.aenqueue,
        }
        with _replaced(app, doors):
            yield


def drain(
    app: App,
    *,
    queues: str | Sequence[str] | None = None,
    limit: int | None = None,
    until_empty: bool = False,
    raise_failures: bool = False,
) -> Summary:
    """Run what is due, one job after another, in this thread: by queue (critical first), then as
    a worker claims. `limit` stops after so many runs. `until_empty` turns the clock on to what is
    due later (retries too) until nothing is; without a `Clock` of yours, for this call only."""
    outer = _inline_bench(app)
    with ExitStack() as stack:
        clock = _clock_of(app)
        if clock is not None:
            clock.attach()
        elif until_empty:
            clock = stack.enter_context(Clock(app))
        bench = stack.enter_context(
            _Bench(app, queues, raise_failures=raise_failures, busy=outer and outer.busy)
        )
        with bench.alone() as free:
            if free:
                bench.work(limit, clock if until_empty else None)
        return bench.summary()


def _inline_bench(app: App) -> _Bench | None:
    found = getattr(vars(app).get("enqueue_jobs"), "__self__", None)
    return found if isinstance(found, _Bench) else None


def _work_inline(app: App) -> None:
    bench = _inline_bench(app)
    if bench is not None:
        bench.work_now()


class _Bench:
    """Claims, runs and finishes in the thread that asks. Work asked for meanwhile, by a handler
    or by another thread, is left to the one who is at it."""

    def __init__(
        self,
        app: App,
        queues: str | Sequence[str] | None = None,
        *,
        raise_failures: bool,
        busy: threading.Lock | None = None,
    ) -> None:
        import asyncio

        from tenure.engine.desk import Desk
        from tenure.engine.finisher import Finisher
        from tenure.engine.plan import parse_queues

        self._app = app
        self._queues = parse_queues(queues)
        self._raise = raise_failures
        self._failures: list[JobFailed] = []
        self._desk = Desk(app)
        self._finisher = Finisher(app.store)
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._begun = time.monotonic()
        self._asked = False
        self.busy = busy or threading.Lock()

    def __enter__(self) -> _Bench:
        return self

    def __exit__(self, *error: object) -> None:
        self._runner.close()

    # -- inline mode: what stands in for the app's own enqueue ----------------------------------
    def enqueue(
        self, jobs: Sequence[NewJob], *, conn: Any = None, on_conflict: str = "return"
    ) -> list[Receipt]:
        receipts = self._app.client.enqueue(jobs, conn=conn, on_conflict=on_conflict)
        if conn is None:  # else it is the caller's to commit first
            self.work_now()
        return receipts

    async def aenqueue(self, jobs: Sequence[NewJob], **more: Any) -> list[Receipt]:
        return await self._app.client.in_thread(self.enqueue, jobs, **more)

    def work_now(self) -> None:
        clock = _clock_of(self._app)
        if clock is not None:
            clock.attach()
        self._asked = True
        while self._asked:  # asked for again between the last claim and the lock's release
            with self.alone() as free:
                if not free:
                    return
                self._asked = False
                self.work(None, None)

    @contextmanager
    def alone(self) -> Iterator[bool]:
        free = self.busy.acquire(blocking=False)
        try:
            yield free
        finally:
            if free:
                self.busy.release()

    # -- claim, run, finish ---------------------------------------------------------------------
    def work(self, limit: int | None, clock: Clock | None) -> None:
        from tenure.engine import host
        from tenure.engine.finisher import Finisher

        app, store = self._app, self._app.store
        info = host.identify(host.new_worker_id(), app.settings.lease_seconds, {"name": "testing"})
        self._desk.worker = store.register(info)
        counts, self._finisher = self._finisher.counts, Finisher(store)
        self._finisher.counts = counts
        try:
            for runs in count():
                if runs == (RUNAWAY if limit is None else limit):
                    break
                job = self._next(clock)
                if job is None:
                    break
                self._one(job)
        finally:
            store.retire(self._desk.worker)
        if limit is None and runs == RUNAWAY:
            raise JobError(
                f"{RUNAWAY} jobs have run and there may be more: does a task enqueue or snooze "
                "itself for ever? drain(app, limit=…) stops after so many runs."
            )
        if self._raise and self._failures:
            failure, self._failures = self._failures[0], []
            raise failure

    def _next(self, clock: Clock | None) -> ClaimedJob | None:
        """The next job due, turning the clock when there is one to turn."""
        store = self._app.store
        while True:
            claim = store.claim(
                self._desk.worker,
                [(name, 1) for name in self._open_queues()],
                frozenset(self._app.tasks),
                limit=1,
            )
            if claim.jobs:
                return claim.jobs[0]
            if claim.more or claim.unknown or store.settle_dependants():
                continue
            due = None if clock is None else self._next_due()
            if clock is None or due is None:
                return None
            clock.turn(_ms(due))

    def _open_queues(self) -> list[str]:
        known = self._app.store.queue_names()
        names = [name for name, paused in known.items() if not paused]
        wanted = names if self._queues is None else [n for n in names if n in self._queues]
        return sorted(wanted, key=lambda name: (-policy.QUEUE_WEIGHTS.get(name, 1.0), name))

    def _next_due(self) -> datetime | None:
        """Of the jobs that could run here. Unknown types are not among them: a claim puts them
        off again and again."""
        now, queues = self._app.store.file.clock(), self._open_queues()  # type: ignore[attr-defined]
        return min(
            (
                job.scheduled_at
                for job in self._app.find(status="queued")
                if job.queue in queues and job.type in self._app.tasks
                and _ms(job.scheduled_at) > now
            ),
            default=None,
        )  # fmt: skip

    def _one(self, job: ClaimedJob) -> None:
        from tenure import outcome
        from tenure.engine.run import JobRun
        from tenure.engine.wire import Assignment

        run = JobRun(Assignment(0, job), self._app.tasks[job.type], self._desk)
        how: Outcome = outcome.Released("the test was interrupted")
        error: BaseException | None = None
        try:
            how, error = self._perform(run)
            self._announce(run, how)
        finally:
            if run.lost:
                how = outcome.Released("its lease was lost")
            said = run.progress is not None and not run.settled
            progress = [(job.id, job.lease_no, str(run.progress))] if said else []
            self._finisher.add(
                [outcome.Ended(job.id, job.lease_no, run.lasted_ms(), how)], progress
            )
            self._finisher.flush(self._desk.worker)
        if isinstance(how, outcome.Failed | outcome.Dead | outcome.Retried):
            self._failures.append(_failure(job, how, error))
