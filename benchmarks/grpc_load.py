"""A load generator for gRPC that costs less than any server: HTTP/2 frames by hand, requests made beforehand.

    connection   preface, SETTINGS with windows that are never full, PING and SETTINGS answered
    call         HEADERS (the same bytes each time, no dynamic table), DATA with END_STREAM
    response     DATA kept, HEADERS not decoded; END_STREAM ends the call, RST_STREAM and GOAWAY are failures

What a client does is a generator: it yields a request and is sent the response's bytes. So one that receives and
acknowledges is a loop of a few lines. Connections keep a fixed number of calls in flight, one generator each.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field

READ_BYTES = 512 * 1024
SOCKET_BYTES = 4 * 1024 * 1024
BOUND_S = 60.0
WINDOW = 2**31 - 1
TOP_UP_BYTES = 256 * 1024 * 1024
FRAME_BYTES_MAX = 16_384  # what a peer takes unless it says more
OWN_BYTES_MAX = 2**24 - 1  # and what we take

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, END_HEADERS, ACK = 1, 4, 1
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


@dataclass(slots=True)
class Request:
    """One call, encoded. `data`: with gRPC's five bytes before the message."""

    headers: bytes
    data: bytes


@dataclass(slots=True)
class Tally:
    """What programs have counted: messages that went through, and calls that failed."""

    messages: int = 0
    failures: int = 0


Program = Generator[Request, bytes, None]


@dataclass(slots=True)
class Outcome:
    """What a run did. `latency_ms` of calls, with one call in flight a connection."""

    calls: int = 0
    messages: int = 0
    failures: int = 0
    seconds: float = 0.0
    cpu_s: float = 0.0
    latency_ms: list[float] = field(default_factory=list)


def header_block(host: str, service: str, call: str, **more: str) -> bytes:
    """The headers of a call, each a literal that nobody has to remember."""
    fields = {
        ":method": "POST", ":scheme": "http", ":path": f"/{service}/{call}", ":authority": host,
        "te": "trailers", "content-type": "application/grpc", "user-agent": "grpc-java-netty/1.50.0", **more,
    }  # fmt: skip
    return b"".join(b"\x00" + _text(name) + _text(value) for name, value in fields.items())


def request(headers: bytes, message: bytes) -> Request:
    """A call with this message."""
    return Request(headers, b"\x00" + len(message).to_bytes(4, "big") + message)


def messages_of(body: bytes) -> Iterator[bytes]:
    """The messages of a response."""
    at = 0
    while at < len(body):
        size = int.from_bytes(body[at + 1 : at + 5], "big")
        yield body[at + 5 : at + 5 + size]
        at += 5 + size


class Link:
    """One connection. `advance` gives a stream's program its response, and sends what it asks for next."""

    def __init__(self, address: str, programs: list[Program]) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=BOUND_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
        self._held, self._next_stream, self._window, self._taken = b"", 1, 65_535, 0
        self._streams: dict[int, tuple[Program, list[bytes]]] = {}
        self._waiting: deque[tuple[Program, Request]] = deque()
        self._out = [PREFACE, _settings(), _frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", WINDOW - 65_535))]
        self.open, self.done, self.failures, self.sent_ns = 0, 0, 0, 0
        for program in programs:
            self._start(program, next(program))
        self._flush()

    def receive(self, *, over: bool) -> int:
        """Take in what has come; returns how many calls have ended. `over`: begin no others."""
        new = self.socket.recv(READ_BYTES)
        if not new:
            raise RuntimeError("the broker has closed a connection under load")
        data, at, ended = self._held + new if self._held else new, 0, 0
        while len(data) - at >= 9:
            size = int.from_bytes(data[at : at + 3], "big")
            if len(data) - at < 9 + size:
                break
            kind, flags = data[at + 3], data[at + 4]
            stream = int.from_bytes(data[at + 5 : at + 9], "big")
            ended += self._take(kind, flags, stream, data[at + 9 : at + 9 + size], over)
            at += 9 + size
        self._held = data[at:]
        self._flush()
        return ended

    def _take(self, kind: int, flags: int, stream: int, payload: bytes, over: bool) -> int:
        if kind == DATA:
            self._taken += len(payload)
            if stream in self._streams:
                self._streams[stream][1].append(payload)
        elif kind == WINDOW_UPDATE and stream == 0:
            self._window += int.from_bytes(payload, "big")
        elif kind == PING and not flags & ACK:
            self._out.append(_frame(PING, ACK, 0, payload))
        elif kind == SETTINGS and not flags & ACK:
            self._out.append(_frame(SETTINGS, ACK, 0, b""))
        elif kind == GOAWAY:
            raise RuntimeError(f"the broker asks a client under load to go: {payload[8:].decode()}")
        if kind == RST_STREAM or (kind in (DATA, HEADERS) and flags & END_STREAM):
            self.failures += kind == RST_STREAM
            return self._ended(stream, over)
        return 0

    def _ended(self, stream: int, over: bool) -> int:
        program, parts = self._streams.pop(stream)
        self.open -= 1
        self.done += 1
        request = program.send(b"".join(parts))  # whatever is over, the answer is counted
        if not over:
            self._start(program, request)
        return 1

    def _start(self, program: Program, request: Request) -> None:
        self.open += 1
        if self._waiting or len(request.data) > self._window:
            self._waiting.append((program, request))
            return
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        self._streams[stream] = (program, [])
        self._window -= len(request.data)
        self._out.append(_frame(HEADERS, END_HEADERS, stream, request.headers))
        for at in range(0, len(request.data), FRAME_BYTES_MAX):
            part = request.data[at : at + FRAME_BYTES_MAX]
            last = at + FRAME_BYTES_MAX >= len(request.data)
            self._out.append(_frame(DATA, END_STREAM if last else 0, stream, part))

    def _flush(self) -> None:
        while self._waiting and len(self._waiting[0][1].data) <= self._window:
            waiting, self._waiting = self._waiting, deque()
            self.open -= 1
            self._start(*waiting.popleft())
            self._waiting = waiting
        if self._taken > TOP_UP_BYTES:
            self._out.append(_frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", self._taken)))
            self._taken = 0
        if self._out:
            self.socket.sendall(b"".join(self._out))
            self.sent_ns = time.perf_counter_ns()
            self._out.clear()


def run(
    address: str,
    program: Callable[[int, Tally], Program],
    connections: int,
    in_flight: int,
    seconds: float,
    dial: Callable[[str, list[Program]], Link] = Link,
) -> Outcome:
    """Keep `in_flight` calls under way on each connection for about `seconds`, then take in what is left.

    `program`: what each of them does, by its number. `dial`: what a connection speaks.
    """
    tally, poll = Tally(), select.epoll()
    known: dict[int, Link] = {}
    begun, cpu = time.perf_counter(), time.process_time()
    for number in range(connections):
        link = dial(address, [program(number * in_flight + n, tally) for n in range(in_flight)])
        known[link.socket.fileno()] = link
        poll.register(link.socket.fileno(), select.EPOLLIN)
    outcome = Outcome()
    while any(link.open for link in known.values()):
        over = time.perf_counter() - begun >= seconds
        if over and outcome.seconds == 0.0:
            # What comes after is not counted: it is the end of the load, not the load.
            outcome.seconds, outcome.cpu_s = time.perf_counter() - begun, time.process_time() - cpu
            outcome.calls, outcome.messages = sum(link.done for link in known.values()), tally.messages
        ready = poll.poll(BOUND_S)
        if not ready:
            raise RuntimeError(f"no answer within {BOUND_S} s")
        for fileno, _ in ready:
            link = known[fileno]
            sent_ns = link.sent_ns
            if link.receive(over=over) and in_flight == 1 and not over:
                outcome.latency_ms.append((time.perf_counter_ns() - sent_ns) / 1e6)
    outcome.failures = tally.failures + sum(link.failures for link in known.values())
    for link in known.values():
        link.socket.close()
    poll.close()
    return outcome


def _text(text: str) -> bytes:
    """HPACK's string, as it is. Its length in seven bits, or in more bytes."""
    data = text.encode()
    if len(data) < 127:
        return bytes([len(data)]) + data
    rest, size = len(data) - 127, b"\x7f"
    while rest >= 128:
        size += bytes([rest % 128 + 128])
        rest //= 128
    return size + bytes([rest]) + data


def _settings() -> bytes:
    """No push, windows as wide as they go, frames too, and no table of headers."""
    pairs = ((1, 0), (2, 0), (4, WINDOW), (5, OWN_BYTES_MAX))
    return _frame(SETTINGS, 0, 0, b"".join(struct.pack(">HI", *pair) for pair in pairs))


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload
