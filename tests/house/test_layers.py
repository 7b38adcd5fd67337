"""Imports point one way: the contracts are in pyproject.toml, under [tool.importlinter]."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "tenure"
# What the command line, pages and packs may import besides `tenure` itself.
PUBLIC = {"config", "errors", "job", "loading", "operations", "terminal"}
ABOVE = {"cli", "web", "packs"}
BESIDE = {"__init__", "__main__", "bench", "demo"}  # no part of the product's heart


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


def test_nothing_is_public_by_oversight() -> None:
    """A new module inside is forbidden to the rooms above; a new room above is held to that."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    (surface,) = [each for each in contracts if each["id"] == "surface"]
    there = {path.stem for path in SOURCE.glob("*.py")}
    there |= {path.parent.name for path in SOURCE.glob("*/__init__.py")}

    forbidden = {name.removeprefix("tenure.") for name in surface["forbidden_modules"]}
    assert forbidden == there - PUBLIC - ABOVE - BESIDE
    assert set(surface["source_modules"]) == {f"tenure.{name}" for name in ABOVE & there}
