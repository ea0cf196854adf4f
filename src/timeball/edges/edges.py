"""The edges of one broker: creates, starts and closes them.

The imports of the edges take a third of a second, and due messages must not wait for them. So the node imports this
module in a thread, after its ticker has begun to release messages.
"""

from __future__ import annotations

import asyncio

# These three are not used here. They are imported with the edges, because a later import would delay due messages: at
# the first SQL subscription, and at the first use of the table of pending messages. psutil is needed for a status, and
# its import would fail while unknown clients hold all file descriptors.
import psutil  # noqa: F401

import timeball.broker.filters.sql_filter
import timeball.table.delta_rs  # noqa: F401
from timeball.broker.service import Broker
from timeball.edges.flight.server import FlightEdge
from timeball.edges.grpc.edge import GrpcEdge
from timeball.edges.http.edge import HttpEdge
from timeball.edges.http.handlers.operators import Status
from timeball.edges.http.recovering import RecoveryResponder
from timeball.edges.push.worker import PushEdge
from timeball.edges.remoting.codec.implementation import CODEC, Codec
from timeball.edges.remoting.edge import RemotingEdge
from timeball.edges.shared.first_byte import WRONG_PROTOCOLS
from timeball.edges.shared.shared_limits import shut_down_all
from timeball.io.security import Security
from timeball.model.errors import SetupError
from timeball.monitoring.metrics import Metrics


class Edges:
    """All edges of one broker, which start and close together. Belongs to the broker's event loop."""

    def __init__(
        self, broker: Broker, metrics: Metrics, status: Status, security: Security, codec: Codec | None = None
    ) -> None:
        """Create the edges. `codec`: of the remoting edge. None: the compiled codec, if it is installed."""
        self.flight = FlightEdge(broker, status, security)
        self.remoting, self.grpc = RemotingEdge(broker, security, codec or CODEC), GrpcEdge(broker, security)
        self.http = HttpEdge(broker, metrics, status, security)
        self.push = PushEdge(broker, metrics.push)
        self._has_tls = security.tls is not None
        self._closing: list[asyncio.Task[None]] = []  # the tasks of `abort`

    async def start(self, recovering: RecoveryResponder) -> None:
        """Listen on all ports, and begin to push messages to URLs.

        The HTTP edge takes over the socket of `recovering`, which has answered on it so far. Raises SetupError if a
        port is in use. No edge listens then.
        """
        try:
            for edge in (self.flight, self.remoting, self.grpc):
                await edge.start()
            await self.http.start(recovering.hand_over())
        except SetupError:
            for edge in (self.grpc, self.remoting, self.flight):
                await edge.close()
            raise
        WRONG_PROTOCOLS.listens(self.ports, has_tls=self._has_tls)
        await self.push.start()

    async def close(self) -> None:
        """Stop listening, and wait for the last answers to clients."""
        await self.push.close()
        # Concurrently, because each edge waits for the last answers to its own clients, and an object store may delay
        # some of them.
        edges = (self.http, self.grpc, self.remoting, self.flight)
        await asyncio.gather(*(edge.close() for edge in edges))

    def abort(self) -> None:
        """Begin to close, and shut down the connections of all clients, so that no edge waits for an answer."""
        ports = set(self.ports.values())
        edges = (self.push, self.http, self.grpc, self.remoting, self.flight)
        self._closing = [asyncio.create_task(edge.close()) for edge in edges]
        shut_down_all(ports)

    async def wait_aborted(self) -> None:
        """Wait for the end of `abort`."""
        await asyncio.gather(*self._closing)

    @property
    def ports(self) -> dict[str, int]:
        """The ports of the edges by name, -1 for an edge that does not listen."""
        remoting = self.remoting.context
        return {
            "flight": self.flight.port, "name_server": remoting.name_server_port, "remoting": remoting.port,
            "grpc": self.grpc.port, "http": self.http.port,
        }  # fmt: skip

    @property
    def connections(self) -> dict[str, int]:
        """The number of open connections by edge."""
        return {
            "flight": self.flight.connections, "remoting": self.remoting.connections,
            "grpc": self.grpc.connections, "http": self.http.connections,
        }  # fmt: skip
