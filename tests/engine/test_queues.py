"""Steps 4 and 5 of the walk: what is claimed, in which order, and what is left."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import tenure
from crash.harness import eventually
from places import only


def recorder(app: tenure.App, **options: object) -> tuple[tenure.Task[..., None], list[str]]:
    order: list[str] = []

    @app.task(**options)  # type: ignore[call-overload, untyped-decorator]
    def work(tag: str) -> None:
        order.append(tag)

    return work, order


def test_priorities_first_then_due_time(app: tenure.App) -> None:
    work, order = recorder(app)
    for priority in (5, 10, 1, 5, 3):
        work.options(priority=priority).enqueue(f"{priority}")

    app.run_worker(drain=True, concurrency=1)

    assert order == ["1", "3", "5", "5", "10"]


def test_orgs_take_turns(app: tenure.App) -> None:
    work, order = recorder(app)
    app.enqueue_many([work.options(org="big").job(f"big{n}") for n in range(20)])
    app.enqueue_many([work.options(org="small").job(f"small{n}") for n in range(3)])

    app.run_worker(drain=True, concurrency=1)

    assert all(f"small{n}" in order[:8] for n in range(3))


@pytest.mark.parametrize("concurrency", [1, 60])
def test_critical_comes_sooner_and_default_does_not_starve(
    app: tenure.App, concurrency: int
) -> None:
    """Also when one claim takes all of them."""
    work, order = recorder(app)
    app.enqueue_many([work.options(queue="critical").job("critical") for _ in range(40)])
    app.enqueue_many([work.options(queue="default").job("default") for _ in range(40)])

    app.run_worker(drain=True, concurrency=concurrency)

    start = order[:20]
    assert 2 <= start.count("default") <= 8  # one turn in five
    assert len(order) == 80


def test_a_busy_worker_learns_of_a_queue_that_is_new(app: tenure.App) -> None:
    """It never sleeps, so it is never told by the look it takes before that."""
    seen = threading.Event()
    fed = 0

    @app.task
    async def endless() -> None: ...

    @app.task
    def news() -> None:
        seen.set()

    app.enqueue_many([endless.job() for _ in range(2000)])
    with app.worker(concurrency=10):
        app.pause("elsewhere")  # the name is new, and its switch is not for us
        app.resume("elsewhere")
        news.options(queue="elsewhere").enqueue()
        while not seen.is_set() and fed < 200:
            app.enqueue_many([endless.job() for _ in range(1000)])
            fed += 1
        assert seen.is_set()
        assert fed < 200


def test_a_paused_queue_rests_and_what_runs_goes_on(app: tenure.App) -> None:
    started, go = threading.Event(), threading.Event()

    @app.task
    def hold() -> str:
        started.set()
        go.wait(10)
        return "done"

    @app.task
    def other() -> str:
        return "done"

    with app.worker():
        running = hold.enqueue()
        assert started.wait(10)
        app.pause("q:default", reason="maintenance", actor=("user", "7"))
        waiting = other.enqueue()
        elsewhere = other.options(queue="exports").enqueue()
        go.set()
        assert app.result(running.id, timeout=10) == "done"
        assert app.result(elsewhere.id, timeout=10) == "done"
        job = app.get(waiting.id)
        assert job is not None
        assert (job.status, job.attempts) == ("queued", 0)
        (queue,) = [queue for queue in app.queues() if queue.name == "default"]
        assert (queue.pause_reason, queue.ready) == ("maintenance", 1)

        app.resume("default")

        assert app.result(waiting.id, timeout=10) == "done"


def test_drain_leaves_what_it_may_not_claim_and_says_why(
    make_app: Callable[..., tenure.App],
) -> None:
    app, other = make_app(), make_app()
    work, order = recorder(app)
    other.task(name="foreign")(lambda: None).enqueue()
    work.enqueue("now")
    work.options(delay=60).enqueue("later")
    work.options(queue="exports").enqueue("elsewhere")
    work.options(queue="planning").enqueue("paused")
    app.pause("planning")

    summary = app.run_worker(queues="default,planning", drain=True)

    assert order == ["now"]
    assert summary.completed == 1
    assert summary.left["due later"] >= 1
    assert summary.left["in queues this worker does not serve"] == 1
    assert summary.left["in paused queues"] == 1
    assert any("type" in why for why in summary.left)


def test_a_retry_in_backoff_does_not_hold_a_drain(app: tenure.App) -> None:
    @app.task(retry=tenure.Retry(backoff=tenure.Fixed(60)))
    def work() -> None:
        raise RuntimeError

    work.enqueue()
    began = time.monotonic()

    summary = app.run_worker(drain=True)

    assert time.monotonic() - began < 10
    assert (summary.retried, dict(summary.left)) == (1, {"due later": 1})


def test_drain_runs_what_its_own_jobs_enqueue(app: tenure.App) -> None:
    @app.task
    def countdown(n: int) -> None:
        if n:
            countdown.enqueue(n - 1)

    countdown.enqueue(20)

    assert app.run_worker(drain=True).completed == 21


def test_an_unknown_type_is_left_alone_and_reported(
    make_app: Callable[..., tenure.App], caplog: pytest.LogCaptureFixture
) -> None:
    old, new = make_app(), make_app()
    known, order = recorder(old)
    newer = new.task(name="newer")(lambda: None)
    receipts = new.enqueue_many([newer.job() for _ in range(3)])
    known.enqueue("known")

    with caplog.at_level(logging.WARNING, logger="tenure.worker"):
        old.run_worker(drain=True)

    assert order == ["known"]
    said = [r.getMessage() for r in caplog.records if "does not know the type" in r.getMessage()]
    assert len(said) == 1
    assert "3 jobs of type 'newer'" in said[0]
    assert "Import the module of the task in the app's" in said[0]
    for receipt in receipts:
        job = new.get(receipt.id)
        assert job is not None
        assert (job.status, job.attempts, job.crashes, job.error) == ("queued", 0, 0, None)


def test_a_cap_on_a_queue_is_kept_without_spinning(app: tenure.App) -> None:
    lock = threading.Lock()
    go = threading.Event()
    running: list[int] = [0, 0]

    @app.task
    def hold() -> None:
        with lock:
            running[0] += 1
            running[1] = max(running)
        go.wait(20)
        with lock:
            running[0] -= 1

    app.enqueue_many([hold.job() for _ in range(8)])
    with app.worker(queues="default:2", concurrency=10):
        eventually(lambda: running[0] == 2, what="two at once")
        before = time.process_time()
        time.sleep(1.0)  # how much it costs to wait with a backlog is the question
        spent = time.process_time() - before
        go.set()
        eventually(lambda: app.stats()["jobs"]["completed"] == 8, what="all of them")

    assert running[1] == 2
    assert spent < 0.3


def test_what_one_claim_brought_runs_although_the_next_one_failed(
    app: tenure.App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn may take two claims. Jobs of the first were given back after two renewals, 20 s."""
    known, order = recorder(app)
    jobs = [known.options(queue="a").job(str(n)) for n in range(40)]
    app.enqueue_many([*jobs, known.options(queue="b").job("b")])
    claim, granted = app.store.claim, [0]

    def fails_once(*args: Any, **options: Any) -> Any:
        if granted[0] == 1:
            granted[0] = 2
            raise tenure.StoreError("away for a moment")
        found = claim(*args, **options)
        granted[0] += bool(found.jobs)
        return found

    monkeypatch.setattr(app.store, "claim", fails_once)
    with app.worker(concurrency=50):
        eventually(lambda: len(order) == 41, within=20, what="all of them")

    assert "job.released" not in {event.kind for event in app.events()}


def test_bad_queue_lists(app: tenure.App) -> None:
    for bad in ("default:0", "default:x", "a b", "default:2:3"):
        with pytest.raises(tenure.ConfigError):
            app.run_worker(queues=bad, drain=True)


def test_two_embedded_workers_share_the_work(make_app: Callable[..., tenure.App]) -> None:
    ran: list[int] = []
    apps = [make_app() for _ in range(2)]
    for app in apps:
        app.task(name="work")(lambda n: ran.append(n))
    jobs = apps[0].enqueue_many([apps[0].tasks["work"].job(n) for n in range(300)])

    with apps[0].worker(concurrency=5), apps[1].worker(concurrency=5):
        eventually(lambda: apps[0].stats()["jobs"]["completed"] == len(jobs), what="all done")

    assert sorted(ran) == list(range(300))  # each exactly once


def test_a_drain_sees_past_jobs_it_does_not_know(make_app: Callable[..., tenure.App]) -> None:
    """Foreign jobs at the head of a lane use up a claim's limit; the walk goes on behind them."""
    theirs, ours = make_app(), make_app()

    @theirs.task
    def foreign() -> None: ...

    @ours.task
    def known() -> str:
        return "found"

    theirs.enqueue_many([foreign.job() for _ in range(200)])
    receipt = known.enqueue()
    summary = ours.run_worker(drain=True, concurrency=1)

    assert ours.result(receipt.id, timeout=1) == "found"
    assert summary.completed == 1
    assert summary.left == {"of unknown type": 200}


@only("postgres", "SQLite's finishes are written by the thread that claims")
def test_a_drain_sees_what_a_job_left_that_ended_during_its_last_look(
    app: tenure.App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claim has looked before the finish stored a follow-up, and answers after it."""
    running, go = threading.Event(), threading.Event()

    @app.task
    def follow_up() -> None: ...

    @app.task
    def work(ctx: tenure.Context) -> None:
        running.set()
        go.wait(10)
        ctx.enqueue(follow_up)

    receipt = work.enqueue()
    claim = app.store.claim

    def late(*args: Any, **options: Any) -> Any:
        found = claim(*args, **options)
        if running.is_set() and not go.is_set():
            assert not found.jobs
            go.set()
            app.result(receipt.id, timeout=10)
            time.sleep(0.2)  # until the finisher has its answer: nothing tells us
        return found

    monkeypatch.setattr(app.store, "claim", late)
    summary = app.run_worker(drain=True)

    assert (summary.completed, dict(summary.left)) == (2, {})
