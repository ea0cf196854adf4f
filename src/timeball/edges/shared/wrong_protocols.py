"""Log clients that connect to the wrong port or send broken frames, once a minute per edge and protocol. No I/O.

A client that connects to a wrong port usually retries forever, and a line per attempt would fill the log. The line
names the client's protocol and the ports of this broker for that protocol.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping

logger = logging.getLogger(__name__)

PAUSE_S = 60.0  # between two log lines about one protocol at one edge
_HTTP = re.compile(rb"[A-Z]{3,7} [ -~]* HTTP/1\.|(?:GET|HEAD|POST|PUT|DELETE|PATCH|OPTIONS|CONNECT) ")
_RESP = re.compile(rb"\*[0-9]{1,9}\r\n\$")
_KAFKA_KEY_MAX, _KAFKA_VERSION_MAX = 100, 30  # api_key and api_version of a request


def protocol_of(data: bytes) -> str:
    """Recognise the protocol of a connection by its first bytes. Returns "" for an unknown protocol."""
    if data[:2] == b"\x16\x03":
        return "TLS"
    if data[:4] == b"PRI ":
        return "HTTP/2"
    if _HTTP.match(data):
        return "HTTP/1"
    if _RESP.match(data):
        return "RESP"
    if len(data) >= 9 and not data[0]:
        size_bytes, header_bytes = (
            int.from_bytes(data[:4], "big"),
            int.from_bytes(data[5:8], "big"),
        )
        # Remoting: the size of the frame, the serialisation (0: JSON, 1: binary), and the size of the header.
        if data[4] in (0, 1) and 0 < header_bytes <= size_bytes - 4 and (data[4] or data[8:9] == b"{"):
            return "remoting"
        api_key, api_version = (
            int.from_bytes(data[4:6], "big"),
            int.from_bytes(data[6:8], "big"),
        )
        if api_key <= _KAFKA_KEY_MAX and api_version <= _KAFKA_VERSION_MAX:
            return "Kafka"
    return ""


# The edges of each protocol, and the settings of their ports.
_PORTS = {
    "HTTP/1": (("http", "http_port"),),
    "HTTP/2": (("flight", "port"), ("grpc", "grpc_port")),
    "remoting": (("remoting", "remoting_port"), ("name_server", "name_server_port")),
}


class WrongProtocols:
    """Limits the log lines about such clients to one per PAUSE_S. Belongs to the event loop."""

    def __init__(self) -> None:
        # By edge and protocol: time of the last line in s, and number of refused connections since then.
        self._logged: dict[tuple[str, str], tuple[float, int]] = {}
        self._ports: Mapping[str, int] = {}
        self._has_tls = False

    def listens(self, ports: Mapping[str, int], *, has_tls: bool) -> None:
        """Set the ports on which the broker listens, by edge. Later log lines name them."""
        self._ports, self._has_tls = ports, has_tls

    def note(self, edge: str, begin: bytes, peer: str, now_s: float, reason: str = "") -> None:
        """Log a refused connection, unless the last line about this edge and protocol is less than PAUSE_S old.

        `begin`: the first bytes of the connection. `reason` is logged for an unknown protocol. A connection of an
        unknown protocol without a reason is not logged.
        """
        protocol = protocol_of(begin)
        if not (protocol or reason):
            return
        logged_s, not_logged = self._logged.get((edge, protocol), (now_s - PAUSE_S, 0))
        if now_s - logged_s < PAUSE_S:
            self._logged[edge, protocol] = logged_s, not_logged + 1
            return
        self._logged[edge, protocol] = now_s, 0
        if not protocol:
            logger.warning(
                "connection closed edge=%s peer=%s reason=%s not_logged=%d", edge, peer, reason, not_logged
            )
            return
        logger.warning(
            "client of another protocol edge=%s tls=%s speaks=%s peer=%s not_logged=%d right_port=%s",
            edge, "on" if self._has_tls else "off", protocol, peer, not_logged, self._hint(protocol),
        )  # fmt: skip

    def _hint(self, protocol: str) -> str:
        """List the settings and numbers of this broker's ports for a protocol."""
        ports = [(name, self._ports.get(edge, -1)) for edge, name in _PORTS.get(protocol, ())]
        return ",".join(f"{name}:{port}" for name, port in ports if port > 0) or "none"


WRONG_PROTOCOLS = WrongProtocols()  # of this process
