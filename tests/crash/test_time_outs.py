"""A handler that cannot be asked is killed with its process; who ran beside it pays nothing."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from .harness import Workshop, eventually


@pytest.mark.timed
def test_a_loop_blocked_past_a_time_out_is_killed_and_bystanders_go_free(
    workshop: Callable[..., Workshop],
) -> None:
    shop = workshop(
        """
        @app.task(timeout=1, retry=tenure.Retry(attempts=1))
        async def blocks() -> None:
            say("blocks", os.getpid())
            time.sleep(60)

        @app.task
        async def bystander(n: int) -> None:
            say("bystander", n)
            while not there("go"):
                await asyncio.sleep(0.01)
        """
    )
    worker = shop.worker(concurrency=10)
    bystanders = shop.app.enqueue_many([shop.jobs.bystander.job(n) for n in range(4)])
    shop.wait_said("bystander", times=4)
    blocks = shop.jobs.blocks.enqueue()
    shop.wait_said("blocks")
    began = time.monotonic()

    ended = eventually(lambda: [*shop.app.find(status="dead_letter")], what="the time-out")
    took = time.monotonic() - began
    shop.touch("go")
    shop.wait_for("completed", 4)

    assert [(job.id, job.error_code) for job in ended] == [(blocks.id, "TIMEOUT")]
    assert took <= 1 + 2 + 0.5  # its time-out, two seconds, and a look at the store
    for receipt in bystanders:
        job = shop.job(receipt.id)
        assert (job.crashes, job.attempts) == (0, 1)
    assert worker.alive
    print(f"hard time-out: {took - 1:.2f} s past the time-out of 1 s")


@pytest.mark.timed
def test_a_thread_that_does_not_listen_is_given_up_and_its_process_replaced(
    workshop: Callable[..., Workshop],
) -> None:
    shop = workshop(
        """
        @app.task(timeout=0.5, retry=tenure.Retry(attempts=1))
        def deaf() -> None:
            say("deaf", os.getpid())
            time.sleep(60)

        @app.task
        async def bystander() -> int:
            say("bystander", os.getpid())
            while not there("go"):
                await asyncio.sleep(0.01)
            return os.getpid()

        @app.task
        async def where() -> int:
            return os.getpid()
        """
    )
    worker = shop.worker(concurrency=10)
    bystander = shop.jobs.bystander.enqueue()
    deaf = shop.jobs.deaf.enqueue()
    shop.wait_said("deaf")
    began = time.monotonic()
    eventually(lambda: shop.job(deaf.id).status == "dead_letter", what="the time-out")
    took = time.monotonic() - began
    old = int(shop.said()[0][1])

    assert took <= 0.5 + 2 + 0.5
    assert shop.job(deaf.id).error_code == "TIMEOUT"
    eventually(
        lambda: shop.app.result(shop.jobs.where.enqueue().id, timeout=15) != old,
        what="a new process",
    )
    assert f"child {old} is replaced: in it 1 `def` handler goes on after a time-out" in worker.log
    shop.touch("go")
    assert shop.app.result(bystander.id, timeout=10) == old  # it went on where it was
    assert shop.job(bystander.id).attempts == 1


def test_a_coroutine_that_swallows_its_cancellation_still_times_out(
    workshop: Callable[..., Workshop],
) -> None:
    shop = workshop(
        """
        @app.task(timeout=0.5, retry=tenure.Retry(attempts=1))
        async def stubborn() -> None:
            say("stubborn")
            while True:
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    say("ignored")

        @app.task
        async def bystander() -> None:
            say("bystander")
            while not there("go"):
                await asyncio.sleep(0.01)
        """
    )
    shop.worker(concurrency=10)
    bystander = shop.jobs.bystander.enqueue()
    shop.wait_said("bystander")
    stubborn = shop.jobs.stubborn.enqueue()
    shop.wait_said("ignored")

    eventually(lambda: shop.job(stubborn.id).status == "dead_letter", within=3, what="the time-out")
    shop.touch("go")
    shop.app.result(bystander.id, timeout=10)

    assert shop.job(stubborn.id).error_code == "TIMEOUT"
    assert (shop.job(bystander.id).crashes, shop.job(bystander.id).attempts) == (0, 1)


def test_a_killed_time_out_follows_the_tasks_own_policy(workshop: Callable[..., Workshop]) -> None:
    """Whoever could be asked about it died with the process: it was asked before."""
    shop = workshop(
        """
        class Mine:
            def delay(self, attempt: int) -> float:
                return 500.0 * attempt

        class Broken:
            def delay(self, attempt: int) -> float:
                raise LookupError("no idea")

        for name, retry in {
            "table": tenure.Retry(attempts=9, backoff=tenure.Steps(2000, 3000)),
            "mine": tenure.Retry(attempts=9, backoff=Mine()),
            "broken": tenure.Retry(attempts=9, backoff=Broken()),
            "never": tenure.Retry(attempts=9, give_up_on=(TimeoutError,)),
            "last": tenure.Retry(attempts=1, backoff=Mine()),
        }.items():
            async def handler() -> None:
                time.sleep(60)  # the loop cannot even ask it

            app.task(name=name, timeout=0.3, retry=retry)(handler)
        """
    )
    shop.worker(concurrency=1)
    expected = {"table": 2000, "mine": 500, "broken": 5, "never": None, "last": None}
    for name, delay in expected.items():
        receipt = shop.app.tasks[name].enqueue()
        job = eventually(
            lambda id=receipt.id: (job := shop.job(id)).error_code == "TIMEOUT" and job,
            what=f"the time-out of {name}",
        )
        assert "killed" in job.error
        assert job.status == {"never": "failed", "last": "dead_letter"}.get(name, "queued")
        if delay is not None:
            waits = (job.scheduled_at - job.updated_at).total_seconds()
            assert delay <= waits <= delay * 1.1 + 1, name
