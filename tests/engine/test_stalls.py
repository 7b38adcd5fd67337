"""When a beat that stands still is a death: only while we could write to the store ourselves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from contract.builders import started_job, worker, worker_row
from tenure.config import Settings
from tenure.engine import janitor
from tenure.engine.janitor import Janitor
from tenure.stores.sqlite import SqliteStore

LEASE, RENEW = 3.0, 1.0


class Hands:
    """A monotonic clock that somebody turns."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Hands:
    hands = Hands()
    monkeypatch.setattr(janitor, "time", hands)
    return hands


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteStore]:
    made = SqliteStore(str(tmp_path / "jobs.db"))
    made.migrate()
    yield made
    made.close()


def test_a_worker_that_renews_no_more_while_we_do(store: SqliteStore, clock: Hands) -> None:
    settings = Settings(lease_seconds=LEASE, lease_renew_seconds=RENEW)
    ours, theirs = Janitor(store, settings), worker(store, lease_ms=int(LEASE * 1000))
    own = worker(store)
    started_job(store, theirs)

    put_back = [0]
    while not put_back[-1] and len(put_back) < 10:
        ours.wrote(clock.now)
        put_back.append(ours.look(own))
        clock.now += RENEW

    assert sum(put_back) == 1
    assert LEASE < clock.now - RENEW - Hands.now <= LEASE + RENEW


def test_after_a_stall_of_our_own_the_observation_starts_again(
    store: SqliteStore, clock: Hands
) -> None:
    """A lock that nobody could write past, a stopped machine: they renew a moment after us."""
    settings = Settings(lease_seconds=LEASE, lease_renew_seconds=RENEW)
    ours, theirs = Janitor(store, settings), worker(store, lease_ms=int(LEASE * 1000))
    own = worker(store)
    started_job(store, theirs)
    ours.wrote(clock.now)
    assert ours.look(own) == 0

    clock.now += 3 * LEASE
    ours.wrote(clock.now)

    assert ours.look(own) == 0
    assert worker_row(store, theirs).dead_at is None
