"""The roster: a worker's children, and the jobs that wait to run alone.

The list of children is replaced, never changed, so that any thread may walk it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping

from tenure.engine.children import Child
from tenure.job import ClaimedJob
from tenure.store import Registration


class WorkerState:
    def __init__(self) -> None:
        self.worker = Registration(0, "")  # who we are to the store
        self.children: list[Child] = []
        self.alone: deque[ClaimedJob] = deque()  # claimed, to run alone, not yet handed out
        self.unwanted: dict[tuple[str, int], str] = {}  # (id, lease_no) -> reason: of `alone`
        self.burying = False  # a dead child's jobs are on their way to the finisher

    def add(self, child: Child) -> None:
        self.children = [*self.children, child]

    def remove(self, child: Child) -> None:
        self.children = [other for other in self.children if other is not child]

    @property
    def embedded(self) -> Child | None:
        """The one child of an embedded worker: an executor in this process."""
        first = self.children[0] if self.children else None
        return first if first is not None and first.process is None else None

    def holding(self) -> bool:
        held = bool(self.alone) or any(child.holds for child in self.children)
        return held or self.burying

    def held(self) -> set[str]:
        known = {job.id for job in list(self.alone)}
        for child in self.children:
            known.update(child.holds)
        return known

    def crowd(self) -> int:
        """How many jobs run or wait in the children that take many."""
        return sum(len(child.holds) for child in self.children if not child.solo)

    def held_by_queue(self) -> Counter[str]:
        """Those that wait to run alone included. One may be in both places for a moment."""
        held = {job.id: job.queue for job in list(self.alone)}
        for child in self.children:
            held.update((job.id, job.queue) for job, _slot in list(child.holds.values()))
        return Counter(held.values())

    def rooms(self) -> dict[Child, int]:
        return {child: child.room() for child in self.children if not child.solo}

    def cancel(self, reasons: Mapping[str, str]) -> set[str]:
        """Pass cancel requests on to whoever runs the jobs; the ids somebody runs."""
        passed: set[str] = set()
        for child in self.children:
            ours: dict[str, str | None] = {
                id: reason for id, reason in reasons.items() if id in child.holds
            }
            if ours:
                child.cancel(ours)
                passed |= ours.keys()
        # Those that wait to run alone are not passed on yet: their process may be starting this
        # moment, so they are asked for again until somebody runs them or they are taken out.
        self.unwanted = {
            (job.id, job.lease_no): reasons[job.id] for job in list(self.alone) if job.id in reasons
        }
        return passed

    def drop(self, runs: Iterable[tuple[str, int]]) -> None:
        """(id, lease_no) whose leases are gone: stop them, their outcomes are void. A later lease
        of the same job, perhaps held by the same child, is none of them."""
        wanted = dict(runs)
        for child in self.children if wanted else ():
            held = child.holds
            lost = [
                (id, no) for id, no in wanted.items() if id in held and held[id][0].lease_no == no
            ]
            if lost:
                child.cancel(dict.fromkeys(id for id, _lease_no in lost))
                child.ended(lost)
