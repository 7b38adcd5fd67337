"""Several workers on one PostgreSQL: they share the work, never a job, and wait in no circle."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from places import PostgresPlace, only
from servers import Databases, PostgresServer

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


MIXED = """
    @app.task
    async def quick(n: int) -> None: ...

    @app.task
    async def parent(ctx: tenure.Context) -> None:
        ctx.progress(50)
        ctx.enqueue(quick, 1)
"""


@only("postgres", "SQLite has no connections to run out of")
def test_a_worker_holds_five_connections_at_most(
    workshop: Callable[..., Workshop], postgres: Databases
) -> None:
    """Whatever it does at once: claims, finishes, progress, follow-ups, upkeep, hints."""
    shop = workshop(MIXED)
    shop.app.enqueue_many([shop.jobs.quick.job(n) for n in range(20_000)])
    shop.app.enqueue_many([shop.jobs.parent.job() for _ in range(2_000)])
    shop.app.close()  # its own connections are not the worker's
    worker = shop.worker(ready=False, drain=True)
    most: Counter[str] = Counter()

    def ended() -> bool:
        rows = postgres.execute(
            "SELECT application_name, count(*) FROM pg_stat_activity"
            " WHERE datname = %s AND backend_type = 'client backend' GROUP BY 1",
            [shop.place.url.rpartition("/")[2]],
        )
        now = Counter(dict(rows))
        most.update({name: max(0, count - most[name]) for name, count in now.items()})
        most["all"] = max(most["all"], now.total())
        return not worker.alive

    eventually(ended, within=60, every=0.005, what="the end of a drain")
    assert worker.wait() == 0, worker.log
    assert most["all"] <= 5, most
    assert most["tenure"] == 3, most  # two for calls, one for the lease
    assert most["tenure listener"] == 1, most
    assert shop.statuses() == {"completed": 24_000}
