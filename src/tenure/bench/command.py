"""`tenure bench`: what this machine, this disk and this version of Tenure can do, in one run.

Everything happens in databases of the benchmark's own, beside the one the URL names: files in a
temporary directory, or databases on the same server. Figures worth comparing are measured in
rounds, each next to the raw loop it is compared with, and the best of each counts: whatever else
the machine does only takes away.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from tenure.bench.figures import (
    DEFAULT,
    EVERY,
    RATES,
    SECTIONS,
    SETTINGS,
    Figure,
    chosen,
    judged,
)
from tenure.cli import target
from tenure.terminal import output
from tenure.terminal.live_line import LiveLine

if TYPE_CHECKING:
    from tenure.bench.live import Site
    from tenure.bench.place import Place

SINGLES = 2_000
COMPARISONS = ("scale", "beside", "snapshot")  # methods of scale.Comparison


# ------------------------------------------------------------------------------- the command


def add_commands(commands: target.Commands) -> None:
    parser = target.add_command(
        commands,
        "bench",
        "measure throughput and latency here",
        description="Measure a raw loop, Tenure's own statements and Tenure itself in one run. "
        "SQLite: in a temporary directory beside the file that --url names, which is never opened. "
        "PostgreSQL: in databases of its own on that server, dropped at the end; the database that "
        "--url names is only used to create them.",
    )
    parser.add_argument(
        "--jobs", type=target.positive, default=50_000, metavar="N", help="a round (default 50000)"
    )
    parser.add_argument(
        "-p",
        "--processes",
        type=target.positive,
        metavar="N",
        help="child processes of the draining worker (default 1; on PostgreSQL 1, then 2)",
    )
    parser.add_argument(
        "--rounds", type=target.positive, default=3, metavar="N", help="best of N (default 3)"
    )
    parser.add_argument(
        "--only",
        metavar="NAME,NAME",
        help=f"of {', '.join(EVERY)} (default: {', '.join(DEFAULT)})",
    )
    parser.add_argument("--all", action="store_true", help="every section; takes minutes")
    parser.add_argument("--quick", action="store_true", help="shorter waits, a smaller scale")
    parser.set_defaults(run=bench)


add_command = add_commands


def bench(args: argparse.Namespace) -> int:
    from tenure.bench import raw
    from tenure.bench.place import open_place

    names = chosen(args.only, args.all)
    line = LiveLine()
    began, here = time.monotonic(), raw.machine()
    try:
        with _terminated_as_interrupted(), open_place(args.url) as place:
            measured = Measured(args, place, line)
            measured.run(names)
    finally:
        line.clear()
    figures = measured.figures
    report = {
        "machine": here | place.machine,
        "jobs": args.jobs,
        "processes": measured.processes[0],
        "rounds": measured.rounds,
        "details": measured.details,
        "figures": {
            f.name.strip(): {"value": f.value, "unit": f.unit, "bar": f.bar, "ok": f.ok}
            for f in figures
        },
        "seconds": time.monotonic() - began,
        "ok": all(figure.ok is not False for figure in figures),
    }
    if args.json:
        output.say_json(report)
    else:
        _print(report, figures, place)
    return 0 if report["ok"] else 1


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM like Ctrl-C: on somebody's server nothing is left behind."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _print(report: dict[str, Any], figures: list[Figure], place: Place) -> None:
    here = report["machine"]
    output.say(
        f"{here['date']} · {here['cores']} cores, load {here['load']:.1f} · "
        f"Python {here['python']} · {report['jobs']:,} jobs · {place.headline}"
    )
    if here["load"] > here["cores"] / 2:
        output.say("This machine was busy when the run began: neither figures nor verdicts count.")
    if place.warning:
        output.say(place.warning)
    verdicts = {True: "ok", False: "not", None: ""}
    output.table(
        ["figure", "value", "bar", ""],
        [[f.name, f.shown_value(), f.shown_bar(), verdicts[f.ok]] for f in figures],
        right=(1, 2),
        tint={3: lambda text: {"ok": "green", "not": "red"}.get(text)},
    )


# ------------------------------------------------------------------------------- measuring


class Measured:
    """One run of the command: what it has found so far."""

    def __init__(self, args: argparse.Namespace, place: Place, line: LiveLine) -> None:
        self.figures: list[Figure] = []
        self.rounds: dict[str, list[float]] = {}
        self.details: dict[str, dict[str, float]] = {}
        given: int | None = args.processes
        self.processes = place.processes if given is None else (given,)
        self._args = args
        self._place = place
        self._line = line

    def run(self, names: tuple[str, ...]) -> None:
        from tenure.bench.scale import Comparison

        rates = [name for name in RATES if name in names]
        for number in range(self._args.rounds if rates else 0):
            self._round(rates, f"round {number + 1}")
        self._compare()
        comparison = Comparison(self._place, self._args, self._site)
        for name in names:
            if name in COMPARISONS:
                measure: Callable[[], list[Figure]] = getattr(comparison, name)
                self.figures += measure()
            elif name in SECTIONS:
                self._section(name)

    def _section(self, name: str) -> None:
        from tenure.bench import live

        measure: Callable[[Site], dict[str, float]] = getattr(live, name)
        with self._site(name, **SETTINGS.get(name, {})) as site:
            found = self.details[name] = measure(site)
        for key, title, unit in SECTIONS[name]:
            self.figures.append(judged(self._place, title, found[key], unit))

    @contextlib.contextmanager
    def _site(self, label: str, **other: Any) -> Iterator[Site]:
        """The benchmark's app on a fresh database, which goes afterwards."""
        from dataclasses import replace

        from tenure.bench.jobs import app
        from tenure.bench.live import Site

        def tell(done: int, total: int, what: str) -> None:
            self._line.bar(done, total, f"{label}: {what}")

        self._line.show(f"{label} …")
        with self._place.fresh() as settings:
            site = Site(app, replace(settings, **other), self._place, tell, self._args.quick)
            site.use()
            try:
                app.migrate()
                yield site
            finally:
                app.close()

    # -- rounds -------------------------------------------------------------------------------
    def _round(self, rates: list[str], label: str) -> None:
        from tenure.bench import live, raw

        jobs, singles = self._args.jobs, min(SINGLES, self._args.jobs)

        def tell(done: int, total: int, what: str) -> None:
            self._line.bar(done, total, f"{label}: {what}")

        def measure_raw() -> None:
            for name, value in self._place.raw_loop(jobs, singles, tell).items():
                self._note(f"raw_{name}", value)

        if "raw" in rates:
            measure_raw()
        if "own" in rates:
            with self._site(label) as site:
                self._enqueue(site, jobs, singles)
                self._note("own_loop", raw.own_loop(site.app.store, jobs + singles, tell))
        drains = self.processes if "drain" in rates else self.processes[:1]
        for processes in drains if {"enqueue", "drain"} & set(rates) else ():
            with self._site(label) as site:
                self._enqueue(site, jobs, singles)
                if "drain" in rates:
                    rate = live.drain(site, jobs + singles, processes)
                    self._note(self._drain_name(processes), rate)
        if "raw" in rates:  # again: it is short, so noise hits it hardest
            measure_raw()

    def _enqueue(self, site: Site, jobs: int, singles: int) -> None:
        from tenure.bench import raw
        from tenure.bench.jobs import nothing

        self._note("enqueue_one", raw.enqueue_one_by_one(nothing, singles))
        many = raw.enqueue_in_batches(site.app, nothing, jobs, site.tell)
        self._note("enqueue_many", many)

    def _note(self, name: str, value: float) -> None:
        self.rounds.setdefault(name, []).append(value)

    def _drain_name(self, processes: int) -> str:
        return "drain" if processes == self.processes[0] else f"drain_p{processes}"

    def _compare(self) -> None:
        best = {name: max(values) for name, values in self.rounds.items()}
        first, *more = self.processes
        for name, title in (
            ("raw_single", "raw: insert and commit one"),
            *self._place.raw_titles.items(),
            ("raw_loop", "raw: claim 500, finish 500"),
            ("own_loop", "own statements: claim 500, finish 500"),
            ("enqueue_one", "enqueue one by one"),
            ("enqueue_many", "enqueue_many of 1,000"),
            *((self._drain_name(number), f"drain, -p {number}") for number in self.processes),
        ):
            if name in best:
                self.figures.append(Figure(title, best[name], "jobs/s"))
        for name, over, title in (
            ("drain", "raw_loop", "drain / raw loop"),
            ("drain", "own_loop", "drain / own statements"),
            *((self._drain_name(n), "drain", f"drain, -p {n} / -p {first}") for n in more),
            ("enqueue_one", "raw_single", "enqueue one / raw"),
            ("enqueue_many", "raw_bulk", "enqueue_many / raw bulk"),
            ("enqueue_many", "raw_copy", "enqueue_many / raw COPY all at once"),
        ):
            if name in best and over in best:
                self.figures.append(judged(self._place, title, best[name] / best[over]))


def main(argv: list[str] | None = None) -> int:
    """`python -m tenure.bench.command`: the command by itself."""
    parser = argparse.ArgumentParser("tenure", allow_abbrev=False)
    target.add_target_options(parser, root=True)
    add_commands(parser.add_subparsers(dest="command", required=True))
    args = parser.parse_args(["bench", *(argv or [])])
    return int(args.run(args))


if __name__ == "__main__":
    import sys

    raise SystemExit(main(sys.argv[1:]))
