"""A web shop's order flow: the order and its job in one transaction, payment in another.

The order and the job that will charge it commit together. The handler books the payment, moves the
order on and enqueues the confirmation in the transaction that also ends the job: each order is
charged exactly once in this database, whatever dies in between.

    python examples/order_flow.py
"""

from __future__ import annotations

import sqlite3
import tempfile
from pathlib import Path

import tenure

DATABASE = Path(tempfile.mkdtemp()) / "shop.db"
app = tenure.App(f"sqlite:///{DATABASE}")


@app.task(queue="critical")
def charge(ctx: tenure.Context, order: int, cents: int) -> None:
    with ctx.transaction() as db:
        db.execute("INSERT INTO payments (order_id, cents) VALUES (?, ?)", (order, cents))
        db.execute("UPDATE orders SET state = 'paid' WHERE id = ?", (order,))
        ctx.enqueue(confirm, order)
        ctx.result({"order": order, "cents": cents})


@app.task(queue="notifications")
def confirm(order: int) -> str:
    return f"order {order} is on its way"


def place_order(db: sqlite3.Connection, cents: int) -> tenure.Receipt:
    with db:  # commits both, or neither
        order = db.execute("INSERT INTO orders (cents) VALUES (?)", (cents,)).lastrowid
        assert order is not None
        return charge.options(conn=db, key=f"charge:{order}").enqueue(order, cents)


def main() -> None:
    app.migrate()
    db = sqlite3.connect(DATABASE)
    db.executescript(
        """
        CREATE TABLE orders (id INTEGER PRIMARY KEY, cents INTEGER, state TEXT DEFAULT 'new');
        CREATE TABLE payments (id INTEGER PRIMARY KEY, order_id INTEGER UNIQUE, cents INTEGER);
        """
    )
    receipts = [place_order(db, cents) for cents in (1999, 4950, 700)]
    app.run_worker(drain=True)
    for receipt in receipts:
        print(app.result(receipt.id))
    paid = db.execute("SELECT count(*), sum(cents) FROM payments").fetchone()
    print(f"{paid[0]} payments, {paid[1]} cents, {app.stats()['jobs']['completed']} jobs completed")
    app.close()


if __name__ == "__main__":
    main()
