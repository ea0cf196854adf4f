"""One request to one receiver, and its outcome.

Each receiver has its own pool of connections. A host name is resolved, forbidden addresses are removed from the answer,
and the connection goes to one of the remaining addresses. No second resolution happens between check and connection, so
a name that changes its answer gains nothing. The function that makes the socket checks the address once more. Redirects
are not followed, the proxies of the environment are not used, and cookies are not stored. Of an answer only the status
and Retry-After count.
"""

from __future__ import annotations

import asyncio
import io
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from timeball import __version__
from timeball.edges.push.codec import Answer, Headers, retry_after_ms
from timeball.model.addresses import Allowed, Target, parse_address
from timeball.model.errors import InvalidMessage

ANSWER_BYTES_MAX = 64 * 1024  # read, so that the connection can be reused; a longer answer closes it
HEADER_BYTES_MAX = 8 * 1024  # of one header line of an answer
CONNECT_S_MAX = 10.0
# Common servers close an idle connection after 5 s. The shorter time avoids a request on a connection that closes.
IDLE_S = 4.0
NAMES_KEPT_S = 10  # names with their checked addresses
LOOK_UPS_MAX = 8  # a look-up at a name server that does not answer takes half a minute
LARGE_BODY_BYTES = 256 * 1024  # larger bodies are sent in pieces

LookUp = Callable[[str, int], Awaitable[Sequence[str]]]


class ForbiddenAddress(OSError):
    """None of the name's addresses may be connected to."""


class Names:
    """Resolves names in separate threads, so that a slow name server blocks no threads of other work."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(LOOK_UPS_MAX, thread_name_prefix="push-names")

    async def look_up(self, host: str, port: int) -> list[str]:
        """Look up the addresses of a name. Raises OSError."""
        found = await asyncio.get_running_loop().run_in_executor(
            self._threads, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        )
        return list(dict.fromkeys(str(each[4][0]) for each in found))

    def close(self) -> None:
        """Stop the threads without waiting for look-ups."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class _Checked(AbstractResolver):
    """A resolver for the connector that only returns allowed addresses."""

    def __init__(self, name: str, look_up: LookUp, allowed: Allowed) -> None:
        self._name, self._look_up, self._allowed = name, look_up, allowed

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Look up the allowed addresses of a name. Raises ForbiddenAddress if there are none."""
        reasons, found = list[str](), list[ResolveResult]()
        for text in await self._look_up(self._name, port):
            address = parse_address(text)
            reason = self._allowed.refusal(self._name, address)
            if reason is not None:
                reasons.append(reason)
                continue
            family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
            flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
            found.append(
                ResolveResult(hostname=host, host=text, port=port, family=family, proto=0, flags=flags)
            )
        if not found:
            raise ForbiddenAddress("; ".join(reasons) or f"{host} has no address")
        return found

    async def close(self) -> None:
        """Do nothing: the threads belong to the owner of `look_up`."""


class Receiver:
    """Sends to one URL. Belongs to the event loop. `close` ends its connections."""

    def __init__(
        self,
        url: str,
        allowed: Allowed,
        look_up: LookUp,
        trust: ssl.SSLContext,
        *,
        connections: int,
        timeout_ms: int,
    ) -> None:
        self._allowed = allowed
        self._target: Target = allowed.check_url(url)
        # The URL is used unchanged, because a rewritten one might differ from the one that was checked.
        self._url = URL(url, encoded=True)
        if (self._url.raw_host or "").lower() != self._target.host:
            raise InvalidMessage(f"url: host {self._target.host!r} is written in an unusual way")
        connector = aiohttp.TCPConnector(
            resolver=_Checked(self._target.host, look_up, allowed),
            socket_factory=self._open_socket,
            ssl=trust,
            limit=connections,
            keepalive_timeout=IDLE_S,
            ttl_dns_cache=NAMES_KEPT_S,
        )
        total_s = timeout_ms / 1_000
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=total_s, sock_connect=min(total_s, CONNECT_S_MAX)),
            headers={"user-agent": f"timeball/{__version__}"},
            skip_auto_headers=["accept-encoding"],
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
            auto_decompress=False,  # the bodies of answers are not read
            max_line_size=HEADER_BYTES_MAX,
            max_field_size=HEADER_BYTES_MAX,
        )

    async def post(self, body: bytes, headers: Headers, now_ms: int) -> Answer:
        """Send a message and return the outcome. Raises no errors of the network."""
        # A large body is sent in pieces, because a single write would block the event loop.
        data: Any = io.BytesIO(body) if len(body) > LARGE_BODY_BYTES else body
        try:
            async with self._session.post(
                self._url, data=data, headers=headers, allow_redirects=False
            ) as response:
                answer = _answer(response, now_ms)
                await _discard(response)
                return answer
        except TimeoutError:
            return Answer("timeout", words="no answer in time")
        except aiohttp.ClientConnectorError as error:
            is_forbidden = _is_forbidden(error)
            words = str(error.os_error if is_forbidden else error)
            return Answer("forbidden_address" if is_forbidden else "unreachable", words=words)
        except (aiohttp.ClientError, OSError) as error:
            return Answer("broken", words=f"{type(error).__name__}: {error}")

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()

    def _open_socket(self, info: Any) -> socket.socket:
        """Make a socket for the next address to connect to. Raises ForbiddenAddress."""
        family, kind, protocol, _, place = info
        # For an address that is part of the URL, no resolver is used, so this is its only check.
        reason = self._allowed.refusal(self._target.host, parse_address(str(place[0])))
        if reason is not None:
            raise ForbiddenAddress(reason)
        return socket.socket(family, kind, protocol)


def _answer(response: aiohttp.ClientResponse, now_ms: int) -> Answer:
    status, words = response.status, f"status {response.status}"
    wait_ms = retry_after_ms(response.headers.get("retry-after"), now_ms)
    if 200 <= status < 300:
        return Answer("delivered", status)
    if 300 <= status < 400:
        return Answer("redirect", status, f"{words}: redirects are not followed", wait_ms)
    return Answer("client_error" if 400 <= status < 500 else "server_error", status, words, wait_ms)


async def _discard(response: aiohttp.ClientResponse) -> None:
    """Read the rest of a short answer, or close the connection. The status counts in every case."""
    left = ANSWER_BYTES_MAX
    try:
        async for part in response.content.iter_any():
            left -= len(part)
            if left < 0:
                break
        else:
            return
    except (TimeoutError, aiohttp.ClientError, OSError):
        pass
    response.close()


def _is_forbidden(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, ForbiddenAddress):
            return True
        error = getattr(error, "os_error", None) or error.__cause__
    return False
