"""`tenure events`: the audit trail, of one job or of everything, also while it grows."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tenure.cli import target
from tenure.terminal import output

if TYPE_CHECKING:
    from tenure import Event
    from tenure.store import EventPage

HELD_SECONDS = 5.0  # of --follow: a transaction that holds the trail up for longer is worth a line
HELD = "events.held"  # a line of its own among the JSON objects
NARROW = 100  # columns of a terminal, from where on events are shown with their day
KIND_COLUMNS = len("job.deadlettered")


def add_commands(commands: target.Commands) -> None:
    parser = target.add_command(commands, "events", "show the audit trail, oldest first")
    parser.add_argument(
        "id", metavar="ID", nargs="?", type=target.job_id, help="of this job (default: of all)"
    )
    parser.add_argument("--follow", action="store_true", help="go on with new ones as they come")
    parser.add_argument(
        "--limit",
        type=target.positive,
        default=100,
        metavar="N",
        help="start with the newest N (default 100)",
    )
    parser.set_defaults(run=show_events)


def show_events(args: argparse.Namespace) -> int:
    with target.existing(args) as (app, operations, _):
        jobs = operations.jobs
        args.id = None if args.id is None else jobs.require(jobs.whole_id(args.id)).id
        hints = app.open_wakeup() if args.follow else None  # before the first look: misses nothing
        held = Held(json=args.json, patience=HELD_SECONDS if args.follow else 0.0)
        try:
            page = jobs.events_before(job_id=args.id, limit=args.limit)
            if page.events or page.held_by is None:  # held up at 0 is not "no events"
                _print(page.events[::-1], args, heads=True)
            held.see(page)
            last = page.events[0].seq if page.events else 0
            while hints is not None:
                while (page := jobs.events_after(last, args.id)).events:
                    _print(page.events, args, heads=False)
                    last = page.events[-1].seq
                held.see(page)
                hints.wait(1.0)
        finally:
            if hints is not None:
                hints.close()
    return 0


class Held:
    """Says once which transaction keeps the trail from going on, when that lasts: later events are
    not shown before those that may still come."""

    def __init__(self, *, json: bool, patience: float) -> None:
        self._json = json
        self._patience = patience
        self._stands: tuple[int, float] | None = None  # at which number, since when
        self._told: str | None = None

    def see(self, page: EventPage) -> None:
        now = time.monotonic()
        if page.held_by is None:
            self._stands = self._told = None
            return
        if self._stands is None or self._stands[0] != page.final:
            self._stands = (page.final, now)
        if page.held_by == self._told or now - self._stands[1] < self._patience:
            return
        self._told = page.held_by
        if self._json:
            output.say_json({"kind": HELD, "final": page.final, "held_by": page.held_by})
        output.complain(
            f"events after number {page.final:,} are shown once this transaction, which may still "
            f"add to them, has ended: {output.plain(page.held_by)}"
        )


def _print(events: Sequence[Event], args: argparse.Namespace, *, heads: bool) -> None:
    if args.json:
        for event in events:
            output.say_json(event)
    elif events:
        print_events(events, of_one_job=args.id is not None, heads=heads)
        output.flush()
    elif not args.follow:
        output.say("no events")


def print_events(events: Sequence[Event], *, of_one_job: bool = False, heads: bool = True) -> None:
    names = ["AT", "EVENT", "TRY", "BY", "DETAILS"]
    narrow = (output.terminal_columns() or NARROW) < NARROW
    rows: list[list[object]] = []
    for event in events:
        by = event.worker or f"{event.actor.type}:{event.actor.id}"
        at = event.at.strftime(f"{'' if narrow else '%Y-%m-%d '}%H:%M:%S.%f")[:-3] + "Z"
        kind = f"{event.kind:<{KIND_COLUMNS}}"  # so that pages of `--follow` stay aligned
        row: list[object] = [at, kind, event.attempt or "", by, output.fields(event.data)]
        if not of_one_job:
            row[2:2] = [event.job_id, event.type]
        rows.append(row)
    if not of_one_job:
        names[2:2] = ["JOB", "TYPE"]
    soft = [place for place, name in enumerate(names) if name in ("TYPE", "BY")]
    output.table(names, rows, heads=heads, ids=[] if of_one_job else [2], soft=soft)
