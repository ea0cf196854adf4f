"""The loop behind `consume`: it pulls messages, hands them out one by one, and acknowledges those it has handed out.

A message counts as processed when the program asks for the next one. The loop has two methods. `next` returns a message
and never blocks. When it has none to return, `work` calls the broker, and blocks. So programs with threads and programs
with an event loop share this class, and differ only in where they call `work`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from timeball.client.consumer import Consumer
from timeball.client.messages import Message
from timeball.io.clock import Clock
from timeball.model import limits
from timeball.model.time_parsing import After, delay_ms

# between acknowledgements: a crash of the consumer repeats at most this time's messages
ACK_INTERVAL_MS = 1_000
WAIT_MS = 10 * limits.SECOND_MS  # of one pull, unless `idle` is shorter

Pull = Callable[[int], list[Message]]  # its argument is the time to wait, in milliseconds


class ConsumeLoop:
    """One loop. It is over when no message came for `idle`, or `stop` was set. Callers must always call `end`."""

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
            # A short wait, so that the loop notices `stop` within a second.
            self._wait_ms = min(self._wait_ms, limits.SECOND_MS)
        # An acknowledgement must reach the broker before the lease ends.
        self._ack_ms = min(ACK_INTERVAL_MS, self._lease_ms // 4)
        self._waiting: deque[Message] = deque()  # pulled, and not handed out yet
        self._done: list[Message] = []  # processed, and not acknowledged yet
        self._current: Message | None = None  # handed out last, until the next one is asked for
        # The times of the last renewal of leases, of the last acknowledgement, and of the last message.
        self._leased_ms = self._flushed_ms = self._last_ms = self._now_ms()
        self._has_pulled_some = True  # the idle time begins with the first pull
        self._is_over = False

    @property
    def is_over(self) -> bool:
        """True when the loop has ended."""
        return self._is_over or (self._stop is not None and self._stop.is_set())

    def next(self) -> Message | None:
        """Take the next message. None when `work` must be called first, or when the loop is over."""
        if self._current is not None:
            # the program asks for the next message, so it has processed this one
            self._done.append(self._current)
            self._current = None
        if self._waiting and not self.is_over and not self._must_answer(self._now_ms()):
            self._current = self._waiting.popleft()
        return self._current

    def work(self) -> None:
        """Pull messages; or, while messages are left to hand out, acknowledge and renew leases. Blocks."""
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
        """Acknowledge processed messages, and give back all others. Blocks.

        The message that was handed out last is given back as a failed attempt. For messages that were not handed out,
        no attempt is counted.
        """
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
        """Renew the leases of messages not handed out yet, and drop those that went to another member."""
        messages = list(self._waiting)
        still_leased = self._consumer.change(messages, self._lease_ms, counts=False)
        self._waiting = deque(one for one, is_leased in zip(messages, still_leased, strict=True) if is_leased)
        self._leased_ms = self._now_ms()

    def _now_ms(self) -> int:
        return self._clock.monotonic_ns() // 1_000_000
