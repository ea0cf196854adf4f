"""The connections between replicas: sockets, TLS, and look-up of host names.

The sockets have no thread of their own: the thread that calls `poll` reads and writes them.

There are two kinds of connections with each other node. On a connection that this node has dialed, it sends as a leader
or candidate, and the other node answers. On an accepted connection, the roles are reversed. By default, messages of
types up to 10 are sent on the first kind, and answers on the second. An accepted connection belongs to the node in its
HELLO. A newer connection of a node replaces the older one of the same kind.

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

logger = logging.getLogger(__name__)

# ---- TLS without I/O -----------------------------------------------------------------------------------------
# A channel converts between plain and encrypted bytes. `Connections` reads and writes the socket. Both sides present a
# certificate of the cluster's own authority, so a foreign process cannot even send a HELLO.


class TlsChannel:
    """One side of a TLS connection."""

    def __init__(self, context: ssl.SSLContext, host: str | None) -> None:
        """Begin as a client of `host`, or as the server when `host` is None."""
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, server_side=host is None, server_hostname=host
        )
        self.is_open = False
        self._unsent_plain: list[bytes | memoryview] = []  # to be sent when the handshake is done

    def receive(self, data: bytes | memoryview) -> bytes:
        """Decrypt bytes from the socket. Raises PeerError."""
        self._incoming.write(data)
        plain = bytearray()
        try:
            self.begin()
            while self.is_open and (chunk := self._tls.read(READ_BYTES)):
                plain += chunk
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            raise PeerError(f"TLS: {error.reason or error}") from error
        return bytes(plain)

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
        for chunk in self._unsent_plain:
            self._tls.write(chunk)
        self._unsent_plain.clear()

    def send(self, plain: bytes | memoryview) -> None:
        """Encrypt bytes for sending. Bytes before the end of the handshake are kept until then."""
        if self.is_open:
            self._tls.write(plain)
        else:
            self._unsent_plain.append(plain)

    def outgoing(self) -> bytes:
        """Take the encrypted bytes that are to be written to the socket. Empty when there are none."""
        return self._outgoing.read()


# ---- connections ---------------------------------------------------------------------------------------------


ANSWERS_FROM = 11  # the lowest message type that is an answer
READ_BYTES = 1 << 20
# A replica with more unsent bytes than this is disconnected. After it has connected again, the leader ships it the log
# from the segments.
UNSENT_BYTES_MAX = 64 << 20
REDIAL_MS = 50
DIAL_TIMEOUT_MS = 1_000
USER_TIMEOUT_MS = 3_000  # a connection ends when the other machine acknowledges no bytes for this long (TCP)
UNIDENTIFIED_MAX = 16  # accepted connections that have not sent a HELLO

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
        self.dialed_ms = 0  # boot clock
        self.tls: TlsChannel | None = None

    def queue(self, message: Message) -> None:
        """Append a message to the unsent bytes, with TLS to the bytes that `write` takes from the channel."""
        for chunk in encode(message):
            if chunk and self.tls is not None:
                self.tls.send(chunk)
            elif chunk:
                self._queue(chunk)

    def _queue(self, chunk: bytes) -> None:
        self.unsent.append(memoryview(chunk))
        self.unsent_bytes += len(chunk)

    def write(self) -> bool:
        """Send as much as the socket takes. Returns True if everything was sent. Raises OSError."""
        if self.tls is not None and (encrypted := self.tls.outgoing()):
            self._queue(encrypted)
        while self.unsent:
            try:
                # 64 buffers in one call: the system accepts 1,024 at most.
                sent_bytes = self.sock.sendmsg(list(self.unsent)[:64])
            except BlockingIOError:
                return False
            self.unsent_bytes -= sent_bytes
            while sent_bytes and sent_bytes >= len(self.unsent[0]):
                sent_bytes -= len(self.unsent.popleft())
            if sent_bytes:  # a part of the next buffer
                self.unsent[0] = self.unsent[0][sent_bytes:]
        return True


class Connections:
    """All connections of a replica. Belongs to the thread that calls it."""

    def __init__(
        self, group: str, listen_on: socket.socket, boot_ms: Callable[[], int], tls: PeerTls | None = None
    ) -> None:
        """`listen_on` is a listening socket. `boot_ms` reads the boot clock. Without `tls`, bytes are sent in plain."""
        self.group, self._boot_ms, self._tls = group, boot_ms, tls
        self._selector = selectors.DefaultSelector()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._close_lock, self._is_closed = threading.Lock(), False
        self._selector.register(self._wake_fd, selectors.EVENT_READ, None)
        listen_on.setblocking(False)
        self._listen_socket = listen_on
        self._selector.register(listen_on, selectors.EVENT_READ, listen_on)
        self._read_buffer = memoryview(bytearray(READ_BYTES))  # buffer of one read, shared by all connections
        self._dialed: dict[str, Connection] = {}
        self._accepted: dict[str, Connection] = {}
        self._unidentified: list[Connection] = []
        self._redial_at_ms: dict[str, int] = {}  # node -> when it may be dialed again
        self._lookup = NameLookup(self.wake)
        self.addresses: dict[str, Address] = {}  # of the other nodes; replaced as a whole
        self.is_dialing = False
        self.listener: Listener

    @property
    def count(self) -> int:
        """The number of connections with known nodes. Any thread may read it."""
        return len(self._accepted) + sum(connection.is_open for connection in list(self._dialed.values()))

    def wake(self) -> None:
        """Make `poll` return at once. Any thread may call this method, also after `close`."""
        with self._close_lock:
            if not self._is_closed:  # the number of a closed descriptor may already belong to another file
                os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """Close all sockets, without calling the listener."""
        for connection in [*self._dialed.values(), *self._accepted.values(), *self._unidentified]:
            connection.sock.close()
        self._listen_socket.close()
        self._selector.close()
        with self._close_lock:
            if not self._is_closed:
                os.close(self._wake_fd)
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
            self._end_connection(connection)
            return
        connection.queue(message)
        self._write(connection)

    def hang_up(self) -> None:
        """Close the connections that were opened here, and stop dialing."""
        self.is_dialing = False
        for connection in list(self._dialed.values()):
            self._end_connection(connection, notify=False)

    def refuses(self, node: str) -> bool:
        """Check whether a node's port refuses connections: then its process has ended. Blocks up to 50 ms."""
        address = self.addresses.get(node)
        try:
            resolved = self._lookup.resolve(address) if address is not None else None
            if resolved is None:
                return False  # the address is not known yet
            with socket.socket(*resolved[:3]) as sock:
                sock.settimeout(0.05)
                sock.connect(resolved.address)
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
                os.eventfd_read(self._wake_fd)
            elif isinstance(key.data, Connection):
                self._serve(key.data, events)
            else:
                self._accept()

    def _serve(self, connection: Connection, events: int) -> None:
        """Handle the events of a connection's socket, and end the connection after an error."""
        try:
            if events & selectors.EVENT_WRITE:
                if not connection.is_open and connection.tls is None and not self._finish_dialing(connection):
                    return
                self._write(connection)
            if events & selectors.EVENT_READ:
                self._read(connection)
        except PeerError as error:
            logger.warning("replica's connection ended node=%s reason=%s", connection.node or "?", error)
            self._end_connection(connection)
        except OSError:
            self._end_connection(connection)

    def _finish_dialing(self, connection: Connection) -> bool:
        """Handle the end of a TCP connect: begin TLS, or mark the connection as open. Returns False if that failed."""
        error_number = connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error_number:
            self._end_connection(connection, notify=False)
            return False
        self._selector.modify(connection.sock, selectors.EVENT_READ, connection)
        if self._tls is not None:
            connection.tls = TlsChannel(self._tls.client, self.addresses[connection.node][0])
            connection.tls.begin()
            self._write(connection)
        else:
            self._mark_open(connection)
        return True

    def _mark_open(self, connection: Connection) -> None:
        """Mark a dialed connection as open, after TCP and TLS handshakes, and inform the listener."""
        connection.is_open = True
        self.listener.opened(connection.node)

    def _read(self, connection: Connection) -> None:
        """Read bytes of a connection, and pass the messages that are complete now to the listener.

        Raises PeerError and OSError.
        """
        try:
            size_bytes = connection.sock.recv_into(self._read_buffer)
        except BlockingIOError:
            return
        if not size_bytes:
            self._end_connection(connection)
            return
        data: bytes | memoryview = self._read_buffer[:size_bytes]
        if connection.tls is not None:
            data = connection.tls.receive(data)
            self._write(connection)
            if connection.opened_here and not connection.is_open and connection.tls.is_open:
                self._mark_open(connection)
        for message in connection.receiver.receive(data):
            if not connection.node:
                self._identify(connection, message)
            if self._is_current(connection):
                self.listener.received(connection.node, message)

    def _identify(self, connection: Connection, message: Message) -> None:
        """Assign an accepted connection to the node in its HELLO, and end an older connection of the node.

        Raises PeerError if the message is no HELLO of this group.
        """
        if not isinstance(message, Hello):
            raise PeerError("the first message is no HELLO")
        if message.group != self.group:
            raise PeerError(f"a replica of group {message.group}; this port is of group {self.group}")
        node = message.replica.partition("/")[0]
        older = self._accepted.get(node)
        if older is not None:
            self._end_connection(older)
        self._unidentified.remove(connection)
        connection.node, self._accepted[node] = node, connection

    def _is_current(self, connection: Connection) -> bool:
        """Check that no newer connection of the node has replaced this one."""
        connections = self._dialed if connection.opened_here else self._accepted
        return connections.get(connection.node) is connection

    def _accept(self) -> None:
        """Accept a connection, whose node is unknown until its HELLO. Keeps at most UNIDENTIFIED_MAX of them."""
        try:
            sock, _ = self._listen_socket.accept()
        except OSError:  # the peer is gone, or no descriptor is left: the other node dials again
            return
        _configure(sock)
        connection = Connection(sock, "", opened_here=False, is_open=True)
        if self._tls is not None:
            connection.tls = TlsChannel(self._tls.server, None)
        self._unidentified.append(connection)
        if len(self._unidentified) > UNIDENTIFIED_MAX:
            self._end_connection(self._unidentified[0])
        self._selector.register(sock, selectors.EVENT_READ, connection)

    # -- dialing -----------------------------------------------------------------------------------------------------

    def _dial(self) -> None:
        """Dial each node that has no connection, unless it was dialed less than REDIAL_MS ago."""
        now_ms = self._boot_ms()
        for node, address in self.addresses.items():
            connection = self._dialed.get(node)
            if (
                connection is not None
                and not connection.is_open
                and now_ms - connection.dialed_ms > DIAL_TIMEOUT_MS
            ):
                self._end_connection(connection, notify=False)
                connection = None
            if connection is None and now_ms >= self._redial_at_ms.get(node, 0):
                self._connect(node, address, now_ms)

    def _connect(self, node: str, address: Address, now_ms: int) -> None:
        """Begin to dial a node, or to look its name up. `poll` reports the outcome."""
        try:
            resolved = self._lookup.resolve(address)
            if resolved is None:
                return  # the end of the look-up wakes `poll`
            self._redial_at_ms[node] = now_ms + REDIAL_MS
            sock = socket.socket(*resolved[:3])
        except OSError as error:
            self._redial_at_ms[node] = now_ms + REDIAL_MS
            logger.warning("replica not reached node=%s reason=%s", node, error)
            return
        _configure(sock)
        connection = Connection(sock, node, opened_here=True, is_open=False)
        connection.dialed_ms = now_ms
        self._dialed[node] = connection
        code = sock.connect_ex(resolved.address)
        if code not in (0, errno.EINPROGRESS):
            self._dialed.pop(node)
            sock.close()
            return
        self._selector.register(sock, selectors.EVENT_READ | selectors.EVENT_WRITE, connection)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _write(self, connection: Connection) -> None:
        """Send the unsent bytes as far as the socket takes them, and let `poll` wait for more space if needed."""
        if connection.sock.fileno() < 0:
            return  # an earlier event of the same poll has ended the connection
        try:
            is_done = connection.write()
        except OSError:
            self._end_connection(connection)
            return
        events = selectors.EVENT_READ | (0 if is_done else selectors.EVENT_WRITE)
        if self._selector.get_key(connection.sock).events != events:
            self._selector.modify(connection.sock, events, connection)

    def _end_connection(self, connection: Connection, *, notify: bool = True) -> None:
        """Close a connection once. With `notify`, report the end of a node's current connection to the listener."""
        connections = self._dialed if connection.opened_here else self._accepted
        was_current = connections.get(connection.node) is connection
        if was_current:
            del connections[connection.node]
        if connection in self._unidentified:
            self._unidentified.remove(connection)
        if connection.sock.fileno() >= 0:
            self._selector.unregister(connection.sock)
            connection.sock.close()
        if was_current and notify and (connection.is_open or not connection.opened_here):
            self.listener.closed(connection.node, opened_here=connection.opened_here)


def listen(host: str, port: int) -> socket.socket:
    """Open a socket that listens for other replicas. Raises SetupError."""
    try:
        family, socket_type, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, socket_type, protocol)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.listen(64)
        except OSError:
            sock.close()
            raise
        return sock
    except OSError as error:
        raise SetupError(f"cannot listen on {host}:{port} (--replication-port): {error.strerror}") from error


def parse_address(text: str) -> Address:
    """Split `host:port`, where an IPv6 address is in brackets. Raises ValueError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65_535:
        raise ValueError(f"address {text!r}: not host:port")
    return host.strip("[]"), int(port)


def _configure(sock: socket.socket) -> None:
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)


# ---- look-up of host names -----------------------------------------------------------------------------------
# Look-ups run in separate threads, because a slow name server must not delay a commit.


class Resolved(NamedTuple):
    """The arguments for creating a socket (the first three fields), and the address to which it connects."""

    family: int
    socket_type: int
    protocol: int
    address: Any


class NameLookup:
    """Looks up host names. Belongs to one thread.

    Each look-up runs in a daemon thread, at most one per address at a time.
    """

    def __init__(self, when_done: Callable[[], None]) -> None:
        """Create the look-up. `when_done` is called, in another thread, each time a look-up has ended."""
        self._when_done = when_done
        self._results: dict[tuple[str, int], Resolved | OSError | None] = {}  # None: the look-up runs

    def resolve(self, address: tuple[str, int]) -> Resolved | None:
        """Resolve an address. None while the look-up runs: then call again after `when_done`. Raises OSError.

        A result is returned once and then forgotten, because the name may move to another machine.
        """
        try:
            return _look_up(address, socket.AI_NUMERICHOST)
        except OSError:
            pass  # not a numeric address: look the name up
        if address not in self._results:
            self._results[address] = None
            threading.Thread(target=self._run, args=(address,), name="name look-up", daemon=True).start()
        result = self._results[address]
        if result is None:
            return None
        del self._results[address]
        if isinstance(result, OSError):
            raise result
        return result

    def _run(self, address: tuple[str, int]) -> None:
        """Look an address up, in a thread of its own, and store the result or the error."""
        result: Resolved | OSError
        try:
            result = _look_up(address)
        except OSError as error:
            result = error
        self._results[address] = result
        self._when_done()


def _look_up(address: tuple[str, int], flags: int = 0) -> Resolved:
    """Resolve an address with the system's resolver. Blocks. Raises OSError."""
    family, socket_type, protocol, _, target = socket.getaddrinfo(
        *address, type=socket.SOCK_STREAM, flags=flags
    )[0]
    return Resolved(family, socket_type, protocol, target)
