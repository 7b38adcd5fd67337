"""What `tenure demo` shows while it runs: a story, line by line, and on a terminal a panel below
it that redraws itself. Without a terminal the panel is a plain line every second or so."""

from __future__ import annotations

import shutil
import sys
import textwrap
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from tenure.terminal import output

if TYPE_CHECKING:
    from tenure.demo.ledger import Kind, Ledger

REDRAW_SECONDS = 0.12
PLAIN_SECONDS = 1.0
RATE_SECONDS = 1.5
WIDEST = 100
CLOCK = 9  # columns of " 12.3 s  "
NARROWEST = 40


def columns() -> int:
    """How wide a line may be; one column is left free, some terminals wrap in it."""
    return max(20, min((output.terminal_columns() or WIDEST) - 1, WIDEST))


def hanging(text: str, indent: int) -> str:
    """`text` for a line that has `indent` columns already; further lines start below it."""
    space = " " * indent
    filled = textwrap.fill(
        text,
        columns(),
        initial_indent=space,
        subsequent_indent=space,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return filled[indent:]


class Panel:
    def __init__(self, kinds: Sequence[Kind], *, silent: bool = False) -> None:
        self._kinds = kinds
        self._total = sum(kind.jobs for kind in kinds)
        self._silent = silent
        wide, tall = shutil.get_terminal_size()
        fits = wide >= NARROWEST and tall > len(kinds) + 4
        self._live = not silent and output.is_terminal(sys.stdout) and fits
        self._blocks = ("█", "▒", "░") if _speaks_utf8() else ("#", "+", ".")
        self._drawn = 0
        self._due = 0.0
        self._begun = time.monotonic()
        self._history: deque[tuple[float, int]] = deque()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begun

    def tell(self, text: str, colour: str | None = None) -> None:
        """A line of the story; it stays."""
        if self._silent:
            return
        self._wipe()
        clock = output.paint(f"{self.seconds:5.1f} s", "dim")
        output.say(f"{clock}  {output.paint(hanging(text, CLOCK), colour)}")
        output.flush()
        self._due = 0.0

    def show(self, ledger: Ledger, progress: Callable[[], Mapping[str, Sequence[float]]]) -> None:
        """The state of things, as often as it is worth it."""
        now = time.monotonic()
        self._history.append((now, ledger.ended))
        while now - self._history[0][0] > RATE_SECONDS:
            self._history.popleft()
        if self._silent or now < self._due:
            return
        self._due = now + (REDRAW_SECONDS if self._live else PLAIN_SECONDS)
        if not self._live:
            output.say(f"{self.seconds:5.1f} s  {self._state(ledger)}")
            output.flush()
            return
        self._wipe()
        percents = progress()
        lines = [
            "",
            *(self._bar(kind, ledger, percents.get(kind.task, ())) for kind in self._kinds),
        ]
        lines.append(output.paint(output.cut(f"  {self._state(ledger)}", columns()), "bold"))
        self._drawn = len(lines)
        sys.stdout.write("\x1b[?25l" + "\n".join(lines) + "\n")
        output.flush()

    def close(self) -> None:
        """Leave the panel where it is, the cursor below it."""
        if self._live:
            self._drawn = 0
            sys.stdout.write("\x1b[?25h")
            output.flush()

    def _wipe(self) -> None:
        if self._drawn:
            sys.stdout.write(f"\x1b[{self._drawn}A\x1b[J")
            self._drawn = 0

    def _state(self, ledger: Ledger) -> str:
        (then, before), (now, ended) = self._history[0], self._history[-1]
        rate = (ended - before) / (now - then) if now > then else 0.0
        parts = [f"{ended:,} of {self._total:,} ended", f"{len(ledger.running):,} running"]
        parts += [f"{rate:,.0f} jobs/s"] if rate else []
        parts += [f"{sum(ledger.dead.values()):,} dead"] if ledger.dead else []
        parts += [f"{len(ledger.put_back):,} recovered"] if ledger.put_back else []
        return " · ".join(parts)

    def _bar(self, kind: Kind, ledger: Ledger, progress: Sequence[float]) -> str:
        """`  send_email    ████████▒░░░░  812/1,289  quick`; narrow terminals lose the end."""
        room = columns()
        size = max(8, min(30, room - 52))
        good, dead = ledger.succeeded[kind.task], ledger.dead[kind.task]
        busy = sum(task == kind.task for task in ledger.running.values())
        marks = [min(size, -(-size * n // kind.jobs)) for n in (good, good + dead)]
        marks.append(min(size, -(-size * (good + dead + busy) // kind.jobs)))
        if good + dead < kind.jobs:  # full means all
            marks = [min(mark, size - 1) for mark in marks[:2]] + marks[2:]
        full, half, empty = self._blocks  # ended, running, to do
        bar = (
            output.paint(full * marks[0], "green")
            + output.paint(full * (marks[1] - marks[0]), "red")
            + output.paint(half * (marks[2] - marks[1]), "yellow")
            + output.paint(empty * (size - marks[2]), "dim")
        )
        count = f"{good + dead:,}/{kind.jobs:,}"
        note = f"  {kind.what}"
        if progress:
            note = "  " + " ".join(f"{percent:.0f}%" for percent in progress)
        note = output.cut(note, max(0, room - 16 - size - 12)) if room > 50 else ""
        return f"  {output.cut(kind.task, 12):<12}  {bar} {count:>11}{output.paint(note, 'dim')}"


def _speaks_utf8() -> bool:
    return (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
