"""`tenure jobs --dead`: dead jobs by what they died of, each group with a handle to act on it.

A group is a type, a status, an error code and the place that raised it. Its handle is a digest of
these, so it stays the same over calls, filters and databases.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from tenure.cli import output
from tenure.errors import ConfigError, JobNotFound
from tenure.job import moment

if TYPE_CHECKING:
    import datetime

    from tenure.app import App
    from tenure.job import Job
    from tenure.store import DeadGroup, Filter

HANDLE_DIGITS = 8
LEAST_DIGITS = 4
PAGE = 100
GROUPS_SHOWN = 10
INDENT = "    "
ERROR_COLUMNS = 120
EVERY = 1_000_000  # groups are as many as there are lines of code that raise: all of them, then
HEADS = ("GROUP", "JOBS", "TYPE", "STATUS", "FIRST SEEN", "LAST SEEN", "CODE", "PLACE")


class Fingerprint(NamedTuple):
    """What a dead job died of; absent parts are empty."""

    type: str
    status: str
    code: str
    place: str

    @classmethod
    def of(cls, job: Job) -> Fingerprint:
        return cls(job.type, job.status, job.error_code or "", job.error_place or "")

    @property
    def digest(self) -> str:
        from hashlib import sha256

        return sha256("|".join(self).encode()).hexdigest()

    @property
    def handle(self) -> str:
        return self.digest[:HANDLE_DIGITS]

    @property
    def short_place(self) -> str:
        """`shop.py:11` beside the code ValueError, otherwise `ValueError at shop.py:11`."""
        return self.place.removeprefix(f"{self.code} at ")

    def as_dict(self, count: int) -> dict[str, Any]:
        parts = {name: part or None for name, part in self._asdict().items()}
        return {"group": self.handle, "count": count, **parts}


def fingerprint(group: DeadGroup) -> Fingerprint:
    return Fingerprint(group.type, group.status, group.code, group.place)


def handle(text: str) -> str:
    """An argparse type: the first digits of a group's digest."""
    digits = text.lower()
    if not LEAST_DIGITS <= len(digits) <= 64 or not set(digits) <= set("0123456789abcdef"):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a group such as 3f29c1d0; `tenure jobs --dead` lists them"
        )
    return digits


# ------------------------------------------------------------------------------- finding


def groups(app: App, where: Filter) -> list[DeadGroup]:
    """Largest first."""
    found = app.store.dead_groups(where, limit=EVERY)
    return [group for group in found if where.status in (None, group.status)]


def named(app: App, digits: str, where: Filter) -> Fingerprint:
    """The one group whose digest starts like this."""
    every = (fingerprint(group) for group in groups(app, where))
    found = [group for group in every if group.digest.startswith(digits)]
    if not found:
        raise JobNotFound(
            f"there is no group {digits} among these dead jobs; `tenure jobs --dead` lists the "
            "groups there are"
        )
    if len(found) > 1:
        longer = ", ".join(group.digest[:16] for group in found[:5])
        raise ConfigError(f"{digits} may be any of {longer}: give more digits")
    return found[0]


def members(app: App, group: Fingerprint, where: Filter, page: int = PAGE) -> Iterator[Job]:
    """The jobs of a group, newest first."""
    narrowed = where._replace(type=group.type, status=group.status, place=group.place or None)
    return (job for job in walk(app, narrowed, page) if Fingerprint.of(job) == group)


def walk(app: App, where: Filter, page: int = PAGE) -> Iterator[Job]:
    """Newest first, like `app.find`. A large page for whoever wants them all: 50,000 dead jobs in
    pages of 100 took 6.5 s."""
    before: str | None = None
    while True:
        found, before = app.store.find(where, before=before, limit=page)
        yield from found
        if before is None:
            return


# ------------------------------------------------------------------------------- showing


def list_groups(app: App, where: Filter, *, limit: int, json: bool) -> None:
    found = groups(app, where)
    shown = found[:limit]
    if json:
        for group in shown:
            output.say_json(_as_dict(group))
        return
    if not shown:
        output.say("no dead jobs")
        return
    _print_groups(shown, output.utc_now())
    if len(found) > limit:
        output.say(f"… there are {len(found) - limit:,} more groups: --limit {limit * 10}")
    capped = any(group.capped for group in found)
    total = output.count(sum(group.jobs for group in found), "dead job", capped=capped)
    output.say()
    output.say(
        f"{total} in {output.count(len(found), 'group')}; `tenure jobs --group GROUP` lists one, "
        "`replay` and `discard` take --group, too"
    )


def _as_dict(group: DeadGroup) -> dict[str, Any]:
    return {
        **fingerprint(group).as_dict(group.jobs),
        "capped": group.capped,
        "first_seen": moment(group.first_ms),
        "last_seen": moment(group.last_ms),
        "sample_id": group.sample_id,
        "sample_error": group.sample_error,
    }


def _print_groups(shown: list[DeadGroup], now: datetime.datetime) -> None:
    """Two lines a group: in one, the sample would push the rest off most terminals. Where a place
    has no room in the first, it is in the second: its end, which would be cut, is the line."""
    names, *rows = _aligned([[*HEADS], *(_cells(group, now) for group in shown)])
    columns = output.terminal_columns()
    for group, row in zip(shown, rows, strict=True):
        output.table(
            names, [row], tint={3: _status_colour}, heads=row is rows[0], soft=(2, 4, 5, 6)
        )
        error = output.cut(output.plain(group.sample_error or "no message"), ERROR_COLUMNS)
        cut = columns is not None and output.width(output.GAP.join(row)) > columns
        place = f"{row[-1]}  " if cut else ""
        line = f"{INDENT}{group.sample_id}  {place}{error}"
        output.say(output.paint(line if columns is None else output.cut(line, columns), "dim"))


def _cells(group: DeadGroup, now: datetime.datetime) -> list[str]:
    mark = fingerprint(group)
    seen = [output.relative(moment(ms), now) for ms in (group.first_ms, group.last_ms)]
    jobs = output.at_least(group.jobs, group.capped)
    cells = [mark.handle, jobs, group.type, group.status, *seen, mark.code, mark.short_place]
    return [output.plain(cell) for cell in cells]


def _aligned(rows: list[list[str]]) -> list[list[str]]:
    """Every cell but the last of a row padded to its column's width; JOBS to the right."""
    widths = [max(map(output.width, column)) for column in zip(*rows, strict=True)]
    padded = []
    for row in rows:
        gaps = [
            " " * (columns - output.width(text)) for text, columns in zip(row, widths, strict=True)
        ]
        cells = [text + gap for text, gap in zip(row, gaps, strict=True)]
        cells[1] = gaps[1] + row[1]
        padded.append([*cells[:-1], row[-1]])
    return padded


def _status_colour(text: str) -> str | None:
    return output.STATUS_COLOURS.get(text.strip())


def print_counts(marks: Iterable[Fingerprint]) -> None:
    """Which groups some jobs belong to, and how many of each."""
    rows = [
        (mark.handle, jobs, mark.type, mark.status, mark.code, mark.short_place)
        for mark, jobs in counted(marks).items()
    ]
    output.table(
        ("GROUP", "JOBS", "TYPE", "STATUS", "CODE", "PLACE"),
        rows[:GROUPS_SHOWN],
        right=[1],
        tint={3: output.STATUS_COLOURS.get},
        soft=(2, 4),
    )
    if len(rows) > GROUPS_SHOWN:
        output.say(f"… and {len(rows) - GROUPS_SHOWN:,} more groups")


def counted(marks: Iterable[Fingerprint]) -> Mapping[Fingerprint, int]:
    """Largest first."""
    return dict(Counter(marks).most_common())
