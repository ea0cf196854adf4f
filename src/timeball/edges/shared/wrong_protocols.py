"""Logs clients that connect to the wrong port or send broken frames, one line per minute for each kind. No I/O.

A client that connects to a wrong port usually tries again without end, and a line per attempt would fill the log. The
line names the client's protocol and the ports of this broker for that protocol.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping

logger = logging.getLogger(__name__)

PAUSE_S = 60.0  # between two lines about one protocol at one edge
_HTTP = re.compile(rb"[A-Z]{3,7} [ -~]* HTTP/1\.|(?:GET|HEAD|POST|PUT|DELETE|PATCH|OPTIONS|CONNECT) ")
_RESP = re.compile(rb"\*[0-9]{1,9}\r\n\$")
_KAFKA_KEY_MAX, _KAFKA_VERSION_MAX = 100, 30  # of a request


def protocol_of(begin: bytes) -> str:
    """Return the name of the protocol that a connection begins with, empty for an unknown protocol."""
    if begin[:2] == b"\x16\x03":
        return "TLS"
    if begin[:4] == b"PRI ":
        return "HTTP/2"
    if _HTTP.match(begin):
        return "HTTP/1"
    if _RESP.match(begin):
        return "RESP"
    if len(begin) >= 9 and not begin[0]:
        size_bytes, header_bytes = int.from_bytes(begin[:4], "big"), int.from_bytes(begin[5:8], "big")
        if begin[4] in (0, 1) and 0 < header_bytes <= size_bytes - 4 and (begin[4] or begin[8:9] == b"{"):
            return "remoting"
        key, version = int.from_bytes(begin[4:6], "big"), int.from_bytes(begin[6:8], "big")
        if key <= _KAFKA_KEY_MAX and version <= _KAFKA_VERSION_MAX:
            return "Kafka"
    return ""


# The edges of each protocol, and the settings of their ports.
_PORTS = {
    "HTTP/1": (("http", "http_port"),),
    "HTTP/2": (("flight", "port"), ("grpc", "grpc_port")),
    "remoting": (("remoting", "remoting_port"), ("name_server", "name_server_port")),
}


class WrongProtocols:
    """The times of the last lines, by edge and protocol. Belongs to the event loop."""

    def __init__(self) -> None:
        self._logged: dict[tuple[str, str], tuple[float, int]] = {}  # time in s, and clients since then
        self._ports: Mapping[str, int] = {}
        self._has_tls = False

    def listens(self, ports: Mapping[str, int], *, has_tls: bool) -> None:
        """Set the ports that the broker listens on, by edge, for the hints in later lines."""
        self._ports, self._has_tls = ports, has_tls

    def note(self, edge: str, begin: bytes, peer: str, now_s: float, reason: str = "") -> None:
        """Log a refused connection with these first bytes, unless a line of the same kind is less than PAUSE_S old.

        `reason`: logged if the protocol is unknown. Without a reason such a client is not logged.
        """
        protocol = protocol_of(begin)
        if not (protocol or reason):
            return
        logged_s, more = self._logged.get((edge, protocol), (now_s - PAUSE_S, 0))
        if now_s - logged_s < PAUSE_S:
            self._logged[edge, protocol] = logged_s, more + 1
            return
        self._logged[edge, protocol] = now_s, 0
        if not protocol:
            logger.warning(
                "connection closed edge=%s peer=%s reason=%s not_logged=%d", edge, peer, reason, more
            )
            return
        logger.warning(
            "client of another protocol edge=%s tls=%s speaks=%s peer=%s not_logged=%d right_port=%s",
            edge, "on" if self._has_tls else "off", protocol, peer, more, self._hint(protocol),
        )  # fmt: skip

    def _hint(self, protocol: str) -> str:
        """Return the settings and numbers of the ports for a protocol."""
        found = [(name, self._ports.get(edge, -1)) for edge, name in _PORTS.get(protocol, ())]
        return ",".join(f"{name}:{port}" for name, port in found if port > 0) or "none"


WRONG_PROTOCOLS = WrongProtocols()
