"""A thread that watches the loop of a child: while a handler blocks it, the thread names the
handler, and does the loop's work for `def` jobs.

`time.sleep(2)` in an `async def` handler stops every task of its child. This thread notices that
the loop does not turn, takes orders, starts and finishes `def` jobs in its place, and after half a
second says which task blocks it and at which line. It costs jobs nothing: it looks ten times a
second, and no job wakes it on its way.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import sysconfig
import time
from collections.abc import Callable
from types import CodeType, FrameType

from tenure.engine.executor import IDLE_BEAT, Executor
from tenure.engine.run import JobRun
from tenure.engine.tracebacks import of_a_module

log = logging.getLogger("tenure.worker")

LOOK_SECONDS = 0.1
BLOCKED_SECONDS = 0.2  # without a turn: we stand in
STANDING_SECONDS = 0.02  # between two looks while we do
NAMED_SECONDS = 0.5  # without a turn: it is named
AGAIN_SECONDS = 60.0  # until the same task is named again for the same line
MOST_REMEMBERED = 1000


class LoopWatch:
    def __init__(
        self, executor: Executor, loop_thread: int, read: Callable[[], None] | None = None
    ) -> None:
        """Without `read` (embedded, where the supervisor waits for the loop itself) it only names
        the task that blocks."""
        self._executor = executor
        self._loop_thread = loop_thread
        self._read = read
        self._named: dict[tuple[str, str], float] = {}  # task, place -> when
        self._named_turn = 0.0  # in one turn only the first line: a busy one stands at many
        self._over = False

    def close(self) -> None:
        self._over = True

    def run(self) -> None:
        standing = False
        while not self._over:
            try:
                standing = self._look(time.monotonic(), self._executor.working)
            except Exception:  # it must not end: no other thread does this
                log.exception("internal error in the loop watch")
                standing = False
            time.sleep(STANDING_SECONDS if standing else LOOK_SECONDS)

    def _look(self, now: float, at_work: bool) -> bool:
        """Whether the loop is blocked."""
        silent = now - self._executor.turned - (0 if at_work else IDLE_BEAT)
        if silent < BLOCKED_SECONDS:
            return False
        turn = self._executor.turned
        if silent >= NAMED_SECONDS and turn != self._named_turn and self._name(now, silent):
            self._named_turn = turn
        if self._read is not None:
            self._executor.stand_in(self._read)
        return True

    # -- which task it is ---------------------------------------------------------------------
    def _name(self, now: float, silent: float) -> bool:
        """False when no task can be blamed."""
        frames = _inside_a_callback(sys._current_frames().get(self._loop_thread))
        run = _run_of(frames)
        if run is None and not any(map(_is_theirs, frames)):
            return False  # the loop waits, or is at work: a thread holds the GIL, or all is slow
        runs = [run for run in self._executor.runs() if run.waiter is not None]
        run = run or (runs[0] if len(runs) == 1 else None)
        place = _place(frames, None if run is None else run.task.function)
        types = run.job.type if run is not None else ", ".join(sorted({r.job.type for r in runs}))
        if now - self._named.get((types, place), -AGAIN_SECONDS) < AGAIN_SECONDS:
            return True
        if len(self._named) >= MOST_REMEMBERED:
            self._named.clear()
        self._named[types, place] = now
        about = {} if run is None else {"job_id": run.job.id, "job_type": run.job.type}
        log.warning(
            "%s blocks the event loop at %s, for %.1f s so far: no other async job of its process "
            "goes on meanwhile. Await there, use asyncio.to_thread(), or make the task a plain def",
            f"task {types!r}" if run is not None else f"one of the tasks {types or '(none runs)'}",
            place,
            silent,
            extra=about,
        )
        return True


_RUN_ASYNC: CodeType = Executor._run_async.__code__
_CALLBACK: CodeType = asyncio.Handle._run.__code__


def _inside_a_callback(frame: FrameType | None) -> list[FrameType]:
    """The frames of what the loop is running, innermost first; none when it runs nothing."""
    frames: list[FrameType] = []
    while frame is not None:
        if frame.f_code is _CALLBACK:
            return frames
        frames.append(frame)
        frame = frame.f_back
    return []


def _run_of(frames: list[FrameType]) -> JobRun | None:
    """Not of a task that the handler has started beside itself."""
    for frame in frames:
        if frame.f_code is _RUN_ASYNC:
            found = frame.f_locals.get("run")
            return found if isinstance(found, JobRun) else None
    return None


def _place(frames: list[FrameType], function: object) -> str:
    """`shop/jobs.py:12`: where the user's code stands, whatever library it is in at the moment. A
    frame that is no module's (compiled under any name) is passed over: a payload may name it."""
    known = [frame for frame in frames if of_a_module(frame)]
    code = getattr(function, "__code__", None)
    theirs = [frame for frame in known if _is_theirs(frame)]
    theirs += [frame for frame in known if code and _file(frame) == code.co_filename]
    if not (theirs or known):
        return "an unknown place"
    frame = (theirs or known)[0]
    file = os.path.relpath(_file(frame))
    return f"{_file(frame) if file.startswith(os.pardir) else file}:{frame.f_lineno}"


def _is_theirs(frame: FrameType) -> bool:
    return of_a_module(frame) and not _file(frame).startswith(_LIBRARIES)


def _file(frame: FrameType) -> str:
    return frame.f_code.co_filename


_LIBRARIES = tuple(
    os.path.join(path, "")
    for path in {
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
    }
    if path
)
