"""Every periodic duty of a worker, as one list of timers (`timers.py`).

The lease is not in it: a renewal has a period of its own after a failure (`lease_renewal.py`).
"""

from __future__ import annotations

import time

from tenure.engine import rescue, retention
from tenure.engine.board import remove_forgotten_boards
from tenure.engine.timers import Timer
from tenure.engine.worker_state import WorkerState
from tenure.store import Store

PULSE_SECONDS = 0.25
BOARDS_SECONDS = 60.0
BOARDS_KEPT = 86_400.0  # after their worker has died


class Upkeep:
    def __init__(self, store: Store, state: WorkerState) -> None:
        self._store = store
        self._state = state

    def timers(self, *, embedded: bool) -> list[Timer]:
        """Passes that take part of a second at most share a lane. The pulse and rescue wait for no
        other pass, and no other pass waits for retention, which may take 45 s."""
        store, state = self._store, self._state
        pulse = min(PULSE_SECONDS, state.settings.lease_seconds / 24)
        asked = retention.PASS_EVERY / retention.ASKED_AGAIN
        pass_of_retention = retention.Retention(store, state).run
        timers = [
            Timer("rescue", rescue.EVERY_SECONDS, rescue.Rescuer(store, state).look, "rescue"),
            Timer("dependants", 1.0, self.settle_dependants, "upkeep"),
            Timer("sweep", 1.0, self.sweep, "upkeep"),
            Timer("boards", BOARDS_SECONDS, self.look_after_boards, "upkeep", at_start=False),
            Timer("retention", asked, pass_of_retention, "retention", at_start=False),
        ]
        if not embedded:  # an executor in this process lives and dies with it
            timers.append(Timer("pulse", pulse, self.pulse, "pulse", jitter=0.0))
        return timers

    def pulse(self) -> None:
        """Tell the children that this process runs; those that miss it end before our lease does.
        It says no more than that, so nothing may hold it up: no store, no log, no slow start of a
        process."""
        boards = [child.board for child in self._state.children]
        partial = any(board.path is None for board in boards)
        now, until = time.monotonic(), self._state.lease.until
        for board in boards:
            board.pulse(now, until, partial=partial)

    def settle_dependants(self) -> None:
        """Release waiting jobs whose needs ended while no finish could see it."""
        if self._store.settle_dependants():
            self._state.wake_writers()

    def sweep(self) -> None:
        if self._store.sweep():
            self._state.wake_writers()

    def look_after_boards(self) -> None:
        """Ours are in use; those that workers of this machine left behind go after a day."""
        for child in self._state.children:
            child.board.touch()
        remove_forgotten_boards(BOARDS_KEPT)
