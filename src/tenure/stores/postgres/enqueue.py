"""Step 2 of the walk: store new jobs, on our own connection or on the caller's."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Sequence
from typing import Any

import psycopg

from tenure.errors import JobError, StoreError
from tenure.job import NewJob, Receipt, Terms
from tenure.stores.postgres import callers
from tenure.stores.postgres.base import PostgresBase, to_json
from tenure.stores.postgres.connecting import CANCEL_SECONDS, CannotConnect, Late
from tenure.stores.postgres.database import to_uuid_text, to_uuids
from tenure.stores.postgres.pool import NoneFree
from tenure.stores.rows import refuse_circles, refuse_twins, shared_parameters

AGAIN_SECONDS = 1.0  # for a second try, where the first has taken all the time there was
UNSURE = 10_000  # ids that are remembered: some of a batch are enough to know it


def _left(until: float | None) -> float | None:
    return None if until is None else max(0.0, until - time.monotonic())


def receipts_from(rows: Sequence[tuple[Any, ...]]) -> list[Receipt]:
    """A row without an id says why the batch was refused."""
    if rows and rows[0][0] is None:
        raise JobError(rows[0][2])
    return list(map(Receipt._make, rows))


class Enqueueing(PostgresBase):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._queues: set[str] = set()  # names this process has seen committed
        self._bound: tuple[Terms | None, dict[str, Any]] = (None, {})
        self._fields: tuple[Terms | None, str] = (None, "")
        self._home: str | None = None
        self._unsure: dict[str, None] = {}  # ids whose enqueue ended unknown, the oldest first

    def enqueue(
        self, jobs: Sequence[NewJob], *, retry: bool = False, now_ms: int | None = None
    ) -> list[Receipt]:
        """Within `enqueue_timeout`: a web request may wait for it. The ids are ours, so a call
        whose reply was lost is repeated without doubling a job, by us and, when that failed as
        well, by the caller."""
        if not jobs:
            return []
        refuse_twins(jobs)
        retry = retry or (bool(self._unsure) and any(job.id in self._unsure for job in jobs))
        first = jobs[0].terms
        plain = not retry and all(
            job.key is None and not job.after and job.terms is first for job in jobs
        )
        deadline = time.monotonic() + self.enqueue_timeout
        # An answer to the cancel of what takes too long is waited for as well.
        until = deadline - min(CANCEL_SECONDS, self.enqueue_timeout / 5)
        if plain:
            self._know_queues(jobs, until)
        try:
            if plain and len(jobs) == 1:
                receipts = self._enqueue_one(jobs[0], now_ms, until)
            elif plain and all(job.at_ms is None for job in jobs):
                receipts = self._enqueue_alike(jobs, now_ms, until)
            else:
                receipts = self._enqueue_any(jobs, retry, now_ms, until)
        except StoreError as error:
            if not error.unknown and type(error) is not StoreError:
                error.unknown = retry
                raise
            if isinstance(error.__context__, Late) and error.__context__.silent:
                self._remember(jobs)
                raise
            # The reply was lost; or it was a value, an id that is stored already: say which.
            until = max(time.monotonic() + AGAIN_SECONDS, deadline)
            receipts = self._enqueue_again(jobs, retry or error.unknown, now_ms, until)
        else:
            if plain and len(jobs) == 1:
                return receipts  # it was hinted with the call, or soon will be
        if retry:
            for job in jobs:
                self._unsure.pop(job.id, None)
        self._hint({job.terms.queue for job in jobs})
        return receipts

    def _enqueue_again(
        self, jobs: Sequence[NewJob], again: bool, now_ms: int | None, until: float
    ) -> list[Receipt]:
        try:
            return self._enqueue_any(jobs, again, now_ms, until)
        except StoreError as error:
            error.unknown = error.unknown or again
            if error.unknown:
                self._remember(jobs)
            raise

    def _remember(self, jobs: Sequence[NewJob]) -> None:
        self._unsure.update((job.id, None) for job in jobs)
        for oldest in list(self._unsure)[:-UNSURE]:
            self._unsure.pop(oldest, None)

    def enqueue_on(
        self, connection: Any, jobs: Sequence[NewJob]
    ) -> list[Receipt] | Awaitable[list[Receipt]]:
        """On the caller's connection and in the caller's transaction, in one round trip. Receipts,
        or an awaitable of them when the connection is an asynchronous one. The hint goes out when
        the transaction has committed."""
        if callers.is_async(connection):
            return self._aenqueue_on(connection, jobs)
        self._prepare(jobs)
        return self._join(connection, jobs)

    async def _aenqueue_on(self, connection: Any, jobs: Sequence[NewJob]) -> list[Receipt]:
        if self._home is None or not {job.terms.queue for job in jobs} <= self._queues:
            import asyncio

            await asyncio.to_thread(self._prepare, jobs)  # our own connection blocks
        receipts = self._join(connection, jobs)
        return receipts if isinstance(receipts, list) else await receipts

    def _join(
        self, connection: Any, jobs: Sequence[NewJob]
    ) -> list[Receipt] | Awaitable[list[Receipt]]:
        refuse_twins(jobs)
        return callers.enqueue_on(
            connection,
            self.database.sql("enqueue_here"),
            self._parameters(jobs, False, None) | {"home": self._home},
            self.notices,
            {job.terms.queue for job in jobs},
        )

    def _prepare(self, jobs: Sequence[NewJob]) -> None:
        """What is done once, on a connection of ours: which database is home, and new queues."""
        until = time.monotonic() + self.enqueue_timeout
        self._know_queues(jobs, until)
        self._know_home(until)

    def _know_home(self, until: float | None = None) -> str | None:
        if self._home is None:
            ((self._home,),) = self._rows("home", {}, timeout=_left(until))
        return self._home

    def _know_queues(self, jobs: Sequence[NewJob], until: float | None = None) -> None:
        """New names first and apart: in a long transaction of a caller's an uncommitted one would
        make everybody wait who uses the name for the first time too."""
        names = {job.terms.queue for job in jobs} - self._queues
        for name in sorted(names):
            named = {"queue": name, "now": self._now(None)}
            self._rows("add_queue", named, timeout=_left(until))
            self._queues.add(name)

    def _enqueue_one(self, job: NewJob, now_ms: int | None, until: float) -> list[Receipt]:
        parameters = {
            **self._bind(job.terms),
            "id": to_uuid_text(job.id),
            "payload": job.payload,
            "delay_ms": job.delay_ms,
            "at_ms": job.at_ms,
            "now": self._now(now_ms),
        }
        # With its hint it is a procedure that commits, which it cannot inside a transaction.
        if not self.database.begins and self.notices.take(job.terms.queue):
            stored = self._store_and_hint(parameters, until)
        else:
            left = _left(until)
            stored = self._rows("enqueue_job", parameters, repeatable=False, timeout=left)
            self._hint([job.terms.queue])
        if stored == [(0,)]:
            return self._enqueue_any([job], False, now_ms, until)  # says why
        return [Receipt(job.id, False, "queued")]

    def _store_and_hint(self, parameters: dict[str, Any], until: float) -> list[tuple[Any, ...]]:
        try:
            named = parameters | {"channel": self.database.schema}
            left = _left(until)
            return self._rows("enqueue_job_and_hint", named, repeatable=False, timeout=left)
        except StoreError as error:
            before = (CannotConnect, NoneFree, psycopg.IntegrityError)
            if not isinstance(error.__context__, before):
                error.unknown = True  # it may have been the wait for the disk, after the commit
            raise

    def _enqueue_alike(
        self, jobs: Sequence[NewJob], now_ms: int | None, until: float
    ) -> list[Receipt]:
        delays = [job.delay_ms for job in jobs]
        parameters = {
            **self._bind(jobs[0].terms),
            "ids": to_uuids(job.id for job in jobs),
            "delays": delays if any(delays) else None,
            "payloads": f"[{','.join([job.payload for job in jobs])}]",
            "now": self._now(now_ms),
        }
        left = _left(until)
        if self._rows("enqueue_plain", parameters, repeatable=False, timeout=left) == [(0,)]:
            return self._enqueue_any(jobs, False, now_ms, until)  # says why
        return [Receipt(job.id, False, "queued") for job in jobs]

    def _enqueue_any(
        self, jobs: Sequence[NewJob], again: bool, now_ms: int | None, until: float
    ) -> list[Receipt]:
        parameters = self._parameters(jobs, again, now_ms)
        rows = self._rows("enqueue_jobs", parameters, repeatable=again, timeout=_left(until))
        return receipts_from(rows)

    def _parameters(
        self, jobs: Sequence[NewJob], again: bool, now_ms: int | None
    ) -> dict[str, Any]:
        refuse_circles([job for job in jobs if job.after])
        return {
            "jobs": self.jobs_text(jobs),
            "again": again,
            "audit": self.audit,
            "now": self._now(now_ms),
        }

    def jobs_text(self, jobs: Sequence[NewJob]) -> str:
        """The JSON that tenure.enqueue_jobs reads; payloads, JSON already, are spliced in."""
        return f"[{','.join(map(self._job_text, jobs))}]"

    def _job_text(self, job: NewJob) -> str:
        parts = [f'"id":"{to_uuid_text(job.id)}","payload":{job.payload}', self._shared(job.terms)]
        if job.at_ms is not None:
            parts.append(f'"at_ms":{job.at_ms}')
        elif job.delay_ms:
            parts.append(f'"delay_ms":{job.delay_ms}')
        if job.key is not None:
            parts.append(f'"key":{to_json(job.key)}')
        if job.after:
            parts.append(f'"after":{to_json(list(map(to_uuid_text, job.after)))}')
        return f"{{{','.join(parts)}}}"

    def _shared(self, terms: Terms) -> str:
        """The fields that jobs of the same terms share; those of the last terms are kept."""
        last, text = self._fields
        if last is not terms:
            bound = self._bind(terms)
            remark = bound["remark"]
            fields = {
                name: value
                for name, value in bound.items()
                if value is not None and name not in ("audit", "remark")
            }
            text = to_json(fields)[1:-1]
            if remark is not None:
                text = f'{text},"remark":{remark}'
            self._fields = (terms, text)
        return text

    def _bind(self, terms: Terms) -> dict[str, Any]:
        """The parameters that jobs of the same terms share. Those of the last terms are kept:
        a program that enqueues one by one mostly repeats itself."""
        last, bound = self._bound
        if last is not terms:
            bound = shared_parameters(terms) | {"audit": self.audit}
            if terms.parent is not None:
                bound["parent"] = to_uuid_text(terms.parent)
            self._bound = (terms, bound)
        return bound
