"""The lease in one thread, claims in another: which of the store's leases nobody here knows."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from contract.builders import claim, put_many, worker
from crash.harness import eventually
from tenure.config import Settings
from tenure.engine.lease_renewal import LeaseRenewal
from tenure.engine.worker_options import WorkerOptions
from tenure.engine.worker_state import Lease, WorkerState
from tenure.job import ClaimedJob
from tenure.outcome import Ended
from tenure.stores.sqlite import SqliteStore

from .parts import NoHints


class CountedLease(Lease):
    """Says how often it was renewed, and when it has been often enough."""

    renewals, last, end = 0, 10_000, threading.Event()

    def renewed(self, began: float) -> None:
        super().renewed(began)
        self.renewals += 1
        if self.renewals == self.last:
            self.end.set()


class Bench:
    """A worker of which only the renewals run, a hundred a second; the claims are the test's."""

    def __init__(self, path: Path) -> None:
        self.store = SqliteStore(str(path))
        self.store.migrate()
        settings = Settings(lease_seconds=1.0, lease_renew_seconds=0.05)
        self.state = WorkerState(WorkerOptions(), settings, NoHints())
        self.state.worker = worker(self.store)
        self.lease = self.state.lease = CountedLease(1.0, 0.05)
        self.lease.end = threading.Event()

    @property
    def given(self) -> list[Ended]:
        return list(self.state.unwritten._ended)

    def a_few_renewals(self) -> None:
        until = self.lease.renewals + 5
        eventually(lambda: self.lease.renewals >= until, what="a few renewals")

    @contextmanager
    def renewing(self) -> Iterator[None]:
        renewal = LeaseRenewal(self.store, self.state)
        renewal._every = 0.01
        thread = threading.Thread(target=renewal.run, args=(self.lease.end,))
        thread.start()
        try:
            yield
        finally:
            self.lease.end.set()
            thread.join()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path / "jobs.db")
    yield made
    made.store.close()


def claimed(bench: Bench) -> list[ClaimedJob]:
    """What the store has granted, and nobody here has heard of yet."""
    put_many(bench.store, 3)
    assert bench.state.begin_claim()
    return claim(bench.store, bench.state.worker)


def test_a_claim_on_its_way_keeps_its_leases_however_often_they_are_renewed(bench: Bench) -> None:
    """The store has stood still, and renewals make up for it while the reply comes in slowly."""
    jobs = claimed(bench)
    with bench.renewing():
        bench.a_few_renewals()
        bench.state.set_apart(jobs)  # handed out
        bench.state.end_claim()
        bench.a_few_renewals()

    assert bench.given == []


@pytest.mark.parametrize("next_one", [False, True], ids=["idle", "claiming again"])
def test_leases_of_a_lost_claim_are_given_back_once_it_is_over(
    bench: Bench, next_one: bool
) -> None:
    lost = claimed(bench)
    with bench.renewing():
        bench.a_few_renewals()
        assert bench.given == []
        bench.state.end_claim()
        if next_one:
            bench.state.begin_claim()
        bench.a_few_renewals()

    assert sorted(end.id for end in bench.given) == sorted(job.id for job in lost)
    assert all(end.lease_no == 1 for end in bench.given)


def test_a_lease_seen_for_the_first_time_is_not_given_back(bench: Bench) -> None:
    """Its job may have ended between the store's answer and our look."""
    claimed(bench)
    bench.state.end_claim()
    bench.lease.last = 1
    with bench.renewing():
        eventually(bench.lease.end.is_set, what="the only renewal")

    assert (bench.lease.renewals, bench.given) == (1, [])
