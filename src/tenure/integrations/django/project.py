"""The app of a Django project: its jobs are in Django's own database, also while that is a test's,
and its handlers find connections that work.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from inspect import iscoroutinefunction
from typing import Any
from urllib.parse import quote, urlencode

from asgiref.sync import sync_to_async
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured, SynchronousOnlyOperation
from django.db import connections
from django.utils.connection import ConnectionDoesNotExist

from tenure.app import App
from tenure.engine.client import Client
from tenure.errors import ConfigError
from tenure.job import NewJob, Receipt
from tenure.policy import OnConflict

# Of DATABASES[…]["OPTIONS"]: what only Django understands.
NOT_FOR_LIBPQ = frozenset({"assume_role", "isolation_level", "pool", "server_side_binding"})


@functools.cache
def project_app() -> DjangoApp:
    try:
        given = getattr(settings, "TENURE", {})
    except ImproperlyConfigured as error:
        if settings.configured:
            raise
        raise ConfigError(
            "Django's settings are not named: set DJANGO_SETTINGS_MODULE (such as shop.settings), "
            "or use `python manage.py tenure …`"
        ) from error
    return DjangoApp(**given)


class DjangoApp(App):
    """`database` is the alias whose database holds the jobs, unless there is a `url`; everything
    else as for `tenure.App`."""

    def __init__(self, url: str | None = None, *, database: str = "default", **more: Any) -> None:
        self._alias = None if url else database
        self._derived = url_of(database) if self._alias else ""
        super().__init__(url or self._derived, **more)
        self.around = with_fresh_connections

    def lives_in(self, alias: str) -> bool:
        """Jobs are in the database that Django calls so, not in one of a test's own making."""
        return self._alias == alias and self._follow() == self.settings.url

    # -- inside atomic() a job shares its fate --------------------------------------------------
    def enqueue_many(self, jobs: Sequence[NewJob], *, conn: Any = None) -> list[Receipt]:
        return super().enqueue_many(jobs, conn=self._joined(conn))

    def enqueue_jobs(
        self, jobs: Sequence[NewJob], *, conn: Any = None, on_conflict: OnConflict = "return"
    ) -> list[Receipt]:
        return super().enqueue_jobs(jobs, conn=self._joined(conn), on_conflict=on_conflict)

    async def aenqueue_jobs(
        self, jobs: Sequence[NewJob], *, conn: Any = None, on_conflict: OnConflict = "return"
    ) -> list[Receipt]:
        """Where Django's own async calls run: there is a connection to join, on that thread."""
        if conn is not None:
            return await super().aenqueue_jobs(jobs, conn=conn, on_conflict=on_conflict)
        return await sync_to_async(self.enqueue_jobs)(jobs, on_conflict=on_conflict)

    def _joined(self, conn: Any) -> Any:
        """What the caller gives, or Django's connection while that is in a transaction."""
        if conn is not None or self._alias is None or not self.lives_in(self._alias):
            return conn
        connection = connections[self._alias]
        ask_leave(connection)
        if connection.connection is None or connection.autocommit:
            return None
        return connection

    # -- a test's database ----------------------------------------------------------------------
    @property
    def client(self) -> Client:
        self._follow()
        return super().client

    def _follow(self) -> str:
        """Django's test runner gives an alias another database: so do we, unless somebody has
        given us another URL (`--url`, tenure.testing.use)."""
        if self._alias is None or self.settings.url != self._derived:
            return self._derived
        now = url_of(self._alias)
        if now != self._derived:
            self.close()
            self._derived = now
            self.settings = replace(self.settings, url=now)
        return now


def url_of(alias: str) -> str:
    """The URL of the database that Django calls so at this moment."""
    try:
        connection = connections[alias]
    except ConnectionDoesNotExist:
        known = ", ".join(map(repr, connections))
        raise ConfigError(
            f"DATABASES has no {alias!r}, which TENURE names; it has: {known}"
        ) from None
    given = connection.settings_dict
    if connection.vendor == "sqlite":
        if connection.is_in_memory_db():
            raise ConfigError(
                f'DATABASES["{alias}"] is in memory, where no worker finds a job. For tests give '
                'it a file: "TEST": {"NAME": BASE_DIR / "test.sqlite3"}'
            )
        return f"sqlite:///{os.path.abspath(given['NAME'])}"
    if connection.vendor != "postgresql":
        raise ConfigError(
            f'DATABASES["{alias}"] is {connection.display_name}, which cannot hold jobs: say where '
            'they are, TENURE = {"url": "sqlite:////var/lib/jobs.db"} or "postgresql://…"'
        )
    options = {
        name: value
        for name, value in given["OPTIONS"].items()
        if name not in NOT_FOR_LIBPQ and isinstance(value, str | int)
    }
    named = {"host": "HOST", "port": "PORT", "user": "USER", "password": "PASSWORD"}
    options |= {name: given[key] for name, key in named.items() if given[key]}
    query = urlencode(options, quote_via=quote)
    return f"postgresql:///{quote(given['NAME'] or '', safe='')}?{query}"


def ask_leave(connection: Any) -> None:
    """Test runners forbid Django's connections where there may be no test database (SimpleTestCase,
    pytest-django without its mark); on our own a job would be stored in the real one."""
    if "django.test" not in sys.modules:
        return
    opened = connection.connection is None
    with suppress(SynchronousOnlyOperation):
        with connection.cursor():
            pass
        if opened:
            connection.close()


def look_at_connections() -> list[Any]:
    """Those that are broken or too old are closed. Those that are kept are asked before their next
    use whether they still work: a thread may have been idle when the server closed its connection,
    and a job that is tried again on one such thread after the other would use up its attempts.
    Costs a round trip where one is kept. With DEBUG a connection remembers its last 9,000
    statements, on each of fifty threads: those of earlier jobs are forgotten.

    Returned, and left alone, is what somebody else's transaction is open on: a TestCase's, when its
    jobs run on its own thread. Django would close it, for it is not in autocommit."""
    lent = [each for each in connections.all(initialized_only=True) if each.in_atomic_block]
    close_old_connections(lent)
    for connection in connections.all(initialized_only=True):
        if connection in lent:
            continue
        if connection.connection is not None:
            connection.health_check_enabled = True
        if not connection.force_debug_cursor:  # nobody is counting (assertNumQueries)
            connection.queries_log.clear()
    return lent


def close_old_connections(lent: list[Any]) -> None:
    for connection in connections.all(initialized_only=True):
        if connection not in lent:
            connection.close_if_unusable_or_obsolete()


def with_fresh_connections(handler: Callable[..., Any]) -> Callable[..., Any]:
    """Around each job, as Django does around each request: connections that are broken or too old
    are closed, on the thread that uses them."""
    if iscoroutinefunction(handler):
        look, close = sync_to_async(look_at_connections), sync_to_async(close_old_connections)

        @functools.wraps(handler)
        async def arun(*args: Any, **kwargs: Any) -> Any:
            lent = await look()
            try:
                return await handler(*args, **kwargs)
            finally:
                await close(lent)

        return arun

    @functools.wraps(handler)
    def run(*args: Any, **kwargs: Any) -> Any:
        lent = look_at_connections()
        try:
            return handler(*args, **kwargs)
        finally:
            close_old_connections(lent)

    return run
