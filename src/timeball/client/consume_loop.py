"""The loop behind `consume`: it pulls messages, hands them out one by one, and acknowledges the processed ones.

A message counts as processed when the program asks for the next one. `next` returns a message and never blocks. If it
returns None, the caller must call `work`, which calls the broker and blocks. `Timeball` and `AsyncTimeball` share this
class. They differ only in the thread in which they call `work`.
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

# Time between acknowledgements. After a crash of the consumer, the messages of at most this time are repeated.
ACK_INTERVAL_MS = 1_000
WAIT_MS = 10 * limits.SECOND_MS  # longest wait of a pull, unless `idle` is shorter

Pull = Callable[
    [int], list[Message]
]  # pulls messages and waits up to this many milliseconds for the first one


class ConsumeLoop:
    """A loop of `consume`. It is over when no message came for `idle`, or when `stop` is set.

    Callers must always call `end`.
    """

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
        self._ack_interval_ms = min(ACK_INTERVAL_MS, self._lease_ms // 4)
        self._queued: deque[Message] = deque()  # pulled, and not handed out yet
        self._processed: list[Message] = []  # processed, and not acknowledged yet
        self._current: Message | None = None  # the message that the program processes now
        # Monotonic times of the last renewal of leases, the last acknowledgement and the last message.
        self._renewed_ms = self._acknowledged_ms = self._last_message_ms = self._now_ms()
        self._has_pulled_messages = True  # the idle time begins with the first pull
        self._is_over = False

    @property
    def is_over(self) -> bool:
        """True after the loop has ended."""
        return self._is_over or (self._stop is not None and self._stop.is_set())

    def next(self) -> Message | None:
        """Take the next message. None if `work` must be called first, or if the loop is over."""
        if self._current is not None:
            # The program asks for the next message, so it has processed this one.
            self._processed.append(self._current)
            self._current = None
        if self._queued and not self.is_over and not self._is_call_due(self._now_ms()):
            self._current = self._queued.popleft()
        return self._current

    def work(self) -> None:
        """Make the calls that are due. Blocks.

        While messages are left to hand out, acknowledge processed ones and renew the leases of the others. Otherwise
        acknowledge, and pull the next messages.
        """
        if self._queued:
            now_ms = self._now_ms()
            if now_ms - self._acknowledged_ms >= self._ack_interval_ms:
                self._acknowledge()
            if now_ms - self._renewed_ms >= self._lease_ms // 2:
                self._renew()
            return
        self._acknowledge()
        now_ms = self._now_ms()
        if self._has_pulled_messages:
            self._last_message_ms = now_ms
        elif self._idle_ms is not None and now_ms - self._last_message_ms >= self._idle_ms:
            self._is_over = True
            return
        self._renewed_ms = self._acknowledged_ms = now_ms
        self._queued.extend(self._pull(self._wait_ms))
        self._has_pulled_messages = bool(self._queued)

    def end(self) -> None:
        """Acknowledge processed messages, and give back all others. Blocks.

        The message that was handed out last is given back as a failed attempt. For messages that were not handed out,
        no attempt is counted.
        """
        current, self._current = self._current, None
        queued = list(self._queued)
        self._queued.clear()
        self._acknowledge()
        if current is not None:
            self._consumer.change([current], 0, counts=True)
        self._consumer.give_back(queued, None)

    def _is_call_due(self, now_ms: int) -> bool:
        return (
            now_ms - self._acknowledged_ms >= self._ack_interval_ms
            or now_ms - self._renewed_ms >= self._lease_ms // 2
        )

    def _acknowledge(self) -> None:
        if self._processed:
            self._consumer.ack(self._processed, None)
            self._processed.clear()
        self._acknowledged_ms = self._now_ms()

    def _renew(self) -> None:
        """Renew the leases of messages that are not handed out yet. Drops messages whose lease has ended."""
        messages = list(self._queued)
        still_leased = self._consumer.change(messages, self._lease_ms, counts=False)
        self._queued = deque(
            message for message, is_leased in zip(messages, still_leased, strict=True) if is_leased
        )
        self._renewed_ms = self._now_ms()

    def _now_ms(self) -> int:
        return self._clock.monotonic_ns() // 1_000_000
