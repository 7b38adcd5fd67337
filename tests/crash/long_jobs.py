"""Jobs that are still running after several leases, and the proof that nobody took them."""

from __future__ import annotations

from .harness import Workshop

LEASE = 3.0
LONG = """
    @app.task(timeout=120)
    async def long(ctx: tenure.Context, n: int) -> int:
        say("start", ctx.job.id, ctx.job.lease_no)
        while not there("go"):
            await asyncio.sleep(0.02)
        return n

    @app.task(timeout=120)
    def gil(ctx: tenure.Context, seconds: float) -> None:
        say("start", ctx.job.id, ctx.job.lease_no)
        hold_the_gil(seconds)
"""


def nothing_was_taken(shop: Workshop, ids: list[str]) -> None:
    for id in ids:
        job = shop.job(id)
        assert (job.status, job.lease_no, job.attempts, job.crashes) == ("completed", 1, 1, 0)
    assert shop.events("job.rescued") == {}
    assert shop.count("start") == len(ids)
    assert set(shop.events("job.succeeded").values()) == {1}
