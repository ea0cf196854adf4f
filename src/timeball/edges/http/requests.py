"""Handles one HTTP request: its caller, parameters and body, the check for foreign pages, its answer or problem.

page            the check for requests that a browser sends for a page of another site
caller          identified by the headers, before the body is read
permission      checked by the policy before the body is read, if the path identifies the operation
body            at most BODY_BYTES_MAX, within BODY_S, and within the byte quota of the client's address
answer          JSON; its bytes count towards a limit until the client has read them, which may take ANSWER_S
problem         RFC 9457, with the codes of docs/operations.md
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Coroutine, Mapping
from functools import partial
from ipaddress import ip_address
from typing import Any, NamedTuple
from urllib.parse import unquote

from httptools import parse_url
from starlette.convertors import Convertor
from starlette.datastructures import QueryParams
from starlette.routing import compile_path

from timeball.broker.policy import Policy
from timeball.edges.http.codec import (
    JSON,
    Answer,
    Nothing,
    check_content_type,
    decode,
    problem,
    problem_of,
)
from timeball.edges.http.exchange import Exchange, Target
from timeball.edges.shared.error_codes import Refused, log_failure
from timeball.edges.shared.sessions import advertised
from timeball.edges.shared.shared_limits import MemoryQuota, SharedLimit
from timeball.io.security import Security
from timeball.model import limits
from timeball.model.access import Caller, Verb
from timeball.model.addresses import host_names
from timeball.model.config import Settings
from timeball.model.errors import Forbidden, InvalidMessage, OutOfRange, OverLimit, RequestError
from timeball.model.rules import valid

logger = logging.getLogger(__name__)

# ---- requests and answers ------------------------------------------------------------------------------------

BODY_BYTES_MAX = 2 * limits.BODY_BYTES_MAX  # a message body of 4 MiB in base64, and the fields beside it
RECEIVED_BYTES_MAX = 64 * 1024 * 1024  # for the bodies of all requests until they are answered
SENT_BYTES_MAX = 64 * 1024 * 1024  # for all answers that clients have not read yet
CALLS_MAX = limits.PULLS_WAITING_MAX
# live tails and streams of consumer groups; counted separately from the calls, so that they displace no receives
STREAMS_MAX = 2_000
STREAM_READ_S = 20.0  # for a client to read the earlier chunks of a stream before the next one is sent
BODY_S = 20.0  # for reserving its bytes and receiving the whole body
ANSWER_S = 60.0  # for a client to read an answer
PATHS_KEPT_MAX, PATH_KEPT_CHARACTERS_MAX = 4_096, 1_024
QUERY_KEPT_PARAMETERS_MAX = 16  # a parsed parameter takes about 140 bytes
_NO_QUERY = QueryParams("")


class Stream(NamedTuple):
    """An answer without an end, sent in chunks. `chunks` is closed when the client disconnects or does not read."""

    chunks: AsyncGenerator[bytes, None]
    media_type: str


class Call:
    """One request.

    `path` has the parameters in the path, and `query` those of the query string. `peer` is the client's address.
    """

    def __init__(self, exchange: Exchange, request_limits: RequestLimits) -> None:
        self.exchange, self._request_limits = exchange, request_limits
        self.headers, self.peer = exchange.headers, exchange.peer
        _, self.query, self.path = exchange.target
        self.caller: Caller  # set when the credentials were checked
        self.account = ""  # the account that the request counts for, once it is known
        self.held_bytes = 0  # reserved in `RequestLimits.received` for the body
        self.is_answered = False

    def take_body(self) -> bytes | None:
        """Take the body if it has come and its bytes can be reserved at once, else None. Raises Refused (413)."""
        exchange = self.exchange
        if exchange.more_body or exchange.disconnected:
            return None
        reserved_bytes = self._claimed_bytes()
        if not self._request_limits.received.add_if_fits(self.peer, reserved_bytes):
            return None
        self.held_bytes = reserved_bytes
        data = exchange.take_body()
        if len(data) > BODY_BYTES_MAX:
            raise Refused(413, f"a body of more than {BODY_BYTES_MAX} bytes: send fewer at once")
        return data

    def _claimed_bytes(self) -> int:
        """Read the size of the body from the headers. Without it, use the largest size. Raises Refused (413)."""
        # A request with neither header has no body.
        length = self.headers.get("content-length", "" if "transfer-encoding" in self.headers else "0")
        claimed_bytes = int(length) if length.isdecimal() and len(length) < 20 else BODY_BYTES_MAX
        if claimed_bytes > BODY_BYTES_MAX:
            raise Refused(
                413, f"a body of {claimed_bytes} bytes; at most {BODY_BYTES_MAX}: send fewer at once"
            )
        return claimed_bytes

    async def read_body(self) -> bytes:
        """Wait for the body, and read it. Raises Refused (408, 413), ClientDisconnected and OverLimit."""
        data = self.take_body()
        if data is not None:
            return data
        reserved_bytes = self._claimed_bytes()
        chunks, size_bytes = [], 0
        try:
            async with asyncio.timeout(BODY_S):
                # Reserve the bytes before reading: until then uvicorn stops reading from the client.
                await self._request_limits.received.add_when_fits(self.peer, reserved_bytes)
                self.held_bytes = reserved_bytes
                has_more = True
                while has_more:
                    message = await self.exchange.receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnected
                    assert message["type"] == "http.request"
                    chunk, has_more = message["body"], message["more_body"]
                    chunks.append(chunk)
                    size_bytes += len(chunk)
                    if size_bytes > BODY_BYTES_MAX:
                        raise Refused(413, f"a body of more than {BODY_BYTES_MAX} bytes: send fewer at once")
        except TimeoutError:
            raise Refused(408, f"the body has not come within {BODY_S:.0f} s") from None
        return b"".join(chunks)

    @property
    def is_leaving(self) -> bool:
        """True if the client has disconnected, or has announced it by closing its direction."""
        # Bytes that are written to a closing transport are discarded.
        return self.exchange.disconnected or self.exchange.transport.is_closing()

    async def wait_for_disconnect(self) -> None:
        """Wait until the client disconnects. Must not run while the body is read, which uses the same events."""
        while (await self.exchange.receive())["type"] != "http.disconnect":
            pass

    def release(self) -> None:
        """Release the bytes that were reserved for the body."""
        self._request_limits.received.remove(self.peer, self.held_bytes)
        self.held_bytes = 0


class RequestLimits:
    """The limits shared by the requests of all clients. Belongs to the event loop.

    They limit the bytes received, the bytes to send, the calls and the streams.
    """

    def __init__(self) -> None:
        self.received = MemoryQuota(RECEIVED_BYTES_MAX, BODY_BYTES_MAX)
        self.sent = MemoryQuota(SENT_BYTES_MAX, 2 * limits.POP_BYTES_MAX)
        self.calls, self.streams = SharedLimit("requests", CALLS_MAX), SharedLimit("streams", STREAMS_MAX)


class ClientDisconnected(Exception):
    """The client has disconnected before its answer."""


# Raises the errors of the broker's verbs, for which `Endpoint` sends problem documents.
Handler = Callable[[Call], Awaitable[Answer | Stream]]
Respond = Callable[[Answer | BaseException], None]


class DirectHandler(NamedTuple):
    """A handler that needs no task for a request whose body came with its head.

    `begin` takes the body and calls `respond` with the answer, at once or later, once. It returns False, and has done
    nothing, if the body is missing or large. Then a task runs `handle`, as for other requests.
    """

    begin: Callable[[Call, Respond], bool]
    handle: Handler


Paths = dict[str, dict[str, Handler | DirectHandler]]  # by path and method


async def read_request(
    call: Call,
    kind: type[Any],
    policy: Policy,
    verb: Verb,
    *,
    topic: str | None = None,
    group: str | None = None,
) -> Any:
    """Check that the caller may use the verb, then read the JSON body and decode it as a struct of type `kind`.

    Raises Forbidden, Unauthorized, Refused (415), and the errors of `read_body` and `decode`.
    """
    policy.allow(call.caller, verb, topic=topic, group=group)
    check_content_type(call.headers.get("content-type", ""), JSON)
    return decode(kind, await call.read_body())


async def check_no_body(
    call: Call,
    policy: Policy,
    verb: Verb,
    *,
    topic: str | None = None,
    group: str | None = None,
) -> None:
    """Check that the caller may use the verb, and that there is no body. An empty JSON object is accepted.

    Raises the errors of `read_request`. The content type is checked because a form on a page of another site always has
    one, and it is never that of JSON.
    """
    policy.allow(call.caller, verb, topic=topic, group=group)
    if content_type := call.headers.get("content-type"):
        try:
            check_content_type(content_type, JSON)
        except Refused as error:
            raise Refused(415, f"{error}, or nothing: the request needs no body") from error
    if data := await call.read_body():
        decode(Nothing, data)


def parse_count(call: Call, name: str, default: int, count_max: int) -> int:
    """Parse the query parameter `name`, a number from 1 to `count_max`. Raises OutOfRange."""
    text = call.query.get(name, str(default))
    if not (text.isascii() and text.isdecimal() and len(text) < 9 and 1 <= int(text) <= count_max):
        raise OutOfRange(f"{name}={text[:20]}: 1 to {count_max}")
    return int(text)


def parse_group(call: Call) -> str:
    """Read the consumer group from the query. Raises InvalidMessage if it is missing."""
    group = call.query.get("group")
    if not group:
        raise InvalidMessage("group: name the consumer group, as in ?group=workers")
    return group


class Endpoint:
    """Serves one path: checks each request and calls the handler of its method."""

    def __init__(
        self,
        methods: Mapping[str, Handler | DirectHandler],
        security: Security,
        pages: ForeignPageCheck,
        now_ms: Callable[[], int],
        request_limits: RequestLimits,
        *,
        is_open: bool,
        former_methods: Mapping[str, str],
        parameters: Mapping[str, tuple[str, ...]],
    ) -> None:
        """Serve `methods`. `parameters` lists the query parameters of each method.

        A method that is missing in `parameters` accepts any query. `is_open` means that callers need no account.
        """
        self._methods, self._security, self._pages, self._now_ms = methods, security, pages, now_ms
        self._request_limits, self._parameters = request_limits, parameters
        # by method that only older versions offered: advice for the client
        self._former_methods = former_methods
        self._needs_no_account = is_open

    def start(self, exchange: Exchange, run: Callable[[Coroutine[Any, Any, None]], None]) -> None:
        """Serve one request: check it, call its handler, and send the answer or a problem document. Raises nothing.

        `run` starts a task, which most handlers need.
        """
        call = Call(exchange, self._request_limits)
        self._request_limits.calls.take(call.peer)
        respond = partial(self._respond, call, run)
        try:
            handler = self._admit(exchange.method, call)
            if isinstance(handler, Answer):
                respond(handler)
                return
            if isinstance(handler, DirectHandler):
                if handler.begin(call, respond):
                    return
                handler = handler.handle
        except Exception as error:  # of any kind: the client waits for an answer
            respond(error)
        else:
            run(self._handle(call, handler))

    def _admit(self, method: str, call: Call) -> Handler | DirectHandler | Answer:
        """Check the origin, method, caller, limits and parameters of a request, and find its handler.

        The result is an answer if the path does not have the method. Raises Forbidden, Unauthorized, OverLimit and
        RequestError.
        """
        self._pages.check(method, call.exchange.target.path, call.headers)
        # Checked before the handler runs, because a refused receive must not lease messages.
        self._request_limits.sent.check(call.peer)
        name = "GET" if method == "HEAD" else method
        handler = self._methods.get(name)
        if handler is None:
            allowed = ", ".join(sorted(self._methods))
            advice = self._former_methods.get(method, f"this path has {allowed}")
            return problem(405, "bad_request", f"{method[:20]!r}: {advice}", allow=allowed)
        call_limit = self._request_limits.calls
        if not self._needs_no_account:
            call.caller = self._security.caller(call.headers, self._now_ms())
            call.account = call.caller.name
            call_limit.count_account(call.account)
        if excess := call_limit.excess(call.peer, call.account):
            raise OverLimit(excess)
        check_parameters(call.query, self._parameters.get(name))
        return handler

    async def _handle(self, call: Call, handler: Handler) -> None:
        """Run a handler as a task, and send its answer, or the problem document for its error."""
        try:
            answer = await handler(call)
            if isinstance(answer, Answer) and answer.size_bytes and call.exchange.method == "GET":
                # Several requests may have passed the check in `_admit` before one had its answer. A GET changes
                # nothing, so it may be refused after its handler has ended.
                self._request_limits.sent.check(call.peer, answer.size_bytes)
        except ClientDisconnected:
            self._end(call)
            return
        except Exception as error:  # of any kind: the client waits for an answer
            answer = self._problem_of(call, error)
        except BaseException:  # such as a cancel at a stop
            self._end(call)
            raise
        self._end(call)
        if isinstance(answer, Stream):
            try:
                if await call.exchange.drain(ANSWER_S):
                    await self._send_stream(answer, call)
            finally:
                await answer.chunks.aclose()
        elif call.exchange.flow.write_paused:
            await self._write_later(call, answer)
        elif unread_bytes := self._write(call, answer):
            await self._wait_until_read(call, unread_bytes)

    def _respond(
        self, call: Call, run: Callable[[Coroutine[Any, Any, None]], None], outcome: Answer | BaseException
    ) -> None:
        """Send the answer of a direct handler, or the problem document for its error.

        Does nothing if the request has its answer already.
        """
        if call.is_answered:
            return
        self._end(call)
        answer = self._problem_of(call, outcome) if isinstance(outcome, BaseException) else outcome
        if call.exchange.flow.write_paused:
            run(self._write_later(call, answer))
        elif unread_bytes := self._write(call, answer):
            run(self._wait_until_read(call, unread_bytes))

    def _write(self, call: Call, answer: Answer) -> int:
        """Write an answer to a client that reads.

        Returns the size of its body if the client must read first, or 0 if the system took most of the bytes at once.
        """
        try:
            size_bytes = call.exchange.write(answer)
        except Exception as error:  # an answer that cannot be encoded, and the client waits for one
            size_bytes = call.exchange.write(self._problem_of(call, error))
        return size_bytes if call.exchange.flow.write_paused else 0

    async def _wait_until_read(self, call: Call, size_bytes: int) -> None:
        """Count a written answer until the client has read it. Aborts the connection after ANSWER_S."""
        sent, exchange = self._request_limits.sent, call.exchange
        sent.add(exchange.peer, size_bytes)
        try:
            await exchange.drain(ANSWER_S)
        finally:
            sent.remove(exchange.peer, size_bytes)

    def _problem_of(self, call: Call, error: BaseException) -> Answer:
        """Log an error of a request, and build its answer."""
        exchange = call.exchange
        log_failure(logger, f"{exchange.method} {exchange.target.path[:200]!r}", error)
        return problem_of(error)

    def _end(self, call: Call) -> None:
        """Give back the parts of the limits that a call has used, when its handler has ended."""
        call.is_answered = True
        self._request_limits.calls.give_back(call.peer, call.account)
        call.release()

    async def _write_later(self, call: Call, answer: Answer) -> None:
        """Write an answer when the client has read earlier answers."""
        sent, exchange = self._request_limits.sent, call.exchange
        sent.add(exchange.peer, answer.size_bytes)
        try:
            is_read = await exchange.drain(ANSWER_S)
        finally:
            sent.remove(exchange.peer, answer.size_bytes)
        if is_read and (unread_bytes := self._write(call, answer)):
            await self._wait_until_read(call, unread_bytes)

    async def _send_stream(self, stream: Stream, call: Call) -> None:
        """Send the chunks of a stream until it ends, or until the client disconnects or does not read.

        The client has read all earlier answers.
        """
        exchange = call.exchange
        if exchange.method == "HEAD":
            exchange.write(Answer(200, b"", media_type=stream.media_type))
            return
        try:
            self._request_limits.streams.admit(call.peer, call.account)
        except OverLimit as error:
            exchange.write(problem_of(error))
            return
        writing = asyncio.ensure_future(self._write_stream(stream, exchange))
        disconnect = asyncio.ensure_future(call.wait_for_disconnect())
        try:
            await asyncio.wait((writing, disconnect), return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
        finally:
            self._request_limits.streams.give_back(call.peer, call.account)
            for task in (writing, disconnect):
                task.cancel()
            await asyncio.gather(writing, disconnect, return_exceptions=True)

    async def _write_stream(self, stream: Stream, exchange: Exchange) -> None:
        """Send the headers and chunks of a stream. Raises TimeoutError if the client does not read a chunk in time."""
        headers = [
            (b"content-type", stream.media_type.encode()),
            (b"cache-control", b"no-store"),
            (b"x-content-type-options", b"nosniff"),
            # tells proxies not to buffer the answer, which has no end
            (b"x-accel-buffering", b"no"),
        ]
        await exchange.send({"type": "http.response.start", "status": 200, "headers": headers})
        async for chunk in stream.chunks:
            await self._write_chunk(exchange, chunk, has_more=True)
        await self._write_chunk(exchange, b"", has_more=False)

    async def _write_chunk(self, exchange: Exchange, chunk: bytes, *, has_more: bool) -> None:
        """Send a chunk when the client has read earlier chunks. Raises TimeoutError if it does not."""
        # `send` returns when the transport can take more. If the client does not read, only this chunk waits here.
        self._request_limits.sent.add(exchange.peer, len(chunk))
        try:
            async with asyncio.timeout(STREAM_READ_S):
                await exchange.send({"type": "http.response.body", "body": chunk, "more_body": has_more})
        except TimeoutError:
            logger.info("stream not read peer=%s", exchange.peer)
            raise
        finally:
            self._request_limits.sent.remove(exchange.peer, len(chunk))


def no_path(path: str) -> Answer:
    """Build the answer to a request for an unknown path."""
    return problem(404, "not_found", f"no path {path[:200]!r}; GET /openapi.json has them all")


def check_parameters(query: QueryParams, known_names: tuple[str, ...] | None) -> None:
    """Raise RequestError for an unknown or repeated query parameter. `known_names` None allows all parameters."""
    if not query or known_names is None:
        return
    for name in query:
        if name not in known_names:
            raise RequestError(f"parameter {name[:80]!r} is not known; {valid(name, known_names)}")
        if len(query.getlist(name)) > 1:
            raise RequestError(f"parameter {name!r} is there {len(query.getlist(name))} times; give it once")


class PathTable:
    """The endpoints by path template."""

    def __init__(self, endpoints: Mapping[str, Endpoint]) -> None:
        """Serve these endpoints. Templates are Starlette's (`/v1/topics/{topic}`). The first match counts."""
        self._routes: list[_Route] = []
        for template, endpoint in endpoints.items():
            pattern, _, converters = compile_path(template)
            self._routes.append(_Route(template.partition("{")[0], pattern, converters, endpoint))
        # The results of the last look-ups, by URL. Clients choose topics and ids, so their number is limited.
        self._results: dict[bytes, tuple[Target, Endpoint | None]] = {}

    def find(self, url: bytes) -> tuple[Target, Endpoint | None]:
        """Find the endpoint for the URL of a request. None for an unknown path.

        Raises httptools.HttpParserInvalidURLError and UnicodeDecodeError.
        """
        return self._results.get(url) or self._find(url)

    def _find(self, url: bytes) -> tuple[Target, Endpoint | None]:
        """Parse a URL, compare its path with each template, and remember the result for a short URL.

        The endpoint is None if no template matches.
        """
        parsed = parse_url(url)
        path = parsed.path.decode("ascii")
        if "%" in path:
            path = unquote(path)
        query = QueryParams(parsed.query) if parsed.query else _NO_QUERY
        for prefix, pattern, converters, endpoint in self._routes:
            if path.startswith(prefix) and (match := pattern.match(path)):
                params = {name: converters[name].convert(text) for name, text in match.groupdict().items()}
                result = Target(path, query, params), endpoint
                if len(url) <= PATH_KEPT_CHARACTERS_MAX and url.count(b"&") < QUERY_KEPT_PARAMETERS_MAX:
                    if len(self._results) >= PATHS_KEPT_MAX:
                        self._results.clear()
                    self._results[url] = result
                return result
        return Target(path, query, {}), None


class _Route(NamedTuple):
    prefix: str  # of the template, before its first parameter
    pattern: re.Pattern[str]
    converters: Mapping[str, Convertor[Any]]
    endpoint: Endpoint


# ---- requests for pages of other sites (CSRF, DNS rebinding) -------------------------------------------------
# A page can make a browser send requests to every address that the browser reaches, including a broker on the same
# machine. A broker without accounts would carry them out. `ForeignPageCheck` prevents that. It does no I/O.

OWN_SITE_VALUES = ("same-origin", "none")  # `none`: the user typed the address
DEFAULT_PORTS = {"http": ":80", "https": ":443"}
# Probes and load balancers use these paths under any host name. The answers contain no data.
_PATHS_FOR_ANY_HOST = ("/health/", "/leader/")
# A link from another site may lead to all paths but these: the dashboard and the pages of the API contain no data
# either.
_PATHS_WITHOUT_LINKS = ("/v1/", "/metrics")
_QUOTED_MAX = 80  # characters


class ForeignPageCheck:
    """Checks the requests to one broker or follower, in two ways.

    host    The name by which the client reached the broker. The owner of a name can point it to the broker's address
            (DNS rebinding), and the browser then treats the broker as the page's own site. So a broker without
            accounts only answers to names that are local or configured. With accounts, such a page lacks a key.
    page    The site of the page that sends the request, with accounts and without. `Sec-Fetch-Site` tells it. Browsers
            only send that to HTTPS and loopback addresses. Without it, `Origin` counts, which they send with everything
            but a plain GET. A plain GET without either is answered: GET changes nothing, and the page cannot read the
            answer.

    An IP address in `Host` is always accepted: an address cannot be pointed to another one. Programs other than
    browsers send neither of the two page headers.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        has_accounts: bool,
        cluster_hosts: Callable[[], Collection[str]] = tuple,
    ) -> None:
        """Collect the host names by which clients may address the broker.

        `cluster_hosts` returns the names of the cluster's other nodes, which forward their clients to this one.
        """
        self._has_accounts, self._cluster_hosts = has_accounts, cluster_hosts
        own_hosts = (settings.host, advertised(settings.advertise)[0])
        self._known_hosts = host_names(settings.http_hosts) | {name.lower() for name in own_hosts if name}

    def check(self, method: str, path: str, headers: Mapping[str, str]) -> None:
        """Raise Forbidden for a request that comes from a foreign page. The names of `headers` are in lower case."""
        host = headers.get("host", "")
        if not (self._has_accounts or path.startswith(_PATHS_FOR_ANY_HOST) or self._is_known_host(host)):
            name = _host_name(host)[:_QUOTED_MAX]
            raise Forbidden(
                f"host {name!r}: a broker without accounts answers to localhost, to IP addresses and to names that it "
                "is given. Start it with --http-hosts and this name, or with --access-file"
            )
        site, origin = headers.get("sec-fetch-site"), headers.get("origin")
        if site in OWN_SITE_VALUES or (site is None and (origin is None or _is_same_origin(origin, host))):
            return
        if _is_navigation(method, headers) and not path.startswith(_PATHS_WITHOUT_LINKS):
            return
        page = f"a page of {origin[:_QUOTED_MAX]!r}" if origin else "a page of another site"
        raise Forbidden(
            f"{page} sent this request: the API accepts only pages of its own address. Send it from a program, or "
            "through a proxy at the page's address"
        )

    def _is_known_host(self, host: str) -> bool:
        """True if the header `Host` is missing, or names an IP address, this machine, or a known name."""
        name = _host_name(host)
        # Browsers always send the header, so a request without it comes from another program.
        if not name or name == "localhost" or name.endswith(".localhost") or name in self._known_hosts:
            return True
        return _is_address(name) or name in self._cluster_hosts()


def _host_name(host: str) -> str:
    """Extract the host name or address from a `Host` header, without the port and in lower case."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].rstrip(".").lower()


def _is_address(name: str) -> bool:
    """True for an IP address without brackets."""
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _is_same_origin(origin: str, host: str) -> bool:
    """True if a page of `origin` was served by this host and port.

    The scheme is ignored, because a proxy may terminate HTTPS.
    """
    scheme, _, authority = origin.lower().partition("://")
    port = DEFAULT_PORTS.get(scheme, "")
    return bool(authority) and authority.removesuffix(port) == host.lower().removesuffix(port)


def _is_navigation(method: str, headers: Mapping[str, str]) -> bool:
    """True if the browser navigates to this URL, as after a click on a link."""
    return (method, headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")) == (
        "GET",
        "navigate",
        "document",
    )
