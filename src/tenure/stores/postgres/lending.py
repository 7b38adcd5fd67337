"""Transactions lent to handlers: `with ctx.transaction() as conn`.

The connection is a plain one, with the driver's own types, for the handler's SQL. Who lends it
ends it: a commit, a rollback or a close inside the block would part the handler's rows from its
job's finish, so they are refused. Time is limited by the server's own settings of the transaction
and by a deadline here, at each statement and at the end.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar

import psycopg
from psycopg import sql
from psycopg.abc import PQGen
from psycopg.pq import PGconn, TransactionStatus

from tenure import errors
from tenure.stores.libraries import ENDED_INSIDE
from tenure.stores.postgres.connecting import (
    LOOK_SECONDS,
    CannotConnect,
    Doubt,
    Late,
    Unconfirmed,
    first_line,
    stirred,
)
from tenure.stores.postgres.explaining import CONFLICTS, judge

if TYPE_CHECKING:
    from tenure.stores.postgres.database import Database

Value = TypeVar("Value")
CACHED = 2
CACHED_SECONDS = 60.0
END_SECONDS = 5.0  # for the last words: COMMIT, ROLLBACK, DISCARD
TIMED_OUT = frozenset({"25P03", "25P04", "57014", "57P01"})
IN_THE_WAY = "the transaction was rolled back, another one was in its way ({}): run it again"
TOO_LONG = (
    "the transaction was open for more than {:g} s and was rolled back: do slow work before the "
    "block"
)
# COMMIT, END, ABORT and ROLLBACK (but not ROLLBACK TO a savepoint), after blanks and comments.
_END = re.compile(
    r"(\s|--[^\n]*\n|/\*.*?\*/)*"
    r"(COMMIT|END|ABORT|PREPARE\s+TRANSACTION|ROLLBACK(?!(\s+(WORK|TRANSACTION))?\s+TO\b))\b",
    re.IGNORECASE | re.DOTALL,
)


class CommitUnknown(errors.StoreUnavailable):
    """The reply to COMMIT was lost, or no standby confirmed it: it may have been done. Whoever
    lent the transaction reads (id, lease_no) to find out."""

    unknown = True
    uncharged = True


class _Lent:
    """What sync and async loans have in common."""

    pgconn: Any
    doubt: Doubt
    deadline = float("inf")
    lent = False  # in the hands of a handler
    ended = False  # it ended the transaction by SQL
    idle_since = 0.0

    def _in_time(self, steps: PQGen[Value]) -> Generator[Any, Any, Value]:
        if time.monotonic() >= self.deadline:
            raise Late
        if self.ended:
            raise errors.StoreError(ENDED_INSIDE)
        try:
            wanted = next(steps)
            while True:
                ready = yield wanted
                wanted = steps.send(ready)
                if time.monotonic() >= self.deadline:
                    raise Late
        except StopIteration as end:
            if self.lent and self.pgconn.transaction_status == TransactionStatus.IDLE:
                self.ended = True
                raise errors.StoreError(ENDED_INSIDE) from None
            if self.doubt.felt:
                self.doubt.felt = False
                raise Unconfirmed from None
            value: Value = end.value
            return value

    def _refuse(self) -> None:
        if self.lent:
            raise errors.StoreError(ENDED_INSIDE)

    def __del__(self, *_ignored: Any) -> None:
        """No ResourceWarning: a program may end without closing its App."""


class _Cursor(psycopg.Cursor[Any]):
    def execute(self, query: Any, *arguments: Any, **named: Any) -> Self:
        _refuse_end(query, self.connection)
        return super().execute(query, *arguments, **named)


class _AsyncCursor(psycopg.AsyncCursor[Any]):
    async def execute(self, query: Any, *arguments: Any, **named: Any) -> Self:
        _refuse_end(query, self.connection)
        return await super().execute(query, *arguments, **named)


def _refuse_end(query: Any, connection: Any) -> None:
    """A COMMIT as SQL, before it gets to the server. What hides behind other statements of the
    same text is noticed after it."""
    if not connection.lent:
        return
    text = query if isinstance(query, str) else sql.as_string(query, connection)
    if _END.match(text):
        raise errors.StoreError(ENDED_INSIDE)


class LentConnection(_Lent, psycopg.Connection[Any]):
    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.cursor_factory = _Cursor
        self.doubt = Doubt()
        self.add_notice_handler(self.doubt)

    def wait(
        self, gen: PQGen[Value], interval: float = LOOK_SECONDS, timeout: float | None = None
    ) -> Value:
        if timeout is not None:
            return super().wait(gen, interval, timeout)
        return super().wait(self._in_time(gen), interval)

    def commit(self) -> None:
        self._refuse()
        super().commit()

    def rollback(self) -> None:
        self._refuse()
        super().rollback()

    def close(self) -> None:
        self._refuse()
        super().close()


class AsyncLentConnection(_Lent, psycopg.AsyncConnection[Any]):
    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.cursor_factory = _AsyncCursor
        self.doubt = Doubt()
        self.add_notice_handler(self.doubt)

    async def wait(
        self, gen: PQGen[Value], interval: float = LOOK_SECONDS, timeout: float | None = None
    ) -> Value:
        if timeout is not None:
            return await super().wait(gen, interval, timeout)
        return await super().wait(self._in_time(gen), interval)

    async def commit(self) -> None:
        self._refuse()
        await super().commit()

    async def rollback(self) -> None:
        self._refuse()
        await super().rollback()

    async def close(self) -> None:
        self._refuse()
        await super().close()


class Lender:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._idle: list[LentConnection] = []
        self._inherited: list[LentConnection] = []

    # -- def handlers -------------------------------------------------------------------------
    @contextmanager
    def lend(self, limit: float) -> Iterator[psycopg.Connection[Any]]:
        connection = self._take()
        try:
            self._begin(connection, limit)
            connection.execute(_limits(limit, connection.info.server_version))
            connection.lent = True
            yield connection
            self._check_end(connection)
            _last_words(connection)
            self._commit(connection)
        except BaseException as error:
            connection.lent = False
            told = self._told(error, connection, limit)
            self._undo(connection)
            if told is not error:
                raise told from (error if isinstance(error, psycopg.OperationalError) else None)
            raise
        self._give(connection)

    def _take(self) -> LentConnection:
        while self._idle:
            with suppress(IndexError):  # another thread took it
                connection = self._idle.pop()
                fresh = time.monotonic() - connection.idle_since < CACHED_SECONDS
                if fresh and not stirred(connection):
                    return connection
                connection.close()
        deadline = time.monotonic() + self._database.timeout
        for pause in _pauses():
            try:
                return LentConnection.connect(self._database.url, **self._wanted())
            except psycopg.Error as error:
                self._again(error, deadline)
            time.sleep(pause)
        raise AssertionError("unreachable")

    def _commit(self, connection: LentConnection) -> None:
        try:
            connection.commit()
        except psycopg.Error as error:
            self._after_commit(error, connection)

    def _undo(self, connection: LentConnection) -> None:
        """Roll back. A connection that will not is closed, and the server does the same."""
        try:
            if connection.pgconn.transaction_status == TransactionStatus.ACTIVE:
                connection.close()
            elif not connection.closed:
                _last_words(connection)
                connection.rollback()
                self._give(connection)
        except psycopg.Error:
            connection.close()

    def _give(self, connection: LentConnection) -> None:
        """Keep it for the next handler, with nothing of this one's left in the session. The
        handler may have kept its connection object: from now on that one is closed."""
        _last_words(connection)
        if len(self._idle) >= CACHED or connection.closed:
            connection.close()
            return
        try:
            if not self._database.pooled:
                connection.autocommit = True
                connection.execute("DISCARD ALL")
        except psycopg.Error:
            connection.close()
            return
        fresh = LentConnection(connection.pgconn)
        fresh.prepare_threshold = None if self._database.pooled else 5
        connection.pgconn = PGconn()
        fresh.idle_since = time.monotonic()
        self._idle.append(fresh)

    # -- async handlers -----------------------------------------------------------------------
    @asynccontextmanager
    async def alend(self, limit: float) -> AsyncIterator[psycopg.AsyncConnection[Any]]:
        """Not cached: a connection belongs to its event loop."""
        connection = await self._take_async()
        try:
            self._begin(connection, limit)
            await connection.execute(_limits(limit, connection.info.server_version))
            connection.lent = True
            yield connection
            self._check_end(connection)
            _last_words(connection)
            await self._commit_async(connection)
        except BaseException as error:
            connection.lent = False
            told = self._told(error, connection, limit)
            if told is not error:
                raise told from (error if isinstance(error, psycopg.OperationalError) else None)
            raise
        finally:
            await connection.close()  # an open transaction is rolled back

    async def _take_async(self) -> AsyncLentConnection:
        deadline = time.monotonic() + self._database.timeout
        for pause in _pauses():
            try:
                return await AsyncLentConnection.connect(self._database.url, **self._wanted())
            except psycopg.Error as error:
                self._again(error, deadline)
            await asyncio.sleep(pause)
        raise AssertionError("unreachable")

    async def _commit_async(self, connection: AsyncLentConnection) -> None:
        try:
            await connection.commit()
        except psycopg.Error as error:
            self._after_commit(error, connection)

    # -- both ---------------------------------------------------------------------------------
    def _wanted(self) -> dict[str, Any]:
        if self._database.pooled is None:
            self._database.run("SELECT 1")  # learns whether a pooler is in between
        threshold = None if self._database.pooled else 5
        named = {"fallback_application_name": "tenure handler", "prepare_threshold": threshold}
        return self._database.options | named

    def _again(self, error: psycopg.Error, deadline: float) -> None:
        """Return when another attempt to connect makes sense."""
        refusal = CannotConnect(first_line(error, self._database.url))
        if judge(refusal, lost=False) == "never" or time.monotonic() >= deadline:
            self._database.refuse(refusal)
        self._database.retries += 1

    def _begin(self, connection: _Lent, limit: float) -> None:
        connection.deadline = time.monotonic() + limit
        connection.ended = False

    def _check_end(self, connection: _Lent) -> None:
        """Before the COMMIT: one that would roll back instead must not look like a success."""
        status = connection.pgconn.transaction_status
        if connection.ended or status == TransactionStatus.IDLE:
            raise errors.StoreError(ENDED_INSIDE)
        if time.monotonic() >= connection.deadline:
            raise Late
        if status == TransactionStatus.INERROR:
            raise errors.StoreError(
                "a statement in the transaction's block failed and its error was caught, so "
                "PostgreSQL refuses the rest and nothing was committed: let the error out, or put "
                "the statement into `with conn.transaction():`"
            )

    def _after_commit(
        self, error: psycopg.Error, connection: LentConnection | AsyncLentConnection
    ) -> NoReturn:
        if isinstance(error, Unconfirmed):
            raise CommitUnknown(str(self._database.explain(error))) from error
        if connection.closed or isinstance(error, Late):
            raise CommitUnknown(
                f"the connection to {self._database.place} was lost while a transaction was "
                "being committed: whether it was is not known"
            ) from error
        raise error

    def _told(
        self,
        error: BaseException,
        connection: LentConnection | AsyncLentConnection,
        limit: float,
    ) -> BaseException:
        """The handler's own errors stay as they are; those of time and connection are explained,
        and a conflict with another transaction: whether the server finds it in the handler's
        statements, in our finish or at the COMMIT is chance, and nobody's fault."""
        if not isinstance(error, psycopg.Error):
            return error
        if error.sqlstate in CONFLICTS:
            told = errors.StoreBusy(IN_THE_WAY.format(error.sqlstate))
            told.uncharged = True
            return told
        late = time.monotonic() >= connection.deadline and (
            connection.closed or error.sqlstate in TIMED_OUT
        )
        if isinstance(error, Late) or late or error.sqlstate in ("25P03", "25P04"):
            return errors.StoreBusy(TOO_LONG.format(limit))
        return self._database.explain(error) if connection.closed else error

    def close(self) -> None:
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def forget(self) -> None:
        self._inherited += self._idle
        self._idle = []


def _last_words(connection: _Lent) -> None:
    connection.lent = connection.ended = False
    connection.deadline = time.monotonic() + END_SECONDS


def bounded_by(limit: float, version: int) -> list[tuple[str, str]]:
    """What the server is to end a transaction by, when it takes longer."""
    names = ["idle_in_transaction_session_timeout", "statement_timeout"]
    if version >= 170000:
        names.append("transaction_timeout")
    return [(name, str(max(1, round(limit * 1000)))) for name in names]


def _limits(limit: float, version: int) -> Any:
    """Set for the transaction alone, so that a pooler's session keeps nothing of it."""
    return "; ".join(f"SET LOCAL {name} = {value}" for name, value in bounded_by(limit, version))


def _pauses() -> Iterator[float]:
    pause = 0.02
    while True:
        yield pause * random.uniform(0.5, 1.0)
        pause = min(pause * 2, 1.0)
