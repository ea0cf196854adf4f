"""The loop behind `consume`: it pulls, hands one message out after the other, and acknowledges those it has handed out.

A message counts as dealt with when the next one is asked for. The loop has two verbs: `next` returns a message and
never waits; when it has none to return, `work` asks the broker for something, and blocks. So a program with threads and
one with an event loop share it, and differ in where they call `work`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from timeball import limits
from timeball.client.consumer import Consumer
from timeball.client.messages import Message
from timeball.clock import Clock
from timeball.instants import After, delay_ms

ACK_INTERVAL_MS = 1_000  # a loop acknowledges so often; a crash of the consumer repeats no more than this
WAIT_MS = 10 * limits.SECOND_MS

Pull = Callable[[int], list[Message]]  # how long to wait, in milliseconds


class ConsumeLoop:
    """One loop. `is_over` when nothing has come for `idle`, or `stop` was set; `end` must be called in any case."""

    def __init__(
        self,
        consumer: Consumer,
        clock: Clock,
        pull: Pull,
        *,
        lease: After,
        idle: After | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        self._consumer, self._clock, self._pull, self._stop = consumer, clock, pull, stop
        self._lease_ms = delay_ms(lease, "lease")
        self._idle_ms = None if idle is None else delay_ms(idle, "until_idle")
        self._wait_ms = WAIT_MS if self._idle_ms is None else min(WAIT_MS, self._idle_ms)
        if stop is not None:
            self._wait_ms = min(self._wait_ms, limits.SECOND_MS)
        # An acknowledgement must come before its lease ends.
        self._ack_ms = min(ACK_INTERVAL_MS, self._lease_ms // 4)
        self._waiting: deque[Message] = deque()
        self._done: list[Message] = []
        self._current: Message | None = None
        self._leased_ms = self._flushed_ms = self._last_ms = self._now_ms()
        self._has_pulled_some = True  # an idle time begins with the first pull
        self._is_over = False

    @property
    def is_over(self) -> bool:
        """Return whether the loop has come to its end."""
        return self._is_over or (self._stop is not None and self._stop.is_set())

    def next(self) -> Message | None:
        """Return the next message; None when `work` comes first, or the loop is over."""
        if self._current is not None:
            self._done.append(self._current)  # the next one is asked for: this one is dealt with
            self._current = None
        if self._waiting and not self.is_over and not self._must_answer(self._now_ms()):
            self._current = self._waiting.popleft()
        return self._current

    def work(self) -> None:
        """Pull, or acknowledge and renew leases while messages wait. Blocks."""
        if self._waiting:
            now_ms = self._now_ms()
            if now_ms - self._flushed_ms >= self._ack_ms:
                self._flush()
            if now_ms - self._leased_ms >= self._lease_ms // 2:
                self._renew()
            return
        self._flush()
        now_ms = self._now_ms()
        if self._has_pulled_some:
            self._last_ms = now_ms
        elif self._idle_ms is not None and now_ms - self._last_ms >= self._idle_ms:
            self._is_over = True
            return
        self._leased_ms = self._flushed_ms = now_ms
        self._waiting.extend(self._pull(self._wait_ms))
        self._has_pulled_some = bool(self._waiting)

    def end(self) -> None:
        """Acknowledge the messages dealt with; give back the last one, and, uncounted, those not come to. Blocks."""
        current, self._current = self._current, None
        waiting = list(self._waiting)
        self._waiting.clear()
        self._flush()
        if current is not None:
            self._consumer.change([current], 0, counts=True)
        self._consumer.give_back(waiting, None)

    def _must_answer(self, now_ms: int) -> bool:
        return now_ms - self._flushed_ms >= self._ack_ms or now_ms - self._leased_ms >= self._lease_ms // 2

    def _flush(self) -> None:
        if self._done:
            self._consumer.ack(self._done, None)
            self._done.clear()
        self._flushed_ms = self._now_ms()

    def _renew(self) -> None:
        """Lease what the loop has not come to for longer; what has gone to another member leaves the loop."""
        messages = list(self._waiting)
        still_leased = self._consumer.change(messages, self._lease_ms, counts=False)
        self._waiting = deque(one for one, is_leased in zip(messages, still_leased, strict=True) if is_leased)
        self._leased_ms = self._now_ms()

    def _now_ms(self) -> int:
        return self._clock.monotonic_ns() // 1_000_000
