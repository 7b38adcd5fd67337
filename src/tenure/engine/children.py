"""The supervisor's side of its children: start one, hand it jobs, know what it holds."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Protocol

from tenure.engine.board import Board, make_board
from tenure.engine.messages import Assignment, Cancel, FromChild, Pipe, Run, Stop, ToChild
from tenure.job import ClaimedJob
from tenure.store import Registration

AHEAD_SECONDS = 0.05  # claim ahead what the child empties in this time, at its measured rate
MOST_AHEAD = 1500  # a batch of this size holds SQLite's only write lock for about 15 ms
MOST_AHEAD_PARALLEL = 2000  # where nobody waits for that, and a claim takes a round trip longer
SLOTS = 10_000 + MOST_AHEAD_PARALLEL  # the most concurrency there may be, and what is ahead of it
RATE_WINDOW = 0.05  # of work: the time a child waits for jobs says nothing about its rate

log = logging.getLogger("tenure.worker")


class CannotStart(Exception):
    """No process, thread, handle or memory for another child. That may change."""


class Channel(Protocol):
    fault: str | None  # why it was given up, if it was

    def send(self, message: ToChild) -> None: ...

    def end_reading(self) -> None: ...

    def close(self) -> None: ...


# Where a child prints, for as long as it takes to start it; None: where we do.
Streams = Callable[[], AbstractContextManager[int | None]]


class Child:
    """One process (or embedded executor) and the jobs it has been given."""

    def __init__(self, number: int, board: Board, concurrency: int, *, solo: bool) -> None:
        self.number = number
        self.board = board
        self.concurrency = concurrency
        self.solo = solo
        self.channel: Channel | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self.begun = time.monotonic()
        self.ready = False  # has said hello
        self.leaving = False  # gets nothing new
        self.beat = 0.0  # the last we saw of its loop
        self.heard = self.begun  # when that was new to us
        self.halted: float | None = None  # since when it starts nothing: its loop stands still
        self.settled = False  # and what it had not started was taken back
        self.withdrawn: set[tuple[str, int]] = set()  # runs that were taken back from it unstarted
        self.killed: str | None = None  # why we killed it
        self.gone = False
        self.useful = False  # has begun or ended at least one job
        self.quota: int | None = None  # so many more it may be given; None: any number
        self.ran = 0  # jobs that have ended here
        self.weighed = self.begun  # when its memory was last looked at
        self.unweighed = False  # a job has ended since
        self.worn = False  # it has had its jobs, or has grown: another takes its place
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

    def room(self) -> int:
        if not self.ready or self.leaving or self.halted is not None or self.board.left:
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
        self.send(Run(assignments, worker))
        return True

    def bury(self) -> list[tuple[ClaimedJob, bool]]:
        """It is gone: what it held, and whether that had started. It gets nothing any more.

        A job that has ended here, and was not heard of, counts as started where no other runs: it
        may have left behind what ended the process (closed handles, a stopped loop)."""
        with self._lock:
            self.gone = True
            marks = [(job, self.board.started(slot)) for job, slot in self.holds.values()]
            blamed = any(mark > 0 for _job, mark in marks)
            held = [(job, mark > 0 or (mark < 0 and not blamed)) for job, mark in marks]
            self.useful = self.useful or any(started for _job, started in held)
            self.holds = {}
        return held

    def marks(self) -> list[float]:
        """What the board says of each job it holds: see `Board.started`."""
        return [self.board.started(slot) for _job, slot in list(self.holds.values())]

    def halt(self, now: float) -> None:
        """Its loop stands still: let it start nothing, and give it nothing."""
        with self._lock:
            self.halted, self.settled = now, False
            self.board.halt()

    def withdraw(self) -> list[ClaimedJob]:
        """What it has not started, a moment after `halt`, and will not run any more."""
        with self._lock:
            self.settled = True
            back = [job for job, slot in self.holds.values() if not self.board.started(slot)]
            for job in back:
                del self.holds[job.id]
                self.withdrawn.add((job.id, job.lease_no))
        return back

    def resume(self) -> None:
        """Its loop turns again, and what was taken back is forgotten there."""
        with self._lock:
            self.halted = None
            self.withdrawn.clear()
            used = {slot for _job, slot in self.holds.values()}
            self._free_slots = [slot for slot in range(SLOTS) if slot not in used]

    def busy(self, now: float) -> bool:
        """Handlers run in it, or what it has ended is still to be heard. For that its job's
        time-out is waited: killed, it would run once more."""
        for job, slot in list(self.holds.values()):
            started = self.board.started(slot)
            if started > 0 or (started < 0 and now < self.heard + job.timeout_ms / 1000):
                return True
        return False

    def ended(self, runs: Sequence[tuple[str, int]]) -> None:
        """(id, lease_no): a late word about an earlier lease must not end the present one."""
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

    def overdue(self, now: float, grace: float) -> ClaimedJob | None:
        """A job whose time-out, or patience after a cancellation, has passed in silence."""
        for job, slot in list(self.holds.values()):
            started = self.board.started(slot)
            if started > 0 and now > started + job.timeout_ms / 1000 + grace:
                return job
            if now > self.cancels.get(job.id, now) + self.cancel_grace + grace:
                return job
        return None

    def send(self, message: ToChild) -> None:
        channel = self.channel
        if channel is not None:
            channel.send(message)

    def cancel(self, ids: dict[str, str | None]) -> None:
        for id in ids:
            self.cancels.setdefault(id, time.monotonic())
        self.send(Cancel(ids))

    def stop(self) -> None:
        self.leaving = True
        self.send(Stop())

    def kill(self, why: str) -> None:
        self.killed = self.killed or why
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)

    def hang_up_if_dead(self) -> None:
        """Its process may be gone while something it forked keeps the pipe open."""
        if self.process is not None and self.process.poll() is not None and self.channel:
            self.channel.end_reading()

    def how_it_died(self) -> str:
        """Ends it, should it have lost its pipe and live on."""
        if self.killed is not None:
            return self.killed
        try:
            code = None if self.process is None else self.process.wait(1.0)
        except subprocess.TimeoutExpired:
            self.kill("its process closed its pipe and was killed")
            return "its process closed its pipe and was killed"
        if self.channel is not None and self.channel.fault is not None:
            return f"its process was given up: {self.channel.fault}"
        if self.board.left:
            return "its process ended itself: its supervisor stood still"
        if code is not None and code < 0:
            return f"its process was killed by {_name(-code)}"
        return f"its process exited with code {code}"

    def close(self) -> None:
        if self.channel is not None:
            self.channel.close()
            self.channel = None  # it knows us: nothing is left to a garbage collection
        if self.process is not None:
            try:
                self.process.wait(2.0)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.board.close()


def _name(number: int) -> str:
    """Real-time signals have none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def excuse(board: Board) -> bool:
    """Say so where others cannot find it."""
    if board.path is None:
        log.warning(
            "no file for a board (%s): should this worker die, whoever rescues its jobs cannot "
            "tell which had started, and charges all of them",
            board.excuse,
        )
    return board.path is None


class Launcher:
    """Starts children of one app. Always from one long-lived thread: on Linux a child dies with
    the thread that started it."""

    def __init__(
        self,
        spec: str,
        worker_id: Callable[[], str],
        on_message: Callable[[Child, FromChild], None],
        on_end: Callable[[Child], None],
        streams: Streams | None = None,
    ) -> None:
        self._spec = spec
        self._streams = streams or nullcontext
        self.worker_id = worker_id
        self.on_message = on_message
        self.on_end = on_end
        self.reloads = False  # they say where their code is, and their errors with a traceback
        self.processes = 0  # how many share the app's connections; 0: as its settings say
        self._count = 0
        self._excused = False

    def start(self, concurrency: int | None, *, solo: bool = False) -> Child:
        """None: as many at once as the app's own settings say. CannotStart leaves nothing."""
        self._count += 1
        with ExitStack() as undo:
            try:
                child = self._start(concurrency, solo, undo)
            except (OSError, RuntimeError) as error:  # RuntimeError: "can't start new thread"
                raise CannotStart(str(error)) from error
            undo.pop_all()
        if not self._excused:
            self._excused = excuse(child.board)
        return child

    def _start(self, concurrency: int | None, solo: bool, undo: ExitStack) -> Child:
        board = make_board(self.worker_id(), self._count, SLOTS)
        undo.callback(board.close)
        child = Child(self._count, board, concurrency or 1, solo=solo)
        ours, theirs = socket.socketpair()
        undo.callback(ours.close)
        with theirs, self._streams() as printed:
            for end in (ours, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
            lent = board.lend()
            try:
                child.process = subprocess.Popen(  # noqa: S603  our own module, no shell
                    self._command(theirs.fileno(), lent, concurrency, solo),
                    pass_fds=(theirs.fileno(), lent),
                    stdin=subprocess.DEVNULL,
                    stdout=printed,
                    stderr=printed,
                    env=self._environment(),
                )
            finally:
                os.close(lent)
        undo.callback(child.process.wait)
        undo.callback(child.process.kill)
        child.channel = Pipe(
            ours,
            lambda message: self.on_message(child, message),
            lambda: self.on_end(child),
        )
        return child

    def _command(self, pipe: int, board: int, concurrency: int | None, solo: bool) -> list[str]:
        """See `tenure/child.py`. One that runs a single job has one connection, if it needs any."""
        shared = 0 if solo else self.processes
        numbers = (concurrency or 0, shared, int(self.reloads), int(solo))
        return [
            sys.executable, "-m", "tenure.child", str(pipe), self._spec, str(board),
            *map(str, numbers),
        ]  # fmt: skip

    def _environment(self) -> dict[str, str] | None:
        """Compiled files know a source by its second and its size: two saves within one second are
        the same to them."""
        return {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"} if self.reloads else None
