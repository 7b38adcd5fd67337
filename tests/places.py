"""Where the jobs of a test are stored, seen from beside Tenure: its URL, SQL on it, a lock held.

Tests of the engine and of crashes run once per kind of store: they ask for `place`, or for an app
or a workshop on it. One that is about a single kind says so, and why: `@only("sqlite", "…")`.
"""

from __future__ import annotations

import fcntl
import os
import re
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Protocol

import pytest

from contract.builders import connect, show_as_sqlite_does
from tenure import sql

KINDS = ("sqlite", "postgres")
Rows = list[tuple[Any, ...]]


def only(kind: str, why: str) -> pytest.MarkDecorator:
    """This test on one kind of store; the reason is for readers."""
    assert kind in KINDS, kind
    assert why
    return pytest.mark.parametrize("store_kind", [kind], indirect=True)


class Place(Protocol):
    kind: str
    url: str

    def sql(self, statement: str, *parameters: Any) -> Rows:
        """Run one statement in SQLite's words (`tenure_jobs`, `?`) and commit; ids are ULIDs,
        JSON is text, on every kind."""

    def locked(self, table: str = "jobs") -> Any:
        """A foreign program keeps everybody from writing for the length of the block."""

    def quiet(self) -> bool:
        """Nobody is inside a transaction at this moment."""

    def exists(self) -> bool:
        """It has Tenure's tables."""


class SqlitePlace:
    kind = "sqlite"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.url = f"sqlite:///{path}"

    def sql(self, statement: str, *parameters: Any) -> Rows:
        with closing(sqlite3.connect(self.path, timeout=30)) as db, db:
            return db.execute(statement, parameters).fetchall()

    @contextmanager
    def locked(self, table: str = "jobs") -> Iterator[None]:
        """One lock for the whole file: the table does not matter."""
        with closing(sqlite3.connect(self.path, timeout=30, isolation_level=None)) as db:
            db.execute("BEGIN IMMEDIATE")
            yield
            db.execute("ROLLBACK")

    def quiet(self) -> bool:
        handle = os.open(f"{self.path}-tenure.lock", os.O_RDWR)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        finally:
            os.close(handle)
        return True

    def exists(self) -> bool:
        if not self.path.is_file():
            return False
        try:
            return bool(self.sql("SELECT 1 FROM sqlite_master WHERE name = 'job_queue'"))
        except sqlite3.DatabaseError:
            return False  # a test about files that are no databases


class PostgresPlace:
    kind = "postgres"

    def __init__(self, url: str) -> None:
        self.url = url

    def sql(self, statement: str, *parameters: Any) -> Rows:
        words = re.sub(r"\btenure_", "tenure.", statement).replace("%", "%%").replace("?", "%s")
        with closing(connect(self.kind, self.url)) as connection:
            show_as_sqlite_does(connection)
            connection.execute("SET search_path = public, tenure")  # new tables are the user's
            cursor = connection.execute(words, parameters)
            return cursor.fetchall() if cursor.description else []

    @contextmanager
    def locked(self, table: str = "jobs") -> Iterator[None]:
        with closing(connect(self.kind, self.url)) as connection:
            connection.execute("BEGIN")
            connection.execute(f"LOCK TABLE tenure.{table} IN ACCESS EXCLUSIVE MODE")
            yield
            connection.execute("ROLLBACK")

    def quiet(self) -> bool:
        return not self.sql(
            "SELECT pid FROM pg_stat_activity WHERE datname = current_database()"
            " AND pid <> pg_backend_pid() AND backend_type = 'client backend' AND state <> 'idle'"
        )

    def exists(self) -> bool:
        return bool(self.sql("SELECT 1 WHERE to_regclass('tenure.job_queue') IS NOT NULL"))


# -- fixtures, for the conftest.py of a folder ----------------------------------------------------


@pytest.fixture(params=KINDS)
def store_kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def place(
    store_kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[SqlitePlace | PostgresPlace]:
    """A database of this test's own: no file yet, or a database with Tenure's tables. Whatever
    the test does, in the end each job stands where it should."""
    if store_kind == "sqlite":
        file = SqlitePlace(tmp_path / "jobs.db")
        yield file
        if file.exists():
            assert file.sql(sql.statements("sqlite")["misplaced"]) == [(0,)]
        return
    make: Callable[..., str] = request.getfixturevalue("make_database")
    yield PostgresPlace(make(migrated=True))
