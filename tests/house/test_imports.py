"""`import tenure` stays light: short-lived processes enqueue too."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src"
# The assertion: a folder without __init__.py would be imported too, and very quickly.
IMPORT_TENURE = (
    f"import sys; sys.path.insert(0, {str(SOURCE)!r}); import tenure; assert tenure.__file__"
)
HEAVY = {"asyncio", "dataclasses", "inspect", "msgspec", "psycopg", "sqlite3"}
# Lighter, but not for nothing: for who reads, schedules or enqueues.
LATER = {"datetime", "tenure.config", "tenure.secrecy", "tenure.stored", "threading"}
# What a process that only enqueues has no use for: 20 ms of its 60.
NOT_FOR_ENQUEUE = {"asyncio", "importlib.resources", "logging", "pathlib", "tenure.stored"}
ENQUEUE = """
app = tenure.App("sqlite:///" + sys.argv[1])

@app.task
def greet(name: str) -> None: ...

assert greet.enqueue("world").status == "queued"
"""
PRINT_LOADED = "import json; print(json.dumps([*sys.modules]))"
LIMIT_MS = 30
RUNS = 15


def run(code: str, *args: str) -> str:
    # -I: neither the environment nor the working directory decides what is measured.
    ran = subprocess.run(
        [sys.executable, "-I", "-c", code, *args], capture_output=True, text=True, timeout=30
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def milliseconds(code: str) -> float:
    """Of processor time: beside eight busy processes the clock says twice as much."""

    def spent() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    before = spent()
    run(code)
    return (spent() - before) * 1000


def test_import_loads_nothing_heavy() -> None:
    loaded = json.loads(run(f"{IMPORT_TENURE}; {PRINT_LOADED}"))

    assert "tenure" in loaded
    assert not HEAVY.union(LATER).intersection(loaded), "load these where they are first used"


def test_enqueue_loads_nothing_for_readers(tmp_path: Path) -> None:
    ran = run(f"{IMPORT_TENURE}\n{ENQUEUE}\n{PRINT_LOADED}", str(tmp_path / "jobs.db"))

    assert not NOT_FOR_ENQUEUE.intersection(json.loads(ran)), "load these where they are first used"


@pytest.mark.timed
def test_import_is_quick() -> None:
    run(IMPORT_TENURE)  # writes the bytecode, which is not what we measure

    # The minimum is what the code costs; everything above it is the machine's other work.
    # Taken in turn, so that a busy second hits both.
    pairs = [(milliseconds("pass"), milliseconds(IMPORT_TENURE)) for _ in range(RUNS)]
    bare = min(pair[0] for pair in pairs)
    with_tenure = min(pair[1] for pair in pairs)

    cost = with_tenure - bare
    assert cost <= LIMIT_MS, f"import tenure costs {cost:.1f} ms; the limit is {LIMIT_MS} ms"


def test_a_missing_driver_names_its_extra() -> None:
    without = "sys.modules['psycopg'] = None"
    asked = """
app = tenure.App("postgresql://nobody@localhost/nothing")
for ask in (lambda: app.store, app.open_wakeup):
    try:
        ask()
    except tenure.ConfigError as error:
        print(error)
"""
    said = run(f"{IMPORT_TENURE}\n{without}\n{asked}").splitlines()
    needs = 'PostgreSQL needs a driver that is not installed: pip install "tenure[postgres]"'
    assert said == [needs, needs]
