"""The nouns: a job, its statuses and the one table of legal transitions, events, receipts.

Nothing here knows a store. Times are aware datetimes on what users see (`Job`, `Event`) and
integer milliseconds on what travels to and from stores. `Job` and `Event` are in `stored.py` and
loaded when somebody reads: a producer does not need them, and they take 5 ms.
"""

# No `from __future__ import annotations`: NamedTuple compiles each annotation that is a string,
# which would be 1.4 of this module's 2.3 ms.
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    import datetime

    from tenure.stored import Event as Event
    from tenure.stored import Job as Job

Status = Literal["queued", "in_progress", "completed", "failed", "dead_letter", "cancelled"]

STATUSES: tuple[Status, ...] = (
    "queued",
    "in_progress",
    "completed",
    "failed",
    "dead_letter",
    "cancelled",
)
DEAD: frozenset[str] = frozenset({"failed", "dead_letter"})
FINISHED: frozenset[str] = frozenset({"completed", "cancelled"})
TERMINAL: frozenset[str] = DEAD | FINISHED

# Every transition there is, on any store; docs/states.md draws it.
TRANSITIONS: Mapping[str, frozenset[str]] = {
    "queued": frozenset({"in_progress", "cancelled"}),
    "in_progress": frozenset({"completed", "failed", "dead_letter", "cancelled", "queued"}),
    "failed": frozenset({"queued", "cancelled"}),
    "dead_letter": frozenset({"queued", "cancelled"}),
    "completed": frozenset(),
    "cancelled": frozenset(),
}


class Actor(NamedTuple):
    """Who asked for something: type is `user`, `system` or `api_key`."""

    type: str
    id: str


SYSTEM = Actor("system", "tenure")
_FIRST_MS, _LAST_MS = -62_135_596_800_000, 253_402_300_799_999  # the years 1 to 9999


class Receipt(NamedTuple):
    """What an enqueue returns: the job's id, and whether its key had been seen before."""

    id: str
    duplicate: bool
    status: str


class Terms(NamedTuple):
    """What all jobs enqueued with the same options share.

    Batches are grouped by it: a store binds it once per group instead of once per row.
    """

    type: str
    queue: str
    priority: int
    category: str
    max_attempts: int
    timeout_ms: int
    key_ttl_ms: int
    org: str = "default"
    project: str | None = None
    actor: Actor = SYSTEM
    request_id: str = ""
    correlation_id: str = ""
    traceparent: str | None = None
    parent: str | None = None
    after_failed: str | None = None
    remark: str | None = None  # JSON text for the job.enqueued event: what was waived


class NewJob(NamedTuple):
    """One job on its way into a store. `payload` is checked JSON text."""

    id: str
    terms: Terms
    payload: str
    delay_ms: int = 0
    at_ms: int | None = None
    key: str | None = None
    after: tuple[str, ...] = ()


class ClaimedJob(NamedTuple):
    """A granted lease: what a child needs to run the job, in the order stores return it."""

    id: str
    lease_no: int
    type: str
    payload: str
    attempts: int
    max_attempts: int
    crashes: int
    timeout_ms: int
    queue: str
    priority: int
    category: str
    org: str
    project: str | None
    actor_type: str
    actor_id: str
    request: str | None  # None: its own id, as in the tables
    correlation: str | None
    traceparent: str | None
    key: str | None
    parent: str | None
    scheduled_at: int
    created_at: int
    ready_at: int
    losses: int

    @property
    def request_id(self) -> str:
        return self.request or self.id

    @property
    def correlation_id(self) -> str:
        return self.correlation or self.id


def moment(ms: int | None) -> "datetime.datetime | None":
    """Milliseconds since 1970 as an aware datetime in UTC. A row written by other hands may hold
    a number that is no time: the first or last one there is."""
    if ms is None:
        return None
    import datetime

    if not _FIRST_MS <= ms <= _LAST_MS:
        return (datetime.datetime.min if ms < 0 else datetime.datetime.max).replace(
            tzinfo=datetime.UTC
        )
    return datetime.datetime.fromtimestamp(ms / 1000, datetime.UTC)


def rfc3339(ms: int) -> str:
    when = moment(ms)
    assert when is not None  # noqa: S101  ms is an int here
    return when.strftime("%Y-%m-%dT%H:%M:%S.") + f"{ms % 1000:03d}Z"


def __getattr__(name: str) -> Any:
    if name in ("Event", "Job"):
        from tenure import stored

        return getattr(stored, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
