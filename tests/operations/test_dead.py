"""Dead jobs by what they died of."""

from __future__ import annotations

import hashlib

import pytest

from contract.builders import FAILURE, MINUTE, Clock, ended_job, worker
from tenure.errors import ConfigError, JobNotFound
from tenure.operations.dead import Dead, Fingerprint, counts, is_handle
from tenure.operations.listing import JobFilter
from tenure.outcome import Dead as Died
from tenure.outcome import Failed, Failure
from tenure.store import Store

from .conftest import Enter

BOOM = Fingerprint("noop", "dead_letter", "BOOM", "ValueError at tasks.py:7")
PLACELESS = Failure("no place", "BOOM")


def test_a_handle_is_a_digest_of_what_a_job_died_of() -> None:
    text = "noop|dead_letter|BOOM|ValueError at tasks.py:7"

    assert BOOM.digest == hashlib.sha256(text.encode()).hexdigest()
    assert BOOM.handle == BOOM.digest[:8]
    assert BOOM.short_place == "ValueError at tasks.py:7"
    assert BOOM._replace(code="ValueError").short_place == "tasks.py:7"
    assert is_handle(BOOM.handle)
    assert is_handle(BOOM.handle[:4])
    assert not any(map(is_handle, ("3f2", "3F29", "xyzw", "0" * 65)))


def test_groups(store: Store, enter: Enter, clock: Clock) -> None:
    me = worker(store)
    first = clock()
    ids = []
    for _ in range(3):
        ids.append(ended_job(store, me, Died(FAILURE)))
        clock.advance(MINUTE)
    other = ended_job(store, me, Failed(PLACELESS), org="acme")

    large, small = enter(Dead).groups()
    assert (large.group, large.count, large.capped) == (BOOM.handle, 3, False)
    assert large.fingerprint == BOOM
    assert (large.sample_id, large.sample_error) == (ids[-1], "boom")
    assert (large.last_seen - large.first_seen).total_seconds() == 120
    assert large.first_seen.timestamp() * 1000 == pytest.approx(first)
    assert (small.sample_id, small.place) == (other, None)

    def named(where: JobFilter | None = None, **scope: str) -> list[str]:
        return [group.sample_id for group in enter(Dead, **scope).groups(where)]

    assert named(org="acme") == [other]
    assert named(JobFilter(("failed",))) == [other]
    assert named(JobFilter(type="other")) == []


def test_members(store: Store, enter: Enter) -> None:
    """Any place must not match a group without one."""
    me = worker(store)
    with_place = [ended_job(store, me, Died(FAILURE)) for _ in range(2)]
    without = ended_job(store, me, Died(PLACELESS))
    dead: Dead = enter(Dead)
    handle = Fingerprint("noop", "dead_letter", "BOOM", "").handle

    assert [job.id for job in dead.members(BOOM.handle)] == with_place[::-1]
    assert [job.id for job in dead.members(handle)] == [without]
    with pytest.raises(JobNotFound, match="there is no group 0000 among these dead jobs"):
        dead.named("0000")
    with pytest.raises(ConfigError, match="give more digits"):
        dead.named("")


def test_counts() -> None:
    other = BOOM._replace(place="")

    assert [(each.fingerprint, each.count) for each in counts([BOOM, other, BOOM])] == [
        (BOOM, 2),
        (other, 1),
    ]
