"""`tenure worker`: one supervisor process and its children.

The supervisor imports no user code, so it learns from its first child where the jobs are: the
hello carries the app's settings and the types it knows.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tenure.config import Settings
from tenure.engine import host
from tenure.engine.crew import Child, Crew
from tenure.engine.embedded import stopped_by_signals
from tenure.engine.plan import Plan, Summary, parse_queues
from tenure.engine.supervisor import Supervisor
from tenure.engine.wire import FromChild, Hello, Refused
from tenure.errors import ConfigError
from tenure.store import Store
from tenure.wakeup import Wakeup

HELLO_SECONDS = 120.0
# Claims and finishes, and whatever else there is in between; with one for the lease and two for
# hints a worker has five.
CONNECTIONS = 2


def run_fleet(
    spec: str,
    open_store: Callable[[Settings], Store],
    open_wakeup: Callable[[Settings, Store], Wakeup],
    *,
    queues: str | Sequence[str] | None = None,
    concurrency: int | None = None,
    processes: int | None = None,
    shutdown_timeout: float | None = None,
    name: str | None = None,
    drain: bool = False,
    max_jobs: int | None = None,
) -> Summary:
    wanted_queues = parse_queues(queues)
    mail: queue.SimpleQueue[tuple[Child, FromChild | None]] = queue.SimpleQueue()
    worker_id = host.new_worker_id()
    crew = Crew(
        spec,
        lambda: worker_id,
        lambda child, message: mail.put((child, message)),
        lambda child: mail.put((child, None)),
    )
    first = crew.start(concurrency)
    hello = _hello(first, mail)
    chosen: dict[str, Any] = {
        "concurrency": concurrency,
        "processes": processes,
        "shutdown_timeout": shutdown_timeout,
    }
    given = {setting: value for setting, value in chosen.items() if value is not None}
    settings = Settings.from_env(hello.environment)
    settings = replace(settings, connections=min(settings.connections, CONNECTIONS), **given)
    first.concurrency, first.ready = settings.concurrency, True
    plan = Plan(
        queues=wanted_queues if queues is not None else parse_queues(settings.queues),
        concurrency=settings.concurrency,
        processes=settings.processes,
        drain=drain,
        max_jobs=max_jobs,
        name=name,
    )
    store = open_store(settings)
    try:
        # Fails here when there are no tables; on SQLite it keeps a connection open, and so the log
        # the wake-up watches. Nothing is migrated: the role of a worker may not be allowed to.
        store.queue_names()
        wakeup = open_wakeup(settings, store)
        supervisor = Supervisor(store, settings, wakeup, plan)
        supervisor.learn(hello)
        supervisor.enlist(worker_id)
        crew.on_message, crew.on_end = supervisor.on_message, supervisor.on_end
        crew.worker_id = lambda: supervisor.worker_id
        while not mail.empty():  # it died between its hello and now
            supervisor.on_end(mail.get()[0])
        try:
            with stopped_by_signals(supervisor):
                return supervisor.run(crew.start, [first])
        finally:
            wakeup.close()
    finally:
        store.close()


def _hello(child: Child, mail: queue.SimpleQueue[tuple[Child, FromChild | None]]) -> Hello:
    try:
        _, said = mail.get(timeout=HELLO_SECONDS)
    except queue.Empty:
        said = None
    if isinstance(said, Hello):
        return said
    child.kill("the app could not be loaded")
    child.close()
    why = said.message if isinstance(said, Refused) else "its process ended without a word"
    raise ConfigError(f"the app could not be loaded: {why}")
