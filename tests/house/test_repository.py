"""What must not be in the repository: index addresses, paths of a machine, locks, loose ends."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NOT_OURS = {".git", ".venv", "__pycache__", "build", "dist", "node_modules"}
LOCKS = {"uv.lock", "poetry.lock", "pdm.lock", "Pipfile.lock"}

# Written in pieces, or this file would find itself.
INDEX_ADDRESS = re.compile(
    "|".join(
        (
            r"py" r"pi\.org",
            r"python" r"hosted\.org",
            r"registry\." r"npmjs",
            r"https?://[^\s\"'<>]*/simp" r"le\b",
            r"(?:extra-)?index-" r"url",
        )
    ),
    re.IGNORECASE,
)
# Preceded by a word, a dot or a closing brace it is part of a longer path or an address.
MACHINE_PATH = re.compile(r"(?<![\w.~})-])/(?:home|Users|work|root)/\w")
LOOSE_END = re.compile(r"\b(?:TO" r"DO|FIX" r"ME|XX" r"X)\b")


def files() -> list[Path]:
    """Every file that is or would be committed; without git, every file that looks like it."""
    git = shutil.which("git")
    if git and (ROOT / ".git").exists():
        listing = subprocess.run(
            [git, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        )
        paths = (ROOT / name for name in listing.stdout.split("\0") if name)
    else:
        paths = (p for p in ROOT.rglob("*") if not NOT_OURS.intersection(p.parts))
    found = sorted({path for path in paths if path.is_file()})
    assert ROOT / "pyproject.toml" in found
    return found


def lines(path: Path) -> Iterator[tuple[str, str]]:
    """("docs/walk.md:12", text of the line); nothing for a file that is not text."""
    content = path.read_bytes()
    if b"\0" in content:
        return
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        return
    for number, line in enumerate(text.splitlines(), start=1):
        yield f"{path.relative_to(ROOT)}:{number}", line


def matching(pattern: re.Pattern[str], paths: list[Path]) -> list[str]:
    return [
        f"{place}: {line.strip()[:120]}"
        for path in paths
        for place, line in lines(path)
        if pattern.search(line)
    ]


def test_no_package_index_is_named() -> None:
    found = matching(INDEX_ADDRESS, files())

    assert not found, "where packages come from is the installer's business:\n" + "\n".join(found)


def test_no_path_of_a_machine() -> None:
    found = matching(MACHINE_PATH, files())

    assert not found, "these paths exist on one machine only:\n" + "\n".join(found)


def test_no_lock_file() -> None:
    found = [str(path.relative_to(ROOT)) for path in files() if path.name in LOCKS]

    assert not found, f"lock files name the index they were made with: {found}"


def test_no_loose_ends_in_the_source() -> None:
    found = matching(LOOSE_END, [path for path in files() if (ROOT / "src") in path.parents])

    assert not found, "finish these or write an issue:\n" + "\n".join(found)


def test_the_patterns_find_what_they_should() -> None:
    assert INDEX_ADDRESS.search("https://" + "py" + "pi.org/simp" + "le/tenure")
    assert INDEX_ADDRESS.search("pip install --index-" + "url=...")
    assert MACHINE_PATH.search("see /" + "home/ann/jobs.db")
    assert MACHINE_PATH.search("sqlite:////" + "work/jobs.db")
    assert not MACHINE_PATH.search("https://example.com/" + "home/page")
    assert not MACHINE_PATH.search("{base}/" + "work/1")
    assert LOOSE_END.search("# TO" + "DO: later")


def test_tests_install_nothing_on_somebodys_machine() -> None:
    """System packages come with CI=true, or by `make servers`."""

    def asked_for(target: str, **variables: str) -> bool:
        said = subprocess.run(
            ["make", "--dry-run", target, *(f"{n}={v}" for n, v in variables.items())],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        )
        return "tests/servers.py" in said.stdout

    for target in ("test", "soak", "figures"):
        assert not asked_for(target, CI="")
        assert asked_for(target, CI="true")
    assert asked_for("servers", CI="")
