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
from tenure.errors import ConfigError, JobError

if TYPE_CHECKING:
    from tenure import Actor, App
    from tenure.operations import Operations

Commands = Any  # argparse's own type for "the subparsers" is private and not subscriptable
ID_HELP = "a ULID, the beginning of one, or a UUID"


class Target(NamedTuple):
    app: App
    operations: Operations
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
    """An argparse type: a ULID, a UUID, or the beginning of a ULID (`Jobs.whole_id` finds it)."""
    from tenure.operations.jobs import id_or_beginning

    try:
        return id_or_beginning(text)
    except JobError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def positive(text: str) -> int:
    """An argparse type: a whole number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


# ------------------------------------------------------------------------------- the app


def app_spec(args: argparse.Namespace) -> str:
    """The app that -A names, for commands that cannot do without one."""
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


@contextmanager
def anywhere(args: argparse.Namespace, *, acting: bool = False) -> Iterator[Target]:
    """The app and its operations, also when the database is yet to be created. `acting`: changes
    are audited as the user of this shell."""
    from tenure import App

    settings = Settings.load(url=args.url, app=args.app)
    # --url says all a reading command needs, so an app from the environment is not imported.
    named = args.app is not None or (settings.app is not None and args.url is None)
    if named:
        app = _with_url(loading.load_app(settings.app or args.app), args.url)
    else:
        app = App(args.url)
    try:
        org, actor = getattr(args, "org", None), operator() if acting else None
        yield Target(app, app.operations.narrowed(org=org, actor=actor), named)
    finally:
        app.close()


@contextmanager
def existing(args: argparse.Namespace, *, acting: bool = False) -> Iterator[Target]:
    """The same with a database that must be there already."""
    from tenure.operations.database import require

    with anywhere(args, acting=acting) as target:
        require(target.app)
        yield target


def operator() -> Actor:
    """The actor that the audit trail names: the user of this shell."""
    import getpass

    from tenure import Actor

    try:
        return Actor("user", getpass.getuser())
    except (KeyError, OSError):  # a container's user often has no name
        return Actor("user", f"uid:{os.getuid()}")
