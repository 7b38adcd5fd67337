"""`tenure enqueue`: one job by name, its arguments checked against the task's signature."""

from __future__ import annotations

import argparse
import re
import sys
from typing import TYPE_CHECKING, Any

from tenure.cli import target
from tenure.errors import ConfigError, StoreError
from tenure.terminal import output

if TYPE_CHECKING:
    import datetime

UNKNOWN = (
    "The job may be stored: the same command once more may make a second one. See `tenure jobs`; "
    "with --key a command can be repeated."
)
UNKNOWN_KEYED = "The job may be stored: the same command, with the same --key, makes no second one."
_DELAY = re.compile(r"(\d+(?:\.\d+)?)(s|m|h|d)?")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def add_commands(commands: target.Commands) -> None:
    parser = target.add_command(commands, "enqueue", "store one job of the app's")
    parser.add_argument("task", metavar="TASK", help="the task's name")
    parser.add_argument(
        "arguments",
        metavar="JSON",
        nargs="?",
        default="{}",
        help="its arguments by name as a JSON object; - reads standard input",
    )
    parser.add_argument("--delay", type=delay, help="run it so much later: 90, 90s, 5m, 2h, 1d")
    parser.add_argument("--at", type=_moment, help="run it then: 2030-01-31T09:00:00+01:00")
    parser.add_argument("--priority", type=int, help="1 (first) to 10")
    parser.add_argument("--queue", help="another queue than the task's")
    parser.add_argument("--key", help="idempotency key: a second job with it is not stored")
    parser.add_argument(
        "--unique",
        choices=("pending",),
        help="with --key: hold it only while its job is unfinished",
    )
    parser.add_argument("--org", help="the tenant it belongs to")
    parser.set_defaults(run=enqueue)


def enqueue(args: argparse.Namespace) -> int:
    arguments = json_object(sys.stdin.read() if args.arguments == "-" else args.arguments)
    names = ("delay", "at", "priority", "queue", "key", "unique", "org")
    options = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    with target.named_app(args) as app:
        try:
            receipt = app.enqueue(args.task, arguments, actor=target.operator(), **options)
        except StoreError as error:
            if not error.unknown:
                raise
            again = UNKNOWN if args.key is None else UNKNOWN_KEYED
            raise type(error)(f"{error} {again}") from error
        queue = args.queue or app.tasks[args.task].settings.queue
    if args.json:
        output.say_json(receipt._asdict())
    elif receipt.duplicate:
        output.say(f"duplicate: key {args.key!r} belongs to job {receipt.id} ({receipt.status})")
    else:
        due = ""
        if args.delay is not None:
            due = f", due in {output.span(args.delay)}"
        elif args.at is not None:
            due = f", due at {output.stamp(args.at)}"
        output.say(f"enqueued {receipt.id} ({args.task} on q:{queue.removeprefix('q:')}{due})")
    return 0


def json_object(text: str) -> dict[str, Any]:
    import json

    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(
            f'the arguments are not JSON ({error}); write them like \'{{"to": "a@b.c"}}\''
        ) from None
    if not isinstance(value, dict):
        raise ConfigError(
            f"the arguments must be a JSON object by name, got a {type(value).__name__}; "
            'write them like \'{"to": "a@b.c"}\''
        )
    return value


def delay(text: str) -> float:
    match = _DELAY.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a delay such as 90, 5m, 2h or 1d")
    return float(match[1]) * _SECONDS[match[2] or "s"]


def _moment(text: str) -> datetime.datetime:
    import datetime

    try:
        when = datetime.datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a time such as 2030-01-31T09:00:00+01:00"
        ) from None
    if when.utcoffset() is None:
        raise argparse.ArgumentTypeError(f"{text!r} must say its time zone: add Z or +01:00")
    return when
