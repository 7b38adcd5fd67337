"""A clock steps by two hours, either way, or was always wrong: no lease ends because of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

import tenure
from places import Place, SqlitePlace, only
from tenure.engine.client import Client
from tenure.store import Store
from tenure.stores.sqlite import SqliteStore

from .harness import Workshop, eventually

TWO_HOURS_MS = 7_200_000


class SteppingClock:
    def __init__(self) -> None:
        self.offset_ms = 0

    def __call__(self) -> int:
        return time.time_ns() // 1_000_000 + self.offset_ms


@pytest.fixture
def clock() -> SteppingClock:
    return SteppingClock()


def store_by(clock: SteppingClock, place: Place) -> Store:
    """The clock that decides is the store's: this machine's for a file, the server's else."""
    if isinstance(place, SqlitePlace):
        return SqliteStore(str(place.path), clock=clock)
    from tenure.stores.postgres import PostgresStore

    return PostgresStore(place.url, clock=clock)


@pytest.fixture
def apps(place: Place, clock: SteppingClock) -> Iterator[list[tenure.App]]:
    """Two programs with an embedded worker each, by one clock that can be set."""
    opened = []
    for _ in range(2):
        app = tenure.App(place.url, lease_seconds=1.5, lease_renew_seconds=0.4)
        app._client = Client(store_by(clock, place))
        opened.append(app)
    yield opened
    for app in opened:
        app.close()


@pytest.mark.parametrize("step_ms", [TWO_HOURS_MS, -TWO_HOURS_MS], ids=["forward", "back"])
def test_no_job_is_rescued_when_the_clock_steps(
    apps: list[tenure.App], clock: SteppingClock, step_ms: int
) -> None:
    release, started = threading.Event(), threading.Semaphore(0)

    def wait(n: int) -> int:
        started.release()
        release.wait(60)
        return n

    for app in apps:
        app.task(wait)
    apps[0].migrate()
    ids = [r.id for r in apps[0].enqueue_many([apps[0].tasks["wait"].job(n) for n in range(4)])]
    with ExitStack() as workers:
        for app in apps:
            workers.enter_context(app.worker(concurrency=2))
        for _ in ids:
            assert started.acquire(timeout=15)

        clock.offset_ms = step_ms
        beats = {row.no: row.beat for row in apps[0].store.workers()}
        eventually(  # five renewals are more than a lease: time enough for a wrong rescue
            lambda: all(row.beat >= beats[row.no] + 5 for row in apps[0].store.workers()),
            within=20,
            what="both workers renewing through the step",
        )
        release.set()
        results = [apps[0].result(id, timeout=15) for id in ids]

    assert results == [0, 1, 2, 3]
    assert len(apps[0].workers()) == 2  # nobody was declared dead and started over
    for id in ids:
        job = apps[0].get(id)
        assert job is not None
        assert (job.lease_no, job.attempts, job.crashes) == (1, 1, 0)
    assert "job.rescued" not in {event.kind for event in apps[0].events()}


WRONG = """
    @app.task(timeout=120)
    async def long(ctx: tenure.Context, n: int) -> float:
        say("start", ctx.job.id, ctx.job.lease_no)
        while not there("go"):
            await asyncio.sleep(0.02)
        return time.time()

    @app.task(queue="wrong")
    async def asks(ctx: tenure.Context) -> None:
        ctx.enqueue(later.options(delay=1))

    @app.task(queue="wrong")
    async def later() -> None: ...
"""


@only("postgres", "workers of one file have one clock; those of a server have one each")
@pytest.mark.parametrize("hours", [2, -2], ids=["fast", "slow"])
def test_a_worker_with_a_wrong_clock_takes_and_loses_nothing(
    workshop: Callable[..., Workshop], hours: int
) -> None:
    shop = workshop(WRONG, lease_seconds=1.5, lease_renew_seconds=0.4)
    right = shop.worker(concurrency=2, queues="default")
    wrong = shop.worker(concurrency=2, clock_offset=hours * 3600)
    ids = [r.id for r in shop.app.enqueue_many([shop.jobs.long.job(n) for n in range(4)])]
    shop.wait_said("start", times=4)
    beats = {row.no: row.beat for row in shop.app.store.workers()}
    eventually(  # five renewals are more than a lease: time enough for a wrong rescue
        lambda: all(row.beat >= beats[row.no] + 5 for row in shop.app.store.workers()),
        within=20,
        what="both workers renewing",
    )
    shop.touch("go")
    ends = [shop.app.result(id, timeout=15) for id in ids]
    shop.jobs.asks.enqueue()
    shop.wait_for("completed", 6, within=15)

    assert {round((end - time.time()) / 3600) for end in ends} == {0, hours}  # both took part
    (later,) = shop.app.find(type="later")
    assert later.started_at is not None
    assert 0 <= (later.started_at - later.scheduled_at).total_seconds() < 5
    assert abs(later.created_at.timestamp() - time.time()) < 60  # by the server's clock
    assert [worker.stop()["rescued"] for worker in (right, wrong)] == [0, 0]
    for id in ids:
        job = shop.job(id)
        assert (job.lease_no, job.attempts, job.crashes) == (1, 1, 0)
    assert shop.events("job.rescued") == {}
