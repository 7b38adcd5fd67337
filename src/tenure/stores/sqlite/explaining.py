"""What SQLite's errors mean for whoever meets them, and what to do."""

from __future__ import annotations

import os

from tenure import errors

ENDED_INSIDE = (
    "a transaction cannot be ended inside its block, by a commit, a rollback, `with conn:` or "
    "executescript; leave that to the end of the block"
)


def not_writable(path: str) -> errors.StoreError:
    return errors.StoreUnavailable(
        f"this user may not write {path}: make the file, its directory and its -wal, -shm and "
        "-tenure.lock neighbours writable for it."
    )


def explain(path: str, busy_timeout: float, error: Exception) -> errors.StoreError:
    text = str(error)
    if "locked" in text or "busy" in text:
        return errors.StoreBusy(
            f"{path} is locked: another connection has been writing for more than "
            f"{busy_timeout:g} s. Nothing was changed; try again, and keep transactions "
            "on this file short."
        )
    if "not authorized" in text:  # see Loan
        return errors.StoreError(ENDED_INSIDE)
    if "not a database" in text:
        return errors.StoreUnavailable(
            f"{path} is not an SQLite database. Choose another path in the URL "
            "(sqlite:///other.db), or move that file away."
        )
    if "readonly" in text or "read-only" in text:
        return not_writable(path)
    if "unable to open" in text:
        return explain_open(path, error)
    if "malformed" in text:
        return errors.StoreUnavailable(
            f"{path} is damaged ({text}). Stop all workers, copy the file with its -wal "
            "file, then try `sqlite3 FILE .recover`."
        )
    if "Could not decode" in text:
        return errors.StoreUnavailable(
            f"{path} has a row whose text is not UTF-8, written by another program ({text[:80]}). "
            "Nothing was changed; called again, this program reads it with U+FFFD in place of it."
        )
    if "disk is full" in text:
        return errors.StoreUnavailable(
            f"the disk of {path} is full. Nothing was changed; make room and try again."
        )
    if "disk I/O error" in text:
        return errors.StoreUnavailable(
            f"{path} cannot be read or written ({text}): a failing disk, a quota or `ulimit -f` "
            "used up, or its -wal or -shm file deleted under a running program. Nothing was "
            "changed; see what the system log says, then try again."
        )
    return errors.StoreUnavailable(f"{path}: {text}")


def shut(path: str, timeout: float) -> errors.StoreError:
    return errors.StoreBusy(
        f"Another process has been writing to {path} for more than {timeout:g} s. Nothing was "
        "changed; try again. If it stays so, `tenure doctor` shows who holds the file (a stopped "
        "process, a long transaction)."
    )


def gone(path: str) -> errors.StoreError:
    return errors.StoreUnavailable(
        f"{path} was deleted or moved away while this program had it open. Put it back: the "
        "program goes on with whatever file is there. (The next enqueue makes a new, empty one.)"
    )


def restless(path: str) -> errors.StoreError:
    return errors.StoreUnavailable(
        f"{path} is being replaced again and again. Nothing was changed; try again later."
    )


def no_log(path: str, mode: str) -> errors.StoreError:
    return errors.StoreUnavailable(
        f"{path} cannot be switched from journal_mode={mode} to WAL: its file system has no shared "
        "memory for it, or another program keeps it open. Close that program, or use a local disk."
    )


def on_network(path: str, kind: str, mounted_at: str) -> errors.StoreError:
    return errors.StoreUnavailable(
        f"{path} is on a network file system ({kind} at {mounted_at}). SQLite's write-ahead log "
        "does not work there: jobs get lost without an error. Use a local disk; for several "
        "machines, postgresql://. If only one machine ever opens it: TENURE_ALLOW_NETWORK_FILE=1."
    )


def explain_gate(path: str, gate: str, error: OSError) -> errors.StoreError:
    if os.path.exists(path) and not os.access(path, os.W_OK):
        return not_writable(path)
    return errors.StoreUnavailable(
        f"{gate} cannot be opened by this user ({error.strerror or error}), who may write {path}: "
        "its owner gives it the same owner, group and permissions (chown, chmod g+rw), or removes "
        "it while no program uses the file."
    )


def explain_open(path: str, error: Exception) -> errors.StoreError:
    directory = os.path.dirname(path)
    if not os.path.isdir(directory):
        return errors.StoreUnavailable(
            f"{path} cannot be created: there is no directory {directory}. "
            "Create it, or correct the URL (sqlite:///relative.db, sqlite:////absolute.db)."
        )
    return errors.StoreUnavailable(
        f"{path} cannot be opened ({error}). Check that the user running this may read "
        f"and write it and its directory {directory}."
    )
