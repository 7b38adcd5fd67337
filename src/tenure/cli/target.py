"""Which app and which database a command talks to: -A, --url, the environment, tenure.toml.

Commands that only read or operate never create a database: a mistyped URL must not look like an
empty queue.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from tenure import loading
from tenure.config import Settings
from tenure.errors import ConfigError, JobNotFound, SchemaError, StoreUnavailable

if TYPE_CHECKING:
    from tenure.app import App
    from tenure.job import Actor
    from tenure.store import Store

Commands = Any  # argparse's own type for "the subparsers" is private and not subscriptable


LENGTH, LEAST_OF_ID = 26, 6  # of a ULID
BEGINNING = rf"[0-7][0-9A-HJKMNP-TV-Za-hjkmnp-tv-z]{{{LEAST_OF_ID - 1},{LENGTH - 2}}}"
CANDIDATES = 5
ID_HELP = "a ULID, the beginning of one, or a UUID"


class Target(NamedTuple):
    app: App
    named: bool  # by -A or TENURE_APP: its tasks are known


# ------------------------------------------------------------------------------- options


def add_target_options(parser: argparse.ArgumentParser, *, root: bool = False) -> None:
    """The same options before and after the command; the one given last counts."""
    # SUPPRESS: a command that was not given one must not wipe out what stood before it.
    unset = None if root else argparse.SUPPRESS
    group = parser.add_argument_group("which app, which database")
    group.add_argument(
        "-A",
        "--app",
        metavar="MODULE:ATTR",
        default=unset,
        help="the app, such as shop.jobs:app (default: $TENURE_APP)",
    )
    group.add_argument(
        "--url",
        default=unset,
        help="the database, overriding the app's: sqlite:///jobs.db, postgresql://user@host/name "
        "(default: $TENURE_URL, tenure.toml, sqlite:///tenure.db)",
    )
    group.add_argument(
        "--json",
        action="store_true",
        default=False if root else argparse.SUPPRESS,
        help="JSON instead of text, one object a line",
    )


def add_command(
    commands: Commands, name: str, help: str, *, description: str | None = None
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=help,
        description=description or f"{help[0].upper()}{help[1:]}.",
        allow_abbrev=False,
    )
    add_target_options(parser)
    return parser


def job_id(text: str) -> str:
    """An argparse type: a ULID, a UUID, or the beginning of a ULID (`whole_id` finds the rest)."""
    import re

    from tenure.ids import known_id, shown

    begun = text.rstrip("….")  # as a table cuts it
    if (whole := known_id(begun)) is not None:
        return whole
    if re.fullmatch(BEGINNING, begun):
        return begun.upper()
    raise argparse.ArgumentTypeError(
        f"{shown(text)} is not a job id: expected a ULID (26 characters, or the first "
        f"{LEAST_OF_ID} and more of them) or a UUID"
    )


def whole_id(app: App, begun: str) -> str:
    """The one job whose id begins so. A step or two along the primary key, however many jobs there
    are: before the last id that could begin so come those that do."""
    from tenure.store import Filter

    if len(begun) == LENGTH:
        return begun
    page = app.store.find(Filter(), before=begun.ljust(LENGTH, "Z"), limit=CANDIDATES + 1)
    found = [job for job in page.jobs if job.id.startswith(begun)]
    if not found:
        raise JobNotFound(f"there is no job whose id begins with {begun}")
    if len(found) > 1:
        listed = "".join(f"\n  {job.id}  {job.type} {job.status}" for job in found[:CANDIDATES])
        more = "\n  …" if len(found) > CANDIDATES else ""
        raise ConfigError(f"{begun} begins the id of several jobs, give more of it:{listed}{more}")
    return found[0].id


def positive(text: str) -> int:
    """An argparse type: a whole number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


# ------------------------------------------------------------------------------- the app


def app_spec(args: argparse.Namespace) -> str:
    """What -A names, for commands that cannot do without."""
    spec = Settings.load(app=args.app).app
    if spec is None:
        raise ConfigError(
            f"`tenure {args.command}` needs your app: tenure -A module:app {args.command} …, "
            "or set TENURE_APP"
        )
    return spec


def _with_url(app: App, url: str | None) -> App:
    if url is not None:
        from dataclasses import replace

        app.close()
        given = app.settings._given | {"url"}
        app.settings = replace(app.settings, url=url, _given=given)
    return app


@contextmanager
def named_app(args: argparse.Namespace) -> Iterator[App]:
    """The app that -A names, for commands that need its tasks."""
    app = _with_url(loading.load_app(app_spec(args)), args.url)
    try:
        yield app
    finally:
        app.close()


# ------------------------------------------------------------------------------- the database


def _chosen(args: argparse.Namespace) -> Target:
    from tenure.app import App

    settings = Settings.load(url=args.url, app=args.app)
    # --url says all a reading command needs, so an app from the environment is not imported.
    if args.app is not None or (settings.app is not None and args.url is None):
        return Target(_with_url(loading.load_app(settings.app or args.app), args.url), named=True)
    return Target(App(args.url), named=False)


@contextmanager
def existing(args: argparse.Namespace) -> Iterator[Target]:
    """The app with its database, which must be there already."""
    target = _chosen(args)
    try:
        require_database(target.app.settings.url, target.app.store)
        yield target
    finally:
        target.app.close()


@contextmanager
def anywhere(args: argparse.Namespace) -> Iterator[Target]:
    """The same, also when the database is yet to be created."""
    target = _chosen(args)
    try:
        yield target
    finally:
        target.app.close()


def database_file(url: str) -> str | None:
    """The file an SQLite URL names; None for a server."""
    from tenure.app import sqlite_path

    return os.path.abspath(sqlite_path(url)) if url.startswith("sqlite:") else None


def place(url: str) -> str:
    """Where the database is, for people: a file, or host, port and name; never a password."""
    path = database_file(url)
    if path is not None:
        return path
    from tenure.stores.postgres.connecting import location

    return location(url)


def require_database(url: str, store: Store) -> None:
    """A store on a server makes nothing by itself: its first call says that tables are missing."""
    path = database_file(url)
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


def operator() -> Actor:
    """Who to name in the audit trail: the user of this shell."""
    import getpass

    from tenure.job import Actor

    try:
        return Actor("user", getpass.getuser())
    except (KeyError, OSError):  # a container's user often has no name
        return Actor("user", f"uid:{os.getuid()}")
