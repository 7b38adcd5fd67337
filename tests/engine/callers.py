"""One way to use every library whose transactions a job can join: begin, execute, enqueue, commit.

Async libraries run on an event loop of their own, a call at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import tenure

T = TypeVar("T")


class Caller:
    """A program's own connection. `conn` is what it gives to `options(conn=…)`."""

    conn: Any

    def __init__(self, url: str) -> None:
        self.url = url
        self.open()

    def open(self) -> None:
        raise NotImplementedError

    def begin(self) -> None:
        """Nothing to say where the first statement begins a transaction."""

    def execute(self, statement: str) -> None:
        raise NotImplementedError

    def commit(self) -> None:
        self.conn.commit()

    def rollback(self) -> None:
        self.conn.rollback()

    def close(self) -> None:
        self.conn.close()

    def enqueue(self, task: tenure.Task[..., Any], *args: Any, **options: Any) -> tenure.Receipt:
        return task.options(conn=self.conn, **options).enqueue(*args)

    def enqueue_many(self, app: tenure.App, jobs: list[Any]) -> list[tenure.Receipt]:
        return app.enqueue_many(jobs, conn=self.conn)

    def wait(self, call: Callable[[], T]) -> T:
        """`call` blocks; whatever loop there is goes on."""
        return call()


class AsyncCaller(Caller):
    def open(self) -> None:
        self.runner = asyncio.Runner()
        self.runner.get_loop()
        self.run(self.aopen())

    async def aopen(self) -> None:
        raise NotImplementedError

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    def execute(self, statement: str) -> None:
        self.run(self.conn.execute(statement))

    def commit(self) -> None:
        self.run(self.conn.commit())

    def rollback(self) -> None:
        self.run(self.conn.rollback())

    def close(self) -> None:
        self.run(self.aclose())
        self.runner.close()

    async def aclose(self) -> None:
        await self.conn.close()

    def enqueue(self, task: tenure.Task[..., Any], *args: Any, **options: Any) -> tenure.Receipt:
        return self.run(task.options(conn=self.conn, **options).aenqueue(*args))

    def enqueue_many(self, app: tenure.App, jobs: list[Any]) -> list[tenure.Receipt]:
        return self.run(app.aenqueue_jobs(jobs, conn=self.conn))

    def wait(self, call: Callable[[], T]) -> T:
        return self.run(asyncio.to_thread(call))


# -- drivers --------------------------------------------------------------------------------------


class Psycopg(Caller):
    def open(self) -> None:
        import psycopg

        self.conn = psycopg.connect(self.url)

    def execute(self, statement: str) -> None:
        self.conn.execute(statement)


class PsycopgAsync(AsyncCaller):
    async def aopen(self) -> None:
        import psycopg

        self.conn = await psycopg.AsyncConnection.connect(self.url)


class Asyncpg(AsyncCaller):
    async def aopen(self) -> None:
        import asyncpg

        self.conn = await asyncpg.connect(self.url, ssl=False)

    def begin(self) -> None:
        self.transaction = self.conn.transaction()
        self.run(self.transaction.start())

    def commit(self) -> None:
        self.run(self.transaction.commit())

    def rollback(self) -> None:
        self.run(self.transaction.rollback())


class AsyncpgPool(Asyncpg):
    async def aopen(self) -> None:
        import asyncpg

        self.pool = await asyncpg.create_pool(self.url, min_size=1, max_size=1, ssl=False)
        self.conn = await self.pool.acquire()

    async def aclose(self) -> None:
        await self.pool.release(self.conn)
        await self.pool.close()


# -- SQLAlchemy -----------------------------------------------------------------------------------


def sqlalchemy_url(url: str, driver: str) -> str:
    if url.startswith("sqlite:"):
        driver = "aiosqlite" if driver == "psycopg_async" else "pysqlite"
        return url.replace("sqlite:", f"sqlite+{driver}:")
    return url.replace("postgresql://", f"postgresql+{driver}://")


class SqlalchemyConnection(Caller):
    def open(self) -> None:
        import sqlalchemy

        self.engine = sqlalchemy.create_engine(sqlalchemy_url(self.url, "psycopg"))
        self.connect()

    def connect(self) -> None:
        self.conn = self.engine.connect()

    def execute(self, statement: str) -> None:
        import sqlalchemy

        self.conn.execute(sqlalchemy.text(statement))

    def close(self) -> None:
        self.conn.close()
        self.engine.dispose()


class SqlalchemySession(SqlalchemyConnection):
    def connect(self) -> None:
        from sqlalchemy.orm import sessionmaker

        self.conn = sessionmaker(self.engine)()


class SqlalchemyScopedSession(SqlalchemyConnection):
    def connect(self) -> None:
        from sqlalchemy.orm import scoped_session, sessionmaker

        self.conn = scoped_session(sessionmaker(self.engine))

    def close(self) -> None:
        self.conn.remove()
        self.engine.dispose()


class SqlalchemyAsyncConnection(AsyncCaller):
    driver = "psycopg_async"

    async def aopen(self) -> None:
        from sqlalchemy.ext.asyncio import create_async_engine

        self.engine = create_async_engine(sqlalchemy_url(self.url, self.driver))
        await self.aconnect()

    async def aconnect(self) -> None:
        self.conn = await self.engine.connect()

    def execute(self, statement: str) -> None:
        import sqlalchemy

        self.run(self.conn.execute(sqlalchemy.text(statement)))

    async def aclose(self) -> None:
        await self.conn.close()
        await self.engine.dispose()


class SqlalchemyAsyncSession(SqlalchemyAsyncConnection):
    async def aconnect(self) -> None:
        from sqlalchemy.ext.asyncio import async_sessionmaker

        self.conn = async_sessionmaker(self.engine)()


class SqlalchemyAsyncpgConnection(SqlalchemyAsyncConnection):
    driver = "asyncpg"


class SqlalchemyAsyncpgSession(SqlalchemyAsyncSession):
    driver = "asyncpg"


# -- Django ---------------------------------------------------------------------------------------


class Django(Caller):
    """`django.db.connection` and `transaction.atomic()`."""

    def open(self) -> None:
        import django
        import django.conf
        import django.db

        if not django.conf.settings.configured:
            django.conf.settings.configure(DATABASES={}, LOGGING_CONFIG=None)
            django.setup()
        django.db.connections["default"] = self.wrapper("default")
        self.conn = django.db.connection

    def wrapper(self, alias: str) -> Any:
        from importlib import import_module
        from urllib.parse import urlsplit

        address = urlsplit(self.url)
        kind = {"sqlite": "sqlite3"}.get(address.scheme, address.scheme)
        settings = {
            "ENGINE": f"django.db.backends.{kind}",
            "NAME": address.path[1:],
            "USER": address.username,
            "PASSWORD": address.password or "",
            "HOST": address.hostname,
            "PORT": address.port,
            "TIME_ZONE": None,
            "CONN_MAX_AGE": 0,
            "CONN_HEALTH_CHECKS": False,
            "AUTOCOMMIT": True,
            "ATOMIC_REQUESTS": False,
            "OPTIONS": {},
            "TEST": {},
        }
        return import_module(f"django.db.backends.{kind}.base").DatabaseWrapper(settings, alias)

    def begin(self) -> None:
        from django.db import transaction

        self.atomic = transaction.atomic()
        self.atomic.__enter__()

    def execute(self, statement: str) -> None:
        with self.conn.cursor() as cursor:
            cursor.execute(statement)

    def commit(self) -> None:
        self.atomic.__exit__(None, None, None)

    def rollback(self) -> None:
        self.conn.set_rollback(True)
        self.atomic.__exit__(None, None, None)


class DjangoAlias(Django):
    """`connections["other"]`."""

    def open(self) -> None:
        super().open()
        from django.db import connections

        connections["other"] = self.wrapper("other")
        self.conn = connections["other"]

    def begin(self) -> None:
        from django.db import transaction

        self.atomic = transaction.atomic(using="other")
        self.atomic.__enter__()


# -- SQLite ---------------------------------------------------------------------------------------


class Aiosqlite(AsyncCaller):
    async def aopen(self) -> None:
        import aiosqlite

        self.conn = await aiosqlite.connect(self.url.removeprefix("sqlite:///"))


SQLITE_CALLERS: list[type[Caller]] = [
    Aiosqlite,
    SqlalchemyConnection,
    SqlalchemySession,
    SqlalchemyScopedSession,
    SqlalchemyAsyncConnection,
    SqlalchemyAsyncSession,
    Django,
    DjangoAlias,
]
CALLERS: list[type[Caller]] = [
    Psycopg,
    PsycopgAsync,
    Asyncpg,
    AsyncpgPool,
    SqlalchemyConnection,
    SqlalchemySession,
    SqlalchemyScopedSession,
    SqlalchemyAsyncConnection,
    SqlalchemyAsyncSession,
    SqlalchemyAsyncpgConnection,
    SqlalchemyAsyncpgSession,
    Django,
    DjangoAlias,
]
