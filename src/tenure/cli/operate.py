"""`tenure cancel`, `replay`, `discard`: what an operator does to jobs, by id or by filter.

Every change is one line of the audit trail, under the name of this shell's user.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, NamedTuple

from tenure.cli import output, target
from tenure.cli.jobs import add_filters, find
from tenure.errors import ConfigError

if TYPE_CHECKING:
    from tenure.app import App

BATCH = 500
IDS_SHOWN = 10
FILTERS = ("status", "type", "queue", "org")


class Verb(NamedTuple):
    name: str
    past: str
    statuses: tuple[str, ...]  # of the jobs it works on
    whom: str


VERBS = (
    Verb(
        "cancel",
        "cancelled",
        ("queued", "in_progress"),
        "queued and running",
    ),
    Verb("replay", "replayed", ("failed", "dead_letter"), "dead"),
    Verb("discard", "discarded", ("failed", "dead_letter"), "dead"),
)
HELP = {
    "cancel": "cancel queued jobs, ask running ones to stop",
    "replay": "run dead jobs again under the same id",
    "discard": "give dead jobs up",
}


def add_commands(commands: target.Commands) -> None:
    for verb in VERBS:
        parser = target.add_command(
            commands,
            verb.name,
            HELP[verb.name],
            description=f"{HELP[verb.name].capitalize()}: by id, or all that match the filters.",
        )
        parser.add_argument(
            "ids", metavar="ID", nargs="*", type=target.job_id, help="ULIDs or UUIDs"
        )
        add_filters(parser)
        parser.add_argument(
            "--dry-run", action="store_true", help="only say which jobs it would be"
        )
        if verb.name == "replay":
            parser.add_argument(
                "--payload", metavar="JSON", help="new arguments, for one ID; needs -A"
            )
        else:
            parser.add_argument("--reason", default="", help="kept in the audit trail")
        parser.set_defaults(run=operate, verb=verb)


def operate(args: argparse.Namespace) -> int:
    verb: Verb = args.verb
    _check_usage(args, verb)
    with target.existing(args) as (app, named):
        if getattr(args, "payload", None) is not None:
            return _replay_edited(app, named, args)
        unfit = _unfit(app, args, verb)
        ids = [id for id in args.ids if id not in unfit] if args.ids else _matching(app, args, verb)
        if args.dry_run:
            return _preview(ids, args, verb)
        verdicts = unfit | _apply(app, ids, args, verb)
    _report(verdicts, unfit, args, verb)
    return 1 if unfit else 0


def _check_usage(args: argparse.Namespace, verb: Verb) -> None:
    filtered = [name for name in FILTERS if getattr(args, name) is not None]
    if not args.ids and not filtered:
        raise ConfigError(
            f"which jobs? Give ids, or a filter such as --type send_email or "
            f"--status {verb.statuses[-1]}; --dry-run shows what it takes"
        )
    if args.ids and set(filtered) - {"org"}:
        raise ConfigError(f"give ids or --{filtered[0]}, not both")
    if args.status is not None and args.status not in verb.statuses:
        raise ConfigError(
            f"only {verb.whom} jobs can be {verb.past}: --status {' or '.join(verb.statuses)}"
        )
    if getattr(args, "payload", None) is not None and (len(args.ids) != 1 or args.dry_run):
        raise ConfigError("--payload is for one ID, and without --dry-run")


def _matching(app: App, args: argparse.Namespace, verb: Verb) -> list[str]:
    queue = args.queue
    if "failed" in verb.statuses and queue in ("deadletter", "q:deadletter"):
        queue = None  # the view over all queues; for `cancel` it is no queue at all
    statuses: list[str | None] = [args.status] if args.status else [*verb.statuses]
    where = {"type": args.type, "queue": queue, "org": args.org}
    return [job.id for job in find(app, statuses, where)]


def _unfit(app: App, args: argparse.Namespace, verb: Verb) -> dict[str, str]:
    """Of the ids given, those it cannot be done to: id -> `absent` or the status."""
    unfit = {}
    for id in args.ids:
        job = app.store.get(id, org=args.org)
        if job is None or job.status not in verb.statuses:
            unfit[id] = "absent" if job is None else job.status
    return unfit


def _preview(ids: list[str], args: argparse.Namespace, verb: Verb) -> int:
    if args.json:
        output.say_json({"dry_run": True, "count": len(ids), "ids": ids[:IDS_SHOWN]})
        return 0
    output.say(f"would {verb.name} {output.count(len(ids), 'job')}; nothing was changed")
    for id in ids[:IDS_SHOWN]:
        output.say(f"  {id}")
    if len(ids) > IDS_SHOWN:
        output.say(f"  … and {len(ids) - IDS_SHOWN:,} more")
    return 0


def _apply(app: App, ids: list[str], args: argparse.Namespace, verb: Verb) -> dict[str, str]:
    """Batch by batch, so that workers get their turn at the database in between."""
    more: dict[str, Any] = {"actor": target.operator(), "org": args.org}
    if verb.name != "replay":
        more["reason"] = args.reason
    call = getattr(app.store, verb.name)
    verdicts: dict[str, str] = {}
    line = output.LiveLine()
    try:
        for start in range(0, len(ids), BATCH):
            verdicts |= call(ids[start : start + BATCH], **more)
            if len(ids) > BATCH:
                line.bar(len(verdicts), len(ids), verb.name)
    finally:
        line.clear()
    return verdicts


def _replay_edited(app: App, named: bool, args: argparse.Namespace) -> int:
    from tenure.cli.enqueue import json_object
    from tenure.errors import IllegalTransition, JobNotFound

    if not named:
        raise ConfigError(
            "--payload needs your app to check the arguments: tenure -A module:app replay …"
        )
    (id,) = args.ids
    job = app.store.get(id, org=args.org)
    if job is None:
        raise JobNotFound(f"there is no job {id}")
    if not job.dead:
        raise IllegalTransition(_refusal(id, job.status, args.verb))
    app.replay(id, json_object(args.payload), actor=target.operator())
    _report({id: "done"}, {}, args, args.verb)
    return 0


def _report(
    verdicts: dict[str, str], unfit: dict[str, str], args: argparse.Namespace, verb: Verb
) -> None:
    changed = {
        id: verdict
        for id, verdict in verdicts.items()
        if id not in unfit and verdict in ("done", "requested")  # the rest changed since we looked
    }
    if args.json:
        for id, verdict in verdicts.items():
            output.say_json({"id": id, "outcome": verdict, "changed": id in changed})
        return
    asked = sum(verdict == "requested" for verdict in changed.values())
    done = len(changed) - asked
    if not verdicts:
        output.say("no job matches; nothing was changed")
    elif done or not (asked or unfit):
        output.say(f"{verb.past} {output.count(done, 'job')}")
    if asked:
        output.say(
            f"asked {output.count(asked, 'running job')} to stop: "
            "cancelled as soon as the handler looks"
        )
    for id, status in unfit.items():
        output.complain(_refusal(id, status, verb))


def _refusal(id: str, status: str, verb: Verb) -> str:
    if status == "absent":
        return f"there is no job {id}"
    return f"job {id} is {status}: only {verb.whom} jobs can be {verb.past}"
