"""A terminal for tests: a real pty whose foreground program gets a real Ctrl-C, and what a person
would see on it."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from .conftest import Cli

CTRL_C = b"\x03"
# Becomes the program after it has made its standard input its controlling terminal.
SESSION = (
    "import fcntl, os, sys, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "os.execv(sys.argv[1], sys.argv[1:])"
)
_PIECE = re.compile(r"\x1b\[([0-9;]*)([A-Za-z])|\x1b|[^\x1b\r\n]+|\r|\n")


class Terminal:
    def __init__(self, handle: int, program: subprocess.Popen[bytes]) -> None:
        self._handle = handle
        self.program = program
        self.seen = ""

    def read(self, until: str | None = None, within: float = 20.0) -> str:
        """Up to a text, or to the end; what it has shown so far."""
        deadline = time.monotonic() + within
        while until is None or until not in self.seen:
            assert time.monotonic() < deadline, f"no {until!r} in {self.seen!r}"
            data = b""
            with suppress(OSError):  # how Linux says that the other side has hung up
                data = os.read(self._handle, 1 << 16)
            if not data:
                assert until is None, f"no {until!r} in {self.seen!r}"
                break
            self.seen += data.decode(errors="replace")
        return self.seen

    def type(self, keys: bytes) -> None:
        os.write(self._handle, keys)

    def end(self) -> int:
        self.read()
        return self.program.wait(20)


@contextmanager
def on_a_terminal(tenure: Cli, *args: str, **environment: str) -> Iterator[Terminal]:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (40, 120))
    variables = tenure.environment(TERM="xterm", **environment)
    program = subprocess.Popen(
        [sys.executable, "-c", SESSION, *tenure.command(*args)],
        cwd=tenure.home, env=variables, stdin=theirs, stdout=theirs, stderr=theirs,
    )  # fmt: skip
    os.close(theirs)
    try:
        yield Terminal(ours, program)
    finally:
        with suppress(ProcessLookupError):
            os.kill(program.pid, signal.SIGKILL)
        program.wait(20)
        os.close(ours)


class Screen:
    """What is on the paper after all of it: rows that the cursor has left and the present one.
    Knows what we write, and insists that it is nothing else: text, CR, LF, erase to the end of the
    line, colours."""

    def __init__(self, columns: int = 120) -> None:
        self.rows = [""]
        self.column = 0
        self.columns = columns
        self.left: list[str] = []  # each row, as it was when the cursor went on to the next

    def feed(self, text: str) -> Screen:
        for piece in _PIECE.finditer(text):
            if piece[2] == "K":
                self.rows[-1] = self.rows[-1][: self.column]
            elif piece[2] == "m":
                continue
            elif piece[0] == "\r":
                self.column = 0
            elif piece[0] == "\n":
                self.left.append(self.rows[-1])
                self.rows.append("")
            else:
                assert "\x1b" not in piece[0], f"an escape sequence nobody expects in {text!r}"
                self._put(piece[0])
        return self

    def _put(self, text: str) -> None:
        row = self.rows[-1].ljust(self.column)
        self.rows[-1] = row[: self.column] + text + row[self.column + len(text) :]
        self.column += len(text)
        assert self.column < self.columns or " done · " not in text, "the live line has wrapped"
