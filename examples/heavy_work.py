"""CPU-bound work in a process of its own: `process=True`.

Such a job runs alone in a fresh process. If it takes its process down, only it is charged; when it
overruns its time-out, its process is killed. Processes are started by `tenure worker`, so this
example starts one.

    python examples/heavy_work.py
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import tenure

# The worker inherits the variable, and so finds the same file.
os.environ.setdefault("TENURE_URL", f"sqlite:///{Path(tempfile.mkdtemp()) / 'heavy.db'}")
app = tenure.App()


@app.task(process=True, timeout=60)
def primes(below: int) -> dict[str, int]:
    sieve = bytearray([1]) * below
    for number in range(2, int(below**0.5) + 1):
        if sieve[number]:
            sieve[number * number :: number] = bytes(len(sieve[number * number :: number]))
    return {"primes": sum(sieve) - 2, "pid": os.getpid()}


def main() -> None:
    app.migrate()
    here = Path(__file__)
    receipts = [primes.enqueue(below) for below in (100, 10_000, 1_000_000)]
    command = [sys.executable, "-m", "tenure", "-A", f"{here.stem}:app", "worker", "--drain"]
    subprocess.run(command, check=True, cwd=here.parent, stdout=subprocess.DEVNULL)  # noqa: S603
    results = [app.result(receipt.id, timeout=1) for receipt in receipts]
    print("primes:", [result["primes"] for result in results])
    print("processes:", len({result["pid"] for result in results} - {os.getpid()}))
    app.close()


if __name__ == "__main__":
    main()
