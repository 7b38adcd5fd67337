"""Two real workers and a program that never stops enqueueing, on a server that fails.

A test breaks something, heals it and says so. Then the books are made up, the same for every
fault: what was acknowledged is completed, once; nobody's live job was taken away; whoever was
alive before is alive after; every worker takes new jobs within ten seconds of the healing.
"""

from __future__ import annotations

import itertools
import secrets
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg

import tenure
from crash.harness import PREAMBLE, START, Worker, eventually, load_module
from servers import PostgresServer

LEASE, RENEW = 3.0, 1.0
RESUME_WITHIN = 10.0
CONCURRENCY = 8
LONG_EACH = 2  # jobs that each worker runs from before the fault until after it

TASKS = """
RETRY = tenure.Retry(attempts=1000, backoff=tenure.Fixed(0.2))


@app.task
async def quick(ctx: tenure.Context, n: int, word: str) -> int:
    say("start", ctx.job.id, ctx.job.type)
    await asyncio.sleep(0.02)
    return n


@app.task
def threaded(ctx: tenure.Context, n: int, word: str) -> int:
    say("start", ctx.job.id, ctx.job.type)
    time.sleep(0.02)
    return n


@app.task(retry=RETRY)
async def flaky(ctx: tenure.Context, n: int, word: str) -> int:
    say("start", ctx.job.id, ctx.job.type)
    if ctx.attempt == 1:
        raise RuntimeError("the first time always")
    return n


@app.task(retry=RETRY)
def flow(ctx: tenure.Context, n: int, word: str) -> None:
    say("start", ctx.job.id, ctx.job.type)
    ctx.step("charge", say, "charge", ctx.job.id)
    ctx.enqueue(follow_up, n, word)
    with ctx.transaction() as conn:
        conn.execute("INSERT INTO effects (job) VALUES (%s)", [ctx.job.id])


@app.task
async def follow_up(ctx: tenure.Context, parent: int, word: str) -> None:
    say("start", ctx.job.id, ctx.job.type)


@app.task(timeout=300)
async def long(ctx: tenure.Context, n: int, word: str) -> int:
    say("start", ctx.job.id, ctx.job.type)
    while not there("go"):
        await asyncio.sleep(0.02)
    return n


@app.task(timeout=300)
async def medium(ctx: tenure.Context, n: int, word: str) -> int:
    say("start", ctx.job.id, ctx.job.type)
    while not there("enough"):
        await asyncio.sleep(0.02)
    say("end", ctx.job.id, ctx.job.type)
    return n
"""

# How often a handler of this type starts when nothing goes wrong with its own database calls.
STARTS = {"quick": 1, "threaded": 1, "follow_up": 1, "medium": 1, "long": 1, "flaky": 2}


class Prompt:
    """Workers whose listener is probed every half second instead of every twenty."""

    PROBE_SECONDS, ANSWER_SECONDS = 0.5, 0.5
    PROGRAM = (
        "from tenure.wakeups import postgres\n"
        f"postgres.PostgresWakeup.PROBE_SECONDS = {PROBE_SECONDS}\n"
        f"postgres.ANSWER_SECONDS = {ANSWER_SECONDS}\n"
    ) + START


class Producer(threading.Thread):
    """A web application: enqueues whatever happens, and remembers what it was promised."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(daemon=True)
        self._fleet = fleet
        self._over = threading.Event()
        self.acknowledged: dict[str, float] = {}  # id -> when
        self.raised: Counter[str] = Counter()
        self.surprise: BaseException | None = None

    def run(self) -> None:
        try:
            for ask in itertools.cycle((self._one, self._many, self._keyed, self._flaky)):
                if self._over.wait(0.05):  # its pace
                    return
                ask()
        except BaseException as error:
            self.surprise = error

    def stop(self) -> None:
        """After the call it is in; that may take its whole time-out."""
        self._over.set()
        self.join(60)
        assert not self.is_alive(), "an enqueue does not come back"
        if self.surprise is not None:
            raise AssertionError("an enqueue raised something unexpected") from self.surprise

    def _one(self) -> None:
        self._ask(lambda: [self._fleet.app.enqueue("quick", self._fleet.arguments())])

    def _many(self) -> None:
        tasks = self._fleet.jobs
        names = (tasks.quick, tasks.threaded, tasks.flow)
        jobs = [task.job(**self._fleet.arguments()) for task in names]
        self._ask(lambda: self._fleet.app.enqueue_many(jobs))

    def _keyed(self) -> None:
        """Refused, it is asked again under its key, as somebody would who presses the button
        twice."""
        arguments = self._fleet.arguments()
        key = f"key:{arguments['n']}"
        for _ in range(2):
            if self._ask(lambda: [self._fleet.app.enqueue("threaded", arguments, key=key)]):
                return

    def _flaky(self) -> None:
        self._ask(lambda: [self._fleet.app.enqueue("flaky", self._fleet.arguments())])

    def _ask(self, call: Any) -> bool:
        try:
            receipts = call()
        except tenure.TenureError as error:
            self.raised[type(error).__name__] += 1
            return False
        now = time.monotonic()
        self.acknowledged |= {receipt.id: now for receipt in receipts}
        return True


class Fleet:
    """Two workers on a database of their own, reached through `url`; looked at directly."""

    def __init__(
        self, folder: Path, server: PostgresServer, url: str, direct: str, **settings: Any
    ) -> None:
        self.folder = folder
        self.server = server
        self.url = url
        self.direct = direct
        self.word = f"canary{secrets.token_hex(6)}"  # in every payload; in no log
        self.workers: list[Worker] = []
        self.producers: list[Producer] = []
        self.promised: list[str] = []  # ids that the test itself got receipts for
        self.resumed: list[float] = []  # seconds, one for each worker
        self._numbers = itertools.count(1)
        self._log_began = len(server.log)
        self._children: dict[int, list[int]] = {}
        chosen = {"lease_seconds": LEASE, "lease_renew_seconds": RENEW} | settings
        self.jobs = self._write("jobs", url, chosen)
        plain = {name: value for name, value in chosen.items() if name != "listen_url"}
        self.observer: tenure.App = self._write("seen", direct, plain).app
        self.app: tenure.App = self.jobs.app
        self.sql("CREATE TABLE effects (job text NOT NULL)")

    def _write(self, name: str, url: str, settings: dict[str, Any]) -> Any:
        path = self.folder / f"{name}.py"
        head = PREAMBLE.replace("{url}", repr(url)).replace("{settings}", repr(settings))
        path.write_text(head + textwrap.dedent(TASKS))
        return load_module(path, f"{name}_{self.word}")

    def arguments(self) -> dict[str, Any]:
        return {"n": next(self._numbers), "word": self.word}

    def new_key(self) -> str:
        return f"key:{next(self._numbers)}"

    def sql(self, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
        with closing(psycopg.connect(self.direct, autocommit=True)) as connection:
            cursor = connection.execute(statement, parameters or None)
            return cursor.fetchall() if cursor.description else []

    # -- before -----------------------------------------------------------------------------------
    def start(self, workers: int = 2, producers: int = 1, program: str = START) -> None:
        """Workers with jobs that run through the fault, and more coming in all the time."""
        for number in range(1, workers + 1):
            queues = f"default,own-{number}"
            options = {"queues": queues, "concurrency": CONCURRENCY}
            self.workers.append(
                Worker(self.folder, number, options, program=program, prefix=(), variables={})
            )
        for number in range(1, workers + 1):
            task = self.jobs.long.options(queue=f"own-{number}")
            self.app.enqueue_many([task.job(**self.arguments()) for _ in range(LONG_EACH)])
        eventually(self._all_long_run, within=40, what="both workers busy")
        self._children = {worker.pid: worker.children() for worker in self.workers}
        self.producers = [Producer(self) for _ in range(producers)]
        for producer in self.producers:
            producer.start()
        if producers:
            eventually(lambda: self.completed() >= 5, within=20, what="the first jobs done")

    def _all_long_run(self) -> bool:
        for worker in self.workers:
            assert worker.alive, worker.log
        return self.starts("long") == LONG_EACH * len(self.workers)

    def starts(self, type_: str) -> int:
        return sum(line[0] == "start" and line[2] == type_ for line in self.said())

    def said(self) -> list[list[str]]:
        path = self.folder / "said.log"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def completed(self) -> int:
        return int(self.sql("SELECT count(*) FROM tenure.history")[0][0])

    def wait_for_progress(self, count: int = 10, within: float = 20.0) -> None:
        """Until so many more jobs are done."""
        goal = self.completed() + count
        eventually(lambda: self.completed() >= goal, within=within, what=f"{count} more jobs done")

    def pick_up(self) -> float:
        """Seconds from a new job's commit to its start, when every worker sleeps."""
        eventually(self.idle, within=20, what="workers with nothing to do")
        id = self.observer.enqueue("quick", self.arguments()).id
        self.promised.append(id)
        eventually(lambda: self.is_done(id), within=90, what="the job done")
        ((waited,),) = self.sql(
            "SELECT s.at - e.at FROM tenure.events e JOIN tenure.events s USING (job_id)"
            " WHERE e.kind = 'job.enqueued' AND s.kind = 'job.started'"
            " AND tenure.ulid(e.job_id) = %s",
            id,
        )
        return float(waited) / 1000

    def idle(self) -> bool:
        """For a while nobody has looked for jobs: after the last one they look a few times more."""
        return not self.sql(
            "SELECT 1 FROM pg_stat_activity WHERE datname = current_database()"
            " AND query ~ 'tenure.(claim_jobs|next_due)[(]' AND pid <> pg_backend_pid()"
            " AND query_start > clock_timestamp() - interval '0.25 s'"
        )

    # -- after ------------------------------------------------------------------------------------
    def healed(self) -> None:
        """From this call on, each worker has ten seconds to do something new."""
        began = time.monotonic()
        self.alive()
        waiting = {
            self.observer.enqueue("quick", self.arguments(), queue=f"own-{number}").id: number
            for number in range(1, len(self.workers) + 1)
        }
        took: dict[int, float] = {}
        while waiting and time.monotonic() - began < 4 * RESUME_WITHIN:
            for id in [id for id in waiting if self.is_done(id)]:
                took[waiting.pop(id)] = time.monotonic() - began
            time.sleep(0.02)
        assert not waiting, f"nothing new after {4 * RESUME_WITHIN:g} s\n{self.logs()}"
        self.resumed += [took[number] for number in sorted(took)]
        said = ", ".join(f"{seconds:.2f} s" for seconds in self.resumed)
        print(f"\n  resumed after {said}")
        assert max(self.resumed) < RESUME_WITHIN, self.logs()
        eventually(
            lambda: all(any(at > began for at in p.acknowledged.values()) for p in self.producers),
            within=max(0.1, began + RESUME_WITHIN - time.monotonic()),
            what="the program enqueueing again",
        )

    def is_done(self, id: str) -> bool:
        job = self.observer.get(id)
        return job is not None and job.status == "completed"

    def alive(self) -> None:
        for worker in self.workers:
            assert worker.alive, f"worker {worker.pid} has left:\n{worker.log}"

    def settle(self) -> None:
        """The long jobs may end, nothing new comes; everything is done."""
        for producer in self.producers:
            producer.stop()
        (self.folder / "go").touch()
        try:
            eventually(self._nothing_left, within=40, what="all jobs done", every=0.1)
        except AssertionError:
            print(self.sql("SELECT id, type, status, worker, lease_no, error FROM tenure.jobs"))
            print(self.logs())
            raise

    def _nothing_left(self) -> bool:
        return not self.sql("SELECT 1 FROM tenure.jobs LIMIT 1")

    def check(self) -> list[dict[str, Any]]:
        """The books; what the workers say they have done, when they were told to leave."""
        self.settle()
        self.alive()
        acknowledged = {id for producer in self.producers for id in producer.acknowledged}
        acknowledged |= set(self.promised)
        raised = sum((producer.raised for producer in self.producers), Counter[str]())
        rows = self.sql(
            "SELECT tenure.ulid(id), type, status, lease_no, crashes, payload ->> 'n',"
            " tenure.ulid(parent) FROM tenure.job_queue"
        )
        types = {row[0]: row[1] for row in rows}
        assert len(types) == len(rows), "an id twice"
        assert acknowledged <= types.keys(), "acknowledged and lost"
        assert {row[2] for row in rows} == {"completed"}
        asked = Counter(row[5] for row in rows if row[1] != "follow_up")
        assert twice(asked) == [], "asked for once, stored twice"
        flows = [id for id, type_ in types.items() if type_ == "flow"]
        self._check_effects(flows, [row[6] for row in rows if row[1] == "follow_up"])
        self._check_runs(types)
        assert {row[3] for row in rows if row[1] == "long"} == {1}, "a live job was taken away"
        assert {row[4] for row in rows} == {0}, "somebody was charged with a crash"
        self._check_logs()
        print(
            f"  {len(rows)} jobs, {len(acknowledged)} acknowledged, enqueues that raised:"
            f" {dict(raised)}; events {dict(self._kinds())}"
        )
        return [worker.stop() for worker in self.workers]

    def _check_effects(self, flows: list[str], parents: list[str]) -> None:
        effects = Counter(row[0] for row in self.sql("SELECT job FROM effects"))
        assert twice(effects) == [], "a transaction's own rows twice"
        assert sorted(effects) == sorted(flows), "a job without its transaction's rows"
        assert sorted(parents) == sorted(flows), "follow-ups lost or doubled"
        charged = {line[1] for line in self.said() if line[0] == "charge"}
        assert charged == set(flows), "a step that never ran"

    def _check_runs(self, types: dict[str, str]) -> None:
        kinds = self._kinds()
        assert kinds["job.rescued"] == 0, f"live jobs taken away: {kinds}\n{self.logs()}"
        succeeded = Counter(
            row[0]
            for row in self.sql(
                "SELECT tenure.ulid(job_id) FROM tenure.events WHERE kind = 'job.succeeded'"
            )
        )
        assert twice(succeeded) == [], "ended twice"
        assert succeeded.keys() == types.keys(), "an end without its event"
        runs = Counter(line[1] for line in self.said() if line[0] == "start")
        wrong = {
            id: (type_, runs[id])
            for id, type_ in types.items()
            if type_ in STARTS and runs[id] != STARTS[type_]
        }
        assert wrong == {}, f"jobs that ran too often, or never: {wrong}\n{self.logs()}"
        dead = self.sql("SELECT id, dead_reason FROM tenure.workers WHERE dead_at IS NOT NULL")
        assert dead == [], "a live worker was declared dead"
        children = {worker.pid: worker.children() for worker in self.workers}
        assert children == self._children, "a worker lost its process of handlers"

    def _kinds(self) -> Counter[str]:
        return Counter(
            dict(self.sql("SELECT kind, count(*) FROM tenure.events GROUP BY kind")),
        )

    def _check_logs(self) -> None:
        ours = self.server.log[self._log_began :]
        assert "deadlock detected" not in ours
        assert self.word not in ours, "a payload in the server's log"
        for worker in self.workers:
            assert self.word not in worker.log, "a payload in a worker's log"
            assert "internal error" not in worker.log

    def logs(self) -> str:
        return "\n".join(f"-- worker {each.pid}\n{each.log[-6000:]}" for each in self.workers)

    def close(self) -> None:
        for worker in self.workers:
            worker.end()
        for producer in self.producers:
            producer._over.set()
        self.app.close()
        self.observer.close()


def twice(counts: Counter[Any]) -> list[Any]:
    return [what for what, count in counts.items() if count != 1]


def sessions(names: Iterable[str] = ("tenure%",)) -> str:
    """SQL: the pids of sessions of Tenure's in this database, but not of whoever asks."""
    likes = " OR ".join(f"application_name LIKE '{name}'" for name in names)
    return (
        f"SELECT pid FROM pg_stat_activity WHERE ({likes}) AND pid <> pg_backend_pid()"
        " AND datname = current_database()"
    )
