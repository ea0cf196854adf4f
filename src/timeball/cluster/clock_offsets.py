"""Offsets of the other replicas' clocks from this leader's clock, measured with PING and PONG.

A PONG contains the other node's wall clock at an unknown time between sending and receiving. The middle is assumed,
so the error is at most half the round trip. The answer with the shortest round trip of the last `SAMPLES` counts.
"""

from __future__ import annotations

from collections import deque

SAMPLES = 16  # a leader sends 20 PINGs a second


class ClockOffsets:
    """Offsets in ms by node, positive when the node's clock is ahead.

    Belongs to one thread, but any thread may read `ms`.
    """

    def __init__(self) -> None:
        self.ms: dict[str, float] = {}
        self._samples: dict[str, deque[tuple[int, float]]] = {}

    def add(self, node: str, peer_wall_ms: int, round_trip_ms: int, wall_ms: int) -> None:
        """Add an answer that arrived at `wall_ms`, to a PING sent `round_trip_ms` earlier."""
        samples = self._samples.setdefault(node, deque(maxlen=SAMPLES))
        samples.append((round_trip_ms, peer_wall_ms - (wall_ms - round_trip_ms / 2)))
        self.ms[node] = min(samples)[1]
