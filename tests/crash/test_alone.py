"""`process=True`: one job per process. Its death is its own, its time-out ends it, and nothing of
it outlives its supervisor.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

import tenure

from .harness import Workshop, eventually, gone

HEAVY = """
    @app.task(process=True, retry=tenure.Retry(attempts=1))
    def heavy(n: int) -> int:
        say("heavy", n, os.getpid(), os.getppid())
        while not there("go"):
            time.sleep(0.01)
        return os.getpid()

    @app.task
    def light(n: int) -> int:
        say("light", n, os.getpid())
        while not there("go"):
            time.sleep(0.01)
        return os.getpid()
"""


def pids_said(shop: Workshop, word: str) -> list[int]:
    return [int(line[2]) for line in shop.said() if line[0] == word]


def test_its_death_is_the_crash_of_that_job_only(workshop: Callable[..., Workshop]) -> None:
    shop = workshop(HEAVY)
    worker = shop.worker(concurrency=4)
    lights = shop.app.enqueue_many([shop.jobs.light.job(n) for n in range(3)])
    heavies = shop.app.enqueue_many([shop.jobs.heavy.job(n) for n in range(2)])
    shop.wait_said("light", times=3)
    shop.wait_said("heavy", times=2)
    victim = next(int(line[2]) for line in shop.said() if line[:2] == ["heavy", "0"])

    os.kill(victim, signal.SIGKILL)
    shop.wait_said("heavy", times=3)  # it runs again, alone again
    shop.touch("go")
    shop.wait_for("completed", 5)

    assert shop.job(heavies[0].id).crashes == 1
    for receipt in (*lights, heavies[1]):
        job = shop.job(receipt.id)
        assert (job.attempts, job.crashes) == (1, 0)
    assert set(shop.events("job.rescued")) == {heavies[0].id}
    assert worker.alive


def test_a_queue_s_cap_holds_for_them_too(workshop: Callable[..., Workshop]) -> None:
    shop = workshop(
        """
        @app.task(process=True)
        def heavy() -> None:
            say("begun")
            time.sleep(0.3)
            say("ended")
        """
    )
    shop.app.enqueue_many([shop.jobs.heavy.job() for _ in range(5)])
    shop.worker(concurrency=10, queues="default:1")
    shop.wait_for("completed", 5)

    words = [line[0] for line in shop.said()]
    assert words == ["begun", "ended"] * 5


def test_one_that_always_dies_is_poison_and_harms_nobody(
    workshop: Callable[..., Workshop],
) -> None:
    shop = workshop(
        """
        @app.task(process=True)
        def fatal() -> None:
            os.kill(os.getpid(), 11)

        @app.task(process=True)
        def heavy() -> None:
            pass

        @app.task
        def light() -> None:
            pass
        """
    )
    fatal = shop.jobs.fatal.enqueue()
    jobs = [shop.jobs.heavy.job() for _ in range(3)] + [shop.jobs.light.job() for _ in range(50)]
    shop.app.enqueue_many(jobs)
    shop.worker(concurrency=10)
    shop.wait_for("completed", 53)
    shop.wait_for("dead_letter", 1)

    job = shop.job(fatal.id)
    assert (job.status, job.error_code, job.crashes) == ("dead_letter", "poison", 3)
    assert set(shop.events("job.rescued")) == {fatal.id}


@pytest.mark.timed
@pytest.mark.parametrize("how", ["sleeps", "holds the GIL"])
def test_its_time_out_ends_its_process(workshop: Callable[..., Workshop], how: str) -> None:
    shop = workshop(
        """
        @app.task(process=True, timeout=1, retry=tenure.Retry(attempts=1))
        def stuck(gil: bool) -> None:
            say("stuck", 0, os.getpid())
            if gil:
                hold_the_gil(60)
            time.sleep(60)

        @app.task
        def light(n: int) -> int:
            say("light", n, os.getpid())
            while not there("go"):
                time.sleep(0.01)
            return os.getpid()
        """
    )
    shop.worker(concurrency=4)
    light = shop.jobs.light.enqueue(1)
    shop.wait_said("light")
    stuck = shop.jobs.stuck.enqueue(how != "sleeps")
    shop.wait_said("stuck")
    began = time.monotonic()

    eventually(lambda: shop.job(stuck.id).status == "dead_letter", what="the time-out")
    took = time.monotonic() - began
    (pid,) = pids_said(shop, "stuck")
    eventually(lambda: gone(pid), within=10, what="its process gone")
    shop.touch("go")
    shop.app.result(light.id, timeout=10)

    print(f"\n{how}: outcome {took - 1:.2f} s past the time-out of 1 s")
    assert shop.job(stuck.id).error_code == "TIMEOUT"
    assert took <= 1 + 2 + 1  # the figure, and patience with a busy machine
    assert (shop.job(light.id).attempts, shop.job(light.id).crashes) == (1, 0)


def test_a_cancelled_one_ends(workshop: Callable[..., Workshop]) -> None:
    shop = workshop(HEAVY, cancel_grace_seconds=0.3)
    shop.worker(concurrency=4)
    receipt = shop.jobs.heavy.enqueue(1)
    shop.wait_said("heavy")
    shop.app.cancel(receipt.id, reason="enough")
    with pytest.raises(tenure.JobFailed):
        shop.app.result(receipt.id, timeout=15)
    assert shop.job(receipt.id).status == "cancelled"
    eventually(lambda: gone(pids_said(shop, "heavy")[0]), within=10, what="its process gone")


def test_no_more_than_a_few_at_once_and_others_do_not_wait_for_them(
    workshop: Callable[..., Workshop],
) -> None:
    shop = workshop(HEAVY)
    worker = shop.worker(concurrency=2)
    shop.app.enqueue_many([shop.jobs.heavy.job(n) for n in range(7)])
    shop.wait_said("heavy", times=4)
    light = shop.jobs.light.enqueue(1)
    shop.wait_said("light")

    assert shop.count("heavy") == 4
    assert len(worker.children()) == 5
    shop.touch("go")
    shop.wait_for("completed", 8)
    assert len(set(pids_said(shop, "heavy"))) == 7
    assert shop.job(light.id).attempts == 1


def test_no_orphans_after_a_killed_supervisor(workshop: Callable[..., Workshop]) -> None:
    shop = workshop(HEAVY)
    worker = shop.worker(concurrency=4)
    shop.app.enqueue_many([shop.jobs.heavy.job(n) for n in range(3)])
    shop.app.enqueue_many([shop.jobs.light.job(n) for n in range(2)])
    shop.wait_said("heavy", times=3)
    shop.wait_said("light", times=2)
    pids = {*pids_said(shop, "heavy"), *pids_said(shop, "light")}
    assert set(worker.children()) == pids

    worker.kill()

    eventually(lambda: all(gone(pid) for pid in pids), within=5, what="its children gone")
    shop.touch("go")
    shop.worker(concurrency=4)
    shop.wait_for("completed", 5)
    assert shop.statuses() == {"completed": 5}
    assert set(shop.events("job.succeeded").values()) == {1}


def test_steps_and_transactions_work_in_a_process_of_its_own(
    workshop: Callable[..., Workshop],
) -> None:
    shop = workshop(
        """
        @app.task
        def mail(n: int) -> None:
            pass

        @app.task(process=True)
        def heavy(ctx: tenure.Context, n: int) -> None:
            ctx.step("first", say, "step", n)
            ctx.progress(50)
            if not there(f"died-{n}"):
                open(os.path.join(HERE, f"died-{n}"), "w").close()
                os._exit(9)
            with ctx.transaction() as conn:
                conn.execute(words("INSERT INTO ledger VALUES (?)"), (n,))
                ctx.enqueue(mail, n)
                ctx.result(n * 2)
        """
    )
    shop.sql("CREATE TABLE ledger (n INTEGER)")
    receipt = shop.jobs.heavy.enqueue(21)
    shop.worker(concurrency=2)

    assert shop.app.result(receipt.id, timeout=60) == 42
    shop.wait_for("completed", 2)
    assert shop.count("step", 21) == 1
    assert shop.sql("SELECT n FROM ledger") == [(21,)]


def test_a_job_that_waits_for_its_own_process_can_be_cancelled(
    workshop: Callable[..., Workshop],
) -> None:
    """It is claimed, but four others have the processes: no child knows of it yet."""
    shop = workshop(HEAVY)
    shop.worker(concurrency=10)
    heavies = shop.app.enqueue_many([shop.jobs.heavy.job(n) for n in range(4)])
    shop.wait_said("heavy", times=4)
    waiting = shop.jobs.heavy.enqueue(99)
    eventually(lambda: shop.job(waiting.id).status == "in_progress", within=20)

    assert shop.app.cancel(waiting.id, reason="not needed") == "requested"

    eventually(lambda: shop.job(waiting.id).status == "cancelled", within=10)
    assert {shop.job(receipt.id).status for receipt in heavies} == {"in_progress"}
    shop.touch("go")
    shop.wait_for("completed", 4)


def test_jobs_that_run_alone_count_for_the_cap_on_their_queue(
    workshop: Callable[..., Workshop],
) -> None:
    """Tasks of a process of their own, and suspects: claimed, they waited uncounted."""
    shop = workshop(
        """
        def enter_and_leave():
            say("in")
            time.sleep(0.3)
            say("out")

        @app.task(process=True)
        def heavy() -> None:
            enter_and_leave()

        @app.task
        def fatal_once() -> None:
            if not there("died"):
                open(os.path.join(HERE, "died"), "w").close()
                os.kill(os.getpid(), 9)
            enter_and_leave()

        @app.task
        def light() -> None:
            enter_and_leave()
        """
    )
    shop.jobs.fatal_once.enqueue()
    tasks = (shop.jobs.heavy, shop.jobs.light)
    shop.app.enqueue_many([task.job() for task in tasks for _ in range(4)])

    shop.worker(concurrency=4, queues="default:1")
    shop.wait_for("completed", 9)

    assert [line[0] for line in shop.said()] == ["in", "out"] * 9
