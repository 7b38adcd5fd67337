"""A child process: imports the app, says hello, runs what the supervisor hands it.

    python -m tenure.child SOCKET APP BOARD CONCURRENCY PROCESSES RELOADS SOLO

SOCKET and BOARD are inherited handles; CONCURRENCY and PROCESSES may be 0: as the app's settings
say; with RELOADS it says where its code is. The end of the pipe ends it, and on Linux the kernel
kills it with its supervisor, so no handler outlives the lease it runs under.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import traceback
from contextlib import suppress
from dataclasses import replace

from tenure.app import sqlite_path
from tenure.config import Settings
from tenure.engine.board import inherited_board
from tenure.engine.child_process import serve
from tenure.engine.forks import ignore_signals
from tenure.engine.hello import hello_of, source_folders
from tenure.engine.messages import Refused
from tenure.engine.pipe import frame
from tenure.errors import TenureError
from tenure.loading import load_app
from tenure.observe.log import configure_logging

PR_SET_PDEATHSIG = 1


def _die_with_parent() -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    _die_with_parent()
    handle, spec, board_handle, concurrency, processes, reloads, solo = sys.argv[1:8]
    sock = socket.socket(fileno=int(handle))
    sock.set_inheritable(False)  # a program started by a handler must not keep the pipe open
    board = inherited_board(int(board_handle))
    ignore_signals()
    try:
        app = load_app(spec)
        configure_logging(app.settings.log_level, as_json=app.settings.log_format == "json")
        for task in app.tasks.values():
            task.signature  # noqa: B018  a bad signature is said now, not at the first job
        hello = hello_of(app, source_folders(spec) if reloads == "1" else [])
    except Exception as error:
        if not isinstance(error, TenureError):
            traceback.print_exc()
        elif reloads == "1" and error.__cause__ is not None:
            traceback.print_exception(_without_ours(error.__cause__))
        folders = source_folders(spec) if reloads == "1" else []
        sock.sendall(frame(Refused(f"{type(error).__name__}: {error}", folders)))
        sock.close()
        raise SystemExit(1) from None
    sharing = None if solo == "1" else int(processes) or app.settings.processes
    app.settings = _for_a_child(app.settings, sharing)
    try:
        code = 0 if serve(app, sock, board, int(concurrency) or None, hello) else 1
    except BaseException as error:
        code = 1
        with suppress(Exception):  # the text of a handler's `sys.exit()` may quote an argument
            traceback.print_tb(error.__traceback__)
            print(f"{type(error).__name__} ended this process", file=sys.stderr)
    with suppress(Exception):  # a handler may have closed them
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)  # threads that handlers have left behind are not waited for


def _without_ours(error: BaseException) -> BaseException:
    """An error of the user's module, without the frames that led to its import."""
    ours = os.path.dirname(__file__)
    trace = error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if "importlib" not in file and not file.startswith(ours):
            break
        trace = trace.tb_next
    return error.with_traceback(trace)


def _for_a_child(settings: Settings, sharing: int | None) -> Settings:
    """The connections that the app asks for are shared by all its children; a child that runs a
    single job has one. No web request waits for what a handler enqueues, so an enqueue here may
    take longer. And whatever directory a handler changes to, the file stays the same."""
    share = 1 if sharing is None else max(1, settings.connections // sharing)
    url = settings.url
    if url.startswith("sqlite:"):
        url = f"sqlite:///{os.path.abspath(sqlite_path(url))}"
    patience = max(settings.enqueue_timeout, settings.busy_timeout)
    return replace(settings, connections=share, url=url, enqueue_timeout=patience)


if __name__ == "__main__":
    main()
