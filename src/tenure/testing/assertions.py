"""What was enqueued, and assertions about it that list what there is instead."""

from __future__ import annotations

from typing import Any, TypedDict, Unpack

from tenure import payload
from tenure.app import App
from tenure.errors import ConfigError, PayloadError
from tenure.job import Job
from tenure.task import Task
from tenure.testing.rehearsal import Rehearsal

SHOWN = 20  # jobs listed by a failed assertion


class Where(TypedDict, total=False):
    args: dict[str, Any] | None  # some of the arguments, by name
    queue: str | None
    key: str | None
    org: str | None
    status: str | None


def enqueued(app: App | Rehearsal, task: Task[..., Any] | str | None = None) -> list[Job]:
    """Every job of the app's store, or of one task, whatever became of it; oldest first. Of a
    `context(…)`: what its task has enqueued through it."""
    if task is not None:
        return _found(app, task)[0]
    if isinstance(app, Rehearsal):
        return app.enqueued
    refuse_transaction(app)
    return [*app.find()][::-1]


def assert_enqueued(
    app: App | Rehearsal,
    task: Task[..., Any] | str,
    *,
    times: int | None = None,
    **where: Unpack[Where],
) -> list[Job]:
    """The jobs of a task that fit `args=`, `queue=`, `key=`, `org=` and `status=`: at least one,
    or exactly `times`. Else an AssertionError that lists what there is instead."""
    __tracebackhide__ = True
    jobs, wanted = _found(app, task, **where)
    if len(jobs) == times or (times is None and jobs):
        return jobs
    number = "at least one job" if times is None else f"exactly {times}"
    raise AssertionError(f"expected {number} of {wanted}, found {len(jobs)}. {_listed(app)}")


def refute_enqueued(
    app: App | Rehearsal, task: Task[..., Any] | str, **where: Unpack[Where]
) -> None:
    """No job of the task fits."""
    __tracebackhide__ = True
    assert_enqueued(app, task, times=0, **where)


def refuse_transaction(app: App) -> None:
    """What a Django test's own transaction holds is seen by nobody else: no job would be found,
    whatever was enqueued, and on SQLite none could run."""
    if app._joined(None) is not None:
        raise ConfigError(
            "this test is in a transaction on the database of the jobs (a TestCase, or atomic()), "
            "and nobody else sees what it has enqueued: make it a TransactionTestCase, or give the "
            "app a file of the test's own, `with tenure.testing.use(app, directory):`"
        )


def _found(
    app: App | Rehearsal,
    task: Task[..., Any] | str,
    args: dict[str, Any] | None = None,
    **where: str | None,
) -> tuple[list[Job], str]:
    """What fits, oldest first, and in words what was asked for."""
    args = args or {}
    if not isinstance(task, Task):
        if isinstance(app, Rehearsal):
            raise ConfigError("a context knows no names: give the task itself")
        task = app.find_task(task)
    if strange := sorted(args.keys() - set(task.signature.names)):
        raise ConfigError(f"Task {task.name!r} takes {task.signature.names}, not {strange}")
    try:
        stored = payload.decode(task.signature.encode(args, "args"))  # datetimes and the like
    except PayloadError:
        stored = args  # only to be compared, such as mock.ANY
    if isinstance(app, Rehearsal):
        listed = [job for job in app.enqueued[::-1] if job.type == task.name]
        listed = [j for j in listed if all(getattr(j, n) == v for n, v in where.items())]
    else:
        refuse_transaction(app)
        listed = [*app.find(type=task.name, **where)]
    jobs = [
        job
        for job in listed
        if all(n in job.payload and job.payload[n] in (args[n], stored[n]) for n in args)
    ]
    details = "".join(f", {name} {value!r}" for name, value in where.items())
    return jobs[::-1], f"{task.name!r}{f' with {args}' if args else ''}{details}"


def _listed(app: App | Rehearsal) -> str:
    jobs = enqueued(app)
    lines = [f"There are {len(jobs)} jobs{', the last:' if jobs else '.'}"]
    for job in jobs[-SHOWN:]:
        columns = f"queue={job.queue} status={job.status} org={job.org} key={job.key}"
        lines.append(f"  {job.type} {job.payload} {columns}")
    return "\n".join(lines)
