"""`tenure events`: the audit trail, of one job or of everything, also while it grows."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

from tenure.cli import output, target
from tenure.cli.jobs import event_dict, print_events
from tenure.errors import JobNotFound

if TYPE_CHECKING:
    from tenure.job import Event
    from tenure.store import EventPage, Store

PAGE = 500
HELD_SECONDS = 5.0  # of --follow: who writes for longer is worth a line
HELD = "events.held"  # a line of its own among the JSON objects


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
    with target.existing(args) as (app, _):
        store = app.store
        args.id = None if args.id is None else target.whole_id(app, args.id)
        if args.id is not None and store.get(args.id) is None:
            raise JobNotFound(f"there is no job {args.id}")
        hints = app.open_wakeup() if args.follow else None  # before the first look: misses nothing
        held = Held(json=args.json, patience=HELD_SECONDS if args.follow else 0.0)
        try:
            page = newest(store, args.id, args.limit)
            if page.events or page.held_by is None:  # held up at 0 is not "no events"
                _print(page.events, args, heads=True)
            held.see(page)
            last = page.events[-1].seq if page.events else 0
            while hints is not None:
                while (page := store.events(job_id=args.id, after=last, limit=PAGE)).events:
                    _print(page.events, args, heads=False)
                    last = page.events[-1].seq
                held.see(page)
                hints.wait(1.0)
        finally:
            if hints is not None:
                hints.close()
    return 0


class Held:
    """Says once who keeps the trail from going on, when that lasts: later events are not shown
    before those that may still come."""

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


def _print(events: list[Event], args: argparse.Namespace, *, heads: bool) -> None:
    if args.json:
        for event in events:
            output.say_json(event_dict(event))
    elif events:
        print_events(events, of_one_job=args.id is not None, heads=heads)
        output.flush()
    elif not args.follow:
        output.say("no events")


def newest(store: Store, job_id: str | None, limit: int) -> EventPage:
    """The last `limit` events, oldest of them first. Numbers have gaps (what was rolled back has
    drawn some): where too few are found, further back."""
    back = limit
    while True:
        page = store.events(job_id=job_id, limit=1)
        after = max(0, page.final - back) if job_id is None else 0
        begin = after
        found: list[Event] = []
        while (page := store.events(job_id=job_id, after=after, limit=PAGE)).events:
            found = (found + page.events)[-limit:]
            after = page.events[-1].seq
        if len(found) >= limit or begin == 0:
            return page._replace(events=found)
        back *= 8
