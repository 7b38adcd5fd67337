"""What keeps a lease and what takes it away: workers, renewal, rescue."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from tenure.store import Registration, Renewal, Rescue, Turn, WorkerInfo
from tenure.stores.postgres.base import to_json
from tenure.stores.postgres.database import to_uuid_text, to_uuids
from tenure.stores.postgres.finishing import Finishing
from tenure.stores.rows import turns_from, workers_from


class Leases(Finishing):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._renewal_seconds = self.database.timeout

    def register(self, worker: WorkerInfo) -> Registration:
        """A renewal that is not answered must leave time for another, on another connection."""
        self._renewal_seconds = min(self.database.timeout, worker.lease_ms / 4000)
        values = worker._asdict() | {"meta": to_json(worker.meta), "now": self._now(None)}
        ((number,),) = self._rows("register", values)
        return Registration(int(number), worker.id)

    def progress(
        self,
        worker: Registration,
        reports: Sequence[tuple[str, int, str]],
        *,
        now_ms: int | None = None,
    ) -> list[bool]:
        if not reports:
            return []
        latest = {(id, lease_no): text for id, lease_no, text in reports}
        rows = ",".join(
            f'{{"id":"{to_uuid_text(id)}","lease_no":{lease_no},"progress":{text}}}'
            for (id, lease_no), text in sorted(latest.items())
        )
        parameters = _named(worker) | {
            "ids": to_uuids(sorted({id for id, _lease_no in latest})),
            "rows": f"[{rows}]",
            "now": self._now(now_ms),
        }
        stored = set(self._rows("progress", parameters))
        return [report[:2] in stored for report in reports]

    def renew(
        self,
        worker: Registration,
        *,
        meta: Mapping[str, object] | None = None,
        now_ms: int | None = None,
    ) -> Renewal | None:
        said = None if meta is None else to_json(meta)
        parameters = _named(worker) | {"meta": said, "now": self._now(now_ms)}
        rows = self._rows("renew", parameters, reserved=True, timeout=self._renewal_seconds)
        if not rows:
            return None
        held = [row for row in rows if row[0] is not None]
        return Renewal(
            {id: lease_no for id, lease_no, _reason in held},
            {id: reason for id, _lease_no, reason in held if reason is not None},
        )

    def cancel_requests(self, worker: Registration) -> dict[str, str]:
        return dict(self._rows("cancel_requests", {"worker": worker.no}))

    def workers(self, *, count: bool = True) -> list[WorkerInfo]:
        return workers_from(self._rows("workers", {"count": count}))

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
        not_after = None
        if patience is not None:
            # The server's own clock bounds the rest: however long our statement is on its way or
            # waits there, it is too late after that.
            asked = time.monotonic()
            ((clock,),) = self._rows("clock", {})
            if time.monotonic() - asked > patience:
                return None
            not_after = clock + int(patience * 1000)
        parameters = _named(worker) | {
            "beat": beat,
            "started": None if started is None else to_uuids(sorted(started)),
            "limit": limit,
            "reason": reason,
            "not_after": not_after,
            "audit": self.audit,
            "now": self._now(now_ms),
        }
        rows = self._rows("rescue", parameters)
        if not rows:
            return None
        if rows[0][0]:
            self._hint([""])
        requeued, lost, set_aside = rows[0]
        return Rescue(requeued, lost, tuple(set_aside))

    def retire(self, worker: Registration) -> None:
        self._rows("retire", _named(worker) | {"now": self._now(None)})

    def take_turn(self, upkeep: str, every: float, *, now_ms: int | None = None) -> bool:
        every_ms = int(every * 1000)
        parameters = {"name": upkeep, "every_ms": every_ms, "now": self._now(now_ms)}
        ((mine,),) = self._rows("take_turn", parameters)
        return bool(mine)

    def end_turn(self, upkeep: str, note: Mapping[str, object]) -> None:
        self._rows("end_turn", {"name": upkeep, "note": to_json(note)})

    def turns(self) -> dict[str, Turn]:
        return turns_from(self._rows("turns", {}))


def _named(worker: Registration) -> dict[str, Any]:
    return {"worker": worker.no, "worker_id": worker.id}
