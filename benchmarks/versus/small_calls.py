"""Small calls beside other brokers: one delayed message a request, cancels by id, and the size of a pending message.

64 connections, each with one request in flight, in one process that waits for all of them at once. The requests are
bytes of each broker's own protocol, so the client costs about the same everywhere. The Python client is left out: it
is a library.

    single sends   messages that are due in an hour, for some seconds
    cancels        of these messages, each by the name that its broker gives it
    pending        the memory and the disk that such a message takes
"""

from __future__ import annotations

import json
import selectors
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from benchmarks.harness import now_ms, quantiles
from benchmarks.versus.delayed_queues import CLIENTS, LEASE_MS, TOPIC
from benchmarks.versus.peers import DELIVERY, HTTP, Peer
from benchmarks.versus.work import Bench, Sample

CONNECTIONS = 64
SECONDS, SECONDS_SMALL = 4.0, 0.3
CANCELS, CANCELS_SMALL = 5_000, 200
PENDING, PENDING_SMALL = 200_000, 2_000
CALL_ROWS = 500
HOUR_MS = 3_600_000
BODY_BYTES = 128
BOUND_S = 60.0


class Wire(ABC):
    """The requests and answers of one broker, as bytes. A connection has one request in flight."""

    def greet(self, number: int) -> bytes:
        """Return the bytes that begin connection `number`. No answer is expected."""
        return b""

    @abstractmethod
    def send(self, connection: int, number: int, due_ms: int) -> bytes:
        """Return the request that sends message `number`."""

    @abstractmethod
    def cancel(self, connection: int, token: bytes) -> bytes:
        """Return the request that cancels the message with this token."""

    @abstractmethod
    def answer(self, data: bytearray) -> bytes | None:
        """Take the first complete answer out of `data`. None if there is none yet."""

    @abstractmethod
    def token(self, number: int, due_ms: int, answer: bytes) -> bytes | None:
        """Return the token of an accepted message. None if the answer refuses it."""

    @abstractmethod
    def is_cancelled(self, answer: bytes) -> bool:
        """Check whether the answer says that the message was cancelled."""


def body_of(number: int) -> bytes:
    """A body of BODY_BYTES that no other message has."""
    return b"%0*d" % (BODY_BYTES, number)


def _line(data: bytearray) -> bytes | None:
    end = data.find(b"\r\n")
    if end < 0:
        return None
    line = bytes(data[:end])
    del data[: end + 2]
    return line


class RedisWire(Wire):
    """See the module."""

    def send(self, connection: int, number: int, due_ms: int) -> bytes:
        """See Wire."""
        return b"*4\r\n$4\r\nZADD\r\n$7\r\ndelayed\r\n$13\r\n%d\r\n$%d\r\n%b\r\n" % (
            due_ms, BODY_BYTES, body_of(number),
        )  # fmt: skip

    def cancel(self, connection: int, token: bytes) -> bytes:
        """See Wire."""
        return b"*3\r\n$4\r\nZREM\r\n$7\r\ndelayed\r\n$%d\r\n%b\r\n" % (BODY_BYTES, token)

    def answer(self, data: bytearray) -> bytes | None:
        """See Wire."""
        return _line(data)

    def token(self, number: int, due_ms: int, answer: bytes) -> bytes | None:
        """See Wire. The body is the member of the set."""
        return body_of(number) if answer == b":1" else None

    def is_cancelled(self, answer: bytes) -> bool:
        """See Wire."""
        return answer == b":1"


class BeanstalkWire(Wire):
    """See the module."""

    def send(self, connection: int, number: int, due_ms: int) -> bytes:
        """See Wire."""
        delay_s = -(-(due_ms - now_ms()) // 1000)
        return b"put 0 %d %d %d\r\n%b\r\n" % (delay_s, LEASE_MS // 1000, BODY_BYTES, body_of(number))

    def cancel(self, connection: int, token: bytes) -> bytes:
        """See Wire."""
        return b"delete %b\r\n" % token

    def answer(self, data: bytearray) -> bytes | None:
        """See Wire."""
        return _line(data)

    def token(self, number: int, due_ms: int, answer: bytes) -> bytes | None:
        """See Wire."""
        return answer[9:] if answer.startswith(b"INSERTED ") else None

    def is_cancelled(self, answer: bytes) -> bool:
        """See Wire."""
        return answer == b"DELETED"


class NatsWire(Wire):
    """See the module. A message is scheduled under its own subject, and a purge of the subject cancels it."""

    def greet(self, number: int) -> bytes:
        """See Wire."""
        options = b'{"verbose":false,"pedantic":false,"headers":true,"no_responders":true}'
        return b"CONNECT %b\r\nSUB _INBOX.small.%d 1\r\n" % (options, number)

    def send(self, connection: int, number: int, due_ms: int) -> bytes:
        """See Wire."""
        due = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(due_ms // 1000))
        head = f"NATS/1.0\r\nNats-Schedule: @at {due}\r\nNats-Schedule-Target: delivery.due\r\n\r\n".encode()
        return b"HPUB delivery.at.%d.%d _INBOX.small.%d %d %d\r\n%b%b\r\n" % (
            due_ms, number, connection, len(head), len(head) + BODY_BYTES, head, body_of(number),
        )  # fmt: skip

    def cancel(self, connection: int, token: bytes) -> bytes:
        """See Wire."""
        request = b'{"filter":"%b"}' % token
        return b"PUB $JS.API.STREAM.PURGE.delivery _INBOX.small.%d %d\r\n%b\r\n" % (
            connection, len(request), request,
        )  # fmt: skip

    def answer(self, data: bytearray) -> bytes | None:
        """See Wire. Skips what is no message: INFO, PING."""
        while (end := data.find(b"\r\n")) >= 0:
            words = bytes(data[:end]).split(b" ")
            if words[0] not in (b"MSG", b"HMSG"):
                del data[: end + 2]
                if words[0] == b"-ERR":
                    return b" ".join(words)
                continue
            last = end + 2 + int(words[-1])
            if len(data) < last + 2:
                return None
            answer = bytes(data[end + 2 : last])
            del data[: last + 2]
            return answer
        return None

    def token(self, number: int, due_ms: int, answer: bytes) -> bytes | None:
        """See Wire."""
        return (
            b"delivery.at.%d.%d" % (due_ms, number)
            if b'"seq"' in answer and b'"error"' not in answer
            else None
        )

    def is_cancelled(self, answer: bytes) -> bool:
        """See Wire."""
        return b'"purged": 1' in answer or b'"purged":1' in answer


class HttpWire(Wire):
    """See the module. JSON over connections that stay open."""

    def send(self, connection: int, number: int, due_ms: int) -> bytes:
        """See Wire."""
        body = b'{"body":"%b","at":%d}' % (body_of(number), due_ms)
        return (
            b"POST /v1/topics/%b/messages HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (TOPIC.encode(), len(body), body)
        )

    def cancel(self, connection: int, token: bytes) -> bytes:
        """See Wire."""
        return b"DELETE /v1/messages/%b HTTP/1.1\r\nhost: localhost\r\n\r\n" % token

    def answer(self, data: bytearray) -> bytes | None:
        """See Wire. Returns the status line and the body, joined by a space."""
        end = data.find(b"\r\n\r\n")
        if end < 0:
            return None
        head = bytes(data[:end])
        size_bytes = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
        last = end + 4 + size_bytes
        if len(data) < last:
            return None
        answer = head.split(b"\r\n")[0] + b" " + bytes(data[end + 4 : last])
        del data[:last]
        return answer

    def token(self, number: int, due_ms: int, answer: bytes) -> bytes | None:
        """See Wire."""
        if not answer.startswith(b"HTTP/1.1 201"):
            return None
        identity: str = json.loads(answer[answer.index(b"{") :])["id"]
        return identity.encode()

    def is_cancelled(self, answer: bytes) -> bool:
        """See Wire."""
        return answer.startswith(b"HTTP/1.1 200") and b'"cancelled"' in answer


WIRES: dict[str, Wire] = {
    "redis": RedisWire(), "beanstalkd": BeanstalkWire(), "nats": NatsWire(), "http": HttpWire(),
}  # fmt: skip


@dataclass
class Outcome:
    """The answers to a load: how many, for how long, the time of each, and the tokens of accepted messages."""

    seconds: float = 0.0
    failures: int = 0
    latencies_ms: list[float] = field(default_factory=list)
    tokens: list[bytes] = field(default_factory=list)


@dataclass
class _Link:
    """A connection, and its request in flight."""

    socket: socket.socket
    at: int
    data: bytearray = field(default_factory=bytearray)
    sent_s: float = 0.0
    number: int = -1
    due_ms: int = 0


class Load:
    """A number of connections to one broker, each with one request in flight."""

    def __init__(self, wire: Wire, address: str, connections: int = CONNECTIONS) -> None:
        host, _, port = address.rpartition(":")
        self._wire, self._selector = wire, selectors.DefaultSelector()
        self._links = []
        for at in range(connections):
            link = _Link(socket.create_connection((host, int(port)), timeout=BOUND_S), at)
            link.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link.socket.sendall(wire.greet(at))
            self._selector.register(link.socket, selectors.EVENT_READ, link)
            self._links.append(link)

    def close(self) -> None:
        """Close all connections."""
        self._selector.close()
        for link in self._links:
            link.socket.close()

    def send(self, seconds: float) -> Outcome:
        """Send messages that are due in an hour, for `seconds`. Waits for all answers."""
        outcome, end_s = Outcome(), time.perf_counter() + seconds
        first = time.monotonic_ns()  # no other load has these numbers

        def numbers() -> Iterator[int]:
            number = first
            while time.perf_counter() < end_s:
                yield number
                number += 1

        def request(link: _Link, number: int) -> bytes:
            link.number, link.due_ms = number, now_ms() + HOUR_MS
            return self._wire.send(link.at, number, link.due_ms)

        def end(link: _Link, answer: bytes) -> bool:
            token = self._wire.token(link.number, link.due_ms, answer)
            outcome.tokens += [] if token is None else [token]
            return token is not None

        self._run(outcome, numbers(), request, end)
        return outcome

    def cancel(self, tokens: list[bytes]) -> Outcome:
        """Cancel these messages, one a request."""
        outcome = Outcome()
        self._run(
            outcome,
            iter(range(len(tokens))),
            lambda link, number: self._wire.cancel(link.at, tokens[number]),
            lambda _, answer: self._wire.is_cancelled(answer),
        )
        return outcome

    def _run(
        self,
        outcome: Outcome,
        numbers: Iterator[int],
        request: Callable[[_Link, int], bytes],
        end: Callable[[_Link, bytes], bool],
    ) -> None:
        """Make one request for each number. `end` checks an answer: False counts as a failure."""
        begin_s = time.perf_counter()
        in_flight = 0

        def begin(link: _Link) -> int:
            number = next(numbers, None)
            if number is None:
                return 0
            link.sent_s = time.perf_counter()
            link.socket.sendall(request(link, number))
            return 1

        for link in self._links:
            in_flight += begin(link)
        while in_flight:
            ready = self._selector.select(BOUND_S)
            if not ready:
                raise TimeoutError("the broker does not answer")
            for key, _ in ready:
                link = key.data
                data = link.socket.recv(65_536)
                if not data:
                    raise ConnectionError("the broker closed the connection")
                link.data += data
                while (answer := self._wire.answer(link.data)) is not None:
                    outcome.latencies_ms.append((time.perf_counter() - link.sent_s) * 1e3)
                    outcome.failures += not end(link, answer)
                    in_flight += begin(link) - 1
        outcome.seconds = time.perf_counter() - begin_s


def _sample(outcome: Outcome, used_s: float) -> Sample:
    count = len(outcome.latencies_ms)
    p50, p99, _ = quantiles(np.array(outcome.latencies_ms))
    return Sample(count / outcome.seconds, p50, p99, used_s / count * 1e6, outcome.failures)


def single_sends(client: str, peer: Peer, bench: Bench) -> Sample:
    """See the module."""
    return _sends_and_cancels(client, peer, bench)[0]


def cancels(client: str, peer: Peer, bench: Bench) -> Sample:
    """See the module."""
    return _sends_and_cancels(client, peer, bench)[1]


def _sends_and_cancels(client: str, peer: Peer, bench: Bench) -> tuple[Sample, Sample]:
    address = peer.addresses[HTTP if client == "http" else DELIVERY]
    CLIENTS[client](address).close()  # creates the stream of NATS
    load = Load(WIRES[client], address)
    try:
        load.send(0.3)  # warm
        samples = []
        seconds = SECONDS_SMALL if bench.small else SECONDS
        cpu_s = peer.cpu_s()
        sent = load.send(seconds)
        samples.append(_sample(sent, peer.cpu_s() - cpu_s))
        cpu_s = peer.cpu_s()
        ended = load.cancel(sent.tokens[: CANCELS_SMALL if bench.small else CANCELS])
        samples.append(_sample(ended, peer.cpu_s() - cpu_s))
    finally:
        load.close()
    return samples[0], samples[1]


def pending_bytes(client: str, peer: Peer, bench: Bench) -> Sample:
    """Measure the memory of a pending message, in bytes: the growth of the process without mapped files."""
    queue = CLIENTS[client](peer.addresses[HTTP if client == "http" else DELIVERY])
    count = PENDING_SMALL if bench.small else PENDING
    first = time.monotonic_ns()

    def fill(begin: int, end: int) -> None:
        for at in range(begin, end, CALL_ROWS):
            due_ms = now_ms() + 24 * HOUR_MS
            queue.send([(due_ms, body_of(first + n)) for n in range(at, min(at + CALL_ROWS, end))])

    try:
        fill(0, count // 10)  # buffers and caches have their sizes then
        before_mb = peer.anonymous_mb()
        fill(count // 10, count)
        after_mb = peer.anonymous_mb()
    finally:
        queue.close()
    return Sample((after_mb - before_mb) * 2**20 / (count - count // 10))
