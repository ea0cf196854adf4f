"""The outcomes of a push subscription's deliveries since the start.

The push edge writes them. Metrics and the HTTP API read them.
"""

from __future__ import annotations

from typing import Literal

from timeball.io.clock import Clock, Durations

Outcome = Literal[
    "delivered",  # a 2xx
    "client_error",  # a 4xx
    "server_error",  # a 5xx, or a status that does not exist
    "redirect",  # a 3xx, which is not followed
    "timeout",
    "unreachable",  # no name, no connection, no trusted certificate
    "broken",  # the connection ended, or the answer is not HTTP
    "forbidden_address",  # the name leads to an address that may not be connected to
    "failed",  # an internal fault: the log says more
]


class PushFigures:
    """The figures of one subscription. Belongs to the event loop."""

    def __init__(self, clock: Clock) -> None:
        self.outcomes: dict[Outcome, int] = {}
        self.durations = Durations(clock)  # of each request with any outcome
        self.late_acks = 0  # acknowledged after the lease had ended, so these messages are delivered again
        self.in_flight = 0
        self.failures = 0  # failures since the last success
        self.is_held = False
        self.last_failure = ""

    def add(self, outcome: Outcome, ns: int) -> None:
        """Count a request that has ended."""
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
        self.durations.add(ns)

    @property
    def delivered(self) -> int:
        """The number of requests that were answered 2xx."""
        return self.outcomes.get("delivered", 0)

    @property
    def failed(self) -> int:
        """The number of requests with any other outcome."""
        return sum(self.outcomes.values()) - self.delivered
