"""Retention: one pass a minute for all workers of a store together.

The first worker that asks in a minute makes the pass (`store.take_turn`). It removes in bounded
batches, and tries to drop whole days once: a lock that is refused is not asked for again before the
next pass. What the pass did, or what was in its way, is written down for `tenure doctor`.
"""

from __future__ import annotations

import logging
import time
from collections import Counter

from tenure.engine.worker_state import WorkerState
from tenure.errors import StoreError
from tenure.policy import Keep
from tenure.store import Prune, Store

log = logging.getLogger("tenure.worker")
PASS_EVERY = 60.0
ASKED_AGAIN = 6  # times in that: passes follow each other closely, whichever worker has left
LONGEST_PASS = 0.75  # of that: a backlog is left to the next pass, not doubled by it


class Retention:
    def __init__(self, store: Store, state: WorkerState) -> None:
        self._store = store
        self._state = state

    def run(self) -> None:
        try:
            if self._store.take_turn("retention", PASS_EVERY):
                self._pass()
        except StoreError as error:
            log.warning("retention postponed: %s", error)

    def _pass(self) -> None:
        turn = self._store.turns()["retention"]
        note: dict[str, object] = {}
        removed: Counter[str] = Counter()
        try:
            held = self._remove(removed)
        except StoreError as error:
            note["failed"] = str(error)
            raise
        else:
            if held is not None:
                note |= {"held": held, "held_since": turn.note.get("held_since", turn.at)}
                log.info("retention: %s; trying again in the next pass", held)
        finally:
            note["removed"] = {kind: count for kind, count in removed.items() if count}
            self._store.end_turn("retention", note)

    def _remove(self, removed: Counter[str]) -> str | None:
        """What kept it from dropping whole days."""
        settings = self._state.settings
        keep = Prune(
            completed=settings.keep_completed_seconds,
            dead=settings.keep_dead_seconds,
            events=settings.keep_events_seconds,
            tasks={name: own for name, own in self._state.app.keep.items() if own != Keep()},
        )
        until = time.monotonic() + PASS_EVERY * LONGEST_PASS
        first = found = self._store.prune(keep)
        removed.update(found.removed, days=found.days)
        while max(found.removed.values()) >= keep.batch:
            if self._state.over.is_set() or time.monotonic() > until:
                break
            found = self._store.prune(keep._replace(days=False))
            removed.update(found.removed)
        return first.held
