"""The work that `designs` gives to a broker: messages for instants through Flight, or of levels over RocketMQ's wire.

Both answer the same four calls. Each scheduled message has a body of 128 bytes and an id; nothing else differs but what
a level cannot say: its instant is the one of its admission and a fixed time more.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import numpy as np

from benchmarks.designs_compared import HOUR_MS, LEVELS_MS, Design
from benchmarks.harness import Server, messages, now_ms, send_scheduled
from benchmarks.remoting import send_request
from benchmarks.wire_load import BOUND_S, Connection, Outcome, Ring, receive, send
from timeball import Timeball
from timeball.edges.remoting.codec.frame import JSON
from timeball.model.message import Int64Array

TICK_S = 0.01
CONNECTIONS, IN_FLIGHT = 8, 512
RING = 2_048
FAR_LEVELS_MS = [ms for ms in LEVELS_MS if ms >= HOUR_MS // 6]


class Work(Protocol):
    """Returns once all is acknowledged."""

    def far(self, rows: int) -> None:
        """Messages that do not fall due while anything is measured: at random within a day, but not the first hour."""

    def soon(self, rows: int, due_ms: Int64Array, delay_ms: int) -> None:
        """Scheduled messages for these instants; or of the level that waits `delay_ms`."""

    def mixed(self, rows: int, delays_ms: tuple[int, int]) -> None:
        """A few scheduled messages, due after a random time between these; or of random levels between them."""


class Instants:
    """Through Flight, in batches as `burst` sends them."""

    def __init__(self, ball: Timeball) -> None:
        self._ball, self._rng, self._number = ball, np.random.default_rng(17), 0

    def far(self, rows: int) -> None:
        """See Work."""
        send_scheduled(self._ball, now_ms() + self._rng.integers(HOUR_MS, 24 * HOUR_MS, rows))

    def soon(self, rows: int, due_ms: Int64Array, delay_ms: int) -> None:
        """See Work."""
        send_scheduled(self._ball, due_ms)

    def mixed(self, rows: int, delays_ms: tuple[int, int]) -> None:
        """See Work."""
        self._number += 1
        due = now_ms() + self._rng.integers(*delays_ms, rows)
        self._ball.send_many(messages(rows, due, seed=self._number))


class Levels:
    """Over RocketMQ's wire: single messages with a DELAY, many in flight."""

    def __init__(self, server: Server) -> None:
        self._address = server.remoting
        self._outcome = Outcome()
        self._rings: dict[tuple[int, int], Ring] = {}

    def far(self, rows: int) -> None:
        """See Work."""
        self._send(rows, (FAR_LEVELS_MS[0], FAR_LEVELS_MS[-1]))

    def soon(self, rows: int, due_ms: Int64Array, delay_ms: int) -> None:
        """See Work."""
        self._send(rows, (delay_ms, delay_ms))

    def mixed(self, rows: int, delays_ms: tuple[int, int]) -> None:
        """See Work."""
        self._send(rows, delays_ms)

    def _ring(self, delays_ms: tuple[int, int]) -> Ring:
        """Requests of the levels within these bounds, at random."""
        if delays_ms not in self._rings:
            levels = [n + 1 for n, ms in enumerate(LEVELS_MS) if delays_ms[0] <= ms <= delays_ms[1]]
            chosen = np.random.default_rng(13).choice(levels, RING).tolist()
            frames = [send_request(n, JSON, DELAY=str(level)) for n, level in enumerate(chosen)]
            self._rings[delays_ms] = Ring(frames)
        return self._rings[delays_ms]

    def _send(self, rows: int, delays_ms: tuple[int, int]) -> None:
        """Each connection in turn: the answers of its last requests, then the next ones."""
        ring, left, under_way = self._ring(delays_ms), rows, deque[tuple[Connection, int]]()
        host, _, port = self._address.rpartition(":")
        idle = [
            Connection(socket.create_connection((host, int(port)), timeout=BOUND_S), at * RING // CONNECTIONS)
            for at in range(min(CONNECTIONS, -(-rows // IN_FLIGHT)))
        ]
        links = list(idle)
        while left or under_way:
            if left and idle:
                count = min(left, IN_FLIGHT)
                send(idle[-1], ring, count)
                under_way.append((idle.pop(), count))
                left -= count
                continue
            connection, awaited = under_way.popleft()
            while awaited:
                awaited -= receive(connection, self._outcome, timed=False)
            idle.append(connection)
        for connection in links:
            connection.socket.close()
        if self._outcome.failures:
            raise RuntimeError(f"{self._outcome.failures} sends of levels were refused")


def work_for(design: Design, server: Server, ball: Timeball) -> Work:
    """How this column's scheduled messages come in."""
    return Levels(server) if design.by_level else Instants(ball)


def steadily(rows: int, rows_per_s: int, give: Callable[[int], None]) -> None:
    """`give` a few rows every 10 ms; a tick that comes late gives those it is behind."""
    begun, given = time.monotonic(), 0
    while given < rows:
        wanted = min(rows, int((time.monotonic() - begun) * rows_per_s))
        if wanted > given:
            give(wanted - given)
            given = wanted
        time.sleep(TICK_S)
