"""What each room of operations has: a store, the scope of the call, a clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from tenure.errors import ConfigError
from tenure.job import moment
from tenure.operations.scope import Scope

if TYPE_CHECKING:
    import datetime

    from tenure.store import Store


def wall_ms() -> int:
    return time.time_ns() // 1_000_000


def time_of(ms: int) -> datetime.datetime:
    """Milliseconds since 1970 as `job.moment` has them, where there are some."""
    return cast("datetime.datetime", moment(ms))


class Room:
    def __init__(
        self, store: Store, scope: Scope | None = None, now_ms: Callable[[], int] = wall_ms
    ) -> None:
        self.store = store
        self.scope = Scope() if scope is None else scope
        self._now_ms = now_ms

    def now(self) -> datetime.datetime:
        return time_of(self._now_ms())

    def for_operators(self, what: str) -> None:
        """Refuse a scope of one org what no store can tell apart by org: its answer would be about
        other tenants as well."""
        if self.scope.org is not None:
            raise ConfigError(
                f"{what}: known for all orgs together, not for org {self.scope.org!r} alone; "
                "`app.operations`, which is for operators, has it"
            )
