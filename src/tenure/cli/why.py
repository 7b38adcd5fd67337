"""One sentence to the question operators ask: why isn't this job running?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tenure.cli.output import count, relative, span, stamp
from tenure.job import DEAD, moment

if TYPE_CHECKING:
    import datetime

    from tenure.job import Job
    from tenure.store import QueueInfo, WorkerInfo

# A worker is given up a little after its lease ends (promise 4); until then it counts as alive.
GRACE_MS = 10_000
IDS_SHOWN = 3


def why(
    job: Job,
    workers: Sequence[WorkerInfo],
    queues: Sequence[QueueInfo],
    now: datetime.datetime,
    *,
    needs: Mapping[str, str] | None = None,
) -> str:
    """`needs`: what it runs after, id -> status."""
    unmet = {id: status for id, status in (needs or {}).items() if status != "completed"}
    if job.status == "queued" and unmet:
        return _waiting(job, unmet)
    if job.status == "queued":
        return _queued(job, workers, queues, now)
    if job.status == "in_progress":
        return _running(job, workers, now)
    return _ended(job, now)


def is_live(worker: WorkerInfo, now: datetime.datetime) -> bool:
    silent = now.timestamp() * 1000 - worker.seen_at
    return worker.dead_at is None and silent <= worker.lease_ms + GRACE_MS


def serves(worker: WorkerInfo, queue: str) -> bool:
    queues = worker.meta.get("queues")
    return queues is None or queue in queues


def knows(worker: WorkerInfo, type: str) -> bool:
    types = worker.meta.get("types")
    return types is None or type in types


# ------------------------------------------------------------------------------- queued


def _queued(
    job: Job, workers: Sequence[WorkerInfo], queues: Sequence[QueueInfo], now: datetime.datetime
) -> str:
    queue = next((queue for queue in queues if queue.name == job.queue), None)
    paused = queue is not None and queue.paused_at is not None
    if job.scheduled_at > now:
        also = f"; queue q:{job.queue} is paused, too" if paused else ""
        return _later(job, now) + also + "."
    if queue is not None and paused:
        return _paused(queue, now)
    return _no_worker(job, workers, now) or _its_turn(job, workers, queue, now)


def _waiting(job: Job, unmet: Mapping[str, str]) -> str:
    """For which jobs, and whether that can still come to an end by itself."""
    ids = ", ".join([*unmet][:IDS_SHOWN]) + (", …" if len(unmet) > IDS_SHOWN else "")
    sentence = f"It waits for {count(len(unmet), 'job')}: {ids}"
    dead = [id for id, status in unmet.items() if status in DEAD]
    never = [id for id, status in unmet.items() if status in ("cancelled", "gone")]
    if never:
        return f"{sentence}; {never[0]} will never complete, so the next live worker cancels it."
    if dead:
        first = dead[0]
        how = "has failed" if unmet[first] == "failed" else "is a dead letter"
        if job.after_failed == "cancel":
            return (
                f'{sentence}; {first} {how}, and it was enqueued with after_failed="cancel": '
                "the next live worker cancels it."
            )
        more = f" (so may {count(len(dead) - 1, 'other')})" if len(dead) > 1 else ""
        return (
            f"{sentence}; {first} {how}, but may still be replayed{more}: `tenure replay {first}` "
            f"runs it again, `tenure discard {first}` gives it up and cancels this one."
        )
    return f"{sentence}."


def _later(job: Job, now: datetime.datetime) -> str:
    due = f"{stamp(job.scheduled_at)} ({relative(job.scheduled_at, now)})"
    if job.attempts and job.error:
        tried = f"attempt {job.attempts} of {job.max_attempts}"
        return f"It is retried at {due} after {tried} ended in an error: {_error(job)}"
    return f"It is not due until {due}"


def _paused(queue: QueueInfo, now: datetime.datetime) -> str:
    since = moment(queue.paused_at)
    by = f" by {queue.paused_by}" if queue.paused_by else ""
    because = f" because: {queue.pause_reason}" if queue.pause_reason else ""
    when = f" since {stamp(since)} ({relative(since, now)})" if since else ""
    return (
        f"Queue q:{queue.name} is paused{by}{when}{because}; "
        f"`tenure queues resume {queue.name}` lets it go on."
    )


def _no_worker(job: Job, workers: Sequence[WorkerInfo], now: datetime.datetime) -> str | None:
    """What is missing among the workers, if anything."""
    live = [worker for worker in workers if is_live(worker, now)]
    if not live:
        return "No live worker: start one with `tenure -A module:app worker`."
    serving = [worker for worker in live if serves(worker, job.queue)]
    if not serving:
        others = sorted({name for worker in live for name in worker.meta.get("queues") or ()})
        return (
            f"No live worker serves queue q:{job.queue} ({count(len(live), 'live worker')} "
            f"for {', '.join(f'q:{name}' for name in others)})."
        )
    if not any(knows(worker, job.type) for worker in serving):
        return (
            f"No live worker that serves queue q:{job.queue} knows type {job.type!r}: "
            "deploy the code that has it, or correct the task's name."
        )
    return None


def _its_turn(
    job: Job,
    workers: Sequence[WorkerInfo],
    queue: QueueInfo | None,
    now: datetime.datetime,
) -> str:
    able = [w for w in workers if is_live(w, now) and serves(w, job.queue) and knows(w, job.type)]
    waiting = span(max(0.0, (now - job.scheduled_at).total_seconds()))
    others = max(0, queue.ready - 1) if queue is not None else 0
    capped = queue is not None and "ready" in queue.capped
    among = f" among {count(others, 'other due job', capped=capped)}" if others else ""
    return (
        f"It has been due for {waiting} and waits for its turn in queue q:{job.queue}{among}; "
        f"{count(len(able), 'live worker')} {'serves' if len(able) == 1 else 'serve'} it."
    )


# ------------------------------------------------------------------------------- running, ended


def _running(job: Job, workers: Sequence[WorkerInfo], now: datetime.datetime) -> str:
    worker = next((worker for worker in workers if worker.id == job.lease_owner), None)
    since = ""
    if job.started_at is not None:
        since = f" since {stamp(job.started_at)} ({span((now - job.started_at).total_seconds())})"
    if worker is None or not is_live(worker, now):
        seen = moment(worker.seen_at) if worker is not None else None
        silent = f", last heard of {relative(seen, now)}" if seen is not None else ""
        return (
            f"It was running on worker {job.lease_owner or 'unknown'}{since}, which is gone"
            f"{silent}; a live worker will put it back into the queue."
        )
    asked = "; it was asked to stop" if job.cancel_requested else ""
    tried = f"attempt {job.attempts} of {job.max_attempts}"
    return f"It is running on worker {job.lease_owner}{since}, {tried}{asked}."


def _ended(job: Job, now: datetime.datetime) -> str:
    when = job.completed_at or job.updated_at
    at = f"{stamp(when)} ({relative(when, now)})"
    if job.status == "completed":
        took = ""
        if job.started_at is not None:
            took = f", it took {span((when - job.started_at).total_seconds())}"
        return f"It finished at {at} in attempt {job.attempts}{took}."
    if job.status == "cancelled":
        verb = "discarded" if job.error_code == "discarded" else "cancelled"
        return f"It was {verb} at {at}{f': {job.error}' if job.error else ''}."
    again = f"`tenure replay {job.id}` runs it again, `tenure discard {job.id}` gives it up."
    if job.status == "failed":
        return f"It failed for good at {at}: {_error(job)}; {again}"
    if job.error_code == "poison":
        return f"It is a dead letter since {at}: {job.crashes} processes died running it; {again}"
    if job.error_code == "lost":
        lost = f"{count(job.losses, 'worker')} ended while they held it"
        return f"It is a dead letter since {at}: {lost}, the last time {_error(job)}; {again}"
    return (
        f"It is a dead letter since {at}: {job.attempts} of {job.max_attempts} attempts used up, "
        f"the last error was {_error(job)}; {again}"
    )


def _error(job: Job) -> str:
    text = job.error or "no message"
    code = job.error_code
    return text if code is None or code in text else f"{text} [{code}]"
