"""An embedded worker whose loop stands still: what has not started goes back, it claims nothing,
and works on when the loop turns again."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable

import pytest

import tenure
from crash.harness import eventually


def test_what_has_not_started_goes_back(make_app: Callable[..., tenure.App]) -> None:
    blocked, go = threading.Event(), threading.Event()
    ran: list[str] = []

    def app_named(name: str) -> tenure.App:
        app = make_app()

        @app.task
        async def quick(n: int) -> str:
            ran.append(f"{n} {name}")
            return name

        @app.task
        async def leaks() -> None:
            def block() -> None:
                blocked.set()
                go.wait(60)

            asyncio.get_running_loop().call_later(0.1, block)

        @app.task
        def threaded() -> str:
            return name

        return app

    first, second = app_named("first"), app_named("second")
    quick = first.tasks["quick"]
    with first.worker(concurrency=20):
        try:
            first.result(first.tasks["leaks"].enqueue().id, timeout=10)
            assert blocked.wait(10)
            ids = [r.id for r in first.enqueue_many([quick.job(n) for n in range(10)])]
            began = time.monotonic()
            eventually(lambda: first.stats()["jobs"]["in_progress"] == 10, what="all claimed")
            eventually(lambda: first.stats()["jobs"]["queued"] == 10, what="all of them back")
            assert {first.get(id).attempts for id in ids} == {0}
            late = quick.enqueue(10)  # nobody claims it: its worker does not answer
            with second.worker():
                assert {second.result(id, timeout=15) for id in ids} == {"second"}
                assert time.monotonic() - began < 10
                assert second.result(late.id, timeout=15) == "second"
            waits = quick.enqueue(11)
        finally:
            go.set()
        assert first.result(waits.id, timeout=10) == "first"
        assert first.result(first.tasks["threaded"].enqueue().id, timeout=10) == "first"

    assert sorted(ran) == sorted([f"{n} second" for n in range(11)] + ["11 first"])
    assert all(first.get(id).attempts == 1 for id in ids)


def test_a_loop_that_stands_still_twice_with_nothing_to_do(
    app: tenure.App, caplog: pytest.LogCaptureFixture
) -> None:
    blocked, go = threading.Event(), threading.Event()

    @app.task
    async def leaks() -> None:
        def block() -> None:
            blocked.set()
            go.wait(60)

        asyncio.get_running_loop().call_later(0.1, block)

    @app.task
    async def quick(n: int) -> int:
        return n

    with app.worker():
        for turn in (1, 2):
            blocked.clear()
            go.clear()
            app.result(leaks.enqueue().id, timeout=10)
            assert blocked.wait(10)
            said = f"{turn} times"
            eventually(lambda n=turn: caplog.text.count("does not answer") == n, what=said)
            waits = quick.enqueue(turn)
            go.set()
            assert app.result(waits.id, timeout=10) == turn
            ids = [r.id for r in app.enqueue_many([quick.job(n) for n in range(200)])]
            assert [app.result(id, timeout=10) for id in ids] == list(range(200))


def test_a_handler_of_an_embedded_worker_forks(app: tenure.App) -> None:
    """The copy comes back from the handler, in a thread of ours or on our loop: it ends there."""

    @app.task
    def threaded() -> int:
        pid = os.fork()
        return os.waitpid(pid, 0)[1] if pid else 1

    @app.task
    async def on_the_loop(awaits: bool) -> int:
        pid = os.fork()
        if pid == 0:
            if awaits:
                await asyncio.sleep(0)
            return 1
        return os.waitpid(pid, 0)[1]

    with app.worker():
        receipts = [threaded.enqueue(), on_the_loop.enqueue(True), on_the_loop.enqueue(False)]
        assert [app.result(receipt.id, timeout=10) for receipt in receipts] == [0, 0, 0]
    assert app.stats()["jobs"]["completed"] == 3
