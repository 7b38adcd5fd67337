"""When a beat that stands still is a death: only while we could write to the store ourselves."""

from __future__ import annotations

import fcntl
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from contract.builders import claim, get, put_many, started_job, worker, worker_row
from tenure.engine import machine, rescue, worker_state
from tenure.engine.board import boards_of, make_board
from tenure.engine.rescue import Rescuer
from tenure.engine.worker_state import WorkerState
from tenure.ids import new_id
from tenure.stores.sqlite import SqliteStore

from . import parts

LEASE, RENEW = 3.0, 1.0


class Hands:
    """A monotonic clock that somebody turns."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Hands:
    hands = Hands()
    monkeypatch.setattr(rescue, "time", hands)
    monkeypatch.setattr(worker_state, "time", hands)
    return hands


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteStore]:
    made = SqliteStore(str(tmp_path / "jobs.db"))
    made.migrate()
    yield made
    made.close()


def a_state(store: SqliteStore) -> WorkerState:
    state = parts.worker_state(lease_seconds=LEASE, lease_renew_seconds=RENEW)
    state.worker = worker(store)
    return state


def test_a_worker_that_renews_no_more_while_we_do(store: SqliteStore, clock: Hands) -> None:
    state, theirs = a_state(store), worker(store, lease_ms=int(LEASE * 1000))
    ours = Rescuer(store, state)
    started_job(store, theirs)

    put_back = [0]
    while not put_back[-1] and len(put_back) < 10:
        state.lease.renewed(clock.now)
        put_back.append(ours.look())
        clock.now += RENEW

    assert sum(put_back) == 1
    assert LEASE < clock.now - RENEW - Hands.now <= LEASE + RENEW


def test_after_a_stall_of_our_own_the_observation_starts_again(
    store: SqliteStore, clock: Hands
) -> None:
    """A lock that nobody could write past, a stopped machine: they renew a moment after us."""
    state, theirs = a_state(store), worker(store, lease_ms=int(LEASE * 1000))
    ours = Rescuer(store, state)
    started_job(store, theirs)
    state.lease.renewed(clock.now)
    assert ours.look() == 0

    clock.now += 3 * LEASE
    state.lease.renewed(clock.now)

    assert ours.look() == 0
    assert worker_row(store, theirs).dead_at is None


def test_what_the_boards_of_a_dead_worker_say_is_charged(store: SqliteStore) -> None:
    """And they go with it."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    here = {"host": socket.gethostname(), "boot": machine.boot(), "pid": ended.pid}
    dead = worker(store, id=f"here:{ended.pid}:{new_id()}", **here)
    put_many(store, 2)
    first, second = claim(store, dead)
    board = make_board(dead.id, 1, 2)
    board.assign(0, first.id)
    board.assign(1, second.id)
    board.start(1, 1.0)
    fcntl.flock(board._handle, fcntl.LOCK_UN)  # as its owner's death does

    assert Rescuer(store, a_state(store)).look() == 2

    assert (get(store, first.id).losses, get(store, second.id).losses) == (0, 1)
    assert boards_of(dead.id) == []
