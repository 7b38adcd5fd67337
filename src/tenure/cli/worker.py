"""`tenure worker`: run jobs until stopped or drained, and say what became of them.

This process is the supervisor: it imports no user code. Its first child, which does, tells it
where the jobs are; then the live line starts.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from tenure.cli import target
from tenure.config import Settings
from tenure.errors import ConfigError, StoreError
from tenure.terminal import output
from tenure.terminal.live_line import LiveLine

if TYPE_CHECKING:
    from tenure.engine.worker_options import Summary
    from tenure.engine.worker_state import WorkerState
    from tenure.store import QueueInfo, Store

LEVELS = ("debug", "info", "warning", "error", "critical")
LOOK_EVERY = 0.5
RETRY_LOOK = 0.02
SHARE_OF_TIME = 20  # counting a large backlog takes at most a twentieth of the time
RATE_SECONDS = 5.0


def add_commands(commands: target.Commands) -> None:
    parser = target.add_command(
        commands,
        "worker",
        "run jobs until stopped",
        description="Run jobs until SIGTERM or Ctrl-C: stop claiming, finish what runs, give back "
        "the rest. A second signal ends it now.",
    )
    parser.add_argument(
        "-Q",
        "--queues",
        metavar="Q,Q:MOST",
        help="only these queues; a number caps how many of one run here (default: all)",
    )
    parser.add_argument(
        "-c",
        "--concurrency",
        type=target.positive,
        metavar="N",
        help="jobs at once in each process (default 50)",
    )
    parser.add_argument(
        "-p", "--processes", type=target.positive, metavar="N", help="child processes (default 1)"
    )
    parser.add_argument("-n", "--name", help="a name for people, shown with the worker")
    parser.add_argument(
        "-l", "--log-level", choices=LEVELS, type=str.lower, metavar="LEVEL", help=", ".join(LEVELS)
    )
    parser.add_argument(
        "--drain",
        "--burst",
        action="store_true",
        help="return when nothing is left that may be claimed now; say what was left and why",
    )
    parser.add_argument(
        "--reload",
        action="store_true",
        help="for development: replace the children when a .py file of the app changes",
    )
    parser.add_argument(
        "--max-jobs", type=target.positive, metavar="N", help="stop after about N jobs"
    )
    parser.add_argument(
        "--max-jobs-per-child",
        type=target.positive,
        metavar="N",
        help="replace a child process that has had N jobs (default: never)",
    )
    parser.add_argument(
        "--max-memory-per-child",
        type=target.positive,
        metavar="MB",
        help="replace a child process that has grown beyond this, when a job ends (default: never)",
    )
    parser.add_argument(
        "--shutdown-timeout",
        type=_seconds,
        metavar="S",
        help="seconds that running jobs get to finish when stopped (default 30)",
    )
    parser.set_defaults(run=work)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return value


def work(args: argparse.Namespace) -> int:
    from tenure.app import open_store, open_wakeup
    from tenure.engine.worker import run_worker
    from tenure.terminal.logs import configure_logging
    from tenure.terminal.relay import Relay

    if args.reload and args.drain:
        raise ConfigError("--reload goes on until it is stopped, --drain ends: leave one out")
    spec = target.app_spec(args)
    level = args.log_level or Settings.load().log_level
    os.environ["TENURE_LOG_LEVEL"] = level.upper()  # for the children, as is the URL
    os.environ["TENURE_LOG_FORMAT"] = "json" if args.json else "text"
    if args.url is not None:
        os.environ["TENURE_URL"] = args.url
    # `worker | tee log`: there is no telling when `tee` prints, and what it prints would run into
    # the live line.
    line = LiveLine(wanted=not args.json and output.is_terminal(sys.stdout))
    configure_logging(level, as_json=args.json, line=line)
    progress, relay = Progress(line), Relay(line)

    def opened(settings: Settings) -> Store:
        _check_url(settings, args.url)
        return open_store(settings)

    def working(settings: Settings, state: WorkerState) -> None:
        _announce(settings, args)
        if line.on:
            progress.start(open_store(settings), state, args.queues or settings.queues)

    try:
        summary = run_worker(
            spec,
            opened,
            open_wakeup,
            queues=args.queues,
            concurrency=args.concurrency,
            processes=args.processes,
            name=args.name,
            drain=args.drain,
            max_jobs=args.max_jobs,
            reload=args.reload,
            shutdown_timeout=args.shutdown_timeout,
            max_jobs_per_child=args.max_jobs_per_child,
            max_memory_per_child=args.max_memory_per_child,
            streams=relay.streams if line.on else None,
            on_working=working,
        )
    finally:
        relay.close()
        progress.stop()
    if args.json:
        output.say_json(summary._asdict())
    else:
        print_summary(summary)
    return 0


def _check_url(settings: Settings, url: str | None) -> None:
    if url is not None and settings.url != url:
        raise ConfigError(
            "--url cannot move a worker of an app that names its database in the code: its "
            "handlers would enqueue elsewhere. Write tenure.App() there and let TENURE_URL decide"
        )


def _announce(settings: Settings, args: argparse.Namespace) -> None:
    import logging

    from tenure.operations.database import place

    logging.getLogger("tenure.worker").info(
        "started: jobs from %s, queues: %s, processes: %d with %d jobs at once",
        place(settings.url),
        args.queues or settings.queues or "all",
        settings.processes,
        settings.concurrency,
    )


def print_summary(summary: Summary) -> None:
    counts = [
        f"{value:,} {name}"
        for name, value in summary._asdict().items()
        if isinstance(value, int) and value
    ]
    done = summary.completed + summary.failed + summary.dead + summary.cancelled
    rate = f" ({_speed(done / summary.seconds)})" if done and summary.seconds >= 1 else ""
    output.say(f"{', '.join(counts) or 'nothing to do'} in {output.span(summary.seconds)}{rate}")
    for reason, number in summary.left.items():
        output.say(f"left: {output.count(number, 'job')} {reason}")


class Progress:
    """The live line of a worker on a terminal: the jobs that this worker has done and runs, and
    those that its queues hold, about twice a second."""

    def __init__(self, line: LiveLine) -> None:
        self._line = line
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._asked = 0.0  # seconds that the store took for the last look

    def start(self, store: Store, state: WorkerState, queues: str | None) -> None:
        from tenure.engine.worker_options import parse_queues

        wanted = parse_queues(queues)
        run = threading.Thread(
            target=self._run, args=(store, state, wanted), name="tenure-progress"
        )
        run.daemon = True
        with suppress(RuntimeError):  # the system has no thread to give: no live line then
            run.start()
            self._thread = run

    def stop(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join(timeout=2)
        self._line.clear()

    def _run(
        self, store: Store, state: WorkerState, wanted: Mapping[str, int | None] | None
    ) -> None:
        rate = Rate(time.monotonic())
        pause = 0.0
        while not self._over.wait(pause):
            self._asked = 0.0
            with suppress(StoreError):  # the engine logs it
                queues, census = self._look(store, state)
                queues = [each for each in queues if wanted is None or each.name in wanted]
                per_second = rate.at(time.monotonic(), census[0])
                self._line.show(_progress_line(*census, per_second, queues))
            pause = max(LOOK_EVERY, SHARE_OF_TIME * self._asked)
        store.close()

    def _look(
        self, store: Store, state: WorkerState
    ) -> tuple[list[QueueInfo], tuple[int, int, int]]:
        """What the queues hold and what this worker has, at one moment: a job that is claimed
        between the two looks would be counted twice or not at all, so then both are repeated. A
        busy worker always claims: after half a second its figures are taken as they are."""
        until = time.monotonic() + LOOK_EVERY
        while True:
            before, asked = state.claimed(), time.monotonic()
            try:
                queues = store.queues()
            finally:
                self._asked += time.monotonic() - asked
            census = state.census()
            if before is not None and state.claimed() == before:
                return queues, census
            if time.monotonic() > until or SHARE_OF_TIME * self._asked > LOOK_EVERY:
                return queues, census
            self._over.wait(RETRY_LOOK)


class Rate:
    """Jobs per second over the last five seconds; None in the first second."""

    def __init__(self, begun: float) -> None:
        self._seen: deque[tuple[float, int]] = deque([(begun, 0)])

    def at(self, now: float, done: int) -> float | None:
        self._seen.append((now, done))
        while len(self._seen) > 2 and self._seen[1][0] <= now - RATE_SECONDS:
            self._seen.popleft()
        since, before = self._seen[0]
        return (done - before) / (now - since) if now - since >= 1.0 else None


def _progress_line(
    done: int, running: int, waiting: int, rate: float | None, queues: list[Any]
) -> str:
    def figure(name: str, more: int = 0) -> str:
        capped = any(name in queue.capped for queue in queues)
        return output.at_least(sum(getattr(queue, name) for queue in queues) + more, capped)

    # A job that waits in a child has not started: for people it is still queued.
    parts = [f"{done:,} done", f"{figure('ready', waiting)} queued", f"{running:,} running"]
    if rate is not None:
        parts.append(_speed(rate))
    parts += [f"{figure(name)} {name}" for name in ("later", "dead") if figure(name) != "0"]
    return " · ".join(parts)


def _speed(rate: float) -> str:
    """With a decimal where it is slow: one job in ten seconds is not 0 jobs/s."""
    return f"{rate:,.1f} jobs/s" if 0 < rate < 9.95 else f"{rate:,.0f} jobs/s"
