"""`tenure demo`: a few thousand jobs, real processes, real SIGKILLs, and books that add up.

Three acts on one SQLite file in a temporary directory: an idle worker picks up single jobs; a
rush; a rough day in which first a child and then the whole worker is killed.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from tenure.cli import target
from tenure.config import Settings
from tenure.demo import books
from tenure.demo.ledger import (
    FAN_INS,
    PARTS,
    UPLOADS,
    Check,
    Ledger,
    as_expected,
    audit,
    kinds,
    percentile,
    promised,
)
from tenure.demo.panel import Panel
from tenure.demo.processes import (
    SPEC,
    children_of,
    environment,
    kill_if,
    stopped_politely,
    under_way,
)
from tenure.demo.report import Kill, Report, as_dict, print_report
from tenure.errors import ConfigError, TenureError
from tenure.terminal import output

if TYPE_CHECKING:
    from tenure.job import NewJob

FEWEST, MOST = 500, 200_000
SINGLES, SINGLES_SECONDS = 40, 5.0  # jobs sent one by one to an idle worker
AT_ONCE = 8  # jobs at once on the rough day: what a kill takes down with it
CHOOSY = 1.0  # seconds to wait for a kill that hits many jobs, before one will do
ALONE = 1.0  # seconds without any worker
PATIENCE = 30.0  # seconds in which no job ends: something is broken


class Broken(TenureError):
    """The demo cannot go on; the message says what was seen."""


class Target(NamedTuple):
    """A process to kill, and the jobs that are under way in it or below it."""

    pid: int
    jobs: set[str]


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
        output.say_json(as_dict(report))
    else:
        print_report(report)
    return 0 if report.ok else 1


# ------------------------------------------------------------------------------- the play


class Demo:
    def __init__(self, directory: str, jobs: int, *, silent: bool) -> None:
        from tenure.demo import jobs as tasks

        self.directory = directory
        self.url = f"sqlite:///{os.path.join(directory, 'jobs.db')}"
        self.log = os.path.join(directory, "worker.log")
        self.app = tasks.app
        # Neither this shell's TENURE_URL nor its tenure.toml: a demo must not meet real jobs.
        self.app.close()
        self.app.settings = Settings.from_env({"TENURE_URL": self.url})
        self._tasks = tasks
        self._kinds = kinds(jobs)
        self._count = {kind.task: kind.jobs for kind in self._kinds}
        self._silent = silent
        self._panel = Panel(self._kinds, silent=silent)
        self._ledger = Ledger(self.app.store)
        self._worker: subprocess.Popen[bytes] | None = None
        self._acknowledged: list[str] = []
        self._children = 0  # jobs that other jobs enqueue
        self._uploads: list[str] = []
        self._calls = os.path.join(directory, "uploads.log")
        self._kills: list[Kill] = []

    def play(self) -> Report:
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
        checks = audit(promised(self._acknowledged, jobs), jobs, self._ledger)
        fan_ins = books.fan_ins(jobs, self._ledger)
        uploads = books.uploads(jobs, books.read_calls(self._calls))
        checks += [as_expected(self._kinds, jobs), fan_ins.check(), uploads.check(), left_well]
        return Report(
            directory=self.directory,
            url=self.url,
            spec=SPEC,
            seconds=self._panel.seconds,
            jobs=jobs,
            ledger=self._ledger,
            checks=checks,
            kills=self._kills,
            fan_ins=fan_ins,
            uploads=uploads,
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
        jobs = self._tasks.rough_day(self._count, self._calls)
        self._children = FAN_INS * (PARTS + 1)
        self._uploads = [job.id for job in jobs if job.terms.type == "upload"]
        seconds = self._enqueue(jobs)
        self._panel.tell(
            f"stored {len(jobs):,} jobs of {len({job.terms.type for job in jobs})} kinds in one "
            f"commit, {output.span(seconds)}: a rough day begins; {self._children} more will come "
            "from jobs"
        )
        half = UPLOADS // 2
        self._until(lambda: self._uploads_stored_a_step(self._uploads[:half]))
        self._kill_child()
        self._until(lambda: self._uploads_stored_a_step(self._uploads[half:]))
        self._kill_worker()
        self._until(self._all_ended)
        self._panel.tell("everything has ended")

    def _uploads_stored_a_step(self, uploads: list[str]) -> bool:
        """Or have been hit already, by poison: then they go on in a process of their own."""
        return all(
            id in self._ledger.ends or id in self._ledger.interrupted or self.app.store.steps(id)
            for id in uploads
        )

    def _kill_child(self) -> None:
        worker = self._running_worker()

        def find() -> Target | None:
            shared = [child for child in children_of(worker.pid) if not child.alone]
            if not shared:
                return None
            return Target(shared[0].pid, under_way(shared[:1], self.directory))

        back = self._kill("child", "it runs the handlers", find)
        self._panel.tell(f"its supervisor started a new child and {back}")

    def _kill_worker(self) -> None:
        worker = self._running_worker()

        def find() -> Target:
            return Target(worker.pid, under_way(children_of(worker.pid), self.directory))

        back = self._kill("worker", "supervisor and all", find, worker)
        self._panel.tell(f"it saw that worker {worker.pid} is gone and {back}")

    def _kill(
        self,
        what: str,
        note: str,
        find: Callable[[], Target | None],
        worker: subprocess.Popen[bytes] | None = None,
    ) -> str:
        """SIGKILL; then, for a worker, another one. What became of the jobs it held."""
        (pid, jobs), before = self._hit(what, find)
        self._kills.append(Kill(what, pid, len(jobs)))
        held = f"{output.count(len(jobs), 'job')} under way"
        self._panel.tell(f"killed {what} {pid} with SIGKILL ({note}): {held}", "red")
        if worker is not None:
            worker.wait()
            self._rest(ALONE)
            self._start_worker("started another worker, {pid}")

        def settled() -> bool:
            back = {event.job_id for event in self._ledger.put_back[before:]}
            return all(job in back or job in self._ledger.ends for job in jobs)

        self._until(settled)
        back = len(self._ledger.put_back) - before
        return f"{output.count(back, 'job')} went back to the queue, to run again"

    def _hit(self, what: str, find: Callable[[], Target | None]) -> tuple[Target, int]:
        """Kill what is found as soon as that hits jobs, better many of them. What was hit, and
        how many runs had been put back until then."""
        begun = time.monotonic()
        hits: list[tuple[Target, int]] = []

        def worth_it(pid: int) -> bool:
            target = find()  # once more: now it stands still
            if target is None or target.pid != pid:
                return False
            self._ledger.read()
            jobs = target.jobs - self._ledger.ends.keys()
            hits[:] = [(Target(pid, jobs), len(self._ledger.put_back))]
            return len(jobs) >= (AT_ONCE // 2 if time.monotonic() - begun < CHOOSY else 1)

        def done() -> bool:
            target = find()
            if target and target.jobs and kill_if(target.pid, worth_it):
                return True
            if self._all_ended():
                raise Broken(f"all jobs had ended before the {what} could be killed")
            return False

        self._until(done)
        return hits[0]

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
        return self._ledger.ended == len(self._acknowledged) + self._children

    def _look(self) -> None:
        self._ledger.read()
        self._panel.show(self._ledger, self._progress)

    def _progress(self) -> dict[str, list[float]]:
        """How far the slow jobs are, by task."""
        return {
            task: sorted(
                job.progress.get("percent", 0.0)
                for job in self.app.find(type=task, status="in_progress")
                if job.progress
            )
            for task in ("make_report", "upload")
        }

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


if __name__ == "__main__":
    from tenure.cli import main

    raise SystemExit(main(["demo", *sys.argv[1:]]))
