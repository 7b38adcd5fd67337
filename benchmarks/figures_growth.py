"""Figures: nothing that grows with what has gathered. Claims beside many orgs, fan-in of many
parts, what people read of a large store; on SQLite, PostgreSQL 18 and, where it is installed, 15.

One line a figure: name, bar, value, ok or MISSED. `make figures` runs it; it needs 3 GB of disk.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import growth_rows
import servers
from contract.builders import DAY, new, worker
from plans.watching import buffers_of
from tenure.ids import new_id, new_ids
from tenure.job import NewJob, Terms
from tenure.outcome import Completed, Ended
from tenure.store import Filter, Prune
from tenure.stores.postgres import PostgresStore
from tenure.stores.sqlite import SqliteStore

Open = Callable[[], contextlib.AbstractContextManager[Any]]
ORGS = 5_000
MISSED: list[str] = []


def say(name: str, value: float, bar: float, unit: str = "") -> None:
    verdict = "ok" if value <= bar else "MISSED"
    if verdict != "ok":
        MISSED.append(name)
    print(f"{name:<72} bar {bar:>7g} {unit:<6} {value:>10.2f} {unit:<6} {verdict}", flush=True)


def terms(**over: Any) -> Terms:
    return new(**over).terms


# -- stores ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def sqlite_store() -> Iterator[SqliteStore]:
    with tempfile.TemporaryDirectory(prefix="tenure-figures-") as folder:
        store = SqliteStore(str(Path(folder) / "jobs.db"))
        try:
            yield store
        finally:
            store.close()


def postgres_store(server: servers.PostgresServer) -> Open:
    @contextlib.contextmanager
    def opened() -> Iterator[PostgresStore]:
        name = server.create_database(migrated=True)
        store = PostgresStore(server.url(name), notify=False)
        try:
            yield store
        finally:
            store.close()
            server.drop_database(name)

    return opened


def again(store: Any) -> Any:
    """Another program's store on the same database."""
    if isinstance(store, SqliteStore):
        return SqliteStore(store.file.path)
    return PostgresStore(store.database.url, notify=False)


# -- claims ---------------------------------------------------------------------------------------


def serve(store: Any, no: Any, count: int = 500) -> int:
    jobs = store.claim(no, [("default", count)]).jobs
    store.finish(no, [Ended(job.id, job.lease_no, 1, Completed()) for job in jobs])
    return len(jobs)


def crowd(store: Any, no: Any, orgs: int) -> None:
    """So many orgs that were served before, each with a job due tomorrow."""
    for delay in (0, DAY):
        store.enqueue([NewJob(id, terms(org=f"org-{n}"), "{}", delay)
                       for n, id in enumerate(new_ids(orgs))])  # fmt: skip
        while serve(store, no):
            pass


def claim_beside_orgs(label: str, open_store: Open) -> None:
    with open_store() as alone, open_store() as crowded:
        workers = {store: worker(store) for store in (alone, crowded)}
        crowd(alone, workers[alone], 1)
        crowd(crowded, workers[crowded], ORGS)
        taken: dict[Any, list[float]] = {alone: [], crowded: []}
        for _ in range(100):
            for store, no in workers.items():  # in turn: what else the machine does hits both
                store.enqueue([new(org="acme")])
                began = time.perf_counter()
                (job,) = store.claim(no, [("default", 1)]).jobs
                taken[store].append(time.perf_counter() - began)
                store.finish(no, [Ended(job.id, job.lease_no, 1, Completed())])
        cost, beside = (sorted(taken[store])[25] for store in (alone, crowded))
        name = f"{label}: claim of one beside {ORGS:,} idle and future-only orgs / beside one"
        say(name, beside / cost, 2, "x")
        if isinstance(crowded, PostgresStore):
            crowded.enqueue([new(org="acme")])
            no = workers[crowded]
            blocks = buffers_of(crowded, lambda: crowded.claim(no, [("default", 1)]))
            say(f"{label}: the same, blocks touched", blocks, 150, "blocks")


def claim_beside_later(label: str, open_store: Open) -> None:
    """100,000 due tomorrow in 6,000 lanes of the same queue, and a due job found."""
    with open_store() as store:
        no = worker(store)
        lanes = [terms(priority=p, org=f"org-{n}") for p in (1, 5, 9) for n in range(2000)]
        for _ in range(20):
            store.enqueue([NewJob(id, lanes[n], "{}", DAY) for n, id in enumerate(new_ids(5000))])
        taken = []
        for _ in range(30):
            store.enqueue([new(org="acme")])
            taken.append(processor_seconds(store, lambda: store.claim(no, [("default", 1)])))
        name = f"{label}: claim of one beside 100,000 due tomorrow, processor time"
        say(name, median(taken) * 1000, 5, "ms")
        store.enqueue([new(org="acme")])
        if isinstance(store, PostgresStore):
            blocks = buffers_of(store, lambda: store.claim(no, [("default", 1)]))
            say(f"{label}: the same, blocks touched", blocks, 150, "blocks")
            blocks = buffers_of(store, lambda: store.next_due(["default"]))
            say(f"{label}: next_due there, blocks touched", blocks, 30, "blocks")


def finish_planned_when_empty(label: str, store: PostgresStore, server: Any) -> None:
    """Batches of 500 by a session whose plans were made beside an empty, analysed table."""
    no = worker(store)
    name = store.database.url.rpartition("/")[2]
    store.database.run("ALTER TABLE tenure.jobs SET (autovacuum_enabled = off)")
    store.enqueue([new() for _ in range(500)])
    serve(store, no)
    server.execute("VACUUM (ANALYZE) tenure.jobs", database=name)
    for db in store.database._pool._idle:
        db.execute("DISCARD PLANS")
    for _ in range(7):
        store.finish(no, [Ended(new_id(), 1, 1, Completed())])
        store.claim(no, [("default", 1)])
    for _ in range(16):
        store.enqueue([new() for _ in range(500)])
    taken = []
    for _ in range(10):
        jobs = store.claim(no, [("default", 500)]).jobs
        ends = [Ended(job.id, job.lease_no, 1, Completed()) for job in jobs]
        taken.append(processor_seconds(store, lambda: store.finish(no, ends)))  # noqa: B023
    name = f"{label}: finish of 500 beside 8,000, planned when empty, processor time"
    say(name, median(taken) * 1000, 20, "ms")


# -- fan-in ---------------------------------------------------------------------------------------


def fan_in(store: Any, parts: int) -> tuple[float, float]:
    """Seconds to store so many parts and the one that runs after them with their parent's finish,
    and the longest enqueue of a neighbour meanwhile."""
    no, beside = worker(store), again(store)
    store.enqueue([new(queue="parents")])
    (job,) = store.claim(no, [("parents", 1)]).jobs
    ids, own = new_ids(parts), terms(parent=job.id)
    children = (*(NewJob(id, own, "{}") for id in ids), NewJob(new_id(), own, "{}", after=ids))
    beside.enqueue([new(queue="neighbours")])
    worst, over = 0.0, threading.Event()

    def neighbour() -> None:
        nonlocal worst
        while not over.is_set():
            began = time.perf_counter()
            beside.enqueue([new(queue="neighbours", key=new_id())])
            worst = max(worst, time.perf_counter() - began)
            over.wait(0.02)

    thread = threading.Thread(target=neighbour)
    thread.start()
    began = time.perf_counter()
    try:
        outcome = Completed(None, children)
        assert store.finish(no, [Ended(job.id, job.lease_no, 1, outcome)]) == ["accepted"]
    finally:
        taken = time.perf_counter() - began
        over.set()
        thread.join()
        beside.close()
    while serve(store, no):  # the parts, and then the one after them
        pass
    return taken, worst


def fan_ins(stores: dict[str, Open]) -> None:
    taken: dict[str, dict[int, float]] = {}
    for label, open_store in stores.items():
        with open_store() as store:
            fan_in(store, 100)
            for parts in (1_000, 10_000, 20_000):
                rounds = [fan_in(store, parts) for _ in range(3)]
                taken.setdefault(label, {})[parts] = min(seconds for seconds, _worst in rounds)
                late = min(worst for _seconds, worst in rounds)
            if label != "SQLite":  # which has one writer: its neighbours wait for the commit
                say(f"{label}: fan-in of 20,000, a neighbour's enqueue at worst", late, 0.5, "s")
    for label, found in taken.items():
        for parts, seconds in found.items() if label != "SQLite" else ():
            ratio = seconds / taken["SQLite"][parts]
            say(f"{label}: fan-in of {parts:,} ({seconds:.2f} s) / SQLite's", ratio, 3, "x")
        say(f"{label}: fan-in of 20,000 / of 10,000", found[20_000] / found[10_000], 3, "x")


# -- reading --------------------------------------------------------------------------------------


def reading(label: str, open_store: Open) -> None:
    with open_store() as store:
        growth_rows.fill(store, finished=1_000_000, dead=200_000, queued=400_000)
        keep = Prune(30 * 86_400, 90 * 86_400, 90 * 86_400)
        store.prune(keep)  # the first one folds what is old
        hour = int(time.time() - 3600) * 1000
        for name, call, bar in (
            ("rollups of the last hour", lambda: store.rollups(since_ms=hour), 20.0),
            ("rollups of a day, 115,200 rows", lambda: store.rollups(since_ms=0), 300.0),
            ("queues()", store.queues, 20.0),
            ("totals()", store.totals, 20.0),
            ("dead_groups()", lambda: store.dead_groups(Filter()), 20.0),
            ("find(org=) of few jobs", lambda: store.find(Filter(org="rare")), 20.0),
            ("find(key=)", lambda: store.find(Filter(key="key-77")), 20.0),
            ("prune with nothing due", lambda: store.prune(keep), 20.0),
        ):
            costs = [processor_seconds(store, call) for _ in range(15)]
            say(f"{label}: {name}, processor time", min(costs) * 1000, bar, "ms")


def processor_seconds(store: Any, call: Callable[[], object]) -> float:
    """Of this process and of the server's behind the store's connections: what it takes on an idle
    machine whose memory holds the tables."""
    pids = []
    if isinstance(store, PostgresStore):
        pids = [db.info.backend_pid for db in store.database._pool._idle]

    def spent() -> float:
        runs = [int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) for pid in pids]
        return time.process_time() + sum(runs) / 1e9

    before = spent()
    call()
    return spent() - before


def main() -> int:
    with contextlib.ExitStack() as stack:
        running = {"PostgreSQL 18": stack.enter_context(servers.PostgresServer(fsync=True))}
        with contextlib.suppress(servers.Missing):
            older = servers.PostgresServer(major=15, fsync=True)
            running["PostgreSQL 15"] = stack.enter_context(older)
        stores: dict[str, Open] = {"SQLite": sqlite_store}
        stores |= {label: postgres_store(server) for label, server in running.items()}
        for label, open_store in stores.items():
            claim_beside_orgs(label, open_store)
            claim_beside_later(label, open_store)
            if label in running:
                with open_store() as store:
                    finish_planned_when_empty(label, store, running[label])
        fan_ins(stores)
        for label, open_store in stores.items():
            reading(label, open_store)
    return 1 if MISSED else 0


if __name__ == "__main__":
    raise SystemExit(main())
