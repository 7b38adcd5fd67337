"""The vocabulary of the conformance suite: a clock to turn, jobs and workers in one line.

To run the suite on another store: add its kind to `KINDS` and a branch to `open_store`,
`temporary_location` and (SQL stores only) those that follow them. Nothing else names a concrete
store; where a test is about one of them, it says so with `pytest.skip`.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.util
import json
import sqlite3
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tenure.ids import new_id
from tenure.job import Actor, ClaimedJob, Event, Job, NewJob, Terms
from tenure.outcome import Ended, Failure, Outcome
from tenure.store import Accepted, Filter, QueueInfo, Registration, Store, WorkerInfo

_postgres = importlib.util.find_spec("tenure.stores.postgres")
# Until the PostgreSQL store is written: a folder without `__init__.py` is no store yet.
KINDS = ("sqlite", "postgres") if _postgres is not None and _postgres.origin else ("sqlite",)
SQL_KINDS = frozenset({"sqlite", "postgres"})

SECOND = 1_000
MINUTE = 60 * SECOND
HOUR = 60 * MINUTE
DAY = 24 * HOUR
LEASE_MS = 30 * SECOND
# Where history is partitioned by day, whole days go: a finished job may stay for one day more.
LATE = {"sqlite": 0, "postgres": DAY}
START_MS = 1_790_000_000_123  # the odd milliseconds catch stores that round to seconds

OPERATOR = Actor("user", "operator-7")
FAILURE = Failure("boom", "BOOM", "ValueError at tasks.py:7")


class Clock:
    """The store's clock in tests: it stands still until it is told otherwise."""

    def __init__(self, ms: int = START_MS) -> None:
        self.ms = ms

    def __call__(self) -> int:
        return self.ms

    def advance(self, ms: int) -> int:
        self.ms += ms
        return self.ms


# -- stores -----------------------------------------------------------------------------------


def open_store(kind: str, location: str, clock: Clock) -> Store:
    """A store on the database at `location`. Several may be open on one, in any process."""
    if kind == "sqlite":
        from tenure.stores.sqlite import SqliteStore

        return SqliteStore(location, clock=clock)
    if kind == "postgres":
        from tenure.stores.postgres import PostgresStore

        return PostgresStore(location, clock=clock)
    raise AssertionError(f"no such kind of store: {kind}")


@contextlib.contextmanager
def temporary_location(kind: str, *, migrated: bool = True) -> Iterator[str]:
    """A database of this kind without jobs, gone at the end of the block. Where it saves time it
    may have been migrated already, unless that is told otherwise."""
    if kind == "sqlite":
        with tempfile.TemporaryDirectory(prefix="tenure-contract-") as folder:
            yield str(Path(folder) / "jobs.db")
        return
    assert kind == "postgres"
    import servers

    server = servers.require(servers.shared)
    name = server.create_database(migrated=migrated)
    try:
        yield server.url(name)
    finally:
        server.drop_database(name)


def connect(kind: str, location: str) -> Any:
    """A connection of the user's own, as `enqueue_on` gets it, outside of any transaction. It
    knows nothing of Tenure: no type of ours, nothing in its search path."""
    if kind == "sqlite":
        return sqlite3.connect(location, isolation_level=None)
    import psycopg

    return psycopg.connect(location, autocommit=True)


def begin(connection: Any) -> None:
    """Open a transaction that writes. SQLite's takes the file's lock at once or may not get it."""
    sqlite = isinstance(connection, sqlite3.Connection)
    connection.execute("BEGIN IMMEDIATE" if sqlite else "BEGIN")


def in_transaction(connection: Any) -> bool:
    if isinstance(connection, sqlite3.Connection):
        return connection.in_transaction
    return bool(connection.info.transaction_status.name == "INTRANS")


def driver_errors() -> tuple[type[Exception], ...]:
    """What the drivers raise when SQL fails, and the store on a connection it has lent."""
    from tenure.errors import StoreError

    if "postgres" not in KINDS:
        return (sqlite3.Error, StoreError)
    import psycopg

    return (sqlite3.Error, psycopg.Error, StoreError)


def table(kind: str, name: str) -> str:
    """How SQL names a table of ours: a prefix in SQLite, a schema in PostgreSQL."""
    return f"tenure_{name}" if kind == "sqlite" else f"tenure.{name}"


def rows(kind: str, location: str, statement: str) -> list[dict[str, Any]]:
    """What SQL sees of a store's database: `job_queue` by that name, ids as ULIDs, JSON as text."""
    with contextlib.closing(watch(kind, location)) as connection:
        return read(connection, statement)


def watch(kind: str, location: str) -> Any:
    """A connection for somebody who looks on, and sees the same on any kind of store."""
    connection = connect(kind, location)
    if kind == "postgres":
        show_as_sqlite_does(connection)
    return connection


def read(connection: Any, statement: str) -> list[dict[str, Any]]:
    cursor = connection.execute(statement)
    names = [column[0] for column in cursor.description]
    return [dict(zip(names, row, strict=True)) for row in cursor]


def show_as_sqlite_does(connection: Any) -> None:
    import uuid

    from psycopg.types.string import TextLoader
    from psycopg.types.uuid import UUIDLoader

    class UlidLoader(UUIDLoader):
        def load(self, data: Any) -> Any:
            return ulid(uuid.UUID(bytes(data).decode()).int)

    connection.adapters.register_loader("json", TextLoader)
    connection.adapters.register_loader("uuid", UlidLoader)
    connection.execute("SET search_path = tenure, public")


def ulid(bits: int) -> str:
    """The text of an id of 128 bits, written out here: a store's own must agree with it."""
    digits = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
    return "".join(digits[bits >> 5 * place & 31] for place in range(25, -1, -1))


# -- jobs -------------------------------------------------------------------------------------

_TERMS = frozenset(Terms._fields)


@cache
def terms(**over: Any) -> Terms:
    """The same object for the same options, as the client has it: stores group batches by it."""
    given: dict[str, Any] = {
        "type": "noop",
        "queue": "default",
        "priority": 5,
        "category": "default",
        "max_attempts": 5,
        "timeout_ms": 300_000,
        "key_ttl_ms": 7 * DAY,
    }
    return Terms(**(given | over))


def new(**over: Any) -> NewJob:
    """A job to be enqueued; fields of its Terms and its own side by side."""
    shared = {name: over.pop(name) for name in tuple(over) if name in _TERMS}
    given: dict[str, Any] = {"id": new_id(), "terms": terms(**shared), "payload": "{}"}
    return NewJob(**(given | over))


def put(store: Store, **over: Any) -> str:
    """Enqueue one job; its id."""
    return put_many(store, 1, **over)[0]


def put_many(store: Store, count: int, **over: Any) -> list[str]:
    """Enqueue `count` alike jobs in one call; their ids in order."""
    return [receipt.id for receipt in store.enqueue([new(**over) for _ in range(count)])]


# -- workers and leases -----------------------------------------------------------------------


def worker_info(**over: Any) -> WorkerInfo:
    given: dict[str, Any] = {
        "no": 0,
        "id": f"host:4711:{new_id()}",
        "host": "host",
        "boot": "boot",
        "pid": 4711,
        "pid_started": "1",
        "beat": 0,
        "lease_ms": LEASE_MS,
        "started_at": 0,
        "seen_at": 0,
        "dead_at": None,
        "dead_reason": None,
        "meta": {},
        "held": 0,
    }
    return WorkerInfo(**(given | over))


def worker(store: Store, **over: Any) -> Registration:
    """Register a worker: who it is to the store."""
    return store.register(worker_info(**over))


def worker_row(store: Store, worker: Registration) -> WorkerInfo:
    (found,) = [row for row in store.workers() if row.id == worker.id]
    return found


def claim(
    store: Store,
    worker: Registration,
    limit: int = 100,
    *,
    queue: str = "default",
    types: frozenset[str] | None = None,
) -> list[ClaimedJob]:
    """What a worker with room for everything gets: jobs to run beside others, and suspects."""
    found = store.claim(worker, [(queue, limit)], types)
    if found.suspects and len(found.jobs) < limit:
        most = limit - len(found.jobs)
        found.jobs.extend(store.claim(worker, [(queue, most)], types, suspects=True).jobs)
    return found.jobs


def claim_one(store: Store, worker: Registration, *, queue: str = "default") -> ClaimedJob:
    (job,) = claim(store, worker, 1, queue=queue)
    return job


def started_job(store: Store, worker: Registration, **over: Any) -> ClaimedJob:
    """Enqueue one job and claim it."""
    id = put(store, **over)
    job = claim_one(store, worker, queue=over.get("queue", "default"))
    assert job.id == id, "another job was due before this one"
    return job


def end(job: ClaimedJob, outcome: Outcome, duration_ms: int = 5) -> Ended:
    return Ended(job.id, job.lease_no, duration_ms, outcome)


def finish(store: Store, worker: Registration, job: ClaimedJob, outcome: Outcome) -> Accepted:
    (verdict,) = store.finish(worker, [end(job, outcome)])
    return verdict


def ended_job(store: Store, worker: Registration, outcome: Outcome, **over: Any) -> str:
    """Enqueue one job, claim it and end its run; its id."""
    job = started_job(store, worker, **over)
    assert finish(store, worker, job, outcome) == "accepted"
    return job.id


def save_step(store: Store, worker: Registration, job: ClaimedJob, name: str, result: str) -> bool:
    return store.save_step(worker, (job.id, job.lease_no), name, result)


def rescue(
    store: Store,
    worker: Registration,
    *,
    started: frozenset[str] | None = frozenset(),
    limit: int = 10,
    beat: int | None = None,
) -> Any:
    """Rescue the jobs of a worker that has not renewed since `beat` (now, unless told)."""
    beat = worker_row(store, worker).beat if beat is None else beat
    return store.rescue(worker, beat, started=started, limit=limit, reason="gone")


# -- reading ----------------------------------------------------------------------------------


def get(store: Store, id: str) -> Job:
    job = store.get(id)
    assert job is not None, f"no job {id}"
    return job


def find(store: Store, where: Filter | None = None, **page: Any) -> list[Job]:
    """One page of jobs."""
    return store.find(where or Filter(), **page).jobs


def all_events(store: Store, **where: Any) -> list[Event]:
    """Every event, page by page."""
    found: list[Event] = []
    while page := store.events(after=found[-1].seq if found else 0, **where).events:
        found += page
    return found


def kinds(store: Store, id: str) -> list[str]:
    return [event.kind for event in all_events(store, job_id=id)]


def queue_info(store: Store, name: str = "default") -> QueueInfo:
    (found,) = [queue for queue in store.queues() if queue.name == name]
    return found


def totals(store: Store) -> dict[str, int]:
    """Counts per status without the zeros: whether a store lists them is its own business."""
    return {status: count for status, count in store.totals().jobs.items() if count}


def snapshot(store: Store, *ids: str) -> tuple[Any, ...]:
    """All that is visible of these jobs, to prove that a call changed nothing."""
    jobs = [(store.get(id), tuple(all_events(store, job_id=id))) for id in ids]
    return (jobs, totals(store), store.rollups(since_ms=0))


def milliseconds(moment: datetime.datetime | None) -> int | None:
    return None if moment is None else round(moment.timestamp() * 1000)


def holds(data: Any, text: str) -> bool:
    """Whether a word is found in an event's data, whatever its shape."""
    return text in json.dumps(data)


def counts(values: Sequence[str]) -> Mapping[str, int]:
    return {value: values.count(value) for value in values}
