"""The lease in one thread, claims in another: which of the store's leases nobody here knows."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from contract.builders import claim, put_many, worker
from crash.harness import eventually
from tenure.engine.lease_renewal import LeaseRenewal
from tenure.engine.worker_state import WorkerState
from tenure.job import ClaimedJob
from tenure.outcome import Ended
from tenure.stores.sqlite import SqliteStore


class Bench:
    """A worker of whom only the renewals run, a hundred a second; the claims are ours."""

    def __init__(self, path: Path) -> None:
        self.store = SqliteStore(str(path))
        self.store.migrate()
        self.roster = WorkerState()
        self.roster.worker = worker(self.store)
        self.over, self.on_its_way = 0, False
        self.renewals, self.last = 0, 10_000
        self.end = threading.Event()
        self.given: list[Ended] = []

    def renewed(self, _began: float) -> None:
        self.renewals += 1
        if self.renewals == self.last:
            self.end.set()

    def a_few_renewals(self) -> None:
        until = self.renewals + 5
        eventually(lambda: self.renewals >= until, what="a few renewals")

    @contextmanager
    def renewing(self) -> Iterator[None]:
        renewal = LeaseRenewal(
            self.store,
            0.01,
            self.roster,
            lease=1.0,
            news=lambda: None,
            on_renewed=self.renewed,
            on_declared_dead=lambda no: None,
            give_back=self.given.extend,
            unwritten=lambda: {end.id for end in self.given},
            claims=lambda: (self.over, self.on_its_way),
        )
        thread = threading.Thread(target=renewal.run, args=(self.end,))
        thread.start()
        try:
            yield
        finally:
            self.end.set()
            thread.join()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path / "jobs.db")
    yield made
    made.store.close()


def claimed(bench: Bench) -> list[ClaimedJob]:
    """What the store has granted, and nobody here has heard of yet."""
    put_many(bench.store, 3)
    bench.on_its_way = True
    return claim(bench.store, bench.roster.worker)


def test_a_claim_on_its_way_keeps_its_leases_however_often_they_are_renewed(bench: Bench) -> None:
    """The store has stood still, and renewals make up for it while the reply comes in slowly."""
    jobs = claimed(bench)
    with bench.renewing():
        bench.a_few_renewals()
        bench.roster.alone.extend(jobs)  # handed out
        bench.over, bench.on_its_way = 1, False
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
        bench.over, bench.on_its_way = 1, next_one
        bench.a_few_renewals()

    assert sorted(end.id for end in bench.given) == sorted(job.id for job in lost)
    assert all(end.lease_no == 1 for end in bench.given)


def test_a_lease_seen_for_the_first_time_is_not_given_back(bench: Bench) -> None:
    """Its job may have ended between the store's answer and our look."""
    claimed(bench)
    bench.on_its_way = False
    bench.last = 1
    with bench.renewing():
        eventually(bench.end.is_set, what="the only renewal")

    assert (bench.renewals, bench.given) == (1, [])
