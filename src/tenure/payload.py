"""The one check of JSON values at the door, with the same verdict for every store.

SQLite, PostgreSQL and Redis disagree about NUL characters, lone surrogates, NaN, large integers and
deep nesting, so none of them is asked: what passes here can be stored and read back everywhere.
Error messages name the path to the culprit, never a value.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

from tenure.errors import PayloadError

MAX_BYTES = 262_144
MAX_DEPTH = 64
SHOWN_STEPS = 12  # of a path in a message
MIN_INTEGER, MAX_INTEGER = -(2**63), 2**63 - 1  # what every database has a type for

# Every digit becomes 0, every other byte a space: a long integer is then a plain substring. A
# regular expression over the text costs ten times as much.
_DIGITS = bytes(48 if 48 <= byte <= 57 else 32 for byte in range(256))
_LONG_NUMBER = b"0" * 19
# Compiled by `re` when first used, which is in a payload that is refused or odd: 0.2 ms.
_PLAIN_KEY = r"[A-Za-z_][A-Za-z0-9_]{0,63}"
_SURROGATE = "[\ud800-\udfff]"


@cache
def _codec() -> tuple[Callable[[object], bytes], Callable[[str | bytes], Any], type[Exception]]:
    import msgspec  # 29 ms: paid by the first payload, not by ``import tenure``

    return msgspec.json.Encoder().encode, msgspec.json.Decoder().decode, msgspec.DecodeError


def encode(value: object, *, what: str = "payload", max_bytes: int = MAX_BYTES) -> str:
    """``value`` as compact JSON text, or PayloadError naming the path to what cannot be stored.

    The fast path trusts nothing it has not seen come back: the text is decoded again and must equal
    the value, which catches coerced keys, NaN, bytes, datetimes and whatever else an encoder is
    helpful about. Anything suspicious is walked in Python, which gives the real verdict.
    """
    to_json, from_json, _ = _codec()
    try:
        data = to_json(value)
        if (
            len(data) <= max_bytes
            and b"\\u0000" not in data
            and _LONG_NUMBER not in data.translate(_DIGITS)
            and (decoded := from_json(data)) == value
            and (data.count(b"{") + data.count(b"[") <= MAX_DEPTH or not too_deep(decoded))
        ):
            return data.decode()
    except Exception:  # noqa: S110 (whatever the encoder or a value's == says, the walk says better)
        pass
    return _encode_checked(value, what, max_bytes)


def decode(text: str | bytes) -> Any:
    _, from_json, malformed = _codec()
    try:
        return from_json(text)
    except malformed as error:  # its message has a position, never a value
        raise PayloadError(f"not valid JSON: {error}; correct the text and try again") from None
    except UnicodeError:
        raise PayloadError("not valid JSON: the bytes are not UTF-8; encode them so") from None
    except RecursionError:
        raise PayloadError(
            f"not usable JSON: nested too deeply; keep it within {MAX_DEPTH} levels"
        ) from None


def too_deep(decoded: object) -> bool:
    """Whether a decoded value is nested beyond the limit: level by level, containers only."""
    level: list[Any] = [decoded] if isinstance(decoded, (dict, list)) else []
    for _ in range(MAX_DEPTH):
        level = [
            item
            for container in level
            for item in (container.values() if type(container) is dict else container)
            if type(item) is dict or type(item) is list
        ]
        if not level:
            return False
    return True


class _Refused(Exception):
    """What the walk found; the path to it is put together on the way out, so that a valid value
    never pays for it. ``message`` has ``{path}`` where the path belongs."""

    def __init__(self, message: str, *, foreign: bool = False) -> None:
        self.message = message
        self.foreign = foreign
        self.steps: list[str] = []


def _encode_checked(value: object, what: str, max_bytes: int) -> str:
    """The slow path: walk, then encode what the walk found to be plain JSON."""
    try:
        plain = _plain(value, 1, set())
    except _Refused as refused:
        steps = refused.steps[::-1]
        path = "".join(steps if len(steps) <= SHOWN_STEPS else [*steps[:SHOWN_STEPS], "..."])
        error = PayloadError(refused.message.replace("{path}", what + path)).quoting(path)
        error.foreign = refused.foreign
        raise error from None
    data = _codec()[0](plain)
    if len(data) > max_bytes:
        raise PayloadError(
            f"{what} has {len(data):,} bytes as JSON, at most {max_bytes:,} are allowed; "
            "store the data elsewhere and pass a reference to it"
        ).quoting()
    return data.decode()


def _plain(value: object, depth: int, ancestors: set[int]) -> object:
    """A copy made of JSON's own types only, or _Refused. Subclasses are read by the methods of
    their base: whatever `__iter__`, `items` or `__str__` of theirs would say, it is not asked.
    ``ancestors`` are the containers we are inside of."""
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        return _checked_text(str.__str__(value), "{path}")
    if isinstance(value, float):
        number = float.__float__(value)
        if number - number != 0.0:  # true of NaN and both infinities only
            raise _Refused(
                "{path} is NaN or infinite, which JSON cannot express; use None or a string"
            )
        return number
    if isinstance(value, int):
        whole = int.__int__(value)
        if not MIN_INTEGER <= whole <= MAX_INTEGER:
            raise _Refused(
                "{path} is an integer beyond 64 bits (-2**63 to 2**63 - 1); pass it as a string"
            )
        return whole
    if not isinstance(value, (dict, list, tuple)):
        raise _Refused(
            f"{{path}} is of type {type(value).__name__}, which is not JSON; convert it to a dict "
            "with str keys, list, str, int, float, bool or None",
            foreign=True,
        )
    if id(value) in ancestors:
        raise _Refused("{path} contains itself; break the circular reference")
    if depth > MAX_DEPTH:
        raise _Refused(f"{{path}} is nested deeper than {MAX_DEPTH} levels; flatten it")
    ancestors.add(id(value))
    copy: object
    if isinstance(value, dict):
        copy = _plain_dict(value, depth + 1, ancestors)
    else:
        copy = _plain_list(value, depth + 1, ancestors)
    ancestors.discard(id(value))
    return copy


def _plain_list(
    value: list[Any] | tuple[Any, ...], depth: int, ancestors: set[int]
) -> list[object]:
    items = list.__iter__(value) if isinstance(value, list) else tuple.__iter__(value)
    copy: list[object] = []
    try:
        for item in items:
            copy.append(_plain(item, depth, ancestors))
    except _Refused as refused:
        refused.steps.append(f"[{len(copy)}]")
        raise
    return copy


def _plain_dict(value: dict[Any, Any], depth: int, ancestors: set[int]) -> dict[str, object]:
    copy: dict[str, object] = {}
    for key, item in dict.items(value):
        if not isinstance(key, str):
            kind = type(key).__name__
            raise _Refused(
                f"{{path}} has a key of type {kind}; JSON keys are strings: use str(key)",
                foreign=True,
            )
        name = _checked_text(str.__str__(key), "a key of {path}")
        try:
            copy[name] = _plain(item, depth, ancestors)
        except _Refused as refused:
            refused.steps.append(_step(name))
            raise
    return copy


def _step(key: str) -> str:
    if re.fullmatch(_PLAIN_KEY, key):
        return f".{key}"
    return f"[{key!r}]" if len(key) <= 64 else "[...]"


def _checked_text(text: str, path: str) -> str:
    if "\0" in text:
        raise _Refused(
            f"{path} contains a NUL character, which PostgreSQL cannot store; remove it, "
            "or pass binary data as base64"
        )
    if not text.isascii() and re.search(_SURROGATE, text):
        raise _Refused(
            f"{path} contains a lone surrogate, which is not valid Unicode; decode the text "
            "with errors='replace' where it enters your program"
        )
    return text
