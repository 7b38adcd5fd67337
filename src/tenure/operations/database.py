"""The database itself: where it is, whether it is there, whether its hints arrive.

With `schema.py` the only part of operations that names concrete stores.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from tenure.errors import SchemaError, StoreUnavailable
from tenure.store import Finding

if TYPE_CHECKING:
    from tenure.app import App
    from tenure.store import Store
    from tenure.stores.postgres import PostgresStore
    from tenure.wakeup import Wakeup

HINT_SECONDS = 2.0
POOLER_SECONDS = 6.0  # a listener gives a pooler 5 s to prove itself, then it knows why not


def as_postgres(store: Store) -> PostgresStore | None:
    """The store if it is on a PostgreSQL server; its driver is loaded for no other."""
    if not hasattr(store, "database"):
        return None
    from tenure.stores.postgres import PostgresStore

    return store if isinstance(store, PostgresStore) else None


def file_of(url: str) -> str | None:
    """The SQLite file that a URL names, after a store has been opened on it, which checks the URL;
    None for a server."""
    return os.path.abspath(url.removeprefix("sqlite:///")) if url.startswith("sqlite:") else None


def place(url: str) -> str:
    """Where the database is, for people: a file, or host, port and name; never a password."""
    path = file_of(url)
    if path is not None:
        return path
    from tenure.stores.postgres.connecting import location

    return location(url)


def require(app: App) -> None:
    """The database of the app must be there already. A store on a server makes nothing by itself:
    its first call says that tables are missing."""
    store, path = app.store, file_of(app.settings.url)
    if path is None:
        return
    if not os.path.isfile(path):
        raise StoreUnavailable(
            f"there is no database at {path}; enqueue something first or correct the URL"
        )
    if has_no_tables(store):
        raise SchemaError(
            f"{path} has no Tenure tables; enqueue something first, run `tenure migrate`, or "
            "correct the URL"
        )


def has_no_tables(store: Store) -> bool:
    """Looks into an SQLite file without creating any: a store opened for anything else would."""
    from tenure.stores.sqlite import SqliteStore

    if not isinstance(store, SqliteStore):
        return False
    try:
        return store.file.missing()
    except store.file.module.Error as error:
        raise store.file.explain(error) from error


def settle_for_reading(store: Store) -> None:
    """Where no server takes writes, a standby will do for what only reads."""
    if (postgres := as_postgres(store)) is not None:
        from tenure.stores.postgres.doctor import settle_for_a_standby

        settle_for_a_standby(postgres.database)


# ------------------------------------------------------------------------------- hints


def hints(app: App) -> Finding:
    """How hints travel. One is sent where that is possible: a path that looks open may end in a
    pooler or a firewall."""
    wakeup = app.open_wakeup()
    try:
        arrived = _round_trip(app, wakeup)
        text = wakeup.describe().removeprefix("hints: ")
        if arrived or not app.settings.notify:
            return Finding("hints", "ok" if wakeup.healthy() else "warning", text)
        if wakeup.healthy():
            text = f"one that was sent did not arrive within {HINT_SECONDS:g} s ({text})"
        remedy = "set TENURE_LISTEN_URL to the same database on the server itself, past any pooler;"
        return Finding("hints", "warning", text, f"{remedy} jobs run without, up to 1 s later")
    finally:
        wakeup.close()


def _round_trip(app: App, wakeup: Wakeup) -> bool:
    """True where a hint of ours has arrived, or where there is nothing to send one through."""
    if file_of(app.settings.url) is not None:
        return True
    postgres = as_postgres(app.store)
    if not app.settings.notify or postgres is None:
        return False
    patience = POOLER_SECONDS if postgres.database.pooled else HINT_SECONDS
    deadline = time.monotonic() + patience
    while not wakeup.healthy() and (left := deadline - time.monotonic()) > 0:
        wakeup.wait(left)
    if not wakeup.healthy():
        return False
    postgres.notices.hint([""])
    return wakeup.wait(HINT_SECONDS)
