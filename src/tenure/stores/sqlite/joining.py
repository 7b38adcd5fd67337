"""`ctx.transaction(conn=…)`: a handler's ORM and the end of its job in one transaction.

It is the library's own, and holds the file's only write lock from the beginning. Nobody can roll it
back under the library's hands (see `lending.py`: two threads in one connection, with functions in
Python as Django has them, may wait for each other for ever), so a late one is refused at its end.
"""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from tenure import errors, sql
from tenure.stores import libraries
from tenure.stores.sqlite import callers
from tenure.stores.sqlite.file import split_statements
from tenure.stores.sqlite.lending import WARN_AFTER, too_long, warn_of

if TYPE_CHECKING:
    from tenure.outcome import Ended
    from tenure.store import Accepted, Registration
    from tenure.stores.sqlite.file import SqliteFile

T = TypeVar("T")
Finish = Callable[[Any, "Registration", "Ended"], "Accepted"]
OURS = ("picked", "ended")  # of the statement temporary_tables


class Joined:
    """What sync and async settlements have in common; `finish` is the store's, on a connection
    that has its temporary tables."""

    def __init__(
        self, file: SqliteFile, conn: Any, lock: str, finish: Finish, limit: float
    ) -> None:
        self.connection = conn
        self._file = file
        self._lock = lock
        self._finish = finish
        self._limit = limit
        self._begun = time.monotonic()
        after = min(WARN_AFTER, limit / 2)
        self._timer = threading.Timer(after, warn_of, (file.path, after))
        self._timer.daemon = True

    def take_lock(self, driver: Any) -> None:
        callers.take_write_lock(self._file, driver, self._lock)
        self._begun = time.monotonic()
        self._timer.start()

    def stop(self) -> None:
        self._timer.cancel()
        if self._file.fragile:
            self._file.watch_log()

    def settle(self, db: Any, worker: Registration, end: Ended) -> Accepted:
        """The last statements: on their connection, with our temporary tables for this moment."""
        if time.monotonic() - self._begun >= self._limit:
            raise too_long(self._file.path, self._limit)
        if not db.in_transaction:
            raise errors.StoreError(libraries.ENDED_INSIDE)
        before = db.row_factory, db.text_factory
        db.row_factory, db.text_factory = None, str
        try:
            taken = db.execute("SELECT name FROM sqlite_temp_master").fetchall()
            if any(name in OURS for (name,) in taken):
                raise errors.ConfigError(
                    f"conn= has a temporary table of the name {' or '.join(OURS)}, which Tenure "
                    "needs for a moment: drop it before the end of the block, or name it otherwise"
                )
            made = sql.statements("sqlite")["temporary_tables"]
            for statement in split_statements(made, self._file.module):
                db.execute(statement)
            verdict = self._finish(db, worker, end)
            for name in OURS:
                db.execute(f"DROP TABLE temp.{name}")
            return verdict
        except self._file.module.Error as error:
            raise self._file.explain(error) from error
        finally:
            db.row_factory, db.text_factory = before


class JoinedSettlement(Joined):
    @contextmanager
    def held(self) -> Iterator[JoinedSettlement]:
        self._unit = libraries.unit_of(self.connection)
        self._driver = self._unit.begin()
        try:
            if self._unit.kind != "sqlite":
                libraries.refuse_database(self.connection, self._unit.kind, "SQLite")
            self.take_lock(self._driver)
            yield self
            self._unit.commit()
        except BaseException as error:
            self._unit.rollback(error)
            raise
        finally:
            self.stop()

    def finish(self, worker: Registration, end: Ended) -> Accepted:
        self._unit.complete()
        return self.settle(self._driver, worker, end)


class AsyncJoinedSettlement(Joined):
    """On aiosqlite: its thread alone uses the driver's connection, so no loop is held up."""

    @asynccontextmanager
    async def held(self) -> AsyncIterator[AsyncJoinedSettlement]:
        self._unit = libraries.AsyncUnit(self.connection)
        self._driver = await self._unit.begin()
        try:
            if self._unit.kind != "sqlite":
                libraries.refuse_database(self.connection, self._unit.kind, "SQLite")
            await self._inside(self.take_lock)
            yield self
            await self._unit.commit()
        except BaseException as error:
            await self._unit.rollback(error)
            raise
        finally:
            self.stop()

    async def finish(self, worker: Registration, end: Ended) -> Accepted:
        await self._unit.complete()
        return await self._inside(lambda db: self.settle(db, worker, end))

    async def _inside(self, call: Callable[[Any], T]) -> T:
        driver = self._driver
        found: T = await driver._execute(call, driver._conn)
        return found
