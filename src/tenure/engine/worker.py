"""`tenure worker`: one supervisor process and its children.

The supervisor imports no user code, so it learns from its first child where the jobs are: the
hello carries the app's settings and the types it knows.
"""

from __future__ import annotations

import gc
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any

from tenure.config import Settings
from tenure.engine import machine
from tenure.engine.children import CannotStart, Child, Launcher, Streams
from tenure.engine.embedded import stopped_by_signals
from tenure.engine.messages import FromChild, Hello, Refused
from tenure.engine.sources import Sources
from tenure.engine.supervisor import Supervisor
from tenure.engine.worker_options import Summary, WorkerOptions, parse_queues, point_out_unknown
from tenure.errors import ConfigError
from tenure.store import Store
from tenure.wakeup import Wakeup

log = logging.getLogger("tenure.worker")

LONGEST_PAUSE = 30.0  # between two tries, while the system has no process to give
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
    on_working: Callable[[Settings, Supervisor], None] | None = None,
) -> Summary:
    wanted_queues = parse_queues(queues)
    mail = _Mail()
    worker_id = machine.new_worker_id()
    crew = Launcher(spec, lambda: worker_id, mail.put, lambda child: mail.put(child, None), streams)
    crew.processes = processes or 0
    crew.reloads = reload
    first, hello = _first_child(lambda: _insist(lambda: crew.start(concurrency)), mail, reload)
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
    plan = WorkerOptions(
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
            while len(children) < plan.processes:  # they import the app while we open the store
                children.append(crew.start(plan.concurrency))
        with closing(open_store(settings)) as store:
            # Fails here when there are no tables; on SQLite it keeps a connection open, and so the
            # log the wake-up watches. Nothing is migrated: a worker's role may not be allowed to.
            used = store.queue_names()
            with closing(open_wakeup(settings, store)) as wakeup:
                supervisor = Supervisor(store, settings, wakeup, plan)
                supervisor.learn(hello)
                supervisor.enlist(worker_id)
                crew.on_message, crew.on_end = supervisor.on_message, supervisor.on_end
                crew.worker_id = lambda: supervisor.worker_id
                mail.forward(supervisor)
                point_out_unknown(plan.queues, used, hello.queues)
                gc.freeze()
                gc.set_threshold(COLLECT_AFTER)
                with stopped_by_signals(supervisor):  # before anybody is shown that we work
                    if on_working is not None:
                        on_working(settings, supervisor)
                    working = True
                    return supervisor.run(crew.start, children)
    finally:
        if not working:  # else it has closed them
            for child in children:
                child.kill("the worker did not start")
                child.close()


class _Mail:
    """What children say (None: their end) before there is a supervisor to hear it."""

    def __init__(self) -> None:
        self._kept: queue.SimpleQueue[tuple[Child, FromChild | None]] = queue.SimpleQueue()
        self._supervisor: Supervisor | None = None
        self._lock = threading.Lock()

    def put(self, child: Child, said: FromChild | None) -> None:
        with self._lock:
            if self._supervisor is None:
                self._kept.put((child, said))
            else:  # its pipe asked us a moment before it was told of the supervisor
                _tell(self._supervisor, child, said)

    def get(self, timeout: float | None) -> FromChild | None:
        """Of the first child, while it is the only one."""
        return self._kept.get(timeout=timeout)[1]

    def forward(self, supervisor: Supervisor) -> None:
        with self._lock:
            self._supervisor = supervisor
            while not self._kept.empty():
                _tell(supervisor, *self._kept.get())


def _tell(supervisor: Supervisor, child: Child, said: FromChild | None) -> None:
    if said is None:
        supervisor.on_end(child)
    else:
        supervisor.on_message(child, said)


def _insist(start: Callable[[], Child]) -> Child:
    """No process to be had: nothing is lost yet, and whoever started us need not do it again."""
    pause = 1.0
    while True:
        try:
            return start()
        except CannotStart as error:
            log.warning("no process can be started (%s): trying again in %.0f s", error, pause)
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)


def _first_child(start: Callable[[], Child], mail: _Mail, reload: bool) -> tuple[Child, Hello]:
    """The child that tells us what the app is. One that was killed before it could (by hand, for
    want of memory) says nothing about the app: another is started. With `reload` code that cannot
    be loaded is waited for until it changes."""
    patience = Settings.load().start_timeout  # ours: what the app says is not known yet
    killings = 0
    while True:
        child = start()
        try:
            said = mail.get(timeout=patience)
        except queue.Empty:
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
            _wait_for_a_change(mail, said)
            continue
        killings += 1
        if not killed or killings == STARTS:
            raise ConfigError(f"the app could not be loaded: {how}")
        log.warning("the first child is gone before it said hello: %s; starting another", how)


def _wait_for_a_change(mail: _Mail, said: Refused) -> None:
    log.error("the app could not be loaded: %s", said.message)
    log.info("waiting for the next change")
    mail.get(timeout=None)  # its end
    sources = Sources()
    sources.watch(said.folders)
    log.info("%s has changed: trying again", sources.wait(threading.Event()))
