"""What every room of this edge needs to know: the broker behind it, who is connected, and what we are called.

Clients dial the addresses they are told, in routes and in message ids. Without `--advertise` they are told the
address they came in by, which is one they can reach, whatever network lies between.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import TYPE_CHECKING

from timeball.broker.service import Broker
from timeball.errors import SetupError
from timeball.protocols.remoting.codec.records import Host

if TYPE_CHECKING:
    from timeball.protocols.remoting.clients import Clients
    from timeball.protocols.remoting.connection import Connection


@dataclass
class Site:
    """See the module. The ports are known once the edge listens."""

    broker: Broker
    clients: Clients
    broker_name: str
    cluster_name: str
    advertise: str
    name_server_port: int = 0
    remoting_port: int = 0
    _hosts: dict[str, Host] = field(default_factory=dict)

    def monotonic_ms(self) -> int:
        """The clock for who has been silent how long; setting the time changes nothing about it."""
        return self.broker.parts.clock.clock.monotonic_ns() // 1_000_000

    def address(self, connection: Connection) -> str:
        """host:port at which the client of this connection reaches the broker."""
        host, port = self._host_port(connection)
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def store_host(self, connection: Connection) -> Host:
        """The same as bytes, as it stands in stored messages and message ids."""
        host, port = self._host_port(connection)
        found = self._hosts.get(host)
        if found is None or found.port != port:
            address = _packed(host) if found is None else found.address
            found = self._hosts[host] = Host(address, port)
        return found

    def check_advertised(self) -> None:
        """Raise SetupError when the name that clients are to dial is none: every answer to a send has it as bytes."""
        host, _ = self._advertised()
        if host:
            try:
                self._hosts[host] = Host(_packed(host), 0)
            except OSError as error:
                raise SetupError(
                    f"--advertise {self.advertise}: {host!r} cannot be resolved: {error}"
                ) from error

    def _host_port(self, connection: Connection) -> tuple[str, int]:
        host, port = self._advertised()
        if port is None:
            # Either port answers everything, so the one there is will do.
            port = self.remoting_port if self.remoting_port >= 0 else self.name_server_port
        return host or str(connection.local[0]), port

    def _advertised(self) -> tuple[str, int | None]:
        """Host and port of `advertise`, as far as it says; an IPv6 address with a port has brackets."""
        host, _, port = self.advertise.rpartition(":")
        if not host or not port.isdigit() or (":" in host and not host.startswith("[")):
            return self.advertise.strip("[]"), None
        return host.strip("[]"), int(port)


def _packed(host: str) -> bytes:
    try:
        return ip_address(host.partition("%")[0]).packed
    except ValueError:
        # A name: once per name and process, at the first message.
        return ip_address(socket.gethostbyname(host)).packed
