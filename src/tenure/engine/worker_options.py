"""What a worker is to do, and what it says it did."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from tenure import policy
from tenure.errors import ConfigError

log = logging.getLogger("tenure.worker")
ENDS = ("completed", "failed", "dead", "cancelled")  # of jobs, in a summary
MOST_NAMED = 10  # queues, in a line of the log


class WorkerOptions(NamedTuple):
    queues: Mapping[str, int | None] | None = None  # name -> most at once; None: every queue
    concurrency: int = 50
    processes: int = 1
    solos: int = 4  # suspects run alone, so many at a time
    drain: bool = False
    max_jobs: int | None = None
    reload: bool = False  # replace the children when their code changes
    name: str | None = None


class Summary(NamedTuple):
    """What a worker did, for people and tests. `left`: jobs that a drain left behind, by reason."""

    completed: int = 0
    retried: int = 0
    snoozed: int = 0
    failed: int = 0
    dead: int = 0
    cancelled: int = 0
    released: int = 0
    crashed: int = 0
    refused: int = 0
    rescued: int = 0
    seconds: float = 0.0
    left: Mapping[str, int] = MappingProxyType({})


def parse_queues(text: str | Sequence[str] | None) -> dict[str, int | None] | None:
    """`critical,default:2` -> {"critical": None, "default": 2}; a number caps that queue here."""
    if text is None:
        return None
    parts = text.split(",") if isinstance(text, str) else list(text)
    found: dict[str, int | None] = {}
    for part in parts:
        name, _, cap = part.strip().removeprefix("q:").partition(":")
        if cap and not (cap.isdigit() and 1 <= int(cap) <= 10_000):
            raise ConfigError(f"{part!r}: write a queue as name or name:most, such as default:2")
        found[policy.queue_name(name)] = int(cap) if cap else None
    return found


def point_out_unknown(
    queues: Mapping[str, int | None] | None, used: Collection[str], named: Collection[str]
) -> None:
    """A queue that has never had a job (`used`) and that no task names (`named`) is most likely
    misspelt. It may get a job tomorrow, so it is served all the same."""
    known = sorted({*used, *named})
    for name in queues or ():
        if name in known:
            continue
        shown = ", ".join(f"q:{each}" for each in known[:MOST_NAMED])
        more = f" and {len(known) - MOST_NAMED} more" if len(known) > MOST_NAMED else ""
        log.warning(
            "no job has ever been in q:%s and no task of this app names it: %s%s",
            name,
            _close(name, known),
            f"known are {shown}{more}" if known else "no queue is known yet",
        )


def _close(name: str, known: Sequence[str]) -> str:
    from difflib import get_close_matches

    close = get_close_matches(name, known, n=1)
    return f"did you mean q:{close[0]}? " if close else ""
