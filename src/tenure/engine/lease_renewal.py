"""The lease: one row per worker, renewed on time, and what the store thinks that worker holds."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping

from tenure.engine.children import RunKey
from tenure.engine.worker_state import DeclaredDead, WorkerState
from tenure.errors import StoreError
from tenure.outcome import Ended, Released
from tenure.store import Store

log = logging.getLogger("tenure.worker")
RETRY_SECONDS = 1.0
UNANSWERED = Released("its claim was not answered")


class LeaseRenewal:
    def __init__(self, store: Store, state: WorkerState) -> None:
        self._store = store
        self._state = state
        self._every = state.settings.lease_renew_seconds
        # Leases the store names and we do not know, and how many claims must be over to be sure.
        self._unsure: dict[RunKey, int] = {}

    def run(self, over: threading.Event) -> None:
        due = time.monotonic() + self._every
        while not over.wait(max(0.0, due - time.monotonic())):
            began = time.monotonic()
            due = began + self._every
            try:
                self._renew(began)
            except StoreError as error:
                log.warning("could not renew the lease, trying again: %s", error)
                due = began + min(self._every, RETRY_SECONDS)  # at once, if it took its time

    def _renew(self, began: float) -> None:
        state = self._state
        worker = state.worker
        renewal = self._store.renew(worker, meta=state.new_description())
        if renewal is None:
            state.news.put(DeclaredDead(worker))
            return
        state.lease.renewed(began)
        state.cancel(renewal.cancels)
        self._give_back_unknown(renewal.leases)

    def _give_back_unknown(self, leases: Mapping[str, int]) -> None:
        """A claim whose reply was lost left leases that are held nowhere here: give them back.
        First each must have been seen before, and the claim that was under way then must be over:
        renewals may follow each other quickly, and a claim's reply come late."""
        over, under_way = self._state.claims()
        held = self._state.held()
        strange = {run: over + under_way for run in leases.items() if run[0] not in held}
        sure = [run for run in strange if self._unsure.get(run, over + 1) <= over]
        self._state.give_back([Ended(id, lease_no, 0, UNANSWERED) for id, lease_no in sure])
        self._unsure = {run: self._unsure.get(run, needed) for run, needed in strange.items()}
