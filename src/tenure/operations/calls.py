"""The calls by which programs read and operate. `App` has them for every tenant; an app of one
tenant will have the same, in its scope."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tenure import policy

if TYPE_CHECKING:
    from tenure.engine.client import Client
    from tenure.operations import Operations
    from tenure.operations.health import HealthReport
    from tenure.operations.queues import Queue
    from tenure.operations.workers import Worker
    from tenure.stored import Event, Job

    Pair = tuple[str, str]  # ("user", "7")


class OperatorCalls:
    """Async twins have an `a` in front; they wait in a small pool of threads of the client's."""

    if TYPE_CHECKING:

        @property
        def client(self) -> Client: ...

        @property
        def operations(self) -> Operations: ...

    # -- reading ------------------------------------------------------------------------------
    def get(self, id: object) -> Job | None:
        """None when there is no such job; what cannot be an id is no job's."""
        return self.operations.jobs.get(id)

    async def aget(self, id: object) -> Job | None:
        return await self.client.in_thread(self.get, id)

    def find(
        self,
        *,
        status: str | None = None,
        type: str | None = None,
        queue: str | None = None,
        org: str | None = None,
        key: str | None = None,
    ) -> Iterator[Job]:
        """Newest first, page by page; no cursor stays open between jobs."""
        from tenure.operations.listing import JobFilter

        statuses = () if status is None else (status,)
        queue = None if queue is None else policy.queue_name(queue)
        where = JobFilter(statuses, type, queue, key)
        return self.operations.narrowed(org=org).jobs.find(where)

    async def afind(self, **where: Any) -> list[Job]:
        return await self.client.in_thread(lambda: list(self.find(**where)))

    def events(self, id: object = None) -> Iterator[Event]:
        """The audit trail of one job, or of everything; oldest first."""
        return self.operations.jobs.events(id)

    async def aevents(self, id: object = None) -> list[Event]:
        return await self.client.in_thread(lambda: list(self.events(id)))

    def result(self, id: object, timeout: float | None = None) -> Any:
        """Wait for a job's result. JobFailed when it ended otherwise, TimeoutError when late."""
        from tenure.operations.jobs import given_id

        return self.client.result(given_id(id), timeout, self.operations.scope.org)

    async def aresult(self, id: object, timeout: float | None = None) -> Any:
        from tenure.operations.jobs import given_id

        return await self.client.aresult(given_id(id), timeout, self.operations.scope.org)

    def stats(self) -> dict[str, Any]:
        """Counts by status and by queue, and how many workers there are. A figure is counted to
        10,000 and no further: then it is `capped`."""
        return self.operations.statistics.counts()

    async def astats(self) -> dict[str, Any]:
        return await self.client.in_thread(self.stats)

    def queues(self) -> list[Queue]:
        return self.operations.statistics.queues()

    async def aqueues(self) -> list[Queue]:
        return await self.client.in_thread(self.queues)

    def workers(self) -> list[Worker]:
        """Dead ones too, as long as the store keeps them."""
        return self.operations.statistics.workers()

    async def aworkers(self) -> list[Worker]:
        return await self.client.in_thread(self.workers)

    def health(self, *, least_workers: int = 1) -> HealthReport:
        """`healthy`, `degraded` or `unhealthy`, and why. `.report` is the same for JSON."""
        return self.operations.health.report(least_workers=least_workers)

    async def ahealth(self, *, least_workers: int = 1) -> HealthReport:
        return await self.client.in_thread(self.health, least_workers=least_workers)

    # -- operators ----------------------------------------------------------------------------
    def cancel(self, id: object, *, actor: Pair | None = None, reason: str = "") -> str:
        """`cancelled` at once when queued, `requested` when running; otherwise an error."""
        from tenure.operations.acts import Cancel

        return self.operations.narrowed(actor=actor).acts.one(Cancel(reason), id)

    async def acancel(self, id: object, *, actor: Pair | None = None, reason: str = "") -> str:
        return await self.client.in_thread(self.cancel, id, actor=actor, reason=reason)

    def replay(
        self, id: object, payload: dict[str, Any] | None = None, *, actor: Pair | None = None
    ) -> str:
        """Run a dead job again under the same id, with other arguments if given."""
        return self.operations.narrowed(actor=actor).acts.replay(id, payload)

    async def areplay(
        self, id: object, payload: dict[str, Any] | None = None, *, actor: Pair | None = None
    ) -> str:
        return await self.client.in_thread(self.replay, id, payload, actor=actor)

    def discard(self, id: object, *, actor: Pair | None = None, reason: str = "") -> str:
        """Give a dead job up: it becomes `cancelled`."""
        from tenure.operations.acts import Discard

        return self.operations.narrowed(actor=actor).acts.one(Discard(reason), id)

    async def adiscard(self, id: object, *, actor: Pair | None = None, reason: str = "") -> str:
        return await self.client.in_thread(self.discard, id, actor=actor, reason=reason)

    def pause(self, queue: str, *, reason: str = "", actor: Pair | None = None) -> None:
        """Nothing of this queue is claimed until `resume`; what runs goes on."""
        from tenure.operations.acts import Pause

        self.operations.narrowed(actor=actor).acts.switch(Pause(reason), queue)

    async def apause(self, queue: str, *, reason: str = "", actor: Pair | None = None) -> None:
        await self.client.in_thread(self.pause, queue, reason=reason, actor=actor)

    def resume(self, queue: str, *, actor: Pair | None = None) -> None:
        """Workers claim jobs of this queue again. One that is not paused stays as it is."""
        from tenure.operations.acts import Resume

        self.operations.narrowed(actor=actor).acts.switch(Resume(), queue)

    async def aresume(self, queue: str, *, actor: Pair | None = None) -> None:
        await self.client.in_thread(self.resume, queue, actor=actor)
