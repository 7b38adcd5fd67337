"""What keeps a lease and what takes it away: workers, renewal, rescue."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from tenure.store import Renewal, Rescue, WorkerInfo
from tenure.stores.rows import rescue_row, workers_from
from tenure.stores.sqlite.base import to_json
from tenure.stores.sqlite.finishing import Finishing


class Leases(Finishing):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._registered: dict[int, str] = {}  # number -> id, of the workers of this process

    def register(self, worker: WorkerInfo) -> int:
        values = worker._asdict()
        values["meta"] = to_json(worker.meta)
        with self.file.write() as db:
            values["now"] = self.file.clock()
            number: int = db.execute(self._sql["register"], values).fetchone()[0]
        self._registered[number] = worker.id
        return number

    def progress(
        self,
        worker: int,
        reports: Sequence[tuple[str, int, str]],
        *,
        now_ms: int | None = None,
    ) -> list[bool]:
        if not reports:
            return []
        with self.file.write() as db:
            written = db.execute(
                self._sql["progress"],
                {"worker": worker, "rows": to_json(reports), "now": self._now(now_ms)},
            )
            stored = set(written.fetchall())
        return [report[:2] in stored for report in reports]

    def renew(self, worker: int, *, now_ms: int | None = None) -> Renewal | None:
        with self.file.write() as db:
            parameters = {
                "worker": worker,
                "id": self._registered.get(worker),
                "now": self._now(now_ms),
            }
            if db.execute(self._sql["renew"], parameters).fetchone() is None:
                return None
            leases = dict(db.execute(self._sql["held"], parameters).fetchall())
            cancels = dict(db.execute(self._sql["cancel_requests"], parameters).fetchall())
        return Renewal(leases, cancels)

    def cancel_requests(self, worker: int) -> dict[str, str]:
        with self.file.read() as db:
            return dict(db.execute(self._sql["cancel_requests"], {"worker": worker}).fetchall())

    def workers(self, *, count: bool = True) -> list[WorkerInfo]:
        with self.file.read() as db:
            return workers_from(db.execute(self._sql["workers"], {"count": count}).fetchall())

    def rescue(
        self,
        worker: int,
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
            parameters: dict[str, Any] = {
                "worker": worker,
                "beat": beat,
                "reason": reason,
                "now": self._now(now_ms),
                "audit": self.audit,
            }
            if db.execute(self._sql["rescue_declare"], parameters).fetchone() is None:
                return None
            held = db.execute(self._sql["held"], parameters).fetchall()
            charged = {i: limit for i, _no in held if started is None or i in started}
            parameters["rows"] = to_json(
                [rescue_row(i, no, "rescued", reason, charged.get(i)) for i, no in held]
            )
            db.execute("DELETE FROM temp.ended")
            db.execute(self._sql["finish_fence"], parameters)
            poisoned = db.execute(
                "SELECT count(*) FROM temp.ended WHERE status = 'dead_letter'"
            ).fetchone()[0]  # now: whoever waited for them may leave through `ended` too
            self._end(db, parameters, stays=True)
        return Rescue(len(held) - poisoned, poisoned)

    def retire(self, worker: int) -> None:
        with self.file.write() as db:
            db.execute(self._sql["retire"], {"worker": worker, "now": self.file.clock()})
