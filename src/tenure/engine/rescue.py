"""Rescue: put back the jobs of dead workers. Every worker does it; there is no leader.

Rescue knows a stall. A worker is dead when its process is gone from this very machine, or when
its beat stood still for a whole lease *by our own monotonic clock* while we ourselves could write
to the store all that time. After a held lock, a suspended machine or a stopped process the
observation starts again; the store's clock plays no part. [With bare expiry, an 8 s lock took 40
of 40 live jobs under a 3 s lease.]
"""

from __future__ import annotations

import logging
import time

from tenure.engine import machine
from tenure.engine.board import remove_boards, started_in
from tenure.engine.job_log import died
from tenure.engine.worker_state import WorkerState
from tenure.store import Store, WorkerInfo

log = logging.getLogger("tenure.worker")

EVERY_SECONDS = 1.0


class Rescuer:
    def __init__(self, store: Store, state: WorkerState) -> None:
        self._store = store
        self._state = state
        self._settings = state.settings
        # Worker -> beat, since when it stands still. By id: a restored backup gives numbers again.
        self._seen: dict[str, tuple[int, float]] = {}
        self._gaps = 0  # in our own renewals, when we last looked

    def look(self) -> int:
        """One pass; how many jobs were put back."""
        put_back = 0
        for worker in self._store.workers(count=False):
            if worker.id == self._state.worker.id or worker.dead_at is not None:
                self._seen.pop(worker.id, None)
                continue
            if machine.is_gone(worker):
                put_back += self._rescue(worker, "its worker's process is gone", None)
            elif self._stands_still(worker):
                patience = self._settings.lease_renew_seconds
                put_back += self._rescue(worker, "its worker stopped renewing its lease", patience)
        if put_back:
            self._state.counts["rescued"] += put_back
            self._state.wake_writers()
        return put_back

    def _stands_still(self, worker: WorkerInfo) -> bool:
        now, lease = time.monotonic(), self._state.lease
        if lease.gaps != self._gaps or not lease.steady():
            self._gaps = lease.gaps
            self._seen.clear()  # we could not write either: nothing we saw means anything
        beat, since = self._seen.get(worker.id, (-1, now))
        if beat != worker.beat:
            self._seen[worker.id] = (worker.beat, now)
            return False
        return now - since > worker.lease_ms / 1000

    def _rescue(self, worker: WorkerInfo, reason: str, patience: float | None) -> int:
        here = machine.same_place(worker)
        done = self._store.rescue(
            worker.registration,
            worker.beat,
            started=started_in(worker.id) if here else None,
            limit=self._settings.loss_limit,
            reason=reason,
            patience=patience,
        )
        self._seen.pop(worker.id, None)
        if done is None:
            return 0
        if here:
            remove_boards(worker.id)
        log.warning(
            "worker %s is dead (%s): %d jobs put back, %d that have lost too many set aside",
            worker.id, reason, done.requeued, done.lost,
        )  # fmt: skip
        for id in done.set_aside:
            died(self._store.get(id), self._state.worker.id)
        return done.requeued
