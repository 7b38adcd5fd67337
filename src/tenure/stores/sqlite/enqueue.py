"""Step 2 of the walk: store new jobs, on our own connection or on the caller's."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from tenure import errors, sql
from tenure.job import NewJob, Receipt, Terms
from tenure.stores.rows import refuse_circles, refuse_twins, shared_parameters
from tenure.stores.sqlite import callers
from tenure.stores.sqlite.base import SqliteBase, to_json

if TYPE_CHECKING:
    import sqlite3


END_OF_TIME = 2**63 - 1

# The statements that store one job: text, values of its terms, what to take of its own.
Plan = list[tuple[str, tuple[Any, ...], Callable[[Sequence[Any]], tuple[Any, ...]]]]
# Terms, the parameters that jobs of these terms share, and how one of them is stored: by whether
# it is due later and whether a time was asked for.
Bound = tuple[Terms | None, dict[str, Any], dict[tuple[bool, bool], Plan]]
OWN = ("now", "id", "payload", "due", "asked")  # of one job


class Enqueueing(SqliteBase):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._queues = self.file.queues
        self._bound: Bound = (None, {}, {})
        self._numbered: dict[tuple[str, ...], list[sql.Numbered]] = {}  # by what is absent

    def enqueue(
        self, jobs: Sequence[NewJob], *, retry: bool = False, now_ms: int | None = None
    ) -> list[Receipt]:
        if not jobs:
            return []
        with self.file.write(create=True) as db:
            receipts = self._enqueue(db, jobs, self._now(now_ms), self._queues, retry)
        self._queues.update([job.terms.queue for job in jobs])
        return receipts

    def enqueue_on(
        self, connection: Any, jobs: Sequence[NewJob]
    ) -> list[Receipt] | Awaitable[list[Receipt]]:
        """On the caller's connection. Outside a transaction it commits at once, or begins one, as
        the caller's own INSERT would; otherwise it shares the fate of the caller's transaction."""

        def store(cursor: sqlite3.Cursor) -> list[Receipt]:
            return self._enqueue(cursor, jobs, self.file.clock(), set(), False)

        return callers.run_on(self.file, connection, self._sql["enqueue_lock"], store)

    def _enqueue(
        self,
        db: sqlite3.Connection | sqlite3.Cursor,
        jobs: Sequence[NewJob],
        now: int,
        known_queues: set[str],
        retry: bool,
    ) -> list[Receipt]:
        if len(jobs) == 1 and jobs[0].key is None and not jobs[0].after and not retry:
            return [self._enqueue_one(db, jobs[0], now, known_queues)]
        refuse_twins(jobs)
        owners: dict[str, tuple[str, str]] = {}
        firsts, repeats = _first_of_each_key(jobs)
        ids = to_json([job.id for job in jobs])
        stored = {row[0] for row in db.execute(self._sql["enqueue_stored"], {"ids": ids})}
        if stored and not retry:
            raise _stored_already(min(stored))
        for terms, group in _by_terms(job for job in firsts if job.id not in stored):
            parameters = self._bind(terms)[1] | {"now": now}
            if terms.queue not in known_queues:
                db.execute(self._sql["add_queue"], parameters)
            if _are_plain(group):
                self._enqueue_plain(db, terms, group, parameters)
            else:
                owners |= self._enqueue_group(db, terms, group, parameters)
        waiting = [job for job in firsts if job.after and job.id not in stored]
        if waiting:
            # By its key: history may have forgotten it.
            done = {
                (job.terms.org, owners[job.id][0])
                for job in firsts
                if job.id in owners and owners[job.id][1] == "completed"
            }
            self._add_edges(db, _by_owners(waiting, repeats, owners), done, now)
        receipts = []
        for job in jobs:
            first = repeats.get(job.id, job.id)
            owner, status = owners.get(first, (first, "queued"))
            receipts.append(Receipt(owner, owner != job.id, status))
        return receipts

    def _enqueue_plain(
        self,
        db: sqlite3.Connection | sqlite3.Cursor,
        terms: Terms,
        jobs: Sequence[NewJob],
        parameters: dict[str, Any],
    ) -> None:
        parameters["rows"] = to_json([job.id + job.payload for job in jobs])
        db.execute(self._sql["enqueue_plain_jobs"], parameters)
        db.execute(self._sql["enqueue_plain_due"], parameters)
        if terms.remark is not None or self._trail(db) == "all":
            db.execute(self._sql["enqueue_plain_events"], parameters)

    def _enqueue_group(
        self,
        db: sqlite3.Connection | sqlite3.Cursor,
        terms: Terms,
        jobs: Sequence[NewJob],
        parameters: dict[str, Any],
    ) -> dict[str, tuple[str, str]]:
        """With keys, delays and times. Of those with a key: id -> whose the key is, its status."""
        parameters["rows"] = _rows_text(jobs)
        keyed = any(job.key is not None for job in jobs)
        if keyed:
            over = parameters["now"] if terms.key_ttl_ms else END_OF_TIME
            db.execute(self._sql["enqueue_keys"], parameters | {"over": over})
        db.execute(self._sql["enqueue_jobs"], parameters)
        db.execute(self._sql["enqueue_due"], parameters)
        if any(job.at_ms is not None or job.delay_ms for job in jobs):
            db.execute(self._sql["enqueue_later"], parameters)
        if terms.remark is not None or self._trail(db) == "all":
            db.execute(self._sql["enqueue_events"], parameters)
        if not keyed:
            return {}
        owners = db.execute(self._sql["enqueue_owners"], parameters)
        return {sent: (owner, status) for sent, owner, status in owners}

    def _enqueue_one(
        self, db: sqlite3.Connection | sqlite3.Cursor, job: NewJob, now: int, known_queues: set[str]
    ) -> Receipt:
        """What `task.enqueue` mostly sends: the same rows with less around them."""
        id, terms, payload, delay_ms, at_ms, *_rest = job
        due = now + delay_ms if at_ms is None else at_ms
        asked = due if at_ms is not None or delay_ms else None
        own = (now, id, payload, due, asked)
        _terms, shared, plans = self._bind(terms)
        if terms.queue not in known_queues:
            db.execute(self._sql["add_queue"], {**shared, "now": now})
        kind = due > now, asked is None
        plan = plans.get(kind) or self._plan(plans, kind, shared)
        (text, known, take), place, note = plan
        if db.execute(text, known + take(own)).rowcount == 0:
            raise _stored_already(id)
        text, known, take = place
        db.execute(text, known + take(own))
        if terms.remark is not None or self._trail(db) == "all":
            text, known, take = note
            db.execute(text, known + take(own))
        return Receipt(id, False, "queued")

    def _plan(
        self,
        plans: dict[tuple[bool, bool], Plan],
        kind: tuple[bool, bool],
        shared: dict[str, Any],
    ) -> Plan:
        place = "enqueue_job_later" if kind[0] else "enqueue_job_due"
        absent = tuple([name for name, value in shared.items() if value is None])
        absent += ("asked",) if kind[1] else ()
        statements = self._numbered.get((place, *absent))
        if statements is None:
            names = ("enqueue_job", place, "enqueue_job_event")
            statements = [sql.numbered(self._sql[name], OWN, absent) for name in names]
            self._numbered[place, *absent] = statements
        plans[kind] = [(each.text, each.shared(shared), each.own) for each in statements]
        return plans[kind]

    def _bind(self, terms: Terms) -> Bound:
        """Those of the last terms are kept: a program that enqueues one by one mostly repeats
        itself."""
        bound = self._bound
        if bound[0] is not terms:
            self._bound = bound = (terms, shared_parameters(terms), {})
        return bound

    def _add_edges(
        self,
        db: sqlite3.Connection | sqlite3.Cursor,
        jobs: list[NewJob],
        done: set[tuple[str, str]],
        now: int,
    ) -> None:
        if not jobs:
            return
        refuse_circles(jobs)
        needs = to_json(sorted({needed for job in jobs for needed in job.after}))
        found = {
            id: (org, status)
            for id, status, org in db.execute(self._sql["statuses"], {"ids": needs})
        }
        for job in jobs:
            org = job.terms.org
            for needed in job.after:
                owner, status = found.get(needed, (None, None))
                if (org, needed) in done or (owner == org and status != "cancelled"):
                    continue
                why = "there is no such job: enqueue that one first, or with it in the same batch"
                if owner == org:
                    why = "that one was cancelled and will never complete"
                raise errors.JobError(
                    f"a {job.terms.type!r} job is to run after {needed}, but {why}"
                )
        edges = to_json(
            [
                (job.id, needed, (job.terms.org, needed) in done)
                for job in jobs
                for needed in job.after
            ]
        )
        db.execute(self._sql["enqueue_edges"], {"edges": edges})
        db.execute(self._sql["count_waits"], {"ids": to_json([job.id for job in jobs]), "now": now})


def _stored_already(id: str) -> errors.JobError:
    """Stored once more it would run twice, and its second end would find its place taken."""
    return errors.JobError(
        f"job {id} is stored already: `task.job(…)` makes a new one for each enqueue"
    )


def _first_of_each_key(jobs: Sequence[NewJob]) -> tuple[Sequence[NewJob], dict[str, str]]:
    """Within a batch the first job of a key is the one stored: the rest, id -> that job's id."""
    seen: dict[tuple[str, str], str] = {}
    repeats = {}
    for job in jobs:
        if job.key is not None:
            first = seen.setdefault((job.terms.org, job.key), job.id)
            if first != job.id:
                repeats[job.id] = first
    return ([job for job in jobs if job.id not in repeats] if repeats else jobs), repeats


def _by_owners(
    jobs: list[NewJob], repeats: dict[str, str], owners: dict[str, tuple[str, str]]
) -> list[NewJob]:
    """A job whose key was taken was not stored: it waits for nothing, and whoever in this batch
    is to run after it runs after the key's owner."""

    def known_as(id: str) -> str:
        first = repeats.get(id, id)
        return owners[first][0] if first in owners else first

    return [
        job._replace(after=tuple(dict.fromkeys(known_as(needed) for needed in job.after)))
        for job in jobs
        if known_as(job.id) == job.id
    ]


def _by_terms(jobs: Iterable[NewJob]) -> Iterable[tuple[Any, list[NewJob]]]:
    groups: dict[int, tuple[Any, list[NewJob]]] = {}
    for job in jobs:
        groups.setdefault(id(job.terms), (job.terms, []))[1].append(job)
    return groups.values()


def _are_plain(jobs: Sequence[NewJob]) -> bool:
    return not any([job.key is not None or job.delay_ms or job.at_ms is not None for job in jobs])


def _rows_text(jobs: Sequence[NewJob]) -> str:
    """[[id, payload, delay_ms, at_ms, key], …] with the payloads, JSON already, spliced in."""
    rows = [
        f'["{job.id}",{job.payload},{job.delay_ms},{to_json(job.at_ms)},{to_json(job.key)}]'
        for job in jobs
    ]
    return f"[{','.join(rows)}]"
