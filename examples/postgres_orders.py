"""The order flow of order_flow.py on PostgreSQL, asynchronous: only the URL and the SQL differ.

    TENURE_URL=postgresql://user@localhost/shop python examples/postgres_orders.py

The order and the job that will charge it commit together on the shop's own connection; the
handler's payment, its follow-up and the end of its job commit together on the one it is lent.
"""

from __future__ import annotations

import asyncio
import os

import psycopg

import tenure

URL = os.environ["TENURE_URL"]
app = tenure.App(URL)


@app.task(queue="critical")
async def charge(ctx: tenure.Context, order: int, cents: int) -> None:
    async with ctx.transaction() as db:
        await db.execute("INSERT INTO payments (order_id, cents) VALUES (%s, %s)", (order, cents))
        await db.execute("UPDATE orders SET state = 'paid' WHERE id = %s", (order,))
        ctx.enqueue(confirm, order)
        ctx.result({"order": order, "cents": cents})


@app.task(queue="notifications")
async def confirm(order: int) -> str:
    return f"order {order} is on its way"


async def place_order(db: psycopg.AsyncConnection, cents: int) -> tenure.Receipt:
    async with db.transaction():  # commits both, or neither
        cursor = await db.execute("INSERT INTO orders (cents) VALUES (%s) RETURNING id", (cents,))
        row = await cursor.fetchone()
        assert row is not None
        return await charge.options(conn=db, key=f"charge:{row[0]}").aenqueue(row[0], cents)


async def sell() -> list[tenure.Receipt]:
    async with await psycopg.AsyncConnection.connect(URL) as db:
        await db.execute(
            """
            CREATE TABLE orders (id serial PRIMARY KEY, cents integer, state text DEFAULT 'new');
            CREATE TABLE payments (id serial PRIMARY KEY, order_id integer UNIQUE, cents integer);
            """
        )
        return [await place_order(db, cents) for cents in (1999, 4950, 700)]


def main() -> None:
    app.migrate()
    receipts = asyncio.run(sell())
    app.run_worker(drain=True)
    for receipt in receipts:
        print(app.result(receipt.id))
    with psycopg.connect(URL) as db:
        count, cents = db.execute("SELECT count(*), sum(cents) FROM payments").fetchone() or (0, 0)
    print(f"{count} payments, {cents} cents, {app.stats()['jobs']['completed']} jobs completed")
    app.close()


if __name__ == "__main__":
    main()
