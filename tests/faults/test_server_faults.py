"""The server fails in every way an operator has seen: workers wait, carry on, and lose nothing."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import psycopg
import pytest

import servers
from crash.harness import eventually

from .harness import LEASE, Fleet, sessions


def terminate(connection: psycopg.Connection) -> int:
    found = connection.execute(
        f"SELECT pg_terminate_backend(pid) FROM ({sessions()}) s"
    ).fetchall()
    return len(found)


def test_every_session_is_terminated_again_and_again(
    fleet: Callable[..., Fleet], server: servers.PostgresServer
) -> None:
    shop = fleet()
    shop.start()
    killed = 0
    until = time.monotonic() + 8
    with psycopg.connect(shop.direct, autocommit=True) as admin:
        while time.monotonic() < until:
            killed += terminate(admin)
            time.sleep(0.15)  # the rhythm of the fault

    shop.healed()
    shop.check()
    print(f"  {killed} sessions terminated")
    assert killed > 50
