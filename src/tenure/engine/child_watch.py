"""The supervisor's watch over its children: which are late, stuck or silent, and what follows.

A child whose loop stands still (a task that a handler has left behind, C code that holds the GIL)
neither starts what it was given nor says so, while its lease is renewed. Its beat on the board
tells. After five seconds without a beat, what has not started goes back, uncharged:

    supervisor   marks the board: start nothing more; waits; then reads the slots
    child        marks a slot as started; then looks at that mark; runs the job only without it

Whichever comes first, one of the two sees the other's mark. A slot without a start, when the
supervisor reads it, belongs to a child that will see the supervisor's mark and not run the job. A
job that the child runs had its start written before that mark, and a fifth of a second later the
supervisor sees it. (Both may give a job back; the second time is refused, for its lease has ended.)

A silent loop proves nothing about handlers: they may be alive in threads, or be what holds the
GIL. So the child is killed only when no job that had started in it is within its time-out.
"""

from __future__ import annotations

import logging
import sys
import time

from tenure import outcome, policy
from tenure.engine import machine
from tenure.engine.children import Child
from tenure.engine.messages import ForgetWaiting
from tenure.engine.worker_state import WorkerState
from tenure.job import ClaimedJob

log = logging.getLogger("tenure.worker")

HARD_GRACE = 1.5  # past its time-out plus this, a silent child is killed
SILENT_SECONDS = 5.0
SETTLE_SECONDS = 0.2  # between our mark on the board and our look at it
LONGEST_GAP = 2.5  # between two looks of ours: after a longer one we were stopped ourselves
# Between two looks at a child's memory, while jobs end in it: 12 us each where there is a /proc, a
# process of its own elsewhere.
WEIGH_SECONDS = 0.05 if sys.platform.startswith("linux") else 1.0
MEGABYTE = 1 << 20
CANCELLED = outcome.Cancelled("cancelled; its process had to be killed")
NO_ANSWER = outcome.Released("its process did not answer")


class ChildWatch:
    def __init__(self, state: WorkerState) -> None:
        self._state = state
        self._start_timeout = state.settings.start_timeout
        self._most_jobs = state.settings.max_jobs_per_child
        self._most_memory = state.settings.max_memory_per_child * MEGABYTE
        self._looked = time.monotonic()

    def look(self) -> None:
        now = time.monotonic()
        steady = now - self._looked <= LONGEST_GAP
        self._looked = now
        for child in self._state.children:
            if child.ready:
                self._listen(child, now, steady=steady)
            elif not steady:
                child.begun = now
            if child.process is None or child.killed is not None:
                continue  # a thread of an embedded worker cannot be ended; it was asked
            if not child.ready and now - child.begun > self._start_timeout:
                took = f"{self._start_timeout:g} s"
                log.error("child %s has not said hello within %s: killing it", child.pid, took)
                child.kill(f"its process took longer than {took} to import the app")
            if now > child.leave_by:
                child.kill("its code has changed")
            self._kill_overdue(child, now)
            self._replace(child)
            self._relieve(child)
            if child.unweighed:
                self.weigh(child, now)

    # -- handlers that do not end -------------------------------------------------------------
    def _kill_overdue(self, child: Child, now: float) -> None:
        """Asking did not help: end the process. Its other jobs are given back, uncharged."""
        job = child.overdue(now, HARD_GRACE)
        if job is not None:
            log.warning("job %s does not end when told to: killing its process", job.id)
            child.kill("a neighbour in its process did not end when told to")
            self._state.decide(job, CANCELLED if job.id in child.cancels else self._timed_out(job))
            child.ended([(job.id, job.lease_no)])

    def _timed_out(self, job: ClaimedJob) -> outcome.Outcome:
        """By its task's own policy, which was told by a child when it said hello: the process that
        has it is dead."""
        message = f"still running after its time-out of {job.timeout_ms / 1000:g} s; killed"
        failure = outcome.Failure(f"TimeoutError: {message}", "TIMEOUT", "TimeoutError")
        delays = self._state.app.time_outs.get(job.type, [])
        if delays is None:
            return outcome.Failed(failure)
        if job.attempts >= job.max_attempts:
            return outcome.Dead(failure)
        if not delays:
            return outcome.Retried(policy.Exponential().delay(job.attempts), failure)
        return outcome.Retried(delays[min(max(job.attempts, 1), len(delays)) - 1], failure)

    def _replace(self, child: Child) -> None:
        """One that has lost threads to handlers that do not end, or has given itself up because
        we stood still, ends what it runs and leaves."""
        if child.leaving or not (child.stuck or child.board.left):
            return
        if child.stuck:
            log.warning(
                "child %s is replaced: in it %d `def` handler%s on after a time-out or a cancel, "
                "until its other jobs have ended, also beside a retry. ctx.check() would end such "
                "a handler; with process=True it is killed",
                child.pid,
                child.stuck,
                " goes" if child.stuck == 1 else "s go",
            )
        child.stop()

    # -- children that have done enough -------------------------------------------------------
    def _relieve(self, child: Child) -> None:
        """Its successor is started when it has been given its last job, and it leaves when that
        has ended."""
        if child.quota != 0 or child.leaving:
            return
        if not child.worn:
            child.worn = True
            log.info("child %s has had its %d jobs: replacing it", child.pid, self._most_jobs)
        if not child.holds:
            child.stop()

    def weigh(self, child: Child, now: float) -> bool:
        """After jobs of its have ended: has it grown beyond its bound? Then it starts nothing more
        and leaves. On any thread."""
        if not self._most_memory or child.worn or child.leaving or child.solo or child.pid is None:
            return False
        child.unweighed = now - child.weighed < WEIGH_SECONDS
        if child.unweighed:
            return False
        child.weighed = now
        found = machine.resident_bytes(child.pid)
        if found is None or found <= self._most_memory:
            return False
        child.worn = True
        log.info(
            "child %s has grown to %d MB after %d jobs, its bound is %d MB: replacing it",
            child.pid,
            found // MEGABYTE,
            child.ran,
            self._most_memory // MEGABYTE,
        )
        child.stop()
        return True

    # -- loops that stand still ---------------------------------------------------------------
    def _listen(self, child: Child, now: float, *, steady: bool) -> None:
        beat = child.board.last_beat()
        if beat != child.beat or not steady:
            child.beat, child.heard = beat, now
        silent = now - child.heard > SILENT_SECONDS
        if child.halted is None:
            if silent:
                self._halt(child, now)
        elif not child.settled:
            if now - child.halted > SETTLE_SECONDS:
                self._take_back(child)
        elif child.process is None:
            self._resume(child)
        elif silent and not child.busy(now):
            child.kill("its process did not answer")

    def _halt(self, child: Child, now: float) -> None:
        log.warning("child %s does not answer: what it has not started goes back", child.pid)
        child.halt(now)
        if child.process is not None:
            child.stop()  # should its loop come back, it ends what it runs and leaves

    def _take_back(self, child: Child) -> None:
        self._state.take_back(child, [(job, NO_ANSWER) for job in child.withdraw()])
        if child.process is None:
            child.channel.send(ForgetWaiting())  # once: it must not forget what it is given later

    def _resume(self, child: Child) -> None:
        """An embedded worker has no other loop: it works on when this one has forgotten the jobs
        that were taken back from it, and has then wiped our mark off the board."""
        if not child.board.halted:
            log.warning("the loop of this worker turns again")
            child.resume()
