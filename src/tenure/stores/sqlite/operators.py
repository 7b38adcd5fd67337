"""What operators do to jobs and queues, each act on record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tenure.job import DEAD, Actor
from tenure.stores.sqlite.base import to_json
from tenure.stores.sqlite.finishing import Finishing

if TYPE_CHECKING:
    import sqlite3


LOST_KEY_TTL_MS = 7 * 86_400_000  # a pruned key's own is forgotten with it


class Operators(Finishing):
    def cancel(
        self, ids: Sequence[str], *, actor: Actor, reason: str, org: str | None = None
    ) -> dict[str, str]:
        with self.file.write() as db:
            verdicts, by_status = self._statuses(db, ids, org)
            parameters = self._operator(actor, reason, "cancelled")
            queued, running = by_status.get("queued", []), by_status.get("in_progress", [])
            if queued:
                self._withdraw(db, queued, "job.cancelled", parameters)
                self._settle_edges(db, parameters["now"])
                verdicts.update(dict.fromkeys(queued, "done"))
            if running:
                parameters |= {"ids": to_json(running), "kind": "job.cancel_requested"}
                db.execute(self._sql["request_cancel"], parameters)
                db.execute(self._sql["operator_events"], parameters)
                verdicts.update(dict.fromkeys(running, "requested"))
        return verdicts

    def replay(
        self,
        ids: Sequence[str],
        *,
        actor: Actor,
        payload: str | None = None,
        org: str | None = None,
    ) -> dict[str, str]:
        with self.file.write() as db:
            verdicts, by_status = self._statuses(db, ids, org)
            dead = [id for status in DEAD for id in by_status.get(status, [])]
            if dead:
                parameters = self._operator(actor, "edited" if payload else "", "")
                parameters |= {"ids": to_json(dead), "kind": "job.replayed", "payload": payload}
                parameters["key_ttl_ms"] = LOST_KEY_TTL_MS
                db.execute(self._sql["operator_events"], parameters)
                db.execute(self._sql["replay"], parameters)
                db.execute(self._sql["replay_keys"], parameters)
                db.execute(self._sql["replay_lost_keys"], parameters)
                if payload is not None:
                    db.execute(self._sql["replay_steps"], parameters)
                verdicts.update(dict.fromkeys(dead, "done"))
        return verdicts

    def discard(
        self, ids: Sequence[str], *, actor: Actor, reason: str, org: str | None = None
    ) -> dict[str, str]:
        with self.file.write() as db:
            verdicts, by_status = self._statuses(db, ids, org)
            dead = [id for status in DEAD for id in by_status.get(status, [])]
            if dead:
                parameters = self._operator(actor, reason, "discarded")
                self._withdraw(db, dead, "job.discarded", parameters)
                self._settle_edges(db, parameters["now"])
                verdicts.update(dict.fromkeys(dead, "done"))
        return verdicts

    def _statuses(
        self, db: sqlite3.Connection, ids: Sequence[str], org: str | None
    ) -> tuple[dict[str, str], dict[str, list[str]]]:
        """Another org's job is as absent as one that never was."""
        verdicts = dict.fromkeys(ids, "absent")
        by_status: dict[str, list[str]] = {}
        for id, status, owner in db.execute(self._sql["statuses"], {"ids": to_json(list(ids))}):
            if org is None or owner == org:
                verdicts[id] = status
                by_status.setdefault(status, []).append(id)
        return verdicts, by_status

    def pause(self, queue: str, *, actor: Actor, reason: str) -> None:
        self._switch(queue, "pause", actor, {"queue": queue, "reason": reason})

    def resume(self, queue: str, *, actor: Actor) -> None:
        self._switch(queue, "resume", actor, {"queue": queue})

    def _switch(self, queue: str, verb: str, actor: Actor, data: dict[str, str]) -> None:
        with self.file.write() as db:
            parameters = {
                "queue": queue,
                "now": self.file.clock(),
                "by": f"{actor.type}:{actor.id}",
                "reason": data.get("reason"),
                "kind": f"queue.{verb}d",
                "actor_type": actor.type,
                "actor_id": actor.id,
                "data": to_json(data),
            }
            db.execute(self._sql[verb], parameters)
            db.execute(self._sql["queue_event"], parameters)
