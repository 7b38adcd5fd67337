"""Up to which number no event can appear any more: who reads on from there misses none.

Numbers are drawn before they are committed, so an event may show up behind later ones. An INSERT
locks the table before it draws its number: once everybody who held that lock when the last number
was read has ended, nothing up to it can still come (`tenure.event_writers`). Held snapshots do not
matter; an open transaction that has enqueued does, and so does a prepared one.

What retention has noted in `tenure.upkeep` is where a program begins that meets somebody who holds
it up, and all that a standby goes by: there the writers cannot be seen, but the note comes after
what it is about.
"""

from __future__ import annotations

import datetime
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from tenure.stores.postgres.database import Database

# Ordinary writers are through within milliseconds; who takes longer is named instead.
PATIENCE_SECONDS, PAUSE_SECONDS = 0.25, 0.005
HOLDERS_SHOWN = 3


class Waiting(NamedTuple):
    """Everything up to `last` is final once these have ended."""

    last: int
    writers: frozenset[str]
    since: float


class Horizon:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = threading.Lock()
        self._waiting: Waiting | None = None
        self.final = 0  # as far as this program knows

    def look(self) -> tuple[int, str | None]:
        """How far it is now, and who has been holding it for longer than writers take."""
        with self._lock:
            goal: int | None = None
            while True:
                last, writers = self._look()
                goal = last if goal is None else goal
                if self.final >= goal or self._waiting is None:
                    return self.final, None
                if time.monotonic() - self._waiting.since >= PATIENCE_SECONDS:
                    return self.final, self._named(self._waiting.writers & writers)
                time.sleep(PAUSE_SECONDS)

    def note(self) -> None:
        """For whoever reads next."""
        final, _held_by = self.look()
        self._database.rows("note_horizon", {"final": final})

    def _look(self) -> tuple[int, frozenset[str]]:
        ((noted, last, present, standby),) = self._database.rows("event_horizon")
        writers = frozenset(present)
        if last < self.final:  # a database that was restored, or failed over, draws them again
            self.final, self._waiting = 0, None
        self.final = max(self.final, min(noted, last))
        if standby:
            return self.final, writers
        if self._waiting is not None and not self._waiting.writers & writers:
            self.final, self._waiting = max(self.final, self._waiting.last), None
        if not writers:
            self.final = max(self.final, last)
        elif self._waiting is None and self.final < last:
            self._waiting = Waiting(last, writers, time.monotonic())
        return last, writers

    def _named(self, writers: frozenset[str]) -> str | None:
        rows = self._database.rows("event_holders", {"writers": sorted(writers)})
        if not rows:
            return None  # they have ended meanwhile
        shown = "; ".join(holder(row) for row in rows[:HOLDERS_SHOWN])
        more = len(rows) - HOLDERS_SHOWN
        return f"{shown}; and {more} more" if more > 0 else shown


def holder(row: tuple[Any, ...]) -> str:
    pid, gid, user, application, state, since = row
    when = ""
    if since is not None:
        begun = datetime.datetime.fromtimestamp(since, datetime.UTC)
        when = f", since {begun:%Y-%m-%d %H:%M:%S}Z"
    of = f" of {user}" if user else " of another role"
    if gid is not None:
        return f"prepared transaction {gid!r}{of}{when}"
    named = f" {application!r}" if application else ""
    return f"pid {pid}{named}{of}{f', {state}' if state else ''}{when}"
