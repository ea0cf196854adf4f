"""The limits of a subscription: requests at once, a rate, and pauses after failures. No I/O.

in flight   a maximum of requests at once
rate        a token bucket that holds a tenth of a second's worth, so that a quiet hour is not followed by a burst
circuit     after FAILURES_MAX failures in a row, one request at a time, each after a pause that doubles, until one
            succeeds. A receiver that is down then costs few messages an attempt, and the others none
held        until a time that the receiver has requested (Retry-After)
"""

from __future__ import annotations

from timeball.io.clock import Clock

FAILURES_MAX = 10  # in a row, until the circuit opens
PAUSE_MS_MIN, PAUSE_MS_MAX = 1_000, 60_000
BURST_S = 0.1


class Pace:
    """The pace of one subscription. Belongs to the event loop. Durations use the monotonic clock."""

    def __init__(self, clock: Clock, in_flight_max: int, rate_per_s: float | None) -> None:
        self._clock, self._in_flight_max, self._rate_per_s = clock, in_flight_max, rate_per_s
        self._burst = max(1.0, (rate_per_s or 0) * BURST_S)
        self._tokens, self._filled_ms = self._burst, self._now_ms()
        self._held_until_ms = self._probe_at_ms = self._now_ms()
        self._pause_ms = 0
        self.failures = 0  # failures since the last success
        self.in_flight = 0

    @property
    def is_open(self) -> bool:
        """True while the circuit is open, so that only one request at a time tests the receiver."""
        return self.failures >= FAILURES_MAX

    def held_ms(self) -> int:
        """Compute the time in milliseconds for which no request may begin, regardless of the requests in flight."""
        return max(0, max(self._held_until_ms, self._probe_at_ms) - self._now_ms())

    def room(self) -> int:
        """Compute how many requests may begin now."""
        if self.held_ms():
            return 0
        room = (1 if self.is_open else self._in_flight_max) - self.in_flight
        if self._rate_per_s is not None:
            self._fill()
            room = min(room, int(self._tokens))
        return max(0, room)

    def wait_s(self) -> float | None:
        """Compute the time in seconds until `room` may grow. None means: when a request ends."""
        if held_ms := self.held_ms():
            return held_ms / 1_000
        if self.in_flight >= (1 if self.is_open else self._in_flight_max) or self._rate_per_s is None:
            return None
        self._fill()
        return max(0.001, (1 - self._tokens) / self._rate_per_s)

    def begin(self) -> None:
        """Count a request that begins."""
        self.in_flight += 1
        self._tokens -= 1

    def succeeded(self) -> None:
        """Count a request that succeeded. This closes the circuit."""
        self.in_flight -= 1
        self.failures = self._pause_ms = 0
        self._probe_at_ms = self._now_ms()

    def failed(self, hold_ms: int = 0) -> None:
        """Count a request that failed, and hold further ones for `hold_ms`, which the receiver may have requested."""
        now_ms = self._now_ms()
        self.in_flight -= 1
        self.failures += 1
        self._held_until_ms = max(self._held_until_ms, now_ms + hold_ms)
        # Failures during a pause are of requests that began before it, so they do not lengthen it.
        if self.is_open and now_ms >= self._probe_at_ms:
            self._pause_ms = min(max(PAUSE_MS_MIN, 2 * self._pause_ms), PAUSE_MS_MAX)
            self._probe_at_ms = now_ms + self._pause_ms

    def _fill(self) -> None:
        now_ms = self._now_ms()
        assert self._rate_per_s is not None
        self._tokens = min(self._burst, self._tokens + (now_ms - self._filled_ms) * self._rate_per_s / 1_000)
        self._filled_ms = now_ms

    def _now_ms(self) -> int:
        return self._clock.monotonic_ns() // 1_000_000
