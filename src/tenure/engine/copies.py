"""Copies: processes that a handler forks. One that comes back to us ends.

`os.fork()` copies the whole process, in the middle of a handler. The copy has our pipe, our board
and, on the loop's thread, the loop itself with everything that was about to run: it would eat
orders, answer for jobs and run other handlers a second time. So it gets an empty loop, a pipe that
leads nowhere and a board that nobody reads. What the handler does in it until it returns, awaits
or raises is its own business; there it ends, like a forked program at the end of its script.

subprocess and multiprocessing are not concerned: what they start never returns into the handler.
"""

from __future__ import annotations

import os
import traceback
import weakref
from asyncio import AbstractEventLoop
from collections.abc import Iterable
from contextlib import suppress
from typing import NoReturn, Protocol

from tenure.engine.board import Board


class Copied(Protocol):
    """Whoever runs handlers and asks, after each, whether it is still itself."""

    copied: bool


def keep_copies_apart(
    owner: Copied, board: Board, loop: AbstractEventLoop, handles: Iterable[int] = ()
) -> None:
    """From now on. Hooks of a fork cannot be taken back, so they hold nothing that ends earlier."""
    if not hasattr(os, "register_at_fork"):
        return  # Windows has no fork
    known = weakref.ref(owner)
    named = [*handles]

    def in_copy() -> None:
        me = known()
        if me is None:
            return
        me.copied = True
        board.disown()
        ready = getattr(loop, "_ready", None)  # asyncio has no public name for it
        if ready is not None:
            ready.clear()
        _lead_nowhere(*named, _selector_of(loop))

    os.register_at_fork(after_in_child=in_copy)


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
