"""The walk through the code names files that are there, and leaves no part of the engine out."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "tenure"
WALK = (ROOT / "docs" / "walk.md").read_text("utf-8")


def test_every_file_it_names_is_there() -> None:
    named = set(re.findall(r"`((?:[a-z_]+/)*[a-z_0-9]+\.(?:py|sql))`", WALK))
    assert len(named) > 30
    missing = [name for name in sorted(named) if not any(SOURCE.rglob(name))]
    assert not missing, f"docs/walk.md names files that are not there: {missing}"


def test_every_module_of_the_engine_is_named() -> None:
    modules = {path.stem for path in (SOURCE / "engine").glob("*.py")} - {"__init__"}
    silent = [name for name in sorted(modules) if not re.search(rf"\b{name}\b", WALK)]
    assert not silent, f"docs/walk.md does not name these modules of the engine: {silent}"
