"""One line of a terminal that rewrites itself, below whatever else is printed."""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections.abc import Callable
from typing import Any, TextIO

from tenure.terminal.output import cut, gauge, is_terminal, plain


class LiveLine:
    """One line on stderr that rewrites itself; silent where stderr is no terminal."""

    def __init__(self, *, wanted: bool = True) -> None:
        self.on = wanted and is_terminal(sys.stderr)
        self._lock = threading.Lock()
        self._text = ""

    def show(self, text: str) -> None:
        if self.on:
            columns = _columns_of(sys.stderr)
            with self._lock:
                self._text = cut(plain(text), columns - 1)
                self._write(f"\r\x1b[K{self._text}")

    def bar(self, done: int, total: int, what: str) -> None:
        self.show(f"{what} {gauge(done / max(total, 1))} {done:,} of {total:,}")

    def above(self, write: Callable[[], Any]) -> None:
        """Let something else print, then draw the line again below it."""
        with self._lock:
            if self._text:
                self._write("\r\x1b[K")
            write()
            if self._text:
                self._write(self._text)

    def clear(self) -> None:
        if self.on:
            with self._lock:
                self._text = ""
                self._write("\r\x1b[K")

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()


def _columns_of(stream: TextIO) -> int:
    """As wide as it is now; `shutil` asks about stdout, which may be elsewhere."""
    try:
        return int(os.environ.get("COLUMNS") or os.get_terminal_size(stream.fileno()).columns)
    except (OSError, ValueError):
        return shutil.get_terminal_size().columns
