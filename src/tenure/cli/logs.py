"""Log lines of a worker on stderr: plain for people, one JSON object a line for programs."""

from __future__ import annotations

import json
import logging
import sys
import time

from tenure.cli.output import LiveLine, paint, plain

# What a log line may say about its job; never the payload.
FIELDS = (
    "request_id",
    "correlation_id",
    "job_id",
    "job_type",
    "org_id",
    "project_id",
    "attempt",
    "worker_id",
    "duration_ms",
    "error_code",
    "will_retry",
)
_COLOURS = {"WARNING": "yellow", "ERROR": "red", "CRITICAL": "red", "DEBUG": "dim"}


class PlainFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        level = paint(f"{record.levelname:<7}", _COLOURS.get(record.levelname), sys.stderr)
        job = getattr(record, "job_id", None)
        about = f" [{getattr(record, 'job_type', 'job')} {job}]" if job else ""
        text = f"{clock} {level} {plain(record.getMessage())}{about}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, object] = {
            "time": f"{at}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name in FIELDS:
            value = getattr(record, name, None)
            if value is not None:
                line[name] = value
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class _AboveLine(logging.StreamHandler):  # type: ignore[type-arg]
    """Prints above the live line, which stays the last."""

    def __init__(self, line: LiveLine) -> None:
        super().__init__(sys.stderr)
        self._line = line

    def emit(self, record: logging.LogRecord) -> None:
        self._line.above(lambda: super(_AboveLine, self).emit(record))


def configure_logging(level: str, *, as_json: bool, line: LiveLine) -> None:
    handler = _AboveLine(line)
    handler.setFormatter(JsonFormatter() if as_json else PlainFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
