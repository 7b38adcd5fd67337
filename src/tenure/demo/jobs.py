"""The jobs of `tenure demo`: one task for each thing that can happen to a job.

tenure -A tenure.demo.jobs:app worker     # the database: $TENURE_URL or --url
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import tenure
from tenure.demo.ledger import FAN_INS, PARTS, STEP_BYTES, STEPS, UPLOADS, sold

if TYPE_CHECKING:
    from tenure.job import NewJob

app = tenure.App()

SHOP = "shop"  # the queue of everything but ping: its worker runs few of it at once
SOON = tenure.Fixed(0.3, jitter=0.5)
KILLED = 137  # how a process looks from outside when the out-of-memory killer has been there
STEP_SECONDS = 0.5
KILLS = (0.3, 0.6)  # of the way through the rough day


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


# ------------------------------------------------------------------------------- fan-in


@app.task(queue=SHOP)
def plan_report(ctx: tenure.Context, report: int) -> dict[str, Any]:
    """Many jobs, then one that runs after all of them; stored with this job's end or not at all."""
    first = count_part.options(priority=1)
    parts = [ctx.enqueue(first, report, part) for part in range(PARTS)]
    summary = ctx.enqueue(sum_report.options(after=parts, priority=1), report)
    return {"parts": [part.id for part in parts], "summary": summary.id}


@app.task(queue=SHOP)
async def count_part(report: int, part: int) -> int:
    await asyncio.sleep(0.1 + 0.02 * part)
    return sold(report, part)


@app.task(queue=SHOP)
def sum_report(ctx: tenure.Context, report: int) -> int:
    return sum(ctx.results().values())


# ------------------------------------------------------------------------------- checkpoints


@app.task(queue=SHOP)
def upload(ctx: tenure.Context, name: str, log: str) -> int:
    """Five steps. Cut short, it goes on with the first that is not stored yet."""
    run = f"{ctx.job.id} {ctx.job.lease_no}"
    note(log, run)
    sent = 0
    for number, step in enumerate(STEPS, start=1):
        sent += ctx.step(step, send, log, f"{run} {step}")
        ctx.progress(100 * number / len(STEPS), phase=f"{step} of {name}")
    return sent


def send(log: str, call: str) -> int:
    note(log, call)  # first: a call that is cut short is a call, too
    time.sleep(STEP_SECONDS)
    return STEP_BYTES


def note(log: str, line: str) -> None:
    """A book that Tenure has no hand in."""
    with open(log, "a", encoding="utf-8") as file:
        file.write(f"{line}\n")


# ------------------------------------------------------------------------------- a rough day


def rough_day(count: Mapping[str, int], log: str) -> list[NewJob]:
    """The same day every time: shuffled, the poison early, uploads and reports made of parts
    where the kills are to come. Jobs run in the order made here."""
    makers: list[Callable[[int], NewJob]] = []
    makers += count["send_email"] * [lambda n: send_email.job(f"{n}@example.org")]
    makers += count["make_report"] * [lambda n: make_report.job(12)]
    makers += count["charge_card"] * [lambda n: charge_card.job(n, 1 + n % 2)]
    makers += count["import_file"] * [lambda n: import_file.job(f"{n}.xls")]
    makers += count["call_partner"] * [lambda n: call_partner.job(n)]
    random.Random(7).shuffle(makers)
    to_be_hit: list[Callable[[int], NewJob]] = []
    to_be_hit += UPLOADS // len(KILLS) * [lambda n: upload.job(f"{n}.iso", log)]
    to_be_hit += FAN_INS // len(KILLS) * [lambda n: plan_report.job(n)]
    for share in sorted(KILLS, reverse=True):  # from the back: earlier places stay what they are
        place = int(len(makers) * share)
        makers[place:place] = to_be_hit
    place = len(makers) // 10
    makers[place:place] = count["resize_image"] * [lambda n: resize_image.job(f"{n}.png")]
    return [make(n) for n, make in enumerate(makers)]
