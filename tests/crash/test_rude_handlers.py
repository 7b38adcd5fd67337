"""Handlers that damage the process they run in: they pay for it, and others get on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from places import only

from .harness import Workshop, eventually, gone

WORK = """
    @app.task
    async def quick(n: int) -> int:
        return n

    @app.task
    def stepping(ctx: tenure.Context, n: int) -> int:
        return ctx.step("a", lambda: n)
"""


def with_task(kind: str, body: str) -> str:
    return f"""{WORK}
    @app.task(timeout=8)
    {kind} rude() -> None:
        say("rude", os.getpid())
        {body}
"""


@only("sqlite", "it is about processes")
@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("def", "os.execv('/bin/sleep', ['sleep', '60'])"),
        ("async def", "os.execv('/bin/sleep', ['sleep', '60'])"),
        ("def", "os.closerange(0, 21)"),
        ("async def", "os.closerange(0, 21)"),
        ("def", "os.closerange(3, 1000)"),
        ("async def", "os.closerange(3, 1000)"),
        ("async def", "asyncio.get_running_loop().stop()"),
        ("def", "os.kill(os.getpid(), 1)"),
    ],
)
def test_one_that_ends_its_process_is_poison(
    workshop: Callable[..., Workshop], kind: str, body: str
) -> None:
    """Also when its own run is over by then: closed handles end the process a moment later."""
    shop = workshop(with_task(kind, body))
    worker = shop.worker(concurrency=10)
    rude = shop.jobs.rude.enqueue()
    eventually(lambda: shop.job(rude.id).crashes, within=30, what="the first charge")
    jobs = [shop.jobs.quick.job(n) for n in range(20)]
    jobs += [shop.jobs.stepping.job(n) for n in range(5)]
    shop.app.enqueue_many(jobs)
    shop.wait_for("completed", 25)
    eventually(
        lambda: shop.job(rude.id).status == "dead_letter", within=40, what="the poison set aside"
    )

    job = shop.job(rude.id)
    assert (job.error_code, job.crashes) == ("poison", 3)
    assert shop.count("rude") == 3
    assert worker.alive
    assert worker.stop()["completed"] == 25


@only("sqlite", "it is about processes")
@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("def", "os.setsid()"),
        ("def", "os.chdir('/'); os.umask(0o777)"),
        ("def", "sys.stdout.close(); sys.stderr.close(); sys.stdin.close()"),
        ("def", "os.close(0); os.close(1); os.close(2)"),
        ("def", "import threading; threading.Thread(target=time.sleep, args=(600,)).start()"),
        ("def", "import locale; locale.setlocale(locale.LC_ALL, 'C')"),
        ("def", "import logging; logging.shutdown(); logging.disable()"),
        ("def", "os.environ.clear()"),
        ("def", "import socket; socket.setdefaulttimeout(0.001)"),
        (
            "async def",
            "import signal; signal.signal(signal.SIGTERM, signal.SIG_DFL); "
            "signal.signal(signal.SIGINT, signal.SIG_DFL)",
        ),
    ],
)
def test_one_that_changes_its_process_is_no_poison(
    workshop: Callable[..., Workshop], kind: str, body: str
) -> None:
    shop = workshop(with_task(kind, body))
    worker = shop.worker(concurrency=10)
    rude = shop.jobs.rude.enqueue()
    shop.app.result(rude.id, timeout=10)
    jobs = [shop.jobs.quick.job(n) for n in range(20)]
    jobs += [shop.jobs.stepping.job(n) for n in range(5)]
    shop.app.enqueue_many(jobs)
    shop.wait_for("completed", 26)
    children = worker.children()
    began = time.monotonic()

    assert worker.stop()["completed"] == 26
    assert time.monotonic() - began < 5  # nobody waits for what a handler left behind
    assert all(gone(child) for child in children)
    assert {job.attempts for job in shop.app.find()} == {1}


@only("sqlite", "a server has no directory")
def test_a_handler_goes_elsewhere_before_it_asks_for_the_database(
    workshop: Callable[..., Workshop], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`sqlite:///jobs.db` is the file in the worker's directory, wherever a handler is."""
    monkeypatch.chdir(tmp_path)
    shop = workshop(
        """
        app = tenure.App("sqlite:///jobs.db")

        @app.task
        def moves(ctx: tenure.Context) -> str:
            os.makedirs(os.path.join(HERE, "elsewhere"), exist_ok=True)
            os.chdir(os.path.join(HERE, "elsewhere"))
            return ctx.step("a", lambda: "done")
        """
    )
    shop.worker()
    receipt = shop.jobs.moves.enqueue()

    assert shop.app.result(receipt.id, timeout=10) == "done"
    assert list((shop.folder / "elsewhere").iterdir()) == []
    assert shop.job(receipt.id).attempts == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_a_child_alone_changes_nothing(
    workshop: Callable[..., Workshop], number: signal.Signals
) -> None:
    shop = workshop(
        """
        @app.task
        async def hold() -> int:
            say("hold", os.getpid())
            while not there("go"):
                await asyncio.sleep(0.01)
            return os.getpid()
        """
    )
    worker = shop.worker()
    receipt = shop.jobs.hold.enqueue()
    shop.wait_said("hold")
    (child,) = worker.children()
    os.kill(child, number)
    time.sleep(0.3)  # what does not happen has no signal
    shop.touch("go")

    assert shop.app.result(receipt.id, timeout=10) == child
    assert worker.stop()["completed"] == 1


@only("sqlite", "it is about processes")
def test_what_ends_a_process_is_told_without_its_text(workshop: Callable[..., Workshop]) -> None:
    """asyncio lets a `sys.exit()` in any task end the loop; its text may quote an argument."""
    shop = workshop(
        """
        @app.task
        async def rude(who: str) -> None:
            async def inner() -> None:
                sys.exit(f"cannot serve {who}")

            await asyncio.gather(inner())
        """
    )
    receipt = shop.jobs.rude.enqueue("gertrude")
    worker = shop.worker(drain=True, ready=False)

    assert worker.wait() == 0
    assert shop.job(receipt.id).status == "dead_letter"
    assert "SystemExit ended this process" in worker.log
    assert "in inner" in worker.log
    assert "gertrude" not in worker.log
