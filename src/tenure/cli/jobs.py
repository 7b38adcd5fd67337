"""`tenure jobs` and `tenure job`: which jobs there are, and all about one of them.

Arguments may hold personal data: they are shown only where --payload asks for them.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tenure.cli import output, target
from tenure.cli.why import why
from tenure.errors import ConfigError, JobNotFound
from tenure.job import DEAD, STATUSES

if TYPE_CHECKING:
    import datetime

    from tenure.app import App
    from tenure.job import Event, Job

NOTE_COLUMNS = 60
KIND_COLUMNS = len("job.deadlettered")


def add_commands(commands: target.Commands) -> None:
    listing = target.add_command(commands, "jobs", "list jobs, newest first")
    add_filters(listing)
    listing.add_argument("--key", help="with this idempotency key")
    listing.add_argument("--dead", action="store_true", help="failed and dead_letter")
    listing.add_argument(
        "--limit", type=target.positive, default=50, metavar="N", help="at most N (default 50)"
    )
    listing.add_argument("--payload", action="store_true", help="show the arguments, too")
    listing.set_defaults(run=list_jobs)

    one = target.add_command(commands, "job", "show one job and why it is not running")
    one.add_argument("id", metavar="ID", type=target.job_id, help="a ULID or UUID")
    one.add_argument("--payload", action="store_true", help="show the arguments, too")
    one.add_argument(
        "--watch",
        action="store_true",
        help="print it again whenever it changes, until it has ended (exit code 1: not completed)",
    )
    one.set_defaults(run=show_job)


def add_filters(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--status", choices=STATUSES, metavar="S", help=", ".join(STATUSES))
    parser.add_argument("--type", metavar="TASK", help="of this task")
    parser.add_argument("--queue", metavar="Q", help="of this queue, with or without q:")
    parser.add_argument("--org", help="of this tenant")


# ------------------------------------------------------------------------------- many


def list_jobs(args: argparse.Namespace) -> int:
    if args.queue in ("deadletter", "q:deadletter"):  # a view over all queues
        args.queue, args.dead = None, True
    if args.dead and args.status not in (None, *DEAD):
        raise ConfigError(f"--dead lists failed and dead_letter jobs; --status {args.status} none")
    statuses = sorted(DEAD) if args.dead and args.status is None else [args.status]
    where = {name: getattr(args, name) for name in ("type", "queue", "org", "key")}
    with target.existing(args) as (app, _):
        found = list(itertools.islice(find(app, statuses, where), args.limit + 1))
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


def find(app: App, statuses: list[str | None], where: dict[str, Any]) -> Iterator[Job]:
    """Newest first over several statuses."""
    import heapq

    listings = [app.find(status=status, **where) for status in statuses]
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
    heads = ["ID", "STATUS", "TYPE", "QUEUE", "TRIES", "CREATED", "NOTE"]
    rows: list[list[object]] = []
    for job in jobs:
        tries = f"{job.attempts}/{job.max_attempts}"
        created = output.relative(job.created_at, now)
        note = _note(job, now)
        if payload:
            note = output.cut(note, NOTE_COLUMNS)
        row: list[object] = [job.id, job.status, job.type, f"q:{job.queue}", tries, created, note]
        if orgs:
            row.insert(3, job.org)
        if payload:
            row.append(_json(job.payload))
        rows.append(row)
    if orgs:
        heads.insert(3, "ORG")
    if payload:
        heads.append("PAYLOAD")
    output.table(heads, rows, tint={1: output.STATUS_COLOURS.get})


def _note(job: Job, now: datetime.datetime) -> str:
    """The one thing worth knowing in a listing."""
    notes = []
    if job.status == "queued" and job.after:
        notes.append(f"waits for {output.count(len(job.after), 'job')}")
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
        job = _look(app, args)
        if not args.watch:
            return 0
        hints = app.open_wakeup()
        try:
            while not job.terminal:
                hints.wait(1.0)
                newer = _get(app, args.id)
                if newer != job:
                    if not args.json:
                        output.say()
                    job = _look(app, args)
        finally:
            hints.close()
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
    sentence = why(job, app.workers(), app.queues(), output.utc_now())
    if args.json:
        shown = as_dict(job, payload=args.payload)
        output.say_json(shown | {"why": sentence, "events": [event_dict(e) for e in trail]})
    else:
        _print_job(job, sentence, trail, payload=args.payload)
    return job


def _print_job(job: Job, sentence: str, trail: list[Event], *, payload: bool) -> None:
    status = output.paint(job.status, output.STATUS_COLOURS.get(job.status))
    output.say(f"{output.paint(output.plain(job.type), 'bold')} {job.id} {status}")
    output.say(output.plain(sentence))
    output.say()
    output.pairs(
        [
            ("queue", f"q:{job.queue}, priority {job.priority}"),
            ("category", job.category),
            ("attempts", f"{job.attempts} of {job.max_attempts}"),
            ("crashes", job.crashes or None),
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
            ("after", ", ".join(job.after)),
            ("request", job.request_id if job.request_id != job.id else None),
            ("correlation", job.correlation_id if job.correlation_id != job.id else None),
            ("trace", job.traceparent),
            ("arguments", _json(job.payload) if payload else _names(job)),
            ("result", None if job.result is None else _json(job.result)),
        ]
    )
    if trail:
        output.say()
        print_events(trail, of_one_job=True)


# ------------------------------------------------------------------------------- audit trail


def event_dict(event: Event) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(event) | {"actor": event.actor._asdict()}


def print_events(events: list[Event], *, of_one_job: bool = False, heads: bool = True) -> None:
    names = ["AT", "EVENT", "TRY", "BY", "DETAILS"]
    rows: list[list[object]] = []
    for event in events:
        by = event.worker or f"{event.actor.type}:{event.actor.id}"
        at = event.at.strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + "Z"
        kind = f"{event.kind:<{KIND_COLUMNS}}"  # so that pages of `--follow` stay aligned
        row: list[object] = [at, kind, event.attempt or "", by, output.fields(event.data)]
        if not of_one_job:
            row[2:2] = [event.job_id, event.type]
        rows.append(row)
    if not of_one_job:
        names[2:2] = ["JOB", "TYPE"]
    output.table(names, rows, heads=heads)
