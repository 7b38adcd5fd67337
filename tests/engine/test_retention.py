"""Retention beside work: one pass for all workers, in a thread that holds up nobody."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import pairwise

import psycopg
import pytest

from contract.builders import new, rescue, started_job, worker
from crash.harness import Workshop, eventually
from places import only
from stopwatch import waited
from tenure.stores.postgres import PostgresStore

from .test_worker_threads import BROKEN_STORE, WORK, doctor

EVERY = 2.0
SHORT = f"""
import tenure.engine.retention
tenure.engine.retention.PASS_EVERY = {EVERY}
tenure.engine.retention.ASKED_AGAIN = 20
"""
DAY_MS = 86_400_000
SESSIONS = "SELECT pid FROM pg_stat_activity WHERE datname = current_database()"
PASSES = "SELECT at, note FROM tenure_upkeep WHERE name = 'retention' AND note <> '{}'"


def test_a_fleet_has_one_pass_at_a_time(workshop: Callable[..., Workshop]) -> None:
    shop = workshop(WORK, keep_completed_seconds=0)
    workers = [shop.worker(program=SHORT + BROKEN_STORE) for _ in range(2)]
    ids = [r.id for r in shop.app.enqueue_many([shop.jobs.quick.job(n) for n in range(50)])]
    seen: dict[int, str] = {}

    def four_passes() -> bool:
        for at, note in shop.sql(PASSES):
            seen.setdefault(at, note)
        return len(seen) >= 4 and not any(map(shop.app.get, ids))

    eventually(four_passes, within=40, what="four passes, and every job past its time removed")
    assert all(later - earlier >= EVERY * 1000 for earlier, later in pairwise(sorted(seen)))
    assert [worker.stop()["completed"] for worker in workers] != [0, 0]


def test_a_pass_that_fails_takes_nobody_with_it(workshop: Callable[..., Workshop]) -> None:
    shop = workshop(WORK)
    shop.touch("broken-prune")
    worker = shop.worker(program=SHORT + BROKEN_STORE)
    eventually(lambda: "internal error in retention" in worker.log, what="a failure")
    assert shop.app.result(shop.jobs.quick.enqueue(1).id, timeout=10) == 1
    eventually(
        lambda: [f for f in doctor(shop) if "in retention" in f["message"]],
        within=30, what="the doctor's word",
    )  # fmt: skip
    (shop.folder / "broken-prune").unlink()

    eventually(lambda: '"removed"' in str(shop.sql(PASSES)), within=30, what="a pass")
    assert worker.stop()["completed"] == 1


@pytest.mark.timed
@only("postgres", "a day is a table there, and goes under a lock")
def test_an_open_transaction_beside_days_that_are_over(
    workshop: Callable[..., Workshop],
) -> None:
    """It keeps the days from being dropped, and its neighbours from nothing."""
    shop = workshop(WORK)
    store = shop.app.store
    assert isinstance(store, PostgresStore)
    now = int(time.time() * 1000)
    for day in (40, 50):
        store.database.run("SELECT tenure.add_partitions(%(at)s)", {"at": now - day * DAY_MS})
    days = "SELECT count(*) FROM pg_class WHERE relname ~ '^(history|events)_[0-9]{8}$'"
    ((before,),) = shop.sql(days)
    with psycopg.connect(shop.place.url, application_name="their_report") as theirs:
        theirs.execute("SELECT (SELECT count(*) FROM tenure.history), count(*) FROM tenure.events")
        workers = [shop.worker(program=SHORT + BROKEN_STORE) for _ in range(2)]
        eventually(lambda: '"held"' in str(shop.sql(PASSES)), within=30, what="a refused lock")
        worst = worst_beside(store, seconds=3 * EVERY)
        assert "their_report) has a lock on it" in str(shop.sql(PASSES))
    assert shop.sql(days) == [(before,)]
    eventually(lambda: shop.sql(days)[0][0] < before, within=30, what="the days dropped")
    for each in workers:
        each.stop()
    assert worst["enqueue"] <= 0.3
    assert worst["rescue"] <= 0.3


def worst_beside(store: PostgresStore, seconds: float) -> dict[str, float]:
    """The longest enqueue and rescue, less what they, and the sessions that they may stand behind,
    waited for a processor."""
    worst = {"enqueue": 0.0, "rescue": 0.0}
    sessions = store.database.run(SESSIONS, {})
    involved = [threading.get_native_id(), *(pid for (pid,) in sessions)]
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        dead = worker(store)
        started_job(store, dead, queue="elsewhere")
        for what, call in (
            ("enqueue", lambda: store.enqueue([new(queue="elsewhere")])),
            ("rescue", lambda dead=dead: rescue(store, dead)),
        ):
            idle, began = waited(*involved), time.monotonic()
            call()
            took = time.monotonic() - began - (waited(*involved) - idle)
            worst[what] = max(worst[what], took)
        drained = worker(store)
        store.claim(drained, [("elsewhere", 100)])
    return worst
