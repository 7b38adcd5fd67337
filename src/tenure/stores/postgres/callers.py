"""Enqueue on a connection that belongs to somebody else, in that connection's transaction.

The statement is the same for everybody; each library has a runner that sends it the library's own
way and learns of the commit as the library allows. Settings of the connection stay as they are.
A refused batch (JobError) leaves the transaction usable; after an error of the database it is
aborted, as after any error in PostgreSQL: a caller who wants to go on uses a savepoint.
"""

from __future__ import annotations

import asyncio
import re
import weakref
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from tenure import errors
from tenure.ids import parse_id
from tenure.job import Receipt
from tenure.stores.libraries import described, known_as, refuse_database
from tenure.stores.postgres import explaining
from tenure.stores.postgres.connecting import Doubt
from tenure.stores.postgres.notices import FIRST_LOOK, LONGEST_LOOK, WATCH_SECONDS, Notices

JOINED = (
    "a psycopg Connection or AsyncConnection, an asyncpg Connection, a SQLAlchemy Connection, "
    "Session, AsyncConnection or AsyncSession, or Django's connection"
)
PARAMETER = re.compile(r"%\((\w+)\)s(?:::(\w+))?")
HINTS = "tenure_hints"  # in Session.info: whom to tell of which queues after the commit


class Order(NamedTuple):
    """What every runner sends, and whom it tells afterwards."""

    statement: str  # as psycopg wants it: %(name)s
    parameters: Mapping[str, Any]
    notices: Notices
    queues: frozenset[str]


Runner = Callable[[Any, Order], list[Receipt] | Awaitable[list[Receipt]]]


def enqueue_on(
    connection: Any,
    statement: str,
    parameters: Mapping[str, Any],
    notices: Notices,
    queues: Iterable[str],
) -> list[Receipt] | Awaitable[list[Receipt]]:
    """Run `statement` where the caller is: in their transaction, or in one of its own where their
    connection is in autocommit. An async connection gives a coroutine."""
    runner = known_as(connection, RUNNERS)
    if runner is None:
        raise errors.ConfigError(
            f"conn= got {described(connection)}; this app stores jobs in PostgreSQL and can join "
            f"{JOINED}."
        )
    return runner(connection, Order(statement, parameters, notices, frozenset(queues)))


def is_async(connection: object) -> bool:
    """Whether joining it has to be awaited."""
    return known_as(connection, RUNNERS) in ASYNC_RUNNERS


# -- psycopg ------------------------------------------------------------------------------------
def on_psycopg(connection: psycopg.Connection[Any], order: Order) -> list[Receipt]:
    """A cursor of our own making: theirs may be of another kind or make rows of another kind."""
    with (
        explained(),
        Confirmed(connection),
        psycopg.Cursor(connection, row_factory=tuple_row) as cursor,
    ):
        rows = cursor.execute(order.statement, order.parameters).fetchall()
    order.notices.watch(connection, order.queues)
    return receipts(rows)


async def on_psycopg_async(connection: psycopg.AsyncConnection[Any], order: Order) -> list[Receipt]:
    with explained(), Confirmed(connection):
        async with psycopg.AsyncCursor(connection, row_factory=tuple_row) as cursor:
            await cursor.execute(order.statement, order.parameters)
            rows = await cursor.fetchall()
    order.notices.watch(connection, order.queues)
    return receipts(rows)


# -- asyncpg ------------------------------------------------------------------------------------
async def on_asyncpg(connection: Any, order: Order) -> list[Receipt]:
    statement, values = numbered(order.statement, order.parameters)
    driver = getattr(connection, "_con", connection)  # a pool lends a proxy of it
    with explained(), Confirmed(driver):
        rows = await connection.fetch(statement, *values)
    follow(driver, order)
    return receipts(rows)


def numbered(statement: str, parameters: Mapping[str, Any]) -> tuple[str, list[Any]]:
    """$1, $2 …; each is sent as text where it is cast: many teach asyncpg to turn `json` into
    objects and back, and ours is JSON already."""
    names: list[str] = []

    def number(match: re.Match[str]) -> str:
        name, kind = match.groups()
        if name not in names:
            names.append(name)
        place = f"${names.index(name) + 1}"
        return f"{place}::text::{kind}" if kind else place

    text = PARAMETER.sub(number, statement).replace("%%", "%")
    return text, [parameters[name] for name in names]


def follow(connection: Any, order: Order) -> None:
    """asyncpg tells nobody of a commit: look at the state of the transaction until it has ended,
    on its own event loop, ever less often."""
    if not order.notices.enabled:
        return
    loop = asyncio.get_running_loop()
    since = loop.time()
    reference = weakref.ref(connection)

    def look() -> None:
        there = reference()
        age = loop.time() - since
        if there is None or there.is_closed() or not there.is_in_transaction():
            order.notices.hint(order.queues)
        elif age < WATCH_SECONDS:
            loop.call_later(max(FIRST_LOOK, min(age / 10, LONGEST_LOOK)), look)

    look()


# -- SQLAlchemy ---------------------------------------------------------------------------------
def on_connection(connection: Any, order: Order) -> list[Receipt]:
    """The transaction is joined, and begun where the caller's own statement would begin it."""
    rows = run_text(connection, order)
    driver = connection.connection.driver_connection
    if known_as(driver, DRIVERS) == "psycopg":
        order.notices.watch(driver, order.queues)
    elif known_as(driver, DRIVERS) == "asyncpg":
        follow(driver, order)
    else:
        order.notices.hint(order.queues)
    return receipts(rows)


def on_session(session: Any, order: Order) -> list[Receipt]:
    from sqlalchemy import event

    connection = session.connection()
    rows = run_text(connection, order)
    if autocommits(connection.connection.driver_connection):
        order.notices.hint(order.queues)
    else:
        waiting = session.info.setdefault(HINTS, {})
        waiting.setdefault(order.notices, set()).update(order.queues)
        if not event.contains(session, "after_commit", hint_after_commit):
            event.listen(session, "after_commit", hint_after_commit)
    return receipts(rows)


def hint_after_commit(session: Any) -> None:
    """One listener a session, however many jobs it stores. A released savepoint is no commit."""
    if not session.in_nested_transaction():
        for notices, queues in session.info.pop(HINTS, {}).items():
            notices.hint(queues)


def on_scoped_session(registry: Any, order: Order) -> list[Receipt]:
    return on_session(registry(), order)


async def on_async(target: Any, order: Order) -> list[Receipt]:
    """An AsyncConnection or AsyncSession: the same inside it, on the caller's loop."""
    runner = known_as(target, INSIDE)
    assert runner is not None  # noqa: S101  or it would not have come here
    found: list[Receipt] = await target.run_sync(partial(runner, order=order))
    return found


async def on_async_scoped_session(registry: Any, order: Order) -> list[Receipt]:
    return await on_async(registry(), order)


def run_text(connection: Any, order: Order) -> Sequence[Sequence[Any]]:
    """As text() wants it, `:name`; a cast is spelled out, for `:name::json` is no parameter."""
    from sqlalchemy import text

    if connection.dialect.name != "postgresql":
        refuse_database(connection, connection.dialect.name, "PostgreSQL")
    named = PARAMETER.sub(
        lambda match: f"CAST(:{match[1]} AS {match[2]})" if match[2] else f":{match[1]}",
        order.statement,
    )
    with explained(), Confirmed(connection.connection.driver_connection):
        found: Sequence[Sequence[Any]] = connection.execute(
            text(named.replace("%%", "%")), order.parameters
        ).all()
    return found


def autocommits(driver: Any) -> bool:
    """It is in no transaction although it has just been used."""
    if known_as(driver, DRIVERS) == "psycopg":
        return bool(driver.pgconn.transaction_status == TransactionStatus.IDLE)
    return known_as(driver, DRIVERS) == "asyncpg" and not driver.is_in_transaction()


# -- Django -------------------------------------------------------------------------------------
def on_django(connection: Any, order: Order) -> list[Receipt]:
    if connection.vendor != "postgresql":
        refuse_database(connection, connection.vendor, "PostgreSQL")
    connection.validate_no_broken_transaction()  # in Django's words: its cause is no error of ours
    with explained(), connection.cursor() as cursor, Confirmed(connection.connection):
        cursor.execute(order.statement, order.parameters)
        rows = cursor.fetchall()
    hint = partial(order.notices.hint, order.queues)
    if connection.in_atomic_block or connection.get_autocommit():
        connection.on_commit(hint, robust=True)
    elif known_as(connection.connection, DRIVERS) == "psycopg":
        order.notices.watch(connection.connection, order.queues)
    else:
        hint()
    return receipts(rows)


# -- what came back -----------------------------------------------------------------------------
def receipts(rows: Iterable[Sequence[Any]]) -> list[Receipt]:
    """Ids come as text or UUID, as the driver likes. A batch that was refused comes as one row
    without an id that says why; nothing was changed and the transaction can go on. A statement
    that asks first whether it is at home returns nothing elsewhere."""
    rows = list(rows)
    if not rows:
        raise errors.ConfigError(
            "conn= is open on another database than this app's: the job would not commit with "
            "your data, or no worker would see it. Connect to the database of the app's URL."
        )
    if rows[0][0] is None:
        raise errors.JobError(rows[0][2])
    return [Receipt(parse_id(row[0]), bool(row[1]), row[2]) for row in rows]


class Confirmed:
    """Where the driver's connection is in autocommit our statement is the commit: a success that
    no standby has confirmed is none. (Of a commit of the caller's own their driver hears.)"""

    __slots__ = ("_doubt", "_driver")

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self._doubt: Doubt | None = None

    def __enter__(self) -> None:
        driver = self._driver
        if hasattr(driver, "add_notice_handler"):  # psycopg's
            if driver.autocommit and driver.pgconn.transaction_status == TransactionStatus.IDLE:
                self._doubt = Doubt()
                driver.add_notice_handler(self._doubt)
        elif hasattr(driver, "add_log_listener") and not driver.is_in_transaction():  # asyncpg's
            self._doubt = Doubt()
            driver.add_log_listener(self._doubt.hear)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        doubt, driver = self._doubt, self._driver
        if doubt is None:
            return
        if hasattr(driver, "remove_notice_handler"):
            driver.remove_notice_handler(doubt)
        else:
            driver.remove_log_listener(doubt.hear)
        if doubt.felt and kind is None:
            error = errors.StoreUnavailable(f"conn=: the database {explaining.UNCONFIRMED}")
            error.unknown = True
            raise error


@contextmanager
def explained() -> Iterator[None]:
    """Errors of the server in our words. Their own texts may quote parameters (SQLAlchemy's
    always do), so only the driver's, and only where it cannot, is shown as the cause. What a
    library says about its own use passes."""
    try:
        yield
    except errors.TenureError:
        raise
    except Exception as error:
        root = root_of(error)
        state = state_of(root)
        lost = isinstance(root, psycopg.OperationalError | psycopg.InterfaceError)
        if state or lost:
            cause = root if state.startswith(explaining.TELLING) else None
            raise _told(state, _said(root, state)) from cause
        if hasattr(error, "statement"):  # SQLAlchemy's, with the parameters in its text
            raise errors.StoreError(
                f"the statement could not be sent on conn=: {type(root).__name__}; values are "
                "not shown here"
            ) from None
        raise


def root_of(error: BaseException) -> BaseException:
    """The driver's own error under what a library has wrapped around it."""
    while True:
        inner = getattr(error, "orig", None) or error.__cause__
        if not isinstance(inner, BaseException) or (state_of(error) and not state_of(inner)):
            return error
        error = inner


def state_of(error: BaseException) -> str:
    return str(getattr(error, "sqlstate", None) or getattr(error, "pgcode", None) or "")


def _said(error: BaseException, state: str) -> str:
    """The server's own first line, where that cannot quote a value."""
    if not state.startswith(("TN", *explaining.TELLING)):
        return ""
    diagnosis = getattr(error, "diag", None)
    said = getattr(diagnosis, "message_primary", None) or getattr(error, "message", None)
    return str(said or "")


def _told(state: str, said: str) -> errors.TenureError:
    if state == "TN001":
        return errors.JobError(said)
    if state == "TN002":
        return errors.SchemaError(said)
    if state in explaining.NO_SCHEMA:
        return errors.SchemaError(
            f"conn= is open on a database without Tenure tables of this version ({said}): run "
            "`tenure migrate` for it, or open conn= on the database of this app's URL"
        )
    if state == "25P02":
        return errors.StoreError(
            "the transaction on conn= had failed before this enqueue: roll it back, or back to a "
            "savepoint, first"
        )
    if state in explaining.BUSY:
        return errors.StoreBusy(
            f"conn=: {said} ({state}). Your transaction is aborted: roll it back, or back to a "
            "savepoint, and try again."
        )
    if state == "42501":
        return errors.StoreUnavailable(
            f"conn=: {said}. Its database user lacks that right: as the owner of Tenure's schema, "
            "GRANT it USAGE on the schema and the rights on its tables, sequences and functions."
        )
    if not state or state.startswith("08") or state in explaining.ENDED:
        return errors.StoreUnavailable(
            "the connection given as conn= is closed or was lost: its transaction is rolled back"
            + (f" ({said})" if said else "")
        )
    if not said:
        return errors.StoreError(
            f"the database of conn= refused a value ({state}); values are not shown here"
        )
    return errors.StoreError(f"the database of conn= refused the enqueue: {said} ({state})")


DRIVERS: Mapping[str, str] = MappingProxyType(
    {
        "psycopg.Connection": "psycopg",
        "psycopg.AsyncConnection": "psycopg",
        "asyncpg.connection.Connection": "asyncpg",
    }
)
INSIDE: Mapping[str, Callable[..., list[Receipt]]] = MappingProxyType(
    {
        "sqlalchemy.ext.asyncio.engine.AsyncConnection": on_connection,
        "sqlalchemy.ext.asyncio.session.AsyncSession": on_session,
    }
)
RUNNERS: Mapping[str, Runner] = MappingProxyType(
    {
        "psycopg.Connection": on_psycopg,
        "psycopg.AsyncConnection": on_psycopg_async,
        "asyncpg.connection.Connection": on_asyncpg,
        "asyncpg.pool.PoolConnectionProxy": on_asyncpg,
        "sqlalchemy.engine.base.Connection": on_connection,
        "sqlalchemy.orm.session.Session": on_session,
        "sqlalchemy.orm.scoping.scoped_session": on_scoped_session,
        "sqlalchemy.ext.asyncio.engine.AsyncConnection": on_async,
        "sqlalchemy.ext.asyncio.session.AsyncSession": on_async,
        "sqlalchemy.ext.asyncio.scoping.async_scoped_session": on_async_scoped_session,
        "django.utils.connection.ConnectionProxy": on_django,
        "django.db.backends.base.base.BaseDatabaseWrapper": on_django,
    }
)
ASYNC_RUNNERS = frozenset({on_psycopg_async, on_asyncpg, on_async, on_async_scoped_session})
