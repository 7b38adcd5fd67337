"""Imports point one way: the contracts are in pyproject.toml, under [tool.importlinter]."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_imports_follow_the_layers() -> None:
    # A process of its own: the linter configures itself globally and prints what broke.
    command = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    checked = subprocess.run(
        [sys.executable, "-c", command, "--no-cache"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert checked.returncode == 0, f"\n{checked.stdout}{checked.stderr}"
