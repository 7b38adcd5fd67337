"""Retention: what is past its time goes, whole days at once where nothing of them is kept, else in
bounded batches; nothing failed goes before its own time."""

from __future__ import annotations

from typing import Any

from tenure.store import Prune, Pruned
from tenure.stores.postgres.base import PostgresBase
from tenure.stores.postgres.database import to_uuid_text

HOUR_MS = 3_600_000
# Where finished jobs are kept for days, whole days go at once, by dropping their partition; only
# what is still there a day after its time (in a partition of which something is kept) goes row by
# row. A shorter time, and the terms a task has of its own, are kept to the row.
DAY_SECONDS = 86_400.0
EDGES_PER_PASS = 2000
FIRST_ID = "00000000-0000-0000-0000-000000000000"
FOLDS = (("minute", "hour", 24 * HOUR_MS), ("hour", "total", 90 * 24 * HOUR_MS))


class Retention(PostgresBase):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pruned_edges = FIRST_ID  # where the walk over them stands

    def prune(self, keep: Prune, *, now_ms: int | None = None) -> Pruned:
        """Several short transactions, so that nobody waits long behind a large clean-up."""
        ((clock,),) = self._rows("clock", {})
        now = self._now(now_ms) or clock
        removed: dict[str, int] = {}
        days, held = 0, None
        own_terms = sorted(keep.tasks)

        def sweep(kind: str, statement: str, age: float = 0, **more: object) -> None:
            before = now - int(age * 1000)
            parameters = {"now": now, "before": before, "most": keep.batch, **more}
            ((count,),) = self._rows(statement, parameters)
            removed[kind] = removed.get(kind, 0) + int(count)

        own_days = {
            "keep_history": now - int(keep.completed * 1000),
            "keep_events": now - int(keep.events * 1000),
        }
        if keep.days:
            days, held = self._turn_partitions(own_days, clock, own_terms)
        self.horizon.note()
        whole_days = keep.completed >= 2 * DAY_SECONDS
        usual = keep.completed + (DAY_SECONDS if whole_days else 0)
        for (type_,) in self._rows("prune_types", {}):
            mine = keep.tasks.get(type_)
            age = usual if mine is None or mine.completed is None else mine.completed
            sweep("history", "prune_history", age, type=type_, last=None)
            if mine is not None and mine.completed_last is not None:
                last = mine.completed_last
                sweep("history", "prune_history", -DAY_SECONDS, type=type_, last=last)
        for type_, own in keep.tasks.items():
            if own.dead_last is not None:
                last = own.dead_last
                sweep("dead", "prune_dead", types=[type_], others=False, last=last)
            age = keep.dead if own.dead is None else own.dead
            sweep("dead", "prune_dead", age, types=[type_], others=False, last=None)
        sweep("dead", "prune_dead", keep.dead, types=own_terms, others=True, last=None)
        removed["edges"] = self._prune_edges()
        sweep("events", "prune_events", keep.events)
        sweep("keys", "prune_keys")
        sweep("workers", "prune_workers", keep.workers)
        for fine, coarse, age_ms in FOLDS:
            before = (now - age_ms) // HOUR_MS * HOUR_MS
            self._rows("fold_rollups", {"fine": fine, "coarse": coarse, "before": before})
        return Pruned(removed, days, held)

    def _prune_edges(self) -> int:
        asked = {"job": self._pruned_edges, "most": EDGES_PER_PASS}
        ((gone, job),) = self._rows("prune_edges", asked)
        self._pruned_edges = FIRST_ID if job is None else to_uuid_text(job)
        return int(gone)

    # -- what the owner has laid down -----------------------------------------------------------
    def settings(self) -> dict[str, str]:
        return dict(self._rows("settings", {}))

    def lay_down(self, name: str, value: str | None, *, by: str) -> None:
        statement = "lay_down" if value is not None else "take_back"
        self._rows(statement, {"name": name, "value": value})

    # -- days ---------------------------------------------------------------------------------
    def _turn_partitions(
        self, keep: dict[str, int], clock: int, own_terms: list[str]
    ) -> tuple[int, str | None]:
        """Days to come get their partitions, by the server's clock: that is where rows will go.
        Days that are over lose theirs, each in a transaction of its own, until somebody is in the
        way. How many went, and who was."""
        self._rows("add_partitions", {"now": clock})
        dropped = 0
        for (partition,) in self._rows("old_days", keep):
            asked = keep | {"partition": partition, "types": own_terms}
            ((verdict,),) = self._rows("drop_day", asked)
            if verdict == "held":
                return dropped, f"{partition} could not be dropped: {self._holder(partition)}"
            dropped += verdict == "dropped"
        return dropped, None

    def _holder(self, partition: str) -> str:
        """The oldest transaction that has a lock on the table, as far as our role may see."""
        for pid, role, program, seconds in self._rows("lock_holders", {"partition": partition}):
            if pid is None:
                return "a prepared transaction has a lock on it"
            since = "" if seconds is None else f", for {seconds:.0f} s"
            return f"session {pid} ({role}, {program or 'unnamed'}) has a lock on it{since}"
        return "somebody had a lock on it"
