"""One PostgreSQL database as the store sees it: named statements, each a transaction of its own.

A call has a budget of time. Within it, connections are opened, waited for and replaced, and what
certainly did not happen is tried again; what may have happened is tried again only when the caller
says that twice is once (`repeatable`). No session state is relied on, so a pooler in transaction
mode may be in between; then nothing is prepared.
"""

from __future__ import annotations

import logging
import os
import random
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager
from typing import Any, NoReturn

import psycopg

from tenure import errors, sql
from tenure.stores.postgres import explaining, lending
from tenure.stores.postgres.connecting import (
    CannotConnect,
    Connection,
    Late,
    Unconfirmed,
    connect,
    location,
    options,
    set_up,
    to_uuid_text,
    to_uuids,
)
from tenure.stores.postgres.pool import NoneFree, Pool

FIRST_PAUSE, LONGEST_PAUSE = 0.02, 1.0
PREPARE_AFTER = 5  # runs of a statement on a connection; the driver's default

log = logging.getLogger("tenure.store")

Row = tuple[Any, ...]


class Database:
    def __init__(
        self,
        url: str,
        *,
        schema: str = "tenure",
        timeout: float = 15.0,
        clock: Callable[[], int] | None = None,
        most: int = 8,
    ) -> None:
        self.url = url
        self.schema = schema
        self.timeout = timeout
        self.clock = clock
        self.place = location(url)
        self.pooled: bool | None = None  # a pooler is in between; None: not connected yet
        self.begins = False  # and each statement needs a BEGIN and a COMMIT
        self.retries = 0  # calls made again, for doctor
        self.reconnects = 0  # connections lost in a call
        self.options = options(url, timeout)
        self._statements: dict[str, str] = {}
        self._pool = Pool(most, self._connect)
        self._reserved = Pool(1, self._connect)
        self._lender = lending.Lender(self)
        self._down_since: float | None = None
        self._checked = False
        this = weakref.ref(self)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=lambda: _forget(this()))

    def __repr__(self) -> str:
        return f"<Database {self.place} schema {self.schema}>"

    # -- statements ---------------------------------------------------------------------------
    def sql(self, name: str) -> str:
        """A statement of queries.sql, with our schema put in."""
        if not self._statements:
            self._statements = {
                each: sql.with_schema(text, self.schema)
                for each, text in sql.statements("postgres").items()
            }
        return self._statements[name]

    def rows(
        self,
        name: str,
        parameters: Mapping[str, Any] | None = None,
        *,
        reserved: bool = False,
        repeatable: bool = True,
        timeout: float | None = None,
    ) -> list[Row]:
        """Run the statement `name` in a transaction of its own; [] when it returns no rows.

        `reserved`: on a connection that ordinary calls never use. `repeatable`: it may be run
        again when nobody knows whether it was done. `timeout` bounds all of it, in seconds.
        """
        if not self._checked:
            begun = time.monotonic()
            self.check(timeout)
            if timeout is not None:
                timeout = max(0.0, timeout - (time.monotonic() - begun))
        statement = self._statements.get(name) or self.sql(name)
        return self.run(
            statement, parameters, reserved=reserved, repeatable=repeatable, timeout=timeout
        )

    def checked(self, statement: str, parameters: Mapping[str, Any] | None = None) -> list[Row]:
        """A text that has the right schema already, on tables this program works with."""
        if not self._checked:
            self.check()
        return self.run(statement, parameters)

    def run(
        self,
        statement: str,
        parameters: Mapping[str, Any] | None = None,
        *,
        reserved: bool = False,
        repeatable: bool = True,
        timeout: float | None = None,
    ) -> list[Row]:
        """The same for a text that has the right schema already."""
        seconds = self.timeout if timeout is None else timeout
        deadline = time.monotonic() + seconds
        pool = self._reserved if reserved else self._pool
        pause = 0.0
        unconfirmed = False
        while True:
            connection = None
            try:
                connection = pool.take(deadline)
                rows = connection.rows(statement, parameters)
                if unconfirmed:  # this try may have found it done, and waited for nobody
                    connection.rows(self.sql("flush"))
            except (psycopg.Error, CannotConnect, NoneFree) as error:
                unconfirmed = unconfirmed or isinstance(error, Unconfirmed)
                pause = max(FIRST_PAUSE, min(pause * 2, LONGEST_PAUSE))
                self._after(error, pool, connection, repeatable, seconds, deadline, pause)
            except BaseException:
                if connection is not None:
                    pool.drop(connection)
                raise
            else:
                pool.give(connection)
                if self._down_since is not None:
                    self._recovered()
                return rows

    def _after(
        self,
        error: Exception,
        pool: Pool,
        connection: Connection | None,
        repeatable: bool,
        seconds: float,
        deadline: float,
        pause: float,
    ) -> None:
        """Return when the call is to be made again, after a pause; raise when it is over."""
        if isinstance(error, NoneFree):
            raise errors.StoreBusy(
                f"all {pool.most} connections to {self.place} have been in use for {seconds:.3g} s"
                ": too many threads at once, or statements that wait for locks"
            ) from None
        lost = connection is not None and connection.closed
        self._clear_up(error, pool, connection)
        if explaining.state_of(error) in explaining.STALE and pause == FIRST_PAUSE:
            verdict: explaining.Verdict = "again"
        else:
            verdict = explaining.judge(error, lost=lost)
        if lost or (connection is None and verdict == "again"):
            self._complain(error)
        wait = pause * random.uniform(0.5, 1.0)
        over = time.monotonic() + wait >= deadline
        if over or verdict == "never" or (verdict == "if repeatable" and not repeatable):
            self.refuse(error, seconds, unknown=verdict == "if repeatable" or unanswered(error))
        self.retries += 1
        time.sleep(wait)

    def _clear_up(self, error: Exception, pool: Pool, connection: Connection | None) -> None:
        """Give the connection back, or drop it with those that must be as bad."""
        state = explaining.state_of(error)
        if connection is None:
            return
        stale = state in explaining.STALE
        if state in ("26000", "42P05"):
            self.pooled = True
        # 25006: the server has become a replica, and every connection to it is one to a replica.
        if state == "25006" or stale or (isinstance(error, Late) and not error.cancelled):
            pool.drop(connection)
            self._pool.sweep(every=True)
            self._reserved.sweep(every=True)
        elif connection.closed:
            self.reconnects += 1
            pool.drop(connection)
            self._pool.sweep()
            self._reserved.sweep()
        else:
            pool.give(connection)

    # -- connections --------------------------------------------------------------------------
    @contextmanager
    def connection(self, timeout: float | None = None) -> Iterator[Connection]:
        """Borrow a connection, in autocommit, for COPY, a pipeline or a transaction. Errors are
        explained and nothing is repeated."""
        seconds = self.timeout if timeout is None else timeout
        deadline = time.monotonic() + seconds
        connection = self._take_patiently(seconds, deadline)
        try:
            yield connection
        except psycopg.Error as error:
            self._clear_up(error, self._pool, connection)
            self.refuse(error, seconds)
        except BaseException:
            self._pool.give(connection)  # in a transaction still: dropped
            raise
        else:
            self._pool.give(connection)

    def _take_patiently(self, seconds: float, deadline: float) -> Connection:
        pause = 0.0
        while True:
            try:
                connection = self._pool.take(deadline)
            except (CannotConnect, NoneFree) as error:
                pause = max(FIRST_PAUSE, min(pause * 2, LONGEST_PAUSE))
                self._after(error, self._pool, None, True, seconds, deadline, pause)
            else:
                if self._down_since is not None:
                    self._recovered()
                return connection

    def lend(self, limit: float) -> AbstractContextManager[psycopg.Connection[Any]]:
        """A transaction for somebody else's SQL on a connection of its own: committed at the end
        of the block, rolled back when it raises or takes longer than `limit` seconds."""
        return self._lender.lend(limit)

    def alend(self, limit: float) -> AbstractAsyncContextManager[psycopg.AsyncConnection[Any]]:
        """The same for `async with`."""
        return self._lender.alend(limit)

    def connect(self, name: str = "tenure", *, deadline: float | None = None) -> Connection:
        """A new connection that belongs to the caller; raises CannotConnect. One attempt."""
        wanted = self.options | {"fallback_application_name": name}
        until = time.monotonic() + self.timeout if deadline is None else deadline
        connection = connect(self.url, wanted, until)
        between = set_up(connection)
        self.pooled = between if self.pooled is None else self.pooled
        self.begins = connection.begins
        connection.prepare_threshold = None if self.pooled else PREPARE_AFTER
        return connection

    def _connect(self, deadline: float) -> Connection:
        return self.connect(deadline=deadline)

    # -- life ---------------------------------------------------------------------------------
    def check(self, timeout: float | None = None) -> None:
        """Once, at first use: tables of a version that this program works with. None are made."""
        from tenure.stores.postgres import schema

        schema.check(self, timeout)
        self._checked = True

    def close(self) -> None:
        """Close every connection. The database may be used again and reconnects."""
        self._checked = False
        self._pool.close()
        self._reserved.close()
        self._lender.close()

    # -- errors -------------------------------------------------------------------------------
    def explain(self, error: Exception) -> errors.TenureError:
        """What to tell a person about an error of the driver: no password, no values."""
        return explaining.explain(error, self.place, self.schema, self.timeout)

    def refuse(
        self, error: Exception, seconds: float | None = None, *, unknown: bool = False
    ) -> NoReturn:
        told = explaining.explain(
            error, self.place, self.schema, self.timeout if seconds is None else seconds
        )
        if isinstance(told, errors.StoreError):
            told.unknown = unknown
            told.uncharged = explaining.state_of(error) in explaining.CONFLICTS
        if explaining.shows_values(error):
            raise told from None
        raise told from error

    def _complain(self, error: Exception) -> None:
        """Once an outage, not once an attempt."""
        if self._down_since is None:
            self._down_since = time.monotonic()
            what = explaining.primary(error) or "the connection was lost"
            log.warning("%s: %s; trying again", self.place, what)

    def _recovered(self) -> None:
        since, self._down_since = self._down_since, None
        if since is not None:
            log.warning("%s answers again after %.1f s", self.place, time.monotonic() - since)


def unanswered(error: Exception) -> bool:
    """The server was asked and said nothing, not even to the cancel."""
    return isinstance(error, Late) and not error.cancelled


def _forget(database: Database | None) -> None:
    """In a forked child: the parent's connections must be neither used nor closed here."""
    if database is not None:
        database._pool.forget()
        database._reserved.forget()
        database._lender.forget()


__all__ = ["Connection", "Database", "to_uuid_text", "to_uuids"]
