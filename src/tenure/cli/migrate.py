"""`tenure migrate`: create or upgrade the tables, or print the SQL for a person who has the right;
lay down what holds for every program on them."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from tenure.cli import target
from tenure.cli.enqueue import delay
from tenure.errors import ConfigError
from tenure.terminal import output

if TYPE_CHECKING:
    from tenure.operations.schema import Schema

SETTABLE = ("keep_events", "keep_history", "audit")
MOST_KEPT = 100 * 365.25 * 86_400


def add_commands(commands: target.Commands) -> None:
    parser = target.add_command(commands, "migrate", "create or upgrade the tables")
    parser.add_argument(
        "--sql", action="store_true", help="print the SQL of what is pending, run nothing"
    )
    parser.add_argument(
        "--reverse",
        action="store_true",
        help="with --sql, on PostgreSQL: print what takes everything back instead",
    )
    parser.add_argument(
        "--grant",
        metavar="ROLE",
        help="on PostgreSQL: also grant this role what a worker needs (with --sql: print it)",
    )
    parser.add_argument(
        "--set",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        type=_laid_down,
        help="lay down for every program: keep_events=30d, keep_history=7d (kept at least so "
        "long), audit=all; NAME=none takes it back",
    )
    parser.set_defaults(run=migrate)


def _laid_down(text: str) -> tuple[str, float | str | None]:
    """`keep_events=30d` as a name and seconds; None to take it back."""
    name, equals, value = text.partition("=")
    if not equals or name not in SETTABLE:
        raise argparse.ArgumentTypeError(f"give one of {', '.join(SETTABLE)} as NAME=VALUE")
    if value in ("", "none"):
        return name, None
    if name == "audit":
        if value not in ("all", "errors"):
            raise argparse.ArgumentTypeError("audit is all, errors or none")
        return name, value
    seconds = delay(value)
    if seconds > MOST_KEPT:
        raise argparse.ArgumentTypeError(f"at most {MOST_KEPT / 86_400:.0f}d")
    return name, seconds


def migrate(args: argparse.Namespace) -> int:
    args.set = dict(args.set)
    if args.set and args.sql:
        raise ConfigError("--set writes rows, not tables: give it without --sql")
    with target.anywhere(args, acting=True) as (_, operations, _named):
        schema = operations.schema
        _check_usage(args, schema)
        if args.sql:
            _print_script(schema, args)
            return 0
        applied = schema.migrate(args.grant)
        schema.lay_down(args.set)
    _say(applied, args)
    return 0


def _check_usage(args: argparse.Namespace, schema: Schema) -> None:
    if not schema.on_a_server:
        if args.grant is not None:
            raise ConfigError(
                "--grant is for PostgreSQL: who may use an SQLite file, its mode says"
            )
        if args.reverse:
            raise ConfigError(
                "--reverse is for PostgreSQL; an SQLite file is moved away or deleted"
            )
    if args.reverse and not args.sql:
        raise ConfigError(
            "--reverse drops the tables with all jobs in them, so it only prints: "
            "tenure migrate --sql --reverse"
        )
    if args.reverse and args.grant is not None:
        raise ConfigError("give --reverse or --grant, not both")


def _print_script(schema: Schema, args: argparse.Namespace) -> None:
    script = schema.script(reverse=args.reverse, grant=args.grant)
    if script.note is not None:
        output.complain(f"note: {script.note}")
    if not args.json:
        output.say(script.sql.rstrip())
    elif schema.on_a_server:
        output.say_json({"version": script.version, "schema": script.schema, "sql": script.sql})
    else:
        for migration in script.migrations:
            output.say_json(migration)


def _say(applied: list[str], args: argparse.Namespace) -> None:
    if args.json:
        granted = {"granted": args.grant} if args.grant else {}
        laid_down = {
            name: int(value * 1000) if isinstance(value, float) else value
            for name, value in args.set.items()
        }
        output.say_json({"applied": applied} | granted | ({"set": laid_down} if laid_down else {}))
        return
    output.say("\n".join(f"applied {name}" for name in applied) or "up to date")
    if args.grant:
        output.say(f"granted {args.grant} what a worker needs")
    for name, value in args.set.items():
        if value is None:
            output.say(f"{name} is each program's own again")
        elif name == "audit":
            output.say(f"audit is {value}: no program writes less to the trail")
        else:
            span = output.span(int(value * 1000) / 1000)
            output.say(f"{name} is {span}: kept so long, whatever a program's settings say")
