"""Upkeep without a leader: rescue the jobs of dead workers.

Rescue knows a stall. A worker is dead when its process is gone from this very machine, or when
its beat stood still for a whole lease *by our own monotonic clock* while we ourselves could write
to the store all that time. After a held lock, a suspended machine or a stopped process the
observation starts again; the store's clock plays no part. [With bare expiry, an 8 s lock took 40
of 40 live jobs under a 3 s lease.]
"""

from __future__ import annotations

import logging
import time

from tenure.config import Settings
from tenure.engine import machine
from tenure.engine.board import remove_boards, started_in
from tenure.engine.job_log import died
from tenure.store import Registration, Store, WorkerInfo

log = logging.getLogger("tenure.worker")


class Rescuer:
    def __init__(self, store: Store, settings: Settings) -> None:
        self._store = store
        self._settings = settings
        # Worker -> beat, since when it stands still. By id: a restored backup gives numbers again.
        self._seen: dict[str, tuple[int, float]] = {}
        self._wrote = time.monotonic()
        self.rescued = 0

    def wrote(self, began: float) -> None:
        """Our own renewal, begun then, has just succeeded: evidence that writing is possible."""
        now = time.monotonic()
        if now - self._wrote > self._longest_gap():
            self._seen.clear()
        self._wrote = max(began, self._wrote)

    def _longest_gap(self) -> float:
        return self._settings.lease_renew_seconds * 1.5

    def look(self, own: Registration) -> int:
        """One pass; how many jobs were put back."""
        put_back = 0
        for worker in self._store.workers(count=False):
            if worker.id == own.id or worker.dead_at is not None:
                self._seen.pop(worker.id, None)
                continue
            if machine.is_gone(worker):
                put_back += self._rescue(own, worker, "its worker's process is gone", None)
            elif self._stands_still(worker):
                patience = self._settings.lease_renew_seconds
                why = "its worker stopped renewing its lease"
                put_back += self._rescue(own, worker, why, patience)
        self.rescued += put_back
        return put_back

    def _stands_still(self, worker: WorkerInfo) -> bool:
        now = time.monotonic()
        if now - self._wrote > self._longest_gap():
            self._seen.clear()  # we cannot write either: nothing we see means anything
        beat, since = self._seen.get(worker.id, (-1, now))
        if beat != worker.beat:
            self._seen[worker.id] = (worker.beat, now)
            return False
        return now - since > worker.lease_ms / 1000

    def _rescue(
        self, own: Registration, worker: WorkerInfo, reason: str, patience: float | None
    ) -> int:
        started = started_in(worker.id) if machine.same_place(worker) else None
        done = self._store.rescue(
            worker.registration,
            worker.beat,
            started=started,
            limit=self._settings.loss_limit,
            reason=reason,
            patience=patience,
        )
        self._seen.pop(worker.id, None)
        if done is None:
            return 0
        if machine.same_place(worker):
            remove_boards(worker.id)
        log.warning(
            "worker %s is dead (%s): %d jobs put back, %d that have lost too many set aside",
            worker.id, reason, done.requeued, done.lost,
        )  # fmt: skip
        for id in done.set_aside:
            died(self._store.get(id), own.id)
        return done.requeued

    def settle(self) -> int:
        """Waiting jobs whose needs have ended unseen."""
        return self._store.settle_dependants()
