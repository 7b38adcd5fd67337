"""Retention: what is past its time goes, in bounded batches; nothing failed goes before its own."""

from __future__ import annotations

from collections.abc import Mapping

from tenure.store import Prune
from tenure.stores.sqlite.base import SqliteBase, to_json

HOUR_MS = 3_600_000
FOLDS = (("minute", "hour", 24 * HOUR_MS), ("hour", "total", 90 * 24 * HOUR_MS))
VACUUM_PAGES = 1000


class Retention(SqliteBase):
    def prune(self, keep: Prune, *, now_ms: int | None = None) -> Mapping[str, int]:
        """Several short transactions, so that nobody waits long behind a large clean-up."""
        now = self._now(now_ms)
        removed: dict[str, int] = {}

        def sweep(kind: str, statement: str, age: float = 0, **more: object) -> None:
            before = now - int(age * 1000)
            parameters = {"now": now, "before": before, "most": keep.batch, **more}
            with self.file.write() as db:
                count = db.execute(self._sql[statement], parameters).rowcount
            removed[kind] = removed.get(kind, 0) + count

        with self.file.read() as db:
            types = [row[0] for row in db.execute(self._sql["prune_types"]).fetchall()]
        for type_ in types:
            own = keep.tasks.get(type_)
            age = keep.completed if own is None or own.completed is None else own.completed
            sweep("finished", "prune_history", age, type=type_)
        for type_, own in keep.tasks.items():
            if own.completed_last is not None:
                sweep("finished", "prune_history_last", type=type_, last=own.completed_last)
            if own.dead_last is not None:
                sweep("dead", "prune_dead_last", type=type_, last=own.dead_last)
            age = keep.dead if own.dead is None else own.dead
            sweep("dead", "prune_dead_type", age, type=type_)
        sweep("dead", "prune_dead", keep.dead, types=to_json(sorted(keep.tasks)))
        sweep("steps", "prune_steps")
        sweep("edges", "prune_edges")
        sweep("events", "prune_events", keep.events)
        sweep("keys", "prune_keys")
        sweep("workers", "prune_workers", keep.workers)
        self._fold_rollups(now)
        self.file.shrink(VACUUM_PAGES)
        return removed

    def _fold_rollups(self, now: int) -> None:
        for fine, coarse, age in FOLDS:
            before = (now - age) // HOUR_MS * HOUR_MS
            parameters = {"fine": fine, "coarse": coarse, "before": before}
            with self.file.write() as db:
                db.execute(self._sql["fold_rollups"], parameters)
                db.execute(self._sql["drop_folded"], parameters)
