"""The front door and the composition root: the one module that names concrete stores.

`App` registers tasks and offers every call a program makes. The store is opened at first use.
"""

from __future__ import annotations

import os
import time
from _thread import allocate_lock  # threading.Lock, without the 1 ms threading takes to import
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, overload

from tenure import policy
from tenure.context import HOOKS, Context, Lifecycle
from tenure.errors import ConfigError, DuplicateTask, UnknownTask
from tenure.job import Actor, NewJob, Receipt
from tenure.operations.calls import OperatorCalls
from tenure.task import Task, TaskDecorator

if TYPE_CHECKING:
    from tenure.config import Settings
    from tenure.engine.client import Client
    from tenure.engine.worker_options import Summary
    from tenure.operations import Operations
    from tenure.store import Store
    from tenure.wakeup import Wakeup

P = ParamSpec("P")
R = TypeVar("R")
Hook = TypeVar("Hook", bound=Callable[..., Any])


def sqlite_path(url: str) -> str:
    """`sqlite:///relative.db`, `sqlite:////absolute.db`."""
    path = url.removeprefix("sqlite:///")
    if path == url or not path:
        raise ConfigError(
            f"{url!r} names no file: write sqlite:///jobs.db (in this directory) or "
            "sqlite:////var/lib/jobs.db (absolute, four slashes)"
        )
    if ":memory:" in path or path.startswith("file:"):
        raise ConfigError(
            "an in-memory database cannot be shared between a program and its workers: use a file, "
            "for tests one in a temporary directory"
        )
    return path


def open_store(settings: Settings) -> Store:
    scheme = settings.url.partition(":")[0]
    if scheme == "sqlite":
        from tenure.stores.sqlite import SqliteStore

        return SqliteStore(
            sqlite_path(settings.url),
            busy_timeout=settings.busy_timeout,
            module=settings.sqlite_module,
            allow_network=settings.allow_network_file,
            audit=settings.audit,
        )
    if scheme in ("postgresql", "postgres"):
        from tenure.stores.postgres import PostgresStore

        return PostgresStore(
            settings.url,
            schema=settings.schema,
            timeout=settings.busy_timeout,
            audit=settings.audit,
            notify=settings.notify,
            connections=settings.connections,
            enqueue_timeout=settings.enqueue_timeout,
        )
    raise ConfigError(
        f"no store for {scheme!r} URLs in this version; use sqlite:///file.db or "
        "postgresql://user@host/name"
    )


def open_wakeup(settings: Settings, store: Store) -> Wakeup:
    if not settings.url.startswith("sqlite:"):
        from tenure.wakeups.postgres import PostgresWakeup

        url = settings.listen_url or settings.url
        poll = settings.poll_interval_ms / 1000
        return PostgresWakeup(url, settings.schema, enabled=settings.notify, poll_seconds=poll)
    from tenure.wakeups.sqlite import SqliteWakeup

    return SqliteWakeup(os.path.abspath(sqlite_path(settings.url)), store, enabled=settings.notify)


def run_worker(spec: str, **options: Any) -> Summary:
    """`tenure worker`: a supervisor here, children that import the app `spec` names."""
    from tenure.engine.worker import run_worker

    return run_worker(spec, open_store, open_wakeup, **options)


class App(OperatorCalls):
    """A set of tasks and the place their jobs are stored.

    `url` defaults to $TENURE_URL, then `tenure.toml`, then `sqlite:///tenure.db`; any other
    setting can be given by name. `secrets` are the references `ctx.secret` may ask for, or their
    beginnings: `["STRIPE_KEY", "env:MAIL_*", "file:/run/secrets/*"]`; without them it gives none.
    """

    def __init__(
        self, url: str | None = None, *, secrets: Sequence[str] = (), **settings: Any
    ) -> None:
        from tenure.config import Settings  # 9 ms with dataclasses, which not every module needs

        self.settings = Settings.load(url=url, **settings)
        self.secrets: tuple[str, ...] = ()
        if secrets:
            from tenure.reference import declared  # 2 ms, for those who have some

            self.secrets = declared(secrets)
        self.tasks: dict[str, Task[..., Any]] = {}
        self.hooks: dict[str, list[Callable[[Lifecycle], Any]]] = {}
        self.secret_provider: Callable[[str], str | None] | None = None
        # A decorator for every handler while it runs as a job, `def` and `async def` alike.
        self.around: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
        self._client: Client | None = None
        self._operations: Operations | None = None
        self._lock = allocate_lock()

    def __repr__(self) -> str:
        return f"<tenure.App with {len(self.tasks)} tasks>"

    # -- tasks --------------------------------------------------------------------------------
    @overload
    def task(self, function: Callable[Concatenate[Context, P], R], /) -> Task[P, R]: ...
    @overload
    def task(self, function: Callable[P, R], /) -> Task[P, R]: ...
    @overload
    def task(
        self,
        /,
        *,
        name: str | None = None,
        queue: str | None = None,
        category: str = "default",
        retry: policy.Retry | None = None,
        priority: int = 5,
        timeout: float | None = None,
        process: bool = False,
        keep: policy.Keep | None = None,
        not_secret: Sequence[str] = (),
        aliases: Sequence[str] = (),
    ) -> TaskDecorator: ...

    def task(self, function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
        """Make a function a task: `@app.task`, or `@app.task(queue=…, retry=…, timeout=…)`."""
        decorate = TaskDecorator(self, **options)
        return decorate if function is None else decorate(function)

    def register(self, task: Task[..., Any]) -> None:
        """Under its name and the names it had: jobs of all of them are claimed and run."""
        names = (task.name, *task.settings.aliases)
        for name in names:
            known = self.tasks.get(name)
            if known is not None:
                raise DuplicateTask(
                    f"two tasks are named {name!r}: {_where(known.function)} and "
                    f"{_where(task.function)}. Jobs are stored under the name: give one of them "
                    "name=, or take it out of aliases=."
                )
        self.tasks.update(dict.fromkeys(names, task))

    def find_task(self, name: str) -> Task[..., Any]:
        task = self.tasks.get(name)
        if task is None:
            from difflib import get_close_matches

            close = get_close_matches(name, self.tasks, n=1)
            guess = f" Did you mean {close[0]!r}?" if close else ""
            known = ", ".join(sorted(self.tasks)) or "none"
            raise UnknownTask(f"this app has no task {name!r}.{guess} It knows: {known}.")
        return task

    def on(self, kind: str) -> Callable[[Hook], Hook]:
        """A lifecycle hook: `@app.on("failed")`; it gets a `tenure.Lifecycle`."""
        if kind not in HOOKS:
            raise ConfigError(f"hooks are {', '.join(HOOKS)}; got {kind!r}")

        def register(hook: Hook) -> Hook:
            self.hooks.setdefault(kind, []).append(hook)
            return hook

        return register

    # -- enqueue ------------------------------------------------------------------------------
    def enqueue(
        self, task: str, arguments: dict[str, Any] | None = None, **options: Any
    ) -> Receipt:
        """By name, checked against the signature; options as in `Task.options`."""
        job, how = self._named(task, arguments, options)
        return self.enqueue_jobs([job], **how)[0]

    async def aenqueue(
        self, task: str, arguments: dict[str, Any] | None = None, **options: Any
    ) -> Receipt:
        job, how = self._named(task, arguments, options)
        return (await self.aenqueue_jobs([job], **how))[0]

    def _named(
        self, task: str, arguments: dict[str, Any] | None, options: dict[str, Any]
    ) -> tuple[NewJob, dict[str, Any]]:
        """The job, and how it is to be stored: those two options are not about the job."""
        found = self.find_task(task)
        bound = found.options(**options) if options else found
        how = {name: value for name, value in options.items() if name in ("conn", "on_conflict")}
        return bound.job_named(dict(arguments or {})), how

    def enqueue_many(self, jobs: Sequence[NewJob], *, conn: Any = None) -> list[Receipt]:
        """All or none, one commit; receipts in the order given. With `conn`, in the caller's own
        transaction (`await app.aenqueue_jobs(jobs, conn=…)` on a connection of an async driver)."""
        return self.client.enqueue(jobs, conn=conn)

    def enqueue_jobs(
        self, jobs: Sequence[NewJob], *, conn: Any = None, on_conflict: policy.OnConflict = "return"
    ) -> list[Receipt]:
        return self.client.enqueue(jobs, conn=conn, on_conflict=on_conflict)

    async def aenqueue_jobs(
        self, jobs: Sequence[NewJob], *, conn: Any = None, on_conflict: policy.OnConflict = "return"
    ) -> list[Receipt]:
        return await self.client.aenqueue(jobs, conn=conn, on_conflict=on_conflict)

    def _joined(self, conn: Any) -> Any:
        """The connection an enqueue joins: the caller's; a framework's app may know of one."""
        return conn

    # -- operators: what programs and people read and change ------------------------------------
    @property
    def operations(self) -> Operations:
        """All that operators can do, for every tenant. The calls of `OperatorCalls` use it."""
        if self._operations is None:
            from tenure.operations import Operations
            from tenure.operations.scope import Scope

            self._operations = Operations(self, Scope())
        return self._operations

    def migrate(self) -> list[str]:
        """Create or upgrade the tables; the names of what ran. Safe to call at every start."""
        return self.store.migrate()

    # -- workers ------------------------------------------------------------------------------
    def run_worker(
        self,
        *,
        queues: str | Sequence[str] | None = None,
        concurrency: int | None = None,
        drain: bool = False,
    ) -> Summary:
        """Work in this process until drained, or until SIGTERM or SIGINT."""
        from tenure.engine.embedded import run_embedded

        return run_embedded(self, queues=queues, concurrency=concurrency, drain=drain)

    @contextmanager
    def worker(
        self, *, queues: str | Sequence[str] | None = None, concurrency: int | None = None
    ) -> Iterator[None]:
        """A worker in this process for the length of a block; it stops at the end."""
        from tenure.engine.embedded import embedded_worker

        with embedded_worker(self, queues=queues, concurrency=concurrency):
            yield

    def open_wakeup(self) -> Wakeup:
        return open_wakeup(self.settings, self.store)

    # -- parts --------------------------------------------------------------------------------
    @property
    def client(self) -> Client:
        if self._client is None:
            from tenure.engine.client import Client

            with self._lock:
                if self._client is None:
                    self._client = Client(open_store(self.settings))
        return self._client

    @property
    def store(self) -> Store:
        return self.client.store

    @property
    def max_payload_bytes(self) -> int:
        return self.settings.max_payload_bytes

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def close(self) -> None:
        """Close connections and threads; the app may be used again and reopens."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()
            client.store.close()


def _where(function: Callable[..., Any]) -> str:
    code = getattr(function, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else repr(function)


__all__ = ["Actor", "App", "open_store", "open_wakeup", "run_worker", "sqlite_path"]
