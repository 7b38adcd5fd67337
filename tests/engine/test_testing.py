"""`tenure.testing`: what a test of somebody else's program may rely on."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest

import servers
import tenure
from tenure import testing
from tenure.testing import (
    Clock,
    assert_enqueued,
    bench,
    drain,
    enqueued,
    inline,
    refute_enqueued,
    use,
)

ROOT = Path(__file__).resolve().parents[2]

# Here too where Tenure is on the path but not installed, and so has no entry point.
tenure_app, tenure_clock = testing.tenure_app, testing.tenure_clock

NEW_YEAR = datetime(2030, 1, 1, tzinfo=UTC)


@pytest.fixture(scope="module")
def server_url(postgres: servers.Databases) -> Iterator[str]:
    """A database that has nothing of Tenure's, as somebody names it in their tests."""
    name = postgres.create_database()
    yield postgres.url(name)
    left = postgres.execute(
        "SELECT nspname FROM pg_namespace WHERE nspname LIKE 'tenure%'", database=name
    )
    postgres.drop_database(name)
    assert left == [], "schemas of tests that are over"


@pytest.fixture(params=["sqlite", "postgres"])
def tenure_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgres":
        return str(request.getfixturevalue("server_url"))
    return f"sqlite:///{tmp_path}/tenure.db"


sqlite_only = pytest.mark.parametrize("tenure_url", ["sqlite"], indirect=True)


@pytest.fixture
def app(tenure_app: tenure.App) -> tenure.App:
    """What the tests of this file call it; `ran` says what its tasks did."""
    ran: list[Any] = []
    tenure_app.ran = ran  # type: ignore[attr-defined]

    @tenure_app.task
    def note(what: str, loud: bool = False) -> str:
        ran.append(what)
        return what.upper() if loud else what

    @tenure_app.task(name="anote")
    async def anote(what: str) -> str:
        await asyncio.sleep(0)
        ran.append(what)
        return what

    @tenure_app.task(retry=tenure.Retry(attempts=3, backoff=tenure.Steps(60, 3600)))
    def shaky(fails: int) -> str:
        ran.append("shaky")
        if ran.count("shaky") <= fails:
            raise ValueError("not yet")
        return "steady"

    return tenure_app


def ran(app: tenure.App) -> list[Any]:
    found: list[Any] = app.ran  # type: ignore[attr-defined]
    return found


def status(app: tenure.App, receipt: tenure.Receipt) -> str:
    job = app.get(receipt.id)
    assert job is not None
    return job.status


# -- fixtures and `use` -------------------------------------------------------------------------
@sqlite_only
def test_the_app_is_on_the_tests_own_file(
    tenure_app: tenure.App, tenure_url: str, tmp_path: Path
) -> None:
    tenure_app.migrate()

    assert tenure_app.settings.url == tenure_url
    assert (tmp_path / "tenure.db").exists()


def test_use_points_an_app_elsewhere_and_back(app: tenure.App, tmp_path: Path) -> None:
    app.enqueue("note", {"what": "outside"})
    with use(app, tmp_path) as same:
        assert same is app
        assert enqueued(app) == []
        app.enqueue("note", {"what": "inside"})
        with use(app, tmp_path):
            assert enqueued(app) == [], "two files in one directory"
        assert [job.payload["what"] for job in enqueued(app)] == ["inside"]

    assert [job.payload["what"] for job in enqueued(app)] == ["outside"]


def test_use_restores_after_an_error_and_takes_a_clock_along(
    app: tenure.App, tmp_path: Path
) -> None:
    url = app.settings.url
    with pytest.raises(ZeroDivisionError), use(app, tmp_path / "named.db"):
        Clock(app, NEW_YEAR)  # and never restored
        app.enqueue("note", {"what": "x"})
        assert enqueued(app)[0].created_at == NEW_YEAR
        _ = 1 / 0

    assert (tmp_path / "named.db").exists()
    assert app.settings.url == url
    app.enqueue("note", {"what": "x"})
    assert enqueued(app)[0].created_at < NEW_YEAR
    with Clock(app, NEW_YEAR), use(app, tmp_path):
        app.enqueue("note", {"what": "y"})
        assert enqueued(app)[0].created_at == NEW_YEAR


def test_on_a_server_each_app_has_a_schema_of_its_own(
    tenure_app: tenure.App, server_url: str
) -> None:
    first, second = tenure.App("sqlite:///one.db"), tenure.App("sqlite:///two.db")
    for app in (first, second):
        app.task(name="note")(lambda what: None)

    with use(first, url=server_url), use(second, url=server_url):
        first.enqueue("note", {"what": "x"})
        assert (len(enqueued(first)), len(enqueued(second))) == (1, 0)
        assert first.settings.schema != second.settings.schema
        with Clock(first, NEW_YEAR), pytest.raises(ZeroDivisionError):
            _ = 1 / 0

    assert first.settings.url == "sqlite:///one.db"
    assert first.settings.schema == "tenure"
    assert not Path("one.db").exists()


def test_use_takes_a_path_or_a_url(app: tenure.App, tmp_path: Path) -> None:
    with pytest.raises(tenure.ConfigError, match=r"use\(app, path\) or"), use(app):
        pass
    with pytest.raises(tenure.ConfigError, match=r"use\(app, path\) or"):
        testing.use(app, tmp_path, url="sqlite:///x.db").__enter__()
    with use(app, url=f"sqlite:///{tmp_path}/by-url.db"):
        app.enqueue("note", {"what": "x"})
    assert (tmp_path / "by-url.db").exists()


# -- the clock ----------------------------------------------------------------------------------
def test_the_clock_stands_still_until_it_is_turned(app: tenure.App, tenure_clock: Clock) -> None:
    start = tenure_clock.now()
    app.enqueue("note", {"what": "later"}, delay=3600)
    app.enqueue("note", {"what": "at"}, at=start + timedelta(hours=2))
    assert drain(app).completed == 0

    assert tenure_clock.advance(3599.999) == start + timedelta(seconds=3599.999)
    assert drain(app).completed == 0
    tenure_clock.advance(0.001)
    assert drain(app).completed == 1
    tenure_clock.advance(timedelta(hours=1))
    assert drain(app).completed == 1

    assert ran(app) == ["later", "at"]
    assert enqueued(app)[0].completed_at == start + timedelta(hours=1)


def test_the_clock_can_be_set_and_can_tick(app: tenure.App) -> None:
    with Clock(app, NEW_YEAR, ticking=True) as clock:
        assert NEW_YEAR <= clock.now() < NEW_YEAR + timedelta(minutes=2)
        clock.set(NEW_YEAR - timedelta(days=1))
        assert clock.now() < NEW_YEAR
        first = clock()
        while clock() == first:
            pass
        with pytest.raises(tenure.ConfigError, match="forward"):
            clock.advance(-1)
        with pytest.raises(tenure.ConfigError, match="time zone"):
            clock.set(datetime(2030, 1, 1))

    app.enqueue("note", {"what": "now"})
    assert enqueued(app)[0].created_at < NEW_YEAR - timedelta(days=1)
    assert not isinstance(app.now_ms, Clock)


def test_the_clock_survives_a_closed_app(app: tenure.App) -> None:
    with Clock(app, NEW_YEAR) as clock:
        app.close()
        app.enqueue("note", {"what": "x"}, at=NEW_YEAR + timedelta(days=1))
        clock.advance(timedelta(days=1))
        assert drain(app).completed == 1
        assert enqueued(app)[0].completed_at == NEW_YEAR + timedelta(days=1)


# -- drain --------------------------------------------------------------------------------------
def test_drain_runs_in_this_thread_in_a_fixed_order(app: tenure.App) -> None:
    threads: list[int] = []

    @app.task
    def where() -> None:
        threads.append(threading.get_ident())

    for queue, what in (("zebra", "e"), ("default", "c"), ("critical", "a"), ("exports", "d")):
        app.enqueue("note", {"what": what}, queue=queue)
    app.enqueue("note", {"what": "b"}, priority=1)
    where.options(queue="zebra").enqueue()
    summary = drain(app)

    assert ran(app) == ["a", "b", "c", "d", "e"]
    assert threads == [threading.get_ident()]
    assert (summary.completed, summary.left) == (6, {})


def test_drain_keeps_to_its_queues_and_its_limit(app: tenure.App) -> None:
    for queue in ("exports", "default", "paused"):
        app.enqueue("note", {"what": queue}, queue=queue)
        app.enqueue("note", {"what": queue}, queue=queue)
    app.pause("paused")

    assert drain(app, queues="exports", limit=1).completed == 1
    assert ran(app) == ["exports"]
    assert drain(app, until_empty=True).left == {"queued": 2}
    assert ran(app) == ["exports", "default", "default", "exports"]


def test_until_empty_does_not_wait_for_retries(app: tenure.App, tenure_clock: Clock) -> None:
    start = tenure_clock.now()
    receipt = app.enqueue("shaky", {"fails": 2})

    assert drain(app).retried == 1
    assert drain(app, until_empty=True)[:2] == (1, 1)
    assert app.result(receipt.id) == "steady"
    assert tenure_clock.now() == start + timedelta(seconds=3660)


def test_until_empty_brings_its_own_clock(app: tenure.App) -> None:
    app.enqueue("shaky", {"fails": 9})
    summary = drain(app, until_empty=True)

    assert (summary.retried, summary.dead) == (2, 1)
    assert not isinstance(app.now_ms, Clock)
    with pytest.raises(tenure.JobFailed, match="not yet") as failed:
        app.enqueue("shaky", {"fails": 9})
        drain(app, raise_failures=True)
    assert isinstance(failed.value.__cause__, ValueError)


def test_unknown_types_hold_up_nothing(app: tenure.App, tenure_url: str) -> None:
    other = tenure.App(tenure_url, schema=app.settings.schema)

    @other.task
    def foreign() -> None: ...

    foreign.enqueue()
    other.close()
    app.enqueue("note", {"what": "known"})
    app.enqueue("note", {"what": "later"}, delay=timedelta(days=300))

    summary = drain(app, until_empty=True)
    assert ran(app) == ["known", "later"]
    assert summary.left == {"queued": 1}


def test_a_task_without_end_is_an_error(app: tenure.App, monkeypatch: pytest.MonkeyPatch) -> None:
    @app.task
    def again() -> Any:
        return tenure.Snooze(60)

    monkeypatch.setattr(bench, "RUNAWAY", 5)
    again.enqueue()
    with pytest.raises(tenure.JobError, match="5 jobs have run"):
        drain(app, until_empty=True)
    assert drain(app, until_empty=True, limit=3).snoozed == 3


def test_what_a_run_asks_of_its_context_is_real(app: tenure.App) -> None:
    heard: list[str] = []
    for kind in ("start", "complete", "failed", "progress", "final_failure"):
        app.on(kind)(lambda event: heard.append(f"{event.kind} {event.job.type}"))

    def report(ctx: tenure.Context) -> str:
        ctx.progress(50, phase="half")
        parts = [ctx.enqueue(app.tasks["note"], ctx.step(str(n), str, n)) for n in (1, 2)]
        ctx.enqueue(total.options(after=parts))
        return ctx.org

    def total(ctx: tenure.Context) -> list[str]:
        return sorted(ctx.results().values())

    def settle(ctx: tenure.Context) -> None:
        with ctx.transaction() as conn:
            conn.execute("CREATE TEMP TABLE mine (n INTEGER)")
            ctx.result("settled")

    for handler in (report, total, settle):
        handler.__annotations__ = {"ctx": tenure.Context}
    total = app.task(total)
    with tenure.acting(org="acme"):
        receipt = app.task(report).enqueue()
        settled = app.task(settle).enqueue()
        fails = app.task(name="fails")(lambda: tenure.Fail("no")).enqueue()

    summary = drain(app)
    assert (summary.completed, summary.failed, summary.left) == (5, 1, {})
    assert app.result(receipt.id) == "acme"
    assert app.result(settled.id) == "settled"
    assert status(app, fails) == "failed"
    (last,) = enqueued(app, total)
    assert (last.result, last.org, last.parent) == (["1", "2"], "acme", receipt.id)
    job = app.get(receipt.id)
    assert job is not None
    assert job.progress == {"percent": 50, "phase": "half"}
    assert heard[:3] == ["start report", "progress report", "complete report"]
    assert heard.index("failed fails") < heard.index("final_failure fails")
    assert all(worker.dead_at is not None for worker in app.workers())


def test_an_interruption_gives_the_job_back(app: tenure.App) -> None:
    @app.task
    def stopped(how: str) -> None:
        if how == "pytest":
            pytest.fail("from the handler")
        raise KeyboardInterrupt

    first = stopped.enqueue("pytest")
    with pytest.raises(pytest.fail.Exception, match="from the handler"):
        drain(app)
    job = app.get(first.id)
    assert job is not None
    assert (job.status, job.attempts) == ("queued", 0)
    app.cancel(first.id)
    with pytest.raises(KeyboardInterrupt), inline(app):
        stopped.enqueue("keyboard")


# -- inline -------------------------------------------------------------------------------------
def test_inline_runs_every_kind_of_enqueue_at_once(app: tenure.App) -> None:
    note, anote = app.tasks["note"], app.tasks["anote"]
    with inline(app):
        receipt = note.enqueue("a", loud=True)
        assert app.result(receipt.id, timeout=0) == "A"
        anote.enqueue("b")
        app.enqueue("note", {"what": "c"})
        app.enqueue_many([note.job("d"), anote.job("e")])
        asyncio.run(_enqueue_from_a_loop(app))
        assert ran(app) == ["a", "b", "c", "d", "e", "f", "g", "h", "i"]

    note.enqueue("after")
    assert ran(app)[-1] == "i"
    assert not {"enqueue_many", "enqueue_jobs", "aenqueue_jobs"} & vars(app).keys()


async def _enqueue_from_a_loop(app: tenure.App) -> None:
    await app.tasks["note"].aenqueue("f")
    await app.aenqueue("anote", {"what": "g"})
    app.enqueue("note", {"what": "h"})
    app.enqueue("anote", {"what": "i"})  # its handler cannot have this thread's loop


async def test_many_at_once_in_inline_mode(app: tenure.App) -> None:
    with inline(app):
        await asyncio.gather(*(app.aenqueue("anote", {"what": str(n)}) for n in range(12)))
    assert sorted(map(int, ran(app))) == list(range(12))


def test_async_handlers_of_a_block_share_a_loop(app: tenure.App) -> None:
    loops: list[Any] = []

    @app.task
    async def look() -> None:
        loops.append(asyncio.get_running_loop())

    with inline(app):
        look.enqueue()
        look.enqueue()
    assert loops[0] is loops[1]


@pytest.mark.parametrize(
    ("type", "ends"), [("fail", "failed"), ("dead", "dead_letter"), ("retry", "queued")]
)
def test_inline_raises_what_the_handler_raised(app: tenure.App, type: str, ends: str) -> None:
    @app.task(retry=tenure.Retry(attempts=1 if type == "dead" else 2))
    def bad() -> None:
        raise tenure.PermanentError("bad") if type == "fail" else LookupError("bad")

    with inline(app), pytest.raises(tenure.JobFailed, match=f"now {ends}: .*bad") as failed:
        bad.enqueue()
    assert failed.value.status == ends
    assert str(failed.value.__cause__) == "bad"

    with inline(app, raise_failures=False):
        assert status(app, bad.enqueue()) == ends


def test_inline_returns_to_the_handler_before_its_follow_up_runs(app: tenure.App) -> None:
    @app.task
    async def outer() -> None:
        app.enqueue("note", {"what": "by enqueue"})
        await app.aenqueue("shaky", {"fails": 1})
        ran(app).append("outer ends")

    with inline(app), pytest.raises(tenure.JobFailed, match=r"\(shaky\)"):
        outer.enqueue()
    assert ran(app) == ["outer ends", "by enqueue", "shaky"]
    assert_enqueued(app, outer, status="completed", times=1)


def test_inline_leaves_what_is_later_to_the_clock(app: tenure.App, tenure_clock: Clock) -> None:
    with inline(app):
        app.enqueue("note", {"what": "tomorrow"}, delay=86_400)
        assert ran(app) == []
        tenure_clock.advance(86_400)
        assert ran(app) == ["tomorrow"]

        app.enqueue("note", {"what": "next week"}, delay=7 * 86_400)
        drain(app, until_empty=True)
        assert ran(app) == ["tomorrow", "next week"]


@sqlite_only
def test_inline_waits_for_the_owner_of_a_connection(app: tenure.App, tmp_path: Path) -> None:
    import sqlite3

    app.migrate()
    db = sqlite3.connect(tmp_path / "tenure.db")
    with inline(app):
        with db:
            app.tasks["note"].options(conn=db).enqueue("mine")
        assert ran(app) == []
        drain(app)
    db.close()
    assert ran(app) == ["mine"]


def test_an_async_handler_is_timed_out(app: tenure.App) -> None:
    @app.task(timeout=0.05)
    async def sleepy() -> None:
        await asyncio.sleep(60)

    with inline(app), pytest.raises(tenure.JobFailed) as failed:
        sleepy.enqueue()
    assert failed.value.code == "TIMEOUT"


# -- assertions ---------------------------------------------------------------------------------
def test_assertions_find_what_was_enqueued(app: tenure.App) -> None:
    note = app.tasks["note"]

    @app.task
    def remind(at: datetime, whom: list[str]) -> None: ...

    remind.enqueue(NEW_YEAR, ["a", "b"])
    note.options(key="k", queue="exports", org="acme").enqueue("x", loud=True)
    note.enqueue("y")
    drain(app, queues="exports")

    assert_enqueued(app, remind, args={"at": NEW_YEAR, "whom": ("a", "b")})
    assert_enqueued(app, remind, args={"at": ANY}, times=1)
    first, second = assert_enqueued(app, "note", times=2)
    assert (first.payload["what"], second.payload["what"]) == ("x", "y")
    assert assert_enqueued(app, note, args={"loud": True}) == [first]
    assert assert_enqueued(app, note, queue="exports", key="k", org="acme") == [first]
    assert assert_enqueued(app, note, status="queued") == [second]
    assert_enqueued(app, note, args={"what": "z"}, times=0)
    refute_enqueued(app, note, args={"what": "x", "loud": False})
    assert [job.type for job in enqueued(app)] == ["remind", "note", "note"]
    assert enqueued(app, note) == [first, second]


def test_a_failed_assertion_says_what_there_is(app: tenure.App) -> None:
    with pytest.raises(AssertionError, match=r"of 'note', found 0. There are 0 jobs\.$"):
        assert_enqueued(app, "note")
    for n in range(25):
        app.enqueue("note", {"what": f"n{n}"}, key=f"k{n}")

    with pytest.raises(AssertionError) as failed:
        assert_enqueued(app, "note", args={"what": "other"}, queue="default")
    first, *lines = str(failed.value).splitlines()
    assert first == (
        "expected at least one job of 'note' with {'what': 'other'}, queue 'default', found 0. "
        "There are 25 jobs, the last:"
    )
    assert len(lines) == 20
    assert lines[-1] == "  note {'what': 'n24'} queue=default status=queued org=default key=k24"

    with pytest.raises(AssertionError, match=r"expected exactly 0 of 'note'.*found 25"):
        refute_enqueued(app, "note")
    with pytest.raises(AssertionError, match=r"expected exactly 2 of 'note' .*found 1"):
        assert_enqueued(app, "note", args={"what": "n1"}, times=2)


def test_a_misspelt_expectation_is_no_match_but_an_error(app: tenure.App) -> None:
    with pytest.raises(tenure.ConfigError, match=r"takes \('what', 'loud'\), not \['wat'\]"):
        refute_enqueued(app, "note", args={"wat": "x"})
    with pytest.raises(tenure.UnknownTask, match="Did you mean 'note'"):
        refute_enqueued(app, "noot")
    with pytest.raises(tenure.ConfigError, match="status is one of"):
        refute_enqueued(app, "note", status="done")


# -- the plugin, in pytest runs of its own ------------------------------------------------------
def run_pytest(directory: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """With Tenure installed, as far as pytest can tell: its entry points are on the path."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    installed = directory / "installed" / f"tenure-{project['version']}.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text(f"Name: tenure\nVersion: {project['version']}\n")
    points = [f"{name} = {value}" for name, value in project["entry-points"]["pytest11"].items()]
    (installed / "entry_points.txt").write_text("\n".join(["[pytest11]", *points, ""]))
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("TENURE_", "PYTEST_"))}
    environment["PYTHONPATH"] = os.pathsep.join((str(installed.parent), str(ROOT / "src")))
    without = ("asyncio", "cacheprovider", "xdist")  # warns, writes, and loads asyncio
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "pytest", "-q", "-c", os.devnull,
         "--rootdir", str(directory), *(f"-pno:{name}" for name in without), *options],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=90,
    )  # fmt: skip


def test_the_page_shows_a_test_file_that_passes(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "testing.md").read_text("utf-8")
    (example,) = re.findall(r"^```python\n(# test_shop\.py\n.*?)^```$", page, re.S | re.M)
    (tmp_path / "test_shop.py").write_text(example)

    done = run_pytest(tmp_path, "test_shop.py")

    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{example.count('def test_')} passed" in done.stdout
    assert not (tmp_path / "shop.db").exists(), "no test touches the app's own store"


def test_the_page_names_everything_public() -> None:
    page = (ROOT / "docs" / "testing.md").read_text("utf-8")
    public = {*testing.__all__, "tenure_url", "tenure_app", "tenure_clock"}
    public |= {name for name in vars(testing.Rehearsal) if not name.startswith("_")}

    assert not {name for name in public if not re.search(rf"\b{name}\b", page)}


def test_the_plugin_loads_nothing_heavy() -> None:
    code = (
        f"import json, sys; sys.path.insert(0, {str(ROOT / 'src')!r}); import pytest; "
        "before = {*sys.modules}; import tenure.testing; "
        "print(json.dumps(sorted({*sys.modules} - before)))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", code], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0, done.stderr
    loaded = set(json.loads(done.stdout))

    assert "tenure.testing" in loaded
    assert not {"asyncio", "msgspec", "sqlite3", "tenure.engine", "tenure.stores"} & loaded


def test_the_plugin_can_be_left_out(tmp_path: Path) -> None:
    (tmp_path / "test_probe.py").write_text("def test_it(tenure_app): pass\n")
    done = run_pytest(tmp_path, "-p", "no:tenure", "test_probe.py")
    assert "fixture 'tenure_app' not found" in done.stdout


def test_the_plugin_can_be_named_where_it_is_not_installed(tmp_path: Path) -> None:
    (tmp_path / "test_probe.py").write_text("def test_it(tenure_app, tenure_clock): pass\n")
    done = run_pytest(tmp_path, "-p", "no:tenure", "-p", "tenure.testing", "test_probe.py")
    assert "1 passed" in done.stdout, done.stdout + done.stderr
