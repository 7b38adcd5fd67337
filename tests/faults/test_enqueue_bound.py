"""A web request waits for its enqueue: however the server fails, that ends after a bound of its
own, and says what is known. Workers keep their patience."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

import servers
import tenure
from tenure.child import _for_a_child
from tenure.config import Settings

BOUND = 5.0
SPARE = 1.5  # for a machine that is busy, and a cancel that nobody answers


@contextmanager
def app_on(url: str, **settings: Any) -> Iterator[tenure.App]:
    app = tenure.App(url, **settings)

    @app.task
    def work(n: int) -> int:
        return n

    yield app
    app.close()


def ways(app: tenure.App) -> dict[str, Callable[[], Any]]:
    work = app.tasks["work"]
    return {
        "single": lambda: work.enqueue(1),
        "batch": lambda: app.enqueue_many([work.job(n) for n in range(3)]),
        "keyed": lambda: work.options(key="k").enqueue(1),
    }


def seconds_of(call: Callable[[], Any]) -> tuple[float, tenure.StoreError]:
    begun = time.monotonic()
    with pytest.raises(tenure.StoreError) as raised:
        call()
    return time.monotonic() - begun, raised.value


@pytest.fixture
def mute() -> Iterator[str]:
    """A server that accepts and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        kept: list[socket.socket] = []

        def accept() -> None:
            while True:
                try:
                    kept.append(listening.accept()[0])
                except OSError:
                    return

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield f"postgresql://nobody@127.0.0.1:{listening.getsockname()[1]}/nothing"
        listening.shutdown(socket.SHUT_RDWR)
    thread.join(5)
    for one in kept:
        one.close()


@pytest.mark.timed
@pytest.mark.parametrize("way", ["single", "keyed"])
def test_one_that_accepts_and_never_answers(mute: str, way: str) -> None:
    with app_on(mute) as app:
        took, error = seconds_of(ways(app)[way])
    assert isinstance(error, tenure.StoreUnavailable)
    assert not error.unknown, "nothing was sent"
    assert took < BOUND + SPARE


@pytest.mark.timed
def test_one_that_refuses() -> None:
    url = f"postgresql://nobody@127.0.0.1:{servers.free_port()}/nothing"
    with app_on(url) as app:
        took, error = seconds_of(ways(app)["single"])
    assert isinstance(error, tenure.StoreUnavailable)
    assert not error.unknown
    assert took < BOUND + SPARE


@pytest.mark.timed
@pytest.mark.parametrize("way", ["single", "batch", "keyed"])
def test_one_that_is_stopped(server: servers.PostgresServer, way: str) -> None:
    """SIGSTOP, with a connection open: it was asked, and nobody knows what it did."""
    with app_on(server.url(server.create_database(migrated=True))) as app:
        app.tasks["work"].enqueue(0)
        server.pause()
        took, error = seconds_of(ways(app)[way])
        assert isinstance(error, tenure.StoreUnavailable)
        assert error.unknown
        assert took < BOUND + SPARE

        new, fresh = seconds_of(ways(app)[way])  # no connection is left
        assert not fresh.unknown
        assert new < BOUND + SPARE
        server.resume()
        ways(app)[way]()
        print(f"\n{way}: {took:.1f} s while asked, {new:.1f} s without a connection")


@pytest.mark.timed
def test_one_that_is_stopped_when_a_caller_s_connection_is_joined(
    server: servers.PostgresServer,
) -> None:
    """The names of queues are looked after on a connection of ours."""
    url = server.url(server.create_database(migrated=True))
    with app_on(url) as app, psycopg.connect(url) as conn:
        conn.execute("SELECT 1")
        server.pause()
        took, _error = seconds_of(
            lambda: app.tasks["work"].options(conn=conn, queue="new").enqueue(1)
        )
        server.resume()
    assert took < BOUND + SPARE


@pytest.mark.timed
def test_a_bound_of_another_length(mute: str) -> None:
    with app_on(mute, enqueue_timeout=2) as app:
        took, _error = seconds_of(ways(app)["single"])
    assert took < 2 + SPARE
    with app_on(mute, busy_timeout=2) as app:
        took, _error = seconds_of(ways(app)["single"])
    assert took < 2 + SPARE


def test_a_short_outage_is_waited_for(server: servers.PostgresServer) -> None:
    with app_on(server.url(server.create_database(migrated=True))) as app:
        app.tasks["work"].enqueue(0)
        server.pause()
        threading.Timer(1.5, server.resume).start()
        receipt = app.tasks["work"].enqueue(1)
        assert app.get(receipt.id) is not None


def test_what_a_handler_enqueues_has_a_worker_s_patience() -> None:
    settings = _for_a_child(Settings(url="postgresql://h/d"), 1)
    assert settings.enqueue_timeout == settings.busy_timeout == 15
