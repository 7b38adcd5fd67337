"""`tenure bench`: what this machine, this disk and this version of Tenure can do, in one run.

Everything happens in a temporary directory beside the database the URL names; that database
itself is never opened. Figures worth comparing are measured in rounds, each next to the raw loop
it is compared with, and the best of each counts: whatever else the machine does only takes away.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from tenure.cli import output, target
from tenure.errors import ConfigError

if TYPE_CHECKING:
    from tenure.cli.bench_live import Site

RATES = ("raw", "own", "enqueue", "drain")
DEFAULT = (*RATES, "pickup")
ON_REQUEST = ("commit", "priority", "delayed", "cold", "idle", "sleepers", "scale", "recovery")
SCALES = (1_000, 1_000_000)  # rows of each kind
QUICK_SCALE = 100_000
SINGLES = 2_000


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


# Sections with a worker, each a function of bench_live: which of its numbers to show, as (key,
# name, unit, bar, whether the bar is a floor).
SECTIONS: dict[str, tuple[tuple[str, str, str, float | None, bool], ...]] = {
    "pickup": (
        ("p50", "pick-up, idle worker, p50", "ms", None, False),
        ("p95", "pick-up, idle worker, p95", "ms", 10, False),
        ("p99", "pick-up, idle worker, p99", "ms", None, False),
    ),
    "commit": (
        ("p50", "pick-up after a caller's COMMIT, 200/s, p50", "ms", None, False),
        ("p95", "pick-up after a caller's COMMIT, 200/s, p95", "ms", 20, False),
    ),
    "priority": (
        ("p50", "priority 1 beside 100,000, p50", "ms", None, False),
        ("p95", "priority 1 beside 100,000, p95", "ms", 100, False),
        ("backlog_left", "  backlog left at the end", "jobs", None, False),
    ),
    "delayed": (
        ("p50", "delayed job late by, p50", "ms", None, False),
        ("max", "delayed job late by, worst", "ms", 100, False),
    ),
    "cold": (
        ("bare", "bare interpreter, p50", "ms", None, False),
        ("import", "import tenure above it, p50", "ms", 30, False),
        ("p50", "cold process enqueues one job, p50", "ms", None, False),
        ("p95", "cold process enqueues one job, p95", "ms", 100, False),
    ),
    "idle": (
        ("cpu_percent", "idle worker, all its processes", "% of a core", 1, False),
        ("supervisor_mb", "idle supervisor", "MB", 60, False),
        ("child_mb", "idle child", "MB", 60, False),
    ),
    "sleepers": (
        ("at_once", "sleeping at once in one child", "jobs", 1000, True),
        ("all_begun_ms", "  until all had begun", "ms", None, False),
    ),
    "recovery": (
        ("child_s", "child killed, its jobs claimable after", "s", 1, False),
        ("worker_s", "worker killed, claimable on the same host after", "s", 2, False),
    ),
}  # fmt: skip


# ------------------------------------------------------------------------------- the command


def add_commands(commands: target.Commands) -> None:
    parser = target.add_command(
        commands,
        "bench",
        "measure throughput and latency here",
        description="Measure a raw loop, Tenure's own statements and Tenure itself in one run, in "
        "a temporary directory beside the database that --url names, which is never opened.",
    )
    parser.add_argument(
        "--jobs", type=target.positive, default=50_000, metavar="N", help="a round (default 50000)"
    )
    parser.add_argument(
        "-p",
        "--processes",
        type=target.positive,
        default=1,
        metavar="N",
        help="child processes of the draining worker (default 1)",
    )
    parser.add_argument(
        "--rounds", type=target.positive, default=3, metavar="N", help="best of N (default 3)"
    )
    parser.add_argument(
        "--only",
        metavar="NAME,NAME",
        help=f"of {', '.join((*DEFAULT, *ON_REQUEST))} (default: {', '.join(DEFAULT)})",
    )
    parser.add_argument("--all", action="store_true", help="every section; takes minutes")
    parser.add_argument("--quick", action="store_true", help="shorter waits, a smaller scale")
    parser.set_defaults(run=bench)


add_command = add_commands


def bench(args: argparse.Namespace) -> int:
    from tenure.cli import bench_raw

    chosen = _chosen(args)
    line = output.LiveLine()
    began, here = time.monotonic(), bench_raw.machine()
    try:
        with _place(args.url) as place:
            measured = Measured(args, place, line)
            measured.run(chosen)
    finally:
        line.clear()
    figures = measured.figures
    report = {
        "machine": here | {"sqlite": place.module.sqlite_version},
        "jobs": args.jobs,
        "processes": args.processes,
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
        _print(report, figures, place.directory)
    return 0 if report["ok"] else 1


def _chosen(args: argparse.Namespace) -> tuple[str, ...]:
    every = (*DEFAULT, *ON_REQUEST)
    if args.only is None:
        return every if args.all else DEFAULT
    names = [name.strip() for name in args.only.split(",") if name.strip()]
    unknown = [name for name in names if name not in every]
    if unknown or not names:
        raise ConfigError(
            f"bench has no section {', '.join(map(repr, unknown)) or 'of that name'}; "
            f"it has {', '.join(every)}"
        )
    return tuple(name for name in every if name in names)


def _print(report: dict[str, Any], figures: list[Figure], directory: str) -> None:
    here = report["machine"]
    output.say(
        f"{here['date']} · {here['cores']} cores, load {here['load']:.1f} · "
        f"Python {here['python']} · SQLite {here['sqlite']} · {report['jobs']:,} jobs, "
        f"-p {report['processes']}, in {os.path.dirname(directory)}"
    )
    if here["load"] > here["cores"] / 2:
        output.say("This machine was busy when the run began: neither figures nor verdicts count.")
    verdicts = {True: "ok", False: "not", None: ""}
    output.table(
        ["figure", "value", "bar", ""],
        [[f.name, f.shown_value(), f.shown_bar(), verdicts[f.ok]] for f in figures],
        right=(1, 2),
        tint={3: lambda text: {"ok": "green", "not": "red"}.get(text)},
    )


# ------------------------------------------------------------------------------- measuring


class Place(NamedTuple):
    directory: str
    module: Any  # the sqlite3 module in use


@contextlib.contextmanager
def _place(url: str | None) -> Iterator[Place]:
    """A directory of our own on the disk of the URL's database."""
    import importlib

    from tenure.config import Settings

    settings = Settings.load(url=url)
    path = target.database_file(settings.url)
    if path is None:
        raise ConfigError(
            "bench measures SQLite in this version: give --url sqlite:///some/file.db"
        )
    beside = os.path.dirname(path)
    if not os.path.isdir(beside):
        raise ConfigError(
            f"there is no directory {beside} to measure in: create it, or correct --url"
        )
    module = importlib.import_module(settings.sqlite_module)
    with tempfile.TemporaryDirectory(
        prefix="tenure-bench-", dir=beside, ignore_cleanup_errors=True
    ) as directory:
        yield Place(directory, module)


class Measured:
    """One run of the command: what it has found so far."""

    def __init__(self, args: argparse.Namespace, place: Place, line: output.LiveLine) -> None:
        self.figures: list[Figure] = []
        self.rounds: dict[str, list[float]] = {}
        self.details: dict[str, dict[str, float]] = {}
        self._args = args
        self._place = place
        self._line = line
        self._files = 0

    def run(self, chosen: tuple[str, ...]) -> None:
        from tenure.cli import bench_live

        rates = [name for name in RATES if name in chosen]
        for number in range(self._args.rounds if rates else 0):
            self._round(rates, f"round {number + 1}")
        self._compare()
        for name in chosen:
            if name == "scale":
                self._scale()
            elif name in SECTIONS:
                measure: Callable[[Site], dict[str, float]] = getattr(bench_live, name)
                with self._site(name) as site:
                    found = self.details[name] = measure(site)
                for key, title, unit, bar, floor in SECTIONS[name]:
                    self.figures.append(Figure(title, found[key], unit, bar, floor))

    @contextlib.contextmanager
    def _site(self, label: str) -> Iterator[Site]:
        """The benchmark's app on a fresh file, which is removed afterwards."""
        from tenure.cli.bench_jobs import app
        from tenure.cli.bench_live import Site
        from tenure.config import Settings

        def tell(done: int, total: int, what: str) -> None:
            self._line.bar(done, total, f"{label}: {what}")

        self._line.show(f"{label} …")
        path = self._fresh()
        app.close()
        app.settings = Settings(url=f"sqlite:///{path}", sqlite_module=self._place.module.__name__)
        app.migrate()
        try:
            yield Site(app, self._place.directory, tell, self._args.quick)
        finally:
            app.close()
            self._remove(path)

    def _fresh(self) -> str:
        self._files += 1
        return os.path.join(self._place.directory, f"bench-{self._files}.db")

    def _remove(self, path: str) -> None:
        for ending in ("", "-wal", "-shm", "-tenure.lock"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path + ending)

    # -- rounds -------------------------------------------------------------------------------
    def _round(self, rates: list[str], label: str) -> None:
        from tenure.cli import bench_live, bench_raw

        jobs, singles = self._args.jobs, min(SINGLES, self._args.jobs)

        def tell(done: int, total: int, what: str) -> None:
            self._line.bar(done, total, f"{label}: {what}")

        def measure_raw() -> None:
            path = self._fresh()
            raw = bench_raw.raw_loop(self._place.module, path, jobs, singles, tell)
            self._remove(path)
            for name, value in raw.items():
                self._note(f"raw_{name}", value)

        if "raw" in rates:
            measure_raw()
        if "own" in rates:
            with self._site(label) as site:
                self._enqueue(site, jobs, singles)
                self._note("own_loop", bench_raw.own_loop(site.app.store, jobs + singles, tell))
        if "enqueue" in rates or "drain" in rates:
            with self._site(label) as site:
                self._enqueue(site, jobs, singles)
                if "drain" in rates:
                    rate = bench_live.drain(site, jobs + singles, self._args.processes)
                    self._note("drain", rate)
        if "raw" in rates:  # again: it is short, so noise hits it hardest
            measure_raw()

    def _enqueue(self, site: Site, jobs: int, singles: int) -> None:
        from tenure.cli import bench_raw
        from tenure.cli.bench_jobs import nothing

        self._note("enqueue_one", bench_raw.enqueue_one_by_one(nothing, singles))
        many = bench_raw.enqueue_in_batches(site.app, nothing, jobs, site.tell)
        self._note("enqueue_many", many)

    def _note(self, name: str, value: float) -> None:
        self.rounds.setdefault(name, []).append(value)

    def _compare(self) -> None:
        best = {name: max(values) for name, values in self.rounds.items()}
        for name, title in (
            ("raw_single", "raw: insert and commit one"),
            ("raw_bulk", "raw: insert in bulk"),
            ("raw_loop", "raw: claim 500, finish 500"),
            ("own_loop", "own statements: claim 500, finish 500"),
            ("enqueue_one", "enqueue one by one"),
            ("enqueue_many", "enqueue_many of 1,000"),
            ("drain", f"drain, -p {self._args.processes}"),
        ):
            if name in best:
                self.figures.append(Figure(title, best[name], "jobs/s"))
        for name, over, title, bar in (
            ("drain", "raw_loop", "drain / raw loop", 0.2),
            ("drain", "own_loop", "drain / own statements", 0.7),
            ("enqueue_one", "raw_single", "enqueue one / raw", 0.6),
            ("enqueue_many", "raw_bulk", "enqueue_many / raw bulk", 0.2),
        ):
            if name in best and over in best:
                self.figures.append(Figure(title, best[name] / best[over], "", bar, at_least=True))

    # -- scale --------------------------------------------------------------------------------
    def _scale(self) -> None:
        from tenure.cli import bench_raw

        costs: dict[str, list[float]] = {}
        large = QUICK_SCALE if self._args.quick else SCALES[1]
        for each in (SCALES[0], large):
            with self._site("scale") as site:
                store: Any = site.app.store
                bench_raw.fill(store, each, site.tell)
                for most in (1, 100):
                    taken = bench_raw.claim_cost(store, most) * 1000
                    costs.setdefault(f"claim of {most}", []).append(taken)
        for name, (small, big) in costs.items():
            self.figures += [
                Figure(f"{name} beside {SCALES[0]:,} of each kind", small, "ms"),
                Figure(f"{name} beside {large:,} of each kind", big, "ms"),
                Figure(f"{name}: ratio", big / small, "", 1.5),
            ]


def main(argv: list[str] | None = None) -> int:
    """`python -m tenure.cli.bench`: the command by itself."""
    parser = argparse.ArgumentParser("tenure", allow_abbrev=False)
    target.add_target_options(parser, root=True)
    add_commands(parser.add_subparsers(dest="command", required=True))
    args = parser.parse_args(["bench", *(argv or [])])
    return int(args.run(args))


if __name__ == "__main__":
    import sys

    raise SystemExit(main(sys.argv[1:]))
