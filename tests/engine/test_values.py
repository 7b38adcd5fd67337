"""Values at their edges: exactly what went in comes out, or a clear error says why not."""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import re
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec
import psycopg
import pydantic
import pytest

import tenure
from places import Place, only

NOW = tenure.Retry(attempts=5, backoff=tenure.Fixed(0))
ONCE = tenure.Retry(attempts=1)
EDGES = [2**63 - 1, -(2**63), 2**53 + 1, -(2**53) - 1, 2**62, 1234567890123456789, 10**18, 0]


def run(app: tenure.App, task: tenure.Task[..., Any], *args: Any) -> tenure.Job:
    receipt = task.enqueue(*args)
    app.run_worker(drain=True)
    job = app.get(receipt.id)
    assert job is not None
    return job


# -- 64 bits ----------------------------------------------------------------------------------


def test_integers_of_64_bits_come_back_exactly(app: tenure.App) -> None:
    """As an argument, one by one and in a batch, in a follow-up, a step, progress, a result."""
    seen: list[Any] = []

    @app.task
    def child(numbers: list[int]) -> list[int]:
        return numbers

    @app.task
    def work(ctx: tenure.Context, numbers: list[int], one: int, any: dict[str, Any]) -> Any:
        ctx.progress(50, numbers=numbers)
        first = ctx.step("step", lambda: {"numbers": numbers})
        seen.append((numbers, one, any, first))
        ctx.enqueue(child, numbers)
        return {"numbers": numbers}

    arguments: dict[str, Any] = {"numbers": EDGES, "one": 2**63 - 1, "any": {"deep": [EDGES]}}
    one = app.enqueue("work", arguments)
    long = app.enqueue("work", arguments | {"any": {"deep": [EDGES], "pad": "x" * 9000}})
    many = app.enqueue_many([work.job(**arguments), work.options(key="k").job(**arguments)])
    app.run_worker(drain=True)

    for receipt in (one, *many, long):
        job = app.get(receipt.id)
        assert job is not None
        assert job.payload | {"any": {"deep": job.payload["any"]["deep"]}} == arguments
        assert job.result == {"numbers": EDGES}
        assert job.progress == {"percent": 50, "numbers": EDGES}
        assert app.result(receipt.id) == {"numbers": EDGES}
    assert len(seen) == 4
    for numbers, biggest, more, step in seen:
        assert (numbers, biggest, more["deep"], step) == (
            EDGES, 2**63 - 1, [EDGES], {"numbers": EDGES},
        )  # fmt: skip
    results = [job.result for job in app.find(type="child")]
    assert results == [EDGES] * 4
    assert all(type(number) is int for number in results[0])


def test_integers_of_64_bits_survive_a_retry_a_transaction_and_a_replay(app: tenure.App) -> None:
    @app.task(retry=ONCE)
    def work(ctx: tenure.Context, n: int) -> None:
        if n == 2**63 - 1:
            raise RuntimeError(f"no {n}, {n:,} or {-n}; not {n + 1}")
        with ctx.transaction():
            ctx.result([n])

    job = run(app, work, 2**63 - 1)
    assert job.error == (
        "RuntimeError: no [redacted], [redacted] or -[redacted]; not 9223372036854775808"
    )
    app.replay(job.id, {"n": 1 - 2**62})
    app.run_worker(drain=True)

    assert app.get(job.id).payload == {"n": 1 - 2**62}  # type: ignore[union-attr]
    assert app.result(job.id) == [1 - 2**62]


def test_integers_of_64_bits_on_a_callers_connection(app: tenure.App, place: Place) -> None:
    @app.task
    def work(numbers: list[int]) -> list[int]:
        return numbers

    app.migrate()
    if place.kind == "sqlite":
        connection: Any = sqlite3.connect(place.url.removeprefix("sqlite:///"))
    else:
        connection = psycopg.connect(place.url)
    with closing(connection), connection:
        receipts = [work.options(conn=connection).enqueue(EDGES)]
        receipts += app.enqueue_many([work.job(EDGES), work.job(EDGES)], conn=connection)
    app.run_worker(drain=True)

    assert [app.result(receipt.id) for receipt in receipts] == [EDGES] * 3


@only("postgres", "SQLite has no function to call")
def test_integers_of_64_bits_through_sql(app: tenure.App, place: Place) -> None:
    @app.task
    def work(numbers: list[int]) -> list[int]:
        return numbers

    app.migrate()
    jobs = msgspec.json.encode([{"type": "work", "payload": {"numbers": EDGES}}]).decode()
    with psycopg.connect(place.url) as connection:
        connection.execute("SELECT tenure.enqueue(%s::jsonb)", (jobs,))
    app.run_worker(drain=True)

    (job,) = app.find(type="work")
    assert (job.payload, job.result) == ({"numbers": EDGES}, EDGES)


@pytest.mark.parametrize("number", [2**63, -(2**63) - 1, 2**64 - 1, 2**64, 10**30])
def test_beyond_64_bits_is_a_clear_error(app: tenure.App, number: int) -> None:
    @app.task
    def work(value: Any = None) -> Any:
        return {"n": [number]}

    @app.task(retry=NOW)
    def step(ctx: tenure.Context) -> None:
        ctx.step("step", lambda: number)

    @app.task(retry=NOW)
    def progress(ctx: tenure.Context) -> None:
        ctx.progress(1, n=number)

    with pytest.raises(tenure.PayloadError, match=r"\.value\[1\] is an integer beyond 64 bits"):
        work.enqueue([1, number])
    for task in (work, step, progress):
        job = run(app, task)
        assert (job.status, job.error_code, job.attempts) == ("failed", "RESULT_ERROR", 1)
        assert "is an integer beyond 64 bits" in str(job.error)


# -- too deep, circular -----------------------------------------------------------------------
@dataclasses.dataclass
class Node:
    next: Any = None


class Link(msgspec.Struct):
    next: Any = None


class Model(pydantic.BaseModel):
    next: Any = None


class Typed(pydantic.BaseModel):
    next: Typed | None = None


def nested(make: Callable[[Any], Any], levels: int) -> Any:
    value: Any = None
    for _ in range(levels):
        value = make(value)
    return value


def circular(make: Callable[[Any], Any]) -> Any:
    value = make(None)
    if isinstance(value, list):
        value[0] = value
    elif isinstance(value, dict):
        value["next"] = value
    else:
        value.next = value
    return value


KINDS: dict[str, Callable[[Any], Any]] = {
    "list": lambda inner: [inner],
    "dict": lambda inner: {"next": inner},
    "dataclass": Node,
    "struct": Link,
    "model": lambda inner: Model(next=inner),
    "typed model": lambda inner: Typed.model_construct(next=inner),
}
SHAPES: dict[str, Callable[[Callable[[Any], Any]], Any]] = {
    "100": lambda make: nested(make, 100),
    "1,000": lambda make: nested(make, 1_000),
    "5,000": lambda make: nested(make, 5_000),
    "circular": circular,
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_too_deep_and_circular_arguments(
    app: tenure.App, count: Callable[[], int], kind: str, shape: str
) -> None:
    @app.task
    def work(name: str, value: Any) -> None: ...

    app.migrate()
    value = SHAPES[shape](KINDS[kind])

    for inner in (value, [value], {"a": [value]}):
        with pytest.raises(tenure.PayloadError, match=r"arguments of 'work'\.value"):
            work.enqueue("a", inner)
    with pytest.raises(tenure.PayloadError, match=r"arguments of 'work'\.value"):
        app.enqueue("work", {"name": "a", "value": value})

    assert count() == 0


@pytest.mark.parametrize("handler", ["def", "async"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_too_deep_and_circular_results(
    app: tenure.App, kind: str, shape: str, handler: str
) -> None:
    """Of the job, of a step, in progress, of a transaction: failed, and not done again."""
    value = SHAPES[shape](KINDS[kind])

    async def astep() -> Any:
        return value

    def body(ctx: tenure.Context, how: str) -> Any:
        if how == "step":
            ctx.step("step", lambda: value)
        if how == "progress":
            ctx.progress(50, value=value)
        if how == "transaction":
            with ctx.transaction():
                ctx.result(value)
        return value

    async def abody(ctx: tenure.Context, how: str) -> Any:
        if how == "transaction":
            return value
        if how == "step":
            await ctx.step("step", astep)
        await asyncio.sleep(0)
        return body(ctx, how)

    work = app.task(name="work", retry=NOW)(body if handler == "def" else abody)
    app.enqueue_many([work.job(how) for how in ("result", "step", "progress", "transaction")])
    app.run_worker(drain=True)

    for job in app.find():
        assert (job.status, job.error_code, job.attempts) == ("failed", "RESULT_ERROR", 1), job
        assert re.search("nested deeper|contains itself|is of type|that raised V", str(job.error))


@pytest.mark.parametrize("levels", [100, 1_100, 5_000])
def test_arguments_that_somebodys_sql_has_stored(
    app: tenure.App, place: Place, levels: int
) -> None:
    """No enqueue of ours lets them pass; a row changed by hand is an error, not a crash."""

    @app.task(retry=NOW)
    def work(value: list[Any]) -> str:
        raise RuntimeError("ran")

    receipt = work.enqueue([])
    deep = '{"value":' + "[" * levels + "]" * levels + "}"
    place.sql("UPDATE tenure_jobs SET payload = ? WHERE type = 'work'", deep)
    app.run_worker(drain=True)

    ((status, code, error),) = place.sql("SELECT status, error_code, error FROM tenure_jobs")
    if levels == 100:
        assert (status, code) == ("dead_letter", "RuntimeError")
    else:
        assert (status, code) == ("failed", "VALIDATION_ERROR")
        assert error.startswith("ArgumentError: Task 'work': its arguments are not JSON, or nested")
    assert receipt.id


# -- values that misbehave --------------------------------------------------------------------


class Colour(enum.Enum):
    RED = "red"


class Rude:
    """Whatever it is asked, it raises."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("hunter2")

    def __str__(self) -> str:
        raise SystemExit("hunter2")

    __repr__ = __iter__ = __len__ = __bool__ = __str__  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("hunter2")

    __hash__ = None  # type: ignore[assignment]


@dataclasses.dataclass
class Picky:
    value: Any

    def __eq__(self, other: object) -> bool:
        raise ValueError("the truth of an array is ambiguous")

    __hash__ = None  # type: ignore[assignment]


class Dumps:
    def model_dump(self, mode: str) -> Any:
        raise ZeroDivisionError("hunter2")


@pytest.mark.parametrize("value", [Rude(), [Rude()], Dumps(), {"a": Dumps()}], ids=range(4))
def test_values_that_cannot_even_be_asked(app: tenure.App, value: Any) -> None:
    @app.task
    def work(what: Any = None) -> Any:
        return value

    with pytest.raises(tenure.PayloadError) as caught:
        work.enqueue(value)
    job = run(app, work)

    assert "hunter2" not in str(caught.value)
    assert (job.status, job.error_code, job.attempts) == ("failed", "RESULT_ERROR", 1)
    assert "hunter2" not in str(job.error)


def test_an_argument_that_cannot_be_compared_is_refused(app: tenure.App) -> None:
    @app.task
    def work(what: Picky) -> None: ...

    with pytest.raises(tenure.PayloadError, match="is of type Picky"):
        work.enqueue(Picky(1))


def test_an_enum_s_value_is_not_shown(app: tenure.App) -> None:
    @app.task
    def work(colour: Colour) -> None: ...

    with pytest.raises(tenure.ArgumentError, match=r"argument colour: invalid enum value$"):
        app.enqueue("work", {"colour": "hunter2 - at `$.x`"})


@pytest.mark.parametrize("handler", ["def", "async"])
@pytest.mark.parametrize("how", ["raise", "cause", "fail", "cancel", "code", "snooze", "name"])
def test_words_that_cannot_be_said_harm_nobody(app: tenure.App, how: str, handler: str) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise SystemExit("hunter2")

        @property
        def code(self) -> str:
            raise KeyboardInterrupt("hunter2")

    class Sly(str):
        __slots__ = ()

        def replace(self, *_: Any) -> str:  # type: ignore[override]
            return "hunter2"

        __getitem__ = encode = replace  # type: ignore[assignment]

    class Tells(Exception):
        def __str__(self) -> str:
            return Sly("plain words")

    def body() -> Any:
        if how == "raise":
            raise Mute
        if how == "cause":
            raise Tells
        if how == "code":
            error = RuntimeError("no")
            error.code = Sly("C1")  # type: ignore[attr-defined]
            raise error
        if how == "name":
            raise type("\ud800\0 " + "x" * 5000, (Exception,), {})
        value: Any = Rude()
        return {
            "fail": lambda: tenure.Fail(value, code=value),
            "cancel": lambda: tenure.Cancel(value),
            "snooze": lambda: tenure.Snooze(value),
        }[how]()

    async def abody() -> Any:
        return body()

    work = app.task(name="work", retry=ONCE)(body if handler == "def" else abody)
    neighbour = app.task(name="neighbour")(lambda: "fine")
    other = neighbour.enqueue()
    job = run(app, work)

    assert app.result(other.id) == "fine"
    assert job.status in ("failed", "cancelled", "dead_letter")
    told = f"{job.error} {job.error_code} {[event.data for event in app.events(job.id)]}"
    assert "hunter2" not in told
    assert len(told) < 3000
    if how == "cause":
        assert job.error == "Tells: plain words"


# -- paths ------------------------------------------------------------------------------------


def test_paths_are_arguments_and_results(app: tenure.App) -> None:
    seen: list[Any] = []

    @app.task
    def tidy(
        file: Path, more: list[Path], maybe: Path | None = None, pure: PurePosixPath | None = None
    ) -> dict[str, Path]:
        seen.append((file, more, maybe, pure))
        return {"kept": file / "x"}

    given = (Path("/srv/ä ö"), [Path("a"), Path("b/c")], Path("."), PurePosixPath("/p"))
    job = run(app, tidy, *given)

    assert seen == [given]
    assert type(seen[0][3]) is PurePosixPath
    assert job.payload == {"file": "/srv/ä ö", "more": ["a", "b/c"], "maybe": ".", "pure": "/p"}
    assert job.result == {"kept": "/srv/ä ö/x"}
    assert run(app, tidy, "/as/text", []).status == "completed"  # type: ignore[arg-type]
    with pytest.raises(tenure.ArgumentError, match="argument file"):
        tidy.enqueue(7, [])  # type: ignore[arg-type]
