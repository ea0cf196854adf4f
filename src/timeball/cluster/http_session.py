"""The HTTP sessions by which a node asks etcd and the leaders of other groups, and their answers within a bound."""

from __future__ import annotations

import ssl
from collections.abc import Callable

import aiohttp

from timeball import __version__


def open_session(tls: ssl.SSLContext | None, per_host_max: int = 0) -> aiohttp.ClientSession:
    """Return a session of the running loop: JSON goes out, and each request brings its own time limit.

    `tls`: None has the system's certificates checked. `per_host_max`: connections to one host; 0: no bound. Of all
    hosts together there is none, as connections to a host that hangs must leave room for the others.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(ssl=tls or True, limit=0, limit_per_host=per_host_max),
        timeout=aiohttp.ClientTimeout(total=None),
        headers={"user-agent": f"timeball/{__version__}", "content-type": "application/json"},
        skip_auto_headers=["accept-encoding"],
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
        auto_decompress=False,
    )


async def read_bounded(
    response: aiohttp.ClientResponse, bytes_max: int, refuse: Callable[[str], Exception]
) -> bytes:
    """Return the body of an answer; raise what `refuse` makes of the reason when it is longer."""
    parts, left = list[bytes](), bytes_max
    async for part in response.content.iter_any():
        left -= len(part)
        if left < 0:
            response.close()
            raise refuse(f"an answer of more than {bytes_max} bytes")
        parts.append(part)
    return b"".join(parts)
