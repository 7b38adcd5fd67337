"""`tenure migrate`: create or upgrade the tables, or print the SQL for somebody who may."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from tenure.cli import output, target

if TYPE_CHECKING:
    from tenure.app import App
    from tenure.sql import Migration


def add_commands(commands: target.Commands) -> None:
    parser = target.add_command(commands, "migrate", "create or upgrade the tables")
    parser.add_argument(
        "--sql", action="store_true", help="print the SQL of what is pending, run nothing"
    )
    parser.set_defaults(run=migrate)


def migrate(args: argparse.Namespace) -> int:
    with target.anywhere(args) as (app, _):
        if args.sql:
            _print_sql(pending(app), args)
            return 0
        applied = app.migrate()
    if args.json:
        output.say_json({"applied": applied})
    elif applied:
        output.say("\n".join(f"applied {name}" for name in applied))
    else:
        output.say("up to date")
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


def _print_sql(migrations: list[Migration], args: argparse.Namespace) -> None:
    if args.json:
        for migration in migrations:
            output.say_json(migration._asdict())
        return
    if not migrations:
        output.say("-- up to date: nothing is pending")
        return
    output.say("PRAGMA journal_mode=WAL;")
    for version, name, text in migrations:
        output.say(f"\n-- migration {version:04d}_{name}\nBEGIN IMMEDIATE;\n{text.rstrip()}")
        stamp = f"({version}, '{name}', unixepoch() * 1000)"
        output.say(f"INSERT INTO tenure_migrations VALUES {stamp};\nCOMMIT;")  # noqa: S608  ours
