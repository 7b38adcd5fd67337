"""The lease: one row per worker, renewed on time, and what the store thinks that worker holds.

And the pulse: a worker's children know that its lease is cared for.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

from tenure.engine.worker_state import WorkerState
from tenure.errors import StoreError
from tenure.outcome import Ended, Released
from tenure.store import Registration, Store

log = logging.getLogger("tenure.worker")
RETRY_SECONDS = 1.0
PULSE_SECONDS = 0.25
TOUCH_SECONDS = 60.0  # so often the boards' files are said to be in use


class LeaseRenewal:
    def __init__(
        self,
        store: Store,
        every: float,
        roster: WorkerState,
        *,
        lease: float,
        news: Callable[[], Mapping[str, object] | None],
        on_renewed: Callable[[float], None],
        on_declared_dead: Callable[[Registration], None],
        give_back: Callable[[list[Ended]], None],
        unwritten: Callable[[], set[str]],
        claims: Callable[[], tuple[int, bool]],
    ) -> None:
        self._store = store
        self._every = every
        self._roster = roster
        self._lease = lease
        self._news = news  # what others should read about this worker, when there is any
        self._on_renewed = on_renewed
        self._on_declared_dead = on_declared_dead
        self._give_back = give_back
        self._unwritten = unwritten  # jobs that have ended, which the store does not know yet
        self._claims = claims  # how many are over, and whether one is on its way
        # Leases the store names and we do not know, and how many claims must be over to be sure.
        self._unsure: dict[tuple[str, int], int] = {}
        self._asked: set[str] = set()  # cancels already passed on
        self.until = 0.0  # nobody takes our jobs before then, by the monotonic clock

    def holds_from(self, began: float) -> None:
        """The store took our word for it some time after `began`."""
        self.until = began + self._lease

    def run(self, over: threading.Event) -> None:
        due = time.monotonic() + self._every
        while not over.wait(max(0.0, due - time.monotonic())):
            began = time.monotonic()
            due = began + self._every
            worker = self._roster.worker
            try:
                renewal = self._store.renew(worker, meta=self._news())
            except StoreError as error:
                log.warning("could not renew the lease, trying again: %s", error)
                due = began + min(self._every, RETRY_SECONDS)  # at once, if it took its time
                continue
            if renewal is None:
                self._on_declared_dead(worker)
                continue
            self.holds_from(began)
            self._on_renewed(began)
            self.pass_on(renewal.cancels)
            self._give_back_unknown(renewal.leases)

    def run_pulse(self, over: threading.Event) -> None:
        """Not part of another loop, which a store, a blocked log or a slow start of a process may
        hold up: this says no more than that we run. Children that miss it end before our lease."""
        every = min(PULSE_SECONDS, self._lease / 24)
        if self._roster.embedded is not None:
            every = TOUCH_SECONDS  # it shares our fate: nobody looks at this
        touched = time.monotonic()
        while not over.wait(every):
            now = time.monotonic()
            boards = [child.board for child in self._roster.children]
            partial = any(board.path is None for board in boards)
            for board in boards:
                board.pulse(now, self.until, partial=partial)
            if now - touched > TOUCH_SECONDS:
                touched = now
                for board in boards:
                    board.touch()

    def pass_on(self, cancels: Mapping[str, str]) -> None:
        """Cancel requests, each once; one whose job no child has yet comes again."""
        fresh = {id: why for id, why in cancels.items() if id not in self._asked}
        self._asked = (self._asked & cancels.keys()) | self._roster.cancel(fresh)

    def _give_back_unknown(self, leases: Mapping[str, int]) -> None:
        """A claim whose reply was lost left leases nobody here knows of: give them back. They must
        have been seen before, and the claim that was on its way then be over: renewals may follow
        each other quickly, and its reply come late."""
        over, on_its_way = self._claims()
        held = self._roster.held() | self._unwritten()
        strange = {run: over + on_its_way for run in leases.items() if run[0] not in held}
        lost = Released("its claim was not answered")
        sure = [run for run in strange if self._unsure.get(run, over + 1) <= over]
        self._give_back([Ended(id, lease_no, 0, lost) for id, lease_no in sure])
        self._unsure = {run: self._unsure.get(run, needed) for run, needed in strange.items()}
