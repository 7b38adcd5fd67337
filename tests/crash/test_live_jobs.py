"""A live job is never taken away: not by a held lock, not by a held GIL."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from places import PostgresPlace
from servers import PostgresServer

from .harness import Workshop, eventually
from .long_jobs import LEASE, LONG, nothing_was_taken


@pytest.mark.parametrize(
    ("store_kind", "table"),
    [("sqlite", "jobs"), ("postgres", "jobs"), ("postgres", "workers")],
    indirect=["store_kind"],
)
def test_a_lock_is_held_for_three_leases(workshop: Callable[..., Workshop], table: str) -> None:
    """SQLite has one for the file. On PostgreSQL a DBA's ALTER TABLE holds one for a table."""
    shop = workshop(LONG)
    workers = [shop.worker(concurrency=4) for _ in range(2)]
    ids = [r.id for r in shop.app.enqueue_many([shop.jobs.long.job(n) for n in range(8)])]
    shop.wait_said("start", times=8)

    with shop.place.locked(table):
        time.sleep(3 * LEASE)  # the length of the outage is the test
    beats = {row.no: row.beat for row in shop.app.store.workers()}
    eventually(
        lambda: all(row.beat >= beats[row.no] + 4 for row in shop.app.store.workers()),
        within=30,
        what="both renewing again for more than a lease",
    )
    assert all(row.dead_at is None for row in shop.app.workers())
    shop.touch("go")
    shop.wait_for("completed", 8)

    nothing_was_taken(shop, ids)
    assert [worker.stop()["rescued"] for worker in workers] == [0, 0]


def test_the_server_stands_still_for_three_leases(
    tmp_path: Path, own_postgres: PostgresServer
) -> None:
    """A suspended machine of the database: connections stay open, nothing answers."""
    url = own_postgres.url(own_postgres.create_database(migrated=True))
    shop = Workshop(tmp_path, PostgresPlace(url), LONG)
    try:
        workers = [shop.worker(concurrency=4) for _ in range(2)]
        ids = [r.id for r in shop.app.enqueue_many([shop.jobs.long.job(n) for n in range(8)])]
        shop.wait_said("start", times=8)

        own_postgres.pause()
        time.sleep(3 * LEASE)  # the length of the outage is the test
        own_postgres.resume()
        beats = {row.no: row.beat for row in shop.app.store.workers()}
        eventually(
            lambda: all(row.beat >= beats[row.no] + 4 for row in shop.app.store.workers()),
            within=30,
            what="both renewing again for more than a lease",
        )
        shop.touch("go")
        shop.wait_for("completed", 8)

        nothing_was_taken(shop, ids)
        assert [worker.stop()["rescued"] for worker in workers] == [0, 0]
    finally:
        shop.close()


def test_a_handler_holds_the_gil_for_three_leases(workshop: Callable[..., Workshop]) -> None:
    shop = workshop(LONG)
    workers = [shop.worker(concurrency=4) for _ in range(2)]
    ids = [r.id for r in shop.app.enqueue_many([shop.jobs.long.job(n) for n in range(4)])]
    shop.wait_said("start", times=4)  # what waits behind it unstarted is given back, and may be
    ids.append(shop.jobs.gil.enqueue(3 * LEASE).id)
    shop.wait_said("start", times=5)
    shop.touch("go")

    shop.wait_for("completed", 5, within=45)

    nothing_was_taken(shop, ids)
    assert [worker.stop()["rescued"] for worker in workers] == [0, 0]


def test_one_connection_that_hangs_costs_no_lease(
    tmp_path: Path, own_postgres: PostgresServer
) -> None:
    """The renewals of one worker are not answered, though the server is well: a backend that
    hangs, a firewall that forgot one connection. It must not wait for that one for ever."""
    url = own_postgres.url(own_postgres.create_database(migrated=True))
    shop = Workshop(tmp_path, PostgresPlace(url), LONG)
    try:
        workers = [shop.worker(concurrency=4) for _ in range(2)]
        ids = [r.id for r in shop.app.enqueue_many([shop.jobs.long.job(n) for n in range(8)])]
        shop.wait_said("start", times=8)
        renewing = "SELECT min(pid) FROM pg_stat_activity WHERE query LIKE '%SET beat = beat + 1%'"
        pid = eventually(
            lambda: shop.sql(f"{renewing} AND pid <> pg_backend_pid()")[0][0], what="a renewal"
        )

        os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(2 * LEASE)  # the length of the hang is the test
        finally:
            os.kill(pid, signal.SIGCONT)
        shop.touch("go")
        shop.wait_for("completed", 8)

        nothing_was_taken(shop, ids)
        assert [worker.stop()["rescued"] for worker in workers] == [0, 0]
    finally:
        shop.close()
