"""Step 7 of the walk: gather outcomes while the last batch is written, then write them in one.

Batches form by themselves: an idle worker's outcome is written at once, a busy worker's together
with whatever has gathered meanwhile. Nothing is dropped: an outcome that the store could not take
is kept and sent again; the store knows a finish it has seen.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from typing import NamedTuple

from tenure.engine.job_log import died
from tenure.errors import StoreBusy, StoreError
from tenure.outcome import Completed, Ended
from tenure.store import Accepted, Registration, Store

log = logging.getLogger("tenure.worker")
MOST = 2000
BEHIND = 4 * MOST
ALONE_AFTER = 3  # failures in a row, then rows are tried one by one: one may be bad

Progress = tuple[str, int, str]  # id, lease_no, JSON text


class Batch(NamedTuple):
    ended: list[Ended]
    progress: dict[str, Progress]


class Unwritten:
    """Runs that have ended, and progress, that the store does not know yet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended: list[Ended] = []
        self._progress: dict[str, Progress] = {}
        self._taken: Batch | None = None  # the batch that is being written

    def add(self, ended: list[Ended], progress: list[Progress]) -> None:
        with self._lock:
            self._ended += ended
            for report in progress:
                self._progress[report[0]] = report

    @property
    def pending(self) -> bool:
        """Something is to be written, or is being written."""
        with self._lock:  # a batch may be on its way back
            return bool(self._ended or self._progress or self._taken)

    @property
    def waiting(self) -> int:
        return len(self._ended)

    @property
    def behind(self) -> bool:
        """So much waits that claiming more would only make it worse."""
        return len(self._ended) > BEHIND

    def ids(self) -> set[str]:
        """Jobs whose outcome is known here and not yet in the store."""
        with self._lock:
            taken = [] if self._taken is None else self._taken.ended
            return {end.id for end in (*self._ended, *taken)}

    # -- for the finisher ---------------------------------------------------------------------
    def take(self) -> Batch:
        with self._lock:
            self._taken = batch = Batch(self._ended[:MOST], self._progress)
            self._ended, self._progress = self._ended[MOST:], {}
        return batch

    def written(self) -> None:
        self._taken = None

    def put_back(self, batch: Batch) -> None:
        """In front: of two words about one run the first counts."""
        with self._lock:
            self._ended = batch.ended + self._ended
            self._progress = batch.progress | self._progress
            self._taken = None


class Finisher:
    def __init__(self, store: Store, unwritten: Unwritten, counts: Counter[str]) -> None:
        self._store = store
        self._unwritten = unwritten
        self._counts = counts  # how many runs have ended in which way
        self._failures = 0

    def flush(self, worker: Registration) -> list[tuple[str, int]]:
        """Write one batch; the runs (id, lease_no) whose lease is gone. Raises StoreError with
        nothing lost."""
        batch = self._unwritten.take()
        try:
            lost = self._write_progress(worker, batch.progress)
            lost += self._write_ended(worker, batch.ended)
        except BaseException:
            self._failures += 1
            if self._failures >= ALONE_AFTER:
                batch.progress.clear()  # it must not hold up outcomes for ever
            self._unwritten.put_back(batch)
            raise
        self._unwritten.written()
        self._failures = 0
        return lost

    def _write_progress(
        self, worker: Registration, progress: dict[str, Progress]
    ) -> list[tuple[str, int]]:
        if not progress:
            return []
        reports = list(progress.values())
        kept = self._store.progress(worker, reports)
        return [report[:2] for report, ok in zip(reports, kept, strict=True) if not ok]

    def _write_ended(self, worker: Registration, ended: list[Ended]) -> list[tuple[str, int]]:
        # What its own transaction has written already: there is nothing left to write.
        settled = [type(end.outcome) is Completed and end.outcome.settled for end in ended]
        if any(settled):
            ended = [end for end, over in zip(ended, settled, strict=True) if not over]
        if self._failures < ALONE_AFTER:
            verdicts = self._store.finish(worker, ended)
        else:
            verdicts = self._write_one_by_one(worker, ended)
        self._counts["completed"] += sum(settled)  # only now: a batch that fails comes here again
        said = list(zip(ended, verdicts, strict=True))
        kinds = Counter([type(end.outcome) for end, verdict in said if verdict == "accepted"])
        self._counts.update({kind.__name__.lower(): count for kind, count in kinds.items()})
        if kinds.total() == len(said):
            return []
        self._counts.update(verdict for verdict in verdicts if verdict != "accepted")
        for end, verdict in said:
            if verdict == "disowned":
                self._counts["failed"] += 1
                died(self._store.get(end.id), worker.id)
        refused = [(end.id, end.lease_no) for end, verdict in said if verdict == "refused"]
        if refused:
            log.warning("%d finishes refused, their leases are gone: nothing changed", len(refused))
        return refused

    def _write_one_by_one(self, worker: Registration, ended: list[Ended]) -> list[Accepted]:
        """A row that fails alone too is kept for later, and does not hold up the others: the store
        does not take it, or another session holds a lock on its job. Two locks in a row are no
        coincidence: then the whole store is locked."""
        verdicts: list[Accepted] = []
        kept: list[Ended] = []
        locked = False
        for end in ended:
            try:
                verdicts += self._store.finish(worker, [end])
                continue
            except StoreBusy:
                if locked:
                    raise
                locked = True
                log.warning("another session holds a lock on job %s; its outcome is kept", end.id)
            except StoreError:
                log.exception("the outcome of job %s cannot be stored; it is kept", end.id)
            verdicts.append("repeated")
            kept.append(end)
        self._unwritten.add(kept, [])
        return verdicts
