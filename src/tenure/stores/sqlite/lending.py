"""A write transaction in somebody else's hands: what a handler may do with it, and for how long.

The clock runs on a thread of its own and rolls back on the handler's connection. SQLite calls back
into Python while it holds the connection's mutex, and Python's driver waits for that mutex while it
holds the interpreter's lock (to bind a value, to read a column): two threads in one connection can
wait for each other for ever, and every other thread with them. So they take turns: each call of the
handler's is one turn, and the rollback is one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

from tenure import errors

if TYPE_CHECKING:
    import sqlite3

    from tenure.stores.sqlite.gate import Connection

SQLITE_OK, SQLITE_DENY = 0, 1
SQLITE_PRAGMA, SQLITE_TRANSACTION = 19, 22
WARN_AFTER = 1.0

# What waits for SQLite's mutex.
CONNECTION_CALLS = (
    "__exit__", "backup", "blobopen", "close", "commit", "create_aggregate", "create_collation",
    "create_function", "create_window_function", "deserialize", "getlimit", "rollback", "serialize",
    "set_authorizer", "set_progress_handler", "set_trace_callback", "setlimit",
)  # fmt: skip
CURSOR_CALLS = (
    "__next__", "close", "execute", "executescript", "fetchall", "fetchmany", "fetchone",
)  # fmt: skip


class Loan:
    """The rules and the clock while a handler holds the write lock: neither a commit or rollback
    of its own nor anything outside the transaction gets through, and after `limit` seconds the
    transaction is rolled back under its hands."""

    LOOK_EVERY = 10_000  # steps of SQLite's machine, about a tenth of a millisecond

    def __init__(self, connection: Connection, limit: float, path: str) -> None:
        self._connection = connection
        self._limit = limit
        self._path = path
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self.turn = threading.RLock()
        self.expired = False
        after = min(WARN_AFTER, limit / 2)
        self._timers = [
            threading.Timer(after, warn_of, (path, after)),
            threading.Timer(limit, self._expire),
        ]

    def start(self) -> None:
        db: Any = self._connection.db
        db.set_authorizer(self._may)
        db.set_progress_handler(lambda: self.expired, self.LOOK_EVERY)
        db.loan = self
        for timer in self._timers:
            timer.daemon = True
            timer.start()

    def end(self) -> None:
        """The block is over; raises if its time was up before."""
        with self._lock:
            self._ended.set()
        if self.expired:
            raise too_long(self._path, self._limit)

    def stop(self) -> None:
        """After this no timer touches the connection or the gate."""
        with self.turn, self._lock:
            self._ended.set()
        for timer in self._timers:
            timer.cancel()

    def _may(self, action: int, what: str | None, *_rest: object) -> int:
        """Asked about each statement when it is prepared (lent connections cache none)."""
        if self.expired:
            ours = action == SQLITE_PRAGMA or (action, what) == (SQLITE_TRANSACTION, "ROLLBACK")
            return SQLITE_OK if ours else SQLITE_DENY
        if self._ended.is_set():
            return SQLITE_OK
        inside = self._connection.db.in_transaction and action != SQLITE_TRANSACTION
        return SQLITE_OK if inside else SQLITE_DENY

    def _expire(self) -> None:
        with self._lock:
            if self._ended.is_set():
                return
            self.expired = True  # what runs ends at its next look, what comes is refused
        with self.turn:
            if self._ended.is_set():
                return  # whoever ends the block closes the connection
            db: Any = self._connection.db
            try:
                # Not through the calls that are refused now. No interrupt(): with a cursor open it
                # would hit the rollback as well. And should a cursor of another kind be in use
                # (an executemany), it must not go on and commit by itself.
                db.say("PRAGMA query_only = 1")
                if db.in_transaction:
                    db.say("ROLLBACK")
            finally:
                self._connection.gate.leave()


def warn_of(path: str, seconds: float) -> None:
    import logging  # 3 ms of a cold enqueue, for a warning it cannot get

    logging.getLogger("tenure.job").warning(
        "a transaction has been holding the only write lock of %s for %.1f s: everybody else "
        "waits; do slow work before the block",
        path,
        seconds,
    )


def too_long(path: str, limit: float) -> errors.StoreBusy:
    return errors.StoreBusy(
        f"the transaction held the only write lock of {path} for more than {limit:g} s and was "
        "rolled back: do slow work before the block"
    )


@cache
def lent_connection(module: Any) -> type[sqlite3.Connection]:
    """A connection of that driver whose calls are turns of its loan, once it has one."""

    class LentCursor(module.Cursor):  # type: ignore[misc]  # which module is not known
        def executemany(self, statement: str, rows: Iterable[Any]) -> Any:
            with _Turn(self.connection):
                return super().executemany(statement, _between_turns(self.connection, rows))

    class LentConnection(module.Connection):  # type: ignore[misc]
        loan: Loan | None = None

        def cursor(self, factory: Any = LentCursor) -> Any:
            return super().cursor(factory)

        def execute(self, statement: str, *parameters: Any) -> Any:
            return self.cursor().execute(statement, *parameters)

        def executemany(self, statement: str, rows: Iterable[Any]) -> Any:
            return self.cursor().executemany(statement, rows)

        def executescript(self, statements: str) -> Any:
            return self.cursor().executescript(statements)

        def say(self, statement: str) -> None:
            super().execute(statement)

    for kind, names in ((LentCursor, CURSOR_CALLS), (LentConnection, CONNECTION_CALLS)):
        for name in names:
            if hasattr(kind, name):
                setattr(kind, name, _as_a_turn(getattr(kind, name), kind is LentCursor))
    return LentConnection


def _as_a_turn(call: Callable[..., Any], of_cursor: bool) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **named: Any) -> Any:
        with _Turn(self.connection if of_cursor else self, closing=call.__name__ == "close"):
            return call(self, *args, **named)

    method.__name__ = call.__name__
    method.__doc__ = call.__doc__
    return method


class _Turn:
    """Nobody else is in the connection meanwhile; none for a handler whose time is up."""

    __slots__ = ("_closing", "_connection", "_taken")

    def __init__(self, connection: Any, *, closing: bool = False) -> None:
        self._connection = connection
        self._closing = closing
        self._taken: threading.RLock | None = None

    def __enter__(self) -> None:
        loan = self._connection.loan
        if loan is None:
            return
        if loan.expired and not self._closing:
            raise _refusal(self._connection)
        loan.turn.acquire()
        self._taken = loan.turn

    def __exit__(self, *_error: object) -> None:
        if self._taken is not None:
            self._taken.release()


def _between_turns(connection: Any, rows: Iterable[Any]) -> Iterator[Any]:
    """The rows of an executemany; what makes them may take its time."""
    loan: Loan | None = connection.loan
    if loan is None:
        yield from rows
        return
    rows = iter(rows)
    while True:
        loan.turn.release()
        try:
            row = next(rows, _between_turns)
        finally:
            loan.turn.acquire()
        if row is _between_turns:
            return
        if loan.expired:
            raise _refusal(connection)
        yield row


def _refusal(connection: Any) -> Exception:
    error: Exception = connection.OperationalError("interrupted: the transaction's time is up")
    return error
