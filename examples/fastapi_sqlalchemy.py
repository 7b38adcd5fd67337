"""FastAPI with SQLAlchemy: the order, and the job that charges it, in one transaction.

    pip install "tenure[postgres]" "sqlalchemy[asyncio]" aiosqlite fastapi uvicorn
    uvicorn --app-dir examples fastapi_sqlalchemy:web

`sqlite:///shop.db` or `postgresql://…` in TENURE_URL: the program is the same. `/orders` is written
with an AsyncSession, `/blocking/orders` with a Session.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, HTTPException
from sqlalchemy import ForeignKey, create_engine
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

import tenure

URL = os.environ.get("TENURE_URL") or "sqlite:///shop.db"
jobs = tenure.App(URL)
engine = create_engine(URL.replace("postgresql:", "postgresql+psycopg:"))
async_engine = create_async_engine(
    URL.replace("postgresql:", "postgresql+psycopg:").replace("sqlite:", "sqlite+aiosqlite:")
)


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    cents: Mapped[int]
    state: Mapped[str] = mapped_column(default="new")


class Payment(Base):
    __tablename__ = "payments"
    order_id: Mapped[int] = mapped_column(ForeignKey("orders.id"), primary_key=True)
    cents: Mapped[int]


@jobs.task(queue="critical")
async def charge(ctx: tenure.Context, order: int) -> None:
    """The payment, the new state, the follow-up and the end of this job: all of it, once."""
    async with AsyncSession(async_engine) as session, ctx.transaction(conn=session):
        found = await session.get_one(Order, order)
        session.add(Payment(order_id=order, cents=found.cents))
        found.state = "paid"
        ctx.enqueue(confirm, order)


@jobs.task(queue="notifications")
def confirm(ctx: tenure.Context, order: int) -> None:
    """The same in a `def` handler."""
    with Session(engine) as session, ctx.transaction(conn=session):
        session.get_one(Order, order).state = "confirmed"


@asynccontextmanager
async def lifespan(_web: FastAPI) -> AsyncIterator[None]:
    """Small deployments: a worker in the web process. Larger ones run `tenure worker`."""
    jobs.migrate()
    Base.metadata.create_all(engine)
    with jobs.worker(concurrency=10):
        yield
    jobs.close()
    await async_engine.dispose()
    engine.dispose()


web = FastAPI(lifespan=lifespan)


@web.post("/orders", status_code=202)
async def place(cents: int) -> dict[str, int]:
    async with AsyncSession(async_engine) as session, session.begin():
        order = Order(cents=cents)
        session.add(order)
        await session.flush()  # gives it its id
        await charge.options(conn=session).aenqueue(order.id)
        if cents <= 0:
            raise HTTPException(400, "nothing to pay")  # neither order nor job
        return {"order": order.id}


@web.post("/blocking/orders", status_code=202)
def place_blocking(cents: int) -> dict[str, int]:
    with Session(engine) as session, session.begin():
        order = Order(cents=cents)
        session.add(order)
        session.flush()
        charge.options(conn=session).enqueue(order.id)
        if cents <= 0:
            raise HTTPException(400, "nothing to pay")
        return {"order": order.id}


@web.get("/orders/{id}")
def show(id: int) -> dict[str, str]:
    with Session(engine) as session:
        order = session.get(Order, id)
        if order is None:
            raise HTTPException(404)
        return {"state": order.state}
