"""Words for lengths of time, moments and counts: sentences of operations and tables of the command
line say them alike."""

from __future__ import annotations

import datetime


def span(seconds: float) -> str:
    """A length of time in its largest fitting unit: `40 ms`, `3.2 s`, `4 min`, `2 h`, `5 days`."""
    seconds = abs(seconds)
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s".replace(".0 s", " s")
    if seconds < 89.5:
        return f"{seconds:.0f} s"
    if seconds < 89.5 * 60:
        return f"{seconds / 60:.0f} min"
    if seconds < 35.5 * 3600:
        return f"{seconds / 3600:.0f} h"
    return f"{seconds / 86400:,.0f} days"


def relative(when: datetime.datetime | None, now: datetime.datetime) -> str:
    """`3 min ago`, `in 4 min`, `just now`; nothing for nothing."""
    if when is None:
        return ""
    seconds = (when - now).total_seconds()
    if seconds > 0:
        return f"in {span(max(1, round(seconds)))}"
    return "just now" if seconds > -1 else f"{span(round(-seconds))} ago"


def stamp(when: datetime.datetime) -> str:
    return when.astimezone(datetime.UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def count(number: int, noun: str, *, capped: bool = False) -> str:
    """`1 job`, `1,200 jobs`, `10,000+ jobs`."""
    return f"{at_least(number, capped)} {noun}{'' if number == 1 else 's'}"


def at_least(number: int, capped: bool) -> str:
    """A figure; `capped`: counting stopped there."""
    return f"{number:,}{'+' if capped else ''}"
