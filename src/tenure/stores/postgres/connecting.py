"""One connection to PostgreSQL: how it is opened, how long a call may take, how values are read.

Every wait on the socket has a deadline of ours. A server's own time-outs do not help when its host
is gone, its process is stopped or a firewall has forgotten the connection.
"""

from __future__ import annotations

import math
import os
import select
import time
from collections.abc import Generator, Iterable, Mapping
from typing import Any, TypeVar

import psycopg
from psycopg.abc import Buffer, PQGen
from psycopg.adapt import Loader
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import Format, TransactionStatus
from psycopg.types.string import TextBinaryLoader, TextLoader

from tenure.errors import ConfigError
from tenure.ids import _PAIRS, _TO_INT

Value = TypeVar("Value")
CONNECT_SECONDS = 5.0
LEAST_CONNECT_SECONDS = 2  # psycopg's
CANCEL_SECONDS = 1.0
LOOK_SECONDS = 0.1
KEPT_ROWS = 1000
# Of the server's source, in every message it sends: their texts come in the server's language.
WAIT_FOR_STANDBY = "SyncRepWaitForLSN"
READ_COMMITTED = "read committed"
SESSION = (
    "SELECT pg_backend_pid(), current_setting('default_transaction_isolation'),"
    " current_setting('client_min_messages') IN ('error', 'fatal', 'panic')"
)
SET_UP = (
    "SELECT set_config('default_transaction_isolation', 'read committed', false),"
    " set_config('client_min_messages', 'warning', false)"
)


class Late(psycopg.OperationalError):
    """The server did not answer in time. `cancelled`: it did confirm that it stopped the statement,
    so nothing was changed; otherwise nobody knows. `silent`: it did not even take the cancel."""

    def __init__(self, *, cancelled: bool = False, silent: bool = False) -> None:
        super().__init__("no answer in time")
        self.cancelled = cancelled
        self.silent = silent


class Unconfirmed(psycopg.OperationalError):
    """Committed here, and no synchronous standby has said so within the time that there was: after
    a failover it may never have been."""

    def __init__(self) -> None:
        super().__init__("no standby has confirmed the commit")


class Doubt:
    """Hears the notices of a connection. PostgreSQL answers a cancel that finds a commit waiting
    for its standby, whoever sent it, with success and a WARNING: this one's `felt`."""

    __slots__ = ("felt",)

    def __init__(self) -> None:
        self.felt = False

    def __call__(self, notice: Any) -> None:
        self.felt = self.felt or notice.source_function == WAIT_FOR_STANDBY

    def hear(self, _connection: Any, message: Any) -> None:
        """The same, as asyncpg tells it."""
        self.felt = self.felt or message.server_source_function == WAIT_FOR_STANDBY


class CannotConnect(Exception):
    """No connection could be opened, so nothing was sent. `reason` is what the driver said."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


# ------------------------------------------------------------------------------- options


def options(url: str, timeout: float) -> dict[str, Any]:
    """What we ask of every connection, unless the URL says otherwise."""
    given = parsed(url)
    wanted: dict[str, Any] = {
        "fallback_application_name": "tenure",
        "client_encoding": "utf8",
        "connect_timeout": max(LEAST_CONNECT_SECONDS, round(min(timeout, CONNECT_SECONDS))),
        "keepalives": 1,
        "keepalives_idle": 10,
        "keepalives_interval": 5,
        "keepalives_count": 3,
        # A peer that acknowledges nothing is given up early enough to try another connection.
        "tcp_user_timeout": round(max(2.0, min(timeout / 3, 10.0)) * 1000),
    }
    if "PGTARGETSESSIONATTRS" not in os.environ:
        wanted["target_session_attrs"] = "read-write"  # after a failover: not the old primary
    return {name: value for name, value in wanted.items() if name not in given}


def parsed(url: str) -> dict[str, Any]:
    try:
        found = dict(conninfo_to_dict(url))
    except psycopg.Error:
        found = {"host": "@"}
    if "@" in str(found.get("host") or ""):  # half a password, which we would show as a host
        raise ConfigError(
            "the PostgreSQL URL cannot be read: write postgresql://user:password@host:5432/name, "
            "with special characters in the password percent-encoded (@ is %40, / is %2F)"
        )
    return found


def location(url: str) -> str:
    """host:port/name for messages: without user, password and options."""
    given = parsed(url)
    host = given.get("host") or given.get("hostaddr") or os.environ.get("PGHOST") or "localhost"
    port = given.get("port") or os.environ.get("PGPORT") or "5432"
    name = given.get("dbname") or os.environ.get("PGDATABASE") or given.get("user") or ""
    return f"{host}:{port}/{name}"


# ------------------------------------------------------------------------------- our connection


class Connection(psycopg.Connection[Any]):
    """A connection of the store's own. Its `deadline` bounds every wait until it is set again."""

    deadline = float("inf")
    generation = 0  # of its pool
    late = False  # a cancel was sent, which might hit the next statement: not to be used again
    begins = False  # each call in a transaction that names its isolation

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._process = os.getpid()
        self._cursor: psycopg.Cursor[Any] | None = None
        self._doubt = Doubt()
        self.add_notice_handler(self._doubt)

    def wait(
        self, gen: PQGen[Value], interval: float = LOOK_SECONDS, timeout: float | None = None
    ) -> Value:
        if timeout is not None:  # the driver's own, of `notifies()`
            return super().wait(gen, interval, timeout)
        return super().wait(self._in_time(gen), interval)

    def _in_time(self, steps: PQGen[Value]) -> Generator[Any, Any, Value]:
        """The driver's generator with a deadline. When it passes, the server is asked to cancel,
        and only an error that confirms the cancel says what happened."""
        deadline = self.deadline
        cancelled = False
        doubt = self._doubt
        doubt.felt = False
        try:
            wanted = next(steps)
            while True:
                ready = yield wanted
                wanted = steps.send(ready)
                if time.monotonic() >= deadline:
                    if cancelled:
                        raise Late
                    cancelled = True
                    self.late = True
                    try:
                        self.cancel_safe(timeout=CANCEL_SECONDS)
                    except psycopg.Error:
                        raise Late(silent=True) from None
                    deadline = time.monotonic() + CANCEL_SECONDS
        except StopIteration as end:
            if doubt.felt:
                raise Unconfirmed from None
            if cancelled:  # where warnings are hidden, it may have been that
                raise Late from None
            value: Value = end.value
            return value
        except psycopg.errors.QueryCanceled:
            if cancelled:
                raise Late(cancelled=True) from None
            raise

    def rows(self, statement: str, parameters: Mapping[str, Any] | None = None) -> list[Any]:
        """All rows, read in binary. One cursor serves many calls: a new one takes 10 µs, a sixth
        of a short call. After a large result it is let go, with what it keeps of that."""
        if self.begins:  # after an error the transaction stays, and the pool drops us with it
            self.execute("BEGIN ISOLATION LEVEL READ COMMITTED")
        cursor = self._cursor or self.cursor(binary=True)
        cursor.execute(statement, parameters)
        result = cursor.pgresult
        rows = cursor.fetchall() if result is not None and result.nfields else []
        self._cursor = cursor if len(rows) <= KEPT_ROWS else None
        if self.begins:
            self.execute("COMMIT")
        return rows

    def reusable(self) -> bool:
        return not self.late and self.pgconn.transaction_status == TransactionStatus.IDLE

    def close(self) -> None:
        """A forked child must not say good-bye on its parent's socket."""
        if self._process == os.getpid():
            self._cursor = None  # the two hold each other
            super().close()

    def __del__(self, *_ignored: Any) -> None:
        """No ResourceWarning: a program may end without closing its App."""


def stirred(connection: psycopg.Connection[Any]) -> bool:
    """Something arrived on an idle connection. Nothing was asked, so it is the end of it (or a
    changed server setting, after which a new connection is as good)."""
    try:
        handle = connection.pgconn.socket
    except psycopg.Error:
        return True
    if not hasattr(select, "poll"):  # Windows
        return bool(select.select([handle], [], [], 0)[0])
    poller = select.poll()
    poller.register(handle, select.POLLIN)
    return bool(poller.poll(0))


def connect(url: str, wanted: dict[str, Any], deadline: float) -> Connection:
    if "connect_timeout" in wanted:
        left = max(LEAST_CONNECT_SECONDS, math.ceil(deadline - time.monotonic()))
        wanted = wanted | {"connect_timeout": min(wanted["connect_timeout"], left)}
    try:
        connection = Connection.connect(url, autocommit=True, prepare_threshold=None, **wanted)
    except psycopg.Error as error:
        raise CannotConnect(first_line(error, url)) from None
    connection.deadline = deadline
    register_loaders(connection)
    return connection


def set_up(connection: Connection) -> bool:
    """Whether a pooler is in between: it makes up the process number it gives to its clients.

    Our statements are written for READ COMMITTED, whatever the role's or the database's default is
    for programs of their own, and warnings must arrive. Where the session is ours both are set;
    behind a pooler it is everybody's, so there each statement gets a transaction that says so."""
    try:
        ((pid, isolation, hidden),) = connection.execute(SESSION).fetchall()
        between = bool(pid != connection.info.backend_pid)
        if not between and (isolation != READ_COMMITTED or hidden):
            connection.execute(SET_UP)
        elif isolation != READ_COMMITTED:
            connection.begins = True
            connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
    except psycopg.Error as error:
        connection.close()
        raise CannotConnect(first_line(error, "")) from None
    return between


def first_line(error: Exception, url: str) -> str:
    """Of several hosts and hints only the last word, and never the password."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    password = parsed(url).get("password") if url else None
    return lines[0].replace(str(password), "***") if password else lines[0]


# ------------------------------------------------------------------------------- values


class UlidBinaryLoader(Loader):
    """uuid -> ULID text. Ids of a batch share their first 22 characters: those are kept."""

    format = Format.BINARY

    def __init__(self, oid: int, context: Any = None) -> None:
        super().__init__(oid, context)
        self._high = -1
        self._head = ""

    def load(self, data: Buffer) -> str:
        number = int.from_bytes(data)
        if number >> 20 != self._high:
            self._begin(number >> 20)
        return self._head + _PAIRS[(number >> 10) & 1023] + _PAIRS[number & 1023]

    def _begin(self, high: int) -> None:
        self._high = high
        self._head = "".join([_PAIRS[(high >> shift) & 1023] for shift in range(100, -1, -10)])


class UlidTextLoader(UlidBinaryLoader):
    format = Format.TEXT

    def load(self, data: Buffer) -> str:
        return super().load(bytes.fromhex(str(data, "ascii").replace("-", "")))


class JsonbBinaryLoader(Loader):
    """The text of a jsonb, which is sent with its format's version, 1, in front."""

    format = Format.BINARY

    def load(self, data: Buffer) -> str:
        return str(data[1:], "utf-8")


def register_loaders(connection: psycopg.Connection[Any]) -> None:
    adapters = connection.adapters
    adapters.register_loader("uuid", UlidBinaryLoader)
    adapters.register_loader("uuid", UlidTextLoader)
    adapters.register_loader("json", TextLoader)
    adapters.register_loader("json", TextBinaryLoader)
    adapters.register_loader("jsonb", TextLoader)
    adapters.register_loader("jsonb", JsonbBinaryLoader)


_PAIR_VALUES = {pair: value for value, pair in enumerate(_PAIRS)}


def to_uuids(ids: Iterable[str]) -> str:
    """ULIDs as the text of a uuid[], for `%(ids)s::uuid[]`: the driver takes 3 µs an id."""
    found = []
    head = tail = ""
    values = _PAIR_VALUES
    for ulid in ids:
        if ulid[:22] != head:
            head = ulid[:22]
            tail = f"{int(head.translate(_TO_INT), 32):027x}"
        found.append(f"{tail}{values[ulid[22:24]] << 10 | values[ulid[24:]]:05x}")
    return "{" + ",".join(found) + "}"


def to_uuid_text(ulid: str) -> str:
    return f"{int(ulid.translate(_TO_INT), 32):032x}"
