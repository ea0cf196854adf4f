"""Sends requests to receivers over aiohttp, and refuses URLs that lead to forbidden addresses.

Each receiver has its own pool of connections. A host name is resolved, forbidden addresses are removed from the result,
and the connection goes to one of the remaining addresses. The name is not resolved again between check and connection,
so DNS rebinding is not possible. The function that creates the socket checks the address once more. Redirects are not
followed, the proxies of the environment are not used, and cookies are not stored. Only the status and Retry-After of an
answer are used.
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

ANSWER_BYTES_MAX = 64 * 1024  # an answer up to this size is read, so that its connection can be reused
# The longest header line of an answer. With a longer line, aiohttp does not read the status, so that an accepted
# message would be sent again. So this limit is far above those of common servers.
HEADER_BYTES_MAX = 64 * 1024
CONNECT_S_MAX = 10.0
# Common servers close an idle connection after 5 s. The shorter time avoids a request on a connection that closes.
IDLE_S = 4.0
NAMES_KEPT_S = 10  # time for which the checked addresses of a name are cached
LOOK_UPS_MAX = 8  # at the same time: a look-up at a name server that does not answer takes half a minute
LARGE_BODY_BYTES = 256 * 1024  # larger bodies are sent in pieces

LookUp = Callable[[str, int], Awaitable[Sequence[str]]]


class ForbiddenAddress(OSError):
    """None of the name's addresses may be connected to."""


class HostResolver:
    """Resolves host names in its own threads, so that a slow name server does not occupy the threads of other work."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(LOOK_UPS_MAX, thread_name_prefix="push-names")

    async def look_up(self, host: str, port: int) -> list[str]:
        """Look up the IP addresses of a host. Raises OSError."""
        infos = await asyncio.get_running_loop().run_in_executor(
            self._threads, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        )
        return list(dict.fromkeys(str(info[4][0]) for info in infos))

    def close(self) -> None:
        """Stop the threads without waiting for look-ups."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class _CheckedResolver(AbstractResolver):
    """A resolver for aiohttp's connector that only returns allowed addresses."""

    def __init__(self, name: str, look_up: LookUp, allowed: Allowed) -> None:
        self._name, self._look_up, self._allowed = name, look_up, allowed

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Look up the allowed addresses of the receiver's host, which is `host`. Raises OSError.

        The OSError is ForbiddenAddress if no address is allowed.
        """
        reasons, results = list[str](), list[ResolveResult]()
        for address_text in await self._look_up(self._name, port):
            address = parse_address(address_text)
            reason = self._allowed.refusal(self._name, address)
            if reason is not None:
                reasons.append(reason)
                continue
            family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
            flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
            results.append(
                ResolveResult(
                    hostname=host, host=address_text, port=port, family=family, proto=0, flags=flags
                )
            )
        if not results:
            raise ForbiddenAddress("; ".join(reasons) or f"{host} has no address")
        return results

    async def close(self) -> None:
        """Do nothing: the threads belong to the owner of `look_up`."""


class Receiver:
    """Sends messages to one URL, over its own connections. Belongs to the event loop."""

    def __init__(
        self,
        url: str,
        allowed: Allowed,
        look_up: LookUp,
        tls_context: ssl.SSLContext,
        *,
        connections: int,
        timeout_ms: int,
    ) -> None:
        """Check the URL, and prepare the connections.

        `connections`: at most so many at the same time. `timeout_ms`: of a whole request. Raises InvalidMessage and the
        errors of `Allowed.check_url`.
        """
        self._allowed = allowed
        self._target: Target = allowed.check_url(url)
        # The URL is used unchanged, because a normalized URL might have another host than the checked one.
        self._url = URL(url, encoded=True)
        if (self._url.raw_host or "").lower() != self._target.host:
            raise InvalidMessage(f"url: host {self._target.host!r} is written in an unusual way")
        connector = aiohttp.TCPConnector(
            resolver=_CheckedResolver(self._target.host, look_up, allowed),
            socket_factory=self._open_socket,
            ssl=tls_context,
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
        """Send a message by POST. Network errors are outcomes, and are not raised. `now_ms`: for Retry-After dates."""
        # A large body is sent in pieces, because a single write would block the event loop.
        data: Any = io.BytesIO(body) if len(body) > LARGE_BODY_BYTES else body
        try:
            async with self._session.post(
                self._url, data=data, headers=headers, allow_redirects=False
            ) as response:
                answer = _answer(response, now_ms)
                await _read_rest(response)
                return answer
        except TimeoutError:
            return Answer("timeout", detail="no answer in time")
        except aiohttp.ClientConnectorError as error:
            is_forbidden = _is_forbidden(error)
            detail = str(error.os_error if is_forbidden else error)
            return Answer("forbidden_address" if is_forbidden else "unreachable", detail=detail)
        except (aiohttp.ClientError, OSError) as error:
            return Answer("broken", detail=f"{type(error).__name__}: {error}")

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()

    def _open_socket(self, address_info: Any) -> socket.socket:
        """Create a socket for an address that the connector is about to use. Raises ForbiddenAddress."""
        family, kind, protocol, _, socket_address = address_info
        # If the URL contains an IP address, no resolver is used, so this is the only check at connection time.
        reason = self._allowed.refusal(self._target.host, parse_address(str(socket_address[0])))
        if reason is not None:
            raise ForbiddenAddress(reason)
        return socket.socket(family, kind, protocol)


def _answer(response: aiohttp.ClientResponse, now_ms: int) -> Answer:
    """Derive the outcome of a request from the status and Retry-After of its response."""
    status, detail = response.status, f"status {response.status}"
    if 200 <= status < 300:
        return Answer("delivered", status)
    wait_ms = retry_after_ms(response.headers.get("retry-after"), now_ms)
    if 300 <= status < 400:
        return Answer("redirect", status, f"{detail}: redirects are not followed", wait_ms)
    return Answer("client_error" if 400 <= status < 500 else "server_error", status, detail, wait_ms)


async def _read_rest(response: aiohttp.ClientResponse) -> None:
    """Read the body of an answer, so that its connection can be reused.

    Closes the connection if the body has more than ANSWER_BYTES_MAX, or after an error. Errors are not raised, because
    the status has already decided the outcome.
    """
    bytes_left = ANSWER_BYTES_MAX
    try:
        async for chunk in response.content.iter_any():
            bytes_left -= len(chunk)
            if bytes_left < 0:
                break
        else:
            return
    except (TimeoutError, aiohttp.ClientError, OSError):
        pass
    response.close()


def _is_forbidden(error: BaseException | None) -> bool:
    """Check whether a ForbiddenAddress caused this error."""
    while error is not None:
        if isinstance(error, ForbiddenAddress):
            return True
        error = getattr(error, "os_error", None) or error.__cause__
    return False
