"""The inside of a child: hello, then what the supervisor hands over, until the pipe ends.

It opens no store for the jobs it runs; only a handler that asks for one does (see `desk.py`).
"""

from __future__ import annotations

import asyncio
import gc
import os
import socket
from typing import Any

from tenure.engine.board import Board
from tenure.engine.desk import Desk
from tenure.engine.executor import Executor
from tenure.engine.wire import Cancel, Frames, Hello, Report, Run, Stop, ToChild, frame


def hello_of(app: Any) -> Hello:
    settings = {name: task.settings for name, task in sorted(app.tasks.items())}
    return Hello(
        os.getpid(),
        list(settings),
        app.settings.to_env(),
        [name for name, its in settings.items() if its.process],
        {name: its.keep for name, its in settings.items()},
    )


class _Link(asyncio.Protocol):
    """The pipe as the loop sees it: orders in, reports out."""

    def __init__(self, executor_for: Any) -> None:
        self._frames = Frames(ToChild)
        self._executor_for = executor_for
        self.ended = asyncio.Event()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.set_write_buffer_limits(high=1 << 26)
        self._executor: Executor = self._executor_for(self.send)

    def send(self, message: Report) -> None:
        self._transport.write(frame(message))

    def data_received(self, data: bytes) -> None:
        for order in self._frames.feed(data):
            match order:
                case Run():
                    self._executor.assign(order)
                case Cancel():
                    self._executor.cancel(order)
                case Stop():
                    self._executor.stop()
                    asyncio.ensure_future(self._leave_when_idle())  # noqa: RUF006  ends the process

    async def _leave_when_idle(self) -> None:
        await self._executor.idle.wait()
        self._transport.close()  # after what is buffered has been written

    def connection_lost(self, error: Exception | None) -> None:
        self.ended.set()


async def _serve(sock: socket.socket, app: Any, board: Board, concurrency: int) -> None:
    loop = asyncio.get_running_loop()
    link = _Link(lambda send: Executor(Desk(app), board, concurrency, send))
    await loop.connect_accepted_socket(lambda: link, sock)
    await link.ended.wait()


def serve(app: Any, sock: socket.socket, board: Board, concurrency: int | None) -> None:
    """Run what comes through the pipe until it ends. Not asyncio.run: it would wait for threads,
    and some may be inside handlers that were given up."""
    gc.freeze()  # what was imported stays: no collection need walk it again
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    at_once = concurrency or app.settings.concurrency
    loop.run_until_complete(_serve(sock, app, board, at_once))
