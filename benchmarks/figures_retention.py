"""Retention on PostgreSQL: what an enqueue and a rescue wait while whole days go.

Ten days of 500,000 rows each (half finished jobs, half events) are past their time. Two programs
measure every enqueue and every rescue; beside them retention runs as in a worker, a pass every two
seconds: first while somebody keeps a transaction open on the tables, which nobody may notice, then
until every day is gone. What a call waited for a processor is taken off: that is the machine's.

    make figures                      # or: python benchmarks/figures_retention.py --major 15
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import psycopg

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from contract.builders import new, rescue, started_job, worker
from engine.parts import worker_state
from servers import PostgresServer
from stopwatch import waited
from tenure.engine import retention
from tenure.engine.timers import Timer, lanes
from tenure.stores.postgres import PostgresStore

DAY_MS = 86_400_000
BAR = 0.3
HELD_SECONDS = 8.0
HISTORY = """
INSERT INTO tenure.history (id, type, status, queue, priority, org, lease_no, attempts,
  max_attempts, crashes, timeout_ms, category, actor_type, actor_id, scheduled_at,
  created_at, started_at, completed_at, payload)
SELECT tenure.new_id(%(at)s), 'report', 'completed', 'default', 5, 'default', 1, 1, 5, 0, 1000,
       'default', 'system', 'tenure', %(at)s, %(at)s, %(at)s, %(at)s + n / 100, '{"pages": 1}'
  FROM generate_series(1, %(rows)s) n"""
EVENTS = """
INSERT INTO tenure.events (at, kind, job_id, type, org, actor_type, actor_id)
SELECT %(at)s, 'job.succeeded', tenure.new_id(%(at)s), 'report', 'default', 'system', 'tenure'
  FROM generate_series(1, %(rows)s) n"""
LEFT = "SELECT count(*) FROM pg_class WHERE relname = ANY (%(names)s)"


def measure(url: str, what: str, over: Event, results: Any) -> None:
    """Call after call until `over`; of each its length, less its waits for a processor."""
    store = PostgresStore(url, notify=False)
    own = threading.get_native_id()
    ((backend,),) = store.database.run("SELECT pg_backend_pid()", {})
    queue, took = f"{what}s", []
    results.put(("ready", what))
    while not over.is_set():
        call: Callable[[], object]
        if what == "enqueue":
            call = lambda: store.enqueue([new(queue=queue)])  # noqa: E731
        else:
            dead = worker(store)
            started_job(store, dead, queue=queue)
            call = lambda dead=dead: rescue(store, dead)  # type: ignore[misc]  # noqa: E731
        idle, began = waited(own) + waited(backend), time.monotonic()
        call()
        raw = time.monotonic() - began
        took.append((raw - (waited(own) + waited(backend) - idle), raw))
        if what == "rescue":
            store.claim(worker(store), [(queue, 10)])  # out of the way of the next one
    store.close()
    results.put((what, took))


def fill(store: PostgresStore, days: int, rows: int) -> list[str]:
    now, names = int(time.time() * 1000), []
    with psycopg.connect(store.database.url, autocommit=True) as connection:
        connection.execute("SET synchronous_commit = off")
        for day in range(days):
            at = now // DAY_MS * DAY_MS - (100 + day) * DAY_MS
            connection.execute("SELECT tenure.add_partitions(%s)", [at])
            connection.execute(HISTORY, {"at": at, "rows": rows // 2})
            connection.execute(EVENTS, {"at": at, "rows": rows // 2})
            stamp = time.strftime("%Y%m%d", time.gmtime(at / 1000))
            names += [f"history_{stamp}", f"events_{stamp}"]
        connection.execute("VACUUM ANALYZE")
        connection.execute("CHECKPOINT")
    return names


def beside(url: str, work: Callable[[], None]) -> dict[str, list[tuple[float, float]]]:
    """What the two programs measured while `work` ran."""
    spawn = multiprocessing.get_context("spawn")
    over, results = spawn.Event(), spawn.Queue()
    programs = [
        spawn.Process(target=measure, args=(url, what, over, results))
        for what in ("enqueue", "rescue")
    ]
    for program in programs:
        program.start()
    assert {results.get() for _ in programs} == {("ready", "enqueue"), ("ready", "rescue")}
    work()
    over.set()
    found = dict(results.get() for _ in programs)
    for program in programs:
        program.join()
    return found


def report(title: str, found: dict[str, list[tuple[float, float]]]) -> bool:
    well = True
    for what, took in sorted(found.items()):
        net, raw = sorted(n for n, _raw in took), max(r for _net, r in took)
        well = well and net[-1] <= BAR
        print(
            f"{title}: {what:8} worst {net[-1] * 1000:6.1f} ms ({raw * 1000:.1f} with waits for a "
            f"processor), p99 {net[len(net) * 99 // 100] * 1000:.1f}, n {len(net):,}",
            flush=True,
        )
    return well


def run(major: int | None, days: int, rows: int) -> bool:
    retention.PASS_EVERY = 2.0
    with PostgresServer(major=major, fsync=True) as server:
        url = server.url(server.create_database(migrated=True))
        store = PostgresStore(url, notify=False)
        names = fill(store, days, rows)
        print(f"PostgreSQL {server.version // 10000}, {days} days of {rows:,} rows", flush=True)

        def left() -> int:
            return int(store.database.run(LEFT, {"names": names})[0][0])

        def go_until(done: Callable[[], bool]) -> None:
            state = worker_state(url=url)
            timer = Timer("retention", 0.5, retention.Retention(store, state).run, "retention")
            (lane,) = lanes([timer], state.failures).values()
            thread = threading.Thread(target=lane, args=(state.over,))
            thread.start()
            while not done():
                time.sleep(0.1)
            state.over.set()
            thread.join()

        with psycopg.connect(url) as theirs:
            theirs.execute("SELECT 1 FROM tenure.history LIMIT 1")
            theirs.execute("SELECT 1 FROM tenure.events LIMIT 1")
            until = []  # begins when the programs are ready

            def long_enough() -> bool:
                until.append(time.monotonic() + HELD_SECONDS)
                return time.monotonic() > until[0]

            held = beside(url, lambda: go_until(long_enough))
            assert left() == len(names)
        well = report("beside an open transaction", held)
        well &= report("while the days go", beside(url, lambda: go_until(lambda: not left())))
        print(f"bar {BAR:g} s: "
              f"{'kept' if well else 'MISSED'}")  # fmt: skip
        store.close()
    return well


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--major", type=int, help="15, or what the packages bring")
    parser.add_argument("--days", type=int, default=10)
    parser.add_argument("--rows", type=int, default=500_000, help="a day")
    given = parser.parse_args()
    return 0 if run(given.major, given.days, given.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
