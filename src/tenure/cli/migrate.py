"""`tenure migrate`: create or upgrade the tables, or print the SQL for somebody who may; and what
their owner lays down for every program."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from tenure.cli import output, target
from tenure.cli.enqueue import delay
from tenure.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from tenure.app import App
    from tenure.sql import Migration
    from tenure.stores.postgres import PostgresStore

SETTABLE = ("keep_events", "keep_history", "audit")
MOST_KEPT = 100 * 365.25 * 86_400
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
    parser.add_argument(
        "--set",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        type=_laid_down,
        help="lay down for every program: keep_events=30d, keep_history=7d (kept at least so "
        "long), audit=all; NAME=none takes it back",
    )
    parser.set_defaults(run=migrate)


def migrate(args: argparse.Namespace) -> int:
    args.set = dict(args.set)
    if args.set and args.sql:
        raise ConfigError("--set writes rows, not tables: give it without --sql")
    with target.anywhere(args) as (app, _):
        if app.settings.url.startswith("sqlite:"):
            return _sqlite(app, args)
        return _postgres(app, args)


def _laid_down(text: str) -> tuple[str, str | None]:
    """`keep_events=30d` as the store takes it: milliseconds as text, None to take it back."""
    name, equals, value = text.partition("=")
    if not equals or name not in SETTABLE:
        raise argparse.ArgumentTypeError(f"give one of {', '.join(SETTABLE)} as NAME=VALUE")
    if value in ("", "none"):
        return name, None
    if name == "audit":
        if value not in ("all", "errors"):
            raise argparse.ArgumentTypeError("audit is all, errors or none")
        return name, value
    seconds = delay(value)
    if seconds > MOST_KEPT:
        raise argparse.ArgumentTypeError(f"at most {MOST_KEPT / 86_400:.0f}d")
    return name, str(int(seconds * 1000))


def _lay_down(app: App, laid_down: Mapping[str, str | None]) -> None:
    for name, value in laid_down.items():
        app.store.lay_down(name, value, by=target.operator().id)


def _say(applied: list[str], args: argparse.Namespace) -> None:
    if args.json:
        granted = {"granted": args.grant} if args.grant else {}
        laid_down = {
            name: int(value) if value is not None and name != "audit" else value
            for name, value in args.set.items()
        }
        output.say_json({"applied": applied} | granted | ({"set": laid_down} if laid_down else {}))
        return
    output.say("\n".join(f"applied {name}" for name in applied) or "up to date")
    if args.grant:
        output.say(f"granted {args.grant} what a worker needs")
    for name, value in args.set.items():
        if value is None:
            output.say(f"{name} is each program's own again")
        elif name == "audit":
            output.say(f"audit is {value}: no program writes less to the trail")
        else:
            span = output.span(int(value) / 1000)
            output.say(f"{name} is {span}: kept so long, whatever a program's settings say")


# ------------------------------------------------------------------------------- SQLite


def _sqlite(app: App, args: argparse.Namespace) -> int:
    if args.grant is not None:
        raise ConfigError("--grant is for PostgreSQL: who may use an SQLite file, its mode says")
    if args.reverse:
        raise ConfigError("--reverse is for PostgreSQL; an SQLite file is moved away or deleted")
    if args.sql:
        _print_sqlite(pending(app), args)
    else:
        applied = app.migrate()
        _lay_down(app, args.set)
        _say(applied, args)
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
    _lay_down(app, args.set)
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
