"""One sentence each: why isn't this job running?"""

from __future__ import annotations

import datetime
import json
from typing import Any

from tenure.job import Actor, Job
from tenure.operations.encoding import to_json
from tenure.operations.queues import Queue
from tenure.operations.why import Why, why
from tenure.operations.workers import Worker
from tenure.store import QueueInfo, WorkerInfo

NOW = datetime.datetime(2030, 1, 31, 12, 0, tzinfo=datetime.UTC)
NOW_MS = int(NOW.timestamp() * 1000)
ID = "01M7GEX6W23EXZBGJQ83K1S2QG"


def minutes(number: float) -> datetime.datetime:
    return NOW + datetime.timedelta(minutes=number)


def job(**over: Any) -> Job:
    given: dict[str, Any] = {
        "id": ID, "type": "send_email", "status": "queued", "queue": "default", "priority": 5,
        "category": "default", "payload": {"to": "secret"}, "result": None, "error": None,
        "error_code": None, "attempts": 0, "max_attempts": 5, "crashes": 0, "lease_no": 0,
        "lease_owner": None, "lease_until": None, "scheduled_at": minutes(-2),
        "created_at": minutes(-2), "updated_at": minutes(-2), "started_at": None,
        "completed_at": None, "timeout": 300.0, "org": "default", "project": None,
        "actor": Actor("user", "7"), "request_id": ID, "correlation_id": ID, "traceparent": None,
        "key": None, "progress": None, "parent": None,
    }  # fmt: skip
    return Job(**(given | over))


def worker(**over: Any) -> Worker:
    given: dict[str, Any] = {
        "no": 1, "id": "host:1:W", "host": "host", "boot": "b", "pid": 1, "pid_started": "1",
        "beat": 1, "lease_ms": 30_000, "started_at": NOW_MS - 60_000, "seen_at": NOW_MS - 1_000,
        "dead_at": None, "dead_reason": None,
        "meta": {"queues": None, "types": ["send_email"]}, "held": 0,
    }  # fmt: skip
    return Worker.of(WorkerInfo(**(given | over)), NOW)


def queue(**over: Any) -> Queue:
    given: dict[str, Any] = {
        "name": "default", "ready": 1, "later": 0, "waiting": 0, "running": 0, "dead": 0,
        "oldest_ms": 1000, "paused_at": None, "paused_by": None, "pause_reason": None,
    }  # fmt: skip
    return Queue.of(QueueInfo(**(given | over)))


def answer(workers: Any = None, queues: Any = None, **over: Any) -> Why:
    workers = [worker()] if workers is None else workers
    return why(job(**over), workers, [queue()] if queues is None else queues, NOW)


def sentence(workers: Any = None, queues: Any = None, **over: Any) -> str:
    return answer(workers, queues, **over).sentence


def test_not_due() -> None:
    assert sentence(scheduled_at=minutes(4)) == (
        "It is not due until 2030-01-31 12:04:00Z (in 4 min)."
    )


def test_not_due_and_paused() -> None:
    paused = queue(paused_at=NOW_MS, paused_by="user:max")

    assert sentence(scheduled_at=minutes(4), queues=[paused]).endswith(
        "(in 4 min); queue q:default is paused, too."
    )


def test_a_retry_in_backoff() -> None:
    assert sentence(
        scheduled_at=minutes(4), attempts=2, error="TimeoutError: slow", error_code="TIMEOUT"
    ) == (
        "It is retried at 2030-01-31 12:04:00Z (in 4 min) after attempt 2 of 5 ended in an "
        "error: TimeoutError: slow [TIMEOUT]."
    )


def test_paused() -> None:
    paused = queue(paused_at=NOW_MS - 180_000, paused_by="user:max", pause_reason="mail is down")

    assert sentence(queues=[paused]) == (
        "Queue q:default is paused by user:max since 2030-01-31 11:57:00Z (3 min ago) because: "
        "mail is down; `tenure queues resume default` lets it go on."
    )


def test_no_live_worker() -> None:
    gone = [worker(dead_at=NOW_MS), worker(seen_at=NOW_MS - 3_600_000)]

    assert sentence([]).startswith("No live worker: start one")
    assert sentence(gone).startswith("No live worker: start one")


def test_a_worker_counts_as_alive_for_a_little_longer_than_its_lease() -> None:
    assert worker(seen_at=NOW_MS - 39_000).live
    assert not worker(seen_at=NOW_MS - 41_000).live


def test_nobody_serves_the_queue() -> None:
    elsewhere = worker(meta={"queues": ["critical"], "types": ["send_email"]})

    assert sentence([elsewhere]) == (
        "No live worker serves queue q:default (1 live worker for q:critical)."
    )


def test_nobody_knows_the_type() -> None:
    other_app = worker(meta={"queues": ["default"], "types": ["report"]})
    elsewhere = worker(meta={"queues": ["critical"], "types": ["send_email"]})

    assert sentence([other_app, elsewhere]).startswith(
        "No live worker that serves queue q:default knows type 'send_email'"
    )


def waiting(**needs: str) -> str:
    return why(job(after=tuple(needs)), [worker()], [queue()], NOW, needs=needs).sentence


def test_waiting_for_others() -> None:
    assert waiting(A="queued", B="in_progress") == "It waits for 2 jobs: A, B."
    assert waiting(**dict.fromkeys("ABCD", "queued")) == "It waits for 4 jobs: A, B, C, …."
    assert waiting(A="completed", B="queued") == "It waits for 1 job: B."
    assert "waits for its turn" in waiting(A="completed")


def test_waiting_for_one_that_is_dead() -> None:
    assert waiting(A="failed", B="queued") == (
        "It waits for 2 jobs: A, B; A has failed, but may still be replayed: `tenure replay A` "
        "runs it again, `tenure discard A` gives it up and cancels this one."
    )
    assert "A is a dead letter, but may still be replayed (so may 1 other): " in waiting(
        A="dead_letter", B="failed"
    )
    assert waiting(A="cancelled", B="failed") == (
        "It waits for 2 jobs: A, B; A will never complete, so the next live worker cancels it."
    )


def test_its_turn_comes() -> None:
    assert sentence(queues=[queue(ready=1300)]) == (
        "It has been due for 2 min and waits for its turn in queue q:default among 1,299 other due "
        "jobs; 1 live worker serves it."
    )


def test_its_turn_comes_among_more_than_were_counted() -> None:
    said = sentence(queues=[queue(ready=10_000, capped=("ready",))])

    assert "among 9,999+ other due jobs" in said


def test_running() -> None:
    running = {"status": "in_progress", "attempts": 1, "started_at": minutes(-3)}

    assert sentence(lease_owner="host:1:W", **running) == (
        "It is running on worker host:1:W since 2030-01-31 11:57:00Z (3 min), attempt 1 of 5."
    )
    assert sentence(lease_owner="host:1:W", cancel_requested=True, **running).endswith(
        "attempt 1 of 5; it was asked to stop."
    )


def test_running_on_a_worker_that_is_gone() -> None:
    silent = worker(seen_at=NOW_MS - 120_000)
    running = {"status": "in_progress", "attempts": 1, "started_at": minutes(-3)}

    assert sentence([silent], lease_owner="host:1:W", **running) == (
        "It was running on worker host:1:W since 2030-01-31 11:57:00Z (3 min), which is gone, "
        "last heard of 2 min ago; a live worker will put it back into the queue."
    )


def test_ended() -> None:
    ended = {"attempts": 1, "started_at": minutes(-3), "completed_at": minutes(-2)}

    assert sentence(status="completed", **ended) == (
        "It finished at 2030-01-31 11:58:00Z (2 min ago) in attempt 1, it took 60 s."
    )
    assert sentence(status="cancelled", error="no longer needed", **ended) == (
        "It was cancelled at 2030-01-31 11:58:00Z (2 min ago): no longer needed."
    )
    assert "It was discarded at" in sentence(status="cancelled", error_code="discarded", **ended)


def test_dead() -> None:
    dead = {"attempts": 5, "error": "boom", "completed_at": minutes(-2)}

    assert sentence(status="failed", **dead) == (
        f"It failed for good at 2030-01-31 11:58:00Z (2 min ago): boom; `tenure replay {ID}` "
        f"runs it again, `tenure discard {ID}` gives it up."
    )
    assert "5 of 5 attempts used up, the last error was boom;" in sentence(
        status="dead_letter", **dead
    )
    assert "3 processes died running it;" in sentence(
        status="dead_letter", crashes=3, error_code="poison", completed_at=minutes(-2)
    )
    lost = {"error": "its worker's process is gone", "error_code": "lost", "losses": 10}
    said = sentence(status="dead_letter", attempts=2, completed_at=minutes(-2), **lost)
    assert "10 workers ended while they held it" in said
    assert "attempts used up" not in said


def test_the_payload_is_never_in_the_sentence() -> None:
    for status in ("queued", "in_progress", "completed", "failed", "dead_letter", "cancelled"):
        assert "secret" not in sentence(status=status)


def test_a_dead_need_of_a_job_that_is_to_be_cancelled_with_it() -> None:
    other = "01M7GEX6W23EXZBGJQ83K1S2QH"
    waiting = job(after=(other,), after_failed="cancel")

    said = why(waiting, [worker()], [queue()], NOW, needs={other: "dead_letter"}).sentence
    assert said == (
        f"It waits for 1 job: {other}; {other} is a dead letter, and it was enqueued with "
        'after_failed="cancel": the next live worker cancels it.'
    )


def test_every_answer_has_a_code_of_its_own() -> None:
    ended = {"completed_at": minutes(-2), "attempts": 1}
    running = {"status": "in_progress", "started_at": minutes(-3), "lease_owner": "host:1:W"}
    elsewhere = worker(meta={"queues": ["critical"], "types": []})
    stranger = worker(meta={"queues": None, "types": ["report"]})
    answers = {
        "waiting": why(job(after=("A",)), [worker()], [queue()], NOW, needs={"A": "queued"}),
        "later": answer(scheduled_at=minutes(4)),
        "retrying": answer(scheduled_at=minutes(4), attempts=1, error="boom"),
        "paused": answer(queues=[queue(paused_at=NOW_MS)]),
        "no_worker": answer([]),
        "queue_not_served": answer([elsewhere]),
        "type_not_known": answer([stranger]),
        "its_turn": answer(),
        "running": answer(**running),
        "worker_gone": answer([], **running),
        "completed": answer(status="completed", **ended),
        "cancelled": answer(status="cancelled", **ended),
        "discarded": answer(status="cancelled", error_code="discarded", **ended),
        "failed": answer(status="failed", **ended),
        "dead_letter": answer(status="dead_letter", **ended),
        "poison": answer(status="dead_letter", error_code="poison", **ended),
        "lost": answer(status="dead_letter", error_code="lost", **ended),
    }

    assert [found.code for found in answers.values()] == list(answers)
    listed = (Why.__doc__ or "").split("queued ", 1)[1].replace("·", " ").split()
    assert set(answers) <= {*listed}
    for found in answers.values():
        assert json.loads(json.dumps(to_json(found)))["facts"]
