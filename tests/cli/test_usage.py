"""Wrong usage, missing databases, wrong apps: a message, an exit code, never a traceback."""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path

import pytest

from tenure.cli import GROUPS, build_parser, main

from .conftest import Cli, Stage

OPERATE = "tenure.cli.operate"

READING = (
    ["jobs"],
    ["job", "01M7GEX6W23EXZBGJQ83K1S2QG"],
    ["cancel", "01M7GEX6W23EXZBGJQ83K1S2QG"],
    ["replay", "--type", "x"],
    ["discard", "--type", "x"],
    ["queues"],
    ["queues", "pause", "default"],
    ["queues", "resume", "default"],
    ["stats"],
    ["events"],
    ["doctor"],
)


@pytest.mark.parametrize("command", READING, ids=" ".join)
def test_no_command_but_enqueue_creates_a_database(tenure: Cli, command: list[str]) -> None:
    ran = tenure(*command, "--url", "sqlite:///nothing.db")

    assert (ran.code, ran.out) == (1, "")
    assert "there is no database at" in ran.err
    assert "nothing.db; enqueue something first or correct the URL" in ran.err
    assert [path.name for path in tenure.home.iterdir()] == ["shop.py"]


def test_a_database_of_somebody_else_gets_no_tables(tenure: Cli) -> None:
    import sqlite3
    from contextlib import closing

    with closing(sqlite3.connect(tenure.home / "other.db")) as db:
        db.execute("CREATE TABLE theirs (x)")
        before = (tenure.home / "other.db").read_bytes()

    ran = tenure("jobs", TENURE_URL="sqlite:///other.db")

    assert ran.code == 1
    assert "has no Tenure tables" in ran.err
    assert (tenure.home / "other.db").read_bytes() == before


def test_a_file_that_is_no_database(tenure: Cli) -> None:
    (tenure.home / "text.db").write_text("certainly not a database" * 100)

    ran = tenure("jobs", "--url", "sqlite:///text.db")

    assert ran.code == 1
    assert "is not an SQLite database" in ran.err


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nowhere:app", "there is no module 'nowhere'"),
        ("shop:missing", "it has shop:app"),
        ("shop:tenure", "is a module, it must be a tenure.App"),
        ("shop.py", "write it as Python imports it"),
        ("two", "found two:one, two:other. Say which: -A two:one"),
        ("json", "found none. Name the module that makes it, such as -A shop.jobs:app"),
        ("broken", "importing 'broken' failed: ZeroDivisionError: division by zero"),
        ("unfinished", "importing 'unfinished' failed: SyntaxError: expected ':'"),
        ("needy", "importing 'needy' failed: ModuleNotFoundError: No module named 'not_there'"),
    ],
)
def test_a_wrong_app(tenure: Cli, spec: str, message: str) -> None:
    (tenure.home / "two.py").write_text("import tenure\none, other = tenure.App(), tenure.App()\n")
    (tenure.home / "broken.py").write_text("\n1 / 0\n")
    (tenure.home / "unfinished.py").write_text("\ndef f()\n    pass\n")
    (tenure.home / "needy.py").write_text("import not_there\n")

    ran = tenure("-A", spec, "enqueue", "report")

    assert (ran.code, ran.out) == (2, "")
    assert message in ran.err
    if spec in ("broken", "unfinished"):
        assert f"{spec}.py:2)" in ran.err


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ([], "required: COMMAND"),
        (["frobnicate"], "invalid choice"),
        (["jobs", "--status", "happy"], "invalid choice: 'happy'"),
        (["jobs", "--limit", "0"], "not a whole number from 1"),
        (["job", "7"], "is not a job id"),
        (["cancel"], "which jobs?"),
        (["cancel", "--status", "completed"], "only queued and running jobs can be cancelled"),
        (["cancel", "01M7GEX6W23EXZBGJQ83K1S2QG", "--type", "x"], "give ids or --type, not both"),
        (["replay", "--type", "x", "--payload", "{}"], "--payload is for one ID"),
        (["worker"], "needs your app"),
        (["enqueue", "report"], "needs your app"),
        (["jobs", "--url", "mysql://x"], "no store for 'mysql' URLs"),
    ],
)
def test_wrong_usage(
    command: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In this process: a tenth of the time, and no module of an app is imported."""
    monkeypatch.chdir(tmp_path)
    try:
        code: object = main(command)
    except SystemExit as exit:  # argparse's way
        code = exit.code

    said = capsys.readouterr()
    assert (code, said.out) == (2, "")
    assert message in said.err


def test_a_misspelt_setting_is_wrong_usage(tenure: Cli) -> None:
    ran = tenure("jobs", TENURE_URI="sqlite:///jobs.db")

    assert ran.code == 2
    assert "did you mean TENURE_URL?" in ran.err


def test_help_and_version(tenure: Cli) -> None:
    ran = tenure("--help")

    assert ran.code == 0
    for command in ("worker", "enqueue", "jobs", "queues", "doctor", "migrate"):
        assert f"  {command} " in ran.out
    assert tenure("--version").out == "tenure 0.1.0\n"


def test_options_stand_before_or_after_the_command(stage: Stage) -> None:
    url = "sqlite:///jobs.db"
    before = stage.tenure("--url", url, "--json", "jobs")
    after = stage.tenure("jobs", "--url", url, "--json")

    assert before.objects == after.objects
    assert len(after.objects) == 7
    assert stage.tenure("jobs", "--json", TENURE_URL=url).objects == after.objects
    assert stage.tenure("jobs", "--json", TENURE_APP="shop").objects == after.objects


def test_a_module_with_one_app_needs_no_attribute(stage: Stage) -> None:
    assert stage.tenure("-A", "shop", "jobs", "--json").code == 0


def test_url_overrides_the_apps_own(stage: Stage) -> None:
    ran = stage.tenure("-A", "shop", "--url", "sqlite:///other.db", "enqueue", "report")

    assert ran.code == 0
    assert len(stage.tenure("jobs", "--json", "--url", "sqlite:///other.db").objects) == 1


def test_a_reader_that_stops_reading_is_no_error(stage: Stage) -> None:
    with stage.tenure.started("-A", "shop", "events", "--json", "--follow") as reading:
        assert reading.stdout is not None
        assert reading.stderr is not None
        reading.stdout.readline()
        reading.stdout.close()  # then something happens, and its next line has no reader
        assert stage.tenure.shop("enqueue", "report").code == 0
        assert reading.wait(20) == 0
        assert reading.stderr.read() == ""


def test_only_the_group_of_a_command_is_loaded() -> None:
    every = subcommands(build_parser())
    assert [*every] == [name for names in GROUPS.values() for name in names]
    for words, shown in (
        (["jobs"], ["jobs"]),
        (["-A", "worker", "--url", "stats", "--json", "cancel", "job"], [*GROUPS[OPERATE]]),
        (["--app=worker", "queues", "pause", "jobs"], ["queues"]),
        (["jobs", "--help"], ["jobs"]),
        (["--help", "jobs"], [*every]),
        (["frobnicate"], [*every]),
        (["-A"], [*every]),
    ):
        assert [*subcommands(build_parser(words))] == shown, words


def test_a_command_starts_without_what_it_does_not_need(tenure: Cli) -> None:
    code = (
        "import sys; from tenure.cli import build_parser; build_parser(); "
        "print(*{'asyncio', 'msgspec', 'sqlite3', 'logging', 'json'} & {*sys.modules})"
    )
    python = tenure.command()[0]
    ran = subprocess.run(
        [python, "-c", code], env=tenure.environment(), capture_output=True, text=True, check=True
    )

    assert ran.stdout.split() == []


def subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    (found,) = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
    return dict(found.choices)
