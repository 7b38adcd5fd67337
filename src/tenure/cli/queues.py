"""`tenure queues`: what lies in each queue, and the switch that pauses one."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from tenure.cli import target
from tenure.errors import ConfigError
from tenure.terminal import output

if TYPE_CHECKING:
    from tenure.operations.queues import Queue

FIGURES = ("ready", "later", "waiting", "running", "dead")


def add_commands(commands: target.Commands) -> None:
    parser = target.add_command(commands, "queues", "show the queues; pause or resume one")
    parser.set_defaults(run=show_queues)
    switches = parser.add_subparsers(title="switches", dest="switch", metavar="pause | resume")
    pause = target.add_command(switches, "pause", "claim nothing more of a queue")
    pause.add_argument("name", metavar="NAME", help="the queue, with or without q:")
    pause.add_argument("--reason", default="", help="shown to whoever asks why nothing runs")
    pause.set_defaults(run=pause_queue)
    resume = target.add_command(switches, "resume", "let a paused queue go on")
    resume.add_argument("name", metavar="NAME", help="the queue, with or without q:")
    resume.set_defaults(run=resume_queue)


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


def pause_queue(args: argparse.Namespace) -> int:
    from tenure.operations.acts import Pause

    with target.existing(args, acting=True) as (_, operations, _named):
        switched = operations.acts.switch(Pause(args.reason), args.name)
    if args.json:
        output.say_json({"name": switched.name, "paused": True})
    else:
        output.say(f"paused q:{switched.name}: nothing more is claimed, what runs goes on")
    if switched.before == "absent":
        output.complain(f"note: no job has been in q:{switched.name} so far; is the name right?")
    return 0


def resume_queue(args: argparse.Namespace) -> int:
    from tenure.operations.acts import Resume

    with target.existing(args, acting=True) as (_, operations, _named):
        switched = operations.acts.switch(Resume(), args.name)
        known = operations.statistics.queue_names()
    if switched.before == "absent":
        raise ConfigError(
            f"there is no queue q:{switched.name}; there are: "
            f"{', '.join(f'q:{name}' for name in known)}"
        )
    if args.json:
        output.say_json({"name": switched.name, "paused": False})
    elif switched.changed:
        output.say(f"resumed q:{switched.name}")
    else:
        output.say(f"q:{switched.name} was not paused")
    return 0
