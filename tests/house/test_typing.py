"""What a type checker says of programs that use Tenure, in strict mode."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
from pathlib import Path

import tenure
from tenure.testing import assert_enqueued, context, use

app = tenure.App()

@app.task(queue="exports", aliases=["old_export"])
def export(ctx: tenure.Context, rows: int, to: Path | None = None) -> dict[str, int]:
    return {"rows": rows}

@app.task
async def greet(name: str) -> str:
    return name

export.enqueue(5)
export(context(), 5)
export(context(export, attempt=2), rows=5)
total: int = export(context(), 5)["rows"]
ctx = context()
assert_enqueued(ctx, greet, args={"name": "x"})
with use(app, url="postgresql://x"):
    once = greet.options(key="k", unique="pending", on_conflict="error", after_failed="cancel")
    once.enqueue("x")

async def main() -> None:
    greeting: str = await greet("x")
"""

MISTAKES = {
    "export.enqueue('5')": 'Argument 1 to "enqueue" .* expected "int"',
    "export.enqueue(rows=5, too=1)": 'Unexpected keyword argument "too"',
    "export(context(), '5')": "No overload variant",
    "greet(5)": "No overload variant",
    "greet.options(unique='always')": 'expected "Literal',
    "greet.options(key='k', on_conflict='raise')": 'expected "Literal',
    "greet.options(after_failed='stop')": 'expected "Literal',
}


def check(program: str, tmp_path: Path) -> str:
    (tmp_path / "program.py").write_text(program, "utf-8")
    ran = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--python-version", "3.11",
         "--cache-dir", str(tmp_path / "cache"), "program.py"],
        cwd=tmp_path,
        env={"MYPYPATH": str(ROOT / "src"), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=110,
    )  # fmt: skip
    return ran.stdout + ran.stderr


def test_a_program_is_typed_like_its_functions(tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="`make check` installs it")
    mistakes = "\n".join(MISTAKES)

    said = check(f"{PROGRAM}\n{mistakes}\n", tmp_path)

    first = PROGRAM.count("\n") + 2
    for number, (mistake, error) in enumerate(MISTAKES.items(), first):
        assert re.search(rf"program\.py:{number}: error: .*{error}", said), (mistake, said)
    wrong = {int(line) for line in re.findall(r"program\.py:(\d+): error", said)}
    assert wrong == set(range(first, first + len(MISTAKES))), said
