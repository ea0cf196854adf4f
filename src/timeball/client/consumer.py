"""Receiving as a member of a group: its members share the messages out, and each message is leased to one of them.

A lease ends with the member's answer or with its time. A message that is not acknowledged by then is handed out again,
to any member, with one more attempt counted; after the group's last attempt it goes to its dead letters,
`%DLQ%<group>`. So a message is consumed at least once, even if a member or the broker dies.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Literal

import pyarrow as pa

from timeball import limits, wire
from timeball.client.calls import Calls
from timeball.client.dialing import check_process
from timeball.client.messages import Member, Message, view
from timeball.clock import Clock
from timeball.errors import RequestError
from timeball.instants import After, delay_ms

ACK_INTERVAL_MS = 1_000  # a loop acknowledges so often; a crash of the consumer repeats no more than this
Start = Literal["earliest", "latest"]


class Consumer:
    """The verbs of a group's member. Thread safe, and without state."""

    def __init__(self, calls: Calls, clock: Clock) -> None:
        self._calls = calls
        self._clock = clock

    def pull_batch(
        self, topic: str, group: str, rows: int, wait: After, start: Start, lease: After
    ) -> pa.RecordBatch:
        """Lease up to `rows` rows: READ_SCHEMA and a column `receipt`."""
        check_process()
        if not 0 < rows <= limits.PULL_ROWS_MAX:
            raise RequestError(f"max_messages={rows}: between 1 and {limits.PULL_ROWS_MAX}")
        wait_ms, lease_ms = min(delay_ms(wait), limits.PULL_WAIT_MS_MAX), delay_ms(lease)
        if not 1 <= lease_ms <= limits.INVISIBLE_MS_MAX:
            raise RequestError(
                f"lease={lease!r}: between 1 ms and {limits.INVISIBLE_MS_MAX // limits.HOUR_MS} h"
            )
        ticket = wire.Receive(
            topic=topic,
            group=group,
            rows=min(rows, limits.POP_ROWS_MAX),
            wait_ms=wait_ms,
            invisible_ms=lease_ms,
            latest=start == "latest",
        )
        return self._calls.rows(ticket, wait_ms)

    def pull(
        self, topic: str, group: str, rows: int, wait: After, start: Start, lease: After
    ) -> list[Message]:
        """Return the same as messages."""
        batch = self.pull_batch(topic, group, rows, wait, start, lease)
        return view(batch, self._clock.wall_ms(), Member(self._calls, topic, group))

    def ack(self, messages: Iterable[Message] | pa.RecordBatch, group: str | None) -> int:
        """Acknowledge; return how many of the leases had not ended before."""
        return sum(
            is_valid
            for member, receipts in self._receipts(messages, group)
            for is_valid in member.ack(receipts)
        )

    def consume(
        self,
        topic: str,
        group: str,
        rows: int,
        idle: After | None,
        stop: threading.Event | None,
        start: Start,
        lease: After,
    ) -> Iterator[Message]:
        """See Timeball.consume."""
        wait_ms = limits.SECOND_MS * 10
        idle_ms = None if idle is None else delay_ms(idle)
        if idle_ms is not None:
            wait_ms = min(wait_ms, idle_ms)
        if stop is not None:
            wait_ms = min(wait_ms, limits.SECOND_MS)
        lease_ms = delay_ms(lease)
        ack_ms = min(ACK_INTERVAL_MS, lease_ms // 4)  # an acknowledgement must come before its lease ends
        done: list[Message] = []
        waiting: deque[Message] = deque()
        last_ms = self._monotonic_ms()
        current: Message | None = None
        try:
            while stop is None or not stop.is_set():
                leased_ms = flushed_ms = self._monotonic_ms()
                waiting.extend(self.pull(topic, group, rows, wait_ms / 1000, start, lease))
                got = bool(waiting)
                while waiting and (stop is None or not stop.is_set()):
                    current = waiting.popleft()
                    yield current
                    done.append(current)  # the next one is asked for: this one is dealt with
                    current, now_ms = None, self._monotonic_ms()
                    if now_ms - flushed_ms >= ack_ms:
                        flushed_ms = self._flush(done)
                    if now_ms - leased_ms >= lease_ms // 2:
                        leased_ms = self._extend(waiting, lease_ms)
                self._flush(done)
                now_ms = self._monotonic_ms()
                if got:
                    last_ms = now_ms
                elif idle_ms is not None and now_ms - last_ms >= idle_ms:
                    return
        finally:
            self._flush(done)
            self._give_back(current, waiting)

    def _flush(self, done: list[Message]) -> int:
        if done:
            self.ack(done, None)
            done.clear()
        return self._monotonic_ms()

    def _extend(self, waiting: deque[Message], lease_ms: int) -> int:
        """Lease what the loop has not come to for longer; what has gone to another member leaves the loop."""
        messages = list(waiting)
        waiting.clear()
        if messages:
            member = messages[0].lease[0]
            receipts = member.change([message.lease[1] for message in messages], lease_ms, counts=False)
            for message, receipt in zip(messages, receipts, strict=True):
                if receipt is not None:
                    message.renewed(receipt)
                    waiting.append(message)
        return self._monotonic_ms()

    def _give_back(self, current: Message | None, waiting: Iterable[Message]) -> None:
        """Give back at once what a loop that is left was at, and, uncounted, what it had not come to."""
        for messages, counts in (([current] if current is not None else [], True), (list(waiting), False)):
            for member, receipts in self._receipts(messages, None):
                member.change(receipts, 0, counts=counts)

    def _receipts(
        self, messages: Iterable[Message] | pa.RecordBatch, group: str | None
    ) -> list[tuple[Member, list[str]]]:
        if isinstance(messages, pa.RecordBatch):
            if group is None or wire.RECEIPT not in messages.schema.names:
                raise RequestError(
                    "ack of a batch: give the batch that pull_batch has returned, and its group"
                )
            topics, texts = (messages.column(name).to_pylist() for name in ("topic", wire.RECEIPT))
            by_topic: dict[str, list[str]] = {}
            for topic, text in zip(topics, texts, strict=True):
                by_topic.setdefault(topic, []).append(text)
            return [(Member(self._calls, topic, group), found) for topic, found in by_topic.items()]
        by_member: dict[tuple[str, str], tuple[Member, list[str]]] = {}
        for message in messages:
            member, text = message.lease
            by_member.setdefault((member.topic, member.group), (member, []))[1].append(text)
        return list(by_member.values())

    def _monotonic_ms(self) -> int:
        return self._clock.monotonic_ns() // 1_000_000
