"""What operators do, by whatever means: the command line, a web page, a pack.

    operations = app.operations           # or Operations(app, Scope(org="acme", actor=…))
    operations.jobs        get, find, events in both directions, steps, needs, why a job waits
    operations.dead        dead jobs grouped by what they died of
    operations.acts        cancel, replay, discard, pause, resume: choose, preview, apply
    operations.statistics  totals, queues, workers, rates, quantiles, series for charts
    operations.health      the health report, and all that can be found wrong
    operations.schema      pending migrations as SQL, grants, what the owner lays down

Nothing in here prints. What it returns are frozen values with aware datetimes; `encoding.to_json`
makes any of them fit for JSON. Every call carries a `Scope`. Below `app`, above the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tenure.app import App
    from tenure.operations.acts import Acts
    from tenure.operations.dead import Dead
    from tenure.operations.health import Health
    from tenure.operations.jobs import Jobs
    from tenure.operations.schema import Schema
    from tenure.operations.scope import Scope
    from tenure.operations.statistics import Statistics


class Operations:
    """The rooms, for one scope. A room is loaded when it is entered, with the store that the app
    has then: an app that was closed opens another one."""

    def __init__(self, app: App, scope: Scope) -> None:
        self._app = app
        self.scope = scope

    def narrowed(
        self,
        *,
        org: str | None = None,
        actor: tuple[str, str] | None = None,
        request_id: str | None = None,
    ) -> Operations:
        """The same operations in a narrower scope."""
        return Operations(self._app, self.scope.narrowed(org, actor, request_id))

    @property
    def jobs(self) -> Jobs:
        from tenure.operations.jobs import Jobs

        return Jobs(self._app.store, self.scope, self._app.now_ms)

    @property
    def dead(self) -> Dead:
        from tenure.operations.dead import Dead

        return Dead(self._app.store, self.scope, self._app.now_ms)

    @property
    def acts(self) -> Acts:
        from tenure.operations.acts import Acts

        return Acts(self._app.store, self.scope, self._app.now_ms, self._packed)

    @property
    def statistics(self) -> Statistics:
        from tenure.operations.statistics import Statistics

        return Statistics(self._app.store, self.scope, self._app.now_ms)

    @property
    def health(self) -> Health:
        from tenure.operations.health import Health

        return Health(self._app, self.scope)

    @property
    def schema(self) -> Schema:
        from tenure.operations.schema import Schema

        return Schema(self._app, self.scope)

    def _packed(self, type: str, arguments: Mapping[str, Any]) -> str:
        """Arguments of a task as JSON text, checked as at an enqueue."""
        signature = self._app.find_task(type).signature
        text = signature.pack_named(dict(arguments))
        signature.refuse_secrets(text)
        return text
