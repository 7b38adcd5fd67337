"""`ctx.transaction(conn=…)`: a handler's ORM and the end of its job in one transaction.

The transaction is the library's own; what is lent otherwise (`lending.py`) is not needed. The
server bounds it by settings that end with it, and its end refuses to be late.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus

from tenure import errors
from tenure.stores import libraries
from tenure.stores.postgres import callers
from tenure.stores.postgres.database import Database
from tenure.stores.postgres.explaining import CONFLICTS
from tenure.stores.postgres.lending import (
    IN_THE_WAY,
    TIMED_OUT,
    TOO_LONG,
    CommitUnknown,
    bounded_by,
)


class Joined:
    """A library's transaction with our bounds on it. `driver` is the driver's connection."""

    def __init__(self, database: Database, limit: float) -> None:
        self._database = database
        self._limit = limit
        self._deadline = time.monotonic() + limit
        self.driver: Any = None

    def require_kind(self, conn: Any, kind: str, driver: Any) -> None:
        if kind != "postgresql":
            libraries.refuse_database(conn, kind, "PostgreSQL")
        if libraries.known_as(driver, callers.DRIVERS) is None:
            raise errors.ConfigError(
                f"ctx.transaction(conn=…): behind conn= is {libraries.described(driver)}; it works "
                "with psycopg 3 (postgresql+psycopg:// in SQLAlchemy), in async code also with "
                "asyncpg"
            )
        self.driver = driver

    def require_begun(self) -> None:
        """After the first statements: on a connection in autocommit they have begun nothing, and
        what the handler writes would stay, once for each attempt, whatever becomes of the job."""
        if not self._in_transaction():
            raise errors.ConfigError(
                "ctx.transaction(conn=…): conn= is in autocommit, so your data and the end of the "
                "job cannot commit together. Give it an isolation level with transactions, not "
                'isolation_level="AUTOCOMMIT".'
            )

    def _in_transaction(self) -> bool:
        pgconn = getattr(self.driver, "pgconn", None)
        if pgconn is None:
            return bool(self.driver.is_in_transaction())
        return bool(pgconn.transaction_status != TransactionStatus.IDLE)

    def bounds(self) -> str:
        info = getattr(self.driver, "info", None)
        version = info.server_version if info else self.driver.get_server_version().major * 10000
        settings = bounded_by(self._limit, version)
        return f"SELECT {', '.join(f'set_config({n!r}, {v!r}, true)' for n, v in settings)}"

    def require_home(self, found: Any, home: str | None) -> None:
        if found[0] != home:
            raise errors.ConfigError(
                "ctx.transaction(conn=…): conn= is open on another database than this app's, "
                f"{self._database.place}: your data and the end of the job would not commit "
                "together. Connect to that database."
            )

    def check(self) -> None:
        """Before the last statement: nothing may look like a success that is none."""
        if time.monotonic() >= self._deadline:
            raise errors.StoreBusy(TOO_LONG.format(self._limit))
        if not self._in_transaction():
            raise errors.StoreError(libraries.ENDED_INSIDE)
        pgconn = getattr(self.driver, "pgconn", None)
        if pgconn is not None and pgconn.transaction_status == TransactionStatus.INERROR:
            raise errors.StoreError(
                "a statement in the transaction's block failed and its error was caught, so "
                "PostgreSQL refuses the rest and nothing was committed: let the error out, or put "
                "the statement into a savepoint (begin_nested(), atomic())"
            )

    def told(self, error: BaseException, *, committing: bool) -> BaseException:
        """As of a lent transaction: the handler's own errors stay as they are."""
        root = callers.root_of(error)
        state = callers.state_of(root)
        if state in CONFLICTS:
            busy = errors.StoreBusy(IN_THE_WAY.format(state))
            busy.uncharged = True
            return busy
        late = time.monotonic() >= self._deadline and state in TIMED_OUT
        if late or state in ("25P03", "25P04"):
            return errors.StoreBusy(TOO_LONG.format(self._limit))
        closed = getattr(self.driver, "closed", False)
        lost = isinstance(root, (psycopg.OperationalError, OSError)) and (closed or not state)
        if committing and (lost or state.startswith("08")):
            return CommitUnknown(
                f"the connection to {self._database.place} was lost while a transaction was "
                "being committed: whether it was is not known"
            )
        return error


@contextmanager
def joined(database: Database, conn: Any, limit: float, home: str | None) -> Iterator[Any]:
    unit, transaction, committing = libraries.unit_of(conn), Joined(database, limit), False
    driver = unit.begin()
    try:
        transaction.require_kind(conn, unit.kind, driver)
        with callers.explained():
            transaction.require_home(unit.ask(database.sql("home")), home)
            unit.ask(transaction.bounds())
        transaction.require_begun()
        yield unit, transaction
        committing = True
        unit.commit()
    except BaseException as error:
        told = transaction.told(error, committing=committing)
        _undo(unit.rollback, error)
        if told is not error:
            raise told from error
        raise


@asynccontextmanager
async def ajoined(
    database: Database, conn: Any, limit: float, home: str | None
) -> AsyncIterator[Any]:
    unit, transaction, committing = libraries.AsyncUnit(conn), Joined(database, limit), False
    driver = await unit.begin()
    try:
        transaction.require_kind(conn, unit.kind, driver)
        with callers.explained():
            transaction.require_home(await unit.ask(database.sql("home")), home)
            await unit.ask(transaction.bounds())
        transaction.require_begun()
        yield unit, transaction
        committing = True
        await unit.commit()
    except BaseException as error:
        told = transaction.told(error, committing=committing)
        try:
            await unit.rollback(error)
        except Exception as broken:
            error.add_note(f"rolling back raised {type(broken).__name__}")
        if told is not error:
            raise told from error
        raise


def _undo(rollback: Any, error: BaseException) -> None:
    """What cannot be rolled back any more, the server rolls back."""
    try:
        rollback(error)
    except Exception as broken:
        error.add_note(f"rolling back raised {type(broken).__name__}")
