"""`workshop(text, **settings)`: an app in this test's directory, its workers ended afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from places import Place, place, store_kind

from .harness import Workshop

__all__ = ["place", "store_kind"]


@pytest.fixture
def workshop(tmp_path: Path, place: Place) -> Iterator[Callable[..., Workshop]]:
    opened: list[Workshop] = []

    def open_workshop(text: str, **settings: Any) -> Workshop:
        opened.append(Workshop(tmp_path, place, text, **settings))
        return opened[-1]

    yield open_workshop
    for shop in opened:
        shop.close()
