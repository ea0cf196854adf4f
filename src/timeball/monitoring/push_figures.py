"""How the deliveries of a push subscription have gone since the start.

The edge that delivers writes them; metrics and people read them.
"""

from __future__ import annotations

from typing import Literal

from timeball.clock import Clock, Durations

Outcome = Literal[
    "delivered",  # a 2xx
    "client_error",  # a 4xx
    "server_error",  # a 5xx, or a status that there is not
    "redirect",  # a 3xx: not followed
    "timeout",
    "unreachable",  # no name, no connection, no trusted certificate
    "broken",  # the connection ended, or what came is no HTTP
    "forbidden_address",  # its name leads to an address that may not be connected to
    "failed",  # a fault of ours: the log says more
]


class PushFigures:
    """The figures of one subscription. Belongs to the event loop."""

    def __init__(self, clock: Clock) -> None:
        self.outcomes: dict[Outcome, int] = {}
        self.durations = Durations(clock)  # of each request, however it ended
        self.late_acks = 0  # granted after the lease had ended: these messages come again
        self.in_flight = 0
        self.failures = 0  # in a row
        self.is_held = False
        self.last_failure = ""

    def add(self, outcome: Outcome, ns: int) -> None:
        """Count a request that has ended."""
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
        self.durations.add(ns)

    @property
    def delivered(self) -> int:
        """Return how many requests were answered 2xx."""
        return self.outcomes.get("delivered", 0)

    @property
    def failed(self) -> int:
        """Return how many requests ended in any other way."""
        return sum(self.outcomes.values()) - self.delivered
