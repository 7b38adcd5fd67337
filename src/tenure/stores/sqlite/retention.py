"""Retention: what is past its time goes, in bounded batches; nothing failed goes before its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tenure.store import Prune, Pruned
from tenure.stores.sqlite.base import SqliteBase, to_json

if TYPE_CHECKING:
    import sqlite3

HOUR_MS = 3_600_000
FOLDS = (("minute", "hour", 24 * HOUR_MS), ("hour", "total", 90 * 24 * HOUR_MS))
VACUUM_PAGES = 1000
EDGES_PER_PASS = 2000


class Retention(SqliteBase):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pruned_edges = ""  # where the walk over them stands

    def prune(self, keep: Prune, *, now_ms: int | None = None) -> Pruned:
        """Several short transactions, so that nobody waits long behind a large clean-up."""
        now = self._now(now_ms)
        floors = self.floors()
        removed: dict[str, int] = {}

        def sweep(kind: str, statement: str, age: float = 0, **more: object) -> None:
            before = now - int(max(age, floors.get(f"keep_{kind}", age)) * 1000)
            parameters = {"now": now, "before": before, "most": keep.batch, **more}
            with self.file.write() as db:
                count = db.execute(self._sql[statement], parameters).rowcount
            removed[kind] = removed.get(kind, 0) + count

        with self.file.read() as db:
            types = [row[0] for row in db.execute(self._sql["prune_types"]).fetchall()]
        for type_ in types:
            own = keep.tasks.get(type_)
            age = keep.completed if own is None or own.completed is None else own.completed
            sweep("history", "prune_history", age, type=type_)
            if own is not None and own.completed_last is not None:
                last = own.completed_last
                sweep("history", "prune_history_last", -1, type=type_, last=last)
        removed["dead"] = self._prune_dead(keep, now)
        removed["edges"] = self._prune_edges()
        sweep("events", "prune_events", keep.events)
        sweep("keys", "prune_keys")
        sweep("workers", "prune_workers", keep.workers)
        self._fold_rollups(now)
        self.file.shrink(VACUUM_PAGES)
        return Pruned(removed)

    # -- the dead -----------------------------------------------------------------------------
    def _prune_dead(self, keep: Prune, now: int) -> int:
        """Group by group of what died of the same thing: one step each where nothing is to go."""
        gone: list[str] = []
        newest: dict[str, list[tuple[int, str]]] = {}  # of tasks of which the last so many stay
        with self.file.read() as db:
            for queue, type_, death in self._deaths(db):
                own = keep.tasks.get(type_)
                age = keep.dead if own is None or own.dead is None else own.dead
                group = {"queue": queue, "type": type_, "death": death}
                asked = group | {"before": now - int(age * 1000), "most": keep.batch}
                gone += [id for id, _at in db.execute(self._sql["prune_dead_old"], asked)]
                if own is not None and own.dead_last is not None:
                    asked = group | {"most": keep.batch + own.dead_last}
                    rows = db.execute(self._sql["prune_dead_newest"], asked).fetchall()
                    newest.setdefault(type_, []).extend((at, id) for id, at in rows)
        for type_, dead in newest.items():
            last = keep.tasks[type_].dead_last or 0
            gone += [id for _at, id in sorted(dead, reverse=True)[last:]]
        ids = {"ids": to_json(gone[: keep.batch])}
        if not gone:
            return 0
        with self.file.write() as db:
            count = db.execute(self._sql["prune_dead"], ids).rowcount
            db.execute(self._sql["prune_steps"], ids)
        return count

    def _deaths(self, db: sqlite3.Connection) -> Iterator[tuple[str, str, str]]:
        """Every (queue, type, handle) of dead jobs."""
        at: tuple[str, str, str] | None = ("", "", "")
        while at is not None:
            asked = dict(zip(("queue", "type", "death"), at, strict=True))
            at = db.execute(self._sql["death_after"], asked).fetchone()
            if at is not None:
                yield at

    def _prune_edges(self) -> int:
        asked = {"job": self._pruned_edges, "most": EDGES_PER_PASS}
        with self.file.read() as db:
            page = [row[0] for row in db.execute(self._sql["prune_edges_page"], asked)]
        self._pruned_edges = page[-1] if len(page) == EDGES_PER_PASS else ""
        if not page:
            return 0
        with self.file.write() as db:
            ids = {"ids": to_json(sorted(set(page)))}
            return db.execute(self._sql["prune_edges"], ids).rowcount

    def _fold_rollups(self, now: int) -> None:
        for fine, coarse, age in FOLDS:
            before = (now - age) // HOUR_MS * HOUR_MS
            parameters = {"fine": fine, "coarse": coarse, "before": before}
            with self.file.write() as db:
                db.execute(self._sql["fold_rollups"], parameters)
                db.execute(self._sql["drop_folded"], parameters)

    # -- what the owner has laid down -----------------------------------------------------------
    def settings(self) -> dict[str, str]:
        with self.file.read() as db:
            return dict(db.execute(self._sql["settings"]).fetchall())

    def floors(self) -> dict[str, float]:
        """Seconds that finished jobs and events are kept, whatever a worker asks for."""
        found = self.settings()
        return {name: int(found[name]) / 1000 for name in found if name.startswith("keep_")}

    def lay_down(self, name: str, value: str | None, *, by: str) -> None:
        with self.file.write() as db:
            asked = {"name": name, "value": value, "by": by, "now": self.file.clock()}
            db.execute(self._sql["lay_down" if value is not None else "take_back"], asked)
