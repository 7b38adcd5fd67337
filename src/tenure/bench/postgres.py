"""`tenure bench` on PostgreSQL: databases of its own on the server of the URL.

The database that the URL names is only used to create and drop them; where the user may not create
databases, a schema of the benchmark's own in it has to do. Whatever ends the run, they go.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import re
import secrets
import tempfile
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tenure import sql
from tenure.bench import raw
from tenure.bench.place import DAY_MS, FILL_STEP, Caller, Completions, Place, Tell
from tenure.config import Settings
from tenure.errors import TenureError
from tenure.ids import new_ids
from tenure.stores.postgres.database import Database, to_uuid_text
from tenure.terminal import output

if TYPE_CHECKING:
    from tenure.stores.postgres import PostgresStore

DROP_SECONDS = 120.0  # a server writes back what it holds of a database first
READ_SECONDS = 120.0  # to count a million rows on a slow disk

FACTS = """
SELECT current_setting('server_version'), current_setting('fsync'),
       current_setting('synchronous_commit'), r.rolcreatedb OR r.rolsuper
  FROM pg_roles r WHERE r.rolname = current_user
"""

# The least a queue on PostgreSQL could be: a bare table that jobs leave when they are done, one
# index, the table they go to. `tenure.` stands for the benchmark's schema.
RAW_SCHEMA = """
CREATE SCHEMA tenure;
CREATE TABLE tenure.raw_jobs (id uuid PRIMARY KEY, queue text NOT NULL, priority smallint NOT NULL,
  ready_at bigint NOT NULL, status text NOT NULL, payload json NOT NULL);
CREATE INDEX raw_ready ON tenure.raw_jobs (queue, priority, ready_at, id) WHERE status = 'queued';
CREATE TABLE tenure.raw_history (LIKE tenure.raw_jobs, PRIMARY KEY (id));
"""
RAW_INSERT = "INSERT INTO tenure.raw_jobs VALUES (%s, 'default', 5, %s, 'queued', %s)"
RAW_COPY = "COPY tenure.raw_jobs FROM STDIN"
RAW_CLAIM = """
UPDATE tenure.raw_jobs SET status = 'in_progress'
 WHERE id = ANY (ARRAY(SELECT id FROM tenure.raw_jobs
                        WHERE status = 'queued' AND queue = 'default' AND ready_at <= %s
                        ORDER BY priority, ready_at, id LIMIT %s FOR UPDATE SKIP LOCKED))
RETURNING id, payload
"""
RAW_FINISH = """
WITH gone AS (DELETE FROM tenure.raw_jobs WHERE id = ANY (%s) RETURNING *)
INSERT INTO tenure.raw_history
SELECT id, queue, priority, ready_at, 'completed', payload FROM gone
"""

COMPLETIONS = """
SELECT count(*), coalesce(min(completed_at), 0), coalesce(max(completed_at), 0)
  FROM tenure.history WHERE completed_at > %(after)s
"""
BEFORE_LAST = """
SELECT completed_at FROM tenure.history ORDER BY completed_at DESC LIMIT 1 OFFSET %(count)s
"""

# Ids as a program would have made them: in the order of time, so in today's and yesterday's
# partitions.
FILL_JOBS = """
INSERT INTO tenure.jobs (id, type, status, queue, priority, org, ready_at, max_attempts, timeout_ms,
  category, actor_type, actor_id, scheduled_at, created_at, updated_at, payload)
SELECT (lpad(to_hex(%(made)s::bigint + n / 1000), 12, '0') || lpad(to_hex(n), 20, '0'))::uuid,
       'nothing', 'queued', %(queue)s, 5, 'default', %(due)s::bigint + n / 1000, 5, 300000,
       'default', 'system', 'tenure', %(due)s::bigint, %(made)s::bigint + n / 1000,
       %(made)s::bigint,
       '{"data":{"n":1}}'
  FROM generate_series(%(first)s::bigint, %(last)s::bigint - 1) n
"""
FILL_HISTORY = """
INSERT INTO tenure.history (id, type, status, queue, priority, org, lease_no, worker, attempts,
  max_attempts, crashes, timeout_ms, category, actor_type, actor_id, scheduled_at, created_at,
  started_at, completed_at, payload)
SELECT (lpad(to_hex(%(made)s::bigint + n / 1000), 12, '0') || lpad(to_hex(n), 20, '0'))::uuid,
       'nothing', 'completed', %(queue)s, 5, 'default', 1, 1, 1, 5, 0, 300000, 'default', 'system',
       'tenure', %(due)s::bigint, %(made)s::bigint, %(due)s::bigint, %(due)s::bigint + n,
       '{"data":{"n":1}}'
  FROM generate_series(%(first)s::bigint, %(last)s::bigint - 1) n
"""
FILL_QUEUE = """
INSERT INTO tenure.queues (name, created_at) VALUES (%s, %s) ON CONFLICT DO NOTHING
"""


BARS = {
    "drain / raw loop": 0.5,
    "drain, -p 2 / -p 1": 1.0,
    "enqueue one / raw": 0.7,
    "enqueue_many / raw bulk": 0.4,
    "pick-up, idle worker, p95": 5,
    "pick-up, idle worker, p99": 20,
    "drain beside them / alone": 0.8,
    "last stretch beside a held snapshot / without": 0.8,
}
RAW_TITLES = {"raw_bulk": "raw: COPY 1,000 a commit", "raw_copy": "raw: COPY all at once"}


@contextlib.contextmanager
def postgres_place(settings: Settings) -> Iterator[PostgresPlace]:
    with tempfile.TemporaryDirectory(prefix="tenure-bench-") as directory:
        place = PostgresPlace(settings.url, directory)
        try:
            yield place
        finally:
            place.close()


class PostgresPlace(Place):
    processes = (1, 2)
    bars = BARS
    raw_titles = RAW_TITLES

    def __init__(self, url: str, directory: str) -> None:
        self.directory = directory
        self._psycopg: Any = importlib.import_module("psycopg")  # the store has imported it
        self._url = url
        self._server = Database(url)  # the database of the URL
        self._own = f"tenure_bench_{secrets.token_hex(4)}"
        self._number = 0
        self._left: list[str] = []  # names of what is still there
        ((version, fsync, synchronous_commit, self._may_create),) = self._server.run(FACTS)
        self.machine = {
            "postgres": version,
            "fsync": fsync,
            "synchronous_commit": synchronous_commit,
        }
        kind = "databases" if self._may_create else "schemas"
        self.headline = f"PostgreSQL {version.split()[0]}, {kind} of its own in {self.where}"
        if "off" in (fsync, synchronous_commit):
            self.warning = "This server does not wait for its disk: no figure is of a durable one."

    @property
    def where(self) -> str:
        place = self._server.place
        return place.rpartition("/")[0] if self._may_create else place

    # -- databases ----------------------------------------------------------------------------
    @contextlib.contextmanager
    def fresh(self) -> Iterator[Settings]:
        self._number += 1
        name = f"{self._own}_{self._number}"
        self._left.append(name)
        try:
            if self._may_create:
                # template0: nobody is ever connected to it, and nothing of this site is in it.
                self._server.run(f"CREATE DATABASE {name} TEMPLATE template0", timeout=DROP_SECONDS)
                yield Settings(url=with_database(self._url, name))
            else:
                yield Settings(url=self._url, schema=name)
        finally:
            self._drop(name)

    def _drop(self, name: str) -> None:
        """Whoever is still connected is thrown out."""
        statement = f"DROP SCHEMA IF EXISTS {name} CASCADE"
        if self._may_create:
            statement = f"DROP DATABASE IF EXISTS {name} WITH (FORCE)"
        self._server.run(statement, timeout=DROP_SECONDS)
        self._left.remove(name)

    def close(self) -> None:
        """Once more for what could not be dropped; a person is told what is left."""
        for name in list(self._left):
            try:
                self._drop(name)
            except TenureError as error:
                output.complain(f"bench could not remove {name} in {self.where}: {error}")
        self._server.close()

    @contextlib.contextmanager
    def _connected(self, url: str) -> Iterator[Any]:
        """The driver as it comes: none of the store's own settings."""
        try:
            with self._psycopg.connect(url, autocommit=True) as connection:
                yield connection
        except self._psycopg.Error as error:
            raise self._server.explain(error) from None

    # -- the raw loop -------------------------------------------------------------------------
    def raw_loop(self, jobs: int, singles: int, tell: Tell) -> dict[str, float]:
        with self.fresh() as settings, self._connected(settings.url) as connection:
            raw = _Raw(connection, settings.schema, tell)
            found = {"single": raw.single(singles), "bulk": raw.bulk(jobs)}
            found["loop"] = raw.claim_and_finish(jobs + singles)
            found["copy"] = raw.copy(jobs)  # last: the loop is not to find these
        return found

    # -- what only a benchmark asks -----------------------------------------------------------
    def completions(self, store: PostgresStore, after: int = 0) -> Completions:
        return Completions._make(self._read(store, COMPLETIONS, after=after)[0])

    def before_last(self, store: PostgresStore, count: int) -> int:
        rows = self._read(store, BEFORE_LAST, count=count)
        return int(rows[0][0]) if rows else 0

    def _read(self, store: PostgresStore, text: str, **parameters: int) -> list[tuple[Any, ...]]:
        statement = sql.with_schema(text, store.database.schema)
        return store.database.run(statement, parameters, timeout=READ_SECONDS)

    def fill(self, store: PostgresStore, each: int, queue: str, tell: Tell) -> None:
        now, schema = raw.wall_ms(), store.database.schema
        kinds = (
            ("finished", FILL_HISTORY, now - DAY_MS, now - DAY_MS, "default"),
            ("queued", FILL_JOBS, now - DAY_MS // 2, now - DAY_MS // 2, queue),
            ("due tomorrow", FILL_JOBS, now - DAY_MS // 4, now + DAY_MS, "default"),
        )
        with self._connected(store.database.url) as connection:
            connection.execute("SET synchronous_commit = off")  # of this session, while it fills
            for name in (queue, "default"):
                connection.execute(sql.with_schema(FILL_QUEUE, schema), (name, now))
            for what, statement, made, due, where in kinds:
                for first in range(0, each, FILL_STEP):
                    last = min(first + FILL_STEP, each)
                    rows = {"first": first, "last": last, "made": made, "due": due, "queue": where}
                    connection.execute(sql.with_schema(statement, schema), rows)
                    tell(last, each, f"writing {each:,} {what}")
            tell(each, each, "vacuum")
            for table in ("jobs", "history", "queues"):  # as autovacuum would within a minute
                connection.execute(sql.with_schema(f"VACUUM (ANALYZE) tenure.{table}", schema))
            with contextlib.suppress(self._psycopg.errors.InsufficientPrivilege):
                connection.execute("CHECKPOINT")  # or the section pays for what this one wrote

    @contextlib.contextmanager
    def caller(self, store: PostgresStore) -> Iterator[Caller]:
        orders = sql.with_schema("tenure.orders", store.database.schema)
        with self._connected(store.database.url) as connection:
            connection.execute(f"CREATE TABLE {orders} (n integer)")
            yield Caller(connection, "BEGIN", f"INSERT INTO {orders} VALUES (%s)")  # noqa: S608

    @contextlib.contextmanager
    def snapshot(self, store: PostgresStore) -> Iterator[None]:
        with self._connected(store.database.url) as connection:
            connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
            connection.execute("SELECT 1")
            yield
            connection.execute("SELECT 1")  # an error if the server has ended it meanwhile
            connection.rollback()


class _Raw:
    """Statements on a connection in autocommit: each is one round trip and one commit. Rows as the
    driver makes them, so payloads are parsed: a handler takes values, not text."""

    def __init__(self, connection: Any, schema: str, tell: Tell) -> None:
        self._connection = connection
        self._schema = schema
        self._tell = tell
        connection.execute(self._sql(RAW_SCHEMA))

    def _sql(self, text: str) -> str:
        return sql.with_schema(text, self._schema)

    def single(self, count: int) -> float:
        insert = self._sql(RAW_INSERT)
        began = time.perf_counter()
        for number, id in enumerate(new_ids(count)):
            row = (to_uuid_text(id), raw.wall_ms(), json.dumps({"data": {"n": number}}))
            self._connection.execute(insert, row, prepare=True)
        return raw.rate(count, began)

    def bulk(self, count: int) -> float:
        began = time.perf_counter()
        for first in range(0, count, raw.BATCH):
            self._copy(first, min(raw.BATCH, count - first))
            self._tell(first, count, "raw COPY")
        return raw.rate(count, began)

    def copy(self, count: int) -> float:
        self._tell(0, count, "raw COPY of all")
        began = time.perf_counter()
        self._copy(0, count)
        return raw.rate(count, began)

    def _copy(self, first: int, count: int) -> None:
        now = raw.wall_ms()
        with self._connection.cursor().copy(self._sql(RAW_COPY)) as copy:
            for number, id in enumerate(new_ids(count), first):
                payload = json.dumps({"data": {"n": number}})
                copy.write_row((to_uuid_text(id), "default", 5, now, "queued", payload))

    def claim_and_finish(self, count: int) -> float:
        claim, finish = self._sql(RAW_CLAIM), self._sql(RAW_FINISH)
        self._connection.execute(self._sql("ANALYZE tenure.raw_jobs"))
        cursor = self._connection.cursor(binary=True)
        done, began = 0, time.perf_counter()
        while True:
            wanted = (raw.wall_ms(), raw.CLAIM)
            claimed = cursor.execute(claim, wanted, prepare=True).fetchall()
            if not claimed:
                return raw.rate(done, began)
            cursor.execute(finish, ([row[0] for row in claimed],), prepare=True)
            done += len(claimed)
            self._tell(done, count, "raw claim and finish")


def with_database(url: str, name: str) -> str:
    """The same server, user and options, another database; wherever the URL names the old one."""
    found = re.fullmatch(
        r"(?s)(?P<server>postgres(?:ql)?://[^/?]*)(?:/[^?]*)?(?:\?(?P<options>.*))?", url
    )
    if found is None:
        return url
    kept = [
        option
        for option in (found["options"] or "").split("&")
        if option and not option.startswith("dbname=")
    ]
    return f"{found['server']}/{name}" + ("?" + "&".join(kept) if kept else "")
