"""Workers of several users on one machine: none is taken for dead by another who cannot see it."""

from __future__ import annotations

from collections.abc import Callable

from .harness import Workshop, eventually
from .long_jobs import LONG, nothing_was_taken
from .strangers import ANN, BOB, command_as, open_to_all


def test_a_worker_that_another_user_cannot_see_is_alive(workshop: Callable[..., Workshop]) -> None:
    """/proc with hidepid=2: a signal says that it lives, and nothing says since when."""
    shop = workshop(LONG)
    open_to_all(shop.folder)
    ids = [r.id for r in shop.app.enqueue_many([shop.jobs.long.job(n) for n in range(4)])]
    workers = [
        shop.worker(prefix=command_as(uid, hidden=True), concurrency=2) for uid in (ANN, BOB)
    ]
    shop.wait_said("start", times=4)
    beats = {row.no: row.beat for row in shop.app.store.workers()}
    assert len(beats) == 2
    eventually(  # some looks of each at the other
        lambda: all(row.beat >= beats[row.no] + 4 for row in shop.app.store.workers()),
        within=20,
        what="both living on",
    )
    shop.touch("go")
    shop.wait_for("completed", 4)

    nothing_was_taken(shop, ids)
    assert [worker.stop()["rescued"] for worker in workers] == [0, 0]


def test_a_worker_that_another_user_saw_die_is_rescued(workshop: Callable[..., Workshop]) -> None:
    """No signal reaches it any more: that is the kernel's word, whoever asks."""
    shop = workshop(LONG, lease_seconds=60, lease_renew_seconds=20)
    open_to_all(shop.folder)
    shop.jobs.long.enqueue(1)
    first = shop.worker(prefix=command_as(ANN, hidden=True))
    shop.wait_said("start")
    shop.worker(prefix=command_as(BOB, hidden=True))
    first.kill()

    shop.wait_said("start", times=2, within=10)
    shop.touch("go")
    shop.wait_for("completed", 1)
