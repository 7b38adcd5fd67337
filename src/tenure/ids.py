"""Job ids: ULIDs, 48 bits of milliseconds and 80 random bits as 26 Crockford base32 characters.

Ids made by one process only grow, also when the clock steps backwards. They order ties and nothing
else: whether a job is due is decided by the store's clock.
"""

from __future__ import annotations

import os
import re
import time
from _thread import allocate_lock  # threading.Lock, without the 1 ms threading takes to import
from typing import TYPE_CHECKING

from tenure.errors import JobError

if TYPE_CHECKING:
    from uuid import UUID

_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
# Two characters (10 bits) at a time: half the lookups of one character at a time.
_PAIRS = tuple(a + b for a in _ALPHABET for b in _ALPHABET)
_TO_INT = str.maketrans(_ALPHABET, "0123456789ABCDEFGHIJKLMNOPQRSTUV")
# Both cases spelled out: upper() first would let a long s (U+017F) pass as S.
_ULID = r"[0-7][0-9A-HJKMNP-TV-Za-hjkmnp-tv-z]{25}"
_UUID = r"[0-9a-fA-F]{32}|[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"

_LOW_BITS = 20
_LOW_LIMIT = 1 << _LOW_BITS


def _encode(number: int, pairs: int) -> str:
    """The last ``pairs * 2`` base32 characters of ``number``."""
    return "".join([_PAIRS[(number >> shift) & 1023] for shift in range(10 * (pairs - 1), -1, -10)])


class Ulids:
    """A source of growing ids; safe to share between threads, restarted in a forked child.

    The first id of a millisecond draws fresh random bits, the next ones count up from it. Only the
    last four characters are then encoded again: 0.5 µs an id instead of 2.5.
    """

    __slots__ = ("_head", "_high", "_lock", "_low", "_ms")

    def __init__(self) -> None:
        self._ms = -1
        self.restart()

    def restart(self) -> None:
        """Forget the sequence (a forked child must not continue its parent's) and the lock, which
        a thread that does not exist in the child may have held."""
        self._lock = allocate_lock()
        self._low = _LOW_LIMIT
        self._high = 0
        self._head = ""
        self._begin(self._ms)

    def _begin(self, ms: int) -> None:
        """Start a sequence at ``ms`` with fresh random bits. The top one stays 0, so that counting
        up cannot overflow into the time."""
        random = int.from_bytes(os.urandom(10)) >> 1
        self._ms = ms
        self._low = random & (_LOW_LIMIT - 1)
        self._set_high(random >> _LOW_BITS)

    def _set_high(self, high: int) -> None:
        self._high = high
        self._head = _encode((max(self._ms, 0) << 60) | high, 11)

    def new_id(self) -> str:
        ms = time.time_ns() // 1_000_000
        with self._lock:
            if ms > self._ms:
                self._begin(ms)
                low = self._low
            else:  # the same millisecond, or a clock that went backwards
                low = self._low + 1
                if low == _LOW_LIMIT:
                    low = 0
                    self._set_high(self._high + 1)
                self._low = low
            return self._head + _PAIRS[low >> 10] + _PAIRS[low & 1023]

    def new_ids(self, count: int) -> list[str]:
        """``count`` ids in order, all of one millisecond."""
        ids: list[str] = []
        if count < 1:
            return ids
        ms = time.time_ns() // 1_000_000
        with self._lock:
            if ms > self._ms:
                self._begin(ms)
            low = self._low + 1
            while len(ids) < count:
                if low == _LOW_LIMIT:
                    low = 0
                    self._set_high(self._high + 1)
                head = self._head + _PAIRS[low >> 10]
                last = low & 1023
                block = _PAIRS[last : last + count - len(ids)]
                ids += [head + pair for pair in block]
                low += len(block)
            self._low = low - 1
        return ids


# The one instance of this module: "only grows within the process" is a fact about the process, so
# its state belongs to the process, not to an App of which there may be several.
_ulids = Ulids()
new_id = _ulids.new_id
new_ids = _ulids.new_ids

if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_ulids.restart)


def parse_id(text: object) -> str:
    """The canonical ULID for a ULID in any case, or a UUID (text or object) of the same bits."""
    if isinstance(text, str):
        if re.fullmatch(_ULID, text):
            return text.upper()
        if re.fullmatch(_UUID, text):
            return _encode(int(text.replace("-", ""), 16), 13)
    else:
        from uuid import UUID

        if isinstance(text, UUID):
            return _encode(text.int, 13)
    raise JobError(f"{shown(text)} is not a job id: expected a ULID (26 characters) or a UUID")


def known_id(text: object) -> str | None:
    """The same for who looks a job up: None for what cannot be the id of any."""
    try:
        return parse_id(text)
    except JobError:
        return None


def shown(text: object) -> str:
    """What somebody gave for an id, short enough for a message."""
    words = repr(text)
    return words if len(words) <= 60 else f"{words[:56]}...{words[-1]}"


def to_uuid(ulid: str) -> UUID:
    from uuid import UUID

    return UUID(int=int(parse_id(ulid).translate(_TO_INT), 32))


def id_time_ms(ulid: str) -> int:
    """When the id was made, in milliseconds since 1970 by its maker's clock."""
    return int(parse_id(ulid)[:10].translate(_TO_INT), 32)
