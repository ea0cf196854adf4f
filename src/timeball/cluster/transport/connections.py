"""The sockets between replicas, without a thread of their own: the thread that calls `poll` reads and writes them.

There are two kinds of connections with each other node. On a connection opened here, this node sends as a leader or
candidate, and the other node answers. On a connection opened by the other node, the roles are reversed. By default,
messages of types up to 10 are sent on the first kind, and answers on the second. An accepted connection belongs to
the node in its HELLO. A newer connection of a node replaces the older one of the same kind.

A connection ends with PeerError when its first message is not a HELLO of this group, or when messages.py refuses a
message.
"""

from __future__ import annotations

import errno
import logging
import os
import selectors
import socket
import ssl
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from timeball.cluster.protocol.messages import Hello, Message, Receiver, encode
from timeball.model.errors import PeerError, SetupError

# TLS without a socket and without I/O: converts between plain and encrypted bytes. `Connections` reads and writes.
#
# Both sides present a certificate of the cluster's own authority, so a stranger cannot even send a HELLO.


class TlsChannel:
    """One side of one connection."""

    def __init__(self, context: ssl.SSLContext, host: str | None) -> None:
        """Begin as a client of `host`, or as the server when `host` is None."""
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, server_side=host is None, server_hostname=host
        )
        self.is_open = False
        self._plain: list[bytes | memoryview] = []  # to be sent when the handshake is done

    def receive(self, data: bytes | memoryview) -> bytes:
        """Decrypt bytes from the socket. Raises PeerError."""
        self._incoming.write(data)
        found = bytearray()
        try:
            self.begin()
            while self.is_open and (part := self._tls.read(READ_BYTES)):
                found += part
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            raise PeerError(f"TLS: {error.reason or error}") from error
        return bytes(found)

    def begin(self) -> None:
        """Continue the handshake as far as the bytes received so far allow. Raises PeerError."""
        if self.is_open:
            return
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return
        except ssl.SSLError as error:
            raise PeerError(f"TLS: {error.reason or error}") from error
        self.is_open = True
        for part in self._plain:
            self._tls.write(part)
        self._plain.clear()

    def send(self, plain: bytes | memoryview) -> None:
        """Encrypt bytes for sending. Bytes before the end of the handshake are kept until then."""
        if self.is_open:
            self._tls.write(plain)
        else:
            self._plain.append(plain)

    def outgoing(self) -> bytes:
        """Take the encrypted bytes that are to be written to the socket. Empty when there are none."""
        return self._outgoing.read()


logger = logging.getLogger(__name__)

ANSWERS_FROM = 11  # the lowest message type that is an answer
READ_BYTES = 1 << 20
# A replica with more unsent bytes than this is disconnected. When it is back, it gets the log from the segments.
UNSENT_BYTES_MAX = 64 << 20
REDIAL_MS = 50
DIAL_TIMEOUT_MS = 1_000
USER_TIMEOUT_MS = 3_000  # a connection ends when the other machine acknowledges no bytes for this long (TCP)
STRANGERS_MAX = 16  # accepted connections that have not sent a HELLO

Address = tuple[str, int]


class Listener(Protocol):
    """The receiver of connection events. All methods are called in the thread that polls."""

    def opened(self, node: str) -> None:
        """Handle a new connection that was dialed here."""

    def received(self, node: str, message: Message) -> None:
        """Handle a message. It may raise PeerError, which ends its connection."""

    def closed(self, node: str, *, opened_here: bool) -> None:
        """Handle the end of a connection."""


class PeerTls(NamedTuple):
    """TLS contexts for accepted and for dialed connections. Both require a certificate from the other side."""

    server: ssl.SSLContext
    client: ssl.SSLContext


class Connection:
    """One socket, with its unsent bytes."""

    def __init__(self, sock: socket.socket, node: str, *, opened_here: bool, is_open: bool) -> None:
        self.sock, self.node = sock, node
        self.opened_here, self.is_open = opened_here, is_open
        self.receiver = Receiver()
        self.unsent: deque[memoryview] = deque()
        self.unsent_bytes = 0
        self.since_ms = 0
        self.tls: TlsChannel | None = None

    def queue(self, message: Message) -> None:
        """Append a message to the unsent bytes."""
        for part in encode(message):
            if part and self.tls is not None:
                self.tls.send(part)
            elif part:
                self._queue(part)

    def _queue(self, part: bytes) -> None:
        self.unsent.append(memoryview(part))
        self.unsent_bytes += len(part)

    def write(self) -> bool:
        """Send as much as the socket takes. Return whether everything was sent. Raises OSError."""
        if self.tls is not None and (part := self.tls.outgoing()):
            self._queue(part)
        while self.unsent:
            try:
                sent = self.sock.sendmsg(list(self.unsent)[:64])
            except BlockingIOError:
                return False
            self.unsent_bytes -= sent
            while sent and sent >= len(self.unsent[0]):
                sent -= len(self.unsent.popleft())
            if sent:
                self.unsent[0] = self.unsent[0][sent:]
        return True


class Connections:
    """All connections of a replica. Belongs to the thread that calls it."""

    def __init__(
        self, group: str, listen_on: socket.socket, boot_ms: Callable[[], int], tls: PeerTls | None = None
    ) -> None:
        self.group, self._boot_ms, self._tls = group, boot_ms, tls
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing, self._is_closed = threading.Lock(), False
        self._selector.register(self._wake, selectors.EVENT_READ, None)
        listen_on.setblocking(False)
        self._listening = listen_on
        self._selector.register(listen_on, selectors.EVENT_READ, listen_on)
        self._received = memoryview(bytearray(READ_BYTES))  # buffer of one read, shared by all connections
        self._dialed: dict[str, Connection] = {}
        self._accepted: dict[str, Connection] = {}
        self._strangers: list[Connection] = []
        self._again_ms: dict[str, int] = {}  # node -> when it may be dialed again
        self._lookup = NameLookup(self.wake)
        self.addresses: dict[str, Address] = {}  # of the other nodes; replaced as a whole
        self.is_dialing = False
        self.listener: Listener

    @property
    def count(self) -> int:
        """The number of connections with known nodes. Any thread may read it."""
        return len(self._accepted) + sum(each.is_open for each in list(self._dialed.values()))

    def wake(self) -> None:
        """Let `poll` return. Any thread may call it, also after `close`."""
        with self._closing:
            if not self._is_closed:  # the number of a closed descriptor may already belong to another file
                os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Close all sockets, without calling the listener."""
        for connection in [*self._dialed.values(), *self._accepted.values(), *self._strangers]:
            connection.sock.close()
        self._listening.close()
        self._selector.close()
        with self._closing:
            if not self._is_closed:
                os.close(self._wake)
            self._is_closed = True

    # -- sending -----------------------------------------------------------------------------------------------------

    def send(self, node: str, message: Message, *, answers: bool | None = None) -> None:
        """Send a message, or drop it when there is no connection.

        `answers`: True for the connection that the node opened, False for the one opened here. By default the type
        decides.
        """
        if answers is None:
            answers = message.TYPE >= ANSWERS_FROM
        connection = (self._accepted if answers else self._dialed).get(node)
        if connection is None or not connection.is_open:
            return
        # The bound does not include this message, because a single commit may be longer than the bound.
        if connection.unsent_bytes > UNSENT_BYTES_MAX:
            logger.warning(
                "replica cut off: it takes no bytes node=%s waiting_bytes=%d", node, connection.unsent_bytes
            )
            self._end(connection)
            return
        connection.queue(message)
        self._write(connection)

    def hang_up(self) -> None:
        """Close the connections that were opened here, and stop dialing."""
        self.is_dialing = False
        for connection in list(self._dialed.values()):
            self._end(connection, tells=False)

    def refuses(self, node: str) -> bool:
        """Check whether a node's port refuses connections, so its process has ended. Blocks for at most 50 ms."""
        address = self.addresses.get(node)
        try:
            found = self._lookup.resolve(address) if address is not None else None
            if found is None:
                return False  # the address is not known yet
            with socket.socket(*found[:3]) as sock:
                sock.settimeout(0.05)
                sock.connect(found.where)
                return False
        except ConnectionRefusedError:
            return True
        except OSError:
            return False

    # -- receiving ---------------------------------------------------------------------------------------------------

    def poll(self, timeout_ms: int) -> None:
        """Wait for sockets or a wake-up, then read and write, and pass messages to the listener."""
        if self.is_dialing:
            self._dial()
        for key, events in self._selector.select(max(timeout_ms, 0) / 1_000):
            if key.data is None:
                os.eventfd_read(self._wake)
            elif isinstance(key.data, Connection):
                self._serve(key.data, events)
            else:
                self._accept()

    def _serve(self, connection: Connection, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                if not connection.is_open and connection.tls is None and not self._opened(connection):
                    return
                self._write(connection)
            if events & selectors.EVENT_READ:
                self._read(connection)
        except PeerError as error:
            logger.warning("replica's connection ended node=%s reason=%s", connection.node or "?", error)
            self._end(connection)
        except OSError:
            self._end(connection)

    def _opened(self, connection: Connection) -> bool:
        number = connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if number:
            self._end(connection, tells=False)
            return False
        self._selector.modify(connection.sock, selectors.EVENT_READ, connection)
        if self._tls is not None:
            connection.tls = TlsChannel(self._tls.client, self.addresses[connection.node][0])
            connection.tls.begin()
            self._write(connection)
        else:
            self._is_open(connection)
        return True

    def _is_open(self, connection: Connection) -> None:
        connection.is_open = True
        self.listener.opened(connection.node)

    def _read(self, connection: Connection) -> None:
        try:
            size_bytes = connection.sock.recv_into(self._received)
        except BlockingIOError:
            return
        if not size_bytes:
            self._end(connection)
            return
        data: bytes | memoryview = self._received[:size_bytes]
        if connection.tls is not None:
            data = connection.tls.receive(data)
            self._write(connection)
            if connection.opened_here and not connection.is_open and connection.tls.is_open:
                self._is_open(connection)
        for message in connection.receiver.receive(data):
            if not connection.node:
                self._introduce(connection, message)
            if self._is_current(connection):
                self.listener.received(connection.node, message)

    def _introduce(self, connection: Connection, message: Message) -> None:
        """Assign an accepted connection to the node in its HELLO, and replace an older connection of the node."""
        if not isinstance(message, Hello):
            raise PeerError("the first message is no HELLO")
        if message.group != self.group:
            raise PeerError(f"a replica of group {message.group}; this port is of group {self.group}")
        node = message.replica.partition("/")[0]
        older = self._accepted.get(node)
        if older is not None:
            self._end(older)
        self._strangers.remove(connection)
        connection.node, self._accepted[node] = node, connection

    def _is_current(self, connection: Connection) -> bool:
        known = self._dialed if connection.opened_here else self._accepted
        return known.get(connection.node) is connection

    def _accept(self) -> None:
        try:
            sock, _ = self._listening.accept()
        except OSError:  # the peer is gone, or no descriptor is left: the other node dials again
            return
        _configure(sock)
        connection = Connection(sock, "", opened_here=False, is_open=True)
        if self._tls is not None:
            connection.tls = TlsChannel(self._tls.server, None)
        self._strangers.append(connection)
        if len(self._strangers) > STRANGERS_MAX:
            self._end(self._strangers[0])
        self._selector.register(sock, selectors.EVENT_READ, connection)

    # -- dialing -----------------------------------------------------------------------------------------------------

    def _dial(self) -> None:
        now_ms = self._boot_ms()
        for node, address in self.addresses.items():
            connection = self._dialed.get(node)
            if (
                connection is not None
                and not connection.is_open
                and now_ms - connection.since_ms > DIAL_TIMEOUT_MS
            ):
                self._end(connection, tells=False)
                connection = None
            if connection is None and now_ms >= self._again_ms.get(node, 0):
                self._connect(node, address, now_ms)

    def _connect(self, node: str, address: Address, now_ms: int) -> None:
        try:
            found = self._lookup.resolve(address)
            if found is None:
                return  # the end of the look-up wakes `poll`
            self._again_ms[node] = now_ms + REDIAL_MS
            sock = socket.socket(*found[:3])
        except OSError as error:
            self._again_ms[node] = now_ms + REDIAL_MS
            logger.warning("replica not reached node=%s reason=%s", node, error)
            return
        _configure(sock)
        connection = Connection(sock, node, opened_here=True, is_open=False)
        connection.since_ms = now_ms
        self._dialed[node] = connection
        code = sock.connect_ex(found.where)
        if code not in (0, errno.EINPROGRESS):
            self._dialed.pop(node)
            sock.close()
            return
        self._selector.register(sock, selectors.EVENT_READ | selectors.EVENT_WRITE, connection)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _write(self, connection: Connection) -> None:
        if connection.sock.fileno() < 0:
            return  # an earlier event of the same poll has ended the connection
        try:
            is_done = connection.write()
        except OSError:
            self._end(connection)
            return
        events = selectors.EVENT_READ | (0 if is_done else selectors.EVENT_WRITE)
        if self._selector.get_key(connection.sock).events != events:
            self._selector.modify(connection.sock, events, connection)

    def _end(self, connection: Connection, *, tells: bool = True) -> None:
        """Close a connection once, and report its end if its node was known."""
        known = self._dialed if connection.opened_here else self._accepted
        was_known = known.get(connection.node) is connection
        if was_known:
            del known[connection.node]
        if connection in self._strangers:
            self._strangers.remove(connection)
        if connection.sock.fileno() >= 0:
            self._selector.unregister(connection.sock)
            connection.sock.close()
        if was_known and tells and (connection.is_open or not connection.opened_here):
            self.listener.closed(connection.node, opened_here=connection.opened_here)


def listen(host: str, port: int) -> socket.socket:
    """Open a socket that listens for other replicas. Raises SetupError."""
    try:
        family, kind, number, _, where = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, number)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(where)
            sock.listen(64)
        except OSError:
            sock.close()
            raise
        return sock
    except OSError as error:
        raise SetupError(f"cannot listen on {host}:{port} (--replication-port): {error.strerror}") from error


def parse_address(text: str) -> Address:
    """Split `host:port`, where an IPv6 address is in brackets."""
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)


def _configure(sock: socket.socket) -> None:
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)


# Look-up of host names in separate threads, because a slow name server must not delay a commit.


class Resolved(NamedTuple):
    """The arguments for creating a socket, and the address to which it connects."""

    family: int
    kind: int
    number: int
    where: Any


class NameLookup:
    """Looks up host names. Belongs to one thread.

    Each look-up runs in a daemon thread, at most one per address at a time.
    """

    def __init__(self, when_done: Callable[[], None]) -> None:
        """Call `when_done`, in another thread, when a look-up has ended."""
        self._when_done = when_done
        self._answers: dict[tuple[str, int], Resolved | OSError | None] = {}  # None: the look-up runs

    def resolve(self, address: tuple[str, int]) -> Resolved | None:
        """Resolve an address, or return None while the look-up runs: then call again. Raises OSError.

        A result is returned once and then forgotten, because the name may move to another machine.
        """
        try:
            return _look_up(address, socket.AI_NUMERICHOST)
        except OSError:
            pass  # not a numeric address: look the name up
        if address not in self._answers:
            self._answers[address] = None
            threading.Thread(target=self._run, args=(address,), name="name look-up", daemon=True).start()
        answer = self._answers[address]
        if answer is None:
            return None
        del self._answers[address]
        if isinstance(answer, OSError):
            raise answer
        return answer

    def _run(self, address: tuple[str, int]) -> None:
        answer: Resolved | OSError
        try:
            answer = _look_up(address)
        except OSError as error:
            answer = error
        self._answers[address] = answer
        self._when_done()


def _look_up(address: tuple[str, int], flags: int = 0) -> Resolved:
    family, kind, number, _, where = socket.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=flags)[0]
    return Resolved(family, kind, number, where)
