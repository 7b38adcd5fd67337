"""`tenure job`: all about one job, and why it is not running."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from tenure.cli import target
from tenure.cli.events import print_events
from tenure.cli.jobs import as_dict
from tenure.terminal import output
from tenure.terminal.live_line import LiveLine

if TYPE_CHECKING:
    import datetime

    from tenure import App, Job
    from tenure.operations.jobs import JobDetail, Jobs

NEEDS_SHOWN = 5
LOOK_SECONDS = 0.1  # between two looks of --watch, however many hints a busy database gives


def add_commands(commands: target.Commands) -> None:
    one = target.add_command(commands, "job", "show one job and why it is not running")
    one.add_argument("id", metavar="ID", type=target.job_id, help=target.ID_HELP)
    one.add_argument("--payload", action="store_true", help="show the arguments, too")
    one.add_argument(
        "--watch",
        action="store_true",
        help="follow its progress until it has ended (exit code 1: not completed)",
    )
    one.set_defaults(run=show_job)


def show_job(args: argparse.Namespace) -> int:
    with target.existing(args) as (app, operations, _):
        args.id = operations.jobs.whole_id(args.id)
        if not args.watch:
            _look(operations.jobs, args)
            return 0
        job = _watch(app, operations.jobs, args)
    return 0 if job.status == "completed" else 1


def _look(jobs: Jobs, args: argparse.Namespace) -> Job:
    """Print all about it; the job as printed."""
    seen = jobs.detail(args.id)
    if args.json:
        more = {
            "why": seen.why.sentence,
            "steps": [*seen.steps],
            "needs": seen.needs,
            "events": seen.events,
        }
        output.say_json(as_dict(seen.job, payload=args.payload) | more)
    else:
        _print_job(seen, payload=args.payload)
    return seen.job


def _print_head(job: Job, sentence: str) -> None:
    status = output.paint(job.status, output.STATUS_COLOURS.get(job.status))
    output.say(f"{output.paint(output.plain(job.type), 'bold')} {job.id} {status}")
    output.say(output.plain(sentence))


def _print_job(seen: JobDetail, *, payload: bool) -> None:
    job = seen.job
    _print_head(job, seen.why.sentence)
    output.say()
    output.pairs(
        [
            ("queue", f"q:{job.queue}, priority {job.priority}"),
            ("category", job.category),
            ("attempts", f"{job.attempts} of {job.max_attempts}"),
            ("crashes", job.crashes or None),
            ("losses", job.losses or None),
            ("org", job.org),
            ("project", job.project),
            ("actor", f"{job.actor.type}:{job.actor.id}"),
            ("key", job.key),
            ("created", output.stamp(job.created_at)),
            ("due", output.stamp(job.scheduled_at)),
            ("started", output.stamp(job.started_at) if job.started_at else None),
            ("ended", output.stamp(job.completed_at) if job.completed_at else None),
            ("timeout", output.span(job.timeout)),
            ("worker", job.lease_owner),
            ("progress", output.fields(job.progress)),
            ("error", job.error),
            ("code", job.error_code),
            ("place", job.error_place),
            ("parent", job.parent),
            ("after", _needs_line(seen.needs)),
            ("steps", ", ".join(seen.steps)),
            ("request", job.request_id if job.request_id != job.id else None),
            ("correlation", job.correlation_id if job.correlation_id != job.id else None),
            ("trace", job.traceparent),
            ("arguments", output.as_json(job.payload) if payload else _names(job)),
            ("result", None if job.result is None else output.as_json(job.result)),
        ]
    )
    if job.traceback:
        output.say()
        output.say(output.paint(output.indented(job.traceback), "dim"))
    if seen.events:
        output.say()
        print_events(seen.events, of_one_job=True)


def _needs_line(needs: Mapping[str, str]) -> str:
    """`ID completed, ID failed`; of many, how many of each and the first that are not completed."""
    if len(needs) <= NEEDS_SHOWN:
        return ", ".join(f"{id} {status}" for id, status in needs.items())
    counts = ", ".join(f"{n:,} {status}" for status, n in Counter(needs.values()).most_common())
    unmet = [f"{id} {status}" for id, status in needs.items() if status != "completed"]
    first = f" ({', '.join(unmet[:NEEDS_SHOWN])}{', …' if len(unmet) > NEEDS_SHOWN else ''})"
    return f"{len(needs):,} jobs: {counts}{first if unmet else ''}"


def _names(job: Job) -> str:
    return f"{', '.join(job.payload)} (--payload shows them)" if job.payload else "none"


# ------------------------------------------------------------------------------- live


def _watch(app: App, jobs: Jobs, args: argparse.Namespace) -> Job:
    """Follow a job to its end: a bar on a terminal, a line a change in a pipe, JSON objects."""
    line = LiveLine(wanted=not args.json and output.is_terminal(sys.stdout))
    hints = app.open_wakeup()
    job, said = jobs.require(args.id), ""
    if line.on and not job.terminal:
        _print_head(job, jobs.why(job).sentence)
    try:
        while True:
            now = output.utc_now()
            words = _state(job, now, bar=line.on)
            if line.on:
                line.show(words + _clock(job, now))
            elif words != said and args.json:
                job = _look(jobs, args)
                words = _state(job, now, bar=False)
            elif words != said:
                output.say(f"{output.stamp(now)}  {words}")
                output.flush()
            if job.terminal:
                break
            said = words
            time.sleep(LOOK_SECONDS)
            hints.wait(1.0 - LOOK_SECONDS)
            job = jobs.require(args.id)
    finally:
        line.clear()
        hints.close()
    if line.on:
        output.say()
        _look(jobs, args)
    return job


def _state(job: Job, now: datetime.datetime, *, bar: bool) -> str:
    """What --watch says of a job; a change of it is what counts as a change."""
    words = [job.status]
    if job.status == "in_progress":
        words += [_progress(job.progress, bar=bar), f"attempt {job.attempts} of {job.max_attempts}"]
    elif not job.terminal and job.scheduled_at > now:
        words.append(f"due {output.stamp(job.scheduled_at)}")
    if job.cancel_requested and not job.terminal:
        words.append("asked to cancel")
    if job.error and job.status != "completed":
        words.append(job.error)
    return "  ".join(output.plain(word) for word in words if word)


def _progress(progress: object, *, bar: bool) -> str:
    """`[######..................] 25 %  embedding  pages=3`."""
    if not isinstance(progress, dict):
        return output.fields(progress)
    rest = dict(progress)
    percent, phase = rest.pop("percent", None), rest.pop("phase", None)
    words = [output.fields(rest)]
    if phase is not None:
        words.insert(0, str(phase))
    if isinstance(percent, int | float):
        words.insert(0, f"{output.gauge(percent / 100) + ' ' if bar else ''}{percent:.0f} %")
    return "  ".join(word for word in words if word)


def _clock(job: Job, now: datetime.datetime) -> str:
    since = job.started_at if job.status == "in_progress" else job.created_at
    return "" if since is None else f"  {output.span(max(1, round((now - since).total_seconds())))}"
