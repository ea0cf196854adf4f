"""The edge for RocketMQ 5's clients: the rooms, one table of calls, and the server that carries them."""

from __future__ import annotations

import asyncio
from typing import Any

from timeball.broker.service import Broker
from timeball.guard import OPEN, Guard
from timeball.protocols.grpc import needs
from timeball.protocols.grpc.buffers import Unread
from timeball.protocols.grpc.calls import Call
from timeball.protocols.grpc.clients import Clients
from timeball.protocols.grpc.dispatch import Dispatch
from timeball.protocols.grpc.handlers.consumer_request import Consuming
from timeball.protocols.grpc.handlers.pulls import Pulls
from timeball.protocols.grpc.handlers.recalls import Recalls
from timeball.protocols.grpc.handlers.receipts import Receipts
from timeball.protocols.grpc.handlers.receives import Receives
from timeball.protocols.grpc.handlers.renewals import Renewals
from timeball.protocols.grpc.handlers.routes import Routes
from timeball.protocols.grpc.handlers.sends import Sends
from timeball.protocols.grpc.handlers.telemetry import Telemetry
from timeball.protocols.grpc.handlers.transactions import Transactions
from timeball.protocols.grpc.server import Server
from timeball.protocols.grpc.site import Site
from timeball.protocols.receipt_handles import ReceiptHandles

EXPIRE_LOOK_S = 5.0


class GrpcEdge:
    """See the module. Belongs to the broker's event loop."""

    def __init__(self, broker: Broker, guard: Guard = OPEN) -> None:
        self._settings, self._tls = broker.parts.settings, guard.tls
        self.site = site = Site(broker, Clients())
        consuming, handles, unread = (
            Consuming(site),
            ReceiptHandles(broker.parts.receipt_secret.get),
            Unread(),
        )
        self._renewals = Renewals(broker.consuming, site.clients, broker.parts.clock.now_ms)
        rooms = [
            Routes(site).handlers(),
            Sends(site).handlers(),
            Transactions(site).handlers(),
            Recalls(site).handlers(),
            Telemetry(site).handlers(),
            Receives(site, consuming, handles, self._renewals, unread).handlers(),
            Receipts(site, handles, self._renewals).handlers(),
            Pulls(site, consuming, unread).handlers(),
        ]
        clock, policy = broker.parts.clock.clock, broker.policy

        def check(call: Call, name: str, request: Any) -> None:
            if guard.access is not None:
                call.caller = guard.caller(call.headers, clock.wall_ms())
                needs.check(policy, call, name, request)

        self.dispatch = Dispatch(rooms, check)
        self._server = Server(self.dispatch)
        self._watch: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """The port that is listened on; -1 when there is none."""
        return self.site.port

    async def start(self) -> None:
        """Listen; raises SetupError when the port is taken."""
        self.site.port = self._settings.grpc_port
        if self.site.port >= 0:
            self.site.port = await self._server.start(self._settings, self._tls)
        self._watch = asyncio.create_task(self._expire())
        self._watch.add_done_callback(self._ended)

    async def close(self) -> None:
        """Stop listening, and end the calls that wait."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        self.site.clients.close()
        await self._server.close()
        await self._renewals.close()

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(EXPIRE_LOOK_S)
            self.site.clients.expire(self.site.monotonic_ms())

    def _ended(self, watch: asyncio.Task[None]) -> None:
        if not watch.cancelled() and (error := watch.exception()) is not None:
            # Silent clients would keep what they had in hand from now on, and nobody would hear why.
            self.site.broker.parts.on_failure(error)
