"""Log lines: plain for people, one JSON object a line for programs. Never a payload.

A handler's text may hold anything, and so may a name somebody stored: whatever it is, it cannot
move a cursor, turn the reading direction, or look like a line of the log that it is not.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time

# What a log line may say about its job.
FIELDS = (
    "request_id",
    "correlation_id",
    "job_id",
    "job_type",
    "type",
    "org_id",
    "project_id",
    "attempt",
    "max_attempts",
    "worker_id",
    "duration_ms",
    "error_code",
    "will_retry",
    "next_try",
    "exception",
    "error_place",
)


CONTINUED = "    "  # before each further line: a line of the log begins with its time
# C0 but tab and line feed, DEL, C1, line and paragraph separators, what turns the direction of
# writing, halves of surrogate pairs.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def visible(text: str) -> str:
    """Control characters as `\\x1b`; lines stay lines."""
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def neutral(text: str) -> str:
    """Control characters as `\\x1b`, further lines indented."""
    if text.isprintable():
        return text
    text = text.replace("\r\n", "\n").rstrip("\n")
    return visible(text).replace("\n", f"\n{CONTINUED}")


class PlainFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        job = getattr(record, "job_id", None)
        message = neutral(self.message(record))
        if job and str(job) not in message:
            message += neutral(f" [{getattr(record, 'job_type', 'job')} {job}]")
        parts = [f"{clock} {self.level(record)} {message}"]
        if record.exc_info:
            parts.append(CONTINUED + neutral(self.formatException(record.exc_info)))
        elif record.exc_text:
            parts.append(CONTINUED + neutral(record.exc_text))
        if record.stack_info:
            parts.append(CONTINUED + neutral(self.formatStack(record.stack_info)))
        return "\n".join(parts)

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
        elif record.exc_text:
            line["traceback"] = record.exc_text
        if record.stack_info:
            line["stack"] = self.formatStack(record.stack_info)
        text = json.dumps(line, ensure_ascii=False, default=str)
        # The rest of them json escapes itself; all are in strings, and mean the same there.
        return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


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
