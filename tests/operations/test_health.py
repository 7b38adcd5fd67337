"""The health report, and what can be found wrong."""

from __future__ import annotations

import datetime
import json

import pytest

import tenure
from contract.builders import FAILURE, HOUR, OPERATOR, Clock, ended_job, put, worker
from tenure.errors import StoreUnavailable
from tenure.operations import findings, health
from tenure.operations.encoding import to_json
from tenure.operations.health import Health
from tenure.operations.scope import Scope
from tenure.outcome import Dead
from tenure.store import Store


@pytest.fixture
def room(app: tenure.App, store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Health:
    """With the clock of the store: whether a worker is live is a matter of time."""
    monkeypatch.setattr(app, "now_ms", clock)
    found = Health(app, Scope())
    found.store = store
    return found


def checks(room: Health) -> dict[str, str]:
    report = room.report()
    worst = min(
        (check.status for check in report.checks.values()),
        key=("unhealthy", "degraded", "healthy").index,
    )
    assert report.status == worst
    return {name: check.status for name, check in report.checks.items()}


def test_healthy(room: Health, store: Store) -> None:
    worker(store)
    put(store)
    report = room.report()

    assert (report.status, report.active_workers, report.total_queues) == ("healthy", 1, 1)
    assert (report.oldest_waiting, report.dead_letters) == (datetime.timedelta(0), 0)
    assert json.loads(json.dumps(report.report)) == report.report
    assert list(report.report["checks"]) == ["store", "workers", "queues", "deadLetters"]
    assert {name: report.report[name] for name in report.report if name != "checks"} == {
        "status": "healthy", "activeWorkers": 1, "totalQueues": 1, "oldestWaitingJob": 0.0,
        "deadLetterCount": 0,
    }  # fmt: skip


def test_workers(room: Health, store: Store) -> None:
    assert checks(room)["workers"] == "unhealthy"
    worker(store)
    assert checks(room)["workers"] == "healthy"
    assert room.report(least_workers=2).checks["workers"].status == "degraded"


def test_queues(room: Health, store: Store, clock: Clock) -> None:
    put(store)
    worker(store, meta={"queues": ["critical"]})
    assert room.report().checks["queues"].message == "due jobs that no live worker takes: q:default"
    everything = worker(store)
    assert checks(room)["queues"] == "healthy"
    clock.advance(2 * HOUR)
    store.renew(everything)
    report = room.report()
    assert report.checks["queues"].status == "degraded"
    assert report.oldest_waiting == datetime.timedelta(hours=2)
    store.pause("default", actor=OPERATOR, reason="")
    assert checks(room)["queues"] == "healthy"


def test_dead_letters(room: Health, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    me = worker(store)
    ended_job(store, me, Dead(FAILURE))
    assert checks(room)["dead_letters"] == "degraded"
    monkeypatch.setattr(findings, "MANY_DEAD", 2)
    ended_job(store, me, Dead(FAILURE))
    assert checks(room)["dead_letters"] == "unhealthy"
    assert room.report().dead_letters == 2


def test_a_slow_store_and_one_out_of_reach(room: Health, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "SLOW_SECONDS", 0.0)
    assert checks(room)["store"] == "degraded"

    def away() -> None:
        raise StoreUnavailable("no server at db:5432")

    monkeypatch.setattr(room.store, "queue_names", away)
    report = room.report()
    assert (report.status, report.active_workers) == ("unhealthy", None)
    assert report.checks["store"].message == "no server at db:5432"


def test_findings_are_values(room: Health, store: Store, app: tenure.App) -> None:
    put(store)
    found = {finding.check: finding for finding in room.findings()}

    assert (found["workers"].level, found["workers"].remedy) == (
        "problem",
        "start one: tenure -A module:app worker",
    )
    assert found["types"].message == "queued jobs of types this app does not have: noop (1)"
    assert to_json(found["backlog"]) == {
        "check": "backlog",
        "level": "ok",
        "message": "the oldest due job has been waiting for 0 ms, q:default",
        "remedy": None,
    }
    assert "types" not in {finding.check for finding in room.findings(knows_tasks=False)}

    @app.task
    def noop() -> None: ...

    assert "types" not in {finding.check for finding in room.findings()}
