"""A real connection of the edge and the client's socket, on the test's own event loop."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
from typing import Any

from tests.bounds import BOUND_S

from timeball.broker.service import Broker
from timeball.edges.remoting.calls import Call, Handlers, RemotingContext, answer_failure
from timeball.edges.remoting.codec.frame import Command, Splitter, decode
from timeball.edges.remoting.connection import EXPIRY_MS, Connection
from timeball.edges.shared.sessions import EdgeContext, Sessions


def context_of(broker: Broker) -> RemotingContext:
    """Return the context of a remoting edge of the broker without a server."""
    settings = dataclasses.replace(broker.settings, advertise="10.0.0.1:10911")
    return EdgeContext(settings, broker, Sessions(EXPIRY_MS), 10911)


class Pair:
    """The two ends of a connection. `connection` is the broker's end, and `read` returns commands at the client's."""

    def __init__(self, connection: Connection, far: socket.socket) -> None:
        self.connection, self._far = connection, far
        self._splitter = Splitter()
        self._read: list[Command] = []

    @classmethod
    async def create(cls) -> Pair:
        """Connect the two ends."""
        near, far = socket.socketpair()
        far.setblocking(False)
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: Connection(lambda *_: None, set(), loop), sock=near
        )
        return cls(connection, far)

    async def read(self) -> Command:
        """Return the next command from the broker. Raise EOFError if the broker has closed the connection."""
        async with asyncio.timeout(BOUND_S):
            while not self._read:
                data = await asyncio.get_running_loop().sock_recv(self._far, 1 << 16)
                if not data:
                    raise EOFError
                self._read += [decode(frame) for frame in self._splitter.feed(data)]
        return self._read.pop(0)

    async def hang_up(self) -> None:
        """Close the client's end, and wait until the broker has noticed it."""
        closed = asyncio.get_running_loop().create_future()
        self.connection.on_close.append(lambda: closed.set_result(None))
        self._far.close()
        async with asyncio.timeout(BOUND_S):
            await closed

    def close(self) -> None:
        """Close both ends."""
        self.connection.close()
        self._far.close()

    async def ask(
        self, handlers: Handlers, code: int, body: bytes = b"", *, version: int = 409, **ext: object
    ) -> Command:
        """Call a handler with a request of this connection, and return its answer."""
        texts = {name: str(value) for name, value in ext.items()}
        call = Call(self.connection, Command(code, body=body, ext=texts, version=version))
        try:
            reply: Any = handlers[code](call)
            answer = reply if isinstance(reply, Command) else await reply
        except Exception as error:  # as dispatch answers it
            return answer_failure(call, error)
        assert isinstance(answer, Command)
        return answer
