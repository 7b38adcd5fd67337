"""Libraries whose connections a job may join: SQLAlchemy and Django, whatever is behind them.

A connection is known by the names of its classes, so nothing is imported that the caller has not
loaded. `Unit` is a library's own transaction while it belongs to `ctx.transaction(conn=…)`: the
library begins, commits and rolls back, so its sessions, signals and `on_commit` work as always.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any, NoReturn, Protocol, TypeVar

from tenure import errors

Known = TypeVar("Known")
T = TypeVar("T")

ENDED_INSIDE = (
    "a transaction cannot be ended inside its block, by a commit, a rollback, a close or "
    "`with conn:`; leave that to the end of the block"
)
OUTERMOST = "ctx.transaction(conn=…) is the end of a job, and of the outermost transaction"
SQLALCHEMY = MappingProxyType(
    {
        "sqlalchemy.engine.base.Connection": "connection",
        "sqlalchemy.orm.session.Session": "session",
        "sqlalchemy.orm.scoping.scoped_session": "registry",
    }
)
SQLALCHEMY_ASYNC = MappingProxyType(
    {
        "sqlalchemy.ext.asyncio.engine.AsyncConnection": "connection",
        "sqlalchemy.ext.asyncio.session.AsyncSession": "session",
        "sqlalchemy.ext.asyncio.scoping.async_scoped_session": "registry",
    }
)
DJANGO = MappingProxyType(
    {
        "django.utils.connection.ConnectionProxy": "proxy",
        "django.db.backends.base.base.BaseDatabaseWrapper": "wrapper",
    }
)


def known_as(connection: object, names: Mapping[str, Known]) -> Known | None:
    for kind in type(connection).__mro__:
        found = names.get(f"{kind.__module__}.{kind.__qualname__}")
        if found is not None:
            return found
    return None


def described(connection: object) -> str:
    kind = type(connection)
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def refuse_database(connection: object, name: str, ours: str) -> NoReturn:
    raise errors.ConfigError(
        f"conn= got {described(connection)} to a database of another kind ({name}), but this app "
        f"stores jobs in {ours}: the job would not commit with your data. Connect to the app's "
        "database."
    )


# -- one transaction of a library -----------------------------------------------------------------
class Unit(Protocol):
    """`begin` gives the driver's connection, in a transaction of the library's; `complete` sends
    what the library still holds back, and is an error where the transaction has ended meanwhile;
    then `commit`, or `rollback` whatever happened."""

    kind: str  # of the database: postgresql, sqlite

    def begin(self) -> Any: ...

    def ask(self, statement: str) -> Any:
        """One row, through the library: it begins what it has put off."""

    def complete(self) -> None: ...

    def commit(self) -> None: ...

    def rollback(self, error: BaseException) -> None: ...


def unit_of(connection: Any) -> Unit:
    """The unit of a blocking library's connection."""
    if (kind := known_as(connection, SQLALCHEMY)) is not None:
        return SqlalchemyUnit(connection() if kind == "registry" else connection)
    if known_as(connection, DJANGO) is not None:
        return DjangoUnit(connection)
    if known_as(connection, SQLALCHEMY_ASYNC) is not None:
        raise errors.ConfigError(
            f"ctx.transaction() got {described(connection)}, which has to be awaited: write "
            "`async with ctx.transaction(conn=…)` in an `async def` handler"
        )
    raise errors.ConfigError(
        f"ctx.transaction(conn=…) got {described(connection)}: it takes a Session or Connection of "
        "SQLAlchemy, or Django's connection. For SQL of your own write `with ctx.transaction() as "
        "conn:`, which lends you one."
    )


class SqlalchemyUnit:
    """Of a Session or a Connection."""

    def __init__(self, target: Any) -> None:
        self._target = target
        self._session = hasattr(target, "flush")

    def begin(self) -> Any:
        from sqlalchemy import event

        target = self._target
        self._connection = target.connection() if self._session else target
        if target.in_nested_transaction() or self._connection.in_nested_transaction():
            raise errors.ConfigError(f"{OUTERMOST}: end your begin_nested() first")
        if not self._connection.in_transaction():
            self._connection.begin()
        self.kind = self._connection.dialect.name
        self._begun = target.get_transaction()
        event.listen(self._connection, "commit", _refuse_end)
        return self._connection.connection.driver_connection

    def ask(self, statement: str) -> Any:
        return self._connection.exec_driver_sql(statement).one()

    def complete(self) -> None:
        if self._session:
            self._target.flush()
        nested = self._target.in_nested_transaction()
        if nested or self._target.get_transaction() is not self._begun:
            raise errors.StoreError(ENDED_INSIDE)

    def commit(self) -> None:
        """A Session that was given a Connection in a transaction leaves that to whoever began it:
        nothing would be stored yet of a job that passes for finished."""
        self._let_go()
        self._target.commit()
        if self._connection.in_transaction():
            raise errors.ConfigError(
                f"{OUTERMOST}: this Session is bound to a Connection whose transaction was begun "
                "outside of it. Bind it to the engine, or give conn= that Connection."
            )

    def rollback(self, error: BaseException) -> None:
        self._let_go()
        self._target.rollback()
        if self._connection.in_transaction():
            self._connection.rollback()

    def _let_go(self) -> None:
        from sqlalchemy import event

        if event.contains(self._connection, "commit", _refuse_end):
            event.remove(self._connection, "commit", _refuse_end)


def _refuse_end(_connection: Any) -> NoReturn:
    """Of a savepoint's release SQLAlchemy tells by another event."""
    raise errors.StoreError(ENDED_INSIDE)


class DjangoUnit:
    """`atomic(durable=True)`, which lets nobody commit or roll back inside it."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self.kind = connection.vendor

    def begin(self) -> Any:
        from django.db import transaction

        given = self._connection
        if not (given.in_atomic_block or given.get_autocommit()):
            # There atomic() is a savepoint, of a transaction that somebody else commits, or not.
            raise errors.ConfigError(
                f"{OUTERMOST}, but Django's autocommit is off for this connection, so atomic() "
                'commits nothing: call set_autocommit(True), or take "AUTOCOMMIT": False out of '
                "DATABASES"
            )
        self._atomic = transaction.atomic(using=self._connection.alias, durable=True)
        try:
            self._atomic.__enter__()
        except RuntimeError as error:
            raise errors.ConfigError(
                f"{OUTERMOST}: use it outside of your atomic() blocks"
            ) from error
        return self._connection.connection

    def ask(self, statement: str) -> Any:
        with self._connection.cursor() as cursor:
            cursor.execute(statement)
            return cursor.fetchone()

    def complete(self) -> None:
        """Marked so, it would be rolled back without a word."""
        if self._connection.needs_rollback:
            raise errors.StoreError(
                "an error inside an atomic() of this transaction's block was caught in another, so "
                "Django rolls all of it back: let the error out, or catch it outside its atomic()"
            )

    def commit(self) -> None:
        self._atomic.__exit__(None, None, None)

    def rollback(self, error: BaseException) -> None:
        if self._connection.in_atomic_block:
            self._atomic.__exit__(type(error), error, error.__traceback__)


class AsyncUnit:
    """Of an AsyncSession or AsyncConnection: the same inside it, on the caller's loop."""

    def __init__(self, connection: Any) -> None:
        kind = known_as(connection, SQLALCHEMY_ASYNC)
        if kind is None:
            raise errors.ConfigError(
                f"`async with ctx.transaction(conn=…)` got {described(connection)}: it takes an "
                "AsyncSession or AsyncConnection of SQLAlchemy. With a blocking library write "
                "`with ctx.transaction(conn=…)` in a `def` handler."
            )
        self._target = connection() if kind == "registry" else connection
        self._unit: SqlalchemyUnit

    @property
    def kind(self) -> str:
        return str(self._unit.kind)

    async def begin(self) -> Any:
        def begin(inner: Any) -> Any:
            self._unit = SqlalchemyUnit(inner)
            return self._unit.begin()

        return await self._target.run_sync(begin)

    async def ask(self, statement: str) -> Any:
        return await self._inside(lambda: self._unit.ask(statement))

    async def complete(self) -> None:
        await self._inside(self._unit.complete)

    async def commit(self) -> None:
        await self._inside(self._unit.commit)

    async def rollback(self, error: BaseException) -> None:
        await self._inside(lambda: self._unit.rollback(error))

    def _inside(self, call: Callable[[], T]) -> Awaitable[T]:
        found: Awaitable[T] = self._target.run_sync(lambda _inner: call())
        return found
