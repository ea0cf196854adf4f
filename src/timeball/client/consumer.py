"""Receiving as a member of a consumer group: lease messages, answer for them, and the loop behind `consume`.

Each message is leased to one member of the group. A lease ends with the member's answer or after its time. A message
that is not acknowledged by then is delivered again, to any member, with one more attempt counted. After the group's
last attempt it goes to the dead letters, `%DLQ%<group>`. So a message is consumed at least once, even if a member or
the broker dies.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple, Protocol

from timeball.client.attempts import OpenRead
from timeball.client.http_calls import HttpCalls, MessageStream
from timeball.client.http_codec import LeaseRequest, Received
from timeball.client.messages import Leased, Member, Message
from timeball.client.network import driven
from timeball.io.clock import Clock
from timeball.model import limits
from timeball.model.errors import RequestError
from timeball.model.time_parsing import After, delay_ms
from timeball.model.values import valid

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


def build_request(
    topic: str,
    group: str,
    rows: int,
    wait: After,
    start: Start,
    lease: After,
    message_filter: MessageFilter = NO_FILTER,
) -> LeaseRequest:
    """Build the request of a receive from the arguments of `Timeball.pull`.

    Raises RequestError or InvalidDelay for a wrong argument.
    """
    check_start(start)
    if not 0 < rows <= limits.PULL_ROWS_MAX:
        raise RequestError(f"max_messages={rows}: between 1 and {limits.PULL_ROWS_MAX}")
    wait_ms, lease_ms = min(delay_ms(wait, "wait"), limits.PULL_WAIT_MS_MAX), delay_ms(lease, "lease")
    if not 1 <= lease_ms <= limits.INVISIBLE_MS_MAX:
        raise RequestError(f"lease={lease!r}: between 1 ms and {limits.INVISIBLE_MS_MAX // limits.HOUR_MS} h")
    return LeaseRequest(
        topic,
        group,
        min(rows, limits.POP_ROWS_MAX),
        wait_ms,
        lease_ms,
        start,
        message_filter.tag,
        message_filter.sql,
    )


# ---- receive and answer ---------------------------------------------------------------------------------------


class Consumer:
    """Receives messages as a member of any group, and answers for them. Thread safe and stateless."""

    def __init__(self, calls: HttpCalls, clock: Clock, message_class: type[Leased] = Message) -> None:
        """Receive messages as objects of `message_class`, which is AsyncMessage for an AsyncTimeball."""
        self._calls, self.network, self.timeout_ms = calls, calls.network, calls.timeout_ms
        self._clock, self._message_class = clock, message_class

    async def pull_async(
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
        """Lease up to `rows` messages. Timeball.pull documents the arguments. `open_read`: cancels the call."""
        self._calls.check()
        request = build_request(topic, group, rows, wait, start, lease, message_filter)
        return self._view(request, await self._calls.receive(request, open_read))

    pull = driven(pull_async)

    def prepare_feed(
        self,
        topic: str,
        group: str,
        rows: int,
        start: Start,
        lease: After,
        message_filter: MessageFilter = NO_FILTER,
        open_read: OpenRead | None = None,
    ) -> Feed:
        """Prepare the stream of a `consume` loop, which connects at its first read.

        Its credit is the number of messages that the loop may hold without an acknowledgement: `rows`, but at most
        CREDIT_ROWS_MAX. Raises RequestError for a wrong argument, or if the client is closed.
        """
        self._calls.check()
        request = build_request(topic, group, rows, 0, start, lease, message_filter)
        credit = min(rows, limits.CREDIT_ROWS_MAX)
        return Feed(self, request, self._calls.open_stream(request, credit, open_read), credit)

    def _view(self, request: LeaseRequest, rows: Iterable[Received]) -> list[Any]:
        """Wrap received rows as messages that this client has leased."""
        member, now_ms = Member(self._calls, request.topic, request.group), self._clock.wall_ms()
        return [self._message_class(row, now_ms, member) for row in rows]

    async def ack_async(self, messages: Iterable[Leased]) -> int:
        """Acknowledge messages. Returns the number of messages whose lease had not ended."""
        acknowledged = 0
        for member, receipts in _receipts_by_member(messages):
            acknowledged += sum(receipt is not None for receipt in await member.ack(receipts))
        return acknowledged

    ack = driven(ack_async)

    async def give_back_async(self, messages: Iterable[Leased]) -> None:
        """Give back messages that the program has not seen.

        Other members get them at once, and no attempt is counted.
        """
        for member, receipts in _receipts_by_member(messages):
            await member.extend(receipts, 0, counts=False)

    give_back = driven(give_back_async)

    async def change_async(self, messages: Iterable[Leased], lease_ms: int, *, counts: bool) -> list[bool]:
        """Make the leases of these messages end `lease_ms` from now, and store their new receipts.

        Returns for each message, in order, whether it is still leased. `counts`: count the lease as an attempt.
        """
        messages = list(messages)
        by_member: dict[tuple[str, str], list[Leased]] = {}
        for message in messages:
            member, _ = message.lease
            by_member.setdefault((member.topic, member.group), []).append(message)
        for member_messages in by_member.values():
            member, _ = member_messages[0].lease
            old_receipts = [receipt for _, receipt in (message.lease for message in member_messages)]
            new_receipts = await member.extend(old_receipts, lease_ms, counts=counts)
            for message, receipt in zip(member_messages, new_receipts, strict=True):
                message.update_receipt(receipt)
        return [message.is_leased for message in messages]

    change = driven(change_async)


def _receipts_by_member(messages: Iterable[Leased]) -> list[tuple[Member, list[str]]]:
    """Collect the receipts of these messages, with one member for each topic and group."""
    by_member: dict[tuple[str, str], tuple[Member, list[str]]] = {}
    for message in messages:
        member, receipt = message.lease
        by_member.setdefault((member.topic, member.group), (member, []))[1].append(receipt)
    return list(by_member.values())


class Feed:
    """The messages of a `consume` loop, as a stream sends them while its credit lasts."""

    def __init__(self, consumer: Consumer, request: LeaseRequest, stream: MessageStream, credit: int) -> None:
        self._consumer, self._request, self._stream = consumer, request, stream
        # The number of processed messages after which the loop acknowledges, so that the stream gets credit.
        self.ack_rows = max(1, credit // 2)

    async def read(self, wait_ms: int) -> list[Message]:
        """Wait up to `wait_ms` for messages, and return all that have come."""
        return self._consumer._view(self._request, await self._stream.read_async(wait_ms))

    async def close(self) -> list[Message]:
        """End the stream. Returns the messages that came after the last read."""
        return self._consumer._view(self._request, await self._stream.close_async())


# ---- the loop behind `consume` --------------------------------------------------------------------------------
# A message counts as processed when the program asks for the next one. `next` returns a message and never waits. If it
# returns None, the caller must run `work`, which calls the broker and waits.
#
# A stream needs acknowledgements for its credit, but not before each read. While messages keep coming, the loop
# acknowledges when half of the credit is used up. When none has come for ACK_PAUSE_MS, it acknowledges at once.

# Time between acknowledgements. After a crash of the consumer, the messages of at most this time are repeated.
ACK_INTERVAL_MS = 1_000
ACK_PAUSE_MS = 20
WAIT_MS = 10 * limits.SECOND_MS  # longest wait for messages, unless `idle` is shorter


class MessageFeed(Protocol):
    """The part of a Feed that a loop uses."""

    @property
    def ack_rows(self) -> int: ...
    async def read(self, wait_ms: int) -> list[Message]: ...
    async def close(self) -> list[Message]: ...


class ConsumeLoop:
    """A loop of `consume`. It is over when no message has come for `idle`, or when `stop` is set.

    Callers must always run `end`. The loop and its messages belong to one process: in a forked child it is over.
    """

    def __init__(
        self,
        consumer: Consumer,
        clock: Clock,
        feed: MessageFeed,
        *,
        lease: After,
        idle: After | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        self._consumer, self._clock, self._feed, self._stop = consumer, clock, feed, stop
        self._lease_ms = delay_ms(lease, "lease")
        self._idle_ms = None if idle is None else delay_ms(idle, "until_idle")
        self._wait_ms = WAIT_MS if self._idle_ms is None else min(WAIT_MS, self._idle_ms)
        if stop is not None:
            # A short wait, so that the loop notices `stop` within a second.
            self._wait_ms = min(self._wait_ms, limits.SECOND_MS)
        # Only an empty read of a stream shows that no lease is running, so one must end long before a lease does.
        self._wait_ms = min(self._wait_ms, max(ACK_PAUSE_MS, self._lease_ms // 4))
        # An acknowledgement must reach the broker before the lease ends.
        self._ack_interval_ms = min(ACK_INTERVAL_MS, self._lease_ms // 4)
        self._queued: deque[Message] = deque()  # received, and not handed out yet
        self._processed: list[Message] = []  # processed, and not acknowledged yet
        self._current: Message | None = None  # the message that the program processes now
        # Monotonic times. No lease of a queued message began or was renewed before `_renewed_ms`.
        self._renewed_ms = self._acknowledged_ms = self._last_message_ms = self._now_ms()
        # Whether the last read brought messages. True at first, so that the idle time begins with the first read.
        self._has_read_messages = True
        self._is_over, self._pid = False, os.getpid()

    @property
    def is_over(self) -> bool:
        """True after the loop has ended."""
        is_stopped = self._stop is not None and self._stop.is_set()
        return self._is_over or is_stopped or self._pid != os.getpid()

    def next(self) -> Message | None:
        """Take the next message. None if `work` must be called first, or if the loop is over."""
        if self._current is not None:
            # The program asks for the next message, so it has processed this one.
            self._processed.append(self._current)
            self._current = None
        if self._queued and not self.is_over and not self._is_call_due(self._now_ms()):
            self._current = self._queued.popleft()
        return self._current

    async def work(self) -> None:
        """Make the calls to the broker that are due.

        While received messages are left, acknowledge the processed ones and renew the leases of the others, each when
        its time has come. Otherwise acknowledge, and wait for the next messages. Raises the errors of these calls.
        """
        if self._queued:
            now_ms = self._now_ms()
            if self._is_acknowledgement_due(now_ms):
                await self._acknowledge()
                # The broker ends a stream that is not read for long.
                self._queued.extend(await self._feed.read(0))
            if now_ms - self._renewed_ms >= self._lease_ms // 2:
                await self._renew()
            return
        now_ms = self._now_ms()
        if not self._has_read_messages or self._is_acknowledgement_due(now_ms):
            await self._acknowledge()
            now_ms = self._now_ms()
        if self._has_read_messages:
            self._last_message_ms = now_ms
        elif self._idle_ms is not None and now_ms - self._last_message_ms >= self._idle_ms:
            self._is_over = True
            return
        self._queued.extend(await self._feed.read(ACK_PAUSE_MS if self._processed else self._wait_ms))
        self._has_read_messages = bool(self._queued)
        if not self._queued:
            # Messages of a stream may have waited for this read, with their leases running. After an empty read the
            # leases of the next ones begin later.
            self._renewed_ms = self._now_ms()

    async def end(self) -> None:
        """Acknowledge processed messages, and give back all others.

        The message that was handed out last is given back as a failed attempt. For messages that were not handed out,
        no attempt is counted.
        """
        if self._pid != os.getpid():
            return  # only the process that began the loop answers for its messages
        current, self._current = self._current, None
        unread = [*self._queued, *await self._feed.close()]
        self._queued.clear()
        await self._acknowledge()
        if current is not None:
            await self._consumer.change_async([current], 0, counts=True)
        await self._consumer.give_back_async(unread)

    def _is_acknowledgement_due(self, now_ms: int) -> bool:
        is_interval_over = now_ms - self._acknowledged_ms >= self._ack_interval_ms
        return is_interval_over or len(self._processed) >= self._feed.ack_rows

    def _is_call_due(self, now_ms: int) -> bool:
        return self._is_acknowledgement_due(now_ms) or now_ms - self._renewed_ms >= self._lease_ms // 2

    async def _acknowledge(self) -> None:
        """Acknowledge the processed messages, and begin the interval until the next time."""
        if self._processed:
            await self._consumer.ack_async(self._processed)
            self._processed.clear()
        self._acknowledged_ms = self._now_ms()

    async def _renew(self) -> None:
        """Renew the leases of messages that are not handed out yet. Drops messages whose lease has ended."""
        # Messages in the stream are read first, because their leases run already. The second read gets messages that
        # the broker could not send until the first read made room.
        self._queued.extend(await self._feed.read(0))
        self._queued.extend(await self._feed.read(ACK_PAUSE_MS))
        messages = list(self._queued)
        still_leased = await self._consumer.change_async(messages, self._lease_ms, counts=False)
        self._queued = deque(
            message for message, is_leased in zip(messages, still_leased, strict=True) if is_leased
        )
        self._renewed_ms = self._now_ms()

    def _now_ms(self) -> int:
        return self._clock.monotonic_ns() // 1_000_000
