"""`tenure cancel`, `replay`, `discard`: what an operator does to jobs, by id or by filter.

Every change is one line of the audit trail, under the name of this shell's user.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from tenure import policy
from tenure.cli import dead, output, target
from tenure.cli.dead import Fingerprint
from tenure.cli.jobs import add_filters, add_group, find, gauge, narrowing
from tenure.errors import ConfigError, PayloadError, TaskError

if TYPE_CHECKING:
    import threading

    from tenure.app import App

BATCH = 500
PAGE = 5000
TICK_SECONDS = 0.2  # with --rate, a batch is what may be done in this time
ASK_ABOVE = 100
IDS_SHOWN = 10
FILTERS = ("group", "status", "type", "queue", "org")
PERIODS = {"s": 1.0, "m": 60.0, "h": 3600.0}
CHANGED = ("done", "requested")


class Verb(NamedTuple):
    name: str
    past: str
    statuses: tuple[str, ...]  # of the jobs it works on
    whom: str
    becomes: str

    @property
    def of_dead(self) -> bool:
        return self.statuses == ("failed", "dead_letter")


VERBS = (
    Verb("cancel", "cancelled", ("queued", "in_progress"), "queued and running", "cancelled"),
    Verb("replay", "replayed", ("failed", "dead_letter"), "dead", "queued"),
    Verb("discard", "discarded", ("failed", "dead_letter"), "dead", "cancelled"),
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
        parser.add_argument("ids", metavar="ID", nargs="*", type=target.job_id, help=target.ID_HELP)
        add_filters(parser)
        if verb.of_dead:
            add_group(parser)
        parser.add_argument(
            "--dry-run", action="store_true", help="only say which jobs it would be"
        )
        parser.add_argument(
            "--rate", type=_rate, metavar="N/s", help="at most so many: 50/s, 10/m, 500/h"
        )
        parser.add_argument(
            "-y", "--yes", action="store_true", help=f"do not ask about more than {ASK_ABOVE} jobs"
        )
        if verb.name == "replay":
            parser.add_argument(
                "--payload", metavar="JSON", help="new arguments, for one ID; needs -A"
            )
            parser.add_argument(
                "--edit", action="store_true", help="new arguments from $EDITOR, for one ID"
            )
        else:
            parser.add_argument("--reason", default="", help="kept in the audit trail")
        parser.set_defaults(run=operate, verb=verb)


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
    with target.existing(args) as (app, named):
        args.ids = [target.whole_id(app, id) for id in args.ids]
        if _edited(args):
            return _replay_edited(app, named, args)
        unfit, chosen = _given(app, args, verb) if args.ids else ({}, _matching(app, args, verb))
        if args.dry_run:
            _preview(chosen, args, verb)
            for id, status in unfit.items():
                output.complain(_refusal(id, status, verb))
            return 1 if unfit else 0
        if not _agreed(chosen, args, verb):
            output.complain("nothing was changed")
            return 1
        if args.json:
            _say_verdicts(unfit, verb, fit=False)
        verdicts = _apply(app, list(chosen), args, verb)
    _report(verdicts, unfit, args, verb)
    if left := len(chosen) - len(verdicts):
        output.complain(f"stopped: {left:,} of {len(chosen):,} jobs were left as they were")
        raise KeyboardInterrupt  # which is what it was, and sets the exit code
    return 1 if unfit else 0


def _edited(args: argparse.Namespace) -> bool:
    return getattr(args, "payload", None) is not None or getattr(args, "edit", False)


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
    if _edited(args):
        option = "--edit" if args.edit else "--payload"
        if len(args.ids) != 1 or args.dry_run:
            raise ConfigError(f"{option} is for one ID, and without --dry-run")
        if args.edit and args.payload is not None:
            raise ConfigError("give --edit or --payload, not both")


# ------------------------------------------------------------------------------- which jobs


def _given(
    app: App, args: argparse.Namespace, verb: Verb
) -> tuple[dict[str, str], dict[str, Fingerprint]]:
    """Of the ids given, those it cannot be done to (id -> `absent` or the status), and the rest."""
    unfit, chosen = {}, {}
    for id in args.ids:
        job = app.store.get(id, org=args.org)
        if job is None or job.status not in verb.statuses:
            unfit[id] = "absent" if job is None else job.status
        else:
            chosen[id] = Fingerprint.of(job)
    return unfit, chosen


def _matching(app: App, args: argparse.Namespace, verb: Verb) -> dict[str, Fingerprint]:
    if verb.of_dead and args.queue in ("deadletter", "q:deadletter"):
        args.queue = None  # the view over all queues; for `cancel` it is no queue at all
    statuses = [args.status] if args.status else verb.statuses
    found = find(app, narrowing(args), statuses, getattr(args, "group", None), PAGE)
    return {job.id: Fingerprint.of(job) for job in found}


# ------------------------------------------------------------------------------- looking first


def _preview(chosen: dict[str, Fingerprint], args: argparse.Namespace, verb: Verb) -> None:
    ids = list(chosen)
    if args.json:
        seen: dict[str, Any] = {"dry_run": True, "count": len(ids), "ids": ids[:IDS_SHOWN]}
        if verb.of_dead:
            groups = dead.counted(chosen.values())
            seen["groups"] = [mark.as_dict(count) for mark, count in groups.items()]
        output.say_json(seen)
        return
    takes = f", {_spread(len(ids), args.rate)}" if args.rate and ids else ""
    output.say(f"would {verb.name} {output.count(len(ids), 'job')}{takes}; nothing was changed")
    for id in ids[:IDS_SHOWN]:
        output.say(f"  {id}")
    if len(ids) > IDS_SHOWN:
        output.say(f"  … and {len(ids) - IDS_SHOWN:,} more")
    if verb.of_dead and ids:
        output.say()
        dead.print_counts(chosen.values())


def _agreed(chosen: dict[str, Fingerprint], args: argparse.Namespace, verb: Verb) -> bool:
    """Many jobs at once are asked about, where there is somebody to ask."""
    if args.yes or len(chosen) <= ASK_ABOVE or not _somebody():
        return True
    if verb.of_dead and not args.json:
        dead.print_counts(chosen.values())
        output.flush()
    takes = f", {_spread(len(chosen), args.rate)}" if args.rate else ""
    return _asked(f"{verb.name.capitalize()} {output.count(len(chosen), 'job')}{takes}? [y/N] ")


def _somebody() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()


def _asked(question: str) -> bool:
    print(question, end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _spread(jobs: int, rate: float) -> str:
    return f"{_speed(rate)}, about {output.span(jobs / rate)}"


def _speed(rate: float) -> str:
    """`50/s`, `10/m`: in the unit that needs no decimals."""
    for period, seconds in PERIODS.items():
        if rate * seconds >= 0.95 or period == "h":
            break
    number = rate * seconds
    return f"{number:,.0f}/{period}" if number >= 9.95 else f"{number:.2g}/{period}"


# ------------------------------------------------------------------------------- doing it


def _apply(app: App, ids: list[str], args: argparse.Namespace, verb: Verb) -> dict[str, str]:
    """Batch by batch, so that workers get their turn at the database in between. Fewer verdicts
    than ids: Ctrl-C came between two batches."""
    from functools import partial

    more: dict[str, Any] = {"actor": target.operator(), "org": args.org}
    if verb.name != "replay":
        more["reason"] = policy.reason(args.reason)
    call = getattr(app.store, verb.name)
    size = BATCH if args.rate is None else min(max(int(args.rate * TICK_SECONDS), 1), BATCH)
    line = output.LiveLine(wanted=args.rate is not None or len(ids) > BATCH)
    verdicts: dict[str, str] = {}
    with _interruptible() as stop:
        pace = Pace(len(ids), args.rate, stop, lambda text: line.show(f"{verb.name} {text}"))
        try:
            for start in range(0, len(ids), size):
                if not pace.wait(start):
                    break
                batch = call(ids[start : start + size], **more)
                verdicts |= batch
                if args.json:
                    line.above(partial(_say_verdicts, batch, verb, fit=True))
        finally:
            line.clear()
    return verdicts


class Pace:
    """Never faster than `rate` jobs a second, not even after a stall; shows how far it is."""

    def __init__(
        self, total: int, rate: float | None, stop: threading.Event, show: Callable[[str], None]
    ) -> None:
        from time import monotonic

        self._total, self._rate, self._stop, self._show = total, rate, stop, show
        self._clock = monotonic
        self._began = self._due = monotonic()
        self._done = 0

    def wait(self, done: int) -> bool:
        """With so many jobs done, wait for the turn of the next; False when asked to stop."""
        if self._rate is not None:
            self._due += (done - self._done) / self._rate
            self._due = max(self._due, self._clock())
        self._done = done
        while not self._stop.is_set():
            now = self._clock()
            self._show(self._text(now))
            if self._rate is None or now >= self._due:
                return True
            self._stop.wait(min(self._due - now, 1.0))
        return False

    def _text(self, now: float) -> str:
        share = f"{gauge(self._done / self._total)} {self._done:,} of {self._total:,}"
        if not self._done:
            return share
        speed = self._done / max(now - self._began, 0.001)
        if self._rate is not None:
            speed = min(speed, self._rate)
        left = output.span(max(round((self._total - self._done) / speed), 1))
        return f"{share} · {_speed(speed)} · {left} left"


@contextmanager
def _interruptible() -> Iterator[threading.Event]:
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
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


# ------------------------------------------------------------------------------- other arguments


def _replay_edited(app: App, named: bool, args: argparse.Namespace) -> int:
    from tenure.cli.enqueue import json_object
    from tenure.errors import IllegalTransition, JobNotFound

    if not named:
        option = "--edit" if args.edit else "--payload"
        raise ConfigError(
            f"{option} needs your app to check the arguments: tenure -A module:app replay …"
        )
    (id,) = args.ids
    job = app.store.get(id, org=args.org)
    if job is None:
        raise JobNotFound(f"there is no job {id}")
    if not job.dead:
        raise IllegalTransition(_refusal(id, job.status, args.verb))

    def replay(text: str) -> None:
        app.replay(id, json_object(text), actor=target.operator())

    if args.payload is not None:
        replay(args.payload)
    elif not _edit(job.payload, replay):
        output.complain(f"the arguments are as before: nothing was done; `tenure replay {id}`?")
        return 1
    verdicts = {id: "done"}
    if args.json:
        _say_verdicts(verdicts, args.verb, fit=True)
    _report(verdicts, {}, args, args.verb)
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
                if not _somebody():
                    raise
                output.complain(str(error))
                if not _asked("Edit again? [y/N] "):
                    return False
            else:
                return True


# ------------------------------------------------------------------------------- saying so


def _say_verdicts(verdicts: dict[str, str], verb: Verb, *, fit: bool) -> None:
    """For programs: what each job is now, and whether that is our doing."""
    for id, verdict in verdicts.items():
        outcome = verb.becomes if verdict == "done" else verdict
        changed = fit and verdict in CHANGED  # or it changed since we looked
        output.say_json({"id": id, "outcome": outcome, "changed": changed})


def _report(
    verdicts: dict[str, str], unfit: dict[str, str], args: argparse.Namespace, verb: Verb
) -> None:
    if args.json:
        return
    asked = sum(verdict == "requested" for verdict in verdicts.values())
    done = sum(verdict == "done" for verdict in verdicts.values())
    if not verdicts and not unfit:
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
