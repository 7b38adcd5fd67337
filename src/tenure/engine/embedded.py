"""A worker inside the program that enqueues: the same supervisor, an executor in a thread.

It renews its lease from a thread, so a handler that holds the GIL in C code for longer than a
lease can lose it; a worker process of its own (`tenure worker`) cannot.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import msgspec

from tenure.engine.board import make_board
from tenure.engine.child_process import hello_of
from tenure.engine.children import SLOTS, Child, excuse
from tenure.engine.desk import Desk, Employer
from tenure.engine.executor import Executor
from tenure.engine.forks import end_copy, keep_copies_apart
from tenure.engine.loop_watch import LoopWatch
from tenure.engine.messages import Cancel, Forget, Report, Run, Stop, ToChild
from tenure.engine.supervisor import Supervisor
from tenure.engine.worker_options import Summary, WorkerOptions, parse_queues, point_out_unknown
from tenure.store import Store
from tenure.wakeup import Wakeup


class Embeddable(Employer, Protocol):
    """What an embedded worker needs of an app."""

    @property
    def store(self) -> Store: ...

    def open_wakeup(self) -> Wakeup: ...


class _Local:
    """The pipe that is not one: orders go to the loop, reports come straight back."""

    fault: str | None = None

    def __init__(
        self,
        app: Embeddable,
        child: Child,
        report: Callable[[Report], None],
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._executor = Executor(Desk(app), child.board, child.concurrency, report)
        keep_copies_apart(self._executor, child.board, self._loop)
        self._loop.call_soon(self._executor.begin)
        self._thread = threading.Thread(target=self._serve, name="tenure-executor", daemon=True)
        self._thread.start()
        ident = self._thread.ident or 0
        self._standby = LoopWatch(self._executor, ident)
        threading.Thread(target=self._standby.run, name="tenure-standby", daemon=True).start()

    def send(self, message: ToChild) -> None:
        match message:
            case Run():
                self._loop.call_soon_threadsafe(self._executor.assign, message)
            case Cancel():
                self._loop.call_soon_threadsafe(self._executor.cancel, message)
            case Forget():
                self._loop.call_soon_threadsafe(self._executor.forget)
            case Stop():
                self._loop.call_soon_threadsafe(self._executor.stop)

    def end_reading(self) -> None:
        """Nothing is read: reports come as calls."""

    def close(self) -> None:
        self._standby.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=2)
        self._executor.close()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            if self._executor.copied:
                end_copy(None)
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()


def _supervisor(
    app: Embeddable,
    queues: str | Sequence[str] | None,
    concurrency: int | None,
    drain: bool,
) -> tuple[Supervisor, Child, Wakeup]:
    settings = app.settings
    plan = WorkerOptions(
        queues=parse_queues(queues if queues is not None else settings.queues),
        concurrency=concurrency or settings.concurrency,
        drain=drain,
    )
    for task in app.tasks.values():
        task.signature  # noqa: B018  a bad signature is said now, not at the first job
    used = app.store.queue_names()  # as in fleet.py: fails without tables, keeps the log open
    hello = hello_of(app)
    point_out_unknown(plan.queues, used, hello.queues)
    wakeup = app.open_wakeup()
    supervisor = Supervisor(app.store, settings, wakeup, plan)
    # No processes to give here: a task that asks for one runs in a thread.
    supervisor.learn(msgspec.structs.replace(hello, alone=[]))
    supervisor.enlist()
    board = make_board(supervisor.worker_id, 1, SLOTS)
    excuse(board)
    child = Child(1, board, plan.concurrency, solo=False)
    child.channel = _Local(app, child, lambda report: supervisor.on_message(child, report))
    child.greeted()
    return supervisor, child, wakeup


def _no_processes(concurrency: int, *, solo: bool = False) -> Child:
    raise AssertionError("an embedded worker starts no processes")


def run_embedded(
    app: Embeddable,
    *,
    queues: str | Sequence[str] | None,
    concurrency: int | None,
    drain: bool,
) -> Summary:
    supervisor, child, wakeup = _supervisor(app, queues, concurrency, drain)
    try:
        with stopped_by_signals(supervisor):
            return supervisor.run(_no_processes, [child])
    finally:
        wakeup.close()


@contextmanager
def embedded_worker(
    app: Embeddable, *, queues: str | Sequence[str] | None, concurrency: int | None
) -> Iterator[None]:
    supervisor, child, wakeup = _supervisor(app, queues, concurrency, False)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            supervisor.run(_no_processes, [child])
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work, name="tenure-worker", daemon=True)
    thread.start()
    try:
        yield
    finally:
        supervisor.stop()
        thread.join()
        wakeup.close()
    if failures:
        raise failures[0]


@contextmanager
def stopped_by_signals(supervisor: Supervisor) -> Iterator[None]:
    """SIGTERM and SIGINT stop the worker; a second one stops it now. Main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {
        number: signal.signal(number, lambda *_: supervisor.interrupt())
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
