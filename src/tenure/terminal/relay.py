"""What a worker's children print, passed on above the live line.

Where the worker is on a terminal, each child writes to a pseudo-terminal (a pty) of its own. So
`print`, loggers, threads and C code flush as on a real terminal, and keep their colours. A thread
of the worker reads it and passes whole lines on. After half a second an unfinished line is passed
on too, as a line of its own.
"""

from __future__ import annotations

import codecs
import os
import re
import selectors
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from tenure.terminal.live_line import LiveLine

HOLD_SECONDS = 0.5  # an unfinished line is waited for
LONGEST = 64 * 1024  # and not longer than this
RESET = "\x1b[0m"
# Escape sequences (CSI; OSC; the rest) and control characters but tab. Only colours may pass: what
# moves the cursor would move it off the live line.
_ESCAPES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[ -/]*[0-~]?"
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
)


class Relay:
    def __init__(self, line: LiveLine) -> None:
        self._line = line
        self._threads: list[threading.Thread] = []

    @contextmanager
    def streams(self) -> Iterator[int | None]:
        """For one child, started inside the block. Where the system has no pty left, the child
        writes to the worker's terminal itself: torn lines are better than none."""
        try:
            ours, theirs = os.openpty()
        except OSError:
            yield None
            return
        try:
            _prepare(theirs)
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            thread = threading.Thread(target=self._pass_on, args=(ours,), name="tenure-relay")
            thread.daemon = True
            try:
                thread.start()
            except RuntimeError:
                os.close(ours)
                raise
            self._threads.append(thread)
            yield theirs
        finally:
            os.close(theirs)

    def close(self) -> None:
        """When the children have ended: pass on what they printed last. A program that a handler
        has left behind may keep the pty open; it is not waited for."""
        for thread in self._threads:
            thread.join(timeout=0.5)

    def _pass_on(self, ours: int) -> None:
        text = _Lines()
        with selectors.DefaultSelector() as selector:
            selector.register(ours, selectors.EVENT_READ)
            while True:
                if not selector.select(HOLD_SECONDS if text.unfinished else None):
                    self._show(text.rest())
                    continue
                try:
                    data = os.read(ours, 1 << 16)
                except OSError:  # on Linux: no process has the other side open
                    data = b""
                if not data:
                    break
                self._show(text.feed(data))
        self._show(text.rest())
        os.close(ours)

    def _show(self, text: str) -> None:
        if text:
            self._line.above(lambda: sys.stderr.write(text))


class _Lines:
    """Bytes in, whole lines out."""

    def __init__(self) -> None:
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self.unfinished = ""

    def feed(self, data: bytes) -> str:
        whole, newline, self.unfinished = (self.unfinished + self._decode(data)).rpartition("\n")
        shown = "".join(map(_tidy, whole.split("\n"))) if newline else ""
        return shown + self.rest() if len(self.unfinished) > LONGEST else shown

    def rest(self) -> str:
        text, self.unfinished = self.unfinished, ""
        return _tidy(text) if text else ""


def _tidy(line: str) -> str:
    """One line to pass on. Of a line that was written over (a progress bar), its last form."""
    shown = line.rstrip("\r").rpartition("\r")[2]
    plain = _ESCAPES.sub(lambda found: found[0] if _is_colour(found[0]) else "", shown)
    return f"{plain}{RESET if RESET[0] in plain else ''}\n"


def _is_colour(sequence: str) -> bool:
    return sequence.startswith("\x1b[") and sequence.endswith("m")


def _prepare(terminal: int) -> None:
    """Bytes come as they were written, and programs see the width of the real terminal."""
    import termios
    import tty

    tty.setraw(terminal)
    with suppress(OSError, termios.error):
        termios.tcsetwinsize(terminal, termios.tcgetwinsize(sys.stderr.fileno()))
