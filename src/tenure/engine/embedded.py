"""A worker inside the program that enqueues: the same supervisor, an executor in a thread.

It renews its lease from a thread, so a handler that holds the GIL in C code for longer than a
lease can lose it; a worker process of its own (`tenure worker`) cannot.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol

import msgspec

from tenure.engine.board import make_board
from tenure.engine.children import SLOTS, Child
from tenure.engine.executor import Executor
from tenure.engine.forks import end_copy, keep_copies_apart
from tenure.engine.hello import hello_of
from tenure.engine.launcher import warn_of_hidden_board
from tenure.engine.loop_watch import LoopWatch
from tenure.engine.messages import FromChild, Report, ToChild
from tenure.engine.run import RunningApp
from tenure.engine.supervisor import Supervisor
from tenure.engine.worker_options import Summary, WorkerOptions, parse_queues, point_out_unknown
from tenure.engine.worker_state import WorkerState
from tenure.store import Store
from tenure.wakeup import Wakeup


class EmbeddingApp(RunningApp, Protocol):
    """What an embedded worker needs of an app."""

    @property
    def store(self) -> Store: ...

    def open_wakeup(self) -> Wakeup: ...


class LocalChannel:
    """To an executor in a thread of this process: orders go to its loop, reports come as calls."""

    fault: str | None = None

    def __init__(self, app: EmbeddingApp, child: Child) -> None:
        self._loop = asyncio.new_event_loop()
        self._on_report: Callable[[Report], None] = _unheard
        self._executor = Executor(app, child.board, child.concurrency, self._report)
        keep_copies_apart(self._executor, child.board, self._loop)
        self._loop.call_soon(self._executor.begin)
        self._thread = threading.Thread(target=self._serve, name="tenure-executor", daemon=True)
        self._thread.start()
        self._loop_watch = LoopWatch(self._executor, self._thread.ident or 0)
        threading.Thread(target=self._loop_watch.run, name="tenure-loop-watch", daemon=True).start()

    def listen(self, on_message: Callable[[FromChild], None], on_end: Callable[[], None]) -> None:
        """It has no end of its own: its process is ours."""
        self._on_report = on_message

    def receive(self, timeout: float) -> FromChild | None:
        raise NotImplementedError("an executor in this process says no hello")

    def send(self, message: ToChild) -> None:
        with suppress(RuntimeError):  # closed meanwhile
            self._loop.call_soon_threadsafe(self._executor.obey, message)

    def _report(self, report: Report) -> None:
        self._on_report(report)

    def end_reading(self) -> None:
        """Nothing is read: reports come as calls."""

    def close(self) -> None:
        self._loop_watch.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=2)
        self._executor.close()
        self._on_report = _unheard  # it knows the child, which knows us

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


def _unheard(report: Report) -> None:
    """Before and after its supervisor runs there are no jobs."""


def _supervisor(
    app: EmbeddingApp,
    queues: str | Sequence[str] | None,
    concurrency: int | None,
    drain: bool,
) -> tuple[Supervisor, Child, Wakeup]:
    settings = app.settings
    options = WorkerOptions(
        queues=parse_queues(queues if queues is not None else settings.queues),
        concurrency=concurrency or settings.concurrency,
        drain=drain,
    )
    for task in app.tasks.values():
        task.signature  # noqa: B018  a bad signature is said now, not at the first job
    used = app.store.queue_names()  # as in worker.py: fails without tables, keeps the log open
    hello = hello_of(app)
    point_out_unknown(options.queues, used, hello.queues)
    wakeup = app.open_wakeup()
    supervisor = Supervisor(app.store, settings, wakeup, options)
    # No processes to give here: a task that asks for one runs in a thread.
    supervisor.learn(msgspec.structs.replace(hello, alone=[]))
    supervisor.enlist()
    board = make_board(supervisor.state.worker.id, 1, SLOTS)
    warn_of_hidden_board(board)
    child = Child(1, board, options.concurrency, solo=False)
    child.channel = LocalChannel(app, child)
    child.greeted()
    return supervisor, child, wakeup


def run_embedded(
    app: EmbeddingApp,
    *,
    queues: str | Sequence[str] | None,
    concurrency: int | None,
    drain: bool,
) -> Summary:
    supervisor, child, wakeup = _supervisor(app, queues, concurrency, drain)
    try:
        with stopped_by_signals(supervisor.state):
            return supervisor.run([child])
    finally:
        wakeup.close()


@contextmanager
def embedded_worker(
    app: EmbeddingApp, *, queues: str | Sequence[str] | None, concurrency: int | None
) -> Iterator[None]:
    supervisor, child, wakeup = _supervisor(app, queues, concurrency, False)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            supervisor.run([child])
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work, name="tenure-worker", daemon=True)
    thread.start()
    try:
        yield
    finally:
        supervisor.state.stop()
        thread.join()
        wakeup.close()
    if failures:
        raise failures[0]


@contextmanager
def stopped_by_signals(state: WorkerState) -> Iterator[None]:
    """SIGTERM and SIGINT stop the worker; a second one stops it now. Main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {
        number: signal.signal(number, lambda *_: state.interrupt())
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
