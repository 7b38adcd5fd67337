"""What is wrong, and what to do about it: all that `tenure doctor` says of any store.

What a database says about itself is in its store (`inspect`); here is what its contract tells.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from tenure.job import DEAD
from tenure.operations.wording import count, span
from tenure.store import Finding

if TYPE_CHECKING:
    from tenure.operations.queues import Queue
    from tenure.operations.workers import Worker
    from tenure.store import Totals, Turn

OLDEST = datetime.timedelta(hours=1)
MANY_DEAD = 100
NAMES_SHOWN = 5
RETENTION_LATE = 900.0  # there is a pass a minute while a worker runs
Wish = tuple[str, float, float]  # audit, seconds of finished jobs, seconds of events


# ------------------------------------------------------------------------------- workers


def of_workers(workers: Sequence[Worker], queues: Sequence[Queue]) -> list[Finding]:
    live = [worker for worker in workers if worker.live]
    return [
        _live_workers(live, queues),
        *map(_failing, (worker for worker in live if worker.meta.get("failures"))),
        *map(_lost, (worker for worker in workers if worker.held and not worker.live)),
    ]


def _live_workers(live: Sequence[Worker], queues: Sequence[Queue]) -> Finding:
    if live:
        running = sum(worker.held for worker in live)
        text = f"{count(len(live), 'live worker')}, {count(running, 'job')} running"
        return Finding("workers", "ok", text)
    ready = sum(queue.ready for queue in queues)
    remedy = "start one: tenure -A module:app worker"
    if ready:
        capped = any("ready" in queue.capped for queue in queues)
        text = f"no live worker, and {count(ready, 'job', capped=capped)} due"
        return Finding("workers", "problem", text, remedy)
    return Finding("workers", "warning", "no live worker", remedy)


def _failing(worker: Worker) -> Finding:
    """A worker goes on when one of its threads fails: only its log would tell."""
    return Finding(
        "workers",
        "warning",
        f"worker {worker.id} has had {count(worker.meta['failures'], 'internal error')}"
        f", the last one {worker.meta.get('last_failure')}; it goes on",
        "its log has the tracebacks: please report them; a restart sets the count to zero",
    )


def _lost(worker: Worker) -> Finding:
    return Finding(
        "leases",
        "problem",
        f"worker {worker.id} is gone and still holds {count(worker.held, 'job')}",
        "any live worker puts them back into the queue: start one",
    )


# ------------------------------------------------------------------------------- queues, jobs


def of_queues(workers: Sequence[Worker], queues: Sequence[Queue]) -> list[Finding]:
    return [
        *map(_unserved, unserved(workers, queues)),
        *map(_paused, (queue for queue in queues if queue.paused and queue.ready)),
        _oldest(queues),
    ]


def unserved(workers: Sequence[Worker], queues: Sequence[Queue]) -> list[Queue]:
    """Queues with due jobs that no live worker takes, although there are live workers."""
    live = [worker for worker in workers if worker.live]
    return [
        queue
        for queue in queues
        if live
        and queue.ready
        and not queue.paused
        and not any(worker.serves(queue.name) for worker in live)
    ]


def _due(queue: Queue) -> str:
    return count(queue.ready, "due job", capped="ready" in queue.capped)


def _unserved(queue: Queue) -> Finding:
    return Finding(
        "queues",
        "problem",
        f"no live worker serves q:{queue.name} with {_due(queue)}",
        f"start one with -Q {queue.name}, or without -Q for all queues",
    )


def _paused(queue: Queue) -> Finding:
    because = f" because: {queue.pause_reason}" if queue.pause_reason else ""
    text = f"q:{queue.name} is paused by {queue.paused_by} with {_due(queue)}{because}"
    return Finding("queues", "warning", text, f"tenure queues resume {queue.name}")


def oldest(queues: Iterable[Queue]) -> tuple[datetime.timedelta, str] | None:
    """How long the oldest due job has been waiting, and in which queue that is not paused."""
    waiting = [
        (queue.oldest, queue.name)
        for queue in queues
        if queue.oldest is not None and not queue.paused
    ]
    return max(waiting, key=lambda each: each[0], default=None)


def _oldest(queues: Sequence[Queue]) -> Finding:
    found = oldest(queues)
    if found is None:
        return Finding("backlog", "ok", "no job is due and waiting")
    waited, name = found
    text = f"the oldest due job has been waiting for {span(waited.total_seconds())}, q:{name}"
    if waited <= OLDEST:
        return Finding("backlog", "ok", text)
    remedy = f"`tenure jobs --queue {name} --status queued`, then `tenure job ID` says why; "
    return Finding("backlog", "problem", text, remedy + "more workers or a higher -c help load")


def of_types(unknown: Mapping[str, int], whose: str) -> list[Finding]:
    """Queued jobs of types that `whose` (`this app does not have`) says."""
    if not unknown:
        return []
    names = ", ".join(f"{type} ({number:,})" for type, number in [*unknown.items()][:NAMES_SHOWN])
    more = f" and {len(unknown) - NAMES_SHOWN} more" if len(unknown) > NAMES_SHOWN else ""
    return [
        Finding(
            "types",
            "problem",
            f"queued jobs of types {whose}: {names}{more}",
            "deploy a worker whose app has the task, or `tenure cancel --type …`",
        )
    ]


def of_the_dead(totals: Totals) -> Finding:
    dead = sum(totals.jobs[status] for status in DEAD)
    if not dead:
        return Finding("dead letters", "ok", "none")
    remedy = "`tenure jobs --dead` lists them; `tenure replay` or `tenure discard` them"
    text = count(dead, "dead job", capped=bool(DEAD & set(totals.capped)))
    return Finding("dead letters", "problem" if dead >= MANY_DEAD else "warning", text, remedy)


# ------------------------------------------------------------------------------- retention


def of_retention(turn: Turn | None, workers: Sequence[Worker], now: datetime.datetime) -> Finding:
    """Whether what is past its time goes; if not, since when, and what is in the way."""
    now_ms = now.timestamp() * 1000
    ago = (now_ms - turn.at) / 1000 if turn is not None and turn.at else None
    last = "has never run" if ago is None else f"last ran {span(max(1, ago))} ago"
    if turn is None or ago is None or ago > RETENTION_LATE:
        up = ((now - worker.started_at).total_seconds() for worker in workers if worker.live)
        if max(up, default=0.0) > RETENTION_LATE:
            text = f"{last}, though workers run: what is past its time stays"
            remedy = "the log of a worker says why: restart it"
            return Finding("retention", "warning", text, remedy)
        return Finding("retention", "ok", f"{last}; workers do it once a minute")
    if "failed" in turn.note:
        text = f"{last} and failed: {turn.note['failed']}"
        return Finding("retention", "warning", text, "it is tried again every minute")
    if "held" in turn.note:
        since = (now_ms - turn.note["held_since"]) / 1000
        text = f"held up for {span(max(1, since))}: {turn.note['held']}"
        remedy = "end that transaction; others are not held up by this, but the table stays"
        return Finding("retention", "warning" if since > RETENTION_LATE else "ok", text, remedy)
    removed = sum(turn.note.get("removed", {}).values())
    return Finding("retention", "ok", f"{last}, removed {removed:,}")


def of_settings(laid_down: Mapping[str, str], asked: Iterable[tuple[str, Wish]]) -> list[Finding]:
    """Whose settings ask for less than the owner of the tables has laid down."""
    remedy = "change its settings, or what the owner has laid down: tenure migrate --set"
    return [
        Finding("settings", "warning", f"{name} {what}", remedy)
        for name, wish in asked
        for what in _clamped(laid_down, *wish)
    ]


def _clamped(
    laid_down: Mapping[str, str], audit: str, completed: float, events: float
) -> Iterator[str]:
    for name, seconds in (("keep_history", completed), ("keep_events", events)):
        floor = int(laid_down.get(name, 0)) / 1000
        if seconds < floor:
            what = "finished jobs" if name == "keep_history" else "events"
            yield (
                f"asks to keep {what} for {span(seconds)}; the owner's {name} of {span(floor)} "
                "holds"
            )
    if audit != "all" and laid_down.get("audit") == "all":
        yield f"asks for audit {audit!r}; the owner's 'all' holds"
