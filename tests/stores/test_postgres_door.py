"""`tenure.enqueue(jsonb)`, for anybody who speaks SQL: what Python refuses, it refuses."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from contract.builders import FAILURE, OPERATOR, ended_job, get, put, totals, worker
from tenure.ids import to_uuid
from tenure.job import rfc3339
from tenure.outcome import Failed
from tenure.stored import milliseconds
from tenure.stores.postgres import PostgresStore

YEAR_10000 = 253_402_300_800_000
ONE, TWO, THREE = (str(uuid.UUID(int=n)) for n in (1, 2, 3))


@pytest.fixture
def store(make_database: Callable[..., str]) -> Iterator[PostgresStore]:
    made = PostgresStore(make_database(migrated=True), notify=False)
    yield made
    made.close()


@pytest.fixture
def door(store: PostgresStore) -> Iterator[Callable[..., list[str]]]:
    """Enqueue these jobs by SQL; their ids."""
    with psycopg.connect(store.database.url, autocommit=True) as connection:

        def enqueue(*jobs: Any) -> list[str]:
            rows = connection.execute(
                "SELECT tenure.ulid(id) FROM tenure.enqueue(%s::jsonb)", [json.dumps(jobs)]
            )
            return [id for (id,) in rows]

        yield enqueue


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("job", "message"),
    [
        ({"at_ms": YEAR_10000}, "at_ms must be a whole number from "),
        ({"at_ms": 2**62}, "at_ms must be a whole number from "),
        ({"at_ms": -1}, "at_ms must be a whole number from "),
        ({"at_ms": 1.5}, "at_ms must be a whole number from "),
        ({"delay_ms": YEAR_10000}, "delay_ms must be a whole number from 0"),
        ({"delay_ms": "9"}, "delay_ms must be a number"),
        ({"id": ONE, "after": [ONE]}, "in a circle"),
        ({"after": ["01M7GEX6W23EXZBGJQ83K1S2QG"]}, "after must be an array of job ids"),
        ({"after": ["x"]}, "after must be an array of job ids"),
        ({"after": [None]}, "after must be an array of job ids"),
        ({"after": "x"}, "after must be an array of job ids"),
        ({"after": [ONE]}, "there is no such job"),
        ({"id": "x"}, "id must be a job's id"),
        ({"id": "f" * 32}, "id must be a job's id"),  # no listing would come to the last of all
        ({"parent": 7}, "parent must be a job's id"),
        ({"payload": []}, "payload must be a JSON object"),
        ({"payload": {"x": nested(64)}}, "payload is nested deeper than 64 levels"),
        ({"payload": {"x": 2**63}}, "payload has a number beyond 64 bits"),
        ({"payload": {"x": [{"y": -(2**63) - 1}]}}, "payload has a number beyond 64 bits"),
        ({"priority": 0}, "priority must be a whole number from 1 to 10"),
        ({"priority": 5.0}, "priority must be a whole number from 1 to 10"),
        ({"org": ""}, "org must have 1 to 128 characters"),
        ({"actor_type": "nobody"}, "actor_type is user, system or api_key"),
        ({"tipe": "x"}, "there is no field tipe"),
    ],
    ids=str,
)
def test_what_is_refused(
    store: PostgresStore, door: Callable[..., list[str]], job: dict[str, Any], message: str
) -> None:
    with pytest.raises(psycopg.Error) as caught:
        door({"type": "fine"}, {"type": "work"} | job)
    assert caught.value.sqlstate == "TN001"
    assert message in str(caught.value)
    assert totals(store) == {}


@pytest.mark.parametrize("links", [[(0, 1), (1, 0)], [(0, 1), (1, 2), (2, 0)], [(0, 1), (1, 1)]])
def test_circles_are_refused(
    store: PostgresStore, door: Callable[..., list[str]], links: list[tuple[int, int]]
) -> None:
    ids = [ONE, TWO, THREE]
    jobs: list[dict[str, Any]] = [{"type": "work", "id": id, "after": []} for id in ids]
    for waits, needs in links:
        jobs[waits]["after"].append(ids[needs])
    with pytest.raises(psycopg.Error, match="in a circle: none of them could ever run"):
        door(*jobs)
    assert totals(store) == {}


@pytest.mark.parametrize("how", ["cancelled", "discarded"])
def test_a_job_after_one_that_will_never_complete_is_refused(
    store: PostgresStore, door: Callable[..., list[str]], how: str
) -> None:
    need = put(store) if how == "cancelled" else ended_job(store, worker(store), Failed(FAILURE))
    withdraw = store.cancel if how == "cancelled" else store.discard
    withdraw([need], actor=OPERATOR, reason="x")
    with pytest.raises(psycopg.Error, match="was cancelled and will never complete"):
        door({"type": "work", "after": [str(to_uuid(need))]})
    assert totals(store) == {"cancelled": 1}


def test_what_is_at_the_limits_is_stored(
    store: PostgresStore, door: Callable[..., list[str]]
) -> None:
    payload = {"x": nested(63), "high": 2**63 - 1, "low": -(2**63), "part": 0.5}
    later = int(time.time() * 1000) + 3_600_000
    need, last = door(
        {"type": "work", "id": ONE, "payload": payload, "at_ms": later},
        {"type": "work", "after": [ONE, ONE]},
    )
    job = get(store, need)
    assert job.payload == payload
    assert job.scheduled_for is not None
    assert milliseconds(job.scheduled_for) == later
    assert job.envelope["scheduled_for"] == rfc3339(later)
    assert get(store, last).after == (need,)
    assert get(store, last).scheduled_for is None
