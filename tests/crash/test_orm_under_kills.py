"""`ctx.transaction(conn=…)` while workers are killed: the ORM's rows, the follow-ups and the end of
the job are there once, all of them, or not at all."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from .harness import Workshop
from .test_flow_under_kills import NEVER_POISON, run_transfers

BOOKED = """
    @app.task
    def booked(number: int) -> None: ...

    def strike(number):
        if number % 100 == 50 and not there(f"inside-{number}"):
            open(os.path.join(HERE, f"inside-{number}"), "w").close()
            os.kill(os.getpid(), 9)
        time.sleep(0.002)  # so that kills find it between two statements
"""

SQLALCHEMY = (
    BOOKED
    + """
    import sqlalchemy
    from sqlalchemy.orm import Session

    at = app.settings.url.replace("postgresql:", "postgresql+psycopg:")
    engine = sqlalchemy.create_engine(at)
    CHANGE = sqlalchemy.text("UPDATE account SET balance = balance + :by WHERE id = :id")
    APPLY = sqlalchemy.text("INSERT INTO applied VALUES (:number)")

    @app.task(timeout=60)
    def transfer(ctx: tenure.Context, number: int, source: int, target: int, amount: int) -> int:
        first, second = sorted([(source, -amount), (target, amount)])
        with Session(engine) as session, ctx.transaction(conn=session):
            session.execute(CHANGE, {"id": first[0], "by": first[1]})
            strike(number)
            session.execute(CHANGE, {"id": second[0], "by": second[1]})
            session.execute(APPLY, {"number": number})
            if number % 10 == 0:
                ctx.enqueue(booked, number)
            ctx.result(amount)
        if number % 100 == 70:
            os.kill(os.getpid(), 9)  # it is over: this costs nothing any more
"""
)

SQLALCHEMY_ASYNC = (
    BOOKED
    + """
    import sqlalchemy
    from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

    at = app.settings.url.replace("postgresql:", "postgresql+psycopg:")
    engine = create_async_engine(at.replace("sqlite:", "sqlite+aiosqlite:"))
    CHANGE = sqlalchemy.text("UPDATE account SET balance = balance + :by WHERE id = :id")
    APPLY = sqlalchemy.text("INSERT INTO applied VALUES (:number)")

    @app.task(timeout=60)
    async def transfer(
        ctx: tenure.Context, number: int, source: int, target: int, amount: int
    ) -> int:
        first, second = sorted([(source, -amount), (target, amount)])
        async with AsyncSession(engine) as session, ctx.transaction(conn=session):
            await session.execute(CHANGE, {"id": first[0], "by": first[1]})
            strike(number)
            await session.execute(CHANGE, {"id": second[0], "by": second[1]})
            await session.execute(APPLY, {"number": number})
            if number % 10 == 0:
                ctx.enqueue(booked, number)
            ctx.result(amount)
        if number % 100 == 70:
            os.kill(os.getpid(), 9)
"""
)

DJANGO = (
    BOOKED
    + """
    from urllib.parse import urlsplit

    import django
    from django.conf import settings
    from django.db import connection

    address = urlsplit(app.settings.url)
    kind = {"sqlite": "sqlite3"}.get(address.scheme, address.scheme)
    if not settings.configured:  # in workers; the test itself only enqueues
        settings.configure(
            DATABASES={
                "default": {
                    "ENGINE": f"django.db.backends.{kind}",
                    "NAME": address.path[1:],
                    "USER": address.username or "",
                    "PASSWORD": address.password or "",
                    "HOST": address.hostname or "",
                    "PORT": address.port or "",
                }
            },
            LOGGING_CONFIG=None,
        )
        django.setup()

    def execute(statement, *values):
        with connection.cursor() as cursor:
            cursor.execute(statement, values)

    @app.task(timeout=60)
    def transfer(ctx: tenure.Context, number: int, source: int, target: int, amount: int) -> int:
        first, second = sorted([(source, -amount), (target, amount)])
        change = "UPDATE account SET balance = balance + %s WHERE id = %s"
        with ctx.transaction(conn=connection):
            execute(change, first[1], first[0])
            strike(number)
            execute(change, second[1], second[0])
            execute("INSERT INTO applied VALUES (%s)", number)
            if number % 10 == 0:
                ctx.enqueue(booked, number)
            ctx.result(amount)
        if number % 100 == 70:
            os.kill(os.getpid(), 9)
"""
)


@pytest.mark.parametrize("text", [SQLALCHEMY, SQLALCHEMY_ASYNC, DJANGO], ids=["sa", "asa", "dj"])
def test_transfers_under_kills(workshop: Callable[..., Workshop], text: str) -> None:
    run_transfers(workshop(text, **NEVER_POISON), 200, 6, concurrency=3)
