"""Step 7 of the walk: end runs behind the fence, with everything that follows from it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from tenure import outcome
from tenure.errors import ConfigError, JobError, StoreError
from tenure.job import DEAD, SYSTEM, Actor, NewJob
from tenure.store import Accepted, AsyncSettlement, Registration, Settlement
from tenure.stores.rows import decoded, finish_row
from tenure.stores.sqlite.base import to_json
from tenure.stores.sqlite.enqueue import Enqueueing

if TYPE_CHECKING:
    import sqlite3

EDGES_PER_PASS = 1000


class Finishing(Enqueueing):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._walked = ("", "")  # where the janitor's walk over unmet edges stands

    def finish(
        self, worker: Registration, ended: Sequence[outcome.Ended], *, now_ms: int | None = None
    ) -> list[Accepted]:
        if not ended:
            return []
        with self.file.write() as db:
            return self._finish(db, worker, ended, self._now(now_ms))

    def settled(self, job_id: str, lease_no: int) -> bool:
        """What another connection can read here is on disk."""
        with self.file.read() as db:
            asked = {"id": job_id, "lease_no": lease_no}
            return db.execute(self._sql["settled"], asked).fetchone() is not None

    def _finish(
        self,
        db: sqlite3.Connection,
        worker: Registration,
        ended: Sequence[outcome.Ended],
        now: int,
        *,
        lenient: bool = True,
    ) -> list[Accepted]:
        """Not `lenient`: follow-ups that cannot be stored are the caller's error (JobError)."""
        verdicts, parameters = self._pass_fence(db, worker, ended, now)
        bad = self._store_children(db, ended, verdicts, now, lenient)
        if bad:
            ended = [bad.get(index, end) for index, end in enumerate(ended)]
            verdicts, parameters = self._pass_fence(db, worker, ended, now)
        if "accepted" in verdicts:
            stays = any(not isinstance(end.outcome, outcome.Completed) for end in ended)
            self._end(db, parameters, stays)
        for index in bad:
            verdicts[index] = "disowned"
        return verdicts

    def _pass_fence(
        self,
        db: sqlite3.Connection,
        worker: Registration,
        ended: Sequence[outcome.Ended],
        now: int,
    ) -> tuple[list[Accepted], dict[str, Any]]:
        """Put into `ended` what still holds its lease; nothing of any job is changed yet."""
        fence = "finish_fence_completed"
        rows: list[object] = [
            f"{end.id}{end.lease_no:010}{end.duration_ms:012}{end.outcome.result or ''}"
            for end in ended
            if isinstance(end.outcome, outcome.Completed)
        ]
        if len(rows) < len(ended):
            fence, rows = "finish_fence", list(map(finish_row, ended))
        named = {"worker": worker.no, "worker_id": worker.id}
        parameters = named | {"rows": to_json(rows), "now": now, "audit": self._trail(db)}
        db.execute("DELETE FROM temp.ended")
        passed = db.execute(self._sql[fence], parameters).rowcount
        if passed == len(ended):
            return ["accepted"] * passed, parameters
        runs = [(end.id, end.lease_no) for end in ended]
        accepted = set(db.execute(self._sql["finish_accepted"]))
        asked = named | {"runs": to_json(runs)}
        repeated = set(db.execute(self._sql["finish_repeated"], asked))
        return [_verdict(run, accepted, repeated) for run in runs], parameters

    def _store_children(
        self,
        db: sqlite3.Connection,
        ended: Sequence[outcome.Ended],
        verdicts: list[Accepted],
        now: int,
        lenient: bool,
    ) -> dict[int, outcome.Ended]:
        """A run whose follow-ups cannot be stored has failed, its neighbours in the batch have
        not: how those ended instead, by their place. All that can be wrong with follow-ups here
        is what they wait for."""
        bad: dict[int, outcome.Ended] = {}
        if not any(map(_children, ended)):
            return bad
        seen: set[str] = set()  # the same run twice in one batch: its first word counts
        for index, (end, verdict) in enumerate(zip(ended, verdicts, strict=True)):
            first = end.id not in seen
            seen.add(end.id)
            if not first or not _children(end) or verdict != "accepted":
                continue
            db.execute("SAVEPOINT children")
            try:
                self._enqueue(db, _children(end), now, self._queues, False)
            except JobError as error:
                db.execute("ROLLBACK TO children")
                if not lenient:
                    raise
                why = outcome.Failure(f"its follow-up jobs were refused: {error}", "BAD_CHILDREN")
                bad[index] = outcome.Ended(
                    end.id, end.lease_no, end.duration_ms, outcome.Failed(why)
                )
            finally:
                db.execute("RELEASE children")
        return bad

    def _end(self, db: sqlite3.Connection, parameters: dict[str, Any], stays: bool) -> None:
        """What stands in `ended` has passed the fence: write its consequences."""
        db.execute(self._sql["finish_events"], parameters)
        db.execute(self._sql["finish_leases"])
        self._leave(db, parameters)
        if stays:
            db.execute(self._sql["finish_stay"], parameters)
        self._settle_edges(db, parameters["now"])

    def _leave(self, db: sqlite3.Connection, parameters: dict[str, Any]) -> None:
        db.execute(self._sql["finish_history"], parameters)
        db.execute(self._sql["finish_leave"])
        db.execute(self._sql["finish_keys"], parameters)
        if db.execute(self._sql["anything_waits"]).fetchone():
            db.execute(self._sql["finish_waiting"])
        if db.execute(self._sql["any_steps"]).fetchone():
            db.execute(self._sql["finish_steps"])
        db.execute(self._sql["finish_rollups"], parameters)

    # -- whoever waited -----------------------------------------------------------------------
    def _settle_edges(self, db: sqlite3.Connection, now: int) -> None:
        """Release what waited for the jobs in `ended` that completed; cancel what was to end
        with those that died, and then what was to end with these."""
        while db.execute(self._sql["anything_waits"]).fetchone():
            released = [row[0] for row in db.execute(self._sql["finish_met"]).fetchall()]
            if released:
                db.execute(self._sql["count_waits"], {"ids": to_json(released), "now": now})
            doomed = db.execute(self._sql["finish_doomed"]).fetchall()
            if not doomed:
                return
            self._end_with_their_needs(db, dict(doomed), now)

    def settle_dependants(self, *, now_ms: int | None = None) -> int:
        with self.file.read() as db:
            if db.execute(self._sql["anything_waits"]).fetchone() is None:
                return 0
        with self.file.write() as db:
            now = self._now(now_ms)
            job, needs = self._walked
            page = db.execute(
                self._sql["unmet_edges"], {"job": job, "needs": needs, "most": EDGES_PER_PASS}
            ).fetchall()
            self._walked = page[-1][:2] if len(page) == EDGES_PER_PASS else ("", "")
            met = [row[:2] for row in page if row[2] == "completed"]
            if met:
                released = sorted({job for job, _needs in met})
                db.execute(self._sql["meet_edges"], {"edges": to_json(met)})
                db.execute(self._sql["count_waits"], {"ids": to_json(released), "now": now})
            doomed = {row[0]: True for row in page if row[2] in DEAD and row[3] == "cancel"}
            doomed |= {row[0]: False for row in page if row[2] in ("cancelled", "gone")}
            if doomed:
                self._end_with_their_needs(db, doomed, now)
                self._settle_edges(db, now)
        return len(met) + len(doomed)

    def _end_with_their_needs(
        self, db: sqlite3.Connection, doomed: dict[str, bool], now: int
    ) -> None:
        """id -> whether its need has failed, which is told apart from one that was cancelled. What
        was to end with these in turn is found in `ended` afterwards."""
        db.execute("DELETE FROM temp.ended")
        for failed, why, code in (
            (True, "a job it was to run after has failed", "dependency_failed"),
            (False, "a job it was to run after was cancelled", "dependency_cancelled"),
        ):
            ids = sorted(id for id, so in doomed.items() if bool(so) is failed)
            parameters = self._operator(SYSTEM, why, code) | {"now": now}
            self._take_out(db, ids, "job.cancelled", parameters)
        self._leave(db, parameters)

    def _withdraw(
        self, db: sqlite3.Connection, ids: list[str], kind: str, parameters: dict[str, Any]
    ) -> None:
        """Jobs that leave without having run to an end, through the same door as finished ones."""
        db.execute("DELETE FROM temp.ended")
        self._take_out(db, ids, kind, parameters)
        self._leave(db, parameters)

    def _take_out(
        self, db: sqlite3.Connection, ids: list[str], kind: str, parameters: dict[str, Any]
    ) -> None:
        parameters = parameters | {"ids": to_json(ids), "kind": kind}
        for statement in (
            "operator_events",
            "operator_end",
            "operator_leave_due",
            "operator_leave_later",
            "operator_leave_suspects",
        ):
            db.execute(self._sql[statement], parameters)

    def _operator(self, actor: Actor, reason: str, code: str) -> dict[str, Any]:
        return {
            "now": self.file.clock(),
            "actor_type": actor.type,
            "actor_id": actor.id,
            "reason": reason,
            "code": code,
            "data": to_json({"reason": reason}) if reason else None,
            "worker": 0,
        }

    # -- what a running handler writes ----------------------------------------------------------
    def steps(self, job_id: str) -> dict[str, str]:
        with self.file.read() as db:
            return dict(db.execute(self._sql["steps"], {"job": job_id}).fetchall())

    def save_step(
        self,
        worker: Registration,
        run: tuple[str, int],
        name: str,
        result: str,
        *,
        now_ms: int | None = None,
    ) -> bool:
        with self.file.write() as db:
            parameters = {
                "worker": worker.no,
                "worker_id": worker.id,
                "job": run[0],
                "lease_no": run[1],
                "name": name,
                "result": result,
                "now": self._now(now_ms),
            }
            saved = db.execute(self._sql["save_step"], parameters).rowcount == 1
            if saved:
                db.execute(self._sql["forgive_deaths"], parameters)
        return saved

    def results(self, job_id: str) -> dict[str, tuple[str, Any]]:
        with self.file.read() as db:
            rows = db.execute(self._sql["results"], {"job": job_id}).fetchall()
        return {needs: (status, decoded(result)) for needs, status, result in rows}

    @contextmanager
    def transaction(self, limit: float, conn: Any = None) -> Iterator[Settlement]:
        if conn is None:
            with self.file.lend(limit) as db:
                yield _Settlement(self, db)
        else:
            from tenure.stores.sqlite.joining import JoinedSettlement

            with self._joined(JoinedSettlement, conn, limit) as settlement:
                yield settlement

    def atransaction(
        self, limit: float, conn: Any = None
    ) -> AbstractAsyncContextManager[AsyncSettlement]:
        if conn is not None:
            from tenure.stores.sqlite.joining import AsyncJoinedSettlement

            held: AbstractAsyncContextManager[AsyncSettlement] = self._joined(
                AsyncJoinedSettlement, conn, limit
            )
            return held
        raise ConfigError(
            "on SQLite ctx.transaction() works in `def` handlers: it holds the file's only write "
            "lock, and an `async def` handler shares its thread with others. Make the handler a "
            "`def`, or give it an AsyncSession of SQLAlchemy's (with aiosqlite): "
            "ctx.transaction(conn=session)."
        )

    def _joined(self, kind: Any, conn: Any, limit: float) -> Any:
        def finish(db: Any, worker: Registration, end: outcome.Ended) -> Accepted:
            return self._finish(db, worker, [end], self.file.clock(), lenient=False)[0]

        return kind(self.file, conn, self._sql["enqueue_lock"], finish, limit).held()


class _Settlement:
    def __init__(self, store: Finishing, connection: sqlite3.Connection) -> None:
        self._store = store
        self.connection = connection

    def finish(self, worker: Registration, end: outcome.Ended) -> Accepted:
        db = self.connection
        if not db.in_transaction:  # an ON CONFLICT ROLLBACK: nothing may commit by itself now
            raise StoreError("the transaction was rolled back inside its block: nothing was stored")
        db.row_factory, db.text_factory = None, str  # whatever the handler has set
        now = self._store.file.clock()
        return self._store._finish(db, worker, [end], now, lenient=False)[0]


def _children(end: outcome.Ended) -> tuple[NewJob, ...]:
    return end.outcome.children if isinstance(end.outcome, outcome.Completed) else ()


def _verdict(
    run: tuple[str, int], accepted: set[tuple[str, int]], repeated: set[tuple[str, int]]
) -> Accepted:
    if run in accepted:
        return "accepted"
    return "repeated" if run in repeated else "refused"
