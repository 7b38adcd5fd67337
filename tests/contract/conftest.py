"""Every test of this folder runs once per kind of store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tenure.store import Store

from .builders import KINDS, SQL_KINDS, Clock, connect, open_store, rows, temporary_location


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def location(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """Where this test's database is. Empty for tests that open and migrate it themselves."""
    if kind == "sqlite":  # pytest keeps the file of a failed test for a look
        yield str(tmp_path / "jobs.db")
        return
    with temporary_location(kind, migrated="store" in request.fixturenames) as place:
        yield place


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make_store(kind: str, location: str, clock: Clock) -> Iterator[Callable[[], Store]]:
    """Open another store on this test's database, as another process would have it."""
    opened: list[Store] = []

    def make() -> Store:
        opened.append(open_store(kind, location, clock))
        return opened[-1]

    yield make
    for store in opened:
        store.close()


@pytest.fixture
def store(make_store: Callable[[], Store]) -> Store:
    store = make_store()
    store.migrate()
    return store


@pytest.fixture
def sql(kind: str, location: str, store: Store) -> Callable[[str], list[dict[str, Any]]]:
    """Run one statement beside the store; rows as dicts. SQL stores only."""
    if kind not in SQL_KINDS:
        pytest.skip(f"{kind} has no SQL")
    return lambda statement: rows(kind, location, statement)


@pytest.fixture
def connection(kind: str, location: str, store: Store) -> Iterator[Any]:
    """A user's own connection to the database the store lives in. SQL stores only."""
    if kind not in SQL_KINDS:
        pytest.skip(f"{kind} has no transactions to take part in")
    opened = connect(kind, location)
    yield opened
    opened.close()
