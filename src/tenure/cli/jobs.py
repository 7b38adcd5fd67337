"""`tenure jobs`: which jobs there are, or what the dead ones died of.

Arguments may hold personal data: they are shown only where --payload asks for them.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tenure.cli import target
from tenure.errors import ConfigError
from tenure.job import DEAD, STATUSES
from tenure.terminal import output

if TYPE_CHECKING:
    import datetime

    from tenure import Job
    from tenure.operations.dead import Group
    from tenure.operations.listing import JobFilter

NOTE_COLUMNS = 60
INDENT = "    "
ERROR_COLUMNS = 120
GROUP_HEADS = ["GROUP", "JOBS", "TYPE", "STATUS", "FIRST SEEN", "LAST SEEN", "CODE", "PLACE"]


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


def add_filters(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--status", choices=STATUSES, metavar="S", help=", ".join(STATUSES))
    parser.add_argument("--type", metavar="TASK", help="of this task")
    parser.add_argument("--queue", metavar="Q", help="of this queue, with or without q:")
    parser.add_argument("--org", help="of this tenant")


def add_group(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--group",
        metavar="GROUP",
        type=_handle,
        help="the dead jobs of this group, as `tenure jobs --dead` names it",
    )


def _handle(text: str) -> str:
    """An argparse type: the first digits of a group's digest."""
    from tenure.operations.dead import is_handle

    if not is_handle(text.lower()):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a group such as 3f29c1d0; `tenure jobs --dead` lists them"
        )
    return text.lower()


def job_filter(args: argparse.Namespace, *statuses: str, key: str | None = None) -> JobFilter:
    """What the filters of a command line say; `statuses` where they do not say which."""
    from tenure.operations.listing import JobFilter

    asked = statuses if args.status is None else (args.status,)
    return JobFilter(asked, args.type, args.queue, key, getattr(args, "group", None))


def list_jobs(args: argparse.Namespace) -> int:
    if args.queue in ("deadletter", "q:deadletter"):  # a view over all queues: lists its jobs
        args.flat = args.flat or not args.dead
        args.queue, args.dead = None, True
    grouped = args.dead and not args.flat and args.group is None
    _check_usage(args, grouped)
    where = job_filter(args, *sorted(DEAD if args.dead else ()), key=args.key)
    with target.existing(args) as (_, operations, _named):
        if grouped:
            groups = operations.dead.groups(where)
        else:
            found = list(itertools.islice(operations.jobs.find(where), args.limit + 1))
    if grouped:
        _list_groups(groups, limit=args.limit, as_json=args.json)
        return 0
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


# ------------------------------------------------------------------------------- jobs


def as_dict(job: Job, *, payload: bool) -> dict[str, Any]:
    from tenure.operations.encoding import to_json

    shown: dict[str, Any] = to_json(job)
    if not payload:
        del shown["payload"]
    return shown


def _print_jobs(jobs: Sequence[Job], *, payload: bool) -> None:
    now = output.utc_now()
    orgs = any(job.org != "default" for job in jobs)
    rows: list[dict[str, object]] = []
    for job in jobs:
        note = _note(job, now)
        rows.append(
            {
                "ID": job.id,
                "STATUS": job.status,
                "TYPE": job.type,
                **({"ORG": job.org} if orgs else {}),
                "QUEUE": f"q:{job.queue}",
                "TRIES": f"{job.attempts}/{job.max_attempts}",
                "AGE": output.span(max(1, round((now - job.created_at).total_seconds()))),
                "NOTE": output.cut(note, NOTE_COLUMNS) if payload else note,
                **({"PAYLOAD": output.as_json(job.payload)} if payload else {}),
            }
        )
    heads = [*rows[0]]
    soft = [place for place, name in enumerate(heads) if name in ("TYPE", "ORG", "QUEUE", "NOTE")]
    tint = {1: output.STATUS_COLOURS.get}
    output.table(heads, [[*row.values()] for row in rows], tint=tint, ids=[0], soft=soft)


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


# ------------------------------------------------------------------------------- groups


def _list_groups(found: Sequence[Group], *, limit: int, as_json: bool) -> None:
    shown = found[:limit]
    if as_json:
        for group in shown:
            output.say_json(group)
        return
    if not shown:
        output.say("no dead jobs")
        return
    print_groups(shown, output.utc_now())
    if len(found) > limit:
        output.say(f"… there are {len(found) - limit:,} more groups: --limit {limit * 10}")
    capped = any(group.capped for group in found)
    total = output.count(sum(group.count for group in found), "dead job", capped=capped)
    output.say()
    output.say(
        f"{total} in {output.count(len(found), 'group')}; `tenure jobs --group GROUP` lists one, "
        "`replay` and `discard` take --group, too"
    )


def print_groups(shown: Sequence[Group], now: datetime.datetime) -> None:
    """Two lines a group: in one, the sample would push the rest off most terminals. Where a place
    has no room in the first, it is in the second: its end, which would be cut, is the line."""
    names, *rows = _aligned([GROUP_HEADS, *(_cells(group, now) for group in shown)])
    columns = output.terminal_columns()
    for group, row in zip(shown, rows, strict=True):
        output.table(
            names, [row], tint={3: _status_colour}, heads=row is rows[0], soft=(2, 4, 5, 6)
        )
        error = output.cut(output.plain(group.sample_error or "no message"), ERROR_COLUMNS)
        cut = columns is not None and output.width(output.GAP.join(row)) > columns
        place = f"{row[-1]}  " if cut else ""
        line = f"{INDENT}{group.sample_id}  {place}{error}"
        output.say(output.paint(line if columns is None else output.cut(line, columns), "dim"))


def _cells(group: Group, now: datetime.datetime) -> list[str]:
    seen = [output.relative(when, now) for when in (group.first_seen, group.last_seen)]
    jobs, mark = output.at_least(group.count, group.capped), group.fingerprint
    cells = [group.group, jobs, group.type, group.status, *seen, mark.code, mark.short_place]
    return [output.plain(cell) for cell in cells]


def _aligned(rows: list[list[str]]) -> list[list[str]]:
    """Every cell but the last of a row padded to its column's width; JOBS to the right."""
    widths = [max(map(output.width, column)) for column in zip(*rows, strict=True)]
    padded = []
    for row in rows:
        cells = [output.padded(text, columns) for text, columns in zip(row, widths, strict=True)]
        cells[1] = output.padded(row[1], widths[1], right=True)
        padded.append([*cells[:-1], row[-1]])
    return padded


def _status_colour(text: str) -> str | None:
    return output.STATUS_COLOURS.get(text.strip())
