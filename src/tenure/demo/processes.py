"""The processes of `tenure demo`: what a worker is started with, who runs what, and a SIGKILL
that hits jobs for certain."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

SPEC = "tenure.demo.jobs:app"
LEASE = {"TENURE_LEASE_SECONDS": "3", "TENURE_LEASE_RENEW_SECONDS": "1"}


class Child(NamedTuple):
    """A process in which handlers run."""

    pid: int
    alone: bool  # it was started for a single job


def environment(url: str, directory: str) -> dict[str, str]:
    """For a worker: nothing of this shell's own Tenure, this very package, files in one place."""
    import tenure

    root = os.path.dirname(os.path.dirname(os.path.abspath(tenure.__file__)))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TENURE_")}
    paths = [root, *filter(None, [kept.get("PYTHONPATH")])]
    own = {"TENURE_URL": url, "PYTHONPATH": os.pathsep.join(paths), "TMPDIR": directory}
    return kept | LEASE | own


class Stopped(KeyboardInterrupt):
    """A kind of its own: one that is exactly a KeyboardInterrupt and comes while exec() runs (a
    NamedTuple is imported) makes Python end itself by SIGINT, caught or not (with `python -m`)."""


@contextmanager
def stopped_politely() -> Iterator[None]:
    """SIGTERM ends the demo like Ctrl-C, so that it leaves no worker behind."""

    def stop(number: int, frame: object) -> None:
        raise Stopped

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def children_of(worker: int) -> list[Child]:
    """Those that live: a process that has ended, and is not buried yet, has no command line."""
    return [
        Child(pid, command[-1] == "1")
        for pid, parent, command in processes()
        if parent == worker and SPEC in command[:-1]
    ]


def under_way(children: Iterable[Child], directory: str) -> set[str]:
    """The jobs whose handlers run in them at this moment, by the children's own word. The audit
    trail cannot tell: to it a job runs from its claim on, also while it waits for a process."""
    from tenure.engine.board import boards_of, read_board  # only a demo needs it

    pids = {child.pid for child in children}
    found = [read_board(path) for path in boards_of(temporary=directory)]
    return {job for each in found if each is not None and each.pid in pids for job in each.running}


def kill_if(pid: int, worth_it: Callable[[int], bool]) -> bool:
    """SIGKILL, if it is worth it. The process stands still while we look: what is seen is hit."""
    verdict = False
    with suppress(ProcessLookupError):  # a poison job was quicker
        os.kill(pid, signal.SIGSTOP)
        try:
            verdict = worth_it(pid)
        finally:
            os.kill(pid, signal.SIGKILL if verdict else signal.SIGCONT)
    return verdict


def processes() -> Iterator[tuple[int, int, list[str]]]:
    """Every process: its id, its parent's, its command line."""
    if os.path.isdir("/proc/self/task"):
        for name in filter(str.isdecimal, os.listdir("/proc")):
            try:
                with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                    parent = int(file.read().rpartition(")")[2].split()[1])
                with open(f"/proc/{name}/cmdline", encoding="utf-8", errors="replace") as file:
                    command = file.read().rstrip("\0").split("\0")
            except OSError:
                continue  # it has ended meanwhile
            yield int(name), parent, command
        return
    listing = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid=,args="],  # noqa: S607  wherever this system has it
        capture_output=True,
        text=True,
        check=True,
    )
    for line in listing.stdout.splitlines():
        pid, parent_pid, *command = line.split()
        yield int(pid), int(parent_pid), command or [""]
