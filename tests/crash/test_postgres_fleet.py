"""Several workers on one PostgreSQL: they share the work, never a job, and wait in no circle."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from places import PostgresPlace, only
from servers import PostgresServer

from .harness import Workshop, eventually

NOOP = """
    @app.task
    async def noop(n: int) -> None: ...
"""
BATCH = 5000


@pytest.fixture
def durable(tmp_path: Path, own_postgres: PostgresServer) -> Iterator[Workshop]:
    """On a server whose log is this test's alone, and whose commits reach the disk."""
    url = own_postgres.url(own_postgres.create_database(migrated=True))
    shop = Workshop(tmp_path, PostgresPlace(url), NOOP)
    yield shop
    shop.close()


def share(shop: Workshop, server: PostgresServer, total: int, workers: int) -> None:
    for start in range(0, total, BATCH):
        jobs = [shop.jobs.noop.job(n) for n in range(start, min(start + BATCH, total))]
        shop.app.enqueue_many(jobs)
    began = time.monotonic()
    fleet = [shop.worker(ready=False, concurrency=100) for _ in range(workers)]
    shop.wait_for("completed", total, within=240)
    took = time.monotonic() - began
    done = [worker.stop()["completed"] for worker in fleet]

    print(f"\n{total} jobs, {workers} workers started with them: {took:.1f} s, {sorted(done)}")
    assert sum(done) == total
    assert min(done) > 0  # nobody was left out
    assert shop.statuses() == {"completed": total}
    for kind in ("job.started", "job.succeeded"):
        counted = shop.sql(
            "SELECT count(*), count(DISTINCT job_id) FROM tenure_events WHERE kind = ?", kind
        )
        assert counted == [(total, total)], kind
    assert "deadlock detected" not in server.log
    assert "ERROR" not in server.log
    assert [worker.refused() for worker in fleet] == [0] * workers


@pytest.mark.timeout(300)
def test_four_workers_finish_each_of_many_jobs_once(
    durable: Workshop, own_postgres: PostgresServer
) -> None:
    share(durable, own_postgres, 100_000, workers=4)


@only("postgres", "on SQLite each enqueue waits for the disk of this machine")
def test_a_hundred_jobs_enqueued_one_by_one_are_done_within_a_second(
    workshop: Callable[..., Workshop],
) -> None:
    shop = workshop(NOOP)
    shop.worker()
    shop.app.result(shop.jobs.noop.enqueue(0).id, timeout=20)
    times, done = [], 1
    for _ in range(5):  # other programs share this machine: one of a few
        done += 100
        began = time.monotonic()
        for n in range(100):
            shop.jobs.noop.enqueue(n)
        eventually(
            lambda goal=done: shop.statuses()["completed"] >= goal,
            within=30,
            every=0.005,
            what="a hundred jobs done",
        )
        times.append(time.monotonic() - began)
        if times[-1] <= 1.0:
            break

    print(f"\n100 jobs, first enqueue to last finish: {min(times):.2f} s")
    assert min(times) <= 1.0
