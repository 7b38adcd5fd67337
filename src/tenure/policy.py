"""The rules of jobs as pure functions and values: retries, queues, categories, times, names, keys.

Retry(attempts=10, backoff=Exponential(base=5, cap=1800))     the default curve, longer
Retry(attempts=3, backoff=Steps(0, 30, 300))                  a table
Retry(backoff=Fixed(0.2), give_up_on=(KeyError, "NOT_FOUND")) never these again
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from tenure.errors import ArgumentError, ConfigError, PermanentError
from tenure.payload import MAX_DEPTH, encode
from tenure.record import Record

if TYPE_CHECKING:
    import datetime

DAY = 86_400
MAX_BACKOFF = 30 * DAY
MAX_DELAY = 10 * 365.25 * DAY
PAST_TOLERANCE_MS = 60_000

QUEUES = ("critical", "default", "notifications", "planning", "exports", "maintenance")
# critical gets four turns for one of the others: soon, and nobody starves.
QUEUE_WEIGHTS: Mapping[str, float] = MappingProxyType(
    {queue: 4.0 if queue == "critical" else 1.0 for queue in QUEUES}
)

# Compiled by `re` when first used: the second takes 0.3 ms.
_QUEUE_NAME = r"[A-Za-z0-9_.:-]{1,128}"
_UNPRINTABLE = "[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]"


def _number(value: object, what: str, low: float, high: float, hint: str = "") -> float:
    """A finite number within bounds; bool is not a number here."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{what} must be a number, got {type(value).__name__}{hint}")
    if not low <= value <= high:  # also false for NaN
        raise ConfigError(f"{what} must be between {low:g} and {high:g}, got {value}{hint}")
    return float(value)


# ------------------------------------------------------------------------------- backoff


@runtime_checkable
class Backoff(Protocol):
    """``attempt`` is the number of the attempt that just failed, 1 for the first."""

    def delay(self, attempt: int) -> float: ...


def _spread(up_to: float) -> float:
    # Four bytes of the system instead of the random module, which takes milliseconds to import.
    return int.from_bytes(os.urandom(4)) / 2**32 * up_to


class Exponential(Record):
    """``base * factor ** (attempt - 1)`` seconds, never more than ``cap``.

    ``jitter`` adds up to that fraction (0.1: up to 10 %) and stays within the cap: near the cap the
    curve is lowered to make room, so that retries are still spread. ``jitter_seconds`` adds 0 to
    that many seconds on top of everything, the cap too.
    """

    base: float = 5.0
    cap: float = 300.0
    factor: float = 2.0
    jitter: float = 0.1
    jitter_seconds: float = 0.0

    def __post_init__(self) -> None:
        _number(self.base, "Exponential base", 0, MAX_BACKOFF)
        _number(self.cap, "Exponential cap", 0, MAX_BACKOFF)
        _number(self.factor, "Exponential factor", 1, 1000)
        _number(self.jitter, "Exponential jitter", 0, 1, " (a fraction: 0.1 adds up to 10 %)")
        _number(self.jitter_seconds, "Exponential jitter_seconds", 0, MAX_BACKOFF)

    def delay(self, attempt: int) -> float:
        try:
            curve = self.base * float(self.factor) ** (max(attempt, 1) - 1)
        except OverflowError:
            curve = self.cap if self.base else 0.0
        seconds = min(curve, self.cap / (1 + self.jitter))
        jittered = min(seconds + _spread(seconds * self.jitter), self.cap)  # floats round up
        return jittered + _spread(self.jitter_seconds)


class Fixed(Record):
    """Always ``seconds``, plus up to the fraction ``jitter`` of it."""

    seconds: float
    jitter: float = 0.0

    def __post_init__(self) -> None:
        _number(self.seconds, "Fixed seconds", 0, MAX_BACKOFF)
        _number(self.jitter, "Fixed jitter", 0, 1, " (a fraction: 0.1 adds up to 10 %)")

    def delay(self, attempt: int) -> float:
        return self.seconds + _spread(self.seconds * self.jitter)


class Steps(Record):
    """A table: ``Steps(0, 30, 300)`` waits 0 s, 30 s, 300 s; the last value repeats."""

    seconds: tuple[float, ...]

    def __init__(self, *seconds: float) -> None:
        if not seconds:
            raise ConfigError("Steps needs at least one number of seconds, such as Steps(0, 30)")
        for value in seconds:
            _number(value, "each of Steps", 0, MAX_BACKOFF)
        vars(self)["seconds"] = seconds

    def delay(self, attempt: int) -> float:
        return self.seconds[min(max(attempt, 1), len(self.seconds)) - 1]


# ------------------------------------------------------------------------------- retries


def _attribute(error: BaseException, attribute: str) -> Any:
    """An exception's attribute, or None; a property that raises must not hide the error itself."""
    try:
        return getattr(error, attribute, None)
    except Exception:
        return None


class Retry(Record):
    """How often a job is tried, how long it waits in between, and what ends it at once.

    ``give_up_on`` mixes exception classes and error codes (an exception's ``code``).
    """

    attempts: int = 5
    backoff: Backoff = Exponential()
    give_up_on: tuple[type[BaseException] | str, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.attempts, bool) or not isinstance(self.attempts, int):
            kind = type(self.attempts).__name__
            raise ConfigError(f"Retry attempts must be a whole number, got {kind}")
        _number(self.attempts, "Retry attempts", 1, 1000)
        if isinstance(self.backoff, type) or not isinstance(self.backoff, Backoff):
            raise ConfigError(
                "Retry backoff must be Exponential(), Fixed(…), Steps(…) or an object with "
                "delay(attempt)"
            )
        given: object = self.give_up_on
        entries = (given,) if isinstance(given, (str, type)) else tuple(self.give_up_on)
        for entry in entries:
            if isinstance(entry, type) and issubclass(entry, BaseException):
                continue
            if not isinstance(entry, str) or not entry:
                raise ConfigError(
                    "Retry give_up_on takes exception classes and error codes (strings), "
                    f"got {entry!r}"
                )
        vars(self)["give_up_on"] = entries

    def gives_up_on(self, error: BaseException) -> bool:
        if isinstance(error, (PermanentError, ArgumentError)):
            return True
        code = _attribute(error, "code")
        # HTTP libraries have int codes: 404 matches "404".
        code = str(code) if isinstance(code, (str, int)) else None
        return any(
            code == entry if isinstance(entry, str) else isinstance(error, entry)
            for entry in self.give_up_on
        )

    def verdict(
        self, error: BaseException, attempt: int, max_attempts: int
    ) -> float | Literal["failed", "dead"]:
        """What follows when attempt number ``attempt`` ended in ``error``.

        ``"failed"``: trying again cannot help. ``"dead"``: attempts are used up. Otherwise the
        seconds to wait; a ``retry_after`` on the error, such as a provider's, wins over the curve.
        """
        if self.gives_up_on(error):
            return "failed"
        if attempt >= max_attempts:
            return "dead"
        told = _attribute(error, "retry_after")
        if isinstance(told, (int, float)) and not isinstance(told, bool) and told >= 0:
            return float(min(told, MAX_BACKOFF))
        return self.backoff.delay(attempt)


# ------------------------------------------------------------------------------- queues, categories


def queue_name(text: str) -> str:
    """A queue's name without the ``q:`` it is shown with."""
    if not isinstance(text, str):
        raise ConfigError(f"a queue's name must be a string, got {type(text).__name__}")
    plain = text.removeprefix("q:")
    if not re.fullmatch(_QUEUE_NAME, plain):
        raise ConfigError(
            f"{text[:140]!r} is not a queue name: use 1 to 128 of A-Z a-z 0-9 _ . : -"
        )
    if plain == "deadletter":
        raise ConfigError(
            "'deadletter' is a view of jobs that failed for good, not a queue to put jobs in; "
            "choose another queue, and list dead jobs with app.find(status='dead_letter')"
        )
    return plain


class Category(Record):
    """Where jobs of a kind go and how they are retried; what a task sets itself wins."""

    name: str
    queue: str
    retry: Retry
    key_ttl_seconds: int


def _categories() -> Mapping[str, Category]:
    default = Retry()
    files = Retry(attempts=5, backoff=Exponential(cap=600))
    rows = (
        Category("default", "default", default, 7 * DAY),
        Category("notification", "notifications", Retry(10, Exponential(cap=1800)), 7 * DAY),
        Category("planning", "planning", Retry(3, Exponential(cap=120)), 30 * DAY),
        Category("export", "exports", files, 30 * DAY),
        Category("import", "exports", files, 30 * DAY),
        Category("audit_enrichment", "default", default, 7 * DAY),
        Category("maintenance", "maintenance", default, 7 * DAY),
    )
    return MappingProxyType({row.name: row for row in rows})


CATEGORIES: Mapping[str, Category] = _categories()


def category(name: object) -> Category:
    found = CATEGORIES.get(name) if isinstance(name, str) else None
    if found is None:
        from difflib import get_close_matches

        close = get_close_matches(str(name), CATEGORIES, n=1)
        guess = f"did you mean {close[0]!r}? " if close else ""
        raise ConfigError(f"unknown category {name!r}; {guess}There are: {', '.join(CATEGORIES)}")
    return found


SUSPECT_LOSSES = 3


def suspect(crashes: int, losses: int) -> bool:
    """Whether a job has to run alone: its own process died while it ran, or its workers did so
    often that it may be the reason."""
    return crashes > 0 or losses >= SUSPECT_LOSSES


class Keep(Record):
    """How long a task's ended jobs stay, in seconds or as the last so many; None: the settings'.

    Completed and cancelled jobs are counted together, failed and dead-lettered ones apart.
    """

    completed: float | None = None
    completed_last: int | None = None
    dead: float | None = None
    dead_last: int | None = None

    def __post_init__(self) -> None:
        for what in ("completed", "dead"):
            age, last = getattr(self, what), getattr(self, f"{what}_last")
            if age is not None:
                _number(age, f"Keep {what}", 0, MAX_DELAY)
            if last is not None:
                _number(last, f"Keep {what}_last", 0, 1_000_000)


# ------------------------------------------------------------------------------- enqueue options

OnConflict = Literal["return", "error"]
AfterFailed = Literal["wait", "cancel"]
Unique = Literal["pending"]


def choice(value: object, what: str, words: tuple[str, ...]) -> None:
    """An option that is one of a few words; the type says which, and so does the error."""
    if value not in words:
        raise ConfigError(f"{what} is {' or '.join(map(repr, words))}, got {value!r}")


def priority(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 10:
        raise ConfigError(f"priority must be 1 (first) to 10, got {value!r}")
    return value


def delay_seconds(value: float | datetime.timedelta) -> float:
    import datetime  # 1 ms: paid by who schedules, not by `import tenure`

    if isinstance(value, datetime.timedelta):
        value = value.total_seconds()
    return _number(value, "delay", 0, MAX_DELAY, " (seconds or a timedelta)")


def aware(at: datetime.datetime) -> float:
    """Seconds since 1970 of a datetime that knows its time zone."""
    import datetime

    if not isinstance(at, datetime.datetime):
        raise ConfigError(f"at must be a datetime, got {type(at).__name__}; for seconds use delay")
    if at.utcoffset() is None:
        raise ConfigError(
            "at must say its time zone: use datetime.now(UTC) + …, or .replace(tzinfo=…) / "
            ".astimezone() on a local time"
        )
    return at.timestamp()


def due_ms(at: datetime.datetime, now_ms: int) -> int:
    """When a job scheduled ``at`` is due; up to a minute in the past is now, older is an error."""
    due = math.floor(aware(at) * 1000 + 0.5)
    if due < now_ms - PAST_TOLERANCE_MS:
        late = (now_ms - due) / 1000
        raise ConfigError(
            f"at is {late:.0f} s in the past, more than the 60 s that count as now; "
            "leave at out to run the job now, and check this machine's clock"
        )
    if due > now_ms + MAX_DELAY * 1000:
        raise ConfigError("at is more than 10 years ahead; choose an earlier time")
    return max(due, now_ms)


def name(text: str, what: str, *, limit: int = 128) -> str:
    """An id, an org, a key (``limit=512``): a short line of text. The message never quotes it."""
    if not isinstance(text, str):
        raise ConfigError(f"{what} must be a string, got {type(text).__name__}; use str(…)")
    if not 1 <= len(text) <= limit:
        raise ConfigError(f"{what} must have 1 to {limit} characters, got {len(text)}")
    if not text.isprintable() and re.search(_UNPRINTABLE, text):
        raise ConfigError(f"{what} must not contain control characters or line breaks; remove them")
    return text


def reason(text: str | None) -> str:
    """Why somebody acted, for the audit trail: some lines of text, or none."""
    if text is not None and not isinstance(text, str):
        raise ConfigError(f"reason must be a string, got {type(text).__name__}; use str(…)")
    if text:
        name(text.replace("\n", " ").replace("\t", " "), "reason", limit=2000)
    return text or ""


# ------------------------------------------------------------------------------- idempotency keys


def stable_key(type: str, org: str, project: str | None, value: object) -> str:
    """``<type>:<org>:<project?>:<hash>``: the same for equal inputs, whatever the order of keys or
    the time zone of datetimes. Without a project its place stays empty."""
    import hashlib
    import json

    plain = _canonical(value, 1)
    encode(plain, what="the value of the key")  # refuses what has no one JSON form
    text = json.dumps(plain, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    parts = (
        name(type, "the job type of a key"),
        name(org, "the org of a key"),
        "" if project is None else name(project, "the project of a key"),
        digest,
    )
    return ":".join(parts)


def _canonical(value: object, depth: int) -> object:
    import datetime

    if isinstance(value, datetime.datetime):
        if value.utcoffset() is None:
            raise ConfigError(
                "a datetime in the value of a key must say its time zone; use .astimezone(UTC)"
            )
        return value.astimezone(datetime.UTC).isoformat().replace("+00:00", "Z")
    if isinstance(value, datetime.date):
        return value.isoformat()
    if depth > MAX_DEPTH:
        return value  # too deep or circular: the payload check refuses it with a path
    if isinstance(value, dict):
        return {key: _canonical(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_canonical(item, depth + 1) for item in value]
    return value


# ------------------------------------------------------------------------------- turns of queues


def shares(free: int, weights: Mapping[str, float], credit: dict[str, float]) -> dict[str, int]:
    """Divide ``free`` slots between queues in proportion to their weights (smooth weighted turns).

    What a queue was owed and did not get is kept in ``credit``, in slots; hand the same dict to
    every call. Ties go to the queue named first.
    """
    total = 0.0
    for queue, weight in weights.items():
        total += _number(weight, f"the weight of queue {queue!r}", 0.001, 1_000_000)
    given: dict[str, int] = {}
    left = max(free, 0)
    for queue, weight in weights.items():
        exact = max(free, 0) * weight / total
        given[queue] = int(exact)
        credit[queue] = credit.get(queue, 0.0) + exact - given[queue]
        left -= given[queue]
    for _ in range(left if weights else 0):  # fewer than there are queues
        queue = max(weights, key=credit.__getitem__)
        given[queue] += 1
        credit[queue] -= 1
    return given
