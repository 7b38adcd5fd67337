"""Step 6 and 7 of the walk: how a run ends, and what the job is then."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable
from typing import Any

import pytest

import tenure
from places import Place


def run(app: tenure.App, task: tenure.Task[..., Any], *args: Any) -> tenure.Job:
    receipt = task.enqueue(*args)
    app.run_worker(drain=True)
    job = app.get(receipt.id)
    assert job is not None
    return job


def seconds_until_due(job: tenure.Job) -> float:
    return (job.scheduled_at - job.updated_at).total_seconds()


def both(function: Callable[[], Any]) -> list[Callable[[], Any]]:
    """The handler as `def` and as `async def`."""

    async def coroutine() -> Any:
        return function()

    return [function, coroutine]


@pytest.mark.parametrize("kind", [0, 1], ids=["def", "async"])
def test_a_returned_value_is_the_result(app: tenure.App, kind: int) -> None:
    handler = both(lambda: {"answer": 42, "list": [1, None, "x"]})[kind]
    job = run(app, app.task(name="work")(handler))

    assert (job.status, job.result) == ("completed", {"answer": 42, "list": [1, None, "x"]})
    assert (job.attempts, job.lease_no, job.crashes, job.error) == (1, 1, 0, None)
    assert job.started_at is not None
    assert job.completed_at is not None
    assert job.started_at <= job.completed_at
    assert app.result(job.id) == job.result
    kinds = [event.kind for event in app.events(job.id)]
    assert kinds == ["job.enqueued", "job.started", "job.succeeded"]


@pytest.mark.parametrize("kind", [0, 1], ids=["def", "async"])
def test_snooze_costs_no_attempt(app: tenure.App, kind: int) -> None:
    job = run(app, app.task(name="work")(both(lambda: tenure.Snooze(60))[kind]))

    assert (job.status, job.attempts, job.error) == ("queued", 0, None)
    assert 59 <= seconds_until_due(job) <= 61


@pytest.mark.parametrize("kind", [0, 1], ids=["def", "async"])
def test_cancel_and_fail_by_value(app: tenure.App, kind: int) -> None:
    cancel = run(app, app.task(name="a")(both(lambda: tenure.Cancel("not needed"))[kind]))
    fail = run(app, app.task(name="b")(both(lambda: tenure.Fail("no such user"))[kind]))

    assert (cancel.status, cancel.error) == ("cancelled", "not needed")
    assert (fail.status, fail.error, fail.error_code) == ("failed", "no such user", "FAILED")
    with pytest.raises(tenure.JobFailed, match="no such user") as caught:
        app.result(fail.id)
    assert (caught.value.status, caught.value.code) == ("failed", "FAILED")


def test_a_permanent_error_is_not_retried(app: tenure.App) -> None:
    @app.task
    def work() -> None:
        raise tenure.PermanentError("gone for good", code="GONE")

    job = run(app, work)

    assert (job.status, job.error_code, job.attempts) == ("failed", "GONE", 1)
    assert job.error == "PermanentError: gone for good"
    assert job.error_place is not None
    assert job.error_place.startswith("PermanentError at test_outcomes.py:")


def test_a_transient_error_says_when(app: tenure.App) -> None:
    @app.task
    def work() -> None:
        raise tenure.TransientError("busy", retry_after=120, code="429")

    job = run(app, work)

    assert (job.status, job.error_code, job.attempts) == ("queued", "429", 1)
    assert 119 <= seconds_until_due(job) <= 121


def test_retries_by_policy_until_it_works(app: tenure.App) -> None:
    attempts: list[int] = []

    def flaky(ctx: tenure.Context) -> str:
        attempts.append(ctx.attempt)
        if ctx.attempt < 3:
            raise RuntimeError("not yet")
        return "at last"

    flaky.__annotations__ = {"ctx": tenure.Context}
    retry = tenure.Retry(attempts=5, backoff=tenure.Fixed(0))
    receipt = app.task(retry=retry)(flaky).enqueue()
    with app.worker():
        assert app.result(receipt.id, timeout=10) == "at last"

    assert attempts == [1, 2, 3]
    kinds = [event.kind for event in app.events(receipt.id)]
    assert kinds == ["job.enqueued", *["job.started", "job.retried"] * 2, "job.started",
                     "job.succeeded"]  # fmt: skip


def test_used_up_attempts_are_a_dead_letter_and_replay_starts_afresh(app: tenure.App) -> None:
    broken = threading.Event()
    broken.set()

    @app.task(retry=tenure.Retry(attempts=3, backoff=tenure.Fixed(0)))
    def work() -> str:
        if broken.is_set():
            raise ValueError("still broken")
        return "mended"

    receipt = work.enqueue()
    with app.worker():
        with pytest.raises(tenure.JobFailed, match="dead_letter: ValueError: still broken"):
            app.result(receipt.id, timeout=10)
        job = app.get(receipt.id)
        assert job is not None
        assert (job.status, job.attempts, job.error_code) == ("dead_letter", 3, "ValueError")

        broken.clear()
        app.replay(receipt.id)

        assert app.result(receipt.id, timeout=10) == "mended"
    replayed = app.get(receipt.id)
    assert replayed is not None
    assert replayed.attempts == 1


def test_give_up_on_classes_and_codes(app: tenure.App) -> None:
    @app.task(retry=tenure.Retry(give_up_on=(KeyError, "404")))
    def by_class() -> None:
        raise KeyError("x")

    @app.task(retry=tenure.Retry(give_up_on=(KeyError, "404")))
    def by_code() -> None:
        raise tenure.TransientError("not there", code="404")

    assert run(app, by_class).status == "failed"
    assert run(app, by_code).status == "failed"


@pytest.mark.parametrize("error", [SystemExit(), KeyboardInterrupt(), GeneratorExit()], ids=repr)
@pytest.mark.parametrize("kind", [0, 1], ids=["def", "async"])
def test_nothing_a_handler_raises_ends_the_worker(
    app: tenure.App, error: BaseException, kind: int
) -> None:
    def work() -> None:
        raise error

    async def awork() -> None:
        raise error

    job = run(app, app.task(name="work")([work, awork][kind]))

    assert (job.status, job.attempts) == ("queued", 1)
    assert job.error_code == type(error).__name__


def test_arguments_are_checked_again_before_the_run(make_app: Callable[..., tenure.App]) -> None:
    """Stored under an old signature, run under a new one."""
    old, new = make_app(), make_app()
    ran: list[Any] = []
    old.task(name="work")(lambda amount: None)
    new_task = new.task(name="work")(typed(ran))
    receipt = old.enqueue("work", {"amount": "a lot"})
    good = old.enqueue("work", {"amount": 3})

    new.run_worker(drain=True)

    job = new.get(receipt.id)
    assert job is not None
    assert (job.status, job.error_code, job.attempts) == ("failed", "VALIDATION_ERROR", 1)
    assert "argument amount" in str(job.error)
    assert "a lot" not in str(job.error)  # never the value
    assert ran == [3]
    assert new.result(good.id) is None
    new.replay(receipt.id, {"amount": 4})
    new.run_worker(drain=True)
    assert ran == [3, 4]
    assert new_task.name == "work"


def typed(ran: list[Any]) -> Callable[[int], None]:
    def work(amount: int) -> None:
        ran.append(amount)

    work.__annotations__ = {"amount": int}
    return work


def test_a_result_that_cannot_be_stored_fails_the_job(app: tenure.App) -> None:
    @app.task
    def work() -> Any:
        return {"value": object()}

    job = run(app, work)

    assert (job.status, job.error_code) == ("failed", "RESULT_ERROR")
    assert "the job ran" in str(job.error)


def test_a_bad_snooze_is_an_error_not_a_lost_job(app: tenure.App) -> None:
    @app.task
    def work() -> Any:
        return tenure.Snooze(-1)

    job = run(app, work)

    assert (job.status, job.attempts) == ("queued", 1)
    assert "delay" in str(job.error)


def test_an_unprintable_error_is_stored_scrubbed(app: tenure.App) -> None:
    @app.task
    def work() -> None:
        raise RuntimeError("NUL \0, surrogate \ud800, long " + "x" * 5000)

    job = run(app, work)

    assert job.error is not None
    assert "\0" not in job.error
    assert len(job.error) < 2100


def test_an_error_whose_text_raises_is_stored_too(app: tenure.App) -> None:
    class Nasty(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text for you")

    @app.task(retry=tenure.Retry(attempts=1))
    def work() -> None:
        raise Nasty

    job = run(app, work)

    assert (job.status, job.error_code) == ("dead_letter", "Nasty")


@pytest.mark.parametrize("delay", [-1, float("nan"), "soon", None])
def test_a_backoff_that_makes_no_sense_does_not_lose_the_job(app: tenure.App, delay: Any) -> None:
    class Odd:
        def delay(self, attempt: int) -> Any:
            if delay is None:
                raise ZeroDivisionError
            return delay

    @app.task(retry=tenure.Retry(backoff=Odd()))
    def work() -> None:
        raise RuntimeError("failed")

    job = run(app, work)

    assert (job.status, job.attempts, job.error) == ("queued", 1, "RuntimeError: failed")
    assert 4 <= seconds_until_due(job) <= 7  # the default curve


def test_result_is_late_or_fails(app: tenure.App) -> None:
    @app.task
    def work() -> None: ...

    receipt = work.enqueue()
    with pytest.raises(TimeoutError, match=r"has not ended within 0\.05 s"):
        app.result(receipt.id, timeout=0.05)
    app.cancel(receipt.id, reason="changed my mind")
    with pytest.raises(tenure.JobFailed, match="cancelled: changed my mind"):
        app.result(receipt.id)


@pytest.mark.timed
def test_a_delayed_job_starts_on_time(app: tenure.App) -> None:
    @app.task
    def work() -> None: ...

    with app.worker():
        receipt = work.options(delay=0.4).enqueue()
        app.result(receipt.id, timeout=10)

    job = app.get(receipt.id)
    assert job is not None
    assert job.started_at is not None
    late = job.started_at - job.scheduled_at
    assert datetime.timedelta(0) <= late < datetime.timedelta(seconds=0.5)


def test_many_threads_ending_at_once_all_report(app: tenure.App) -> None:
    """Threads hand their outcomes to one loop; none may be left lying there."""

    @app.task
    def work(n: int) -> int:
        return n

    app.enqueue_many([work.job(n) for n in range(3000)])

    summary = app.run_worker(drain=True, concurrency=64)

    assert summary.completed == 3000


class Coded(Exception):
    code = "no\x00 \udcff code"


def raised(error: Exception) -> Callable[[], Any]:
    def handler() -> Any:
        raise error

    return handler


@pytest.mark.parametrize("kind", [0, 1], ids=["def", "async"])
@pytest.mark.parametrize(
    ("handler", "status", "error", "code"),
    [
        (lambda: tenure.Fail("gone", code=404), "failed", "gone", "404"),  # type: ignore[arg-type]
        (lambda: tenure.Fail("bad \x00 byte", code="\x00"), "failed", "bad  byte", ""),
        (lambda: tenure.Fail("no \udcff.txt", code="\udcff"), "failed", "no ?.txt", "?"),
        (lambda: tenure.Cancel("\udcff\x00 off"), "cancelled", "? off", "cancelled"),
        (raised(Coded("\udcff\x00")), "queued", "Coded: ?", "no ? code"),
    ],
    ids=["number", "NUL", "surrogate", "cancel", "raised"],
)
def test_whatever_a_handler_says_is_stored_and_harms_no_neighbour(
    app: tenure.App,
    kind: int,
    handler: Callable[[], Any],
    status: str,
    error: str,
    code: str,
) -> None:
    said = app.task(name="said")(both(handler)[kind]).enqueue()
    neighbours = app.task(name="neighbour")(both(lambda: "fine")[kind])
    others = [neighbours.enqueue() for _ in range(3)]
    app.run_worker(drain=True)

    job = app.get(said.id)
    assert job is not None
    assert (job.status, job.error, job.error_code) == (status, error, code)
    assert [app.result(other.id) for other in others] == ["fine"] * 3


def test_a_key_says_how_its_job_ended_and_where(app: tenure.App, place: Place) -> None:
    @app.task
    def work(how: str) -> None:
        if how == "failed":
            raise tenure.PermanentError("no")

    def key() -> list[tuple[Any, ...]]:
        found = place.sql("SELECT status, result_ref, error_ref, expires_at FROM tenure_keys")
        return [(*row[:3], row[3] is not None) for row in found]

    first = work.options(key="k").enqueue("completed")
    assert key() == [(None, None, None, False)]
    app.run_worker(drain=True)
    assert key() == [("succeeded", first.id, None, True)]
    assert work.options(key="k").enqueue("again") == tenure.Receipt(first.id, True, "completed")

    place.sql("DELETE FROM tenure_keys")
    second = work.options(key="k").enqueue("failed")
    app.run_worker(drain=True)
    assert key() == [("failed", None, second.id, True)]
    app.replay(second.id)
    assert key() == [(None, None, None, False)]


def test_an_audit_of_errors_keeps_what_went_wrong(make_app: Callable[..., tenure.App]) -> None:
    app = make_app(audit="errors")

    @app.task(retry=tenure.Retry(attempts=2, backoff=tenure.Steps(0)))
    def work(fine: bool) -> None:
        if not fine:
            raise ValueError("no")

    fine, bad, given_up = work.enqueue(True), work.enqueue(False), work.options(delay=60)
    kinds = {
        receipt.id: [event.kind for event in app.events(receipt.id)] for receipt in (fine, bad)
    }
    assert kinds == {fine.id: [], bad.id: []}
    app.run_worker(drain=True)
    assert [event.kind for event in app.events(fine.id)] == []
    assert [event.kind for event in app.events(bad.id)] == ["job.retried", "job.deadlettered"]
    cancelled = given_up.enqueue(True)
    app.cancel(cancelled.id)
    assert [event.kind for event in app.events(cancelled.id)] == ["job.cancelled"]
