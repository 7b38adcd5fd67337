"""A fleet is upgraded one program at a time: those of schema 1 work on after the migration to 2.

`schema1/queries.sql` holds their statements as they were; nothing here may edit them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import errors as refusals

from contract.builders import claim_one, finish, get, new, put, worker
from tenure.ids import new_ids, to_uuid
from tenure.outcome import Completed
from tenure.stores.postgres import PostgresStore

TEXT = (Path(__file__).parent / "schema1" / "queries.sql").read_text()
PARTS = re.split(r"^-- name: (\w+)\s*$", TEXT, flags=re.MULTILINE)
STATEMENTS = {
    name: "\n".join(line for line in body.splitlines() if not line.startswith("--")).strip()
    for name, body in zip(PARTS[1::2], PARTS[2::2], strict=True)
}
FRAGMENTS = {"job_hot", "job_history", "job_by_id", "job_order"}  # put together by their programs
WORKER = {
    "id": "vm:1:01ARZ3NDEKTSV4RRFFQ69G5FAV", "host": "vm", "boot": "b", "pid": 1,
    "pid_started": "", "lease_ms": 30_000, "meta": "{}", "now": None,
}  # fmt: skip


@pytest.fixture
def store(make_database: Callable[..., str]) -> Iterator[PostgresStore]:
    made = PostgresStore(make_database(migrated=True), notify=False)
    yield made
    made.close()


@pytest.fixture
def old(store: PostgresStore) -> Iterator[psycopg.Connection[Any]]:
    """A program of schema 1."""
    with psycopg.connect(store.database.url, autocommit=True) as connection:
        yield connection


def run(db: psycopg.Connection[Any], name: str, /, **given: Any) -> list[tuple[Any, ...]]:
    asked = dict.fromkeys(re.findall(r"%\((\w+)\)s", STATEMENTS[name]))
    cursor = db.execute(STATEMENTS[name], asked | given)
    return cursor.fetchall() if cursor.description else []


def claim(db: psycopg.Connection[Any], no: int, **given: Any) -> list[tuple[Any, ...]]:
    memory = json.dumps({"default": {"turns": {}, "rewind": 0}})
    asked = {"worker": no, "queues": ["default"], "mosts": [9], "total": 9, "memory": memory}
    rows = run(db, "claim", **asked | {"later_ms": 10_000, "audit": "all"} | given)
    return [row for row in rows if row[1] > 0]


@pytest.mark.parametrize("name", sorted(STATEMENTS.keys() - FRAGMENTS))
def test_every_statement_finds_its_tables_and_functions(
    old: psycopg.Connection[Any], name: str
) -> None:
    with old.transaction(force_rollback=True):
        try:
            run(old, name)
        except (refusals.DataError, refusals.IntegrityError, refusals.RaiseException):
            pass  # all of its values are NULL
        except refusals.SyntaxError as error:
            assert "{" in STATEMENTS[name], error  # a list is put in by its program


def test_a_life(store: PostgresStore, old: psycopg.Connection[Any]) -> None:
    ((no,),) = run(old, "register", **WORKER)
    first, second, third = (put(store) for _ in range(3))
    rows = claim(old, no)
    assert [row[0] for row in rows] == [to_uuid(id) for id in (first, second, third)]
    assert claim(old, no) == []

    assert {row[0] for row in run(old, "renew", worker=no)} == {row[0] for row in rows}
    saved = {"job": rows[0][0], "lease_no": 1, "name": "one", "result": '"done"'}
    run(old, "save_step", **saved)
    assert run(old, "steps", job=rows[0][0]) == [("one", "done")]
    ids, leases = [row[0] for row in rows[:2]], [1, 1]
    given = {"ids": ids, "lease_nos": leases, "durations": [1, 1], "results": "[1, 2]"}
    assert run(old, "finish_completed", worker=no, audit="all", **given) == []
    assert [get(store, id).status for id in (first, second)] == ["completed"] * 2
    # Once more, as after a lost reply: refused by the fence, and known as repeated.
    assert len(run(old, "finish_completed", worker=no, audit="all", **given)) == 2
    assert len(run(old, "finish_repeated", worker=no, ids=ids, lease_nos=leases)) == 2

    assert get(store, third).status == "in_progress"
    run(old, "retire", worker=no)  # not while it holds one
    assert [row[0] for row in run(old, "renew", worker=no)] == [to_uuid(third)]


def test_what_it_enqueues_runs_here(store: PostgresStore, old: psycopg.Connection[Any]) -> None:
    (id,) = new_ids(1)
    run(old, "add_queue", queue="default")
    terms = {
        "type": "noop", "queue": "default", "priority": 5, "org": "default", "max_attempts": 5,
        "timeout_ms": 1000, "category": "default", "actor_type": "system", "actor_id": "x",
        "after_failed": "cancel", "audit": "all",
    }  # fmt: skip
    assert run(old, "enqueue_job", id=to_uuid(id), payload="{}", delay_ms=0, **terms) == [(1,)]
    many = new_ids(2)
    listed = {"ids": [to_uuid(each) for each in many], "delays": [None, None]}
    assert run(old, "enqueue_plain", payloads="[{}, {}]", **listed, **terms) == [(2,)]

    no = worker(store)
    for wanted in (id, *many):
        job = claim_one(store, no)
        assert job.id == wanted
        assert finish(store, no, job, Completed()) == "accepted"


def test_each_rescues_the_other(store: PostgresStore, old: psycopg.Connection[Any]) -> None:
    ((no,),) = run(old, "register", **WORKER)
    id = put(store)
    assert len(claim(old, no)) == 1
    (row,) = [each for each in store.workers() if each.no == no]
    done = store.rescue(
        row.registration, row.beat, started=None, limit=10, reason="x", patience=None
    )
    assert done is not None and done.requeued == 1
    assert get(store, id).losses == 1
    assert run(old, "renew", worker=no) == []  # it was declared dead

    own = worker(store)
    assert claim_one(store, own).id == id
    given = {"worker": own.no, "beat": 0, "limit": 3, "reason": "x", "audit": "all"}
    assert run(old, "rescue", started=[], **given) == [(1, 0)]
    assert store.renew(own) is None
    assert get(store, id).status == "queued"


def test_it_gets_no_more_than_it_asks_for_where_suspects_wait(
    store: PostgresStore, old: psycopg.Connection[Any]
) -> None:
    ((no,),) = run(old, "register", **WORKER)
    for _ in range(10):
        put(store)
    old.execute(
        "UPDATE tenure.jobs SET crashes = 1 WHERE id IN (SELECT id FROM tenure.jobs LIMIT 5)"
    )
    assert len(claim(old, no, mosts=[4], total=5)) == 4
    assert len(claim(old, no, mosts=[9], total=3)) == 3
    assert len(claim(old, no)) == 3


def test_it_does_not_take_what_waits_for_its_time(
    store: PostgresStore, old: psycopg.Connection[Any]
) -> None:
    ((no,),) = run(old, "register", **WORKER)
    store.enqueue([new(delay_ms=60_000)])
    assert claim(old, no) == []
