"""What every room of this edge needs to know: the broker behind it, who is connected, and what we are called.

Clients dial what a route tells them. Without `--advertise` that is the address they have dialled already, which each
of them says in its request, and which is one that it can reach, whatever network lies between.
"""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_address

from timeball.broker.service import Broker
from timeball.config import Settings
from timeball.protocols.grpc._generated.definition_pb2 import Address, AddressScheme, Endpoints
from timeball.protocols.grpc.clients import Clients


@dataclass
class Site:
    """See the module. The port is known once the edge listens."""

    broker: Broker
    clients: Clients
    port: int = 0

    @property
    def settings(self) -> Settings:
        """The broker's."""
        return self.broker.parts.settings

    def monotonic_ms(self) -> int:
        """The clock for who has been silent how long; setting the time changes nothing about it."""
        return self.broker.parts.clock.clock.monotonic_ns() // 1_000_000

    def endpoints(self, dialled: Endpoints) -> Endpoints:
        """Where a client reaches the broker; `dialled` is what it says it has come by."""
        host = self.settings.advertise
        if not host:
            return dialled if dialled.addresses else endpoints("127.0.0.1", self.port)
        name, _, port = host.rpartition(":")
        if name and port.isdigit() and (":" not in name or name.startswith("[")):
            # Said for the remoting port, which clients of this edge do not dial: the name alone counts.
            host = name
        return endpoints(host.strip("[]"), self.port)


def endpoints(host: str, port: int) -> Endpoints:
    """One address as gRPC's clients take it, which are told what kind of a name it is."""
    try:
        scheme = AddressScheme.IPv6 if ip_address(host).version == 6 else AddressScheme.IPv4
    except ValueError:
        scheme = AddressScheme.DOMAIN_NAME
    return Endpoints(scheme=scheme, addresses=[Address(host=host, port=port)])
