"""The supervisor's end of a pipe: whatever comes through it, its end is heard."""

from __future__ import annotations

import logging
import queue
import socket
from typing import Any

import pytest

from tenure.engine.wire import Hello, Pipe, frame


@pytest.mark.parametrize("nonsense", [b"\x04\x00\x00\x00\xc1\xc1\xc1\xc1", b"\x01\x00\x00\x00\x2a"])
def test_what_cannot_be_read_ends_the_child(
    nonsense: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """A thread that died in silence would leave the child's jobs to nobody."""
    ours, theirs = socket.socketpair()
    heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with caplog.at_level(logging.ERROR, logger="tenure.worker"), theirs:
        Pipe(ours, heard.put, lambda: heard.put("its end"))
        theirs.sendall(frame(Hello(1, [], {}, [], {})) + nonsense)
        assert isinstance(heard.get(timeout=10), Hello)
        assert heard.get(timeout=10) == "its end"
        assert theirs.recv(1) == b""  # so that it goes, should it live
    assert "cannot be read" in caplog.text
