"""Single calls over a Flight connection (actions and reads), with retries and with Timeball's errors.

The time limit of a call includes its retries. If no broker answers (it may be restarting), a call is tried again a few
times if it is safe to repeat: it changes nothing, or the broker recognizes the repetition. Any other call is tried
again only if it was not carried out: it was never sent, or the broker answered that it does nothing at the moment (for
example during a hand-over). After a lost answer the client cannot know whether the broker carried out the call.

A program that runs beside the broker, such as the pipeline, sets `patience_s` instead. All its calls may safely be
repeated. Each call is tried again for this number of seconds, and each attempt has the whole time limit.

The broker sends an error as a code and a sentence (docs/protocols). An error of Flight itself means that no answer
came. It becomes Unavailable, so a program can distinguish "retry later" from "give up". gRPC's debug context is removed
from the texts, because it does not help users.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
import pyarrow as pa
import pyarrow.flight as flight

from timeball.client.dialing import Credentials, check_process, dial, is_inherited
from timeball.io.clock import Clock, SystemClock
from timeball.model import wire
from timeball.model.errors import OverLimit, RequestError, TimeballError, Unavailable, from_code
from timeball.model.message import READ_SCHEMA

# The pause before each attempt after the first. A broker restarts within seconds.
RETRY_PAUSES_S = (0.1, 0.3, 1.0)
CLUSTER_PAUSES_S = (
    0.05,
    0.1,
    *4 * (0.2,),
    *4 * (0.5,),
    1.0,
    1.0,
)  # 5 s in total: another node leads within two or three seconds
PATIENT_PAUSES_S = (0.1, 2.0)  # the first and the longest pause of a client with `patience_s`
# Verbs that are safe to repeat. An attach carries a job id and an epoch, by which the broker recognizes a repetition.
REPEATABLE = frozenset(
    {
        "status",
        "topics",
        "groups",
        "dead_letters",
        "queues",
        "offsets",
        "source_positions",
        "get",
        "commit",
        "attach",
        "compactor",
    }
)

# By default gRPC waits up to 20 s before it tries again to connect to a broker.
_CHANNEL = [
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Despite its name, this is the time limit of one connection attempt. 100 ms is too short for a busy or distant
    # broker.
    ("grpc.min_reconnect_backoff_ms", 3_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]

SCHEMES = ("grpc", "grpc+tcp", "grpc+tls", "grpc+unix")

logger = logging.getLogger(__name__)

T = TypeVar("T")


class NotNow(Unavailable):
    """The broker did not carry out the call, because it stops or hands over. The call may be repeated."""

    code = "not_now"


class NotSent(NotNow):
    """No broker has received the call: there was no connection, or the stream was already dead."""

    code = "not_sent"


class OpenRead:
    """A read that another thread may cancel. The broker takes back the messages that a cancelled read had leased."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reader: Any = None
        self.is_cancelled = False

    def begin(self, reader: Any) -> None:
        """Set the stream that `cancel` cancels. Cancels it at once if `cancel` was called before."""
        with self._lock:
            self._reader = reader
            if self.is_cancelled:
                reader.cancel()

    def cancel(self) -> None:
        """Cancel the read, now or when it begins. The read then raises RequestError, unless it has already ended."""
        with self._lock:
            self.is_cancelled = True
            if self._reader is not None:
                self._reader.cancel()


class Calls:
    """A connection to one broker. Dials at the first call. Thread safe."""

    def __init__(
        self,
        endpoint: str,
        timeout_ms: int,
        who: Credentials | None = None,
        *,
        patience_s: float | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Prepare a connection.

        `endpoint` is grpc://host:port, or grpc://host:port,host:port for the nodes of a cluster. `who`: the
        credentials, by default from the environment. `patience_s`: retry each call for this many seconds (see the
        module's docstring). Raises RequestError for a malformed endpoint.
        """
        self._endpoints = _split_endpoints(
            endpoint
        )  # calls go to the first one; `_rotate_endpoints` changes it
        self.timeout_ms = timeout_ms
        self._patience_s = patience_s
        self._closed = threading.Event()
        self._who, self._clock = who, clock or SystemClock()
        self._dial_lock = threading.Lock()  # guards `_endpoints` and `_flight`
        self._flight: Any = None

    @property
    def endpoint(self) -> str:
        """The address that the next call uses."""
        return self._endpoints[0]

    def _rotate_endpoints(self) -> None:
        """Let the next call dial the next node of the cluster, because the current node does not answer."""
        if len(self._endpoints) > 1 and not is_inherited():
            with self._dial_lock:
                self._endpoints.append(self._endpoints.pop(0))
                # The old client is not closed, because other threads may have streams on it. These end by themselves.
                self._flight = None

    @property
    def flight(self) -> Any:
        """The Flight client, created at the first use. Raises RequestError for a malformed endpoint or after a fork."""
        check_process()
        with self._dial_lock:
            if self._flight is None:
                try:
                    self._flight = dial(self.endpoint, self._who, generic_options=_CHANNEL)
                except (pa.ArrowException, flight.FlightError) as error:
                    raise RequestError(
                        f"endpoint {self.endpoint!r}: write it as grpc://host:port ({error})"
                    ) from error
            return self._flight

    def close(self) -> None:
        """Close the connection. Calls that wait for their next attempt end with Unavailable."""
        if self._closed.is_set() or is_inherited():
            return
        self._closed.set()
        with self._dial_lock:
            if self._flight is not None:
                self._flight.close()

    def attempts(self) -> Iterator[bool]:
        """Yield before each attempt, after its pause. The value is True if another attempt may follow.

        Raises RequestError after a fork, and Unavailable if the client is closed during a pause.
        """
        check_process()
        if self._patience_s is not None:
            yield from self._patient_attempts(self._patience_s)
            return
        pauses_s = RETRY_PAUSES_S if len(self._endpoints) == 1 else CLUSTER_PAUSES_S
        yield len(pauses_s) > 0
        for number, pause_s in enumerate(pauses_s, 1):
            if self._closed.wait(pause_s):
                raise Unavailable("the client was closed")
            self._rotate_endpoints()
            yield number < len(pauses_s)

    def _patient_attempts(self, patience_s: float) -> Iterator[bool]:
        give_up_ns, pause_s = self._clock.monotonic_ns() + int(patience_s * 1e9), PATIENT_PAUSES_S[0]
        may_retry = patience_s > 0
        while True:
            yield may_retry
            if not may_retry:
                return
            logger.warning("broker not reached, trying again broker=%s retry_s=%.1f", self.endpoint, pause_s)
            # The jitter spreads the reconnects of a whole Spark cluster after a restart of the broker.
            if self._closed.wait(pause_s * random.uniform(0.5, 1.0)):
                raise Unavailable("the client was closed")
            self._rotate_endpoints()
            pause_s = min(2 * pause_s, PATIENT_PAUSES_S[1])
            may_retry = self._clock.monotonic_ns() < give_up_ns

    def action(self, verb: str, body: object, answer: type[T], timeout_ms: int | None = None) -> T:
        """Run an action and decode its answer. `body` is an object that is encoded as JSON, or bytes of JSON.

        `timeout_ms` replaces the time limit of the connection for this call.
        """
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        call = flight.Action(verb, data)

        def attempt(remaining_s: float) -> T:
            options = flight.FlightCallOptions(timeout=remaining_s)
            results = [result.body.to_pybytes() for result in self.flight.do_action(call, options)]
            return msgspec.json.decode(results[0], type=answer)

        timeout_ms = timeout_ms or self.timeout_ms
        if verb in REPEATABLE or self._patience_s is not None:
            return self._with_retries(attempt, timeout_ms)
        return self._with_retries(attempt, timeout_ms, retry_on=NotNow)

    def rows(
        self, ticket: wire.Ticket, wait_ms: int = 0, open_read: OpenRead | None = None
    ) -> pa.RecordBatch:
        """Read all rows of a ticket into a batch in READ_SCHEMA. `wait_ms` is added to the time limit."""
        data = flight.Ticket(msgspec.json.encode(ticket))

        def attempt(remaining_s: float) -> pa.RecordBatch:
            reader = self.flight.do_get(data, flight.FlightCallOptions(timeout=remaining_s))
            if open_read is not None:
                open_read.begin(reader)
            try:
                # `read_all` is not used, because cancelling it interrupts the main thread, as Ctrl-C would.
                batches = [chunk.data for chunk in reader]
            except flight.FlightError:
                if open_read is not None and open_read.is_cancelled:
                    raise RequestError("this read was cancelled") from None
                raise
            if not batches:
                return pa.RecordBatch.from_pylist([], READ_SCHEMA)
            return batches[0] if len(batches) == 1 else pa.concat_batches(batches)

        return self._with_retries(attempt, self.timeout_ms + wait_ms)

    def stream(self, ticket: wire.Ticket) -> pa.RecordBatchReader:
        """Read the batches of a ticket as they arrive. There is no time limit, because a log may be long."""
        reader = self._open(ticket)
        with translated(self.endpoint):
            schema = reader.schema
        return pa.RecordBatchReader.from_batches(schema, self._read(reader))

    def batches(self, ticket: wire.Ticket) -> Iterator[pa.RecordBatch]:
        """Yield the batches of a ticket as they arrive. There is no time limit."""
        yield from self._read(self._open(ticket))

    def _open(self, ticket: wire.Ticket) -> Any:
        self._check_open()
        with translated(self.endpoint):
            return self.flight.do_get(flight.Ticket(msgspec.json.encode(ticket)))

    def _read(self, reader: Any) -> Iterator[pa.RecordBatch]:
        with translated(self.endpoint):
            for chunk in reader:
                yield chunk.data

    def _attempt(self, call: Callable[[float], T], remaining_s: float) -> T:
        self._check_open()
        with translated(self.endpoint):
            return call(remaining_s)

    def _with_retries(
        self, call: Callable[[float], T], timeout_ms: int, *, retry_on: type[Unavailable] = Unavailable
    ) -> T:
        end_ns = self._clock.monotonic_ns() + timeout_ms * 1_000_000
        remaining_s, failure = timeout_ms / 1000, None
        for may_retry in self.attempts():
            if failure is not None and self._patience_s is None:
                remaining_s = (end_ns - self._clock.monotonic_ns()) / 1e9
                if remaining_s <= 0:
                    raise failure
            try:
                return self._attempt(call, remaining_s)
            except retry_on as error:
                if not may_retry:
                    raise
                failure = error
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _check_open(self) -> None:
        check_process()
        if self._closed.is_set():
            raise RequestError("this Timeball client is closed")


def _split_endpoints(endpoint: str) -> list[str]:
    """Split "grpc://a:1,b:2" into "grpc://a:1" and "grpc://b:2". Raises RequestError for a malformed endpoint."""
    scheme, separator, rest = endpoint.partition("://")
    addresses = [address.strip() for address in rest.split(",")]
    if not separator or scheme not in SCHEMES or (len(addresses) > 1 and not all(addresses)):
        raise RequestError(f"endpoint {endpoint!r}: write it as grpc://host:port")
    return [f"{scheme}://{address}" for address in addresses]


# ---- translation of Flight's errors -----------------------------------------------------------------------

# Parts of gRPC's error texts, by which `translate` recognises the cause.
NO_FLIGHT = "/arrow.flight.protocol.FlightService/"  # from a gRPC server without this method
PORTS = "Timeball's clients connect to --port (7400 by default); 8081 is for RocketMQ 5's gRPC clients"
NO_GRPC = "Received http2 header with status"  # from another server or a proxy that uses HTTP/2
TOO_LONG = "Received message larger than max"
# The call was never sent: no connection was made, or the broker's GOAWAY excluded the call.
NOT_CONNECTED = "failed to connect to all addresses"
_DEBUG_SUFFIXES = (". Detail: Failed", ". gRPC client debug context", ". Client context")


def refusal(code: str, text: str) -> TimeballError:
    """Rebuild an error from the broker's code and text.

    The code of `Unavailable` gives NotNow, because the broker did not carry out the call. After an error of a subclass
    of Unavailable, the broker may have carried it out, or may still do so.
    """
    return NotNow(text) if code == Unavailable.code else from_code(code, text)


def translate(error: BaseException, endpoint: str) -> TimeballError:
    """Translate an error that Flight raised during a call to `endpoint` to an error of Timeball."""
    if isinstance(error, TimeballError):
        return error
    text = str(error)
    for suffix in _DEBUG_SUFFIXES:
        text = text.split(suffix, 1)[0]
    if isinstance(error, flight.FlightServerError) and error.extra_info:
        return refusal(bytes(error.extra_info).decode("ascii", "replace"), text)
    if TOO_LONG in text:
        return OverLimit(f"{endpoint} takes no request as long as this one: name fewer things at once")
    if isinstance(error, flight.FlightTimedOutError):
        return Unavailable(f"{endpoint} did not answer in time")
    if isinstance(error, (flight.FlightUnavailableError, flight.FlightCancelledError)):
        reason = text.rsplit("with message: ", 1)[-1]
        kind = NotSent if reason.startswith(NOT_CONNECTED) else Unavailable
        return kind(f"no broker answers at {endpoint}; is `timeball serve` running there? ({reason})")
    if isinstance(error, flight.FlightError):
        return Unavailable(f"the connection to {endpoint} failed: {text}")
    if NO_FLIGHT in text:
        return Unavailable(f"{endpoint} speaks gRPC, but not Arrow Flight. {PORTS}")
    if NO_GRPC in text:
        return Unavailable(f"{endpoint} is no broker: it speaks HTTP/2, but not gRPC ({text}). {PORTS}")
    return TimeballError(f"{endpoint} answered with something else than a broker would: {text}")


@contextmanager
def translated(endpoint: str) -> Iterator[None]:
    """Translate the Flight errors of the block to errors of Timeball."""
    try:
        yield
    except (pa.ArrowException, flight.FlightError) as error:
        raise translate(error, endpoint) from error
