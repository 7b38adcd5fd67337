"""docs/reference.md names everything public, with the defaults it has."""

from __future__ import annotations

import inspect
import re
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import tenure
from tenure import testing
from tenure.config import Settings
from tenure.task import TaskDecorator

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "reference.md").read_text("utf-8")
# Of an app: for the engine, the command line and tests.
INSIDE = {"client", "store", "max_payload_bytes", "now_ms", "open_wakeup"}


def section(title: str) -> str:
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S)
    assert found, title
    return found[1]


def in_code(text: str) -> set[str]:
    """Every word that stands between backticks."""
    return {word for code in re.findall(r"`([^`\n]+)`", text) for word in re.findall(r"\w+", code)}


def public(owner: object) -> set[str]:
    """Inherited ones too."""
    return {name for name in dir(owner) if not name.startswith("_")}


def test_every_public_name() -> None:
    assert set(tenure.__all__) <= in_code(PAGE), set(tenure.__all__) - in_code(PAGE)
    assert set(testing.__all__) <= in_code(section("`tenure.testing`"))
    assert public(tenure.App) - INSIDE <= in_code(section("`tenure.App`"))
    assert public(tenure.Context) <= in_code(section("`tenure.Context`"))
    shown = in_code(section("`tenure.Task`"))
    assert {"enqueue", "aenqueue", "job", "options", "name", "signature"} <= shown


@pytest.mark.parametrize(
    ("title", "function"),
    [("`@app.task`", TaskDecorator.__init__), ("`Task.options`", tenure.Task.options)],
)
def test_every_option_and_its_default(title: str, function: Any) -> None:
    parameters = inspect.signature(function).parameters
    options = {n: p.default for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", section(title), re.M))

    assert rows.keys() == options.keys()
    for name, default in options.items():
        said = rows[name]  # None may be said in words: where it comes from instead
        assert said == f"`{default!r}`" or (default is None and "`None`" not in said), name


def test_every_setting_its_variable_and_its_default() -> None:
    expected = [
        f"| `{field.name}` | `TENURE_{field.name.upper()}` | `{field.default!r}` |"
        for field in fields(Settings)
        if field.name != "_given"
    ]

    assert re.findall(r"^(\| `\w+` \| `\w+` \| `.*?` \|)", section("Settings"), re.M) == expected


def test_signatures_of_values() -> None:
    for name in ("Retry", "Exponential", "Fixed", "Keep"):
        value = getattr(tenure, name)
        for parameter in inspect.signature(value).parameters.values():
            if isinstance(parameter.default, (int, float, tuple)):
                assert f"{parameter.name}={parameter.default!r}" in section("Values"), name


def test_extras_are_of_what_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]

    assert set(project["optional-dependencies"]) == {"postgres", "dev"}
    assert "The only extra to install is `tenure[postgres]`" in PAGE
