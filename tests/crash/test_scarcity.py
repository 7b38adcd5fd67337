"""What a machine may lack, or have too much of: threads, processes, room in /tmp, small numbers."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import servers
from places import SqlitePlace, only

from .harness import Workshop, environment, eventually
from .strangers import ANN, be_root, command_as, mounting, open_to_all

WORK = """
    @app.task
    def threaded(n: int) -> int:
        say("threaded", n)
        return n

    @app.task
    async def quick(n: int) -> int:
        say("quick", n)
        return n

    @app.task
    async def asks(ctx: tenure.Context) -> str:
        async def answer() -> str:
            return "answered"

        say("asks")
        return await ctx.step("one", answer)  # the store is asked in a thread

    @app.task
    async def hold() -> None:
        say("hold", os.getpid())
        while not there("go"):
            await asyncio.sleep(0.01)
"""

MOST_TASKS = 60  # processes and threads of one user


@pytest.fixture
def uid() -> int:
    """Somebody of whom nothing else runs: the kernel counts all that a user has."""
    return 60_000 + os.getpid() % 5_000


def limited(uid: int, most: int = MOST_TASKS) -> list[str]:
    """As this user, who may have so many processes and threads."""
    return [*command_as(uid), "prlimit", f"--nproc={most}:{most}"]


@contextmanager
def crowd(uid: int, folder: Path) -> Iterator[None]:
    """Another program of the same user, which takes every thread that it can get."""
    program = textwrap.dedent("""
        import sys, threading
        over = threading.Event()
        def more():
            try:
                threading.Thread(target=over.wait, daemon=True).start()
            except RuntimeError:
                return False
            return True
        threading.Thread(target=lambda: (sys.stdin.readline(), over.set()), daemon=True).start()
        while more():
            pass
        print("full", flush=True)
        while not over.wait(0.002):
            while not over.is_set() and more():
                pass
    """)
    taker = subprocess.Popen(
        [*limited(uid), sys.executable, "-c", program],
        cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert taker.stdout is not None
    try:
        assert taker.stdout.readline() == "full\n"
        yield
    finally:
        taker.communicate("enough\n", timeout=20)


def test_no_thread_and_no_process_to_be_had(workshop: Callable[..., Workshop], uid: int) -> None:
    """It waits and says so; nothing is lost, nobody exits."""
    shop = workshop(WORK)
    open_to_all(shop.folder)
    worker = shop.worker(prefix=limited(uid), concurrency=8)
    shop.app.result(shop.jobs.quick.enqueue(0).id, timeout=10)
    with crowd(uid, shop.folder):
        waiting = shop.app.enqueue_many([shop.jobs.threaded.job(n) for n in range(5)])
        eventually(lambda: "no thread for a job" in worker.log, what="a line about threads")
        assert shop.app.result(shop.jobs.quick.enqueue(1).id, timeout=10) == 1
        assert shop.count("threaded") == 0
        asks = shop.jobs.asks.enqueue()
        shop.wait_said("asks")
    assert shop.app.result(asks.id, timeout=30) == "answered"
    assert shop.job(asks.id).attempts == 1
    shop.wait_for("completed", 8, within=30)
    with crowd(uid, shop.folder):

        def no_successor() -> bool:
            """It and the crowd race for the place of the one that was killed."""
            for child in worker.children():
                os.kill(child, signal.SIGKILL)
            return "no process can be started" in worker.log

        eventually(no_successor, within=30, every=0.1, what="a line about processes")
        assert worker.alive
    assert shop.app.result(shop.jobs.threaded.enqueue(5).id, timeout=60) == 5

    for receipt in waiting:
        job = shop.job(receipt.id)
        assert (job.attempts, job.crashes) == (1, 0)
    assert [shop.count("threaded", n) for n in range(6)] == [1] * 6
    assert shop.row_of(worker).meta.get("failures") is None
    assert worker.stop()["completed"] == 9


@only("sqlite", "a server has no gate")
def test_the_gate_without_a_thread_to_wait_in(
    workshop: Callable[..., Workshop], place: SqlitePlace, uid: int
) -> None:
    shop = workshop(WORK, busy_timeout=1.0)
    open_to_all(shop.folder)
    program = textwrap.dedent("""
        import os, jobs, tenure
        jobs.quick.enqueue(0)
        before = len(os.listdir("/proc/self/fd"))
        print("ready", flush=True)
        input()
        for _ in range(2):
            try:
                jobs.quick.enqueue(1)
            except tenure.StoreBusy as error:
                print("busy", flush=True)
        jobs.quick.enqueue(2)
        print(len(os.listdir("/proc/self/fd")) - before, flush=True)
    """)
    gate = os.open(f"{place.path}-tenure.lock", os.O_RDWR)
    with subprocess.Popen(
        [*limited(uid, 1), sys.executable, "-c", program],
        cwd=shop.folder,
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as alone:
        assert alone.stdin is not None
        assert alone.stdout is not None
        assert alone.stdout.readline() == "ready\n"
        fcntl.flock(gate, fcntl.LOCK_EX)
        alone.stdin.write("go\n")
        alone.stdin.flush()
        assert [alone.stdout.readline() for _ in range(2)] == ["busy\n"] * 2
        os.close(gate)  # it waits again, and gets in
        assert alone.stdout.readline() == "0\n"  # no handle was left behind
    assert shop.statuses() == {"queued": 2}


def test_a_worker_that_starts_in_a_crowd(workshop: Callable[..., Workshop], uid: int) -> None:
    shop = workshop(WORK)
    open_to_all(shop.folder)
    receipt = shop.jobs.threaded.enqueue(1)
    with crowd(uid, shop.folder):  # room for one more, and no child
        worker = shop.worker(prefix=limited(uid, MOST_TASKS + 1), ready=False)
        eventually(lambda: "no process can be started" in worker.log, what="a line in the log")
        assert worker.alive

    assert shop.app.result(receipt.id, timeout=60) == 1
    assert worker.stop()["completed"] == 1


def test_handles_with_large_numbers(workshop: Callable[..., Workshop]) -> None:
    shop = workshop(
        WORK
        + """
    @app.task
    def crowded(ctx: tenure.Context) -> int:
        kept = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
        try:
            return ctx.step("one", lambda: kept[-1])
        finally:
            for handle in kept:
                os.close(handle)
    """
    )
    opens = (
        "import os, resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096)); "
        "[os.set_inheritable(os.open(os.devnull, 0), True) for _ in range(1100)]; "
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    worker = shop.worker(prefix=[sys.executable, "-c", opens])
    assert len(os.listdir(f"/proc/{worker.pid}/fd")) > 1100
    for n in range(3):
        assert shop.app.result(shop.jobs.quick.enqueue(n).id, timeout=10) == n
    assert shop.app.result(shop.jobs.crowded.enqueue().id, timeout=20) >= 1024
    receipt = shop.jobs.hold.enqueue()
    shop.wait_said("hold")
    shop.app.cancel(receipt.id)
    eventually(lambda: shop.job(receipt.id).status == "cancelled", what="its cancellation")

    assert "internal error" not in worker.log
    assert worker.stop()["completed"] == 4


def small_tmp(folder: Path, size: str) -> list[str]:
    """A /tmp of that size, for this command only."""
    folder.mkdir()
    return mounting(f"-t tmpfs -o size={size} tmpfs {folder}")


@pytest.mark.parametrize("size", ["16k", "600k"])
def test_a_tmp_that_is_full(workshop: Callable[..., Workshop], size: str) -> None:
    """A page that cannot be had would end whoever writes to it: SIGBUS. The second size has room
    for the board of one child, not for two."""
    shop = workshop(WORK)
    tmp = shop.folder / "tmp"
    prefix = small_tmp(tmp, size)
    variables = {"TMPDIR": str(tmp)}
    worker = shop.worker(prefix=prefix, variables=variables, processes=2, concurrency=4)
    shop.app.enqueue_many([shop.jobs.threaded.job(n) for n in range(200)])
    shop.wait_for("completed", 200)
    assert worker.log.count("no file for a board") == 1
    shop.jobs.hold.enqueue()
    shop.wait_said("hold")
    os.kill(int(shop.said()[-1][1]), signal.SIGKILL)  # a child of its: the memory knows
    shop.wait_said("hold", times=2)
    assert [job.crashes for job in shop.app.find(status="in_progress")] == [1]
    shop.touch("go")
    shop.wait_for("completed", 201)
    assert worker.stop()["completed"] == 201


def test_a_tmp_that_fills_up_later(workshop: Callable[..., Workshop]) -> None:
    shop = workshop(WORK)
    tmp = shop.folder / "tmp"
    prefix = small_tmp(tmp, "1m")
    worker = shop.worker(prefix=prefix, variables={"TMPDIR": str(tmp)}, concurrency=4)
    inside = f"/proc/{worker.pid}/root{tmp}"
    with pytest.raises(OSError, match="No space"), open(f"{inside}/fill", "wb", 0) as file:
        while True:
            file.write(bytes(4096))

    shop.app.enqueue_many([shop.jobs.threaded.job(n) for n in range(500)])
    shop.wait_for("completed", 500)
    assert worker.stop()["completed"] == 500


def test_a_tmp_that_others_have_prepared(workshop: Callable[..., Workshop]) -> None:
    """A sticky directory with another user's things where ours should be, as far as they can."""
    shop = workshop(WORK)
    servers.require(be_root)
    tmp = shop.folder / "tmp"
    tmp.mkdir()
    tmp.chmod(0o1777)
    trap = tmp / "tenure-0"
    trap.symlink_to("/etc")
    os.lchown(trap, ANN, ANN)
    worker = shop.worker(variables={"TMPDIR": str(tmp)})
    other = shop.worker(variables={"TMPDIR": str(tmp)})
    shop.jobs.hold.enqueue()
    shop.wait_said("hold")
    victim = next(w for w in (worker, other) if int(shop.said()[-1][1]) in w.children())
    survivor = other if victim is worker else worker
    victim.kill()
    shop.wait_said("hold", times=2)
    shop.touch("go")
    shop.wait_for("completed", 1)

    assert "not a directory of ours" in survivor.log
    assert survivor.stop()["rescued"] == 1
    assert not [name for name in os.listdir("/etc") if name.endswith(".board")]


@only("sqlite", "who kills it does not matter")
@pytest.mark.parametrize("number", [34, 40, 64])
def test_signals_without_a_name(workshop: Callable[..., Workshop], number: int) -> None:
    shop = workshop(WORK)
    worker = shop.worker()
    receipt = shop.jobs.hold.enqueue()
    shop.wait_said("hold")
    os.kill(int(shop.said()[-1][1]), number)
    shop.wait_said("hold", times=2)
    shop.touch("go")
    shop.app.result(receipt.id, timeout=10)

    (reason,) = [e.data["error"] for e in shop.app.events(receipt.id) if e.kind == "job.rescued"]
    assert "its process was killed by" in reason
    assert (f"signal {number}" in reason) == (number == 40)
    assert worker.stop()["completed"] == 1
