"""Starts child processes of one app.

Always from one long-lived thread: on Linux a child dies with the thread that started it.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext

from tenure.engine.board import Board, make_board
from tenure.engine.children import SLOTS, Child
from tenure.engine.pipe import Pipe

log = logging.getLogger("tenure.worker")

# Where a child prints, for as long as it takes to start it; None: where this process prints.
Streams = Callable[[], AbstractContextManager[int | None]]


class CannotStart(Exception):
    """No process, thread, handle or memory for another child. That may change."""


class Launcher:
    def __init__(
        self,
        spec: str,
        *,
        processes: int | None = None,
        reload: bool = False,
        streams: Streams | None = None,
    ) -> None:
        self._spec = spec
        self._processes = processes or 0  # that share the app's connections; 0: as its settings say
        self._reload = reload  # children say where their code is, and their errors with a traceback
        self._streams = streams or nullcontext
        self._count = 0
        self._warned = False

    def start(self, worker_id: str, concurrency: int | None, *, solo: bool = False) -> Child:
        """A child of this worker. Without `concurrency` it runs as many jobs at once as the app's
        own settings say; `solo`: a single job. CannotStart leaves nothing behind."""
        self._count += 1
        with ExitStack() as undo:
            try:
                child = self._start(worker_id, concurrency, solo, undo)
            except (OSError, RuntimeError) as error:  # RuntimeError: "can't start new thread"
                raise CannotStart(str(error)) from error
            undo.pop_all()
        if not self._warned:
            self._warned = warn_of_hidden_board(child.board)
        return child

    def _start(self, worker_id: str, concurrency: int | None, solo: bool, undo: ExitStack) -> Child:
        board = make_board(worker_id, self._count, SLOTS)
        undo.callback(board.close)
        child = Child(self._count, board, concurrency or 1, solo=solo)
        ours, theirs = socket.socketpair()
        undo.callback(ours.close)
        with theirs, self._streams() as printed:
            for end in (ours, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
            lent = board.lend()
            try:
                child.process = subprocess.Popen(  # noqa: S603  our own module, no shell
                    self._command(theirs.fileno(), lent, concurrency, solo),
                    pass_fds=(theirs.fileno(), lent),
                    stdin=subprocess.DEVNULL,
                    stdout=printed,
                    stderr=printed,
                    env=self._environment(),
                )
            finally:
                os.close(lent)
        undo.callback(child.process.wait)
        undo.callback(child.process.kill)
        child.channel = Pipe(ours)
        return child

    def _command(self, pipe: int, board: int, concurrency: int | None, solo: bool) -> list[str]:
        """See `tenure/child.py`. A child that runs a single job has one connection at most."""
        shared = 0 if solo else self._processes
        numbers = (concurrency or 0, shared, int(self._reload), int(solo))
        return [
            sys.executable, "-m", "tenure.child", str(pipe), self._spec, str(board),
            *map(str, numbers),
        ]  # fmt: skip

    def _environment(self) -> dict[str, str] | None:
        """Python takes compiled files for current by the source's second and size: after two saves
        within one second it would load the first. So with `--reload` none are written."""
        return {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"} if self._reload else None


def warn_of_hidden_board(board: Board) -> bool:
    """Whether a rescuer could not find this board; then it is said."""
    if board.path is None:
        log.warning(
            "no file for a board (%s): should this worker die, its rescuer cannot tell which jobs "
            "had started, and charges all of them",
            board.excuse,
        )
    return board.path is None
