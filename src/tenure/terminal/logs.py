"""The worker's own log lines on a terminal: coloured, and above the live line."""

from __future__ import annotations

import logging
import sys

from tenure.observe import log
from tenure.terminal.live_line import LiveLine
from tenure.terminal.output import paint, plain

_COLOURS = {"WARNING": "yellow", "ERROR": "red", "CRITICAL": "red", "DEBUG": "dim"}


class _Coloured(log.PlainFormatter):
    def level(self, record: logging.LogRecord) -> str:
        return paint(super().level(record), _COLOURS.get(record.levelname), sys.stderr)

    def message(self, record: logging.LogRecord) -> str:
        return plain(record.getMessage())


class _AboveLine(logging.StreamHandler):  # type: ignore[type-arg]
    """Prints above the live line, which stays the last."""

    def __init__(self, line: LiveLine) -> None:
        super().__init__(sys.stderr)
        self._line = line

    def emit(self, record: logging.LogRecord) -> None:
        self._line.above(lambda: super(_AboveLine, self).emit(record))


def configure_logging(level: str, *, as_json: bool, line: LiveLine) -> None:
    handler = _AboveLine(line)
    handler.setFormatter(log.JsonFormatter() if as_json else _Coloured())
    log.configure_logging(level, as_json=as_json, handler=handler)
