"""Retention: one pass a minute for the whole fleet, in a thread in which nothing else waits.

Whoever asks first in a minute has the pass (`store.take_turn`). It removes in bounded batches, and
tries whole days once: a lock that is refused is not asked for again before the next pass. What it
did, or who was in its way, is written down for `tenure doctor`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Mapping

from tenure.config import Settings
from tenure.engine.board import remove_forgotten_boards
from tenure.errors import StoreError
from tenure.policy import Keep
from tenure.store import Prune, Store

log = logging.getLogger("tenure.worker")
PASS_EVERY = 60.0
ASKED_AGAIN = 6  # times in that: passes follow each other closely, whichever worker has left
LONGEST_PASS = 0.75  # of that: a backlog is left to the next pass, not doubled by it
BOARDS_KEPT = 86_400.0  # after its owner has died


class Retention:
    def __init__(self, store: Store, settings: Settings) -> None:
        self._store = store
        self._settings = settings
        self.keep: Mapping[str, Keep] = {}

    def run(self, over: threading.Event) -> None:
        while not over.wait(PASS_EVERY / ASKED_AGAIN):
            remove_forgotten_boards(BOARDS_KEPT)  # each worker for its own machine
            try:
                if self._store.take_turn("retention", PASS_EVERY):
                    self._pass(over)
            except StoreError as error:
                log.warning("retention postponed: %s", error)

    def _pass(self, over: threading.Event) -> None:
        turn = self._store.turns()["retention"]
        note: dict[str, object] = {}
        removed: Counter[str] = Counter()
        try:
            held = self._remove(removed, over)
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

    def _remove(self, removed: Counter[str], over: threading.Event) -> str | None:
        keep = Prune(
            completed=self._settings.keep_completed_seconds,
            dead=self._settings.keep_dead_seconds,
            events=self._settings.keep_events_seconds,
            tasks={name: own for name, own in self.keep.items() if own != Keep()},
        )
        until = time.monotonic() + PASS_EVERY * LONGEST_PASS
        first = found = self._store.prune(keep)
        removed.update(found.removed, days=found.days)
        while max(found.removed.values()) >= keep.batch:
            if over.is_set() or time.monotonic() > until:
                break
            found = self._store.prune(keep._replace(days=False))
            removed.update(found.removed)
        return first.held
