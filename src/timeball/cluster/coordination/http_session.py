"""HTTP client sessions for requests to etcd and to the leaders of other groups, and size-limited reading of answers."""

from __future__ import annotations

import ssl
from collections.abc import Callable

import aiohttp

from timeball import __version__


def open_session(tls: ssl.SSLContext | None, per_host_max: int = 0) -> aiohttp.ClientSession:
    """Open a session on the running event loop, for JSON requests that each set their own time limit.

    `tls`: None checks certificates with the system's authorities. `per_host_max`: connections to one host, 0 for no
    bound. There is no bound for all hosts together, because connections to a host that hangs must not block those to
    others.
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
    """Read the body of an answer. If it is longer than `bytes_max`, raise the exception that `refuse` creates."""
    parts, left = list[bytes](), bytes_max
    async for part in response.content.iter_any():
        left -= len(part)
        if left < 0:
            response.close()
            raise refuse(f"an answer of more than {bytes_max} bytes")
        parts.append(part)
    return b"".join(parts)
