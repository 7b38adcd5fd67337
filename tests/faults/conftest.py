"""`fleet(**settings)`: two workers and a producer on a server that this test may break."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import servers
from proxy import Proxy

from .harness import Fleet


@pytest.fixture(scope="session")
def breakable() -> Iterator[servers.PostgresServer]:
    """One server for all faults: a start takes as long as a fault. Its commits reach the disk."""
    with servers.require(lambda: servers.PostgresServer(fsync=True)) as server:
        yield server


@pytest.fixture
def server(breakable: servers.PostgresServer) -> Iterator[servers.PostgresServer]:
    """The same, made whole again for the next test, however this one went."""
    yield breakable
    if breakable.running:
        breakable.resume()
    else:
        breakable.start()
    breakable.execute("ALTER SYSTEM RESET ALL")
    breakable.execute("SELECT pg_reload_conf()")


@pytest.fixture
def network(server: servers.PostgresServer) -> Iterator[Proxy]:
    with Proxy.before(server.url()) as proxy:
        yield proxy


@pytest.fixture
def fleet(
    tmp_path: Path, server: servers.PostgresServer, caplog: pytest.LogCaptureFixture
) -> Iterator[Callable[..., Fleet]]:
    """Not started. `through`: what makes the URL of a proxy or a pooler out of the server's."""
    opened: list[Fleet] = []

    def make(
        *, through: Callable[[str], str] = str, listens_directly: bool = False, **settings: Any
    ) -> Fleet:
        direct = server.url(server.create_database(migrated=True))
        if listens_directly:
            settings["listen_url"] = direct
        opened.append(Fleet(tmp_path, server, through(direct), direct, **settings))
        return opened[-1]

    yield make
    for each in opened:
        each.close()
        assert each.word not in caplog.text, "a payload in the program's own log"
