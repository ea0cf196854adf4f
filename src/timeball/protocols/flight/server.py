"""FlightEdge: the broker's verbs over Arrow Flight, carried by grpcio.

pyarrow's own server takes a request of any length into memory, decompresses it and resolves its dictionaries before
it says who calls. So grpcio carries the calls, `protobuf` reads Flight's few messages, and `ipc` the
batches. Each call is a handler that reads when it wants to, so that the order is: who calls, how many are inside, then
one message of bounded length, then what it says.

A handler runs in a thread of its own; the broker lives on one asyncio loop. It decodes its request (codec), hands it
to the loop, waits, and answers; a send stream is pipelined instead (exchange). It waits in short turns and looks
whether its client is still there, so a client that went away frees its thread. Only a long poll is cancelled for it; a
verb that changes something is left to finish, because what it waits for (one group commit) others wait for too.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import grpc
import pyarrow as pa

from timeball import limits, wire
from timeball.access import Caller, Verb
from timeball.broker.filters.compiler import FiltersKept
from timeball.broker.service import Broker
from timeball.errors import NotFound, OverLimit, RequestError, SetupError, TimeballError, Unavailable
from timeball.message import READ_SCHEMA
from timeball.protocols import arrow_ipc as ipc
from timeball.protocols.arrow_columns import ReleaseColumns, SendColumns
from timeball.protocols.error_codes import log_failure
from timeball.protocols.flight import codec, protobuf, verbs
from timeball.protocols.flight.exchange import Stream
from timeball.protocols.flight.gate import CALLS_MAX, STREAMS_MAX, Gate, RequestReads
from timeball.protocols.flight.sends import STOPPING, Releases, Sends
from timeball.protocols.flight.window import Budget
from timeball.security import OPEN, Security

logger = logging.getLogger(__name__)

SERVICE = "/arrow.flight.protocol.FlightService/"
MESSAGE_BYTES_MAX = limits.BATCH_BYTES_MAX + 64 * 1024  # a batch with its header
ANSWER_PART_BYTES = 4 * 1024 * 1024
ANSWERS_BYTES_MAX = 192 * 1024 * 1024  # read and not yet taken, of all calls
ANSWER_WAIT_S = 1.0

LOOK_AGAIN_S = 0.25  # how soon a waiting thread sees that its client is gone
DRAIN_S = 5.0  # how long streams get for their last answers when the broker stops
CUT_S = 0.5  # and then all calls

OPTIONS = [
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", -1),
    # What a client may send before a handler asks for it, of a stream; more comes when a message is waited for.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.max_metadata_size", 8 * 1024),
    ("grpc.absolute_max_metadata_size", 16 * 1024),
    ("grpc.max_concurrent_streams", CALLS_MAX),
    # A client whose machine is gone holds a stream until a ping finds that out.
    ("grpc.keepalive_time_ms", limits.MINUTE_MS),
    ("grpc.keepalive_timeout_ms", 20 * limits.SECOND_MS),
    ("grpc.so_reuseport", 0),  # a port that another broker has is an error, not to be shared with it
]

T = TypeVar("T")
Requests = Iterator[bytes]
Handler = Callable[[Caller, Requests, Any], Iterator[bytes]]


class FlightEdge:
    """Serves from the moment it is built. Build and `close` it from any thread but the loop's."""

    def __init__(
        self,
        broker: Broker,
        loop: asyncio.AbstractEventLoop,
        host: str,
        port: int,
        status: verbs.Status | None = None,
        security: Security = OPEN,
    ) -> None:
        """Bind and serve; port 0 takes a free one. Raises SetupError when the address cannot be used.

        `status` answers the action of that name, where the process has more to say than the broker. `security`: who
        may come in, and by which certificate.
        """
        self._broker = broker
        self._status = status or broker.status
        self._loop = loop
        self._filters = FiltersKept()
        self._sends, self._releases = Sends(broker, loop), Releases(broker, loop)
        self._budget, self._answers = Budget(), Budget(ANSWERS_BYTES_MAX)
        self._calls = Gate("calls", CALLS_MAX)
        self._streams_gate = Gate("send streams", STREAMS_MAX)
        self._streams: set[Stream] = set()
        self._decoding = threading.Lock()
        self._security, self._clock = security, broker.parts.clock.clock
        self._closing = threading.Event()
        self._reads = RequestReads(broker.parts.clock.clock, self._closing)
        self._close_once = threading.Lock()
        threads = CALLS_MAX + STREAMS_MAX
        self._threads = concurrent.futures.ThreadPoolExecutor(threads, "flight")
        self._server = grpc.server(
            self._threads,
            handlers=[_Methods(self)],
            options=OPTIONS,
            maximum_concurrent_rpcs=threads,
        )
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if security.tls is None:
                self.port = int(self._server.add_insecure_port(address))
            else:
                pair = (security.tls.key, security.tls.certificate)
                self.port = int(self._server.add_secure_port(address, grpc.ssl_server_credentials([pair])))
        except RuntimeError as error:
            raise SetupError(f"--port {port} on {host} cannot be used: {error}") from error
        self._server.start()

    @property
    def connections(self) -> int:
        """Return how many calls and streams are under way: grpcio does not say how many connections there are."""
        return self._calls.inside + self._streams_gate.inside

    # ---- Flight's verbs ---------------------------------------------------------------------------------

    def handler(self, method: str) -> Handler | None:
        """Return what serves this method; None for one that Flight has not."""
        return {
            "DoExchange": self._do_exchange,
            "DoAction": self._do_action,
            "DoGet": self._do_get,
            "ListActions": self._list_actions,
            "GetSchema": self._get_schema,
            "DoPut": self._refuse,
            "ListFlights": self._refuse,
            "GetFlightInfo": self._refuse,
            "PollFlightInfo": self._refuse,
            "Handshake": self._refuse,
        }.get(method)

    def caller(self, metadata: Any) -> Caller:
        """Return who makes a call with these headers; raises Unauthorized."""
        return self._security.caller(headers_of(metadata), self._clock.wall_ms())

    def _do_exchange(self, caller: Caller, requests: Requests, context: Any) -> Iterator[bytes]:
        """`send` and `release`: record batches in, one acknowledgement each out."""
        self._check_open()
        with self._streams_gate.enter():
            messages = map(protobuf.data, requests)
            first = next(messages, None)
            stream = self._stream(caller, first.path if first else None)
            # When the call ends, however it does, who waits for the stream is woken.
            if not context.add_callback(stream.window.abort):
                return
            self._streams.add(stream)
            try:
                if self._closing.is_set():  # close() may have looked through the streams just before
                    raise Unavailable(STOPPING)
                assert first is not None
                started = chain((first,), messages)
                del first
                for answer in stream.answers(started):
                    yield protobuf.data_message(metadata=answer)
            finally:
                self._streams.discard(stream)

    def _stream(self, caller: Caller, path: list[bytes] | None) -> Stream:
        if path == wire.SEND_PATH:
            return Stream(self._sends, caller, self._budget, SendColumns, self._decoding)
        if path == wire.RELEASE_PATH:
            self._broker.policy.allow(caller, Verb.ADMIN)  # before a batch is received; `release` asks again
            return Stream(self._releases, caller, self._budget, ReleaseColumns, self._decoding)
        raise NotFound("no such exchange; descriptor paths are ['send'] and ['release']")

    def _do_action(self, caller: Caller, requests: Requests, context: Any) -> Iterator[bytes]:
        """Everything small: a JSON body in, one JSON body out."""
        self._check_open()
        with self._calls.enter():
            verb, request = self._reads.read(requests, context, _action)
            broker, status = self._broker, self._status
            answer = self._on_loop(context, lambda: verbs.perform(broker, verb, request, status, caller))
            yield protobuf.result(codec.encode(answer))

    def _do_get(self, caller: Caller, requests: Requests, context: Any) -> Iterator[bytes]:
        """Rows in READ_SCHEMA: of the log, of a queue, of a long poll; or leased to a group, with receipts."""
        self._check_open()
        with self._calls.enter():
            request = self._reads.read(requests, context, _ticket)
            schema = READ_SCHEMA
            if isinstance(request, wire.ReadLog):
                schema = pa.schema([READ_SCHEMA.field(name) for name in request.columns or READ_SCHEMA.names])
                batches = self._log_rows(request, caller)
            elif isinstance(request, wire.Receive):
                schema = wire.RECEIVED_SCHEMA
                batches = self._received(request, context, caller)
            else:
                batches = self._queue_rows(request, context, caller)
            yield protobuf.data_message(ipc.schema_header(schema))
            for batch in batches:
                yield from self._parts(batch)
                del batch  # not held while the next one is read

    def _list_actions(self, caller: Caller, requests: Requests, context: Any) -> Iterator[bytes]:
        """The verbs of DoAction."""
        for verb, (_, _, text) in codec.ACTIONS.items():
            yield protobuf.action_type(verb, text)

    def _get_schema(self, caller: Caller, requests: Requests, context: Any) -> Iterator[bytes]:
        """Every DoGet has message.READ_SCHEMA."""
        yield protobuf.result(READ_SCHEMA.serialize().to_pybytes())

    def _refuse(self, caller: Caller, requests: Requests, context: Any) -> Iterator[bytes]:
        raise RequestError("this method is not offered; use DoExchange, DoAction or DoGet")

    # ---- stopping ---------------------------------------------------------------------------------------

    def close(self) -> None:
        """Refuse new calls, answer those under way, cut the rest. Blocks some seconds at most.

        Needs the loop to be running, and so must not be called on it (use `asyncio.to_thread`).
        """
        with self._close_once:
            if self._closing.is_set():
                return
            self._closing.set()
        streams = list(self._streams)
        for stream in streams:
            stream.stop()
        for stream in streams:
            if not stream.window.wait_empty(DRAIN_S):
                logger.warning("stream cut unanswered_batches=%d", len(stream.window))
        self._server.stop(CUT_S).wait()
        self._threads.shutdown(wait=False)

    # ---- inside -----------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise Unavailable(STOPPING)

    def _on_loop(
        self, context: Any, verb: Callable[[], Coroutine[Any, Any, T]], *, cancel: bool = False
    ) -> T:
        """The outcome of a verb run on the loop; Unavailable when the client left or the broker stops."""
        coroutine = verb()
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:  # the loop is closed
            coroutine.close()
            raise Unavailable(STOPPING) from None
        try:
            while True:
                try:
                    return future.result(LOOK_AGAIN_S)
                except concurrent.futures.CancelledError:
                    raise Unavailable(STOPPING) from None
                except TimeoutError:
                    if future.done():  # between the two lines, or the verb's own TimeoutError
                        return future.result()
                if not context.is_active() or (self._closing.is_set() and (cancel or self._loop.is_closed())):
                    if cancel:
                        future.cancel()
                    raise Unavailable(STOPPING)
        finally:
            del future  # its error's traceback holds this frame, which would hold the request's rows for ever

    def _queue_rows(
        self, request: wire.ReadQueue | wire.Pull, context: Any, caller: Caller
    ) -> Iterator[pa.RecordBatch]:
        cancel = isinstance(request, wire.Pull)
        yield self._on_loop(context, lambda: verbs.rows(self._broker, request, caller), cancel=cancel)

    def _received(self, request: wire.Receive, context: Any, caller: Caller) -> Iterator[pa.RecordBatch]:
        """Yield what a member of a group gets; give it back when its client goes before it is sent."""
        handed_out = self._on_loop(
            context, lambda: verbs.receive(self._broker, self._filters, request, caller), cancel=True
        )
        is_sent = False
        try:
            yield handed_out.rows
            is_sent = True
        finally:
            if not is_sent and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._broker.consuming.not_seen, handed_out.receipts)

    def _log_rows(self, request: wire.ReadLog, caller: Caller) -> Iterator[pa.RecordBatch]:
        rows = self._broker.read_log(
            request.from_seq,
            request.to_seq,
            request.kinds,
            request.coalesce_rows,
            request.columns,
            caller,
            placed=request.placed,
        )
        for batch in rows:
            self._check_open()
            yield batch

    def _parts(self, batch: pa.RecordBatch) -> Iterator[bytes]:
        """Yield the messages of a batch; its bytes count among the answers until the last has been sent."""
        size_bytes = batch.nbytes
        if not self._answers.reserve(size_bytes, ANSWER_WAIT_S):
            raise OverLimit(
                f"{ANSWERS_BYTES_MAX} bytes of answers wait to be taken by those who asked; try again later"
            )
        try:
            for header, body in ipc.parts(batch, ANSWER_PART_BYTES):
                yield protobuf.data_message(header, body)
        finally:
            self._answers.give(size_bytes)


class _Methods(grpc.GenericRpcHandler):
    """The handlers grpcio asks for when a call's headers are there. Every method is a stream: nothing is read yet."""

    def __init__(self, edge: FlightEdge) -> None:
        self._edge = edge

    def service(self, details: Any) -> Any:
        if not details.method.startswith(SERVICE):
            return None
        method = details.method.removeprefix(SERVICE)
        handler = self._edge.handler(method)
        if handler is None:
            return None
        try:
            handler = partial(handler, self._edge.caller(details.invocation_metadata or ()))
        except TimeballError as error:
            handler = partial(_refused, error)
        return grpc.stream_stream_rpc_method_handler(partial(_answered, method, handler))


def _refused(error: TimeballError, requests: Requests, context: Any) -> Iterator[bytes]:
    raise error


def _answered(method: str, handler: Any, requests: Requests, context: Any) -> Iterator[bytes]:
    """Yield what a handler yields, and end the call as it ended."""
    try:
        yield from handler(_until_gone(requests), context)
    except Exception as error:  # of any kind: the client gets an answer
        log_failure(logger, method, error)
        context.set_code(grpc.StatusCode.UNKNOWN)
        context.set_details(codec.details(error))
        context.set_trailing_metadata(codec.trailers(error))


def _until_gone(requests: Requests) -> Iterator[bytes]:
    """Yield the messages of a call until its client has finished, or is gone."""
    try:
        yield from requests
    except grpc.RpcError:
        return


def _action(message: bytes) -> tuple[str, codec.ActionRequest]:
    verb, body = protobuf.action(message)
    codec.check_size(f"the body of action {verb[:40]}", len(body), codec.body_bytes_max(verb))
    return verb, codec.decode_action(verb, bytes(body))


def _ticket(message: bytes) -> wire.Ticket:
    return codec.decode_ticket(protobuf.ticket(message))


def headers_of(metadata: Iterable[tuple[str, str | bytes]]) -> dict[str, str]:
    """Return the headers that are text; a name that is there twice has the first value."""
    headers: dict[str, str] = {}
    for name, value in metadata:
        if isinstance(value, str):
            headers.setdefault(name.lower(), value)
    return headers
