"""What must not be there: planted words, looked for in every form in which texts carry them, over
all that a run leaves behind. An oracle of its own: it uses no line of the code that hides them.
"""

from __future__ import annotations

import json
import re
import secrets
from base64 import b64encode, urlsafe_b64encode
from collections.abc import Iterable, Iterator
from html import escape
from urllib.parse import quote, quote_plus

from places import Place, SqlitePlace

LEAST_HALF = 8  # characters: half of a shorter word says nothing
AN_ID = re.compile(r"[0-9A-HJKMNP-TV-Z]{26}|[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")

# All that is said about a job, beside the payload it must not repeat.
SAID = """
SELECT CAST(payload AS text), error || ' ' || coalesce(error_code, '') ||
       ' ' || coalesce(error_place, '') || ' ' || coalesce(cancel_reason, '') ||
       ' ' || coalesce(traceback, '')
  FROM tenure_jobs WHERE error IS NOT NULL
UNION
SELECT CAST(payload AS text), error || ' ' || coalesce(error_code, '') ||
       ' ' || coalesce(traceback, '')
  FROM tenure_history WHERE error IS NOT NULL
UNION
SELECT CAST(j.payload AS text), CAST(e.data AS text)
  FROM tenure_events e JOIN job_queue j ON j.id = e.job_id WHERE e.data IS NOT NULL
"""


def canary() -> str:
    """A word that nothing says by chance; some of it has to be escaped wherever that is done."""
    return f"c4nary-{secrets.token_hex(6)}/é ß&{secrets.token_hex(6)}"


def forms(word: str) -> Iterator[tuple[str, str]]:
    """(what it is called, what it looks like), of the word and of its halves."""
    middle = len(word) // 2
    pieces = {"": word}
    if middle >= LEAST_HALF:
        pieces |= {"first half, ": word[:middle], "second half, ": word[middle:]}
    for part, piece in pieces.items():
        yield f"{part}plain", piece
        yield f"{part}lower", piece.lower()
        yield f"{part}upper", piece.upper()
        yield f"{part}repr", repr(piece)[1:-1]
        yield f"{part}ascii", ascii(piece)[1:-1]
        yield f"{part}bytes", repr(piece.encode())[2:-1]
        yield f"{part}json", json.dumps(piece)[1:-1]
        yield f"{part}json, unicode", json.dumps(piece, ensure_ascii=False)[1:-1]
        yield f"{part}url", quote(piece)
        yield f"{part}url, all of it", quote(piece, safe="")
        yield f"{part}form", quote_plus(piece)
        yield f"{part}html", escape(piece)
        yield f"{part}hex", piece.encode().hex()
        yield f"{part}hex, upper", piece.encode().hex().upper()
        for shift in range(3):  # behind `user:` it is another text
            yield f"{part}base64 + {shift}", _core(b64encode, piece, shift)
            yield f"{part}base64 for URLs + {shift}", _core(urlsafe_b64encode, piece, shift)


def _core(encode: object, piece: str, shift: int) -> str:
    """The digits that depend on the piece alone, whatever stands around it."""
    data = b"\0" * shift + piece.encode()
    digits: str = encode(data).decode()  # type: ignore[operator]
    return digits[-(-shift * 4 // 3) : len(data) * 4 // 3]


def leaks(text: str, words: Iterable[str]) -> list[str]:
    """`the word as base64 + 1: …`, for each that is there."""
    return [
        f"{word!r} as {form}: ...{text[max(0, at - 60) : at + len(shape) + 20]!r}"
        for word in words
        for form, shape in forms(word)
        if (at := text.find(shape)) >= 0
    ]


def assert_absent(words: Iterable[str], *texts: str) -> None:
    for text in texts:
        found = leaks(text, words)
        assert found == [], "\n".join(found)


def assert_not_stored(words: Iterable[str], place: Place) -> None:
    """In no table, and in no page of the file: for what is in no payload and no result."""
    assert_absent(words, _tables(place))
    if isinstance(place, SqlitePlace):
        files = [place.path, place.path.with_name(f"{place.path.name}-wal")]
        data = b"".join(file.read_bytes() for file in files if file.exists())
        assert_absent(words, data.decode("utf-8", "replace"))


def _tables(place: Place) -> str:
    if isinstance(place, SqlitePlace):
        tables = "SELECT name FROM sqlite_master WHERE type = 'table' AND name LIKE 'tenure#_%'"
        names = [name for (name,) in place.sql(f"{tables} ESCAPE '#'")]
    else:
        tables = "SELECT tablename FROM pg_tables WHERE schemaname = 'tenure'"
        names = [f"tenure_{name}" for (name,) in place.sql(tables)]
    assert len(names) > 5, names
    rows = [row for name in names for row in place.sql(f"SELECT * FROM {name}")]
    return "\n".join(" ".join(map(str, row)) for row in rows)


def said_about_jobs(place: Place) -> list[tuple[str, str]]:
    return [(payload, said) for payload, said in place.sql(SAID)] if place.exists() else []


def assert_nothing_leaked(place: Place, logs: str = "") -> None:
    """For after every test that runs jobs: no word of a payload in what was stored or logged
    about its failure, whatever the test was about."""
    rows = said_about_jobs(place)
    found = [leak for payload, said in rows for leak in leaks(said, distinctive(payload))]
    assert found == [], "\n".join(found)
    lines = "\n".join(line for line in logs.splitlines() if "Error" in line)
    if lines:
        words = {word for payload, _said in rows for word in distinctive(payload)}
        assert_absent(words, lines)


def distinctive(payload: str) -> set[str]:
    """The values of a payload that a text of ours does not hold by chance."""
    found: set[str] = set()
    try:
        stack = [json.loads(payload)]
    except RecursionError:  # of a test about that
        return found
    while stack:
        item = stack.pop()
        if isinstance(item, (dict, list)):
            stack += item.values() if isinstance(item, dict) else item
        elif isinstance(item, str) and len(item) >= 10 and re.search("[0-9@]", item):
            found |= set() if AN_ID.fullmatch(item) else {item}
        elif isinstance(item, int) and abs(item) >= 10**7:
            found.add(str(abs(item)))
    return found
