"""What the owner lays down with `migrate --set`, and what `doctor` says about retention."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from places import PostgresPlace, SqlitePlace
from tenure.app import open_store
from tenure.config import Settings
from tenure.store import Store

from .conftest import SHOP, Cli, Ran, enlist

DAY_MS = 86_400_000


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/jobs.db"
    make: Callable[..., str] = request.getfixturevalue("make_database")
    return make(migrated=True)


@pytest.fixture
def tenure(tmp_path: Path, url: str) -> Cli:
    (tmp_path / "shop.py").write_text(SHOP.replace("sqlite:///jobs.db", url), "utf-8")
    return Cli(tmp_path)


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    opened = open_store(Settings(url=url))
    opened.migrate()
    yield opened
    opened.close()


def said(ran: Ran, check: str) -> list[tuple[str, str]]:
    return [(f["level"], f["message"]) for f in ran.objects if f["check"] == check]


def test_floors_are_laid_down_and_taken_back(tenure: Cli, store: Store) -> None:
    ran = tenure.shop("migrate", "--set", "keep_events=30d", "--set", "audit=all")
    assert (ran.code, ran.err) == (0, "")
    assert "keep_events is 30 days: kept so long, whatever a program's settings say\n" in ran.out
    assert "audit is all: no program writes less to the trail\n" in ran.out
    assert store.settings() == {"keep_events": str(30 * DAY_MS), "audit": "all"}

    ran = tenure.shop("migrate", "--set", "keep_events=none", "--set", "keep_history=90m")
    assert "keep_events is each program's own again\n" in ran.out
    assert store.settings() == {"keep_history": str(90 * 60_000), "audit": "all"}
    ran = tenure.shop("migrate", "--set", "keep_events=1h", "--set", "audit=all", "--json")
    assert ran.object == {"applied": [], "set": {"keep_events": 3_600_000, "audit": "all"}}
    tenure.shop("migrate", "--set", "keep_events=none")
    ran = tenure.shop("migrate", "--set", "keep_history=", "--json")
    assert ran.object == {"applied": [], "set": {"keep_history": None}}
    assert store.settings() == {"audit": "all"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--set", "keep_dead=1d"], "give one of keep_events, keep_history, audit"),
        (["--set", "keep_events"], "as NAME=VALUE"),
        (["--set", "keep_events=soon"], "'soon' is not a delay"),
        (["--set", "keep_events=99999999d"], "at most 36525d"),
        (["--set", "audit=some"], "audit is all, errors or none"),
        (["--sql", "--set", "audit=all"], "without --sql"),
    ],
)
def test_what_cannot_be_laid_down(
    tenure: Cli, store: Store, given: list[str], message: str
) -> None:
    ran = tenure.shop("migrate", *given)

    assert (ran.code, message in ran.err) == (2, True), ran.err
    assert store.settings() == {}


def test_doctor_says_whose_settings_are_clamped(tenure: Cli, store: Store) -> None:
    for name, value in {"keep_events": 60 * DAY_MS, "keep_history": DAY_MS}.items():
        store.lay_down(name, str(value), by="x")
    store.lay_down("audit", "all", by="x")
    id = enlist(store, audit="errors", keep=[3600.0, 90 * 86_400.0]).id  # type: ignore[attr-defined]

    found = said(tenure.shop("doctor", "--json"), "settings")

    assert found == [
        ("warning", "this app asks to keep events for 30 days; the owner's keep_events of 60 days "
                    "holds"),
        ("warning", f"worker {id} asks to keep finished jobs for 60 min; the owner's keep_history "
                    "of 24 h holds"),
        ("warning", f"worker {id} asks for audit 'errors'; the owner's 'all' holds"),
    ]  # fmt: skip


def test_doctor_says_how_retention_gets_on(tenure: Cli, store: Store) -> None:
    def retention() -> tuple[str, str]:
        (found,) = said(tenure.shop("doctor", "--json"), "retention")
        return found

    assert retention() == ("ok", "has never run; workers do it once a minute")
    now = int(time.time() * 1000)
    assert store.take_turn("retention", 60, now_ms=now)
    store.end_turn("retention", {"removed": {"keys": 3, "history": 2000}})
    level, text = retention()
    assert (level, text.endswith(" ago, removed 2,003")) == ("ok", True)

    held = {
        "held": "history_20260101 could not be dropped: session 7 (shop, psql) has a lock on it"
    }
    store.end_turn("retention", held | {"held_since": now - 60_000})
    assert retention()[0] == "ok"
    store.end_turn("retention", held | {"held_since": now - 3 * 3_600_000})
    assert retention() == ("warning", f"held up for 3 h: {held['held']}")
    store.end_turn("retention", {"failed": "no such luck"})
    assert retention()[1].endswith("and failed: no such luck")


def test_doctor_says_when_workers_run_and_retention_does_not(
    tenure: Cli, store: Store, url: str
) -> None:
    enlist(store)
    hour_ago = int(time.time() * 1000) - 3_600_000
    place = (
        SqlitePlace(Path(url.removeprefix("sqlite:///")))
        if url.startswith("sqlite:")
        else PostgresPlace(url)
    )
    place.sql("UPDATE tenure_workers SET started_at = ?", hour_ago)
    assert store.take_turn("retention", 60, now_ms=hour_ago)

    (found,) = said(tenure.shop("doctor", "--json"), "retention")

    assert found == (
        "warning",
        "last ran 60 min ago, though workers run: what is past its time stays",
    )
