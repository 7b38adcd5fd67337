"""Step 7 of the walk: end runs behind the fence, with everything that follows from it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import msgspec
import psycopg
from psycopg.rows import tuple_row

from tenure import outcome
from tenure.errors import SchemaError, StoreBusy, StoreError, StoreUnavailable
from tenure.job import NewJob
from tenure.store import Accepted, AsyncSettlement, Registration, Settlement
from tenure.stores.libraries import known_as
from tenure.stores.postgres import callers, joining
from tenure.stores.postgres.base import to_json
from tenure.stores.postgres.database import to_uuid_text, to_uuids
from tenure.stores.postgres.enqueue import Enqueueing
from tenure.stores.postgres.explaining import CONFLICTS
from tenure.stores.postgres.joining import Joined
from tenure.stores.rows import decoded, finish_row

EDGES_PER_PASS = 1000
LENDERS = CONFLICTS | {None}  # late, lost or in somebody's way: told by who lent the connection
FIRST_ID = "00000000-0000-0000-0000-000000000000"

log = logging.getLogger("tenure.store")

Call = tuple[str, dict[str, Any]]  # the name of a statement and its parameters


class Finishing(Enqueueing):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._walked: tuple[str, str] | None = None  # where the walk over unmet edges stands

    def finish(
        self, worker: Registration, ended: Sequence[outcome.Ended], *, now_ms: int | None = None
    ) -> list[Accepted]:
        if not ended:
            return []
        children = [job for end in ended for job in _children(end)]
        self._know_queues(children)
        missed = self._write_finish(worker, ended, now_ms)
        verdicts: list[Accepted] = ["accepted"] * len(ended)
        if missed:
            repeated = self._rows("finish_repeated", _runs(worker, ended))
            if repeated:
                self._rows("flush", {})
            verdicts = _verdicts(ended, missed, repeated)
        self._hint({job.terms.queue for job in children})
        return verdicts

    def settled(self, job_id: str, lease_no: int) -> bool:
        found = self._rows("settled", {"id": to_uuid_text(job_id), "lease_no": lease_no})
        if found:
            self._rows("flush", {})
        return bool(found)

    def _write_finish(
        self, worker: Registration, ended: Sequence[outcome.Ended], now_ms: int | None
    ) -> list[tuple[Any, ...]]:
        """What was not accepted. A value the short way cannot take, the long one may."""
        if all(isinstance(e.outcome, outcome.Completed) and not e.outcome.children for e in ended):
            try:
                return self._rows(*self._completed_call(worker, ended, now_ms))
            except (StoreBusy, StoreUnavailable, SchemaError):
                raise
            except StoreError as error:
                log.warning("a batch of finishes is written another way: %s", error)
        return self._rows(*self._finish_call(worker, ended, now_ms))

    def _completed_call(
        self, worker: Registration, ended: Sequence[outcome.Ended], now_ms: int | None
    ) -> Call:
        """The hot path. In id order, like every batch: two of them cannot wait in a circle."""
        ended = sorted(ended, key=_id)
        results = [e.outcome.result or "null" for e in ended]  # type: ignore[union-attr]
        return "finish_completed", _runs(worker, ended) | {
            "durations": _array([end.duration_ms for end in ended]),
            "results": None if set(results) == {"null"} else f"[{','.join(results)}]",
            "audit": self.audit,
            "now": self._now(now_ms),
        }

    def _finish_call(
        self,
        worker: Registration,
        ended: Sequence[outcome.Ended],
        now_ms: int | None,
        *,
        strict: bool = False,
    ) -> Call:
        """The statement that ends these runs. `strict`: follow-ups that cannot be stored are the
        caller's error (JobError)."""
        return "finish", {
            "worker": worker.no,
            "worker_id": worker.id,
            "rows": to_json([_row(end) for end in ended]),
            "children": self._children_text(ended),
            "strict": strict,
            "audit": self.audit,
            "now": self._now(now_ms),
        }

    def _children_text(self, ended: Sequence[outcome.Ended]) -> str:
        families = []
        seen: set[str] = set()  # the same run twice in one batch: its first word counts
        for end in ended:
            children = _children(end)
            if children and end.id not in seen:
                families.append(
                    f'{{"id":"{to_uuid_text(end.id)}","jobs":{self.jobs_text(children)}}}'
                )
            seen.add(end.id)
        return f"[{','.join(families)}]"

    def settle_dependants(self, *, now_ms: int | None = None) -> int:
        if not self._rows("anything_waits", {}):
            return 0
        job, needs = self._walked or (FIRST_ID, FIRST_ID)
        parameters = {"job": job, "needs": needs, "most": EDGES_PER_PASS, "now": self._now(now_ms)}
        ((changed, job, needs),) = self._rows("settle_dependants", parameters)
        self._walked = None if job is None else (to_uuid_text(job), to_uuid_text(needs))
        return int(changed)

    # -- what a running handler writes ----------------------------------------------------------
    def steps(self, job_id: str) -> dict[str, str]:
        return dict(self._rows("steps", {"job": to_uuid_text(job_id)}))

    def save_step(
        self,
        worker: Registration,
        run: tuple[str, int],
        name: str,
        result: str,
        *,
        now_ms: int | None = None,
    ) -> bool:
        parameters = {
            "worker": worker.no,
            "worker_id": worker.id,
            "job": to_uuid_text(run[0]),
            "lease_no": run[1],
            "name": name,
            "result": result,
            "now": self._now(now_ms),
        }
        ((saved,),) = self._rows("save_step", parameters)
        return bool(saved)

    def results(self, job_id: str) -> dict[str, tuple[str, Any]]:
        rows = self._rows("results", {"job": to_uuid_text(job_id)})
        return {needs: (status, decoded(result)) for needs, status, result in rows}

    @contextmanager
    def transaction(self, limit: float, conn: Any = None) -> Iterator[Settlement]:
        if conn is None:
            with self.database.lend(limit) as connection:
                settlement = _Settlement(self, connection)
                yield settlement
        else:
            with joining.joined(self.database, conn, limit, self._know_home()) as joined:
                settlement = _Settlement(self, conn, *joined)
                yield settlement
        self._hint(settlement.queues)

    @asynccontextmanager
    async def atransaction(self, limit: float, conn: Any = None) -> AsyncIterator[AsyncSettlement]:
        if conn is None:
            async with self.database.alend(limit) as connection:
                settlement = _AsyncSettlement(self, connection)
                yield settlement
        else:
            home = self._home or await asyncio.to_thread(self._know_home)
            async with joining.ajoined(self.database, conn, limit, home) as joined:
                settlement = _AsyncSettlement(self, conn, *joined)
                yield settlement
        self._hint(settlement.queues)


class _Settlement:
    """The handler's own errors stay the driver's; those of the finish are told as ours.
    `connection` is the handler's; where that is a library's, `joined` has the driver's."""

    def __init__(
        self, store: Finishing, connection: Any, unit: Any = None, joined: Joined | None = None
    ) -> None:
        self._store = store
        self._unit = unit
        self._joined = joined
        self._driver = connection if joined is None else joined.driver
        self.connection = connection
        self.queues: set[str] = set()

    def finish(self, worker: Registration, end: outcome.Ended) -> Accepted:
        if self._joined is not None:
            self._unit.complete()
            self._joined.check()
        try:
            with psycopg.Cursor(self._driver, row_factory=tuple_row) as cursor:
                cursor.execute(*self._call(worker, end))
                if not cursor.fetchone():
                    return "accepted"
                cursor.execute(*self._asked_before(worker, end))
                return "repeated" if cursor.fetchone() else "refused"
        except psycopg.Error as error:
            if error.sqlstate in LENDERS:
                raise
            self._store.database.refuse(error)

    def _call(self, worker: Registration, end: outcome.Ended) -> Call:
        self.queues = {job.terms.queue for job in _children(end)}
        name, parameters = self._store._finish_call(worker, [end], None, strict=True)
        return self._store.database.sql(name), parameters

    def _asked_before(self, worker: Registration, end: outcome.Ended) -> Call:
        return self._store.database.sql("finish_repeated"), _runs(worker, [end])


class _AsyncSettlement(_Settlement):
    async def finish(  # type: ignore[override]
        self, worker: Registration, end: outcome.Ended
    ) -> Accepted:
        if self._joined is not None:
            await self._unit.complete()
            self._joined.check()
        try:
            if not await self._fetch(*self._call(worker, end)):
                return "accepted"
            return "repeated" if await self._fetch(*self._asked_before(worker, end)) else "refused"
        except psycopg.Error as error:
            if error.sqlstate in LENDERS:
                raise
            self._store.database.refuse(error)

    async def _fetch(self, statement: str, parameters: dict[str, Any]) -> list[Any]:
        if known_as(self._driver, callers.DRIVERS) == "asyncpg":
            with callers.explained():
                text, values = callers.numbered(statement, parameters)
                rows: list[Any] = await self._driver.fetch(text, *values)
                return rows
        async with psycopg.AsyncCursor(self._driver, row_factory=tuple_row) as cursor:
            await cursor.execute(statement, parameters)
            return await cursor.fetchall()


def _id(end: outcome.Ended) -> str:
    return end.id


def _children(end: outcome.Ended) -> tuple[NewJob, ...]:
    return end.outcome.children if isinstance(end.outcome, outcome.Completed) else ()


def _runs(worker: Registration, ended: Sequence[outcome.Ended]) -> dict[str, Any]:
    return {
        "worker": worker.no,
        "worker_id": worker.id,
        "ids": to_uuids(end.id for end in ended),
        "lease_nos": _array([end.lease_no for end in ended]),
    }


def _array(numbers: list[int]) -> str:
    """An array as the server reads it; the driver takes four times as long for a list."""
    return f"{{{','.join(map(str, numbers))}}}"


def _row(end: outcome.Ended) -> list[object]:
    """A row of tenure.finish: the id as uuid, the result, JSON already, spliced in."""
    row = list(finish_row(end))
    row[0] = to_uuid_text(end.id)
    if len(row) > 6 and row[6] is not None:
        row[6] = msgspec.Raw(str(row[6]).encode())
    return row


def _verdicts(
    ended: Sequence[outcome.Ended],
    missed: Sequence[tuple[Any, ...]],
    repeated: Sequence[tuple[Any, ...]],
) -> list[Accepted]:
    refused, before = set(missed), set(repeated)
    verdicts: list[Accepted] = []
    for end in ended:
        run = (end.id, end.lease_no)
        if (end.id, None) in refused:
            verdicts.append("disowned")
        elif run not in refused:
            verdicts.append("accepted")
        else:
            verdicts.append("repeated" if run in before else "refused")
    return verdicts
