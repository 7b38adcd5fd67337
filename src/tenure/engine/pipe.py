"""How messages travel between a supervisor and a child process: MessagePack in frames.

A frame is a mark, a length, at most a megabyte of a message, and another mark. So foreign bytes in
the pipe, or missing ones, are noticed; without marks `it worked\n` was read as a length of 1.8 GB.
A message of any size takes as many frames as it needs.
"""

from __future__ import annotations

import logging
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import msgspec

from tenure.engine.messages import FromChild, RunJobs, ToChild
from tenure.record import Record

log = logging.getLogger("tenure.worker")

LARGE = 200  # jobs of one message
_HEAD = struct.Struct("<4sI")
_MARK, _END = b"\x9atnr", b"rnt\x9a"
_MORE = 1 << 31  # beside the length: the message goes on in the next frame
MOST = 1 << 20  # bytes of a message in one frame
READ_BYTES = 1 << 20


def _fields(value: object) -> dict[str, Any]:
    """msgspec does not know a Record (`Keep`): it travels as its fields."""
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
    """Not what was sent: another program has written to the pipe, or read from it."""


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
    """The supervisor's end. A send never blocks, whatever the child is doing.

    A child whose loop is busy does not read. What its socket does not take is written by a thread
    of the pipe's own, in order. That thread also encodes large batches, so that the dispatcher is
    at the store again meanwhile.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._messages = self._read()
        self._waiting: deque[bytes | ToChild] = deque()
        self._changed = threading.Condition()
        self._listened = False
        self._closed = False
        self.fault: str | None = None  # why the child was given up
        threading.Thread(target=self._write, name="tenure-pipe-out", daemon=True).start()

    # -- from the child -----------------------------------------------------------------------
    def receive(self, timeout: float) -> FromChild | None:
        """The next message, before `listen`; None at the end of the pipe. TimeoutError when there
        is none in time: then nothing more can be received."""
        self._socket.settimeout(timeout)
        try:
            return next(self._messages, None)
        finally:
            self._socket.settimeout(None)

    def listen(self, on_message: Callable[[FromChild], None], on_end: Callable[[], None]) -> None:
        """From now on, in a thread of the pipe's own. RuntimeError when the system has none."""
        threading.Thread(
            target=self._listen, args=(on_message, on_end), name="tenure-pipe-in", daemon=True
        ).start()
        self._listened = True

    def _listen(self, on_message: Callable[[FromChild], None], on_end: Callable[[], None]) -> None:
        try:
            for message in self._messages:
                on_message(message)
        except Exception:
            self.fault = "what it said cannot be used"
            log.exception("what a child said cannot be used: it is given up")
        self._socket.close()
        on_end()

    def _read(self) -> Iterator[FromChild]:
        """Every message until the end of the pipe. When its bytes make no sense the pipe ends, and
        the child with it: in silence it would keep its jobs for ever."""
        frames = Frames(FromChild)
        try:
            while data := self._socket.recv(READ_BYTES):
                yield from frames.feed(data)
        except TimeoutError:
            raise
        except OSError:
            return  # reset by a dying child: the same as its end of file
        except Garbled as error:
            self.fault = str(error)
            log.error("what a child said cannot be read: it is given up (%s)", error)
        except Exception:
            self.fault = "what it said cannot be read"
            log.exception("what a child said cannot be read: it is given up")

    def end_reading(self) -> None:
        """The child is dead: what it has sent is read, then comes the end of file, even where a
        process that it forked keeps its end of the pipe open."""
        with suppress(OSError):  # the end of file was seen already
            self._socket.shutdown(socket.SHUT_RD)

    # -- to the child -------------------------------------------------------------------------
    def send(self, message: ToChild) -> None:
        large = isinstance(message, RunJobs) and len(message.jobs) >= LARGE
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
                self.fault = "a message to it cannot be encoded"
                log.exception("a message to a child cannot be encoded: the child is given up")
                self.close()
                return
            with self._changed:
                self._waiting.popleft()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        with suppress(OSError):  # the other end closed first
            self._socket.shutdown(socket.SHUT_RDWR)
        if not self._listened:  # else the thread that listens closes it
            self._socket.close()
