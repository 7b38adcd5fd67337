"""What `tenure doctor` says about an SQLite file: version, integrity, the log, the schema."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from tenure import sql
from tenure.store import Finding
from tenure.stores.sqlite.file import CHECKPOINT_BYTES, SCHEMA_VERSION, SqliteFile, wal_reset_bug

if TYPE_CHECKING:
    import sqlite3


REPLACE = (  # the trigger on tenure_jobs does the rest
    "DELETE FROM tenure_due; DELETE FROM tenure_later; DELETE FROM tenure_suspects; "
    "DELETE FROM tenure_leases WHERE id NOT IN (SELECT id FROM tenure_jobs); "
    "UPDATE tenure_jobs SET status = status"
)


def inspect(file: SqliteFile) -> list[Finding]:
    findings = [_version(file)]
    with file.read() as db:
        schema = file.version()
        findings.append(
            Finding("schema", "ok", f"version {schema} of {SCHEMA_VERSION}, up to date")
            if schema == SCHEMA_VERSION
            else Finding(
                "schema", "problem", f"version {schema} of {SCHEMA_VERSION}", "tenure migrate"
            )
        )
        verdict = db.execute("PRAGMA quick_check(3)").fetchall()
        findings.append(
            Finding("integrity", "ok", "quick_check found nothing")
            if verdict == [("ok",)]
            else Finding(
                "integrity",
                "problem",
                "; ".join(str(row[0]) for row in verdict),
                "stop all workers, copy the file with its -wal, then `sqlite3 FILE .recover`",
            )
        )
        findings.append(_places(db))
        mode = db.execute("PRAGMA journal_mode").fetchone()[0]
        if mode != "wal":
            findings.append(
                Finding("journal", "problem", f"journal_mode is {mode}", "tenure migrate")
            )
    findings.append(_log_size(file))
    return findings


def _places(db: sqlite3.Connection) -> Finding:
    (astray,) = db.execute(sql.statements("sqlite")["misplaced"]).fetchone()
    if not astray:
        return Finding("places", "ok", "every job is queued, leased, waiting or dead")
    return Finding(
        "places",
        "problem",
        f"{astray} jobs or places of jobs do not match: something else has written to our tables",
        f'stop all workers, then put every job back into its place: sqlite3 FILE "{REPLACE}"',
    )


def _version(file: SqliteFile) -> Finding:
    version = tuple(file.module.sqlite_version_info)
    text = f"SQLite {file.module.sqlite_version} through {file.module.__name__}"
    if not wal_reset_bug(version):
        return Finding("sqlite", "ok", text)
    return Finding(
        "sqlite",
        "warning",
        f"{text}: before 3.51.3 an automatic checkpoint racing a commit can lose it. Tenure has "
        "switched automatic checkpoints off and makes its own under a lock.",
        "switch them off on your own connections to this file too (PRAGMA wal_autocheckpoint=0), "
        "or use a newer SQLite: pip install pysqlite3 and TENURE_SQLITE_MODULE=pysqlite3",
    )


def _log_size(file: SqliteFile) -> Finding:
    try:
        size = os.stat(f"{file.path}-wal").st_size
    except FileNotFoundError:
        size = 0
    megabytes = f"{size / 1e6:.1f} MB"
    if size <= 4 * CHECKPOINT_BYTES:
        return Finding("wal", "ok", megabytes)
    return Finding(
        "wal",
        "warning",
        f"{megabytes}: some connection keeps an old snapshot open, so the log cannot be reset",
        "find the long-running reader (an open cursor or transaction on this file) and end it",
    )
