"""Figures: `tenure bench`, its sections `beside` and `scale`, on PostgreSQL 18 and, where it is
installed, 15. With arguments, those are bench's: `figures_bench.py --only drain,enqueue,pickup`.

Without any, one line a figure that has a bar, on a small scale: 100,000 rows of each kind.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import servers

ROOT = Path(__file__).resolve().parents[1]
USUAL = ["--only", "beside,scale", "--quick", "--jobs", "20000"]
VERDICTS = {True: "ok", False: "MISSED", None: ""}


def bench(url: str, options: list[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "tenure", "bench", "--url", url, "--json", *options]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    if not ran.stdout:
        raise SystemExit(f"bench ended with {ran.returncode} and said nothing")
    return dict(json.loads(ran.stdout)["figures"])


def main(options: list[str]) -> int:
    missed = False
    for label, major in (("PostgreSQL 18", None), ("PostgreSQL 15", 15)):
        with contextlib.ExitStack() as stack:
            try:
                server = stack.enter_context(servers.PostgresServer(major=major, fsync=True))
            except servers.Missing as reason:
                print(f"{label}: {reason}")
                continue
            for name, found in bench(server.url(), options or USUAL).items():
                value, unit, bar, ok = (found[key] for key in ("value", "unit", "bar", "ok"))
                missed = missed or ok is False
                if bar is not None or options:
                    shown = "" if bar is None else f"bar {bar:>7g}"
                    what = f"{label}: {name}"
                    print(f"{what:<72} {shown:<11} {value:>12,.2f} {unit:<6} {VERDICTS[ok]}")
            sys.stdout.flush()
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
