"""What operators do to jobs and queues: choose, look first, then apply in batches and at a pace.

An act is a value (`Cancel(reason="not needed")`), its row in `VERBS` says to which jobs it can be
done and what becomes of them. A new act is one such value and one such row: pages, commands and
`App` find it there. Each change is one line of the audit trail, under the actor of the scope.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from tenure import policy
from tenure.errors import ConfigError, IllegalTransition, JobNotFound
from tenure.job import DEAD
from tenure.operations.dead import Fingerprint, GroupCount, counts
from tenure.operations.jobs import Jobs, given_id
from tenure.operations.listing import DEAD_STATUSES, JobFilter
from tenure.operations.pace import Pace, Progress
from tenure.operations.room import Room, wall_ms
from tenure.operations.scope import Scope
from tenure.record import Record

if TYPE_CHECKING:
    from tenure.store import Store
    from tenure.stored import Job

BATCH = 500  # jobs in one transaction: workers get their turn at the database in between
PAGE = 5000
IDS_SHOWN = 10
DONE, REQUESTED, ABSENT = "done", "requested", "absent"  # verdicts of a store besides a status


# -- the acts -----------------------------------------------------------------------------------
class Act(Record):
    """Something that is done to jobs or to queues, with what it needs to know."""

    def write(self, store: Store, names: Sequence[str], scope: Scope) -> Mapping[str, str]:
        """One transaction; the verdict of the store for each id."""
        raise NotImplementedError


class Cancel(Act):
    """A queued job ends at once, a running one is asked to stop."""

    reason: str = ""

    def write(self, store: Store, names: Sequence[str], scope: Scope) -> Mapping[str, str]:
        why = policy.reason(self.reason)
        return store.cancel(names, actor=scope.by, reason=why, org=scope.org)


class Replay(Act):
    """A dead job runs again under its id. `payload` is checked JSON text: see `Acts.replay`."""

    payload: str | None = None

    def write(self, store: Store, names: Sequence[str], scope: Scope) -> Mapping[str, str]:
        return store.replay(names, actor=scope.by, payload=self.payload, org=scope.org)


class Discard(Act):
    """A dead job is given up: it becomes `cancelled`."""

    reason: str = ""

    def write(self, store: Store, names: Sequence[str], scope: Scope) -> Mapping[str, str]:
        why = policy.reason(self.reason)
        return store.discard(names, actor=scope.by, reason=why, org=scope.org)


class Pause(Act):
    """Nothing of a queue is claimed; what runs goes on."""

    reason: str = ""

    def write(self, store: Store, names: Sequence[str], scope: Scope) -> Mapping[str, str]:
        why = policy.reason(self.reason)
        for name in names:
            store.pause(name, actor=scope.by, reason=why)
        return dict.fromkeys(names, DONE)


class Resume(Act):
    """A paused queue goes on."""

    def write(self, store: Store, names: Sequence[str], scope: Scope) -> Mapping[str, str]:
        for name in names:
            store.resume(name, actor=scope.by)
        return dict.fromkeys(names, DONE)


class Verb(NamedTuple):
    """An act in words, and what it can be done to."""

    name: str
    act: type[Act]
    past: str
    statuses: tuple[str, ...]  # of the jobs or queues it can be done to
    whom: str  # the same in words
    becomes: str  # what they are afterwards
    help: str
    of: Literal["jobs", "queues"] = "jobs"

    @property
    def of_dead(self) -> bool:
        return DEAD.issuperset(self.statuses)

    def refusal(self, id: str, status: str) -> str:
        """Why it cannot be done to this job, which is absent or has this status."""
        if status == ABSENT:
            return f"there is no job {id}"
        return f"job {id} is {status}: only {self.whom} jobs can be {self.past}"


LIVE_STATUSES = ("queued", "in_progress")
# fmt: off
VERBS = {verb.name: verb for verb in (
    Verb("cancel", Cancel, "cancelled", LIVE_STATUSES, "queued and running", "cancelled",
         "cancel queued jobs, ask running ones to stop"),
    Verb("replay", Replay, "replayed", DEAD_STATUSES, "dead", "queued",
         "run dead jobs again under the same id"),
    Verb("discard", Discard, "discarded", DEAD_STATUSES, "dead", "cancelled",
         "give dead jobs up"),
    Verb("pause", Pause, "paused", (ABSENT, "open", "paused"), "any", "paused",
         "claim nothing more of a queue", of="queues"),
    Verb("resume", Resume, "resumed", ("paused",), "paused", "open",
         "let a paused queue go on", of="queues"),
)}
# fmt: on


def verb_of(act: Act, of: str = "jobs") -> Verb:
    verb = next(verb for verb in VERBS.values() if verb.act is type(act))
    if verb.of != of:
        raise ConfigError(f"{verb.name} is for {verb.of}, not for {of}")
    return verb


# -- looking first ------------------------------------------------------------------------------
class Verdict(Record):
    """What an act has done to one job. `outcome` is the status that the job has now, `requested`
    for a running job that was asked to stop, or `absent`; `changed`: the act made it so."""

    id: str
    outcome: str
    changed: bool


class Preview(Record):
    """What an act would do."""

    verb: str
    count: int
    ids: tuple[str, ...]  # the first ten
    groups: tuple[GroupCount, ...]  # of dead jobs: what they died of
    seconds: float | None  # how long it takes at the rate that was asked for


class Choice(Record):
    """The jobs that an act is meant for, as they were when they were looked up. `refused`: ids that
    were given and to which it cannot be done, each with the job's status or `absent`."""

    act: Act
    jobs: Mapping[str, Fingerprint]
    refused: Mapping[str, str]

    @property
    def verb(self) -> Verb:
        return verb_of(self.act)

    def preview(self, rate: float | None = None) -> Preview:
        return Preview(
            self.verb.name,
            len(self.jobs),
            tuple(self.jobs)[:IDS_SHOWN],
            tuple(counts(self.jobs.values())) if self.verb.of_dead else (),
            len(self.jobs) / rate if rate else None,
        )


class Applied(Record):
    """What became of the chosen jobs. `left`: how many were not changed, because of a stop."""

    verdicts: tuple[Verdict, ...]
    left: int

    @property
    def done(self) -> int:
        return sum(verdict.changed and verdict.outcome != REQUESTED for verdict in self.verdicts)

    @property
    def requested(self) -> int:
        return sum(verdict.outcome == REQUESTED for verdict in self.verdicts)


class Switched(Record):
    """A queue that was paused or resumed; `before` is `absent`, `open` or `paused`."""

    name: str
    before: str
    changed: bool


# -- doing it -----------------------------------------------------------------------------------
class Acts(Room):
    def __init__(
        self,
        store: Store,
        scope: Scope | None = None,
        now_ms: Callable[[], int] = wall_ms,
        pack: Callable[[str, Mapping[str, Any]], str] | None = None,
    ) -> None:
        """`pack` checks arguments against the signature of a task: the app gives it."""
        super().__init__(store, scope, now_ms)
        self._pack = pack

    def choose(
        self, act: Act, *, ids: Iterable[str] | None = None, where: JobFilter | None = None
    ) -> Choice:
        """The jobs of these ids, or all that match and that the act can be done to."""
        verb = verb_of(act)
        if (ids is None) == (where is None):
            raise ConfigError(f"{verb.name} which jobs? Give ids or a filter, not both")
        if where is None:
            return self._given(act, verb, list(dict.fromkeys(ids or ())))
        if not set(verb.statuses).issuperset(where.statuses):
            raise ConfigError(f"only {verb.whom} jobs can be {verb.past}")
        fit = where if where.statuses else where.replaced(statuses=verb.statuses)
        found = Jobs(self.store, self.scope).find(fit, page=PAGE)
        return Choice(act, {job.id: Fingerprint.of(job) for job in found}, {})

    def _given(self, act: Act, verb: Verb, ids: Sequence[str]) -> Choice:
        """Which of these ids are there and fit, in their order."""
        from tenure.store import Filter

        found: dict[str, Job] = {}
        for start in range(0, len(ids), BATCH):
            where = Filter(ids=tuple(ids[start : start + BATCH]), org=self.scope.org)
            found |= {job.id: job for job in self.store.find(where, limit=BATCH).jobs}
        fit = {id: job for id, job in found.items() if job.status in verb.statuses}
        return Choice(
            act,
            {id: Fingerprint.of(fit[id]) for id in ids if id in fit},
            {id: found[id].status if id in found else ABSENT for id in ids if id not in fit},
        )

    def apply(
        self,
        choice: Choice,
        *,
        rate: float | None = None,
        stop: Callable[[float], bool] | None = None,
        tell: Callable[[Progress, Sequence[Verdict]], None] | None = None,
    ) -> Applied:
        """Batch by batch, each one transaction, at most `rate` jobs a second.

        `stop(seconds)` waits for so long and says whether to stop now: `threading.Event().wait`.
        `tell` hears of the progress while the next batch waits for its turn (then without verdicts)
        and after each batch, with its verdicts."""
        ids = list(choice.jobs)
        pace = Pace(len(ids), rate, most=BATCH, stop=stop, tell=tell)
        verdicts: list[Verdict] = []
        while len(verdicts) < len(ids) and pace.turn(len(verdicts)):
            batch = ids[len(verdicts) : len(verdicts) + pace.batch]
            said = choice.act.write(self.store, batch, self.scope)
            new = [_verdict(choice.verb, id, said[id]) for id in batch]
            verdicts += new
            pace.told(len(verdicts), new)
        return Applied(tuple(verdicts), len(ids) - len(verdicts))

    def one(self, act: Act, id: object) -> str:
        """To one job: what it is now. An error where the act cannot be done to it."""
        ulid, verb = given_id(id), verb_of(act)
        verdict = act.write(self.store, [ulid], self.scope)[ulid]
        if verdict == ABSENT:
            raise JobNotFound(verb.refusal(ulid, verdict))
        if verdict not in (DONE, REQUESTED):
            raise IllegalTransition(verb.refusal(ulid, verdict))
        return verb.becomes if verdict == DONE else verdict

    def replay(self, id: object, arguments: Mapping[str, Any] | None = None) -> str:
        """One dead job, with other arguments if given: they are checked as at an enqueue."""
        if arguments is None:
            return self.one(Replay(), id)
        job = Jobs(self.store, self.scope).require(id)
        if self._pack is None:
            raise ConfigError("other arguments need the app that has the task, to check them")
        return self.one(Replay(self._pack(job.type, arguments)), id)

    def switch(self, act: Act, queue: str) -> Switched:
        """Pause or resume a queue. To resume a queue that is not paused changes nothing, and leaves
        no line in the audit trail."""
        self.for_operators("switches of queues")
        verb, name = verb_of(act, of="queues"), policy.queue_name(queue)
        paused = self.store.queue_names().get(name)
        before = ABSENT if paused is None else "paused" if paused else "open"
        if before not in verb.statuses:
            return Switched(name, before, changed=False)
        act.write(self.store, [name], self.scope)
        return Switched(name, before, changed=True)


def _verdict(verb: Verb, id: str, said: str) -> Verdict:
    return Verdict(id, verb.becomes if said == DONE else said, said in (DONE, REQUESTED))
