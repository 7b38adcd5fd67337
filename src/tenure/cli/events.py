"""`tenure events`: the audit trail, of one job or of everything, also while it grows."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from tenure.cli import output, target
from tenure.cli.jobs import event_dict, print_events
from tenure.errors import JobNotFound

if TYPE_CHECKING:
    from tenure.job import Event
    from tenure.store import Store

PAGE = 500


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
        if args.id is not None and store.get(args.id) is None:
            raise JobNotFound(f"there is no job {args.id}")
        hints = app.open_wakeup() if args.follow else None  # before the first look: misses nothing
        try:
            found = newest(store, args.id, args.limit)
            _print(found, args, heads=True)
            last = found[-1].seq if found else 0
            while hints is not None:
                while found := store.events(job_id=args.id, after=last, limit=PAGE):
                    _print(found, args, heads=False)
                    last = found[-1].seq
                hints.wait(1.0)
        finally:
            if hints is not None:
                hints.close()
    return 0


def _print(events: list[Event], args: argparse.Namespace, *, heads: bool) -> None:
    if args.json:
        for event in events:
            output.say_json(event_dict(event))
    elif events:
        print_events(events, of_one_job=args.id is not None, heads=heads)
        output.flush()
    elif not args.follow:
        output.say("no events")


def newest(store: Store, job_id: str | None, limit: int) -> list[Event]:
    """The last `limit` events, oldest of them first."""
    after = 0 if job_id is not None else max(0, _last_seq(store) - limit)
    found: list[Event] = []
    while page := store.events(job_id=job_id, after=after, limit=PAGE):
        found = (found + page)[-limit:]
        after = page[-1].seq
    return found


def _last_seq(store: Store) -> int:
    """The number of the newest event, by doubling and halving: some 50 one-row reads instead of
    a walk over all of them."""

    def beyond(seq: int) -> bool:
        return bool(store.events(after=seq, limit=1))

    high = 1
    while beyond(high):
        high *= 2
    low = high // 2
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if beyond(middle) else (low, middle)
    return low
