"""A task: a function that can also be enqueued. The call stays a call.

`Task[P, R]` is typed like the function it wraps; a leading `Context` parameter is not part of P.
"""

from __future__ import annotations

from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    ParamSpec,
    Protocol,
    TypeVar,
    overload,
)

from tenure import context, payload, policy
from tenure.errors import ConfigError
from tenure.ids import new_id, parse_id
from tenure.job import NewJob, Receipt, Terms
from tenure.record import Record

if TYPE_CHECKING:
    import datetime
    from collections.abc import Callable, Sequence

    from tenure.config import Settings
    from tenure.signature import Signature

P = ParamSpec("P")
R = TypeVar("R")


class Enqueuer(Protocol):
    """What a task needs of its app."""

    def enqueue_jobs(
        self, jobs: Sequence[NewJob], *, conn: Any = None, on_conflict: str = "return"
    ) -> list[Receipt]: ...

    async def aenqueue_jobs(
        self, jobs: Sequence[NewJob], *, conn: Any = None, on_conflict: str = "return"
    ) -> list[Receipt]: ...

    @property
    def max_payload_bytes(self) -> int: ...

    def now_ms(self) -> int: ...


class Registry(Enqueuer, Protocol):
    """What `@app.task` needs of it."""

    settings: Settings

    def register(self, task: Task[..., Any]) -> None: ...


class TaskSettings(Record, kw_only=True):
    """What the decorator said, with the category's defaults filled in."""

    name: str
    queue: str
    category: policy.Category
    retry: policy.Retry
    priority: int
    timeout: float
    process: bool
    keep: policy.Keep
    not_secret: tuple[str, ...] = ()  # paths of arguments that only look like secrets


class Options(Record, kw_only=True):
    """What `.options()` changes for one enqueue; None leaves it as it is."""

    delay_ms: int = 0
    at_ms: int | None = None
    priority: int | None = None
    queue: str | None = None
    key: str | None = None
    org: str | None = None
    project: str | None = None
    actor: tuple[str, str] | None = None
    timeout: float | None = None
    max_attempts: int | None = None
    after: tuple[str, ...] = ()
    after_failed: str = "wait"
    allow_secret: bool = False
    conn: Any = None
    on_conflict: str = "return"


class Task(Generic[P, R]):
    def __init__(
        self,
        function: Callable[..., R],
        app: Enqueuer,
        settings: TaskSettings,
        options: Options | None = None,
    ) -> None:
        self.function = function
        self.settings = settings
        self._app = app
        self._options = options or Options()
        self._signature: Signature | None = None
        self._terms: dict[tuple[str, ...], tuple[context.Acting, Terms]] = {}  # by what is waived
        self.__name__ = getattr(function, "__name__", settings.name)
        self.__doc__ = function.__doc__
        self.__wrapped__ = function

    def __repr__(self) -> str:
        return f"<Task {self.name!r} on queue {self.settings.queue!r}>"

    @property
    def name(self) -> str:
        return self.settings.name

    @property
    def signature(self) -> Signature:
        if self._signature is None:
            from tenure.signature import Signature  # msgspec and inspect: at first use, not import

            most, not_secret = self._app.max_payload_bytes, self.settings.not_secret
            self._signature = Signature(self.function, self.name, most, not_secret)
        return self._signature

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)

    def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> Receipt:
        """Store one request to run this task; durable when this returns."""
        return self._app.enqueue_jobs(
            [self._job(self.signature.pack(args, kwargs))],
            conn=self._options.conn,
            on_conflict=self._options.on_conflict,
        )[0]

    async def aenqueue(self, *args: P.args, **kwargs: P.kwargs) -> Receipt:
        receipts = await self._app.aenqueue_jobs(
            [self._job(self.signature.pack(args, kwargs))],
            conn=self._options.conn,
            on_conflict=self._options.on_conflict,
        )
        return receipts[0]

    def job(self, *args: P.args, **kwargs: P.kwargs) -> NewJob:
        """A job not yet stored, for `app.enqueue_many` and `ctx.enqueue`."""
        if self._options.conn is not None:
            raise ConfigError("options(conn=…) is for .enqueue(); give conn= to app.enqueue_many()")
        return self._job(self.signature.pack(args, kwargs))

    def job_named(self, arguments: dict[str, Any]) -> NewJob:
        return self._job(self.signature.pack_named(arguments))

    def pack_result(self, value: Any) -> str:
        """A handler's return value as JSON text; what JSON has no word for is converted first."""
        return self.signature.encode(value, f"result of {self.name!r}")

    def _job(self, text: str) -> NewJob:
        chosen = self._options
        waived = () if chosen.allow_secret else self.signature.refuse_secrets(text)
        return NewJob(
            new_id(),
            self._current_terms(waived),
            text,
            chosen.delay_ms,
            chosen.at_ms,
            chosen.key,
            chosen.after,
        )

    def _current_terms(self, waived: tuple[str, ...]) -> Terms:
        """The same object while the request context stays the same: batches group by it."""
        acting = context.current()
        known = self._terms.get(waived)
        if known is not None and known[0] is acting:
            return known[1]
        settings, chosen = self.settings, self._options
        terms = Terms(
            type=settings.name,
            queue=chosen.queue or settings.queue,
            priority=chosen.priority or settings.priority,
            category=settings.category.name,
            max_attempts=chosen.max_attempts or settings.retry.attempts,
            timeout_ms=int((chosen.timeout or settings.timeout) * 1000),
            key_ttl_ms=settings.category.key_ttl_seconds * 1000,
            org=chosen.org or acting.org,
            project=chosen.project or acting.project,
            actor=acting.actor if chosen.actor is None else context.checked_actor(chosen.actor),
            request_id=acting.request_id,
            correlation_id=acting.correlation_id,
            traceparent=acting.traceparent,
            after_failed=chosen.after_failed if chosen.after else None,
            remark=_remark(chosen.allow_secret, waived),
        )
        self._terms[waived] = (acting, terms)
        return terms

    def options(
        self,
        *,
        delay: float | datetime.timedelta | None = None,
        at: datetime.datetime | None = None,
        priority: int | None = None,
        queue: str | None = None,
        key: str | None = None,
        org: str | None = None,
        project: str | None = None,
        actor: tuple[str, str] | None = None,
        timeout: float | None = None,
        max_attempts: int | None = None,
        after: Sequence[object] = (),
        after_failed: str = "wait",
        allow_secret: bool = False,
        conn: Any = None,
        on_conflict: str = "return",
    ) -> Task[P, R]:
        """The same task with other options for what is enqueued through it."""
        if delay is not None and at is not None:
            raise ConfigError("give delay= or at=, not both")
        if on_conflict not in ("return", "error"):
            raise ConfigError(f"on_conflict is 'return' or 'error', got {on_conflict!r}")
        if after_failed not in ("wait", "cancel"):
            raise ConfigError(f"after_failed is 'wait' or 'cancel', got {after_failed!r}")
        if max_attempts is not None:
            policy.Retry(attempts=max_attempts)  # checks the range
        if timeout is not None:
            checked_timeout(timeout)
        chosen = Options(
            delay_ms=0 if delay is None else int(policy.delay_seconds(delay) * 1000),
            at_ms=None if at is None else policy.due_ms(at, self._app.now_ms()),
            priority=None if priority is None else policy.priority(priority),
            queue=None if queue is None else policy.queue_name(queue),
            key=None if key is None else policy.name(key, "key", limit=512),
            org=None if org is None else policy.name(org, "org"),
            project=None if project is None else policy.name(project, "project"),
            actor=actor,
            timeout=timeout,
            max_attempts=max_attempts,
            after=tuple(dict.fromkeys(parse_id(getattr(id, "id", id)) for id in after)),
            after_failed=after_failed,
            allow_secret=allow_secret,
            conn=conn,
            on_conflict=on_conflict,
        )
        bound: Task[P, R] = Task(self.function, self._app, self.settings, chosen)
        bound._signature = self.signature
        return bound


def checked_timeout(seconds: object) -> float:
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise ConfigError(f"timeout is a number of seconds, got {type(seconds).__name__}")
    if not 0.01 <= seconds <= 30 * 86_400:
        raise ConfigError(f"timeout must be 0.01 s to 30 days, got {seconds!r}")
    return float(seconds)


def checked_paths(paths: Sequence[str], function: Callable[..., Any]) -> tuple[str, ...]:
    """`not_secret=("token", "users[].reset.token")`: each begins with the name of a parameter."""
    from inspect import signature  # 7 ms, for those who say so

    from tenure.secrecy import any_index

    names = list(signature(function).parameters)
    given = () if isinstance(paths, str) else tuple(paths)
    if not given or not all(isinstance(path, str) for path in given):
        raise ConfigError('not_secret= takes a list of paths, such as ["token", "reset.token"]')
    for path in given:
        first = path.partition(".")[0].partition("[")[0]
        if first not in names:
            raise ConfigError(
                f"not_secret= got {path!r}, but {getattr(function, '__name__', 'it')} has no "
                f"parameter {first!r}; it takes ({', '.join(names)})"
            )
    return tuple(any_index(path) for path in given)


def _remark(allow_secret: bool, waived: tuple[str, ...]) -> str | None:
    """What of the secret check was waived, for the audit trail."""
    if allow_secret:
        return payload.encode({"allow_secret": True})
    return payload.encode({"not_secret": list(waived)}) if waived else None


class TaskDecorator:
    """`@app.task(...)` with its options; checked when the module is imported, not at first use."""

    def __init__(
        self,
        app: Registry,
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
    ) -> None:
        if keep is not None and not isinstance(keep, policy.Keep):
            raise ConfigError("keep= takes a tenure.Keep, such as tenure.Keep(completed_last=100)")
        if retry is not None and not isinstance(retry, policy.Retry):
            raise ConfigError("retry= takes a tenure.Retry, such as tenure.Retry(attempts=3)")
        kind = policy.category(category)
        self._app = app
        self._name = None if name is None else policy.name(name, "a task's name")
        self._queue = kind.queue if queue is None else policy.queue_name(queue)
        self._category = kind
        self._retry = kind.retry if retry is None else retry
        self._priority = policy.priority(priority)
        self._timeout = app.settings.timeout if timeout is None else checked_timeout(timeout)
        self._process = process
        self._keep = keep or policy.Keep()
        self._not_secret = not_secret

    @overload
    def __call__(self, function: Callable[Concatenate[context.Context, P], R], /) -> Task[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> Task[P, R]: ...

    def __call__(self, function: Callable[..., Any], /) -> Task[..., Any]:
        settings = TaskSettings(
            name=self._name or policy.name(function.__name__, "a task's name"),
            queue=self._queue,
            category=self._category,
            retry=self._retry,
            priority=self._priority,
            timeout=self._timeout,
            process=self._process,
            keep=self._keep,
            not_secret=checked_paths(self._not_secret, function) if self._not_secret else (),
        )
        task: Task[..., Any] = Task(function, self._app, settings)
        self._app.register(task)
        return task
