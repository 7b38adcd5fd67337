"""Children that do not answer: what they have not started runs elsewhere, what runs is theirs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from .harness import Workshop, eventually, gone

SOON = 10.0  # taken back from a child that does not answer, a job starts elsewhere within this

WORK = """
    @app.task
    async def quick(n: int) -> int:
        say("quick", n, os.getpid())
        return os.getpid()

    @app.task(timeout=120)
    def hold() -> int:
        say("hold", os.getpid())
        while not there("go"):
            time.sleep(0.01)
        return os.getpid()
"""


def once_each(shop: Workshop, ids: list[str]) -> None:
    for id in ids:
        job = shop.job(id)
        assert (job.status, job.attempts, job.crashes) == ("completed", 1, 0), job
    assert set(shop.events("job.succeeded").values()) == {1}


@pytest.mark.timed
def test_a_task_that_was_left_behind_blocks_the_loop(workshop: Callable[..., Workshop]) -> None:
    shop = workshop(
        WORK
        + """
    @app.task
    async def leaks() -> None:
        def block() -> None:
            say("blocks", os.getpid())
            time.sleep(600)

        asyncio.get_running_loop().call_later(0.3, block)  # long after its job has ended
    """
    )
    worker = shop.worker()
    leaks = shop.jobs.leaks.enqueue()
    shop.app.result(leaks.id, timeout=10)
    shop.wait_said("blocks")
    blocked = int(shop.said()[0][1])

    began = time.monotonic()
    ids = [r.id for r in shop.app.enqueue_many([shop.jobs.quick.job(n) for n in range(40)])]
    shop.wait_for("completed", 41)
    took = time.monotonic() - began

    once_each(shop, [*ids, leaks.id])
    assert all(shop.events("job.released")[id] == 1 for id in ids)  # they were in its hands
    assert took < SOON
    eventually(lambda: gone(blocked), what="the blocked child gone")  # nothing runs in it
    assert len(worker.children()) == 1
    assert "does not answer" in worker.log
    print(f"40 jobs in the hands of a blocked child ran elsewhere after {took:.1f} s")


@pytest.mark.timed
def test_a_handler_that_holds_the_gil_keeps_its_job(workshop: Callable[..., Workshop]) -> None:
    """Its loop is as silent as a dead one's, but the handler is alive: it is left to its work."""
    shop = workshop(
        WORK
        + """
    @app.task(timeout=60)
    def gil(seconds: float) -> int:
        say("gil", os.getpid())
        ctypes.PyDLL(None).sleep(int(seconds))  # in one go: not even the loop has a turn
        return os.getpid()
    """
    )
    worker = shop.worker(concurrency=10)
    gil = shop.jobs.gil.enqueue(9.0)
    shop.wait_said("gil")
    (holder,) = worker.children()
    began = time.monotonic()
    ids = [r.id for r in shop.app.enqueue_many([shop.jobs.quick.job(n) for n in range(5)])]
    shop.wait_for("completed", 5)

    assert time.monotonic() - began < 9
    assert holder not in {shop.job(id).result for id in ids}
    assert shop.app.result(gil.id, timeout=20) == holder
    once_each(shop, [*ids, gil.id])
    assert shop.count("gil") == 1
    eventually(lambda: gone(holder), what="the old child gone")  # it has ended what it ran
    assert len(worker.children()) == 1


def test_handlers_that_hold_the_gil_do_not_multiply_children(
    workshop: Callable[..., Workshop],
) -> None:
    shop = workshop(
        """
        @app.task(timeout=60)
        def gil() -> int:
            say("gil", os.getpid())
            ctypes.PyDLL(None).sleep(7)
            return os.getpid()
        """
    )
    worker = shop.worker(concurrency=1)
    ids = [r.id for r in shop.app.enqueue_many([shop.jobs.gil.job() for _ in range(5)])]
    most = 0

    def all_done() -> bool:
        nonlocal most
        most = max(most, len(worker.children()))
        return shop.statuses()["completed"] == 5

    eventually(all_done, within=60, what="five jobs done")
    once_each(shop, ids)
    assert shop.count("gil") == 5
    assert most == 2  # the one that is planned, and one successor


@pytest.mark.timed
def test_a_stopped_child(workshop: Callable[..., Workshop]) -> None:
    """SIGSTOP: what it had started is waited for, up to its time-out."""
    shop = workshop(WORK)
    worker = shop.worker(concurrency=5)
    hold = shop.jobs.hold.enqueue()
    shop.wait_said("hold")
    (stopped,) = worker.children()
    os.kill(stopped, signal.SIGSTOP)
    began = time.monotonic()
    ids = [r.id for r in shop.app.enqueue_many([shop.jobs.quick.job(n) for n in range(3)])]
    shop.wait_for("completed", 3)
    took = time.monotonic() - began
    os.kill(stopped, signal.SIGCONT)
    shop.touch("go")

    assert shop.app.result(hold.id, timeout=10) == stopped
    assert took < SOON
    once_each(shop, [*ids, hold.id])
    assert shop.count("hold") == 1
    assert [shop.count("quick", n) for n in range(3)] == [1, 1, 1]
    eventually(lambda: gone(stopped), what="the old child gone")


def test_a_stopped_child_past_its_jobs_time_out(workshop: Callable[..., Workshop]) -> None:
    shop = workshop(
        """
        @app.task(timeout=1, retry=tenure.Retry(attempts=1))
        async def late() -> None:
            say("late", os.getpid())
            await asyncio.sleep(60)
        """
    )
    worker = shop.worker()
    late = shop.jobs.late.enqueue()
    shop.wait_said("late")
    (child,) = worker.children()
    os.kill(child, signal.SIGSTOP)

    eventually(lambda: shop.job(late.id).status == "dead_letter", what="the time-out")

    assert shop.job(late.id).error_code == "TIMEOUT"
    eventually(lambda: gone(child), what="the child gone")


IMPORTS = """
    say("import", os.getpid())
    while there("hang"):
        time.sleep(0.05)
"""


def test_a_later_child_hangs_in_import(workshop: Callable[..., Workshop]) -> None:
    shop = workshop(IMPORTS + WORK, start_timeout=3)
    worker = shop.worker()
    before = shop.count("import")
    shop.touch("hang")
    (child,) = worker.children()
    os.kill(child, signal.SIGKILL)
    shop.wait_said("import", times=before + 1)
    hung = int(shop.said()[-1][1])
    receipt = shop.jobs.quick.enqueue(1)
    shop.wait_said("import", times=before + 2)  # the next one, and it hangs too
    assert gone(hung)
    assert "has not said hello within 3 s" in worker.log
    (shop.folder / "hang").unlink()

    shop.app.result(receipt.id, timeout=15)
    once_each(shop, [receipt.id])


def test_a_process_for_one_job_hangs_in_import(workshop: Callable[..., Workshop]) -> None:
    shop = workshop(
        IMPORTS
        + """
    @app.task(process=True)
    def heavy() -> int:
        return os.getpid()
    """,
        start_timeout=3,
    )
    shop.worker()
    before = shop.count("import")
    shop.touch("hang")
    heavy = shop.jobs.heavy.enqueue()
    shop.wait_said("import", times=before + 1)
    hung = int(shop.said()[-1][1])
    shop.wait_said("import", times=before + 2)  # given back, and tried again
    (shop.folder / "hang").unlink()

    shop.app.result(heavy.id, timeout=15)
    once_each(shop, [heavy.id])
    assert gone(hung)
    assert shop.events("job.released")[heavy.id] >= 1


def test_stray_bytes_in_the_pipe(workshop: Callable[..., Workshop]) -> None:
    """A handler writes to a handle that is not its own: read as a length this was 1.8 GB."""
    shop = workshop(
        WORK
        + """
    @app.task
    def strays() -> None:
        if there("once"):
            return
        open(os.path.join(HERE, "once"), "w").close()
        import socket, stat
        for handle in range(3, 50):
            try:
                if stat.S_ISSOCK(os.fstat(handle).st_mode):
                    with socket.socket(fileno=os.dup(handle)) as found:
                        if found.family == socket.AF_UNIX and found.getsockname() == "":
                            os.write(handle, b"it worked, one more\\\\n")
            except OSError:
                pass
        time.sleep(60)
    """
    )
    worker = shop.worker(concurrency=4)
    strays = shop.jobs.strays.enqueue()
    eventually(lambda: "foreign bytes in the pipe" in worker.log, what="a line in the log")
    ids = [r.id for r in shop.app.enqueue_many([shop.jobs.quick.job(n) for n in range(10)])]

    shop.wait_for("completed", 11)
    once_each(shop, ids)
    assert shop.job(strays.id).crashes == 1  # it runs alone from then on
    assert worker.alive
