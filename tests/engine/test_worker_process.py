"""`tenure worker` from outside: one supervisor, children that import the app."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import tenure
from contract.builders import connect
from crash.harness import Workshop, environment, eventually
from places import PostgresPlace, only
from tenure.store import Prune

WORK = """
    @app.task
    async def quick(n: int) -> int:
        return n

    @app.task
    async def hold(n: int) -> int:
        say("start", n)
        while not there("go"):
            await asyncio.sleep(0.01)
        return n
"""


def test_a_thousand_sleeping_jobs_in_one_child(workshop: Callable[..., Workshop]) -> None:
    shop = workshop(
        """
        running = 0
        gate = asyncio.Event()

        @app.task
        async def sleeps() -> None:
            global running
            running += 1
            if running == 1000:
                gate.set()
            await gate.wait()  # all of them wait for the last one
        """
    )
    shop.app.enqueue_many([shop.jobs.sleeps.job() for _ in range(1000)])
    worker = shop.worker(concurrency=1000)

    shop.wait_for("completed", 1000)

    assert len(worker.children()) == 1
    assert worker.stop()["completed"] == 1000


def test_several_children_share_the_work_and_drain_ends(workshop: Callable[..., Workshop]) -> None:
    shop = workshop(
        """
        @app.task
        def where() -> int:
            time.sleep(0.005)
            return os.getpid()
        """
    )
    shop.app.enqueue_many([shop.jobs.where.job() for _ in range(300)])
    shop.jobs.where.options(delay=60).enqueue()
    worker = shop.worker(ready=False, processes=2, concurrency=4, drain=True)

    assert worker.wait() == 0

    summary = worker.summary()
    assert (summary["completed"], summary["left"]) == (300, {"due later": 1})
    pids = {job.result for job in shop.app.find(status="completed")}
    assert 1 <= len(pids) <= 2


def test_a_running_job_in_a_child_is_cancelled_at_once(workshop: Callable[..., Workshop]) -> None:
    shop = workshop(WORK, lease_seconds=60, lease_renew_seconds=20)
    shop.worker()
    receipt = shop.jobs.hold.enqueue(1)
    shop.wait_said("start", 1)
    began = time.monotonic()

    shop.app.cancel(receipt.id, reason="not needed")

    with pytest.raises(tenure.JobFailed, match="not needed"):
        shop.app.result(receipt.id, timeout=10)
    assert time.monotonic() - began < 5  # by the hint: the next renewal is 20 s away


def test_a_busy_worker_hears_of_a_cancel_request_too(workshop: Callable[..., Workshop]) -> None:
    """It reads no hints while it claims, and asks four times a second instead."""
    shop = workshop(WORK, lease_seconds=60, lease_renew_seconds=20)
    shop.worker()
    receipt = shop.jobs.hold.enqueue(1)
    shop.wait_said("start", 1)
    shop.app.enqueue_many([shop.jobs.quick.job(n) for n in range(3000)])
    began = time.monotonic()

    shop.app.cancel(receipt.id, reason="not needed")
    while shop.app.get(receipt.id).status != "cancelled" and time.monotonic() - began < 5:
        shop.app.enqueue_many([shop.jobs.quick.job(n) for n in range(1000)])

    assert time.monotonic() - began < 5


def test_an_idle_worker_picks_up_a_job_at_once(workshop: Callable[..., Workshop]) -> None:
    shop = workshop(WORK)
    shop.worker()
    shop.app.result(shop.jobs.quick.enqueue(0).id, timeout=15)
    waits = []
    for n in range(10):
        time.sleep(0.3)  # until it is idle again
        began = time.monotonic()
        assert shop.app.result(shop.jobs.quick.enqueue(n).id, timeout=15) == n
        waits.append(time.monotonic() - began)

    assert sorted(waits)[5] < 0.5  # without the hint it would be poll after poll: 5 s each


def test_without_hints_polling_finds_everything(workshop: Callable[..., Workshop]) -> None:
    shop = workshop(WORK, notify=False, poll_interval_ms=100)
    shop.worker()

    for n in range(3):
        assert shop.app.result(shop.jobs.quick.enqueue(n).id, timeout=15) == n


def test_an_app_that_cannot_be_loaded_ends_the_worker_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import no_such_module_here\n")
    command = [sys.executable, "-c", "import sys; from tenure.app import run_worker; "
               "run_worker(sys.argv[1])"]  # fmt: skip
    for spec, message in (
        ("missing:app", "no module 'missing'"),
        ("broken:app", "no_such_module_here"),
        ("os:path", "tenure.App"),
    ):
        done = subprocess.run(
            [*command, spec], cwd=tmp_path, env=environment(), capture_output=True, text=True,
            timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode != 0
        assert message in done.stderr.splitlines()[-1]


def test_a_store_that_is_busy_for_long_stops_nothing_for_good(
    workshop: Callable[..., Workshop],
) -> None:
    """Every call of the worker fails for a while: it says so, goes on and loses nothing."""
    shop = workshop(WORK, busy_timeout=0.3)
    worker = shop.worker(concurrency=5)
    ids = [r.id for r in shop.app.enqueue_many([shop.jobs.hold.job(n) for n in range(5)])]
    shop.wait_said("start", times=5)
    with shop.place.locked():
        shop.touch("go")  # they finish, and nobody can write it down
        eventually(lambda: "does not answer" in worker.log, what="a complaint in the log")
        with pytest.raises(tenure.StoreBusy, match=r"[Nn]othing was changed"):
            shop.jobs.quick.enqueue(1)

    shop.wait_for("completed", 5)
    assert all(shop.job(id).attempts == 1 for id in ids)
    assert set(shop.events("job.succeeded").values()) == {1}
    assert worker.stop()["completed"] == 5


def test_a_lease_the_worker_never_heard_of_is_given_back(
    workshop: Callable[..., Workshop],
) -> None:
    """The reply to a claim was lost: the store thinks this worker runs a job, it does not."""
    shop = workshop(WORK, lease_seconds=1.5, lease_renew_seconds=0.4)
    shop.app.pause("default")
    worker = shop.worker()
    receipt = shop.jobs.quick.options(queue="lost").enqueue(7)
    row = shop.row_of(worker)
    # Either this claim wins or the worker's own did; both end well, the first is the test.
    claim = shop.app.store.claim(row.registration, [("lost", 1)], None)

    assert shop.app.result(receipt.id, timeout=15) == 7

    job = shop.job(receipt.id)
    assert (job.attempts, job.crashes) == (1, 0)
    if claim.jobs:
        assert shop.events("job.released")[receipt.id] == 1


def test_a_child_that_dies_at_once_is_not_restarted_in_a_hurry(
    workshop: Callable[..., Workshop],
) -> None:
    shop = workshop(
        """
        say("import", os.getpid())
        if there("broken"):
            os._exit(3)

        @app.task
        async def quick(n: int) -> int:
            return n

        @app.task
        async def fatal() -> None:
            os._exit(4)
        """,
        crash_limit=1,
    )
    worker = shop.worker()
    before = shop.count("import")
    shop.touch("broken")
    fatal = shop.jobs.fatal.enqueue()
    eventually(lambda: shop.job(fatal.id).status == "dead_letter", what="the child's death")
    time.sleep(2.5)  # how often it tries in this time is the question
    tries = shop.count("import") - before
    assert worker.alive
    assert 1 <= tries <= 5

    (shop.folder / "broken").unlink()

    assert shop.app.result(shop.jobs.quick.enqueue(1).id, timeout=20) == 1


# -- what a server asks of a worker ---------------------------------------------------------------

NO_TABLES = """
import tenure

app = tenure.App({url!r})


@app.task
def work() -> None: ...
"""


def test_a_worker_without_tables_says_what_to_do_and_makes_none(
    tmp_path: Path, database: str
) -> None:
    (tmp_path / "empty.py").write_text(NO_TABLES.format(url=database))
    command = [sys.executable, "-c", "from tenure.app import run_worker; run_worker('empty:app')"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    app = tenure.App(database)
    with pytest.raises(tenure.SchemaError, match="run `tenure migrate`"):
        app.run_worker(drain=True)
    with pytest.raises(tenure.SchemaError, match="run `tenure migrate`"), app.worker():
        pass
    app.close()

    assert done.returncode != 0
    assert "SchemaError" in done.stderr.splitlines()[-1]
    assert "run `tenure migrate`" in done.stderr
    assert not PostgresPlace(database).exists()


@only("postgres", "a file has no roles")
def test_a_role_that_may_not_change_tables_can_work(
    workshop: Callable[..., Workshop], place: PostgresPlace
) -> None:
    from tenure.stores.postgres import PostgresStore
    from tenure.stores.postgres.grants import grant

    address = urlsplit(place.url)
    role = f"worker_{address.path[1:]}"
    server = address.netloc.rpartition("@")[2]
    owner = PostgresStore(place.url)
    place.sql(f"CREATE ROLE {role} LOGIN")
    try:
        grant(owner.database, role)
        place.url = address._replace(netloc=f"{role}@{server}").geturl()
        shop = workshop(WORK)
        with pytest.raises(Exception, match="permission denied"):
            shop.sql("CREATE TABLE tenure.mine (n integer)")
        shop.app.enqueue_many([shop.jobs.hold.job(n) for n in range(3)])
        first = shop.worker(concurrency=5)
        shop.wait_said("start", times=3)
        first.kill()
        second = shop.worker(concurrency=5)  # rescues, claims, finishes
        shop.touch("go")
        shop.wait_for("completed", 3)
        rescued = len(shop.events("job.rescued"))
        shop.app.store.prune(Prune(completed=0, dead=0, events=0))
        second.stop()
        shop.close()

        assert rescued == 3
        assert "ermission" not in second.log
    finally:
        owner.close()
        place.url = address.geturl()
        place.sql(f"DROP OWNED BY {role}")
        place.sql(f"DROP ROLE {role}")


@only("postgres", "a file has no connections to count")
@pytest.mark.parametrize(("processes", "connections"), [(3, 6), (3, 2)])
def test_children_share_the_connections_that_were_asked_for(
    workshop: Callable[..., Workshop], processes: int, connections: int
) -> None:
    """Beside the five of the supervisor: what the setting says for all of them together, and at
    least one each."""
    shop = workshop(
        """
        @app.task
        def steps(ctx: tenure.Context) -> int:
            for n in range(10):
                ctx.step(str(n), lambda: n)
            return os.getpid()
        """,
        connections=connections,
    )
    shop.worker(processes=processes, concurrency=16)
    shop.app.enqueue_many([shop.jobs.steps.job() for _ in range(600)])
    counted = (
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
        " AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
    )
    ours = len(shop.app.store.database._pool) + len(shop.app.store.database._reserved) + 1  # hints
    most = 0
    with closing(connect("postgres", shop.place.url)) as looking_on:
        while shop.statuses()["completed"] < 600:
            most = max(most, looking_on.execute(counted).fetchone()[0])

    assert len({job.result for job in shop.app.find(status="completed")}) == processes
    assert processes < most <= 5 + max(connections, processes) + ours
