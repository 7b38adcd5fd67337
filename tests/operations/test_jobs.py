"""Jobs: one, many, page by page; their trails in both directions; why one is not running."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from contract.builders import (
    FAILURE,
    OPERATOR,
    SECOND,
    Clock,
    claim_one,
    ended_job,
    finish,
    put,
    put_many,
    save_step,
    worker,
)
from tenure.errors import ConfigError, JobError, JobNotFound
from tenure.ids import new_id, to_uuid
from tenure.operations.dead import Fingerprint
from tenure.operations.jobs import Jobs, id_or_beginning
from tenure.operations.listing import JobFilter
from tenure.outcome import Completed, Dead, Failed, Failure
from tenure.store import Store

from .conftest import Enter

OTHER = Failure("gone", "GONE", "KeyError at tasks.py:9")


# -- one --------------------------------------------------------------------------------------
def test_get(store: Store, enter: Enter) -> None:
    id = put(store, org="acme")

    assert enter(Jobs).get(id).id == id
    assert enter(Jobs).get(to_uuid(id)).id == id
    assert enter(Jobs, org="acme").get(id).id == id
    assert enter(Jobs, org="other").get(id) is None
    assert enter(Jobs).get("not an id") is None
    with pytest.raises(JobNotFound, match=f"there is no job {id}"):
        enter(Jobs, org="other").require(id)
    with pytest.raises(JobNotFound, match="an id is a ULID or a UUID"):
        enter(Jobs).require(7)


def test_ids_as_people_type_them() -> None:
    id = new_id()

    assert id_or_beginning(id.lower()) == id_or_beginning(str(to_uuid(id))) == id
    assert id_or_beginning(f"{id[:9].lower()}…") == id[:9]
    for text in ("01M7G", "hello", str(uuid.uuid4())[:20], ""):
        with pytest.raises(JobError, match="is not a job id"):
            id_or_beginning(text)


def test_the_beginning_of_an_id(store: Store, enter: Enter) -> None:
    shared = new_id()[:20]
    ids = [put(store, id=f"{shared}00000{digit}") for digit in range(8)]
    mine = put(store, org="acme")

    assert enter(Jobs).whole_id(ids[3]) == ids[3]
    assert enter(Jobs, org="acme").whole_id(mine[:10]) == mine
    with pytest.raises(ConfigError) as several:
        enter(Jobs).whole_id(shared)
    assert str(several.value).count("noop queued") == 5
    assert str(several.value).endswith("\n  …")
    with pytest.raises(JobNotFound, match="no job whose id begins with 7ZZZZZZZ"):
        enter(Jobs).whole_id("7ZZZZZZZ")


def test_all_about_a_job(store: Store, enter: Enter) -> None:
    me = worker(store)
    need = ended_job(store, me, Dead(FAILURE))
    id = put(store, after=(need,))

    waits = enter(Jobs).detail(id)
    assert waits.needs == {need: "dead_letter"}
    assert (waits.why.code, waits.why.facts["dead"]) == ("waiting", [need])
    assert [event.kind for event in waits.events] == ["job.enqueued"]

    put(store)
    job = claim_one(store, me)
    save_step(store, me, job, "fetch", '{"rows": 3}')
    runs = enter(Jobs).detail(job.id)
    assert runs.steps == {"fetch": {"rows": 3}}
    assert (runs.why.code, runs.why.facts["worker"]) == ("running", me.id)
    with pytest.raises(JobNotFound):
        enter(Jobs, org="acme").detail(id)


def test_why_of_a_job_through_its_life(store: Store, enter: Enter, clock: Clock) -> None:
    jobs: Jobs = enter(Jobs)

    def why(id: str) -> str:
        return jobs.why(jobs.require(id)).code

    id = put(store, delay_ms=60 * SECOND)
    assert why(id) == "later"
    clock.advance(61 * SECOND)
    assert why(id) == "no_worker"
    worker(store, meta={"queues": ["critical"]})
    assert why(id) == "queue_not_served"
    worker(store, meta={"queues": None, "types": ["other"]})
    assert why(id) == "type_not_known"
    me = worker(store)
    assert why(id) == "its_turn"
    store.pause("default", actor=OPERATOR, reason="a look")
    assert why(id) == "paused"
    store.resume("default", actor=OPERATOR)
    job = claim_one(store, me)
    assert why(id) == "running"
    finish(store, me, job, Failed(FAILURE))
    assert why(id) == "failed"
    store.discard([id], actor=OPERATOR, reason="")
    assert why(id) == "discarded"


# -- many -------------------------------------------------------------------------------------
@pytest.fixture
def graveyard(store: Store) -> dict[str, list[str]]:
    """Dead jobs of two statuses, one after the other, and others in between."""
    me = worker(store)
    made: dict[str, list[str]] = {"dead_letter": [], "failed": [], "completed": [], "queued": []}
    for _ in range(4):
        made["dead_letter"].append(ended_job(store, me, Dead(FAILURE)))
        made["failed"].append(ended_job(store, me, Failed(OTHER)))
        made["completed"].append(ended_job(store, me, Completed("null")))
    made["dead_letter"].append(ended_job(store, me, Dead(FAILURE)))
    made["queued"] += put_many(store, 3)
    return made


def newest(*groups: list[str]) -> list[str]:
    return sorted((id for group in groups for id in group), reverse=True)


FILTERS = [
    (JobFilter(), ("dead_letter", "failed", "completed", "queued")),
    (JobFilter(("failed",)), ("failed",)),
    (JobFilter(("failed", "dead_letter")), ("dead_letter", "failed")),
    (JobFilter(queue="q:deadletter"), ("dead_letter", "failed")),
    (JobFilter(("queued", "failed"), queue="q:default"), ("failed", "queued")),
    (JobFilter(type="unknown"), ()),
    (
        JobFilter(group=Fingerprint("noop", "failed", "GONE", "KeyError at tasks.py:9").handle),
        ("failed",),
    ),
]


@pytest.mark.parametrize(("where", "expected"), FILTERS)
@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_find_and_page_agree(
    enter: Enter,
    graveyard: dict[str, list[str]],
    where: JobFilter,
    expected: tuple[str, ...],
    size: int,
) -> None:
    jobs: Jobs = enter(Jobs)
    wanted = newest(*(graveyard[name] for name in expected))

    assert [job.id for job in jobs.find(where, page=size)] == wanted
    seen: list[str] = []
    before: str | None = None
    for _ in range(50):
        page = jobs.page(where, before=before, limit=size)
        assert len(page.jobs) <= size
        seen += [job.id for job in page.jobs]
        before = page.before
        if before is None:
            break
    assert seen == wanted


def test_a_filter_says_what_cannot_be() -> None:
    with pytest.raises(ConfigError, match="status is one of"):
        JobFilter(("happy",))
    with pytest.raises(ConfigError, match="is a view of jobs"):
        JobFilter(("queued",), queue="q:deadletter")
    with pytest.raises(ConfigError, match="is not a queue name"):
        JobFilter(queue="a b")


# -- the audit trail --------------------------------------------------------------------------
def seqs(events: Any) -> list[int]:
    return [event.seq for event in events]


def backwards(jobs: Jobs, job_id: str | None, limit: int) -> list[int]:
    seen: list[int] = []
    while events := jobs.events_before(seen[-1] if seen else None, job_id, limit=limit).events:
        assert len(events) <= limit
        seen += seqs(events)
    return seen


@pytest.mark.parametrize("limit", [1, 3, 100])
def test_events_in_both_directions(store: Store, enter: Enter, limit: int) -> None:
    me = worker(store)
    ids = [ended_job(store, me, Completed("null")) for _ in range(5)]
    put_many(store, 4, org="acme")
    for scope in ({}, {"org": "acme"}):
        jobs: Jobs = enter(Jobs, **scope)
        every = seqs(jobs.events())
        assert every == sorted(every)
        assert len(every) == (4 if scope else 19)
        assert backwards(jobs, None, limit) == every[::-1]
    of_one = seqs(enter(Jobs).events(ids[2]))
    assert len(of_one) == 3
    assert backwards(enter(Jobs), ids[2], limit) == of_one[::-1]
    assert list(enter(Jobs).events("not an id")) == []
    assert list(enter(Jobs, org="acme").events(ids[2])) == []


def test_going_back_over_gaps(store: Store, enter: Enter, kind: str, location: str) -> None:
    """Numbers that were drawn and never used lie between the events that are there."""
    from contract.builders import connect

    put_many(store, 3)
    beside = connect(kind, location)
    if kind == "sqlite":
        beside.execute(
            "INSERT INTO tenure_events (seq, at, kind, org, actor_type, actor_id)"
            " VALUES (5000, 0, 'queue.paused', 'default', 'user', 'x')"
        )
    else:
        beside.execute("SELECT setval('tenure.events_seq', 5000)")
    beside.close()
    put_many(store, 2)

    jobs: Jobs = enter(Jobs)
    every = seqs(jobs.events())
    assert every[-1] > 5000
    assert backwards(jobs, None, 4) == every[::-1]
