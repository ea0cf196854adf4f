"""The outcomes of a push subscription's deliveries since the start.

The push edge writes them. Metrics and the HTTP API read them.
"""

from __future__ import annotations

from typing import Literal

from timeball.io.clock import Clock, Durations

Outcome = Literal[
    "delivered",  # the receiver answered 2xx
    "client_error",  # 4xx
    "server_error",  # 5xx, or an unknown status
    "redirect",  # 3xx, which the broker does not follow
    "timeout",
    "unreachable",  # the name does not resolve, no connection, or no trusted certificate
    "broken",  # the connection ended, or the answer is not HTTP
    "forbidden_address",  # the name resolves to an address to which pushes are not allowed
    "failed",  # an internal error, which the log describes
]


class PushFigures:
    """The figures of one subscription. Belongs to the event loop."""

    def __init__(self, clock: Clock) -> None:
        self.outcomes: dict[Outcome, int] = {}
        self.durations = Durations(clock)  # of all requests, successful and failed
        self.late_acks = 0  # messages acknowledged after their lease had ended, so they are delivered again
        self.in_flight = 0  # requests under way
        self.failures = 0  # failed requests since the last success
        self.is_held = False
        self.last_failure = ""

    def add(self, outcome: Outcome, duration_ns: int) -> None:
        """Count a request that has ended."""
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
        self.durations.add(duration_ns)

    @property
    def delivered(self) -> int:
        """The number of requests that the receiver answered with 2xx."""
        return self.outcomes.get("delivered", 0)

    @property
    def failed(self) -> int:
        """The number of requests with any other outcome."""
        return sum(self.outcomes.values()) - self.delivered
