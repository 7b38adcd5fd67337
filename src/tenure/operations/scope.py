"""For whom an operation is made: the tenant it may see, and the actor it is audited as."""

from __future__ import annotations

from tenure import policy
from tenure.context import checked_actor, current
from tenure.errors import ConfigError
from tenure.job import Actor
from tenure.record import Record


class Scope(Record):
    """Travels with every operation. `app.operations` and the operations of one tenant differ in
    nothing else."""

    org: str | None = None  # None: every org, for operators
    actor: Actor | None = None  # None: the actor of `tenure.acting`, else the system
    request_id: str | None = None  # no store keeps it yet: see docs/decisions.md

    @property
    def by(self) -> Actor:
        """The actor that the audit trail names."""
        return current().actor if self.actor is None else self.actor

    def narrowed(
        self,
        org: str | None = None,
        actor: tuple[str, str] | None = None,
        request_id: str | None = None,
    ) -> Scope:
        """This scope with what is given. A scope of one org cannot become that of another."""
        if org is not None and self.org not in (None, org):
            raise ConfigError(f"these are the operations of org {self.org!r}, not of {org!r}")
        return Scope(
            self.org if org is None else org,
            self.actor if actor is None else checked_actor(actor),
            self.request_id if request_id is None else policy.name(request_id, "request_id"),
        )
