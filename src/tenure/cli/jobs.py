"""`tenure jobs` and `tenure job`: which jobs there are, and all about one of them.

Arguments may hold personal data: they are shown only where --payload asks for them.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tenure.cli import dead, output, target
from tenure.cli.why import why
from tenure.errors import ConfigError, JobNotFound
from tenure.job import DEAD, STATUSES

if TYPE_CHECKING:
    import datetime

    from tenure.app import App
    from tenure.job import Event, Job
    from tenure.store import Filter

NOTE_COLUMNS = 60
GAUGE_COLUMNS = 24
NEEDS_SHOWN = 5
LOOK_SECONDS = 0.1  # between two looks of --watch, however many hints a busy database gives
NARROW = 100  # columns of a terminal, from where on events are shown with their day
KIND_COLUMNS = len("job.deadlettered")


def add_commands(commands: target.Commands) -> None:
    listing = target.add_command(commands, "jobs", "list jobs, newest first")
    add_filters(listing)
    listing.add_argument("--key", help="with this idempotency key")
    listing.add_argument(
        "--dead",
        action="store_true",
        help="failed and dead_letter jobs, grouped by what they died of",
    )
    listing.add_argument("--flat", action="store_true", help="with --dead: the jobs themselves")
    add_group(listing)
    listing.add_argument(
        "--limit", type=target.positive, default=50, metavar="N", help="at most N (default 50)"
    )
    listing.add_argument("--payload", action="store_true", help="show the arguments, too")
    listing.set_defaults(run=list_jobs)

    one = target.add_command(commands, "job", "show one job and why it is not running")
    one.add_argument("id", metavar="ID", type=target.job_id, help=target.ID_HELP)
    one.add_argument("--payload", action="store_true", help="show the arguments, too")
    one.add_argument(
        "--watch",
        action="store_true",
        help="follow its progress until it has ended (exit code 1: not completed)",
    )
    one.set_defaults(run=show_job)


def add_filters(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--status", choices=STATUSES, metavar="S", help=", ".join(STATUSES))
    parser.add_argument("--type", metavar="TASK", help="of this task")
    parser.add_argument("--queue", metavar="Q", help="of this queue, with or without q:")
    parser.add_argument("--org", help="of this tenant")


def add_group(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--group",
        metavar="GROUP",
        type=dead.handle,
        help="the dead jobs of this group, as `tenure jobs --dead` names it",
    )


# ------------------------------------------------------------------------------- many


def list_jobs(args: argparse.Namespace) -> int:
    if args.queue in ("deadletter", "q:deadletter"):  # a view over all queues: lists its jobs
        args.flat = args.flat or not args.dead
        args.queue, args.dead = None, True
    grouped = args.dead and not args.flat and args.group is None
    _check_usage(args, grouped)
    where = narrowing(args, key=args.key)
    with target.existing(args) as (app, _):
        if grouped:
            dead.list_groups(app, where, limit=args.limit, json=args.json)
            return 0
        statuses = sorted(DEAD) if args.dead and args.status is None else [args.status]
        found = list(itertools.islice(find(app, where, statuses, args.group), args.limit + 1))
    shown = found[: args.limit]
    if args.json:
        for job in shown:
            output.say_json(as_dict(job, payload=args.payload))
        return 0
    if not shown:
        output.say("no jobs")
        return 0
    _print_jobs(shown, payload=args.payload)
    if len(found) > args.limit:
        output.say(f"… there are more: --limit {args.limit * 10}")
    return 0


def _check_usage(args: argparse.Namespace, grouped: bool) -> None:
    if (args.dead or args.group) and args.status not in (None, *DEAD):
        option = "--dead" if args.dead else "--group"
        raise ConfigError(
            f"{option} lists failed and dead_letter jobs; --status {args.status} none"
        )
    for option in ("key", "payload"):
        if grouped and getattr(args, option):
            raise ConfigError(f"--dead lists groups, which have no {option}: add --flat")
    if args.flat and not args.dead and args.group is None:
        raise ConfigError("--flat goes with --dead: tenure jobs --dead --flat")


def narrowing(args: argparse.Namespace, *, key: str | None = None) -> Filter:
    """What the filters of a command line say."""
    from tenure.policy import queue_name
    from tenure.store import Filter

    queue = None if args.queue is None else queue_name(args.queue)
    return Filter(status=args.status, type=args.type, queue=queue, org=args.org, key=key)


def find(
    app: App,
    where: Filter,
    statuses: Sequence[str | None],
    group: str | None = None,
    page: int = dead.PAGE,
) -> Iterator[Job]:
    """Newest first over several statuses, or over one group of dead jobs."""
    import heapq

    if group is not None:
        return dead.members(app, dead.named(app, group, where), where, page)
    listings = [dead.walk(app, where._replace(status=status), page) for status in statuses]
    return heapq.merge(*listings, key=lambda job: job.id, reverse=True)


def as_dict(job: Job, *, payload: bool) -> dict[str, Any]:
    from dataclasses import asdict

    shown = asdict(job)
    shown["actor"] = job.actor._asdict()
    shown["uuid"] = str(job.uuid)
    if not payload:
        del shown["payload"]
    return shown


def _print_jobs(jobs: list[Job], *, payload: bool) -> None:
    now = output.utc_now()
    orgs = any(job.org != "default" for job in jobs)
    heads = ["ID", "STATUS", "TYPE", "QUEUE", "TRIES", "AGE", "NOTE"]
    rows: list[list[object]] = []
    for job in jobs:
        tries = f"{job.attempts}/{job.max_attempts}"
        age = output.span(max(1, round((now - job.created_at).total_seconds())))
        note = _note(job, now)
        if payload:
            note = output.cut(note, NOTE_COLUMNS)
        row: list[object] = [job.id, job.status, job.type, f"q:{job.queue}", tries, age, note]
        if orgs:
            row.insert(3, job.org)
        if payload:
            row.append(_json(job.payload))
        rows.append(row)
    if orgs:
        heads.insert(3, "ORG")
    if payload:
        heads.append("PAYLOAD")
    soft = [place for place, name in enumerate(heads) if name in ("TYPE", "ORG", "QUEUE", "NOTE")]
    output.table(heads, rows, tint={1: output.STATUS_COLOURS.get}, ids=[0], soft=soft)


def _note(job: Job, now: datetime.datetime) -> str:
    """The one thing worth knowing in a listing."""
    notes = []
    if job.status == "queued" and job.after:
        notes.append(f"after {output.count(len(job.after), 'job')}")
    elif job.status == "queued" and job.scheduled_at > now:
        notes.append(f"due {output.relative(job.scheduled_at, now)}")
    if job.cancel_requested:
        notes.append("asked to cancel")
    if job.status == "in_progress" and job.progress is not None:
        notes.append(output.fields(job.progress))
    if job.error and job.status != "completed":
        code = "" if not job.error_code or job.error_code in job.error else f"{job.error_code}: "
        notes.append(code + job.error)
    return "; ".join(notes)


def _names(job: Job) -> str:
    return f"{', '.join(job.payload)} (--payload shows them)" if job.payload else "none"


def _json(value: object) -> str:
    import json

    return json.dumps(value, ensure_ascii=False)


# ------------------------------------------------------------------------------- one


def show_job(args: argparse.Namespace) -> int:
    with target.existing(args) as (app, _):
        args.id = target.whole_id(app, args.id)
        if not args.watch:
            _look(app, args)
            return 0
        job = _watch(app, args)
    return 0 if job.status == "completed" else 1


def _get(app: App, id: str) -> Job:
    job = app.get(id)
    if job is None:
        raise JobNotFound(f"there is no job {id}")
    return job


def _look(app: App, args: argparse.Namespace) -> Job:
    """Print all about it; the job as printed."""
    job = _get(app, args.id)
    trail = list(app.events(job.id))
    steps = list(app.store.steps(job.id))
    needs = _needs(app, job)
    sentence = _sentence(app, job, needs)
    if args.json:
        more = {"why": sentence, "steps": steps, "needs": needs}
        trail_shown = [event_dict(event) for event in trail]
        output.say_json(as_dict(job, payload=args.payload) | more | {"events": trail_shown})
    else:
        extra = {"steps": ", ".join(steps), "after": _needs_line(needs)}
        _print_job(job, sentence, trail, extra, payload=args.payload)
    return job


def _needs(app: App, job: Job) -> dict[str, str]:
    """What it runs after: id -> status."""
    if not job.after:
        return {}
    return {id: status for id, (status, _) in app.store.results(job.id).items()}


def _sentence(app: App, job: Job, needs: dict[str, str]) -> str:
    return why(job, app.workers(), app.queues(), output.utc_now(), needs=needs)


def _needs_line(needs: dict[str, str]) -> str:
    """`ID completed, ID failed`; of many, how many of each and the first that are not completed."""
    from collections import Counter

    if len(needs) <= NEEDS_SHOWN:
        return ", ".join(f"{id} {status}" for id, status in needs.items())
    counts = ", ".join(f"{n:,} {status}" for status, n in Counter(needs.values()).most_common())
    unmet = [f"{id} {status}" for id, status in needs.items() if status != "completed"]
    first = f" ({', '.join(unmet[:NEEDS_SHOWN])}{', …' if len(unmet) > NEEDS_SHOWN else ''})"
    return f"{len(needs):,} jobs: {counts}{first if unmet else ''}"


def _print_head(job: Job, sentence: str) -> None:
    status = output.paint(job.status, output.STATUS_COLOURS.get(job.status))
    output.say(f"{output.paint(output.plain(job.type), 'bold')} {job.id} {status}")
    output.say(output.plain(sentence))


def _print_job(
    job: Job, sentence: str, trail: list[Event], extra: dict[str, str], *, payload: bool
) -> None:
    _print_head(job, sentence)
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
            ("after", extra["after"]),
            ("steps", extra["steps"]),
            ("request", job.request_id if job.request_id != job.id else None),
            ("correlation", job.correlation_id if job.correlation_id != job.id else None),
            ("trace", job.traceparent),
            ("arguments", _json(job.payload) if payload else _names(job)),
            ("result", None if job.result is None else _json(job.result)),
        ]
    )
    if job.traceback:
        output.say()
        output.say(output.paint(output.indented(job.traceback), "dim"))
    if trail:
        output.say()
        print_events(trail, of_one_job=True)


# ------------------------------------------------------------------------------- live


def _watch(app: App, args: argparse.Namespace) -> Job:
    """Follow a job to its end: a bar on a terminal, a line a change in a pipe, JSON objects."""
    import sys
    import time

    line = output.LiveLine(wanted=not args.json and output.is_terminal(sys.stdout))
    hints = app.open_wakeup()
    job, said = _get(app, args.id), ""
    if line.on and not job.terminal:
        _print_head(job, _sentence(app, job, _needs(app, job)))
    try:
        while True:
            now = output.utc_now()
            words = _state(job, now, bar=line.on)
            if line.on:
                line.show(words + _clock(job, now))
            elif words != said and args.json:
                job = _look(app, args)
                words = _state(job, now, bar=False)
            elif words != said:
                output.say(f"{output.stamp(now)}  {words}")
                output.flush()
            if job.terminal:
                break
            said = words
            time.sleep(LOOK_SECONDS)
            hints.wait(1.0 - LOOK_SECONDS)
            job = _get(app, args.id)
    finally:
        line.clear()
        hints.close()
    if line.on:
        output.say()
        _look(app, args)
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
        words.insert(0, f"{gauge(percent / 100) + ' ' if bar else ''}{percent:.0f} %")
    return "  ".join(word for word in words if word)


def gauge(part: float) -> str:
    filled = int(GAUGE_COLUMNS * min(max(part, 0.0), 1.0))
    return f"[{'#' * filled}{'.' * (GAUGE_COLUMNS - filled)}]"


def _clock(job: Job, now: datetime.datetime) -> str:
    since = job.started_at if job.status == "in_progress" else job.created_at
    return "" if since is None else f"  {output.span(max(1, round((now - since).total_seconds())))}"


# ------------------------------------------------------------------------------- audit trail


def event_dict(event: Event) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(event) | {"actor": event.actor._asdict()}


def print_events(events: list[Event], *, of_one_job: bool = False, heads: bool = True) -> None:
    names = ["AT", "EVENT", "TRY", "BY", "DETAILS"]
    narrow = (output.terminal_columns() or NARROW) < NARROW
    rows: list[list[object]] = []
    for event in events:
        by = event.worker or f"{event.actor.type}:{event.actor.id}"
        at = event.at.strftime(f"{'' if narrow else '%Y-%m-%d '}%H:%M:%S.%f")[:-3] + "Z"
        kind = f"{event.kind:<{KIND_COLUMNS}}"  # so that pages of `--follow` stay aligned
        row: list[object] = [at, kind, event.attempt or "", by, output.fields(event.data)]
        if not of_one_job:
            row[2:2] = [event.job_id, event.type]
        rows.append(row)
    if not of_one_job:
        names[2:2] = ["JOB", "TYPE"]
    soft = [place for place, name in enumerate(names) if name in ("TYPE", "BY")]
    output.table(names, rows, heads=heads, ids=[] if of_one_job else [2], soft=soft)
