"""Everything through a real pgbouncer in transaction mode: each statement on any session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import pytest

import servers
from tenure.wakeups import postgres as wakeups

from .harness import Fleet, sessions


@pytest.fixture
def pooler(server: servers.PostgresServer) -> Iterator[servers.Pgbouncer]:
    """With fewer sessions than clients, so that they are really shared. After a failed login it
    would not try again for 15 s, whatever we do."""
    settings = {"server_login_retry": 1}

    def open_pooler() -> servers.Pgbouncer:
        return servers.Pgbouncer(server, pool_size=6, settings=settings)

    with servers.require(open_pooler) as pgbouncer:
        yield pgbouncer


def behind(pooler: servers.Pgbouncer) -> Callable[[str], str]:
    return lambda url: pooler.url(urlsplit(url).path.removeprefix("/"))


def test_all_kinds_of_jobs(fleet: Callable[..., Fleet], pooler: servers.Pgbouncer) -> None:
    """Retries, steps, follow-ups, a handler's own transaction; hints straight from the server."""
    shop = fleet(through=behind(pooler), listens_directly=True)
    shop.start(producers=2)
    shop.wait_for_progress(100, within=30)
    listeners = shop.sql(sessions(["tenure listener"]))
    assert len(listeners) == len(shop.workers)
    ((most,),) = shop.sql(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
        " AND backend_type = 'client backend' AND application_name <> 'tenure listener'"
    )
    assert most <= 6 + 2, "somebody went around the pooler"  # the observer's and this one

    shop.healed()
    shop.check()


def test_it_is_restarted_under_load(fleet: Callable[..., Fleet], pooler: servers.Pgbouncer) -> None:
    shop = fleet(through=behind(pooler), listens_directly=True)
    shop.start()
    for _ in range(2):
        shop.wait_for_progress(15)
        pooler.stop()
        shop.alive()
        pooler.start()

    shop.healed()
    shop.check()


def test_the_server_crashes_behind_it(
    fleet: Callable[..., Fleet], server: servers.PostgresServer, pooler: servers.Pgbouncer
) -> None:
    """Its clients' connections outlive the server's; it says so in errors of its own."""
    shop = fleet(through=behind(pooler), listens_directly=True)
    shop.start()
    server.restart("immediate")

    shop.healed()
    shop.check()


def test_without_a_way_around_it(
    fleet: Callable[..., Fleet], pooler: servers.Pgbouncer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LISTEN does not work through it: hints say so, polling does the work."""
    monkeypatch.setattr(wakeups, "ANSWER_SECONDS", 0.5)
    shop = fleet(through=behind(pooler), poll_interval_ms=500)
    shop.start(producers=0)
    hints = shop.app.open_wakeup()
    try:
        assert not hints.wait(2.5)
        assert not hints.healthy()
        assert hints.describe().startswith("hints: down, polling every ")
        assert "because a pooler (pgbouncer?) is in between" in hints.describe()
        assert "TENURE_LISTEN_URL" in hints.describe()
    finally:
        hints.close()
    waits = [shop.pick_up() for _ in range(3)]
    print(f"  by polling every 0.5 s picked up after {max(waits):.2f} s at most")
    assert max(waits) < 0.5 + 1.5

    shop.healed()
    shop.check()
