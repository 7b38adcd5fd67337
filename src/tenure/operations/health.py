"""Whether all is well: a report for machines that ask every few seconds, and everything that can be
found for a person who asks once."""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from tenure.errors import StoreError
from tenure.job import DEAD
from tenure.operations import database, findings
from tenure.operations.findings import Wish
from tenure.operations.queues import Queue
from tenure.operations.room import Room
from tenure.operations.workers import Worker
from tenure.record import Record
from tenure.store import Finding

if TYPE_CHECKING:
    from tenure.app import App
    from tenure.operations.scope import Scope
    from tenure.store import Totals

Status = Literal["healthy", "degraded", "unhealthy"]
WORST_FIRST: tuple[Status, ...] = ("unhealthy", "degraded", "healthy")
SLOW_SECONDS = 0.1  # a store that takes longer for the smallest question is not well


class Check(Record):
    status: Status
    message: str


class HealthReport(Record):
    """`status` is that of the worst check. What could not be read is None."""

    status: Status
    checks: Mapping[str, Check]  # store, workers, queues, dead_letters
    active_workers: int | None = None
    total_queues: int | None = None
    oldest_waiting: datetime.timedelta | None = None  # the oldest due job of a queue not paused
    dead_letters: int | None = None  # counted to 20,000 at most

    @property
    def report(self) -> dict[str, Any]:
        """For JSON, under the names that REQUIREMENTS D4 gives them; lengths of time in seconds."""
        waited = self.oldest_waiting
        return {
            "status": self.status,
            "checks": {
                _camel(name): {"status": check.status, "message": check.message}
                for name, check in self.checks.items()
            },
            "activeWorkers": self.active_workers,
            "totalQueues": self.total_queues,
            "oldestWaitingJob": None if waited is None else waited.total_seconds(),
            "deadLetterCount": self.dead_letters,
        }


class Health(Room):
    def __init__(self, app: App, scope: Scope) -> None:
        super().__init__(app.store, scope, app.now_ms)
        self._app = app

    # -- for machines -------------------------------------------------------------------------
    def report(self, *, least_workers: int = 1) -> HealthReport:
        """Three cheap looks at the store. A store out of reach is unhealthy, not an error."""
        self.for_operators("health")
        try:
            store = self._store_check()
            workers, queues, totals = self._workers(), self._queues(), self.store.totals()
        except StoreError as error:
            return HealthReport("unhealthy", {"store": Check("unhealthy", str(error))})
        live = sum(worker.live for worker in workers)
        dead = sum(totals.jobs[status] for status in DEAD)
        checks = {
            "store": store,
            "workers": _workers_check(live, least_workers),
            "queues": _queues_check(workers, queues),
            "dead_letters": _dead_check(dead, totals),
        }
        worst = min((check.status for check in checks.values()), key=WORST_FIRST.index)
        waited = findings.oldest(queues)
        return HealthReport(worst, checks, live, len(queues), waited and waited[0], dead)

    def _store_check(self) -> Check:
        self.store.queue_names()  # opens a connection where there was none
        began = time.monotonic()
        self.store.queue_names()
        took = time.monotonic() - began
        return Check("healthy" if took < SLOW_SECONDS else "degraded", f"{took * 1000:.1f} ms")

    # -- for people ---------------------------------------------------------------------------
    def findings(self, *, knows_tasks: bool = True) -> list[Finding]:
        """First what the database says; the rest only where that can be read. `knows_tasks`: the
        app is the one whose workers run here, so a type that it does not have is worth a line."""
        self.for_operators("findings")
        database.require(self._app)
        database.settle_for_reading(self.store)
        found = self.store.inspect()
        if any(finding.check == "schema" and finding.level == "problem" for finding in found):
            return found
        try:
            return [*found, *self._general(knows_tasks)]
        except StoreError as error:
            if not any(finding.level == "problem" for finding in found):
                raise
            return [*found, Finding("jobs", "problem", f"cannot be read: {error}", "see above")]

    def _general(self, knows_tasks: bool) -> list[Finding]:
        """What any store can say through its contract."""
        workers, queues = self._workers(), self._queues()
        return [
            *(Finding("settings", "warning", line) for line in self._app.settings.warnings()),
            database.hints(self._app),
            *findings.of_workers(workers, queues),
            *findings.of_queues(workers, queues),
            *self._unknown_types(knows_tasks, workers),
            findings.of_the_dead(self.store.totals()),
            findings.of_retention(self.store.turns().get("retention"), workers, self.now()),
            *findings.of_settings(self.store.settings(), self._asked(workers)),
        ]

    def _unknown_types(self, knows_tasks: bool, workers: Sequence[Worker]) -> list[Finding]:
        live = [worker for worker in workers if worker.live]
        if knows_tasks:
            known, whose = frozenset(self._app.tasks), "this app does not have"
        elif live:
            types = self.store.unknown_types(frozenset())
            known = frozenset(type for type in types if any(each.knows(type) for each in live))
            whose = "no live worker knows"
        else:
            return []
        return findings.of_types(self.store.unknown_types(known), whose)

    def _asked(self, workers: Sequence[Worker]) -> Iterator[tuple[str, Wish]]:
        """What app, tasks and live workers ask to be kept and audited."""
        own = self._app.settings
        yield "this app", (own.audit, own.keep_completed_seconds, own.keep_events_seconds)
        for name, task in self._app.tasks.items():
            if task.settings.keep.completed is not None:
                yield f"task {name}", ("all", task.settings.keep.completed, float("inf"))
        for worker in workers:
            if worker.live and "keep" in worker.meta:
                yield f"worker {worker.id}", (worker.meta["audit"], *worker.meta["keep"])

    def _workers(self) -> list[Worker]:
        now = self.now()
        return [Worker.of(row, now) for row in self.store.workers()]

    def _queues(self) -> list[Queue]:
        return [Queue.of(row) for row in self.store.queues()]


def _workers_check(live: int, least: int) -> Check:
    status: Status = "healthy" if live >= least else "degraded" if live else "unhealthy"
    return Check(status, f"{live} live, at least {least} wanted")


def _queues_check(workers: Sequence[Worker], queues: Sequence[Queue]) -> Check:
    """No live worker at all is told by the check of the workers."""
    if unserved := findings.unserved(workers, queues):
        names = ", ".join(f"q:{queue.name}" for queue in unserved)
        return Check("degraded", f"due jobs that no live worker takes: {names}")
    finding = findings.of_queues([], queues)[-1]
    return Check("healthy" if finding.level == "ok" else "degraded", finding.message)


def _dead_check(dead: int, totals: Totals) -> Check:
    status: Status = "unhealthy" if dead >= findings.MANY_DEAD else "degraded"
    return Check(status if dead else "healthy", findings.of_the_dead(totals).message)


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(map(str.capitalize, rest))
