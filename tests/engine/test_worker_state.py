"""The state of a worker: phases that never go back, jobs that are never nowhere, signals that find
no lock."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tenure.engine.child_watch import NO_ANSWER, ChildWatch
from tenure.engine.children import Child
from tenure.engine.finisher import Finisher, Unwritten
from tenure.engine.messages import CancelJobs, Report, RunJobs
from tenure.engine.worker_options import WorkerOptions
from tenure.engine.worker_state import WorkerState
from tenure.errors import StoreError
from tenure.job import ClaimedJob
from tenure.outcome import Completed, Crashed, Ended, Released
from tenure.store import Registration

from .parts import child_of, claimed_job, worker_state

ME = Registration(7, "here:1:01")


def completed(job: ClaimedJob) -> Report:
    return Report([Ended(job.id, job.lease_no, 1, Completed())], [])


def written(state: WorkerState) -> None:
    state.unwritten.take()
    state.unwritten.written()


# -- phases ---------------------------------------------------------------------------------------
def test_the_phases_of_a_worker() -> None:
    state = worker_state(shutdown_timeout=30)
    assert (state.phase, state.claiming) == ("starting", True)
    state.begin()
    assert (state.phase, state.finished()) == ("working", False)
    state.stop()
    assert (state.phase, state.claiming, state.finished()) == ("draining", False, True)
    state.stop(0.0)
    assert state.phase == "stopping"
    state.stop()  # a later, longer grace changes nothing
    assert state.phase == "stopping"
    state.end()
    assert state.phase == "over"


def test_a_signal_stops_and_a_second_one_ends() -> None:
    state = worker_state(shutdown_timeout=30)
    state.interrupt()
    assert (state.phase, state.interrupted) == ("draining", True)
    assert state.news.get(timeout=1) is None
    state.interrupt()
    assert state.phase == "stopping"


def test_of_many_that_stop_it_at_once_the_shortest_grace_holds() -> None:
    """A drain that ends just when a second signal comes must not give its 30 s back."""
    for _ in range(50):
        state, ready = worker_state(), threading.Barrier(4)
        graces = (None, None, 5.0, 0.0)

        def stop(grace: float | None, state: WorkerState = state, ready: Any = ready) -> None:
            ready.wait()
            state.stop(grace)

        threads = [threading.Thread(target=stop, args=(grace,)) for grace in graces]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert state.phase == "stopping"


def test_signals_while_its_locks_are_held() -> None:
    """A handler runs in the middle of whatever the main thread does: it must take no lock."""
    state = worker_state()
    seen = []

    def interrupt(_number: int, _frame: Any) -> None:
        state.interrupt()
        seen.append(state.phase)

    def send() -> None:
        for _ in range(100):
            os.kill(os.getpid(), signal.SIGUSR2)
            time.sleep(0.003)

    before = signal.signal(signal.SIGUSR2, interrupt)
    sender = threading.Thread(target=send)
    try:
        with child_of(state) as (child, _other), state.unwritten._lock, child._lock:
            sender.start()
            while len(seen) < 20:
                state.wake_supervisor()
        while sender.is_alive():
            state.wake_writers()
            state.finished()
    finally:
        sender.join()
        signal.signal(signal.SIGUSR2, before)
    assert set(seen[1:]) == {"stopping"}


# -- claims ---------------------------------------------------------------------------------------
def test_a_claim_is_said_before_it_is_asked_whether_there_may_be_one() -> None:
    """A supervisor that has stopped the worker and sees no claim under way may go: if the claim
    were said later, the jobs that it brings would be nobody's."""
    state, seen = worker_state(), []

    class Deadlines(list[float]):
        def __len__(self) -> int:
            seen.append(state.claim_under_way)
            return super().__len__()

    state._deadlines = Deadlines()
    assert state.begin_claim()
    assert seen == [True]
    state.end_claim()
    assert state.claims() == (1, False)
    state._deadlines.append(time.monotonic())
    assert not state.begin_claim()
    assert not state.finished()


# -- a job is never nowhere -----------------------------------------------------------------------
@contextmanager
def never_nowhere(
    state: WorkerState, child: Child, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[str]]:
    """Looks at every step between two places: whatever a job is taken out of, it is in the next."""
    steps: list[str] = []

    def watched(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any) -> Any:
            assert not state.idle(), f"nowhere before {name}"
            found = call(*args)
            assert not state.idle(), f"nowhere after {name}"
            steps.append(name)
            return found

        return step

    with monkeypatch.context() as patch:
        patch.setattr(state.unwritten, "add", watched("add", state.unwritten.add))
        for name in ("ended", "let_go", "hand"):
            patch.setattr(child, name, watched(name, getattr(child, name)))
        yield steps


def test_it_ends_in_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    state, job = worker_state(), claimed_job()
    with child_of(state) as (child, _other):
        child.hand([job], ME)
        with never_nowhere(state, child, monkeypatch) as steps:
            state.reported(child, completed(job))
        assert steps == ["add", "ended"]
        assert not state.holding()
        written(state)
        assert state.idle()


def test_its_process_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    state, job = worker_state(), claimed_job()
    with child_of(state) as (child, _other):
        child.hand([job], ME)
        with never_nowhere(state, child, monkeypatch) as steps:
            held = child.bury()
            assert child.room() == 0
            assert not child.hand([claimed_job()], ME)
            state.take_back(child, [(job, Crashed("died", 3)) for job, _started in held])
        assert steps == ["hand", "add", "let_go"]
        assert not child.holds


def test_it_is_taken_back_from_a_child_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state, job, running = worker_state(), claimed_job(), claimed_job()
    with child_of(state) as (child, _other):
        child.hand([job, running], ME)
        child.board.start(child.holds[running.id][1], time.monotonic())
        child.halt(time.monotonic())
        with never_nowhere(state, child, monkeypatch) as steps:
            ChildWatch(state)._take_back(child)
        assert steps == ["add", "let_go"]
        assert list(child.holds) == [running.id]
        # What the child says of it now, it says too late.
        state.reported(child, Report([Ended(job.id, 1, 0, NO_ANSWER)], []))
        assert len(state.unwritten.take().ended) == 1


def test_it_is_killed_for_its_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    state, job = worker_state(), claimed_job()
    with child_of(state) as (child, _other):
        child.hand([job], ME)
        child.board.start(child.holds[job.id][1], time.monotonic() - 60)
        with never_nowhere(state, child, monkeypatch) as steps:
            ChildWatch(state)._kill_overdue(child, time.monotonic())
        assert steps == ["add", "ended"]


def test_a_batch_that_comes_back_from_the_store() -> None:
    """While it is written, and while it is put back, something is pending."""

    class Broken:
        def finish(self, worker: Registration, ended: list[Ended]) -> list[str]:
            assert unwritten.pending
            raise StoreError("away")

    unwritten, end = Unwritten(), Ended("a", 1, 0, Completed())
    unwritten.add([end], [])
    with pytest.raises(StoreError):
        Finisher(Broken(), unwritten, worker_state().counts).flush(ME)  # type: ignore[arg-type]
    assert unwritten.pending
    assert unwritten.ids() == {"a"}
    assert unwritten.take().ended == [end]
    assert unwritten.pending
    unwritten.written()
    assert not unwritten.pending


def test_an_observer_never_finds_it_finished_while_a_job_is_here() -> None:
    """One thread moves jobs through all their places, one after another; another one looks."""
    state = worker_state()
    state.stop()
    wrong: list[int] = []
    moved, over = [0], threading.Event()  # odd while a job is here

    def move() -> None:
        with child_of(state) as (child, other):
            for turn in range(3000):
                job = claimed_job()
                state.claim_under_way = True
                moved[0] += 1
                if turn % 2:
                    state.set_apart([job])
                    state.end_claim()
                    child.hand([job], ME)
                    state.alone.popleft()
                else:
                    child.hand([job], ME)
                    state.end_claim()
                state.reported(child, completed(job))
                batch = state.unwritten.take()
                if turn % 3 == 0:
                    state.unwritten.put_back(batch)
                    state.unwritten.take()
                moved[0] += 1
                state.unwritten.written()
                other.received()
        over.set()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=move)
    thread.start()
    try:
        while not over.is_set():
            before = moved[0]
            finished = state.finished()
            if finished and before % 2 and moved[0] == before:
                wrong.append(before)
    finally:
        sys.setswitchinterval(interval)
        thread.join()
    assert moved[0] == 6000
    assert wrong == []


# -- cancel requests ------------------------------------------------------------------------------
def test_a_cancel_request_goes_to_the_child_that_runs_the_job_once() -> None:
    """Asked for by two threads, of which one may have an older answer of the store's."""
    state, job, other_job = worker_state(), claimed_job(), claimed_job()
    with child_of(state) as (first, first_end), child_of(state) as (second, second_end):
        first.hand([job], ME)
        second.hand([other_job], ME)
        state.cancel({job.id: "not needed"})
        state.cancel({})  # a renewal that began before the request
        state.cancel({job.id: "not needed"})

        assert first_end.received()[1:] == [CancelJobs({job.id: "not needed"})]
        assert second_end.received()[1:] == []


def test_a_cancel_request_for_a_job_that_waits_to_run_alone() -> None:
    state, job = worker_state(), claimed_job()
    with child_of(state, solo=True) as (child, other):
        state.set_apart([job])
        state.cancel({job.id: "no"})
        assert state.unwanted == {(job.id, 1): "no"}

        child.hand([job], ME)  # its process was starting at that moment
        state.alone.popleft()
        state.cancel({job.id: "no"})
        assert other.received()[1:] == [CancelJobs({job.id: "no"})]
        assert state.unwanted == {}


def test_a_lost_lease_ends_its_own_run_only() -> None:
    state, id = worker_state(), claimed_job().id
    with child_of(state) as (child, other):
        child.hand([claimed_job(3, id)], ME)
        state.lose([(id, 1)])
        assert list(child.holds) == [id]
        state.lose([(id, 3)])
        assert not child.holds
        run, cancel = other.received()
        assert isinstance(run, RunJobs)
        assert cancel == CancelJobs({id: None})


# -- what this worker is --------------------------------------------------------------------------
def test_under_a_new_id_after_it_was_declared_dead() -> None:
    state = worker_state(lease_seconds=30)
    now = time.monotonic()
    state.registered(ME, now)
    again = Registration(8, "here:1:02")
    state.registered(again, now + 5)
    assert (state.worker, state.lease.until) == (again, now + 35)
    assert state.phase == "starting"


def test_what_others_read_about_it() -> None:
    state = worker_state(WorkerOptions(queues={"b": None, "a": 2}, name="left"))
    assert state.new_description() is None
    about = state.description()
    assert (about["name"], about["queues"], "failures" in about) == ("left", ["a", "b"], False)
    state.failures.count("rescue", ValueError("a bug"))
    told = state.new_description()
    assert told is not None
    assert (told["failures"], told["last_failure"]) == (1, "ValueError in rescue")


def test_the_dispatcher_is_woken_out_of_its_sleep() -> None:
    """The bell interrupts the wait for hints, only while there is one."""
    state = worker_state()
    hints: Any = state.dispatcher_bell._interrupt.__self__  # type: ignore[attr-defined]
    state.wake_writers()
    assert state.dispatcher_bell.is_set()
    assert not hints.interrupted.is_set()
    state.dispatcher_bell.asleep = True
    state.give_back([Ended("a", 1, 0, Released("lost"))])
    assert hints.interrupted.is_set()
