"""Processes and the machine they run on: a worker is named by host, boot, pid and process start."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from functools import cache

from tenure.ids import new_id
from tenure.store import WorkerInfo


@cache
def boot() -> str:
    """Names the machine's boot and the pid namespace, within which a pid means one process.
    Containers share a kernel's boot id but not its pids."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{sys.platform} {time.time() - time.monotonic():.0f}"


def process_start(pid: int) -> str:
    """When a process started, in the kernel's words; empty when that is unknown."""
    found = _stat(pid)
    return "" if found is None else found[1]


def _stat(pid: int) -> tuple[str, str] | None:
    """A process's state letter and when it started; None when that is unknown: there is no /proc
    (macOS), or the process is another user's and /proc is mounted with `hidepid`."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            words = file.read().rpartition(")")[2].split()
            return words[0], words[19]
    except (OSError, IndexError):
        return None


def resident_bytes(pid: int) -> int | None:
    """The memory that a process uses; None when that is unknown."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return None if sys.platform.startswith("linux") else _asked_of_ps(pid)


def _asked_of_ps(pid: int) -> int | None:
    command = ["ps", "-o", "rss=", "-p", str(pid)]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=5)  # noqa: S603
        return int(found.stdout) * 1024
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None


def new_worker_id() -> str:
    return f"{socket.gethostname()}:{os.getpid()}:{new_id()}"


def identify(id: str, lease_seconds: float, meta: dict[str, object]) -> WorkerInfo:
    host, pid = socket.gethostname(), os.getpid()
    return WorkerInfo(
        no=0,
        id=id,
        host=host,
        boot=boot(),
        pid=pid,
        pid_started=process_start(pid),
        beat=0,
        lease_ms=int(lease_seconds * 1000),
        started_at=0,
        seen_at=0,
        dead_at=None,
        dead_reason=None,
        meta=dict(meta),
        held=0,
    )


def same_place(worker: WorkerInfo) -> bool:
    return worker.boot == boot() and worker.host == socket.gethostname()


def is_gone(worker: WorkerInfo) -> bool:
    """The worker ran here and its process has ended, or its pid is another process now. A process
    that cannot be looked at is never taken for gone: only the kernel's word takes jobs away."""
    if not same_place(worker):
        return False
    try:
        os.kill(worker.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass  # it lives, under another user
    except OverflowError:
        return False  # no pid of any machine: the row was not written by us
    found = _stat(worker.pid)
    if found is None:
        return False
    state, started = found
    # A zombie has ended, and its parent has not looked yet: it will never write again.
    return state in "ZXx" or bool(worker.pid_started and started != worker.pid_started)
