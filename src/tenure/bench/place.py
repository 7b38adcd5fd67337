"""`tenure bench`: where it measures. What differs between stores is said here and nowhere else.

A place gives a fresh database to every section and takes it away afterwards, runs the raw loop of
its store, and reads what the contract of a store does not offer, because only a benchmark asks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from tenure.config import Settings

DAY_MS = 86_400_000
FILL_STEP = 100_000

Tell = Callable[[int, int, str], None]  # done, total, what


class Completions(NamedTuple):
    """What history has; milliseconds of the store's own clock."""

    jobs: int
    first: int
    last: int

    @property
    def rate(self) -> float:
        return self.jobs / max((self.last - self.first) / 1000, 0.001)


class Caller(NamedTuple):
    """A program with tables of its own beside ours, as `options(conn=…)` meets it."""

    connection: Any  # in autocommit, so that a transaction begins where it says so
    begin: str
    insert: str  # one row of its own, one parameter


class Place(ABC):
    """One store, and what its figures are held against."""

    directory: str  # of the benchmark's own: logs of its workers
    machine: dict[str, Any]  # what the report says of the store
    headline: str  # the same for people
    warning: str = ""
    # Processes of the draining workers, unless told otherwise: the first is the one compared.
    processes: tuple[int, ...] = (1,)
    bars: Mapping[str, float]  # by the name of their figure, beside those all stores share
    raw_titles: Mapping[str, str]  # what a raw bulk insert is here

    @abstractmethod
    def fresh(self) -> AbstractContextManager[Settings]:
        """A database that nobody has used, for the length of the block."""

    @abstractmethod
    def raw_loop(self, jobs: int, singles: int, tell: Tell) -> dict[str, float]:
        """Jobs a second of the least a queue on this store could be: `single`, `bulk`, `loop`."""

    @abstractmethod
    def completions(self, store: Any, after: int = 0) -> Completions:
        """Of the jobs that history says were completed later than `after`."""

    @abstractmethod
    def before_last(self, store: Any, count: int) -> int:
        """When the last completion before the last `count` was; 0 when there are no more."""

    @abstractmethod
    def fill(self, store: Any, each: int, queue: str, tell: Tell) -> None:
        """So many queued in `queue`, so many in `default` due tomorrow, so many finished; written
        by SQL, not enqueued, and tidied up as the store would have done by then."""

    @abstractmethod
    def caller(self, store: Any) -> AbstractContextManager[Caller]:
        """A connection of the benchmark's own to the database of this store."""

    @abstractmethod
    def snapshot(self, store: Any) -> AbstractContextManager[None]:
        """Somebody reads in a transaction that is open for the length of the block."""


def open_place(url: str | None) -> AbstractContextManager[Place]:
    """On the disk or the server of the URL's database, which itself is left alone."""
    from tenure.config import Settings

    settings = Settings.load(url=url)
    if settings.url.startswith("sqlite:"):
        from tenure.bench.sqlite import sqlite_place

        return sqlite_place(settings)
    if settings.url.startswith(("postgresql:", "postgres:")):
        from tenure.bench.postgres import postgres_place

        return postgres_place(settings)
    from tenure.errors import ConfigError

    raise ConfigError(
        "bench measures SQLite and PostgreSQL: give --url sqlite:///some/file.db or "
        "postgresql://user@host/name"
    )
