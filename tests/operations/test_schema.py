"""The tables: the SQL of what is pending, what their owner lays down."""

from __future__ import annotations

import pytest

import tenure
from tenure.store import Store


def test_nothing_is_pending(app: tenure.App, store: Store, kind: str) -> None:
    script = app.operations.schema.script()

    assert script.sql == "-- up to date: nothing is pending\n"
    assert app.operations.schema.on_a_server is (kind == "postgres")
    assert app.operations.schema.migrate() == []


def test_a_script_from_nothing(kind: str, location: str) -> None:
    app = tenure.App(f"sqlite:///{location}" if kind == "sqlite" else location)
    script = app.operations.schema.script()
    app.close()

    assert "BEGIN" in script.sql
    assert "0001_initial" in script.sql
    assert (script.version, script.note) == (None if kind == "sqlite" else 0, None)


def test_what_the_owner_lays_down(app: tenure.App, store: Store) -> None:
    owner = app.operations.narrowed(actor=("user", "7")).schema
    owner.lay_down({"keep_events": 1.5, "audit": "all"})
    assert store.settings() == {"keep_events": "1500", "audit": "all"}
    owner.lay_down({"keep_events": None})
    assert store.settings() == {"audit": "all"}
    with pytest.raises(tenure.ConfigError, match="lays down keep_events"):
        owner.lay_down({"keep_dead": 1})
