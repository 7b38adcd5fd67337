"""docs/cli.md knows every command and every long option.

A command is documented by a heading with its name in it (## `tenure worker`); its options stand
in the text below that heading. Options of `tenure` itself are documented once, anywhere. A command
of a command (`tenure queues pause`) has its own heading or a place in its parent's text.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "cli.md"
HEADING = re.compile(r"^(?P<marks>#{1,6}) +(?P<title>.+)$")


def subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """By name, without aliases and without those hidden from --help."""
    found: dict[str, argparse.ArgumentParser] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                if command not in found.values():
                    found[name] = command
    return found


def long_options(parser: argparse.ArgumentParser) -> set[str]:
    return {
        option
        for action in parser._actions
        if action.help != argparse.SUPPRESS
        for option in action.option_strings
        if option.startswith("--") and option != "--help"
    }


def commands(
    parser: argparse.ArgumentParser, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], set[str]]]:
    """(("queues", "pause"), {"--reason"}), parents before their children."""
    for name, command in subcommands(parser).items():
        yield (*path, name), long_options(command)
        yield from commands(command, (*path, name))


def mentions(text: str, word: str) -> bool:
    return re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", text) is not None


def section(page: str, path: tuple[str, ...]) -> str:
    """The text under the heading of this command, up to the next heading as high; '' if none."""
    wanted = " ".join(path)
    taken: list[str] = []
    depth, in_code = 0, False
    for line in page.splitlines():
        in_code ^= line.lstrip().startswith("```")
        heading = None if in_code else HEADING.match(line)
        if heading and depth and len(heading["marks"]) <= depth:
            depth = 0
        if heading and not depth:
            # `tenure queues` and bare `queues`, but `queues` is not `queues pause`.
            names = re.findall(r"`(?:tenure +)?([^`]+)`", heading["title"]) or [
                heading["title"].removeprefix("tenure ")
            ]
            if any(re.match(rf"{re.escape(wanted)}(?= +[^a-z]|$)", name) for name in names):
                depth = len(heading["marks"])
        if depth:
            taken.append(line)
    return "\n".join(taken)


def undocumented(parser: argparse.ArgumentParser, page: str) -> list[str]:
    everywhere = long_options(parser)
    missing = [f"tenure {option}" for option in sorted(everywhere) if not mentions(page, option)]
    for path, options in commands(parser):
        name = "tenure " + " ".join(path)
        text = section(page, path)
        if not text and len(path) > 1 and mentions(parent := section(page, path[:-1]), path[-1]):
            text = parent
        if not text:
            missing.append(f"{name}: no heading")
            continue
        missing += [
            f"{name} {option}"
            for option in sorted(options - everywhere)
            if not mentions(text, option)
        ]
    return missing


def test_every_command_and_option_is_documented() -> None:
    from tenure.cli import build_parser

    parser = build_parser()
    assert subcommands(parser), "build_parser() offers no commands"
    assert PAGE.is_file(), "docs/cli.md is missing"

    missing = undocumented(parser, PAGE.read_text("utf-8"))

    assert not missing, "docs/cli.md says nothing about:\n" + "\n".join(missing)


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("tenure")
    parser.add_argument("-A", "--app")
    top = parser.add_subparsers()
    worker = top.add_parser("worker", aliases=["work"])
    worker.add_argument("--drain", "--burst", action="store_true")
    worker.add_argument("--app")
    queues = top.add_parser("queues")
    pause = queues.add_subparsers().add_parser("pause")
    pause.add_argument("--reason")
    return parser


COMPLETE = """
# Commands
`-A/--app` names the app.
## `tenure worker [-Q QUEUES]`
`--drain` (or `--burst`) stops when nothing is left.
## `tenure queues`
`pause` takes `--reason`.
"""


def test_a_complete_page_is_complete(parser: argparse.ArgumentParser) -> None:
    assert undocumented(parser, COMPLETE) == []


def test_what_is_missing_is_named(parser: argparse.ArgumentParser) -> None:
    page = COMPLETE.replace("--burst", "--burst-mode").replace("--reason", "a reason")

    assert undocumented(parser, page) == ["tenure worker --burst", "tenure queues pause --reason"]
    assert undocumented(parser, "# `tenure --app`") == [
        "tenure worker: no heading",
        "tenure queues: no heading",
        "tenure queues pause: no heading",
    ]
