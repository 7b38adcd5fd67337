"""Copies: processes that a handler forks. A copy ends where it would return to the engine.

`os.fork()` copies the whole process, in the middle of a handler. The copy has the child's pipe, its
board and, on the loop's thread, the loop itself with everything that was about to run: it would
take orders, report jobs and run other handlers a second time. So it gets an empty loop, a pipe that
leads nowhere, a board of its own, and the usual signals. Until the handler returns, awaits or
raises, the copy does what the handler says; there it ends, like a script at its end.

Processes of subprocess and multiprocessing never return into the handler.
"""

from __future__ import annotations

import os
import signal
import threading
import traceback
import weakref
from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, NoReturn, Protocol

from tenure.engine.board import Board


class Copied(Protocol):
    """An executor: after each handler it asks whether it is now in a copy."""

    copied: bool


def keep_copies_apart(
    owner: Copied, board: Board, loop: AbstractEventLoop, handles: Iterable[int] = ()
) -> None:
    """From now on. The hook cannot be removed again, so it holds weak references only."""
    if not hasattr(os, "register_at_fork"):
        return  # Windows has no fork
    its_owner, its_board, its_loop = weakref.ref(owner), weakref.ref(board), weakref.ref(loop)
    named = [*handles]

    def in_copy() -> None:
        owner, board, loop = its_owner(), its_board(), its_loop()
        if owner is None or board is None or loop is None:
            return
        owner.copied = True
        board.disown()
        if hasattr(loop, "_ready"):  # asyncio has no public name for what is to run next
            loop._ready = _Nothing(loop._ready)
        _lead_nowhere(*named, _selector_of(loop))

    os.register_at_fork(after_in_child=in_copy)


class _Nothing(deque[Any]):
    """The queue of a loop, in a copy: nothing of it is run. What was in it before is kept: if it
    were destroyed, Python would complain that it was never awaited."""

    def __init__(self, before: Any) -> None:
        super().__init__()
        self.before = before

    def popleft(self) -> NoReturn:
        end_copy(None)


def end_copy(error: BaseException | None) -> NoReturn:
    """Like a script: 0, the code given to `sys.exit`, or a traceback and 1."""
    code = 0
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    elif error is not None:
        code = 1
        with suppress(Exception):
            traceback.print_exception(error)
    os._exit(code & 0xFF)


def ignore_signals() -> None:
    """A terminal's Ctrl-C reaches the whole process group, and some service managers signal it too:
    but only the supervisor decides about stopping. Not SIG_IGN: programs that a handler starts
    would inherit that.

    A copy would inherit these handlers, and multiprocessing ends its processes by SIGTERM, perhaps
    at once. So a thread that forks holds the signals back until the copy has the usual handlers."""
    usual: dict[int, Any] = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
    }
    for number in usual:
        signal.signal(number, _ignore)
    held = threading.local()

    def before() -> None:
        held.mask = signal.pthread_sigmask(signal.SIG_BLOCK, usual)

    def in_parent() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, held.mask)

    def in_copy() -> None:
        for number, action in usual.items():
            if signal.getsignal(number) is _ignore:
                signal.signal(number, action)
        in_parent()

    os.register_at_fork(before=before, after_in_parent=in_parent, after_in_child=in_copy)


def _ignore(_number: int, _frame: Any) -> None:
    return


def _selector_of(loop: AbstractEventLoop) -> int:
    """A copy shares the kernel's epoll: an event that one process takes, the other does not see."""
    try:
        handle: int = loop._selector.fileno()  # type: ignore[attr-defined]
    except (AttributeError, OSError, ValueError):
        return -1  # another kind of loop
    return handle


def _lead_nowhere(*handles: int) -> None:
    """Not closed: objects still name these numbers, and no other file may get them."""
    with suppress(OSError):
        nowhere = os.open(os.devnull, os.O_RDWR)
        for handle in handles:
            if handle >= 0:
                os.dup2(nowhere, handle, inheritable=False)
        os.close(nowhere)
