"""Copies: processes that a handler forks. One that comes back to us ends.

`os.fork()` copies the whole process, in the middle of a handler. The copy has our pipe, our board
and, on the loop's thread, the loop itself with everything that was about to run: it would eat
orders, answer for jobs and run other handlers a second time. So it gets an empty loop, a pipe that
leads nowhere, a board that nobody reads, and the usual signals. What the handler does in it until
it returns, awaits or raises is its own business; there it ends, like a script at its end.

What subprocess and multiprocessing start never returns into the handler.
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
    """Whoever runs handlers and asks, after each, whether it is still itself."""

    copied: bool


def keep_copies_apart(
    owner: Copied, board: Board, loop: AbstractEventLoop, handles: Iterable[int] = ()
) -> None:
    """From now on. A hook cannot be taken back, so it keeps nothing alive."""
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
    """What a loop is to run next, in a copy: not even what the copy itself has asked for. What it
    was to run is kept: destroyed, it would complain that it was never awaited."""

    def __init__(self, before: Any) -> None:
        super().__init__()
        self.before = before

    def popleft(self) -> NoReturn:
        end_copy(None)


def end_copy(error: BaseException | None) -> NoReturn:
    """Like a script: 0, what `sys.exit` was given, or a traceback and 1."""
    code = 0
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    elif error is not None:
        code = 1
        with suppress(Exception):
            traceback.print_exception(error)
    os._exit(code & 0xFF)


def ignore_signals() -> None:
    """A terminal's Ctrl-C reaches the whole group, and some stop a service that way: stopping is
    the supervisor's decision. Not SIG_IGN: programs a handler starts would inherit that.

    A copy would inherit this, and multiprocessing ends its own by SIGTERM, perhaps at once: so the
    signals are held back in a thread that forks until the copy listens to them."""
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
    """The kernel's epoll is shared with a copy: what one takes from it, the other does not see."""
    try:
        handle: int = loop._selector.fileno()  # type: ignore[attr-defined]
    except (AttributeError, OSError, ValueError):
        return -1  # another kind of loop
    return handle


def _lead_nowhere(*handles: int) -> None:
    """Not closed: their numbers must not become somebody's file while objects still name them."""
    with suppress(OSError):
        nowhere = os.open(os.devnull, os.O_RDWR)
        for handle in handles:
            if handle >= 0:
                os.dup2(nowhere, handle, inheritable=False)
        os.close(nowhere)
