"""Being written."""

from __future__ import annotations

REMEDY = "Pass a reference instead."


def looks_secret(text: str) -> bool:
    return False


def find_secret(value: object, what: str = "payload") -> str | None:
    return None


def scrub(text: str, payload_text: str) -> str:
    return text
