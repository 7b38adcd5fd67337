"""A job and an event as the store has them: what reading returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tenure.ids import to_uuid
from tenure.job import DEAD, TERMINAL, Actor, rfc3339

if TYPE_CHECKING:
    import datetime
    import uuid


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
    losses: int = 0
    scheduled_for: datetime.datetime | None = None  # as it was asked; retries do not change it
    death: str | None = field(default=None, repr=False)  # handle of the group it died in
    traceback: str | None = field(default=None, repr=False)
    after_failed: str | None = None  # of a job that waits: `wait` or `cancel`

    @property
    def name(self) -> str:
        return self.type

    @property
    def uuid(self) -> uuid.UUID:
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
        asked = self.scheduled_for
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
            "created_at": rfc3339(milliseconds(self.created_at)),
            "payload": self.payload,
            "scheduled_for": None if asked is None else rfc3339(milliseconds(asked)),
            "traceparent": self.traceparent,
        }


def milliseconds(when: datetime.datetime) -> int:
    return int(when.timestamp() * 1000 + 0.5)


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
