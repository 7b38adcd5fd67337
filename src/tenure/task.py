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
from tenure.errors import ArgumentError, ConfigError, TaskError
from tenure.ids import new_id, parse_id
from tenure.job import NewJob, Receipt, Terms
from tenure.record import Record

if TYPE_CHECKING:
    import datetime
    from collections.abc import Callable, Sequence

    from tenure.config import Settings
    from tenure.signature import Signature

_VARIADIC = 0x04 | 0x08  # of a code object's flags; `inspect` takes 7 ms to import
_GENERATOR = 0x20 | 0x200

P = ParamSpec("P")
R = TypeVar("R")


class Enqueuer(Protocol):
    """What a task needs of its app."""

    def enqueue_jobs(
        self, jobs: Sequence[NewJob], *, conn: Any = None, on_conflict: policy.OnConflict = "return"
    ) -> list[Receipt]: ...

    async def aenqueue_jobs(
        self, jobs: Sequence[NewJob], *, conn: Any = None, on_conflict: policy.OnConflict = "return"
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
    aliases: tuple[str, ...] = ()  # names it had: jobs stored under them run, too


class Options(Record, kw_only=True):
    """What `.options()` changes for one enqueue; None leaves it as it is."""

    delay_ms: int = 0
    at_ms: int | None = None
    priority: int | None = None
    queue: str | None = None
    key: str | None = None
    unique: policy.Unique | None = None
    org: str | None = None
    project: str | None = None
    actor: tuple[str, str] | None = None
    timeout: float | None = None
    max_attempts: int | None = None
    after: tuple[str, ...] = ()
    after_failed: policy.AfterFailed = "wait"
    allow_secret: bool = False
    conn: Any = None
    on_conflict: policy.OnConflict = "return"


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
        self._takes_context = _seems_to_take_context(function)

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

    # A task that takes a context is called with one; where it comes from: tenure.testing.context.
    @overload
    def __call__(self, context: context.Context, /, *args: P.args, **kwargs: P.kwargs) -> R: ...
    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...

    def __call__(self, *args: Any, **kwargs: Any) -> R:  # type: ignore[misc]  # mypy: P after one
        if self._takes_context and not (args and isinstance(args[0], context.Context)):
            raise ArgumentError(
                f"Task {self.name!r} takes a Context first, which a worker gives it. To call it "
                f"yourself: {self.__name__}(tenure.testing.context(), …); .enqueue(…) takes none."
            )
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
            key_ttl_ms=0 if chosen.unique else settings.category.key_ttl_seconds * 1000,
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
        unique: policy.Unique | None = None,
        org: str | None = None,
        project: str | None = None,
        actor: tuple[str, str] | None = None,
        timeout: float | None = None,
        max_attempts: int | None = None,
        after: Sequence[object] = (),
        after_failed: policy.AfterFailed = "wait",
        allow_secret: bool = False,
        conn: Any = None,
        on_conflict: policy.OnConflict = "return",
    ) -> Task[P, R]:
        """The same task with other options for what is enqueued through it."""
        if delay is not None and at is not None:
            raise ConfigError("give delay= or at=, not both")
        policy.choice(on_conflict, "on_conflict", ("return", "error"))
        policy.choice(after_failed, "after_failed", ("wait", "cancel"))
        if unique is not None:
            policy.choice(unique, "unique", ("pending",))
            if key is None:
                raise ConfigError(
                    "unique= says how long a key holds: give key=, too. tenure.stable_key(…) makes "
                    "one from arguments"
                )
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
            unique=unique,
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


def _seems_to_take_context(function: Callable[..., Any]) -> bool:
    """By the annotation as it is written, for a message: `Signature` knows, and takes 29 ms."""
    code = getattr(function, "__code__", None)
    if code is None or not code.co_argcount:
        return False
    hint = getattr(function, "__annotations__", {}).get(code.co_varnames[0])
    if isinstance(hint, str):
        return hint.rpartition(".")[2] == "Context"
    return hint is context.Context


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


def _checked_aliases(aliases: Sequence[str]) -> tuple[str, ...]:
    if isinstance(aliases, str):
        raise ConfigError(f"aliases= takes a list of names, such as [{aliases!r}]")
    return tuple(policy.name(alias, "an alias") for alias in aliases)


def refuse_strange(function: Any, *, named: bool = False) -> None:
    """Only a plain function can be a task: workers in other processes find it by its name, and its
    arguments are stored by theirs. Said where it is decorated, not when a job fails."""
    name = getattr(function, "__name__", type(function).__name__)
    inner = function
    while hasattr(inner, "__wrapped__"):  # functools.wraps: its signature is the one inside
        inner = inner.__wrapped__
    code = getattr(inner, "__code__", None)
    why = None
    if isinstance(function, type):
        why = "a class; write a function that makes one and calls it"
    elif hasattr(function, "func") and hasattr(function, "keywords"):
        why = "a partial, which has no name; write a function that calls it"
    elif isinstance(function, (staticmethod, classmethod)):
        why = "a static or class method; put @app.task below @staticmethod, next to the function"
    elif getattr(function, "__self__", None) is not None and hasattr(function, "__func__"):
        why = "a method of an object that no worker has; write a function that calls it"
    elif code is None:
        why = f"of type {type(function).__name__}; write a function that calls it"
    elif name == "<lambda>" and not named:
        why = "a lambda, which has none; use def, or give it name="
    elif code.co_varnames[: min(code.co_argcount, 1)] in (("self",), ("cls",)):
        why = f"a method: no worker has a {code.co_varnames[0]!r} for it; move it out of its class"
    elif code.co_flags & _GENERATOR:
        why = "a generator, whose body a call does not run; return a list, or enqueue a job an item"
    if why is not None:
        raise TaskError(f"a task is a function with a name of its own: {name} is {why}.")
    if code is not None and code.co_flags & _VARIADIC:
        raise TaskError(
            f"Task {name!r} takes *args or **kwargs: a job's arguments are stored by name, so give "
            "each one a parameter of its own (a list or dict parameter holds many)."
        )


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
        aliases: Sequence[str] = (),
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
        self._aliases = _checked_aliases(aliases)

    @overload
    def __call__(self, function: Callable[Concatenate[context.Context, P], R], /) -> Task[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> Task[P, R]: ...

    def __call__(self, function: Callable[..., Any], /) -> Task[..., Any]:
        refuse_strange(function, named=self._name is not None)
        name = self._name or policy.name(function.__name__, "a task's name")
        if name in self._aliases:
            raise ConfigError(f"task {name!r} has its own name among its aliases=: take it out")
        settings = TaskSettings(
            name=name,
            queue=self._queue,
            category=self._category,
            retry=self._retry,
            priority=self._priority,
            timeout=self._timeout,
            process=self._process,
            keep=self._keep,
            not_secret=checked_paths(self._not_secret, function) if self._not_secret else (),
            aliases=self._aliases,
        )
        task: Task[..., Any] = Task(function, self._app, settings)
        self._app.register(task)
        return task
