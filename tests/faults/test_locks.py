"""A stranger holds a lock for several leases: whoever waits is alive all the same."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psycopg
import pytest
from psycopg.types.json import Jsonb

from crash.harness import eventually

from .harness import LEASE, RESUME_WITHIN, Fleet


@contextmanager
def held(url: str, statement: str) -> Iterator[None]:
    """With NOWAIT the statement is tried until it succeeds: a stranger that waits for one table
    while it holds another would make a deadlock of its own with our statements."""
    with psycopg.connect(url) as stranger:
        while True:
            try:
                stranger.execute(statement)
                break
            except psycopg.errors.LockNotAvailable:
                stranger.rollback()
        yield
        stranger.rollback()


def test_nobody_can_claim_or_finish(fleet: Callable[..., Fleet]) -> None:
    """Renewals still pass: leases are alive, and what they say about jobs whose end is not
    written yet must not put those back into the queue."""
    shop = fleet(busy_timeout=2.0)
    shop.start()
    ends = [shop.jobs.medium.job(**shop.arguments()) for _ in range(6)]
    shop.promised += [receipt.id for receipt in shop.app.enqueue_many(ends)]
    eventually(lambda: shop.starts("medium") == len(ends), what="jobs that will end meanwhile")
    with held(shop.direct, "LOCK TABLE tenure.jobs IN EXCLUSIVE MODE"):
        (shop.folder / "enough").touch()
        beats = dict(shop.sql("SELECT no, beat FROM tenure.workers"))
        time.sleep(3 * LEASE)  # the length of the fault
        after = dict(shop.sql("SELECT no, beat FROM tenure.workers"))
        renewed = [after[no] - beat for no, beat in beats.items()]
        assert min(renewed) >= 4, f"renewals did not pass: {renewed}\n{shop.logs()}"

    shop.healed()
    shop.check()


@pytest.mark.parametrize("lock", ["rows", pytest.param("tables", marks=pytest.mark.soak)])
def test_nobody_can_renew(fleet: Callable[..., Fleet], lock: str) -> None:
    """One worker's row is held: its neighbour sees it stand still, and must not be the first to
    get there when the lock is gone. The tables are held: nobody gets anywhere."""
    statements = {
        "rows": "SELECT 1 FROM tenure.workers ORDER BY no LIMIT 1 FOR UPDATE",
        "tables": "LOCK TABLE tenure.workers, tenure.jobs IN ACCESS EXCLUSIVE MODE NOWAIT",
    }
    shop = fleet()
    shop.start()
    with held(shop.direct, statements[lock]):
        time.sleep(2.5 * LEASE)  # the length of the fault
    shop.healed()
    shop.check()


def test_a_claim_that_waited_hides_nothing(fleet: Callable[..., Fleet]) -> None:
    """What a claim remembers makes it pass over jobs that commit late, until it sweeps; how often
    it does depends on what a sweep costs. The time it waited for a lock is no such cost."""
    shop = fleet()
    shop.start(workers=1, producers=0)  # another one, that remembers nothing, would find them
    shop.pick_up()
    eventually(shop.idle, what="the next claim being a sweep")
    with psycopg.connect(shop.direct) as program:
        late = {"type": "quick", "payload": shop.arguments()}
        ((id,),) = program.execute(
            "SELECT tenure.ulid(id) FROM tenure.enqueue(%s)", [Jsonb([late])]
        ).fetchall()
        with held(shop.direct, "SELECT 1 FROM tenure.workers FOR UPDATE"):
            shop.promised.append(shop.app.enqueue("quick", shop.arguments()).id)
            time.sleep(LEASE)  # the length of the fault
        eventually(lambda: shop.is_done(shop.promised[-1]), what="the other job done")
        program.commit()
    began = time.monotonic()
    shop.promised.append(id)
    eventually(lambda: shop.is_done(id), within=20, what="the late job done", every=0.05)
    took = time.monotonic() - began
    print(f"  a late commit was found after {took:.1f} s")
    assert took < RESUME_WITHIN

    shop.healed()
    shop.check()


@pytest.mark.soak
def test_nobody_can_claim_or_finish_for_longer_than_a_call_takes(
    fleet: Callable[..., Fleet],
) -> None:
    shop = fleet()
    shop.start()
    with held(shop.direct, "LOCK TABLE tenure.jobs IN EXCLUSIVE MODE"):
        time.sleep(40)  # the length of the fault

    shop.healed()
    shop.check()
