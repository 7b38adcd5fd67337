"""The parts of the listener: where to connect, names looked up, a connection that never blocks."""

from __future__ import annotations

import ipaddress
import os
import selectors
import socket
import threading
from contextlib import suppress
from typing import Any, TypeAlias

import psycopg
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import ExecStatus, PGconn, PollingStatus

from tenure.errors import ConfigError

FOUND = b"f"  # said through the listener's own pipe
Address: TypeAlias = dict[str, Any]  # parameters of a connection to one host


class Down(psycopg.OperationalError):
    """Why it does not listen."""


class Lookup:
    """The addresses behind a name, each to be tried first in its turn. By a thread: the driver's
    own look-up holds the interpreter's lock for as long as a name server does not answer, and no
    lease would be renewed."""

    def __init__(self, address: Address, host: str, turn: int, done: socket.socket) -> None:
        self.host = host
        self.found: Address | None = None
        self.error: Exception | None = None
        self._address = address
        self._turn = turn
        self._done = done
        try:
            threading.Thread(target=self._run, name="tenure-lookup", daemon=True).start()
        except RuntimeError as error:
            raise Down(f"the name {host!r} cannot be looked up: {error}") from None

    def _run(self) -> None:
        try:
            rows = socket.getaddrinfo(self.host, None, type=socket.SOCK_STREAM)
            addresses = list(dict.fromkeys(str(row[4][0]) for row in rows))
            first = self._turn % len(addresses)
            self.found = self._address | {
                "host": ",".join([self.host] * len(addresses)),
                "hostaddr": ",".join(addresses[first:] + addresses[:first]),
            }
        except (OSError, UnicodeError) as error:
            self.error = error
        with suppress(OSError):  # closed meanwhile, or enough is pending
            self._done.send(FOUND)


class Session:
    """A connection that never blocks: opening, then one question at a time."""

    def __init__(self, conninfo: bytes, question: str) -> None:
        self._connection = PGconn.connect_start(conninfo)
        if self._connection.socket < 0:
            raise Down(self._said())
        self._question: str | None = question  # to be asked when it is open
        self._rows: bytes | None = None
        self.asked = False
        self.is_ready = False
        self.events = selectors.EVENT_WRITE

    @property
    def handle(self) -> int:
        return int(self._connection.socket)

    @property
    def backend(self) -> int:
        return int(self._connection.backend_pid)

    def ask(self, question: str) -> None:
        self._connection.send_query(question.encode())
        self.asked = True
        self._rows = None
        self._flush()

    def advance(self) -> None:
        """Its socket is ready for what it waited for."""
        if self._question is not None:
            self._connect()
            return
        self._flush()
        self._connection.consume_input()

    def heard(self) -> bool:
        """A notification has arrived since."""
        found = False
        if self._question is None:
            self._connection.is_busy()  # parses what was read
            while self._connection.notifies() is not None:
                found = True
        return found

    def answer(self) -> bytes | None:
        """The value of the last row of what was asked, b"" without rows; None: not yet, or
        nothing was asked."""
        while self.asked and not self._connection.is_busy():
            result = self._connection.get_result()
            if result is None:
                self.asked = False
                return self._rows or b""
            if result.status == ExecStatus.FATAL_ERROR:
                raise Down(result.get_error_message())
            if result.ntuples:
                self._rows = result.get_value(result.ntuples - 1, 0)
        return None

    def close(self) -> None:
        self._connection.finish()

    def _connect(self) -> None:
        status = self._connection.connect_poll()
        if status == PollingStatus.FAILED:
            raise Down(self._said())
        if status == PollingStatus.OK:
            self._connection.nonblocking = 1
            question, self._question = self._question, None
            self.ask(question or "")
        else:
            reading = status == PollingStatus.READING
            self.events = selectors.EVENT_READ if reading else selectors.EVENT_WRITE

    def _flush(self) -> None:
        self.events = selectors.EVENT_READ
        if self._connection.flush():
            self.events |= selectors.EVENT_WRITE

    def _said(self) -> str:
        return str(self._connection.get_error_message())


def name_in(address: Address) -> str | None:
    """The name a connection has to look up first, if any: not an address, not a socket's path."""
    host = address.get("host") or os.environ.get("PGHOST") or ""
    if not host or host[0] in "/@" or address.get("hostaddr") or os.environ.get("PGHOSTADDR"):
        return None
    if "," in host:  # several in the environment: left to the driver
        return None
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return str(host)
    return None


def addresses_of(url: str) -> list[Address]:
    """What to connect with, one for each host of the URL. TCP keepalive finds a peer that is gone
    between two probes; a replica cannot listen, so only a primary will do."""
    try:
        given = dict(conninfo_to_dict(url))
    except psycopg.Error:
        raise ConfigError(
            "the PostgreSQL URL for LISTEN cannot be read: write "
            "postgresql://user:password@host:5432/name"
        ) from None
    wanted: dict[str, Any] = {
        "fallback_application_name": "tenure listener",
        "keepalives": 1,
        "keepalives_idle": 10,
        "keepalives_interval": 5,
        "keepalives_count": 3,
        "tcp_user_timeout": 10_000,
    }
    if "PGTARGETSESSIONATTRS" not in os.environ:
        wanted["target_session_attrs"] = "read-write"
    wanted |= given
    hosts = str(wanted.get("host") or "").split(",")
    numbers = str(wanted.get("hostaddr") or "").split(",")
    ports = str(wanted.get("port") or "").split(",")
    found = []
    for index in range(max(len(hosts), len(numbers))):
        one = {
            "host": hosts[index] if index < len(hosts) else "",
            "hostaddr": numbers[index] if index < len(numbers) else "",
            "port": ports[index] if len(ports) > 1 else ports[0],
        }
        named = {name: value for name, value in one.items() if value}
        rest = {name: value for name, value in wanted.items() if name not in one}
        found.append(rest | named)
    return found
