"""Handlers that make processes: none of them answers for us, and what they are for works."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

from .harness import Workshop, eventually, gone

WORK = """
    @app.task
    async def beside(n: int) -> int:
        say("beside", n, os.getpid())
        await asyncio.sleep(0.01)
        say("beside-end", n, os.getpid())
        return n

    @app.task
    def threads(how: str) -> int:
        pid = os.fork()
        if pid == 0:
            say("copy", os.getpid())
            if how == "raises":
                raise LookupError("in the copy")
            if how == "exits":
                sys.exit(3)
            return 0
        return os.waitpid(pid, 0)[1]

    @app.task
    async def on_the_loop(how: str) -> int:
        pid = os.fork()
        if pid == 0:
            say("copy", os.getpid())
            if how == "raises":
                raise LookupError("in the copy")
            if how == "exits":
                sys.exit(3)
            if how == "awaits":
                await asyncio.sleep(0)
                say("never")
            if how == "sleeps":
                await asyncio.sleep(0.2)
                say("never")
            return 0
        while True:
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                return status
            await asyncio.sleep(0.01)
"""
# In a copy asyncio has no running loop: what asks for it raises.
STATUS = {"returns": 0, "raises": 1 << 8, "exits": 3 << 8, "awaits": 0, "sleeps": 1 << 8}


def test_a_handler_forks(workshop: Callable[..., Workshop]) -> None:
    """The copy comes back from the handler: it ends there, and nothing else of ours runs in it."""
    shop = workshop(WORK)
    worker = shop.worker(concurrency=20)
    shop.app.result(shop.jobs.beside.enqueue(-1).id, timeout=15)
    (child,) = worker.children()
    jobs, expected = [], []
    for how in ("returns", "raises", "exits"):
        jobs.append(shop.jobs.threads.job(how))
        expected.append(STATUS[how])
    for how in STATUS:
        jobs.append(shop.jobs.on_the_loop.job(how))
        expected.append(STATUS[how])
    others = [shop.jobs.beside.job(n) for n in range(200)]
    mixed = [job for n, job in enumerate(jobs) for job in (job, *others[n * 25 : n * 25 + 25])]
    shop.app.enqueue_many(mixed)
    shop.wait_for("completed", len(mixed) + 1)

    for job, status in zip(jobs, expected, strict=True):
        assert shop.job(job.id).result == status, job
    assert all(shop.job(job.id).attempts == 1 for job in mixed)
    for n in range(200):
        assert shop.count("beside", n) == shop.count("beside-end", n) == 1
    assert {int(line[-1]) for line in shop.said() if line[0].startswith("beside")} == {child}
    assert shop.count("copy") == len(jobs)
    assert shop.count("never") == 0
    copies = [int(line[1]) for line in shop.said() if line[0] == "copy"]
    eventually(lambda: all(gone(pid) for pid in copies), what="all copies gone")
    assert worker.children() == [child]
    assert worker.stop()["completed"] == len(mixed) + 1


def test_a_copy_that_lives_on_disturbs_nobody(workshop: Callable[..., Workshop]) -> None:
    """A daemon that a handler starts by hand: it keeps no pipe open, and eats no orders."""
    shop = workshop(
        WORK
        + """
    @app.task
    async def daemon() -> None:
        if os.fork() == 0:
            os.setsid()
            say("daemon", os.getpid())
            while not there("enough"):
                time.sleep(0.02)
            os._exit(0)
    """
    )
    worker = shop.worker(concurrency=20)
    shop.app.result(shop.jobs.daemon.enqueue().id, timeout=15)
    shop.wait_said("daemon")
    pid = int(shop.said()[0][1])
    shop.app.enqueue_many([shop.jobs.beside.job(n) for n in range(500)])
    shop.wait_for("completed", 501)
    open_there = {os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()}
    (child,) = worker.children()
    open_here = {os.readlink(path) for path in Path(f"/proc/{child}/fd").iterdir()}
    pipes = {name for name in open_here if name.startswith(("socket:", "anon_inode:"))}

    assert worker.stop()["completed"] == 501
    shop.touch("enough")
    eventually(lambda: gone(pid), what="the daemon gone")
    # asyncio's own pair of sockets, with which it wakes itself, is all they share.
    shared = {name for name in pipes & open_there if name.startswith("socket:")}
    assert len(shared) <= 2
    assert len(pipes - open_there) >= 1


def test_subprocess_and_multiprocessing_work(workshop: Callable[..., Workshop]) -> None:
    shop = workshop(
        """
        import multiprocessing, subprocess

        def square(n):
            return n * n

        @app.task
        def pool(method: str) -> list[int]:
            with multiprocessing.get_context(method).Pool(2) as pool:
                return pool.map(square, range(5))

        @app.task
        def process(method: str) -> int:
            made = multiprocessing.get_context(method).Process(target=sys.exit, args=(7,))
            made.start()
            made.join()
            return made.exitcode

        @app.task
        def terminated(method: str) -> int:
            made = multiprocessing.get_context(method).Process(target=time.sleep, args=(60,))
            made.start()
            made.terminate()
            made.join()
            return made.exitcode

        @app.task
        def command(prepared: bool) -> str:
            first = os.setsid if prepared else None
            words = [sys.executable, "-c", "print(6 * 7)"]
            return subprocess.run(
                words, capture_output=True, check=True, text=True, preexec_fn=first
            ).stdout

        @app.task
        async def acommand() -> str:
            words = [sys.executable, "-c", "print(6 * 7)"]
            made = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)
            said, _ = await made.communicate()
            return said.decode()
        """
    )
    shop.worker(concurrency=4)
    expected = [(shop.jobs.command.enqueue(flag), "42\n") for flag in (False, True)]
    expected.append((shop.jobs.acommand.enqueue(), "42\n"))
    for method in ("fork", "spawn", "forkserver"):
        expected.append((shop.jobs.pool.enqueue(method), [0, 1, 4, 9, 16]))
        expected.append((shop.jobs.process.enqueue(method), 7))
        expected.append((shop.jobs.terminated.enqueue(method), -signal.SIGTERM))

    for receipt, value in expected:
        assert shop.app.result(receipt.id, timeout=40) == value
        assert shop.job(receipt.id).attempts == 1
