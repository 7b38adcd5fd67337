"""The supervisor's end of a pipe: whatever comes through it, its end is heard."""

from __future__ import annotations

import logging
import queue
import socket
from typing import Any

import pytest

from tenure.engine.messages import (
    Assignment,
    CancelJobs,
    FromChild,
    Hello,
    Refused,
    RunJobs,
    Stop,
    ToChild,
)
from tenure.engine.pipe import LARGE, MOST, Frames, Pipe, frame
from tenure.job import ClaimedJob
from tenure.store import Registration

HELLO = Hello(1, [], {}, [], {}, {})


@pytest.mark.parametrize(
    "nonsense",
    [
        b"hi\n",  # shorter than any frame, and nothing follows
        b"it worked\n" * 3,  # read as a length these were 1.8 GB
        frame(HELLO)[:4] + b"\xff\xff\xff\x7f",  # our mark, and a length of 2 GB
        frame(HELLO)[:4]
        + b"\x04\x00\x00\x00\xc1\xc1\xc1\xc1"
        + frame(HELLO)[-4:],  # no MessagePack
        frame(HELLO)[:4] + b"\x01\x00\x00\x00\x2a" + frame(HELLO)[-4:],  # no message
        frame(HELLO)[:9] + b"!" + frame(HELLO)[9:],  # somebody wrote in between
        frame(HELLO)[:9] + frame(HELLO)[10:] + frame(HELLO),  # or has read from it
    ],
)
def test_what_cannot_be_read_ends_the_child(
    nonsense: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """A thread that died in silence would leave the child's jobs to nobody."""
    ours, theirs = socket.socketpair()
    heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with caplog.at_level(logging.ERROR, logger="tenure.worker"), theirs:
        pipe = Pipe(ours)
        pipe.listen(heard.put, lambda: heard.put("its end"))
        theirs.sendall(frame(HELLO) + nonsense)
        assert heard.get(timeout=10) == HELLO
        assert heard.get(timeout=10) == "its end"
        assert theirs.recv(1) == b""  # so that it goes, should it live
    assert "cannot be read" in caplog.text
    assert pipe.fault is not None


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
        sent += [RunJobs(jobs(LARGE), who), RunJobs(jobs(1), who), CancelJobs({"a": str(number)})]
    frames, received = Frames(ToChild), []
    with theirs:
        pipe = Pipe(ours)
        for message in [*sent, Stop()]:
            pipe.send(message)
        while not received or received[-1] != Stop():
            received += frames.feed(theirs.recv(1 << 16))
        pipe.close()
    assert received == [*sent, Stop()]


@pytest.mark.parametrize("size", [MOST - 1, MOST, MOST + 1, 5 * MOST])
def test_a_message_of_any_size_is_frames_of_a_megabyte(size: int) -> None:
    """A result, or what a handler enqueued, may be as large as the settings allow."""
    message = Refused("x" * size)
    sent = frame(message) + frame(HELLO)
    frames, received, longest = Frames(FromChild), [], 0
    for start in range(0, len(sent), 100_001):
        received += frames.feed(sent[start : start + 100_001])
        longest = max(longest, len(frames._buffer))

    assert received == [message, HELLO]
    assert longest <= MOST + 100_001 + 12


def test_a_batch_that_cannot_be_encoded_ends_the_child(caplog: pytest.LogCaptureFixture) -> None:
    """Its jobs would wait in the worker's name for ever: half a character, which no store gives."""
    ours, theirs = socket.socketpair()
    heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with caplog.at_level(logging.ERROR, logger="tenure.worker"), theirs:
        pipe = Pipe(ours)
        pipe.listen(heard.put, lambda: heard.put("its end"))
        pipe.send(RunJobs(jobs(LARGE, "\ud800"), Registration(1, "w")))
        assert heard.get(timeout=10) == "its end"
        assert theirs.recv(1) == b""
    assert "cannot be encoded" in caplog.text


def test_the_first_message_is_received_and_the_rest_is_heard() -> None:
    """The supervisor's first child tells what the app is, before there is anything to listen."""
    ours, theirs = socket.socketpair()
    heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with theirs:
        pipe = Pipe(ours)
        theirs.sendall(frame(HELLO) + frame(Refused("one")))
        assert pipe.receive(10) == HELLO
        pipe.listen(heard.put, lambda: heard.put("its end"))
        theirs.sendall(frame(Refused("two")))
        assert [heard.get(timeout=10) for _ in range(2)] == [Refused("one"), Refused("two")]
    assert heard.get(timeout=10) == "its end"


def test_a_first_message_that_does_not_come() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        pipe = Pipe(ours)
        with pytest.raises(TimeoutError):
            pipe.receive(0.05)
        pipe.close()
        assert theirs.recv(1) == b""
    ours, theirs = socket.socketpair()
    theirs.close()
    pipe = Pipe(ours)
    assert pipe.receive(10) is None
    pipe.close()
