"""What keeps a lease and what takes it away: workers, renewal, rescue."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from tenure.store import Registration, Renewal, Rescue, Turn, WorkerInfo
from tenure.stores.rows import lost_row, turns_from, workers_from
from tenure.stores.sqlite.base import to_json
from tenure.stores.sqlite.finishing import Finishing


class Leases(Finishing):
    def register(self, worker: WorkerInfo) -> Registration:
        values = worker._asdict()
        values["meta"] = to_json(worker.meta)
        with self.file.write() as db:
            values["now"] = self.file.clock()
            number: int = db.execute(self._sql["register"], values).fetchone()[0]
        return Registration(number, worker.id)

    def progress(
        self,
        worker: Registration,
        reports: Sequence[tuple[str, int, str]],
        *,
        now_ms: int | None = None,
    ) -> list[bool]:
        if not reports:
            return []
        with self.file.write() as db:
            written = db.execute(
                self._sql["progress"],
                _named(worker) | {"rows": to_json(reports), "now": self._now(now_ms)},
            )
            stored = set(written.fetchall())
        return [report[:2] in stored for report in reports]

    def renew(
        self,
        worker: Registration,
        *,
        meta: Mapping[str, object] | None = None,
        now_ms: int | None = None,
    ) -> Renewal | None:
        said = None if meta is None else to_json(meta)
        with self.file.write() as db:
            parameters = _named(worker) | {"meta": said, "now": self._now(now_ms)}
            if db.execute(self._sql["renew"], parameters).fetchone() is None:
                return None
            leases = dict(db.execute(self._sql["held"], parameters).fetchall())
            cancels = dict(db.execute(self._sql["cancel_requests"], parameters).fetchall())
        return Renewal(leases, cancels)

    def cancel_requests(self, worker: Registration) -> dict[str, str]:
        with self.file.read() as db:
            return dict(db.execute(self._sql["cancel_requests"], _named(worker)).fetchall())

    def workers(self, *, count: bool = True) -> list[WorkerInfo]:
        with self.file.read() as db:
            return workers_from(db.execute(self._sql["workers"], {"count": count}).fetchall())

    def rescue(
        self,
        worker: Registration,
        beat: int,
        *,
        started: frozenset[str] | None,
        limit: int,
        reason: str,
        patience: float | None = None,
        now_ms: int | None = None,
    ) -> Rescue | None:
        asked = time.monotonic()
        with self.file.write() as db:
            if patience is not None and time.monotonic() - asked > patience:
                return None
            parameters: dict[str, Any] = _named(worker) | {
                "beat": beat,
                "reason": reason,
                "now": self._now(now_ms),
                "audit": self._trail(db),
            }
            if db.execute(self._sql["rescue_declare"], parameters).fetchone() is None:
                return None
            held = db.execute(self._sql["held"], parameters).fetchall()
            charged = {i: limit for i, _no in held if started is None or i in started}
            parameters["rows"] = to_json(
                [lost_row(i, no, reason, charged.get(i)) for i, no in held]
            )
            db.execute("DELETE FROM temp.ended")
            db.execute(self._sql["finish_fence"], parameters)
            lost = db.execute(
                "SELECT id FROM temp.ended WHERE status = 'dead_letter' ORDER BY id"
            ).fetchall()  # now: whoever waited for them may leave through `ended` too
            self._end(db, parameters, stays=True)
        return Rescue(len(held) - len(lost), len(lost), tuple(id for (id,) in lost))

    def retire(self, worker: Registration) -> None:
        with self.file.write() as db:
            db.execute(self._sql["retire"], _named(worker) | {"now": self.file.clock()})

    def take_turn(self, upkeep: str, every: float, *, now_ms: int | None = None) -> bool:
        with self.file.write() as db:
            asked = {"name": upkeep, "every_ms": int(every * 1000), "now": self._now(now_ms)}
            return db.execute(self._sql["take_turn"], asked).fetchone() is not None

    def end_turn(self, upkeep: str, note: Mapping[str, object]) -> None:
        with self.file.write() as db:
            db.execute(self._sql["end_turn"], {"name": upkeep, "note": to_json(note)})

    def turns(self) -> dict[str, Turn]:
        with self.file.read() as db:
            return turns_from(db.execute(self._sql["turns"]).fetchall())


def _named(worker: Registration) -> dict[str, Any]:
    return {"worker": worker.no, "worker_id": worker.id}
