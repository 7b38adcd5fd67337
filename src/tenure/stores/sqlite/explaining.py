"""What SQLite's errors mean for whoever meets them, and what to do."""

from __future__ import annotations

import os

from tenure import errors

ENDED_INSIDE = (
    "a transaction cannot be ended inside its block, by a commit, a rollback, `with conn:` or "
    "executescript; leave that to the end of the block"
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
        return errors.StoreUnavailable(
            f"{path} cannot be written by this user: make the file, its directory and "
            "its -wal and -tenure.lock neighbours writable."
        )
    if "unable to open" in text:
        return explain_open(path, error)
    if "malformed" in text:
        return errors.StoreUnavailable(
            f"{path} is damaged ({text}). Stop all workers, copy the file with its -wal "
            "file, then try `sqlite3 FILE .recover`."
        )
    return errors.StoreUnavailable(f"{path}: {text}")


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
