"""The machine's clock steps by two hours, either way: no lease ends because of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import tenure
from tenure.engine.client import Client
from tenure.stores.sqlite import SqliteStore

from .harness import eventually

TWO_HOURS_MS = 7_200_000


class SteppingClock:
    def __init__(self) -> None:
        self.offset_ms = 0

    def __call__(self) -> int:
        return time.time_ns() // 1_000_000 + self.offset_ms


@pytest.fixture
def clock() -> SteppingClock:
    return SteppingClock()


@pytest.fixture
def apps(tmp_path: Path, clock: SteppingClock) -> Iterator[list[tenure.App]]:
    """Two programs with an embedded worker each, on one file, by one clock that can be set."""
    path = str(tmp_path / "jobs.db")
    opened = []
    for _ in range(2):
        app = tenure.App(f"sqlite:///{path}", lease_seconds=1.5, lease_renew_seconds=0.4)
        app._client = Client(SqliteStore(path, clock=clock))
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
        beats = {row.no: row.beat for row in apps[0].workers()}
        eventually(  # five renewals are more than a lease: time enough for a wrong rescue
            lambda: all(row.beat >= beats[row.no] + 5 for row in apps[0].workers()),
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
