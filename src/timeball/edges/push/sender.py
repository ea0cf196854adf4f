"""Builds signed requests, and sends them to receivers over aiohttp. Protects the broker's network from their URLs.

Each receiver has its own pool of connections. A host name is resolved, forbidden addresses are removed from the result,
and the connection goes to one of the remaining addresses. The name is not resolved again between check and connection,
so DNS rebinding is not possible. The function that creates the socket checks the address once more. Redirects are not
followed, the proxies of the environment are not used, and cookies are not stored. Only the status and Retry-After of an
answer are used.
"""

from __future__ import annotations

import asyncio
import hmac
import io
import socket
import ssl
from base64 import b64encode
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from hashlib import blake2b
from typing import Any, NamedTuple
from urllib.parse import quote

import aiohttp
import pyarrow as pa
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from timeball import __version__
from timeball.broker.consuming.retry import SPENT
from timeball.model.addresses import Allowed, Target, parse_address
from timeball.model.errors import InvalidMessage
from timeball.model.message import decode_properties
from timeball.model.trace_context import TRACEPARENT, TRACESTATE
from timeball.monitoring.figures import Outcome

# ---- connections to receivers --------------------------------------------------------------------------------

ANSWER_BYTES_MAX = 64 * 1024  # an answer up to this size is read, so that its connection can be reused
HEADER_BYTES_MAX = 8 * 1024  # of one header line of an answer
CONNECT_S_MAX = 10.0
# Common servers close an idle connection after 5 s. The shorter time avoids a request on a connection that closes.
IDLE_S = 4.0
NAMES_KEPT_S = 10  # for which the checked addresses of a name are cached
LOOK_UPS_MAX = 8  # a look-up at a name server that does not answer takes half a minute
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
        """Look up the allowed addresses of the receiver's host. Raises ForbiddenAddress if there are none."""
        reasons, allowed = list[str](), list[ResolveResult]()
        for address_text in await self._look_up(self._name, port):
            address = parse_address(address_text)
            reason = self._allowed.refusal(self._name, address)
            if reason is not None:
                reasons.append(reason)
                continue
            family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
            flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
            allowed.append(
                ResolveResult(
                    hostname=host, host=address_text, port=port, family=family, proto=0, flags=flags
                )
            )
        if not allowed:
            raise ForbiddenAddress("; ".join(reasons) or f"{host} has no address")
        return allowed

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
        """Send a message by POST. Network errors are outcomes, and are not raised."""
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
    wait_ms = retry_after_ms(response.headers.get("retry-after"), now_ms)
    if 200 <= status < 300:
        return Answer("delivered", status)
    if 300 <= status < 400:
        return Answer("redirect", status, f"{detail}: redirects are not followed", wait_ms)
    return Answer("client_error" if 400 <= status < 500 else "server_error", status, detail, wait_ms)


async def _read_rest(response: aiohttp.ClientResponse) -> None:
    """Read the body of an answer, so that the connection can be reused. Closes the connection if the body is too long.

    Errors are ignored, because the status has already decided the outcome.
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
    """True if a ForbiddenAddress caused this error."""
    while error is not None:
        if isinstance(error, ForbiddenAddress):
            return True
        error = getattr(error, "os_error", None) or error.__cause__
    return False


# ---- the request that delivers a message: its headers and its signature --------------------------------------
# The scheme is Standard Webhooks 1.0. `webhook-id` identifies the message and is the same in each attempt. The
# signature is HMAC-SHA256 over id, timestamp and body, joined with dots. There is one signature for each valid secret.
# Characters that a header cannot contain are percent-encoded (%XX), and so are spaces, double quotes and percent signs,
# as in the HTTP binding of CloudEvents.

# Common servers accept 8 KiB of headers in total. 2 KiB are left for other headers and for those that proxies add.
PROPERTIES_CHARACTERS_MAX = 6 * 1024
DEFAULT_CONTENT_TYPE = "application/octet-stream"
# the printable ASCII characters that are not percent-encoded in values
_SAFE = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) not in '%"')
# the characters that a header's name may contain besides letters, digits and %
_SAFE_IN_NAMES = "!#$&'*+-.^_`|~"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# Properties that RocketMQ's clients and the broker add to a message. They are not sent as property headers: some have
# headers of their own, such as `timeball-tag`, and the others are of no use to a receiver.
_INTERNAL_PROPERTIES = SPENT | {
    "TAGS", "KEYS", "UNIQ_KEY", "WAIT", "ORIGIN_GROUP", "ORIGIN_MESSAGE_ID", "RETRY_TOPIC", "1ST_POP_TIME", "POP_CK",
}  # fmt: skip
_COLUMNS = (
    "topic", "body", "tag", "keys", "unique_key", "properties", "born_ms", "born_host", "store_ms",
    "reconsume_times", "due_ms",
)  # fmt: skip

Headers = list[tuple[str, str]]


class Delivery(NamedTuple):
    """One attempt to deliver a message: the request without its timestamp and signature."""

    message_id: str  # the value of the header webhook-id
    body: bytes
    headers: Headers
    attempt: int


class Answer(NamedTuple):
    """The outcome of a request. `status` is 0 if no answer came, and `detail` is an explanation for people.

    `retry_after_ms` is the pause that the receiver has requested, 0 for none.
    """

    outcome: Outcome
    status: int = 0
    detail: str = ""
    retry_after_ms: int = 0

    @property
    def is_gone(self) -> bool:
        """True if the receiver answered 410, which means: stop sending (Standard Webhooks)."""
        return self.status == 410


def build_deliveries(rows: pa.RecordBatch, subscription: str, topic: str) -> Iterator[Delivery]:
    """Build an attempt for each row (READ_SCHEMA) that a subscription has received from `topic` or its retry topic."""
    columns = [rows.column(column).to_pylist() for column in _COLUMNS]
    for row in zip(*columns, strict=True):
        (
            stored_topic, body, tag, keys, unique_key, properties_text, born_ms, born_host, store_ms, reconsume_times,
            due_ms,
        ) = row  # fmt: skip
        properties, body = decode_properties(properties_text or ""), body or b""
        raw_id = (
            unique_key or properties.get("UNIQ_KEY") or _derived_id(topic, body, keys, born_ms, born_host)
        )
        # A dot would end the id in the signed text.
        message_id = quote(raw_id, safe=_SAFE).replace(".", "%2E")
        attempt = 1 + (reconsume_times or 0)
        headers: Headers = [
            ("webhook-id", message_id),
            ("content-type", _percent_encoded(properties.pop("content-type", "")) or DEFAULT_CONTENT_TYPE),
            ("timeball-subscription", subscription),
            ("timeball-topic", _percent_encoded(topic)),
            ("timeball-attempt", str(attempt)),
            ("timeball-released", _rfc3339(store_ms)),
        ]
        # A row of the retry topic has the time of the retry as its due time, and not the due time that the sender
        # chose.
        if due_ms is not None and stored_topic == topic:
            headers.append(("timeball-due", _rfc3339(due_ms)))
        if tag:
            headers.append(("timeball-tag", _percent_encoded(tag)))
        if keys:
            headers.append(("timeball-key", " ".join(map(_percent_encoded, keys.split()))))
        # Trace contexts keep their names, so that the receiver's request becomes part of the message's trace.
        for header_name in (TRACEPARENT, TRACESTATE):
            if value := properties.pop(header_name, ""):
                headers.append(
                    (
                        header_name,
                        value if value.isascii() and value.isprintable() else _percent_encoded(value),
                    )
                )
        headers += _property_headers(properties)
        yield Delivery(message_id, body, headers, attempt)


def signed_headers(delivery: Delivery, secrets: Sequence[bytes], now_ms: int) -> Headers:
    """Build all headers of an attempt: those of `delivery`, the timestamp `now_ms` and a signature for each secret."""
    seconds = str(now_ms // 1_000)
    signed_content = b".".join((delivery.message_id.encode(), seconds.encode(), delivery.body))
    signatures = [
        "v1," + b64encode(hmac.digest(secret, signed_content, "sha256")).decode() for secret in secrets
    ]
    return [
        *delivery.headers,
        ("webhook-timestamp", seconds),
        ("webhook-signature", " ".join(signatures)),
    ]


def retry_after_ms(value: str | None, now_ms: int) -> int:
    """Convert the header Retry-After, a number of seconds or a date, to milliseconds from `now_ms`.

    0 if the header is missing, malformed, or a date in the past.
    """
    if value is None:
        return 0
    text = value.strip()
    if text.isascii() and text.isdecimal():
        return int(text[:9]) * 1_000  # nine digits are thirty years, and the caller applies a limit
    try:
        retry_time = parsedate_to_datetime(text)
    except (ValueError, TypeError, IndexError):
        return 0
    retry_time = retry_time if retry_time.tzinfo is not None else retry_time.replace(tzinfo=UTC)
    return max(0, (retry_time - _EPOCH) // timedelta(milliseconds=1) - now_ms)


def _property_headers(properties: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield a header `timeball-property-NAME` for each property. Attributes of a CloudEvent keep their names.

    At most PROPERTIES_CHARACTERS_MAX characters are sent. A last header counts the omitted properties.
    """
    is_event, characters_left, omitted_count = "ce-specversion" in properties, PROPERTIES_CHARACTERS_MAX, 0
    for name, value in properties.items():
        if name in _INTERNAL_PROPERTIES:
            continue
        is_event_attribute = is_event and name.startswith("ce-")
        header = quote(name, safe=_SAFE_IN_NAMES), _percent_encoded(value)
        characters_left -= len(header[0]) + len(header[1])
        if characters_left < 0:
            omitted_count += 1
        else:
            yield (header[0] if is_event_attribute else f"timeball-property-{header[0]}"), header[1]
    if omitted_count:
        yield "timeball-properties-omitted", str(omitted_count)


def _derived_id(topic: str, body: bytes, keys: str | None, born_ms: int | None, born_host: str | None) -> str:
    """Derive the id of a message that was sent without an id. Uses only content that is the same in each attempt."""
    content = (topic.encode(), (keys or "").encode(), str(born_ms).encode(), str(born_host).encode(), body)
    return blake2b(b"\n".join(content), digest_size=16).hexdigest()


def _percent_encoded(value: str) -> str:
    return quote(value, safe=_SAFE)


def _rfc3339(time_ms: int) -> str:
    """Format a time as RFC 3339 in UTC, with milliseconds."""
    text = (_EPOCH + timedelta(milliseconds=time_ms)).isoformat(timespec="milliseconds")
    return text.removesuffix("+00:00") + "Z"
