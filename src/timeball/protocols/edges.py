"""The edges of one broker, and all that they import: a third of a second, which no promise that is due must wait for.

The node imports this module in a thread, after its ticker has begun to release.
"""

from __future__ import annotations

import asyncio

# Not needed by name, but soon: the first subscription must not hold up what is due, nor must the table of promises; and
# the first status must be given while strangers have all descriptors.
import psutil  # noqa: F401

import timeball.broker.filters.sql_grammar
import timeball.table.delta_rs  # noqa: F401
from timeball.broker.service import Broker
from timeball.errors import SetupError
from timeball.monitoring.metrics import Metrics
from timeball.protocols.flight.server import FlightEdge
from timeball.protocols.grpc.edge import GrpcEdge
from timeball.protocols.http.edge import HttpEdge
from timeball.protocols.http.handlers.operators import Status
from timeball.protocols.http.recovering import Recovering
from timeball.protocols.push.edge import PushEdge
from timeball.protocols.remoting.edge import RemotingEdge
from timeball.protocols.wrong_protocols import WRONG_PROTOCOLS
from timeball.security import Security


class Edges:
    """Starts and closes them together. Belongs to the broker's event loop."""

    def __init__(self, broker: Broker, metrics: Metrics, status: Status, security: Security) -> None:
        self.flight = FlightEdge(broker, status, security)
        self.remoting, self.grpc = RemotingEdge(broker, security), GrpcEdge(broker, security)
        self.http = HttpEdge(broker, metrics, status, security)
        self.push = PushEdge(broker, metrics.push)
        self._has_tls = security.tls is not None

    async def start(self, recovering: Recovering) -> None:
        """Listen on all ports, on HTTP's in place of `recovering`, and begin to deliver to URLs.

        Raises SetupError when a port is taken, and listens on none.
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
        # All at once: each waits for the last answers of its own clients, some of which an object store may not give.
        await asyncio.gather(*(e.close() for e in (self.http, self.grpc, self.remoting, self.flight)))

    @property
    def ports(self) -> dict[str, int]:
        """Return the ports that are listened on, by name; -1 where there is none."""
        remoting = self.remoting.context
        return {
            "flight": self.flight.port, "name_server": remoting.name_server_port, "remoting": remoting.port,
            "grpc": self.grpc.port, "http": self.http.port,
        }  # fmt: skip

    @property
    def connections(self) -> dict[str, int]:
        """Return how many connections are open, by edge."""
        return {
            "flight": self.flight.connections, "remoting": self.remoting.connections,
            "grpc": self.grpc.connections, "http": self.http.connections,
        }  # fmt: skip
