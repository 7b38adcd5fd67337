"""`tenure queues`: what lies in each queue, and the switch that pauses one."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from tenure.cli import target
from tenure.errors import ConfigError
from tenure.operations.acts import VERBS, Verb
from tenure.terminal import output

if TYPE_CHECKING:
    from tenure.operations.queues import Queue

CONSEQUENCE = ": nothing more is claimed, what runs goes on"
FIGURES = ("ready", "later", "waiting", "running", "dead")


def add_commands(commands: target.Commands) -> None:
    parser = target.add_command(commands, "queues", "show the queues; pause or resume one")
    parser.set_defaults(run=show_queues)
    verbs = [verb for verb in VERBS.values() if verb.of == "queues"]
    names = " | ".join(verb.name for verb in verbs)
    switches = parser.add_subparsers(title="switches", dest="switch", metavar=names)
    for verb in verbs:
        switch = target.add_command(switches, verb.name, verb.help)
        switch.add_argument("name", metavar="NAME", help="the queue, with or without q:")
        if "reason" in verb.act._fields:
            help = "shown to whoever asks why nothing runs"
            switch.add_argument("--reason", default="", help=help)
        switch.set_defaults(run=switch_queue, verb=verb)


def show_queues(args: argparse.Namespace) -> int:
    with target.existing(args) as (_, operations, _named):
        queues = operations.statistics.queues()
    dead, capped = sum(queue.dead for queue in queues), any("dead" in q.capped for q in queues)
    if args.json:
        for queue in queues:
            output.say_json(_as_dict(queue))
        view = {"name": "deadletter", "view": True, "dead": dead, "capped": ["dead"] * capped}
        output.say_json(view)
        return 0
    heads = ["QUEUE", "READY", "LATER", "WAITING", "RUNNING", "DEAD", "OLDEST", "PAUSED"]
    rows: list[list[object]] = [
        [
            f"q:{queue.name}",
            *(output.at_least(getattr(queue, name), name in queue.capped) for name in FIGURES),
            "" if queue.oldest is None else output.span(queue.oldest.total_seconds()),
            _paused(queue),
        ]
        for queue in queues
    ]
    total = output.at_least(dead, capped)
    rows.append(["q:deadletter", "", "", "", "", total, "", "(view: the dead jobs of all queues)"])
    output.table(heads, rows, right=range(1, 7), soft=[0], tint={5: _tint_dead, 7: _tint_paused})
    return 0


def _as_dict(queue: Queue) -> dict[str, Any]:
    oldest = None if queue.oldest is None else round(queue.oldest.total_seconds() * 1000)
    values = {name: getattr(queue, name) for name in queue._fields} | {"oldest": oldest}
    return {f"{name}_ms" if name == "oldest" else name: values[name] for name in values} | {
        "view": False
    }


def _paused(queue: Queue) -> str:
    if not queue.paused:
        return ""
    since = output.relative(queue.paused_at, output.utc_now())
    reason = f": {queue.pause_reason}" if queue.pause_reason else ""
    return f"{since} by {queue.paused_by}{reason}"


def _tint_dead(text: str) -> str | None:
    return None if text in ("", "0") else "red"


def _tint_paused(text: str) -> str | None:
    return "dim" if text.startswith("(") else "yellow"


# ------------------------------------------------------------------------------- the switch


def switch_queue(args: argparse.Namespace) -> int:
    verb: Verb = args.verb
    act = verb.act(**{name: getattr(args, name) for name in verb.act._fields})
    with target.existing(args, acting=True) as (_, operations, _named):
        switched = operations.acts.switch(act, args.name)
        known = operations.statistics.queue_names()
    queue, paused = f"q:{switched.name}", verb.becomes == "paused"
    if switched.before == "absent" and not switched.changed:
        there = ", ".join(f"q:{name}" for name in known)
        raise ConfigError(f"there is no queue {queue}; there are: {there}")
    if args.json:
        output.say_json({"name": switched.name, "paused": paused})
    elif switched.changed:
        output.say(f"{verb.past} {queue}" + (CONSEQUENCE if paused else ""))
    else:
        output.say(f"{queue} was not paused")
    if switched.before == "absent":
        output.complain(f"note: no job has been in {queue} so far; is the name right?")
    return 0
