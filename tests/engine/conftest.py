"""Apps on a file of their own, closed at the end of the test."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tenure
from leaks import assert_nothing_leaked


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "jobs.db"


@pytest.fixture
def make_app(path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[Callable[..., tenure.App]]:
    """Another app on this test's file, as another program would have it."""
    opened: list[tenure.App] = []

    def make(**settings: Any) -> tenure.App:
        chosen = {"lease_seconds": 3, "lease_renew_seconds": 1} | settings
        opened.append(tenure.App(f"sqlite:///{path}", **chosen))
        return opened[-1]

    yield make
    for app in opened:
        app.close()
    assert_nothing_leaked(path, caplog.text)


@pytest.fixture
def app(make_app: Callable[..., tenure.App]) -> tenure.App:
    return make_app()


@pytest.fixture
def count(path: Path) -> Callable[[], int]:
    """How many jobs, and anything else of theirs, the file holds; 0 when there is no file."""

    def rows() -> int:
        if not path.exists():
            return 0
        db = sqlite3.connect(path)
        try:
            tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master")}
            wanted = {"tenure_jobs", "tenure_history", "tenure_keys", "tenure_events"} & tables
            return sum(
                db.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in wanted
            )
        finally:
            db.close()

    return rows
