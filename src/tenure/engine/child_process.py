"""The inside of a child: hello, then what the supervisor hands over, until the pipe ends.

It opens no store for the jobs it runs; only a handler that asks for one does (see `desk.py`).
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from tenure.engine.board import Board
from tenure.engine.desk import Desk
from tenure.engine.executor import Executor
from tenure.engine.forks import end_copy, keep_copies_apart
from tenure.engine.loop_watch import LoopWatch
from tenure.engine.messages import (
    Cancel,
    Forget,
    Frames,
    Garbled,
    Hello,
    Report,
    Run,
    Stop,
    ToChild,
    frame,
)
from tenure.policy import Exponential, Retry, delay_seconds

log = logging.getLogger("tenure.worker")

MOST_READ = 1 << 18  # bytes at once
ORPHANED = 75  # the exit code of a child whose supervisor stood still: try again (EX_TEMPFAIL)


def hello_of(app: Any, folders: Sequence[str] = ()) -> Hello:
    settings = {name: task.settings for name, task in sorted(app.tasks.items())}
    return Hello(
        os.getpid(),
        list(settings),
        app.settings.to_env(),
        [name for name, its in settings.items() if its.process],
        {name: its.keep for name, its in settings.items()},
        {name: after_time_outs(its.retry) for name, its in settings.items()},
        sorted({its.queue for its in settings.values()}),
        list(folders),
    )


def after_time_outs(retry: Retry) -> list[float] | None:
    """What `retry` says to a time-out of the first attempt, the second, ..., as numbers: when a
    process had to be killed, nobody is left to ask. None: it is not tried again."""
    late = TimeoutError()
    if retry.gives_up_on(late):
        return None
    return [_delay(retry, late, attempt) for attempt in range(1, max(retry.attempts, 2))]


def _delay(retry: Retry, late: TimeoutError, attempt: int) -> float:
    try:
        return delay_seconds(float(retry.verdict(late, attempt, attempt + 1)))
    except Exception:  # a backoff of the user's own: a run would fall back in the same way
        return Exponential().delay(attempt)


class SupervisorWatch:
    """A child's watch over its supervisor.

    A supervisor that stands still (SIGSTOP, a debugger) does not renew its lease; when that has
    ended, another worker runs its jobs. So before then its children stop, even if their loop is
    blocked: this is a thread. Told first, at the last third of the lease; ended at the end.

    Only the supervisor's silence counts, not a store that does not answer. And only silence that
    we have watched without a gap: after a suspended machine, or if we were stopped too, the watch
    begins again.
    """

    def __init__(
        self, board: Board, lease: float, tell: Callable[[], None], end: Callable[[], None]
    ) -> None:
        self._board = board
        self._lease = lease
        self._tell = tell
        self._end = end
        self._every = min(0.25, lease / 24)
        self._margin = min(1.0, lease / 12)
        self._longest_gap = max(1.0, lease / 6)
        self._told = False

    def run(self) -> None:
        since = last = time.monotonic()
        while True:
            time.sleep(self._every)
            now = time.monotonic()
            if now - last > self._longest_gap:
                since = now
            last = now
            pulse, until = self._board.last_pulse()
            if pulse:
                self._judge(now, now - max(pulse, since), until)

    def _judge(self, now: float, silent: float, until: float) -> None:
        # A renewal may have failed for a while before the silence: some silence is asked for.
        if silent >= self._lease / 2 - self._margin and now >= until - self._margin:
            self._end()
        elif silent >= self._lease / 3 and now >= until - self._lease / 3 and not self._told:
            self._told = True
            self._tell()


class _Link:
    """The pipe as a child sees it: orders in, reports out. Read and written under the executor's
    lock, by the loop or by whoever stands in for it."""

    def __init__(
        self, sock: socket.socket, executor_for: Callable[[Callable[[Report], None]], Executor]
    ) -> None:
        self._socket = sock
        self._loop = asyncio.get_running_loop()
        self._frames = Frames(ToChild)
        self._unsent = bytearray()
        self._leaving = False  # when all is sent
        self._closed = False
        self.executor = executor_for(self.send)
        self._lock = self.executor.lock
        self.ended = asyncio.Event()
        self.garbled = False

    def open(self) -> None:
        self._socket.setblocking(False)
        self._loop.add_reader(self._socket, self.read)
        self.executor.begin()

    def read(self) -> None:
        with self._lock:
            if self._closed:
                return
            try:
                data = self._socket.recv(MOST_READ)
            except (BlockingIOError, InterruptedError):
                return  # somebody else has read it
            except OSError:
                data = b""  # reset: the same as the end of file
            if not data:
                self._close()
                return
            try:
                for order in self._frames.feed(data):
                    self._obey(order)
            except Garbled as error:
                log.error("what the supervisor said cannot be read, this child leaves: %s", error)
                self.garbled = True
                self._close()

    def send(self, message: Report) -> None:
        with self._lock:
            self._unsent += frame(message)
            self._write()

    def _write(self) -> None:
        while self._unsent and not self._closed:
            try:
                sent = self._socket.send(self._unsent)
            except (BlockingIOError, InterruptedError):
                self._loop.call_soon_threadsafe(self._when_there_is_room)
                return
            except OSError:
                return  # the end of file says what to do
            del self._unsent[:sent]
        if self._leaving:
            self._close()

    def _when_there_is_room(self) -> None:
        if not self._closed:
            self._loop.add_writer(self._socket, self._write_on)

    def _write_on(self) -> None:
        with self._lock:
            self._loop.remove_writer(self._socket)
            self._write()

    def _obey(self, order: ToChild) -> None:
        match order:
            case Run():
                self.executor.assign(order)
            case Cancel():
                self.executor.cancel(order)
            case Forget():
                self.executor.forget()
            case Stop():
                self.executor.stop()
                self._loop.call_soon_threadsafe(self.leave_when_idle)

    def leave_when_idle(self) -> None:
        asyncio.ensure_future(self._leave_when_idle())  # noqa: RUF006  ends the process

    async def _leave_when_idle(self) -> None:
        await self.executor.idle.wait()
        with self._lock:
            self._leaving = True
            self._write()

    def _close(self) -> None:
        if not self._closed:
            self._closed = True
            self._loop.call_soon_threadsafe(self._close_on_loop)

    def _close_on_loop(self) -> None:
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        self.ended.set()


async def _serve(
    sock: socket.socket, app: Any, board: Board, concurrency: int, hello: Hello
) -> bool:
    loop = asyncio.get_running_loop()
    link = _Link(sock, lambda send: Executor(Desk(app), board, concurrency, send))
    keep_copies_apart(link.executor, board, loop, [sock.fileno()])

    def give_up() -> None:
        log.warning("the supervisor stands still: nothing is started, what runs is told to stop")
        link.executor.give_up()
        link.leave_when_idle()

    def tell() -> None:
        board.leave()
        link.executor.lose()
        with suppress(RuntimeError):  # it is closing
            loop.call_soon_threadsafe(give_up)

    def end() -> None:
        board.leave()
        os._exit(ORPHANED)

    await _start_thread("vigil", SupervisorWatch(board, app.settings.lease_seconds, tell, end).run)
    try:
        sock.sendall(frame(hello))
    except OSError:
        return False  # our supervisor is gone already
    link.open()
    await _start_thread("standby", LoopWatch(link.executor, threading.get_ident(), link.read).run)
    await link.ended.wait()
    return not link.garbled


async def _start_thread(name: str, work: Callable[[], None]) -> None:
    """As soon as the system has one to give."""
    pause = 0.1
    while True:
        try:
            threading.Thread(target=work, name=f"tenure-{name}", daemon=True).start()
            return
        except RuntimeError as error:
            log.warning("no thread to begin with (%s): trying again in %.1f s", error, pause)
            await asyncio.sleep(pause)
            pause = min(pause * 2, 5.0)


def serve(
    app: Any, sock: socket.socket, board: Board, concurrency: int | None, hello: Hello
) -> bool:
    """Say hello and run what comes through the pipe until it ends; False when it could not be
    read. Not asyncio.run: it would wait for threads, and some may be inside handlers that were
    given up."""
    gc.freeze()  # what was imported stays: no collection need walk it again
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    at_once = concurrency or app.settings.concurrency
    process = os.getpid()
    try:
        return loop.run_until_complete(_serve(sock, app, board, at_once, hello))
    finally:
        if os.getpid() != process:
            end_copy(None)  # it has awaited, and its loop is empty
