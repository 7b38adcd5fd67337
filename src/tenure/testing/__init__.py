"""For tests of programs that use Tenure: a fresh store, a clock to turn, jobs run in the test's
own thread, a context to call a task with, assertions about what was enqueued. Under pytest the
fixtures come by themselves.

Jobs pass the real store, claim, judgement and fenced finish. What is missing is the worker around
them (processes, renewal, cancelling what runs): test that with `app.worker()`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from itertools import count

from tenure.app import App
from tenure.errors import ConfigError
from tenure.testing.assertions import assert_enqueued, enqueued, refute_enqueued
from tenure.testing.bench import drain, inline
from tenure.testing.clock import Clock, clock_of, replaced
from tenure.testing.rehearsal import Rehearsal, context

__all__ = [
    "Clock",
    "Rehearsal",
    "assert_enqueued",
    "context",
    "drain",
    "enqueued",
    "inline",
    "refute_enqueued",
    "use",
]


# -- a fresh store ------------------------------------------------------------------------------
@contextmanager
def use(
    app: App, path: str | os.PathLike[str] | None = None, *, url: str | None = None
) -> Iterator[App]:
    """Point an app at a fresh store for the length of a block, then back at its own. `path` is a
    file, or a directory (pytest's `tmp_path`) to make one in. `url` names a database: on PostgreSQL
    the app gets a schema of its own in it, which goes at the end of the block."""
    if (path is None) == (url is None):
        raise ConfigError("use(app, path) or use(app, url=…)")
    if path is not None and os.path.isdir(path):
        files = (os.path.join(path, f"tenure-{number}.db") for number in count(1))
        path = next(file for file in files if not os.path.exists(file))
    place = {"TENURE_URL": url or f"sqlite:///{os.path.abspath(path or '')}"}
    server = not place["TENURE_URL"].startswith("sqlite:")
    if server:
        place["TENURE_SCHEMA"] = f"tenure_test_{os.urandom(6).hex()}"
    app.close()
    settings = app.settings.from_env(app.settings.to_env() | place)
    with replaced(app, settings=settings, now_ms=app.now_ms), closing(app), ExitStack() as stack:
        if server:
            stack.callback(_drop_schema, app)
            app.migrate()
        clock_of(app)
        yield app


def _drop_schema(app: App) -> None:
    from tenure.stores.postgres import PostgresStore, schema

    app.close()  # whoever still works in it ends
    if isinstance(app.store, PostgresStore):
        schema.drop(app.store.database)


# -- fixtures -----------------------------------------------------------------------------------
try:
    import pytest
except ImportError:  # with unittest there is everything but these
    pass
else:

    @pytest.fixture
    def tenure_url(tmp_path: os.PathLike[str]) -> str:
        """A database: a file of this test alone. Override it to test on a server."""
        return f"sqlite:///{tmp_path}/tenure.db"

    @pytest.fixture
    def tenure_app(tenure_url: str) -> Iterator[App]:
        """An app without tasks on that database, on a server in a schema of its own. Override it
        to test your own: see `use`."""
        with use(App(tenure_url), url=tenure_url) as app:
            yield app

    @pytest.fixture
    def tenure_clock(tenure_app: App) -> Iterator[Clock]:
        """The clock of `tenure_app`, standing still at now."""
        with Clock(tenure_app) as clock:
            yield clock
