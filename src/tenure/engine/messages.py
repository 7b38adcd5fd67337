"""What a supervisor and a child say to each other, and how it travels.

Messages are tagged structs; on a pipe they are MessagePack in frames. An embedded worker passes the
same objects without a pipe.

A frame is a mark, a length, at most a megabyte of a message and another mark: bytes that somebody
else has put into the pipe, or taken out of it, are noticed instead of being taken for a length of
1.8 GB. A message of any size is as many frames as it takes.
"""

from __future__ import annotations

import logging
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import msgspec

from tenure.job import ClaimedJob
from tenure.outcome import Ended
from tenure.policy import Keep
from tenure.record import Record
from tenure.store import Registration

log = logging.getLogger("tenure.worker")


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """A child's first word: what it can run, and how its app is set up."""

    pid: int
    types: list[str]
    environment: dict[str, str]  # the app's settings, as Settings.to_env gives them
    alone: list[str]  # types that run in a process of their own
    keep: dict[str, Keep]  # types with a retention of their own
    # What follows a time-out, when its process had to be killed: seconds until the next attempt
    # after the first, second, ... (the last repeats); None: the task gives up on a time-out.
    time_outs: dict[str, list[float] | None]
    queues: list[str] = []  # those its tasks name
    folders: list[str] = []  # where its code is, if somebody asked


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """The app could not be loaded; said instead of Hello."""

    message: str
    folders: list[str] = []


class Assignment(msgspec.Struct, frozen=True, array_like=True):
    slot: int  # where the board says whether it has started
    job: ClaimedJob


class Run(msgspec.Struct, frozen=True, array_like=True, tag="run"):
    jobs: list[Assignment]
    worker: Registration  # who we are to the store: what a transaction finishes under


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """id -> why. A reason of None: the lease is gone, stop without an outcome."""

    ids: dict[str, str | None]


class Forget(msgspec.Struct, frozen=True, array_like=True, tag="forget"):
    """What you have not started was taken back while you did not answer: forget it, go on."""


class Stop(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """Start nothing more: give back what has not started, end what runs, then leave."""


class Report(msgspec.Struct, frozen=True, array_like=True, tag="report"):
    ended: list[Ended]
    progress: list[tuple[str, int, str]]
    stuck: int = 0  # threads lost to handlers that overran their time-out


ToChild: TypeAlias = Run | Cancel | Forget | Stop
FromChild: TypeAlias = Hello | Refused | Report

LARGE = 200  # jobs
_HEAD = struct.Struct("<4sI")
_MARK, _END = b"\x9atnr", b"rnt\x9a"
_MORE = 1 << 31  # beside the length: the message goes on in the next frame
MOST = 1 << 20  # bytes of a message in one frame


def _fields(value: object) -> dict[str, Any]:
    """A Record (`Keep`), which msgspec does not know, travels as its fields."""
    if not isinstance(value, Record):
        raise NotImplementedError(f"{type(value).__name__} does not travel")
    return vars(value)


_encoder = msgspec.msgpack.Encoder(enc_hook=_fields)


def frame(message: ToChild | FromChild) -> bytes:
    body = _encoder.encode(message)
    if len(body) <= MOST:
        return _HEAD.pack(_MARK, len(body)) + body + _END
    parts = []
    for start in range(0, len(body), MOST):
        part = body[start : start + MOST]
        more = _MORE if start + MOST < len(body) else 0
        parts += [_HEAD.pack(_MARK, len(part) | more), part, _END]
    return b"".join(parts)


class Garbled(Exception):
    """Not what we have sent: somebody else has written to the pipe, or read from it."""


class Frames:
    """Bytes in, messages out."""

    def __init__(self, kind: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(
            kind, dec_hook=lambda record, fields: record(**fields)
        )
        self._buffer = bytearray()
        self._parts: list[bytes] = []  # of a message that goes on

    def feed(self, data: bytes) -> Iterator[Any]:
        buffer = self._buffer
        buffer += data
        start = 0
        while len(buffer) - start >= _HEAD.size:
            mark, length = _HEAD.unpack_from(buffer, start)
            begin = start + _HEAD.size
            end = begin + (length & ~_MORE)
            if mark != _MARK or end - begin > MOST:
                raise Garbled("foreign bytes in the pipe")
            if len(buffer) < end + len(_END):
                break
            part = bytes(memoryview(buffer)[begin:end])
            start = end + len(_END)
            if buffer[end:start] != _END:
                raise Garbled("foreign bytes in the pipe, or some are missing")
            if length & _MORE:
                self._parts.append(part)
                continue
            if self._parts:
                part = b"".join([*self._parts, part])
                self._parts = []
            yield self._decoder.decode(part)
        del buffer[:start]
        if not _MARK.startswith(buffer[: len(_MARK)]):
            raise Garbled("foreign bytes in the pipe")  # also when nothing comes after them


class Pipe:
    """The supervisor's end: sends never block it, whatever the child is doing.

    A child whose loop is busy does not read; what its socket does not take is written by a
    thread of the pipe's own, in order. That thread also encodes large batches, while whoever
    claimed them is at the store again.
    """

    def __init__(
        self, sock: socket.socket, on_message: Callable[[Any], None], on_end: Callable[[], None]
    ) -> None:
        self._socket = sock
        self._on_message = on_message
        self._on_end = on_end
        self._waiting: deque[bytes | ToChild] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self.fault: str | None = None  # why the child was given up, if it was
        # Both now: a thread that cannot be had is said here, not when jobs are on their way.
        threading.Thread(target=self._write, name="tenure-pipe-out", daemon=True).start()
        try:
            threading.Thread(target=self._read, name="tenure-pipe-in", daemon=True).start()
        except RuntimeError:
            self.close()
            raise

    def send(self, message: ToChild) -> None:
        large = isinstance(message, Run) and len(message.jobs) >= LARGE
        data = message if large else frame(message)
        with self._changed:
            if not self._waiting and isinstance(data, bytes):
                try:
                    sent = self._socket.send(data, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    sent = 0
                except OSError:
                    return  # the child is gone; its end of file says what to do with its jobs
                if sent == len(data):
                    return
                data = data[sent:]
            self._waiting.append(data)
            self._changed.notify()

    def end_reading(self) -> None:
        """The child is dead: what it has sent is read, then comes the end of file, even where a
        process it forked keeps its end of the pipe open."""
        try:
            self._socket.shutdown(socket.SHUT_RD)
        except OSError:
            return  # the end of file was seen already

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the other end closed first

    def _write(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                data = self._waiting[0]
            try:
                self._socket.sendall(data if isinstance(data, bytes) else frame(data))
            except OSError:
                return
            except Exception:
                self.fault = "what it is to do cannot be said"
                log.exception("what a child is to do cannot be said: it is given up")
                self.close()
                return
            with self._changed:
                self._waiting.popleft()

    def _read(self) -> None:
        frames = Frames(FromChild)
        try:
            while data := self._socket.recv(1 << 20):
                for message in frames.feed(data):
                    self._on_message(message)
        except OSError:
            pass  # reset by a dying child: the same as its end of file
        except Garbled as error:
            self.fault = str(error)
            log.error("what a child said cannot be read: it is given up (%s)", error)
        except Exception:
            # It goes when its pipe does. Silence would leave its jobs to nobody.
            self.fault = "what it said cannot be read"
            log.exception("what a child said cannot be read: it is given up")
        self._socket.close()
        self._on_end()
