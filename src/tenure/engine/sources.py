"""`--reload`: where an app's code is, as a child knows it, and when it changes.

Files are looked at about twice a second: of the folder of the app's module, and of every folder
below the working directory from which something was imported.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress

LOOK_SECONDS = 0.5
SETTLE_SECONDS = 0.1  # an editor may remove a file, write it anew, and write several
INSTALLED = ("site-packages", "dist-packages")

Stamps = dict[str, tuple[int, int]]  # path -> time of its last change, size


# -- in a child -----------------------------------------------------------------------------------
def source_folders(spec: str) -> list[str]:
    """Also when the import has failed: the module itself is not among the loaded ones then."""
    here = os.path.join(os.getcwd(), "")
    name = spec.partition(":")[0]
    files = [_file_of(sys.modules.get(name))]
    loaded = [_file_of(module) for module in list(sys.modules.values())]
    files += [file for file in loaded if file.startswith(here) and not _installed(file)]
    with suppress(Exception):  # whatever a finder of the user's does
        found = importlib.util.find_spec(name.partition(".")[0])
        files.append(os.path.abspath(found.origin) if found and found.origin else "")
    return sorted({os.path.dirname(file) for file in files if file})


def _file_of(module: object) -> str:
    file = getattr(module, "__file__", None)
    return os.path.abspath(file) if isinstance(file, str) else ""


def _installed(file: str) -> bool:
    return any(part in INSTALLED for part in file.split(os.sep))


def without_ours(error: BaseException) -> BaseException:
    """An error of the user's module, without the frames that led to its import."""
    ours = os.path.dirname(os.path.dirname(__file__))
    trace = error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if "importlib" not in file and not file.startswith(ours):
            break
        trace = trace.tb_next
    return error.with_traceback(trace)


# -- in the supervisor ----------------------------------------------------------------------------
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
        """Until one changes: its path; None when it is over."""
        while not over.wait(LOOK_SECONDS):
            path = self._changed()
            if path is not None:
                while not over.wait(SETTLE_SECONDS) and self._changed() is not None:
                    continue
                return os.path.relpath(path)
        return None

    def _changed(self) -> str | None:
        """Since it was asked last."""
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
