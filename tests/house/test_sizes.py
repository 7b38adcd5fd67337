"""A reader's first hour stays pleasant: short files, short functions, each file says what it is."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src" / "tenure"
FILE_LINES = 450
FUNCTION_LINES = 80


def modules() -> list[Path]:
    found = sorted(SOURCE.rglob("*.py"))
    assert found, f"no Python files under {SOURCE}"
    return found


def functions(tree: ast.AST) -> Iterator[tuple[str, int, int]]:
    """Name, first line and length of every function, nested ones and methods too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield node.name, node.lineno, node.end_lineno - node.lineno + 1


def short(path: Path) -> str:
    return str(path.relative_to(SOURCE.parent))


def test_no_file_is_long() -> None:
    lengths = {path: len(path.read_text("utf-8").splitlines()) for path in modules()}
    long = [
        f"{short(path)}: {lines} lines" for path, lines in lengths.items() if lines > FILE_LINES
    ]

    assert not long, f"split these, the limit is {FILE_LINES} lines:\n" + "\n".join(long)


def test_no_function_is_long() -> None:
    long = [
        f"{short(path)}:{line} {name}: {lines} lines"
        for path in modules()
        for name, line, lines in functions(ast.parse(path.read_text("utf-8"), str(path)))
        if lines > FUNCTION_LINES
    ]

    assert not long, f"split these, the limit is {FUNCTION_LINES} lines:\n" + "\n".join(long)


def test_every_module_says_what_it_is() -> None:
    silent = [
        short(path)
        for path in modules()
        if not ast.get_docstring(ast.parse(path.read_text("utf-8"), str(path)))
    ]

    assert not silent, "these modules have no docstring:\n" + "\n".join(silent)
