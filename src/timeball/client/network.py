"""The network of a client: connections and pauses, which block the thread or suspend a task.

The rules of the client are written once, as coroutines: the attempts of a call, the bytes of a request, the loop of
`consume`. They await only a `Network` and its streams. The awaits of `BlockingNetwork` block and never suspend, so
`run` brings such a coroutine to its end in one step. Those of `LoopNetwork` (loop_network.py) suspend, and the event
loop of the program runs the coroutine.

    class Consumer:
        async def ack_async(self, messages): ...
        ack = driven(ack_async)

A driven method returns the result of the coroutine, or the coroutine if the client is an AsyncTimeball.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

if TYPE_CHECKING:
    import ssl
    import threading

READ_BYTES = 65_536

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S", bound="HasNetwork")


class Stream(Protocol):
    """The bytes of one connection. Belongs to one thread or task, except `interrupt`. Errors are OSErrors."""

    @property
    def descriptor(self) -> int:
        """The file descriptor of the socket."""

    @property
    def is_readable(self) -> bool:
        """True if bytes or the end of the connection can be read."""

    async def send(self, data: bytes, timeout_s: float) -> None:
        """Send all bytes. Raises TimeoutError after `timeout_s`, and OSError if the connection breaks."""

    async def receive(self, timeout_s: float) -> bytes:
        """Wait for bytes. Returns b"" at the end of the connection. Raises as `send`."""

    async def wait(self, wait_s: float) -> bool:
        """Wait until the stream is readable. Returns False if it is not within `wait_s`."""

    def end_sending(self) -> bool:
        """Tell the node that no more bytes come. Returns False if this is not possible, as with TLS."""

    def interrupt(self) -> None:
        """Make the call that uses the stream end soon. May be called from another thread, if the stream blocks."""

    def close(self) -> None:
        """Close the connection."""

    def forget(self) -> None:
        """Close this process's copy of a connection that the parent process still uses."""


class Network(Protocol):
    """Connects to nodes, and pauses."""

    def drive(self, coroutine: Coroutine[Any, Any, T], /) -> T:
        """Run a coroutine and return its result, or return the coroutine for the caller to await."""

    def slot(self) -> AbstractAsyncContextManager[object]:
        """Return a context for one call, which is entered when the number of calls under way allows it."""

    async def pause(self, seconds: float, closed: threading.Event) -> bool:
        """Wait `seconds`. Returns whether `closed` is set, which may also end the wait."""

    async def connect(
        self, host: str, port: int, tls: ssl.SSLContext | None, tls_name: str, timeout_s: float
    ) -> Stream:
        """Connect to a node. With `tls`, its certificate must have the name `tls_name`. Raises OSError."""


class HasNetwork(Protocol):
    """An object with methods that are driven."""

    @property
    def network(self) -> Network: ...


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, and return its result. All its awaits must be of a blocking network."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("an await of a blocking network has suspended")


def driven(
    coroutine_function: Callable[Concatenate[S, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[S, P], T]:
    """Turn a coroutine method into a method that calls `drive` of its object's network (see the module's docstring)."""

    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.network.drive(coroutine_function(self, *args, **kwargs))

    return call


# ---- blocking -------------------------------------------------------------------------------------------------


class BlockingStream:
    """See Stream."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected

    @property
    def descriptor(self) -> int:
        return self._socket.fileno()

    @property
    def is_readable(self) -> bool:
        return self._poll(0)

    async def send(self, data: bytes, timeout_s: float) -> None:
        self._socket.settimeout(timeout_s)
        self._socket.sendall(data)

    async def receive(self, timeout_s: float) -> bytes:
        self._socket.settimeout(timeout_s)
        return self._socket.recv(READ_BYTES)

    async def wait(self, wait_s: float) -> bool:
        return self._poll(wait_s)

    def end_sending(self) -> bool:
        """See Stream. A socket with TLS cannot end one direction only."""
        if hasattr(self._socket, "pending"):  # a socket with TLS
            return False
        self._socket.shutdown(socket.SHUT_WR)
        return True

    def interrupt(self) -> None:
        """See Stream. Shuts both directions of the socket down, so that another thread's wait ends."""
        try:
            # Not SSLSocket's own method, which is not safe while another thread reads.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
        except OSError:
            pass  # it is closed already

    def close(self) -> None:
        self.interrupt()
        self._socket.close()

    def forget(self) -> None:
        forget(self._socket)

    def _poll(self, wait_s: float) -> bool:
        # Bytes that TLS has decrypted already are not in the socket, so a poll does not see them.
        pending = getattr(self._socket, "pending", None)
        return (pending is not None and pending() > 0) or is_readable(self._socket, wait_s)


def is_readable(connected: socket.socket, wait_s: float) -> bool:
    """Wait until bytes or the end of the connection can be read. Returns False after `wait_s`."""
    poll = select.poll()
    poll.register(connected, select.POLLIN)
    return bool(poll.poll(max(0, wait_s) * 1000))


def forget(connected: socket.socket) -> None:
    """Close this process's copy of a socket. Other objects that use the socket find it closed."""
    if (descriptor := connected.detach()) >= 0:
        socket.close(descriptor)


class BlockingNetwork:
    """See Network. Thread safe and stateless."""

    _unlimited = nullcontext()

    def drive(self, coroutine: Coroutine[Any, Any, T], /) -> T:
        return run(coroutine)

    def slot(self) -> AbstractAsyncContextManager[object]:
        """See Network. The threads of the program limit the calls."""
        return self._unlimited

    async def pause(self, seconds: float, closed: threading.Event) -> bool:
        return closed.wait(seconds)

    async def connect(
        self, host: str, port: int, tls: ssl.SSLContext | None, tls_name: str, timeout_s: float
    ) -> Stream:
        """See Network."""
        connected = socket.create_connection((host, port), timeout_s)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is not None:
            connected = tls.wrap_socket(connected, server_hostname=tls_name)
        return BlockingStream(connected)


BLOCKING = BlockingNetwork()
