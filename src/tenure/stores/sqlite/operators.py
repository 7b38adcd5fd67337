"""What operators do to jobs and queues, each act on record; and retention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tenure.job import DEAD, Actor
from tenure.store import Prune
from tenure.stores.sqlite.base import to_json
from tenure.stores.sqlite.leases import Leases

if TYPE_CHECKING:
    import sqlite3

DAY_MS = 86_400_000


class Operators(Leases):
    def cancel(
        self, ids: Sequence[str], *, actor: Actor, reason: str, org: str | None = None
    ) -> dict[str, str]:
        with self.file.write() as db:
            verdicts, by_status = self._statuses(db, ids, org)
            parameters = self._operator(actor, reason, "cancelled")
            queued, running = by_status.get("queued", []), by_status.get("in_progress", [])
            if queued:
                self._withdraw(db, parameters | {"ids": to_json(queued), "kind": "job.cancelled"})
                verdicts.update(dict.fromkeys(queued, "cancelled"))
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
                db.execute(self._sql["operator_events"], parameters)
                db.execute(self._sql["replay"], parameters)
                db.execute(self._sql["replay_keys"], parameters)
                if payload is not None:
                    db.execute(self._sql["replay_steps"], parameters)
                verdicts.update(dict.fromkeys(dead, "queued"))
        return verdicts

    def discard(
        self, ids: Sequence[str], *, actor: Actor, reason: str, org: str | None = None
    ) -> dict[str, str]:
        with self.file.write() as db:
            verdicts, by_status = self._statuses(db, ids, org)
            dead = [id for status in DEAD for id in by_status.get(status, [])]
            if dead:
                parameters = self._operator(actor, reason, "discarded")
                self._withdraw(db, parameters | {"ids": to_json(dead), "kind": "job.discarded"})
                verdicts.update(dict.fromkeys(dead, "cancelled"))
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

    def _operator(self, actor: Actor, reason: str, code: str) -> dict[str, Any]:
        return {
            "now": self.file.clock(),
            "actor_type": actor.type,
            "actor_id": actor.id,
            "reason": reason,
            "code": code,
            "data": to_json({"reason": reason}) if reason else None,
            "worker": 0,
        }

    def _withdraw(self, db: sqlite3.Connection, parameters: dict[str, Any]) -> None:
        db.execute("DELETE FROM temp.ended")
        db.execute(self._sql["operator_events"], parameters)
        db.execute(self._sql["operator_end"], parameters)
        self._leave(db, parameters)

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

    def prune(self, keep: Prune, *, now_ms: int | None = None) -> Mapping[str, int]:
        """Several short transactions, so that nobody waits long behind a large clean-up."""
        now = self._now(now_ms)
        removed: dict[str, int] = {}

        def sweep(kind: str, statement: str, age: float, **more: object) -> None:
            with self.file.write() as db:
                before = now - int(age * 1000)
                parameters = {"now": now, "before": before, "most": keep.batch, **more}
                count = db.execute(self._sql[statement], parameters).rowcount
            removed[kind] = removed.get(kind, 0) + count

        with self.file.read() as db:
            types = [row[0] for row in db.execute(self._sql["prune_types"]).fetchall()]
        for type_ in types:
            sweep("finished", "prune_history", keep.completed, type=type_)
        sweep("dead", "prune_dead", keep.dead)
        sweep("events", "prune_events", keep.events)
        sweep("keys", "prune_keys", 0)
        sweep("workers", "prune_workers", keep.workers)
        for fine, coarse, age in (
            ("minute", "hour", DAY_MS),
            ("hour", "total", 90 * DAY_MS),
        ):
            parameters = {
                "fine": fine,
                "coarse": coarse,
                "before": (now - age) // 3600000 * 3600000,
            }
            with self.file.write() as db:
                db.execute(self._sql["fold_rollups"], parameters)
                db.execute(self._sql["drop_folded"], parameters)
        return removed
