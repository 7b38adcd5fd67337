"""The supervisor's end of a pipe: whatever comes through it, its end is heard."""

from __future__ import annotations

import logging
import queue
import socket
from typing import Any

import pytest

from tenure.engine.wire import (
    LARGE,
    Assignment,
    Cancel,
    Frames,
    Hello,
    Pipe,
    Run,
    Stop,
    ToChild,
    frame,
)
from tenure.job import ClaimedJob
from tenure.store import Registration


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


def jobs(count: int, payload: str = "{}") -> list[Assignment]:
    return [
        Assignment(
            slot,
            ClaimedJob(
                f"{slot:026}", 1, "t", payload, 1, 5, 0, 1000, "default", 5, "default", "default",
                None, "system", "tenure", None, None, None, None, None, 0, 0, 0, 0,
            ),
        )
        for slot in range(count)
    ]  # fmt: skip


def test_what_is_sent_arrives_whole_and_in_order() -> None:
    """Large batches are encoded by another thread; nothing may overtake them."""
    ours, theirs = socket.socketpair()
    sent: list[Any] = []
    who = Registration(1, "w")
    for number in range(20):
        sent += [Run(jobs(LARGE), who), Run(jobs(1), who), Cancel({"a": str(number)})]
    frames, received = Frames(ToChild), []
    with theirs:
        pipe = Pipe(ours, lambda message: None, lambda: None)
        for message in [*sent, Stop()]:
            pipe.send(message)
        while not received or received[-1] != Stop():
            received += frames.feed(theirs.recv(1 << 16))
        pipe.close()
    assert received == [*sent, Stop()]


def test_a_batch_that_cannot_be_said_ends_the_child(caplog: pytest.LogCaptureFixture) -> None:
    """Its jobs would wait in the worker's name for ever: half a character, which no store gives."""
    ours, theirs = socket.socketpair()
    heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with caplog.at_level(logging.ERROR, logger="tenure.worker"), theirs:
        Pipe(ours, heard.put, lambda: heard.put("its end")).send(
            Run(jobs(LARGE, "\ud800"), Registration(1, "w"))
        )
        assert heard.get(timeout=10) == "its end"
        assert theirs.recv(1) == b""
    assert "cannot be said" in caplog.text
