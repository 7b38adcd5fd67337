"""The database file is replaced under a running worker: it goes on with the file that is there."""

from __future__ import annotations

import os
import signal
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from places import SqlitePlace, only

from .harness import Workshop, eventually

pytestmark = only("sqlite", "a server's files are the server's business")

JOBS = """
    @app.task(timeout=120)
    async def long(ctx: tenure.Context, n: int) -> int:
        say("start", ctx.job.id)
        while not there("go"):
            await asyncio.sleep(0.02)
        say("end", ctx.job.id)
        return n

    @app.task
    async def quick(n: int) -> int:
        say("ran", n)
        return n
"""


def file_of(shop: Workshop) -> Path:
    assert isinstance(shop.place, SqlitePlace)
    return shop.place.path


def backup(path: Path) -> Path:
    copy = path.with_name("backup.db")
    with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(copy)) as target:
        source.backup(target)
    return copy


def remove(path: Path) -> None:
    for ending in ("", "-wal", "-shm"):
        path.with_name(path.name + ending).unlink(missing_ok=True)


def make_empty(path: Path) -> None:
    remove(path)


def restore(path: Path) -> None:
    remove(path)
    path.with_name("backup.db").rename(path)


def restore_over_its_log(path: Path) -> None:
    os.replace(path.with_name("backup.db"), path)


@pytest.mark.parametrize("replace", [make_empty, restore, restore_over_its_log])
def test_a_worker_goes_on_with_the_file_that_is_there(
    workshop: Callable[..., Workshop], replace: Callable[[Path], None]
) -> None:
    shop = workshop(JOBS)
    path = file_of(shop)
    waiting = shop.jobs.quick.options(delay=3600).enqueue(0)
    backup(path)  # knows neither the worker nor what it runs
    worker = shop.worker(concurrency=4)
    before = shop.row_of(worker).id
    held = shop.jobs.long.enqueue(1)
    shop.wait_said("start", held.id)

    replace(path)
    fresh = [shop.jobs.quick.enqueue(n) for n in range(1, 4)]

    for receipt in fresh:
        assert shop.app.result(receipt.id, timeout=20) in (1, 2, 3)
    assert shop.app.get(held.id) is None
    assert (shop.app.get(waiting.id) is None) == (replace is make_empty)
    row = eventually(lambda: shop.row_of(worker), what="the worker in the new file")
    assert row.id != before
    assert "declared dead; starting over" in worker.log
    shop.touch("go")
    last = shop.jobs.quick.enqueue(9)
    assert shop.app.result(last.id, timeout=20) == 9
    assert worker.stop()["completed"] == 4
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_a_file_that_is_away_for_a_while(workshop: Callable[..., Workshop]) -> None:
    """The worker waits, makes none of its own, and finds its lease and its job as they were."""
    shop = workshop(JOBS)
    path = file_of(shop)
    worker = shop.worker(concurrency=4)
    held = shop.jobs.long.enqueue(1)
    shop.wait_said("start", held.id)
    shop.app.close()
    away = path.with_name("away")
    away.mkdir()
    backup(path).rename(away / path.name)
    remove(path)

    eventually(lambda: "deleted or moved away" in worker.log, what="a complaint of the worker")
    assert not path.exists()
    (away / path.name).rename(path)
    shop.touch("go")

    assert shop.app.result(held.id, timeout=20) == 1
    assert shop.job(held.id).attempts == 1
    assert shop.count("start", held.id) == 1
    assert worker.stop()["completed"] == 1


def test_two_workers_and_a_backup_that_knows_only_one(workshop: Callable[..., Workshop]) -> None:
    """The second one's number is free again in the backup: who gets it next is not the second."""
    shop = workshop(JOBS)
    path = file_of(shop)
    first = shop.worker(concurrency=4)
    backup(path)
    second = shop.worker(concurrency=4)
    number = shop.row_of(second).no
    shop.freeze(second)
    restore(path)
    third = shop.worker(concurrency=4)
    assert shop.row_of(third).no == number
    second.signal(signal.SIGCONT)

    eventually(
        lambda: "starting over" in second.log, within=15, what="the second under another number"
    )
    receipts = [shop.jobs.quick.enqueue(n) for n in range(20)]
    for receipt in receipts:
        shop.app.result(receipt.id, timeout=20)
    rows = {shop.row_of(worker).no for worker in (first, second, third)}
    assert len(rows) == 3
    assert sum(worker.stop()["completed"] for worker in (first, second, third)) == 20
