"""One call, one answer: actions and reads over a Flight connection, with our errors.

A call ends within its time limit, however often it is tried. One that changes nothing, or that the broker recognises
when it is repeated, is tried again a few times when no broker answers (it may be restarting). Any other is tried again
only when it has not left, or when the broker has said that it does nothing now (it may be handing over): without an
answer the client cannot tell whether it was done.

A program that runs beside the broker, such as the pipeline, has `patience_s` instead: each of its calls may be repeated
without harm, and is tried again for so long, each time within the time limit.

The broker's errors travel as a code and a sentence (docs/protocols). What Flight itself reports means that no answer
came, and becomes Unavailable, so that a program can tell "wait" from "give up". gRPC's debug context is cut off: it
names no remedy.
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

from timeball import wire
from timeball.client.dialing import Credentials, check_process, dial, is_inherited
from timeball.clock import Clock, SystemClock
from timeball.errors import OverLimit, RequestError, TimeballError, Unavailable, from_code
from timeball.message import READ_SCHEMA

# Attempts after the first, and the pause before each: a broker restarts within seconds.
RETRY_PAUSES_S = (0.1, 0.3, 1.0)
CLUSTER_PAUSES_S = (
    0.05,
    0.1,
    *4 * (0.2,),
    *4 * (0.5,),
    1.0,
    1.0,
)  # another node leads within two or three seconds
PATIENT_PAUSES_S = (0.1, 2.0)  # the first and the longest pause of a program that has patience
# Verbs whose repetition changes nothing. Attach carries a job id and an epoch by which the broker knows it.
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

# gRPC waits up to 20 s before it looks again whether a broker has come back.
_CHANNEL = [
    ("grpc.initial_reconnect_backoff_ms", 100),
    # In spite of its name this is the time one attempt may last: 100 ms is too little for a busy broker or a far one.
    ("grpc.min_reconnect_backoff_ms", 3_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]

SCHEMES = ("grpc", "grpc+tcp", "grpc+tls", "grpc+unix")

logger = logging.getLogger(__name__)

T = TypeVar("T")


class NotNow(Unavailable):
    """The broker has answered that it does nothing now, as it stops or hands over: the call may be repeated."""

    code = "not_now"


class NotSent(NotNow):
    """No connection carried the call, or its stream was dead before: no broker has seen it."""

    code = "not_sent"


class OpenRead:
    """A read that another thread may cancel. The broker gives back what it had leased for one that was cancelled."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reader: Any = None
        self.is_cancelled = False

    def begin(self, reader: Any) -> None:
        """Note the stream to cancel."""
        with self._lock:
            self._reader = reader
            if self.is_cancelled:
                reader.cancel()

    def cancel(self) -> None:
        """End the read, now or when it begins; it raises RequestError. No effect on one that has ended."""
        with self._lock:
            self.is_cancelled = True
            if self._reader is not None:
                self._reader.cancel()


class Calls:
    """A connection to one broker. Dials with the first call. Thread safe."""

    def __init__(
        self,
        endpoint: str,
        timeout_ms: int,
        who: Credentials | None = None,
        *,
        patience_s: float | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`endpoint` as in grpc://host:port, or grpc://host:port,host:port for the nodes of a cluster.

        RequestError if it is not of that form. `who`: else the environment's.
        """
        self._endpoints = _each_endpoint(endpoint)
        self.timeout_ms = timeout_ms
        self._patience_s = patience_s
        self._closed = threading.Event()
        self._who, self._clock = who, clock or SystemClock()
        self._dialling = threading.Lock()
        self._flight: Any = None

    @property
    def endpoint(self) -> str:
        """The address that is dialed now."""
        return self._endpoints[0]

    def _try_next(self) -> None:
        """Dial another node of the cluster with the next call: this one does not answer."""
        if len(self._endpoints) > 1 and not is_inherited():
            with self._dialling:
                self._endpoints.append(self._endpoints.pop(0))
                # Not closed: other threads may have streams on it, which end by themselves.
                self._flight = None

    @property
    def flight(self) -> Any:
        """The Flight client of this process; raises RequestError for an endpoint that is none, and after a fork."""
        check_process()
        with self._dialling:
            if self._flight is None:
                try:
                    self._flight = dial(self.endpoint, self._who, generic_options=_CHANNEL)
                except (pa.ArrowException, flight.FlightError) as error:
                    raise RequestError(
                        f"endpoint {self.endpoint!r}: write it as grpc://host:port ({error})"
                    ) from error
            return self._flight

    def close(self) -> None:
        """Let go of the connection; calls that wait for another attempt give up."""
        if self._closed.is_set() or is_inherited():
            return
        self._closed.set()
        with self._dialling:
            if self._flight is not None:
                self._flight.close()

    def attempts(self) -> Iterator[bool]:
        """For each attempt, after its pause: whether another may follow. Raises RequestError after a fork."""
        check_process()
        if self._patience_s is not None:
            yield from self._patient_attempts(self._patience_s)
            return
        pauses_s = RETRY_PAUSES_S if len(self._endpoints) == 1 else CLUSTER_PAUSES_S
        yield len(pauses_s) > 0
        for number, pause_s in enumerate(pauses_s, 1):
            if self._closed.wait(pause_s):
                raise Unavailable("the client was closed")
            self._try_next()
            yield number < len(pauses_s)

    def _patient_attempts(self, patience_s: float) -> Iterator[bool]:
        give_up_ns, pause_s = self._clock.monotonic_ns() + int(patience_s * 1e9), PATIENT_PAUSES_S[0]
        more = patience_s > 0
        while True:
            yield more
            if not more:
                return
            logger.warning("broker not reached, trying again broker=%s retry_s=%.1f", self.endpoint, pause_s)
            # Jitter: after a restart the tasks of a whole cluster would otherwise knock at once.
            if self._closed.wait(pause_s * random.uniform(0.5, 1.0)):
                raise Unavailable("the client was closed")
            self._try_next()
            pause_s = min(2 * pause_s, PATIENT_PAUSES_S[1])
            more = self._clock.monotonic_ns() < give_up_ns

    def action(self, verb: str, body: object, answer: type[T], timeout_ms: int | None = None) -> T:
        """Do an action: JSON out, JSON in, decoded as `answer`. `body` may be bytes that are JSON already.

        `timeout_ms`: of this one, where it is not that of all.
        """
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        call = flight.Action(verb, data)

        def once(left_s: float) -> T:
            options = flight.FlightCallOptions(timeout=left_s)
            results = [result.body.to_pybytes() for result in self.flight.do_action(call, options)]
            return msgspec.json.decode(results[0], type=answer)

        timeout_ms = timeout_ms or self.timeout_ms
        if verb in REPEATABLE or self._patience_s is not None:
            return self._repeat(once, timeout_ms)
        return self._repeat(once, timeout_ms, when=NotNow)

    def rows(
        self, ticket: wire.Ticket, wait_ms: int = 0, open_read: OpenRead | None = None
    ) -> pa.RecordBatch:
        """The one batch a ticket names, in READ_SCHEMA; `wait_ms` is how long the broker may take besides."""
        data = flight.Ticket(msgspec.json.encode(ticket))

        def once(left_s: float) -> pa.RecordBatch:
            reader = self.flight.do_get(data, flight.FlightCallOptions(timeout=left_s))
            if open_read is not None:
                open_read.begin(reader)
            try:
                # Not `read_all`: one that is cancelled interrupts the main thread, as Ctrl-C would.
                found = [chunk.data for chunk in reader]
            except flight.FlightError:
                if open_read is not None and open_read.is_cancelled:
                    raise RequestError("this read was cancelled") from None
                raise
            if not found:
                return pa.RecordBatch.from_pylist([], READ_SCHEMA)
            return found[0] if len(found) == 1 else pa.concat_batches(found)

        return self._repeat(once, self.timeout_ms + wait_ms)

    def stream(self, ticket: wire.Ticket) -> pa.RecordBatchReader:
        """Return the batches a ticket names, as they come; without a time limit, because a log may be long."""
        reader = self._open(ticket)
        with translated(self.endpoint):
            schema = reader.schema
        return pa.RecordBatchReader.from_batches(schema, self._read(reader))

    def batches(self, ticket: wire.Ticket) -> Iterator[pa.RecordBatch]:
        """Yield the batches a ticket names, as they come; without a time limit."""
        yield from self._read(self._open(ticket))

    def _open(self, ticket: wire.Ticket) -> Any:
        self._check_open()
        with translated(self.endpoint):
            return self.flight.do_get(flight.Ticket(msgspec.json.encode(ticket)))

    def _read(self, reader: Any) -> Iterator[pa.RecordBatch]:
        with translated(self.endpoint):
            for chunk in reader:
                yield chunk.data

    def _once(self, call: Callable[[float], T], left_s: float) -> T:
        self._check_open()
        with translated(self.endpoint):
            return call(left_s)

    def _repeat(
        self, call: Callable[[float], T], timeout_ms: int, *, when: type[Unavailable] = Unavailable
    ) -> T:
        end_ns = self._clock.monotonic_ns() + timeout_ms * 1_000_000
        left_s, failure = timeout_ms / 1000, None
        for more in self.attempts():
            if failure is not None and self._patience_s is None:
                left_s = (end_ns - self._clock.monotonic_ns()) / 1e9
                if left_s <= 0:
                    raise failure
            try:
                return self._once(call, left_s)
            except when as error:
                if not more:
                    raise
                failure = error
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _check_open(self) -> None:
        check_process()
        if self._closed.is_set():
            raise RequestError("this Timeball client is closed")


def _each_endpoint(endpoint: str) -> list[str]:
    scheme, mark, rest = endpoint.partition("://")
    addresses = [each.strip() for each in rest.split(",")]
    if not mark or scheme not in SCHEMES or (len(addresses) > 1 and not all(addresses)):
        raise RequestError(f"endpoint {endpoint!r}: write it as grpc://host:port")
    return [f"{scheme}://{address}" for address in addresses]


# ---- Flight's errors as ours ------------------------------------------------------------------------------

# gRPC's own words; it says them before the broker sees a request.
NO_FLIGHT = "/arrow.flight.protocol.FlightService/"  # a server of gRPC names the call that it has not
PORTS = "Timeball's clients connect to --port (7400 by default); 8081 is for RocketMQ 5's gRPC clients"
NO_GRPC = "Received http2 header with status"  # another server, or a proxy, that speaks HTTP/2
TOO_LONG = "Received message larger than max"
# And these of a call that has not left: none of its connections was made, or the broker's GOAWAY has left it out.
NOT_CONNECTED = "failed to connect to all addresses"
_TAILS = (". Detail: Failed", ". gRPC client debug context", ". Client context")


def refusal(code: str, text: str) -> TimeballError:
    """Return the broker's refusal by its code. Other kinds of Unavailable may have been done, or will be."""
    return NotNow(text) if code == Unavailable.code else from_code(code, text)


def translate(error: BaseException, endpoint: str) -> TimeballError:
    """Return our error for what Flight raised while speaking to `endpoint`."""
    if isinstance(error, TimeballError):
        return error
    text = str(error)
    for tail in _TAILS:
        text = text.split(tail, 1)[0]
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
    """Raise our errors instead of Flight's from the block."""
    try:
        yield
    except (pa.ArrowException, flight.FlightError) as error:
        raise translate(error, endpoint) from error
