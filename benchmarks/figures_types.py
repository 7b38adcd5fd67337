"""Figures: several apps on one queue, and a worker beside 60,000 jobs it does not know.

One line a figure: name, bar, value, ok or MISSED. `make figures` runs it. The scenarios are in
`tests/crash/test_two_apps.py`.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import servers
from crash.harness import Workshop
from crash.test_two_apps import SOON, Apart, apart, beside_foreign, deploy, two_apps
from places import PostgresPlace, SqlitePlace

FOREIGN = 60_000


def say(name: str, value: float, bar: float, unit: str) -> bool:
    verdict = "ok" if value <= bar else "MISSED"
    print(f"{name:<60} bar {bar:>6g} {unit:<3} {value:>8.2f} {unit:<3} {verdict}", flush=True)
    return value <= bar


@contextlib.contextmanager
def several_apps(kind: str) -> Iterator[Apart]:
    """In a directory and a database of their own."""
    with tempfile.TemporaryDirectory(prefix="tenure-figures-") as name:
        folder = Path(name)
        place: Any = SqlitePlace(folder / "jobs.db")
        if kind == "postgres":
            server = servers.shared()
            place = PostgresPlace(server.url(server.create_database(migrated=True)))
        shops: list[Workshop] = []

        def workshop(text: str, **settings: Any) -> Workshop:
            shops.append(Workshop(folder, place, text, **settings))
            return shops[-1]

        apps = apart(workshop)
        try:
            yield apps
        finally:
            apps.close()
            for shop in shops:
                shop.close()


def figures(kind: str) -> list[bool]:
    with several_apps(kind) as apps:
        kept = [say(f"{kind}: two apps, one queue, p95 start", two_apps(apps, 1000), SOON, "ms")]
    with several_apps(kind) as apps:
        first, slowest = deploy(apps, 1000)
        kept.append(say(f"{kind}: a type that a deploy adds, first start", first, 2.0, "s"))
        kept.append(say(f"{kind}: a type that a deploy adds, p95 start", slowest, SOON, "ms"))
    with several_apps(kind) as apps:
        untouched, more, slowest = beside_foreign(apps, FOREIGN)
        kept.append(say(f"{kind}: foreign jobs written to", float(not untouched), 0, ""))
        kept.append(say(f"{kind}: processor more than without", more * 100, 10, "%"))
        kept.append(say(f"{kind}: p95 start beside {FOREIGN} foreign", slowest, SOON, "ms"))
    return kept


def main() -> int:
    try:
        kept = [each for kind in ("sqlite", "postgres") for each in figures(kind)]
    finally:
        servers.close_shared()
    return 0 if all(kept) else 1


if __name__ == "__main__":
    sys.exit(main())
