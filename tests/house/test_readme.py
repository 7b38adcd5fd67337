"""The README tells the truth: its code runs, from top to bottom, in an empty directory.

What is run, in the order of the page:
  * every ```python block, all in one namespace, like a reader typing into one session;
  * a ```python block whose first line is a file name (`# jobs.py`) is saved under that name and
    run as a program, so that later blocks and commands can import it;
  * a ```console or ```sh block with `<!-- run -->` on the line above it. In console blocks only the
    lines after `$ ` are commands; what they print is not compared.
A block that cannot run here says so: `<!-- no-run: needs a PostgreSQL server -->`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
SECONDS = 90

FENCE = re.compile(r"^(?P<indent> *)(?P<marks>`{3,}|~{3,}) *(?P<language>[\w+-]*)[^`]*$")
FILE_NAME = re.compile(r"^# (?P<name>\w+\.py)$")
RUN = re.compile(r"^<!-- run -->$")
NO_RUN = re.compile(r"^<!-- no-run: \S.*-->$")

# Runs in the temporary directory, reading the steps from standard input.
DRIVER = r"""
import json, subprocess, sys, types

session = types.ModuleType("__main__")
sys.modules["__main__"] = session
sys.path.insert(0, "")
for step in json.load(sys.stdin):
    kind, line, text = step["kind"], step["line"], step["text"]
    print(f"README.md:{line} ({kind})", file=sys.stderr, flush=True)
    if kind == "session":
        # The blank lines make a traceback name the line of the page.
        exec(compile("\n" * line + text, "README.md", "exec"), session.__dict__)
    elif kind == "program":
        with open(step["file"], "w", encoding="utf-8") as file:
            file.write(text)
        subprocess.run([sys.executable, step["file"]], check=True, stdin=subprocess.DEVNULL)
    else:
        subprocess.run(["bash", "-euo", "pipefail", "-c", text], check=True,
                       stdin=subprocess.DEVNULL)
"""


@dataclass(frozen=True, slots=True)
class Step:
    kind: Literal["session", "program", "shell"]
    line: int  # of the opening fence
    text: str
    file: str = ""


@dataclass(frozen=True, slots=True)
class Block:
    language: str
    line: int
    text: str
    before: str  # the nearest line above that is not blank


def blocks(page: str) -> list[Block]:
    found = []
    lines = page.splitlines()
    position, before = 0, ""
    while position < len(lines):
        opening = FENCE.match(lines[position])
        if opening is None:
            before = lines[position].strip() or before
            position += 1
            continue
        start = position + 1
        end = start
        while end < len(lines) and lines[end].strip() != opening["marks"]:
            end += 1
        assert end < len(lines), f"README.md:{start}: this block is never closed"
        indent = len(opening["indent"])
        body = [line[indent:] if not line[:indent].strip() else line for line in lines[start:end]]
        found.append(Block(opening["language"].lower(), start, "\n".join(body) + "\n", before))
        position, before = end + 1, ""
    return found


def step(block: Block) -> Step | None:
    """What to do with this block; None when there is nothing to run."""
    if NO_RUN.match(block.before):
        return None
    if block.language in ("python", "py"):
        named = FILE_NAME.match(block.text.partition("\n")[0])
        if named:
            return Step("program", block.line, block.text, named["name"])
        return Step("session", block.line, block.text)
    if not RUN.match(block.before):
        return None
    if block.language in ("console", "shell-session"):
        commands = [line[2:] for line in block.text.splitlines() if line.startswith("$ ")]
        assert commands, f"README.md:{block.line}: no line of this block starts with '$ '"
        return Step("shell", block.line, "\n".join(commands))
    assert block.language in ("sh", "bash", "shell"), f"README.md:{block.line}: how to run this?"
    return Step("shell", block.line, block.text)


def steps(page: str) -> list[Step]:
    return [found for block in blocks(page) if (found := step(block)) is not None]


def run(to_do: list[Step], directory: Path) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("TENURE_", "PYTEST_"))}
    environment["PATH"] = os.pathsep.join(
        (str(Path(sys.executable).parent), environment.get("PATH", os.defpath))
    )
    environment["PYTHONPATH"] = str(ROOT / "src")
    return subprocess.run(
        [sys.executable, "-c", DRIVER],
        input=json.dumps([asdict(one) for one in to_do]),
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


def test_every_block_of_the_readme_runs(tmp_path: Path) -> None:
    assert README.is_file(), "README.md is missing"
    to_do = steps(README.read_text("utf-8"))
    assert any(one.kind != "shell" for one in to_do), "README.md shows no Python that runs"

    ran = run(to_do, tmp_path)

    assert ran.returncode == 0, f"\n{ran.stdout[-4000:]}\n{ran.stderr[-8000:]}"


def test_the_package_page_shows_the_readme() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]

    assert project.get("readme") == "README.md"


PAGE = """
# A page
```python
# jobs.py
VALUE = 41
```
then
```python
import jobs
answer = jobs.VALUE + 1
```
<!-- no-run: needs a server -->

```python
raise SystemExit("never")
```
```console
$ false
```
<!-- run -->
```console
$ python -c "import jobs; print(jobs.VALUE)"
41
$ touch ran
```
  ```python
  assert answer == 42
  ```
"""


def test_blocks_run_in_order_in_one_directory(tmp_path: Path) -> None:
    to_do = steps(PAGE)
    ran = run(to_do, tmp_path)

    assert [one.kind for one in to_do] == ["program", "session", "shell", "session"]
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "41\n"
    assert (tmp_path / "ran").exists()


def test_a_failing_block_is_found_by_its_line(tmp_path: Path) -> None:
    ran = run(steps("text\n```python\nx = 1\nx / 0\n```\n"), tmp_path)

    assert ran.returncode != 0
    assert 'File "README.md", line 4' in ran.stderr
