"""The edges of one broker. Their imports take a third of a second, and due messages must not wait for them.

So the node imports this module in a thread, after its ticker has begun to release messages.
"""

from __future__ import annotations

import asyncio

# Imported early, because each is needed soon. The first subscription and the table of pending messages must not delay
# due messages by an import. And the first status must work while unknown clients hold all descriptors.
import psutil  # noqa: F401

import timeball.broker.filters.sql_grammar
import timeball.table.delta_rs  # noqa: F401
from timeball.broker.service import Broker
from timeball.edges.flight.server import FlightEdge
from timeball.edges.grpc.edge import GrpcEdge
from timeball.edges.http.edge import HttpEdge
from timeball.edges.http.handlers.operators import Status
from timeball.edges.http.recovering import Recovering
from timeball.edges.push.edge import PushEdge
from timeball.edges.remoting.edge import RemotingEdge
from timeball.edges.shared.wrong_protocols import WRONG_PROTOCOLS
from timeball.io.security import Security
from timeball.model.errors import SetupError
from timeball.monitoring.metrics import Metrics


class Edges:
    """Starts and closes the edges together. Belongs to the broker's event loop."""

    def __init__(self, broker: Broker, metrics: Metrics, status: Status, security: Security) -> None:
        self.flight = FlightEdge(broker, status, security)
        self.remoting, self.grpc = RemotingEdge(broker, security), GrpcEdge(broker, security)
        self.http = HttpEdge(broker, metrics, status, security)
        self.push = PushEdge(broker, metrics.push)
        self._has_tls = security.tls is not None

    async def start(self, recovering: Recovering) -> None:
        """Listen on all ports, on HTTP's in place of `recovering`, and begin to deliver to URLs.

        If a port is taken, listens on none and raises SetupError.
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
        """Stop listening, and let the last answers leave."""
        await self.push.close()
        # All at once: each edge waits for the last answers of its own clients, and an object store may delay some of
        # them.
        await asyncio.gather(*(e.close() for e in (self.http, self.grpc, self.remoting, self.flight)))

    @property
    def ports(self) -> dict[str, int]:
        """Return the ports of the edges by name, -1 for an edge that does not listen."""
        remoting = self.remoting.context
        return {
            "flight": self.flight.port, "name_server": remoting.name_server_port, "remoting": remoting.port,
            "grpc": self.grpc.port, "http": self.http.port,
        }  # fmt: skip

    @property
    def connections(self) -> dict[str, int]:
        """Return the number of open connections by edge."""
        return {
            "flight": self.flight.connections, "remoting": self.remoting.connections,
            "grpc": self.grpc.connections, "http": self.http.connections,
        }  # fmt: skip
