"""What people and programs read: aligned tables, relative times, colours, JSON lines.

A pipe gets whole lines without colours; only a terminal gets lines cut to its width.
"""

from __future__ import annotations

import datetime
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TextIO

from tenure.operations.wording import at_least as at_least
from tenure.operations.wording import count as count
from tenure.operations.wording import relative as relative
from tenure.operations.wording import span as span
from tenure.operations.wording import stamp as stamp

GAP = "  "
LEAST_COLUMN, LEAST_LAST_COLUMN = 5, 8
LEAST_ID = 12  # characters of an id that are shown: ten are the time, then they are random
GAUGE_COLUMNS = 24
COLOURS = {"red": 31, "green": 32, "yellow": 33, "blue": 34, "bold": 1, "dim": 2}
# A stored error may hold anything: control characters must not reach somebody's terminal.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")

STATUS_COLOURS = {
    "queued": "blue",
    "in_progress": "yellow",
    "completed": "green",
    "failed": "red",
    "dead_letter": "red",
    "cancelled": "dim",
}


# ------------------------------------------------------------------------------- lines


def say(text: str = "") -> None:
    print(text)


def complain(text: str) -> None:
    print(f"tenure: {text}", file=sys.stderr)


def flush() -> None:
    """A program that follows this one sees it now."""
    sys.stdout.flush()


def say_json(value: object) -> None:
    """One JSON object on one line, flushed: a program that follows this one sees it now."""
    from tenure.operations.encoding import to_json

    print(as_json(to_json(value)), flush=True)


def as_json(value: object) -> str:
    import json

    return json.dumps(value, ensure_ascii=False)


def is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def paint(text: str, colour: str | None, stream: TextIO | None = None) -> str:
    if colour is None or not text or os.environ.get("NO_COLOR"):
        return text
    if not is_terminal(stream or sys.stdout):
        return text
    return f"\x1b[{COLOURS[colour]}m{text}\x1b[0m"


# ------------------------------------------------------------------------------- tables


def plain(cell: object) -> str:
    """A cell's text: one line, thousands separated, nothing that moves a cursor."""
    if cell is None:
        return ""
    if isinstance(cell, int) and not isinstance(cell, bool):
        return f"{cell:,}"
    text = str(cell).replace("\r\n", "\n").replace("\n", " ⏎ ").replace("\t", " ")
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def indented(text: str) -> str:
    """Several lines for a terminal, each of them `plain`."""
    return "\n".join(f"{GAP}{plain(line)}" for line in text.split("\n"))


def width(text: str) -> int:
    """Columns on a terminal: Chinese takes two each, a combining accent none."""
    if text.isascii():
        return len(text)
    from unicodedata import combining, east_asian_width

    return sum(0 if combining(c) else 2 if east_asian_width(c) in "WF" else 1 for c in text)


def padded(text: str, columns: int, *, right: bool = False) -> str:
    gap = " " * (columns - width(text))
    return gap + text if right else text + gap


def cut(text: str, columns: int) -> str:
    if width(text) <= columns:
        return text
    while text and width(text) > columns - 1:
        text = text[: min(len(text) - 1, columns - 1)]
    return text + "…"


def terminal_columns() -> int | None:
    """None where output goes to no terminal."""
    return shutil.get_terminal_size().columns if is_terminal(sys.stdout) else None


def table(
    names: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    right: Iterable[int] = (),
    tint: Mapping[int, Callable[[str], str | None]] | None = None,
    heads: bool = True,
    ids: Iterable[int] = (),
    soft: Iterable[int] = (),
) -> None:
    """Columns as wide as their widest cell. On a terminal the last one is cut to what is left,
    where that is too little ids to what tells them apart here, then the widest of the columns in
    `soft`. `tint` names the colour of a cell by its text, per column."""
    body = [[plain(cell) for cell in row] for row in rows]
    widths = [max(map(width, column)) for column in zip(names, *body, strict=True)]
    if (room := terminal_columns()) is not None:
        least = {place: LEAST_COLUMN for place in soft}
        least |= {place: _telling([row[place] for row in body]) for place in ids}
        _fit(widths, room, [[len(widths) - 1], [*ids], [*soft]], least)
    rights = frozenset(right)
    if heads:
        say(paint(_line(names, widths, rights, {}), "bold"))
    for row in body:
        say(_line(row, widths, rights, tint or {}))


def _telling(ids: Sequence[str]) -> int:
    """How many columns ids need to be told apart; the rest of an id may be left out, because every
    command takes the beginning of one."""
    lengths = range(LEAST_ID, max(map(len, ids), default=0))
    apart = (n for n in lengths if len({id[:n] for id in ids}) == len({*ids}))
    return next(apart, max(map(len, ids), default=0) - 1) + 1


def _fit(
    widths: list[int], room: int, groups: Sequence[Sequence[int]], least: Mapping[int, int]
) -> None:
    """Where a table is too wide: narrow the columns of one group after the other, always the widest
    of a group by one."""
    over = sum(widths) + len(GAP) * (len(widths) - 1) - room
    for group in groups:
        while over > 0:
            able = [n for n in group if widths[n] > least.get(n, LEAST_LAST_COLUMN)]
            if not able:
                break
            widths[max(able, key=widths.__getitem__)] -= 1
            over -= 1


def _line(
    cells: Sequence[str],
    widths: Sequence[int],
    right: frozenset[int],
    tint: Mapping[int, Callable[[str], str | None]],
) -> str:
    parts = []
    for place, (text, columns) in enumerate(zip(cells, widths, strict=True)):
        shown = cut(text.rstrip(), columns)  # padding may be cut without a mark
        gap = " " * (columns - width(shown))
        painted = paint(shown, tint[place](text)) if place in tint else shown
        parts.append(gap + painted if place in right else painted + gap)
    return GAP.join(parts).rstrip()


def pairs(rows: Iterable[tuple[str, object]]) -> None:
    """`name   value` lines, aligned; empty values are left out."""
    shown = [(name, plain(value)) for name, value in rows if value not in (None, "")]
    longest = max((len(name) for name, _ in shown), default=0)
    for name, value in shown:
        say(f"{GAP}{paint(name.ljust(longest), 'dim')}{GAP}{value}")


# ------------------------------------------------------------------------------- words


def utc_now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def gauge(part: float) -> str:
    filled = int(GAUGE_COLUMNS * min(max(part, 0.0), 1.0))
    return f"[{'#' * filled}{'.' * (GAUGE_COLUMNS - filled)}]"


def fields(value: object) -> str:
    """A small JSON object as `name=value` words, for the last column."""
    if not isinstance(value, dict):
        return "" if value is None else str(value)
    return " ".join(f"{name}={_word(item)}" for name, item in value.items() if item is not None)


def _word(value: object) -> str:
    text = str(value)
    return repr(text) if " " in text or not text else text
