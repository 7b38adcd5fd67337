"""`--reload`: a worker's children are replaced when their code changes.

Files are looked at about twice a second: those in the folder of the app's module, and in every
folder below the working directory from which something was imported: a child names them
(`hello.py`).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable
from contextlib import suppress

from tenure.engine.worker_state import CodeChanged, WorkerState

log = logging.getLogger("tenure.worker")

GRACE_SECONDS = 5.0  # running jobs get to finish; or a shutdown's grace, if that is less
LOOK_SECONDS = 0.5
SETTLE_SECONDS = 0.1  # an editor may remove a file, write it anew, and write several

Stamps = dict[str, tuple[int, int]]  # path -> time of its last change, size


class Reload:
    def __init__(self, state: WorkerState) -> None:
        self._state = state
        self._grace = min(state.settings.shutdown_timeout, GRACE_SECONDS)
        self.sources = Sources()
        self.broken = False  # the code as it is now cannot be loaded: no child is started

    def run(self, over: threading.Event) -> None:
        while (path := self.sources.wait(over)) is not None:
            self._state.news.put(CodeChanged(path))

    def replace(self, path: str) -> None:
        """As a deploy would: successors start, while children of the old code end what they run."""
        log.info("%s has changed: replacing the children", path)
        self.broken = False
        leave_by = time.monotonic() + self._grace
        for child in self._state.children:
            child.leave_by = min(child.leave_by, leave_by)
            child.stop()

    def refused(self, folders: Iterable[str]) -> None:
        """A child could not load the code. It has printed the traceback."""
        self.broken = True
        self.sources.watch(folders)
        log.info("waiting for the next change")


class Sources:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._folders: set[str] = set()
        self._seen: Stamps = {}

    def watch(self, folders: Iterable[str]) -> None:
        """These too. What has changed in others meanwhile is still to be noticed."""
        with self._lock:
            new = set(folders) - self._folders
            self._folders |= new
            self._seen |= _stamps(new)

    def wait(self, over: threading.Event) -> str | None:
        """The path of a file that has changed, once one has; None when it is over."""
        while not over.wait(LOOK_SECONDS):
            path = self._changed()
            if path is not None:
                while not over.wait(SETTLE_SECONDS) and self._changed() is not None:
                    continue
                return os.path.relpath(path)
        return None

    def _changed(self) -> str | None:
        """Since the last call."""
        with self._lock:
            before, self._seen = self._seen, _stamps(self._folders)
            changed = dict(before.items() ^ self._seen.items())
        return min(changed, default=None)


def _stamps(folders: Iterable[str]) -> Stamps:
    found: Stamps = {}
    for folder in folders:
        with suppress(OSError):  # a folder that is gone has no files
            for entry in os.scandir(folder):
                if entry.name.endswith(".py"):
                    with suppress(OSError):
                        is_now = entry.stat()
                        found[entry.path] = (is_now.st_mtime_ns, is_now.st_size)
    return found
