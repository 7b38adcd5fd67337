"""A page of a listing, newest first, out of walks over several tables.

What a listing is narrowed by has no index of its own, mostly: rows that do not fit are walked over.
So a walk looks at a bounded number of rows and says where it stopped: there the next page goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from tenure.job import DEAD, FINISHED
from tenure.store import Filter

WALK = 20_000  # rows looked at for a page, in all its walks: some 10 ms
NARROWS = frozenset({"status", "type", "queue", "org", "place"})
CAP = 10_000  # what is counted for people, and no further

Row = tuple[Any, ...]


class Walked(NamedTuple):
    rows: Sequence[Row]  # that fit; the id is first
    end: str | None  # the last id that was looked at; None: there are no more


def walks(where: Filter) -> list[str]:
    """The names of the walks that find such jobs: hot ones first, jobs move to history."""
    if where.status in DEAD:
        return ["walk_dead"]
    if where.status == "in_progress":
        return ["walk_held"]
    if where.status == "queued":
        return ["walk_hot"]
    if where.status == "cancelled":
        return ["walk_cancelled"]
    if where.place is not None:
        return ["walk_all_dead"]
    return ["walk_finished"] if where.status in FINISHED else ["walk_hot", "walk_finished"]


def narrowing(walk: str, where: Filter) -> list[str]:
    """What the rows of a walk are still to be narrowed by, by name."""
    told = walk in ("walk_dead", "walk_held", "walk_cancelled")
    names = ("type", "queue", "org", "place") if told else Filter._fields
    return [name for name in names if name in NARROWS and getattr(where, name) is not None]


def merged(parts: Sequence[Walked], limit: int) -> tuple[list[Row], str | None]:
    """The newest `limit` rows of all walks, down to where the first of them stopped, and from
    where on to continue. A job may move to history between two walks: the later row counts."""
    cut = max((part.end for part in parts if part.end is not None), default=None)
    newest = {row[0]: row for part in parts for row in part.rows}
    ids = [id for id in sorted(newest, reverse=True) if cut is None or id >= cut]
    page = [newest[id] for id in ids[:limit]]
    return page, ids[limit - 1] if len(ids) >= limit else cut


def capped(counts: dict[str, int]) -> tuple[dict[str, int], tuple[str, ...]]:
    """Figures that were counted up to one more than the cap, and which of them reached it."""
    over = tuple(name for name, count in counts.items() if count > CAP)
    return {name: min(count, CAP) for name, count in counts.items()}, over
