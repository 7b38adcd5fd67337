"""Step 1 of the walk: a function becomes a task, a call becomes a job."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable

import pytest

import tenure
from places import Place
from tenure.policy import CATEGORIES


def send_to(app: tenure.App) -> tenure.Task[[str, str], str]:
    @app.task(queue="notifications", priority=3, timeout=30)
    def send_email(to: str, template: str = "welcome") -> str:
        return f"{template} to {to}"

    return send_email


def stored(app: tenure.App, receipt: tenure.Receipt) -> tenure.Job:
    job = app.get(receipt.id)
    assert job is not None
    return job


def test_a_call_stays_a_call(app: tenure.App, count: Callable[[], int]) -> None:
    send_email = send_to(app)

    assert send_email("a@b.c") == "welcome to a@b.c"
    assert send_email("a@b.c", template="x") == "x to a@b.c"
    assert send_email.__name__ == "send_email"
    assert count() == 0


async def test_an_async_call_stays_one(app: tenure.App) -> None:
    @app.task
    async def add(a: int, b: int) -> int:
        return a + b

    assert await add(1, 2) == 3


def test_a_bare_decorator_works_and_so_does_a_direct_call_with_a_context(app: tenure.App) -> None:
    @app.task
    def plain() -> str:
        return "done"

    assert plain() == "done"
    assert app.tasks["plain"] is plain


def test_enqueue_stores_arguments_by_name_and_the_task_s_options(app: tenure.App) -> None:
    receipt = send_to(app).enqueue("a@b.c")

    job = stored(app, receipt)
    assert receipt == tenure.Receipt(job.id, False, "queued")
    assert (job.type, job.status, job.queue, job.priority) == (
        "send_email", "queued", "notifications", 3,
    )  # fmt: skip
    assert job.payload == {"to": "a@b.c"}
    assert (job.timeout, job.attempts, job.max_attempts, job.lease_no) == (30.0, 0, 5, 0)
    assert job.org == "default"
    assert app.get(job.uuid) == job


def test_options_change_one_enqueue_and_leave_the_task_alone(app: tenure.App) -> None:
    send_email = send_to(app)
    soon = datetime.datetime.now(datetime.UTC) + datetime.timedelta(minutes=5)
    chosen = send_email.options(
        delay=datetime.timedelta(seconds=60), priority=1, key="welcome:7", org="acme",
        queue="q:urgent", project="p1", actor=("user", "7"), timeout=2, max_attempts=9,
    )  # fmt: skip

    job = stored(app, chosen.enqueue("a@b.c", template="x"))

    assert (job.priority, job.queue, job.org, job.key) == (1, "urgent", "acme", "welcome:7")
    assert (job.project, job.actor, job.timeout, job.max_attempts) == ("p1", ("user", "7"), 2.0, 9)
    assert job.payload == {"to": "a@b.c", "template": "x"}
    assert (job.scheduled_at - job.created_at).total_seconds() == 60
    at = stored(app, send_email.options(at=soon).enqueue("a@b.c"))
    assert abs((at.scheduled_at - soon).total_seconds()) < 0.002
    assert stored(app, send_email.enqueue("a@b.c")).priority == 3


def test_a_key_seen_before_returns_the_first_receipt(app: tenure.App) -> None:
    keyed = send_to(app).options(key="k")
    first = keyed.enqueue("a@b.c")

    assert keyed.enqueue("d@e.f") == tenure.Receipt(first.id, True, "queued")
    assert not send_to_other_org(app).enqueue("a@b.c").duplicate
    with pytest.raises(tenure.DuplicateKey, match="on_conflict"):
        app.tasks["send_email"].options(key="k", on_conflict="error").enqueue("a@b.c")


def test_a_conflict_is_no_error_of_a_batch_that_is_stored(app: tenure.App) -> None:
    email = send_to(app)
    jobs = [email.job("a@b.c"), email.options(key="k").job("a@b.c")]
    email.options(key="k").enqueue("a@b.c")

    with pytest.raises(tenure.ConfigError, match="one job at a time"):
        app.enqueue_jobs(jobs, on_conflict="error")

    assert app.stats()["jobs"]["queued"] == 1


def send_to_other_org(app: tenure.App) -> tenure.Task[..., object]:
    return app.tasks["send_email"].options(key="k", org="other")


def test_enqueue_many_gives_receipts_in_order(app: tenure.App) -> None:
    send_email = send_to(app)
    jobs = [
        send_email.job("a@b.c"),
        send_email.options(delay=5).job("d@e.f"),
        send_email.options(key="k").job("first"),
        send_email.options(key="k").job("second"),
    ]

    receipts = app.enqueue_many(jobs)

    assert [r.id for r in receipts[:3]] == [job.id for job in jobs[:3]]
    assert receipts[3] == tenure.Receipt(jobs[2].id, True, "queued")
    assert [job.payload["to"] for job in app.find()] == ["first", "d@e.f", "a@b.c"]
    assert app.enqueue_many([]) == []


def test_enqueue_by_name_is_checked_against_the_signature(app: tenure.App) -> None:
    send_to(app)

    job = stored(app, app.enqueue("send_email", {"to": "a@b.c"}, delay=1, key="k"))

    assert (job.payload, job.key) == ({"to": "a@b.c"}, "k")
    with pytest.raises(tenure.ArgumentError, match="unexpected argument 'too'"):
        app.enqueue("send_email", {"too": "a@b.c"})


def test_types_json_has_no_word_for_come_back_as_they_were(app: tenure.App) -> None:
    @dataclasses.dataclass
    class Point:
        x: int
        y: int

    seen: list[object] = []

    def travel(to: Point, when: datetime.datetime, tags: list[str]) -> None:
        seen.extend([to, when, tags])

    travel.__annotations__ = {"to": Point, "when": datetime.datetime, "tags": list[str]}
    when = datetime.datetime(2026, 1, 2, 3, 4, tzinfo=datetime.UTC)
    app.task(travel).enqueue(Point(1, 2), when, ["a"])

    app.run_worker(drain=True)

    assert seen == [Point(1, 2), when, ["a"]]


async def test_async_twins(app: tenure.App) -> None:
    send_email = send_to(app)
    with tenure.acting(org="acme", request_id="r-1"):
        receipt = await send_email.aenqueue("a@b.c")
    named = await app.aenqueue("send_email", {"to": "d@e.f"})

    job = await app.aget(receipt.id)
    assert job is not None
    assert (job.org, job.request_id) == ("acme", "r-1")  # the context is copied along
    assert {found.id for found in await app.afind(status="queued")} == {receipt.id, named.id}
    assert await app.acancel(named.id) == "cancelled"
    with app.worker():
        assert await app.aresult(receipt.id, timeout=10) == "welcome to a@b.c"


def test_the_context_of_a_request_travels(app: tenure.App) -> None:
    send_email = send_to(app)
    with tenure.acting(org="acme", actor=("user", "7"), request_id="r", correlation_id="c"):
        job = stored(app, send_email.enqueue("a@b.c"))
        inner = stored(app, send_email.options(org="other").enqueue("a@b.c"))
    outside = stored(app, send_email.enqueue("a@b.c"))

    assert (job.org, job.actor, job.request_id, job.correlation_id) == (
        "acme", ("user", "7"), "r", "c",
    )  # fmt: skip
    assert (inner.org, inner.actor) == ("other", ("user", "7"))
    assert (outside.org, outside.actor) == ("default", ("system", "tenure"))


@pytest.mark.parametrize("category", sorted(CATEGORIES))
def test_a_category_routes_and_retries(app: tenure.App, category: str) -> None:
    @app.task(category=category)
    def work() -> None: ...

    job = stored(app, work.enqueue())

    kind = CATEGORIES[category]
    assert (job.category, job.queue, job.max_attempts) == (
        category, kind.queue, kind.retry.attempts,
    )  # fmt: skip


@pytest.mark.parametrize("category", sorted(CATEGORIES))
def test_a_category_says_how_long_a_key_is_remembered(
    app: tenure.App, place: Place, category: str
) -> None:
    @app.task(category=category)
    def work() -> None: ...

    work.options(key="k").enqueue()

    days = 30 if category in ("planning", "export", "import") else 7
    assert place.sql("SELECT ttl_ms FROM tenure_keys") == [(days * 86_400_000,)]


def test_the_priority_of_a_task_that_names_none(app: tenure.App) -> None:
    @app.task
    def work() -> None: ...

    assert stored(app, work.enqueue()).priority == 5
    assert stored(app, app.enqueue("work")).priority == 5
    assert stored(app, work.options(priority=2).enqueue()).priority == 2


def test_the_envelope_has_the_names_of_the_contract_and_no_other(app: tenure.App) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    later = datetime.datetime(2031, 2, 3, 4, 5, 6, 789_000, tzinfo=datetime.UTC)
    who = {"org": "acme", "project": "p-1", "actor": ("user", "7")}
    send_email = send_to(app)
    with tenure.acting(**who, request_id="r", correlation_id="c", traceparent=trace):
        receipt = send_email.options(key="k", at=later).enqueue("a@b.c")
        plain = send_email.enqueue("a@b.c")

    job = stored(app, receipt)
    assert job.envelope == {
        "job_id": str(job.uuid), "job_type": "send_email", "org_id": "acme", "project_id": "p-1",
        "actor_type": "user", "actor_id": "7", "request_id": "r", "correlation_id": "c",
        "idempotency_key": "k", "payload": {"to": "a@b.c"},
        "created_at": job.created_at.strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z",
        "scheduled_for": "2031-02-03T04:05:06.789Z", "traceparent": trace,
    }  # fmt: skip
    assert stored(app, plain).envelope["scheduled_for"] is None
    assert stored(app, plain).traceparent == trace


def test_find_walks_pages_newest_first(app: tenure.App) -> None:
    send_email = send_to(app)
    receipts = app.enqueue_many([send_email.job(str(n)) for n in range(250)])

    found = [job.id for job in app.find(type="send_email", queue="q:notifications")]

    assert found == [receipt.id for receipt in reversed(receipts)]
    with pytest.raises(tenure.ConfigError, match="status is one of"):
        app.find(status="done")


# -- keys that hold while their job is unfinished -------------------------------------------------


def test_unique_pending_is_over_with_its_job(app: tenure.App) -> None:
    send_email = send_to(app).options(key="digest:7", unique="pending")
    first = send_email.enqueue("a@b.c")

    assert send_email.enqueue("a@b.c") == (first.id, True, "queued")
    with pytest.raises(tenure.DuplicateKey, match="digest:7"):
        app.enqueue(
            "send_email", {"to": "x"}, key="digest:7", unique="pending", on_conflict="error"
        )
    app.run_worker(drain=True)
    second = send_email.enqueue("a@b.c")

    assert not second.duplicate
    assert stored(app, second).status == "queued"


# -- ids that are none, actors, names of long ago -------------------------------------------------


@pytest.mark.parametrize("id", ["nonsense", "", 7, None, "01HZZ", b"x", "'; DROP TABLE", "x" * 999])
async def test_what_is_no_id_is_nobodys(app: tenure.App, id: object) -> None:
    app.migrate()

    assert app.get(id) is None
    assert await app.aget(id) is None
    assert id is None or [*app.events(id)] == []
    for call in (app.cancel, app.discard, app.replay, lambda id: app.replay(id, {}), app.result):
        with pytest.raises(tenure.JobNotFound, match="there is no job") as refused:
            call(id)
        assert len(str(refused.value)) < 120
    with pytest.raises(tenure.JobNotFound):
        await app.aresult(id)


def test_an_operators_call_is_audited_as_who_acts(app: tenure.App) -> None:
    send_email = send_to(app)
    receipts = [send_email.enqueue("a") for _ in range(3)]

    with tenure.acting(actor=("user", "7")):
        app.cancel(receipts[0].id)
        app.cancel(receipts[1].id, actor=("api_key", "ci"))
        app.pause("exports", reason="x")
        app.resume("exports")
    app.cancel(receipts[2].id)

    acts = [(e.kind, *e.actor) for e in app.events() if e.kind != "job.enqueued"]
    assert acts == [
        ("job.cancelled", "user", "7"),
        ("job.cancelled", "api_key", "ci"),
        ("queue.paused", "user", "7"),
        ("queue.resumed", "user", "7"),
        ("job.cancelled", "system", "tenure"),
    ]


def test_a_renamed_task_runs_what_was_enqueued_under_its_old_name(
    make_app: Callable[..., tenure.App],
) -> None:
    before, after, ran = make_app(), make_app(), []

    @before.task
    def send(to: str) -> None: ...

    @after.task(aliases=["send", "post"])
    def send_email(to: str) -> str:
        ran.append(to)
        return to

    old = send.enqueue("old")
    new = after.enqueue("post", {"to": "new"})
    after.run_worker(drain=True)

    assert sorted(ran) == ["new", "old"]
    assert (stored(after, old).type, stored(after, new).type) == ("send", "send_email")
    assert after.result(old.id) == "old"
    types = {r.type: r.runs for r in after.store.rollups(since_ms=0) if r.outcome == "completed"}
    assert types == {"send": 1, "send_email": 1}  # under the name the job has
