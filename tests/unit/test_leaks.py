"""The oracle that judges whether something leaked is worth what it finds."""

from __future__ import annotations

import json
from base64 import b64encode, urlsafe_b64encode
from urllib.parse import quote

import pytest

from leaks import AN_ID, assert_absent, canary, distinctive, forms, leaks
from tenure.ids import new_id, to_uuid

WORD = "c4nary-0f1e2d3c4b5a/é ß&a5b4c3d2e1f0"


@pytest.mark.parametrize("before", ["", "u", "us", "use", "user:"])
@pytest.mark.parametrize("after", ["", "x", "xy"])
def test_base64_is_found_wherever_it_begins(before: str, after: str) -> None:
    data = f"{before}{WORD}{after}".encode()

    assert leaks(f"Basic {b64encode(data).decode()}", [WORD])
    assert leaks(f"Basic {urlsafe_b64encode(data).decode().rstrip('=')}", [WORD])


@pytest.mark.parametrize(
    "said",
    [
        *(WORD, WORD.lower(), WORD.upper(), repr(WORD), ascii(WORD), json.dumps(WORD)),
        *(str(WORD.encode()), quote(WORD), quote(WORD, safe=""), WORD.encode().hex()),
        *(f"{WORD[:18]}...", f"...{WORD[18:]}", str({"a": WORD}), f"x{WORD}y"),
    ],
)
def test_a_word_is_found_in_every_form(said: str) -> None:
    assert leaks(said, [WORD])
    with pytest.raises(AssertionError, match="c4nary"):
        assert_absent(["other-word-1", WORD], "nothing here", f"some words {said} and more")


def test_nothing_is_found_where_nothing_is() -> None:
    text = f"RuntimeError: [redacted] at jobs.py:12, {new_id()}, {canary()}"

    assert leaks(text, [WORD]) == []
    assert all(len(shape) >= 8 for _, shape in forms(WORD)), "shorter ones are there by chance"


def test_what_of_a_payload_is_looked_for() -> None:
    payload = {"to": "ann@example.com", "n": [12345678, 5], "id": new_id(), "word": "process"}
    payload |= {"uuid": str(to_uuid(new_id())), "text": "no digits at all in this one"}

    assert distinctive(json.dumps(payload)) == {"ann@example.com", "12345678"}
    assert AN_ID.fullmatch(new_id())
