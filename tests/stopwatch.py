"""Bounds of time that hold on a busy machine: measured against what it can do just then."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

LOOP_MILLISECONDS = 10.0


def processor_ms(call: Callable[[], object]) -> float:
    began = time.process_time()
    call()
    return (time.process_time() - began) * 1000


def slowness() -> float:
    return processor_ms(lambda: sum(n * n for n in range(200_000))) / LOOP_MILLISECONDS


def within(milliseconds: float, call: Callable[[], object]) -> bool:
    """On the machine our bounds are for: this one takes as much longer as a plain loop does, before
    and after. Of several tries one must do: the least is what the code costs."""
    call()  # compiles the expressions
    for _ in range(10):
        before = slowness()
        took = processor_ms(call)
        if took < milliseconds * max(1.0, min(before, slowness())):
            return True
    return False


def waited(*threads: int) -> float:
    """Seconds that they were ready to run and the kernel had no processor for them."""
    return sum(_waited(Path(f"/proc/{thread}/schedstat")) for thread in threads)


def process_waited(*processes: int) -> float:
    """The same of all threads of processes."""
    tasks = [task for pid in processes for task in Path(f"/proc/{pid}/task").iterdir()]
    return sum(_waited(task / "schedstat") for task in tasks)


def _waited(schedstat: Path) -> float:
    with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
        return int(schedstat.read_text().split()[1]) / 1e9
    return 0.0
