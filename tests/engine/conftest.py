"""Apps on a database of their own, of each kind, closed at the end of the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tenure
from crash.conftest import workshop
from leaks import assert_nothing_leaked
from places import Place, SqlitePlace, place, store_kind

__all__ = ["place", "store_kind", "workshop"]
COUNTED = ("jobs", "history", "keys", "events")


@pytest.fixture
def path(place: Place) -> Path:
    """The file, for tests that are about one."""
    assert isinstance(place, SqlitePlace), 'say @only("sqlite", "…")'
    return place.path


@pytest.fixture
def make_app(place: Place, caplog: pytest.LogCaptureFixture) -> Iterator[Callable[..., tenure.App]]:
    """Another app on this test's database, as another program would have it."""
    opened: list[tenure.App] = []

    def make(**settings: Any) -> tenure.App:
        chosen = {"lease_seconds": 3, "lease_renew_seconds": 1} | settings
        opened.append(tenure.App(place.url, **chosen))
        return opened[-1]

    yield make
    for app in opened:
        app.close()
    assert_nothing_leaked(place, caplog.text)


@pytest.fixture
def app(make_app: Callable[..., tenure.App]) -> tenure.App:
    return make_app()


@pytest.fixture
def count(place: Place) -> Callable[[], int]:
    """How many jobs, and anything else of theirs, are stored; 0 when there are no tables."""

    def rows() -> int:
        if not place.exists():
            return 0
        return sum(place.sql(f"SELECT count(*) FROM tenure_{table}")[0][0] for table in COUNTED)

    return rows
