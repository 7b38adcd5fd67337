"""Chains, fan-ins, transactions and steps while workers are killed: in order, once, exact."""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from .harness import Workshop, eventually
from .test_kill_storm import killed, storm

NEVER_POISON: dict[str, Any] = {"crash_limit": 100}


def dice() -> random.Random:
    seed = int(os.environ.get("TENURE_TEST_SEED", "0")) or random.randrange(1, 10**6)
    print(f"\nseed {seed} (TENURE_TEST_SEED repeats it)")
    return random.Random(seed)


def killed_until(shop: Workshop, total: int, kills: int, **how: Any) -> dict[str, int]:
    """Kill workers and children until all is done; then stop what lives."""
    began = time.monotonic()
    try:
        counts = storm(shop, total, kills, dice(), **how)
        eventually(lambda: shop.statuses()["completed"] >= total or dead(shop), within=180)
        assert dead(shop) == []
    except AssertionError:
        print(shop.autopsy())
        raise
    for worker in shop.workers:
        # One that was started a moment ago does not listen to signals yet.
        eventually(lambda one=worker: not one.alive or shop.row_of(one), within=30, what="a worker")
        if worker.alive:
            worker.stop()
    print(f"{total} jobs, killed {killed(counts)}, {time.monotonic() - began:.1f} s")
    return counts


def dead(shop: Workshop) -> list[tuple[Any, ...]]:
    return shop.sql(
        "SELECT id, error_code, crashes, losses, error FROM tenure_jobs"
        " WHERE status IN ('failed', 'dead_letter')"
    )


# -- chains and fan-ins -----------------------------------------------------------------------

FLOW = """
    @app.task
    async def link(ctx: tenure.Context, chain: int, number: int) -> int:
        say("link", chain, number, ctx.job.id)
        await asyncio.sleep(0.005)
        if chain % 2 and number < 2:  # half of the chains grow link by link
            ctx.enqueue(link, chain, number + 1)
        return number

    @app.task
    async def part(fan: int, number: int) -> int:
        await asyncio.sleep(0.005)
        return number

    @app.task
    async def join(ctx: tenure.Context, fan: int) -> int:
        say("join", fan, ctx.job.id)
        await asyncio.sleep(0.005)
        return sum(ctx.results().values())

    @app.task
    async def spread(ctx: tenure.Context, fan: int, width: int) -> None:
        await asyncio.sleep(0.005)
        parts = [ctx.enqueue(part, fan, number) for number in range(width)]
        ctx.enqueue(join.options(after=parts), fan)
"""


def enqueue_flow(shop: Workshop, chains: int, fans: int, width: int) -> int:
    """Half of each kind is laid out beforehand, half grows while it runs; how many jobs."""
    jobs = shop.jobs
    batch = []
    for chain in range(chains):
        first = jobs.link.job(chain, 0)
        batch.append(first)
        if chain % 2 == 0:
            second = jobs.link.options(after=[first]).job(chain, 1)
            batch += [jobs.link.options(after=[second]).job(chain, 2), second]
    for fan in range(0, fans, 2):
        parts = [jobs.part.job(fan, number) for number in range(width)]
        batch += [jobs.join.options(after=parts).job(fan), *parts]
    spreads = [jobs.spread.job(fan, width) for fan in range(1, fans, 2)]
    shop.app.enqueue_many(batch + spreads)
    return 3 * chains + fans * (width + 1) + len(spreads)


def check_flow(shop: Workshop, chains: int, fans: int, width: int) -> None:
    rows = [
        (id, kind, status, *map(json.loads(payload).get, ("chain", "number", "fan")), result)
        for id, kind, status, payload, result in shop.sql(
            "SELECT id, type, status, payload, result FROM job_queue"
        )
    ]
    assert {row[2] for row in rows} == {"completed"}
    succeeded: dict[str, int] = {}
    started: dict[str, int] = {}
    for seq, kind, id in shop.sql(
        "SELECT seq, kind, job_id FROM tenure_events"
        " WHERE kind IN ('job.started', 'job.succeeded') ORDER BY seq"
    ):
        if kind == "job.started":
            started.setdefault(id, seq)
        else:
            assert id not in succeeded, "ended twice"
            succeeded[id] = seq

    links = {(row[3], row[4]): row[0] for row in rows if row[1] == "link"}
    assert sum(row[1] == "link" for row in rows) == len(links) == 3 * chains
    for chain in range(chains):  # in order: each begins after the one before it has ended
        for number in (1, 2):
            before, this = links[chain, number - 1], links[chain, number]
            assert succeeded[before] < started[this], f"chain {chain} out of order"

    parts: dict[int, list[str]] = defaultdict(list)
    for row in rows:
        if row[1] == "part":
            parts[row[5]].append(row[0])
    joins = Counter(row[5] for row in rows if row[1] == "join")
    assert joins == dict.fromkeys(range(fans), 1)  # each fan-in exactly once
    ran = Counter(line[2] for line in shop.said() if line[0] == "join")
    charged = shop.events("job.rescued")
    for id, kind, _status, _chain, _number, fan, result in rows:
        if kind == "join":
            assert len(parts[fan]) == width
            assert result == str(sum(range(width)))
            assert all(succeeded[part] < started[id] for part in parts[fan])
            assert ran[id] <= 1 + charged[id], "ran again though nobody was killed"


def run_flow(shop: Workshop, chains: int, fans: int, width: int, kills: int) -> None:
    total = enqueue_flow(shop, chains, fans, width)
    killed_until(shop, total, kills)
    assert shop.statuses() == {"completed": total}
    check_flow(shop, chains, fans, width)


def test_chains_and_fan_ins_under_kills(workshop: Callable[..., Workshop]) -> None:
    run_flow(workshop(FLOW, **NEVER_POISON), chains=100, fans=20, width=20, kills=6)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_many_chains_and_wide_fan_ins_under_many_kills(workshop: Callable[..., Workshop]) -> None:
    run_flow(workshop(FLOW, **NEVER_POISON), chains=500, fans=100, width=50, kills=20)


LONG_CHAIN = """
    @app.task
    async def grows(ctx: tenure.Context, chain: int, number: int) -> None:
        if number < 99:
            ctx.enqueue(grows, chain, number + 1)

    @app.task
    async def laid() -> None:
        pass
"""


def fastest(take: Callable[[], float], goal: float, tries: int = 3) -> float:
    """The best of a few: other programs share this machine."""
    times = []
    for _ in range(tries):
        times.append(take())
        if times[-1] <= goal:
            break
    return min(times)


def test_a_chain_of_a_hundred_links_takes_less_than_three_seconds(
    workshop: Callable[..., Workshop],
) -> None:
    shop = workshop(LONG_CHAIN)
    shop.worker(concurrency=10)
    shop.app.result(shop.jobs.laid.enqueue().id, timeout=20)
    done = shop.statuses()["completed"]

    def wait_for_more(count: int, begin: Callable[[], object]) -> float:
        nonlocal done
        done += count
        began = time.monotonic()
        begin()
        eventually(lambda: shop.statuses()["completed"] >= done, within=60, what="the chain")
        return time.monotonic() - began

    def lay_out() -> None:
        chain = [shop.jobs.laid.job()]
        for _ in range(99):
            chain.append(shop.jobs.laid.options(after=[chain[-1]]).job())
        shop.app.enqueue_many(chain)

    grown = fastest(lambda: wait_for_more(100, lambda: shop.jobs.grows.enqueue(1, 0)), 3.0)
    laid = fastest(lambda: wait_for_more(100, lay_out), 3.0)

    print(f"\n100 links: {grown:.2f} s when each enqueues the next, {laid:.2f} s by after=")
    assert grown <= 3.0
    assert laid <= 3.0


# -- transfers --------------------------------------------------------------------------------

BANK = """
    @app.task
    def booked(number: int) -> None:
        pass

    @app.task
    def transfer(ctx: tenure.Context, number: int, source: int, target: int, amount: int) -> None:
        with ctx.transaction() as conn:
            # The lower account first: two transfers never wait for each other in a circle.
            first, second = sorted([(source, -amount), (target, amount)])
            change = words("UPDATE account SET balance = balance + ? WHERE id = ?")
            conn.execute(change, (first[1], first[0]))
            if number % 100 == 50 and not there(f"inside-{number}"):
                open(os.path.join(HERE, f"inside-{number}"), "w").close()
                os.kill(os.getpid(), 9)
            time.sleep(0.002)  # so that kills find it between two statements
            conn.execute(change, (second[1], second[0]))
            conn.execute(words("INSERT INTO applied VALUES (?)"), (number,))
            if number % 10 == 0:
                ctx.enqueue(booked, number)
            ctx.result(amount)
        if number % 100 == 70:
            os.kill(os.getpid(), 9)  # it is over: this costs nothing any more
"""


def run_transfers(shop: Workshop, count: int, kills: int, **how: Any) -> None:
    shop.sql("CREATE TABLE account (id INTEGER PRIMARY KEY, balance INTEGER)")
    shop.sql("CREATE TABLE applied (number INTEGER)")
    shop.sql(f"INSERT INTO account VALUES {', '.join(f'({n}, 1000)' for n in range(10))}")
    numbers = random.Random(7)
    plan = [(n, *numbers.sample(range(10), 2), numbers.randrange(1, 100)) for n in range(count)]
    expected = dict.fromkeys(range(10), 1000)
    for _n, source, target, amount in plan:
        expected[source] -= amount
        expected[target] += amount
    receipts = shop.app.enqueue_many([shop.jobs.transfer.job(*each) for each in plan])

    killed_until(shop, count + count // 10, kills, **how)

    assert shop.sql("SELECT sum(balance) FROM account") == [(10_000,)]
    assert dict(shop.sql("SELECT id, balance FROM account")) == expected
    applied = Counter(n for (n,) in shop.sql("SELECT number FROM applied"))
    assert applied == dict.fromkeys(range(count), 1)
    follow_ups = shop.sql("SELECT payload FROM job_queue WHERE type = 'booked'")
    booked = sorted(json.loads(payload)["number"] for (payload,) in follow_ups)
    assert booked == [*range(0, count, 10)]
    assert set(shop.events("job.succeeded").values()) == {1}
    results = dict(shop.sql("SELECT id, result FROM job_queue WHERE type = 'transfer'"))
    assert [results[r.id] for r in receipts] == [str(amount) for *_rest, amount in plan]


def blameless(shop: Workshop) -> None:
    """With the limits as they are: what a killed worker held is no suspect, and whoever was in a
    killed child completes alone. There it is spared: three deaths under a job are evidence, even
    if we are the ones who kill (of 70 jobs that ran alone one met a second random kill)."""
    run_transfers(shop, 400, 20, concurrency=3, lone=False)
    charges = Counter(shop.sql("SELECT crashes, losses FROM job_queue WHERE crashes + losses > 0"))
    print(f"charged, by (crashes, losses): {dict(sorted(charges.items()))}")
    twice = shop.sql("SELECT payload FROM job_queue WHERE crashes > 1")
    assert {json.loads(payload)["number"] % 100 for (payload,) in twice} <= {50}  # of its own doing


def test_no_innocent_is_blamed_for_kills(workshop: Callable[..., Workshop]) -> None:
    blameless(workshop(BANK))


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("round", range(5))
def test_again_and_again_no_innocent_is_blamed_for_kills(
    workshop: Callable[..., Workshop], round: int
) -> None:
    blameless(workshop(BANK))


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_many_transfers_under_many_kills(workshop: Callable[..., Workshop]) -> None:
    run_transfers(workshop(BANK, **NEVER_POISON), 1000, 20)


# -- steps ------------------------------------------------------------------------------------

STEPS = """
    def once(name):
        try:
            os.close(os.open(os.path.join(HERE, name), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def function(number, in_flight):
        say("step", number)
        if in_flight and once(f"in-flight-{number}"):
            os.kill(os.getpid(), 9)
        return number

    @app.task(timeout=60)
    def work(ctx: tenure.Context, in_flight: bool) -> list[int]:
        say("run", ctx.job.lease_no)
        results = []
        for number in range(10):
            results.append(ctx.step(f"step {number}", function, number, in_flight))
            if not in_flight and once(f"after-{number}"):
                # every third time with the supervisor: nobody is left to say anything
                os.kill(os.getppid() if number % 3 == 2 else os.getpid(), 9)
                time.sleep(60)
        return results
"""


def work_through(shop: Workshop, receipt: Any) -> None:
    """Keep one worker alive until the job has ended."""

    def ended() -> bool:
        if not any(worker.alive for worker in shop.workers):
            shop.worker(concurrency=2, ready=False)
        return shop.job(receipt.id).terminal

    eventually(ended, within=90, what="the job's end", every=0.05)


def test_a_job_of_ten_steps_killed_after_each_step(workshop: Callable[..., Workshop]) -> None:
    """With the usual limit of 3 crashes: a job that gets on is no poison."""
    shop = workshop(STEPS)
    receipt = shop.jobs.work.enqueue(False)
    began = time.monotonic()
    work_through(shop, receipt)

    assert shop.app.result(receipt.id) == list(range(10))
    ran = Counter(int(line[1]) for line in shop.said() if line[0] == "step")
    print(f"\n10 kills, {shop.count('run')} runs, {time.monotonic() - began:.1f} s; steps {ran}")
    assert ran == dict.fromkeys(range(10), 1)
    assert shop.count("run") == 11


def test_a_job_of_ten_steps_killed_in_each_step(workshop: Callable[..., Workshop]) -> None:
    shop = workshop(STEPS)
    receipt = shop.jobs.work.enqueue(True)
    work_through(shop, receipt)

    assert shop.app.result(receipt.id) == list(range(10))
    ran = Counter(int(line[1]) for line in shop.said() if line[0] == "step")
    assert ran == dict.fromkeys(range(10), 2)  # once, and the one that was in flight


# -- time-outs --------------------------------------------------------------------------------


@pytest.mark.timed
def test_a_def_handler_past_its_time_out_is_over_in_time_and_alone(
    workshop: Callable[..., Workshop],
) -> None:
    shop = workshop(
        """
        @app.task(timeout=1, retry=tenure.Retry(attempts=1))
        def deaf() -> None:
            say("deaf", os.getpid())
            time.sleep(60)

        @app.task
        def neighbour(n: int) -> int:
            say("neighbour", n)
            while not there("go"):
                time.sleep(0.01)
            return n

        @app.task
        def quick() -> None:
            pass
        """
    )
    worker = shop.worker(concurrency=8)
    neighbours = shop.app.enqueue_many([shop.jobs.neighbour.job(n) for n in range(4)])
    shop.wait_said("neighbour", times=4)
    deaf = shop.jobs.deaf.enqueue()
    shop.wait_said("deaf")
    eventually(lambda: shop.job(deaf.id).status == "dead_letter", what="the time-out")
    shop.app.enqueue_many([shop.jobs.quick.job() for _ in range(20)])
    shop.wait_for("completed", 20)  # beside the neighbours, which still run
    shop.touch("go")
    shop.wait_for("completed", 24)

    job = shop.job(deaf.id)
    assert job.error_code == "TIMEOUT"
    at = {event.kind: event.at for event in shop.app.events(deaf.id)}
    took = (at["job.deadlettered"] - at["job.started"]).total_seconds()
    print(f"\nits outcome was stored {took - 1:.2f} s past the time-out of 1 s")
    assert took <= 1 + 2
    for receipt in neighbours:
        assert (shop.job(receipt.id).attempts, shop.job(receipt.id).crashes) == (1, 0)
    assert set(shop.events("job.rescued")) == set()
    assert worker.alive
