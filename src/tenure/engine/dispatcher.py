"""Steps 4, 5 and 7 of the walk in one loop: finish what has ended, claim what there is room for,
hand it out, sleep until a hint or a bell. Where the store can do two things at once
(`Store.parallel`) the finishing is a loop of its own.
"""

from __future__ import annotations

import logging
import random
import threading
import time

from tenure import outcome
from tenure.engine.children import Child
from tenure.engine.claims import MOST_CLAIM, Claims, in_turn
from tenure.engine.finisher import Finisher
from tenure.engine.worker_state import WorkerState
from tenure.errors import StoreError
from tenure.job import ClaimedJob
from tenure.store import Store
from tenure.wakeup import Wakeup

log = logging.getLogger("tenure.worker")

# Under load a batch costs one commit whatever its size: outcomes gather for a moment, and room for
# more jobs until half of what children may hold is free.
ENOUGH = 350
GATHER_SECONDS = 0.02
STOPPED_PAUSE = 1.0  # nothing is claimed any more: only a bell has work for us
CALM_SECONDS, ASK_SECONDS = 0.02, 0.25  # after a hint, until cancel requests are asked for
NOT_TAKEN = outcome.Released("its process ended before it started")


class Dispatcher:
    def __init__(self, store: Store, state: WorkerState, wakeup: Wakeup) -> None:
        self._store = store
        self._state = state
        self._wakeup = wakeup
        self._finisher = Finisher(store, state.unwritten, state.counts)
        self._hinted = False  # a hint has come, and cancel requests were not asked for since
        self._asked = time.monotonic()  # when we last woke up for a hint, or asked for them
        self.claims = Claims(store, state)
        self.drained = False

    def run(self, over: threading.Event) -> None:
        failures = 0
        bell = self._state.dispatcher_bell
        while True:
            bell.clear()  # before we look whether it is over: the bell that says so stays
            if over.is_set() and not self._more_to_write():
                return
            try:
                if self._more_to_write():
                    self._gather(bell)
                    self._flush()
                again, idle = self._claim_once()
                failures = 0
                if again or self._more_to_write() or self._new_queues():
                    continue
                if idle:
                    self._check_drained()
                self._rest(self._pause(), over)
            except StoreError as error:
                failures += 1
                _back_off(error, over, failures)

    def run_finishes(self, over: threading.Event) -> None:
        """The other half, where it is a thread of its own."""
        failures = 0
        state = self._state
        while not over.is_set() or state.unwritten.pending:
            state.finisher_bell.clear()
            try:
                while state.unwritten.pending:
                    self._gather(state.finisher_bell)
                    self._flush()
                    state.dispatcher_bell.set()  # what a finish released may be claimed now
            except StoreError as error:
                failures += 1
                _back_off(error, over, failures)
                continue
            failures = 0
            self._look_for_the_end()
            state.finisher_bell.wait(STOPPED_PAUSE)

    # -- finishing ----------------------------------------------------------------------------
    def _more_to_write(self) -> bool:
        return not self._store.parallel and self._state.unwritten.pending

    def _gather(self, bell: threading.Event) -> None:
        state, until = self._state, time.monotonic() + GATHER_SECONDS
        while state.unwritten.waiting < ENOUGH and state.loaded() and state.claiming:
            left = until - time.monotonic()
            if left <= 0:
                return
            bell.clear()
            bell.wait(left)

    def _flush(self) -> None:
        self._state.lose(self._finisher.flush(self._state.worker))

    def _look_for_the_end(self) -> None:
        """Nothing to write, or nothing to claim: in a worker that stops, that may be the end."""
        if not self._state.claiming:
            self._state.wake_supervisor()

    # -- claiming -----------------------------------------------------------------------------
    def _claim_once(self) -> tuple[bool, bool]:
        """Whether to do it again at once, and whether there was nothing here before it."""
        state, claims = self._state, self.claims
        allowed = state.begin_claim()
        try:
            claims.begin()
            # Before the claim looks: a job that ends meanwhile may leave one it does not see.
            idle = state.idle()
            again = allowed and bool(self._claim_and_hand())
        finally:
            state.end_claim()
        if time.monotonic() - self._asked >= ASK_SECONDS:
            # Nothing else reads hints. One may be younger than this claim.
            claims.more = self._wakeup.wait(0.0) or claims.more
            self._cancel_what_was_asked()
        return again or claims.more, idle

    def _claim_and_hand(self) -> int:
        state, options = self._state, self._state.options
        rooms = state.rooms()
        free = min(sum(rooms.values()), MOST_CLAIM)
        if state.unwritten.behind or self._half_full(free):
            return 0  # the bell rings when that has changed
        if options.max_jobs is not None:
            free = min(free, options.max_jobs - state.claimed_jobs)
            if state.claimed_jobs >= options.max_jobs and state.claiming:
                state.stop()
        if free <= 0 or self._suspect_is_next():
            return 0
        jobs: list[ClaimedJob] = []
        try:
            self.claims.take(jobs, free)
        finally:
            state.claimed_jobs += len(jobs)
            self._hand_out(self._set_apart(in_turn(jobs)), rooms)
        return len(jobs)

    def _set_apart(self, jobs: list[ClaimedJob]) -> list[ClaimedJob]:
        """The jobs that run beside others; the rest wait for processes of their own."""
        alone = self.claims.alone(jobs)
        if not alone:
            return jobs
        self._state.set_apart(alone)
        ids = {job.id for job in alone}
        return [job for job in jobs if job.id not in ids]

    def _hand_out(self, jobs: list[ClaimedJob], rooms: dict[Child, int]) -> None:
        """To each child in proportion to its room."""
        state, left = self._state, sum(rooms.values())
        for child, room in rooms.items():
            count = -(-len(jobs) * room // left) if left else 0
            left -= room
            batch, jobs = jobs[:count], jobs[count:]
            if batch and not child.hand(batch, state.worker):
                for job in batch:
                    state.decide(job, NOT_TAKEN)
            if child.quota == 0:
                state.wake_supervisor()  # it needs a successor

    def _half_full(self, free: int) -> bool:
        return free < ENOUGH and free < self._state.crowd() and self._state.loaded()

    def _suspect_is_next(self) -> bool:
        """An embedded worker has no process to give to a suspect: it runs when nothing else does,
        and until then nothing else is claimed."""
        return self._state.embedded is not None and bool(self._state.alone)

    def _new_queues(self) -> bool:
        """After a claim that found nothing: is there a queue it did not look at?"""
        state = self._state
        free = sum(state.rooms().values())
        if state.options.queues is not None or not state.claiming:
            return False
        return free > 0 and not self._half_full(free) and self.claims.learn_names()

    def _check_drained(self) -> None:
        """A claim with room to spare found nothing, and nothing of ours runs."""
        state = self._state
        if state.options.drain and state.claiming and state.idle() and any(state.rooms().values()):
            self.drained = True
            state.stop()

    # -- waiting ------------------------------------------------------------------------------
    def _rest(self, pause: float, over: threading.Event) -> None:
        """Until the bell or a hint, at most for so long. Most hints are about new jobs, and those
        are in a hurry. Whether one was about a cancel request is asked a moment later, when no
        other follows it, or four times a second. A dispatcher that is awake needs no hint; most
        are of our own writes."""
        bell, until = self._state.dispatcher_bell, time.monotonic() + pause
        hinted = slept = False
        bell.asleep = True  # before we look at the bell: set later, it interrupts our sleep
        try:
            while not (hinted or bell.is_set() or over.is_set()):
                left = until - time.monotonic()
                if left <= 0:
                    break
                hinted = self._wakeup.wait(min(left, CALM_SECONDS) if self._hinted else left)
                slept = True
                if self._hinted and not hinted and not bell.is_set():
                    self._cancel_what_was_asked()
        finally:
            bell.asleep = False
        if slept and not self._hinted:  # bells may be so dense that we never sleep
            self._hinted, self._asked = hinted, time.monotonic()
        self.claims.slept()

    def _cancel_what_was_asked(self) -> None:
        """A hint may have been about a cancel request: from the store to the child that runs it."""
        self._state.cancel(self._store.cancel_requests(self._state.worker))
        self._hinted, self._asked = False, time.monotonic()

    def _pause(self) -> float:
        """Until the next look: never later than the next due job."""
        state = self._state
        if not state.claiming:
            self._look_for_the_end()
            return STOPPED_PAUSE
        settings, healthy = state.settings, self._wakeup.healthy()
        poll = settings.hint_poll_interval_ms if healthy else settings.poll_interval_ms
        free = sum(state.rooms().values())
        if free == 0 or self._half_full(free) or self._suspect_is_next():
            return poll / 1000  # a job that ends rings the bell
        due = self._store.next_due([name for name, cap in self.claims.caps().items() if cap])
        return (poll if due is None else min(poll, max(due, 1))) / 1000


def _back_off(error: StoreError, over: threading.Event, failures: int) -> None:
    """The store is away: nothing is lost, the worker stays, and tries again with jitter."""
    pause = min(5.0, 0.05 * 2 ** min(failures, 10)) * random.uniform(0.5, 1.5)
    log.warning("the store does not answer, trying again in %.1f s: %s", pause, error)
    over.wait(pause)
