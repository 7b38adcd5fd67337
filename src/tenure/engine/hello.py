"""What a child says about its app: which types it runs, and what the supervisor must know of each
task for the time when no process is left to ask."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from tenure.engine.messages import Hello
from tenure.policy import Exponential, Retry, delay_seconds

INSTALLED = ("site-packages", "dist-packages")


def hello_of(app: Any, folders: Sequence[str] = ()) -> Hello:
    settings = {name: task.settings for name, task in sorted(app.tasks.items())}
    return Hello(
        os.getpid(),
        list(settings),
        app.settings.to_env(),
        [name for name, its in settings.items() if its.process],
        {name: its.keep for name, its in settings.items()},
        {name: after_time_outs(its.retry) for name, its in settings.items()},
        sorted({its.queue for its in settings.values()}),
        list(folders),
    )


def after_time_outs(retry: Retry) -> list[float] | None:
    """The delays that `retry` gives after a time-out of the first attempt, the second, ...: when a
    process had to be killed, its task cannot be asked. None: it is not tried again."""
    late = TimeoutError()
    if retry.gives_up_on(late):
        return None
    return [_delay(retry, late, attempt) for attempt in range(1, max(retry.attempts, 2))]


def _delay(retry: Retry, late: TimeoutError, attempt: int) -> float:
    try:
        return delay_seconds(float(retry.verdict(late, attempt, attempt + 1)))
    except Exception:  # a backoff of the user's own: a run falls back in the same way
        return Exponential().delay(attempt)


def source_folders(spec: str) -> list[str]:
    """Also when the import has failed: the module itself is not among the loaded ones then."""
    here = os.path.join(os.getcwd(), "")
    name = spec.partition(":")[0]
    files = [_file_of(sys.modules.get(name))]
    loaded = [_file_of(module) for module in list(sys.modules.values())]
    files += [file for file in loaded if file.startswith(here) and not _installed(file)]
    with suppress(Exception):  # a finder of the user's may raise anything
        found = importlib.util.find_spec(name.partition(".")[0])
        files.append(os.path.abspath(found.origin) if found and found.origin else "")
    return sorted({os.path.dirname(file) for file in files if file})


def _file_of(module: object) -> str:
    file = getattr(module, "__file__", None)
    return os.path.abspath(file) if isinstance(file, str) else ""


def _installed(file: str) -> bool:
    return any(part in INSTALLED for part in file.split(os.sep))
