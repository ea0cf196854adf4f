"""A message as a consumer sees it, and the answers that a member of a group gives: done, later, longer.

A message is a view of one row of a batch: nothing is copied or decoded until asked for. Receipts are texts of the
broker's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from timeball import limits, wire
from timeball.client.calls import Calls
from timeball.errors import RequestError
from timeball.instants import After, delay_ms
from timeball.message import NACK_REASON, decode_properties, lateness_ms


class Member:
    """The receipts of one group in one topic. Thread safe."""

    def __init__(self, calls: Calls, topic: str, group: str) -> None:
        self._calls = calls
        self.topic = topic
        self.group = group

    def ack(self, receipts: Sequence[str]) -> list[bool]:
        """End these leases for good; false for one that had ended: its message comes again."""
        found: list[bool] = []
        for part in _parts(receipts, limits.CANCELS_PER_REQUEST_MAX):
            body = wire.Acknowledge(topic=self.topic, group=self.group, receipts=part)
            found += self._calls.action("ack", body, dict[str, list[bool]])["valid"]
        return found

    def change(
        self,
        receipts: Sequence[str],
        invisible_ms: int | None,
        *,
        counts: bool = True,
        nack: bool = False,
        reason: str = "",
    ) -> list[str | None]:
        """Make leases end so far from now; return their receipts, None for one that had ended.

        `invisible_ms` None: after as long as the group's retry policy says. `counts`: the lease is an attempt. `nack`:
        the messages are given back.
        """
        found: list[str | None] = []
        for part in _parts(receipts, limits.POP_ROWS_MAX):
            body = wire.ChangeInvisibleTime(
                topic=self.topic, group=self.group, receipts=part, invisible_ms=invisible_ms, counts=counts,
                nack=nack, reason=_bounded(reason),
            )  # fmt: skip
            answer = self._calls.action("change_invisible_time", body, dict[str, list[str | None]])
            found += answer["receipts"]
        return found

    def dead_letter(self, receipts: Sequence[str], reason: str = "") -> list[bool]:
        """Put messages into the group's dead letters; false for one whose lease had ended."""
        found: list[bool] = []
        for part in _parts(receipts, limits.POP_ROWS_MAX):
            body = wire.DeadLetter(topic=self.topic, group=self.group, receipts=part, reason=_bounded(reason))
            found += self._calls.action("dead_letter", body, dict[str, list[bool]])["valid"]
        return found


class Leased:
    """One visible message, and its lease. Instants are milliseconds since 1970 UTC.

    What `Message` and `AsyncMessage` have in common: all but how they answer.
    """

    __slots__ = ("_batch", "_member", "_receipt", "_row", "is_leased", "received_ms")

    def __init__(
        self, batch: pa.RecordBatch, row: int, received_ms: int, member: Member | None = None
    ) -> None:
        self._batch = batch
        self._member = member
        self._receipt: str | None = None  # None: as in the batch
        self._row = row
        self.received_ms = received_ms  # when this client got it, by its own clock
        self.is_leased = member is not None  # as far as this client has been told

    def _value(self, column: str) -> Any:
        return self._batch.column(column)[self._row].as_py()

    @property
    def topic(self) -> str:
        """The topic it was sent to."""
        return str(self._value("topic"))

    @property
    def body(self) -> bytes:
        """Return the body as the producer sent it."""
        body: bytes = self._value("body") or b""
        return body

    @property
    def tag(self) -> str | None:
        """RocketMQ's tag: one word to filter by."""
        tag: str | None = self._value("tag")
        return tag

    @property
    def keys(self) -> list[str]:
        """The business keys it can be found and cancelled by."""
        return (self._value("keys") or "").split()

    @property
    def properties(self) -> dict[str, str]:
        """The producer's own properties."""
        return decode_properties(self._value("properties") or "")

    @property
    def id(self) -> str | None:
        """The id its sender knows."""
        key: str | None = self._value("unique_key")
        return key

    @property
    def seq(self) -> int:
        """Its place in the log. For a delayed message: of its release, not of its promise."""
        return int(self._value("seq"))

    @property
    def promise_seq(self) -> int | None:
        """The sequence number in the sender's receipt, if it was delayed."""
        seq: int | None = self._value("source_seq")
        return seq

    @property
    def queue_id(self) -> int:
        """Return the number of its queue in the topic."""
        return int(self._value("queue_id"))

    @property
    def queue_offset(self) -> int:
        """Its place in that queue."""
        return int(self._value("queue_offset"))

    @property
    def born_ms(self) -> int | None:
        """When its producer made it, by the producer's clock."""
        instant: int | None = self._value("born_ms")
        return instant

    @property
    def store_ms(self) -> int:
        """When it became visible, by the broker's clock."""
        return int(self._value("store_ms"))

    @property
    def due_ms(self) -> int | None:
        """When it was to become visible; None if it was not delayed."""
        instant: int | None = self._value("due_ms")
        return instant

    @property
    def lateness_ms(self) -> int | None:
        """How long after its instant it became visible; None if it was not delayed. Never negative.

        The lateness of a message that was due before it was accepted counts from its acceptance.
        """
        due_ms = self.due_ms
        return None if due_ms is None else lateness_ms(due_ms, self._value("accepted_ms"), self.store_ms)

    @property
    def attempts(self) -> int:
        """How often it was consumed before and given back."""
        return int(self._value("reconsume_times") or 0)

    @property
    def nack_reason(self) -> str | None:
        """Return the last reason that a consumer of the group gave for a nack; None when none has given one."""
        return self.properties.get(NACK_REASON)

    # ---- answers to the group ---------------------------------------------------------------------------

    @property
    def lease(self) -> tuple[Member, str]:
        """The member it is leased to, and the receipt; RequestError for a message that was browsed."""
        if self._member is None:
            raise RequestError("this message was browsed and is leased to no group; pull it to answer")
        return self._member, self._receipt or str(self._value(wire.RECEIPT))

    def renewed(self, receipt: str | None) -> None:
        """Go on with the receipt of a changed lease; None: the lease had ended."""
        self._receipt, self.is_leased = receipt or self._receipt, receipt is not None

    def _extend(self, lease_ms: int) -> bool:
        member, receipt = self.lease
        (changed,) = member.change([receipt], lease_ms)
        self.renewed(changed)
        return changed is not None

    def _nack(self, after_ms: int | None, reason: str) -> bool:
        member, receipt = self.lease
        (changed,) = member.change([receipt], after_ms, nack=True, reason=reason)
        self.renewed(changed)
        return changed is not None

    def _ack(self) -> bool:
        member, receipt = self.lease
        return member.ack([receipt])[0]

    def _dead_letter(self, reason: str) -> bool:
        member, receipt = self.lease
        return member.dead_letter([receipt], reason)[0]

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(topic={self.topic!r}, id={self.id!r}, queue_id={self.queue_id}, "
            f"queue_offset={self.queue_offset}, body={len(self.body)} bytes)"
        )


class Message(Leased):
    """One visible message.

    A message that was pulled as a member of a group is leased to this client: answer with `ack`, `nack` or
    `dead_letter` before the lease ends, or `extend` it.
    """

    __slots__ = ()

    def ack(self) -> bool:
        """Say that it is dealt with; false when its lease had ended, so that it comes again."""
        return self._ack()

    def nack(self, after: After | None = None, *, reason: str = "") -> bool:
        """Give it back as an attempt that failed; it comes again `after` so long, or when the group's policy says.

        The next delivery and the dead letter show the `reason`. False when its lease had ended.
        """
        return self._nack(None if after is None else delay_ms(after), reason)

    def extend(self, lease: After) -> bool:
        """Keep it for so long from now; false when its lease had ended."""
        return self._extend(delay_ms(lease, "lease"))

    def dead_letter(self, *, reason: str = "") -> bool:
        """Give it up: it goes to the group's dead letters at once. False when its lease had ended."""
        return self._dead_letter(reason)


def view(batch: pa.RecordBatch, received_ms: int, member: Member | None = None) -> list[Message]:
    """Return the rows of a batch in READ_SCHEMA as messages; `member`: to whom they are leased."""
    return [Message(batch, row, received_ms, member) for row in range(batch.num_rows)]


def reason_of(error: BaseException) -> str:
    """Return an exception as the reason of a nack: its type and what it says."""
    said = str(error)
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def _bounded(reason: str) -> str:
    # The broker keeps no more of it; and JSON has no half of a surrogate pair, which an exception's text may have.
    return reason[: limits.NACK_REASON_BYTES_MAX].encode(errors="replace").decode()


def _parts(receipts: Sequence[str], most: int) -> list[list[str]]:
    return [list(receipts[begin : begin + most]) for begin in range(0, len(receipts), most)]
