"""The `tenure` command. One file per group of commands; what a command needs it imports itself,
so that starting is quick.

Exit codes: 0 all well, 1 found a problem, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from tenure.cli import doctor, enqueue, events, jobs, migrate, operate, queues, stats, worker
from tenure.cli.output import complain
from tenure.cli.target import add_target_options
from tenure.errors import ConfigError, PayloadError, TaskError, TenureError

GROUPS = (worker, enqueue, jobs, operate, queues, stats, events, doctor, migrate)
LARGE = frozenset({"demo", "bench"})  # together they cost 30 ms to import
WRONG_USAGE = (ConfigError, TaskError, PayloadError)
INTERRUPTED = 130


def build_parser(argv: Sequence[str] | None = None) -> argparse.ArgumentParser:
    """Every command; for a given command line, the large ones only where it may mean them."""
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
    for group in GROUPS:
        group.add_commands(commands)
    words = frozenset(argv or ())
    if words & LARGE or not words & frozenset(commands.choices):
        from tenure.bench import command as bench
        from tenure.demo import command as demo

        demo.add_commands(commands)
        bench.add_commands(commands)
    return parser


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
    except BrokenPipeError:  # `tenure jobs | head`: whoever read us has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code
