"""Receiving as a member of a consumer group: lease messages, answer for them, and the loop behind `consume`.

Each message is leased to one member of the group. A lease ends with the member's answer or after its time. A message
that is not acknowledged by then is delivered again, to any member, with one more attempt counted. After the group's
last attempt it goes to the dead letters, `%DLQ%<group>`. So a message is consumed at least once, even if a member or
the broker dies.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

import pyarrow as pa

from timeball.client.calls import Calls, OpenRead
from timeball.client.dialing import check_process
from timeball.client.messages import Leased, Member, Message, view
from timeball.io.clock import Clock
from timeball.model import limits, wire
from timeball.model.errors import RequestError
from timeball.model.rules import valid
from timeball.model.time_parsing import After, delay_ms

# ---- starts and filters ---------------------------------------------------------------------------------------

Start = Literal["earliest", "latest"]
_STARTS = ("earliest", "latest")


def check_start(start: Start) -> None:
    """Raise RequestError for an unknown start."""
    if start not in _STARTS:
        raise RequestError(f"start={start!r} is not known; {valid(str(start), _STARTS)}")


class MessageFilter(NamedTuple):
    """A filter of messages by tag or by SQL. Two empty texts select all messages."""

    tag: str = ""
    sql: str = ""


NO_FILTER = MessageFilter()


def make_filter(tag: str | None, sql: str | None) -> MessageFilter:
    """Make a filter from the arguments of a receive. Raises RequestError if both are given."""
    if tag and sql:
        raise RequestError("filter by tag= or by sql=, one of them")
    return MessageFilter(tag or "", sql or "")


# ---- receive and answer ---------------------------------------------------------------------------------------


class Consumer:
    """Receives messages as a member of any group, and answers for them. Thread safe and stateless."""

    def __init__(self, calls: Calls, clock: Clock) -> None:
        self._calls = calls
        self._clock = clock

    def pull_batch(
        self,
        topic: str,
        group: str,
        rows: int,
        wait: After,
        start: Start,
        lease: After,
        message_filter: MessageFilter = NO_FILTER,
        open_read: OpenRead | None = None,
    ) -> pa.RecordBatch:
        """Lease up to `rows` messages. Returns them in READ_SCHEMA with a column `receipt`.

        Raises RequestError for an argument out of range. Timeball.pull documents the arguments.
        """
        check_process()
        check_start(start)
        if not 0 < rows <= limits.PULL_ROWS_MAX:
            raise RequestError(f"max_messages={rows}: between 1 and {limits.PULL_ROWS_MAX}")
        wait_ms, lease_ms = min(delay_ms(wait, "wait"), limits.PULL_WAIT_MS_MAX), delay_ms(lease, "lease")
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
            tag=message_filter.tag,
            sql=message_filter.sql,
        )
        return self._calls.rows(ticket, wait_ms, open_read)

    def pull(
        self,
        topic: str,
        group: str,
        rows: int,
        wait: After,
        start: Start,
        lease: After,
        message_filter: MessageFilter = NO_FILTER,
        open_read: OpenRead | None = None,
    ) -> list[Message]:
        """Lease up to `rows` messages, as `pull_batch` does."""
        batch = self.pull_batch(topic, group, rows, wait, start, lease, message_filter, open_read)
        return view(batch, self._clock.wall_ms(), Member(self._calls, topic, group))

    def ack(self, messages: Iterable[Leased] | pa.RecordBatch, group: str | None) -> int:
        """Acknowledge messages. Returns the number of messages whose lease had not ended."""
        return sum(
            is_valid
            for member, receipts in self._receipts(messages, group)
            for is_valid in member.ack(receipts)
        )

    def give_back(self, messages: Iterable[Leased] | pa.RecordBatch, group: str | None) -> None:
        """Give back messages that the program has not seen.

        Other members get them at once, and no attempt is counted.
        """
        for member, receipts in self._receipts(messages, group):
            member.change(receipts, 0, counts=False)

    def change(self, messages: Iterable[Leased], lease_ms: int, *, counts: bool) -> list[bool]:
        """Make the leases of these messages end `lease_ms` from now.

        Returns for each message whether it is still leased. `counts`: count the lease as an attempt.
        """
        messages = list(messages)
        by_member: dict[tuple[str, str], list[Leased]] = {}
        for message in messages:
            member, _ = message.lease
            by_member.setdefault((member.topic, member.group), []).append(message)
        for member_messages in by_member.values():
            member, _ = member_messages[0].lease
            receipts = member.change(
                [message.lease[1] for message in member_messages], lease_ms, counts=counts
            )
            for message, receipt in zip(member_messages, receipts, strict=True):
                message.update_receipt(receipt)
        return [message.is_leased for message in messages]

    def _receipts(
        self, messages: Iterable[Leased] | pa.RecordBatch, group: str | None
    ) -> list[tuple[Member, list[str]]]:
        """Group the receipts of these messages by topic and group. A batch needs its `group`."""
        if isinstance(messages, pa.RecordBatch):
            if group is None or wire.RECEIPT not in messages.schema.names:
                raise RequestError(
                    "ack of a batch: give the batch that pull_batch has returned, and its group"
                )
            topics, receipts = (messages.column(name).to_pylist() for name in ("topic", wire.RECEIPT))
            by_topic: dict[str, list[str]] = {}
            for topic, receipt in zip(topics, receipts, strict=True):
                by_topic.setdefault(topic, []).append(receipt)
            return [
                (Member(self._calls, topic, group), topic_receipts)
                for topic, topic_receipts in by_topic.items()
            ]
        by_member: dict[tuple[str, str], tuple[Member, list[str]]] = {}
        for message in messages:
            member, receipt = message.lease
            by_member.setdefault((member.topic, member.group), (member, []))[1].append(receipt)
        return list(by_member.values())


# ---- the loop behind `consume` --------------------------------------------------------------------------------
# A message counts as processed when the program asks for the next one. `next` returns a message and never blocks. If it
# returns None, the caller must call `work`, which calls the broker and blocks. `Timeball` and `AsyncTimeball` share
# `ConsumeLoop`. They differ only in the thread in which they call `work`.

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
