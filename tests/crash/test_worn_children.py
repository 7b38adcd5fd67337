"""Children that have had their jobs, or have grown: another takes their place, and work goes on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from .harness import Workshop, eventually, gone

WORK = """
    kept = []

    @app.task
    def where() -> int:
        time.sleep(0.01)
        return os.getpid()

    @app.task
    def leaks() -> int:
        kept.append(b"x" * (10 << 20))
        time.sleep(0.05)  # as often as memory is looked at
        return os.getpid()

    @app.task(timeout=120)
    def hold(n: int) -> int:
        say("hold", n, os.getpid())
        while not there("go"):
            time.sleep(0.01)
        return os.getpid()
"""


def uncharged(shop: Workshop, ids: list[str]) -> Counter[int]:
    """Nothing is lost and no attempt spent; how many jobs each process had."""
    jobs = [shop.job(id) for id in ids]
    assert {(job.status, job.attempts, job.crashes) for job in jobs} == {("completed", 1, 0)}
    assert set(shop.events("job.succeeded").values()) == {1}
    return Counter(job.result for job in jobs)


def test_a_child_has_so_many_jobs(workshop: Callable[..., Workshop]) -> None:
    shop = workshop(WORK)
    ids = [r.id for r in shop.app.enqueue_many([shop.jobs.where.job() for _ in range(23)])]
    worker = shop.worker(concurrency=2, max_jobs_per_child=5, drain=True, ready=False)

    assert worker.wait() == 0

    had = uncharged(shop, ids)
    assert sorted(had.values()) == [3, 5, 5, 5, 5]
    assert shop.events("job.released") == {}
    assert worker.log.count("has had its 5 jobs: replacing it") == 4
    assert "is gone" not in worker.log


def test_a_child_that_leaks_is_replaced(workshop: Callable[..., Workshop]) -> None:
    shop = workshop(WORK, max_memory_per_child=150)
    ids = [r.id for r in shop.app.enqueue_many([shop.jobs.leaks.job() for _ in range(40)])]
    worker = shop.worker(concurrency=1, drain=True, ready=False)

    assert worker.wait() == 0

    had = uncharged(shop, ids)
    assert len(had) >= 3
    # 150 MB are 15 jobs at most; what ends before its memory was looked at is a few more.
    assert max(had.values()) <= 20, had
    assert "MB after" in worker.log and "its bound is 150 MB: replacing it" in worker.log
    assert "is gone" not in worker.log


def test_what_runs_in_the_old_child_ends_there_while_the_new_one_works(
    workshop: Callable[..., Workshop],
) -> None:
    shop = workshop(WORK, max_jobs_per_child=3)
    worker = shop.worker(concurrency=4)
    held = shop.jobs.hold.enqueue(1)
    shop.wait_said("hold", 1)
    old = int(shop.said()[0][2])
    ids = [r.id for r in shop.app.enqueue_many([shop.jobs.where.job() for _ in range(4)])]
    shop.wait_for("completed", 4)

    assert not gone(old)
    had = uncharged(shop, ids)
    assert had[old] == 2 and len(had) == 2
    shop.touch("go")
    assert shop.app.result(held.id, timeout=10) == old
    eventually(lambda: gone(old), what="the old child gone")
    assert shop.job(held.id).attempts == 1
    assert len(worker.children()) == 1


def test_jobs_that_run_for_long_do_not_multiply_processes(
    workshop: Callable[..., Workshop],
) -> None:
    shop = workshop(WORK, max_jobs_per_child=1)
    worker = shop.worker(concurrency=4)
    ids = [r.id for r in shop.app.enqueue_many([shop.jobs.hold.job(n) for n in range(5)])]
    shop.wait_said("hold", times=2)
    eventually(lambda: len(worker.children()) == 2, what="two children")
    assert shop.statuses() == {"in_progress": 2, "queued": 3}
    shop.touch("go")
    shop.wait_for("completed", 5)
    assert sorted(uncharged(shop, ids).values()) == [1] * 5
