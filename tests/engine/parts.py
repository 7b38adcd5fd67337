"""Parts of a worker by themselves: its state, and a child at the other end of a real pipe."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tenure.config import Settings
from tenure.engine.board import make_board
from tenure.engine.children import SLOTS, Child
from tenure.engine.messages import ToChild
from tenure.engine.pipe import Frames, Pipe
from tenure.engine.worker_options import WorkerOptions
from tenure.engine.worker_state import WorkerState
from tenure.ids import new_id
from tenure.job import ClaimedJob


class NoHints:
    """A wake-up that only wakes when it is interrupted."""

    def __init__(self) -> None:
        self.interrupted = threading.Event()

    def wait(self, timeout: float) -> bool:
        self.interrupted.wait(timeout)
        self.interrupted.clear()
        return False

    def interrupt(self) -> None:
        self.interrupted.set()

    def healthy(self) -> bool:
        return True

    def describe(self) -> str:
        return "no hints"

    def close(self) -> None: ...


def worker_state(options: WorkerOptions | None = None, **settings: Any) -> WorkerState:
    return WorkerState(options or WorkerOptions(), Settings(**settings), NoHints())


class OtherEnd:
    """What a child reads from its pipe."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._frames = Frames(ToChild)

    def received(self) -> list[Any]:
        """All that was sent so far."""
        self._socket.setblocking(False)
        found: list[Any] = []
        try:
            while data := self._socket.recv(1 << 20):
                found += self._frames.feed(data)
        except BlockingIOError:
            return found
        return found


@contextmanager
def child_of(state: WorkerState, *, solo: bool = False) -> Iterator[tuple[Child, OtherEnd]]:
    """A child that has said hello and that nobody runs."""
    ours, theirs = socket.socketpair()
    board = make_board(f"test:1:{new_id()}", 1, SLOTS)
    child = Child(1, board, 50, solo=solo)
    child.channel = Pipe(ours)
    child.greeted()
    state.add(child)
    with theirs:
        yield child, OtherEnd(theirs)
        child.close()


def claimed_job(lease_no: int = 1, id: str | None = None) -> ClaimedJob:
    return ClaimedJob(
        id or new_id(), lease_no, "t", "{}", 1, 5, 0, 1000, "default", 5, "default", "default",
        None, "system", "tenure", None, None, None, None, None, 0, 0, 0, 0,
    )  # fmt: skip
