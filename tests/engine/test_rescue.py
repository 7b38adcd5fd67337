"""Which workers are dead, by what the rescuer of another worker has seen."""

from __future__ import annotations

import time

import tenure
from contract.builders import worker
from places import Place
from tenure.engine.rescue import Rescuer
from tenure.engine.worker_options import WorkerOptions
from tenure.engine.worker_state import WorkerState

from .parts import NoHints

LEASE = 0.5
FORGET = {
    "postgres": ["TRUNCATE tenure_workers RESTART IDENTITY"],
    "sqlite": [
        "DELETE FROM tenure_workers",
        "DELETE FROM sqlite_sequence WHERE name = 'tenure_workers'",
    ],
}


def test_what_was_seen_of_a_worker_is_not_held_against_another_of_its_number(
    app: tenure.App, place: Place
) -> None:
    """A restored backup gives numbers again: one that had just begun was taken for the one that
    had stood still."""
    app.migrate()
    elsewhere = {"host": "elsewhere", "boot": "x", "lease_ms": int(1000 * LEASE)}
    still = worker(app.store, **elsewhere)
    state = WorkerState(WorkerOptions(), app.settings, NoHints())
    rescuer = Rescuer(app.store, state)
    state.worker = worker(app.store)
    rescuer.look()

    for statement in FORGET[place.kind]:
        place.sql(statement)
    time.sleep(2 * LEASE)
    fresh = worker(app.store, **elsewhere)
    assert fresh.no == still.no
    state.lease.renewed(time.monotonic())
    rescuer.look()

    assert [(row.id, row.dead_at) for row in app.store.workers()] == [(fresh.id, None)]
