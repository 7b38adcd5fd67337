"""The doctor's own session: questions to the server that change nothing and never hang.

Each question is a read-only transaction with the server's time limit and, in case the server does
not keep it, ours. So it works through a pooler, and beside somebody's lock on every table.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import psycopg

from tenure import sql
from tenure.stores.postgres.connecting import CannotConnect, Connection
from tenure.stores.postgres.database import Database
from tenure.stores.postgres.explaining import state_of

ANSWER_SECONDS = 3
LOCK_SECONDS = 1
SLACK_SECONDS = 2.0  # after which we do not wait for the server's own time-out any more

Row = tuple[Any, ...]


class Server(NamedTuple):
    """What the server says about itself, and how it looks to the role we are."""

    major: int
    version: str
    standby: bool
    encoding: str
    role: str
    fsync: str
    full_page_writes: str
    synchronous_commit: str
    autovacuum: str
    track_counts: str
    max_connections: int
    reserved: int  # of these, for superusers and the like
    clock: float


class Tables(NamedTuple):
    """Our schema as the catalog has it, and what the role we are may do there."""

    present: bool
    usable: bool
    may_create: bool
    stamped: bool  # `migrations` is there
    readable: bool  # and may be read
    owned: bool


class Examination:
    def __init__(self, database: Database) -> None:
        self.database = database
        self.schema = database.schema
        self._statements = {
            name: sql.with_schema(text, database.schema)
            for name, text in sql.statements("postgres", "doctor.sql").items()
        }
        self._connection = self._open()
        self.server = Server._make(self.ask("server")[0])
        self.tables = Tables._make(self.ask("tables", schema=self.schema)[0])

    def ask(self, name: str, **parameters: Any) -> list[Row]:
        if not self._connection.reusable():  # a question before was cut off
            self._connection.close()
            self._connection = self._open()
        with self.transaction(self._connection):
            return self.run(self._connection, name, **parameters)

    def run(self, connection: Connection, name: str, **parameters: Any) -> list[Row]:
        """In a transaction that is open."""
        connection.deadline = time.monotonic() + ANSWER_SECONDS + SLACK_SECONDS
        found: list[Row] = connection.execute(self._statements[name], parameters).fetchall()
        return found

    def transaction(self, connection: Connection) -> _Bounded:
        return _Bounded(connection)

    def another(self) -> Connection:
        """A second client, to be closed by the caller."""
        return self._open()

    def close(self) -> None:
        self._connection.close()

    def _open(self) -> Connection:
        begun = time.monotonic()
        try:
            connection = self.database.connect("tenure doctor")
        except CannotConnect as error:
            self.database.refuse(error, round(time.monotonic() - begun, 1))
        connection.read_only = True
        return connection


class _Bounded:
    """BEGIN READ ONLY with time limits of its own; SET LOCAL is all a pooler lets us have."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._block = connection.transaction()

    def __enter__(self) -> None:
        connection = self._connection
        connection.deadline = time.monotonic() + ANSWER_SECONDS + SLACK_SECONDS
        self._block.__enter__()
        connection.execute(f"SET LOCAL statement_timeout = '{ANSWER_SECONDS}s'")
        connection.execute(f"SET LOCAL lock_timeout = '{LOCK_SECONDS}s'")

    def __exit__(self, *exc: Any) -> None:
        self._block.__exit__(*exc)


def settle_for_a_standby(database: Database) -> None:
    """Without a primary, let this process read from a standby: for a doctor, who only reads."""
    if "target_session_attrs" not in database.options:  # the URL or the environment has chosen
        return
    try:
        database.connect("tenure doctor").close()
    except CannotConnect as error:
        if state_of(error) == "25006":
            database.options["target_session_attrs"] = "any"


def unseen(error: psycopg.Error, database: Database) -> str:
    """Why a question has no answer, in words without values."""
    return str(database.explain(error))
