"""`tenure doctor`: what is wrong, and what to do about it. Exit code 1 when there is a problem."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from tenure.cli import output, target
from tenure.cli.why import is_live, knows, serves
from tenure.job import DEAD

if TYPE_CHECKING:
    import datetime

    from tenure.app import App
    from tenure.store import Finding, QueueInfo, WorkerInfo
    from tenure.wakeup import Wakeup

Level = Literal["ok", "warning", "problem"]
MARKS = {"ok": ("✓", "green"), "warning": ("!", "yellow"), "problem": ("✗", "red")}
OLDEST_MS = 3_600_000
MANY_DEAD = 100
NAMES_SHOWN = 5
HINT_SECONDS = 2.0
RETENTION_LATE = 900.0  # there is a pass a minute while a worker runs
POOLER_SECONDS = 6.0  # a listener gives a pooler 5 s to prove itself, then it knows why not


def add_commands(commands: target.Commands) -> None:
    parser = target.add_command(
        commands, "doctor", "say what is wrong with the database, the workers and the queues"
    )
    parser.set_defaults(run=examine)


def examine(args: argparse.Namespace) -> int:
    with target.anywhere(args) as (app, named):
        findings = _findings(app, named)
    for finding in findings:
        if args.json:
            output.say_json(finding._asdict())
        else:
            _print(finding)
    problems = sum(finding.level == "problem" for finding in findings)
    warnings = sum(finding.level == "warning" for finding in findings)
    if not args.json:
        found = f"{output.count(problems, 'problem')}, {output.count(warnings, 'warning')}"
        output.say("all well" if not problems and not warnings else found)
    return 1 if problems else 0


def _findings(app: App, named: bool) -> list[Finding]:
    """First the database; the rest only where it can be read."""
    from tenure.errors import StoreError

    if app.settings.url.startswith("sqlite:"):
        target.require_database(app.settings.url, app.store)
    else:
        from tenure.stores.postgres import PostgresStore
        from tenure.stores.postgres.doctor import settle_for_a_standby

        if isinstance(app.store, PostgresStore):
            settle_for_a_standby(app.store.database)
    found = app.store.inspect()
    if any(finding.check == "schema" and finding.level == "problem" for finding in found):
        return found
    try:
        return [*found, *_general(app, named)]
    except StoreError as error:
        if not any(finding.level == "problem" for finding in found):
            raise
        return [*found, _finding("jobs", "problem", f"cannot be read: {error}", "see above")]


def _print(finding: Finding) -> None:
    mark, colour = MARKS[finding.level]
    output.say(f"{output.paint(mark, colour)} {finding.check}: {output.plain(finding.message)}")
    if finding.remedy:
        output.say(f"    → {output.plain(finding.remedy)}")


def _finding(check: str, level: Level, message: str, remedy: str | None = None) -> Finding:
    from tenure.store import Finding  # loads msgspec: not while the command line is parsed

    return Finding(check, level, message, remedy)


def _general(app: App, named: bool) -> list[Finding]:
    """What any store can say through its contract."""
    now = output.utc_now()
    workers, queues = app.workers(), app.queues()
    live = [worker for worker in workers if is_live(worker, now)]
    return [
        *(_finding("settings", "warning", line) for line in app.settings.warnings()),
        _hints(app),
        _live_workers(live, queues),
        *_failing_workers(live),
        *_lost_workers(workers, now),
        *_unserved(live, queues),
        *_paused(queues),
        _oldest(queues),
        *_unknown_types(app, named, live),
        _dead_letters(app),
        _retention(app, live, now),
        *_floors(app, live),
    ]


def _hints(app: App) -> Finding:
    """A hint is sent where one can be: a path that looks open may end in a pooler or a firewall."""
    hints = app.open_wakeup()
    try:
        arrived = _round_trip(app, hints)
        text = hints.describe().removeprefix("hints: ")
        if arrived or not app.settings.notify:
            return _finding("hints", "ok" if hints.healthy() else "warning", text)
        if hints.healthy():
            text = f"one that was sent did not arrive within {HINT_SECONDS:g} s ({text})"
        remedy = "set TENURE_LISTEN_URL to the same database on the server itself, past any pooler;"
        return _finding("hints", "warning", text, f"{remedy} jobs run without, up to 1 s later")
    finally:
        hints.close()


def _round_trip(app: App, hints: Wakeup) -> bool:
    """True where a hint of ours has arrived, or where there is nothing to send one through."""
    if app.settings.url.startswith("sqlite:"):
        return True
    from tenure.stores.postgres import PostgresStore

    store = app.store
    if not app.settings.notify or not isinstance(store, PostgresStore):
        return False
    patience = POOLER_SECONDS if store.database.pooled else HINT_SECONDS
    deadline = time.monotonic() + patience
    while not hints.healthy() and (left := deadline - time.monotonic()) > 0:
        hints.wait(left)
    if not hints.healthy():
        return False
    store.notices.hint([""])
    return hints.wait(HINT_SECONDS)


def _live_workers(live: Sequence[WorkerInfo], queues: Sequence[QueueInfo]) -> Finding:
    if live:
        running = sum(worker.held for worker in live)
        text = f"{output.count(len(live), 'live worker')}, {output.count(running, 'job')} running"
        return _finding("workers", "ok", text)
    ready = sum(queue.ready for queue in queues)
    remedy = "start one: tenure -A module:app worker"
    if ready:
        capped = any("ready" in queue.capped for queue in queues)
        text = f"no live worker, and {output.count(ready, 'job', capped=capped)} due"
        return _finding("workers", "problem", text, remedy)
    return _finding("workers", "warning", "no live worker", remedy)


def _failing_workers(live: Sequence[WorkerInfo]) -> list[Finding]:
    """A worker goes on when a thread of its fails: that would be seen in its log only."""
    return [
        _finding(
            "workers",
            "warning",
            f"worker {worker.id} has had {output.count(worker.meta['failures'], 'internal error')}"
            f", the last one {worker.meta.get('last_failure')}; it goes on",
            "its log has the tracebacks: please report them; a restart sets the count to zero",
        )
        for worker in live
        if worker.meta.get("failures")
    ]


def _lost_workers(workers: Sequence[WorkerInfo], now: datetime.datetime) -> list[Finding]:
    return [
        _finding(
            "leases",
            "problem",
            f"worker {worker.id} is gone and still holds {output.count(worker.held, 'job')}",
            "any live worker puts them back into the queue: start one",
        )
        for worker in workers
        if worker.held and not is_live(worker, now)
    ]


def _due(queue: QueueInfo) -> str:
    return output.count(queue.ready, "due job", capped="ready" in queue.capped)


def _unserved(live: Sequence[WorkerInfo], queues: Sequence[QueueInfo]) -> list[Finding]:
    if not live:
        return []
    return [
        _finding(
            "queues",
            "problem",
            f"no live worker serves q:{queue.name} with {_due(queue)}",
            f"start one with -Q {queue.name}, or without -Q for all queues",
        )
        for queue in queues
        if queue.ready
        and queue.paused_at is None
        and not any(serves(worker, queue.name) for worker in live)
    ]


def _paused(queues: Sequence[QueueInfo]) -> list[Finding]:
    return [
        _finding(
            "queues",
            "warning",
            f"q:{queue.name} is paused by {queue.paused_by} with {_due(queue)}"
            + (f" because: {queue.pause_reason}" if queue.pause_reason else ""),
            f"tenure queues resume {queue.name}",
        )
        for queue in queues
        if queue.paused_at is not None and queue.ready
    ]


def _oldest(queues: Sequence[QueueInfo]) -> Finding:
    waiting = {q.name: q.oldest_ms for q in queues if q.oldest_ms is not None and not q.paused_at}
    if not waiting:
        return _finding("backlog", "ok", "no job is due and waiting")
    name = max(waiting, key=waiting.__getitem__)
    text = f"the oldest due job has been waiting for {output.span(waiting[name] / 1000)}, q:{name}"
    if waiting[name] <= OLDEST_MS:
        return _finding("backlog", "ok", text)
    remedy = f"`tenure jobs --queue {name} --status queued`, then `tenure job ID` says why; "
    return _finding("backlog", "problem", text, remedy + "more workers or a higher -c help load")


def _unknown_types(app: App, named: bool, live: Sequence[WorkerInfo]) -> list[Finding]:
    if named:
        known, whose = frozenset(app.tasks), "this app does not have"
    elif live:
        types = app.store.unknown_types(frozenset())
        known = frozenset(t for t in types if any(knows(worker, t) for worker in live))
        whose = "no live worker knows"
    else:
        return []
    unknown = app.store.unknown_types(known)
    if not unknown:
        return []
    names = ", ".join(f"{type} ({number:,})" for type, number in [*unknown.items()][:NAMES_SHOWN])
    more = f" and {len(unknown) - NAMES_SHOWN} more" if len(unknown) > NAMES_SHOWN else ""
    return [
        _finding(
            "types",
            "problem",
            f"queued jobs of types {whose}: {names}{more}",
            "deploy a worker whose app has the task, or `tenure cancel --type …`",
        )
    ]


def _dead_letters(app: App) -> Finding:
    totals = app.store.totals()
    dead = sum(totals.jobs[status] for status in DEAD)
    capped = bool(DEAD & set(totals.capped))
    if not dead:
        return _finding("dead letters", "ok", "none")
    level: Level = "problem" if dead >= MANY_DEAD else "warning"
    remedy = "`tenure jobs --dead` lists them; `tenure replay` or `tenure discard` them"
    return _finding("dead letters", level, output.count(dead, "dead job", capped=capped), remedy)


# ------------------------------------------------------------------------------- retention


def _retention(app: App, live: Sequence[WorkerInfo], now: datetime.datetime) -> Finding:
    """Whether what is past its time goes; if not, since when, and who is in the way."""
    turn = app.store.turns().get("retention")
    now_ms = now.timestamp() * 1000
    ago = (now_ms - turn.at) / 1000 if turn is not None and turn.at else None
    last = "has never run" if ago is None else f"last ran {output.span(max(1, ago))} ago"
    if ago is None or ago > RETENTION_LATE:
        if any(now_ms - worker.started_at > RETENTION_LATE * 1000 for worker in live):
            text = f"{last}, though workers run: what is past its time stays"
            return _finding(
                "retention", "warning", text, "the log of a worker says why: restart it"
            )
        return _finding("retention", "ok", f"{last}; workers do it once a minute")
    note = turn.note if turn is not None else {}
    if "failed" in note:
        text = f"{last} and failed: {note['failed']}"
        return _finding("retention", "warning", text, "it is tried again every minute")
    if "held" in note:
        since = (now_ms - note["held_since"]) / 1000
        level: Level = "warning" if since > RETENTION_LATE else "ok"
        text = f"held up for {output.span(max(1, since))}: {note['held']}"
        remedy = "end that transaction; others are not held up by this, but the table stays"
        return _finding("retention", level, text, remedy)
    removed = sum(note.get("removed", {}).values())
    return _finding("retention", "ok", f"{last}, removed {removed:,}")


def _floors(app: App, live: Sequence[WorkerInfo]) -> list[Finding]:
    """Whose settings ask for less than the owner of the tables has laid down."""
    laid_down = app.store.settings()
    settings = app.settings
    own = (settings.audit, settings.keep_completed_seconds, settings.keep_events_seconds)
    asked: list[tuple[str, tuple[str, float, float]]] = [("this app", own)]
    for name, task in app.tasks.items():
        keep = task.settings.keep.completed
        if keep is not None:
            asked.append((f"task {name}", ("all", keep, float("inf"))))
    for worker in live:
        if "keep" in worker.meta:
            asked.append((f"worker {worker.id}", (worker.meta["audit"], *worker.meta["keep"])))
    remedy = "change its settings, or what the owner has laid down: tenure migrate --set"
    return [
        _finding("settings", "warning", f"{who} {what}", remedy)
        for who, wanted in asked
        for what in _clamped(laid_down, *wanted)
    ]


def _clamped(
    laid_down: Mapping[str, str], audit: str, completed: float, events: float
) -> Iterator[str]:
    for name, seconds in (("keep_history", completed), ("keep_events", events)):
        floor = int(laid_down.get(name, 0)) / 1000
        if seconds < floor:
            what = "finished jobs" if name == "keep_history" else "events"
            yield (
                f"asks to keep {what} for {output.span(seconds)}; the owner's {name} of "
                f"{output.span(floor)} holds"
            )
    if audit != "all" and laid_down.get("audit") == "all":
        yield f"asks for audit {audit!r}; the owner's 'all' holds"
