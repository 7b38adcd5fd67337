"""The dead-letter workbench: dead jobs grouped by what they died of."""

from __future__ import annotations

from typing import Any

from tenure.outcome import Cancelled, Completed, Dead, Failed, Failure, Outcome, Retried
from tenure.store import DeadGroup, Filter, Store

from .builders import OPERATOR, SECOND, Clock, ended_job, find, get, worker

BAD_HOST = Failure("cannot resolve host a", "DNS", "OSError at mail.py:17")
OTHER_HOST = Failure("cannot resolve host b", "DNS", "OSError at mail.py:17")
BAD_DATA = Failure("no amount", "VALIDATION_ERROR", "KeyError at pay.py:4")
ANYTHING = Filter()


def dead(store: Store, clock: Clock, outcome: Outcome, count: int = 1, **over: Any) -> list[str]:
    no = worker(store)
    ids = []
    for _ in range(count):
        ids.append(ended_job(store, no, outcome, **over))
        clock.advance(SECOND)
    return ids


def by_place(groups: list[DeadGroup]) -> dict[tuple[str, str, str], int]:
    return {(group.type, group.status, group.place): group.jobs for group in groups}


def test_nothing_dead_no_groups(store: Store, clock: Clock) -> None:
    assert store.dead_groups(ANYTHING) == []
    dead(store, clock, Completed())
    dead(store, clock, Cancelled("x"))
    dead(store, clock, Retried(3600, BAD_HOST))
    assert store.dead_groups(ANYTHING) == []


def test_a_group_is_type_status_code_and_place(store: Store, clock: Clock) -> None:
    dead(store, clock, Failed(BAD_HOST), 3, type="mail")
    dead(store, clock, Failed(OTHER_HOST), 2, type="mail")  # another text, the same thing
    dead(store, clock, Dead(BAD_HOST), 2, type="mail")
    dead(store, clock, Failed(BAD_DATA), 1, type="mail")
    dead(store, clock, Failed(BAD_HOST), 1, type="other")

    groups = store.dead_groups(ANYTHING)

    assert by_place(groups) == {
        ("mail", "failed", BAD_HOST.place): 5,
        ("mail", "dead_letter", BAD_HOST.place): 2,
        ("mail", "failed", BAD_DATA.place): 1,
        ("other", "failed", BAD_HOST.place): 1,
    }
    assert groups[0].jobs == 5, "the largest group comes first"
    assert {group.code for group in groups} == {"DNS", "VALIDATION_ERROR"}


def test_first_and_last_seen(store: Store, clock: Clock) -> None:
    began = clock()
    dead(store, clock, Failed(BAD_HOST), 4)
    (group,) = store.dead_groups(ANYTHING)
    assert (group.first_ms, group.last_ms) == (began, began + 3 * SECOND)


def test_the_sample_is_one_of_them_with_its_own_error(store: Store, clock: Clock) -> None:
    ids = dead(store, clock, Failed(OTHER_HOST)) + dead(store, clock, Failed(BAD_HOST))
    (group,) = store.dead_groups(ANYTHING)
    assert group.sample_id in ids
    assert group.sample_error == get(store, group.sample_id).error


def test_replayed_and_discarded_jobs_leave_their_group(store: Store, clock: Clock) -> None:
    first, second, third = dead(store, clock, Failed(BAD_HOST), 3)
    store.replay([first], actor=OPERATOR)
    assert [group.jobs for group in store.dead_groups(ANYTHING)] == [2]
    store.discard([second], actor=OPERATOR, reason="x")
    (group,) = store.dead_groups(ANYTHING)
    assert (group.jobs, group.sample_id) == (1, third)
    store.discard([third], actor=OPERATOR, reason="x")
    assert store.dead_groups(ANYTHING) == []


def test_groups_are_narrowed(store: Store, clock: Clock) -> None:
    dead(store, clock, Failed(BAD_HOST), 2, type="mail", queue="notifications", org="a")
    dead(store, clock, Dead(BAD_DATA), 1, type="pay", queue="default", org="b")

    def count(**where: Any) -> list[int]:
        return [group.jobs for group in store.dead_groups(Filter(**where))]

    assert count() == [2, 1]
    assert (count(type="mail"), count(type="pay"), count(type="none")) == ([2], [1], [])
    assert (count(queue="notifications"), count(queue="default")) == ([2], [1])
    assert (count(org="a"), count(org="b"), count(org="c")) == ([2], [1], [])
    assert count(org="a", type="pay") == []


def test_the_filter_s_status_and_place_narrow_too(store: Store, clock: Clock) -> None:
    dead(store, clock, Failed(BAD_HOST), 2)
    dead(store, clock, Dead(BAD_DATA), 1)

    def count(**where: Any) -> list[int]:
        return [group.jobs for group in store.dead_groups(Filter(**where))]

    assert (count(status="failed"), count(status="dead_letter")) == ([2], [1])
    assert (count(place=BAD_HOST.place), count(place=BAD_DATA.place)) == ([2], [1])


def test_a_page_of_groups_is_the_largest_ones(store: Store, clock: Clock) -> None:
    for number in range(5):
        failure = Failure("x", "X", f"ValueError at a.py:{number}")
        dead(store, clock, Failed(failure), number + 1)
    assert [group.jobs for group in store.dead_groups(ANYTHING, limit=2)] == [5, 4]


def test_jobs_of_a_group_are_found_by_its_place(store: Store, clock: Clock) -> None:
    wanted = dead(store, clock, Failed(BAD_HOST), 3)
    dead(store, clock, Failed(BAD_DATA), 2)
    (group, _other) = store.dead_groups(ANYTHING)
    found = find(store, Filter(status=group.status, type=group.type, place=group.place))
    assert sorted(job.id for job in found) == sorted(wanted)
