"""Hints on PostgreSQL: LISTEN on a connection of its own, driven by whoever waits.

A listening connection fails silently: a firewall forgets it, a pooler gives its server session to
somebody else, and it hears nothing for days. So it is asked in regular intervals whether it still
listens, and one that does not answer is given up. A pooler (it makes up the process number it tells
its clients) must first prove itself with a notification sent through another connection of its;
in transaction mode it does not arrive.

Everything happens inside `wait`, without blocking: it opens, asks and reads as far as the sockets
allow, so `interrupt` works at any moment and a server that is away delays nobody. Only a name is
looked up by a thread.
"""

from __future__ import annotations

import os
import random
import selectors
import socket
import threading
import time
from contextlib import suppress
from typing import Any

from tenure.errors import ConfigError

try:
    import psycopg
except ImportError as error:
    raise ConfigError(
        'PostgreSQL needs a driver that is not installed: pip install "tenure[postgres]"'
    ) from error

from psycopg.conninfo import conninfo_to_dict, make_conninfo

from tenure.wakeups.postgres_session import Address, Down, Lookup, Session, addresses_of, name_in

ANSWER_SECONDS = 5.0
FIRST_BACKOFF, LONGEST_BACKOFF = 0.1, 30.0
FAR = 3600.0
INTERRUPT = b"i"  # said through our own pipe, beside what a look-up says
POOLER = (
    "a pooler (pgbouncer?) is in between and does not pass notifications on: set "
    "TENURE_LISTEN_URL to the server itself"
)


class PostgresWakeup:
    PROBE_SECONDS = 20.0

    def __init__(
        self, url: str, schema: str, *, enabled: bool = True, poll_seconds: float = 1.0
    ) -> None:
        self._url = url
        self._channel = schema
        self._enabled = enabled
        self._poll_seconds = poll_seconds
        self._addresses = addresses_of(url) if enabled else []
        self._attempts = 0
        self._backoff = 0.0
        self._waiting = threading.Lock()
        self._closed = False
        self._abandoned: list[Any] = []
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._inbox, self._outbox = socket.socketpair()
        self._inbox.setblocking(False)
        self._outbox.setblocking(False)
        self._lookup: Lookup | None = None
        self._target = b""  # what the session is, or will be, connected with
        self._session: Session | None = None
        self._echo: Session | None = None  # a second client of a pooler, for its proof
        self._up = False
        self._reason = "it has not connected yet"
        self._due = 0.0  # when the state we are in has lasted long enough

    # -- the contract -------------------------------------------------------------------------
    def wait(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        pause = 0.0
        with self._waiting:
            if self._process != os.getpid():
                self._forget()
            while not self._closed:
                if self._sleep(pause):
                    return False
                if self._enabled and self._advance():
                    return True
                now = time.monotonic()
                if now >= deadline:
                    return False
                pause = min(deadline - now, max(0.0, self._due - now) if self._enabled else FAR)
        return False

    def interrupt(self) -> None:
        with suppress(OSError):  # one is pending already, or it is closed
            self._outbox.send(INTERRUPT)

    def healthy(self) -> bool:
        return self._up

    def describe(self) -> str:
        if not self._enabled:
            return "hints: off (TENURE_NOTIFY=0), polling"
        if self._up:
            return f"hints: LISTEN {self._channel}"
        every = f"{self._poll_seconds:g} s"
        return f"hints: down, polling every {every}, because {self._reason}"

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.interrupt()
        with self._waiting:
            self._drop()
            self._reason = "it was closed"
            self._inbox.close()
            self._outbox.close()

    # -- sleeping -----------------------------------------------------------------------------
    def _sleep(self, seconds: float) -> bool:
        """Until a socket has something for us or the time is up; True when interrupted."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._inbox, selectors.EVENT_READ)
            sessions = [each for each in (self._session, self._echo) if each is not None]
            for session in sessions:
                selector.register(session.handle, session.events, session)
            ready = {key.data for key, _ in selector.select(seconds)}
        for session in sessions:
            session.is_ready = session in ready
        if None not in ready:
            return False
        said = b""
        with suppress(BlockingIOError):
            while data := self._inbox.recv(4096):
                said += data
        return INTERRUPT in said

    # -- one step of whatever we are in -------------------------------------------------------
    def _advance(self) -> bool:
        """As far as it goes without waiting. True: look for jobs now."""
        try:
            if self._lookup is not None:
                self._await(self._lookup)
                return False
            if self._session is None:
                if time.monotonic() >= self._due:
                    self._open()
                return False
            for each in (self._session, self._echo):
                if each is not None and each.is_ready:
                    each.advance()
                    if not self._up:  # who waits for us may look in seldom: each step has its time
                        self._due = time.monotonic() + ANSWER_SECONDS
            return self._progress(self._session)
        except (psycopg.Error, OSError) as error:
            deaf, self._up = self._up, False
            self._go_down(str(error))
            return deaf  # hints may have been missed: look now, and poll from then on

    def _open(self) -> None:
        """One host at a time: the driver below has no time-out of its own to go on to the next."""
        turn, number = divmod(self._attempts, len(self._addresses))
        self._attempts += 1
        self._due = time.monotonic() + ANSWER_SECONDS
        address = self._addresses[number]
        host = name_in(address)
        if host is None:
            self._connect(address)
        else:
            self._lookup = Lookup(address, host, turn, self._outbox)

    def _await(self, lookup: Lookup) -> None:
        if lookup.found is not None:
            self._lookup = None
            self._connect(lookup.found)
        elif lookup.error is not None:
            raise Down(f"the name {lookup.host!r} cannot be looked up: {lookup.error}")
        elif time.monotonic() >= self._due:
            seconds = f"{ANSWER_SECONDS:g} s"
            raise Down(f"the name {lookup.host!r} was not looked up within {seconds}")

    def _connect(self, address: Address) -> None:
        self._due = time.monotonic() + ANSWER_SECONDS
        self._target = make_conninfo("", **address).encode()
        self._session = Session(self._target, f'LISTEN "{self._channel}"; SELECT pg_backend_pid()')

    def _progress(self, session: Session) -> bool:
        hinted = session.heard()
        answer = session.answer()
        now = time.monotonic()
        if self._up:
            if answer is not None:
                if answer != b"1":
                    raise Down("the session does not listen any more")
                self._due = now + self.PROBE_SECONDS
            elif now >= self._due:
                self._probe(session, now)
            return hinted
        if self._echo is not None:
            if hinted:
                return self._go_up(now)
            if now >= self._due:
                raise Down(POOLER)
        elif answer is not None:
            if answer == str(session.backend).encode():
                return self._go_up(now)
            self._due = now + ANSWER_SECONDS
            proof = f"SELECT pg_notify('{self._channel}', '')"
            self._echo = Session(self._target, proof)
        elif now >= self._due:
            raise Down(f"the server did not answer within {ANSWER_SECONDS:g} s")
        return False

    def _probe(self, session: Session, now: float) -> None:
        if session.asked:
            raise Down(f"the session did not answer within {ANSWER_SECONDS:g} s")
        channel = f"'{self._channel}'"
        session.ask(f"SELECT 1 FROM pg_listening_channels() c WHERE c = {channel}")  # noqa: S608
        self._due = now + ANSWER_SECONDS

    def _go_up(self, now: float) -> bool:
        """Whatever was said while nobody listened is found by looking: True, once."""
        if self._echo is not None:
            self._echo.close()
            self._echo = None
        self._up = True
        self._backoff = 0.0
        self._due = now + self.PROBE_SECONDS
        return True

    def _go_down(self, reason: str) -> None:
        self._drop()
        self._reason = _first_line(reason, self._url)
        self._backoff = min(max(self._backoff * 2, FIRST_BACKOFF), LONGEST_BACKOFF)
        self._due = time.monotonic() + self._backoff * random.uniform(0.5, 1.0)

    def _drop(self) -> None:
        self._up = False
        for session in (self._session, self._echo):
            if session is not None:
                session.close()
        self._session = self._echo = self._lookup = None

    def _forget(self) -> None:
        """In a forked child: the parent's sockets are left alone, not closed."""
        self._abandoned += [self._session, self._echo, self._inbox, self._outbox]
        self._begin()


def _first_line(reason: str, url: str) -> str:
    password = conninfo_to_dict(url).get("password")
    line = (reason.strip().splitlines() or ["the connection was lost"])[0]
    return line.replace(str(password), "***") if password else line
