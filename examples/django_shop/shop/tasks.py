"""Found by Tenure in every installed app."""

from django.db import connection

import tenure
from shop.models import Order, Payment
from tenure.integrations.django import app


@app.task(queue="critical")
def charge(ctx: tenure.Context, order: int) -> None:
    """The payment, the new state, the follow-up and the end of this job: all of it, once."""
    with ctx.transaction(conn=connection):
        found = Order.objects.select_for_update().get(id=order)
        Payment.objects.create(order=found, cents=found.cents)
        found.state = "paid"
        found.save()
        ctx.enqueue(confirm, order)
        ctx.result({"cents": found.cents})


@app.task(queue="notifications")
async def confirm(order: int) -> str:
    found = await Order.objects.aget(id=order)
    return f"order {order} is {found.state}"
