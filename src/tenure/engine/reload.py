"""`--reload`: a worker's children are replaced when their code changes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable

from tenure.engine.sources import Sources
from tenure.engine.worker_state import WorkerState

log = logging.getLogger("tenure.worker")

GRACE_SECONDS = 5.0  # running jobs get to finish, or less: a shutdown's


class Reload:
    def __init__(self, roster: WorkerState, grace: float) -> None:
        self._roster = roster
        self._grace = min(grace, GRACE_SECONDS)
        self.sources = Sources()
        self.broken = False  # the code as it is now cannot be loaded: no child is started

    def run(self, on_change: Callable[[str], None], over: threading.Event) -> None:
        while (path := self.sources.wait(over)) is not None:
            on_change(path)

    def replace(self, path: str) -> None:
        """As a deploy would: successors, while those that run the old code end what they run."""
        log.info("%s has changed: replacing the children", path)
        self.broken = False
        leave_by = time.monotonic() + self._grace
        for child in self._roster.children:
            child.leave_by = min(child.leave_by, leave_by)
            child.stop()

    def refused(self, folders: Iterable[str]) -> None:
        """Its traceback has been printed."""
        self.broken = True
        self.sources.watch(folders)
        log.info("waiting for the next change")
