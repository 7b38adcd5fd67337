"""A second look at tests that measure time: `make test` calls this when some have failed.

Three runs of real processes share two cores; in 5,000 tests one or two miss a bound of theirs, and
not the same ones twice. Those are run once more, alone, with the same bounds. Only where processes
are what is tested, and at most three: whatever else fails has failed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

WITH_PROCESSES = (
    "tests/cli/",
    "tests/crash/",
    "tests/engine/",
    "tests/faults/",
    "tests/integrations/",
)
MOST = 3


def main() -> int:
    failed = sorted(json.loads(Path(".pytest_cache/v/cache/lastfailed").read_text()))
    if not 0 < len(failed) <= MOST or not all(id.startswith(WITH_PROCESSES) for id in failed):
        return 1
    print("failed beside others, once more alone:", *failed, sep="\n  ", flush=True)
    return subprocess.run([sys.executable, "-m", "pytest", *failed], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
