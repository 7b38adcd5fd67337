"""How a run ended, as values. A child makes them, the pipe carries them, a store obeys them.

Frozen, tagged and array-like: they are their own wire format, and one `match` ending in
`assert_never` covers them all. Results and errors are already JSON text or scrubbed strings.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from tenure.job import NewJob


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """Why a run failed, fit to be stored: no payload values, no secrets."""

    message: str
    code: str
    place: str = ""  # fingerprint: exception type at file:line
    traceback: str | None = None  # at most 8 KB


class Completed(msgspec.Struct, frozen=True, array_like=True, tag="completed"):
    result: str | None = None  # JSON text
    children: tuple[NewJob, ...] = ()  # what `ctx.enqueue` gathered: stored with the finish
    settled: bool = False  # `ctx.transaction()` has written this finish already


class Retried(msgspec.Struct, frozen=True, array_like=True, tag="retried"):
    delay: float
    failure: Failure


class Snoozed(msgspec.Struct, frozen=True, array_like=True, tag="snoozed"):
    """Later, at no cost: the attempt is given back."""

    delay: float


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """Permanent: not retried."""

    failure: Failure


class Dead(msgspec.Struct, frozen=True, array_like=True, tag="dead"):
    """Attempts used up."""

    failure: Failure


class Cancelled(msgspec.Struct, frozen=True, array_like=True, tag="cancelled"):
    reason: str


class Released(msgspec.Struct, frozen=True, array_like=True, tag="released"):
    """Given back before its run has ended (shutdown, a neighbour's crash): costs no attempt."""

    reason: str
    delay: float = 0.0


class Crashed(msgspec.Struct, frozen=True, array_like=True, tag="crashed"):
    """Its process died while it ran, and the supervisor lives: back to the queue, charged; at the
    limit it is poison."""

    reason: str
    limit: int


Outcome: TypeAlias = Completed | Retried | Snoozed | Failed | Dead | Cancelled | Released | Crashed


class Ended(msgspec.Struct, frozen=True, array_like=True):
    """One claimed run and how it ended."""

    id: str
    lease_no: int
    duration_ms: int
    outcome: Outcome
