"""Rows of the SQL stores as nouns. Both dialects return the same columns in the same order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, assert_never

from tenure import outcome, payload
from tenure.errors import JobError, PayloadError
from tenure.job import Actor, ClaimedJob, NewJob, Terms, moment
from tenure.store import DeadGroup, Filter, Finding, QueueInfo, Turn, WorkerInfo
from tenure.stores.listing import CAP, capped

if TYPE_CHECKING:
    from tenure.stored import Event, Job


UNREADABLE = "unreadable"  # in place of a value: why it cannot be shown


def decoded(text: str | None) -> Any:
    """A JSON value of a row. One that came in by other hands may be none, or nested so deeply that
    whoever prints or copies it would fail: then it says so, and the row can be read."""
    if text is None:
        return None
    try:
        value = payload.decode(text)
        if text.count("[") + text.count("{") > payload.MAX_DEPTH and payload.too_deep(value):
            return {UNREADABLE: f"nested deeper than {payload.MAX_DEPTH} levels"}
    except PayloadError as error:
        return {UNREADABLE: str(error)}
    return value


def _object(text: str) -> dict[str, Any]:
    value = decoded(text)
    return value if isinstance(value, dict) else {UNREADABLE: "not a JSON object"}


def job_from(row: tuple[Any, ...]) -> Job:
    from tenure.stored import Job  # 5 ms, for who reads: who only enqueues does not need it

    (
        id, type_, status, queue, priority, category, arguments, result, error, error_code,
        attempts, max_attempts, crashes, lease_no, lease_owner, lease_until, scheduled_at,
        created_at, updated_at, started_at, completed_at, timeout_ms, org, project, actor_type,
        actor_id, request_id, correlation_id, traceparent, key, progress, parent, cancel_at,
        error_place, losses, asked_at, death, traceback, after_failed, after,
    ) = row  # fmt: skip
    return Job(
        id=id,
        type=type_,
        status=status,
        queue=queue,
        priority=priority,
        category=category,
        payload=_object(arguments),
        result=decoded(result),
        error=error,
        error_code=error_code,
        attempts=attempts,
        max_attempts=max_attempts,
        crashes=crashes,
        lease_no=lease_no,
        lease_owner=lease_owner,
        lease_until=moment(lease_until),
        scheduled_at=moment(scheduled_at),  # type: ignore[arg-type]
        created_at=moment(created_at),  # type: ignore[arg-type]
        updated_at=moment(updated_at),  # type: ignore[arg-type]
        started_at=moment(started_at),
        completed_at=moment(completed_at),
        timeout=timeout_ms / 1000,
        org=org,
        project=project,
        actor=Actor(actor_type, actor_id),
        request_id=request_id,
        correlation_id=correlation_id,
        traceparent=traceparent,
        key=key,
        progress=decoded(progress),
        parent=parent,
        after=tuple(after),
        cancel_requested=cancel_at is not None,
        error_place=error_place,
        losses=losses,
        scheduled_for=moment(asked_at),
        death=death,
        traceback=traceback,
        after_failed=after_failed,
    )


def event_from(row: tuple[Any, ...]) -> Event:
    from tenure.stored import Event

    (
        seq, kind, at, job_id, type_, attempt, lease_no, org, project, actor_type, actor_id,
        request_id, correlation_id, worker, data,
    ) = row  # fmt: skip
    return Event(
        seq=seq,
        kind=kind,
        at=moment(at),  # type: ignore[arg-type]
        job_id=job_id,
        type=type_,
        attempt=attempt,
        lease_no=lease_no,
        org=org,
        project=project,
        actor=Actor(actor_type, actor_id),
        request_id=request_id,
        correlation_id=correlation_id,
        worker=worker,
        data=decoded(data),
    )


_BY_DUE_TIME = attrgetter("priority", "ready_at", "id")


def in_order(jobs: list[ClaimedJob]) -> list[ClaimedJob]:
    """Priority, then orgs in turn, then due time, then id."""
    jobs.sort(key=_BY_DUE_TIME)
    if len({job.org for job in jobs}) < 2:
        return jobs
    turns: dict[tuple[int, str], int] = {}
    placed = []
    for job in jobs:
        turn = turns[job.priority, job.org] = turns.get((job.priority, job.org), 0) + 1
        placed.append((job.priority, turn, job.ready_at, job.id, job))
    placed.sort()
    return [entry[-1] for entry in placed]


def workers_from(rows: Iterable[tuple[Any, ...]]) -> list[WorkerInfo]:
    return [WorkerInfo._make((*row[:12], _object(row[12]), row[13])) for row in rows]


def turns_from(rows: Iterable[tuple[Any, ...]]) -> dict[str, Turn]:
    return {name: Turn(at, _object(note)) for name, at, note in rows}


def queues_from(
    counted: Iterable[tuple[Any, ...]], switches: Sequence[tuple[Any, ...]]
) -> list[QueueInfo]:
    """`counted`: several rows a queue, to be added up, each with the first due time and the time
    they were counted at. `switches`: what is known of queues that may be empty."""
    counts: dict[str, list[int]] = {name: [0] * 5 for name, *_ in switches}
    oldest: dict[str, int] = {}
    for queue, *numbers, first, now in counted:
        sums = counts.setdefault(queue, [0] * 5)
        counts[queue] = [a + b for a, b in zip(sums, numbers, strict=True)]
        if first is not None and first <= now:
            oldest[queue] = max(now - first, oldest.get(queue, 0))
    paused = {name: rest for name, *rest in switches}
    found = []
    for name in sorted(counts):
        figures = dict(zip(QueueInfo._fields[1:6], counts[name], strict=True))
        shown, over = capped(figures)
        switch = paused.get(name, [None] * 3)
        found.append(QueueInfo._make((name, *shown.values(), oldest.get(name), *switch, over)))
    return found


def groups_from(rows: Iterable[tuple[Any, ...]], where: Filter, limit: int) -> list[DeadGroup]:
    """Groups of several queues put together, largest first; narrowed by what all of a group have in
    common."""
    found: dict[tuple[str, ...], DeadGroup] = {}
    for row in rows:
        new = DeadGroup(*row)
        if where.status not in (None, new.status) or where.place not in (None, new.place):
            continue
        old = found.get(new[:4])
        if old is not None:
            latest = new if new.last_ms >= old.last_ms else old
            jobs, first = old.jobs + new.jobs, min(old.first_ms, new.first_ms)
            new = latest._replace(jobs=jobs, first_ms=first)
        found[new[:4]] = new
    groups = sorted(found.values(), key=lambda group: (-group.jobs, -group.last_ms))[:limit]
    return [group._replace(jobs=min(group.jobs, CAP), capped=group.jobs > CAP) for group in groups]


def waiting_for_the_dead(row: tuple[Any, ...]) -> list[Finding]:
    """What `doctor` says of jobs that go on only when somebody decides: how many, and the first of
    them with what it waits for and how that has ended."""
    jobs, job, needs, status = row
    if not jobs:
        return []
    waits = f"job {job} waits" if jobs == 1 else f"{jobs:,} jobs wait, like {job},"
    how = "has failed" if status == "failed" else "is a dead letter"
    return [
        Finding(
            "waiting",
            "warning",
            f"{waits} for {needs}, which {how} but may still be replayed",
            f"`tenure replay {needs}` runs it again; `tenure discard {needs}` gives it up and "
            'cancels what waits for it; after_failed="cancel" does so by itself',
        )
    ]


def shared_parameters(terms: Terms) -> dict[str, Any]:
    """What jobs of the same terms have in common."""
    return {
        "type": terms.type,
        "queue": terms.queue,
        "priority": terms.priority,
        "category": terms.category,
        "max_attempts": terms.max_attempts,
        "timeout_ms": terms.timeout_ms,
        "key_ttl_ms": terms.key_ttl_ms,
        "org": terms.org,
        "project": terms.project,
        "actor_type": terms.actor.type,
        "actor_id": terms.actor.id,
        "request_id": terms.request_id or None,
        "correlation_id": terms.correlation_id or None,
        "traceparent": terms.traceparent,
        "parent": terms.parent,
        "after_failed": terms.after_failed,
        "remark": terms.remark,
    }


def refuse_circles(jobs: list[NewJob]) -> None:
    """Jobs already stored cannot wait for new ones, so a circle can only be within a batch."""
    waiting = {job.id: set(job.after) for job in jobs}
    while waiting:
        free = [id for id, needs in waiting.items() if not needs & waiting.keys()]
        if not free:
            raise JobError(
                f"{len(waiting)} jobs of this batch wait for each other in a circle: none of them "
                "could ever run"
            )
        for id in free:
            del waiting[id]


def refuse_twins(jobs: Sequence[NewJob]) -> None:
    """A job that stands in a batch twice: stored once, one of its receipts would be a lie."""
    ids = [job.id for job in jobs]
    if len(set(ids)) < len(ids):
        ((twin, times),) = Counter(ids).most_common(1)
        raise JobError(
            f"job {twin} is in this batch {times} times: `task.job(…)` makes a new one for each "
            "enqueue"
        )


class FinishRow(NamedTuple):
    """One finish as the statement `finish_fence` reads it; trailing defaults are left out."""

    id: str
    lease_no: int
    duration_ms: int
    outcome: str
    status: str
    event: str
    result: str | None = None
    error: str | None = None
    error_code: str | None = None
    error_place: str | None = None
    delay_ms: int | None = None  # None keeps the job's place in the queue
    refund: int = 0  # attempts given back
    crash_limit: int | None = None  # charged a crash; at the limit a dead letter, poison
    loss_limit: int | None = None  # charged a loss; at the limit a dead letter, lost
    traceback: str | None = None


def finish_row(end: outcome.Ended) -> tuple[object, ...]:
    id, lease_no, lasted, how = end.id, end.lease_no, end.duration_ms, end.outcome
    match how:
        case outcome.Completed(result=result):  # the hot path: as short as it gets
            return (id, lease_no, lasted, "completed", "completed", "job.succeeded", result)
        case outcome.Retried(delay=delay, failure=why):
            row = FinishRow(id, lease_no, lasted, "retried", "queued", "job.retried")
            return _failed(row, why)._replace(delay_ms=int(delay * 1000))
        case outcome.Snoozed(delay=delay):
            row = FinishRow(id, lease_no, lasted, "snoozed", "queued", "job.snoozed")
            return row._replace(delay_ms=int(delay * 1000), refund=1)
        case outcome.Failed(failure=why):
            return _failed(FinishRow(id, lease_no, lasted, "failed", "failed", "job.failed"), why)
        case outcome.Dead(failure=why):
            row = FinishRow(id, lease_no, lasted, "dead", "dead_letter", "job.deadlettered")
            return _failed(row, why)
        case outcome.Cancelled(reason=reason):
            row = FinishRow(id, lease_no, lasted, "cancelled", "cancelled", "job.cancelled")
            return row._replace(error=reason, error_code="cancelled")
        case outcome.Released(delay=delay):
            row = FinishRow(id, lease_no, lasted, "released", "queued", "job.released")
            return row._replace(delay_ms=int(delay * 1000) or None, refund=1)
        case outcome.Crashed(reason=reason, limit=limit):
            row = FinishRow(id, lease_no, lasted, "crashed", "queued", "job.rescued")
            return row._replace(error=reason, error_code="crashed", crash_limit=limit)
        case _:
            assert_never(how)


def _failed(row: FinishRow, why: outcome.Failure) -> FinishRow:
    return row._replace(
        error=why.message, error_code=why.code, error_place=why.place, traceback=why.traceback
    )


def death_handle(type_: str, status: str, code: str | None, place: str | None) -> str:
    """The handle of a group of dead jobs: those of one type that died of the same thing."""
    from hashlib import sha256

    return sha256(f"{type_}|{status}|{code or ''}|{place or ''}".encode()).hexdigest()[:16]


def lost_row(id: str, lease_no: int, reason: str, loss_limit: int | None) -> FinishRow:
    """Back to the queue after the death of its worker; charged if there is a limit."""
    row = FinishRow(id, lease_no, 0, "rescued", "queued", "job.rescued")
    if loss_limit is None:
        return row
    return row._replace(error=reason, error_code="lost", loss_limit=loss_limit)
