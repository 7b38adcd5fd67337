"""The `tenure` command: argparse and formatting, on public names and `tenure.operations`.

One file per group of commands, loaded when the command line names one of its commands, so that
starting is quick. Exit codes: 0 all well, 1 found a problem, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from tenure.cli.target import add_target_options
from tenure.errors import ConfigError, PayloadError, TaskError, TenureError
from tenure.terminal.output import complain

# Each with the commands that it adds, in the order of `tenure --help`. A command that is missing
# here works, but all groups are loaded for it, which takes 20 ms.
GROUPS = {
    "tenure.cli.worker": ("worker",),
    "tenure.cli.enqueue": ("enqueue",),
    "tenure.cli.jobs": ("jobs",),
    "tenure.cli.job": ("job",),
    "tenure.cli.operate": ("cancel", "replay", "discard"),
    "tenure.cli.queues": ("queues",),
    "tenure.cli.stats": ("stats",),
    "tenure.cli.events": ("events",),
    "tenure.cli.doctor": ("doctor",),
    "tenure.cli.migrate": ("migrate",),
    "tenure.demo.command": ("demo",),
    "tenure.bench.command": ("bench",),
}
WRONG_USAGE = (ConfigError, TaskError, PayloadError)
INTERRUPTED = 130


def build_parser(argv: Sequence[str] | None = None) -> argparse.ArgumentParser:
    """Every command; for a given command line, only those of the group that it names."""
    from tenure import __version__

    parser = argparse.ArgumentParser(
        "tenure",
        description="Durable background jobs: run workers, look at jobs, operate queues.",
        epilog="`tenure COMMAND --help` describes a command. "
        "Exit codes: 0 all well, 1 found a problem, 2 wrong usage.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"tenure {__version__}")
    add_target_options(parser, root=True)
    commands = parser.add_subparsers(
        title="commands", dest="command", metavar="COMMAND", required=True
    )
    for module in _meant(argv or ()):
        importlib.import_module(module).add_commands(commands)
    return parser


def _meant(words: Sequence[str]) -> list[str]:
    """The group whose command this is; all groups where there is no such command, or no command."""
    command = _command(words)
    return [group for group, names in GROUPS.items() if command in names] or [*GROUPS]


def _command(words: Sequence[str]) -> str | None:
    """The first word that is neither an option nor the value of one. `--help` before it is about
    all commands."""
    rest = iter(words)
    for word in rest:
        if word in ("-h", "--help"):
            return None
        if word in ("-A", "--app", "--url"):
            next(rest, None)
        elif not word.startswith("-"):
            return word
    return None


def main(argv: list[str] | None = None) -> int:
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal without UTF-8 gets "?" instead of an error
            stream.reconfigure(errors="replace")
    try:
        words = sys.argv[1:] if argv is None else argv
        args = build_parser(words).parse_args(words)
        code = int(args.run(args))
        sys.stdout.flush()  # here, where a closed pipe is expected, not at exit
    except WRONG_USAGE as error:
        complain(str(error))
        return 2
    except TenureError as error:
        complain(str(error))
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # `tenure jobs | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code
