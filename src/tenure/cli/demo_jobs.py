"""The jobs of `tenure demo`: one task for each thing that can happen to a job.

tenure -A tenure.cli.demo_jobs:app worker     # the database: $TENURE_URL or --url
"""

from __future__ import annotations

import asyncio
import os
import time

import tenure

app = tenure.App()

SHOP = "shop"  # the queue of everything but ping: its worker runs few of it at once
SOON = tenure.Fixed(0.3, jitter=0.5)
KILLED = 137  # how a process looks from outside when the out-of-memory killer has been there


@app.task
async def ping() -> float:
    """Quick: does nothing. When it ran is all it says."""
    return time.time()


@app.task(queue=SHOP)
async def send_email(to: str) -> str:
    """Quick: waits a moment for a server, as most jobs do."""
    await asyncio.sleep(0.02)
    return f"sent to {to}"


@app.task(queue=SHOP)
def make_report(ctx: tenure.Context, pages: int) -> int:
    """Slow, and says how far it is."""
    for page in range(pages):
        ctx.progress(100 * page / pages, phase=f"page {page + 1} of {pages}")
        time.sleep(0.08)
    ctx.progress(100)
    return pages


@app.task(queue=SHOP, retry=tenure.Retry(attempts=6, backoff=SOON))
def charge_card(ctx: tenure.Context, order: int, failures: int) -> str:
    """Flaky: the first attempts fail, a later one does not."""
    if ctx.attempt <= failures:
        raise tenure.TransientError("the bank does not answer", code="BANK_AWAY")
    return f"order {order} paid, attempt {ctx.attempt}"


@app.task(queue=SHOP)
async def import_file(name: str) -> None:
    """Hopeless, and knows it: trying again cannot help."""
    raise tenure.PermanentError(f"{name} is not a spreadsheet", code="BAD_FILE")


@app.task(queue=SHOP, retry=tenure.Retry(attempts=3, backoff=SOON))
async def call_partner(order: int) -> None:
    """Hopeless, and does not know it: every attempt fails."""
    raise ConnectionError(f"partner.example refuses order {order}")


@app.task(queue=SHOP)
def resize_image(name: str) -> None:
    """Poison: takes its whole process down, and the jobs beside it."""
    os._exit(KILLED)
