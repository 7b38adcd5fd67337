"""What operators do to jobs and queues, each act on record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tenure.job import Actor
from tenure.stores.postgres.base import to_json
from tenure.stores.postgres.database import to_uuids
from tenure.stores.postgres.finishing import Finishing

LOST_KEY_TTL_MS = 7 * 86_400_000  # a pruned key's own is forgotten with it


class Operators(Finishing):
    def cancel(
        self, ids: Sequence[str], *, actor: Actor, reason: str, org: str | None = None
    ) -> dict[str, str]:
        return self._operate("cancel", ids, actor, org, reason=reason)

    def replay(
        self,
        ids: Sequence[str],
        *,
        actor: Actor,
        payload: str | None = None,
        org: str | None = None,
    ) -> dict[str, str]:
        more = {"payload": payload, "key_ttl_ms": LOST_KEY_TTL_MS}
        return self._operate("replay", ids, actor, org, **more)

    def discard(
        self, ids: Sequence[str], *, actor: Actor, reason: str, org: str | None = None
    ) -> dict[str, str]:
        return self._operate("discard", ids, actor, org, reason=reason)

    def _operate(
        self, verb: str, ids: Sequence[str], actor: Actor, org: str | None, **more: Any
    ) -> dict[str, str]:
        """Not repeated when the reply is lost: the second answer would be about the first act."""
        verdicts = dict.fromkeys(ids, "absent")
        if ids:
            parameters = {
                "ids": to_uuids(sorted(set(ids))),
                "org": org,
                "actor_type": actor.type,
                "actor_id": actor.id,
                "now": self._now(None),
                **more,
            }
            verdicts.update(self._rows(verb, parameters, repeatable=False))
            self._hint([""])
        return verdicts

    def pause(self, queue: str, *, actor: Actor, reason: str) -> None:
        self._switch(queue, "pause", actor, {"queue": queue, "reason": reason})

    def resume(self, queue: str, *, actor: Actor) -> None:
        self._switch(queue, "resume", actor, {"queue": queue})
        self._hint([queue])

    def _switch(self, queue: str, verb: str, actor: Actor, data: dict[str, str]) -> None:
        parameters = {
            "queue": queue,
            "now": self._now(None),
            "actor_type": actor.type,
            "actor_id": actor.id,
            "data": to_json(data),
        }
        if verb == "pause":
            parameters |= {"by": f"{actor.type}:{actor.id}", "reason": data["reason"]}
        self._rows(verb, parameters, repeatable=False)
