"""Claim: who gets which job, in which order."""

from __future__ import annotations

import json

import pytest

from tenure.job import Actor
from tenure.outcome import Crashed, Released, Retried
from tenure.store import Claim, Registration, Store

from .builders import (
    FAILURE,
    MINUTE,
    OPERATOR,
    SECOND,
    Clock,
    claim,
    claim_one,
    counts,
    ended_job,
    finish,
    get,
    milliseconds,
    new,
    put,
    put_many,
    rescue,
    snapshot,
    started_job,
    worker,
    worker_row,
)

# -- granting a lease -------------------------------------------------------------------------


def test_claiming_grants_a_lease_and_counts_the_attempt(store: Store, clock: Clock) -> None:
    id = put(store)
    no = worker(store)
    clock.advance(250)

    granted = claim_one(store, no)

    job = get(store, id)
    assert (granted.id, granted.attempts) == (id, 1)
    assert (job.status, job.attempts, job.crashes) == ("in_progress", 1, 0)
    assert job.lease_no == granted.lease_no > 0
    assert job.lease_owner == worker_row(store, no).id
    assert milliseconds(job.started_at) == milliseconds(job.updated_at) == clock()
    assert job.completed_at is None


ODD = 'quote " back \\ slash / tab \t line \n bell \x07 \x7f \u2028 ü 漢 \U0001f98a {"a":[1]} null'


@pytest.mark.parametrize("length", [0, 300, 9000, 200_000], ids="{} more".format)
def test_a_claimed_job_is_what_was_enqueued_to_the_last_character(
    store: Store, clock: Clock, length: int
) -> None:
    parts = {"odd": ODD, "more": "ü" * length, "n": [1.0, 1e-7, -0.0, 9007199254740991, None]}
    payload = json.dumps(parts, ensure_ascii=False, separators=(",", ":"))
    given = new(
        payload=payload,
        key=ODD[:40],
        org="org " + ODD[:20],
        project=ODD[:40],
        actor=Actor("user", ODD[:40]),
        request_id=ODD[:40],
        correlation_id=ODD[-20:],
        traceparent="00-" + "a" * 32,
        timeout_ms=1234,
        max_attempts=7,
    )
    store.enqueue([new(), given, new(payload='"other"')])

    granted = {job.id: job for job in claim(store, worker(store), 10)}

    assert len(granted) == 3
    job = granted[given.id]
    terms = given.terms
    assert job.payload == payload
    assert (job.type, job.key, job.org, job.project) == (
        terms.type, given.key, terms.org, terms.project,
    )  # fmt: skip
    assert Actor(job.actor_type, job.actor_id) == terms.actor
    assert (job.request_id, job.correlation_id) == (terms.request_id, terms.correlation_id)
    assert (job.traceparent, job.timeout_ms, job.max_attempts) == (terms.traceparent, 1234, 7)
    assert (job.scheduled_at, job.created_at, job.ready_at) == (clock(), clock(), clock())
    assert [granted[id].payload for id in granted if id != given.id] == ["{}", '"other"']


def test_a_claimed_job_is_not_granted_again(store: Store) -> None:
    put(store)
    one, two = worker(store), worker(store)

    assert len(claim(store, one)) == 1
    assert claim(store, two) == []
    assert claim(store, one) == []


def test_two_workers_share_the_jobs_without_sharing_a_job(store: Store) -> None:
    ids = put_many(store, 10)

    first = claim(store, worker(store), 6)
    second = claim(store, worker(store), 6)

    assert (len(first), len(second)) == (6, 4)
    assert {job.id for job in first} | {job.id for job in second} == set(ids)


def test_each_attempt_is_counted_when_it_is_claimed(store: Store) -> None:
    no = worker(store)
    id = put(store)

    for attempt in (1, 2, 3):
        job = claim_one(store, no)
        assert (job.id, job.attempts, get(store, id).attempts) == (id, attempt, attempt)
        finish(store, no, job, Retried(0, FAILURE))


def test_an_empty_store_gives_nothing(store: Store) -> None:
    assert store.claim(worker(store), [("default", 10)]) == Claim([], {}, False)


def test_wanting_nothing_gives_nothing(store: Store) -> None:
    put(store)

    assert store.claim(worker(store), []).jobs == []
    assert claim(store, worker(store), 0) == []


# -- limits and queues ------------------------------------------------------------------------


def test_each_queue_has_its_own_limit(store: Store) -> None:
    for queue in ("a", "b", "c"):
        put_many(store, 5, queue=queue)

    jobs = store.claim(worker(store), [("a", 2), ("b", 3), ("d", 4)]).jobs

    assert counts([job.queue for job in jobs]) == {"a": 2, "b": 3}


def test_a_queue_with_less_than_its_limit_does_not_raise_anothers(store: Store) -> None:
    put(store, queue="a")
    put_many(store, 5, queue="b")

    jobs = store.claim(worker(store), [("a", 3), ("b", 2)]).jobs

    assert counts([job.queue for job in jobs]) == {"a": 1, "b": 2}


def test_jobs_of_queues_not_asked_for_stay(store: Store) -> None:
    id = put(store, queue="other")

    assert claim(store, worker(store)) == []
    assert get(store, id).status == "queued"


@pytest.mark.parametrize("limit", [0, 1, 3, 4, 5, 9])
def test_a_limit_in_all_goes_beside_the_limits_of_the_queues(store: Store, limit: int) -> None:
    for queue in ("a", "b"):
        put_many(store, 5, queue=queue)

    jobs = store.claim(worker(store), [("a", 2), ("b", 3)], limit=limit).jobs

    assert len(jobs) == min(limit, 5)
    taken = counts([job.queue for job in jobs])
    assert taken.get("a", 0) <= 2
    assert taken.get("b", 0) <= 3
    assert store.totals().jobs["queued"] == 10 - len(jobs)


def test_what_one_queue_leaves_of_the_limit_in_all_goes_to_the_next(store: Store) -> None:
    put(store, queue="a")
    put_many(store, 5, queue="b")

    jobs = store.claim(worker(store), [("a", 4), ("b", 4)], limit=4).jobs

    assert counts([job.queue for job in jobs]) == {"a": 1, "b": 3}


# -- order ------------------------------------------------------------------------------------


def test_the_most_urgent_priority_goes_first(store: Store) -> None:
    ids = {priority: put(store, priority=priority) for priority in (5, 10, 1, 7, 2)}
    no = worker(store)

    order = [claim_one(store, no).id for _ in ids]

    assert order == [ids[priority] for priority in (1, 2, 5, 7, 10)]


def test_among_equals_the_one_due_first_goes_first(store: Store, clock: Clock) -> None:
    late = put(store, delay_ms=3 * SECOND)
    early = put(store, delay_ms=1 * SECOND)
    middle = put(store, delay_ms=2 * SECOND)
    clock.advance(MINUTE)
    no = worker(store)

    assert [claim_one(store, no).id for _ in range(3)] == [early, middle, late]


def test_among_jobs_due_at_the_same_time_the_smallest_id_goes_first(store: Store) -> None:
    jobs = [new() for _ in range(6)]
    store.enqueue(jobs[::-1])
    no = worker(store)

    assert [claim_one(store, no).id for _ in jobs] == [job.id for job in jobs]


def test_one_claim_of_many_takes_the_first_ones_in_the_same_order(
    store: Store, clock: Clock
) -> None:
    # The list comes in claim order too: it is the order in which a worker starts them.
    expected = [
        put(store, priority=1, delay_ms=2),
        put(store, priority=1, delay_ms=3),
        put(store, priority=4),
        put(store, priority=9, delay_ms=1),
        put(store, priority=9, delay_ms=1),
    ]
    expected.insert(2, put(store, priority=1, delay_ms=3))
    left = [put(store, priority=9, delay_ms=4), put(store, priority=10)]
    clock.advance(SECOND)

    jobs = claim(store, worker(store), len(expected))

    assert [job.id for job in jobs] == expected
    assert {get(store, id).status for id in left} == {"queued"}


def test_priority_goes_before_due_time(store: Store, clock: Clock) -> None:
    old = put(store, priority=6)
    clock.advance(10 * MINUTE)
    urgent = put(store, priority=5)
    no = worker(store)

    assert [claim_one(store, no).id for _ in range(2)] == [urgent, old]


@pytest.mark.parametrize("how", ["release", "rescue"])
def test_a_job_given_back_or_rescued_keeps_its_place(store: Store, clock: Clock, how: str) -> None:
    no = worker(store)
    first = started_job(store, no)
    clock.advance(SECOND)
    second = put(store)
    clock.advance(SECOND)

    if how == "release":
        finish(store, no, first, Released("shutdown"))
    else:
        rescue(store, no)

    assert [job.id for job in claim(store, worker(store), 2)] == [first.id, second]


def test_a_retried_job_goes_to_the_place_of_its_new_due_time(store: Store, clock: Clock) -> None:
    no = worker(store)
    retried = started_job(store, no)
    waiting = put(store)
    clock.advance(SECOND)

    finish(store, no, retried, Retried(0, FAILURE))

    assert [job.id for job in claim(store, no, 2)] == [waiting, retried.id]


# -- orgs in turn -----------------------------------------------------------------------------


def test_claims_of_one_take_the_orgs_in_turn(store: Store, clock: Clock) -> None:
    put_many(store, 1000, org="large")
    clock.advance(SECOND)
    small = put_many(store, 3, org="small")
    no = worker(store)

    jobs = [claim_one(store, no) for _ in range(6)]

    orgs = [job.org for job in jobs]
    assert [set(orgs[turn : turn + 2]) for turn in (0, 2, 4)] == [{"large", "small"}] * 3
    assert [job.id for job in jobs if job.org == "small"] == small


def test_a_claim_of_many_is_split_evenly_between_orgs(store: Store) -> None:
    put_many(store, 100, org="a")
    put_many(store, 50, org="b")

    jobs = claim(store, worker(store), 10)

    assert counts([job.org for job in jobs]) == {"a": 5, "b": 5}


def test_an_uneven_claim_differs_by_one_at_most(store: Store) -> None:
    for org in ("a", "b", "c"):
        put_many(store, 100, org=org)

    jobs = claim(store, worker(store), 10)

    assert sorted(counts([job.org for job in jobs]).values()) == [3, 3, 4]


def test_what_one_org_does_not_use_goes_to_the_others(store: Store) -> None:
    put_many(store, 1000, org="large")
    small = put_many(store, 3, org="small")

    jobs = claim(store, worker(store), 10)

    assert counts([job.org for job in jobs]) == {"large": 7, "small": 3}
    assert {job.id for job in jobs if job.org == "small"} == set(small)


def test_a_claim_larger_than_all_orgs_together_takes_everything(store: Store) -> None:
    sizes = {"a": 1, "b": 7, "c": 30}
    for org, size in sizes.items():
        put_many(store, size, org=org)

    jobs = claim(store, worker(store), 100)

    assert counts([job.org for job in jobs]) == sizes


def test_each_org_gets_its_own_jobs_in_due_order(store: Store, clock: Clock) -> None:
    expected: dict[str, list[str]] = {"a": [], "b": []}
    for _ in range(4):
        for org in expected:
            expected[org].append(put(store, org=org))
        clock.advance(1)

    jobs = claim(store, worker(store), 6)

    for org, ids in expected.items():
        assert [job.id for job in jobs if job.org == org] == ids[:3]


def test_priority_goes_before_the_turn_of_an_org(store: Store) -> None:
    put_many(store, 5, org="patient", priority=5)
    urgent = put_many(store, 3, org="urgent", priority=1)

    jobs = claim(store, worker(store), 4)

    assert {job.id for job in jobs[:3]} == set(urgent)
    assert jobs[3].org == "patient"


def test_many_orgs_all_get_their_turn(store: Store) -> None:
    store.enqueue([new(org=f"org-{number:03}") for number in range(300)])
    no = worker(store)
    seen: list[str] = []

    # A walk over orgs may stop at its bound; then it says so, and going on finds the rest.
    for _ in range(300):
        granted = store.claim(no, [("default", 50)])
        seen += [job.org for job in granted.jobs]
        if not granted.jobs and not granted.more:
            break

    assert sorted(seen) == [f"org-{number:03}" for number in range(300)]


def test_an_org_that_arrives_late_does_not_wait_for_the_others_to_be_served(
    store: Store,
) -> None:
    for number in range(20):
        put_many(store, 5, org=f"old-{number:02}")
    no = worker(store)
    claim(store, no, 30)
    put(store, org="a-newcomer")

    # Once round all orgs is enough: twenty old ones and the new one.
    orgs = [claim_one(store, no).org for _ in range(21)]

    assert "a-newcomer" in orgs


# -- due later --------------------------------------------------------------------------------


def test_a_job_due_later_is_not_claimed_before_its_time(store: Store, clock: Clock) -> None:
    id = put(store, delay_ms=5 * SECOND)
    no = worker(store)

    assert claim(store, no) == []
    clock.advance(5 * SECOND - 1)
    assert claim(store, no) == []
    clock.advance(1)
    assert [job.id for job in claim(store, no)] == [id]


def test_a_moment_in_the_past_is_now(store: Store, clock: Clock) -> None:
    id = put(store, at_ms=clock() - 30 * SECOND)

    assert claim_one(store, worker(store)).id == id


def test_jobs_due_later_do_not_hide_those_due_now(store: Store) -> None:
    put_many(store, 50, delay_ms=MINUTE, priority=1)
    due = put(store, priority=9)

    assert [job.id for job in claim(store, worker(store), 1)] == [due]


def test_of_two_jobs_in_a_row_only_the_one_that_is_due_is_taken(store: Store) -> None:
    due = put(store)
    put(store, delay_ms=1)

    assert [job.id for job in claim(store, worker(store))] == [due]


def test_now_ms_decides_what_is_due(store: Store, clock: Clock) -> None:
    put(store, delay_ms=MINUTE)
    no = worker(store)

    assert store.claim(no, [("default", 1)], now_ms=clock() + MINUTE - 1).jobs == []
    assert len(store.claim(no, [("default", 1)], now_ms=clock() + MINUTE).jobs) == 1


# -- paused queues ----------------------------------------------------------------------------


def test_a_paused_queue_gives_nothing_until_it_is_resumed(store: Store) -> None:
    id = put(store)
    no = worker(store)
    store.pause("default", actor=OPERATOR, reason="maintenance")

    assert claim(store, no) == []
    assert get(store, id).status == "queued"
    store.resume("default", actor=OPERATOR)
    assert [job.id for job in claim(store, no)] == [id]


def test_a_pause_concerns_one_queue(store: Store) -> None:
    put(store, queue="a")
    other = put(store, queue="b")
    store.pause("a", actor=OPERATOR, reason="maintenance")

    jobs = store.claim(worker(store), [("a", 5), ("b", 5)]).jobs

    assert [job.id for job in jobs] == [other]


def test_a_queue_may_be_paused_before_its_first_job(store: Store) -> None:
    store.pause("default", actor=OPERATOR, reason="not yet")
    put(store)

    assert claim(store, worker(store)) == []


def test_a_pause_lets_running_jobs_finish(store: Store) -> None:
    no = worker(store)
    job = started_job(store, no)
    store.pause("default", actor=OPERATOR, reason="maintenance")

    assert finish(store, no, job, Retried(0, FAILURE)) == "accepted"
    assert claim(store, no) == []


# -- unknown types ----------------------------------------------------------------------------


def test_a_type_the_worker_does_not_know_is_passed_over_and_reported(store: Store) -> None:
    known = put(store, type="known")
    unknown = put_many(store, 2, type="unknown")
    before = snapshot(store, *unknown)
    no = worker(store)

    granted, reported = claim_all(store, no, frozenset({"known"}))

    assert granted == [known]
    assert reported == {"unknown"}
    assert snapshot(store, *unknown)[0] == before[0]


def claim_all(
    store: Store, no: Registration, types: frozenset[str], most: int = 10
) -> tuple[list[str], set[str]]:
    """Claim as a worker does, until there is nothing more: the ids, and the types passed over."""
    ids: list[str] = []
    passed: set[str] = set()
    for _ in range(1000):
        got = store.claim(no, [("default", most)], types)
        ids += [job.id for job in got.jobs]
        passed |= got.unknown.keys()
        if not (got.jobs or got.more):
            return ids, passed
    raise AssertionError("it goes on for ever")


def test_what_one_worker_passes_over_another_gets_at_once(store: Store) -> None:
    id = put(store, type="unknown")
    claim_all(store, worker(store), frozenset({"known"}))

    (job,) = claim(store, worker(store), types=frozenset({"unknown"}))
    assert (job.id, job.attempts) == (id, 1)


def test_a_claim_for_other_types_gets_what_the_last_one_passed_over(store: Store) -> None:
    """The same worker may ask for fewer types while it has no process to give to the others."""
    no = worker(store)
    ids = [put(store, type=type) for type in ("a", "b", "a", "b")]

    assert claim_all(store, no, frozenset({"a"}))[0] == ids[0::2]
    assert claim_all(store, no, frozenset({"a", "b"}))[0] == ids[1::2]


@pytest.mark.parametrize("over", [{}, {"org": "acme"}, {"priority": 9}, {"delay_ms": SECOND}])
def test_unknown_types_do_not_block_the_known_ones_behind_them(
    store: Store, clock: Clock, over: dict[str, object]
) -> None:
    put_many(store, 30, type="unknown", delay_ms=over.get("delay_ms", 0))
    known = put(store, type="known", **over)
    clock.advance(2 * SECOND)

    assert claim_all(store, worker(store), frozenset({"known"}), most=1)[0] == [known]


def test_known_ones_among_many_unknown_ones_are_all_found(store: Store) -> None:
    """More than one walk may look at, at the beginning, in between and at the end."""
    jobs = [new(type="known" if n % 2500 == 0 else "unknown") for n in range(10_001)]
    store.enqueue(jobs)
    before = snapshot(store, jobs[1].id, jobs[9_999].id)

    found, passed = claim_all(store, worker(store), frozenset({"known"}), most=3)

    assert found == [job.id for job in jobs[::2500]]
    assert passed == {"unknown"}
    assert snapshot(store, jobs[1].id, jobs[9_999].id)[0] == before[0]


def test_orgs_that_have_only_unknown_jobs_do_not_hide_the_others(store: Store) -> None:
    store.enqueue([new(type="unknown", org=f"org-{n:04}") for n in range(700)])
    wanted = [put(store, type="known", org=org) for org in ("aaa", "org-0350", "zzz")]
    no = worker(store)

    found, _passed = claim_all(store, no, frozenset({"known"}), most=2)

    assert sorted(found) == sorted(wanted)
    late = put(store, type="known", org="org-0699")
    assert claim_all(store, no, frozenset({"known"}), most=2)[0] == [late]


def test_a_walk_over_unknown_jobs_comes_to_an_end(store: Store) -> None:
    """However many orgs have nothing else, and however little room there is."""
    store.enqueue([new(type="unknown", org=f"org-{n:04}") for n in range(600)])
    no, claims = worker(store), 0
    while store.claim(no, [("default", 1)], frozenset({"known"})).more:
        claims += 1
    assert claims <= 1200


def test_jobs_of_many_orgs_that_are_due_later_do_not_hide_one_that_is_due(
    store: Store, clock: Clock
) -> None:
    store.enqueue([new(org=f"org-{n:04}", delay_ms=MINUTE) for n in range(1500)])
    due = put(store, org="zzz")

    first = store.claim(worker(store), [("default", 5)])

    assert ([job.id for job in first.jobs], first.more) == ([due], False)
    clock.advance(MINUTE)
    assert len(claim_all(store, worker(store), frozenset({"noop"}), most=2000)[0]) == 1500


def test_jobs_whose_time_has_come_take_their_turn(store: Store, clock: Clock) -> None:
    """More of them than there is room for, beside others: priority, then orgs in turn."""
    put_many(store, 20, org="a", delay_ms=SECOND)
    put_many(store, 20, org="b")
    urgent = put_many(store, 3, org="a", priority=1, delay_ms=SECOND)
    clock.advance(2 * SECOND)

    first = claim(store, worker(store), 13)

    assert sorted(job.id for job in first[:3]) == sorted(urgent)
    assert counts([job.org for job in first[3:]]) == {"a": 5, "b": 5}


def test_an_urgent_job_whose_time_has_come_is_not_behind_a_thousand_others(
    store: Store, clock: Clock
) -> None:
    store.enqueue([new(delay_ms=SECOND) for _ in range(1200)])
    urgent = put(store, priority=1, delay_ms=SECOND + 500)
    clock.advance(2 * SECOND)
    no = worker(store)

    claimed = [job.id for _ in range(3) for job in claim(store, no, 10)]

    assert urgent in claimed


# -- suspects ---------------------------------------------------------------------------------


def test_a_suspect_is_claimed_by_who_asks_for_suspects(store: Store) -> None:
    no = worker(store)
    suspect = ended_job(store, no, Crashed("killed", 3))
    healthy = put(store)

    got = store.claim(no, [("default", 5)])
    assert ([job.id for job in got.jobs], got.suspects) == ([healthy], True)
    (alone,) = store.claim(no, [("default", 5)], suspects=True).jobs
    assert (alone.id, alone.crashes) == (suspect, 1)
    assert store.claim(no, [("default", 5)]).suspects is False


def test_suspects_are_claimed_within_the_same_limits(store: Store, clock: Clock) -> None:
    no = worker(store)
    suspects = [ended_job(store, no, Crashed("killed", 3), type=type) for type in "aabb"]
    put(store)

    def take(*wants: tuple[str, int], types: frozenset[str] | None = None) -> list[str]:
        return [job.id for job in store.claim(no, wants, types, suspects=True).jobs]

    assert take(("other", 9)) == []
    assert take(("default", 9), types=frozenset({"c"})) == []
    assert take(("default", 1), types=frozenset({"b"})) == [suspects[2]]
    store.pause("default", actor=OPERATOR, reason="x")
    assert take(("default", 9)) == []
    store.resume("default", actor=OPERATOR)
    assert take(("default", 2)) == suspects[:2]
    dead = worker(store)
    rescue(store, dead)
    assert store.claim(dead, [("default", 9)], suspects=True).jobs == []
    assert take(("default", 9)) == suspects[3:]


def test_a_suspect_that_is_retried_waits_for_its_time(store: Store, clock: Clock) -> None:
    no = worker(store)
    ended_job(store, no, Crashed("killed", 3))
    (suspect,) = store.claim(no, [("default", 5)], suspects=True).jobs
    finish(store, no, suspect, Retried(60, FAILURE))

    assert store.claim(no, [("default", 5)], suspects=True).jobs == []
    assert store.next_due(["default"]) == MINUTE
    clock.advance(MINUTE)
    assert store.next_due(["default"]) == 0
    assert store.claim(no, [("default", 5)]).suspects
    assert [job.id for job in store.claim(no, [("default", 5)], suspects=True).jobs] == [suspect.id]


def test_many_suspects_do_not_hide_a_healthy_job(store: Store) -> None:
    no = worker(store)
    put_many(store, 500)
    for job in claim(store, no, 500):
        finish(store, no, job, Crashed("killed", 3))
    healthy = put(store)

    first = store.claim(no, [("default", 1)])

    assert ([job.id for job in first.jobs], first.more) == ([healthy], False)


def test_without_types_a_worker_takes_everything(store: Store) -> None:
    ids = [put(store, type=type) for type in ("a", "b")]

    granted = store.claim(worker(store), [("default", 10)], None)

    assert ([job.id for job in granted.jobs], dict(granted.unknown)) == (ids, {})


# -- workers that may not ---------------------------------------------------------------------


def test_a_worker_declared_dead_gets_nothing(store: Store) -> None:
    no = worker(store)
    rescue(store, no)
    id = put(store)

    assert store.claim(no, [("default", 10)]).jobs == []
    assert (get(store, id).status, get(store, id).attempts) == ("queued", 0)


def test_a_worker_that_retired_gets_nothing(store: Store) -> None:
    # Nobody could ever rescue what it would hold.
    no = worker(store)
    store.retire(no)
    put(store)

    assert store.claim(no, [("default", 10)]).jobs == []


def test_a_number_that_was_never_given_gets_nothing(store: Store) -> None:
    put(store)

    no = worker(store)
    assert store.claim(no._replace(no=no.no + 1000), [("default", 10)]).jobs == []
    assert store.claim(no._replace(id="host:1:restored"), [("default", 10)]).jobs == []


# -- the number of the lease ------------------------------------------------------------------


def test_the_lease_number_grows_at_every_grant_and_every_removal(store: Store) -> None:
    no = worker(store)
    id = put(store)
    seen = [get(store, id).lease_no]

    for outcome in (Retried(0, FAILURE), Released("shutdown"), Crashed("killed", 9)):
        job = claim_one(store, no)
        finish(store, no, job, outcome)
        seen += [job.lease_no, get(store, id).lease_no]
    seen.append(claim_one(store, no).lease_no)
    rescue(store, no)
    seen.append(get(store, id).lease_no)

    assert seen == sorted(set(seen)), "it has to grow strictly"
