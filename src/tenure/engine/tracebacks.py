"""Where an error happened, and the traceback of it that may be stored and logged.

The place of an error is the last frame of the user's own code: the line that called a library, not
line 355 of the library's decoder. The traceback is laid out as Python does it, with the causes of
the error and the members of a group; without local variables, and without the engine's frames that
led to the handler. Source lines are shown of modules only: code that was compiled from text may
name any file, and that file must not be read.
"""

from __future__ import annotations

import inspect
import linecache
import os
import re
import sysconfig
from collections.abc import Callable, Iterator
from itertools import groupby, islice
from types import FrameType
from typing import Any, NamedTuple

from tenure.observe.log import visible

MOST_BYTES = 8192
MOST_ERRORS = 12  # of a chain, or in a group
MOST_NOTES = 20  # of one error; each is scrubbed, which takes a tenth of a millisecond and more
MOST_FRAMES = 100  # of one error: the first third, the last two
MOST_NAME = 300
SAME_SHOWN = 3  # of a frame that repeats (recursion), as Python does
_CAUSED = "The above exception was the direct cause of the following exception:"
_MEANWHILE = "During handling of the above exception, another exception occurred:"
_HEADER = "Traceback (most recent call last):"

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_STANDARD = tuple(
    {sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")}
    | {os.path.dirname(os.path.abspath(os.__file__)) + os.sep}
)
_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\]")


class _Step(NamedTuple):
    frame: FrameType
    line: int


class _Line(NamedTuple):
    text: str
    frame: bool = False
    dispensable: bool = False  # a frame of a library, and not where the error was raised


class Tracebacks:
    """Of the errors of one run. Three functions make text fit to be stored: `said` an error's last
    line, `scrubbed` a text of the handler's, `without_secrets` a line of source."""

    def __init__(
        self,
        handler: Callable[..., Any],
        said: Callable[[BaseException], str],
        scrubbed: Callable[[object], str],
        without_secrets: Callable[[str], str],
    ) -> None:
        function = inspect.unwrap(handler)
        self._code = getattr(function, "__code__", None)
        self._file = None if self._code is None else self._code.co_filename
        self._package = str(getattr(function, "__module__", "")).partition(".")[0]
        self._said = said
        self._scrubbed = scrubbed
        self._without_secrets = without_secrets

    # -- the place ----------------------------------------------------------------------------
    def place(self, error: BaseException) -> str:
        """`jobs.py:12`: the last frame of the user's code, else where the task is defined. Of a
        group: where its errors were raised, if that is one place."""
        if isinstance(error, BaseExceptionGroup):
            inside = set(map(self._last_place, islice(_leaves(error), MOST_ERRORS)))
            if len(inside) == 1 and (only := inside.pop()):
                return only
        return self._last_place(error) or self._definition()

    def _last_place(self, error: BaseException) -> str:
        for step in reversed(_walk(error)):
            if self._theirs(step.frame):
                return f"{os.path.basename(self._name_of(step.frame))}:{step.line}"
        return ""

    def _definition(self) -> str:
        """The line of `def`: a code object begins at the first decorator."""
        if self._code is None or self._file is None:
            return ""
        first = self._code.co_firstlineno
        for number in range(first, first + 50):
            if re.match(r"\s*(?:async\s+)?def\b", linecache.getline(self._file, number)):
                first = number
                break
        return f"{os.path.basename(self._file)}:{first}"

    # -- whose code ---------------------------------------------------------------------------
    def _theirs(self, frame: FrameType) -> bool:
        """The user's code: the task's own file and package, wherever that is installed, and every
        file that belongs neither to Python, nor to an installed library, nor to us."""
        file = frame.f_code.co_filename
        if file == self._file:
            return True
        if file.startswith(("<", _OURS)):
            return False
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package == self._package and package not in ("", "tenure"):
            return True
        return not (file.startswith(_STANDARD) or _INSTALLED.search(file))

    def _engines(self, frame: FrameType) -> bool:
        file = frame.f_code.co_filename
        return file.startswith(_OURS) and file != self._file

    def _name_of(self, frame: FrameType) -> str:
        file = frame.f_code.co_filename
        shown = file if of_a_module(frame) or file == self._file else self._scrubbed(file)
        return shown[-MOST_NAME:]

    # -- the text -----------------------------------------------------------------------------
    def text(self, error: BaseException) -> str | None:
        """None when it has no frame."""
        lines = list(self._tell(error, "", set()))
        return fitted(lines) if any(line.frame for line in lines) else None

    def _tell(self, error: BaseException, margin: str, told: set[int]) -> Iterator[_Line]:
        told.add(id(error))
        before, words = error.__cause__, _CAUSED
        if before is None and not error.__suppress_context__:
            before, words = error.__context__, _MEANWHILE
        if before is not None and id(before) not in told and len(told) < MOST_ERRORS:
            yield from self._tell(before, margin, told)
            yield _Line(f"{margin}\n{margin}{words}\n{margin}")
        group = error if isinstance(error, BaseExceptionGroup) else None
        frames = self._frames(error)
        if group is not None and not margin:
            margin = "  | "
            yield _Line(f"  + Exception Group {_HEADER}")
        elif frames:
            yield _Line(f"{margin}{'Exception Group ' if group else ''}{_HEADER}")
        said = map(_Line, (self._said(error), *self._notes(error)))
        for line in (*frames, *said):
            yield line._replace(text=margin + line.text.replace("\n", f"\n{margin}"))
        if group is not None:
            yield from self._members(group, margin[:-2], told)

    def _members(
        self, group: BaseExceptionGroup[BaseException], margin: str, told: set[int]
    ) -> Iterator[_Line]:
        mark = "+-+"
        for number, member in enumerate(group.exceptions, 1):
            if len(told) >= MOST_ERRORS:
                yield _Line(f"{margin}  ... and {len(group.exceptions) - number + 1} more")
                break
            if id(member) in told:
                continue
            yield _Line(f"{margin}{mark}---------------- {number} ----------------")
            yield from self._tell(member, f"{margin}  | ", told)
            mark = "  +"
        yield _Line(f"{margin}  +------------------------------------")

    def _notes(self, error: BaseException) -> list[str]:
        try:
            notes = getattr(error, "__notes__", None)
        except Exception:  # a property of its own that raises
            return []
        if not isinstance(notes, list):
            return []
        more = len(notes) - MOST_NOTES
        told = [self._scrubbed(note) for note in notes[:MOST_NOTES]]
        return [*told, f"... and {more} more notes"] if more > 0 else told

    def _frames(self, error: BaseException) -> list[_Line]:
        walked = _walk(error)
        while walked and self._engines(walked[0].frame):
            del walked[0]
        rows = [list(same) for _code, same in groupby(walked, _where)]
        first, gone = MOST_FRAMES // 3, len(rows) - MOST_FRAMES
        if gone > 0:
            rows = [*rows[:first], *rows[first + gone :]]
        sources = self._sources([row[0] for row in rows])
        lines: list[_Line] = []
        for index, (row, source) in enumerate(zip(rows, sources, strict=True)):
            if gone > 0 and index == first:
                lines.append(_Line(f"  ... {gone} frames ..."))
            dispensable = row is not rows[-1] and not self._theirs(row[0].frame)
            line = _Line(self._described(row[0], source), True, dispensable)
            lines += [line] * min(len(row), SAME_SHOWN)
            if len(row) > SAME_SHOWN:
                more = len(row) - SAME_SHOWN
                lines.append(line._replace(text=f"  [Previous line repeated {more} more times]"))
        return lines

    def _described(self, step: _Step, source: str) -> str:
        name = step.frame.f_code.co_name
        if not of_a_module(step.frame):
            name = self._scrubbed(name)
        file = self._name_of(step.frame)
        text = f'  File "{file}", line {step.line}, in {name[:MOST_NAME]}'
        return f"{text}\n    {source}" if source else text

    def _sources(self, steps: list[_Step]) -> list[str]:
        """Without secrets that are written into them; all in one call, which takes 0.1 ms."""
        lines = [
            linecache.getline(step.frame.f_code.co_filename, step.line).strip()[:MOST_NAME]
            if of_a_module(step.frame)
            else ""
            for step in steps
        ]
        found = self._without_secrets("\n".join(lines)).split("\n")
        return found if len(found) == len(lines) else [self._without_secrets(s) for s in lines]


def _walk(error: BaseException) -> list[_Step]:
    found, trace = [], error.__traceback__
    while trace is not None:
        found.append(_Step(trace.tb_frame, trace.tb_lineno or 0))
        trace = trace.tb_next
    return found


def _where(step: _Step) -> tuple[object, int]:
    return step.frame.f_code, step.line


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for member in group.exceptions:
        if isinstance(member, BaseExceptionGroup):
            yield from _leaves(member)
        else:
            yield member


def of_a_module(frame: FrameType) -> bool:
    return bool(frame.f_globals.get("__file__") == frame.f_code.co_filename)


def fitted(lines: list[_Line], most: int = MOST_BYTES) -> str:
    """At most so many bytes: first the frames of libraries go, then the middle of the text."""
    text = visible("\n".join(line.text for line in lines))
    if len(text.encode()) <= most:
        return text
    kept: list[str] = []
    gone = 0
    for line in [*lines, _Line("")]:
        if line.dispensable:
            gone += 1
            continue
        if gone:
            kept.append(f"  ... {gone} frames of libraries ...")
            gone = 0
        kept.append(line.text)
    data = visible("\n".join(kept[:-1])).encode()
    if len(data) <= most:
        return data.decode()
    mark = b"\n  ...\n"
    head, tail = data[: most // 3], data[-(most - most // 3 - len(mark)) :]
    if b"\n" in head:
        head = head[: head.rindex(b"\n")]
    if b"\n" in tail:
        tail = tail[tail.index(b"\n") + 1 :]
    return (head + mark + tail).decode("utf-8", "ignore")
