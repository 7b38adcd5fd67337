"""Many at once: threads on one store, stores in many processes, one database."""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from tenure.job import Receipt
from tenure.outcome import Completed, Failed, Retried
from tenure.store import Prune, Rescue, Store

from .builders import (
    FAILURE,
    OPERATOR,
    SECOND,
    Clock,
    all_events,
    begin,
    claim,
    claim_one,
    connect,
    end,
    finish,
    get,
    kinds,
    new,
    open_store,
    put,
    put_many,
    rescue,
    started_job,
    totals,
    worker,
    worker_row,
)

KEEP_ALL = Prune(completed=1e6, dead=1e6, events=1e6)
WAIT = 60  # seconds until a barrier gives up: somebody died before it


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Run the calls in threads that all start at the same time; their results in order."""
    barrier = threading.Barrier(len(calls))

    def run(call: Callable[[], Any]) -> Any:
        barrier.wait(WAIT)
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls))


def claim_everything(store: Store, limit: int) -> list[str]:
    """Claim as a new worker until nothing is left, finishing half of it on the way."""
    no = worker(store)
    claimed: list[str] = []
    while jobs := claim(store, no, limit):
        claimed += [job.id for job in jobs]
        store.finish(no, [end(job, Completed()) for job in jobs[::2]])
    return claimed


# -- threads ----------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [True, False], ids=["one store", "a store each"])
def test_threads_claiming_at_once_share_no_job_and_miss_none(
    store: Store, make_store: Callable[[], Store], shared: bool
) -> None:
    ids = put_many(store, 400)
    stores = [store if shared else make_store() for _ in range(4)]

    claims = together(*(partial(claim_everything, each, 7) for each in stores))

    claimed = [id for part in claims for id in part]
    assert len(claimed) == len(set(claimed)), "two workers were given the same job"
    assert set(claimed) == set(ids)
    assert {get(store, id).attempts for id in ids} == {1}


@pytest.mark.parametrize("theirs", [False, True], ids=["own", "callers"])
def test_two_enqueues_at_the_end_of_the_job_that_has_their_pending_key(
    store: Store, make_store: Callable[[], Store], kind: str, location: str, theirs: bool
) -> None:
    """Each gets a new job, or the name of one that is not finished: nothing falls between."""
    no = worker(store)
    others = [make_store(), make_store()]

    def enqueue(own: Store, key: str) -> Receipt:
        if not theirs:
            return own.enqueue([new(key=key, key_ttl_ms=0)])[0]
        with contextlib.closing(connect(kind, location)) as connection:
            begin(connection)
            receipts = own.enqueue_on(connection, [new(key=key, key_ttl_ms=0)])
            connection.commit()
        assert isinstance(receipts, list)
        return receipts[0]

    fresh_ones = 0
    for turn in range(60):
        first = put(store, key=f"k{turn}", key_ttl_ms=0)
        job = claim_one(store, no)
        *receipts, _ = together(
            *(partial(enqueue, own, f"k{turn}") for own in others),
            partial(finish, store, no, job, Completed()),
        )

        fresh = [receipt for receipt in receipts if not receipt.duplicate]
        assert len(fresh) <= 1
        names = {first, *(receipt.id for receipt in fresh)}
        for receipt in receipts:
            assert receipt.id in names
            if not theirs:  # a caller is not waited for: it may end between the look and the answer
                assert receipt.status in ("queued", "in_progress")
        assert totals(store).get("queued", 0) == len(fresh)
        for each in claim(store, no):
            finish(store, no, each, Completed())
        fresh_ones += len(fresh)
        # Afterwards the key is free, whoever had it last.
        assert not store.enqueue([new(key=f"k{turn}", key_ttl_ms=0)])[0].duplicate
        finish(store, no, claim_one(store, no), Completed())
    assert fresh_ones, "the race was never close: every enqueue came before the end"


@pytest.mark.parametrize(("size", "rounds"), [(1, 200), (200, 25)], ids=["single", "batch"])
def test_keys_that_expire_while_they_are_taken_and_pruned(
    store: Store, make_store: Callable[[], Store], clock: Clock, size: int, rounds: int
) -> None:
    """Their time ends with each tick of the clock: at every moment one is being taken over, ended
    and removed. Whoever got a receipt has a job, or the name of the one it repeats."""
    over = threading.Event()

    def enqueue() -> list[Receipt]:
        own, receipts = make_store(), []
        for turn in range(rounds):
            keys = (f"k{n}" for n in range(size))
            batch = [new(key=key, key_ttl_ms=1) for key in keys]
            receipts += own.enqueue(batch[:: 1 if turn % 2 else -1])
        return receipts

    def end_them() -> None:
        own = make_store()
        no = worker(own)
        while not over.is_set():
            own.finish(no, [end(job, Completed()) for job in claim(own, no, 100)])
            clock.advance(2)

    def prune() -> None:
        own = make_store()
        while not over.is_set():
            own.prune(KEEP_ALL)

    with ThreadPoolExecutor(4) as pool:
        beside = [pool.submit(end_them), pool.submit(prune)]
        try:
            enqueuing = [pool.submit(enqueue), pool.submit(enqueue)]
            receipts = [receipt for each in enqueuing for receipt in each.result(WAIT)]
        finally:
            over.set()
        for each in beside:
            each.result(WAIT)

    assert len(receipts) == 2 * size * rounds
    stored = [receipt.id for receipt in receipts if not receipt.duplicate]
    assert len(stored) == len(set(stored)) > size  # some changed hands
    for receipt in receipts:
        get(store, receipt.id)


@pytest.mark.parametrize("shared", [True, False], ids=["one store", "a store each"])
def test_threads_enqueuing_at_once_lose_nothing(
    store: Store, make_store: Callable[[], Store], shared: bool
) -> None:
    stores = [store if shared else make_store() for _ in range(6)]

    def enqueue(store: Store) -> list[str]:
        return [put(store) for _ in range(25)] + put_many(store, 25)

    parts = together(*(partial(enqueue, each) for each in stores))

    ids = [id for part in parts for id in part]
    assert len(set(ids)) == 6 * 50
    assert totals(store) == {"queued": 300}
    assert {event.job_id for event in all_events(store)} == set(ids)


def test_threads_enqueuing_the_same_key_make_one_job(
    store: Store, make_store: Callable[[], Store]
) -> None:
    stores = [store, store, make_store(), make_store()]

    for round in range(10):
        keys = [f"{round}-{number}" for number in range(3)]
        batches = [[new(key=key) for key in keys] for _ in stores]
        receipts = together(
            *(partial(each.enqueue, batch) for each, batch in zip(stores, batches, strict=True))
        )
        for number in range(3):
            same = [part[number] for part in receipts]
            assert len({receipt.id for receipt in same}) == 1
            assert sorted(receipt.duplicate for receipt in same) == [False, True, True, True]
    assert totals(store) == {"queued": 30}


def test_one_of_many_simultaneous_finishes_is_accepted(
    store: Store, make_store: Callable[[], Store]
) -> None:
    no = worker(store)
    other = make_store()

    for _ in range(10):
        job = started_job(store, no)
        verdicts = together(
            *(
                partial(finish, each, no, job, Completed("1"))
                for each in (store, store, other, other)
            )
        )
        assert sorted(verdicts) == ["accepted", "repeated", "repeated", "repeated"]
        assert kinds(store, job.id).count("job.succeeded") == 1


def test_a_finish_and_a_rescue_at_once_have_one_winner(
    store: Store, make_store: Callable[[], Store]
) -> None:
    other = make_store()
    winners: set[str] = set()

    for round in range(20):
        no = worker(store)
        job = started_job(store, no, queue=f"q{round}")
        verdict, rescued = together(
            partial(finish, store, no, job, Completed("1")),
            partial(rescue, other, no, beat=0, started=None),
        )
        winners.add(verdict)

        now = get(store, job.id)
        if verdict == "accepted":
            assert (now.status, now.losses) == ("completed", 0)
            assert rescued == Rescue(0, 0)
        else:
            assert (verdict, now.status, now.losses) == ("refused", "queued", 1)
            assert rescued == Rescue(1, 0)
    assert winners <= {"accepted", "refused"}


def test_a_renewal_and_a_rescue_at_once_have_one_winner(
    store: Store, make_store: Callable[[], Store]
) -> None:
    other = make_store()

    for round in range(20):
        no = worker(store)
        job = started_job(store, no, queue=f"q{round}")
        renewal, rescued = together(
            partial(store.renew, no), partial(rescue, other, no, beat=0, started=None)
        )

        # A live worker's job is never taken away: one of them came first and the other knows.
        assert (renewal is None) == (rescued is not None)
        assert get(store, job.id).status == ("queued" if rescued else "in_progress")
        assert (worker_row(store, no).dead_at is None) == (renewal is not None)


def test_a_claim_and_a_rescue_at_once_strand_no_job(
    store: Store, make_store: Callable[[], Store]
) -> None:
    other = make_store()

    for round in range(20):
        no = worker(store)
        id = put(store, queue=f"q{round}")
        jobs, rescued = together(
            partial(claim, store, no, queue=f"q{round}"),
            partial(rescue, other, no, beat=0, started=frozenset()),
        )

        if rescued is None:  # seen claiming: that is no death
            assert worker_row(store, no).dead_at is None
            assert [job.id for job in jobs] == [id]
            rescue(other, no, started=frozenset())
        # Whoever was first: a dead worker holds nothing.
        assert worker_row(store, no).dead_at is not None
        assert get(store, id).status == "queued"
        assert get(store, id).attempts == len(jobs)


def test_a_cancel_and_a_claim_at_once_have_one_winner(
    store: Store, make_store: Callable[[], Store]
) -> None:
    other, no = make_store(), worker(store)

    for round in range(20):
        id = put(store, queue=f"q{round}")
        jobs, told = together(
            partial(claim, store, no, queue=f"q{round}"),
            partial(other.cancel, [id], actor=OPERATOR, reason="stop"),
        )

        if jobs:
            assert told == {id: "requested"}
            assert get(store, id).status == "in_progress"
        else:
            assert told == {id: "done"}
            assert get(store, id).status == "cancelled"


def test_two_replays_at_once_are_one_replay(store: Store, make_store: Callable[[], Store]) -> None:
    other, no = make_store(), worker(store)
    for _ in range(10):
        job = started_job(store, no)
        finish(store, no, job, Failed(FAILURE))

        together(
            partial(store.replay, [job.id], actor=OPERATOR),
            partial(other.replay, [job.id], actor=OPERATOR),
        )

        assert kinds(store, job.id).count("job.replayed") == 1
        finish(store, no, claim_one(store, no), Completed())


# -- processes --------------------------------------------------------------------------------

_barrier: Any = None


def _begin(barrier: Any) -> None:
    global _barrier
    _barrier = barrier


def _claim_in_a_process(kind: str, location: str) -> list[str]:
    store = open_store(kind, location, Clock())
    try:
        store.queue_names()  # everything imported and opened before the race
        _barrier.wait(WAIT)
        return claim_everything(store, 5)
    finally:
        store.close()


def _work_in_a_process(kind: str, location: str) -> list[str]:
    """Enqueue, claim, finish and renew, all mixed; the ids this process enqueued."""
    store = open_store(kind, location, Clock())
    try:
        no = worker(store)
        ids: list[str] = []
        _barrier.wait(WAIT)
        for round in range(15):
            ids += put_many(store, 4)
            jobs = claim(store, no, 6)
            retried = [end(job, Retried(0, FAILURE)) for job in jobs[:1]]
            done = [end(job, Completed()) for job in jobs[1:]]
            assert set(store.finish(no, retried + done)) <= {"accepted"}
            renewal = store.renew(no)
            assert renewal is not None, f"declared dead in round {round}"
            assert renewal.leases == {}
        return ids
    finally:
        store.close()


@pytest.fixture
def processes() -> Iterator[ProcessPoolExecutor]:
    """Four real processes, started afresh (never forked), waiting for each other."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        4, mp_context=context, initializer=_begin, initargs=(context.Barrier(4),)
    ) as pool:
        yield pool


def test_processes_claiming_at_once_share_no_job_and_miss_none(
    store: Store, kind: str, location: str, processes: ProcessPoolExecutor
) -> None:
    ids = put_many(store, 600)

    runs = [processes.submit(_claim_in_a_process, kind, location) for _ in range(4)]

    claimed = [id for run in runs for id in run.result(WAIT)]
    assert len(claimed) == len(set(claimed)), "two processes were given the same job"
    assert set(claimed) == set(ids)
    assert {event.attempt for event in all_events(store) if event.kind == "job.started"} == {1}


def test_processes_doing_everything_at_once_lose_nothing(
    store: Store, clock: Clock, kind: str, location: str, processes: ProcessPoolExecutor
) -> None:
    runs = [processes.submit(_work_in_a_process, kind, location) for _ in range(4)]

    ids = [id for run in runs for id in run.result(WAIT)]
    assert len(set(ids)) == 4 * 60
    clock.advance(SECOND)
    no = worker(store)
    while jobs := claim(store, no):
        assert set(store.finish(no, [end(job, Completed()) for job in jobs])) == {"accepted"}
    assert totals(store) == {"completed": len(ids)}
    # Every job ended once, whatever happened to it on the way.
    ended = [event.job_id for event in all_events(store) if event.kind == "job.succeeded"]
    assert sorted(str(id) for id in ended) == sorted(ids)
