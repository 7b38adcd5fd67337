"""The server itself crashes and is stopped while work goes on: what was acknowledged is there."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import tenure
from places import PostgresPlace
from servers import PostgresServer

from .harness import Workshop, eventually
from .long_jobs import LONG, nothing_was_taken

WORK = """
    @app.task(timeout=120)
    async def short(n: int) -> int:
        await asyncio.sleep(0.01)
        return n
"""


@pytest.fixture
def shop(tmp_path: Path, own_postgres: PostgresServer) -> Iterator[Workshop]:
    url = own_postgres.url(own_postgres.create_database(migrated=True))
    opened = Workshop(tmp_path, PostgresPlace(url), LONG + WORK)
    yield opened
    opened.close()


def test_a_crashing_server_loses_no_job_and_takes_none_away(
    shop: Workshop, own_postgres: PostgresServer
) -> None:
    """It is killed three times under two workers that never end because of it."""
    workers = [shop.worker(concurrency=10) for _ in range(2)]
    ids = [r.id for r in shop.app.enqueue_many([shop.jobs.short.job(n) for n in range(600)])]
    long = [r.id for r in shop.app.enqueue_many([shop.jobs.long.job(n) for n in range(4)])]
    shop.wait_said("start", times=4)
    for number in range(3):
        goal = 150 * (number + 1)
        eventually(
            lambda goal=goal: len(shop.events("job.succeeded")) >= goal, within=30, what="work"
        )
        own_postgres.restart("immediate")
        for n in range(20):  # acknowledged or an error; what was acknowledged counts
            try:
                ids.append(shop.jobs.short.enqueue(n).id)
            except tenure.StoreError:
                time.sleep(0.05)
    shop.wait_for("completed", len(ids), within=60)
    shop.touch("go")
    shop.wait_for("completed", len(ids) + 4, within=30)

    stops = [worker.stop() for worker in workers]
    succeeded = shop.events("job.succeeded")
    assert set(ids) | set(long) == set(succeeded)
    assert set(succeeded.values()) == {1}
    assert [stop["rescued"] for stop in stops] == [0, 0]
    for id in long:
        job = shop.job(id)
        assert (job.lease_no, job.attempts, job.crashes) == (1, 1, 0)


def test_a_server_that_is_down_for_longer_than_a_lease_takes_nothing_away(
    shop: Workshop, own_postgres: PostgresServer
) -> None:
    workers = [shop.worker(concurrency=4) for _ in range(2)]
    ids = [r.id for r in shop.app.enqueue_many([shop.jobs.long.job(n) for n in range(6)])]
    shop.wait_said("start", times=6)

    own_postgres.stop("fast")
    time.sleep(6)  # two leases: the length of the outage is the test
    shop.touch("go")  # they end while nobody can write it down
    own_postgres.start()
    shop.wait_for("completed", 6, within=30)

    nothing_was_taken(shop, ids)
    assert [worker.stop()["rescued"] for worker in workers] == [0, 0]
