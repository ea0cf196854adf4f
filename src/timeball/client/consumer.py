"""Receiving as a member of a consumer group: each message is leased to one member of the group.

A lease ends with the member's answer or after its time. A message that is not acknowledged by then is delivered again,
to any member, with one more attempt counted. After the group's last attempt it goes to the dead letters,
`%DLQ%<group>`. So a message is consumed at least once, even if a member or the broker dies.
"""

from __future__ import annotations

from collections.abc import Iterable
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
