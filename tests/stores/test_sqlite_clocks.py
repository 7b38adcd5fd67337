"""On SQLite `now` is the clock of whoever asks. A job that asked for no delay is due at once all
the same, whatever the clock of the program that stored it said, or has said since."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tenure.engine import machine
from tenure.stores.sqlite import SqliteStore
from tenure.stores.sqlite.file import wall_ms

from .sqlite_files import TERMS, jobs, python

HOUR_MS, TEN_MINUTES_MS = 3_600_000, 600_000


class Clock:
    def __init__(self) -> None:
        self.offset_ms = 0

    def __call__(self) -> int:
        return wall_ms() + self.offset_ms


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Iterator[SqliteStore]:
    """The one that claims."""
    store = SqliteStore(str(tmp_path / "jobs.db"), clock=clock)
    store.migrate()
    yield store
    store.close()


def claim(store: SqliteStore) -> list[str]:
    worker = store.register(machine.identify(machine.new_worker_id(), 30, {}))
    return [job.id for job in store.claim(worker, [(TERMS.queue, 10)]).jobs]


AHEAD = """
import sqlite3, sys, time
seconds, nanoseconds = time.time, time.time_ns
time.time = lambda: seconds() + float(sys.argv[2])
time.time_ns = lambda: nanoseconds() + int(float(sys.argv[2]) * 1e9)
import tenure
app = tenure.App("sqlite:///" + sys.argv[1])

@app.task(name="noop")
def noop() -> None: ...

how = {}
if sys.argv[3] == "keyed":
    how["key"] = "k"
elif sys.argv[3] == "caller":
    how["conn"] = sqlite3.connect(sys.argv[1], isolation_level=None)
print(noop.options(**how).enqueue().id, end="")
"""


@pytest.mark.parametrize("how", ["plain", "keyed", "caller"])
def test_a_producer_whose_clock_is_an_hour_ahead(store: SqliteStore, how: str) -> None:
    id = python(AHEAD, store.file.path, 3600, how)

    assert claim(store) == [id]


@pytest.mark.parametrize("how", ["plain", "keyed", "caller"])
def test_a_producer_whose_clock_is_an_hour_behind(store: SqliteStore, how: str) -> None:
    id = python(AHEAD, store.file.path, -3600, how)

    assert claim(store) == [id]


def test_a_clock_that_steps_back_after_an_enqueue(store: SqliteStore, clock: Clock) -> None:
    (receipt,) = store.enqueue(jobs(1))
    clock.offset_ms = -TEN_MINUTES_MS

    assert claim(store) == [receipt.id]


def test_jobs_from_before_and_after_a_step_back(store: SqliteStore, clock: Clock) -> None:
    first = [r.id for r in store.enqueue(jobs(2))]
    clock.offset_ms = -TEN_MINUTES_MS
    second = [r.id for r in store.enqueue(jobs(2))]

    assert set(claim(store)) == {*first, *second}


def test_a_delay_is_kept_by_a_clock_that_does_not_move(store: SqliteStore, clock: Clock) -> None:
    """The control: what did ask for a delay waits for it."""
    store.enqueue([jobs(1)[0]._replace(delay_ms=HOUR_MS)])
    assert claim(store) == []
    clock.offset_ms = HOUR_MS + 1000
    assert len(claim(store)) == 1
