"""A job that kills its worker must not loop, and its neighbours must not suffer."""

from __future__ import annotations

from collections.abc import Callable

from .harness import Workshop, eventually


def test_a_poison_job_is_set_aside_and_its_neighbours_complete_uncharged(
    workshop: Callable[..., Workshop],
) -> None:
    shop = workshop(
        """
        @app.task
        async def poison() -> None:
            say("poison", os.getpid())
            os._exit(1)

        @app.task
        async def neighbour(n: int) -> int:
            await asyncio.sleep(0.002)
            return n
        """
    )
    neighbours = shop.app.enqueue_many([shop.jobs.neighbour.job(n) for n in range(30)])
    poison = shop.jobs.poison.enqueue()
    neighbours += shop.app.enqueue_many([shop.jobs.neighbour.job(n) for n in range(30)])
    worker = shop.worker(concurrency=4)

    shop.wait_for("completed", 60)
    dead = eventually(lambda: [*shop.app.find(status="dead_letter")], what="the poison set aside")

    assert [job.id for job in dead] == [poison.id]
    assert (dead[0].error_code, dead[0].crashes) == ("poison", 3)
    assert shop.count("poison") == 3
    crashes = [shop.job(receipt.id).crashes for receipt in neighbours]
    assert crashes.count(0) >= 50  # at most the three beside it had started
    assert max(crashes) <= 1
    assert worker.alive


def test_claimed_ahead_is_not_started(workshop: Callable[..., Workshop]) -> None:
    """One at a time, many in the child's hands: only the one that ran is charged."""
    shop = workshop(
        """
        @app.task
        def quick() -> None:
            pass

        @app.task
        def fatal() -> None:
            if not there("once"):
                open(os.path.join(HERE, "once"), "w").close()
                os._exit(9)

        @app.task
        def after() -> None:
            pass
        """
    )
    jobs = [shop.jobs.quick.job() for _ in range(300)]
    fatal = shop.jobs.fatal.job()
    jobs += [fatal, *(shop.jobs.after.job() for _ in range(60))]
    shop.app.enqueue_many(jobs)
    shop.worker(concurrency=1)

    shop.wait_for("completed", 361)

    charged = {job.id for job in shop.app.find(status="completed") if job.crashes}
    assert charged == {fatal.id}
    given_back = set(shop.events("job.released"))
    assert all(shop.job(id).attempts == 1 for id in given_back)  # costs no attempt


def test_a_job_that_kills_its_supervisor_is_lost_in_the_end_and_never_poison(
    workshop: Callable[..., Workshop],
) -> None:
    """The end of a worker says little about its jobs, but this one is always there: from the third
    time on it runs in a process of its own, at the limit it is set aside."""
    shop = workshop(
        """
        @app.task
        async def regicide(ctx: tenure.Context) -> None:
            say("regicide", ctx.job.losses, sys.argv[-1])  # it takes one job
            os.kill(os.getppid(), 9)
            await asyncio.sleep(30)

        @app.task
        async def neighbour(n: int) -> None:
            while not there("go"):
                await asyncio.sleep(0.01)
        """,
        loss_limit=5,
    )
    deadly = shop.jobs.regicide.enqueue()
    for losses in range(5):
        worker = shop.worker(ready=False, concurrency=4)
        assert worker.wait() == -9
        assert shop.count("regicide", losses) == 1
    shop.touch("go")
    neighbours = shop.app.enqueue_many([shop.jobs.neighbour.job(n) for n in range(5)])
    last = shop.worker(concurrency=4)

    shop.wait_for("completed", 5)
    eventually(lambda: shop.job(deadly.id).status == "dead_letter", what="the dead letter")

    job = shop.job(deadly.id)
    assert (job.error_code, job.crashes, job.losses) == ("lost", 0, 5)
    assert [line[2] for line in shop.said()] == ["0", "0", "0", "1", "1"]
    assert last.alive
    assert all(shop.job(receipt.id).losses == 0 for receipt in neighbours)

    shop.app.replay(deadly.id)
    last.wait()
    assert shop.count("regicide", 0) == 2  # a replay begins with a clean slate
