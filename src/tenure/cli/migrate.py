"""`tenure migrate`: create or upgrade the tables, or print the SQL for somebody who may."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from tenure.cli import output, target
from tenure.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from tenure.app import App
    from tenure.sql import Migration
    from tenure.stores.postgres import PostgresStore

NOTHING = "-- up to date: nothing is pending"


def add_commands(commands: target.Commands) -> None:
    parser = target.add_command(commands, "migrate", "create or upgrade the tables")
    parser.add_argument(
        "--sql", action="store_true", help="print the SQL of what is pending, run nothing"
    )
    parser.add_argument(
        "--reverse",
        action="store_true",
        help="with --sql, on PostgreSQL: print what takes everything back instead",
    )
    parser.add_argument(
        "--grant",
        metavar="ROLE",
        help="on PostgreSQL: also grant this role what a worker needs (with --sql: print it)",
    )
    parser.set_defaults(run=migrate)


def migrate(args: argparse.Namespace) -> int:
    with target.anywhere(args) as (app, _):
        if app.settings.url.startswith("sqlite:"):
            return _sqlite(app, args)
        return _postgres(app, args)


def _say(applied: list[str], args: argparse.Namespace) -> None:
    if args.json:
        output.say_json({"applied": applied} | ({"granted": args.grant} if args.grant else {}))
        return
    output.say("\n".join(f"applied {name}" for name in applied) or "up to date")
    if args.grant:
        output.say(f"granted {args.grant} what a worker needs")


# ------------------------------------------------------------------------------- SQLite


def _sqlite(app: App, args: argparse.Namespace) -> int:
    if args.grant is not None:
        raise ConfigError("--grant is for PostgreSQL: who may use an SQLite file, its mode says")
    if args.reverse:
        raise ConfigError("--reverse is for PostgreSQL; an SQLite file is moved away or deleted")
    if args.sql:
        _print_sqlite(pending(app), args)
    else:
        _say(app.migrate(), args)
    return 0


def pending(app: App) -> list[Migration]:
    """What has not run yet; looks without creating or changing anything."""
    from tenure import sql
    from tenure.stores.sqlite import SqliteStore

    path, store = target.database_file(app.settings.url), app.store
    migrations = sql.migrations("sqlite")
    if path is not None and not os.path.isfile(path):
        return migrations
    if target.has_no_tables(store) or not isinstance(store, SqliteStore):
        return migrations
    version = store.file.version()
    return [migration for migration in migrations if migration.version > version]


def _print_sqlite(migrations: list[Migration], args: argparse.Namespace) -> None:
    from tenure import sql

    if args.json:
        for migration in migrations:
            output.say_json(migration._asdict())
        return
    if not migrations:
        output.say(NOTHING)
        return
    output.say("PRAGMA journal_mode=WAL;")
    for migration in migrations:
        title = f"-- migration {migration.version:04d}_{migration.name}"
        output.say(f"\n{title}\nBEGIN IMMEDIATE;\n{migration.text.rstrip()}")
        output.say(f"{sql.stamp(migration).replace(':now', 'unixepoch() * 1000')};\nCOMMIT;")


# ------------------------------------------------------------------------------- PostgreSQL


def _postgres(app: App, args: argparse.Namespace) -> int:
    from tenure.stores.postgres import PostgresStore, grants

    store = app.store
    if not isinstance(store, PostgresStore):  # pragma: no cover  app.py has no third kind
        raise ConfigError("this database has no migrations")
    if args.reverse and not args.sql:
        raise ConfigError(
            "--reverse drops the tables with all jobs in them, so it only prints: "
            "tenure migrate --sql --reverse"
        )
    if args.reverse and args.grant is not None:
        raise ConfigError("give --reverse or --grant, not both")
    if args.grant is not None:
        grants.quoted(args.grant)  # before anything is done: a wrong name changes nothing
    if args.sql:
        _print_postgres(store, args)
        return 0
    if args.grant is not None:
        grants.require_role(store.database, args.grant)
    applied = app.migrate()
    store.database.rows("add_partitions", {"now": None})
    if args.grant is not None:
        grants.grant(store.database, args.grant)
    _say(applied, args)
    return 0


def _print_postgres(store: PostgresStore, args: argparse.Namespace) -> None:
    """From the version the database has; from nothing where it cannot be asked."""
    from tenure.stores.postgres import grants, schema

    name = store.database.schema
    version = _version(store, args)
    if args.reverse:
        script = "-- nothing to take back\n" if version == 0 else schema.reverse_sql(name)
    else:
        script = schema.forward_sql(name, version or 0)
        if args.grant is not None:
            granting = grants.grant_sql(name, args.grant)
            script += f"\n-- what a worker's role needs\nBEGIN;\n{granting}COMMIT;\n"
    if args.json:
        output.say_json({"version": version, "schema": name, "sql": script})
    else:
        output.say(script.rstrip())


def _version(store: PostgresStore, args: argparse.Namespace) -> int | None:
    from tenure.stores.postgres.examining import Examination

    try:
        examination = Examination(store.database)
    except StoreError as error:
        whole = "the reverse of everything" if args.reverse else "the script from nothing"
        output.complain(f"note: {whole}, because the database could not be asked: {error}")
        return None
    try:
        if not examination.tables.stamped:
            return 0
        return int(examination.ask("version")[0][0])
    finally:
        examination.close()
