"""A few connections, opened when needed and handed out last in, first out.

The common case, an idle connection and nobody waiting, takes no lock: `pop` and `append` of a list
are atomic, and whoever waits has said so before it looks at the list a last time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from tenure.stores.postgres.connecting import Connection, stirred


class NoneFree(Exception):
    """All connections were in use for as long as the caller may wait."""


class Pool:
    def __init__(self, most: int, connect: Callable[[float], Connection]) -> None:
        self.most = most
        self._connect = connect
        self._inherited: list[Connection] = []
        self._all: set[Connection] = set()
        self._generation = 0
        self.forget()

    def forget(self) -> None:
        """In a forked child: the parent's connections are neither used nor closed here, and kept
        referenced so that they are not finalised either."""
        self._inherited += self._all
        self._all = set()
        self._idle: list[Connection] = []
        self._room = threading.Condition()
        self._count = 0
        self._waiting = 0
        self._generation += 1

    def __len__(self) -> int:
        return self._count

    def take(self, deadline: float) -> Connection:
        """A connection that looked alive a moment ago, its deadline set."""
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                found = self._wait(deadline)
                if found is None:
                    return self._open(deadline)
                connection = found
            if not stirred(connection):
                connection.deadline = deadline
                return connection
            self.drop(connection)

    def give(self, connection: Connection) -> None:
        if connection.generation != self._generation or not connection.reusable():
            self.drop(connection)
            return
        self._idle.append(connection)
        if self._waiting:
            with self._room:
                self._room.notify()

    def drop(self, connection: Connection) -> None:
        connection.close()
        if connection not in self._all:  # of a time before close(), or of a parent process
            return
        with self._room:
            self._all.discard(connection)
            self._count -= 1
            self._room.notify()

    def sweep(self, *, every: bool = False) -> None:
        """Drop the idle connections that are broken too, or every idle one."""
        kept: list[Connection] = []
        while self._idle:
            try:
                connection = self._idle.pop()
            except IndexError:  # another thread took the last one
                break
            if every or stirred(connection):
                self.drop(connection)
            else:
                kept.append(connection)
        for connection in kept:
            self.give(connection)

    def close(self) -> None:
        """Idle connections now, those in use when they are given back."""
        with self._room:
            self._generation += 1
            idle, self._idle = self._idle, []
            self._all, self._count = set(), 0
            self._room.notify_all()
        for connection in idle:
            connection.close()

    def _wait(self, deadline: float) -> Connection | None:
        """An idle connection, or None for leave to open one."""
        with self._room:
            self._waiting += 1
            try:
                while True:
                    if self._idle:
                        return self._idle.pop()
                    if self._count < self.most:
                        self._count += 1
                        return None
                    left = deadline - time.monotonic()
                    if left <= 0:
                        raise NoneFree
                    self._room.wait(left)
            finally:
                self._waiting -= 1

    def _open(self, deadline: float) -> Connection:
        generation = self._generation
        try:
            connection = self._connect(deadline)
        except BaseException:
            with self._room:
                if generation == self._generation:
                    self._count -= 1
                self._room.notify()
            raise
        connection.generation = generation
        with self._room:
            if generation == self._generation:
                self._all.add(connection)
        return connection
