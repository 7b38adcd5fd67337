"""`tenure bench`, the sections with a worker: how soon a job starts, what idling costs, what a kill
costs. The worker is the real command in processes of its own, on the benchmark's own database.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from tenure.bench.raw import percentile
from tenure.errors import StoreUnavailable

if TYPE_CHECKING:
    from tenure.app import App
    from tenure.bench.place import Completions, Place, Tell
    from tenure.config import Settings

COLD_APP = """
import tenure
app = tenure.App()
@app.task
async def nothing(data: dict) -> None: ...
nothing.enqueue({"n": 1})
"""
COLD_RUNS = 30
SILENCE = 10.0
READY_SECONDS = 30.0
BACKLOG = 100_000
RUSH, RUSHES = 100, 5


class Site(NamedTuple):
    """Where a section runs: an app on a fresh database of the benchmark's own."""

    app: App
    settings: Settings
    place: Place
    tell: Tell
    quick: bool

    def use(self) -> None:
        """Point the app at this database: its tasks are the same in all of them."""
        self.app.close()
        self.app.settings = self.settings

    @property
    def directory(self) -> str:
        return self.place.directory

    def completions(self, after: int = 0) -> Completions:
        return self.place.completions(self.app.store, after)

    @property
    def environment(self) -> dict[str, str]:
        """Ours without the settings of whoever runs the benchmark."""
        kept = {name: v for name, v in os.environ.items() if not name.startswith("TENURE_")}
        return kept | self.settings.to_env()


# ------------------------------------------------------------------------------- a worker


def worker_command(*options: str) -> list[str]:
    app = "tenure.bench.jobs:app"
    return [sys.executable, "-m", "tenure", "-A", app, "worker", "-l", "error", *options]


def start_worker(site: Site, *options: str) -> subprocess.Popen[bytes]:
    with open(os.path.join(site.directory, "worker.log"), "ab") as log:
        return subprocess.Popen(  # noqa: S603  our own command, no shell
            worker_command(*options),
            cwd=site.directory,
            env=site.environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def wait_for(done: Callable[[], Any], what: str, seconds: float = READY_SECONDS) -> float:
    """Until it is so; how long that took. Looks every 2 ms."""
    began = time.monotonic()
    while not done():
        if time.monotonic() - began > seconds:
            raise StoreUnavailable(f"bench: {what} took longer than {seconds:g} s; gave up")
        time.sleep(0.002)
    return time.monotonic() - began


def end_worker(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # a session of its own: only its children
    process.wait()


@contextlib.contextmanager
def worker(site: Site, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """A worker that has registered, so its child has said hello; ended at the end of the block."""
    before = sum(w.dead_at is None for w in site.app.workers())
    process = start_worker(site, *options)
    try:
        wait_for(
            lambda: (
                process.poll() is not None
                or sum(w.dead_at is None for w in site.app.workers()) > before
            ),
            "starting a worker",
        )
        if process.poll() is not None:
            raise StoreUnavailable(f"bench: the worker did not start: {worker_log(site)}")
        time.sleep(0.2)  # its threads and watches
        yield process
    finally:
        end_worker(process)


def worker_log(site: Site) -> str:
    path = os.path.join(site.directory, "worker.log")
    with open(path, encoding="utf-8", errors="replace") as log:
        return log.read()[-2000:].strip() or "it said nothing"


def drain(site: Site, jobs: int, processes: int) -> float:
    """Jobs a second, from the first to the last completion that history has."""
    store = site.app.store
    before = site.completions().last
    counted = sum(rollup.runs for rollup in store.rollups(since_ms=0))
    process = start_worker(site, "--drain", "-Q", "default", "-p", str(processes))
    try:
        while True:
            try:
                code = process.wait(0.25)
                break
            except subprocess.TimeoutExpired:
                # Rollups, not history: a scan would keep SQLite's log from being started anew.
                done = sum(rollup.runs for rollup in store.rollups(since_ms=0)) - counted
                site.tell(done, jobs, f"drain, -p {processes}")
    finally:
        end_worker(process)
    found = site.completions(before)
    if code != 0 or found.jobs != jobs:
        raise StoreUnavailable(f"bench: {found.jobs} of {jobs} jobs drained: {worker_log(site)}")
    return found.rate


def results(site: Site, ids: list[str], seconds: float = READY_SECONDS) -> list[Any]:
    deadline = time.monotonic() + seconds
    return [site.app.result(id, timeout=max(0.01, deadline - time.monotonic())) for id in ids]


# ------------------------------------------------------------------------------- pick-up


def spread(values: list[float]) -> dict[str, float]:
    """Milliseconds."""
    found = {f"p{int(s * 100)}": percentile(values, s) * 1000 for s in (0.5, 0.95, 0.99)}
    return found | {"max": max(values) * 1000}


def paced(
    site: Site, count: int, every: float, enqueue: Callable[[int], tuple[str, float]], what: str
) -> list[float]:
    """Enqueue at a steady pace; for each job from just before the call to the handler's start."""
    sent: list[tuple[str, float]] = []
    began = time.monotonic()
    for number in range(count):
        time.sleep(max(0.0, began + number * every - time.monotonic()))
        sent.append(enqueue(number))
        site.tell(number, count, what)
    started = results(site, [id for id, _ in sent])
    return [start - before for start, (_, before) in zip(started, sent, strict=True)]


def pickup(site: Site) -> dict[str, float]:
    """An idle worker, one job every 50 ms, 200 times."""
    from tenure.bench.jobs import clock

    def enqueue(number: int) -> tuple[str, float]:
        before = time.time()
        return clock.enqueue({"n": number}).id, before

    with worker(site):
        return spread(paced(site, 200, 0.05, enqueue, "pick-up"))


def silent(site: Site) -> dict[str, float]:
    """The same without hints (TENURE_NOTIFY=0): polling alone has to find each job."""
    from tenure.bench.jobs import clock

    def enqueue(number: int) -> tuple[str, float]:
        before = time.time()
        return clock.enqueue({"n": number}).id, before

    with worker(site):
        return spread(paced(site, 8 if site.quick else 30, 0.73, enqueue, "pick-up by polling"))


def rush(site: Site) -> dict[str, float]:
    """100 jobs one by one, as fast as they go, to a worker that has worked before; five times."""
    from tenure.bench.jobs import clock

    taken = []
    with worker(site):
        results(site, [clock.enqueue({"n": number}).id for number in range(20)])
        for number in range(RUSHES):
            time.sleep(0.3)
            taken.append(_one_rush(site))
            site.tell(number, RUSHES, "rush")
    return {"p50": percentile(taken, 0.5), "max": max(taken)}


def _one_rush(site: Site) -> float:
    """Seconds from the first call to the moment when history has them all."""
    from tenure.bench.jobs import nothing

    before, began = site.completions().jobs, time.monotonic()
    for number in range(RUSH):
        nothing.enqueue({"n": number})
    wait_for(lambda: site.completions().jobs >= before + RUSH, "finishing 100 jobs")
    return time.monotonic() - began


def commit(site: Site) -> dict[str, float]:
    """A queue fed at 200 a second; every other job in a caller's transaction, and those count,
    from just before the COMMIT."""
    from tenure.bench.jobs import clock

    with site.place.caller(site.app.store) as caller:
        connection = caller.connection
        joined = clock.options(conn=connection)

        def enqueue(number: int) -> tuple[str, float]:
            if number % 2:
                return clock.enqueue({"n": number}).id, time.time()
            connection.execute(caller.begin)
            connection.execute(caller.insert, (number,))
            id = joined.enqueue({"n": number}).id
            before = time.time()
            connection.commit()
            return id, before

        with worker(site):
            return spread(paced(site, 1000, 0.005, enqueue, "pick-up after COMMIT")[::2])


def priority(site: Site) -> dict[str, float]:
    """Priority 1 beside a backlog of 100,000 that a busy worker is eating."""
    from tenure.bench.jobs import clock, nothing
    from tenure.bench.raw import enqueue_in_batches

    enqueue_in_batches(site.app, nothing, BACKLOG, site.tell)
    first = clock.options(priority=1)

    def enqueue(number: int) -> tuple[str, float]:
        before = time.time()
        return first.enqueue({"n": number}).id, before

    with worker(site):
        found = spread(paced(site, 60, 0.02, enqueue, "priority 1"))
        left = BACKLOG + 60 - site.completions().jobs
    return found | {"backlog_left": float(left)}


def delayed(site: Site) -> dict[str, float]:
    """100 jobs due between 0.5 and 2.5 s from now, on an idle worker: how late each starts."""
    from tenure.bench.jobs import clock

    with worker(site):
        jobs = [clock.options(delay=0.5 + place / 50).job({"n": place}) for place in range(100)]
        ids = [receipt.id for receipt in site.app.enqueue_many(jobs)]
        started = results(site, ids)
        due = [job.scheduled_at.timestamp() for id in ids if (job := site.app.get(id))]
    return spread([start - when for start, when in zip(started, due, strict=True)])


# ------------------------------------------------------------------------------- processes


def cold(site: Site) -> dict[str, float]:
    """A process's whole life, interpreter included; and what `import tenure` adds to a bare one."""
    site.app.migrate()

    def run(code: str) -> float:
        began = time.perf_counter()
        subprocess.run(  # noqa: S603  our own interpreter, no shell
            [sys.executable, "-c", code], env=site.environment, cwd=site.directory, check=True
        )
        return time.perf_counter() - began

    taken: dict[str, list[float]] = {"pass": [], "import tenure": [], COLD_APP: []}
    for number in range(COLD_RUNS + 1):
        for code, seconds in taken.items():
            seconds.append(run(code))
        site.tell(number, COLD_RUNS, "cold starts")
    bare, imported, enqueued = (seconds[1:] for seconds in taken.values())  # the first warms disks
    return {
        "p50": percentile(enqueued, 0.5) * 1000,
        "p95": percentile(enqueued, 0.95) * 1000,
        "bare": percentile(bare, 0.5) * 1000,
        "import": (percentile(imported, 0.5) - percentile(bare, 0.5)) * 1000,
    }


def _children(pid: int) -> list[int]:
    """Of any of its threads: on Linux a child belongs to the thread that started it."""
    found: list[int] = []
    for thread in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
            found += [int(child) for child in file.read().split()]
    return found


def _cpu_seconds(pid: int) -> float:
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _megabytes(pid: int) -> float:
    with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
        resident = next(line for line in file if line.startswith("VmRSS"))
    return int(resident.split()[1]) / 1024


def idle(site: Site) -> dict[str, float]:
    """Supervisor and one child after a little work and 10 s of silence."""
    from tenure.bench.jobs import clock

    window = 15.0 if site.quick else 60.0
    with worker(site) as process:
        results(site, [clock.enqueue({"n": number}).id for number in range(100)])
        pids = [process.pid, *_children(process.pid)]
        time.sleep(SILENCE)
        before, began = sum(map(_cpu_seconds, pids)), time.monotonic()
        while (passed := time.monotonic() - began) < window:
            site.tell(int(passed), int(window), "idling")
            time.sleep(1.0)
        used = sum(map(_cpu_seconds, pids)) - before
        sizes = [_megabytes(pid) for pid in pids]
    return {
        "cpu_percent": 100 * used / passed,
        "supervisor_mb": sizes[0],
        "child_mb": max(sizes[1:]),
    }


def sleepers(site: Site) -> dict[str, float]:
    """1,000 async jobs that sleep 3 s in one child: how many slept at once, when all had begun."""
    from tenure.bench.jobs import sleep

    with worker(site, "-c", "1000", "-p", "1"):
        before = time.time()
        jobs = [sleep.job(3.0) for _ in range(1000)]
        spans = results(site, [receipt.id for receipt in site.app.enqueue_many(jobs)])
    edges = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
    at_once = most = 0
    for _when, step in edges:
        at_once += step
        most = max(most, at_once)
    return {"at_once": float(most), "all_begun_ms": (max(s for s, _ in spans) - before) * 1000}


def recovery(site: Site) -> dict[str, float]:
    """SIGKILL, and the time until the jobs that were running can be claimed again."""
    return {"child_s": _kill_child(site), "worker_s": _kill_worker(site)}


def _kill_child(site: Site) -> float:
    with worker(site, "--shutdown-timeout", "0.5") as process:
        held = _five_running(site)
        for child in _children(process.pid):
            os.kill(child, signal.SIGKILL)
        return _taken_away(site, held)


def _kill_worker(site: Site) -> float:
    with worker(site, "--shutdown-timeout", "0.5") as process:
        held = _five_running(site)
        with worker(site, "--shutdown-timeout", "0.5"):
            os.killpg(process.pid, signal.SIGKILL)
            return _taken_away(site, held)


def _leases(site: Site) -> dict[str, int]:
    return {job.id: job.lease_no for job in site.app.find(status="in_progress")}


def _five_running(site: Site) -> dict[str, int]:
    """The leases of five new jobs that have started."""
    from tenure.bench.jobs import sleep

    before = _leases(site).keys()
    for _ in range(5):
        sleep.enqueue(30.0)
    wait_for(lambda: len(_leases(site).keys() - before) == 5, "starting five jobs")
    time.sleep(0.2)  # claimed; now let them start
    return {id: no for id, no in _leases(site).items() if id not in before}


def _taken_away(site: Site, held: dict[str, int]) -> float:
    """Until none of these leases stands: queued again, or already claimed by another."""
    return wait_for(lambda: not held.items() & _leases(site).items(), "rescue")
