from __future__ import annotations

import json
import logging
import re
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenure.observe.log import JsonFormatter, PlainFormatter

# Everything by which some reader of a log ends a line, moves a cursor or turns the direction.
UNSAFE = [
    *map(chr, [*range(0x09), *range(0x0B, 0x20), *range(0x7F, 0xA0)]),
    *"\u061c\u200e\u200f\u2028\u2029\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\ud800\udfff",
]
A_LINE = re.compile(r"\d\d:\d\d:\d\d [A-Z]+ ")


def record(message: str, *args: object, **more: Any) -> logging.LogRecord:
    made = logging.LogRecord("tenure.job", logging.INFO, "jobs.py", 1, message, args, None)
    vars(made).update(more)
    return made


def plain(message: str, *args: object, **more: Any) -> str:
    return PlainFormatter().format(record(message, *args, **more))


def as_json(message: str, *args: object, **more: Any) -> str:
    return JsonFormatter().format(record(message, *args, **more))


@pytest.mark.parametrize("character", UNSAFE, ids=lambda character: f"{ord(character):04x}")
def test_no_control_character_gets_through(character: str) -> None:
    text = f"before{character}after"

    assert character not in plain("%s", text)
    assert character not in plain("all fine", job_id=f"1{character}", job_type="work")
    assert character not in as_json("%s", text, job_id=text)
    assert json.loads(as_json("%s", text))["message"] == text
    assert "before\\" in plain("%s", text)


def test_ordinary_texts_stay_as_they_are() -> None:
    text = "größer 大 \t 🔑 naïve 'quoted' \\ back\u00a0space"

    assert plain("%s", text).endswith(f" INFO    {text}")
    assert text.replace("\\", "\\\\").replace("\t", "\\t") in as_json("%s", text)


def test_further_lines_are_indented() -> None:
    said = plain("first\r\n12:00:00 ERROR   forged\n\nlast\n", job_id="J1", job_type="work")

    assert said[9:].splitlines() == [
        "INFO    first", "    12:00:00 ERROR   forged", "    ", "    last [work J1]",
    ]  # fmt: skip


def test_a_traceback_keeps_its_lines_and_forges_none() -> None:
    try:
        raise RuntimeError("no\n12:00:00 ERROR   forged\x1b[2J\u2028x")
    except RuntimeError:
        said = plain("it failed", exc_info=sys.exc_info())
        line = as_json("it failed", exc_info=sys.exc_info())

    first, *rest = said.splitlines()
    assert first.endswith("INFO    it failed")
    assert rest[0] == "    Traceback (most recent call last):"
    assert rest[-2:] == ["    RuntimeError: no", "    12:00:00 ERROR   forged\\x1b[2J\\u2028x"]
    assert all(text.startswith("    ") for text in rest)
    assert len(line.splitlines()) == 1
    assert "forged\x1b[2J\u2028x" in json.loads(line)["exception"]


def test_a_stack_is_shown() -> None:
    said = plain("here", stack_info="Stack (most recent call last):\n  File x\x1b")

    assert said.splitlines()[1:] == ["    Stack (most recent call last):", "      File x\\x1b"]
    assert "File x" in json.loads(as_json("here", stack_info="File x"))["stack"]


@given(st.text(st.characters() | st.sampled_from("\n\r\x1b\x85\u2028\x0b\x0c\x1c")))
def test_one_record_is_one_line_of_the_log(text: str) -> None:
    lines = plain("%s", text).splitlines() or [""]

    assert A_LINE.match(lines[0])
    assert not any(A_LINE.match(line) for line in lines[1:])
    assert len(as_json("%s", text).splitlines()) == 1
