from __future__ import annotations

import enum
import json
import math
import subprocess
import sys
import traceback
from collections import OrderedDict
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenure import payload
from tenure.errors import PayloadError
from tenure.payload import decode, encode

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
)
keys = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=5)
plain = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(keys, inner))

anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters())
    | st.binary(max_size=3)
    | st.datetimes()
    | st.decimals(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(
            st.text(st.characters(), max_size=4) | st.integers() | st.booleans() | st.none(),
            inner,
            max_size=4,
        )
    ),
)


def nested(levels: int, innermost: object = 1) -> object:
    value = innermost
    for level in range(levels):
        value = [value] if level % 2 else {"a": value}
    return value


def refusal(value: object, **options: Any) -> str:
    with pytest.raises(PayloadError) as caught:
        encode(value, **options)
    return str(caught.value)


@given(plain)
def test_what_is_json_comes_back_equal(value):
    assert decode(encode(value)) == value
    assert json.loads(encode(value)) == value


@given(anything)
def test_the_fast_path_and_the_walk_give_the_same_verdict(value):
    def verdict(function: Any) -> object:
        try:
            return json.loads(function())
        except PayloadError as error:
            return str(error)

    assert verdict(lambda: encode(value)) == verdict(
        lambda: payload._encode_checked(value, "payload", payload.MAX_BYTES)
    )


def test_the_text_is_compact_and_not_escaped():
    value = {"b": [1, 2.5, None, True], "a": "grün/✓"}
    assert encode(value) == '{"b":[1,2.5,null,true],"a":"grün/✓"}'


def test_relatives_of_json_types_are_taken_for_what_they_are():
    class Colour(str, enum.Enum):  # noqa: UP042 (as written before 3.11)
        RED = "red"

    class Level(enum.IntEnum):
        HIGH = 3

    class Text(str):
        __slots__ = ()

    class Number(float):
        __slots__ = ()

    class Point(NamedTuple):
        x: int
        y: int

    value = {
        "colour": Colour.RED,
        Text("level"): Level.HIGH,
        "text": Text("t"),
        "number": Number(0.5),
        "point": Point(1, 2),
        "ordered": OrderedDict(a=(1,)),
    }
    assert decode(encode(value)) == {
        "colour": "red",
        "level": 3,
        "text": "t",
        "number": 0.5,
        "point": [1, 2],
        "ordered": {"a": [1]},
    }


@pytest.mark.parametrize(
    ("value", "path", "reason"),
    [
        ({"items": [0, 1, 2, {"name": "a\0b"}]}, "payload.items[3].name ", "NUL"),
        ({"a\0": 1}, "a key of payload ", "NUL"),
        ({"a": {"\ud800": 1}}, "a key of payload.a ", "surrogate"),
        ({"a": ["x", "\udfff"]}, "payload.a[1] ", "surrogate"),
        ({"n": math.nan}, "payload.n ", "NaN"),
        ([math.inf], "payload[0] ", "infinite"),
        ({"n": -math.inf}, "payload.n ", "infinite"),
        ({"n": 2**63}, "payload.n ", "2**63"),
        ({"n": -(2**63) - 1}, "payload.n ", "2**63"),
        ({"n": 2**64 - 1}, "payload.n ", "64 bits"),
        ({"n": 10**400}, "payload.n ", "pass it as a string"),
        ({1: 2}, "payload has a key of type int", "str(key)"),
        ({"a": [{1.5: 2}]}, "payload.a[0] has a key of type float", "str(key)"),
        ({"a": {True: 2}}, "payload.a has a key of type bool", "str(key)"),
        ({None: 2}, "payload has a key of type NoneType", "str(key)"),
        ({"1": 2, 1: 2}, "payload has a key of type int", "str(key)"),
        ({"t": datetime.now(UTC)}, "payload.t is of type datetime", "convert"),
        ({"d": Decimal(1)}, "payload.d is of type Decimal", "convert"),
        ({"b": b"x"}, "payload.b is of type bytes", "convert"),
        ({"s": {1}}, "payload.s is of type set", "convert"),
        ({"o": object()}, "payload.o is of type object", "convert"),
        ({"a": {"odd key": {1}}}, "payload.a['odd key'] is of type set", "convert"),
        (object, "payload is of type type", "convert"),
    ],
)
def test_what_some_store_cannot_keep_is_refused_by_path(value, path, reason):
    message = refusal(value)
    assert message.startswith(path)
    assert reason in message


def test_the_path_starts_with_the_word_of_the_caller():
    assert refusal({"a": {1}}, what="result").startswith("result.a is of type set")


@pytest.mark.parametrize(
    "number",
    [
        *(2**53 - 1, 2**53 + 1, 10**18 - 1, 10**18, 2**63 - 1, -(2**63), -(2**63) + 1),
        *(0.1 + 0.2, 1e300, 5e-324, -0.0, 2.0**63, 1234567890123456789.0),
    ],
)
def test_numbers_at_the_edge_are_kept(number):
    found = decode(encode({"n": number}))["n"]

    assert (found, type(found)) == (number, type(number))
    assert math.copysign(1, found) == math.copysign(1, number)


def test_text_that_only_looks_suspicious_is_kept():
    value = {"a": "\\u0000", "b": "1234567890123456789", "c": "[{" * 100, "d": "\x7f\u2028"}
    assert decode(encode(value)) == value
    assert decode(encode("[" * 100)) == "[" * 100


@pytest.mark.parametrize("innermost", [1, "\\u0000"], ids=["fast path", "walk"])
def test_64_levels_pass_and_65_do_not(innermost):
    assert decode(encode(nested(64, innermost))) == nested(64, innermost)
    assert "nested deeper than 64 levels" in refusal(nested(65, innermost))


def test_depth_is_not_fooled_by_brackets_in_strings():
    value: object = 1
    for _ in range(100):
        value = ["]", value, "["]
    assert "nested deeper" in refusal(value)


def test_many_containers_beside_each_other_are_not_deep():
    value = [{"a": [1]} for _ in range(500)]
    assert decode(encode(value)) == value


@pytest.mark.parametrize("levels", [65, 500, 990, 1_000, 1_100, 100_000])
def test_very_deep_values_are_refused_by_path(levels):
    message = refusal(nested(levels))

    assert "nested deeper than 64 levels" in message
    steps = ".a[0].a[0].a[0].a[0].a[0].a[0]" if levels % 2 else "[0].a[0].a[0].a[0].a[0].a[0].a"
    assert message.startswith(f"payload{steps}... is nested"), "twelve steps are enough to find it"


def test_circular_values_are_refused_not_fatal():
    circle: dict[str, object] = {}
    circle["self"] = [circle]
    assert refusal(circle).startswith("payload.self[0] contains itself")
    shared = [1]
    assert encode([shared, shared, {"a": shared}]) == '[[1],[1],{"a":[1]}]'


class OddList(list):  # type: ignore[type-arg]
    def __iter__(self):
        while True:
            yield 1

    def __len__(self):
        raise RuntimeError("no length")

    def __eq__(self, other):
        raise RuntimeError("not to be compared")

    __hash__ = None  # type: ignore[assignment]


class OddDict(dict):  # type: ignore[type-arg]
    def items(self):
        raise RuntimeError("no items")

    __iter__ = keys = values = items

    def __eq__(self, other):
        return "neither"


class OddText(str):
    __slots__ = ()

    def __str__(self):
        raise RuntimeError("no text")

    __repr__ = encode = isascii = __str__

    def __eq__(self, other):
        return False

    __hash__ = str.__hash__


class OddNumber(int):
    def __int__(self):
        raise RuntimeError("no number")

    __index__ = __str__ = __repr__ = __int__

    def __le__(self, other):
        return True

    __ge__ = __lt__ = __gt__ = __le__


class Liar:
    """Equal to everything, and of every class."""

    def __eq__(self, other):
        return True

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (OddList([1, OddList([2])]), "[1,[2]]"),
        (OddDict(a=OddDict(b=1)), '{"a":{"b":1}}'),
        ({OddText("a"): OddText("b")}, '{"a":"b"}'),
        ([OddNumber(5), OddNumber(2**60)], f"[5,{2**60}]"),
    ],
)
def test_values_are_taken_for_what_they_hold_not_for_what_they_say(value, text):
    assert encode(value) == text


def test_what_a_value_says_does_not_let_it_pass():
    for value in (OddNumber(2**63), OddText("\0"), OddList([object()]), [OddDict(a=2**70)], Liar()):
        assert refusal({"a": value}).startswith("payload.a")
    assert "contains itself" in refusal([circle := OddList(), circle.append(circle)])


def test_the_limit_counts_utf8_bytes():
    value = "é" * 10  # 20 bytes and two quotes
    assert encode(value, max_bytes=22)
    message = refusal(value, max_bytes=21)
    assert "22 bytes" in message
    assert "at most 21" in message
    assert "pass a reference" in message
    assert encode("x" * 262_142)
    assert "262,145 bytes" in refusal("x" * 262_143)


@pytest.mark.parametrize("poison", ["\0", "\ud800"])
def test_values_never_appear_in_messages(poison):
    assert "hunter2" not in refusal({"password": "hunter2" + poison})
    assert "hunter2" not in refusal({"password": "hunter2"}, max_bytes=5)
    with pytest.raises(PayloadError) as caught:
        encode({"password": "hunter2" + poison})
    text = "".join(traceback.format_exception(caught.value))
    assert "UnicodeEncodeError" not in text  # it would carry the text
    with pytest.raises(PayloadError) as caught:
        decode(b'{"password": "hunter2\xff"}')
    assert "hunter2" not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("text", ["", "{", "NaN", "[1,]", b"\xff", '{"a":1} x', "[" * 100_000])
def test_decode_refuses_what_is_not_json(text):
    with pytest.raises(PayloadError, match=r"^not "):
        decode(text)


def test_decode_takes_text_and_bytes():
    assert decode('{"a":[1,null]}') == decode(b'{"a":[1,null]}') == {"a": [1, None]}


def test_importing_the_module_is_light():
    program = (
        "import sys; import tenure.ids, tenure.payload, tenure.policy, tenure.config; "
        "print([m for m in ('msgspec', 'asyncio', 'logging', 'tomllib', 'random', 'uuid', "
        "'json', 'secrets') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {program}"],
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    assert done.stdout.strip() == "[]"
