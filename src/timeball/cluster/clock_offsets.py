"""How far the clocks of other replicas are ahead of this leader's, from PING and PONG.

A PONG tells the other's wall clock while this one was between sending and receiving; the middle is assumed. What that
may be wrong by is half the round trip, so the quickest of the last answers counts.
"""

from __future__ import annotations

from collections import deque

SAMPLES = 16  # a leader sends 20 PINGs a second


class ClockOffsets:
    """Offsets by node. Written by one thread; `ms` may be read by others."""

    def __init__(self) -> None:
        self.ms: dict[str, float] = {}
        self._samples: dict[str, deque[tuple[int, float]]] = {}

    def add(self, node: str, peer_wall_ms: int, round_trip_ms: int, wall_ms: int) -> None:
        """Count an answer that came at `wall_ms` to a question sent a round trip before."""
        samples = self._samples.setdefault(node, deque(maxlen=SAMPLES))
        samples.append((round_trip_ms, peer_wall_ms - (wall_ms - round_trip_ms / 2)))
        self.ms[node] = min(samples)[1]
