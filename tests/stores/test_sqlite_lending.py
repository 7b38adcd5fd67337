"""The transaction a handler is lent: its calls and the clock never wait for each other."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tenure.errors import StoreBusy
from tenure.stores.sqlite import SqliteStore

ROUNDS = 60
HASTE = """
import logging, sys
from tenure.errors import StoreBusy
from tenure.stores.sqlite import SqliteStore

logging.disable()
store = SqliteStore(sys.argv[1])
with store.file.lend(30.0) as db:
    db.execute("CREATE TABLE ledger (entry text)")


def rows():
    while True:
        yield ("row",)


busy = 0
for number in range(int(sys.argv[2])):
    try:
        with store.file.lend(0.01) as db:
            if number % 2:
                db.executemany("INSERT INTO ledger VALUES (?)", rows())
            while True:
                db.execute("INSERT INTO ledger VALUES (?)", ("one",)).fetchall()
    except StoreBusy:
        busy += 1
with store.file.read() as db:
    print(busy, *db.execute("SELECT count(*) FROM ledger").fetchone())
"""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteStore]:
    made = SqliteStore(str(tmp_path / "jobs.db"))
    made.file.migrate()
    with made.file.lend(30.0) as db:
        db.execute("CREATE TABLE ledger (entry text)")
    yield made
    made.close()


def entries(store: SqliteStore) -> list[str]:
    with store.file.read() as db:
        return [entry for (entry,) in db.execute("SELECT entry FROM ledger ORDER BY rowid")]


def test_a_handler_in_a_hurry_and_the_clock(tmp_path: Path) -> None:
    """A process of its own: where they wait for each other, the whole interpreter stands still."""
    ran = subprocess.run(
        [sys.executable, "-c", HASTE, str(tmp_path / "jobs.db"), str(ROUNDS)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert (ran.stdout.split(), ran.stderr) == ([str(ROUNDS), "0"], "")


def test_it_is_a_connection_like_any_other(store: SqliteStore) -> None:
    with store.file.lend(30.0) as db:
        assert isinstance(db, sqlite3.Connection)
        assert db.execute("INSERT INTO ledger VALUES (?)", ("a",)).rowcount == 1
        assert db.execute("INSERT INTO ledger VALUES (:entry)", {"entry": "b"}).lastrowid == 2
        # Rows may come from the connection itself.
        db.executemany(
            "INSERT INTO ledger VALUES (?)",
            ((entry + "!",) for (entry,) in db.execute("SELECT entry FROM ledger").fetchall()),
        )
        cursor = db.cursor()
        cursor.execute("SELECT entry FROM ledger ORDER BY rowid")
        assert cursor.fetchone() == ("a",)
        assert cursor.fetchmany(1) == [("b",)]
        assert [entry for (entry,) in cursor] == ["a!", "b!"]
        cursor.close()
        db.create_function(
            "twice", 1, lambda text: db.execute("SELECT ?", (text * 2,)).fetchone()[0]
        )
        assert db.execute("SELECT twice('x')").fetchall() == [("xx",)]
        db.row_factory = sqlite3.Row
        assert db.execute("SELECT count(*) AS n FROM ledger").fetchone()["n"] == 4

    assert entries(store) == ["a", "b", "a!", "b!"]


def test_rows_that_fail_are_the_handlers_own_error(store: SqliteStore) -> None:
    def rows() -> Iterator[tuple[str]]:
        yield ("a",)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), store.file.lend(30.0) as db:
        db.executemany("INSERT INTO ledger VALUES (?)", rows())

    assert entries(store) == []
    with store.file.lend(30.0) as db:  # the gate is open
        db.execute("INSERT INTO ledger VALUES ('b')")
    assert entries(store) == ["b"]


def test_what_is_kept_of_it_is_of_no_use_later(store: SqliteStore) -> None:
    with pytest.raises(StoreBusy), store.file.lend(0.05) as db:
        cursor = db.execute("SELECT 1 UNION ALL SELECT 2")
        while True:
            try:
                db.execute("INSERT INTO ledger VALUES ('a')")
            except sqlite3.OperationalError as error:
                assert "time is up" in str(error) or "interrupted" in str(error)
                break
        with pytest.raises(sqlite3.Error):
            cursor.fetchall()
    with pytest.raises(sqlite3.ProgrammingError):
        db.execute("SELECT 1")

    assert entries(store) == []
