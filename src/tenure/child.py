"""A child process: imports the app, says hello, runs what the supervisor hands it.

    python -m tenure.child SOCKET APP BOARD SLOTS CONCURRENCY

The end of the pipe ends it, and on Linux the kernel kills it with its supervisor, so no handler
outlives the lease it runs under.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import traceback

from tenure.engine.board import Board
from tenure.engine.child import hello_of, serve
from tenure.engine.wire import Refused, frame
from tenure.errors import TenureError
from tenure.loading import load_app
from tenure.observe.log import configure_logging

PR_SET_PDEATHSIG = 1


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
        configure_logging(app.settings.log_level, as_json=app.settings.log_format == "json")
        for task in app.tasks.values():
            task.signature  # noqa: B018  a bad signature is said now, not at the first job
        hello = hello_of(app)
    except Exception as error:
        if not isinstance(error, TenureError):
            traceback.print_exc()
        sock.sendall(frame(Refused(f"{type(error).__name__}: {error}")))
        sock.close()
        raise SystemExit(1) from None
    try:
        sock.sendall(frame(hello))
    except OSError:
        raise SystemExit(1) from None  # our supervisor is gone already
    serve(app, sock, Board(board_file, int(slots), create=False), int(concurrency) or None)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
