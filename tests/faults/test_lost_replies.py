"""The server has done it and the reply is lost: what is sent again is not done again."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from crash.harness import eventually, gone
from proxy import Proxy

from .harness import RENEW, Fleet


def of(*texts: bytes) -> Callable[[bytes], bool]:
    """A call of this statement: its Bind, which the proxy shows with the text. The Parse before
    it has the text too, and is part of the same request."""
    return lambda message: message[:1] == b"B" and any(text in message for text in texts)


ONE = of(b"tenure.enqueue_job(", b"tenure.enqueue_job_and_hint(")
PLAIN, ANY = of(b"INSERT INTO tenure.jobs"), of(b"tenure.enqueue_jobs(")
CLAIM, STEP = of(b"tenure.claim_jobs("), of(b"tenure.store_step(")
FINISH_COMPLETED, FINISH = of(b"tenure.complete_runs("), of(b"tenure.finish_runs(")


def is_commit(message: bytes) -> bool:
    """A COMMIT by itself: hints are sent as BEGIN to COMMIT in one message."""
    return message[:1] == b"Q" and message[5:].startswith(b"COMMIT")


# -- enqueue --------------------------------------------------------------------------------------


def test_the_reply_to_an_enqueue(fleet: Callable[..., Fleet], network: Proxy) -> None:
    """The caller gets its receipt all the same, after a second try that finds the first."""
    shop = fleet(through=network.url)
    shop.start(producers=0)
    for _ in range(3):
        for match, ask in (
            (ONE, lambda: [shop.app.enqueue("quick", shop.arguments())]),
            (PLAIN, lambda: shop.app.enqueue_many(batch(shop))),
            (ANY, lambda: [shop.app.enqueue("quick", shop.arguments(), key=shop.new_key())]),
            (ANY, lambda: shop.app.enqueue_many([*batch(shop), keyed(shop)])),
        ):
            lost = network.counts["lost_replies"]
            network.lose_reply(match)
            receipts = ask()
            shop.promised += [receipt.id for receipt in receipts]
            assert not any(receipt.duplicate for receipt in receipts)
            network.wait_for("lost_replies", lost + 1)

    shop.healed()
    shop.check()


def test_the_reply_to_an_enqueue_and_to_its_second_try(
    fleet: Callable[..., Fleet], network: Proxy
) -> None:
    shop = fleet(through=network.url)
    shop.start(producers=0)
    for _ in range(3):
        lost = network.counts["lost_replies"]
        network.lose_reply(ONE)
        network.lose_reply(ANY)
        network.lose_reply(ANY)
        shop.promised.append(shop.app.enqueue("threaded", shop.arguments()).id)
        network.wait_for("lost_replies", lost + 3)

    shop.healed()
    shop.check()


def batch(shop: Fleet) -> list[Any]:
    return [shop.jobs.quick.job(**shop.arguments()) for _ in range(5)]


def keyed(shop: Fleet) -> Any:
    return shop.jobs.threaded.options(key=shop.new_key()).job(**shop.arguments())


def test_an_enqueue_that_arrives_after_its_job_is_done(fleet: Callable[..., Fleet]) -> None:
    """Its backend hangs with the statement, which is given up and made again elsewhere; the job
    runs and is done. Then the backend goes on with the first one."""
    shop = fleet(busy_timeout=2.0)
    shop.start(producers=0)
    shop.promised.append(shop.app.enqueue("quick", shop.arguments()).id)
    (pid,) = shop.sql(
        "SELECT pid FROM pg_stat_activity WHERE datname = current_database()"
        " AND application_name = 'tenure' AND query LIKE %s",
        "CALL tenure.enqueue_job_and_hint%",
    )[0]
    os.kill(pid, signal.SIGSTOP)
    try:
        id = shop.app.enqueue("quick", shop.arguments()).id
        shop.promised.append(id)
        eventually(lambda: shop.is_done(id), what="the second try's job done")
    finally:
        os.kill(pid, signal.SIGCONT)
    eventually(lambda: gone(pid), what="the end of that backend")

    shop.healed()
    shop.check()


# -- claim ----------------------------------------------------------------------------------------


def test_the_reply_to_a_claim(fleet: Callable[..., Fleet], network: Proxy) -> None:
    """Leases that their worker has never heard of are given back by its renewals: nobody else
    could, as it lives."""
    shop = fleet(through=network.url)
    shop.start()
    for number in range(1, 13):
        network.lose_reply(CLAIM)
        shop.promised += [
            receipt.id
            for receipt in shop.observer.enqueue_many(
                [shop.jobs.quick.job(**shop.arguments()) for _ in range(10)]
            )
        ]
        network.wait_for("lost_replies", number)

    shop.healed()
    shop.settle()
    given_back = shop.sql(
        "SELECT r.at - s.at FROM tenure.events r JOIN tenure.events s"
        " ON s.job_id = r.job_id AND s.lease_no = r.lease_no AND s.kind = 'job.started'"
        " WHERE r.kind = 'job.released'"
    )
    slowest = max(row[0] for row in given_back) / 1000
    print(f"  {len(given_back)} leases given back, after {slowest:.1f} s at most")
    assert len(given_back) >= 5
    assert slowest < 3 * RENEW + 1.5
    shop.check()


# -- finish ---------------------------------------------------------------------------------------


def test_the_reply_to_a_finish(fleet: Callable[..., Fleet], network: Proxy) -> None:
    """Of completed jobs, of failed and retried ones; of steps and of a handler's own COMMIT."""
    shop = fleet(through=network.url)
    shop.start()
    number = 0
    for _ in range(4):
        for match in (FINISH_COMPLETED, FINISH, STEP, is_commit):
            number += 1
            network.lose_reply(match)
            network.wait_for("lost_replies", number, within=20)

    shop.healed()
    summaries = shop.check()
    assert sum(summary["refused"] for summary in summaries) == 0


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_replies_are_lost_all_the_time(fleet: Callable[..., Fleet], network: Proxy) -> None:
    shop = fleet(through=network.url)
    shop.start(producers=2)
    for number in range(1, 201):
        network.lose_reply((CLAIM, FINISH_COMPLETED, FINISH, STEP, is_commit, ANY)[number % 6])
        network.wait_for("lost_replies", number, within=30)

    shop.healed()
    shop.check()
