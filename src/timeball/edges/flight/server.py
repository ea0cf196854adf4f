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
from timeball.edges.flight.exchange import ColumnsOf, Upload, UploadContext
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
DRAIN_S = 5.0  # for the last answers of the streams when the broker stops

Handler = Callable[[FlightCall, bytes], Awaitable[None]]


class FlightEdge:
    """Builds the calls of this edge, and starts and stops the server. Belongs to the broker's event loop."""

    call = Call

    def __init__(self, broker: Broker, status: verbs.Status | None = None, security: Security = OPEN) -> None:
        """Build the edge.

        `status` answers the action `status`. By default it is the broker's own status, without figures of the process.
        `security` decides who may connect, and has the TLS certificate.
        """
        self._broker, self._served = broker, verbs.ServedBroker.by(broker, status or broker.status)
        self._security, self._clock = security, broker.clock.clock
        self._sends, self._source_sends, self._releases = (
            Sends(broker),
            SourcedSends(broker),
            Releases(broker),
        )
        self._budget = MemoryQuota(BYTES_ALL_STREAMS_MAX, MESSAGE_BYTES_MAX)
        self._reads = Reads(self._served, self._check_open)
        self._calls = SharedLimit("calls", CALLS_MAX)
        self._send_streams = SharedLimit("send streams", STREAMS_MAX)
        self._decode_thread = ThreadPoolExecutor(1, "flight-decodes")
        self._uploads: set[Upload] = set()  # the open streams of batches
        self._context = UploadContext(
            self._choose_sink,
            broker.policy.allow,
            self._budget,
            self._decode_thread,
            self._send_streams,
            self._uploads,
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
        self._watch_task: asyncio.Task[None] | None = None
        self.port = -1

    async def start(self) -> None:
        """Listen. Raises SetupError when the address cannot be used."""
        settings = self._broker.settings
        self.port = await self._server.start(settings.host, settings.port, self._security.tls, "--port")
        self._watch_task = asyncio.create_task(self._server.watch())

    @property
    def connections(self) -> int:
        """The number of connected clients."""
        return self._server.connections

    def open(
        self,
        method: Method | None,
        streams: Streams,
        number: int,
        is_half_closed: bool,
        call: Call,
        now_s: float,
    ) -> Exchange:
        """Create the call of a new stream (see http2.server.Service)."""
        if method is not None and method.takes_stream:
            return Upload(
                streams,
                number,
                is_half_closed,
                call,
                self.room,
                self._serve,
                now_s,
                self._admit_sender,
                self._context,
            )
        return FlightCall(
            streams, number, is_half_closed, call, self.room, self._serve, now_s, self._admit, self._calls
        )

    def caller(self, headers: Mapping[str, str]) -> Caller:
        """Find the caller from the headers. Raises Unauthorized."""
        return self._security.caller(headers, self._clock.wall_ms())

    async def close(self) -> None:
        """Refuse new calls, end reads, and answer received batches.

        Streams with unanswered batches are cut after DRAIN_S.
        """
        if self._is_closing:
            return
        self._is_closing = True
        uploads = list(self._uploads)
        for upload in uploads:
            upload.stop()
        for call in self._server.open_streams():
            if isinstance(call, FlightCall) and call.task and not call.method.outlives_client:
                call.task.cancel()  # long polls, and reads of the log
        if uploads:
            await asyncio.wait(
                [asyncio.ensure_future(upload.window.emptied()) for upload in uploads], timeout=DRAIN_S
            )
        for upload in uploads:
            if upload.window and not upload.window.is_aborted:
                logger.warning("stream cut unanswered_batches=%d", len(upload.window))
        await self._server.close()
        if self._watch_task is not None:
            self._watch_task.cancel()
        self._decode_thread.shutdown(wait=False)
        self._reads.close()

    # ---- Flight's methods -------------------------------------------------------------------------------

    async def _serve(self, call: Any, message: bytes) -> None:
        """Answer a call that is not a stream of batches."""
        try:
            await self._handlers.get(call.method.name, _refuse_method)(call, message)
            call.finish()
        except asyncio.CancelledError:
            call.refuse(Unavailable(STOPPING))  # has no effect if the client has disconnected
            raise
        except Exception as error:  # of any kind: the client gets an answer
            call.refuse(error)

    async def _do_action(self, call: FlightCall, message: bytes) -> None:
        """Answer an action. The body of the request and the answer are JSON."""
        verb, body = protobuf.parse_action(message)
        codec.check_size(f"the body of action {verb[:40]}", len(body), codec.body_bytes_max(verb))
        if verb in codec.LARGE_ADMIN_ACTIONS:  # checked before the body is decoded, and again by the broker
            self._broker.policy.allow(call.call.caller, Verb.ADMIN)
        request = codec.decode_action(verb, bytes(body))
        answer = await verbs.perform(self._served, verb, request, call.call.caller)
        call.answer(protobuf.encode_result(codec.encode(answer)))

    async def _list_actions(self, call: FlightCall, message: bytes) -> None:
        """List the verbs of DoAction."""
        for verb, (_, _, text) in codec.ACTIONS.items():
            call.send_messages(framed(protobuf.encode_action_type(verb, text)))

    async def _get_schema(self, call: FlightCall, message: bytes) -> None:
        """Send message.READ_SCHEMA, which is the schema of every DoGet."""
        call.send_messages(framed(protobuf.encode_result(READ_SCHEMA.serialize().to_pybytes())))

    def _choose_sink(self, caller: Caller, path: list[bytes] | None) -> tuple[Sends | Releases, ColumnsOf]:
        """Choose by the path where the batches of a DoExchange go, and which columns they have.

        Raises NotFound for an unknown path, and Forbidden.
        """
        if path == SEND_PATH:
            return self._sends, partial(SendColumns, codec=self._broker.settings.codec)
        if path == SOURCE_PATH:
            return self._source_sends, SourceColumns
        if path == RELEASE_PATH:
            # checked before a batch is received, and by `Broker.release` for each batch
            self._broker.policy.allow(caller, Verb.ADMIN)
            return self._releases, ReleaseColumns
        raise NotFound("no such exchange; descriptor paths are ['send'], ['source'] and ['release']")

    # ---- admission --------------------------------------------------------------------------------------

    def _admit(self, call: Call) -> Caller:
        """Identify the caller of a call. Raises Unauthorized, and Unavailable once the edge closes."""
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


async def _refuse_method(call: FlightCall, message: bytes) -> None:
    raise RequestError("this method is not offered; use DoExchange, DoAction or DoGet")
