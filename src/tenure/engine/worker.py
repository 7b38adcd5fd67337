"""`tenure worker`: one supervisor process and its children.

The supervisor imports no user code, so it learns from its first child where the jobs are: the
hello carries the app's settings and the types it knows.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any

from tenure.config import Settings
from tenure.engine import machine
from tenure.engine.children import Child
from tenure.engine.embedded import stopped_by_signals
from tenure.engine.launcher import CannotStart, Launcher, Streams
from tenure.engine.messages import Hello, Refused
from tenure.engine.reload import Sources
from tenure.engine.supervisor import LONGEST_PAUSE, Supervisor
from tenure.engine.worker_options import Summary, WorkerOptions, parse_queues, point_out_unknown
from tenure.engine.worker_state import WorkerState
from tenure.errors import ConfigError
from tenure.store import Store
from tenure.wakeup import Wakeup

log = logging.getLogger("tenure.worker")

STARTS = 5  # of a first child that is killed each time
# Claims and finishes, and whatever else there is in between; with one for the lease and two for
# hints a worker has five.
CONNECTIONS = 2
# Thousands of claimed jobs come and go here without a cycle among them: looking for one after
# every 700 new objects costs 5 % of a drain.
COLLECT_AFTER = 50_000


def run_worker(
    spec: str,
    open_store: Callable[[Settings], Store],
    open_wakeup: Callable[[Settings, Store], Wakeup],
    *,
    queues: str | Sequence[str] | None = None,
    concurrency: int | None = None,
    processes: int | None = None,
    shutdown_timeout: float | None = None,
    max_jobs_per_child: int | None = None,
    max_memory_per_child: int | None = None,
    name: str | None = None,
    drain: bool = False,
    max_jobs: int | None = None,
    reload: bool = False,
    streams: Streams | None = None,
    on_working: Callable[[Settings, WorkerState], None] | None = None,
) -> Summary:
    wanted_queues = parse_queues(queues)
    worker_id = machine.new_worker_id()
    launcher = Launcher(spec, processes=processes, reload=reload, streams=streams)
    first, hello = _first_child(launcher, worker_id, concurrency, reload)
    chosen: dict[str, Any] = {
        "concurrency": concurrency,
        "processes": processes,
        "shutdown_timeout": shutdown_timeout,
        "max_jobs_per_child": max_jobs_per_child,
        "max_memory_per_child": max_memory_per_child,
    }
    given = {setting: value for setting, value in chosen.items() if value is not None}
    settings = Settings.from_env(hello.environment)
    settings = replace(settings, connections=min(settings.connections, CONNECTIONS), **given)
    first.concurrency = settings.concurrency
    first.greeted()
    options = WorkerOptions(
        queues=wanted_queues if queues is not None else parse_queues(settings.queues),
        concurrency=settings.concurrency,
        processes=settings.processes,
        drain=drain,
        max_jobs=max_jobs,
        reload=reload,
        name=name,
    )
    children, working = [first], False
    try:
        with suppress(CannotStart):  # the supervisor tries again
            while len(children) < options.processes:  # they import the app while we open the store
                children.append(launcher.start(worker_id, options.concurrency))
        with closing(open_store(settings)) as store:
            # Fails here when there are no tables; on SQLite it keeps a connection open, and so the
            # log the wake-up watches. Nothing is migrated: a worker's role may not be allowed to.
            used = store.queue_names()
            with closing(open_wakeup(settings, store)) as wakeup:
                supervisor = Supervisor(store, settings, wakeup, options, launcher)
                supervisor.learn(hello)
                supervisor.enlist(worker_id)
                point_out_unknown(options.queues, used, hello.queues)
                gc.freeze()
                gc.set_threshold(COLLECT_AFTER)
                with stopped_by_signals(supervisor.state):  # before `on_working` says that we work
                    if on_working is not None:
                        on_working(settings, supervisor.state)
                    working = True
                    return supervisor.run(children)
    finally:
        if not working:  # else the supervisor has closed them
            for child in children:
                child.kill("the worker did not start")
                child.close()


def _first_child(
    launcher: Launcher, worker_id: str, concurrency: int | None, reload: bool
) -> tuple[Child, Hello]:
    """The child that tells us what the app is. One that was killed before it could (by hand, for
    want of memory) says nothing about the app: another is started. With `reload` code that cannot
    be loaded is waited for until it changes."""
    patience = Settings.load().start_timeout  # ours: what the app says is not known yet
    killings = 0
    while True:
        child = _start_patiently(launcher, worker_id, concurrency)
        try:
            said = child.channel.receive(patience)
        except TimeoutError:
            child.kill("it did not say hello")
            child.close()
            raise ConfigError(
                f"the app could not be loaded: it took longer than {patience:g} s to import; "
                "TENURE_START_TIMEOUT allows for more"
            ) from None
        if isinstance(said, Hello):
            return child, said
        how = said.message if isinstance(said, Refused) else child.how_it_died()
        killed = said is None and child.process is not None and (child.process.returncode or 0) < 0
        child.kill("the app could not be loaded")
        child.close()
        if reload and isinstance(said, Refused):
            _wait_for_a_change(said)
            continue
        killings += 1
        if not killed or killings == STARTS:
            raise ConfigError(f"the app could not be loaded: {how}")
        log.warning("the first child is gone before it said hello: %s; starting another", how)


def _start_patiently(launcher: Launcher, worker_id: str, concurrency: int | None) -> Child:
    """While no process is to be had nothing is lost, and this worker need not be started anew."""
    pause = 1.0
    while True:
        try:
            return launcher.start(worker_id, concurrency)
        except CannotStart as error:
            log.warning("no process can be started (%s): trying again in %.0f s", error, pause)
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)


def _wait_for_a_change(said: Refused) -> None:
    log.error("the app could not be loaded: %s", said.message)
    log.info("waiting for the next change")
    sources = Sources()
    sources.watch(said.folders)
    log.info("%s has changed: trying again", sources.wait(threading.Event()))
