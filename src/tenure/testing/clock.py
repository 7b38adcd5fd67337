"""The clock of a test: the time by which an app's store decides what is due."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

from tenure import policy
from tenure.app import App
from tenure.errors import ConfigError


class Clock(AbstractContextManager["Clock"]):
    """The time by which an app's store decides what is due. It stands still until it is turned;
    with `ticking=True` it runs on from where it was set. `restore()`, or the end of
    `with Clock(app) as clock:`, brings the real one back."""

    def __init__(self, app: App, at: datetime | None = None, *, ticking: bool = False) -> None:
        self._app, self._ticking = app, ticking
        self._restore = ExitStack()
        self.turn(app.now_ms() if at is None else milliseconds(at))
        self._restore.enter_context(replaced(app, now_ms=self))

    def __call__(self) -> int:
        """Milliseconds since 1970, as stores want them."""
        return self._ms + int((time.monotonic() - self._since) * 1000 if self._ticking else 0)

    def now(self) -> datetime:
        return datetime.fromtimestamp(self() / 1000, UTC)

    def set(self, to: datetime) -> None:
        """Any time, also an earlier one. In inline mode what is due then runs now."""
        self.turn(milliseconds(to))
        from tenure.testing.bench import bench_of

        if (bench := bench_of(self._app)) is not None:
            bench.work_now()

    def advance(self, by: float | timedelta) -> datetime:
        """So many seconds on; the new time. In inline mode what is due then runs now."""
        by = by if isinstance(by, timedelta) else timedelta(seconds=by)
        if by < timedelta(0):
            raise ConfigError("advance() goes forward; set() can go back")
        self.set(self.now() + by)
        return self.now()

    def turn(self, ms: int) -> None:
        """`set` that runs nothing. The store an app opened after a `close` gets the clock too."""
        self._ms, self._since = ms, time.monotonic()
        store: Any = self._app.store
        place = store.file if hasattr(store, "file") else store.database
        if place.clock is not self:
            self._restore.callback(setattr, place, "clock", place.clock)
            place.clock = self

    def restore(self, *error: object) -> None:
        self._restore.close()

    __exit__ = restore


def milliseconds(at: datetime) -> int:
    return round(policy.aware(at) * 1000)


def clock_of(app: App) -> Clock | None:
    """The clock a test has given this app, now at work in the store it uses."""
    found = vars(app).get("now_ms")
    if not isinstance(found, Clock):
        return None
    found.turn(found())
    return found


@contextmanager
def replaced(app: App, **attributes: Any) -> Iterator[None]:
    """Attributes of this one app object, in front of those of its class."""
    own = vars(app)
    before = {name: own[name] for name in attributes if name in own}
    own.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            own.pop(name, None)
        own.update(before)
