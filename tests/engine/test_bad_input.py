"""Bad input: an error that names the problem and the remedy, and nothing stored."""

from __future__ import annotations

import datetime
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tenure
from crash.harness import environment
from places import Place, only
from tenure import payload

TOO_DEEP = payload.MAX_DEPTH + 1


def deep(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


@pytest.fixture
def send(app: tenure.App) -> tenure.Task[..., Any]:
    @app.task
    def send(to: str, value: Any = None) -> None: ...

    app.migrate()
    return send


Call = Callable[[tenure.App, tenure.Task[..., Any]], object]
NAIVE = datetime.datetime(2030, 1, 1)
ABSENT = "01HZZZZZZZZZZZZZZZZZZZZZZZ"
LONG_AGO = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)

BAD: dict[str, tuple[type[Exception], str, Call]] = {
    "unknown task": (
        tenure.UnknownTask, "no task 'sned'. Did you mean 'send'", lambda a, t: a.enqueue("sned"),
    ),
    "unexpected argument": (
        tenure.ArgumentError, "unexpected argument 'too'; it takes", lambda a, t: t.enqueue(too=1),
    ),
    "missing argument": (
        tenure.ArgumentError, "missing 'to'; it takes", lambda a, t: t.enqueue(),
    ),
    "ill-typed argument": (
        tenure.ArgumentError, "argument to: expected str, got int", lambda a, t: t.enqueue(1),
    ),
    "too many arguments": (
        tenure.ArgumentError, "3 positional arguments; it takes 2", lambda a, t: t.enqueue(1, 2, 3),
    ),
    "two values": (
        tenure.ArgumentError, "two values for 'to'", lambda a, t: t.enqueue("a", to="b"),
    ),
    "too large": (
        tenure.PayloadError, "at most 262,144 .* reference", lambda a, t: t.enqueue("x" * 300_000),
    ),
    "not JSON": (
        tenure.PayloadError, "value is of type object", lambda a, t: t.enqueue("a", object()),
    ),
    "NUL": (tenure.PayloadError, "NUL character", lambda a, t: t.enqueue("a\0b")),
    "NaN": (tenure.PayloadError, "NaN or infinite", lambda a, t: t.enqueue("a", float("nan"))),
    "infinity": (tenure.PayloadError, "NaN or infinite", lambda a, t: t.enqueue("a", [1e999])),
    "lone surrogate": (tenure.PayloadError, "lone surrogate", lambda a, t: t.enqueue("\ud800")),
    "huge integer": (tenure.PayloadError, r"2\*\*63", lambda a, t: t.enqueue("a", 2**63)),
    "too deep": (
        tenure.PayloadError, "nested deeper than", lambda a, t: t.enqueue("a", deep(TOO_DEEP)),
    ),
    "many receipts": (
        tenure.ConfigError, r"made by `task.job.*a Receipt: `.enqueue.*stored that one already",
        lambda a, t: a.enqueue_many([tenure.Receipt(ABSENT, False, "queued")]),
    ),
    "a generator": (
        tenure.ConfigError, r"as a list: \[task.job",
        lambda a, t: a.enqueue_many(t.job("a") for _ in range(3)),
    ),
    "many tasks": (
        tenure.ConfigError, r"made by `task.job.*a Task$", lambda a, t: a.enqueue_many([t]),
    ),
    "bad queue": (tenure.ConfigError, "queue name", lambda a, t: t.options(queue="a b")),
    "dead-letter queue": (
        tenure.ConfigError, "view of jobs", lambda a, t: t.options(queue="q:deadletter"),
    ),
    "priority 0": (tenure.ConfigError, "1 .first. to 10", lambda a, t: t.options(priority=0)),
    "priority 11": (tenure.ConfigError, "1 .first. to 10", lambda a, t: t.options(priority=11)),
    "negative delay": (tenure.ConfigError, "delay must be", lambda a, t: t.options(delay=-1)),
    "naive datetime": (tenure.ConfigError, "time zone", lambda a, t: t.options(at=NAIVE)),
    "past datetime": (tenure.ConfigError, "in the past", lambda a, t: t.options(at=LONG_AGO)),
    "delay and at": (
        tenure.ConfigError, "not both", lambda a, t: t.options(delay=1, at=LONG_AGO),
    ),
    "actor": (
        tenure.ConfigError, "actor type", lambda a, t: t.options(actor=("x", "1")).enqueue("a"),
    ),
    "empty org": (tenure.ConfigError, "org must have", lambda a, t: t.options(org="")),
    "zero time-out": (tenure.ConfigError, "timeout must be", lambda a, t: t.options(timeout=0)),
    "no attempts": (tenure.ConfigError, "attempts", lambda a, t: t.options(max_attempts=0)),
    "conn of another kind": (
        tenure.ConfigError, r"conn= (got|takes)", lambda a, t: t.options(conn=1).enqueue("a"),
    ),
    "NUL in a reason": (
        tenure.ConfigError, "control characters", lambda a, t: a.pause("default", reason="a\0b"),
    ),
    "surrogate in a reason": (
        tenure.ConfigError, "control characters", lambda a, t: a.cancel(ABSENT, reason="\ud800"),
    ),
    "ESC in a reason": (
        tenure.ConfigError, "control characters", lambda a, t: a.discard(ABSENT, reason="\x1b[2J"),
    ),
    "endless reason": (
        tenure.ConfigError, "1 to 2000", lambda a, t: a.cancel(ABSENT, reason="x" * 100_000),
    ),
    "reason of another kind": (
        tenure.ConfigError, "string, got int", lambda a, t: a.pause("default", reason=5),
    ),
    "not an id": (
        tenure.JobError, "'nonsense' is not a job id",
        lambda a, t: t.options(after=["nonsense"]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", sorted(BAD))
def test_bad_enqueue_stores_nothing(
    app: tenure.App, send: tenure.Task[..., Any], count: Callable[[], int], what: str
) -> None:
    kind, message, call = BAD[what]

    with pytest.raises(kind, match=message) as caught:
        call(app, send)

    assert isinstance(caught.value, tenure.TenureError)
    assert "\x00" not in str(caught.value)
    assert "xxxxxxxx" not in str(caught.value)  # the path to the culprit, never its value
    assert count() == 0


async def test_the_async_twin_refuses_the_same(
    send: tenure.Task[..., Any], count: Callable[[], int]
) -> None:
    with pytest.raises(tenure.ArgumentError, match="missing 'to'"):
        await send.aenqueue()

    assert count() == 0


def test_nothing_of_a_batch_is_stored_when_one_is_bad(
    app: tenure.App, send: tenure.Task[..., Any], count: Callable[[], int]
) -> None:
    with pytest.raises(tenure.ArgumentError):
        app.enqueue_many([send.job("a"), send.job(1)])
    good = send.job("a")
    with pytest.raises(tenure.TenureError):  # the same id twice: the second insert fails
        app.enqueue_many([send.options(key="k").job("b"), good, good])

    assert count() == 0


def test_a_task_is_checked_when_it_is_decorated(app: tenure.App) -> None:
    def work() -> None: ...

    app.task(work)
    with pytest.raises(tenure.DuplicateTask, match=r"test_bad_input.py:\d+ and .*name="):
        app.task(name="work")(lambda: None)
    for bad in (
        {"priority": 0}, {"queue": "a b"}, {"timeout": -1}, {"retry": 3}, {"category": "exprot"},
        {"name": ""},
    ):  # fmt: skip
        with pytest.raises(tenure.TenureError):
            app.task(**bad)
    assert list(app.tasks) == ["work"]


def test_a_signature_that_cannot_be_stored_is_refused(app: tenure.App) -> None:
    def late(value: int, ctx: tenure.Context) -> None: ...

    late.__annotations__ = {"value": int, "ctx": tenure.Context}
    with pytest.raises(tenure.TaskError, match="first"):
        app.task(late).enqueue(1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lease_seconds": 10, "lease_renew_seconds": 6}, "at least 2 x lease_renew_seconds"),
        ({"lease_seconds": 5}, "at least 2 x lease_renew_seconds"),
        ({"leese_seconds": 5}, "did you mean lease_seconds"),
        ({"concurrency": 0}, "between 1 and"),
        ({"url": "sqlite:///:memory:"}, "cannot be shared"),
        ({"url": "sqlite://"}, "names no file"),
        ({"url": "mysql://host/db"}, "no store for 'mysql'"),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(tenure.ConfigError, match=message):
        tenure.App(**settings).migrate()


def test_a_path_without_a_directory(tmp_path: Path) -> None:
    app = tenure.App(f"sqlite:///{tmp_path}/missing/jobs.db")

    with pytest.raises(tenure.StoreUnavailable, match=r"no directory .*missing. Create it"):
        app.migrate()

    assert not (tmp_path / "missing").exists()


@only("sqlite", "a server has no files to mistake")
def test_a_file_that_is_not_a_database(path: Path, app: tenure.App) -> None:
    path.write_bytes(b"This is a letter, not a database. " * 100)
    before = path.read_bytes()

    with pytest.raises(tenure.StoreUnavailable, match="not an SQLite database"):
        app.migrate()

    assert path.read_bytes() == before


@only("sqlite", "a server has no files to mistake")
def test_a_directory_in_place_of_the_file(path: Path, app: tenure.App) -> None:
    path.mkdir()

    with pytest.raises(tenure.StoreUnavailable, match="cannot be opened"):
        app.migrate()


READ_ONLY = """
import importlib, os, pkgutil, sys, tenure

def made(path):
    app = tenure.App("sqlite:///" + path)
    app.task(name="work")(lambda: None)
    app.store  # reads its statements, opens nothing
    return app

# Everything while this user may read it: the next one may not enter the checkout.
for module in pkgutil.walk_packages(tenure.__path__, "tenure."):
    if "postgres" not in module.name and not module.name.endswith("__main__"):
        importlib.import_module(module.name)
made(sys.argv[1]).enqueue("work")
app = made(sys.argv[2])
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
try:
    app.enqueue("work")
except tenure.StoreUnavailable as error:
    print(error)
"""


def test_a_read_only_file(tmp_path: Path) -> None:
    """As somebody who may only read it; root may write everything."""
    with tempfile.TemporaryDirectory(prefix="tenure-test-") as name:
        place = Path(name)
        path = place / "jobs.db"
        app = tenure.App(f"sqlite:///{path}")
        app.migrate()
        app.close()
        for file in place.iterdir():
            file.chmod(0o444)
        place.chmod(0o555)
        command = [sys.executable, "-c", READ_ONLY, str(tmp_path / "warm.db"), str(path)]
        try:
            said = subprocess.run(
                command, capture_output=True, text=True, env=environment(), check=False
            )
        finally:
            place.chmod(0o755)

        assert str(path) in said.stdout, said.stderr
        assert "write" in said.stdout
        rows = sqlite3.connect(path)
        assert rows.execute("SELECT count(*) FROM job_queue").fetchone() == (0,)
        rows.close()


def test_a_newer_schema_is_refused_and_left_alone(
    place: Place, make_app: Callable[..., tenure.App]
) -> None:
    stamp_from_the_future(place, make_app, compatible_from=999)
    app = make_app()

    @app.task
    def work() -> None: ...

    for call in (
        app.migrate,
        work.enqueue,
        lambda: app.run_worker(drain=True),
        lambda: app.get("01HZZZZZZZZZZZZZZZZZZZZZZZ"),
        lambda: list(app.find()),
        lambda: list(app.events()),
        app.stats,
    ):
        with pytest.raises(tenure.SchemaError, match="Upgrade Tenure"):
            call()


def test_a_newer_schema_that_this_program_works_with_is_used(
    place: Place, make_app: Callable[..., tenure.App]
) -> None:
    """An older program runs on while a fleet is upgraded."""
    stamp_from_the_future(place, make_app, compatible_from=2)
    app = make_app()

    @app.task
    def work() -> int:
        return 7

    receipt = work.enqueue()
    app.run_worker(drain=True)

    assert app.result(receipt.id) == 7
    assert app.migrate() == []


def stamp_from_the_future(
    place: Place, make_app: Callable[..., tenure.App], *, compatible_from: int
) -> None:
    first = make_app()
    first.migrate()
    first.close()
    when = ", 1" if place.kind == "sqlite" else ", now()"
    place.sql(
        "INSERT INTO tenure_migrations (version, name, compatible_from, applied_at) "
        f"VALUES (999, 'from_the_future', {compatible_from}{when})"
    )


def test_an_unknown_job_and_a_step_that_is_not_allowed(
    app: tenure.App, send: tenure.Task[..., Any]
) -> None:
    receipt = send.enqueue("a")

    assert app.get(ABSENT) is None
    for call in (app.cancel, app.replay, app.discard, app.result):
        with pytest.raises(tenure.JobNotFound):
            call(ABSENT)
    app.run_worker(drain=True)
    for call, message in (
        (app.replay, "completed: only dead jobs can be replayed"),
        (app.discard, "completed: only dead jobs can be discarded"),
        (app.cancel, "completed: only queued and running jobs can be cancelled"),
    ):
        with pytest.raises(tenure.IllegalTransition, match=message):
            call(receipt.id)


def test_a_context_that_is_not_annotated_is_an_argument(app: tenure.App) -> None:
    @app.task
    def send(ctx, to) -> None:  # type: ignore[no-untyped-def]
        ...

    with pytest.raises(tenure.ArgumentError, match=r"annotate it: \(ctx: tenure.Context"):
        send.enqueue(to="a@b.c")
    with pytest.raises(tenure.ArgumentError, match=r"missing 'to'; it takes \(ctx, to\)\.$"):
        send.enqueue("a value of its own")
