"""The server fails in every way an operator has seen: workers wait, carry on, and lose nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

import servers
from crash.harness import eventually

from .harness import LEASE, Fleet, sessions


def terminate(admin: psycopg.Connection[Any]) -> int:
    return len(admin.execute(f"SELECT pg_terminate_backend(pid) FROM ({sessions()}) s").fetchall())


# -- connections ----------------------------------------------------------------------------------


def test_every_session_is_terminated_again_and_again(fleet: Callable[..., Fleet]) -> None:
    shop = fleet()
    shop.start()
    killed = 0
    until = time.monotonic() + 7
    with psycopg.connect(shop.direct, autocommit=True) as admin:
        while time.monotonic() < until:
            killed += terminate(admin)
            time.sleep(0.15)  # the rhythm of the fault

    shop.healed()
    shop.check()
    print(f"  {killed} sessions terminated")
    assert killed > 50


def test_somebody_takes_every_connection(
    fleet: Callable[..., Fleet], server: servers.PostgresServer
) -> None:
    """They are needed, too: whatever Tenure had open is terminated, the slots go to others."""
    shop = fleet()
    shop.start()
    with greedy(shop.direct) as (admin, taken):
        eventually(lambda: terminate(admin) + taken() > 80, what="no slots left", every=0.2)
        for _ in range(4):
            terminate(admin)
            time.sleep(0.5)  # the rhythm of the fault
        # One of ours may be quicker to a slot than the greedy one: until that has them all.
        eventually(lambda: terminate(admin) == 0, what="no session of ours", every=0.2)

    shop.healed()
    shop.check()
    assert "too many clients" in server.log or "remaining connection slots" in server.log
    assert any("connection" in worker.log for worker in shop.workers)


@contextlib.contextmanager
def greedy(url: str) -> Iterator[tuple[psycopg.Connection[Any], Callable[[], int]]]:
    """A program that opens connections as fast as it gets them. Its own first one stays usable."""
    over = threading.Event()
    taken: list[psycopg.Connection[Any]] = []

    def grab() -> None:
        while not over.is_set():
            try:
                taken.append(psycopg.connect(url, application_name="greedy"))
            except psycopg.OperationalError:
                over.wait(0.005)

    with psycopg.connect(url, autocommit=True) as admin:
        threads = [threading.Thread(target=grab) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            yield admin, lambda: len(taken)
        finally:
            over.set()
            for thread in threads:
                thread.join()
            for connection in taken:
                connection.close()


# -- the whole server -----------------------------------------------------------------------------


def test_the_server_crashes(fleet: Callable[..., Fleet], server: servers.PostgresServer) -> None:
    """An immediate stop under load: what was acknowledged is in the log it recovers from."""
    shop = fleet()
    shop.start(producers=2)
    for _ in range(2):
        shop.wait_for_progress(20)
        server.restart("immediate")

    shop.healed()
    shop.check()


def stopped(shop: Fleet, server: servers.PostgresServer, seconds: float) -> None:
    shop.start()
    server.stop("fast")
    time.sleep(seconds)  # the length of the fault
    shop.alive()
    server.start()

    shop.healed()
    shop.check()


def test_the_server_is_down_for_a_while(
    fleet: Callable[..., Fleet], server: servers.PostgresServer
) -> None:
    stopped(fleet(), server, 5)


@pytest.mark.soak
@pytest.mark.parametrize("seconds", [20, 45])
def test_the_server_is_down_for_long(
    fleet: Callable[..., Fleet], server: servers.PostgresServer, seconds: float
) -> None:
    """Longer than a call of ours may take, and than three of them."""
    stopped(fleet(), server, seconds)


def paused(shop: Fleet, server: servers.PostgresServer, seconds: float) -> None:
    shop.start()
    server.pause()
    time.sleep(seconds)  # the length of the fault
    shop.alive()
    server.resume()

    shop.healed()
    shop.check()


def test_the_server_hangs_for_three_leases(
    fleet: Callable[..., Fleet], server: servers.PostgresServer
) -> None:
    """Its machine is suspended: connections stay open, nothing answers, everybody's lease is over
    when it comes back. Nobody may conclude anything from that."""
    paused(fleet(), server, 3 * LEASE + 1)


@pytest.mark.soak
@pytest.mark.parametrize("seconds", [20, 45])
def test_the_server_hangs_for_long(
    fleet: Callable[..., Fleet], server: servers.PostgresServer, seconds: float
) -> None:
    """Longer than a call may take: what was asked is given up, and done by the server later."""
    paused(fleet(), server, seconds)


def test_a_single_backend_hangs(
    fleet: Callable[..., Fleet], server: servers.PostgresServer
) -> None:
    """The one that renews a lease stops, the others do not. Its worker has to renew on another
    connection before its lease is over: the neighbour is well and watches it."""
    shop = fleet()
    shop.start()
    with psycopg.connect(shop.direct, autocommit=True) as admin:
        ((pid,),) = eventually(
            lambda: admin.execute(
                "SELECT pid FROM pg_stat_activity WHERE datname = current_database()"
                " AND state = 'idle' AND query LIKE '%%SET beat = beat + 1%%' LIMIT 1"
            ).fetchall(),
            what="a session that renews",
        )
    os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(2 * LEASE + 0.5)  # the length of the fault
    finally:
        os.kill(pid, signal.SIGCONT)

    shop.healed()
    shop.check()


# -- its settings ---------------------------------------------------------------------------------


def configure(admin: psycopg.Connection[Any], change: str) -> None:
    admin.execute(f"ALTER SYSTEM {change}")
    admin.execute("SELECT pg_reload_conf()")


def test_the_server_becomes_read_only(
    fleet: Callable[..., Fleet], server: servers.PostgresServer
) -> None:
    """A failover that leaves us with the old primary: reads work, writes do not."""
    shop = fleet()
    shop.start()
    with psycopg.connect(shop.direct, autocommit=True) as admin:
        configure(admin, "SET default_transaction_read_only = on")
        eventually(
            lambda: "cannot execute" in server.log or "is read-only" in shop.logs(),
            what="a write refused",
        )
        terminate(admin)
        time.sleep(LEASE)  # the length of the fault
        # One of ours may be quicker to a slot than the greedy one; no worker can work with that.
        (left,) = admin.execute(f"SELECT count(*) FROM ({sessions()}) s").fetchone() or (0,)
        assert left <= 2
        configure(admin, "RESET default_transaction_read_only")

    shop.healed()
    shop.check()


def test_no_statement_is_given_enough_time(
    fleet: Callable[..., Fleet], server: servers.PostgresServer
) -> None:
    """An administrator's statement_timeout, too low for anything: 57014 from everywhere."""
    shop = fleet()
    shop.start()
    before = server.log.count("statement timeout")
    with psycopg.connect(shop.direct, autocommit=True) as admin:
        admin.execute("SET statement_timeout = 0")
        configure(admin, "SET statement_timeout = '1ms'")
        eventually(
            lambda: server.log.count("statement timeout") > before + 5, what="statements cancelled"
        )
        time.sleep(LEASE)  # the length of the fault
        configure(admin, "RESET statement_timeout")

    shop.healed()
    shop.check()
