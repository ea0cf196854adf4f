"""A load generator for RocketMQ's wire that costs less than any server: frames made beforehand, answers counted.

A ring of encoded requests is sent from, a slice of bytes for each read; of the answers only the lengths are followed
and the codes counted. So its CPU is mostly the kernel's. Connections keep a fixed number of requests in flight.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

READ_BYTES = 512 * 1024
SOCKET_BYTES = 4 * 1024 * 1024
BOUND_S = 60.0
OK_JSON = b'"code":0,'
OK_BINARY = b"\x00\x00\x00"  # code 0 and language JAVA, right behind the prefix


class Ring:
    """Encoded requests, to be sent round and round."""

    def __init__(self, frames: Sequence[bytes]) -> None:
        self.count = len(frames)
        self._data = b"".join([*frames, *frames])
        sizes = np.array([len(frame) for frame in [*frames, *frames]])
        self._begins = [0, *np.cumsum(sizes).tolist()]

    def take(self, at: int, count: int) -> bytes:
        """`count` frames from position `at` on; at most the whole ring."""
        return self._data[self._begins[at] : self._begins[at + count]]


@dataclass(slots=True)
class Connection:
    """One connection and how far it has got."""

    socket: socket.socket
    at: int
    held: bytes = b""
    sent_ns: int = 0
    requests: int = 0
    answers: int = 0


@dataclass(slots=True)
class Outcome:
    """What a run did. `latency_ms` only with one request in flight a connection."""

    answers: int = 0
    failures: int = 0
    seconds: float = 0.0
    cpu_s: float = 0.0
    latency_ms: list[float] = field(default_factory=list)


def run(
    address: str, ring: Ring, connections: int, in_flight: int, seconds: float, *, once: bool = False
) -> Outcome:
    """Keep `in_flight` requests under way on each connection for about `seconds`, then take in what is left.

    `once`: no request of the ring is sent twice; the load ends when all have been answered, if not before.
    """
    host, _, port = address.rpartition(":")
    poll = select.epoll()
    known: dict[int, Connection] = {}
    for number in range(connections):
        link = socket.create_connection((host, int(port)), timeout=BOUND_S)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
        known[link.fileno()] = Connection(link, number * ring.count // connections)
        poll.register(link.fileno(), select.EPOLLIN)
    outcome = Outcome()
    share = ring.count // connections
    assert in_flight <= share or not once, (
        f"a ring of {ring.count} requests is too short for {connections}x{in_flight}"
    )
    begun, cpu = time.perf_counter(), time.process_time()
    for connection in known.values():
        send(connection, ring, in_flight)
    open_requests = connections * in_flight
    while open_requests:
        over = time.perf_counter() - begun >= seconds
        for number, _ in poll.poll(BOUND_S):
            connection = known[number]
            done = receive(connection, outcome, in_flight == 1)
            open_requests -= done
            more = min(done, share - connection.requests) if once else done
            if more and not over:
                send(connection, ring, more)
                open_requests += more
        over = over or not open_requests
        if over and outcome.seconds == 0.0:
            # What comes after is not counted: it is the end of the load, not the load.
            outcome.seconds = time.perf_counter() - begun
            outcome.cpu_s = time.process_time() - cpu
            outcome.answers = sum(connection.answers for connection in known.values())
    for connection in known.values():
        connection.socket.close()
    poll.close()
    return outcome


def send(connection: Connection, ring: Ring, count: int) -> None:
    """The next `count` requests of the ring."""
    connection.socket.sendall(ring.take(connection.at, count))
    connection.at = (connection.at + count) % ring.count
    connection.requests += count
    connection.sent_ns = time.perf_counter_ns()


def receive(connection: Connection, outcome: Outcome, timed: bool) -> int:
    """Answers that have arrived whole."""
    new = connection.socket.recv(READ_BYTES)
    if not new:
        raise RuntimeError("the broker has closed a connection under load")
    data = connection.held + new if connection.held else new
    at, count, size = 0, 0, len(data)
    while size - at >= 4:
        end = at + 4 + int.from_bytes(data[at : at + 4], "big")
        if end > size:
            break
        if data[at + 4] == 0:
            ok = data.find(OK_JSON, at, at + 32) >= 0
        else:
            ok = data[at + 8 : at + 11] == OK_BINARY
        outcome.failures += not ok
        at, count = end, count + 1
    connection.held = data[at:]
    connection.answers += count
    if timed and count:
        outcome.latency_ms.append((time.perf_counter_ns() - connection.sent_ns) / 1e6)
    return count
