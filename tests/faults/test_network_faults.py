"""The network between us and a healthy server fails, without a word or in the middle of one."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from crash.harness import eventually
from proxy import Proxy
from tenure.wakeups import postgres as wakeups

from .harness import LEASE, Fleet, Prompt, sessions

TIMEOUT = 2.0  # of a call, in place of 15 s: the hole has to be longer


# -- silence --------------------------------------------------------------------------------------


@pytest.mark.parametrize("closed", [True, False], ids=["reset", "delivered late"])
def test_nothing_passes_for_longer_than_a_call_may_take(
    fleet: Callable[..., Fleet], network: Proxy, closed: bool
) -> None:
    """Requests that were given up may still arrive: claims nobody waits for, finishes that were
    sent again, jobs that were stored by another attempt."""
    shop = fleet(through=network.url, busy_timeout=TIMEOUT)
    shop.start()
    network.black_hole()
    time.sleep(2 * LEASE + 0.5)  # the length of the fault
    shop.alive()
    assert network.counts["held"] > 5
    network.heal(closed=closed)

    shop.healed()
    shop.check()
    assert any("did not answer" in worker.log for worker in shop.workers)


@pytest.mark.soak
@pytest.mark.parametrize("closed", [True, False], ids=["reset", "delivered late"])
def test_nothing_passes_for_a_minute(
    fleet: Callable[..., Fleet], network: Proxy, closed: bool
) -> None:
    shop = fleet(through=network.url)
    shop.start()
    network.black_hole()
    time.sleep(60)  # the length of the fault
    network.heal(closed=closed)

    shop.healed()
    shop.check()


def test_the_network_refuses_and_resets(fleet: Callable[..., Fleet], network: Proxy) -> None:
    shop = fleet(through=network.url)
    shop.start()
    network.refuse()
    time.sleep(LEASE + 1)  # the length of the fault
    shop.alive()
    network.heal()

    shop.healed()
    shop.check()


# -- hints ----------------------------------------------------------------------------------------


def test_the_listener_hears_nothing_and_does_not_know(
    fleet: Callable[..., Fleet], network: Proxy
) -> None:
    """Before its next probe (20 s) a half-open listener looks healthy: then polling at the slower
    pace has to find what came. Once it is connected again, hints count again."""
    poll = 1.5
    pace = {"poll_interval_ms": int(poll * 1000), "hint_poll_interval_ms": int(poll * 1000)}
    shop = fleet(through=network.url, **pace)
    shop.start(producers=0)
    assert min(shop.pick_up() for _ in range(3)) < poll / 4  # by a hint
    network.black_hole("tenure listener")
    waits = [shop.pick_up() for _ in range(3)]
    assert max(waits) < poll + 1.5
    assert max(waits) > poll / 4, "the hints have come through"
    network.heal(closed=True)

    shop.healed()
    eventually(lambda: shop.pick_up() < poll / 4, within=30, what="hints again")
    print(f"  without hints picked up within {max(waits):.2f} s, polling every {poll:g} s")
    shop.check()


def test_a_listener_that_hears_nothing_is_found_out(
    fleet: Callable[..., Fleet], network: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its probe is not answered: it says so, has a look, and polls at the quicker pace until it
    listens again; then it looks at what it may have missed."""
    shop = fleet(through=network.url, poll_interval_ms=500, hint_poll_interval_ms=60_000)
    shop.start(producers=0, program=Prompt.PROGRAM)
    monkeypatch.setattr(wakeups.PostgresWakeup, "PROBE_SECONDS", Prompt.PROBE_SECONDS)
    monkeypatch.setattr(wakeups, "ANSWER_SECONDS", Prompt.ANSWER_SECONDS)
    hints = shop.app.open_wakeup()
    try:
        assert hints.wait(10)
        assert hints.describe() == "hints: LISTEN tenure"
        network.black_hole("tenure listener")
        missed = shop.pick_up()
        assert hints.wait(10), "nobody looks at what was missed before"
        assert not hints.healthy()
        assert hints.describe().startswith("hints: down, polling every ")
        assert "did not answer" in hints.describe()
        later = [shop.pick_up() for _ in range(2)]
        network.heal(closed=True)
        assert hints.wait(30), "nobody looks at what was missed meanwhile"
        assert hints.healthy()
    finally:
        hints.close()

    shop.healed()
    listening = sessions(["tenure listener"])
    eventually(lambda: len(shop.sql(listening)) == 2, within=30, what="both workers listening")
    assert min(shop.pick_up() for _ in range(2)) < 0.2
    print(f"  deaf, picked up after {missed:.2f} s; known to be deaf, after {max(later):.2f} s")
    assert missed < Prompt.PROBE_SECONDS + Prompt.ANSWER_SECONDS + 1.5
    assert max(later) < 0.5 + 1.5
    shop.check()
