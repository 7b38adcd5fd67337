"""What `tenure doctor` says about an SQLite file: version, schema, integrity, the log, where and
whose it is."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from tenure import sql
from tenure.store import Finding
from tenure.stores.listing import WALK
from tenure.stores.rows import waiting_for_the_dead
from tenure.stores.sqlite import mounts
from tenure.stores.sqlite.file import SCHEMA_VERSION, SqliteFile
from tenure.stores.sqlite.gate import GATE, gate_mode
from tenure.stores.sqlite.log import CHECKPOINT_BYTES, log_size

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
        waiting = sql.statements("sqlite")["waiting_for_the_dead"]
        findings += waiting_for_the_dead(db.execute(waiting, {"most": WALK}).fetchone()[:4])
    return [*findings, _log_size(file), *_file_system(file), *_rights(file)]


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
    text = f"SQLite {file.module.sqlite_version} through {file.module.__name__}"
    if not file.fragile:
        return Finding("sqlite", "ok", text)
    return Finding(
        "sqlite",
        "warning",
        f"{text}: before 3.51.3 an automatic checkpoint can lose a commit. Tenure makes its own, "
        "under the write lock, and has switched automatic ones off: on its connections, and on "
        "yours from the first enqueue in one of their transactions (conn=) until they are closed.",
        "switch them off on your other connections to this file too (PRAGMA wal_autocheckpoint=0), "
        "or use a newer SQLite: pip install pysqlite3 and TENURE_SQLITE_MODULE=pysqlite3",
    )


def _log_size(file: SqliteFile) -> Finding:
    size = log_size(file.path)
    megabytes = f"{size / 1e6:.1f} MB"
    if size <= 4 * CHECKPOINT_BYTES:
        return Finding("wal", "ok", megabytes)
    return Finding(
        "wal",
        "warning",
        f"{megabytes}: some connection keeps an old snapshot open, so the log cannot be reset",
        "find the long-running reader (an open cursor or transaction on this file) and end it",
    )


def _file_system(file: SqliteFile) -> list[Finding]:
    mount = mounts.mount_of(file.path)
    if mount is None or not mount.risk:
        return []
    refused = mount.risk == "refused"
    return [
        Finding(
            "file system",
            "problem" if refused else "warning",
            f"{mount.kind}, mounted at {mount.at}: SQLite's write-ahead log needs memory and locks "
            "that all who open the file share",
            "move the file to a local disk, or use PostgreSQL"
            + ("" if refused else "; or let this machine only open it"),
        )
    ]


def _rights(file: SqliteFile) -> list[Finding]:
    findings, database = [], os.stat(file.path)
    if database.st_nlink > 1:
        findings.append(
            Finding(
                "names",
                "problem",
                f"{file.path} has {database.st_nlink} names (hard links): each has a log of its "
                "own, and who opens the file by different names damages it",
                "find them with find -samefile, and delete all but one; symbolic links are fine",
            )
        )
    try:
        gate = os.stat(file.path + GATE)
    except FileNotFoundError:
        return findings
    like_it = gate.st_gid == database.st_gid or not database.st_mode & 0o020
    if stat.S_IMODE(gate.st_mode) != gate_mode(database.st_mode) or not like_it:
        name = os.path.basename(file.path) + GATE
        findings.append(
            Finding(
                "gate",
                "warning",
                f"{name} ({stat.filemode(gate.st_mode)}) does not go with the database "
                f"({stat.filemode(database.st_mode)}): who may write the one must be able to write "
                "the other, and nobody else to open it",
                f"chgrp --reference={file.path} {file.path}{GATE}; "
                f"chmod {gate_mode(database.st_mode):o} {file.path}{GATE}",
            )
        )
    return findings
