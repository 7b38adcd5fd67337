"""`tenure stats`: how many, how fast, how well. Read from rollups, never by walking jobs."""

from __future__ import annotations

import argparse
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from tenure.cli import output, target
from tenure.cli.why import is_live
from tenure.job import moment

if TYPE_CHECKING:
    import datetime

    from tenure.store import Rollup, WorkerInfo

# Upper bounds of the duration buckets in seconds; one more bucket holds everything above.
BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300)
RUNS = ("completed", "retried", "failed", "dead")  # outcomes whose duration says something
# Every way a run may end, so that what has not happened is 0 and not absent.
OUTCOMES = (*RUNS, "snoozed", "cancelled", "released", "crashed", "rescued")
HOUR_MS = 3_600_000
SHORT_MS = 300_000
TYPES_SHOWN = 15
LABEL = " " * len("success  ")


def add_commands(commands: target.Commands) -> None:
    parser = target.add_command(commands, "stats", "show totals, rates and durations")
    parser.set_defaults(run=show_stats)


def show_stats(args: argparse.Namespace) -> int:
    with target.existing(args) as (app, _):
        now = output.utc_now()
        now_ms = int(now.timestamp() * 1000)
        hour_ago = (now_ms - HOUR_MS) // 60_000 * 60_000
        # The grand total of long ago is kept under minute 0 and always returned.
        recent = [r for r in app.store.rollups(since_ms=hour_ago) if r.start >= hour_ago]
        totals = app.store.totals()
        workers = [w for w in app.workers() if is_live(w, now) or w.held]
    report = {
        "jobs": totals.jobs,
        "capped": list(totals.capped),
        "last_hour": summarize(recent),
        "last_5_min": summarize(r for r in recent if r.start > now_ms - SHORT_MS - 60_000),
        "types": by_type(recent),
        "workers": [_worker(worker, now) for worker in workers],
    }
    if args.json:
        output.say_json(report)
    else:
        _print(report)
    return 0


# ------------------------------------------------------------------------------- numbers


def quantile(buckets: Sequence[int], q: float) -> float | None:
    """The duration in seconds that the fraction q stays below, interpolated within its bucket;
    infinite when that is the last one, None without any."""
    rank = q * sum(buckets)
    if rank == 0:
        return None
    seen = 0
    for place, number in enumerate(buckets):
        if number and seen + number >= rank:
            if place == len(BOUNDS):
                return math.inf
            low = BOUNDS[place - 1] if place else 0.0
            return low + (BOUNDS[place] - low) * (rank - seen) / number
        seen += number
    return math.inf


def summarize(rollups: Iterable[Rollup]) -> dict[str, Any]:
    outcomes: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
    buckets, lasted_ms = [0] * (len(BOUNDS) + 1), 0
    for rollup in rollups:
        outcomes[rollup.outcome] += rollup.runs
        if rollup.outcome in RUNS:
            buckets = [a + b for a, b in zip(buckets, rollup.buckets, strict=True)]
            lasted_ms += rollup.duration_ms
    ended = outcomes["completed"] + outcomes["failed"] + outcomes["dead"]
    durations = {f"p{q}": _finite(quantile(buckets, q / 100)) for q in (50, 95, 99)}
    if sum(buckets) == 1:  # known to the millisecond, not to its bucket
        durations = dict.fromkeys(durations, lasted_ms / 1000)
    return {
        "outcomes": dict(outcomes),
        "runs": sum(outcomes[name] for name in RUNS),
        "success_rate": outcomes["completed"] / ended if ended else None,
        **durations,
    }


def _finite(seconds: float | None) -> float | None:
    """JSON has no infinity: 300 stands for five minutes or more."""
    return None if seconds is None else round(min(seconds, float(BOUNDS[-1])), 4)


def by_type(rollups: Iterable[Rollup]) -> dict[str, dict[str, Any]]:
    """The busiest first."""
    groups: dict[str, list[Rollup]] = defaultdict(list)
    for rollup in rollups:
        groups[rollup.type].append(rollup)
    found = {type: summarize(group) for type, group in groups.items()}
    return dict(sorted(found.items(), key=lambda item: (-item[1]["runs"], item[0])))


def _worker(worker: WorkerInfo, now: datetime.datetime) -> dict[str, Any]:
    return {
        "id": worker.id,
        "name": worker.meta.get("name"),
        "live": is_live(worker, now),
        "started_at": moment(worker.started_at),
        "seen_at": moment(worker.seen_at),
        "queues": worker.meta.get("queues"),
        "running": worker.held,
    }


# ------------------------------------------------------------------------------- for people


def _print(report: dict[str, Any]) -> None:
    totals = report["jobs"]
    shown = [
        f"{output.paint(s, output.STATUS_COLOURS[s])} {output.at_least(n, s in report['capped'])}"
        for s, n in totals.items()
    ]
    whole = len("  ".join(f"{s} {n:,}+" for s, n in totals.items())) + len(LABEL)
    half = len(shown) if whole <= (output.terminal_columns() or whole) else len(shown) // 2
    output.say("jobs     " + "  ".join(shown[:half]))
    if shown[half:]:
        output.say(LABEL + "  ".join(shown[half:]))
    hour, short = report["last_hour"], report["last_5_min"]
    output.say("success  " + _success(hour, "last hour"))
    names = [name for name, number in hour["outcomes"].items() if number]
    if names:
        output.say()
        names.sort(key=lambda name: -hour["outcomes"][name])
        rows = [
            [
                name,
                short["outcomes"][name],
                hour["outcomes"][name],
                f"{hour['outcomes'][name] / 60:,.1f}",
            ]
            for name in names
        ]
        output.table(["OUTCOME", "5 MIN", "1 HOUR", "PER MIN"], rows, right=(1, 2, 3))
        output.say()
        _print_types(report["types"], hour)
    output.say()
    _print_workers(report["workers"])


def _print_types(types: dict[str, dict[str, Any]], hour: dict[str, Any]) -> None:
    heads = ["TYPE (LAST HOUR)", "RUNS", "SUCCESS", "P50", "P95", "P99"]
    listed = [*list(types.items())[:TYPES_SHOWN], ("all", hour)]
    rows = [
        [
            name,
            numbers["runs"],
            _percent(numbers["success_rate"]),
            *(_duration(numbers[p]) for p in ("p50", "p95", "p99")),
        ]
        for name, numbers in listed
    ]
    output.table(heads, rows, right=range(1, 6), soft=[0])
    if len(types) > TYPES_SHOWN:
        output.say(f"… and {len(types) - TYPES_SHOWN} more types (--json has all)")


def _print_workers(workers: list[dict[str, Any]]) -> None:
    live = sum(worker["live"] for worker in workers)
    gone = f", {len(workers) - live:,} gone and still holding jobs" if live < len(workers) else ""
    output.say(f"workers  {live:,} live{gone}")
    if not workers:
        return
    now = output.utc_now()
    output.table(
        ["WORKER", "NAME", "STATE", "RUNNING", "SEEN", "UP", "QUEUES"],
        [
            [
                worker["id"],
                worker["name"],
                "live" if worker["live"] else "gone",
                worker["running"],
                output.relative(worker["seen_at"], now),
                output.span((now - worker["started_at"]).total_seconds()),
                "all" if worker["queues"] is None else ",".join(worker["queues"]),
            ]
            for worker in workers
        ],
        right=(3,),
        soft=(0, 1),
        tint={2: lambda text: "green" if text == "live" else "red"},
    )


def _success(numbers: dict[str, Any], when: str) -> str:
    if numbers["success_rate"] is None:
        return f"no job ended in the {when}"
    return f"{_percent(numbers['success_rate'])} of the jobs that ended in the {when}"


def _percent(share: float | None) -> str:
    # Down, not to the nearest: 99.99 % must not look like all.
    return "" if share is None else f"{math.floor(share * 1000) / 10:g} %"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return "> 5 min" if seconds == BOUNDS[-1] else output.span(seconds)
