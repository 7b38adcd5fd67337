"""A primary whose commits wait for a standby, and no standby: what was acknowledged is on both.

PostgreSQL answers a cancel of that wait with success and a WARNING. The commit is there, can be
seen, and is gone after a failover: whoever hears the warning has been promised nothing.
"""

from __future__ import annotations

import asyncio
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import servers
import tenure
from contract.builders import worker_info
from crash.harness import eventually
from engine import callers
from tenure.outcome import Completed, Ended

SETTINGS = {"busy_timeout": 0.6, "lease_seconds": 9, "lease_renew_seconds": 1}
CONFIRM = "committed it, but no standby has confirmed"


class Standby(servers.PostgresServer):
    """A copy of a running server that follows it."""

    def __init__(self, primary: servers.PostgresServer) -> None:
        self._primary = primary
        again = {"wal_retrieve_retry_interval": "100ms"}  # after it has lost its primary
        super().__init__(binaries=primary.binaries, settings=again)

    def _initialise(self, *, synced: bool) -> None:
        command = [self.binaries / "pg_basebackup", "-D", self.data, "-d", self._primary.url()]
        command += ["--write-recovery-conf", "--checkpoint=fast", "--no-sync"]
        made = subprocess.run(command, capture_output=True, text=True, **self._as_user())
        if made.returncode:
            raise RuntimeError(f"pg_basebackup failed:\n{made.stdout}{made.stderr}")

    def promote(self) -> None:
        assert self.execute("SELECT pg_promote()") == [(True,)]


class Pair:
    def __init__(self) -> None:
        self.primary = servers.PostgresServer()
        self.standby = Standby(self.primary)
        self.primary.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
        self.primary.execute("SELECT pg_reload_conf()")
        self.wait_for_standby()

    def wait_for_standby(self) -> None:
        state = "SELECT 1 FROM pg_stat_replication WHERE sync_state = 'sync'"
        eventually(lambda: self.primary.execute(state), within=30, what="the standby in step")

    def lose_standby(self) -> None:
        """Killed, not stopped: what was sent to a stopped one would wait for it in its socket."""
        self.standby.stop("immediate")

    def heal(self) -> None:
        if not self.standby.running:
            self.standby.start()
        self.wait_for_standby()

    def fail_over(self) -> None:
        self.primary.stop("immediate")
        self.standby.start()
        self.standby.promote()

    def waiting(self, database: str, like: str = "%") -> list[int]:
        """Sessions whose commit waits for the standby."""
        rows = self.primary.execute(
            "SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND datname = %s"
            " AND application_name LIKE %s",
            [database, like],
        )
        return [row[0] for row in rows]

    def cancel_wait(self, database: str, like: str = "%") -> None:
        """As a person may who sees sessions hang."""
        eventually(lambda: self.waiting(database, like), what="a commit waiting for the standby")
        for pid in self.waiting(database, like):
            self.primary.execute("SELECT pg_cancel_backend(%s)", [pid])

    def close(self) -> None:
        self.standby.close()
        self.primary.close()


@pytest.fixture(scope="module")
def servers_in_step() -> Iterator[Pair]:
    pair = servers.require(Pair)
    yield pair
    pair.close()


@pytest.fixture
def pair(servers_in_step: Pair) -> Iterator[Pair]:
    yield servers_in_step
    servers_in_step.heal()


@pytest.fixture
def database(pair: Pair) -> str:
    return pair.primary.create_database(migrated=True)


@pytest.fixture
def app(pair: Pair, database: str) -> Iterator[tenure.App]:
    app = tenure.App(pair.primary.url(database), **SETTINGS)
    add_tasks(app)
    app.enqueue("work", {"n": 0}, queue="warm")  # whose connection is open, and name known
    app.enqueue("work", {"n": 0}, key="warm")
    yield app
    app.close()


def add_tasks(app: tenure.App) -> None:
    @app.task(retry=tenure.Retry(attempts=1))
    def work(n: int) -> int:
        return n


def jobs_of(app: tenure.App, count: int = 3, **options: Any) -> list[Any]:
    task = app.tasks["work"].options(**options)
    return [task.job(n) for n in range(1, count + 1)]


def ways(app: tenure.App, word: str = "") -> dict[str, list[Any]]:
    """One, several, one under a key, several of which one has a key."""
    return {
        "single": jobs_of(app, 1),
        "batch": jobs_of(app),
        "keyed": jobs_of(app, 1, key=f"mine {word}"),
        "mixed": [*jobs_of(app), *jobs_of(app, 1, key=f"other {word}")],
    }


# -- enqueue --------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["single", "batch", "keyed", "mixed"])
def test_an_enqueue_that_no_standby_confirms(pair: Pair, app: tenure.App, way: str) -> None:
    jobs = ways(app)[way]
    pair.lose_standby()
    with pytest.raises(tenure.StoreUnavailable, match=CONFIRM) as raised:
        app.enqueue_many(jobs)
    assert raised.value.unknown
    with pytest.raises(tenure.StoreUnavailable, match=CONFIRM):
        app.enqueue_many(jobs)  # what can be seen by now is still on one server only

    pair.heal()
    receipts = app.enqueue_many(jobs)
    assert [(each.id, each.duplicate) for each in receipts] == [(job.id, False) for job in jobs]
    found = [job.id for job in app.find() if job.key != "warm" and job.queue != "warm"]
    assert sorted(found) == sorted(job.id for job in jobs), "stored once"
    with pytest.raises(tenure.JobError, match="stored already"):
        app.enqueue_many(jobs)


@pytest.mark.parametrize("way", ["single", "batch", "keyed"])
def test_the_busy_time_out_is_not_spent_twice(
    pair: Pair, database: str, app: tenure.App, way: str
) -> None:
    """The second try, which may still find the answer, has what the first has left, or 1 s."""
    patient = tenure.App(pair.primary.url(database), **SETTINGS | {"busy_timeout": 5})
    add_tasks(patient)
    patient.enqueue("work", {"n": 0}, queue="default")
    pair.lose_standby()
    begun = time.monotonic()
    with pytest.raises(tenure.StoreUnavailable, match=CONFIRM):
        patient.enqueue_many(ways(patient)[way])
    took = time.monotonic() - begun
    patient.close()
    assert took < 8.5, "10 s when each try has its own"


def test_a_key_that_is_taken_by_an_unconfirmed_job(pair: Pair, app: tenure.App) -> None:
    task = app.tasks["work"].options(key="mine")
    pair.lose_standby()
    with pytest.raises(tenure.StoreUnavailable, match=CONFIRM):
        task.enqueue(1)
    with pytest.raises(tenure.StoreUnavailable, match=CONFIRM):
        task.enqueue(1)  # no receipt for a duplicate of what may be gone
    pair.heal()
    assert task.enqueue(1).duplicate


def test_a_role_that_hides_warnings(pair: Pair, database: str, app: tenure.App) -> None:
    pair.primary.execute(f"ALTER DATABASE {database} SET client_min_messages = 'error'")
    app.close()
    app.enqueue("work", {"n": 0}, queue="warm")
    pair.lose_standby()
    with pytest.raises(tenure.StoreUnavailable, match=CONFIRM):
        app.enqueue_many(jobs_of(app))


def test_through_a_pooler(pair: Pair, database: str, app: tenure.App) -> None:
    with servers.require(lambda: servers.Pgbouncer(pair.primary)) as bouncer:
        behind = tenure.App(bouncer.url(database), **SETTINGS)
        add_tasks(behind)
        behind.enqueue("work", {"n": 0}, queue="warm")
        pair.lose_standby()
        for jobs in ways(behind).values():
            with pytest.raises(tenure.StoreUnavailable, match=CONFIRM):
                behind.enqueue_many(jobs)
        behind.close()


def test_somebody_else_cancels_the_wait(pair: Pair, database: str, app: tenure.App) -> None:
    """Before our time is up: the call is made again, and has its answer when there is a standby."""
    patient = tenure.App(pair.primary.url(database), **SETTINGS | {"busy_timeout": 30})
    add_tasks(patient)
    patient.enqueue("work", {"n": 0}, queue="warm")
    got: list[Any] = []
    pair.lose_standby()
    asking = threading.Thread(target=lambda: got.append(patient.enqueue("work", {"n": 1})))
    asking.start()
    pair.cancel_wait(database)
    eventually(lambda: pair.waiting(database), what="the second try")
    assert got == []
    pair.heal()
    asking.join(20)
    assert [(receipt.duplicate, receipt.status) for receipt in got] == [(False, "queued")]
    patient.close()


# -- on a caller's connection ---------------------------------------------------------------------


def in_autocommit(kind: type[callers.Caller], url: str) -> callers.Caller:
    caller: Any = kind(url)
    if kind is callers.Psycopg:
        caller.conn.autocommit = True
    elif kind is callers.PsycopgAsync:
        caller.run(caller.conn.set_autocommit(True))
    elif kind is callers.SqlalchemyConnection:
        caller.conn = caller.conn.execution_options(isolation_level="AUTOCOMMIT")
    elif kind is callers.SqlalchemySession:
        caller.conn.connection(execution_options={"isolation_level": "AUTOCOMMIT"})
    elif kind is callers.SqlalchemyAsyncpgConnection:
        caller.run(caller.conn.execution_options(isolation_level="AUTOCOMMIT"))
    return caller


AUTOCOMMITTING = [
    callers.Psycopg,
    callers.PsycopgAsync,
    callers.Asyncpg,
    callers.AsyncpgPool,
    callers.SqlalchemyConnection,
    callers.SqlalchemySession,
    callers.SqlalchemyAsyncpgConnection,
    callers.Django,
]


def test_an_autocommit_connection_of_the_callers(
    pair: Pair, database: str, app: tenure.App
) -> None:
    """Our statement is the commit there, and the caller asked us."""
    task = app.tasks["work"].options(queue="warm")
    opened = [in_autocommit(kind, pair.primary.url(database)) for kind in AUTOCOMMITTING]
    stored = [caller.enqueue(task, 1).id for caller in opened]
    pair.lose_standby()
    for caller in opened:
        canceller = threading.Thread(target=pair.cancel_wait, args=[database])
        canceller.start()
        with pytest.raises(tenure.StoreUnavailable, match="no standby has confirmed") as raised:
            caller.enqueue(task, 2)
        assert raised.value.unknown, type(caller).__name__
        canceller.join()
    pair.heal()
    stored += [caller.enqueue(task, 3).id for caller in opened]
    assert {job.id for job in app.find()} >= set(stored)
    assert opened[0].conn._notice_handlers == []
    for caller in opened:
        caller.close()


# -- the end of a run -----------------------------------------------------------------------------


def test_a_finish_that_no_standby_confirms(pair: Pair, app: tenure.App) -> None:
    """It is sent again, and counts when it is on both; what may be gone is not `repeated`."""
    store = app.store
    worker = store.register(worker_info())
    ids = [receipt.id for receipt in app.enqueue_many(jobs_of(app))]
    claimed = [job for job in store.claim(worker, [("default", 10)]).jobs if job.id in ids]
    ended = [Ended(job.id, job.lease_no, 1, Completed("1")) for job in claimed]
    assert len(ended) == 3
    pair.lose_standby()
    for _ in range(2):
        with pytest.raises(tenure.StoreUnavailable, match=CONFIRM) as raised:
            store.finish(worker, ended)
        assert raised.value.unknown
    with pytest.raises(tenure.StoreUnavailable, match=CONFIRM):
        store.settled(ended[0].id, ended[0].lease_no)
    pair.heal()
    assert store.finish(worker, ended) == ["repeated"] * 3
    assert store.settled(ended[0].id, ended[0].lease_no)


@pytest.mark.parametrize(
    ("kind", "cancelled"), [("def", True), ("def", False), ("async def", True)]
)
def test_a_handlers_transaction_that_no_standby_confirms(
    pair: Pair,
    database: str,
    app: tenure.App,
    kind: str,
    cancelled: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The reply to its COMMIT says so, or does not come while we wait for it.

    Its one attempt is not spent, its rows are there once, it ends when the standby has it."""
    pair.primary.execute("CREATE TABLE ledger (entry text)", database=database)
    begun, go = threading.Event(), threading.Event()
    insert = "INSERT INTO ledger VALUES ('paid')"

    def pay(ctx: tenure.Context) -> None:
        begun.set()
        assert go.wait(60)
        with ctx.transaction() as conn:
            conn.execute(insert)

    async def apay(ctx: tenure.Context) -> None:
        begun.set()
        assert await asyncio.to_thread(go.wait, 60)
        async with ctx.transaction() as conn:
            await conn.execute(insert)

    decorate = app.task(name="pay", retry=tenure.Retry(attempts=1), queue="pay")
    decorate(pay if kind == "def" else apay)
    id = app.enqueue("pay").id
    with app.worker(queues="pay"):
        assert begun.wait(20)
        pair.lose_standby()
        go.set()
        if cancelled:
            pair.cancel_wait(database, "tenure handler")
        eventually(lambda: "uncharged" in caplog.text, what="a run that is not sure of its end")
        pair.heal()
        eventually(lambda: app.get(id).status == "completed", within=30, what="the job's end")
    job = app.get(id)
    assert (job.attempts, job.error) == (1, None)
    assert pair.primary.execute("SELECT entry FROM ledger", database=database) == [("paid",)]


# -- failover -------------------------------------------------------------------------------------


def test_nothing_acknowledged_is_lost_when_the_standby_takes_over() -> None:
    pair = servers.require(Pair)
    try:
        database = pair.primary.create_database(migrated=True)
        app = tenure.App(pair.primary.url(database), **SETTINGS)
        add_tasks(app)
        promised, doubtful = enqueue_all(app, "before")
        assert (len(promised), len(doubtful)) == (9, 0)
        worker = app.store.register(worker_info())
        claimed = app.store.claim(worker, [("default", 2)]).jobs
        ended = [Ended(job.id, job.lease_no, 1, Completed("1")) for job in claimed]
        pair.lose_standby()
        more, doubtful = enqueue_all(app, "alone")
        with pytest.raises(tenure.StoreUnavailable, match=CONFIRM):
            app.store.finish(worker, ended)
        seen = {job.id for job in app.find()}
        app.close()
        pair.fail_over()
        kept = tenure.App(pair.standby.url(database))
        stored = {job.id: job.status for job in kept.find()}
        assert promised | more <= stored.keys(), "acknowledged and lost"
        lost = seen - stored.keys()
        assert lost == {job.id for job in doubtful}, "they were there, and promised to nobody"
        assert {stored[end.id] for end in ended} == {"in_progress"}
        assert kept.store.finish(worker, ended) == ["accepted", "accepted"]
        assert [receipt.id for receipt in kept.enqueue_many(doubtful)] == [
            job.id for job in doubtful
        ]
        kept.close()
    finally:
        pair.close()


def test_doctor_says_that_no_standby_is_there(pair: Pair, app: tenure.App) -> None:
    def said() -> list[tuple[str, str]]:
        found = app.store.inspect()
        return [(each.level, each.message) for each in found if each.check == "replication"]

    assert said() == [("ok", "nothing stands in its way")]

    pair.lose_standby()
    eventually(lambda: not pair.primary.execute("SELECT 1 FROM pg_stat_replication"))

    ((level, message),) = said()
    assert level == "problem"
    assert "synchronous_standby_names is '*'), and of 1 there are 0" in message


def enqueue_all(app: tenure.App, word: str) -> tuple[set[str], list[Any]]:
    """The ids that we got receipts for, and the jobs of which we were told that nobody knows."""
    promised: set[str] = set()
    doubtful: list[Any] = []
    for jobs in ways(app, word).values():
        try:
            promised |= {receipt.id for receipt in app.enqueue_many(jobs)}
        except tenure.StoreError as error:
            assert error.unknown
            doubtful += jobs
    return promised, doubtful
