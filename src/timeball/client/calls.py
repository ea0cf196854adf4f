"""Calls over Flight: reads of columns, and the actions of the pipeline, with retries and with Timeball's errors.

The broker sends an error as a code and a sentence (docs/protocols). An error of Flight itself means that no answer
came. It becomes Unavailable, so a program can distinguish "retry later" from "give up". gRPC's debug context is removed
from the texts, because it does not help users.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
import pyarrow as pa
import pyarrow.flight as flight

from timeball.client.attempts import Attempts, NotSent, refusal, split_endpoints, wait_within
from timeball.client.credentials import Credentials, credentials
from timeball.client.network import run
from timeball.io.clock import Clock
from timeball.model import wire
from timeball.model.errors import OverLimit, RequestError, TimeballError, Unavailable
from timeball.model.message import READ_SCHEMA

# By default gRPC waits up to 20 s before it tries again to connect to a broker.
_CHANNEL = [
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Despite its name, this is the time limit of one connection attempt. 100 ms is too short for a busy or distant
    # broker.
    ("grpc.min_reconnect_backoff_ms", 3_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # A read of a log has no time limit. If its broker's machine is lost, it ends by a ping without an answer.
    ("grpc.keepalive_time_ms", 30_000),
    # The time limit of a ping. Which of the two counts depends on the release of gRPC.
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.ping_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),  # a read sends no data
]

# What pyarrow raises for a call that has failed. OSError: the stream is broken.
FLIGHT_ERRORS = (pa.ArrowException, flight.FlightError, OSError)

SCHEMES = ("grpc", "grpc+tcp", "grpc+tls", "grpc+unix")

# Verbs that are safe to repeat. An attach carries a job id and an epoch, by which the broker recognizes a repetition.
REPEATABLE = frozenset({"status", "queues", "source_positions", "attach", "compactor"})

T = TypeVar("T")


# ---- dialing, and forks ------------------------------------------------------------------------------------
#
# gRPC does not survive a fork. In a child of a process that has dialed, calls hang longer than every time limit, even
# calls of a client created in the child (also with GRPC_ENABLE_FORK_SUPPORT, tried with pyarrow 26). So in such a child
# each call raises an error that states the remedy. A client dials at its first call, so a client that was created but
# not used before the fork works in the child.

FORKED = (
    "this process was forked from one that had used columns over Flight, which gRPC does not survive: "
    "make the first call for columns after the fork, or start processes by spawn"
)


class _Process:
    """Flight clients that this process, or the process that it was forked from, has created."""

    def __init__(self) -> None:
        self.clients: weakref.WeakSet[Any] = weakref.WeakSet()
        self.has_dialed = False
        self.is_inherited = False  # the parent process had dialed before the fork

    def after_fork(self) -> None:
        """Keep the parent's clients alive in a child process, because freeing them hangs as well."""
        self.is_inherited = self.has_dialed
        for client in list(self.clients):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))


_PROCESS = _Process()
os.register_at_fork(after_in_child=_PROCESS.after_fork)


def check_process() -> None:
    """Raise RequestError in a child of a process that had dialed. Call this before waiting for any lock.

    Another thread of the parent may have held the lock at the fork. The child has no such thread to release it.
    """
    if _PROCESS.is_inherited:
        raise RequestError(FORKED)


def is_inherited() -> bool:
    """Check whether a parent process had dialed before this process was forked from it."""
    return _PROCESS.is_inherited


def dial(endpoint: str, who: Credentials | None = None, **options: Any) -> Any:
    """Create a FlightClient that sends credentials: `who`, or those of the environment. `options`: those of its class.

    The client connects at its first call. Raises RequestError after a fork or for wrong credentials, and FLIGHT_ERRORS
    for a malformed address.
    """
    check_process()
    who = credentials() if who is None else who
    if who.access_key:
        options["middleware"] = [_CredentialsFactory(who)]
    if who.tls_roots is not None:
        options["tls_root_certs"] = who.tls_roots
    if who.tls_name:
        options["override_hostname"] = who.tls_name
    _PROCESS.has_dialed = True  # set before dialing, because a fork may happen in between
    client = flight.FlightClient(endpoint.replace("grpc://", "grpc+tcp://", 1), **options)
    _PROCESS.clients.add(client)
    return client


class _CredentialsFactory(flight.ClientMiddlewareFactory):
    """Adds the credentials to each call."""

    def __init__(self, who: Credentials) -> None:
        super().__init__()
        self._call = _CredentialsMiddleware({"authorization": who.authorization})

    def start_call(self, info: Any) -> flight.ClientMiddleware:
        """Implement flight.ClientMiddlewareFactory."""
        return self._call


class _CredentialsMiddleware(flight.ClientMiddleware):
    def __init__(self, headers: dict[str, str]) -> None:
        super().__init__()
        self._headers = headers

    def sending_headers(self) -> dict[str, str]:
        return self._headers


# ---- the connection -----------------------------------------------------------------------------------------


class Calls(Attempts):
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
        credentials, by default from the environment. `patience_s`: retry each call for this many seconds
        (see attempts.py). Raises RequestError for a malformed endpoint.
        """
        super().__init__(
            split_endpoints(endpoint, SCHEMES, "grpc://host:port"),
            timeout_ms,
            patience_s=patience_s,
            clock=clock,
        )
        self._who = who
        self._dial_lock = threading.Lock()  # guards `_flight`
        self._flight: Any = None

    def leave(self, endpoint: str) -> None:
        """See Attempts."""
        if len(self._endpoints) > 1 and not is_inherited():
            with self._dial_lock:
                if endpoint == self.endpoint:
                    super().leave(endpoint)
                    # The old client is not closed: other threads may have streams on it, which end by themselves.
                    self._flight = None

    @property
    def flight(self) -> Any:
        """The Flight client, created at the first use. Raises RequestError for a malformed endpoint or after a fork."""
        check_process()
        with self._dial_lock:
            if self._flight is None:
                try:
                    self._flight = dial(self.endpoint, self._who, generic_options=_CHANNEL)
                except FLIGHT_ERRORS as error:
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

    def pauses(self) -> Iterator[tuple[float, bool]]:
        """See Attempts. Raises RequestError after a fork."""
        check_process()
        yield from super().pauses()

    def action(self, verb: str, body: object, answer: type[T], timeout_ms: int | None = None) -> T:
        """Run the action `verb`, and decode its answer from JSON as `answer`.

        `body` is an object that is encoded as JSON, or bytes of JSON. `timeout_ms` replaces the time limit of the
        connection for this call. Raises the broker's error, or Unavailable.
        """
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        call = flight.Action(verb, data)

        async def attempt(limit_s: float) -> T:
            """Make the call once, within `limit_s` seconds."""
            options = flight.FlightCallOptions(timeout=limit_s)
            with translated(self.endpoint):
                results = [result.body.to_pybytes() for result in self.flight.do_action(call, options)]
            return msgspec.json.decode(results[0], type=answer)

        is_repeatable = verb in REPEATABLE or self._patience_s is not None
        return run(self.with_retries(attempt, timeout_ms or self.timeout_ms, is_repeatable=is_repeatable))

    def rows(self, ticket: wire.Ticket) -> pa.RecordBatch:
        """Read all rows of a ticket into a batch in READ_SCHEMA. The wait of a Pull is added to the time limit."""
        wait_ms = ticket.wait_ms if isinstance(ticket, wire.Pull) else 0

        async def attempt(limit_s: float) -> pa.RecordBatch:
            """Read once, within `limit_s` seconds."""
            sent = ticket
            if isinstance(ticket, wire.Pull):
                # A later attempt has less time, so the broker must wait less.
                attempt_wait_ms = wait_within(limit_s, self.timeout_ms, wait_ms)
                sent = msgspec.structs.replace(ticket, wait_ms=attempt_wait_ms)
            data = flight.Ticket(msgspec.json.encode(sent))
            with translated(self.endpoint):
                reader = self.flight.do_get(data, flight.FlightCallOptions(timeout=limit_s))
                batches = [chunk.data for chunk in reader]
            if not batches:
                return pa.RecordBatch.from_pylist([], READ_SCHEMA)
            return batches[0] if len(batches) == 1 else pa.concat_batches(batches)

        return run(self.with_retries(attempt, self.timeout_ms, wait_ms=wait_ms))

    def stream(self, ticket: wire.Ticket) -> pa.RecordBatchReader:
        """Return a reader of the batches of a ticket. There is no time limit, because a log may be long."""
        reader = self._open(ticket)
        with translated(self.endpoint):
            schema = reader.schema
        return pa.RecordBatchReader.from_batches(schema, self._read(reader))

    def batches(self, ticket: wire.Ticket) -> Iterator[pa.RecordBatch]:
        """Yield the batches of a ticket as they arrive. There is no time limit."""
        yield from self._read(self._open(ticket))

    def _open(self, ticket: wire.Ticket) -> Any:
        """Begin to read a ticket. Returns Flight's reader."""
        self.check()
        with translated(self.endpoint):
            return self.flight.do_get(flight.Ticket(msgspec.json.encode(ticket)))

    def _read(self, reader: Any) -> Iterator[pa.RecordBatch]:
        """Yield the batches of Flight's reader, with its errors as errors of Timeball."""
        with translated(self.endpoint):
            for chunk in reader:
                yield chunk.data

    def check(self) -> None:
        """See Attempts. Raises RequestError after a fork, too."""
        check_process()
        super().check()


# ---- translation of Flight's errors -----------------------------------------------------------------------

# Parts of gRPC's error texts, by which `translate` recognises the cause.
NO_FLIGHT = "/arrow.flight.protocol.FlightService/"  # from a gRPC server without this method
PORTS = "Timeball's clients connect to --port (7400 by default); 8081 is for RocketMQ 5's gRPC clients"
NO_GRPC = "Received http2 header with status"  # from another server or a proxy that uses HTTP/2
TOO_LONG = "Received message larger than max"
# The call was never sent: no connection was made, or the broker's GOAWAY excluded the call.
NOT_CONNECTED = "failed to connect to all addresses"
_DEBUG_SUFFIXES = (". Detail: Failed", ". gRPC client debug context", ". Client context")


def translate(error: BaseException, endpoint: str) -> TimeballError:
    """Translate an error that Flight raised during a call to `endpoint` to an error of Timeball.

    An error that the broker sent has its code in `extra_info`. Of all others, only the class and parts of the text
    show the cause.
    """
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
    if isinstance(error, OSError):
        return Unavailable(f"the connection to {endpoint} failed: {text}")
    return TimeballError(f"{endpoint} answered with something else than a broker would: {text}")


@contextmanager
def translated(endpoint: str) -> Iterator[None]:
    """Translate the Flight errors of the block to errors of Timeball."""
    try:
        yield
    except FLIGHT_ERRORS as error:
        raise translate(error, endpoint) from error
