"""Opening, migrating and closing a store."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from tenure.store import Store

from .builders import get, put


def test_migrating_names_what_ran_and_a_second_time_runs_nothing(
    make_store: Callable[[], Store],
) -> None:
    store = make_store()

    assert store.migrate()
    assert store.migrate() == []


def test_migrating_keeps_the_jobs(store: Store) -> None:
    id = put(store)

    store.migrate()

    assert get(store, id).status == "queued"


def test_several_may_migrate_an_empty_database_at_once(make_store: Callable[[], Store]) -> None:
    stores = [make_store() for _ in range(4)]
    barrier = threading.Barrier(len(stores))

    def migrate(store: Store) -> list[str]:
        barrier.wait(30)
        return store.migrate()

    with ThreadPoolExecutor(len(stores)) as pool:
        ran = list(pool.map(migrate, stores))

    # Every migration ran once, whoever of the four ran it.
    names = [name for names in ran for name in names]
    assert names
    assert len(names) == len(set(names))
    assert put(stores[0])


def test_closing_twice_is_closing_once_and_a_closed_store_reopens(store: Store) -> None:
    id = put(store)

    store.close()
    store.close()

    assert get(store, id).status == "queued"
    assert put(store)


def test_what_one_store_wrote_another_one_reads(
    store: Store, make_store: Callable[[], Store]
) -> None:
    id = put(store)
    store.close()

    assert get(make_store(), id).id == id
