"""Servers as fixtures, started at first use, shared by a whole test process where they can be."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator

import pytest

import servers
from proxy import Proxy


@pytest.fixture(scope="session")
def postgres() -> servers.Databases:
    """The shared server: databases on it are cheap, its life is not the test's to end."""
    return servers.require(servers.shared)


@pytest.fixture
def own_postgres() -> Iterator[servers.PostgresServer]:
    """A server that this test may stop, pause and crash; its commits reach the disk."""
    with servers.require(lambda: servers.PostgresServer(fsync=True)) as server:
        yield server


@pytest.fixture(scope="session")
def postgres15() -> Iterator[servers.PostgresServer]:
    """The oldest version of the matrix, where Debian's package is installed."""
    with servers.require(lambda: servers.PostgresServer(major=15), optional=True) as server:
        yield server


@pytest.fixture
def make_database(postgres: servers.Databases) -> Iterator[Callable[..., str]]:
    """`make_database(migrated=True)`: the URL of a database of this test's own."""
    made: list[str] = []

    def make(**how: bool) -> str:
        made.append(postgres.create_database(**how))
        return postgres.url(made[-1])

    yield make
    for name in made:
        postgres.drop_database(name)


@pytest.fixture
def database(make_database: Callable[..., str]) -> str:
    """The URL of an empty database of this test's own."""
    return make_database()


@pytest.fixture(scope="session")
def pgbouncer(postgres: servers.Databases) -> Iterator[servers.Pgbouncer]:
    """pgbouncer in transaction mode in front of the shared server."""
    with servers.require(lambda: servers.Pgbouncer(postgres)) as bouncer:
        yield bouncer


@pytest.fixture
def proxy(postgres: servers.Databases) -> Iterator[Proxy]:
    """A network of this test's own between it and the shared server."""
    with Proxy.before(postgres.url()) as network:
        yield network


def pytest_sessionstart() -> None:
    """A shell that starts us in the background has SIGINT ignored, and so would all we start:
    tests that interrupt a command would wait for ever."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_sessionfinish() -> None:
    servers.close_shared()
