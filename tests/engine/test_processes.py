"""One database, many processes: forks, a first open by all at once, migrations, signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import tenure
from crash.harness import environment, eventually
from places import Place, PostgresPlace, SqlitePlace, only
from tenure import sql


@pytest.fixture
def empty(store_kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> Place:
    """No file yet, or a database without tables of ours."""
    if store_kind == "sqlite":
        return SqlitePlace(tmp_path / "jobs.db")
    return PostgresPlace(request.getfixturevalue("database"))


@pytest.fixture
def empty_app(empty: Place) -> Iterator[tenure.App]:
    app = tenure.App(empty.url)
    yield app
    app.close()


def python(text: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(text), *map(str, arguments)],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str], said: str | None = None) -> str:
    out, err = process.communicate(said, timeout=60)
    assert process.returncode == 0, err
    return out


def test_a_forked_child_and_its_parent_both_enqueue(app: tenure.App, place: Place) -> None:
    process = python(
        """
        import os, sys, tenure
        app = tenure.App(sys.argv[1])

        @app.task
        def work(n: int) -> None: ...

        work.enqueue(0)
        for round in range(3):
            pid = os.fork()
            if pid == 0:
                for n in range(20):
                    work.enqueue(n)
                app.close()
                os._exit(0)
            for n in range(20):
                work.enqueue(n)
            assert os.waitpid(pid, 0)[1] == 0
        work.enqueue(0)
        app.close()
        """,
        place.url,
    )
    finish(process)

    assert app.stats()["jobs"]["queued"] == 3 * 40 + 2
    if place.kind == "sqlite":
        assert place.sql("PRAGMA integrity_check") == [("ok",)]


def test_a_worker_in_the_parent_survives_a_fork(app: tenure.App, place: Place) -> None:
    process = python(
        """
        import os, sys, tenure
        app = tenure.App(sys.argv[1])

        @app.task
        def work(n: int) -> int:
            return n

        with app.worker():
            pid = os.fork()
            if pid == 0:
                os._exit(work.enqueue(5).duplicate)
            assert os.waitpid(pid, 0)[1] == 0
            assert app.result(work.enqueue(6).id, timeout=20) == 6
            (first,) = [job for job in app.find() if job.payload == {"n": 5}]
            assert app.result(first.id, timeout=20) == 5
        """,
        place.url,
    )
    finish(process)

    assert app.stats()["jobs"]["completed"] == 2


@only("sqlite", "a server's tables are made by `tenure migrate`, not by the first who comes")
def test_eight_processes_open_a_new_file_at_once(app: tenure.App, path: Path) -> None:
    processes = [
        python(
            """
            import sys, tenure
            app = tenure.App(sys.argv[1])

            @app.task
            def work(n: int) -> None: ...

            job = work.job(int(sys.argv[2]))  # everything is loaded
            print("ready", flush=True)
            sys.stdin.readline()
            for n in range(25):
                work.enqueue(n)
            """,
            f"sqlite:///{path}",
            number,
        )
        for number in range(8)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    assert not path.exists()
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        finish(process)

    assert app.stats()["jobs"]["queued"] == 8 * 25


def test_two_processes_migrate_at_once(empty: Place) -> None:
    text = """
        import sys, tenure
        app = tenure.App(sys.argv[1])
        print("ready", flush=True)
        sys.stdin.readline()
        print(len(app.migrate()))
    """
    processes = [python(text, empty.url) for _ in range(2)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    ran = sorted(int(finish(process)) for process in processes)

    assert sum(ran) == len(sql.migrations(empty.kind)), "each of them by one of the two"


def test_a_killed_migration_goes_on_where_it_stopped(empty: Place, empty_app: tenure.App) -> None:
    """Killed inside its transaction: the next one finds the place as if nothing had happened."""
    process = python(
        """
        import os, signal, sys, tenure
        app = tenure.App(sys.argv[1])

        def die(*_):  # called after the statements ran, before the stamp and the commit
            os.kill(os.getpid(), signal.SIGKILL)

        if sys.argv[2] == "sqlite":
            app.store.file.clock = die
        else:
            from tenure.stores.postgres import schema
            schema._stamp = die
        app.migrate()
        """,
        empty.url,
        empty.kind,
    )
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert not empty.exists()

    assert len(empty_app.migrate()) == len(sql.migrations(empty.kind))
    assert empty_app.migrate() == []


def test_migrating_twice_and_reopening_changes_nothing(empty_app: tenure.App) -> None:
    app = empty_app
    work = app.task(name="work")(lambda: None)
    assert app.migrate()
    receipt = work.enqueue()
    app.close()

    assert app.migrate() == []
    assert app.get(receipt.id) is not None
    app.close()
    app.close()


def test_close_while_others_use_the_file(make_app: Callable[..., tenure.App]) -> None:
    """The last connection of one app closes; the log it shares with the other stays whole."""
    first, second = make_app(), make_app()
    work = first.task(name="work")(lambda: None)
    second.task(name="work")(lambda: None)
    with second.worker():
        for _ in range(5):
            receipt = work.enqueue()
            first.close()
            second.result(receipt.id, timeout=10)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_an_embedded_worker(
    app: tenure.App, place: Place, number: signal.Signals
) -> None:
    process = python(
        """
        import os, signal, sys, time, tenure
        app = tenure.App(sys.argv[1])

        @app.task
        def work() -> str:
            print("started", flush=True)
            time.sleep(0.5)
            return "finished"

        work.enqueue()
        summary = app.run_worker()
        print(summary.completed, flush=True)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        """,
        place.url,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    os.kill(process.pid, number)

    assert finish(process) == "1\n"
    (job,) = app.find()
    assert (job.status, job.result) == ("completed", "finished")


def test_leaving_the_block_finishes_what_runs(app: tenure.App) -> None:
    started, go = threading.Event(), threading.Event()

    @app.task
    def work() -> str:
        started.set()
        go.wait(10)
        return "finished"

    with app.worker(concurrency=1):
        receipt = work.enqueue()
        app.enqueue_many([work.job() for _ in range(3)])
        assert started.wait(10)
        threading.Timer(0.2, go.set).start()

    assert app.result(receipt.id) == "finished"
    counts = app.stats()["jobs"]
    assert counts["in_progress"] == 0
    assert counts["completed"] + counts["queued"] == 4
    attempts = {job.status: job.attempts for job in app.find()}
    assert attempts.get("queued", 0) == 0
    assert eventually(lambda: all(row.dead_at for row in app.workers()))
