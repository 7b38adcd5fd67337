"""The inside of a child process: hello, then what the supervisor hands over, until the pipe ends.

It opens no store for the jobs it runs; only a handler that asks for one does (see `run.py`).
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from tenure.engine.board import Board
from tenure.engine.executor import Executor
from tenure.engine.forks import end_copy, keep_copies_apart
from tenure.engine.loop_watch import LoopWatch
from tenure.engine.messages import Hello, Report, Stop, ToChild
from tenure.engine.pipe import Frames, Garbled, frame
from tenure.engine.supervisor_watch import SupervisorWatch

log = logging.getLogger("tenure.worker")

MOST_READ = 1 << 18  # bytes at once
ORPHANED = 75  # the exit code of a child whose supervisor stood still: try again (EX_TEMPFAIL)


class SupervisorLink:
    """The child's end of the pipe: orders in, reports out. Read and written under the executor's
    lock, by the loop or by the thread that stands in for it."""

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
                return  # another thread has read it
            except OSError:
                data = b""  # reset: the same as the end of file
            if not data:
                self._close()
                return
            try:
                for order in self._frames.feed(data):
                    self.executor.obey(order)
                    if isinstance(order, Stop):
                        self._loop.call_soon_threadsafe(self.leave_when_idle)
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
    link = SupervisorLink(sock, lambda send: Executor(app, board, concurrency, send))
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

    watch = SupervisorWatch(board, app.settings.lease_seconds, tell, end)
    await _start_thread("supervisor-watch", watch.run)
    try:
        sock.sendall(frame(hello))
    except OSError:
        return False  # our supervisor is gone already
    link.open()
    loop_watch = LoopWatch(link.executor, threading.get_ident(), link.read)
    await _start_thread("loop-watch", loop_watch.run)
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
