"""The store contract: what a database must do for Tenure, and nothing else.

One suite (`tests/contract/`) runs against every store. All methods are plain blocking calls, safe
to use from any thread, batched, and each is **one short transaction**: whole or not at all.
`now_ms` overrides the store's clock for tests; it is read *after* the write lock is held.

The fence. A lease is (worker, lease_no). Every write of a run after its claim names the
`lease_no` it was granted, and the store compares it under the lock that makes the change.
`lease_no` grows when a lease is granted and whenever one ends without completing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from tenure.job import Actor, ClaimedJob, NewJob, Receipt
from tenure.outcome import Ended
from tenure.policy import Keep

if TYPE_CHECKING:
    from tenure.stored import Event, Job


class Registration(NamedTuple):
    """A worker as the store knows it. The number alone does not name it: after a restore or a
    failover another worker may be given the same one."""

    no: int
    id: str


class Claim(NamedTuple):
    jobs: list[ClaimedJob]
    unknown: Mapping[str, int] = MappingProxyType({})  # types passed over
    more: bool = False  # the walk stopped at its bound: claim again soon
    suspects: bool = False  # there are suspects due


class Renewal(NamedTuple):
    """What the store believes about a worker that is alive."""

    leases: dict[str, int]  # job id -> lease_no this worker holds
    cancels: dict[str, str]  # job id -> reason: asked to be cancelled while running


class WorkerInfo(NamedTuple):
    no: int
    id: str
    host: str
    boot: str
    pid: int
    pid_started: str
    beat: int
    lease_ms: int
    started_at: int
    seen_at: int
    dead_at: int | None
    dead_reason: str | None
    meta: dict[str, Any]
    held: int

    @property
    def registration(self) -> Registration:
        return Registration(self.no, self.id)


class QueueInfo(NamedTuple):
    name: str
    ready: int  # due now
    later: int  # due later
    waiting: int  # on other jobs
    running: int
    dead: int
    oldest_ms: int | None  # how long the oldest due job has been waiting
    paused_at: int | None
    paused_by: str | None
    pause_reason: str | None
    capped: tuple[str, ...] = ()  # figures of which only the first 10,000 were counted


class Totals(NamedTuple):
    """Count of jobs per status, live and finished; `capped`: of these there are more."""

    jobs: dict[str, int]
    capped: tuple[str, ...] = ()


class Page(NamedTuple):
    """A page of a listing. It may be short, or empty, and still not be the last: `before` is where
    the walk stopped, None when there is nothing behind it."""

    jobs: list[Job]
    before: str | None


class EventPage(NamedTuple):
    """Events in the order of their numbers. `final`: up to this number none can appear any more,
    and no later one is shown; `held_by` names who has kept it from growing for a while."""

    events: list[Event]
    final: int
    held_by: str | None = None


class Rescue(NamedTuple):
    """What a rescue did; empty when the worker had renewed after all."""

    requeued: int
    lost: int
    set_aside: tuple[str, ...] = ()  # the ids of those that have lost too many


class Filter(NamedTuple):
    """Which jobs; None is any. `org` None means every org (operators only). `place` is the
    fingerprint of an error: dead jobs only."""

    status: str | None = None
    type: str | None = None
    queue: str | None = None
    org: str | None = None
    key: str | None = None
    ids: tuple[str, ...] | None = None
    place: str | None = None


class DeadGroup(NamedTuple):
    """Dead jobs that died of the same thing."""

    type: str
    status: str
    code: str
    place: str
    jobs: int
    first_ms: int
    last_ms: int
    sample_id: str
    sample_error: str | None
    capped: bool = False  # there are more


class Rollup(NamedTuple):
    start: int
    queue: str
    type: str
    outcome: str
    runs: int
    duration_ms: int
    buckets: tuple[int, ...]


class Finding(NamedTuple):
    """One line of `doctor`: what was looked at, what was found, what to do about it."""

    check: str
    level: Literal["ok", "warning", "problem"]
    message: str
    remedy: str | None = None


class Prune(NamedTuple):
    """How long to keep what; seconds. `tasks` has the say for the tasks it names."""

    completed: float
    dead: float
    events: float
    tasks: Mapping[str, Keep] = MappingProxyType({})
    workers: float = 30 * 86_400  # as long as events that name them
    batch: int = 1000
    days: bool = True  # whole days too, where the store keeps them apart


class Pruned(NamedTuple):
    """Rows that a pass of retention has removed, by kind, and tables of a whole day. `held`: what
    kept it from removing more of those."""

    removed: dict[str, int]
    days: int = 0
    held: str | None = None


class Turn(NamedTuple):
    """Upkeep of the whole store: when a pass of it last began, and what was said at its end."""

    at: int
    note: dict[str, Any]


Accepted = Literal["accepted", "disowned", "repeated", "refused"]


class Settlement(Protocol):
    """An open write transaction that will end in a job's finish."""

    connection: Any  # the driver's own: the handler's SQL goes here

    def finish(self, worker: Registration, end: Ended) -> Accepted:
        """Write the fenced finish; the block commits it with everything else."""


class AsyncSettlement(Protocol):
    """The same for an `async def` handler, on its own event loop."""

    connection: Any

    async def finish(self, worker: Registration, end: Ended) -> Accepted:
        """Write the fenced finish; the block commits it with everything else."""


class Store(Protocol):
    # Whether two writes of one program at once are faster than one after the other.
    parallel: bool

    # -- life ---------------------------------------------------------------------------------
    def migrate(self) -> list[str]:
        """Bring the schema up to date; the names of what ran. Safe to run by several at once,
        resumable after a kill. A schema newer than this code is refused (SchemaError)."""

    def close(self) -> None:
        """Close every connection. Idempotent. The store may be used again and reopens."""

    # -- enqueue ------------------------------------------------------------------------------
    def enqueue(
        self, jobs: Sequence[NewJob], *, retry: bool = False, now_ms: int | None = None
    ) -> list[Receipt]:
        """Store all jobs or none; receipts in order. What a job is `after` must exist in its own
        org (or come in the same batch, without a circle) and not have been cancelled, else
        JobError. A key seen before
        within its org yields the first job's receipt (`duplicate=True`). An id that is stored
        already, live or finished, is a JobError; `retry=True` repeats a call whose reply was
        lost: such ids are passed over."""

    def enqueue_on(
        self, connection: Any, jobs: Sequence[NewJob]
    ) -> list[Receipt] | Awaitable[list[Receipt]]:
        """The same, on the caller's own connection and in the caller's transaction. A connection
        of an async driver gives an awaitable: nothing is sent before it is awaited."""

    # -- the life of a lease ------------------------------------------------------------------
    def register(self, worker: WorkerInfo) -> Registration:
        """Add a worker row. What every other call of this worker names."""

    def claim(
        self,
        worker: Registration,
        wants: Sequence[tuple[str, int]],
        types: frozenset[str] | None = None,
        *,
        suspects: bool = False,
        limit: int | None = None,
        now_ms: int | None = None,
    ) -> Claim:
        """Grant leases, up to the number named for each queue and `limit` in all: due, not
        paused, by priority, then orgs in turn, then due time, then id. Two claims never share a
        job. A worker that was declared dead gets nothing. Costs the same beside any number of
        queued, later or finished jobs, and of orgs that have nothing due.

        `types`: only of these (None: any); others are passed over without being written to, in a
        bounded walk. Suspects (`policy.suspect`: they run alone) are taken by a claim that asks for
        `suspects`, which takes nothing else."""

    def finish(
        self, worker: Registration, ended: Sequence[Ended], *, now_ms: int | None = None
    ) -> list[Accepted]:
        """End runs, fenced one by one: `accepted`; `disowned` when it completed and has failed all
        the same, for its children cannot be stored; `repeated` when this very finish was accepted
        before; `refused` when the lease is gone (nothing was changed for that row).
        A run that would go back to the queue (retry, snooze, release, crash, rescue) although
        its job was asked to be cancelled ends `cancelled` instead.
        History, events, keys, rollups and the children of a completed run are written in the
        same transaction; whoever waited for these jobs is released or cancelled in it."""

    def settled(self, job_id: str, lease_no: int) -> bool:
        """Whether the run under this number has completed, for good: an answer that a crash of
        the store or of its standby could still undo is waited for."""

    def progress(
        self,
        worker: Registration,
        reports: Sequence[tuple[str, int, str]],
        *,
        now_ms: int | None = None,
    ) -> list[bool]:
        """Store (id, lease_no, JSON text), fenced; False where the lease is gone."""

    def steps(self, job_id: str) -> dict[str, str]:
        """Finished steps of a job: name -> result as JSON text."""

    def save_step(
        self,
        worker: Registration,
        run: tuple[str, int],
        name: str,
        result: str,
        *,
        now_ms: int | None = None,
    ) -> bool:
        """Store a step's result of the run (id, lease_no), fenced; False where the lease is gone.
        A job that gets on is neither poison nor lost: crashes and losses are forgotten."""

    def results(self, job_id: str) -> dict[str, tuple[str, Any]]:
        """What a job waited for: id -> (status, result)."""

    def transaction(self, limit: float, conn: Any = None) -> AbstractContextManager[Settlement]:
        """A write transaction for a handler's own SQL and its job's finish together, on `conn` of
        its library if given. Rolled back when the block raises or takes more than `limit` s."""

    def atransaction(
        self, limit: float, conn: Any = None
    ) -> AbstractAsyncContextManager[AsyncSettlement]:
        """The same on the event loop it is entered from, for `async def` handlers. ConfigError
        where the store has no async driver: then the text says what to do instead."""

    def settle_dependants(self, *, now_ms: int | None = None) -> int:
        """One bounded pass over waiting jobs whose needs have ended unseen: release or cancel
        them. How many changed."""

    def renew(
        self,
        worker: Registration,
        *,
        meta: Mapping[str, object] | None = None,
        now_ms: int | None = None,
    ) -> Renewal | None:
        """Prove the worker alive and read what it holds. None: it was declared dead; whatever
        it still runs is void. `meta` takes the place of what its row says about it. Uses a
        connection nothing else waits on."""

    def cancel_requests(self, worker: Registration) -> dict[str, str]:
        """Cancel requests for jobs this worker runs: id -> reason."""

    def workers(self, *, count: bool = True) -> list[WorkerInfo]:
        """Every worker row, dead ones included while they are kept. Without `count` what they
        hold is not counted (0): whoever asks every second does not pay for that."""

    def rescue(
        self,
        worker: Registration,
        beat: int,
        *,
        started: frozenset[str] | None,
        limit: int,
        reason: str,
        patience: float | None = None,
        now_ms: int | None = None,
    ) -> Rescue | None:
        """Declare a worker dead and put its jobs back, unless it has renewed since `beat`, or
        the store kept us waiting longer than `patience` seconds: a stall proves nothing about
        the others (None then). Jobs in `started` (all, when None: nobody knows) are charged a
        loss; at `limit` they become dead letters with the code `lost`."""

    def retire(self, worker: Registration) -> None:
        """A worker that gave everything back leaves: dead, reason `signed off`."""

    def take_turn(self, upkeep: str, every: float, *, now_ms: int | None = None) -> bool:
        """Whether this pass of upkeep (`retention`, `events`) is the caller's: one in `every`
        seconds for all workers of the store, whoever asks first."""

    def end_turn(self, upkeep: str, note: Mapping[str, object]) -> None:
        """What was done in it, for whoever looks."""

    def turns(self) -> dict[str, Turn]:
        """Every kind of upkeep, and its last pass."""

    def next_due(self, queues: Sequence[str], *, now_ms: int | None = None) -> int | None:
        """Milliseconds until the next job of these queues is due that was to run later; None when
        there is none. What was due when the last claim looked does not count: it is not for this
        worker, or there was no room for it."""

    def sweep(self, *, now_ms: int | None = None) -> int:
        """For stores whose claims remember where they were: look for due jobs that they would
        pass over. How many places have some; the next claim finds them."""

    # -- reading ------------------------------------------------------------------------------
    def get(self, id: str, *, org: str | None = None) -> Job | None: ...

    def find(self, where: Filter, *, before: str | None = None, limit: int = 100) -> Page:
        """Newest first, one page; continue with `before=` what it says. At most 20,000 rows are
        looked at for a page. By `key`: the job that holds it, in each org."""

    def events(
        self,
        *,
        job_id: str | None = None,
        org: str | None = None,
        after: int = 0,
        limit: int = 100,
    ) -> EventPage:
        """Oldest first, one page; continue with `after=` the last seq. Who does so sees every event
        once: of all jobs only those are shown before which none can appear any more."""

    def dead_groups(self, where: Filter, *, limit: int = 100) -> list[DeadGroup]:
        """Dead jobs grouped by what they died of, largest group first; each counted to 10,000."""

    def queues(self, *, now_ms: int | None = None) -> list[QueueInfo]:
        """Every figure is counted to 10,000, and no further (`capped`)."""

    def queue_names(self) -> dict[str, bool]:
        """Every queue name known to the store -> paused."""

    def unknown_types(self, types: frozenset[str]) -> dict[str, int]:
        """Queued jobs whose type is not among these, as far as some 20,000 rows tell."""

    def rollups(self, *, since_ms: int) -> list[Rollup]: ...

    def totals(self) -> Totals:
        """Count of jobs per status, live and finished; each to 10,000, and no further."""

    # -- operators ----------------------------------------------------------------------------
    def cancel(
        self, ids: Sequence[str], *, actor: Actor, reason: str, org: str | None = None
    ) -> dict[str, str]:
        """queued -> cancelled at once; in_progress -> a request the handler will see.
        id -> `done`, `requested`, `absent`, or the status that does not allow it."""

    def replay(
        self,
        ids: Sequence[str],
        *,
        actor: Actor,
        payload: str | None = None,
        org: str | None = None,
    ) -> dict[str, str]:
        """failed, dead_letter -> queued under the same id, attempts, crashes and losses 0.
        id -> `done`, `absent`, or the status that does not allow it."""

    def discard(
        self, ids: Sequence[str], *, actor: Actor, reason: str, org: str | None = None
    ) -> dict[str, str]:
        """failed, dead_letter -> cancelled (reason `discarded`)."""

    def pause(self, queue: str, *, actor: Actor, reason: str) -> None: ...

    def resume(self, queue: str, *, actor: Actor) -> None: ...

    def prune(self, keep: Prune, *, now_ms: int | None = None) -> Pruned:
        """One bounded pass of retention: finished and dead jobs, events, expired keys, dead
        worker rows, rollups folded. Nothing goes before the owner's floors (`settings`)."""

    def settings(self) -> dict[str, str]:
        """What the owner has laid down: `keep_history`, `keep_events` (milliseconds that finished
        jobs and events are kept, whatever a worker asks for), `audit` (the least to be written)."""

    def lay_down(self, name: str, value: str | None, *, by: str) -> None:
        """Lay it down, or take it back (None). On PostgreSQL for the owner of the tables only."""

    def inspect(self) -> list[Finding]:
        """What `doctor` says about this database."""
