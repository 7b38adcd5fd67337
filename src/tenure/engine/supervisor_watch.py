"""A child's watch over its supervisor.

A supervisor that stands still (SIGSTOP, a debugger) does not renew its lease. When that has ended,
another worker runs its jobs. So before then its children stop, even if their loop is blocked: this
is a thread. In the last third of the lease they are told; at its end they are ended.

Only the supervisor's silence counts, not a store that does not answer. And only silence that was
watched without a gap: after a suspended machine, or if the child was stopped too, the watch begins
again.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from tenure.engine.board import Board


class SupervisorWatch:
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
