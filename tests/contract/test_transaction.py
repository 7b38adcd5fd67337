"""A handler's own SQL, its follow-ups and its finish in one transaction: all of it, once, or none.

SQL stores only: the connection a settlement lends is the driver's own.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tenure.errors import JobError, StoreBusy, StoreError
from tenure.ids import new_id
from tenure.job import ClaimedJob
from tenure.outcome import Completed, Released, Retried
from tenure.store import Accepted, Store

from .builders import (
    FAILURE,
    SQL_KINDS,
    claim,
    claim_one,
    driver_errors,
    end,
    finish,
    get,
    kinds,
    new,
    put,
    queue_info,
    rescue,
    snapshot,
    started_job,
    totals,
    worker,
)

WRITE_A = "INSERT INTO ledger VALUES ('a') ON CONFLICT DO NOTHING"
LONG = 30.0  # seconds a transaction may take where its limit is not the test


@pytest.fixture(autouse=True)
def ledger(kind: str, connection: Any) -> None:
    """A table of the user's own, in the same database."""
    assert kind in SQL_KINDS
    connection.execute("CREATE TABLE ledger (entry TEXT UNIQUE)")


@pytest.fixture
def entries(connection: Any) -> Callable[[], list[str]]:
    return lambda: [row[0] for row in connection.execute("SELECT entry FROM ledger ORDER BY 1")]


def settle(
    store: Store, no: int, job: ClaimedJob, outcome: Completed, *entries: str, limit: float = LONG
) -> Accepted:
    """One whole block, as the desk runs it."""
    with store.transaction(limit) as settlement:
        for entry in entries:
            settlement.connection.execute(f"INSERT INTO ledger VALUES ('{entry}')")
        verdict = settlement.finish(no, end(job, outcome))
        if verdict != "accepted":
            raise LookupError(verdict)
    return verdict


# -- all of it --------------------------------------------------------------------------------


def test_sql_children_and_result_are_there_together(
    store: Store, entries: Callable[[], list[str]]
) -> None:
    no = worker(store)
    job = started_job(store, no)
    child = new(parent=job.id)

    settle(store, no, job, Completed('{"paid":5}', (child,)), "a", "b")

    done = get(store, job.id)
    assert (done.status, done.result, done.lease_no) == ("completed", {"paid": 5}, job.lease_no)
    assert get(store, child.id).status == "queued"
    assert entries() == ["a", "b"]
    assert kinds(store, job.id) == ["job.enqueued", "job.started", "job.succeeded"]


def test_nothing_is_seen_before_the_end_of_the_block(
    store: Store, entries: Callable[[], list[str]]
) -> None:
    no = worker(store)
    job = started_job(store, no)
    with store.transaction(LONG) as settlement:
        settlement.connection.execute("INSERT INTO ledger VALUES ('a')")
        settlement.finish(no, end(job, Completed()))
        assert entries() == []
        assert get(store, job.id).status == "in_progress"
    assert entries() == ["a"]
    assert get(store, job.id).status == "completed"


def test_whoever_waited_is_released_by_it(store: Store) -> None:
    no = worker(store)
    job = started_job(store, no)
    last = put(store, after=(job.id,))
    settle(store, no, job, Completed("1"))
    assert claim_one(store, no).id == last
    assert queue_info(store).waiting == 0


def test_the_key_of_a_follow_up_is_taken_from_then_on(store: Store) -> None:
    """Its place is held by a time that has passed; it stayed so, and the next one was stored."""
    no = worker(store)
    job = started_job(store, no)
    children = (new(key="k"), new(key="k"), new(key="l"))
    settle(store, no, job, Completed(None, children))
    first, _second, other = children

    assert store.enqueue([new(key="k")]) == [(first.id, True, "queued")]
    assert store.enqueue([new(key="l")]) == [(other.id, True, "queued")]
    assert totals(store) == {"completed": 1, "queued": 2}


def test_a_finish_after_it_is_the_same_finish(
    store: Store, entries: Callable[[], list[str]]
) -> None:
    no = worker(store)
    job = started_job(store, no)
    child = new(parent=job.id)
    settle(store, no, job, Completed(None, (child,)), "a")
    before = snapshot(store, job.id, child.id)

    assert finish(store, no, job, Completed(None, (child,))) == "repeated"
    with pytest.raises(LookupError, match="repeated"):
        settle(store, no, job, Completed(None, (child,)), "b")

    assert snapshot(store, job.id, child.id) == before
    assert entries() == ["a"]


def text_as_bytes() -> Any:
    """psycopg's way to say `text_factory = bytes`."""
    from psycopg.adapt import Loader

    class Bytes(Loader):
        def load(self, data: Any) -> bytes:
            return bytes(data)

    return Bytes


def test_the_user_s_row_and_text_factories_do_not_matter(store: Store, kind: str) -> None:
    no = worker(store)
    job = started_job(store, no)
    put(store, after=(job.id,))
    with store.transaction(LONG) as settlement:
        if kind == "sqlite":
            settlement.connection.row_factory = lambda cursor, row: {"row": row}
            settlement.connection.text_factory = bytes
        else:
            settlement.connection.row_factory = lambda cursor: lambda values: {"row": values}
            settlement.connection.adapters.register_loader("text", text_as_bytes())
        settlement.connection.execute("SELECT 'x'").fetchone()
        assert settlement.finish(no, end(job, Completed())) == "accepted"
    assert len(claim(store, no)) == 1


def test_savepoints_inside_the_block_work(store: Store, entries: Callable[[], list[str]]) -> None:
    no = worker(store)
    job = started_job(store, no)
    with store.transaction(LONG) as settlement:
        db = settlement.connection
        db.execute("INSERT INTO ledger VALUES ('kept')")
        db.execute("SAVEPOINT mine")
        db.execute("INSERT INTO ledger VALUES ('undone')")
        db.execute("ROLLBACK TO mine")
        db.execute("RELEASE mine")
        settlement.finish(no, end(job, Completed()))
    assert entries() == ["kept"]


# -- or none ----------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before the finish", "after the finish"])
def test_an_exception_undoes_everything(
    store: Store, entries: Callable[[], list[str]], when: str
) -> None:
    no = worker(store)
    job = started_job(store, no)
    child = new(parent=job.id)
    before = snapshot(store, job.id)

    with pytest.raises(ZeroDivisionError), store.transaction(LONG) as settlement:
        settlement.connection.execute("INSERT INTO ledger VALUES ('a')")
        if when == "after the finish":
            settlement.finish(no, end(job, Completed("1", (child,))))
        raise ZeroDivisionError

    assert entries() == []
    assert store.get(child.id) is None
    assert snapshot(store, job.id) == before
    settle(store, no, job, Completed("1", (child,)), "a")  # the run goes on, and may try again
    assert entries() == ["a"]


def test_an_sql_error_undoes_everything(store: Store, entries: Callable[[], list[str]]) -> None:
    no = worker(store)
    job = started_job(store, no)
    with pytest.raises(driver_errors()), store.transaction(LONG) as settlement:
        settlement.connection.execute("INSERT INTO ledger VALUES ('a')")
        settlement.connection.execute("INSERT INTO no_such_table VALUES (1)")
    assert entries() == []
    assert get(store, job.id).status == "in_progress"


def lost_by_rescue(store: Store, no: int, job: ClaimedJob) -> None:
    rescue(store, no)


def lost_and_run_again(store: Store, no: int, job: ClaimedJob) -> None:
    rescue(store, no)
    claim_one(store, worker(store))


def given_back(store: Store, no: int, job: ClaimedJob) -> None:
    finish(store, no, job, Released("x"))


def claimed_anew(store: Store, no: int, job: ClaimedJob) -> None:
    finish(store, no, job, Retried(0, FAILURE))
    claim_one(store, no)


@pytest.mark.parametrize("lose", [lost_by_rescue, lost_and_run_again, given_back, claimed_anew])
def test_without_its_lease_a_run_s_transaction_is_refused(
    store: Store,
    entries: Callable[[], list[str]],
    lose: Callable[[Store, int, ClaimedJob], None],
) -> None:
    no = worker(store)
    job = started_job(store, no)
    lose(store, no, job)
    child = new(parent=job.id)
    before = snapshot(store, job.id)

    with pytest.raises(LookupError, match=r"refused|repeated"):
        settle(store, no, job, Completed(None, (child,)), "stale")

    assert entries() == []
    assert store.get(child.id) is None
    assert snapshot(store, job.id) == before


def test_a_lease_cannot_be_lost_inside_the_block(
    store: Store, make_store: Callable[[], Store], entries: Callable[[], list[str]]
) -> None:
    """A rescuer waits for the write lock, and then finds the job completed. SQLite's is held from
    the beginning of the block, a row's from the finish on: until then a lease may be lost, and
    the finish says so."""
    no = worker(store)
    job = started_job(store, no)
    other = make_store()
    rescued: list[Any] = []
    with store.transaction(LONG) as settlement:
        settlement.connection.execute("INSERT INTO ledger VALUES ('a')")
        assert settlement.finish(no, end(job, Completed())) == "accepted"
        thread = threading.Thread(target=lambda: rescued.append(rescue(other, no, started=None)))
        thread.start()
        thread.join(0.2)
        assert rescued == []
    thread.join(LONG)
    assert (rescued[0].requeued, rescued[0].lost) == (0, 0)
    assert get(store, job.id).status == "completed"
    assert entries() == ["a"]


def test_bad_children_undo_everything(store: Store, entries: Callable[[], list[str]]) -> None:
    """Half of it, the SQL without the follow-ups, would be the worst of all."""
    no = worker(store)
    job = started_job(store, no)
    good, bad = new(parent=job.id), new(parent=job.id, after=(new_id(),))
    before = snapshot(store, job.id)

    with pytest.raises(JobError, match="no such job"):
        settle(store, no, job, Completed(None, (good, bad)), "a")

    assert entries() == []
    assert store.get(good.id) is None
    assert snapshot(store, job.id) == before


# -- whose transaction it is ------------------------------------------------------------------


def by_commit(db: Any) -> None:
    db.commit()


def by_rollback(db: Any) -> None:
    db.rollback()


def by_sql(db: Any) -> None:
    db.execute("COMMIT")


def by_a_with_block(db: Any) -> None:
    with db:
        db.execute("INSERT INTO ledger VALUES ('b')")


def by_a_script(db: Any) -> None:
    db.executescript("INSERT INTO ledger VALUES ('b');")  # commits what is open, says its manual


ENDINGS = [by_commit, by_rollback, by_sql, by_a_with_block, by_a_script]


@pytest.mark.parametrize("ending", ENDINGS)
def test_ending_the_transaction_inside_the_block_is_an_error(
    store: Store, kind: str, entries: Callable[[], list[str]], ending: Callable[[Any], None]
) -> None:
    if kind != "sqlite" and ending is by_a_script:
        pytest.skip("only SQLite has executescript")
    no = worker(store)
    job = started_job(store, no)

    with pytest.raises(StoreError, match="inside its block"), store.transaction(LONG) as settlement:
        settlement.connection.execute("INSERT INTO ledger VALUES ('a')")
        ending(settlement.connection)
        settlement.finish(no, end(job, Completed()))

    assert entries() == []
    assert get(store, job.id).status == "in_progress"
    settle(store, no, job, Completed())  # the write lock is free again


@pytest.mark.parametrize("ending", ENDINGS)
def test_an_ending_that_was_caught_has_not_happened(
    store: Store, kind: str, entries: Callable[[], list[str]], ending: Callable[[Any], None]
) -> None:
    if kind != "sqlite" and ending is by_a_script:
        pytest.skip("only SQLite has executescript")
    no = worker(store)
    job = started_job(store, no)
    with pytest.raises(ZeroDivisionError), store.transaction(LONG) as settlement:
        settlement.connection.execute("INSERT INTO ledger VALUES ('a')")
        with pytest.raises(driver_errors()):
            ending(settlement.connection)
        settlement.finish(no, end(job, Completed()))
        raise ZeroDivisionError
    assert entries() == []
    assert get(store, job.id).status == "in_progress"


def test_a_transaction_that_rolled_itself_back_commits_nothing(
    store: Store, kind: str, entries: Callable[[], list[str]]
) -> None:
    """INSERT OR ROLLBACK ends the transaction; what follows must not commit by itself."""
    if kind != "sqlite":
        pytest.skip("only SQLite has statements that roll back and go on")
    no = worker(store)
    job = started_job(store, no)
    with (
        pytest.raises(StoreError, match="rolled back inside"),
        store.transaction(LONG) as settlement,
    ):
        db = settlement.connection
        db.execute("INSERT INTO ledger VALUES ('a')")
        with pytest.raises(driver_errors()):
            db.execute("INSERT OR ROLLBACK INTO ledger VALUES ('a')")
        with pytest.raises(driver_errors()):
            db.execute("INSERT INTO ledger VALUES ('b')")
        settlement.finish(no, end(job, Completed()))
    assert entries() == []
    assert get(store, job.id).status == "in_progress"


# -- its time is bounded ----------------------------------------------------------------------


def gate_is_free(store: Store) -> None:
    """Somebody else can write."""
    began = time.monotonic()
    put(store, queue="others")
    assert time.monotonic() - began < 5


def test_a_transaction_past_its_limit_is_rolled_back_and_others_go_on(
    store: Store, kind: str, make_store: Callable[[], Store], entries: Callable[[], list[str]]
) -> None:
    no = worker(store)
    job = started_job(store, no)
    other = make_store()
    other.queue_names()

    with pytest.raises(StoreBusy, match="rolled back"), store.transaction(0.3) as settlement:
        db = settlement.connection
        db.execute("INSERT INTO ledger VALUES ('a')")
        put(other, queue="others")  # SQLite: waits until the limit has passed, then goes on
        if kind != "sqlite":
            time.sleep(0.4)  # nobody waits for a handler, so its time has to pass otherwise
        for statement in (
            "INSERT INTO ledger VALUES ('b')",
            "DELETE FROM ledger",
            "CREATE TABLE another (x integer)",
            "BEGIN",
            "COMMIT",
        ):
            with pytest.raises(driver_errors()):
                db.execute(statement)
        settlement.finish(no, end(job, Completed()))

    assert entries() == []
    assert get(store, job.id).status == "in_progress"
    gate_is_free(store)
    settle(store, no, job, Completed(), "a")
    assert entries() == ["a"]


def test_a_block_that_swallows_every_error_still_fails(
    store: Store, entries: Callable[[], list[str]]
) -> None:
    no = worker(store)
    started_job(store, no)
    with pytest.raises(StoreBusy), store.transaction(0.1) as settlement:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            try:
                settlement.connection.execute(WRITE_A)
            except (*driver_errors(), SystemError):  # what Python's driver says when threads cross
                break
        for _ in range(100):
            try:
                settlement.connection.execute(WRITE_A)
            except driver_errors():
                continue
    assert entries() == []


def endless(db: Any) -> None:
    """One statement that does not end by itself."""
    db.execute(
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)"
        " SELECT count(*) FROM n WHERE i < 0"
    ).fetchone()


def with_a_function_of_python(db: Any) -> None:
    """A function that needs the GIL, while SQLite holds its mutex."""
    db.create_function("slow", 1, lambda i: time.sleep(0.001) or i)
    db.execute(
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT slow(i) + 1 FROM n WHERE i < 3000)"
        " SELECT count(*) FROM n"
    ).fetchone()
    raise driver_errors()[0]("ended by itself, late")


def with_an_open_cursor(db: Any) -> None:
    """A half-read SELECT, then nothing for long."""
    cursor = db.execute("SELECT 1 UNION ALL SELECT 2 UNION ALL SELECT 3")
    cursor.fetchone()
    time.sleep(0.6)
    db.execute("INSERT INTO ledger VALUES ('b')")


def with_many_rows(db: Any) -> None:
    """Prepared once, stepped for long: nothing of it may commit by itself."""

    def rows() -> Iterator[tuple[str]]:
        until = time.monotonic() + 5
        number = 0
        while time.monotonic() < until:
            number += 1
            time.sleep(0.002)
            yield (f"row {number}",)

    if isinstance(db, sqlite3.Connection):
        db.executemany("INSERT INTO ledger VALUES (?)", rows())
    else:
        db.cursor().executemany("INSERT INTO ledger VALUES (%s)", rows())


@pytest.mark.parametrize(
    "work", [endless, with_a_function_of_python, with_an_open_cursor, with_many_rows]
)
def test_whatever_it_is_doing_its_limit_ends_it(
    store: Store,
    make_store: Callable[[], Store],
    entries: Callable[[], list[str]],
    work: Callable[[Any], None],
    kind: str,
) -> None:
    if kind != "sqlite" and work is with_a_function_of_python:
        pytest.skip("only SQLite calls Python functions")
    no = worker(store)
    job = started_job(store, no)
    other = make_store()
    other.queue_names()
    waited: list[float] = []

    def wait_for_the_lock() -> None:
        began = time.monotonic()
        put(other, queue="others")
        waited.append(time.monotonic() - began)

    thread = threading.Thread(target=wait_for_the_lock)
    with pytest.raises(StoreBusy), store.transaction(0.3) as settlement:
        settlement.connection.execute("INSERT INTO ledger VALUES ('a')")
        thread.start()
        work(settlement.connection)
    thread.join(LONG)

    assert entries() == []
    assert get(store, job.id).status == "in_progress"
    assert waited[0] < 4, "the others waited for the handler, not for the limit"
    gate_is_free(store)


def test_an_exception_at_the_very_limit_leaves_the_gate_open(store: Store) -> None:
    """The timer and the end of the block race: no handle is touched after it was closed."""
    no = worker(store)
    for round in range(20):
        job = started_job(store, no)
        with pytest.raises((ZeroDivisionError, StoreBusy)), store.transaction(0.05):
            time.sleep(0.045 + round * 0.0005)
            raise ZeroDivisionError
        finish(store, no, job, Completed())
    assert totals(store) == {"completed": 20}


def test_it_warns_before_its_limit(
    store: Store, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    if kind != "sqlite":
        pytest.skip("only SQLite has one write lock for all")
    no = worker(store)
    job = started_job(store, no)
    with (
        caplog.at_level(logging.WARNING, logger="tenure.job"),
        store.transaction(0.6) as settlement,
    ):
        deadline = time.monotonic() + 10
        while not caplog.records and time.monotonic() < deadline:
            time.sleep(0.01)
        settlement.finish(no, end(job, Completed()))
        assert "write lock" in caplog.text


def test_it_waits_its_turn_behind_other_writers(
    store: Store, make_store: Callable[[], Store], entries: Callable[[], list[str]]
) -> None:
    """Several transactions and plain writers at once: each entry once, nobody is refused."""
    stores = [store, *(make_store() for _ in range(3))]
    failures: list[BaseException] = []

    def work(own: Store, name: int) -> None:
        try:
            no = worker(own)
            for number in range(10):
                own.enqueue([new(queue=f"q{name}")])
                job = claim_one(own, no, queue=f"q{name}")
                settle(own, no, job, Completed(), f"{name}-{number}")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(own, name)) for name, own in enumerate(stores)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert failures == []
    assert len(entries()) == 40
    assert totals(store) == {"completed": 40}
