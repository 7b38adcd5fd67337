"""For tests of programs that use Tenure: a fresh file, a clock to turn, jobs run in the test's
own thread, assertions about what was enqueued. Under pytest the fixtures come by themselves.

Jobs pass the real store, claim, judgement and fenced finish. What is missing is the worker around
them (processes, renewal, cancelling what runs): test that with `app.worker()`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from contextvars import copy_context
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from tenure import payload, policy
from tenure.app import App
from tenure.context import Lifecycle
from tenure.errors import ConfigError, JobCancelled, JobError, JobFailed, PayloadError
from tenure.job import ClaimedJob, Job, NewJob, Receipt
from tenure.task import Task

if TYPE_CHECKING:  # pytest imports this module first of all: the engine only where it is used
    from tenure.engine.plan import Summary
    from tenure.engine.run import JobRun
    from tenure.outcome import Outcome

RUNAWAY = 1000  # runs, then a drain without a limit says that it does not end
SHOWN = 20  # jobs listed by a failed assertion
FINAL = ("failed", "final_failure")
HOOKS = {"Completed": ("complete",), "Retried": ("failed",), "Failed": FINAL, "Dead": FINAL}


# -- a fresh file -------------------------------------------------------------------------------
@contextmanager
def use(app: App, path: str | os.PathLike[str]) -> Iterator[App]:
    """Point an app at a fresh file for the length of a block, then back at its own store.
    `path` is the file, or a directory (pytest's `tmp_path`) to make one in."""
    if os.path.isdir(path):
        files = (os.path.join(path, f"tenure-{number}.db") for number in count(1))
        path = next(file for file in files if not os.path.exists(file))
    app.close()
    url = {"TENURE_URL": f"sqlite:///{os.path.abspath(path)}"}
    settings = app.settings.from_env(app.settings.to_env() | url)
    with _replaced(app, settings=settings, now_ms=app.now_ms), closing(app):
        _clock_of(app)
        yield app


@contextmanager
def _replaced(app: App, **attributes: Any) -> Iterator[None]:
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
class Clock(AbstractContextManager["Clock"]):
    """The time by which an app's store decides what is due. It stands still until it is turned;
    with `ticking=True` it runs on from where it was set. `restore()`, or the end of
    `with Clock(app) as clock:`, brings the real one back."""

    def __init__(self, app: App, at: datetime | None = None, *, ticking: bool = False) -> None:
        self._app, self._ticking = app, ticking
        self._restore = ExitStack()
        self.turn(app.now_ms() if at is None else _ms(at))
        self._restore.enter_context(_replaced(app, now_ms=self))

    def __call__(self) -> int:
        """Milliseconds since 1970, as stores want them."""
        return self._ms + int((time.monotonic() - self._since) * 1000 if self._ticking else 0)

    def now(self) -> datetime:
        return datetime.fromtimestamp(self() / 1000, UTC)

    def set(self, to: datetime) -> None:
        """Any time, also an earlier one. In inline mode what is due then runs now."""
        self.turn(_ms(to))
        if (bench := _bench_of(self._app)) is not None:
            bench.work_now()

    def advance(self, by: float | timedelta) -> datetime:
        """So many seconds on; the new time. In inline mode what is due then runs now."""
        by = by if isinstance(by, timedelta) else timedelta(seconds=by)
        if by < timedelta(0):
            raise ConfigError("advance() goes forward; set() can go back")
        self.set(self.now() + by)
        return self.now()

    def turn(self, ms: int) -> None:
        """`set` that runs nothing. The store an app opened after a `close` gets the clock too."""
        self._ms, self._since = ms, time.monotonic()
        file: Any = self._app.store.file  # type: ignore[attr-defined]  # SQLite's
        if file.clock is not self:
            self._restore.callback(setattr, file, "clock", file.clock)
            file.clock = self

    def restore(self, *error: object) -> None:
        self._restore.close()

    __exit__ = restore


def _ms(at: datetime) -> int:
    return round(policy.aware(at) * 1000)


def _clock_of(app: App) -> Clock | None:
    """The clock a test has given this app, now at work in the store it uses."""
    found = vars(app).get("now_ms")
    if not isinstance(found, Clock):
        return None
    found.turn(found())
    return found


# -- running jobs here --------------------------------------------------------------------------
@contextmanager
def inline(app: App, *, raise_failures: bool = True) -> Iterator[None]:
    """Inside the block an enqueue returns when its job, and whatever else is due, has run.
    A run that fails (for good, or to be retried) raises JobFailed from the enqueue, caused by the
    handler's own exception. What a handler enqueues runs after it, as it would in a worker."""
    with _Bench(app, None, raise_failures) as bench:
        doors = {"enqueue_many": bench.enqueue, "enqueue_jobs": bench.enqueue}
        with _replaced(app, aenqueue_jobs=bench.aenqueue, **doors):
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
    outer, clock = _bench_of(app), _clock_of(app)
    with ExitStack() as stack:
        if outer is not None and outer.busy.acquire(blocking=False):
            stack.callback(outer.busy.release)  # what handlers enqueue is left to this drain
        if clock is None and until_empty:
            clock = stack.enter_context(Clock(app))
        bench = stack.enter_context(_Bench(app, queues, raise_failures))
        return bench.work(limit, clock if until_empty else None)


def _bench_of(app: App) -> _Bench | None:
    """Set while the app is in inline mode."""
    found = getattr(vars(app).get("enqueue_jobs"), "__self__", None)
    return found if isinstance(found, _Bench) else None


class _Bench(AbstractContextManager["_Bench"]):
    """A worker in the thread that asks: claims, runs and finishes one job after another. Asked
    while somebody is at it (by a handler, by another thread), it leaves the work to them."""

    def __init__(self, app: App, queues: str | Sequence[str] | None, raise_failures: bool) -> None:
        from asyncio import Runner, new_event_loop

        from tenure.engine.plan import parse_queues

        self._app, self._raise = app, raise_failures
        self._queues = parse_queues(queues)
        self._runner = Runner(loop_factory=new_event_loop)  # one: handlers keep things open in it
        self._asked, self.busy = False, threading.Lock()

    def __exit__(self, *error: object) -> None:
        _beside_loops(self._runner.close)

    def enqueue(self, jobs: Sequence[NewJob], *, conn: Any = None, **more: Any) -> list[Receipt]:
        receipts = self._app.client.enqueue(jobs, conn=conn, **more)
        if conn is None:  # else its owner has to commit first
            self.work_now()
        return receipts

    async def aenqueue(self, jobs: Sequence[NewJob], **more: Any) -> list[Receipt]:
        if more.get("conn") is not None:  # theirs: on their loop, and they have to commit first
            return await self._app.client.aenqueue(jobs, **more)
        return await self._app.client.in_thread(self.enqueue, jobs, **more)

    def work_now(self) -> None:
        self._asked = True
        # Again when somebody has asked between our last claim and the release.
        while self._asked and self.busy.acquire(blocking=False):
            try:
                self._asked = False
                self.work()
            finally:
                self.busy.release()

    def work(self, limit: int | None = None, clock: Clock | None = None) -> Summary:
        from tenure.engine import desk, finisher, host, plan

        app, store, begun = self._app, self._app.store, time.monotonic()
        _clock_of(app)
        info = host.identify(host.new_worker_id(), app.settings.lease_seconds, {"name": "testing"})
        self._desk, self._finisher = desk.Desk(app), finisher.Finisher(store)
        self._desk.worker = store.register(info)
        self._failures: list[JobFailed] = []
        try:
            for _ in range(RUNAWAY if limit is None else limit):
                if (job := self._next(clock)) is None:
                    break
                self._run(job)
        finally:
            store.retire(self._desk.worker)
        if limit is None and job is not None:
            raise JobError(
                f"{RUNAWAY} jobs have run and it goes on: does a task enqueue or snooze itself for "
                "ever? drain(app, limit=…) stops after as many as you say"
            )
        if self._raise and self._failures:
            raise self._failures[0]
        counts = {n: c for n, c in self._finisher.counts.items() if n in plan.Summary._fields}
        queued = store.totals().jobs["queued"]
        left = {"queued": queued} if queued else {}
        return plan.Summary(**counts, seconds=time.monotonic() - begun, left=left)

    def _next(self, clock: Clock | None) -> ClaimedJob | None:
        """The next job due, after turning the clock if there is one to turn."""
        store, types = self._app.store, frozenset(self._app.tasks)
        while True:
            known = store.queue_names()
            names = [n for n in known if self._queues is None or n in self._queues]
            names.sort(key=lambda name: (-policy.QUEUE_WEIGHTS.get(name, 1.0), name))
            wants = [(name, 1) for name in names if not known[name]]
            worker = self._desk.worker
            claim = store.claim(worker, wants, types, limit=1)
            if claim.suspects and not claim.jobs:
                claim = store.claim(worker, wants, types, suspects=True, limit=1)
            if claim.jobs:
                return claim.jobs[0]
            if claim.more or store.settle_dependants():
                continue
            if clock is None:
                return None
            # Not `store.next_due`: it counts types nobody here knows.
            queued = [j for j in self._app.find(status="queued") if j.type in types]
            later = [_ms(j.scheduled_at) for j in queued if (j.queue, 1) in wants]
            later = [due for due in later if due > clock()]
            if not later:
                return None
            clock.turn(min(later))

    # -- what `engine/executor.py` does, without its threads -------------------------------------
    def _run(self, job: ClaimedJob) -> None:
        from tenure import outcome
        from tenure.engine.run import JobRun
        from tenure.engine.wire import Assignment

        run = JobRun(Assignment(0, job), self._app.tasks[job.type], self._desk)
        run.begun = time.monotonic()
        how: Outcome = outcome.Released("the test was interrupted")  # Ctrl-C, pytest.fail
        try:
            how, error = self._outcome(run)
            failure, result = getattr(how, "failure", None), getattr(how, "result", None)
            for kind in HOOKS.get(type(how).__name__, ()):
                said = None if failure is None else failure.message
                self._desk.tell(Lifecycle.ended(kind, job, result, said, run.raised))
        finally:
            if run.lost:
                how = outcome.Released("its lease was lost")
            report = None if run.settled else run.progress
            ended = outcome.Ended(job.id, job.lease_no, run.lasted_ms(), how)
            self._finisher.add([ended], [(job.id, job.lease_no, report)] if report else [])
            self._finisher.flush(self._desk.worker)
        if failure is not None and (after := self._app.get(job.id)) is not None:
            message = f"job {job.id} ({job.type}) failed, now {after.status}: {failure.message}"
            self._failures.append(JobFailed(message, status=after.status, code=failure.code))
            self._failures[-1].__cause__ = error

    def _outcome(self, run: JobRun) -> tuple[Outcome, BaseException | None]:
        from asyncio import CancelledError

        from tenure.context import acting_for
        from tenure.engine.run import call, judge_error, judge_value

        try:
            with acting_for(run.job):
                self._desk.tell(Lifecycle("start", run.job))
                value = call(run)
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


# -- assertions ---------------------------------------------------------------------------------
class Where(TypedDict, total=False):
    args: dict[str, Any] | None  # some of the arguments, by name
    queue: str | None
    key: str | None
    org: str | None
    status: str | None


def enqueued(app: App, task: Task[..., Any] | str | None = None) -> list[Job]:
    """Every job of the app's store, or of one task, whatever became of it; oldest first."""
    return [*app.find()][::-1] if task is None else _found(app, task)[0]


def assert_enqueued(
    app: App, task: Task[..., Any] | str, *, times: int | None = None, **where: Unpack[Where]
) -> list[Job]:
    """The jobs of a task that fit `args=`, `queue=`, `key=`, `org=` and `status=`: at least one,
    or exactly `times`. Else an AssertionError that lists what there is instead."""
    __tracebackhide__ = True
    jobs, wanted = _found(app, task, **where)
    if len(jobs) == times or (times is None and jobs):
        return jobs
    number = "at least one job" if times is None else f"exactly {times}"
    raise AssertionError(f"expected {number} of {wanted}, found {len(jobs)}. {_listed(app)}")


def refute_enqueued(app: App, task: Task[..., Any] | str, **where: Unpack[Where]) -> None:
    """No job of the task fits."""
    __tracebackhide__ = True
    assert_enqueued(app, task, times=0, **where)


def _found(
    app: App, task: Task[..., Any] | str, args: dict[str, Any] | None = None, **where: str | None
) -> tuple[list[Job], str]:
    """What fits, oldest first, and in words what was asked for."""
    task, args = task if isinstance(task, Task) else app.find_task(task), args or {}
    if strange := sorted(args.keys() - set(task.signature.names)):
        raise ConfigError(f"Task {task.name!r} takes {task.signature.names}, not {strange}")
    try:
        stored = payload.decode(task.signature.encode(args, "args"))  # datetimes and the like
    except PayloadError:
        stored = args  # only to be compared, such as mock.ANY
    jobs = [
        job
        for job in app.find(type=task.name, **where)
        if all(n in job.payload and job.payload[n] in (args[n], stored[n]) for n in args)
    ]
    details = "".join(f", {name} {value!r}" for name, value in where.items())
    return jobs[::-1], f"{task.name!r}{f' with {args}' if args else ''}{details}"


def _listed(app: App) -> str:
    jobs = enqueued(app)
    lines = [f"There are {len(jobs)} jobs{', the last:' if jobs else '.'}"]
    for job in jobs[-SHOWN:]:
        columns = f"queue={job.queue} status={job.status} org={job.org} key={job.key}"
        lines.append(f"  {job.type} {job.payload} {columns}")
    return "\n".join(lines)


# -- fixtures -----------------------------------------------------------------------------------
try:
    import pytest
except ImportError:  # with unittest there is everything but these
    pass
else:

    @pytest.fixture
    def tenure_url(tmp_path: os.PathLike[str]) -> str:
        """A database of this test alone."""
        return f"sqlite:///{tmp_path}/tenure.db"

    @pytest.fixture
    def tenure_app(tenure_url: str) -> Iterator[App]:
        """An app without tasks on that database. Override it to test your own: see `use`."""
        with closing(App(tenure_url)) as app:
            yield app

    @pytest.fixture
    def tenure_clock(tenure_app: App) -> Iterator[Clock]:
        """The clock of `tenure_app`, standing still at now."""
        with Clock(tenure_app) as clock:
            yield clock
