"""Stores as the conformance suite has them, with a clock to turn, and apps on their databases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import tenure
from contract.builders import Clock
from contract.conftest import clock, kind, location, make_store, store
from tenure.operations.scope import Scope
from tenure.store import Store

__all__ = ["clock", "kind", "location", "make_store", "store"]

Enter = Callable[..., Any]


@pytest.fixture
def enter(store: Store, clock: Clock) -> Enter:
    """`enter(Jobs, org="acme")`: a room on this test's store, in a scope."""

    def room(of: Callable[..., Any], **scope: Any) -> Any:
        return of(store, Scope(**scope), clock)

    return room


@pytest.fixture
def app(kind: str, location: str, store: Store) -> Iterator[tenure.App]:
    """An app on this test's database, with the real clock."""
    opened = tenure.App(f"sqlite:///{location}" if kind == "sqlite" else location)
    yield opened
    opened.close()
