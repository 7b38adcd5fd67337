"""The answer to the question operators ask: why isn't this job running?"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tenure.job import DEAD
from tenure.operations.wording import count, relative, span, stamp
from tenure.record import Record

if TYPE_CHECKING:
    from tenure.operations.queues import Queue
    from tenure.operations.workers import Worker
    from tenure.stored import Job

IDS_SHOWN = 3


class Why(Record):
    """`code` is for programs, one of those below; `sentence` is for people and never quotes the
    job's arguments; `facts` are what the sentence is made of, as values.

    queued       waiting · later · retrying · paused · no_worker · queue_not_served · type_not_known
                 · its_turn
    in_progress  running · worker_gone
    ended        completed · cancelled · discarded · failed · dead_letter · poison · lost"""

    code: str
    sentence: str
    facts: Mapping[str, Any]


def why(
    job: Job,
    workers: Sequence[Worker],
    queues: Sequence[Queue],
    now: datetime.datetime,
    *,
    needs: Mapping[str, str] | None = None,
) -> Why:
    """`needs`: the jobs it runs after, id -> status."""
    unmet = {id: status for id, status in (needs or {}).items() if status != "completed"}
    if job.status == "queued" and unmet:
        return _waiting(job, unmet)
    if job.status == "queued":
        return _queued(job, workers, queues, now)
    if job.status == "in_progress":
        return _running(job, workers, now)
    return _ended(job, now)


# ------------------------------------------------------------------------------- queued


def _queued(
    job: Job, workers: Sequence[Worker], queues: Sequence[Queue], now: datetime.datetime
) -> Why:
    queue = next((queue for queue in queues if queue.name == job.queue), None)
    if job.scheduled_at > now:
        return _later(job, queue, now)
    if queue is not None and queue.paused:
        return _paused(queue, now)
    live = [worker for worker in workers if worker.live]
    return _no_worker(job, live) or _its_turn(job, live, queue, now)


def _waiting(job: Job, unmet: Mapping[str, str]) -> Why:
    """For which jobs, and whether that can still come to an end by itself."""
    ids = ", ".join([*unmet][:IDS_SHOWN]) + (", …" if len(unmet) > IDS_SHOWN else "")
    sentence = f"It waits for {count(len(unmet), 'job')}: {ids}"
    dead = [id for id, status in unmet.items() if status in DEAD]
    never = [id for id, status in unmet.items() if status in ("cancelled", "gone")]
    if never:
        sentence += f"; {never[0]} will never complete, so the next live worker cancels it"
    elif dead:
        sentence += _dead_need(job, unmet, dead)
    return Why("waiting", f"{sentence}.", {"needs": unmet, "dead": dead, "never": never})


def _dead_need(job: Job, unmet: Mapping[str, str], dead: Sequence[str]) -> str:
    first = dead[0]
    how = "has failed" if unmet[first] == "failed" else "is a dead letter"
    if job.after_failed == "cancel":
        return (
            f'; {first} {how}, and it was enqueued with after_failed="cancel": '
            "the next live worker cancels it"
        )
    more = f" (so may {count(len(dead) - 1, 'other')})" if len(dead) > 1 else ""
    return (
        f"; {first} {how}, but may still be replayed{more}: `tenure replay {first}` "
        f"runs it again, `tenure discard {first}` gives it up and cancels this one"
    )


def _later(job: Job, queue: Queue | None, now: datetime.datetime) -> Why:
    paused = queue is not None and queue.paused
    due = f"{stamp(job.scheduled_at)} ({relative(job.scheduled_at, now)})"
    also = f"; queue q:{job.queue} is paused, too" if paused else ""
    facts = {"due": job.scheduled_at, "paused": paused, "attempt": job.attempts}
    if job.attempts and job.error:
        tried = f"attempt {job.attempts} of {job.max_attempts}"
        sentence = f"It is retried at {due} after {tried} ended in an error: {_error(job)}{also}."
        return Why("retrying", sentence, facts | {"error": job.error, "error_code": job.error_code})
    return Why("later", f"It is not due until {due}{also}.", facts)


def _paused(queue: Queue, now: datetime.datetime) -> Why:
    since = queue.paused_at
    by = f" by {queue.paused_by}" if queue.paused_by else ""
    because = f" because: {queue.pause_reason}" if queue.pause_reason else ""
    when = f" since {stamp(since)} ({relative(since, now)})" if since else ""
    sentence = (
        f"Queue q:{queue.name} is paused{by}{when}{because}; "
        f"`tenure queues resume {queue.name}` lets it go on."
    )
    facts = {"by": queue.paused_by, "since": since, "reason": queue.pause_reason}
    return Why("paused", sentence, {"queue": queue.name} | facts)


def _no_worker(job: Job, live: Sequence[Worker]) -> Why | None:
    """What is missing among the live workers, if anything."""
    facts = {"queue": job.queue, "type": job.type, "live_workers": len(live)}
    if not live:
        sentence = "No live worker: start one with `tenure -A module:app worker`."
        return Why("no_worker", sentence, facts)
    serving = [worker for worker in live if worker.serves(job.queue)]
    if not serving:
        others = sorted({name for worker in live for name in worker.queues or ()})
        sentence = (
            f"No live worker serves queue q:{job.queue} ({count(len(live), 'live worker')} "
            f"for {', '.join(f'q:{name}' for name in others)})."
        )
        return Why("queue_not_served", sentence, facts | {"served": others})
    if not any(worker.knows(job.type) for worker in serving):
        sentence = (
            f"No live worker that serves queue q:{job.queue} knows type {job.type!r}: "
            "deploy the code that has it, or correct the task's name."
        )
        return Why("type_not_known", sentence, facts)
    return None


def _its_turn(job: Job, live: Sequence[Worker], queue: Queue | None, now: datetime.datetime) -> Why:
    able = sum(worker.serves(job.queue) and worker.knows(job.type) for worker in live)
    others = max(0, queue.ready - 1) if queue is not None else 0
    capped = queue is not None and "ready" in queue.capped
    among = f" among {count(others, 'other due job', capped=capped)}" if others else ""
    waited = span(max(0.0, (now - job.scheduled_at).total_seconds()))
    sentence = (
        f"It has been due for {waited} and waits for its turn in queue q:{job.queue}{among}; "
        f"{count(able, 'live worker')} {'serves' if able == 1 else 'serve'} it."
    )
    facts = {"queue": job.queue, "due": job.scheduled_at, "others": others, "capped": capped}
    return Why("its_turn", sentence, facts | {"able_workers": able})


# ------------------------------------------------------------------------------- running, ended


def _running(job: Job, workers: Sequence[Worker], now: datetime.datetime) -> Why:
    worker = next((worker for worker in workers if worker.id == job.lease_owner), None)
    since = ""
    if job.started_at is not None:
        since = f" since {stamp(job.started_at)} ({span((now - job.started_at).total_seconds())})"
    facts = {"worker": job.lease_owner, "since": job.started_at, "attempt": job.attempts}
    if worker is None or not worker.live:
        seen = None if worker is None else worker.seen_at
        silent = f", last heard of {relative(seen, now)}" if seen is not None else ""
        sentence = (
            f"It was running on worker {job.lease_owner or 'unknown'}{since}, which is gone"
            f"{silent}; a live worker will put it back into the queue."
        )
        return Why("worker_gone", sentence, facts | {"last_seen": seen})
    asked = "; it was asked to stop" if job.cancel_requested else ""
    tried = f"attempt {job.attempts} of {job.max_attempts}"
    sentence = f"It is running on worker {job.lease_owner}{since}, {tried}{asked}."
    return Why("running", sentence, facts | {"asked_to_stop": job.cancel_requested})


def _ended(job: Job, now: datetime.datetime) -> Why:
    when = job.completed_at or job.updated_at
    at = f"{stamp(when)} ({relative(when, now)})"
    facts = {"at": when, "attempt": job.attempts, "error": job.error, "error_code": job.error_code}
    if job.status == "completed":
        took = ""
        if job.started_at is not None:
            took = f", it took {span((when - job.started_at).total_seconds())}"
        return Why("completed", f"It finished at {at} in attempt {job.attempts}{took}.", facts)
    if job.status == "cancelled":
        code = "discarded" if job.error_code == "discarded" else "cancelled"
        reason = f": {job.error}" if job.error else ""
        return Why(code, f"It was {code} at {at}{reason}.", facts)
    code, sentence = _died(job, at)
    again = f"`tenure replay {job.id}` runs it again, `tenure discard {job.id}` gives it up."
    return Why(code, f"{sentence}; {again}", facts)


def _died(job: Job, at: str) -> tuple[str, str]:
    if job.status == "failed":
        return "failed", f"It failed for good at {at}: {_error(job)}"
    since = f"It is a dead letter since {at}"
    if job.error_code == "poison":
        return "poison", f"{since}: {job.crashes} processes died running it"
    if job.error_code == "lost":
        lost = f"{count(job.losses, 'worker')} ended while they held it"
        return "lost", f"{since}: {lost}, the last time {_error(job)}"
    tried = f"{job.attempts} of {job.max_attempts} attempts used up"
    return "dead_letter", f"{since}: {tried}, the last error was {_error(job)}"


def _error(job: Job) -> str:
    text = job.error or "no message"
    code = job.error_code
    return text if code is None or code in text else f"{text} [{code}]"
