"""FlightEdge: the broker's verbs over Arrow Flight, carried by the HTTP/2 of http2/ on the broker's event loop.

pyarrow's own server takes a request of any length into memory, decompresses it and resolves its dictionaries before
it says who calls. Here the order is: who calls, how many are inside, then one message of bounded length, then what it
says. `protobuf` reads Flight's few messages, and `arrow_ipc` the batches. Decision 0050.

An action or a read is a task. A read ends with its client; a verb that changes something is left to finish, because
what it waits for (one group commit) others wait for too. A send stream has no task: its batches and answers are moved
on by what arrives (exchange.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from timeball import limits
from timeball.access import Caller, Verb
from timeball.broker.service import Broker
from timeball.errors import NotFound, RequestError, Unavailable
from timeball.message import READ_SCHEMA
from timeball.protocols.arrow_columns import ReleaseColumns, SendColumns, SourceColumns
from timeball.protocols.flight import codec, protobuf, verbs
from timeball.protocols.flight.calls import FlightCall, framed
from timeball.protocols.flight.exchange import Columns, Shared, Upload
from timeball.protocols.flight.reads import Reads
from timeball.protocols.flight.sends import STOPPING, Releases, Sends, SourcedSends
from timeball.protocols.flight.window import BYTES_ALL_STREAMS_MAX
from timeball.protocols.http2.calls import Call, Method, Room
from timeball.protocols.http2.connection import Bounds
from timeball.protocols.http2.exchange import Exchange
from timeball.protocols.http2.server import Server
from timeball.protocols.http2.streams import Streams
from timeball.protocols.shared_limits import ByteShares, SharedLimit
from timeball.security import OPEN, Security
from timeball.wire import RELEASE_PATH, SEND_PATH, SOURCE_PATH

logger = logging.getLogger(__name__)

SERVICE = "/arrow.flight.protocol.FlightService/"
MESSAGE_BYTES_MAX = limits.BATCH_BYTES_MAX + 64 * 1024  # a batch with its header
RECEIVED_BYTES_MAX = 64 * 1024 * 1024  # of requests of actions and reads that are on their way
FRAME_BYTES_MAX = 1024 * 1024  # of DATA: a batch comes in a few of them
CALLS_MAX = 1_024  # actions, reads and long polls
STREAMS_MAX = 256  # each has a window, and READ_AHEAD_BYTES
DRAIN_S = 5.0  # how long streams get for their last answers when the broker stops

Handler = Callable[[FlightCall, bytes], Awaitable[None]]


class FlightEdge:
    """Builds the calls of this edge, starts and stops the server. Belongs to the broker's event loop."""

    call = Call

    def __init__(self, broker: Broker, status: verbs.Status | None = None, security: Security = OPEN) -> None:
        """`status` answers the action of that name, where the process has more to say than the broker.

        `security`: who may come in, and by which certificate.
        """
        self._broker, self._served = broker, verbs.Served.by(broker, status or broker.status)
        self._security, self._clock = security, broker.parts.clock.clock
        self._sends, self._sourced, self._releases = Sends(broker), SourcedSends(broker), Releases(broker)
        self._budget = ByteShares(BYTES_ALL_STREAMS_MAX, MESSAGE_BYTES_MAX)
        self._reads = Reads(self._served, self._check_open)
        self._calls = SharedLimit("calls", CALLS_MAX)
        self._send_streams = SharedLimit("send streams", STREAMS_MAX)
        self._decoding = ThreadPoolExecutor(1, "flight-decodes")
        self._uploads: set[Upload] = set()
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
            ByteShares(RECEIVED_BYTES_MAX, MESSAGE_BYTES_MAX),
            MESSAGE_BYTES_MAX,
            # Nearly all that both limits let in: what waits for its turn at them is no more than a header.
            SharedLimit("calls and streams", 2 * (CALLS_MAX + STREAMS_MAX)),
        )
        self.methods = {f"{SERVICE}{name}": _method(name) for name in METHODS}
        self._server = Server(
            self, Bounds(FRAME_BYTES_MAX, ages=False, edge="flight"), broker.parts.settings.codec
        )
        self._watch: asyncio.Task[None] | None = None
        self.port = -1

    async def start(self) -> None:
        """Listen; raises SetupError when the address cannot be used."""
        settings = self._broker.parts.settings
        self.port = await self._server.start(settings.host, settings.port, self._security.tls, "--port")
        self._watch = asyncio.create_task(self._server.watch())

    @property
    def connections(self) -> int:
        """Return how many clients are connected."""
        return self._server.connections

    def open(
        self, method: Method | None, streams: Streams, number: int, is_heard: bool, call: Call, now_s: float
    ) -> Exchange:
        """See http2.server.Service."""
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
        """Return who makes a call with these headers; raises Unauthorized."""
        return self._security.caller(headers, self._clock.wall_ms())

    async def close(self) -> None:
        """Refuse new calls, answer those under way, cut the rest. Takes some seconds at most."""
        if self._is_closing:
            return
        self._is_closing = True
        uploads = list(self._uploads)
        for upload in uploads:
            upload.stop()
        for stream in self._server.open_streams():
            if isinstance(stream, FlightCall) and stream.task and not stream.method.outlives_client:
                stream.task.cancel()  # long polls, and logs that are read
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
        """Answer a call that is no stream of batches."""
        try:
            await self._handlers.get(call.method.name, _refuse)(call, message)
            call.finish()
        except asyncio.CancelledError:
            call.refuse(Unavailable(STOPPING))  # nothing is said to a client that has gone
            raise
        except Exception as error:  # of any kind: the client gets an answer
            call.refuse(error)

    async def _do_action(self, call: FlightCall, message: bytes) -> None:
        """Everything small: a JSON body in, one JSON body out."""
        verb, body = protobuf.action(message)
        codec.check_size(f"the body of action {verb[:40]}", len(body), codec.body_bytes_max(verb))
        if verb in codec.LARGE_OF_ADMINS:  # before the body is decoded; the broker asks again
            self._broker.policy.allow(call.call.caller, Verb.ADMIN)
        request = codec.decode_action(verb, bytes(body))
        answer = await verbs.perform(self._served, verb, request, call.call.caller)
        call.answer(protobuf.result(codec.encode(answer)))

    async def _list_actions(self, call: FlightCall, message: bytes) -> None:
        """The verbs of DoAction."""
        for verb, (_, _, text) in codec.ACTIONS.items():
            call.send_messages(framed(protobuf.action_type(verb, text)))

    async def _get_schema(self, call: FlightCall, message: bytes) -> None:
        """Every DoGet has message.READ_SCHEMA."""
        call.send_messages(framed(protobuf.result(READ_SCHEMA.serialize().to_pybytes())))

    def _choose(self, caller: Caller, path: list[bytes] | None) -> tuple[Sends | Releases, Columns]:
        """Return who takes the batches of a DoExchange; raise NotFound, Forbidden."""
        if path == SEND_PATH:
            return self._sends, partial(SendColumns, codec=self._broker.parts.settings.codec)
        if path == SOURCE_PATH:
            return self._sourced, SourceColumns
        if path == RELEASE_PATH:
            self._broker.policy.allow(caller, Verb.ADMIN)  # before a batch is received; `release` asks again
            return self._releases, ReleaseColumns
        raise NotFound("no such exchange; descriptor paths are ['send'], ['source'] and ['release']")

    # ---- inside -----------------------------------------------------------------------------------------

    def _admit(self, call: Call) -> Caller:
        caller = self.caller(call.headers)
        self._check_open()
        return caller

    def _admit_sender(self, call: Call) -> Caller:
        """Return who opens a send stream: not an account that may send to no topic at all."""
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
