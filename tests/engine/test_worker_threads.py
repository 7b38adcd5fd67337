"""A thread of a supervisor that fails: said, counted, kept going, and told to others."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise

import pytest

from crash.harness import START, Workshop, environment, eventually
from places import only
from tenure.engine.worker_threads import FIRST_PAUSE, Failures, WorkerThreads

WORK = """
    @app.task
    async def quick(n: int) -> int:
        return n
"""

# A store with bugs that come and go: what it raises is no StoreError.
BROKEN_STORE = START.replace(
    "summary = run_worker(",
    """
import os
from tenure.app import open_store, open_wakeup
from tenure.engine.worker import run_worker as run_on

class Broken:
    def __init__(self, store):
        self._store = store

    def __getattr__(self, name):
        if os.path.exists(f"broken-{name}"):
            with open("calls.log", "a") as file:
                file.write(name + "\\n")
            raise ZeroDivisionError(name)
        return getattr(self._store, name)

def run_worker(spec, **options):
    return run_on(spec, lambda settings: Broken(open_store(settings)), open_wakeup, **options)

summary = run_worker(""",
)


# A store of which one method does not return while there is a file of its name.
SLOW_STORE = BROKEN_STORE.replace(
    "raise ZeroDivisionError(name)",
    'while os.path.exists(f"broken-{name}"): time.sleep(0.02)',
)


def doctor(shop: Workshop) -> list[dict[str, str]]:
    ran = subprocess.run(
        [sys.executable, "-m", "tenure", "doctor", "--json", "-A", "jobs:app"],
        cwd=shop.folder, env=environment(), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    return [json.loads(line) for line in ran.stdout.splitlines()]


@pytest.mark.parametrize("method", ["claim", "finish", "workers", "sweep"])
def test_a_worker_survives_its_own_bugs(workshop: Callable[..., Workshop], method: str) -> None:
    """Claims, finishes, rescues: whichever thread it is. A bug that stays costs no processor."""
    shop = workshop(WORK)
    worker = shop.worker(program=BROKEN_STORE)
    shop.app.result(shop.jobs.quick.enqueue(0).id, timeout=10)
    shop.touch(f"broken-{method}")
    ids = [r.id for r in shop.app.enqueue_many([shop.jobs.quick.job(n) for n in range(20)])]
    began = time.monotonic()
    eventually(lambda: worker.log.count("internal error in") >= 3, what="three failures")
    assert time.monotonic() - began > 1.2  # pauses of 0.5 and 1 s lie between them
    assert len((shop.folder / "calls.log").read_text().splitlines()) <= 8

    failures = eventually(
        lambda: [f for f in doctor(shop) if "internal error" in f["message"]],
        what="the doctor's word",
    )
    assert "ZeroDivisionError in " in failures[0]["message"]
    assert failures[0]["level"] == "warning"
    (shop.folder / f"broken-{method}").unlink()
    shop.wait_for("completed", 21)
    assert all(shop.job(id).attempts == 1 for id in ids)
    assert worker.stop()["completed"] == 21


def test_a_lease_that_cannot_be_renewed_for_a_while(workshop: Callable[..., Workshop]) -> None:
    shop = workshop(WORK)
    worker = shop.worker(program=BROKEN_STORE)
    shop.touch("broken-renew")
    eventually(lambda: "internal error in renewal" in worker.log, what="a failure")
    (shop.folder / "broken-renew").unlink()
    beat = shop.row_of(worker).beat

    eventually(lambda: shop.row_of(worker).beat > beat + 1, what="it renewing again")
    assert shop.row_of(worker).meta["failures"] >= 1
    assert worker.stop()["completed"] == 0


@pytest.mark.parametrize("method", ["sweep", "settle_dependants", "take_turn"])
def test_a_pass_that_hangs_delays_neither_rescue_nor_renewal(
    workshop: Callable[..., Workshop], method: str
) -> None:
    shop = workshop("""
        @app.task
        def hold() -> None:
            say("holding")
            while not there("go"):
                time.sleep(0.02)
    """)
    shop.touch(f"broken-{method}")
    program = "import tenure.engine.retention as r\nr.PASS_EVERY = r.ASKED_AGAIN = 1.0\n"
    watching = shop.worker(program=program + SLOW_STORE, queues="elsewhere")
    eventually(lambda: (shop.folder / "calls.log").exists(), what="a pass that hangs")
    dies = shop.worker()
    id = shop.jobs.hold.enqueue().id
    shop.wait_said("holding")
    beat = shop.row_of(watching).beat

    dies.kill(whole=True)
    eventually(lambda: shop.job(id).status == "queued", within=3, what="rescue")
    assert shop.job(id).losses == 1
    eventually(lambda: shop.row_of(watching).beat > beat + 1, what="its lease renewed")
    assert (shop.folder / "calls.log").read_text().splitlines() == [method]
    (shop.folder / f"broken-{method}").unlink()
    assert watching.stop()["rescued"] == 1


@only("sqlite", "a server takes no text that is not JSON")
def test_rows_that_somebody_else_wrote(workshop: Callable[..., Workshop]) -> None:
    shop = workshop(WORK)
    worker = shop.worker()
    shop.sql(
        "INSERT INTO tenure_workers (id, host, boot, pid, pid_started, lease_ms, started_at,"
        " seen_at, meta) VALUES ('x', 'x', 'x', 1, '', 1000, 0, 0, 'no JSON')"
    )
    eventually(lambda: "worker x is dead" in worker.log, what="a rescue beside what cannot be read")
    assert shop.app.result(shop.jobs.quick.enqueue(1).id, timeout=10) == 1
    assert worker.stop()["completed"] == 1
    assert "internal error" not in worker.log


def test_pauses_grow_while_it_fails_and_begin_anew(caplog: pytest.LogCaptureFixture) -> None:
    times: list[float] = []
    done = threading.Event()

    def loop(over: threading.Event) -> None:
        times.append(time.monotonic())
        if len(times) == 4:
            done.set()
            over.wait()
            return
        raise ValueError("a bug")

    failures, over = Failures(), threading.Event()
    threads = WorkerThreads({"one": loop}, failures, over)
    with caplog.at_level(logging.ERROR, logger="tenure.worker"):
        assert threads.start()
        assert done.wait(10)
        over.set()
        threads.join(5)

    gaps = [later - earlier for earlier, later in pairwise(times)]
    for gap, expected in zip(gaps, (1, 2, 4), strict=True):
        assert expected * FIRST_PAUSE <= gap <= expected * FIRST_PAUSE + 0.5
    assert failures.told() == {"failures": 3, "last_failure": "ValueError in one"}
    assert caplog.text.count("Traceback") == 3
