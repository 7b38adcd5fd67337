"""The nouns: a job, its statuses and the one table of legal transitions, events, receipts.

Nothing here knows a store. Times are aware datetimes on what users see (`Job`, `Event`) and
integer milliseconds on what travels to and from stores.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    import datetime
    import uuid
    from collections.abc import Mapping

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


class Receipt(NamedTuple):
    """What an enqueue returns: the job's id, and whether its key had been seen before."""

    id: str
    duplicate: bool
    status: str


@dataclass(frozen=True, slots=True)
class Terms:
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
    request_id: str
    correlation_id: str
    traceparent: str | None
    key: str | None
    parent: str | None
    scheduled_at: int
    created_at: int
    ready_at: int


def moment(ms: int | None) -> datetime.datetime | None:
    """Milliseconds since 1970 as an aware datetime in UTC."""
    if ms is None:
        return None
    import datetime

    return datetime.datetime.fromtimestamp(ms / 1000, datetime.UTC)


def rfc3339(ms: int) -> str:
    when = moment(ms)
    assert when is not None  # noqa: S101  ms is an int here
    return when.strftime("%Y-%m-%dT%H:%M:%S.") + f"{ms % 1000:03d}Z"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job as the store has it."""

    id: str
    type: str
    status: str
    queue: str
    priority: int
    category: str
    payload: dict[str, Any]
    result: Any
    error: str | None
    error_code: str | None
    attempts: int
    max_attempts: int
    crashes: int
    lease_no: int
    lease_owner: str | None
    lease_until: datetime.datetime | None
    scheduled_at: datetime.datetime
    created_at: datetime.datetime
    updated_at: datetime.datetime
    started_at: datetime.datetime | None
    completed_at: datetime.datetime | None
    timeout: float
    org: str
    project: str | None
    actor: Actor
    request_id: str
    correlation_id: str
    traceparent: str | None
    key: str | None
    progress: Any
    parent: str | None
    after: tuple[str, ...] = ()
    cancel_requested: bool = False
    error_place: str | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        return self.type

    @property
    def uuid(self) -> uuid.UUID:
        from tenure.ids import to_uuid

        return to_uuid(self.id)

    @property
    def dead(self) -> bool:
        return self.status in DEAD

    @property
    def terminal(self) -> bool:
        return self.status in TERMINAL

    @property
    def envelope(self) -> dict[str, Any]:
        """The job contract: exactly these names (REQUIREMENTS B1)."""
        created = int(self.created_at.timestamp() * 1000 + 0.5)
        scheduled = int(self.scheduled_at.timestamp() * 1000 + 0.5)
        return {
            "job_id": str(self.uuid),
            "job_type": self.type,
            "org_id": self.org,
            "project_id": self.project,
            "actor_type": self.actor.type,
            "actor_id": self.actor.id,
            "request_id": self.request_id,
            "correlation_id": self.correlation_id,
            "idempotency_key": self.key,
            "created_at": rfc3339(created),
            "payload": self.payload,
            "scheduled_for": rfc3339(scheduled) if scheduled > created else None,
            "traceparent": self.traceparent,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One line of the audit trail."""

    seq: int
    kind: str
    at: datetime.datetime
    job_id: str | None
    type: str | None
    attempt: int | None
    lease_no: int | None
    org: str
    project: str | None
    actor: Actor
    request_id: str | None
    correlation_id: str | None
    worker: str | None
    data: Any
