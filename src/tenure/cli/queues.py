"""`tenure queues`: what lies in each queue, and the switch that pauses one."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from tenure.cli import output, target
from tenure.errors import ConfigError

if TYPE_CHECKING:
    from tenure.store import QueueInfo


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
    with target.existing(args) as (app, _):
        queues = app.queues()
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
            "" if queue.oldest_ms is None else output.span(queue.oldest_ms / 1000),
            _paused(queue),
        ]
        for queue in queues
    ]
    total = output.at_least(dead, capped)
    rows.append(["q:deadletter", "", "", "", "", total, "", "(view: the dead jobs of all queues)"])
    output.table(heads, rows, right=range(1, 7), soft=[0], tint={5: _tint_dead, 7: _tint_paused})
    return 0


def _as_dict(queue: QueueInfo) -> dict[str, Any]:
    from tenure.job import moment

    return queue._asdict() | {"paused_at": moment(queue.paused_at), "view": False}


def _paused(queue: QueueInfo) -> str:
    from tenure.job import moment

    if queue.paused_at is None:
        return ""
    since = output.relative(moment(queue.paused_at), output.utc_now())
    reason = f": {queue.pause_reason}" if queue.pause_reason else ""
    return f"{since} by {queue.paused_by}{reason}"


def _tint_dead(text: str) -> str | None:
    return None if text in ("", "0") else "red"


def _tint_paused(text: str) -> str | None:
    return "dim" if text.startswith("(") else "yellow"


# ------------------------------------------------------------------------------- the switch


def pause_queue(args: argparse.Namespace) -> int:
    from tenure.policy import queue_name

    name = queue_name(args.name)
    with target.existing(args) as (app, _):
        new = name not in app.store.queue_names()
        app.pause(name, reason=args.reason, actor=target.operator())
    if args.json:
        output.say_json({"name": name, "paused": True})
    else:
        output.say(f"paused q:{name}: nothing more is claimed, what runs goes on")
    if new:
        output.complain(f"note: no job has been in q:{name} so far; is the name right?")
    return 0


def resume_queue(args: argparse.Namespace) -> int:
    from tenure.policy import queue_name

    name = queue_name(args.name)
    with target.existing(args) as (app, _):
        known = app.store.queue_names()
        if name not in known:
            raise ConfigError(
                f"there is no queue q:{name}; there are: {', '.join(f'q:{q}' for q in known)}"
            )
        if known[name]:
            app.resume(name, actor=target.operator())
    if args.json:
        output.say_json({"name": name, "paused": False})
    else:
        output.say(f"resumed q:{name}" if known[name] else f"q:{name} was not paused")
    return 0
