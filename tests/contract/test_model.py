"""The store against a model of it: any calls in any order, legal, stale, repeated or foreign.

The model is a dict of jobs. Where the contract says "grows", not by how much, the model takes the
number from the store after checking that it grew; everything else it predicts.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tenure import policy, sql
from tenure.errors import JobError
from tenure.ids import new_id
from tenure.job import DEAD, TERMINAL, TRANSITIONS, ClaimedJob, NewJob
from tenure.outcome import (
    Cancelled,
    Completed,
    Crashed,
    Dead,
    Ended,
    Failed,
    Outcome,
    Released,
    Retried,
    Snoozed,
)
from tenure.store import Filter, Prune, Registration, Rescue

from .builders import (
    FAILURE,
    KINDS,
    MINUTE,
    OPERATOR,
    SECOND,
    SQL_KINDS,
    Clock,
    find,
    get,
    milliseconds,
    new,
    open_store,
    read,
    rows,
    temporary_location,
    totals,
    watch,
    worker,
    worker_row,
)

KEY_TTL = MINUTE
CRASH_LIMIT, LOSS_LIMIT = 2, 4
KEPT, DEAD_KEPT = 3 * MINUTE, 5 * MINUTE
ORGS = ("acme", "globex")
QUEUES = ("one", "two")
OUTCOMES: list[Outcome] = [
    Completed("1"),
    Retried(0, FAILURE),
    Retried(5, FAILURE),
    Snoozed(5),
    Failed(FAILURE),
    Dead(FAILURE),
    Cancelled("asked to"),
    Released("shutdown"),
    Released("bystander", 5),
    Crashed("killed", CRASH_LIMIT),
]


@dataclass
class ModelJob:
    sent: NewJob
    due: int  # what `scheduled_at` says
    ready: int = 0  # since when, or from when on, it may run: its place in the queue
    status: str = "queued"
    attempts: int = 0
    crashes: int = 0
    losses: int = 0
    lease_no: int = 0
    worker: Registration | None = None
    cancel: str | None = None
    over: int = 0  # when it became terminal
    needs: set[str] = field(default_factory=set)  # that have not completed
    steps: dict[str, str] = field(default_factory=dict)
    # (worker, lease_no), all of them
    grants: list[tuple[Registration, int]] = field(default_factory=list)
    ends: set[int] = field(default_factory=set)  # lease numbers whose finish was accepted
    last_end: tuple[Registration, Ended] | None = None  # accepted, and nothing has ended since

    def __post_init__(self) -> None:
        self.ready = self.due

    @property
    def id(self) -> str:
        return self.sent.id

    @property
    def org(self) -> str:
        return self.sent.terms.org

    @property
    def queue(self) -> str:
        return self.sent.terms.queue

    @property
    def priority(self) -> int:
        return self.sent.terms.priority

    @property
    def suspect(self) -> bool:
        return policy.suspect(self.crashes, self.losses)

    def move(self, status: str) -> None:
        assert status in TRANSITIONS[self.status], f"{self.status} -> {status}"
        self.status = status
        if status != "in_progress":
            self.worker = None


@dataclass
class ModelKey:
    owner: str
    expires: int | None = None


class StoreMachine(RuleBasedStateMachine):
    kind: str

    jobs = Bundle("jobs")

    def __init__(self) -> None:
        super().__init__()
        self.resources = contextlib.ExitStack()
        self.location = self.resources.enter_context(temporary_location(self.kind))
        self.clock = Clock()
        self.store = open_store(self.kind, self.location, self.clock)
        self.resources.callback(self.store.close)
        self.model: dict[str, ModelJob] = {}
        self.keys: dict[tuple[str, str], ModelKey] = {}
        self.paused: set[str] = set()
        self.dead_workers: list[Registration] = []
        self.looks = 0

    def teardown(self) -> None:
        self.resources.close()

    @initialize()
    def two_workers(self) -> None:
        self.store.migrate()
        if self.kind != "sqlite":  # where whoever looks on would keep the log from being put away
            eye = contextlib.closing(watch(self.kind, self.location))
            self.eye = self.resources.enter_context(eye)
        self.workers = [worker(self.store), worker(self.store)]

    # -- what the model knows -----------------------------------------------------------------

    def held(self, no: Registration) -> list[ModelJob]:
        return [job for job in self.model.values() if job.worker == no]

    def due(self, queue: str, *, suspects: bool = False) -> list[ModelJob]:
        if queue in self.paused:
            return []
        return [
            job
            for job in self.model.values()
            if (job.queue, job.status, job.suspect) == (queue, "queued", suspects)
            and not job.needs
            and job.ready <= self.clock()
        ]

    def grew(self, job: ModelJob) -> None:
        seen = get(self.store, job.id).lease_no
        assert seen > job.lease_no, "a lease was granted or taken away and its number did not grow"
        job.lease_no = seen

    def ended(self, job: ModelJob, status: str) -> None:
        """The job is terminal: its key has a time to live from now on."""
        job.move(status)
        job.cancel = None
        job.over = self.clock()
        if status not in DEAD:
            job.steps = {}
        key = self.keys.get((job.org, job.sent.key)) if job.sent.key is not None else None
        if key is not None and key.owner == job.id:
            key.expires = self.clock() + KEY_TTL
        self.tell_whoever_waits(job)

    def tell_whoever_waits(self, need: ModelJob) -> None:
        """Released by what has completed; ended with what was cancelled, and with what has failed
        if told so."""
        for job in [job for job in self.model.values() if need.id in job.needs]:
            if not job.needs:
                continue  # it has ended with another need, which had ended with this one
            if need.status == "completed":
                job.needs.discard(need.id)
                if not job.needs:
                    job.ready = max(job.ready, self.clock())
            elif need.status == "cancelled" or job.sent.terms.after_failed == "cancel":
                job.needs = set()
                self.ended(job, "cancelled")
                job.last_end = None
                how = "cancelled" if need.status == "cancelled" else "failed"
                assert get(self.store, job.id).error_code == f"dependency_{how}"

    def requeued(self, job: ModelJob, *, due: int | None = None) -> None:
        """Back to the queue, unless the job was asked to be cancelled: then it is, right here."""
        if job.cancel is not None:
            seen = get(self.store, job.id)
            self.ended(job, "cancelled")
            self.not_less(job)
            # Whether a run that will have no successor gives its attempt back is not said.
            assert abs(seen.attempts - job.attempts) <= 1 and abs(seen.crashes - job.crashes) <= 1
            assert abs(seen.losses - job.losses) <= 1
            job.attempts, job.crashes, job.losses = seen.attempts, seen.crashes, seen.losses
            job.due = milliseconds(seen.scheduled_at) or 0
            return
        job.move("queued")
        if due is not None:
            job.due = job.ready = due
        self.grew(job)

    def crashed(self, job: ModelJob) -> None:
        job.crashes += 1
        if job.crashes < CRASH_LIMIT:
            self.requeued(job)
        else:
            self.died(job, "poison")

    def lost(self, job: ModelJob) -> None:
        job.losses += 1
        if job.losses < LOSS_LIMIT:
            self.requeued(job)
        else:
            self.died(job, "lost")

    def died(self, job: ModelJob, code: str) -> None:
        self.ended(job, "dead_letter")
        self.grew(job)
        assert get(self.store, job.id).error_code == code

    def apply(self, job: ModelJob, outcome: Outcome) -> None:
        now = self.clock()
        match outcome:
            case Completed():
                self.ended(job, "completed")
            case Cancelled():
                self.ended(job, "cancelled")
            case Failed():
                self.ended(job, "failed")
                self.grew(job)
            case Dead():
                self.ended(job, "dead_letter")
                self.grew(job)
            case Retried(delay=delay):
                self.requeued(job, due=now + int(delay * SECOND))
            case Snoozed(delay=delay):
                job.attempts -= 1
                self.requeued(job, due=now + int(delay * SECOND))
            case Released(delay=delay):
                job.attempts -= 1
                self.requeued(job, due=now + int(delay * SECOND) if delay else None)
            case Crashed():
                self.crashed(job)

    def verdicts(self, no: Registration, ended: Ended) -> set[str]:
        """What a finish may be told."""
        job = self.model.get(ended.id)
        if job is None:
            return {"refused"}
        if (job.worker, job.lease_no, job.status) == (no, ended.lease_no, "in_progress"):
            return {"accepted"}
        if job.last_end == (no, ended):
            return {"repeated"}
        # An end of that lease was accepted, long ago, by somebody else, or another end than this:
        # a store need not remember which.
        return {"repeated", "refused"} if ended.lease_no in job.ends else {"refused"}

    def send(self, no: Registration, batch: list[Ended]) -> None:
        expected = [self.verdicts(no, ended) for ended in batch]
        told = self.store.finish(no, batch)
        assert len(told) == len(batch)
        for ended, verdict, allowed in zip(batch, told, expected, strict=True):
            assert verdict in allowed, f"{ended} was {verdict}, not {allowed}"
            if verdict == "accepted":
                job = self.model[ended.id]
                job.ends.add(ended.lease_no)
                self.apply(job, ended.outcome)
                job.last_end = (no, ended)

    # -- rules: enqueue -----------------------------------------------------------------------

    @rule(
        target=jobs,
        org=st.sampled_from(ORGS),
        queue=st.sampled_from(QUEUES),
        priority=st.sampled_from([1, 5]),
        delay=st.sampled_from([0, 0, 0, 7 * SECOND]),
        key=st.sampled_from([None, None, "k", "l"]),
    )
    def enqueue(self, org: str, queue: str, priority: int, delay: int, key: str | None) -> Any:
        sent = new(
            org=org, queue=queue, priority=priority, delay_ms=delay, key=key,
            key_ttl_ms=KEY_TTL, max_attempts=2,
        )  # fmt: skip
        known = None if key is None else self.keys.get((org, key))
        if known and known.expires is not None and known.expires <= self.clock():
            known = None

        (receipt,) = self.store.enqueue([sent])

        if known is not None:
            owner = self.model.get(known.owner)
            if owner is not None:  # or retention has taken it, and the key tells how it ended
                assert receipt.status == owner.status
            assert receipt[:2] == (known.owner, True)
            assert self.store.get(sent.id) is None
            return multiple()
        assert receipt == (sent.id, False, "queued")
        self.model[sent.id] = ModelJob(sent, due=self.clock() + delay)
        if key is not None:
            self.keys[org, key] = ModelKey(sent.id)
        return sent.id

    @rule(
        target=jobs,
        needs=st.lists(jobs, min_size=1, max_size=3),
        org=st.sampled_from(ORGS),
        after_failed=st.sampled_from(["wait", "cancel"]),
        delay=st.sampled_from([0, 0, 7 * SECOND]),
    )
    def enqueue_after(self, needs: list[str], org: str, after_failed: str, delay: int) -> Any:
        sent = new(
            org=org, queue=QUEUES[0], after=tuple(dict.fromkeys(needs)), after_failed=after_failed,
            delay_ms=delay, key_ttl_ms=KEY_TTL, max_attempts=2,
        )  # fmt: skip
        known = [self.model.get(id) for id in needs]
        if any(job is None or job.org != org or job.status == "cancelled" for job in known):
            with pytest.raises(JobError):
                self.store.enqueue([sent])
            return multiple()

        (receipt,) = self.store.enqueue([sent])

        assert receipt == (sent.id, False, "queued")
        waiting = {job.id for job in known if job is not None and job.status != "completed"}
        self.model[sent.id] = ModelJob(sent, due=self.clock() + delay, needs=waiting)
        return sent.id

    @rule()
    def the_janitor_settles(self) -> None:
        """Who was told to end with a need that had failed before it came."""
        doomed = [
            job
            for job in self.model.values()
            if job.sent.terms.after_failed == "cancel"
            and any(self.model[id].status in DEAD for id in job.needs)
        ]

        self.store.settle_dependants()

        for job in doomed:
            if job.status == "queued":
                job.needs = set()
                self.ended(job, "cancelled")

    @rule(id=jobs)
    def enqueue_again_because_the_reply_was_lost(self, id: str) -> None:
        if id in self.model:
            (receipt,) = self.store.enqueue([self.model[id].sent], retry=True)

            assert (receipt.id, receipt.duplicate) == (id, False)

    @rule(
        queue=st.sampled_from(QUEUES), priority=st.sampled_from([1, 5]), size=st.integers(1, 4),
        target=jobs,
    )  # fmt: skip
    def enqueue_for_both_orgs(self, queue: str, priority: int, size: int) -> Any:
        batch = [
            new(org=org, queue=queue, priority=priority, key_ttl_ms=KEY_TTL, max_attempts=2)
            for org in ORGS
            for _ in range(size)
        ]

        receipts = self.store.enqueue(batch)

        assert [receipt.id for receipt in receipts] == [job.id for job in batch]
        self.model |= {job.id: ModelJob(job, due=self.clock()) for job in batch}
        return multiple(*(job.id for job in batch))

    # -- rules: leases ------------------------------------------------------------------------

    @rule(slot=st.integers(0, 1), limit=st.sampled_from([1, 2, 5]))
    def claim(self, slot: int, limit: int) -> None:
        no = self.workers[slot]
        due = {queue: self.due(queue) for queue in QUEUES}

        granted = self.store.claim(no, [(queue, limit) for queue in QUEUES])

        assert dict(granted.unknown) == {}
        assert granted.suspects == any(self.due(queue, suspects=True) for queue in QUEUES)
        for queue in QUEUES:
            leases = [lease for lease in granted.jobs if lease.queue == queue]
            taken = [self.model[lease.id] for lease in leases]
            assert len(taken) == min(limit, len(due[queue]))
            assert all(job in due[queue] for job in taken)
            self.check_order(taken, [job for job in due[queue] if job not in taken])
            for job, lease in zip(taken, leases, strict=True):
                self.grant(job, no, lease)

    def check_order(self, taken: list[ModelJob], left: list[ModelJob]) -> None:
        for job in taken:
            for other in left:
                assert job.priority <= other.priority
                if (job.priority, job.org) == (other.priority, other.org):
                    assert (job.ready, job.id) < (other.ready, other.id)
        # Orgs in turn: who still has jobs of that priority got no less than anybody but one.
        shares = Counter((job.priority, job.org) for job in taken)
        for priority, org in {(job.priority, job.org) for job in left}:
            most = max((shares[priority, any_org] for any_org in ORGS), default=0)
            assert shares[priority, org] >= most - 1

    @rule(slot=st.integers(0, 1), limit=st.sampled_from([1, 5]))
    def claim_suspects(self, slot: int, limit: int) -> None:
        no = self.workers[slot]
        due = {queue: self.due(queue, suspects=True) for queue in QUEUES}

        granted = self.store.claim(no, [(queue, limit) for queue in QUEUES], suspects=True)

        for queue in QUEUES:
            leases = [lease for lease in granted.jobs if lease.queue == queue]
            first = sorted(due[queue], key=lambda job: (job.ready, job.id))[:limit]
            assert {lease.id for lease in leases} == {job.id for job in first}
            for lease in leases:
                self.grant(self.model[lease.id], no, lease)

    def grant(self, job: ModelJob, no: Registration, lease: ClaimedJob) -> None:
        job.move("in_progress")
        job.worker = no
        job.attempts += 1
        self.grew(job)
        job.grants.append((no, job.lease_no))
        assert (lease.lease_no, lease.attempts) == (job.lease_no, job.attempts)
        assert (lease.crashes, lease.losses) == (job.crashes, job.losses)
        assert (lease.org, lease.key) == (job.org, job.sent.key)

    @rule(slot=st.integers(0, 1), outcomes=st.lists(st.sampled_from(OUTCOMES), min_size=1))
    def work(self, slot: int, outcomes: list[Outcome]) -> None:
        """A worker's life: claim, and finish what it holds as far as the outcomes go."""
        self.claim(slot=slot, limit=5)
        self.claim_suspects(slot=slot, limit=5)
        self.send(
            self.workers[slot],
            [
                Ended(job.id, job.lease_no, 5, outcome)
                for job, outcome in zip(self.held(self.workers[slot]), outcomes, strict=False)
            ],
        )

    @rule(id=jobs, outcome=st.sampled_from(OUTCOMES))
    def finish(self, id: str, outcome: Outcome) -> None:
        """By whoever was granted it last, which may be an hour ago."""
        for no, lease_no in self.known(id).grants[-1:]:
            self.send(no, [Ended(id, lease_no, 5, outcome)])

    def known(self, id: str) -> ModelJob:
        """Retention may have taken it since it was drawn: then it is as one that never was."""
        return self.model.get(id) or ModelJob(new(id=id), due=0)

    @rule(
        id=jobs,
        outcome=st.sampled_from(OUTCOMES),
        off_by=st.sampled_from([-1, 0, 0, 1]),
        slot=st.integers(0, 1),
    )
    def finish_by_anybody(self, id: str, outcome: Outcome, off_by: int, slot: int) -> None:
        lease_no = self.known(id).lease_no + off_by
        self.send(self.workers[slot], [Ended(id, lease_no, 5, outcome)])

    @rule(id=jobs, outcome=st.sampled_from(OUTCOMES))
    def finish_every_run_there_ever_was(self, id: str, outcome: Outcome) -> None:
        """Zombies: only the run that holds the job now has a say."""
        for no, lease_no in self.known(id).grants:
            self.send(no, [Ended(id, lease_no, 5, outcome)])

    @rule(id=jobs, ms=st.sampled_from([0, SECOND]))
    def finish_again_because_the_reply_was_lost(self, id: str, ms: int) -> None:
        last = self.known(id).last_end
        if last is not None:
            self.clock.advance(ms)
            self.send(last[0], [last[1]])

    @rule(slot=st.integers(0, 1), outcomes=st.lists(st.sampled_from(OUTCOMES), max_size=4), id=jobs)
    def finish_a_batch(self, slot: int, outcomes: list[Outcome], id: str) -> None:
        """What a worker holds, and amid it a row that is stale or nobody's."""
        no = self.workers[slot]
        batch = [
            Ended(job.id, job.lease_no, 5, outcome)
            for job, outcome in zip(self.held(no), outcomes, strict=False)
            if job.id != id
        ]
        batch.insert(len(batch) // 2, Ended(id, self.known(id).lease_no - 1, 5, Completed()))
        batch.insert(0, Ended(new_id(), 1, 5, Completed()))
        self.send(no, batch)

    @rule(id=jobs, slot=st.integers(0, 1), off_by=st.sampled_from([-1, 0, 0, 1]))
    def progress(self, id: str, slot: int, off_by: int) -> None:
        job, no = self.known(id), self.workers[slot]
        lease_no = job.lease_no + off_by
        holds = job.status == "in_progress" and (no, lease_no) == (job.worker, job.lease_no)
        seen = self.store.get(id)

        assert self.store.progress(no, [(id, lease_no, str(self.clock()))]) == [holds]

        if seen is not None:
            assert get(self.store, id).progress == (self.clock() if holds else seen.progress)

    @rule(
        id=jobs,
        slot=st.integers(0, 1),
        off_by=st.sampled_from([-1, 0, 0, 0, 1]),
        name=st.sampled_from(["first", "second"]),
    )
    def save_step(self, id: str, slot: int, off_by: int, name: str) -> None:
        job, no = self.known(id), self.workers[slot]
        lease_no, result = job.lease_no + off_by, str(self.clock())
        holds = job.status == "in_progress" and (no, lease_no) == (job.worker, job.lease_no)

        assert self.store.save_step(no, (id, lease_no), name, result) == holds

        if holds:
            job.steps[name] = result
            job.crashes = job.losses = 0
        assert self.store.steps(id) == job.steps

    @rule(slot=st.integers(0, 1))
    def renew(self, slot: int) -> None:
        no = self.workers[slot]

        renewal = self.store.renew(no)

        held = self.held(no)
        assert renewal is not None
        assert renewal.leases == {job.id: job.lease_no for job in held}
        assert renewal.cancels == {job.id: job.cancel for job in held if job.cancel is not None}

    @rule(slot=st.integers(0, 1))
    def rescue_of_a_worker_that_has_renewed(self, slot: int) -> None:
        no = self.workers[slot]
        beat = worker_row(self.store, no).beat
        assert self.store.renew(no) is not None

        told = self.store.rescue(no, beat, started=None, limit=LOSS_LIMIT, reason="gone")

        assert told is None

    @rule(slot=st.integers(0, 1), knows=st.booleans(), data=st.data())
    def rescue(self, slot: int, knows: bool, data: st.DataObject) -> None:
        no = self.workers[slot]
        held = self.held(no)
        started = None
        if knows:
            started = frozenset(job.id for job in held if data.draw(st.booleans(), label=job.id))

        told = self.store.rescue(
            no, worker_row(self.store, no).beat, started=started, limit=LOSS_LIMIT, reason="gone"
        )

        for job in held:
            job.last_end = None
            if started is None or job.id in started:
                self.lost(job)
            else:
                self.requeued(job)
        ends = Counter(job.status for job in held)
        assert told is not None
        assert told.lost == ends["dead_letter"]
        # A cancel request obeyed by the rescue may or may not count as put back.
        assert ends["queued"] <= told.requeued <= ends["queued"] + ends["cancelled"]
        self.dead_workers.append(no)
        self.workers[slot] = worker(self.store)
        assert self.workers[slot] not in self.dead_workers

    @precondition(lambda self: self.dead_workers)
    @rule()
    def a_dead_worker_tries_to_go_on(self) -> None:
        for no in self.dead_workers[-1:]:
            assert self.store.renew(no) is None
            assert self.store.claim(no, [(queue, 5) for queue in QUEUES]).jobs == []
            beat = worker_row(self.store, no).beat
            again = self.store.rescue(no, beat, started=None, limit=1, reason="again")
            assert again in (None, Rescue(0, 0))

    # -- rules: operators ---------------------------------------------------------------------

    @rule(id=jobs, org=st.sampled_from([None, *ORGS]))
    def cancel(self, id: str, org: str | None) -> None:
        job = self.known(id)

        told = self.store.cancel([id], actor=OPERATOR, reason="stop", org=org)

        if org not in (None, job.org) or id not in self.model:
            assert told == {id: "absent"}
        elif job.status == "queued":
            assert told == {id: "done"}
            job.needs = set()
            self.ended(job, "cancelled")
            job.last_end = None
        elif job.status == "in_progress":
            assert told == {id: "requested"}
            job.cancel = "stop"
        else:
            assert told == {id: job.status}

    @precondition(lambda self: any(job.status in DEAD for job in self.model.values()))
    @rule(data=st.data(), org=st.sampled_from([None, None, *ORGS]), edited=st.booleans())
    def replay_a_dead_job(self, data: st.DataObject, org: str | None, edited: bool) -> None:
        dead = [job.id for job in self.model.values() if job.status in DEAD]
        self.replay(data.draw(st.sampled_from(dead)), org, edited)

    @rule(id=jobs)
    def replay_whatever_it_is(self, id: str) -> None:
        self.replay(id, None, edited=False)

    def replay(self, id: str, org: str | None, edited: bool) -> None:
        job = self.known(id)
        payload = f'{{"at":{self.clock()}}}' if edited else None

        told = self.store.replay([id], actor=OPERATOR, payload=payload, org=org)

        if org not in (None, job.org) or id not in self.model:
            assert told == {id: "absent"}
        elif job.status in DEAD:
            assert told == {id: "done"}
            job.move("queued")
            job.attempts = job.crashes = job.losses = 0
            job.due = job.ready = self.clock()
            job.last_end = None
            self.not_less(job)
            key = self.keys.get((job.org, job.sent.key)) if job.sent.key is not None else None
            if key is not None and key.owner == id:
                key.expires = None
            elif job.sent.key is not None and key is None:
                self.keys[job.org, job.sent.key] = ModelKey(id)  # pruned, and taken again
            if payload is not None:
                job.sent = job.sent._replace(payload=payload)
                job.steps = {}
        else:
            assert told == {id: job.status}

    @rule(id=jobs, org=st.sampled_from([None, *ORGS]))
    def discard(self, id: str, org: str | None) -> None:
        job = self.known(id)

        told = self.store.discard([id], actor=OPERATOR, reason="hopeless", org=org)

        if org not in (None, job.org) or id not in self.model:
            assert told == {id: "absent"}
        elif job.status in DEAD:
            assert told == {id: "done"}
            self.ended(job, "cancelled")
            job.last_end = None
            self.not_less(job)
        else:
            assert told == {id: job.status}

    def not_less(self, job: ModelJob) -> None:
        seen = get(self.store, job.id).lease_no
        assert seen >= job.lease_no
        job.lease_no = seen

    @rule()
    def retention(self) -> None:
        """What is past its time goes, unless somebody waits for it; keys go with their time."""
        now = self.clock()
        wanted = {
            id
            for job in self.model.values()
            if job.status not in ("completed", "cancelled")
            for id in job.sent.after
        }
        keep = Prune(KEPT / SECOND, DEAD_KEPT / SECOND, 1e6)
        for _ in range(2):
            self.store.prune(keep)

        for job in list(self.model.values()):
            kept = DEAD_KEPT if job.status in DEAD else KEPT
            if job.status in TERMINAL and now - job.over > kept and job.id not in wanted:
                del self.model[job.id]
        for name, key in list(self.keys.items()):
            if key.expires is not None and key.expires <= now:
                del self.keys[name]

    @rule(queue=st.sampled_from(QUEUES))
    def pause_or_resume(self, queue: str) -> None:
        if queue in self.paused:
            self.store.resume(queue, actor=OPERATOR)
            self.paused.discard(queue)
        else:
            self.store.pause(queue, actor=OPERATOR, reason="deploy")
            self.paused.add(queue)

    @rule(ms=st.sampled_from([1, SECOND, 7 * SECOND, 2 * MINUTE]))
    def time_passes(self, ms: int) -> None:
        self.clock.advance(ms)

    @rule()
    def the_process_restarts(self) -> None:
        self.store.close()

    # -- always -------------------------------------------------------------------------------

    def read(self, statement: str) -> list[dict[str, Any]]:
        if self.kind == "sqlite":
            return rows(self.kind, self.location, statement)
        return read(self.eye, statement)

    @invariant()
    def every_job_is_as_the_model_has_it(self) -> None:
        found = {job.id: job for job in find(self.store, Filter(), limit=1000)}
        assert found.keys() == self.model.keys()
        self.looks += 1
        for id in sorted(found)[self.looks % max(1, len(found)) :][:1]:  # each has its turn
            assert get(self.store, id) == found[id]
        for id, job in self.model.items():
            seen = found[id]
            assert seen.status == job.status
            assert (seen.attempts, seen.crashes, seen.losses) == (
                job.attempts, job.crashes, job.losses,
            )  # fmt: skip
            assert seen.lease_no == job.lease_no
            assert (seen.lease_owner is None) == (job.worker is None)
            assert milliseconds(seen.scheduled_at) == job.due
            assert (seen.completed_at is not None) == (job.status in TERMINAL)
            assert seen.cancel_requested == (job.cancel is not None)
            assert f'{{"at":{seen.payload["at"]}}}' == job.sent.payload if seen.payload else True

    @invariant()
    def counts_agree(self) -> None:
        jobs = self.model.values()
        assert totals(self.store) == Counter(job.status for job in jobs)
        for queue in self.store.queues():
            mine = Counter(self.where(job) for job in jobs if job.queue == queue.name)
            assert (queue.ready, queue.later) == (mine["ready"], mine["later"])
            assert queue.waiting == mine["waiting"]
            assert queue.running == mine["in_progress"]
            assert queue.dead == mine["failed"] + mine["dead_letter"]
            assert (queue.paused_at is not None) == (queue.name in self.paused)

    def where(self, job: ModelJob) -> str:
        if job.status != "queued":
            return job.status
        if job.needs:
            return "waiting"
        return "ready" if job.ready <= self.clock() else "later"

    @invariant()
    def no_job_is_in_two_places(self) -> None:
        if self.kind in SQL_KINDS:
            seen = [row["id"] for row in self.read("SELECT id FROM job_queue")]
            assert sorted(seen) == sorted(self.model)
        if self.kind == "sqlite":
            (found,) = self.read(sql.statements("sqlite")["misplaced"])
            assert list(found.values()) == [0], "queued, leased, waiting or dead: one of them"


@pytest.mark.timeout(400)  # a step is a round trip on a server
@pytest.mark.parametrize("examples", [50, pytest.param(200, marks=pytest.mark.soak)])
@pytest.mark.parametrize("kind", KINDS)
def test_the_store_does_what_the_model_does(
    kind: str, examples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing commits late here: what claims on PostgreSQL remember must suffice without sweeps.
    monkeypatch.setattr("tenure.stores.postgres.memory.SWEEP_SECONDS", 1e9)
    machine = type("StoreMachine", (StoreMachine,), {"kind": kind})

    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            database=None,
            # Not `explain`: it traces every line, the driver's too, and takes ten times as long.
            phases=[Phase.explicit, Phase.generate, Phase.shrink],
        ),
    )
