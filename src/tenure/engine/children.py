"""The supervisor's side of a child: hand it jobs, know what it holds, end it."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from tenure.engine.board import Board
from tenure.engine.messages import Assignment, CancelJobs, FromChild, RunJobs, Stop, ToChild
from tenure.job import ClaimedJob
from tenure.store import Registration

AHEAD_SECONDS = 0.05  # claim ahead what the child empties in this time, at its measured rate
MOST_AHEAD = 1500  # a batch of this size holds SQLite's only write lock for about 15 ms
MOST_AHEAD_PARALLEL = 2000  # where that makes nothing wait, and a claim takes a round trip longer
SLOTS = 10_000 + MOST_AHEAD_PARALLEL  # the most concurrency there may be, and what is ahead of it
RATE_WINDOW = 0.05  # of work: the time a child waits for jobs says nothing about its rate

RunKey = tuple[str, int]  # job id, lease_no: names one run, and no later one of the same job


class Channel(Protocol):
    fault: str | None  # why it was given up, if it was

    def listen(
        self, on_message: Callable[[FromChild], None], on_end: Callable[[], None]
    ) -> None: ...

    def receive(self, timeout: float) -> FromChild | None: ...

    def send(self, message: ToChild) -> None: ...

    def end_reading(self) -> None: ...

    def close(self) -> None: ...


class Child:
    """One process (or embedded executor) and the jobs it has been given."""

    channel: Channel

    def __init__(self, number: int, board: Board, concurrency: int, *, solo: bool) -> None:
        self.number = number
        self.board = board
        self.concurrency = concurrency
        self.solo = solo  # runs a single job, then leaves
        self.process: subprocess.Popen[bytes] | None = None  # None: embedded
        self.begun = time.monotonic()
        self.ready = False  # has said hello
        self.leaving = False  # gets nothing new
        self.beat = 0.0  # the last turn of its loop that the board told us of
        self.heard = self.begun  # when that was new to us
        self.halted: float | None = None  # since when it may start nothing: its loop stands still
        self.settled = False  # halted, and what it had not started was taken back
        self.withdrawn: set[RunKey] = set()  # runs that were taken back from it unstarted
        self.killed: str | None = None  # why we killed it
        self.gone = False  # its process has ended
        self.useful = False  # has begun or ended at least one job
        self.quota: int | None = None  # jobs that it may still be given; None: any number
        self.ran = 0  # jobs that have ended here
        self.weighed = self.begun  # when its memory was last looked at
        self.unweighed = False  # a job has ended since
        self.worn = False  # it has had its jobs, or has grown: a successor takes its place
        self.leave_by = float("inf")  # when it is killed, should it not have left
        self.stuck = 0  # threads it has lost to handlers that do not end
        self.holds: dict[str, tuple[ClaimedJob, int]] = {}  # id -> job, slot
        self.cancels: dict[str, float] = {}  # id -> when it was asked to stop
        self.cancel_grace = float("inf")
        self.most_ahead = MOST_AHEAD
        self._free_slots = list(range(SLOTS))
        self._lock = threading.Lock()
        self._rate = 0.0
        self._counted = 0
        self._worked = 0.0  # seconds
        self._since = time.monotonic()

    @property
    def pid(self) -> int | None:
        return None if self.process is None else self.process.pid

    def greeted(self) -> None:
        """It has said hello."""
        self.heard = time.monotonic()
        self.ready = True

    # -- handing it jobs ----------------------------------------------------------------------
    def room(self) -> int:
        if not self.ready or self.leaving or self.gone or self.halted is not None:
            return 0
        if self.board.left:
            return 0
        ahead = 0 if self.solo else min(int(self._rate * AHEAD_SECONDS), self.most_ahead)
        room = max(0, self.concurrency + ahead - len(self.holds))
        return room if self.quota is None else min(room, self.quota)

    def hand(self, jobs: list[ClaimedJob], worker: Registration) -> bool:
        """Give it jobs to run; False when it is gone or does not answer, and takes none."""
        assignments = []
        with self._lock:
            if self.gone or self.halted is not None:
                return False
            if not self.holds:
                self._since = time.monotonic()
            if self.quota is not None:
                self.quota -= len(jobs)
            for job in jobs:
                slot = self._free_slots.pop()
                self.board.assign(slot, job.id)
                self.holds[job.id] = (job, slot)
                assignments.append(Assignment(slot, job))
        self.channel.send(RunJobs(assignments, worker))
        return True

    def ended(self, runs: Sequence[RunKey]) -> None:
        """It holds these runs no longer. A late word about an earlier lease of a job does not end
        its present one."""
        with self._lock:
            for id, lease_no in runs:
                held = self.holds.get(id)
                if held is not None and held[0].lease_no == lease_no:
                    del self.holds[id]
                    self.cancels.pop(id, None)
                    self._free_slots.append(held[1])
            self._measure(len(runs))
            self.ran += len(runs)
        self.useful = self.useful or bool(runs)

    def _measure(self, count: int) -> None:
        """Jobs per second of work: the clock runs while it holds any."""
        now = time.monotonic()
        self._counted += count
        self._worked += now - self._since
        self._since = now
        if self._worked >= RATE_WINDOW or (self._rate == 0 and self._worked > 0.005):
            self._rate = self._counted / self._worked
            self._counted, self._worked = 0, 0.0

    # -- taking jobs back ---------------------------------------------------------------------
    # Whatever is taken back is first recorded as ended, then let go: see `WorkerState`.

    def bury(self) -> list[tuple[ClaimedJob, bool]]:
        """Its process is gone, so it is given nothing more: what it holds, and whether that had
        started.

        A job that has ended here without our hearing of it counts as started where no other runs:
        it may have left behind what ended the process (closed handles, a stopped loop)."""
        with self._lock:
            self.gone = True
            marks = [(job, self.board.started(slot)) for job, slot in self.holds.values()]
        blamed = any(mark > 0 for _job, mark in marks)
        held = [(job, mark > 0 or (mark < 0 and not blamed)) for job, mark in marks]
        self.useful = self.useful or any(started for _job, started in held)
        return held

    def halt(self, now: float) -> None:
        """Its loop stands still: let it start nothing, and give it nothing."""
        with self._lock:
            self.halted, self.settled = now, False
            self.board.halt()

    def withdraw(self) -> list[ClaimedJob]:
        """A moment after `halt`: what it has not started, and will not run any more."""
        with self._lock:
            self.settled = True
            back = [job for job, slot in self.holds.values() if not self.board.started(slot)]
            self.withdrawn.update((job.id, job.lease_no) for job in back)
        return back

    def let_go(self, jobs: Collection[ClaimedJob]) -> None:
        """Without their slots, to which the child may still write."""
        with self._lock:
            for job in jobs:
                self.holds.pop(job.id, None)

    def resume(self) -> None:
        """Its loop turns again, and it has forgotten what was taken back."""
        with self._lock:
            self.halted = None
            self.withdrawn.clear()
            used = {slot for _job, slot in self.holds.values()}
            self._free_slots = [slot for slot in range(SLOTS) if slot not in used]

    # -- what runs in it ----------------------------------------------------------------------
    def marks(self) -> list[float]:
        """What the board says of each job it holds: see `Board.started`."""
        return [self.board.started(slot) for _job, slot in list(self.holds.values())]

    def busy(self, now: float) -> bool:
        """Handlers run in it, or a job has ended in it and we have not heard of that yet. We wait
        for that as long as the job's time-out: if the child were killed, the job would run again.
        """
        for job, slot in list(self.holds.values()):
            started = self.board.started(slot)
            if started > 0 or (started < 0 and now < self.heard + job.timeout_ms / 1000):
                return True
        return False

    def overdue(self, now: float, grace: float) -> ClaimedJob | None:
        """A job whose time-out, or patience after a cancellation, has passed in silence."""
        for job, slot in list(self.holds.values()):
            started = self.board.started(slot)
            if started > 0 and now > started + job.timeout_ms / 1000 + grace:
                return job
            if now > self.cancels.get(job.id, now) + self.cancel_grace + grace:
                return job
        return None

    # -- asking it to stop --------------------------------------------------------------------
    def cancel(self, requests: Mapping[str, str]) -> None:
        """Pass cancel requests on, of the jobs it holds, each once: a second one would interrupt
        the handler again, in the middle of its clean-up."""
        with self._lock:
            fresh: dict[str, str | None] = {
                id: reason
                for id, reason in requests.items()
                if id in self.holds and id not in self.cancels
            }
            self.cancels.update(dict.fromkeys(fresh, time.monotonic()))
        if fresh:
            self.channel.send(CancelJobs(fresh))

    def lose(self, runs: Mapping[str, int]) -> None:
        """The leases of these runs (id -> lease_no) are gone: stop those it holds. Their outcomes
        are void."""
        held = self.holds
        lost = [(id, no) for id, no in runs.items() if id in held and held[id][0].lease_no == no]
        if lost:
            self.channel.send(CancelJobs(dict.fromkeys(id for id, _lease_no in lost)))
            self.ended(lost)

    def stop(self) -> None:
        self.leaving = True
        self.channel.send(Stop())

    # -- its end ------------------------------------------------------------------------------
    def kill(self, why: str) -> None:
        self.killed = self.killed or why
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)

    def hang_up_if_dead(self) -> None:
        """Its process may be gone while a process that it forked keeps the pipe open."""
        if self.process is not None and self.process.poll() is not None:
            self.channel.end_reading()

    def how_it_died(self) -> str:
        """Ends its process, should that have lost its pipe and live on."""
        if self.killed is not None:
            return self.killed
        try:
            code = None if self.process is None else self.process.wait(1.0)
        except subprocess.TimeoutExpired:
            self.kill("its process closed its pipe and was killed")
            return "its process closed its pipe and was killed"
        if self.channel.fault is not None:
            return f"its process was given up: {self.channel.fault}"
        if self.board.left:
            return "its process ended itself: its supervisor stood still"
        if code is not None and code < 0:
            return f"its process was killed by {_signal_name(-code)}"
        return f"its process exited with code {code}"

    def close(self) -> None:
        self.channel.close()
        if self.process is not None:
            try:
                self.process.wait(2.0)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.board.close()


def _signal_name(number: int) -> str:
    """Real-time signals have none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
