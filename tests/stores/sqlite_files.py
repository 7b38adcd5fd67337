"""For tests about an SQLite file: jobs for a store, programs beside it, other users."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from crash.harness import environment
from tenure.ids import new_ids
from tenure.job import NewJob, Terms

TERMS = Terms("noop", "default", 5, "default", 5, 300_000, 1000)
NOBODY = 65534

needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can become another user or mount a file system"
)

# A program of another kind that writes to the same file without a pause, and knows no gate.
BUSY_WRITER = """
import sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=60)
db.execute("PRAGMA synchronous=OFF")
db.execute("CREATE TABLE IF NOT EXISTS foreign_rows (n INTEGER)")
print("ready", flush=True)
while True:
    db.execute("BEGIN IMMEDIATE")
    db.execute("INSERT INTO foreign_rows VALUES (1)")
    db.execute("COMMIT")
"""


def jobs(count: int, size: int = 10) -> list[NewJob]:
    text = f'{{"text":"{"x" * size}"}}'
    return [NewJob(id, TERMS, text) for id in new_ids(count)]


@contextmanager
def program(text: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A Python program that has said its first line; it is gone at the end of the block."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(text), *map(str, arguments)],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        if not process.stdout.readline():
            raise AssertionError(process.communicate()[1])
        yield process
    finally:
        process.kill()
        process.communicate()


def python(text: str, *arguments: object) -> str:
    """What a program prints; an error when it ends with one."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text), *map(str, arguments)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def shared_folder(mode: int = 0o755) -> Iterator[Path]:
    """One that other users get into, unlike pytest's."""
    folder = Path(tempfile.mkdtemp(prefix="tenure-test-"))
    folder.chmod(mode)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def as_user(call: Callable[[], Any], *, uid: int = NOBODY, groups: tuple[int, ...] = ()) -> Any:
    """What `call` returns, or raises, in a forked child that has become another user. (Not a new
    interpreter: that user may not be able to read this one.)"""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups(groups)
            os.setgid(NOBODY)
            os.setuid(uid)
            try:
                said: Any = ("returned", call())
            except Exception as error:
                said = ("raised", error)
            os.write(writing, pickle.dumps(said))
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        kind, value = pickle.loads(pipe.read())  # noqa: S301  our own child's
    os.waitpid(pid, 0)
    if kind == "raised":
        raise value
    return value
