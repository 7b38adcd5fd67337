"""`tenure bench`, the sections that measure the same thing twice: in an empty database, and beside
what a queue that has been in use for long has gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from tenure.bench import live, raw
from tenure.bench.figures import Figure, judged

if TYPE_CHECKING:
    import argparse

    from tenure.bench.live import Site
    from tenure.bench.place import Place

FEW, MANY, QUICK_MANY = 1_000, 1_000_000, 100_000  # rows of each kind
PASSING, LAST = 500_000, 50_000
QUICK_PASSING, QUICK_LAST = 100_000, 10_000

OpenSite = Callable[[str], AbstractContextManager["Site"]]


class Comparison:
    """What these sections share: where fresh databases come from, and how large it is to be."""

    def __init__(self, place: Place, args: argparse.Namespace, open_site: OpenSite) -> None:
        self._place = place
        self._args = args
        self._open_site = open_site
        self._many = QUICK_MANY if args.quick else MANY

    def scale(self) -> list[Figure]:
        """The median cost of a claim beside few and many rows of each kind."""
        costs: dict[str, list[float]] = {}
        for each in (FEW, self._many):
            with self._filled(each, "default") as site:
                for most in (1, 100):
                    taken = raw.claim_cost(site.app.store, most) * 1000
                    costs.setdefault(f"claim of {most}", []).append(taken)
        figures = []
        for name, (small, big) in costs.items():
            figures += [
                Figure(f"{name} beside {FEW:,} of each kind", small, "ms"),
                Figure(f"{name} beside {self._many:,} of each kind", big, "ms"),
                judged(self._place, f"{name}: ratio", big / small),
            ]
        return figures

    def beside(self) -> list[Figure]:
        """Drains of one queue alone and, in turn with them, beside many rows queued in another
        queue, due tomorrow in the same one, and finished. The best of each counts."""
        best = [0.0, 0.0]
        with self._open_site("alone") as empty, self._filled(self._many, "another") as filled:
            for _ in range(self._args.rounds):
                for number, site in enumerate((empty, filled)):
                    site.use()
                    _enqueue(site, self._args.jobs)
                    rate = live.drain(site, self._args.jobs, 1)
                    best[number] = max(best[number], rate)
        alone, crowded = best
        return [
            Figure("drain alone", alone, "jobs/s"),
            Figure(f"drain beside {self._many:,} of each kind", crowded, "jobs/s"),
            judged(self._place, "drain beside them / alone", crowded / alone),
        ]

    def snapshot(self) -> list[Figure]:
        """Many jobs pass while another session keeps a transaction open that has read: the rate
        of the last of them, against the same stretch of a run without it. The best of three each:
        the stretch takes a second or two, and a checkpoint in it halves the rate."""
        runs = [(self._last_stretch(hold=False), self._last_stretch(hold=True)) for _ in range(3)]
        without, held = (max(rates) for rates in zip(*runs, strict=True))
        return [
            Figure("last stretch of a long drain", without, "jobs/s"),
            Figure("last stretch beside a held snapshot", held, "jobs/s"),
            judged(self._place, "last stretch beside a held snapshot / without", held / without),
        ]

    @contextmanager
    def _filled(self, each: int, queue: str) -> Iterator[Site]:
        with self._open_site(f"beside {each:,}") as site:
            self._place.fill(site.app.store, each, queue, site.tell)
            yield site

    def _last_stretch(self, *, hold: bool) -> float:
        passing, last = (QUICK_PASSING, QUICK_LAST) if self._args.quick else (PASSING, LAST)
        with self._open_site("with a snapshot" if hold else "without a snapshot") as site:
            store: Any = site.app.store
            _enqueue(site, passing)
            with self._place.snapshot(store) if hold else nullcontext():
                live.drain(site, passing, 1)
            start = self._place.before_last(store, last)
            found = site.completions(start)
            return found._replace(first=start).rate


def _enqueue(site: Site, count: int) -> None:
    from tenure.bench.jobs import nothing

    raw.enqueue_in_batches(site.app, nothing, count, site.tell)
