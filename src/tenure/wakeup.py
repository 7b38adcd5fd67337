"""The wake-up contract: hints that something may have changed. No guarantee rests on them."""

from __future__ import annotations

from typing import Protocol


class Wakeup(Protocol):
    def wait(self, timeout: float) -> bool:
        """Sleep until something may have changed, `interrupt()`, or the time is up.
        True: look now. May be early, late, doubled or missing."""

    def interrupt(self) -> None:
        """Make a waiting thread return."""

    def healthy(self) -> bool:
        """Hints are expected to arrive; when not, the engine polls more often."""

    def describe(self) -> str:
        """For people: how hints travel here, or why they do not."""

    def close(self) -> None: ...
