"""Step 4 of the walk: grant leases, in one call of tenure.claim_jobs. What it remembers of the last
one is in `memory.py`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from tenure.job import ClaimedJob
from tenure.store import Claim, Registration
from tenure.stores.postgres.base import PostgresBase, to_json
from tenure.stores.postgres.memory import Memory
from tenure.stores.rows import in_order

Types = frozenset[str] | None
# Of the rows of tenure.claim_jobs that are no granted job: those of a queue.
LEASE_NO, REPORT, ROOM, QUEUE, READY_AT = 1, 3, 4, 8, 22


class Claiming(PostgresBase):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._memory: dict[Types, dict[str, Memory]] = {}
        self._lists: dict[Types, list[str] | None] = {}  # of types, as the driver wants them

    def claim(
        self,
        worker: Registration,
        wants: Sequence[tuple[str, int]],
        types: Types = None,
        *,
        suspects: bool = False,
        limit: int | None = None,
        now_ms: int | None = None,
    ) -> Claim:
        wants = [(queue, most) for queue, most in wants if most > 0]
        total = sum(most for _queue, most in wants) if limit is None else limit
        if not wants or total <= 0:
            return Claim([])
        known = {} if suspects else self._memory.setdefault(types, {})
        memories = {queue: known.setdefault(queue, Memory()) for queue, _most in wants}
        sweeps = {queue for queue, memory in memories.items() if memory.claim_sweeps()}
        parameters = {
            "worker": worker.no,
            "worker_id": worker.id,
            "queues": [queue for queue, _most in wants],
            "mosts": [most for _queue, most in wants],
            "total": total,
            "memory": to_json(
                {queue: m.parameters(sweep=queue in sweeps) for queue, m in memories.items()}
            ),
            "types": self._listed(types),
            "suspects": suspects,
            "audit": self.audit,
            "now": self._now(now_ms),
        }
        began = time.monotonic()
        # Not repeated when its reply is lost: the leases nobody heard of are given back by the
        # next renewals, and the next claim takes others.
        rows = self._rows("claim", parameters, repeatable=False)
        jobs = in_order([ClaimedJob._make(row) for row in rows if row[LEASE_NO] > 0])
        if suspects:
            return Claim(jobs)
        last = {(job.queue, job.priority, job.org): job for job in jobs}
        unknown: dict[str, int] = {}
        more = found = False
        for row in rows:
            if row[LEASE_NO] > 0:
                continue
            # A queue that was looked at, which one that is paused was not.
            queue, memory = row[QUEUE], memories[row[QUEUE]]
            if queue in sweeps:
                memory.sweeping = began
            served = [job for lane, job in last.items() if lane[0] == queue]
            news = memory.learn(
                row[REPORT], served, row[READY_AT], bool(row[ROOM]), sweep=queue in sweeps
            )
            if memory.sweeping is not None and not news.more:
                memory.was_swept(memory.sweeping, len(jobs))
            for type_, count in news.unknown.items():
                unknown[type_] = unknown.get(type_, 0) + count
            more, found = more or news.more, found or news.suspects
        return Claim(jobs, unknown, more, found)

    def _listed(self, types: Types) -> list[str] | None:
        if types not in self._lists:
            self._lists[types] = None if types is None else sorted(types)
        return self._lists[types]

    def next_due(self, queues: Sequence[str], *, now_ms: int | None = None) -> int | None:
        """Never later than the next sweep of a queue that may hide something."""
        looked: dict[str, int] = {}
        waits = []
        for memories in self._memory.values():
            for queue in memories.keys() & set(queues):
                memory = memories[queue]
                looked[queue] = max(memory.looked, looked.get(queue, -1))
                if memory.hidden and memory.by_claims:
                    waits.append(max(1, int(memory.sweep_in() * 1000)))
        parameters = {"queues": list(queues), "since": to_json(looked), "now": self._now(now_ms)}
        ((due,),) = self._rows("next_due", parameters)
        return min([*waits, *([] if due is None else [due])], default=None)

    def sweep(self, *, now_ms: int | None = None) -> int:
        """Look for due rows before the remembered places of the queues where a claim should not."""
        found = 0
        for memories in list(self._memory.values()):
            for queue, memory in list(memories.items()):
                if memory.by_claims or memory.sweep_in() > 0:
                    continue
                began = time.monotonic()
                found += memory.compare(
                    self._rows("due_lanes", {"queue": queue, "now": self._now(now_ms)})
                )
                memory.was_swept(began)
        return found
