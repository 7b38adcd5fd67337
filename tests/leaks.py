"""Nothing of a payload in what is stored or logged about a failure: checked after every test that
runs jobs, over all it has left behind."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from tenure.secrecy import scrub

STORED = """
SELECT type, payload, error FROM job_queue WHERE error IS NOT NULL
UNION ALL
SELECT j.type, j.payload, e.data ->> 'error'
  FROM tenure_events e JOIN job_queue j ON j.id = e.job_id WHERE e.data ->> 'error' IS NOT NULL
"""


def assert_nothing_leaked(database: Path, logs: str = "") -> None:
    """Scrubbing what was stored again must find nothing to scrub."""
    if not database.is_file():
        return
    db = sqlite3.connect(database)
    try:
        known = db.execute("SELECT 1 FROM sqlite_master WHERE name = 'job_queue'").fetchone()
        rows = set(db.execute(STORED).fetchall()) if known else set()
    except sqlite3.DatabaseError:
        return  # a test about files that are no databases
    finally:
        db.close()
    leaks = [
        f"{type_}: {error}" for type_, payload, error in rows if scrub(error, payload) != error
    ]
    assert leaks == [], "payload values in stored errors"
    lines = [line for line in logs.splitlines() if "Error" in line]
    payloads = {payload for _type, payload, _error in rows}
    told = [line for line in lines for payload in payloads if scrub(line, payload) != line]
    assert told == [], "payload values in logged errors"
