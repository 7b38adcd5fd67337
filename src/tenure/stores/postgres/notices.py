"""Hints to listening workers: NOTIFY, coalesced, on a connection of its own.

NOTIFY takes a lock of the whole server at commit, so no commit that waits for a disk has one: the
first hint for a queue goes out at once (with the call that stores a single job, before that waits,
see tenure.enqueue_job_and_hint), the next ones at most every 10 ms together, from one thread, in
transactions of their own that wait for none. Nothing rests on a hint, so nothing here raises.
"""

from __future__ import annotations

import atexit
import logging
import os
import random
import threading
import time
import weakref
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg.pq import TransactionStatus

from tenure.stores.postgres.connecting import CannotConnect, Connection
from tenure.stores.postgres.explaining import primary

if TYPE_CHECKING:
    from tenure.stores.postgres.database import Database

EVERY_SECONDS = 0.01  # for one queue
SEND_SECONDS = 5.0
IDLE_SECONDS = 60.0  # after which connection and thread end
PAYLOAD_BYTES = 7_900  # PostgreSQL takes 7,999
FIRST_BACKOFF, LONGEST_BACKOFF = 0.1, 30.0
FIRST_LOOK, LONGEST_LOOK = 0.002, 0.25
WATCH_SECONDS = 600.0
EXIT_SECONDS = 1.0

log = logging.getLogger("tenure.store")


class _Watched:
    """Somebody's transaction, and which queues to hint when it has ended."""

    def __init__(self, connection: Any, queues: list[str]) -> None:
        self.connection = weakref.ref(connection)
        self.queues = queues
        self.since = time.monotonic()
        self.look_at = self.since + FIRST_LOOK

    def ended(self) -> bool:
        """Committed or rolled back, nobody can tell; and who closed or lost it may have committed
        before. A hint too many does no harm."""
        connection = self.connection()
        if connection is None or connection.closed:
            return True
        return bool(connection.pgconn.transaction_status == TransactionStatus.IDLE)

    def later(self, now: float) -> bool:
        """Look again after a tenth of its age; False when it has been open for too long."""
        age = now - self.since
        self.look_at = now + max(FIRST_LOOK, min(age / 10, LONGEST_LOOK))
        return age < WATCH_SECONDS


class Notices:
    def __init__(self, database: Database, enabled: bool = True) -> None:
        self.enabled = enabled
        self._database = database
        self._inherited: list[Connection] = []
        self._connection: Connection | None = None
        self._sent = self._failed = 0
        self._last_error: str | None = None
        self._reset()
        this = weakref.ref(self)
        self._at_exit = partial(_flush_at_exit, this)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=lambda: _forget(this()))

    def _reset(self) -> None:
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._pending: set[str] = set()
        self._watched: list[_Watched] = []
        self._sent_at: dict[str, float] = {}
        self._sending = False
        self._closing = False
        self._backoff = 0.0
        self._not_before = 0.0

    # -- for the store ------------------------------------------------------------------------
    def hint(self, queues: Iterable[str]) -> None:
        """Say that jobs of these queues may be due. Returns at once."""
        if not self.enabled:
            return
        with self._changed:
            before = len(self._pending)
            self._pending.update(queues)
            if len(self._pending) > before:
                self._wake()

    def take(self, queue: str) -> bool:
        """Whether a hint for this queue is due this moment; who asks sends it, after a commit."""
        if not self.enabled:
            return False
        now = time.monotonic()
        with self._changed:
            if queue in self._pending or self._due_at(queue) > now:
                return False
            self._remember([queue], now)
            self._sent += 1
        return True

    def watch(self, connection: Any, queues: Iterable[str]) -> None:
        """Hint when the transaction open on somebody's psycopg connection has ended."""
        if not self.enabled:
            return
        watched = _Watched(connection, list(queues))
        if watched.ended():
            self.hint(watched.queues)
            return
        with self._changed:
            self._watched.append(watched)
            self._wake()

    def flush(self, timeout: float) -> bool:
        """Wait until everything was sent; False when that took too long."""
        deadline = time.monotonic() + timeout
        with self._changed:
            for watched in self._watched:
                watched.look_at = 0.0
            self._changed.notify_all()
            while self._pending or self._sending or any(w.look_at == 0.0 for w in self._watched):
                left = deadline - time.monotonic()
                if left <= 0 or self._thread is None or self._not_before > deadline:
                    return False
                self._changed.wait(left)
        return True

    def describe(self) -> dict[str, Any]:
        with self._changed:
            return {
                "enabled": self.enabled,
                "sent": self._sent,
                "failed": self._failed,
                "pending": len(self._pending),
                "watched": len(self._watched),
                "last_error": self._last_error,
            }

    def close(self, timeout: float = EXIT_SECONDS) -> None:
        """Send what is pending, bounded, and end the thread. May be used again."""
        self.flush(timeout)
        with self._changed:
            thread, self._closing = self._thread, True
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)

    # -- the thread ---------------------------------------------------------------------------
    def _wake(self) -> None:
        """With the lock held."""
        if self._thread is not None:
            self._changed.notify_all()
            return
        self._closing = False
        thread = threading.Thread(target=self._run, name="tenure-notices", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the interpreter is going down
            self._pending.clear()
            self._note(error)
            return
        self._thread = thread
        atexit.register(self._at_exit)

    def _run(self) -> None:
        while (due := self._next()) is not None:
            self._send(due)

    def _next(self) -> list[str] | None:
        """The queues to hint now, after waiting for some; None when the thread is to end."""
        idle_since = time.monotonic()
        with self._changed:
            self._sending = False
            while True:
                now = time.monotonic()
                self._look(now)
                due = [queue for queue in self._pending if self._due_at(queue) <= now]
                if due and not self._closing:
                    self._pending.difference_update(due)
                    self._sending = True
                    self._remember(due, now)
                    return due
                self._changed.notify_all()  # whoever flushes
                idle = not self._pending and not self._watched
                if self._closing or (idle and now - idle_since >= IDLE_SECONDS):
                    self._end()
                    return None
                times = [self._due_at(queue) for queue in self._pending]
                times += [watched.look_at for watched in self._watched]
                self._changed.wait(max(0.0, min(times, default=now + IDLE_SECONDS) - now))

    def _end(self) -> None:
        """With the lock held: the next hint starts another thread."""
        self._pending.clear()
        self._watched.clear()
        self._thread = None
        atexit.unregister(self._at_exit)
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _due_at(self, queue: str) -> float:
        return max(self._not_before, self._sent_at.get(queue, -EVERY_SECONDS) + EVERY_SECONDS)

    def _remember(self, queues: list[str], now: float) -> None:
        if len(self._sent_at) > 1000:
            self._sent_at.clear()
        self._sent_at.update(dict.fromkeys(queues, now))

    def _look(self, now: float) -> None:
        """At the transactions that are due for it. Reading a connection's state takes 1 µs, is
        safe beside the thread that uses it, and asks the server nothing."""
        kept = []
        for watched in self._watched:
            if watched.look_at > now:
                kept.append(watched)
            elif watched.ended():
                self._pending.update(watched.queues)
            elif watched.later(now):
                kept.append(watched)
        self._watched = kept

    def _send(self, queues: list[str]) -> None:
        try:
            connection = self._connection
            if connection is None or connection.closed:
                connection = self._connection = self._database.connect("tenure notices")
            connection.deadline = time.monotonic() + SEND_SECONDS
            connection.execute(statement(self._database.schema, queues))
        except (psycopg.Error, CannotConnect) as error:
            self._note(error)
            if self._connection is not None:
                self._connection.close()
                self._connection = None
            self._backoff = min(max(self._backoff * 2, FIRST_BACKOFF), LONGEST_BACKOFF)
            self._not_before = time.monotonic() + self._backoff * random.uniform(0.5, 1.0)
            with self._changed:
                self._pending.update(queues)
            return
        self._sent += 1
        self._backoff = self._not_before = 0.0

    def _note(self, error: Exception) -> None:
        self._failed += 1
        self._last_error = primary(error) or type(error).__name__
        log.debug("a hint was not sent: %s", self._last_error)


def statement(channel: str, queues: Iterable[str]) -> str:
    """One statement, with one notification per payload, whose own commit waits for no disk."""
    payloads, current = [], ""
    for queue in sorted(queues):
        if current and len(current) + len(queue) >= PAYLOAD_BYTES:
            payloads.append(current)
            current = ""
        current += f",{queue}" if current else queue
    payloads.append(current)
    calls = ", ".join(f"pg_notify({_literal(channel)}, {_literal(each)})" for each in payloads)
    return f"SELECT set_config('synchronous_commit', 'off', true), {calls}"


def _literal(text: str) -> str:
    return "'" + text.replace("\\", "").replace("'", "''") + "'"


def _flush_at_exit(reference: weakref.ref[Notices]) -> None:
    """A program that enqueues one job and ends: its hint is on its way in another thread."""
    notices = reference()
    if notices is not None:
        notices.flush(EXIT_SECONDS)


def _forget(notices: Notices | None) -> None:
    """In a forked child: no thread, another lock, and the parent's connection left alone."""
    if notices is not None:
        if notices._connection is not None:
            notices._inherited.append(notices._connection)
            notices._connection = None
        notices._reset()
