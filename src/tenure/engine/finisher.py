"""Step 7 of the walk: gather outcomes while the last flush runs, then write them in one batch.

Batches form by themselves: an idle worker's outcome is written at once, a busy one's with
whatever has gathered meanwhile. Nothing is dropped: what the store could not take is kept, and
sent again; the store knows a finish it has seen.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter

from tenure.engine.job_log import died
from tenure.errors import StoreBusy, StoreError
from tenure.outcome import Completed, Ended
from tenure.store import Accepted, Registration, Store

log = logging.getLogger("tenure.worker")
MOST = 2000
BEHIND = 4 * MOST
ALONE_AFTER = 3  # failures in a row, then rows are tried one by one: one may be bad

Progress = tuple[str, int, str]  # id, lease_no, JSON text


class Finisher:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._ended: list[Ended] = []
        self._progress: dict[str, Progress] = {}
        self._failures = 0
        self._writing = False
        self._flying: list[Ended] = []  # the batch being written
        self.counts: Counter[str] = Counter()

    def add(self, ended: list[Ended], progress: list[Progress]) -> None:
        with self._lock:
            self._ended += ended
            for report in progress:
                self._progress[report[0]] = report

    @property
    def pending(self) -> bool:
        """Something is to be written, or just being."""
        return bool(self._ended or self._progress or self._writing)

    def holds(self) -> set[str]:
        """Jobs whose outcome is known here and not yet in the store."""
        with self._lock:
            return {end.id for end in (*self._ended, *self._flying)}

    @property
    def waiting(self) -> int:
        return len(self._ended)

    @property
    def behind(self) -> bool:
        """Claiming more would only make it worse."""
        return len(self._ended) > BEHIND

    def flush(self, worker: Registration) -> list[tuple[str, int]]:
        """Write one batch; the runs (id, lease_no) whose lease is gone. Raises StoreError with
        nothing lost."""
        with self._lock:
            ended, self._ended = self._ended[:MOST], self._ended[MOST:]
            progress, self._progress = self._progress, {}
            self._writing, self._flying = True, ended
        try:
            lost = self._write_progress(worker, progress)
            lost += self._write_ended(worker, ended)
        except BaseException:
            self._failures += 1
            with self._lock:  # first again: of two words about a run the first counts
                self._ended = ended + self._ended
                if self._failures < ALONE_AFTER:  # it must not hold up outcomes for ever
                    self._progress = progress | self._progress
            raise
        finally:
            self._writing, self._flying = False, []
        self._failures = 0
        return lost

    def _write_progress(
        self, worker: Registration, progress: dict[str, Progress]
    ) -> list[tuple[str, int]]:
        reports = list(progress.values())
        kept = self._store.progress(worker, reports)
        return [report[:2] for report, ok in zip(reports, kept, strict=True) if not ok]

    def _write_ended(self, worker: Registration, ended: list[Ended]) -> list[tuple[str, int]]:
        settled = sum(map(_settled, ended))
        if settled:
            ended = [end for end in ended if not _settled(end)]
        if self._failures < ALONE_AFTER:
            verdicts = self._store.finish(worker, ended)
        else:
            verdicts = self._write_one_by_one(worker, ended)
        self.counts["completed"] += settled  # only now: a batch that fails comes here again
        said = list(zip(ended, verdicts, strict=True))
        kinds = Counter([type(end.outcome) for end, verdict in said if verdict == "accepted"])
        self.counts.update({kind.__name__.lower(): count for kind, count in kinds.items()})
        if kinds.total() == len(said):
            return []
        self.counts.update(verdict for verdict in verdicts if verdict != "accepted")
        for end, verdict in said:
            if verdict == "disowned":
                self.counts["failed"] += 1
                died(self._store.get(end.id), worker.id)
        refused = [(end.id, end.lease_no) for end, verdict in said if verdict == "refused"]
        if refused:
            log.warning("%d finishes refused, their leases are gone: nothing changed", len(refused))
        return refused

    def _write_one_by_one(self, worker: Registration, ended: list[Ended]) -> list[Accepted]:
        """A row that fails alone too is kept for later, and does not hold up the others: the store
        does not take it, or somebody holds a lock on its job. Two locks in a row are no chance."""
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
                log.warning("somebody holds a lock on job %s; its outcome is kept", end.id)
            except StoreError:
                log.exception("the outcome of job %s cannot be stored; it is kept", end.id)
            verdicts.append("repeated")
            kept.append(end)
        self.add(kept, [])
        return verdicts


def _settled(end: Ended) -> bool:
    """Its own transaction has written this finish: there is nothing left to write."""
    return isinstance(end.outcome, Completed) and end.outcome.settled
