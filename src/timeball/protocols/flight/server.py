"""FlightEdge: the broker's verbs over Arrow Flight.

gRPC calls every handler in a thread of its own; the broker lives on one asyncio loop. A handler decodes its
request (codec), hands it to the loop, waits, and answers; a send stream is pipelined instead (exchange). The
edge refuses whatever the codec refuses, more calls than its gates let through, and everything while it stops.

A handler waits in short turns and looks whether its client is still there, so a client that went away frees
its thread. Only a long poll is cancelled for it; a verb that changes something is left to finish, because what
it waits for (one group commit) others wait for too.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa
import pyarrow.flight as flight

from timeball.access import Principal
from timeball.errors import NotFound, RequestError, SetupError, TimeballError, Unavailable
from timeball.guard import OPEN, Guard
from timeball.message import READ_SCHEMA
from timeball.protocols.flight import codec, permissions, verbs
from timeball.protocols.flight.columns import SendColumns
from timeball.protocols.flight.exchange import Stream
from timeball.protocols.flight.failures import answering, internal, to_flight
from timeball.protocols.flight.gate import CALLS_MAX, STREAMS_MAX, Gate, Pass
from timeball.protocols.flight.inbox import STOPPING, Inbox
from timeball.protocols.flight.releasing import ReleaseColumns, Releases
from timeball.protocols.flight.sockets import check_free, cut_connections
from timeball.protocols.flight.window import Budget

if TYPE_CHECKING:
    from timeball.broker.service import Broker

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 0.25  # how soon a waiting thread sees that its client is gone
DRAIN_S = 5.0  # how long streams get for their last answers when the broker stops
CUT_S = 0.1
CUT_ROUNDS = 100

T = TypeVar("T")


class FlightEdge(flight.FlightServerBase):
    """Serves from the moment it is built. Build and `close` it from any thread but the loop's."""

    def __init__(
        self,
        broker: Broker,
        loop: asyncio.AbstractEventLoop,
        host: str,
        port: int,
        status: Callable[[], dict[str, object]] | None = None,
        guard: Guard = OPEN,
    ) -> None:
        """Bind and serve; port 0 takes a free one. Raises SetupError when the address cannot be used.

        `status` answers the action of that name, where the process has more to say than the broker. `guard`: who
        may come in, and by which certificate.
        """
        self._broker = broker
        self._status = status or broker.status
        self._loop = loop
        self._inbox, self._releases = Inbox(broker, loop), Releases(broker, loop)
        self._budget = Budget()
        self._calls = Gate("calls", CALLS_MAX)
        self._streams_gate = Gate("send streams", STREAMS_MAX)
        self._streams: set[Stream] = set()
        self._permissions = permissions.Permissions(guard.access, broker.parts.clock.clock)
        self._closing = threading.Event()
        self._close_once = threading.Lock()
        check_free(host, port)
        address = f"[{host}]" if ":" in host else host
        try:
            super().__init__(
                f"grpc+{'tls' if guard.tls else 'tcp'}://{address}:{port}",
                tls_certificates=[(guard.tls.certificate, guard.tls.key)] if guard.tls else None,
                middleware=self._permissions.middleware,
            )
        except (pa.ArrowException, flight.FlightError) as error:
            raise SetupError(f"--port {port} on {host} cannot be used: {error}") from error

    # ---- Flight's verbs ---------------------------------------------------------------------------------

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        """`send` and `release`: record batches in, one acknowledgement each out."""
        with answering("do_exchange"), self._admit(self._streams_gate):
            caller, path = self._permissions.caller(context), list(descriptor.path or [])
            if path == codec.SEND_PATH:
                columns = SendColumns if caller is None else partial(_permitted, caller)
                stream = Stream(self._inbox, self._budget, columns)
            elif path == codec.RELEASE_PATH:
                permissions.check_release(caller)
                stream = Stream(self._releases, self._budget, ReleaseColumns)
            else:
                raise NotFound("no such exchange; descriptor paths are ['send'] and ['release']")
            self._streams.add(stream)
            try:
                if self._closing.is_set():  # close() may have looked through the streams just before
                    raise Unavailable(STOPPING)
                stream.run(reader, writer)
            finally:
                self._streams.discard(stream)

    def do_action(self, context: Any, action: Any) -> list[bytes]:
        """Everything small: a JSON body in, one JSON body out."""
        with answering("do_action"), self._admit(self._calls):
            caller, verb, body = self._permissions.caller(context), action.type, action.body
            codec.check_size(f"the body of action {verb[:40]}", body.size, codec.body_bytes_max(verb))
            request = codec.decode_action(verb, body.to_pybytes())
            permissions.check_action(caller, verb, request)
            may, broker = permissions.cancellable(caller), self._broker
            answer = self._on_loop(context, lambda: verbs.perform(broker, verb, request, self._status, may))
            return [codec.encode(permissions.shown(caller, verb, answer))]

    def do_get(self, context: Any, ticket: Any) -> Any:
        """Rows in READ_SCHEMA: of the log, of a queue, or of a long poll."""
        with answering("do_get"):
            caller, data = self._permissions.caller(context), ticket.ticket
            request = codec.decode_ticket(data)
            permissions.check_ticket(caller, request)
            entry = self._admit(self._calls)
            if isinstance(request, codec.ReadLog):
                names = request.columns or READ_SCHEMA.names
                schema = pa.schema([READ_SCHEMA.field(name) for name in names])
                return flight.GeneratorStream(schema, self._log_rows(request, entry))
            with entry:
                cancel = isinstance(request, codec.Pull)
                batch = self._on_loop(context, lambda: verbs.rows(self._broker, request), cancel=cancel)
                return flight.RecordBatchStream(pa.Table.from_batches([batch], READ_SCHEMA))

    def list_actions(self, context: Any) -> list[tuple[str, str]]:
        """The verbs of do_action."""
        return [(verb, text) for verb, (_, _, text) in codec.ACTIONS.items()]

    def list_flights(self, context: Any, criteria: bytes) -> Any:
        """Not offered."""
        return self._refuse("list_flights")

    def get_flight_info(self, context: Any, descriptor: Any) -> Any:
        """Not offered."""
        return self._refuse("get_flight_info")

    def get_schema(self, context: Any, descriptor: Any) -> Any:
        """Every do_get has message.READ_SCHEMA. (Refusing is no choice: Flight would send a traceback along.)"""
        return flight.SchemaResult(READ_SCHEMA)

    def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        """Not offered: a put has no answer per batch."""
        self._refuse("do_put")

    # ---- stopping ---------------------------------------------------------------------------------------

    def close(self) -> None:
        """Refuse what is new, answer what is under way, cut who stays. Blocks some seconds at most.

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
                log.warning("a stream with %d unanswered batches is cut", len(stream.window))
        # gRPC's shutdown ends when all calls have, and idle streams end when their connection does.
        ending = threading.Thread(target=self.shutdown, name="flight-shutdown", daemon=True)
        ending.start()
        for _ in range(CUT_ROUNDS):
            ending.join(CUT_S)
            if not ending.is_alive():
                return
            cut_connections(self.port)
            for stream in list(self._streams):
                stream.window.abort()
        log.error("the Flight server did not end; its threads are left to the end of the process")

    # ---- inside -----------------------------------------------------------------------------------------

    def _admit(self, gate: Gate) -> Pass:
        if self._closing.is_set():
            raise Unavailable(STOPPING)
        return gate.enter()

    def _refuse(self, method: str) -> Any:
        raise to_flight(RequestError(f"{method} is not offered; use do_exchange, do_action or do_get"))

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
        while True:
            try:
                return future.result(LOOK_AGAIN_S)
            except concurrent.futures.CancelledError:
                raise Unavailable(STOPPING) from None
            except TimeoutError:
                if future.done():  # between the two lines, or the verb's own TimeoutError
                    return future.result()
            if context.is_cancelled() or (self._closing.is_set() and (cancel or self._loop.is_closed())):
                if cancel:
                    future.cancel()
                raise Unavailable(STOPPING)

    def _log_rows(self, request: codec.ReadLog, entry: Pass) -> Iterator[pa.RecordBatch]:
        return _LogRows(self._broker, request, entry, self._closing)


def _permitted(caller: Principal, schema: pa.Schema) -> permissions.PermittedColumns:
    return permissions.PermittedColumns(SendColumns(schema), caller)


class _LogRows:
    """Batches of a log read. The gate's pass goes back with the object: gRPC may drop it at any point."""

    def __init__(self, broker: Broker, request: codec.ReadLog, entry: Pass, closing: threading.Event) -> None:
        self._entry = entry
        self._closing = closing
        self._rows = broker.read_log(
            request.from_seq, request.to_seq, request.kinds, request.coalesce_rows, request.columns
        )

    def __iter__(self) -> _LogRows:
        return self

    def __next__(self) -> pa.RecordBatch:
        try:
            if self._closing.is_set():
                raise Unavailable(STOPPING)
            return next(self._rows)
        except StopIteration:
            self._entry.give_back()
            raise
        except TimeballError as error:
            raise to_flight(error) from None
        except Exception as error:  # Flight would send its traceback to the client
            raise to_flight(internal(error, "read_log")) from None

    def __del__(self) -> None:
        self._entry.give_back()
