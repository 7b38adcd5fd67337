"""An `async def` handler that blocks the event loop: it is named, and `def` jobs go on."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable

import pytest

from stopwatch import process_waited

from .harness import Workshop, eventually

WORK = """
    def somewhere():
        say("blocks")
        time.sleep(0.01)
        while there("block"):
            time.sleep(0.01)

    @app.task(timeout=60)
    async def blocks() -> int:
        somewhere()
        return os.getpid()

    @app.task
    async def sleeps() -> None:
        def somewhere() -> None:
            time.sleep(1.2)  # here

        somewhere()

    @app.task
    async def busy() -> None:
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            there("x")
            there("y")

    @app.task(timeout=60)
    async def beside() -> None:
        async def part() -> None:
            time.sleep(0.9)  # beside

        await asyncio.gather(part(), asyncio.sleep(0))

    @app.task
    async def quick() -> int:
        return os.getpid()

    @app.task
    def plain(seconds: float = 0.0) -> int:
        say("plain")
        time.sleep(seconds)
        return os.getpid()

    @app.task
    async def leaves_behind() -> None:
        def block() -> None:
            say("behind")
            time.sleep(2.5)

        asyncio.get_running_loop().call_later(0.3, block)

    @app.task(timeout=3, retry=tenure.Retry(attempts=1))
    def patient(ctx: tenure.Context) -> int:
        say("patient")
        while not ctx.cancelled:
            time.sleep(0.01)
        return os.getpid()

    @app.task
    async def waits() -> None:
        await asyncio.sleep(1.5)

    @app.task(timeout=30)
    def gil() -> None:
        hold_the_gil(1.5)
"""


def line_of(shop: Workshop, mark: str) -> int:
    lines = (shop.folder / "jobs.py").read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(mark))


def named(log: str) -> list[str]:
    return [line for line in log.splitlines() if "blocks the event loop" in line]


def test_it_is_named_with_its_line_once(workshop: Callable[..., Workshop]) -> None:
    shop = workshop(WORK)
    worker = shop.worker()
    job = shop.jobs.sleeps.enqueue()
    shop.app.result(job.id, timeout=10)
    (line,) = named(worker.log)
    place = f"jobs.py:{line_of(shop, '# here')}"
    assert f"task 'sleeps' blocks the event loop at {place}, for 0." in line
    assert "WARNING" in line and f"[sleeps {job.id}]" in line

    for task in (shop.jobs.sleeps, shop.jobs.busy, shop.jobs.beside):
        shop.app.result(task.enqueue().id, timeout=10)
    _first, busy, beside = named(worker.log)  # the same once, and whoever is at many lines too
    assert "task 'busy' blocks the event loop at jobs.py:" in busy
    place = f"jobs.py:{line_of(shop, '# beside')}"
    assert f"task 'beside' blocks the event loop at {place}" in beside


@pytest.mark.timed
def test_plain_jobs_in_the_same_child_go_on(workshop: Callable[..., Workshop]) -> None:
    shop = workshop(WORK, lease_seconds=3, lease_renew_seconds=1)
    shop.touch("block")
    worker = shop.worker(concurrency=20)
    (child,) = worker.children()
    before = shop.jobs.plain.enqueue(0.7)  # begins before, ends meanwhile
    blocks = shop.jobs.blocks.enqueue()
    shop.wait_said("blocks")
    waits = shop.jobs.quick.enqueue()  # it has to wait
    began = time.monotonic()

    assert shop.app.result(before.id, timeout=5) == child
    took = []
    while time.monotonic() - began < 4:  # a lease and more
        asked, idle = time.monotonic(), process_waited(child, worker.pid)
        assert shop.app.result(shop.jobs.plain.enqueue().id, timeout=5) == child
        wanting = process_waited(child, worker.pid) - idle  # a processor: not the loop's doing
        took.append(time.monotonic() - asked - wanting)

    print(f"{len(took)} plain jobs beside a blocked loop, at most {1000 * max(took):.0f} ms")
    assert max(took[1:]) < 0.5  # the first may have come before anybody noticed
    assert shop.job(blocks.id).status == "in_progress"
    assert shop.job(waits.id).status in ("in_progress", "queued")
    (shop.folder / "block").unlink()
    assert shop.app.result(blocks.id, timeout=10) == child
    shop.app.result(waits.id, timeout=10)
    jobs = [shop.job(id) for id in (before.id, blocks.id, waits.id)]
    assert {(job.attempts, job.crashes) for job in jobs} == {(1, 0)}
    assert "declared dead" not in worker.log and "refused" not in worker.log


def test_nobody_is_named_who_does_not_block(workshop: Callable[..., Workshop]) -> None:
    shop = workshop(WORK)
    worker = shop.worker()
    ids = [shop.jobs.waits.enqueue().id, shop.jobs.plain.enqueue(1.0).id]
    ids.append(shop.jobs.gil.enqueue().id)  # a thread's: the loop cannot turn, and is not to blame
    for id in ids:
        shop.app.result(id, timeout=15)
    assert named(worker.log) == []


def test_a_stop_while_the_loop_is_blocked(workshop: Callable[..., Workshop]) -> None:
    """What waits for the loop goes back at once, and what runs in threads is finished."""
    shop = workshop(WORK)
    shop.touch("block")
    worker = shop.worker(concurrency=5)
    blocks = shop.jobs.blocks.enqueue()
    shop.wait_said("blocks")
    plain = shop.jobs.plain.enqueue(1.0)
    shop.app.enqueue_many([shop.jobs.quick.job() for _ in range(3)])
    eventually(lambda: shop.statuses()["in_progress"] == 5, what="all of them claimed")
    shop.wait_said("plain")

    worker.signal(signal.SIGTERM)
    eventually(lambda: shop.statuses()["queued"] == 3, within=4, what="those that wait given back")
    assert shop.app.result(plain.id, timeout=10) is not None
    (shop.folder / "block").unlink()
    assert worker.wait() == 0

    assert shop.statuses() == {"completed": 2, "queued": 3}
    assert shop.job(blocks.id).attempts == 1
    assert re.search(r"stopping: 2 running, up to 30 s", worker.log)


def test_what_waited_for_the_loop_runs_when_it_turns_again(
    workshop: Callable[..., Workshop],
) -> None:
    """Also when no job of its was to blame, whose end would start the next."""
    shop = workshop(WORK)
    worker = shop.worker()
    (child,) = worker.children()
    shop.app.result(shop.jobs.leaves_behind.enqueue().id, timeout=10)
    shop.wait_said("behind")
    quick = [r.id for r in shop.app.enqueue_many([shop.jobs.quick.job() for _ in range(5)])]

    assert shop.app.result(shop.jobs.plain.enqueue(0.1).id, timeout=5) == child
    assert shop.statuses()["in_progress"] == 5  # they wait
    assert {shop.app.result(id, timeout=10) for id in quick} == {child}
    assert "does not answer" not in worker.log


def test_time_outs_of_what_was_started_meanwhile(workshop: Callable[..., Workshop]) -> None:
    """A thread stands in for the loop and starts a job; the loop tells it when its time is up."""
    shop = workshop(WORK)
    worker = shop.worker()
    (child,) = worker.children()
    shop.app.result(shop.jobs.leaves_behind.enqueue().id, timeout=10)
    shop.wait_said("behind")
    patient = shop.jobs.patient.enqueue()
    shop.wait_said("patient")

    assert shop.app.result(patient.id, timeout=10) == child
    assert worker.children() == [child]
