"""`tenure bench`: its sections, their figures, and the bars those must clear."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tenure.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tenure.bench.place import Place

RATES = ("raw", "own", "enqueue", "drain")
DEFAULT = (*RATES, "pickup")
ON_REQUEST = (
    "commit", "silent", "rush", "priority", "delayed", "cold", "idle", "sleepers", "recovery",
    "scale", "beside", "snapshot",
)  # fmt: skip
EVERY = (*DEFAULT, *ON_REQUEST)

# Sections with a worker, each a function of live.py: which of its numbers to show, as (key,
# name, unit).
SECTIONS: dict[str, tuple[tuple[str, str, str], ...]] = {
    "pickup": (
        ("p50", "pick-up, idle worker, p50", "ms"),
        ("p95", "pick-up, idle worker, p95", "ms"),
        ("p99", "pick-up, idle worker, p99", "ms"),
    ),
    "commit": (
        ("p50", "pick-up after a caller's COMMIT, 200/s, p50", "ms"),
        ("p95", "pick-up after a caller's COMMIT, 200/s, p95", "ms"),
    ),
    "silent": (
        ("p50", "pick-up without hints, p50", "ms"),
        ("max", "pick-up without hints, worst", "ms"),
    ),
    "rush": (
        ("p50", "100 jobs one by one, all finished, p50", "s"),
        ("max", "100 jobs one by one, all finished, worst", "s"),
    ),
    "priority": (
        ("p50", "priority 1 beside 100,000, p50", "ms"),
        ("p95", "priority 1 beside 100,000, p95", "ms"),
        ("backlog_left", "  backlog left at the end", "jobs"),
    ),
    "delayed": (
        ("p50", "delayed job late by, p50", "ms"),
        ("max", "delayed job late by, worst", "ms"),
    ),
    "cold": (
        ("bare", "bare interpreter, p50", "ms"),
        ("import", "import tenure above it, p50", "ms"),
        ("p50", "cold process enqueues one job, p50", "ms"),
        ("p95", "cold process enqueues one job, p95", "ms"),
    ),
    "idle": (
        ("cpu_percent", "idle worker, all its processes", "% of a core"),
        ("supervisor_mb", "idle supervisor", "MB"),
        ("child_mb", "idle child", "MB"),
    ),
    "sleepers": (
        ("at_once", "sleeping at once in one child", "jobs"),
        ("all_begun_ms", "  until all had begun", "ms"),
    ),
    "recovery": (
        ("child_s", "child killed, its jobs claimable after", "s"),
        ("worker_s", "worker killed, claimable on the same host after", "s"),
    ),
}
# What such a section wants other than the default settings.
SETTINGS: dict[str, Mapping[str, object]] = {"silent": {"notify": False}}

# The bars that all stores share; a place has those of its store.
BARS = {
    "pick-up after a caller's COMMIT, 200/s, p95": 20,
    "pick-up without hints, worst": 1050,  # poll_interval_ms and 50
    "100 jobs one by one, all finished, worst": 1,
    "priority 1 beside 100,000, p95": 100,
    "delayed job late by, worst": 100,
    "import tenure above it, p50": 30,
    "idle worker, all its processes": 1,
    "idle supervisor": 60,
    "idle child": 60,
    "sleeping at once in one child": 1000,
    "child killed, its jobs claimable after": 1,
    "worker killed, claimable on the same host after": 2,
    "claim of 1: ratio": 1.5,
    "claim of 100: ratio": 1.5,
}


class Figure(NamedTuple):
    """One number, and the bar it must clear if it has one."""

    name: str
    value: float
    unit: str
    bar: float | None = None
    at_least: bool = False  # the bar is a floor; otherwise a ceiling

    @property
    def ok(self) -> bool | None:
        if self.bar is None:
            return None
        return self.value >= self.bar if self.at_least else self.value <= self.bar

    def shown_bar(self) -> str:
        return "" if self.bar is None else f"{'≥' if self.at_least else '≤'} {self.bar:g}"

    def shown_value(self) -> str:
        places = 0 if abs(self.value) >= 1000 else 1 if abs(self.value) >= 10 else 2
        return f"{self.value:,.{places}f} {self.unit}".rstrip()


def judged(place: Place, name: str, value: float, unit: str = "") -> Figure:
    """With its bar on this store. More is better for comparisons and counts, less for times."""
    bar = place.bars.get(name, BARS.get(name))
    at_least = unit in ("", "jobs") and not name.endswith(": ratio")
    return Figure(name, value, unit, bar, at_least)


def chosen(only: str | None, every: bool) -> tuple[str, ...]:
    """The names of the sections to run, in their order."""
    if only is None:
        return EVERY if every else DEFAULT
    names = [name.strip() for name in only.split(",") if name.strip()]
    unknown = [name for name in names if name not in EVERY]
    if unknown or not names:
        raise ConfigError(
            f"bench has no section {', '.join(map(repr, unknown)) or 'of that name'}; "
            f"it has {', '.join(EVERY)}"
        )
    return tuple(name for name in EVERY if name in names)
