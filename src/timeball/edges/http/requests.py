"""One HTTP request: its caller, its parameters, its body if the handler reads it, and its answer or problem.

caller          identified by the headers, before any byte of the body is read
permission      checked by the policy before the body is read, if the path identifies the operation
body            at most BODY_BYTES_MAX, within BODY_S, and within the share of bytes of the client's address
answer          JSON; its bytes count until they are written, at most for ANSWER_S
problem         RFC 9457, with the codes of docs/operations.md
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, NamedTuple

from starlette.datastructures import QueryParams
from starlette.types import Message, Receive, Scope, Send

from timeball.broker.policy import Policy
from timeball.edges.http.codec import JSON, Nothing, check_type, decode, encode
from timeball.edges.http.foreign_pages import ForeignPages
from timeball.edges.http.problems import Answer, problem, problem_of
from timeball.edges.shared.error_codes import Refused, log_failure
from timeball.edges.shared.shared_limits import MemoryQuota, SharedLimit
from timeball.io.security import Security
from timeball.model import limits
from timeball.model.access import Caller, Verb
from timeball.model.errors import OverLimit, RequestError
from timeball.model.rules import valid

logger = logging.getLogger(__name__)

BODY_BYTES_MAX = 2 * limits.BODY_BYTES_MAX  # a message body of 4 MiB in base64, and the fields beside it
RECEIVED_BYTES_MAX = 64 * 1024 * 1024  # for all requests that are read or answered
SENT_BYTES_MAX = 64 * 1024 * 1024  # for answers that clients have not read yet
CALLS_MAX = limits.PULLS_WAITING_MAX
STREAMS_MAX = (
    2_000  # besides the calls, so that live tails displace no receives; each is some tasks and a socket
)
TAKEN_S = 20.0  # for a client to read the earlier parts before the next part of a stream
BODY_S = 20.0  # for the reservation and the whole body
ANSWER_S = 60.0  # for a client to take an answer


class Stream(NamedTuple):
    """An answer without an end, sent in parts. `parts` is closed when the client disconnects or does not read."""

    parts: AsyncGenerator[bytes, None]
    media_type: str


class Call:
    """One request. `caller` is set once the credentials are checked."""

    def __init__(self, scope: Scope, receive: Receive, headers: Mapping[str, str], room: Room) -> None:
        self._receive, self._room = receive, room
        self.headers, self.path = headers, scope["path_params"]
        self.query = QueryParams(scope["query_string"])
        self.peer = peer_of(scope)
        self.caller: Caller
        self.account = ""  # the account that the request counts for, once it is known
        self.held_bytes = 0

    async def body(self) -> bytes:
        """Read the body. Raises Refused (408, 413), Gone if the client disconnects, and OverLimit."""
        # A request with neither header has no body.
        length = self.headers.get("content-length", "" if "transfer-encoding" in self.headers else "0")
        wanted = int(length) if length.isdecimal() and len(length) < 20 else BODY_BYTES_MAX
        if wanted > BODY_BYTES_MAX:
            raise Refused(413, f"a body of {wanted} bytes; at most {BODY_BYTES_MAX}: send fewer at once")
        parts, size = [], 0
        try:
            async with asyncio.timeout(BODY_S):
                # Reserve the bytes before reading: until then uvicorn stops reading from the client.
                await self._room.received.room(self.peer, wanted)
                self.held_bytes = wanted
                more = True
                while more:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise Gone
                    part, more = message.get("body", b""), message.get("more_body", False)
                    parts.append(part)
                    size += len(part)
                    if size > BODY_BYTES_MAX:
                        raise Refused(413, f"a body of more than {BODY_BYTES_MAX} bytes: send fewer at once")
        except TimeoutError:
            raise Refused(408, f"the body has not come within {BODY_S:.0f} s") from None
        return b"".join(parts)

    async def gone(self) -> None:
        """Wait until the client disconnects. Nothing else may read the body at the same time."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def release(self) -> None:
        """Release the bytes that the body holds."""
        self._room.received.remove(self.peer, self.held_bytes)
        self.held_bytes = 0


class Room:
    """The limits shared by the requests of all clients. Belongs to the event loop.

    They limit the bytes received, the bytes to send, the calls and the streams.
    """

    def __init__(self) -> None:
        self.received = MemoryQuota(RECEIVED_BYTES_MAX, BODY_BYTES_MAX)
        self.sent = MemoryQuota(SENT_BYTES_MAX, 2 * limits.POP_BYTES_MAX)
        self.calls, self.streams = SharedLimit("requests", CALLS_MAX), SharedLimit("streams", STREAMS_MAX)


class Gone(Exception):
    """The client has disconnected before its answer."""


Handler = Callable[[Call], Awaitable[Answer | Stream]]
Paths = dict[str, dict[str, Handler]]  # by path and method


async def read(
    call: Call,
    kind: type[Any],
    policy: Policy,
    verb: Verb,
    *,
    topic: str | None = None,
    group: str | None = None,
) -> Any:
    """Check that the policy allows the verb, then read the JSON body and decode it as a struct of type `kind`.

    Raises Forbidden, Unauthorized, Refused (408, 413, 415), InvalidMessage and OverLimit.
    """
    policy.allow(call.caller, verb, topic=topic, group=group)
    check_type(call.headers.get("content-type", ""), JSON)
    return decode(kind, await call.body())


async def check_no_body(
    call: Call,
    policy: Policy,
    verb: Verb,
    *,
    topic: str | None = None,
    group: str | None = None,
) -> None:
    """Check that the policy allows the verb, and refuse a body. An empty JSON object is accepted.

    Raises Forbidden, Unauthorized, Refused (415) and InvalidMessage. The content type is checked because a form on a
    page of another site always has one, and it is never that of JSON.
    """
    policy.allow(call.caller, verb, topic=topic, group=group)
    if kind := call.headers.get("content-type"):
        try:
            check_type(kind, JSON)
        except Refused as error:
            raise Refused(415, f"{error}, or nothing: the request needs no body") from error
    if data := await call.body():
        decode(Nothing, data)


class Endpoint:
    """The handlers of one path, by method. An ASGI application."""

    def __init__(
        self,
        methods: Mapping[str, Handler],
        security: Security,
        pages: ForeignPages,
        now_ms: Callable[[], int],
        room: Room,
        *,
        is_open: bool,
        former: Mapping[str, str],
        parameters: Mapping[str, tuple[str, ...]],
    ) -> None:
        """Keep the handlers. `parameters` are the query parameters of each method.

        A method that is missing in `parameters` accepts any query.
        """
        self._methods, self._security, self._now_ms, self._room = methods, security, now_ms, room
        self._pages = pages
        self._parameters = parameters
        self._former = former  # by method: the advice for a method that older versions answered
        self._is_open = is_open  # to callers without an account

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        call = Call(scope, receive, headers, self._room)
        self._room.calls.take(call.peer)
        try:
            self._pages.check(scope["method"], scope["path"], headers)
            answer = await self._answer(scope["method"], call)
        except Gone:
            return
        except Exception as error:  # of any kind: its client waits for an answer
            log_failure(logger, f"{scope['method']} {scope['path'][:200]!r}", error)
            answer = problem_of(error)
        finally:
            self._room.calls.give_back(call.peer, call.account)
            call.release()
        if isinstance(answer, Stream):
            await self._stream(answer, call, send, is_head=scope["method"] == "HEAD")
            return
        with self._room.sent.held(call.peer, 0):
            self._room.sent.add(call.peer, answer.size_bytes)
            try:
                async with asyncio.timeout(ANSWER_S):
                    await respond(answer, send, is_head=scope["method"] == "HEAD")
            except TimeoutError:
                logger.info("answer not taken peer=%s", call.peer)
                raise
            finally:
                self._room.sent.remove(call.peer, answer.size_bytes)

    async def _stream(self, stream: Stream, call: Call, send: Send, *, is_head: bool) -> None:
        """Write the parts of a stream until it ends, or the client disconnects or does not read."""
        if is_head:
            await stream.parts.aclose()
            await respond(Answer(200, b"", media_type=stream.media_type), send)
            return
        try:
            self._room.streams.admit(call.peer, call.account)
        except OverLimit as error:
            await stream.parts.aclose()
            await respond(problem_of(error), send)
            return
        writing = asyncio.ensure_future(self._write(stream, call.peer, send))
        gone = asyncio.ensure_future(call.gone())
        try:
            await asyncio.wait((writing, gone), return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
        finally:
            self._room.streams.give_back(call.peer, call.account)
            for task in (writing, gone):
                task.cancel()
            await asyncio.gather(writing, gone, return_exceptions=True)
            await stream.parts.aclose()

    async def _write(self, stream: Stream, peer: str, send: Send) -> None:
        headers = [
            (b"content-type", stream.media_type.encode()),
            (b"cache-control", b"no-store"),
            (b"x-content-type-options", b"nosniff"),
            # a proxy that collects an answer before sending it would wait for ever
            (b"x-accel-buffering", b"no"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for part in stream.parts:
            # `send` returns when the transport can take more. If the client does not read, only this one part waits
            # here.
            self._room.sent.add(peer, len(part))
            try:
                async with asyncio.timeout(TAKEN_S):
                    await send({"type": "http.response.body", "body": part, "more_body": True})
            except TimeoutError:
                logger.info("stream not read peer=%s", peer)
                raise
            finally:
                self._room.sent.remove(peer, len(part))
        await send({"type": "http.response.body", "body": b""})

    async def _answer(self, method: str, call: Call) -> Answer | Stream:
        handler = self._methods.get("GET" if method == "HEAD" else method)
        if handler is None:
            allowed = ", ".join(sorted(self._methods))
            advice = self._former.get(method, f"this path has {allowed}")
            return problem(405, "bad_request", f"{method[:20]!r}: {advice}", allow=allowed)
        calls = self._room.calls
        if not self._is_open:
            call.caller = self._security.caller(call.headers, self._now_ms())
            call.account = call.caller.name
            calls.name(call.account)
        if text := calls.excess(call.peer, call.account):
            raise OverLimit(text)
        check_parameters(call.query, self._parameters.get("GET" if method == "HEAD" else method))
        return await handler(call)


def check_parameters(query: QueryParams, known: tuple[str, ...] | None) -> None:
    """Raise RequestError for an unknown or repeated query parameter. `known` None allows all parameters."""
    for name in query if known is not None else ():
        if name not in (known or ()):
            raise RequestError(f"parameter {name[:80]!r} is not known; {valid(name, known or ())}")
        if len(query.getlist(name)) > 1:
            raise RequestError(f"parameter {name!r} is there {len(query.getlist(name))} times; give it once")


def peer_of(scope: Scope) -> str:
    """Read the client's address from an ASGI scope."""
    return scope["client"][0] if scope.get("client") else ""


async def not_found(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request for an unknown path. An ASGI application."""
    if scope["type"] == "http":
        await respond(
            problem(404, "not_found", f"no path {scope['path'][:200]!r}; GET /openapi.json has them all"),
            send,
        )


async def respond(answer: Answer, send: Send, *, is_head: bool = False) -> None:
    """Write an answer: its head, and its body unless the request is a HEAD."""
    data = answer.value if isinstance(answer.value, bytes) else encode(answer.value)
    headers = [
        (b"content-type", answer.media_type.encode()),
        (b"content-length", b"%d" % len(data)),
        (b"cache-control", b"no-store"),
        (b"x-content-type-options", b"nosniff"),
        *answer.headers,
    ]
    start: Message = {"type": "http.response.start", "status": answer.status, "headers": headers}
    await send(start)
    await send({"type": "http.response.body", "body": b"" if is_head else data})
