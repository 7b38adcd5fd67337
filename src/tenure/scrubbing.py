"""Texts of failures without the payload's values and without secrets.

Exception texts love to quote the value they choked on. What a handler says about its failure goes
through a `Scrubber` before anybody else sees it: the store, the audit trail, hooks, our log. Our
own words are put around it afterwards, so that no payload can eat them.
"""

from __future__ import annotations

import re
from binascii import a2b_base64
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from typing import TypeAlias

from tenure.payload import MAX_BYTES, decode
from tenure.secrecy import PLAIN_NAME, compiled, json_inside, spans

MAX_TEXT = 8_192
_WORK = 100_000  # comparisons of values with places in the text: 40 ms
_ANYWHERE_FROM = 8  # characters; shorter values count only as words of their own
_EDGE = 6  # characters of a cut-off value that give it away
_LEAST_PART = 4  # characters of a secret's part that are one themselves
_MOST_SECRETS = 131_072  # characters
_FRAGMENT = 8  # characters of a key that give it away wherever they stand
_OPAQUE = r"(?a)(?=[^\d]*\d)[\w+/=.-]{16,}+"  # a key; words and addresses have fragments in common
_LEAST_DECODED = 5  # characters; what is not base64 at all decodes to chance
_PLAIN = r"[A-Za-z0-9]{3,}"
_LONG = 30  # characters; from here on values get cut off
_CUT = r"['\"`]?(?:\.\.\.|…)['\"`]?|\Z"
_QUOTES = ("'", '"', "`")
_SHORT_WORD = r"[a-z]{3}"
_BASE64 = r"(?a)[A-Za-z0-9+/_-]{8,}"
_HEX = r"(?a)[0-9A-Fa-f]{10,}"
_USER_AND_WORD = r"[^:\s/]++:([^:\s/]++)"

_VALUE, _SECRET = 1, 2
_Scalar: TypeAlias = str | int | float


class Scrubber:
    """Takes the values of one payload, and the secrets its run has fetched, out of texts.

    Strings from 3 characters (plain, escaped, URL-quoted, as base64 or hex; also cut off by `...`),
    numbers from 3 digits. Values under 8 characters count as words of their own only, so that
    `err` leaves `error` alone, and lower-case words of 3 letters only in quotes. Secrets of any
    length; whatever else looks like one goes too.
    """

    def __init__(self, payload_text: str, secrets: Sequence[str] = ()) -> None:
        self._payload_text = payload_text
        self._secrets = secrets

    def __call__(self, text: str) -> str:
        """Never raises: what cannot be examined within bounds is withheld."""
        try:
            page = _Page(text[:MAX_TEXT])
            page.mark(self._values, _VALUE)
            if sum(map(len, self._secrets)) > _MOST_SECRETS:
                raise OverflowError
            for secret in self._secrets:
                parts = _parts(secret)
                page.mark(parts, _SECRET)
                page.mark_fragments(part for part in parts if compiled(_OPAQUE).fullmatch(part))
            return page.cleared()
        except Exception:  # OverflowError mostly
            return "[redacted]"

    @cached_property
    def _values(self) -> set[_Scalar]:
        if len(self._payload_text) > 4 * MAX_BYTES:
            raise OverflowError
        return _scalars(decode(self._payload_text)) if self._payload_text else set()


def without_secrets(text: str) -> str:
    """What looks like a secret goes, nothing else: for a text that knows neither the payload nor
    what was fetched."""
    pieces, position = list[str](), 0
    for _, start, end in spans(text):
        pieces += text[position:start], "[secret]"
        position = end
    return "".join(pieces) + text[position:]


class _Page:
    """A text, behind it what its base64 and hex stand for, and what of both must go."""

    def __init__(self, text: str) -> None:
        self._own = len(text)
        self._codes: list[tuple[int, int, int, int]] = []  # where in the text, where behind it
        pieces, length = [text], len(text)
        for start, end, plain in _decoded(text):
            self._codes.append((start, end, length + 1, length + 1 + len(plain)))
            pieces += "…", plain  # the mark of a cut: a piece may begin and end inside a value
            length += 1 + len(plain)
        self._text = text = "".join(pieces)
        self._escaped = "\\" in text
        self._quoted = "%" in text or "+" in text or "&" in text
        self._grouped = "," in text
        self._marks = bytearray(length)
        self._places: dict[str, list[int]] = {}  # of each three characters in the text
        for index in range(length - 2):
            self._places.setdefault(self._text[index : index + 3], []).append(index)
        self._cuts = [cut.span() for cut in compiled(_CUT).finditer(self._text)]
        self._words: list[tuple[int, int, int]] = []
        self._work = 0

    def mark(self, scalars: Iterable[_Scalar], mark: int) -> None:
        text = self._text
        for form in self._forms(scalars, least=3 if mark == _VALUE else 1):
            if len(form) < 3:
                heads, tails = [m.start() for m in re.finditer(re.escape(form), text)], []
            else:
                heads = self._places.get(form[:3], [])
                tails = self._places.get(form[-3:], []) if len(self._cuts) > 1 else []
            if (work := self._work + len(heads) + len(tails)) > _WORK:
                raise OverflowError
            self._work = work
            found = [(at, at + len(form)) for at in heads if text.startswith(form, at)]
            if len(form) < _ANYWHERE_FROM:
                self._words += [
                    (start, end, mark)
                    for start, end in found
                    if start < self._own or end - start >= _LEAST_DECODED
                ]
                found = []
            for start, end in chain(found, _cut_off(text, form, heads, tails, self._cuts)):
                self._set(start, end, mark)

    def mark_fragments(self, keys: Iterable[str]) -> None:
        """Both ways through one text: 64 KiB of a key take 20 ms."""
        text = self._text
        for key in keys:
            pieces = {key[at : at + _FRAGMENT] for at in range(len(key) - _FRAGMENT + 1)}
            for at in range(len(text) - _FRAGMENT + 1):
                if text[at : at + _FRAGMENT] in pieces:
                    self._set(at, at + _FRAGMENT, _SECRET)

    def cleared(self) -> str:
        text, marks = self._text[: self._own], self._marks
        for _, start, end in spans(text):
            self._set(start, end, _SECRET)
        self._mark_words()
        for start, end, at, until in self._codes:
            if any(marks[at:until]):
                self._set(start, end, max(marks[at:until]))
        pieces, position = list[str](), 0
        for run in re.finditer(rb"[\1\2]+", marks[: self._own]):  # what touches becomes one
            hidden = "[secret]" if _SECRET in run[0] else "[redacted]"
            pieces += text[position : run.start()], hidden
            position = run.end()
        return ("".join(pieces) + text[position:])[:MAX_TEXT]

    def _set(self, start: int, end: int, mark: int) -> None:
        self._marks[start:end] = bytes((mark,)) * (end - start)

    def _forms(self, scalars: Iterable[_Scalar], least: int) -> set[str]:
        """The ways in which they could stand in the text. Nearly all are ruled out by three of
        their characters: 40,000 values take 30 ms."""
        text, places = self._text, self._places
        forms: set[str] = set()
        for scalar in scalars:
            if not isinstance(scalar, str):
                forms.update(_digits(scalar, grouped=self._grouped))
                continue
            forms.update((scalar, scalar.lower(), scalar.strip(), *_retyped(scalar)))
            if len(scalar) >= _ANYWHERE_FROM:
                forms.add(scalar.upper())
            if (self._escaped or self._quoted) and not (scalar.isalnum() and scalar.isascii()):
                plain = compiled(_PLAIN).findall(scalar[:_LONG])  # what no escaping changes
                if all(run in text for run in (plain if len(scalar) < _LONG else plain[:1])):
                    forms.update(_escaped(scalar) if self._escaped else ())
                    forms.update(_quoted(scalar) if self._quoted else ())
        return {
            form
            for form in forms
            if len(form) >= least
            and (form[:3] in places or form[-3:] in places or (len(form) < 3 and form in text))
        }

    def _mark_words(self) -> None:
        """Short values; again, because what stood next to one may be gone now."""
        words = self._words
        for _ in range(8):
            if not (found := [word for word in words if self._own_word(*word)]):
                break
            for word in found:
                self._set(*word)
            words = [word for word in words if 0 in self._marks[word[0] : word[1]]]

    def _own_word(self, start: int, end: int, mark: int) -> bool:
        """Neither side goes on with more of the same: letters with letters, digits with digits."""
        text, marks = self._text, self._marks
        before = "" if start == 0 or marks[start - 1] else text[start - 1]
        after = "" if end == len(text) or marks[end] else text[end]
        if mark == _VALUE and compiled(_SHORT_WORD).fullmatch(text, start, end):
            return before in _QUOTES and after in _QUOTES
        if before.isalpha() and text[max(0, start - 2) : start - 1] == "\\":
            before = ""  # the n of an escaped line feed
        return not (_same(before, text[start]) or _same(text[end - 1], after))


def _same(left: str, right: str) -> bool:
    return (left.isalpha() and right.isalpha()) or (left.isdigit() and right.isdigit())


def _cut_off(
    text: str, form: str, heads: list[int], tails: list[int], cuts: list[tuple[int, int]]
) -> Iterator[tuple[int, int]]:
    """The head of a value before `...` or the end of the text, its tail after `...`: libraries
    shorten what they quote, and we cut texts ourselves."""
    for start in heads:
        before = cuts[bisect_left(cuts, (start, 0))][0]  # the last one is the end of the text
        if _EDGE <= before - start < len(form) and form.startswith(text[start:before]):
            yield start, before
    for start in tails:
        if index := bisect_right(cuts, start, key=lambda span: span[1]):
            after, end = cuts[index - 1][1], start + 3
            if _EDGE <= end - after < len(form) and form.endswith(text[after:end]):
                yield after, end


# -- values -------------------------------------------------------------------------------------
def _scalars(payload: object) -> set[_Scalar]:
    """Strings and numbers of a payload, also of JSON inside its strings, and keys that are data
    rather than names."""
    found: set[_Scalar] = set()
    stack = [payload]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            found.update(key for key in item if not compiled(PLAIN_NAME).fullmatch(key))
            stack += item.values()
        elif isinstance(item, list):
            stack += item
        elif isinstance(item, (str, int, float)):  # True has no three digits
            found.add(item)
            if isinstance(item, str) and item[:1] in ("{", "["):
                stack.append(json_inside(item))
    return found


def _parts(secret: str) -> set[str]:
    """A secret, and what is taken out of one: its lines, the values of its JSON, a password."""
    parts = {secret.strip(), *map(str.strip, secret.splitlines())}
    parts.update(secret[start:end] for _, start, end in spans(secret))
    parts.update(map(str, _scalars(json_inside(secret))))
    if pair := compiled(_USER_AND_WORD).fullmatch(secret):
        parts.add(pair[1])
    return {secret, *(part for part in parts if len(part) >= _LEAST_PART)}


def _digits(value: float, *, grouped: bool) -> Iterator[str]:
    value = abs(value)
    if len(written := repr(value)) - ("." in written) > 2:
        yield written
        if grouped:
            yield f"{value:,}"
        if "." in written:
            yield written.removesuffix(".0")


# -- forms --------------------------------------------------------------------------------------
def _escaped(value: str) -> Iterator[str]:
    import json

    for form in (
        *(repr(value)[1:-1], ascii(value)[1:-1], repr(value.encode())[2:-1]),
        *(json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]),
    ):
        yield form
        yield form.replace("\\", "\\\\")  # quoted once more, as a KeyError does


def _retyped(value: str) -> tuple[str, ...]:
    """How Python shows what it was stored as: a datetime, a UUID."""
    if value[10:11] == "T" and value[4:5] == "-":
        return (value.replace("T", " ").replace("Z", "+00:00"),)
    return (value.replace("-", ""),) if len(value) == 36 and value[8] == "-" else ()


def _quoted(value: str) -> Iterator[str]:
    from html import escape
    from urllib.parse import quote

    quoted = quote(value, safe="")
    yield from (quoted, quoted.replace("%2F", "/"), quoted.replace("%20", "+"))
    yield from (escape(value), escape(value, quote=False))


def _decoded(text: str) -> Iterator[tuple[int, int, str]]:
    """Start and end of what may be base64 or hex, and what it would stand for. Where the code
    begins within its word is unknown (`key-aHVudGVyMg`): four tries, for hex two."""
    for word in compiled(_BASE64).finditer(text):
        code = word[0].replace("-", "+").replace("_", "/")
        for skip in range(min(4, len(code) - 7)):
            rest = code[skip : len(code) - ((len(code) - skip) % 4 == 1)]
            yield *word.span(), a2b_base64(rest + "==").decode("utf-8", "replace")
    for word in compiled(_HEX).finditer(text):
        for skip in (0, 1):
            even = word[0][skip : len(word[0]) - (len(word[0]) - skip) % 2]
            yield *word.span(), bytes.fromhex(even).decode("utf-8", "replace")
