"""`tenure stats`: how many, how fast, how well."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING, Any

from tenure.cli import target
from tenure.terminal import output

if TYPE_CHECKING:
    from tenure.operations.statistics import Figures, Overview
    from tenure.operations.workers import Worker

TYPES_SHOWN = 15
LONGEST = 300  # seconds: the last bucket holds everything above
LABEL = " " * len("success  ")


def add_commands(commands: target.Commands) -> None:
    parser = target.add_command(commands, "stats", "show totals, rates and durations")
    parser.set_defaults(run=show_stats)


def show_stats(args: argparse.Namespace) -> int:
    with target.existing(args) as (_, operations, _named):
        seen = operations.statistics.overview()
    if args.json:
        shown = {name: getattr(seen, name) for name in seen._fields}
        output.say_json(shown | {"workers": [_worker(worker) for worker in seen.workers]})
    else:
        _print(seen)
    return 0


def _worker(worker: Worker) -> dict[str, Any]:
    return {
        "id": worker.id,
        "name": worker.name,
        "live": worker.live,
        "started_at": worker.started_at,
        "seen_at": worker.seen_at,
        "queues": worker.queues,
        "running": worker.held,
    }


def _print(seen: Overview) -> None:
    shown = [
        f"{output.paint(s, output.STATUS_COLOURS[s])} {output.at_least(n, s in seen.capped)}"
        for s, n in seen.jobs.items()
    ]
    whole = len("  ".join(f"{s} {n:,}+" for s, n in seen.jobs.items())) + len(LABEL)
    half = len(shown) if whole <= (output.terminal_columns() or whole) else len(shown) // 2
    output.say("jobs     " + "  ".join(shown[:half]))
    if shown[half:]:
        output.say(LABEL + "  ".join(shown[half:]))
    output.say("success  " + _success(seen.last_hour, "last hour"))
    hour, short = seen.last_hour.outcomes, seen.last_5_min.outcomes
    names = sorted((name for name in hour if hour[name]), key=lambda name: -hour[name])
    if names:
        output.say()
        rows = [[name, short[name], hour[name], f"{hour[name] / 60:,.1f}"] for name in names]
        output.table(["OUTCOME", "5 MIN", "1 HOUR", "PER MIN"], rows, right=(1, 2, 3))
        output.say()
        _print_types(seen)
    output.say()
    _print_workers(seen.workers)


def _print_types(seen: Overview) -> None:
    heads = ["TYPE (LAST HOUR)", "RUNS", "SUCCESS", "P50", "P95", "P99"]
    listed = [*list(seen.types.items())[:TYPES_SHOWN], ("all", seen.last_hour)]
    rows = [
        [
            name,
            numbers.runs,
            _percent(numbers.success_rate),
            *map(_duration, (numbers.p50, numbers.p95, numbers.p99)),
        ]
        for name, numbers in listed
    ]
    output.table(heads, rows, right=range(1, 6), soft=[0])
    if len(seen.types) > TYPES_SHOWN:
        output.say(f"… and {len(seen.types) - TYPES_SHOWN} more types (--json has all)")


def _print_workers(workers: tuple[Worker, ...]) -> None:
    live = sum(worker.live for worker in workers)
    gone = f", {len(workers) - live:,} gone and still holding jobs" if live < len(workers) else ""
    output.say(f"workers  {live:,} live{gone}")
    if not workers:
        return
    now = output.utc_now()
    rows = [
        [
            worker.id,
            worker.name,
            "live" if worker.live else "gone",
            worker.held,
            output.relative(worker.seen_at, now),
            output.span((now - worker.started_at).total_seconds()),
            "all" if worker.queues is None else ",".join(worker.queues),
        ]
        for worker in workers
    ]
    heads = ["WORKER", "NAME", "STATE", "RUNNING", "SEEN", "UP", "QUEUES"]
    tint = {2: lambda text: "green" if text == "live" else "red"}
    output.table(heads, rows, right=(3,), soft=(0, 1), tint=tint)


def _success(numbers: Figures, when: str) -> str:
    if numbers.success_rate is None:
        return f"no job ended in the {when}"
    return f"{_percent(numbers.success_rate)} of the jobs that ended in the {when}"


def _percent(share: float | None) -> str:
    # Down, not to the nearest: 99.99 % must not look like all.
    return "" if share is None else f"{math.floor(share * 1000) / 10:g} %"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return "> 5 min" if seconds == LONGEST else output.span(seconds)
