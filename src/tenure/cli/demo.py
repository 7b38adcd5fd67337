"""`tenure demo`: a few thousand jobs, real processes, real SIGKILLs, and books that add up.

Three acts on one SQLite file in a temporary directory: an idle worker picks up single jobs; a
rush; a rough day in which first a child and then the whole worker is killed.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from tenure.cli import demo_report, output, target
from tenure.cli.demo_ledger import Check, Ledger, as_expected, audit, kinds, percentile
from tenure.cli.demo_panel import Panel
from tenure.config import Settings
from tenure.errors import ConfigError, TenureError

if TYPE_CHECKING:
    from tenure.job import NewJob

SPEC = "tenure.cli.demo_jobs:app"
FEWEST, MOST = 500, 200_000
SINGLES, SINGLES_SECONDS = 40, 5.0  # jobs sent one by one to an idle worker
AT_ONCE = 8  # jobs at once on the rough day: what a kill takes down with it
KILL_CHILD, KILL_WORKER = 0.3, 0.6  # of the rough day's jobs have ended
ALONE = 1.0  # seconds without any worker
PATIENCE = 30.0  # seconds in which no job ends: something is broken
LEASE = {"TENURE_LEASE_SECONDS": "3", "TENURE_LEASE_RENEW_SECONDS": "1"}


class Broken(TenureError):
    """The demo cannot go on; the message says what was seen."""


def add_commands(commands: target.Commands) -> None:
    parser = target.add_command(
        commands,
        "demo",
        "see jobs survive killed processes, in half a minute",
        description="Run a few thousand jobs of several kinds on a database of its own, kill a "
        "child and then the whole worker with SIGKILL, and account for every job. Exit code 0 "
        "only if nothing was lost.",
    )
    parser.add_argument(
        "--jobs",
        type=target.positive,
        default=5000,
        metavar="N",
        help=f"how many, from {FEWEST} (default 5000)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.url is not None or args.app is not None:
        raise ConfigError("`tenure demo` has an app and a database of its own: leave -A, --url out")
    if not FEWEST <= args.jobs <= MOST:
        raise ConfigError(f"--jobs takes {FEWEST} to {MOST:,}: fewer leave nothing to kill")
    directory = tempfile.mkdtemp(prefix="tenure-demo-")
    with stopped_politely():
        demo = Demo(directory, args.jobs, silent=args.json)
        try:
            report = demo.play()
        except (TenureError, TimeoutError) as error:
            output.complain(f"the demo broke off: {error}")
            output.complain(f"what the workers said is in {demo.log}; the end of it:")
            output.complain(demo.last_words())
            return 1
        finally:
            demo.close()
    if args.json:
        output.say_json(demo_report.as_dict(report))
    else:
        demo_report.print_report(report)
    return 0 if report.ok else 1


@contextmanager
def stopped_politely() -> Iterator[None]:
    """SIGTERM ends the demo like Ctrl-C, so that it leaves no worker behind."""

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# ------------------------------------------------------------------------------- the play


class Demo:
    def __init__(self, directory: str, jobs: int, *, silent: bool) -> None:
        from tenure.cli import demo_jobs

        self.directory = directory
        self.url = f"sqlite:///{os.path.join(directory, 'jobs.db')}"
        self.log = os.path.join(directory, "worker.log")
        self.app = demo_jobs.app
        # Neither this shell's TENURE_URL nor its tenure.toml: a demo must not meet real jobs.
        self.app.close()
        self.app.settings = Settings.from_env({"TENURE_URL": self.url})
        self._tasks = demo_jobs
        self._kinds = kinds(jobs)
        self._count = {kind.task: kind.jobs for kind in self._kinds}
        self._silent = silent
        self._panel = Panel(self._kinds, silent=silent)
        self._ledger = Ledger(self.app.store)
        self._worker: subprocess.Popen[bytes] | None = None
        self._acknowledged: list[str] = []
        self._kills: list[demo_report.Kill] = []

    def play(self) -> demo_report.Report:
        self._introduce()
        self.app.migrate()
        self._start_worker("started a worker: a supervisor, {pid}, and one child")
        latencies = self._send_singles()
        rush, rush_seconds = self._rush()
        self._rough_day()
        left_well = self._stop_worker()
        self._look()
        self._panel.close()
        jobs = list(self.app.find())
        checks = audit(self._acknowledged, jobs, self._ledger)
        return demo_report.Report(
            directory=self.directory,
            url=self.url,
            spec=SPEC,
            seconds=self._panel.seconds,
            jobs=jobs,
            ledger=self._ledger,
            checks=[*checks, as_expected(self._kinds, jobs), left_well],
            kills=self._kills,
            latencies=latencies,
            rush=rush,
            rush_seconds=rush_seconds,
        )

    def close(self) -> None:
        self._panel.close()
        if self._worker is not None and self._worker.poll() is None:
            self._worker.terminate()
            self._worker.terminate()  # the second signal: now
            try:
                self._worker.wait(5)
            except subprocess.TimeoutExpired:
                self._worker.kill()
                self._worker.wait()
        self.app.close()

    def last_words(self) -> str:
        try:
            with open(self.log, encoding="utf-8", errors="replace") as log:
                return "".join(log.readlines()[-8:]).rstrip()
        except OSError:
            return "nothing"

    def _introduce(self) -> None:
        if not self._silent:
            total = sum(self._count.values())
            output.say(output.paint(f"Tenure: {total:,} jobs, one SQLite file, no server", "bold"))
            output.say(f"everything it makes is in {self.directory}")
            output.say()

    # -- act 1 and 2 --------------------------------------------------------------------------
    def _send_singles(self) -> list[float]:
        """How long an idle worker takes from the call of enqueue() to the running handler."""
        latencies: list[float] = []
        until = time.monotonic() + SINGLES_SECONDS
        while len(latencies) < SINGLES and time.monotonic() < until:
            called = time.time()
            receipt = self._tasks.ping.enqueue()
            self._acknowledged.append(receipt.id)
            latencies.append(self.app.result(receipt.id, timeout=PATIENCE) - called)
            self._look()
            time.sleep(0.02)
        middle = percentile(latencies, 0.5) * 1000
        self._panel.tell(f"gave it {len(latencies)} single jobs: half run within {middle:.1f} ms")
        return latencies

    def _rush(self) -> tuple[int, float]:
        """Jobs that do nothing; how many, and the seconds from the first start to the last end."""
        jobs = [self._tasks.ping.job() for _ in range(self._count["ping"] - self._ledger.ended)]
        self._enqueue(jobs)
        self.app.result(jobs[-1].id, timeout=PATIENCE)  # drawing now would only slow it down
        self._until(self._all_ended)
        ids = {job.id for job in jobs}
        ran = [job for job in self.app.find(type="ping") if job.id in ids]
        first = min(job.started_at for job in ran if job.started_at)
        last = max(job.completed_at for job in ran if job.completed_at)
        seconds = (last - first).total_seconds()
        self._panel.tell(f"a rush of {len(jobs):,} jobs that do nothing took {seconds:.2f} s")
        return len(jobs), seconds

    # -- act 3 --------------------------------------------------------------------------------
    def _rough_day(self) -> None:
        jobs = self._mixed_jobs()
        seconds = self._enqueue(jobs)
        self._panel.tell(
            f"stored {len(jobs):,} jobs of {len(self._kinds) - 1} kinds in one commit, "
            f"{output.span(seconds)}: a rough day begins"
        )
        before = self._ledger.ended
        self._until(lambda: self._busy(before + KILL_CHILD * len(jobs)))
        self._kill_child()
        self._until(lambda: self._busy(before + KILL_WORKER * len(jobs)))
        self._kill_worker()
        self._until(self._all_ended)
        self._panel.tell("everything has ended")

    def _mixed_jobs(self) -> list[NewJob]:
        """The same day every time: shuffled, the poison early. Jobs run in the order made here."""
        tasks, count = self._tasks, self._count
        makers: list[Callable[[int], NewJob]] = []
        makers += count["send_email"] * [lambda n: tasks.send_email.job(f"{n}@example.org")]
        makers += count["make_report"] * [lambda n: tasks.make_report.job(12)]
        makers += count["charge_card"] * [lambda n: tasks.charge_card.job(n, 1 + n % 2)]
        makers += count["import_file"] * [lambda n: tasks.import_file.job(f"{n}.xls")]
        makers += count["call_partner"] * [lambda n: tasks.call_partner.job(n)]
        random.Random(7).shuffle(makers)
        place = len(makers) // 10
        makers[place:place] = count["resize_image"] * [lambda n: tasks.resize_image.job(f"{n}.png")]
        return [make(n) for n, make in enumerate(makers)]

    def _busy(self, ended: float) -> bool:
        """So many have ended, and a kill now hits many that were never hit before."""
        unhurt = len(self._ledger.running.keys() - self._ledger.interrupted)
        return self._all_ended() or (self._ledger.ended >= ended and unhurt >= AT_ONCE // 2)

    def _kill_child(self) -> None:
        worker = self._running_worker()
        pids: list[int] = []

        def found() -> bool:
            pids[:] = children_of(worker.pid)
            return bool(pids)

        self._until(found)
        back = self._kill("child", pids[0], "it runs the handlers")
        self._panel.tell(f"its supervisor started a new child and {back}")

    def _kill_worker(self) -> None:
        worker = self._running_worker()
        back = self._kill("worker", worker.pid, "supervisor and all", worker)
        self._panel.tell(f"it saw that worker {worker.pid} is gone and {back}")

    def _kill(
        self, what: str, pid: int, note: str, worker: subprocess.Popen[bytes] | None = None
    ) -> str:
        """SIGKILL; then, for a worker, another one. What became of the jobs it held."""
        self._ledger.read()
        before, running = len(self._ledger.put_back), len(self._ledger.running)
        with suppress(ProcessLookupError):  # a poison job was quicker
            os.kill(pid, signal.SIGKILL)
        self._kills.append(demo_report.Kill(what, pid, running))
        held = f"{output.count(running, 'job')} under way"
        self._panel.tell(f"killed {what} {pid} with SIGKILL ({note}): {held}", "red")
        if worker is not None:
            worker.wait()
            self._rest(ALONE)
            self._start_worker("started another worker, {pid}")
        self._until(lambda: len(self._ledger.put_back) > before or self._all_ended())
        back = len(self._ledger.put_back) - before
        return f"{output.count(back, 'job')} went back to the queue, to run again"

    # -- the worker ---------------------------------------------------------------------------
    def _start_worker(self, story: str) -> None:
        queues = f"default,{self._tasks.SHOP}:{AT_ONCE}"
        with open(self.log, "ab") as log:
            worker = subprocess.Popen(  # noqa: S603  our own command, no shell
                [sys.executable, "-m", "tenure", "-A", SPEC, "worker", "-Q", queues],
                env=environment(self.url, self.directory),
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._worker = worker
        self._until(lambda: any(info.pid == worker.pid for info in self.app.workers()))
        self._panel.tell(story.format(pid=worker.pid))

    def _running_worker(self) -> subprocess.Popen[bytes]:
        assert self._worker is not None  # noqa: S101  the play begins with starting it
        return self._worker

    def _stop_worker(self) -> Check:
        worker = self._running_worker()
        worker.send_signal(signal.SIGTERM)
        try:
            code = worker.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            return Check(False, f"the worker did not stop within {PATIENCE:.0f} s of SIGTERM")
        return Check(code == 0, f"the worker left on SIGTERM with exit code {code}")

    # -- time ---------------------------------------------------------------------------------
    def _enqueue(self, jobs: list[NewJob]) -> float:
        begun = time.monotonic()
        receipts = self.app.enqueue_many(jobs)
        self._acknowledged += [receipt.id for receipt in receipts]
        return time.monotonic() - begun

    def _all_ended(self) -> bool:
        return self._ledger.ended == len(self._acknowledged)

    def _look(self) -> None:
        self._ledger.read()
        self._panel.show(self._ledger, self._report_progress)

    def _report_progress(self) -> list[float]:
        """How far the slow jobs are."""
        running = self.app.find(type="make_report", status="in_progress")
        return sorted(job.progress.get("percent", 0.0) for job in running if job.progress)

    def _until(self, over: Callable[[], bool]) -> None:
        worker, ended, last = self._running_worker(), -1, 0.0
        while True:
            self._look()
            if over():
                return
            if self._ledger.ended != ended:
                ended, last = self._ledger.ended, time.monotonic()
            if worker.poll() is not None:
                raise Broken(f"the worker ended by itself with code {worker.returncode}")
            if time.monotonic() - last > PATIENCE:
                raise Broken(f"no job has ended for {PATIENCE:.0f} s")
            time.sleep(0.03)

    def _rest(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._look()
            time.sleep(0.03)


# ------------------------------------------------------------------------------- processes


def environment(url: str, directory: str) -> dict[str, str]:
    """For a worker: nothing of this shell's own Tenure, this very package, files in one place."""
    import tenure

    root = os.path.dirname(os.path.dirname(os.path.abspath(tenure.__file__)))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TENURE_")}
    paths = [root, *filter(None, [kept.get("PYTHONPATH")])]
    own = {"TENURE_URL": url, "PYTHONPATH": os.pathsep.join(paths), "TMPDIR": directory}
    return kept | LEASE | own


def children_of(worker: int) -> list[int]:
    """Its children that run many jobs at once; one that runs a suspect alone is not among them."""
    return [
        pid
        for pid, parent, command in processes()
        if parent == worker and SPEC in command and command[-1] != "1"
    ]


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


if __name__ == "__main__":
    from tenure.cli import main

    raise SystemExit(main(["demo", *sys.argv[1:]]))
