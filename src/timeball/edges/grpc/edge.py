"""The edge for RocketMQ 5's clients: its handlers, the table of calls, and the server."""

from __future__ import annotations

import asyncio
from typing import Any

from timeball.broker.service import Broker
from timeball.edges.grpc import needs
from timeball.edges.grpc.calls import Call, Consuming
from timeball.edges.grpc.dispatch import Dispatch
from timeball.edges.grpc.handlers.pulls import Pulls
from timeball.edges.grpc.handlers.receipts import Receipts
from timeball.edges.grpc.handlers.receives import Receives
from timeball.edges.grpc.handlers.renewals import Renewals
from timeball.edges.grpc.handlers.routes import Routes
from timeball.edges.grpc.handlers.sends import Sends
from timeball.edges.grpc.handlers.telemetry import Telemetry
from timeball.edges.grpc.handlers.transactions import Transactions
from timeball.edges.grpc.server import GrpcService
from timeball.edges.grpc.session import EXPIRY_MS, Client
from timeball.edges.http2.server import Server
from timeball.edges.shared.receipt_handles import ReceiptHandles
from timeball.edges.shared.sessions import EdgeContext, Sessions
from timeball.edges.shared.shared_limits import ByteShares
from timeball.io.security import OPEN, Security

EXPIRE_LOOK_S = 5.0
UNREAD_BYTES_MAX = 256 * 1024 * 1024  # of answers that clients have not read


class GrpcEdge:
    """Builds the handlers, starts and stops the server. Belongs to the broker's event loop."""

    def __init__(self, broker: Broker, security: Security = OPEN) -> None:
        self._settings, self._tls = broker.parts.settings, security.tls
        sessions: Sessions[str, Client] = Sessions(EXPIRY_MS)
        self.context = context = EdgeContext(broker.parts.settings, broker, sessions)
        consuming, handles, response_buffer = (
            Consuming(),
            ReceiptHandles(broker.parts.receipt_secret.get),
            ByteShares(UNREAD_BYTES_MAX),
        )
        self._renewals = Renewals(broker.consuming, context.sessions, broker.parts.clock.elapsed_ms)
        rooms = [
            Routes(context).handlers,
            Sends(context).handlers,
            Transactions(context).handlers,
            Telemetry(context).handlers,
            Receives(context, consuming, handles, self._renewals, response_buffer).handlers,
            Receipts(context, handles, self._renewals).handlers,
            Pulls(context, consuming, response_buffer).handlers,
        ]
        clock, policy = broker.parts.clock.clock, broker.policy

        def admit(call: Call) -> None:
            call.caller = security.caller(call.headers, clock.wall_ms())

        def check(call: Call, name: str, request: Any) -> None:
            needs.check(policy, call, name, request)

        is_open = security.access is None
        self.dispatch = Dispatch(rooms, None if is_open else check, None if is_open else admit)
        self.service = GrpcService(self.dispatch)
        self._server = Server(self.service, codec=self._settings.codec)
        self._watches: list[asyncio.Task[None]] = []

    @property
    def port(self) -> int:
        """Return the port on which the edge listens, -1 if there is none."""
        return self.context.port

    async def start(self) -> None:
        """Listen. Raises SetupError if the port is taken."""
        self.context.port = self._settings.grpc_port
        if self.context.port >= 0:
            # By default, clients in Java and Go connect with TLS, those in Python and Node do not.
            self.context.port = await self._server.start(
                self._settings.host, self.context.port, self._tls, "--grpc-port",
                plain_from="all" if self._settings.allow_plaintext else "this machine",
            )  # fmt: skip
        self._watches = [self.context.start_watch(each) for each in (self._expire(), self._server.watch())]

    @property
    def connections(self) -> int:
        """Return the number of connected clients."""
        return self._server.connections

    async def close(self) -> None:
        """Stop listening, and end the calls that wait."""
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        for client in self.context.sessions.all():
            for stream in client.streams:
                stream.end()
        await self._server.close()
        await self._renewals.close()

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(EXPIRE_LOOK_S)
            for client in self.context.sessions.expired(self.context.monotonic_ms()):
                if not client.streams:
                    self.context.sessions.remove(client.key)
