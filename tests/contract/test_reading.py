"""Reading: get, find, counts, and the relation `job_queue` for everybody else's SQL."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from tenure.ids import new_id
from tenure.job import rfc3339
from tenure.outcome import Cancelled, Completed, Crashed, Dead, Failed, Outcome, Retried
from tenure.store import Filter, Store

from .builders import (
    FAILURE,
    HOUR,
    MINUTE,
    OPERATOR,
    SECOND,
    Clock,
    all_events,
    claim,
    claim_one,
    ended_job,
    find,
    finish,
    get,
    milliseconds,
    new,
    put,
    put_many,
    queue_info,
    rescue,
    started_job,
    totals,
    worker,
    worker_row,
)

Sql = Callable[[str], list[dict[str, Any]]]


def found(store: Store, where: Filter, **page: Any) -> list[str]:
    return [job.id for job in find(store, where, **page)]


# -- get --------------------------------------------------------------------------------------


def test_an_absent_job_is_none(store: Store) -> None:
    put(store)

    assert store.get(new_id()) is None


@pytest.mark.parametrize("end", [None, Completed("1"), Failed(FAILURE)], ids=str)
def test_a_foreign_job_is_none(store: Store, end: Outcome | None) -> None:
    id = put(store, org="acme")
    if end is not None:
        no = worker(store)
        finish(store, no, claim_one(store, no), end)

    assert store.get(id, org="globex") is None
    for own in ("acme", None):
        job = store.get(id, org=own)
        assert job is not None
        assert job.org == "acme"


def test_a_finished_job_keeps_what_it_was(store: Store, clock: Clock) -> None:
    given = new(
        type="t", queue="q", priority=2, category="c", org="acme", project="p",
        request_id="r", correlation_id="co", traceparent="tp", parent=new_id(),
        payload='{"n":1}', key="k", max_attempts=9, timeout_ms=1500,
    )  # fmt: skip
    store.enqueue([given])
    queued = get(store, given.id)
    no = worker(store)
    clock.advance(SECOND)
    finish(store, no, claim_one(store, no, queue="q"), Completed("7"))

    done = get(store, given.id)

    same = [
        "id",
        "type",
        "queue",
        "priority",
        "category",
        "payload",
        "max_attempts",
        "timeout",
        "org",
        "project",
        "actor",
        "request_id",
        "correlation_id",
        "traceparent",
        "key",
        "parent",
        "created_at",
        "scheduled_at",
    ]
    assert {name: getattr(done, name) for name in same} == {
        name: getattr(queued, name) for name in same
    }
    assert (done.status, done.result, done.attempts) == ("completed", 7, 1)


# -- find -------------------------------------------------------------------------------------


def test_newest_first_over_live_dead_and_finished_jobs(store: Store) -> None:
    no = worker(store)
    ends = [Completed(), Failed(FAILURE), Cancelled("x"), Dead(FAILURE), Retried(60, FAILURE)]
    ids = [ended_job(store, no, end) for end in ends * 3]

    assert found(store, Filter()) == sorted(ids, reverse=True)


def test_pages_neither_skip_nor_repeat(store: Store) -> None:
    no = worker(store)
    ends = [Completed(), Failed(FAILURE), Cancelled("x"), Retried(60, FAILURE)]
    ids = sorted((ended_job(store, no, end) for end in ends * 4), reverse=True)
    seen: list[str] = []

    while page := found(store, Filter(), before=seen[-1] if seen else None, limit=3):
        assert len(page) <= 3
        seen += page

    assert seen == ids


def test_a_job_that_moves_between_two_pages_is_not_listed_twice(store: Store) -> None:
    no = worker(store)
    ids = sorted(put_many(store, 6), reverse=True)
    first = found(store, Filter(), limit=3)

    for job in claim(store, no):
        finish(store, no, job, Completed())

    assert first + found(store, Filter(), before=first[-1], limit=3) == ids


def test_the_limit_is_honoured(store: Store) -> None:
    put_many(store, 150)

    assert len(find(store, Filter(), limit=7)) == 7
    assert len(find(store, Filter())) == 100
    assert len(find(store, Filter(), limit=1000)) == 150


@pytest.fixture
def zoo(store: Store) -> dict[str, str]:
    """A few jobs that differ in everything one can filter by: name -> id."""
    no = worker(store)
    return {
        "done": ended_job(store, no, Completed(), type="a", queue="one", org="acme", key="k1"),
        "failed": ended_job(store, no, Failed(FAILURE), type="a", queue="two", org="acme"),
        "dead": ended_job(store, no, Dead(FAILURE), type="b", queue="one", org="globex"),
        "cancelled": ended_job(store, no, Cancelled("x"), type="b", queue="two", org="globex"),
        "running": started_job(store, no, type="a", queue="one", org="globex", key="k1").id,
        "queued": put(store, type="b", queue="two", org="acme", key="k2"),
    }


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        (Filter(status="completed"), "done"),
        (Filter(status="failed"), "failed"),
        (Filter(status="dead_letter"), "dead"),
        (Filter(status="cancelled"), "cancelled"),
        (Filter(status="in_progress"), "running"),
        (Filter(status="queued"), "queued"),
        (Filter(type="a"), "done failed running"),
        (Filter(queue="two"), "failed cancelled queued"),
        (Filter(org="acme"), "done failed queued"),
        (Filter(key="k1"), "done running"),
        (Filter(key="k1", org="acme"), "done"),
        (Filter(key="k1", ids=()), ""),
        (Filter(type="b", queue="two", org="globex"), "cancelled"),
        (Filter(status="queued", type="a"), ""),
        (Filter(org="nobody"), ""),
        (Filter(type="%"), ""),
    ],
    ids=str,
)
def test_filters(store: Store, zoo: dict[str, str], where: Filter, expected: str) -> None:
    names = {id: name for name, id in zoo.items()}

    assert {names[id] for id in found(store, where)} == set(expected.split())


def test_filter_by_ids(store: Store, zoo: dict[str, str]) -> None:
    wanted = (zoo["done"], zoo["queued"], new_id())

    assert found(store, Filter(ids=wanted)) == [zoo["queued"], zoo["done"]]
    assert found(store, Filter(ids=wanted, org="globex")) == []
    assert found(store, Filter(ids=wanted, status="completed")) == [zoo["done"]]


def test_no_ids_is_not_any_id(store: Store, zoo: dict[str, str]) -> None:
    # None is any; an empty selection must never become "everything" in a bulk action.
    assert found(store, Filter(ids=())) == []


def test_filters_and_pages_together(store: Store) -> None:
    put_many(store, 5, org="acme", type="a")
    put_many(store, 5, org="globex", type="a")
    ids = put_many(store, 5, org="acme", type="a")
    put_many(store, 5, org="acme", type="b")

    first = found(store, Filter(org="acme", type="a"), limit=3)
    second = found(store, Filter(org="acme", type="a"), before=first[-1], limit=3)

    assert first == ids[:1:-1]
    assert len(second) == 3
    assert second[:2] == ids[1::-1]


def test_what_is_found_is_what_is_got(store: Store, zoo: dict[str, str]) -> None:
    assert find(store, Filter()) == [get(store, id) for id in sorted(zoo.values(), reverse=True)]


# -- counts -----------------------------------------------------------------------------------


def test_totals_count_every_status(store: Store, zoo: dict[str, str]) -> None:
    put_many(store, 3, delay_ms=MINUTE)

    assert totals(store) == {
        "queued": 4, "in_progress": 1, "completed": 1,
        "failed": 1, "dead_letter": 1, "cancelled": 1,
    }  # fmt: skip


def test_an_empty_store_counts_nothing(store: Store) -> None:
    assert totals(store) == {}


def test_queues_count_what_is_in_them(store: Store, clock: Clock) -> None:
    no = worker(store)
    put_many(store, 2)
    clock.advance(4 * SECOND)
    put(store)
    put_many(store, 4, delay_ms=MINUTE)
    put(store, queue="other")
    ended_job(store, no, Failed(FAILURE), priority=1)
    ended_job(store, no, Dead(FAILURE), priority=1)
    ended_job(store, no, Completed(), priority=1)
    ended_job(store, no, Cancelled("x"), priority=1)
    started_job(store, no, priority=1)

    info = queue_info(store)

    assert (info.ready, info.later, info.waiting, info.running, info.dead) == (3, 4, 0, 1, 2)
    assert info.oldest_ms == 4 * SECOND
    other = queue_info(store, "other")
    assert (other.ready, other.later, other.running, other.dead) == (1, 0, 0, 0)
    assert other.oldest_ms == 0


def test_the_oldest_is_found_behind_more_than_are_counted(store: Store, clock: Clock) -> None:
    put(store, priority=9, org="z")
    clock.advance(HOUR)
    for _ in range(11):
        put_many(store, 1000, priority=1)

    info = queue_info(store)

    assert (info.ready, info.capped, info.oldest_ms) == (10_000, ("ready",), HOUR)


def test_what_is_due_later_becomes_ready(store: Store, clock: Clock) -> None:
    put(store, delay_ms=MINUTE)
    assert queue_info(store).oldest_ms is None

    clock.advance(MINUTE + 3 * SECOND)

    info = queue_info(store)
    # The age counts from the due time.
    assert (info.ready, info.later, info.oldest_ms) == (1, 0, 3 * SECOND)


def test_queues_and_totals_agree(store: Store, zoo: dict[str, str]) -> None:
    put_many(store, 3, queue="three", delay_ms=5)
    queues, total = store.queues(), totals(store)

    assert sum(queue.ready + queue.later + queue.waiting for queue in queues) == total["queued"]
    assert sum(queue.running for queue in queues) == total["in_progress"]
    assert sum(queue.dead for queue in queues) == total["failed"] + total["dead_letter"]


def test_queue_names_are_those_that_were_used_or_paused(store: Store) -> None:
    put(store, queue="used")
    store.pause("paused", actor=OPERATOR, reason="x")

    names = store.queue_names()

    assert (names["used"], names["paused"]) == (False, True)


def test_unknown_types_counts_queued_jobs_of_other_types(store: Store) -> None:
    no = worker(store)
    ended_job(store, no, Completed(), type="finished")
    started_job(store, no, type="running")
    put_many(store, 2, type="a")
    put_many(store, 3, type="b", delay_ms=MINUTE)
    put(store, type="c")

    assert store.unknown_types(frozenset({"a"})) == {"b": 3, "c": 1}
    assert store.unknown_types(frozenset({"a", "b", "c"})) == {}


# -- the next due job -------------------------------------------------------------------------


def test_next_due_is_the_time_until_the_earliest_job(store: Store, clock: Clock) -> None:
    put(store, delay_ms=30 * SECOND, priority=1)
    put(store, delay_ms=10 * SECOND, priority=9, org="acme")
    put(store, delay_ms=5 * SECOND, queue="other")

    assert store.next_due(["default"]) == 10 * SECOND
    assert store.next_due(["default", "other"]) == 5 * SECOND
    clock.advance(4 * SECOND)
    assert store.next_due(["default"]) == 6 * SECOND
    assert store.next_due(["default"], now_ms=clock() + SECOND) == 5 * SECOND


def test_next_due_looks_at_every_org(store: Store) -> None:
    store.enqueue([new(org=f"org-{n:03}", delay_ms=(1000 - n) * SECOND) for n in range(600)])

    assert store.next_due(["default"]) == 401 * SECOND


def test_next_due_is_zero_when_the_time_of_a_job_has_come(store: Store, clock: Clock) -> None:
    put(store, delay_ms=SECOND)
    clock.advance(2 * SECOND)

    assert store.next_due(["default"]) == 0


def test_what_a_claim_has_left_is_not_waited_for(store: Store, clock: Clock) -> None:
    """It is of a type nobody here knows: a worker that asked when it is due would ask for ever."""
    no, known = worker(store), frozenset({"known"})
    put(store, type="unknown", delay_ms=SECOND)
    put(store, type="known", delay_ms=HOUR)
    clock.advance(2 * SECOND)

    while store.claim(no, [("default", 5)], known).more:
        pass

    assert store.next_due(["default"]) == HOUR - 2 * SECOND


def test_next_due_is_none_when_there_is_nothing_to_wait_for(store: Store) -> None:
    assert store.next_due(["default"]) is None
    assert store.next_due([]) is None
    no = worker(store)
    started_job(store, no)
    ended_job(store, no, Failed(FAILURE))
    ended_job(store, no, Completed())
    put(store, queue="other")

    assert store.next_due(["default", "unheard-of"]) is None


# -- job_queue --------------------------------------------------------------------------------

COLUMNS = [
    "id",
    "type",
    "status",
    "priority",
    "scheduled_at",
    "lease_owner",
    "lease_until",
    "payload",
    "idempotency_key",
    "attempts",
    "max_retries",
    "error",
    "created_at",
    "updated_at",
    "started_at",
    "completed_at",
    "result",
]
TIMES = [name for name in COLUMNS if name.endswith("_at") or name == "lease_until"]
ZULU = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")


def test_job_queue_has_the_canonical_columns(store: Store, sql: Sql) -> None:
    put(store)

    (row,) = sql("SELECT * FROM job_queue")

    assert set(COLUMNS) <= set(row)


def test_job_queue_has_every_job_once(store: Store, zoo: dict[str, str], sql: Sql) -> None:
    rows = sql("SELECT id, status FROM job_queue")

    assert sorted(row["id"] for row in rows) == sorted(zoo.values())
    assert {row["id"]: row["status"] for row in rows} == {
        id: get(store, id).status for id in zoo.values()
    }


@pytest.mark.parametrize("offset", [0, 1, 7, 876, 877, 999])
def test_job_queue_shows_times_to_the_millisecond(
    store: Store, clock: Clock, sql: Sql, kind: str, offset: int
) -> None:
    clock.ms = clock.ms // 1000 * 1000 + offset
    no = worker(store)
    put(store, delay_ms=3 * SECOND)
    started_job(store, no)
    ended_job(store, no, Completed())
    ended_job(store, no, Failed(FAILURE))

    for row in sql("SELECT * FROM job_queue"):
        job = get(store, row["id"])
        for name in TIMES:
            value = milliseconds(getattr(job, name))
            if kind != "sqlite":  # only SQLite has no type for times
                assert milliseconds(row[name]) == value, name
                continue
            assert row[name] == (None if value is None else rfc3339(value)), name
            assert row[name] is None or ZULU.fullmatch(row[name])


def test_job_queue_shows_a_running_job_with_its_lease(store: Store, sql: Sql) -> None:
    no = worker(store)
    started_job(store, no, key="k", max_attempts=7, priority=3, payload='{"n":1}')

    (row,) = sql("SELECT * FROM job_queue")

    assert (row["status"], row["attempts"], row["max_retries"]) == ("in_progress", 1, 7)
    assert row["lease_owner"] == worker_row(store, no).id
    assert row["lease_until"] is not None
    assert (row["idempotency_key"], row["priority"]) == ("k", 3)
    assert json.loads(row["payload"]) == {"n": 1}


def test_job_queue_shows_how_jobs_ended(store: Store, sql: Sql) -> None:
    no = worker(store)
    done = ended_job(store, no, Completed('{"sent":1}'))
    failed = ended_job(store, no, Failed(FAILURE))

    rows = {row["id"]: row for row in sql("SELECT * FROM job_queue")}

    assert json.loads(rows[done]["result"]) == {"sent": 1}
    assert (rows[failed]["status"], rows[failed]["error"]) == ("failed", "boom")
    for row in rows.values():
        assert row["completed_at"] is not None
        assert (row["lease_owner"], row["lease_until"]) == (None, None)


def test_every_job_ever_accepted_is_in_job_queue_with_its_ulid(store: Store, sql: Sql) -> None:
    ids = put_many(store, 20)

    assert {row["id"] for row in sql("SELECT id FROM job_queue")} == set(ids)
    assert all(re.fullmatch(r"[0-7][0-9A-HJKMNP-TV-Z]{25}", id) for id in ids)


def test_what_was_asked_stays_what_was_asked(store: Store, clock: Clock) -> None:
    """Retries and replays move when a job is due, not when it was asked to run."""
    no = worker(store)
    at_once = put(store)
    delayed = put(store, delay_ms=MINUTE)
    exact = put(store, at_ms=clock() + MINUTE)
    asked = {id: get(store, id).scheduled_for for id in (at_once, delayed, exact)}
    assert asked[at_once] is None
    assert {milliseconds(when) for when in asked.values() if when} == {clock() + MINUTE}
    clock.advance(MINUTE)
    for job in claim(store, no):
        finish(store, no, job, Retried(10, FAILURE))
    clock.advance(HOUR)
    for job in claim(store, no):
        finish(store, no, job, Failed(FAILURE) if job.id == exact else Completed())
    store.replay([exact], actor=OPERATOR)
    clock.advance(HOUR)
    finish(store, no, claim_one(store, no), Completed())

    assert {id: get(store, id).scheduled_for for id in asked} == asked
    assert {get(store, id).status for id in asked} == {"completed"}


def test_a_discarded_job_keeps_the_error_it_died_of(store: Store) -> None:
    id = ended_job(store, worker(store), Failed(FAILURE))
    error = get(store, id).error

    store.discard([id], actor=OPERATOR, reason="hopeless")

    job = get(store, id)
    assert (job.status, job.error, job.error_code) == ("cancelled", error, "discarded")
    last = all_events(store, job_id=id)[-1]
    assert (last.kind, last.data) == ("job.discarded", {"reason": "hopeless"})


@pytest.mark.parametrize("how", ["poison", "lost"])
def test_poison_counts_as_dead_in_statistics(store: Store, how: str) -> None:
    no = worker(store)
    job = started_job(store, no)
    if how == "poison":
        finish(store, no, job, Crashed("killed", 1))
    else:
        rescue(store, no, started=None, limit=1)

    assert get(store, job.id).error_code == how
    outcomes = {(rollup.outcome, rollup.runs) for rollup in store.rollups(since_ms=0)}
    assert outcomes == {("dead", 1)}
    assert totals(store) == {"dead_letter": 1}
    assert queue_info(store).dead == 1
