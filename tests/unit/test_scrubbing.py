from __future__ import annotations

import json
import re
from base64 import b64encode, urlsafe_b64encode
from collections.abc import Callable
from html import escape
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookalikes import JWT, LETTERS, REPEATED, SIZE, pem
from stopwatch import within
from tenure.payload import encode
from tenure.scrubbing import MAX_TEXT, Scrubber, without_secrets


def scrub(text: str, payload: str, secrets: list[str] | None = None) -> str:
    return Scrubber(payload, secrets or [])(text)


def own_word(value: str, text: str) -> bool:
    """A value of under eight characters survives inside a longer word only."""
    if len(value) >= 8:
        return value in text
    left = "" if not value[0].isalnum() else r"(?<![^\W\d_])" if value[0].isalpha() else r"(?<!\d)"
    right = "" if not value[-1].isalnum() else r"(?![^\W\d_])" if value[-1].isalpha() else r"(?!\d)"
    return re.search(left + re.escape(value) + right, text) is not None


PAYLOAD = {
    "to": "alice@example.com",
    "name": 'O\'Brien "Bob"',
    "city": "Zürich\n",
    "user": 4711,
    "amount": 1234567.5,
    "n": [1, 22, True, None, {"deep": ["Grünstraße 7", "new", "USD"]}],
    "carol@example.com": 1,
    "at": "2026-11-16T10:00:00Z",
    "order": "8c5e2f0e-9d8b-4a52-8a5f-0d1b3cf0f0a1",
    "essay": "It was a dark and stormy night; " * 50,
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ValueError: no 'alice@example.com'", "ValueError: no '[redacted]'"),
        ("no ALICE@example.com, alice@example.com", "no ALICE@example.com, [redacted]"),
        (f"KeyError: {PAYLOAD['name']!r}", "KeyError: '[redacted]'"),
        (f"bad json {json.dumps(PAYLOAD['name'])}", 'bad json "[redacted]"'),
        (f"bad json {json.dumps(PAYLOAD['city'])}", 'bad json "[redacted]"'),
        ("user 4711, user4711, 47110", "user [redacted], user[redacted], 47110"),
        ("1,234,567.5 and -1234567.5", "[redacted] and -[redacted]"),
        ("at Grünstraße 7!", "at [redacted]!"),
        (f"GET /s?q={quote('Grünstraße 7')}", "GET /s?q=[redacted]"),
        (
            r"repr '\nUSD' and b'Gr\xc3\xbcnstra\xc3\x9fe 7'",
            r"repr '\n[redacted]' and b'[redacted]'",
        ),
        ("a new thing, not 'new'", "a new thing, not '[redacted]'"),
        ("22 of True is None", "22 of True is None"),
        ("KeyError: 'carol@example.com'", "KeyError: '[redacted]'"),
        ("input_value='It was a dark...stormy night; '", "input_value='[redacted]...[redacted]'"),
        ("too long: It was a da", "too long: [redacted]"),
        ("no slot at 2026-11-16 10:00:00+00:00", "no slot at [redacted]"),
        ("no 8c5e2f0e9d8b4a528a5f0d1b3cf0f0a1", "no [redacted]"),
        ("", ""),
    ],
)
def test_values_of_the_payload_are_redacted(text: str, expected: str) -> None:
    assert scrub(text, encode(PAYLOAD)) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"bad token ghp_{LETTERS}.", "bad token [secret]."),
        (f"{JWT} expired", "[secret] expired"),
        (f"key {pem('RSA PRIVATE KEY')}is bad", "key [secret]\nis bad"),
        (f"key {pem('RSA PRIVATE KEY')[:60]}", "key [secret]"),
        ("cannot reach postgres://bob:hunter2@db/x", "cannot reach postgres://bob:[secret]@db/x"),
        ("sent 'Authorization: Bearer abc123'", "sent 'Authorization: Bearer [secret]'"),
        ("dsn host=db password=hunter2", "dsn host=db password=[secret]"),
    ],
)
@pytest.mark.parametrize("payload", ["", "null", "{}", '{"a":[1,"x"]}'])
def test_secrets_from_elsewhere_are_hidden(text: str, expected: str, payload: str) -> None:
    assert scrub(text, payload) == expected


def test_overlapping_values_leave_no_rest() -> None:
    payload = encode(["hello world", "world peace and love", "redacted"])

    assert scrub("say hello world peace and love redacted", payload) == (
        "say [redacted] [redacted]"
    )


@pytest.mark.parametrize("payload", ["{", "not json", '"\\ud800"', "[" * 100_000, "1" * 2_000_000])
def test_what_cannot_be_examined_is_withheld(payload: str) -> None:
    assert scrub("bad 'alice'", payload) == "[redacted]"


def test_long_texts_are_cut_and_leave_no_part_of_a_value() -> None:
    value = "x" * (MAX_TEXT - 20) + "alice in wonderland" * 20

    scrubbed = scrub(f"ValueError: {value}", encode([value]))

    assert scrubbed == "ValueError: [redacted]"
    assert len(scrub("ab1 " * 10_000, encode(["ab1"]))) <= MAX_TEXT


# -- secrets a run has fetched --------------------------------------------------------------------
TOKEN = "s3cr3t-T0ken-4b1f/ß of shop"
SHAPES: list[Callable[[str], str]] = [
    str,
    str.lower,
    str.upper,
    repr,
    ascii,
    json.dumps,
    quote,
    escape,
    lambda word: repr(repr(word)),
    lambda word: repr(word.encode()),
    lambda word: quote(word, safe="").replace("%20", "+"),
    lambda word: word.encode().hex(),
    lambda word: f"0x{word.encode().hex().upper()}",
    lambda word: b64encode(word.encode()).decode(),
    lambda word: urlsafe_b64encode(b"u:" + word.encode()).decode(),
    lambda word: f"key-{b64encode(word.encode()).decode()}",
    lambda word: f"{word[:14]}...",
    lambda word: f"{word[:14]!r}...",
    lambda word: f"...{word[-14:]}",
]


@pytest.mark.parametrize("shape", SHAPES, ids=range(len(SHAPES)))
@pytest.mark.parametrize("known", ["secret", "payload"])
def test_every_form_is_hidden(shape: Callable[[str], str], known: str) -> None:
    text = f"cannot log in with {shape(TOKEN)}"
    secrets, payload = ([TOKEN], "") if known == "secret" else ([], encode({"a": [TOKEN]}))

    scrubbed = scrub(text, payload, secrets)

    assert scrubbed.startswith("cannot log in with ")
    rest = scrubbed.removeprefix("cannot log in with ")
    hidden = "[secret]" if known == "secret" else "[redacted]"
    assert hidden in rest
    assert len(rest) <= len(hidden) + 6, rest  # quotes, dots, the sign of padding


@pytest.mark.parametrize(
    ("secret", "text", "expected"),
    [
        ("4821", "4821, 48210, pin=4821, x4821y", "[secret], 48210, pin=[secret], x[secret]y"),
        ("abc", "abc, abcd, 'abc'", "[secret], abcd, '[secret]'"),
        ("x", "x, xx, 'x'", "[secret], xx, '[secret]'"),
        ("", "nothing is hidden", "nothing is hidden"),
        ("hunter2", "hunter2 Hunter2 hunter22", "[secret] Hunter2 hunter22"),
        ("hunter2\n", "no hunter2", "no [secret]"),
        ("bob:hunter2", "bob said hunter2", "bob said [secret]"),
        ("postgres://bob:hunter2@db/x", "no hunter2 at db", "no [secret] at db"),
        ('{"user": "app", "key": "hunter2"}', "the app: hunter2", "the app: [secret]"),
        ("first line\nsecond line\nend", "in 'second line', end", "in '[secret]', end"),
        ("k9f8e7d6c5b4a3928170", "starts with k9f8e7d6c", "starts with [secret]"),
        ("k9f8e7d6c5b4a3928170", "has e7d6c5b4a39 inside", "has [secret] inside"),
        ("k9f8e7d6c5b4a3928170", "k9f8 and 8170", "k9f8 and 8170"),
        ("correct horse battery staple", "a battery or a horse", "a battery or a horse"),
    ],
)
def test_secrets_are_hidden_as_far_as_they_are_ones(secret: str, text: str, expected: str) -> None:
    assert scrub(text, "", [secret]) == expected


def test_ordinary_texts_stay_as_they_are() -> None:
    text = (
        "HTTPConnectionPool(host='example.com', port=443): Max retries exceeded with url: /v1/item "
        "(Caused by 8c5e2f0e-9d8b-4a52-8a5f-0d1b3cf0f0a1, e3b0c44298fc1c149afbf4c8996fb924)"
    )
    payload = encode({"to": "a@b.c", "names": ["ann", "bob"], "n": [1, 22, 4711], "path": "items2"})

    assert scrub(text, payload, ["s3cr3t-T0ken-4b1f", "hunter2"]) == text


words = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=30)
glue = st.sampled_from([" ", ": ", "'", '"', ", ", "=", "\n", "x", "_", "7", "...", "\\", "%", "Ä"])


@given(st.lists(words | st.integers(0, 2**53 - 1), max_size=6), st.data())
def test_no_value_survives(scalars: list[str | int], data: st.DataObject) -> None:
    forms: list[Callable[[str], str]] = [str, repr, json.dumps, ascii]
    written = st.sampled_from(scalars or [""]).flatmap(
        lambda value: st.sampled_from(forms).map(lambda form: form(str(value)))
    )
    text = "".join(data.draw(st.lists(written | glue, max_size=12)))
    scrubbed = scrub(text, encode({"a": scalars}))

    plain = scrubbed.replace("[redacted]", "\0").replace("[secret]", "\0")
    for value in map(str, scalars):
        short = len(value) < 3 or re.fullmatch("[a-z]{3}", value)
        assert short or not own_word(value, plain), (value, text)


@given(st.text(), st.text(), st.lists(st.text(), max_size=3))
def test_scrub_never_raises(text: str, payload: str, secrets: list[str]) -> None:
    assert len(scrub(text, payload, secrets)) <= MAX_TEXT


# -- time ---------------------------------------------------------------------------------------
@pytest.mark.timed
@pytest.mark.parametrize("unit", REPEATED)
def test_pathological_texts_take_linear_time(unit: str) -> None:
    text = (unit * SIZE)[:SIZE]

    assert within(200, lambda: scrub(text, json.dumps([text])))
    assert within(200, lambda: scrub(text, "", [text[:65_536]]))


@pytest.mark.timed
@pytest.mark.parametrize(
    "scalars",
    [
        list(range(100, 43_000)),
        [f"value {index}" for index in range(18_000)],
        [f"é%{index}" for index in range(21_000)],
        ["a" * size for size in range(3, 700)],
        [f"aaaaaa{index}" for index in range(18_000)],
        [{"password_ref": "x", "n": index} for index in range(8_000)],
        ["no such thing " * 18_000],
    ],
    ids=["numbers", "strings", "escaped", "nested", "heads", "objects", "essay"],
)
@pytest.mark.parametrize(
    "text",
    ["value 17 \\ % 1234 " * 455, "a" * 8_192, "aaaaaa1..." * 800, "no such thing ..." * 480],
)
def test_many_values_are_scrubbed_within_bounds(scalars: list[object], text: str) -> None:
    payload = encode(scalars)

    assert within(200, lambda: scrub(text, payload))
    assert within(200, lambda: scrub(text, "", [payload[:65_536], "\n".join(payload[:65_536])]))


def test_a_text_that_knows_no_payload_loses_only_what_looks_like_a_secret() -> None:
    key, other = (
        "sk_live_" + "4eC39HqLyjWDarjtT1zdp7dc",
        "ghp_" + "16C7e42F292c6912E7710c838347Ae178B4a",
    )
    source = f'stripe.api_key = "{key}"\nsend_email(other, "{other}")\n'

    shown = without_secrets(source)

    assert key not in shown and other not in shown
    assert shown.count("[secret]") == 2
    assert "send_email(other" in shown
    assert without_secrets("charge(order, cents)") == "charge(order, cents)"
