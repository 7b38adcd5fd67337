"""Rows that came in by other hands than ours: no reader stops at them and no worker; what cannot be
run is set aside."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import tenure
from crash.harness import environment
from places import Place, only
from tenure.ids import to_uuid
from tenure.store import Filter

DEEP = "[" * 1500 + "]" * 1500
# No arguments a task could be called with.
UNREADABLE = {
    "nested": f'{{"x": {DEEP}}}',
    "a list": "[1, 2]",
    "a word": '"x"',
    "nothing": "null",
    "half a pair": '{"x": "\\ud800"}',
    "digits": '{"x": ' + "1" * 5000 + "}",
    "beyond": '{"x": 1e999}',
    "unknown": '{"x": 1, "y": 2}',
}
NO_JSON = {"no json": "{x", "empty": "", "not a number": '{"x": NaN}'}
ODD: dict[str, Any] = {
    "scheduled_at": [2**63 - 1, -(2**63)],
    "created_at": [2**62, -(2**63)],
    "updated_at": [2**63 - 1, -(2**63)],
    "started_at": [2**63 - 1, -1],
    "asked_at": [2**63 - 1, -(2**63)],
    "timeout_ms": [-5, 0, 2**63 - 1],
    "max_attempts": [-1, 0, 2**31 - 1],
    "attempts": [-1, 2**31 - 2],
    "payload": ['{"x": ' + "[" * 400 + "]" * 400 + "}", '{"x": ' + "9" * 300 + "}"],
    "org": ["a\nb", "\u202e"],
    "category": ["", "x" * 5000],
    "project": ["", "\x07"],
    "actor_type": ["", "nobody"],
    "actor_id": [""],
    "request_id": ["", "\n"],
    "correlation_id": [""],
    "traceparent": ["", "not one"],
    "key": ["", "held by nobody"],
    "after_failed": ["", "explode"],
    "cancel_reason": ["\x1b[2J"],
    "result": [DEEP, '"\\u0000"'],
    "progress": [DEEP, "[1]", '{"percent": "many"}', '{"percent": 1e308}'],
    "error": ["\x1b[2J"],
}


@pytest.fixture
def app(place: Place) -> Iterator[tenure.App]:
    """Not looked through for secrets at the end, as others are: what is in it nobody can read."""
    app = tenure.App(place.url, lease_seconds=3, lease_renew_seconds=1)
    yield app
    app.close()


@pytest.fixture
def work(app: tenure.App) -> tenure.Task[..., Any]:
    app.migrate()

    @app.task(retry=tenure.Retry(attempts=2, backoff=tenure.Fixed(0)))
    def work(x: Any = None) -> Any:
        return 1

    return work


def spoil(place: Place, id: str, column: str, value: Any) -> None:
    name = id if place.kind == "sqlite" else str(to_uuid(id))
    place.sql(f"UPDATE tenure_jobs SET {column} = ? WHERE id = ?", value, name)


def cli(place: Place, *args: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-m", "tenure", "--url", place.url, *args],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=60,
        check=False,
    )
    assert "Traceback" not in ran.stderr, ran.stderr
    return f"{ran.stdout}{ran.stderr}"


def readable(app: tenure.App, ids: list[str]) -> None:
    """Every reader there is, over every row."""
    for id in ids:
        job = app.get(id)
        assert job is not None
        assert isinstance(job.payload, dict)
        assert job.envelope["job_id"] == str(to_uuid(id))
    assert {job.id for job in app.find()} >= set(ids)
    for status in ("queued", "completed", "dead_letter"):
        assert all(job.status == status for job in app.find(status=status))
    assert list(app.events())
    app.stats()


def all_read(app: tenure.App, place: Place, ids: list[str]) -> None:
    readable(app, ids)
    assert ids[0] in cli(place, "job", ids[0], "--json", "--payload")
    assert ids[0] in cli(place, "job", ids[0], "--payload")
    listed = cli(place, "jobs", "--payload", "--limit", "500")
    objects = cli(place, "jobs", "--json", "--payload", "--limit", "500")
    assert all(id in listed and id in objects for id in ids)
    for args in (("jobs", "--dead"), ("events", "--json"), ("stats",)):
        cli(place, *args)


def test_arguments_that_cannot_be_read(
    app: tenure.App, work: tenure.Task[..., Any], place: Place
) -> None:
    strange = UNREADABLE | (NO_JSON if place.kind == "sqlite" else {})
    ids = {name: work.enqueue(x=0).id for name in strange}
    for name, id in ids.items():
        spoil(place, id, "payload", strange[name])
    good = work.enqueue(x=1)
    readable(app, list(ids.values()))

    app.run_worker(drain=True)

    assert app.result(good.id) == 1
    jobs = {name: app.get(id) for name, id in ids.items()}
    assert {name: job.status for name, job in jobs.items() if job} == dict.fromkeys(
        ids, "failed"
    ), {name: (job.status, job.error) for name, job in jobs.items() if job}
    assert {job.error_code for job in jobs.values() if job} == {"VALIDATION_ERROR"}
    assert {job.attempts for job in jobs.values() if job} == {1}  # once is enough to know
    all_read(app, place, list(ids.values()))
    groups = app.store.dead_groups(Filter())
    assert sum(group.jobs for group in groups) == len(ids)


@only("sqlite", "PostgreSQL takes no text that is not of its encoding")
@pytest.mark.parametrize("column", ["payload", "error", "progress", "org", "type", "actor_id"])
def test_text_that_is_no_text(
    app: tenure.App, work: tenure.Task[..., Any], place: Place, column: str
) -> None:
    odd = work.enqueue(x=0)
    place.sql(f"UPDATE tenure_jobs SET {column} = CAST(x'7bff00fe' AS TEXT)")
    good = work.enqueue(x=1)
    readable(app, [odd.id, good.id])

    app.run_worker(drain=True)

    assert app.result(good.id) == 1
    readable(app, [odd.id, good.id])


def test_columns_with_values_that_make_no_sense(
    app: tenure.App, work: tenure.Task[..., Any], place: Place
) -> None:
    odd = [(column, value) for column, values in ODD.items() for value in values]
    ids = [work.enqueue(x=0).id for _ in odd]
    for id, (column, value) in zip(ids, odd, strict=True):
        spoil(place, id, column, value)
    good = work.enqueue(x=1)
    all_read(app, place, ids)
    for id in ids[::12]:
        shown = cli(place, "job", id)
        assert id in shown
        assert "\x1b" not in shown

    app.run_worker(drain=True)

    assert app.result(good.id) == 1
    readable(app, ids)
    left = [what for id, what in zip(ids, odd, strict=True) if not app.get(id).terminal]  # type: ignore[union-attr]
    assert left == []


def test_events_with_strange_data(
    app: tenure.App, work: tenure.Task[..., Any], place: Place
) -> None:
    id = work.enqueue(x=0).id
    for at, data in ((2**62, DEEP), (-(2**62), '"x"'), (0, '{"\\u0000": 1}')):
        place.sql(
            "INSERT INTO tenure_events (at, kind, org, actor_type, actor_id, data) "
            "VALUES (?, 'odd', '', '', '', ?)",
            at,
            data,
        )
    assert [event.kind for event in app.events()] == ["job.enqueued", "odd", "odd", "odd"]
    assert cli(place, "events").count("odd") == 3
    assert cli(place, "events", "--json").count('"odd"') == 3
    assert app.get(id) is not None


def test_a_need_with_a_strange_result(app: tenure.App, place: Place) -> None:
    app.migrate()
    seen = []

    @app.task
    def part() -> int:
        return 1

    @app.task
    def whole(ctx: tenure.Context) -> int:
        seen.append(ctx.results)
        return 2

    need = part.enqueue()
    app.run_worker(drain=True)
    place.sql("UPDATE tenure_history SET result = ?", DEEP)
    last = whole.options(after=[need.id]).enqueue()

    app.run_worker(drain=True)

    assert app.result(last.id) == 2
    assert len(seen) == 1
    assert app.get(need.id) is not None
