"""`tenure cancel`, `replay`, `discard`: what an operator does to jobs, by id or by filter.

Which jobs, in which batches and how fast is decided by `tenure.operations.acts`. Here are the
options, the question before many jobs are changed, and what is said about it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tenure.cli import target
from tenure.cli.enqueue import json_object
from tenure.cli.jobs import add_filters, add_group, job_filter
from tenure.errors import ConfigError, IllegalTransition, PayloadError, TaskError
from tenure.operations.acts import BATCH, VERBS, Applied, Choice, Verb, Verdict
from tenure.terminal import output
from tenure.terminal.live_line import LiveLine

if TYPE_CHECKING:
    from tenure.operations import Operations
    from tenure.operations.acts import Preview
    from tenure.operations.dead import GroupCount
    from tenure.operations.pace import Progress

ASK_ABOVE = 100
GROUPS_SHOWN = 10
FILTERS = ("group", "status", "type", "queue", "org")
PERIODS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def add_commands(commands: target.Commands) -> None:
    for verb in VERBS.values():
        if verb.of == "jobs":
            _add_command(commands, verb)


def _add_command(commands: target.Commands, verb: Verb) -> None:
    parser = target.add_command(
        commands,
        verb.name,
        verb.help,
        description=f"{verb.help.capitalize()}: by id, or all that match the filters.",
    )
    parser.add_argument("ids", metavar="ID", nargs="*", type=target.job_id, help=target.ID_HELP)
    add_filters(parser)
    if verb.of_dead:
        add_group(parser)
    parser.add_argument("--dry-run", action="store_true", help="only say which jobs it would be")
    parser.add_argument(
        "--rate", type=_rate, metavar="N/s", help="at most so many: 50/s, 10/m, 500/h"
    )
    parser.add_argument(
        "-y", "--yes", action="store_true", help=f"do not ask about more than {ASK_ABOVE} jobs"
    )
    if "payload" in verb.act._fields:
        parser.add_argument("--payload", metavar="JSON", help="new arguments, for one ID; needs -A")
        parser.add_argument(
            "--edit", action="store_true", help="new arguments from $EDITOR, for one ID"
        )
    if "reason" in verb.act._fields:
        parser.add_argument("--reason", default="", help="kept in the audit trail")
    parser.set_defaults(run=operate, verb=verb, payload=None, edit=False)


def _rate(text: str) -> float:
    """An argparse type: jobs a second."""
    number, _, period = text.partition("/")
    if period in PERIODS:
        try:
            rate = float(number) / PERIODS[period]
        except ValueError:
            rate = 0.0
        if 0 < rate < float("inf"):
            return rate
    raise argparse.ArgumentTypeError(f"{text!r} is not a rate such as 50/s, 10/m or 500/h")


def operate(args: argparse.Namespace) -> int:
    verb: Verb = args.verb
    _check_usage(args, verb)
    with target.existing(args, acting=True) as (_, operations, named):
        args.ids = [operations.jobs.whole_id(id) for id in args.ids]
        if args.payload is not None or args.edit:
            return _replay_edited(operations, named, args)
        choice = _chosen(operations, args, verb)
        if args.dry_run:
            _say_preview(choice.preview(args.rate), args)
            _complain(choice)
            return 1 if choice.refused else 0
        if not _agreed(choice, args):
            output.complain("nothing was changed")
            return 1
        if args.json:
            _say_verdicts(Verdict(id, found, False) for id, found in choice.refused.items())
        applied = _apply(operations, choice, args)
    _report(applied, choice, args)
    if applied.left:
        output.complain(
            f"stopped: {applied.left:,} of {len(choice.jobs):,} jobs were left as they were"
        )
        raise KeyboardInterrupt  # which is what it was, and sets the exit code
    return 1 if choice.refused else 0


def _check_usage(args: argparse.Namespace, verb: Verb) -> None:
    filtered = [name for name in FILTERS if getattr(args, name, None) is not None]
    if not args.ids and not filtered:
        group = " --group GROUP," if verb.of_dead else ""
        raise ConfigError(
            f"which jobs? Give ids,{group} or a filter such as --type send_email or "
            f"--status {verb.statuses[-1]}; --dry-run shows what it takes"
        )
    if args.ids and set(filtered) - {"org"}:
        raise ConfigError(f"give ids or --{filtered[0]}, not both")
    if args.status is not None and args.status not in verb.statuses:
        raise ConfigError(
            f"only {verb.whom} jobs can be {verb.past}: --status {' or '.join(verb.statuses)}"
        )
    if args.payload is not None or args.edit:
        option = "--edit" if args.edit else "--payload"
        if len(args.ids) != 1 or args.dry_run:
            raise ConfigError(f"{option} is for one ID, and without --dry-run")
        if args.edit and args.payload is not None:
            raise ConfigError("give --edit or --payload, not both")


def _chosen(operations: Operations, args: argparse.Namespace, verb: Verb) -> Choice:
    given = {name: getattr(args, name) for name in verb.act._fields if name == "reason"}
    act = verb.act(**given)
    if args.ids:
        return operations.acts.choose(act, ids=args.ids)
    return operations.acts.choose(act, where=job_filter(args))


# ------------------------------------------------------------------------------- looking first


def _say_preview(seen: Preview, args: argparse.Namespace) -> None:
    verb: Verb = args.verb
    if args.json:
        said: dict[str, Any] = {"dry_run": True, "count": seen.count, "ids": seen.ids}
        output.say_json(said | ({"groups": seen.groups} if verb.of_dead else {}))
        return
    jobs = output.count(seen.count, "job")
    output.say(f"would {verb.name} {jobs}{_takes(seen, args)}; nothing was changed")
    for id in seen.ids:
        output.say(f"  {id}")
    if seen.count > len(seen.ids):
        output.say(f"  … and {seen.count - len(seen.ids):,} more")
    if seen.groups:
        output.say()
        _print_counts(seen.groups)


def _takes(seen: Preview, args: argparse.Namespace) -> str:
    """`, 50/s, about 2.8 s`, where it goes at a pace."""
    if not seen.seconds:
        return ""
    return f", {_speed(args.rate)}, about {output.span(seen.seconds)}"


def _agreed(choice: Choice, args: argparse.Namespace) -> bool:
    """On a terminal, its user is asked before many jobs are changed at once."""
    if args.yes or len(choice.jobs) <= ASK_ABOVE or not _on_a_terminal():
        return True
    seen = choice.preview(args.rate)
    if seen.groups and not args.json:
        _print_counts(seen.groups)
        output.flush()
    jobs = output.count(seen.count, "job")
    return _asked(f"{seen.verb.capitalize()} {jobs}{_takes(seen, args)}? [y/N] ")


def _on_a_terminal() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()


def _asked(question: str) -> bool:
    print(question, end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _speed(rate: float) -> str:
    """`50/s`, `10/m`: in the unit that needs no decimals."""
    for period, seconds in PERIODS.items():
        if rate * seconds >= 0.95 or period == "h":
            break
    number = rate * seconds
    return f"{number:,.0f}/{period}" if number >= 9.95 else f"{number:.2g}/{period}"


def _print_counts(groups: Sequence[GroupCount]) -> None:
    """Which groups some jobs belong to, and how many of each."""
    rows = [
        (each.group, each.count, each.type, each.status, each.code, each.fingerprint.short_place)
        for each in groups[:GROUPS_SHOWN]
    ]
    heads = ("GROUP", "JOBS", "TYPE", "STATUS", "CODE", "PLACE")
    output.table(heads, rows, right=[1], tint={3: output.STATUS_COLOURS.get}, soft=(2, 4))
    if len(groups) > GROUPS_SHOWN:
        output.say(f"… and {len(groups) - GROUPS_SHOWN:,} more groups")


# ------------------------------------------------------------------------------- doing it


def _apply(operations: Operations, choice: Choice, args: argparse.Namespace) -> Applied:
    line = LiveLine(wanted=args.rate is not None or len(choice.jobs) > BATCH)

    def tell(progress: Progress, verdicts: Sequence[Verdict]) -> None:
        line.show(f"{choice.verb.name} {_progress(progress)}")
        if args.json and verdicts:
            line.above(lambda: _say_verdicts(verdicts))

    with _interruptible() as stop:
        try:
            return operations.acts.apply(choice, rate=args.rate, stop=stop, tell=tell)
        finally:
            line.clear()


def _progress(progress: Progress) -> str:
    share = (
        f"{output.gauge(progress.done / progress.total)} {progress.done:,} of {progress.total:,}"
    )
    if progress.per_second is None or progress.seconds_left is None:
        return share
    left = output.span(max(round(progress.seconds_left), 1))
    return f"{share} · {_speed(progress.per_second)} · {left} left"


@contextmanager
def _interruptible() -> Iterator[Callable[[float], bool]]:
    """The first Ctrl-C ends the work after the batch at hand, a second one at once."""
    import signal
    import threading

    stop = threading.Event()
    before = signal.getsignal(signal.SIGINT)

    def ask(*_: object) -> None:
        stop.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, ask)
    try:
        yield stop.wait
    finally:
        signal.signal(signal.SIGINT, before)


# ------------------------------------------------------------------------------- other arguments


def _replay_edited(operations: Operations, named: bool, args: argparse.Namespace) -> int:
    if not named:
        option = "--edit" if args.edit else "--payload"
        raise ConfigError(
            f"{option} needs your app to check the arguments: tenure -A module:app replay …"
        )
    (id,) = args.ids
    job = operations.jobs.require(id)
    if not job.dead:
        raise IllegalTransition(args.verb.refusal(id, job.status))

    def replay(text: str) -> None:
        operations.acts.replay(id, json_object(text))

    if args.payload is not None:
        replay(args.payload)
    elif not _edit(job.payload, replay):
        output.complain(f"the arguments are as before: nothing was done; `tenure replay {id}`?")
        return 1
    if args.json:
        _say_verdicts([Verdict(id, args.verb.becomes, True)])
    else:
        output.say(f"{args.verb.past} 1 job")
    return 0


def _edit(payload: dict[str, Any], use: Callable[[str], None]) -> bool:
    """Have the user's editor change the arguments until `use` takes them; False if unchanged."""
    import json
    import os
    import shlex
    import subprocess
    from pathlib import Path
    from tempfile import TemporaryDirectory

    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR")
    if not editor:
        raise ConfigError("--edit needs an editor: set EDITOR, or use --payload JSON")
    with TemporaryDirectory(prefix="tenure-") as folder:  # for this user's eyes only
        file = Path(folder, "arguments.json")
        file.write_text(json.dumps(payload, indent=2, ensure_ascii=False) + "\n", "utf-8")
        while True:
            before = file.read_text("utf-8")
            command = [*shlex.split(editor), str(file)]
            if subprocess.run(command, check=False).returncode:  # noqa: S603  the user's own
                raise ConfigError(f"{editor} failed; nothing was done")
            text = file.read_text("utf-8")
            if text == before:
                return False
            try:
                use(text)
            except (ConfigError, TaskError, PayloadError) as error:
                if not _on_a_terminal():
                    raise
                output.complain(str(error))
                if not _asked("Edit again? [y/N] "):
                    return False
            else:
                return True


# ------------------------------------------------------------------------------- saying so


def _say_verdicts(verdicts: Iterable[Verdict]) -> None:
    """For programs: what each job is now, and whether the command has made it so."""
    for verdict in verdicts:
        output.say_json(verdict)


def _report(applied: Applied, choice: Choice, args: argparse.Namespace) -> None:
    if args.json:
        return
    done, asked = applied.done, applied.requested
    if not applied.verdicts and not choice.refused:
        output.say("no job matches; nothing was changed")
    elif done or not (asked or choice.refused):
        output.say(f"{choice.verb.past} {output.count(done, 'job')}")
    if asked:
        output.say(
            f"asked {output.count(asked, 'running job')} to stop: "
            "cancelled as soon as the handler looks"
        )
    _complain(choice)


def _complain(choice: Choice) -> None:
    for id, status in choice.refused.items():
        output.complain(choice.verb.refusal(id, status))
