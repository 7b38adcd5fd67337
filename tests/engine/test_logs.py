"""What a worker's log shows of a handler's words: real processes, what they really print."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest

from crash.harness import Workshop

FORGED = "12:00:00 ERROR   forged line"
NASTY = f"one\n{FORGED}\r{FORGED}\x1b[2J\x1b]0;title\x07\x9b31m\x85{FORGED}\u2028{FORGED}\u202eend"
HANDLERS = f"""
    NASTY = {NASTY!r}

    @app.task
    def threaded(ctx: tenure.Context) -> None:
        ctx.log.warning("said: %s", NASTY)
        ctx.log.warning(NASTY)

    @app.task
    async def looped(ctx: tenure.Context) -> None:
        try:
            raise RuntimeError(NASTY)
        except RuntimeError:
            ctx.log.exception("caught")
        import logging
        logging.getLogger("shop").error(NASTY, extra={{"job_id": NASTY, "job_type": NASTY}})

    @app.task
    def settled(ctx: tenure.Context) -> None:
        with ctx.transaction():
            pass
        raise RuntimeError(NASTY)

    @app.on("start")
    def started(event):
        if event.job.type == "settled":
            raise type(NASTY, (Exception,), {{}})
"""


def lines(shop: Workshop) -> list[str]:
    """What a terminal, a pager or a log collector takes for lines."""
    for task in ("threaded", "looped", "settled"):
        getattr(shop.jobs, task).enqueue()
    worker = shop.worker(ready=False, drain=True)
    assert worker.wait(60) == 0
    log = worker.log
    # What came out of a child: the harness sets up its own format for the supervisor.
    assert "caught" in log
    return [line for line in log.splitlines() if not re.match(r"\d{4}-\d\d-\d\d ", line)]


def test_plain_lines(workshop: Callable[..., Workshop]) -> None:
    shop = workshop(HANDLERS)

    found = lines(shop)

    assert not [
        line for line in found if re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u202e]", line)
    ]
    assert [line for line in found if line.startswith(FORGED[:8])] == []
    own = [line for line in found if re.match(r"\d\d:\d\d:\d\d ", line)]
    assert len(own) == 6, "\n".join(found)
    assert all(line.startswith("    ") for line in found if line not in own)
    assert sum("    " + FORGED in line for line in found) >= 5, "shown, as what it is"
    assert any("\\x1b[2J" in line for line in found)


def test_json_lines(workshop: Callable[..., Workshop]) -> None:
    shop = workshop(HANDLERS, log_format="json")

    found = [json.loads(line) for line in lines(shop)]

    assert len(found) == 6
    assert [line["message"] for line in found].count(NASTY) == 2
    assert f"said: {NASTY}" in [line["message"] for line in found]
    (caught,) = [line for line in found if line["message"] == "caught"]
    assert NASTY in caught["exception"]
    assert (caught["job_type"], caught["attempt"]) == ("looped", 1)


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_log_that_cannot_be_formatted_ends_nothing(
    workshop: Callable[..., Workshop], log_format: str
) -> None:
    shop = workshop(
        """
        class Rude:
            def __str__(self):
                raise RuntimeError("not me")

        @app.task
        def work(ctx: tenure.Context) -> str:
            import logging
            ctx.log.warning("%d of %s", "many")
            ctx.log.warning("%s", Rude())
            logging.getLogger("shop").error("ours", extra={"job_id": Rude(), "org_id": Rude()})
            return "done"
        """,
        log_format=log_format,
    )
    receipt = shop.jobs.work.enqueue()
    shop.worker(ready=False, drain=True).wait(60)

    assert shop.app.result(receipt.id) == "done"
