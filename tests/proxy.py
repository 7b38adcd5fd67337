"""A network that fails on command, between a PostgreSQL client and its server.

It speaks as much of the protocol (version 3) as it takes to know whose connection it is (the
`application_name` of the start), where messages end, and which ReadyForQuery answers which
request. TLS is declined, so that there is something to read.

    with Proxy.before(server.url()) as proxy:
        client = psycopg.connect(proxy.url(server.url(database)))
        proxy.black_hole("listener")      # only connections that call themselves so
        proxy.heal()
        proxy.lose_reply(b"tenure.finish")  # done by the server, never heard of by the client
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Self
from urllib.parse import urlsplit

SSL_REQUEST, GSS_REQUEST = 80877103, 80877104
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close with RST, as a network that breaks does

Match = bytes | Callable[[bytes], bool]


class Proxy:
    """Connections to a free loopback port end up at `host:port`, until told otherwise.

    `counts` says what it did: accepted, held, cut, reset, lost_replies, lost_requests.
    """

    def __init__(self, host: str, port: int) -> None:
        self.target = (host, port)
        self.counts: Counter[str] = Counter()
        self._changed = threading.Condition()  # guards all below, and tells of every change
        self._open: set[Connection] = set()
        self._holes: set[str | None] = set()  # names of those held up; None is everybody
        self._losses: list[tuple[str, Match]] = []
        self._closed = False
        self._listener: socket.socket | None = None
        self.port = 0
        self._listen()

    @classmethod
    def before(cls, url: str) -> Self:
        """In front of the server of this URL."""
        address = urlsplit(url)
        return cls(address.hostname or "127.0.0.1", address.port or 5432)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def url(self, url: str) -> str:
        """The same database, through here."""
        address = urlsplit(url)
        user = address.netloc.rpartition("@")[0]
        place = f"127.0.0.1:{self.port}"
        return address._replace(netloc=f"{user}@{place}" if user else place).geturl()

    # -- what can go wrong ------------------------------------------------------------------------
    def black_hole(self, name: str | None = None) -> None:
        """From now on nothing passes in either direction, and nothing is closed: for connections
        of this `application_name`, or for all, new ones too."""
        with self._changed:
            self._holes.add(name)

    def refuse(self) -> None:
        """Nobody listens any more, and whoever was connected is reset: the server is down."""
        with self._changed:
            listener, self._listener = self._listener, None
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept()
            listener.close()
        self.cut()

    def cut(self, name: str | None = None) -> int:
        """Reset the connections there are; how many."""
        chosen = [each for each in self._snapshot() if name in (None, each.name)]
        return sum(each.break_off("cut") for each in chosen)

    def lose_reply(self, after: Match) -> None:
        """The next request that matches is done by the server, wholly: its ReadyForQuery has
        been seen. Then the client's connection is reset instead of any answer. `after` is part
        of a message, or a judge of one; a Bind is shown with the text of its statement."""
        with self._changed:
            self._losses.append(("lost_replies", after))

    def lose_request(self, before: Match) -> None:
        """The next request that matches never gets to the server; its connection is reset."""
        with self._changed:
            self._losses.append(("lost_requests", before))

    def heal(self, *, closed: bool = False) -> None:
        """Everything passes again. What was held up is delivered late; with `closed`, it is
        dropped and the connections it was held on are reset, as after a long outage."""
        if closed:
            for each in self._snapshot():
                if self.holds(each.name):
                    each.break_off("reset")
        with self._changed:
            self._holes.clear()
            self._losses.clear()
            self._changed.notify_all()
        if self._listener is None:
            self._listen()

    # -- what is to be seen -----------------------------------------------------------------------
    @property
    def connections(self) -> int:
        return len(self._snapshot())

    @property
    def names(self) -> Counter[str]:
        """Open connections by their application_name."""
        return Counter(each.name or "" for each in self._snapshot())

    def wait_until(
        self, look: Callable[[Proxy], bool], within: float = 10.0, what: str = "it"
    ) -> None:
        """Until `look` is true of this proxy, asked again at every change of it."""
        with self._changed:
            if not self._changed.wait_for(lambda: look(self), within):
                raise AssertionError(f"waited {within:g} s for {what}; {dict(self.counts)}")

    def wait_for(self, event: str, times: int = 1, within: float = 10.0) -> None:
        """Until it has done this so often: `proxy.wait_for("lost_replies")`."""
        self.wait_until(lambda proxy: proxy.counts[event] >= times, within, f"{times} x {event}")

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.refuse()
        self.wait_until(lambda proxy: not proxy._open, what="its connections to end")

    # -- for its connections ----------------------------------------------------------------------
    def count(self, event: str) -> None:
        with self._changed:
            self.counts[event] += 1
            self._changed.notify_all()

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def holds(self, name: str | None) -> bool:
        with self._changed:
            return None in self._holes or (name is not None and name in self._holes)

    def pass_gate(self, connection: Connection) -> None:
        """Wait while this connection is in a black hole."""
        with self._changed:
            if self.holds(connection.name):
                self.count("held")
            while self.holds(connection.name) and not self._closed and not connection.broken:
                self._changed.wait()
        if self._closed or connection.broken:
            raise ConnectionResetError("ended while it was held up")

    def loss(self, message: bytes) -> str | None:
        """What is to be lost of this request; each loss is once."""
        with self._changed:
            for each in self._losses:
                kind, match = each
                if match in message if isinstance(match, bytes) else match(message):
                    self._losses.remove(each)
                    return kind
        return None

    def leave(self, connection: Connection) -> None:
        with self._changed:
            self._open.discard(connection)
            self._changed.notify_all()

    def _snapshot(self) -> list[Connection]:
        with self._changed:
            return list(self._open)

    def _listen(self) -> None:
        """On the same port again after `refuse`."""
        listener = socket.create_server(("127.0.0.1", self.port))
        self.port = listener.getsockname()[1]
        self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return  # refused from now on
            connection = Connection(self, client)
            with self._changed:
                self._open.add(connection)
                self.count("accepted")
            threading.Thread(target=connection.run, daemon=True).start()


class Connection:
    """One client's connection and ours to the server for it; a thread for each direction."""

    def __init__(self, proxy: Proxy, client: socket.socket) -> None:
        self.name: str | None = None  # its application_name, once it has said it
        self.broken = False
        self._proxy = proxy
        self._client = client
        self._server: socket.socket | None = None
        self._unanswered: deque[Request] = deque([Request()])  # oldest first; the start is one
        self._ending = threading.Lock()
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def run(self) -> None:
        """Client to server, in the thread it was given."""
        back: threading.Thread | None = None
        try:
            start = self._start()
            self._proxy.pass_gate(self)
            self._server = socket.create_connection(self._proxy.target, timeout=10)
            self._server.settimeout(None)
            self._server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._server.sendall(start)
            back = threading.Thread(target=self._answers, daemon=True)
            back.start()
            self._requests(self._server)
        except OSError:
            pass
        finally:
            self._end()
            if back is not None:
                back.join()
            for each in (self._client, self._server):
                if each is not None:
                    each.close()
            self._proxy.leave(self)

    def break_off(self, why: str) -> bool:
        """Reset it towards the client; False when it had ended already."""
        with self._ending:
            if self.broken:
                return False
            self.broken = True
            with contextlib.suppress(OSError):
                self._client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self._proxy.count(why)
        self._end()
        return True

    def _end(self) -> None:
        """Wake both threads out of recv; the sockets are closed when both have left."""
        with self._ending:
            self.broken = True
            # A shutdown of the client's socket would say goodbye (FIN) before the reset.
            for each in (self._client, self._server):
                if each is not None:
                    with contextlib.suppress(OSError):
                        each.shutdown(socket.SHUT_RD if each is self._client else socket.SHUT_RDWR)
        self._proxy.wake()

    def _start(self) -> bytes:
        """Decline encryption, read the start and whose it is; its bytes."""
        while True:
            head = self._exactly(8)
            length, code = struct.unpack("!ii", head)
            if code not in (SSL_REQUEST, GSS_REQUEST):
                break
            self._proxy.pass_gate(self)
            self._client.sendall(b"N")
        body = self._exactly(length - 8)
        words = body.split(b"\0")
        said = dict(zip(words[::2], words[1::2], strict=False))
        self.name = said.get(b"application_name", b"").decode()
        return head + body

    def _exactly(self, size: int) -> bytes:
        got = b""
        while len(got) < size:
            more = self._client.recv(size - len(got))
            if not more:
                raise ConnectionResetError("gone before it had said who it is")
            got += more
        return got

    def _requests(self, server: socket.socket) -> None:
        statements: dict[bytes, bytes] = {}
        for messages in whole_messages(self._client):
            for message in messages:
                loss = self._proxy.loss(message + prepared(statements, message))
                if loss == "lost_requests":
                    self.break_off(loss)
                    return
                self._ask(message[:1], lost=loss is not None)
            self._proxy.pass_gate(self)
            server.sendall(b"".join(messages))
        self._proxy.pass_gate(self)  # the goodbye of a client is held up, too

    def _ask(self, kind: bytes, *, lost: bool) -> None:
        """Note which answer this message belongs to: a Query has its own, everything of the
        extended protocol that of the next Sync."""
        last = self._unanswered[-1] if self._unanswered else None
        if kind in b"QF":
            self._unanswered.append(Request(synced=True))
        elif kind in b"PBDECHS" and (last is None or last.synced):
            self._unanswered.append(Request())
        if kind == b"S":
            self._unanswered[-1].synced = True
        if lost and self._unanswered:
            self._unanswered[-1].lost = True

    def _answers(self) -> None:
        assert self._server is not None
        try:
            for messages in whole_messages(self._server):
                kept = [each for each in messages if not self._is_lost(each)]
                self._proxy.pass_gate(self)
                if kept:
                    self._client.sendall(b"".join(kept))
            self._proxy.pass_gate(self)
            self._client.shutdown(socket.SHUT_RDWR)  # the server has hung up
        except OSError:
            pass
        finally:
            self._end()

    def _is_lost(self, message: bytes) -> bool:
        if not self._unanswered:
            return False  # a notification, or a goodbye
        request = self._unanswered[0]
        if message[:1] == b"G":  # COPY: send your data. Until it has ended, Syncs are ignored
            request.synced = False
            return False
        if message[:1] == b"Z":
            self._unanswered.popleft()
            if request.lost:
                self.break_off("lost_replies")
        return request.lost


class Request:
    """Something that ends with one ReadyForQuery."""

    def __init__(self, *, synced: bool = False) -> None:
        self.synced = synced  # its last message has been sent
        self.lost = False


def whole_messages(source: socket.socket) -> Iterator[list[bytes]]:
    """What has come, cut into messages: one byte of type, four of length, the rest."""
    buffer = bytearray()
    while chunk := source.recv(65536):
        buffer += chunk
        messages: list[bytes] = []
        while len(buffer) >= 5:
            end = 1 + int.from_bytes(buffer[1:5])
            if len(buffer) < end:
                break
            messages.append(bytes(buffer[:end]))
            del buffer[:end]
        if messages:
            yield messages


def prepared(statements: dict[bytes, bytes], message: bytes) -> bytes:
    """The text of the statement a Bind names, remembered from its Parse."""
    if message[:1] == b"P":
        name, text, *_ = message[5:].split(b"\0", 2)
        statements[name] = text
    elif message[:1] == b"B":
        _portal, name, *_ = message[5:].split(b"\0", 2)
        return statements.get(name, b"")
    return b""
