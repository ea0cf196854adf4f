"""The network of an AsyncTimeball: the connections of an event loop, without threads.

A client belongs to the event loop that awaits it. A later loop, as that of a second `asyncio.run` or of a child process
after a fork, opens connections of its own.

Only the name of a host is resolved in a thread, which is one of the loop's executor. An address needs no thread.
"""

from __future__ import annotations

import asyncio
import socket
import weakref
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar, cast

from timeball.client.network import Stream, forget, is_readable
from timeball.model.errors import RequestError

if TYPE_CHECKING:
    import ssl
    import threading

BUFFER_BYTES = 1_048_576  # of received bytes, after which the node has to wait
LAST_BYTES_S = 1.0  # for bytes that a node was sending when its call was interrupted
NO_LOOP = (
    "no event loop runs here: await the methods of AsyncTimeball in a coroutine; a child process after a fork "
    "needs an `asyncio.run` of its own"
)

T = TypeVar("T")


class LoopStream(asyncio.Protocol):
    """See network.Stream."""

    _transport: asyncio.Transport

    def __init__(self, connected: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        # The socket is kept for `forget`, because a transport does not give it away.
        self._socket, self.loop = connected, loop
        self._received, self._received_bytes = list[bytes](), 0  # not read yet
        self._is_over = False  # no more bytes come from the node
        self._is_full = False  # the transport has enough bytes to send
        self._has_ended_sending = False
        self._error: OSError | None = None  # which ended the connection
        self._waiter: asyncio.Future[bool] | None = None  # of the call that waits now
        # Done when the transport has closed the connection.
        self.lost: asyncio.Future[None] = loop.create_future()

    @property
    def descriptor(self) -> int:
        return self._socket.fileno()

    @property
    def is_readable(self) -> bool:
        """See network.Stream. True also after `end_sending`, because the node closes the connection then.

        A stream of another loop cannot be used, so it counts as closed.
        """
        is_of_loop = self.loop is asyncio.get_running_loop()
        return not is_of_loop or self._has_ended_sending or self._has_input or is_readable(self._socket, 0)

    async def send(self, data: bytes, timeout_s: float) -> None:
        """See network.Stream. Returns when the transport has room again, which may be before all bytes are sent."""
        if self._has_ended_sending:
            raise BrokenPipeError("the connection was ended")
        self._transport.write(data)
        while self._is_full and not self._is_over:
            await self._wait_in_time(timeout_s)

    async def receive(self, timeout_s: float) -> bytes:
        """See network.Stream. Returns all bytes that have come."""
        if not self._has_input:
            await self._wait_in_time(timeout_s)
        if not self._received and self._error is not None:
            raise self._error
        data = b"".join(self._received)
        if self._received_bytes > BUFFER_BYTES and not self._is_over:
            self._transport.resume_reading()
        self._received, self._received_bytes = [], 0
        return data

    async def wait(self, wait_s: float) -> bool:
        return self._has_input or await self._wait(wait_s)

    def end_sending(self) -> bool:
        """See network.Stream."""
        if self._is_over or not self._transport.can_write_eof():
            return False
        self._transport.write_eof()
        self._has_ended_sending = True
        return True

    def interrupt(self) -> None:
        """See network.Stream. Bytes that the node is sending can still be received for LAST_BYTES_S."""
        if self.end_sending():
            self.loop.call_later(LAST_BYTES_S, self._transport.abort)
        else:
            self._transport.abort()

    def close(self) -> None:
        """See network.Stream. The transport of a closed loop can do nothing, so the socket is closed itself."""
        if self.loop.is_closed():
            self._socket.close()
        else:
            self._transport.abort()

    def forget(self) -> None:
        """See network.Stream. Does not touch the loop, because its selector is shared with the parent process."""
        forget(self._socket)

    @property
    def _has_input(self) -> bool:
        return bool(self._received) or self._is_over

    async def _wait(self, seconds: float) -> bool:
        """Wait for bytes, for the end of the connection, or for room to send. Returns False after `seconds`."""
        waiter: asyncio.Future[bool] = self.loop.create_future()
        self._waiter = waiter
        # Even a timer of 0 s comes after the bytes of the next poll of the loop.
        timer = self.loop.call_later(max(0.0, seconds), _wake, waiter, False)
        try:
            return await waiter
        finally:
            timer.cancel()
            self._waiter = None

    async def _wait_in_time(self, seconds: float) -> None:
        if not await self._wait(seconds):
            raise TimeoutError("timed out")

    def _notify(self) -> None:
        if self._waiter is not None:
            _wake(self._waiter, True)

    # ---- as asyncio.Protocol ----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Keep bytes for `receive`. The node has to wait while they are more than BUFFER_BYTES."""
        self._received.append(data)
        self._received_bytes += len(data)
        if self._received_bytes > BUFFER_BYTES:
            self._transport.pause_reading()
        self._notify()

    def eof_received(self) -> None:
        self._is_over = True
        self._notify()

    def connection_lost(self, error: Exception | None) -> None:
        """End the stream. `receive` raises `error` after the bytes that came before it."""
        self._is_over = True
        if error is not None:
            self._error = error if isinstance(error, OSError) else ConnectionResetError(str(error))
        self.lost.set_result(None)
        self._notify()

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        self._notify()


def _wake(waiter: asyncio.Future[bool], has_happened: bool) -> None:
    if not waiter.done():
        waiter.set_result(has_happened)


class LoopNetwork:
    """See network.Network."""

    def __init__(self, calls_max: int) -> None:
        """At most `calls_max` calls have a slot at the same time."""
        self._calls_max = calls_max
        self._loop: asyncio.AbstractEventLoop | None = None
        self._slots = asyncio.Semaphore(calls_max)  # of `_loop`
        self._streams: weakref.WeakSet[LoopStream] = weakref.WeakSet()

    def enter(self) -> asyncio.AbstractEventLoop:
        """Return the running loop. If it is another one than before, the slots are free again.

        Raises RequestError if no loop runs.
        """
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise RequestError(NO_LOOP) from None
        if loop is not self._loop:
            self._loop, self._slots = loop, asyncio.Semaphore(self._calls_max)
        return loop

    def drive(self, coroutine: Coroutine[Any, Any, T], /) -> T:
        """See network.Network. Returns the coroutine, which AsyncTimeball awaits."""
        return cast(T, coroutine)

    def slot(self) -> asyncio.Semaphore:
        self.enter()
        return self._slots

    async def pause(self, seconds: float, closed: threading.Event) -> bool:
        """See network.Network. Always waits `seconds`: an AsyncTimeball that is closed waits for its calls."""
        await asyncio.sleep(seconds)
        return closed.is_set()

    async def connect(
        self, host: str, port: int, tls: ssl.SSLContext | None, tls_name: str, timeout_s: float
    ) -> Stream:
        """See network.Network. Tries all addresses of the host in turn, and raises the error of the last one."""
        loop, failure = self.enter(), OSError(f"{host} has no address")
        try:
            async with asyncio.timeout(timeout_s):
                for family, address in await _resolve(loop, host, port):
                    connected = socket.socket(family, socket.SOCK_STREAM)
                    try:
                        connected.setblocking(False)
                        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                        await loop.sock_connect(connected, address)
                        return await self._create_stream(loop, connected, tls, tls_name)
                    except OSError as error:
                        connected.close()
                        failure = error
                    except BaseException:  # of any kind, because no other code closes the socket
                        connected.close()
                        raise
        except TimeoutError:
            raise TimeoutError("timed out") from None
        raise failure

    async def _create_stream(
        self,
        loop: asyncio.AbstractEventLoop,
        connected: socket.socket,
        tls: ssl.SSLContext | None,
        tls_name: str,
    ) -> LoopStream:
        """Create the stream of a connected socket, and with `tls` do the handshake. Raises OSError."""
        _, stream = await loop.create_connection(
            lambda: LoopStream(connected, loop),
            sock=connected,
            ssl=tls,
            server_hostname=tls_name if tls is not None else None,
        )
        self._streams.add(stream)
        return stream

    async def wait_for_calls(self) -> None:
        """Wait until no call has a slot or waits for one, by taking all slots."""
        slots, taken = self.slot(), 0
        try:
            while taken < self._calls_max:
                await slots.acquire()
                taken += 1
        finally:
            for _ in range(taken):
                slots.release()

    async def close(self) -> None:
        """Close the connections of the running loop, and wait until they are closed."""
        loop = self.enter()
        streams = [stream for stream in self._streams if stream.loop is loop]
        for stream in streams:
            stream.close()
            await asyncio.shield(stream.lost)


async def _resolve(
    loop: asyncio.AbstractEventLoop, host: str, port: int
) -> list[tuple[socket.AddressFamily, Any]]:
    """Resolve a host to its addresses, each with its family. Raises OSError. Only a name needs a thread."""
    try:
        results = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        results = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [(family, address) for family, _, _, _, address in results]
