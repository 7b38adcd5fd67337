"""What children print, as whole lines: however its bytes come, nothing of it moves the cursor."""

from __future__ import annotations

import pytest

from tenure.terminal.relay import _Lines


def shown(*chunks: bytes) -> str:
    lines = _Lines()
    return "".join(map(lines.feed, chunks)) + lines.rest()


@pytest.mark.parametrize(
    ("printed", "line"),
    [
        ("one\ntwo\n", "one\ntwo\n"),
        ("not ended", "not ended\n"),
        ("\n", "\n"),
        ("dos\r\n", "dos\n"),
        ("10 %\r20 %\r30 %\n", "30 %\n"),
        ("a\tb ü 日本 \u20ac\n", "a\tb ü 日本 \u20ac\n"),
        ("\x1b[31mred\x1b[0m\n", "\x1b[31mred\x1b[0m\x1b[0m\n"),
        ("\x1b[2K\x1b[1A\x1b[?25lup\x1b[10;3H\n", "up\n"),
        ("\x1b]0;title\x07text \x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\\n", "text link\n"),
        ("\x07\x08\x00\x7f\x9bbell\x1b7\x1b8\x1bc\x1b(B\n", "bell\n"),
    ],
)
def test_lines(printed: str, line: str) -> None:
    data = printed.encode()
    assert shown(data) == line
    assert shown(*(data[place : place + 1] for place in range(len(data)))) == line


def test_bytes_that_are_no_text_and_lines_without_end() -> None:
    assert shown(b"\xff\xfe x\n") == "\ufffd\ufffd x\n"
    lines = _Lines()
    assert lines.feed(b"x" * 70_000) == "x" * 70_000 + "\n"
    assert lines.unfinished == ""
