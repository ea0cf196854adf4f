"""FlightEdge: the broker's verbs over Arrow Flight, on the HTTP/2 of http2/ and the broker's event loop.

pyarrow's own server reads a request of any length into memory, decompresses it and resolves its dictionaries before it
checks the caller. This server first checks the caller, then the number of calls, then receives one message of bounded
length, and then decodes it. `protobuf` reads Flight's few messages, and `arrow_ipc` the batches. Decision 0050.

An action or a read is a task. A read ends when its client disconnects. A verb that changes something is left to finish,
because it waits for a group commit that other requests wait for too. A send stream has no task: arriving batches and
answers drive it (exchange.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from timeball.broker.service import Broker
from timeball.edges.flight import codec, protobuf, verbs
from timeball.edges.flight.calls import FlightCall, framed
from timeball.edges.flight.exchange import Columns, Shared, Upload
from timeball.edges.flight.reads import Reads
from timeball.edges.flight.sends import STOPPING, Releases, Sends, SourcedSends
from timeball.edges.flight.window import BYTES_ALL_STREAMS_MAX
from timeball.edges.http2.calls import Call, Method, Room
from timeball.edges.http2.connection import Bounds
from timeball.edges.http2.exchange import Exchange
from timeball.edges.http2.server import Server
from timeball.edges.http2.streams import Streams
from timeball.edges.shared.arrow_columns import ReleaseColumns, SendColumns, SourceColumns
from timeball.edges.shared.shared_limits import MemoryQuota, SharedLimit
from timeball.io.security import OPEN, Security
from timeball.model import limits
from timeball.model.access import Caller, Verb
from timeball.model.errors import NotFound, RequestError, Unavailable
from timeball.model.message import READ_SCHEMA
from timeball.model.wire import RELEASE_PATH, SEND_PATH, SOURCE_PATH

logger = logging.getLogger(__name__)

SERVICE = "/arrow.flight.protocol.FlightService/"
MESSAGE_BYTES_MAX = limits.BATCH_BYTES_MAX + 64 * 1024  # a batch and its header
RECEIVED_BYTES_MAX = 64 * 1024 * 1024  # for incomplete requests of actions and reads
FRAME_BYTES_MAX = 1024 * 1024  # of DATA: a batch arrives in a few frames
CALLS_MAX = 1_024  # actions, reads and long polls
STREAMS_MAX = 256  # each has a window and READ_AHEAD_BYTES
DRAIN_S = 5.0  # the time for the streams' last answers when the broker stops

Handler = Callable[[FlightCall, bytes], Awaitable[None]]


class FlightEdge:
    """Builds the calls of this edge, and starts and stops the server. Belongs to the broker's event loop."""

    call = Call

    def __init__(self, broker: Broker, status: verbs.Status | None = None, security: Security = OPEN) -> None:
        """Build the edge. `status` answers the action of that name if the process adds figures to those of the broker.

        `security` decides who may connect, and has the TLS certificate.
        """
        self._broker, self._served = broker, verbs.Served.by(broker, status or broker.status)
        self._security, self._clock = security, broker.clock.clock
        self._sends, self._sourced, self._releases = Sends(broker), SourcedSends(broker), Releases(broker)
        self._budget = MemoryQuota(BYTES_ALL_STREAMS_MAX, MESSAGE_BYTES_MAX)
        self._reads = Reads(self._served, self._check_open)
        self._calls = SharedLimit("calls", CALLS_MAX)
        self._send_streams = SharedLimit("send streams", STREAMS_MAX)
        self._decoding = ThreadPoolExecutor(1, "flight-decodes")
        self._uploads: set[Upload] = set()  # the open streams of batches
        self._shared = Shared(
            self._choose, broker.policy.allow, self._budget, self._decoding, self._send_streams, self._uploads
        )
        self._is_closing = False
        self._handlers: dict[str, Handler] = {
            "DoAction": self._do_action,
            "DoGet": self._reads.answer,
            "ListActions": self._list_actions,
            "GetSchema": self._get_schema,
        }
        self.room = Room(
            MemoryQuota(RECEIVED_BYTES_MAX, MESSAGE_BYTES_MAX),
            MESSAGE_BYTES_MAX,
            # Nearly as much as both limits admit. A call that waits for them only holds its headers.
            SharedLimit("calls and streams", 2 * (CALLS_MAX + STREAMS_MAX)),
        )
        self.methods = {f"{SERVICE}{name}": _method(name) for name in METHODS}
        self._server = Server(self, Bounds(FRAME_BYTES_MAX, ages=False, edge="flight"), broker.settings.codec)
        self._watch: asyncio.Task[None] | None = None
        self.port = -1

    async def start(self) -> None:
        """Listen. Raises SetupError when the address cannot be used."""
        settings = self._broker.settings
        self.port = await self._server.start(settings.host, settings.port, self._security.tls, "--port")
        self._watch = asyncio.create_task(self._server.watch())

    @property
    def connections(self) -> int:
        """The number of connected clients."""
        return self._server.connections

    def open(
        self, method: Method | None, streams: Streams, number: int, is_heard: bool, call: Call, now_s: float
    ) -> Exchange:
        """Create the call of a new stream (see http2.server.Service)."""
        if method is not None and method.takes_stream:
            return Upload(
                streams,
                number,
                is_heard,
                call,
                self.room,
                self._serve,
                now_s,
                self._admit_sender,
                self._shared,
            )
        return FlightCall(
            streams, number, is_heard, call, self.room, self._serve, now_s, self._admit, self._calls
        )

    def caller(self, headers: Mapping[str, str]) -> Caller:
        """Find the caller from the headers. Raises Unauthorized."""
        return self._security.caller(headers, self._clock.wall_ms())

    async def close(self) -> None:
        """Refuse new calls, answer those under way, and cut the others after DRAIN_S."""
        if self._is_closing:
            return
        self._is_closing = True
        uploads = list(self._uploads)
        for upload in uploads:
            upload.stop()
        for stream in self._server.open_streams():
            if isinstance(stream, FlightCall) and stream.task and not stream.method.outlives_client:
                stream.task.cancel()  # long polls, and reads of the log
        if uploads:
            await asyncio.wait(
                [asyncio.ensure_future(upload.window.emptied()) for upload in uploads], timeout=DRAIN_S
            )
        for upload in uploads:
            if upload.window and not upload.window.is_aborted:
                logger.warning("stream cut unanswered_batches=%d", len(upload.window))
        await self._server.close()
        if self._watch is not None:
            self._watch.cancel()
        self._decoding.shutdown(wait=False)
        self._reads.close()

    # ---- Flight's methods -------------------------------------------------------------------------------

    async def _serve(self, call: Any, message: bytes) -> None:
        """Answer a call that is not a stream of batches."""
        try:
            await self._handlers.get(call.method.name, _refuse)(call, message)
            call.finish()
        except asyncio.CancelledError:
            call.refuse(Unavailable(STOPPING))  # has no effect if the client has disconnected
            raise
        except Exception as error:  # of any kind: the client gets an answer
            call.refuse(error)

    async def _do_action(self, call: FlightCall, message: bytes) -> None:
        """Answer an action: a JSON body in, one JSON body out."""
        verb, body = protobuf.action(message)
        codec.check_size(f"the body of action {verb[:40]}", len(body), codec.body_bytes_max(verb))
        if verb in codec.LARGE_OF_ADMINS:  # checked before the body is decoded, and again by the broker
            self._broker.policy.allow(call.call.caller, Verb.ADMIN)
        request = codec.decode_action(verb, bytes(body))
        answer = await verbs.perform(self._served, verb, request, call.call.caller)
        call.answer(protobuf.result(codec.encode(answer)))

    async def _list_actions(self, call: FlightCall, message: bytes) -> None:
        """List the verbs of DoAction."""
        for verb, (_, _, text) in codec.ACTIONS.items():
            call.send_messages(framed(protobuf.action_type(verb, text)))

    async def _get_schema(self, call: FlightCall, message: bytes) -> None:
        """Send message.READ_SCHEMA, which is the schema of every DoGet."""
        call.send_messages(framed(protobuf.result(READ_SCHEMA.serialize().to_pybytes())))

    def _choose(self, caller: Caller, path: list[bytes] | None) -> tuple[Sends | Releases, Columns]:
        """Choose the taker of a DoExchange's batches, and its columns, by the path. Raises NotFound and Forbidden."""
        if path == SEND_PATH:
            return self._sends, partial(SendColumns, codec=self._broker.settings.codec)
        if path == SOURCE_PATH:
            return self._sourced, SourceColumns
        if path == RELEASE_PATH:
            # before a batch is received; `release` checks it again
            self._broker.policy.allow(caller, Verb.ADMIN)
            return self._releases, ReleaseColumns
        raise NotFound("no such exchange; descriptor paths are ['send'], ['source'] and ['release']")

    # ---- inside -----------------------------------------------------------------------------------------

    def _admit(self, call: Call) -> Caller:
        caller = self.caller(call.headers)
        self._check_open()
        return caller

    def _admit_sender(self, call: Call) -> Caller:
        """Find the caller of a send stream. Raises Forbidden for an account that may not send to any topic."""
        caller = self._admit(call)
        self._broker.policy.allow_somewhere(caller, Verb.SEND)
        return caller

    def _check_open(self) -> None:
        if self._is_closing:
            raise Unavailable(STOPPING)


METHODS = (
    "DoExchange", "DoAction", "DoGet", "ListActions", "GetSchema",
    "DoPut", "ListFlights", "GetFlightInfo", "PollFlightInfo", "Handshake",
)  # fmt: skip


def _method(name: str) -> Method:
    return Method(name, name == "DoExchange", True, bytes, bytes, outlives_client=name == "DoAction")


async def _refuse(call: FlightCall, message: bytes) -> None:
    raise RequestError("this method is not offered; use DoExchange, DoAction or DoGet")
