"""What a worker is to do, and what it says it did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from tenure import policy
from tenure.errors import ConfigError


class Plan(NamedTuple):
    queues: Mapping[str, int | None] | None = None  # name -> most at once; None: every queue
    concurrency: int = 50
    processes: int = 1
    solos: int = 4  # suspects run alone, so many at a time
    drain: bool = False
    max_jobs: int | None = None
    name: str | None = None


class Summary(NamedTuple):
    """What a worker did, for people and tests. `left`: what a drain left behind, by reason."""

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
