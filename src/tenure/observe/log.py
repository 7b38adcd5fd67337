"""Log lines: plain for people, one JSON object a line for programs. Never a payload."""

from __future__ import annotations

import json
import logging
import sys
import time

# What a log line may say about its job.
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


class PlainFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        job = getattr(record, "job_id", None)
        about = f" [{getattr(record, 'job_type', 'job')} {job}]" if job else ""
        text = f"{clock} {self.level(record)} {self.message(record)}{about}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text

    def level(self, record: logging.LogRecord) -> str:
        return f"{record.levelname:<7}"

    def message(self, record: logging.LogRecord) -> str:
        return record.getMessage()


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


def configure_logging(level: str, *, as_json: bool, handler: logging.Handler | None = None) -> None:
    """For processes that are ours: workers and their children. An app that has set up logging
    of its own in its module keeps it."""
    root = logging.getLogger()
    if handler is None:
        if root.handlers:
            return
        handler = logging.StreamHandler(sys.stderr)
    if handler.formatter is None:
        handler.setFormatter(JsonFormatter() if as_json else PlainFormatter())
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
