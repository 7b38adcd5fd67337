"""Real workers for tests: write an app into a directory, start workers on it, send them signals.

Nothing sleeps for a fixed time: `eventually` looks until something is true or its deadline
passes, and handlers say what they do by appending lines to a file (`say`), one write each.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import tenure
from leaks import assert_nothing_leaked
from places import Place

T = TypeVar("T")
SOURCE = Path(__file__).resolve().parents[2] / "src"

PREAMBLE = """
import asyncio, ctypes, os, sys, time
import tenure

HERE = os.path.dirname(os.path.abspath(__file__))
app = tenure.App({url}, **{settings})


def say(*words):
    handle = os.open(os.path.join(HERE, "said.log"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(handle, (" ".join(map(str, words)) + "\\n").encode())
    os.close(handle)


def there(name):
    return os.path.exists(os.path.join(HERE, name))


def words(statement):
    # SQL with the placeholders of the driver whose connection a handler gets.
    return statement if app.settings.url.startswith("sqlite:") else statement.replace("?", "%s")


def hold_the_gil(seconds):
    # PyDLL keeps the GIL during the call: no other thread of this process runs meanwhile.
    libc = ctypes.PyDLL(None)
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        libc.usleep(int(min(left, 0.9) * 1_000_000))  # usleep takes less than a second

"""

# Whose wall clock is wrong by that many seconds; a supervisor runs no code of the app, so it is
# told in its command line, and passes it on to its children by the environment.
SHIFT = """
import os, time
OFFSET = float(os.environ.get("TEST_CLOCK_OFFSET", "0"))
if OFFSET:
    seconds, nanoseconds = time.time, time.time_ns
    time.time = lambda: seconds() + OFFSET
    time.time_ns = lambda: nanoseconds() + int(OFFSET * 1e9)
"""

START = (
    SHIFT
    + """
import faulthandler, json, logging, signal, sys
faulthandler.register(signal.SIGUSR1)  # where every thread is, into the log
logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
from tenure.app import run_worker
summary = run_worker("jobs:app", **json.loads(sys.argv[1]))
print(json.dumps(summary._asdict()))
"""
)


def eventually(
    look: Callable[[], T], *, within: float = 10.0, what: str = "it", every: float = 0.02
) -> T:
    """What `look` returns as soon as that is true; an error when it is not true in time."""
    deadline = time.monotonic() + within
    while True:
        found = look()
        if found:
            return found
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {within:g} s for {what}; last seen: {found!r}")
        time.sleep(every)


def p95(figures: Sequence[float]) -> float:
    return sorted(figures)[int(len(figures) * 0.95)]


class Worker:
    """One `tenure worker`: a supervisor process, and through it its children."""

    def __init__(
        self,
        folder: Path,
        number: int,
        options: dict[str, Any],
        *,
        program: str,
        prefix: Sequence[str],
        variables: Mapping[str, str],
    ) -> None:
        self._log = folder / f"worker-{number}.log"
        self._out = folder / f"worker-{number}.out"
        with self._log.open("wb") as log, self._out.open("wb") as out:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, "-c", program, json.dumps(options)],
                cwd=folder,
                env=environment() | variables,
                stdout=out,
                stderr=log,
                stdin=subprocess.DEVNULL,
                process_group=0,
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    @property
    def log(self) -> str:
        return self._log.read_text("utf-8", "replace")

    def children(self, *, lone: bool = True) -> list[int]:
        """Without `lone`: only those that take many jobs."""
        commands = {pid: command(pid) for pid in children_of(self.pid)}
        return [
            pid
            for pid, text in commands.items()
            if b"tenure.child" in text and (lone or text.endswith(b"\x000\x00"))
        ]

    def signal(self, number: int) -> None:
        if self.alive:
            os.kill(self.pid, number)

    def kill(self, *, whole: bool = False) -> None:
        """The supervisor; or everything it has started too, at one stroke."""
        if whole and self.alive:
            os.killpg(self.pid, signal.SIGKILL)
        self.signal(signal.SIGKILL)
        self.process.wait(10)

    def wait(self, within: float = 30.0) -> int:
        try:
            return self.process.wait(within)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"worker {self.pid} still runs; its log:\n{self.log}") from None

    def stop(self, within: float = 30.0) -> dict[str, Any]:
        """SIGTERM, then what it says it has done."""
        self.signal(signal.SIGTERM)
        code = self.wait(within)
        assert code == 0, f"worker {self.pid} left with {code}:\n{self.log}"
        return self.summary()

    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._out.read_text().splitlines()[-1])
        return found

    def refused(self) -> int:
        """Stale finishes this worker was refused, by its log (a killed one has no summary)."""
        lines = [line for line in self.log.splitlines() if "finishes refused" in line]
        return sum(int(line.split(" finishes refused")[0].split()[-1]) for line in lines)

    def end(self) -> None:
        """Whatever state it is in: it and its children are gone after this."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)
        if self.alive:
            self.process.kill()
        self.process.wait(10)


class Workshop:
    """A directory with an app in it, its database, and the workers that were started on it."""

    def __init__(self, folder: Path, place: Place, text: str, **settings: Any) -> None:
        self.folder = folder
        self.place = place
        chosen = {"lease_seconds": 3, "lease_renew_seconds": 1} | settings
        head = PREAMBLE.replace("{url}", repr(place.url)).replace("{settings}", repr(chosen))
        (folder / "jobs.py").write_text(SHIFT + head + textwrap.dedent(text))
        self.workers: list[Worker] = []
        self.jobs = load_module(folder / "jobs.py", f"jobs_{abs(hash(str(folder)))}")
        self.app: tenure.App = self.jobs.app
        self.app.migrate()

    def worker(
        self,
        *,
        ready: bool = True,
        clock_offset: float = 0.0,
        program: str = START,
        prefix: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
        **options: Any,
    ) -> Worker:
        """Start one; wait until the store knows it, unless told otherwise. `program` runs it,
        `prefix` is a command that becomes it, `variables` are put into its environment."""
        worker = Worker(
            self.folder,
            len(self.workers) + 1,
            options,
            program=program,
            prefix=prefix,
            variables={"TEST_CLOCK_OFFSET": str(clock_offset)} | dict(variables or {}),
        )
        self.workers.append(worker)
        if ready:
            eventually(
                lambda: self.row_of(worker) or not worker.alive, within=30, what="a new worker"
            )
            assert worker.alive, worker.log
        return worker

    def row_of(self, worker: Worker) -> Any:
        rows = [row for row in self.app.store.workers() if row.pid == worker.pid]
        return rows[-1] if rows else None

    # -- what the store says ----------------------------------------------------------------------
    def job(self, id: str) -> tenure.Job:
        found = self.app.get(id)
        assert found is not None, f"job {id} is lost"
        return found

    def statuses(self) -> Counter[str]:
        """Exact, where the store itself counts no further than 10,000."""
        totals = self.app.store.totals()
        counts = totals.jobs
        if totals.capped:
            counts = dict(self.sql("SELECT status, count(*) FROM job_queue GROUP BY status"))
        return Counter({status: n for status, n in counts.items() if n})

    def wait_for(self, status: str, count: int, within: float = 30.0) -> None:
        eventually(
            lambda: self.statuses()[status] >= count,
            within=within,
            what=f"{count} jobs {status}",
            every=0.05,  # it counts a good deal
        )

    def sql(self, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
        return self.place.sql(statement, *parameters)

    def events(self, kind: str) -> Counter[str]:
        """How often each job had an event of this kind."""
        rows = self.sql("SELECT job_id FROM tenure_events WHERE kind = ?", kind)
        return Counter(row[0] for row in rows)

    # -- what handlers said -----------------------------------------------------------------------
    def said(self) -> list[list[str]]:
        try:
            text = (self.folder / "said.log").read_text()
        except FileNotFoundError:
            return []
        return [line.split() for line in text.splitlines()]

    def count(self, *words: object) -> int:
        """How many lines begin with these words."""
        start = [str(word) for word in words]
        return sum(line[: len(start)] == start for line in self.said())

    def wait_said(self, *words: object, times: int = 1, within: float = 15.0) -> None:
        eventually(
            lambda: self.count(*words) >= times, within=within, what=f"{words} x {times} said"
        )

    def touch(self, name: str) -> None:
        (self.folder / name).touch()

    def freeze(self, worker: Worker) -> None:
        """SIGSTOP, at a moment when the worker is in no transaction: SQLite has one write lock for
        everybody, and a process stopped inside it stops them all; on PostgreSQL it would be the
        rows of one statement."""
        for _ in range(200):
            worker.signal(signal.SIGSTOP)
            eventually(lambda: state_of(worker.pid) == "T", what="a stopped supervisor")
            with suppress(AssertionError):
                eventually(self.place.quiet, within=0.3, every=0.005)
                return
            worker.signal(signal.SIGCONT)
            time.sleep(0.01)
        raise AssertionError("the supervisor was never outside of a transaction")

    def autopsy(self) -> str:
        """What the store holds, and where every thread of every live worker is."""
        text = f"{dict(self.statuses())}\n"
        for worker in self.workers:
            if worker.alive:
                worker.signal(signal.SIGUSR1)
                time.sleep(0.5)  # until it has written
                text += f"-- worker {worker.pid}, children {worker.children()}\n"
                text += f"{self.row_of(worker)}\n{worker.log[-8000:]}\n"
        return text

    def close(self) -> None:
        for worker in self.workers:
            worker.end()
        self.app.close()
        logs = "\n".join(worker.log for worker in self.workers)
        assert_nothing_leaked(self.place, logs)


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TENURE_")}
    return kept | {"PYTHONPATH": str(SOURCE), "PYTHONWARNINGS": "default"}


def load_module(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# -- processes, as Linux shows them ---------------------------------------------------------------
def children_of(pid: int) -> list[int]:
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, path.read_text().split())
    return found


def command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def state_of(pid: int) -> str:
    """R, S, D, T, Z; empty when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def gone(pid: int) -> bool:
    return state_of(pid) in ("", "Z")
