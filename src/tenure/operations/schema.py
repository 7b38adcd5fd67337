"""The tables: pending migrations, also as SQL; the grants of a role; rules that the tables' owner
lays down for every program."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from tenure import sql
from tenure.errors import ConfigError, StoreError
from tenure.operations import database
from tenure.record import Record

if TYPE_CHECKING:
    from tenure.app import App
    from tenure.operations.scope import Scope
    from tenure.sql import Migration
    from tenure.stores.postgres import PostgresStore

SETTABLE = ("keep_events", "keep_history", "audit")
NOTHING = "-- up to date: nothing is pending\n"


class Script(Record):
    """SQL to be run by a person who has the right to. `version` is that of the tables there are;
    None where the database could not be asked, and `note` says why."""

    sql: str
    version: int | None = None
    schema: str | None = None  # on PostgreSQL
    migrations: tuple[Migration, ...] = ()  # on SQLite: what it is made of
    note: str | None = None


class Schema:
    def __init__(self, app: App, scope: Scope) -> None:
        self._app = app
        self._scope = scope
        self._postgres = database.as_postgres(app.store)

    @property
    def on_a_server(self) -> bool:
        """Grants and the way back are for PostgreSQL: an SQLite file has its mode, and is moved."""
        return self._postgres is not None

    def migrate(self, grant: str | None = None) -> list[str]:
        """Create or upgrade the tables; the names of what ran. `grant`: then grant this role what a
        worker needs. A name that cannot be, or a role that is not there, changes nothing."""
        if self._postgres is None:
            return self._app.migrate()
        from tenure.stores.postgres import grants

        if grant is not None:
            grants.quoted(grant)
            grants.require_role(self._postgres.database, grant)
        applied = self._app.migrate()
        self._postgres.database.rows("add_partitions", {"now": None})
        if grant is not None:
            grants.grant(self._postgres.database, grant)
        return applied

    def lay_down(self, settings: Mapping[str, float | str | None]) -> None:
        """For every program on these tables: seconds that events and finished jobs are kept at
        least, the least that is audited; None takes it back."""
        for name, value in settings.items():
            if name not in SETTABLE:
                raise ConfigError(f"the owner of the tables lays down {', '.join(SETTABLE)}")
            text = str(int(value * 1000)) if isinstance(value, int | float) else value
            self._app.store.lay_down(name, text, by=self._scope.by.id)

    def script(self, *, reverse: bool = False, grant: str | None = None) -> Script:
        """What is pending, or the way back; runs nothing."""
        if self._postgres is None:
            return _sqlite_script(self._pending())
        return _postgres_script(self._postgres, reverse=reverse, grant=grant)

    def _pending(self) -> list[Migration]:
        """What an SQLite file has not had yet; looks without creating or changing anything."""
        from tenure.stores.sqlite import SqliteStore

        store, path = self._app.store, database.file_of(self._app.settings.url)
        migrations = sql.migrations("sqlite")
        if path is not None and not os.path.isfile(path):
            return migrations
        if database.has_no_tables(store) or not isinstance(store, SqliteStore):
            return migrations
        version = store.file.version()
        return [migration for migration in migrations if migration.version > version]


def _sqlite_script(migrations: list[Migration]) -> Script:
    if not migrations:
        return Script(NOTHING)
    parts = ["PRAGMA journal_mode=WAL;\n"]
    for migration in migrations:
        title = f"-- migration {migration.version:04d}_{migration.name}"
        stamp = sql.stamp(migration).replace(":now", "unixepoch() * 1000")
        text = migration.text.rstrip()
        parts.append(f"\n{title}\nBEGIN IMMEDIATE;\n{text}\n{stamp};\nCOMMIT;\n")
    return Script("".join(parts), migrations=tuple(migrations))


def _postgres_script(store: PostgresStore, *, reverse: bool, grant: str | None) -> Script:
    """From the version the database has; from nothing where it cannot be asked."""
    from tenure.stores.postgres import grants, schema

    if grant is not None:
        grants.quoted(grant)
    name, note = store.database.schema, None
    try:
        version = _version(store)
    except StoreError as error:
        whole = "the reverse of everything" if reverse else "the script from nothing"
        version, note = None, f"{whole}, because the database could not be asked: {error}"
    if reverse:
        script = "-- nothing to take back\n" if version == 0 else schema.reverse_sql(name)
        return Script(script, version, name, note=note)
    script = schema.forward_sql(name, version or 0)
    if grant is not None:
        granting = grants.grant_sql(name, grant)
        script += f"\n-- what a worker's role needs\nBEGIN;\n{granting}COMMIT;\n"
    return Script(script, version, name, note=note)


def _version(store: PostgresStore) -> int:
    from tenure.stores.postgres.examining import Examination

    examination = Examination(store.database)
    try:
        return int(examination.ask("version")[0][0]) if examination.tables.stamped else 0
    finally:
        examination.close()
