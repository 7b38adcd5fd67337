"""`tenure worker`: run jobs until stopped or drained, and say what became of them.

This process is the supervisor: it imports no user code. Where the jobs are it learns from its
first child, which is also when the live line starts.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from tenure.cli import output, target
from tenure.config import Settings
from tenure.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from tenure.engine.plan import Summary
    from tenure.store import Store
    from tenure.wakeup import Wakeup

LEVELS = ("debug", "info", "warning", "error", "critical")
LOOK_EVERY = 1.0
SHARE_OF_TIME = 20  # counting a large backlog takes at most a twentieth of the time
ENDED = ("completed", "failed", "dead", "cancelled")


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
        "--max-jobs", type=target.positive, metavar="N", help="stop after about N jobs"
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
    from tenure.cli.logs import configure_logging
    from tenure.engine.fleet import run_fleet

    spec = target.app_spec(args)
    level = args.log_level or Settings.load().log_level
    os.environ["TENURE_LOG_LEVEL"] = level.upper()  # for the children, as is the URL
    os.environ["TENURE_LOG_FORMAT"] = "json" if args.json else "text"
    if args.url is not None:
        os.environ["TENURE_URL"] = args.url
    line = output.LiveLine(wanted=not args.json)
    configure_logging(level, as_json=args.json, line=line)
    progress = Progress(line)

    def opened(settings: Settings) -> Store:
        _check_url(settings, args.url)
        progress.start(open_store(settings))
        return open_store(settings)

    def listening(settings: Settings, store: Store) -> Wakeup:
        _announce(settings, args)
        return open_wakeup(settings, store)

    try:
        summary = run_fleet(
            spec,
            opened,
            listening,
            queues=args.queues,
            concurrency=args.concurrency,
            processes=args.processes,
            name=args.name,
            drain=args.drain,
            max_jobs=args.max_jobs,
            shutdown_timeout=args.shutdown_timeout,
        )
    finally:
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

    logging.getLogger("tenure.worker").info(
        "started: jobs from %s, queues: %s, processes: %d with %d jobs at once",
        target.place(settings.url),
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
    rate = f" ({done / summary.seconds:,.0f} jobs/s)" if done and summary.seconds >= 1 else ""
    output.say(f"{', '.join(counts) or 'nothing to do'} in {output.span(summary.seconds)}{rate}")
    for reason, number in summary.left.items():
        output.say(f"left: {output.count(number, 'job')} {reason}")


class Progress:
    """The live line of a worker in a terminal, counted by the store once a second."""

    def __init__(self, line: output.LiveLine) -> None:
        self._line = line
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, store: Store) -> None:
        if self._line.on:
            run = threading.Thread(target=self._run, args=(store,), name="tenure-progress")
            run.daemon = True
            with suppress(RuntimeError):  # no thread to be had: it does without
                run.start()
                self._thread = run

    def stop(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join(timeout=2)
        self._line.clear()

    def _run(self, store: Store) -> None:
        begun = time.time_ns() // 1_000_000 // 60_000 * 60_000
        before: tuple[float, int] | None = None
        first = 0
        pause = LOOK_EVERY
        while not self._over.wait(pause if before else 0.2):
            asked = time.monotonic()
            try:
                done = _done(store, begun)
                queues = store.queues()
            except StoreError:
                continue  # the engine says so in the log
            if before is None:
                first, before = done, (asked, done)
            rate = (done - before[1]) / max(asked - before[0], 0.001)
            before = (asked, done)
            self._line.show(_progress_line(done - first, rate, queues))
            pause = max(LOOK_EVERY, SHARE_OF_TIME * (time.monotonic() - asked))
        store.close()


def _done(store: Store, since_ms: int) -> int:
    rollups = store.rollups(since_ms=since_ms)
    return sum(r.runs for r in rollups if r.start >= since_ms and r.outcome in ENDED)


def _progress_line(done: int, rate: float, queues: list[Any]) -> str:
    def figure(name: str) -> str:
        capped = any(name in queue.capped for queue in queues)
        return output.at_least(sum(getattr(queue, name) for queue in queues), capped)

    parts = [f"{done:,} done", f"{figure('ready')} queued", f"{figure('running')} running"]
    parts.append(f"{rate:,.0f} jobs/s")
    parts += [f"{figure(name)} {name}" for name in ("later", "dead") if figure(name) != "0"]
    return " · ".join(parts)
