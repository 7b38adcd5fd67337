"""Apps with tasks of their own on one store and one queue: none is in another's way."""

from __future__ import annotations

import os
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from .harness import START, Worker, Workshop, eventually, load_module, p95

TASK = """
@app.task
async def {name}(asked: float) -> None:
    say("{name}", time.time() - asked)
"""
# What the workers of each module know; `whole` is the program that enqueues.
APPS = {"other": ("beta",), "newer": ("beta", "late"), "whole": ("alpha", "beta", "late")}
PER_SECOND = 200
SOON = 100.0  # milliseconds from the enqueue to the start
TICK = os.sysconf("SC_CLK_TCK")


class Apart:
    """A workshop with several apps in it: `jobs`, which knows `alpha`, and those above."""

    def __init__(self, shop: Workshop) -> None:
        self.shop = shop
        head = (shop.folder / "jobs.py").read_text().partition("@app.task")[0]
        for module, names in APPS.items():
            tasks = "".join(TASK.format(name=name) for name in names)
            (shop.folder / f"{module}.py").write_text(head + tasks)
        path = shop.folder / "whole.py"
        self.jobs: ModuleType = load_module(path, f"whole_{abs(hash(str(shop.folder)))}")

    def worker(self, module: str) -> Worker:
        """Its sessions on a server bear the module's name."""
        program = START.replace('"jobs:app"', f'"{module}:app"')
        return self.shop.worker(program=program, variables={"PGAPPNAME": module})

    def alternate(self, names: tuple[str, ...], count: int, per_second: int = PER_SECOND) -> float:
        """Enqueue in turn, at a rate that the machine bears; the slowest type's p95."""
        before = {name: self.shop.count(name) for name in names}
        began = time.monotonic()
        for n in range(count):
            time.sleep(max(0.0, began + n / per_second - time.monotonic()))
            getattr(self.jobs, names[n % len(names)]).enqueue(time.time())
        for name in names:
            self.shop.wait_said(name, times=before[name] + count // len(names), within=60)
        return max(p95(self.delays(name)[before[name] :]) for name in names)

    def delays(self, name: str) -> list[float]:
        return [float(line[1]) * 1000 for line in self.shop.said() if line[0] == name]

    def close(self) -> None:
        self.jobs.app.close()


def apart(workshop: Callable[..., Workshop]) -> Apart:
    return Apart(workshop(textwrap.indent(TASK.format(name="alpha"), "    ")))


def starts_soon(apps: Apart, names: tuple[str, ...], *how: int) -> float:
    """The best of three: other programs share this machine."""
    best = float("inf")
    for _ in range(3):
        best = min(best, apps.alternate(names, *how))
        if best <= SOON:
            break
    return best


def two_apps(apps: Apart, count: int) -> float:
    apps.worker("jobs")
    apps.worker("other")
    return starts_soon(apps, ("alpha", "beta"), count)


def deploy(apps: Apart, count: int) -> tuple[float, float]:
    """What nobody knows waits; with the first worker that does it starts: seconds after that one
    has begun, then the p95 with the old one still there."""
    apps.worker("other")
    early = [apps.jobs.late.enqueue(time.time()) for _ in range(10)]
    apps.alternate(("beta",), 20)
    assert {apps.shop.job(each.id).attempts for each in early} == {0}
    apps.worker("newer")
    began = time.monotonic()
    apps.shop.wait_said("late", times=10)
    return time.monotonic() - began, starts_soon(apps, ("beta", "late"), count)


def beside_foreign(apps: Apart, foreign: int) -> tuple[bool, float, float]:
    """A worker beside jobs it does not know: whether they were written to, how much more of a
    processor it takes (with the sessions it has on a server) than without them once it has walked
    past them, and the p95 of 20 jobs a second it does know."""
    shop = apps.shop
    old = apps.worker("jobs")

    def share() -> tuple[float, float]:
        used, began = processor(shop, old), time.monotonic()
        slowest = starts_soon(apps, ("alpha",), 60, 20)
        return (processor(shop, old) - used) / (time.monotonic() - began), slowest

    apps.alternate(("alpha",), 60, 20)
    alone, _slowest = share()
    for _ in range(foreign // 5000):
        apps.jobs.app.enqueue_many([apps.jobs.beta.job(0.0) for _ in range(5000)])
    before = rows(shop)
    apps.alternate(("alpha",), 60, 20)
    beside, slowest = share()
    eventually(lambda: shop.statuses()["completed"] % 20 == 0, what="the last finish")
    return rows(shop) == before, beside - alone, slowest


def rows(shop: Workshop) -> list[tuple[Any, ...]]:
    """Queued jobs, with all that a write to them would change."""
    if shop.place.kind == "postgres":
        return shop.sql(
            "SELECT id, ctid::text, xmin::text, xmax::text FROM tenure_jobs ORDER BY id"
        )
    waiting = shop.sql("SELECT * FROM tenure_due ORDER BY id")
    return waiting + shop.sql("SELECT * FROM tenure_jobs WHERE type = 'beta' ORDER BY id")


def processor(shop: Workshop, worker: Worker) -> float:
    """Seconds used so far."""
    pids = [worker.pid]
    if shop.place.kind == "postgres":
        found = shop.sql(
            "SELECT pid FROM pg_stat_activity WHERE datname = current_database()"
            " AND application_name = 'jobs'"
        )
        pids += [pid for (pid,) in found]
    return sum(ticks(pid) for pid in pids) / TICK


def ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


# -------------------------------------------------------------------------------------------------


@pytest.mark.timed
def test_two_apps_on_one_queue(workshop: Callable[..., Workshop]) -> None:
    apps = apart(workshop)
    slowest = two_apps(apps, 1000)
    apps.close()
    print(f"\ntwo apps on one queue: p95 {slowest:.0f} ms")
    assert slowest <= SOON


@pytest.mark.timed
def test_a_deploy_that_adds_a_type(workshop: Callable[..., Workshop]) -> None:
    apps = apart(workshop)
    first, slowest = deploy(apps, 500)
    apps.close()
    print(f"\na type that was not known runs {first:.2f} s after it is; then p95 {slowest:.0f} ms")
    assert first <= 3.0
    assert slowest <= SOON


@pytest.mark.timed
def test_a_worker_beside_jobs_it_does_not_know(workshop: Callable[..., Workshop]) -> None:
    apps = apart(workshop)
    untouched, more, slowest = beside_foreign(apps, 20_000)
    apps.close()
    print(f"\nbeside 20,000 foreign jobs: {more:.1%} more of a processor, p95 {slowest:.0f} ms")
    assert untouched
    assert more <= 0.1  # sweeps take a twentieth
    assert slowest <= SOON
