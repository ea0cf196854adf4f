"""Names the protocol of a client that has come to the wrong port, and logs one line a minute about it. No I/O.

A client that dials a wrong port usually tries again without end, so that a line for each attempt would fill the log.
"""

from __future__ import annotations

import logging
import re

logger = logging.getLogger(__name__)

PAUSE_S = 60.0  # between two lines about one protocol at one edge
_HTTP = re.compile(rb"[A-Z]{3,7} [ -~]* HTTP/1\.|(?:GET|HEAD|POST|PUT|DELETE|PATCH|OPTIONS|CONNECT) ")
_RESP = re.compile(rb"\*[0-9]{1,9}\r\n\$")
_KAFKA_KEY_MAX, _KAFKA_VERSION_MAX = 100, 30  # of a request


def protocol_of(begin: bytes) -> str:
    """Return the name of the protocol that a connection begins with; empty when it is none of those known."""
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


class WrongProtocols:
    """The times of the last lines, by edge and protocol. Belongs to the event loop."""

    def __init__(self) -> None:
        self._logged: dict[tuple[str, str], tuple[float, int]] = {}  # when, and how often since then

    def note(self, edge: str, begin: bytes, peer: str, now_s: float) -> bool:
        """Log a client whose connection begins so, unless it was logged just now; return whether it is known."""
        protocol = protocol_of(begin)
        if not protocol:
            return False
        logged_s, more = self._logged.get((edge, protocol), (now_s - PAUSE_S, 0))
        if now_s - logged_s < PAUSE_S:
            self._logged[edge, protocol] = logged_s, more + 1
            return True
        self._logged[edge, protocol] = now_s, 0
        logger.warning(
            "client of another protocol edge=%s speaks=%s peer=%s not_logged=%d", edge, protocol, peer, more
        )
        return True


WRONG_PROTOCOLS = WrongProtocols()
