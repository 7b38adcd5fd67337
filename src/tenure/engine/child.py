"""A child process: imports the app, says hello, runs what the supervisor hands it.

    python -m tenure.engine.child SOCKET APP BOARD SLOTS CONCURRENCY

It opens no store for the jobs it runs. The end of the pipe ends it, and on Linux the kernel kills
it with its supervisor, so no handler outlives the lease it runs under.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import os
import signal
import socket
import sys
import traceback
from typing import Any

from tenure.engine.board import Board
from tenure.engine.desk import Desk
from tenure.engine.executor import Executor
from tenure.engine.wire import Cancel, Frames, Hello, Refused, Report, Run, Stop, ToChild, frame
from tenure.errors import ConfigError, TenureError

PR_SET_PDEATHSIG = 1


def load_app(spec: str) -> Any:
    """`module:attr`; `module` alone when it holds exactly one app. The current directory counts."""
    from tenure.app import App

    module_name, _, attribute = spec.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and not module_name.startswith(error.name):
            raise
        raise ConfigError(
            f"there is no module {module_name!r} here ({os.getcwd()}): give -A module:app as you "
            "would import it"
        ) from None
    if attribute:
        found = getattr(module, attribute, None)
        if not isinstance(found, App):
            raise ConfigError(f"{module_name} has no tenure.App named {attribute!r}")
        return found
    apps = [value for value in vars(module).values() if isinstance(value, App)]
    if len(apps) != 1:
        raise ConfigError(f"{module_name} holds {len(apps)} apps: say which, -A {module_name}:app")
    return apps[0]


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


def _die_with_parent() -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    _die_with_parent()
    handle, spec, board_file, slots, concurrency = sys.argv[1:6]
    sock = socket.socket(fileno=int(handle))
    sock.set_inheritable(False)  # a program started by a handler must not keep the pipe open
    # A terminal's Ctrl-C reaches the whole group: stopping is the supervisor's decision. Not
    # SIG_IGN: programs a handler starts would inherit that, and could not be terminated.
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        app = load_app(spec)
        for task in app.tasks.values():
            task.signature  # noqa: B018  a bad signature is said now, not at the first job
        hello = hello_of(app)
    except Exception as error:
        if not isinstance(error, TenureError):
            traceback.print_exc()
        sock.sendall(frame(Refused(f"{type(error).__name__}: {error}")))
        raise SystemExit(1) from None
    sock.sendall(frame(hello))
    board = Board(board_file, int(slots), create=False)
    # Not asyncio.run: it would wait for threads, and some may be inside handlers given up.
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    at_once = int(concurrency) or app.settings.concurrency
    loop.run_until_complete(_serve(sock, app, board, at_once))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
