"""`ctx.enqueue` says yes only to what will be stored: a run that is over takes nothing more."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

import tenure
from tenure.job import Job

ONCE = tenure.Retry(attempts=1)


def run(app: tenure.App, task: tenure.Task[..., object], *args: object) -> Job:
    receipt = task.enqueue(*args)
    app.run_worker(drain=True)
    job = app.get(receipt.id)
    assert job is not None
    return job


@pytest.fixture
def follow(app: tenure.App) -> tenure.Task[..., None]:
    @app.task
    def follow(n: int) -> None: ...

    return follow


def stored(app: tenure.App) -> list[int]:
    return sorted(job.payload["n"] for job in app.find(type="follow"))


def test_after_its_transaction_a_run_enqueues_nothing(
    app: tenure.App, follow: tenure.Task[..., None]
) -> None:
    raised: list[BaseException] = []

    @app.task(retry=ONCE)
    def work(ctx: tenure.Context) -> None:
        with ctx.transaction():
            ctx.enqueue(follow, 1)
        try:
            ctx.enqueue(follow, 2)
        except tenure.JobError as error:
            raised.append(error)

    job = run(app, work)

    assert job.status == "completed"
    assert stored(app) == [1]
    assert "this run is over" in str(raised[0])
    assert "follow.enqueue(" in str(raised[0])  # what to do instead


@pytest.mark.parametrize("how", ["returns", "raises"])
def test_a_thread_that_outlives_its_handler_enqueues_nothing(
    app: tenure.App, follow: tenure.Task[..., None], how: str
) -> None:
    over, tried = threading.Event(), threading.Event()
    raised: list[BaseException] = []

    @app.task(retry=ONCE)
    def work(ctx: tenure.Context) -> None:
        ctx.enqueue(follow, 1)

        def later() -> None:
            over.wait(10)
            try:
                ctx.enqueue(follow, 2)
            except tenure.JobError as error:
                raised.append(error)
            tried.set()

        threading.Thread(target=later).start()
        if how == "raises":
            raise ValueError("no")

    job = run(app, work)
    over.set()
    assert tried.wait(10)

    assert job.status == ("completed" if how == "returns" else "dead_letter")
    assert stored(app) == ([1] if how == "returns" else [])
    assert "this run is over" in str(raised[0])


def test_a_transaction_that_failed_leaves_the_run_open(
    app: tenure.App, follow: tenure.Task[..., None]
) -> None:
    """What was enqueued in the block goes with it, as its SQL does; the rest is stored when the
    handler goes on and returns."""

    @app.task(retry=ONCE)
    def work(ctx: tenure.Context) -> None:
        ctx.enqueue(follow, 1)
        try:
            with ctx.transaction():
                ctx.enqueue(follow, 2)
                raise ValueError("undo")
        except ValueError:
            ctx.enqueue(follow, 3)

    assert run(app, work).status == "completed"
    assert stored(app) == [1, 3]


def test_a_block_that_is_tried_again_stores_its_follow_ups_once(
    app: tenure.App, follow: tenure.Task[..., None]
) -> None:
    @app.task(retry=ONCE)
    def work(ctx: tenure.Context) -> None:
        for number in range(3):
            try:
                with ctx.transaction():
                    ctx.enqueue(follow, number)
                    if number < 2:
                        raise ValueError("somebody was in the way")
            except ValueError:
                continue

    assert run(app, work).status == "completed"
    assert stored(app) == [2]


def test_whatever_threads_were_told_yes_is_stored(
    app: tenure.App, follow: tenure.Task[..., None]
) -> None:
    """They race with the end of their run."""
    told: list[int] = []
    asked: list[Callable[[], None]] = []
    pace = threading.Event()

    @app.task(retry=ONCE)
    def work(ctx: tenure.Context, round: int) -> None:
        begun = threading.Event()

        def ask() -> None:
            n = round * 1_000_000
            while True:
                n += 1
                try:
                    ctx.enqueue(follow, n)
                except tenure.JobError:
                    return
                told.append(n)
                begun.set()
                pace.wait(0.001)  # a busy machine would let it store a hundred thousand

        thread = threading.Thread(target=ask)
        asked.append(thread.join)
        thread.start()
        begun.wait(10)

    for round in range(20):
        assert run(app, work, round).status == "completed"
    for join in asked:
        join()

    assert stored(app) == sorted(told)
