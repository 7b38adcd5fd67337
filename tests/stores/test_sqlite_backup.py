"""docs/backup.md, followed to the letter while a worker and a program are busy with the file."""

from __future__ import annotations

import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from crash.conftest import workshop
from crash.harness import Workshop, environment
from places import only, place, store_kind

__all__ = ["place", "store_kind", "workshop"]

pytestmark = only("sqlite", "a server has backups of its own")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "backup.md"
JOBS = """
    @app.task
    async def quick(n: int) -> int:
        return n

    @app.task(timeout=120)
    async def long(ctx: tenure.Context) -> str:
        say("start", ctx.job.id)
        while not there("go"):
            await asyncio.sleep(0.02)
        return ctx.key
"""


def blocks(section: str, language: str) -> list[str]:
    text = PAGE.read_text("utf-8").split(f"\n## {section}\n")[1].split("\n## ")[0]
    found = re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert found, f"{PAGE.name} has no {language} block under {section}"
    return found


def type_in(block: str, folder: Path) -> str:
    """What a console block prints when its commands are typed."""
    commands = [line.removeprefix("$ ") for line in block.splitlines() if line.startswith("$ ")]
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", "\n".join(commands)],
        cwd=folder,
        env=environment() | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def copy_by_shell(folder: Path) -> None:
    if shutil.which("sqlite3") is None:
        pytest.skip("the sqlite3 command is not installed (apt install sqlite3)")
    type_in(blocks("Copy", "console")[0], folder)


def copy_by_python(folder: Path) -> None:
    (text,) = blocks("Copy", "python")
    subprocess.run([sys.executable, "-c", text], cwd=folder, check=True, timeout=60)


@pytest.fixture
def shop(workshop: Callable[..., Workshop]) -> Workshop:
    return workshop(JOBS)


@pytest.fixture
def acknowledged(shop: Workshop) -> Iterator[Callable[[], set[str]]]:
    """A program that enqueues without a pause; what it was told is stored, so far."""
    ids: list[str] = []
    over = threading.Event()

    def enqueue() -> None:
        while not over.is_set():
            ids.extend(
                r.id for r in shop.app.enqueue_many([shop.jobs.quick.job(n=n) for n in (1, 2)])
            )

    thread = threading.Thread(target=enqueue)
    thread.start()
    yield lambda: set(ids)
    over.set()
    thread.join()


def ids_in(path: Path) -> set[str]:
    with closing(sqlite3.connect(path)) as db:
        return {row[0] for row in db.execute("SELECT id FROM job_queue")}


@pytest.mark.parametrize("copy", [copy_by_shell, copy_by_python])
def test_a_copy_under_load_is_whole(
    shop: Workshop, acknowledged: Callable[[], set[str]], copy: Callable[[Path], None]
) -> None:
    worker = shop.worker()
    shop.wait_for("completed", 50)
    before = acknowledged()
    copy(shop.folder)
    after = acknowledged()

    backup = shop.folder / "backup.db"
    kept = ids_in(backup)
    assert before <= kept
    assert after - before  # the load went on
    if shutil.which("sqlite3"):
        assert type_in(blocks("Copy", "console")[1], shop.folder).startswith("ok\n")
    with closing(sqlite3.connect(backup)) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    said = subprocess.run(
        [sys.executable, "-m", "tenure", "doctor", "--json", "--url", f"sqlite:///{backup}"],
        cwd=shop.folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    found = {one["check"]: one["level"] for one in map(json.loads, said.stdout.splitlines())}
    assert {found[check] for check in ("schema", "integrity", "places", "wal")} == {"ok"}
    assert worker.alive


def test_a_restored_file_goes_on_from_the_moment_of_the_copy(shop: Workshop) -> None:
    worker = shop.worker(concurrency=4)
    done = shop.jobs.quick.options(key="before").enqueue(1)
    assert shop.app.result(done.id, timeout=20) == 1
    running = shop.jobs.long.options(key="running").enqueue()
    shop.wait_said("start", running.id)
    shop.app.pause("exports", reason="for this test")
    later = shop.jobs.quick.options(queue="exports").enqueue(2)
    copy_by_python(shop.folder)

    since = shop.jobs.quick.options(key="since").enqueue(3)
    shop.touch("go")
    key = shop.app.result(running.id, timeout=20)
    assert shop.app.result(since.id, timeout=20) == 3
    shop.app.resume("exports")
    assert worker.stop()["completed"] >= 3
    shop.app.close()
    (commands,) = blocks("Restore", "console")
    type_in(commands, shop.folder)

    # Finished since the copy: run again, under the same key. Enqueued since: gone, its key is free.
    assert shop.app.get(since.id) is None
    assert not shop.jobs.quick.options(key="since").enqueue(4).duplicate
    assert shop.jobs.quick.options(key="before").enqueue(5) == (done.id, True, "completed")
    shop.worker(concurrency=4)
    assert shop.app.result(running.id, timeout=20) == key
    assert shop.count("start", running.id) == 2
    assert shop.job(later.id).status == "queued"  # paused, as it was
    shop.app.resume("exports")
    assert shop.app.result(later.id, timeout=20) == 2
    assert (shop.job(done.id).attempts, shop.job(running.id).attempts) == (1, 2)
