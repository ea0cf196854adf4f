"""A received message and the answers to it: acknowledge, give back, extend the lease, or dead-letter.

A receipt is an opaque text by which the broker recognises a lease.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from timeball.model import limits, wire
from timeball.model.errors import RequestError
from timeball.model.time_parsing import After, delay_ms
from timeball.model.values import NACK_REASON

T = TypeVar("T")


class Actions(Protocol):
    """The calls to a broker that answer for messages."""

    def action(self, verb: str, body: object, answer: type[T], timeout_ms: int | None = None) -> T:
        """Make a call and decode its answer."""


class ReceivedRow(Protocol):
    """The fields of a received message, as its transport has them. `Leased` documents them."""

    @property
    def topic(self) -> str: ...
    @property
    def body(self) -> bytes: ...
    @property
    def tag(self) -> str | None: ...
    @property
    def keys(self) -> list[str]: ...
    @property
    def properties(self) -> dict[str, str]: ...
    @property
    def id(self) -> str | None: ...
    @property
    def seq(self) -> int: ...
    @property
    def scheduled_seq(self) -> int | None: ...
    @property
    def queue_id(self) -> int: ...
    @property
    def queue_offset(self) -> int: ...
    @property
    def born_ms(self) -> int | None: ...
    @property
    def store_ms(self) -> int: ...
    @property
    def due_ms(self) -> int | None: ...
    @property
    def lateness_ms(self) -> int | None: ...
    @property
    def attempts(self) -> int: ...
    @property
    def receipt(self) -> str: ...


class Member:
    """A member of a consumer group, which answers for messages of one topic by their receipts. Thread safe."""

    def __init__(self, calls: Actions, topic: str, group: str) -> None:
        self._calls = calls
        self.topic = topic
        self.group = group

    def ack(self, receipts: Sequence[str]) -> list[bool]:
        """Acknowledge messages. The result is False for each message whose lease had ended: it is delivered again."""
        valid: list[bool] = []
        for chunk in _chunks(receipts, limits.POP_ROWS_MAX):
            body = wire.Acknowledge(topic=self.topic, group=self.group, receipts=chunk)
            valid += self._calls.action("ack", body, dict[str, list[bool]])["valid"]
        return valid

    def change(
        self,
        receipts: Sequence[str],
        invisible_ms: int | None,
        *,
        counts: bool = True,
        nack: bool = False,
        reason: str = "",
    ) -> list[str | None]:
        """Make leases end `invisible_ms` from now. Returns their new receipts, with None for each lease that had ended.

        `invisible_ms` None means the delay of the group's retry policy. `counts`: count the lease as an attempt.
        `nack`: this is a negative acknowledgement, for `reason`.
        """
        new_receipts: list[str | None] = []
        for chunk in _chunks(receipts, limits.POP_ROWS_MAX):
            body = wire.ChangeInvisibleTime(
                topic=self.topic, group=self.group, receipts=chunk, invisible_ms=invisible_ms, counts=counts,
                nack=nack, reason=_shortened(reason),
            )  # fmt: skip
            answer = self._calls.action("change_invisible_time", body, dict[str, list[str | None]])
            new_receipts += answer["receipts"]
        return new_receipts

    def dead_letter(self, receipts: Sequence[str], reason: str = "") -> list[bool]:
        """Move messages to the group's dead letters. The result is False for each message whose lease had ended."""
        valid: list[bool] = []
        for chunk in _chunks(receipts, limits.POP_ROWS_MAX):
            body = wire.DeadLetter(
                topic=self.topic, group=self.group, receipts=chunk, reason=_shortened(reason)
            )
            valid += self._calls.action("dead_letter", body, dict[str, list[bool]])["valid"]
        return valid


class Leased:
    """One visible message and its lease. Times are milliseconds since 1970 UTC.

    The common base of `Message` and `AsyncMessage`, which differ only in how they answer.
    """

    __slots__ = ("_member", "_receipt", "_row", "is_leased", "received_ms")

    def __init__(self, row: ReceivedRow, received_ms: int, member: Member | None = None) -> None:
        self._row = row
        self._member = member
        self._receipt: str | None = None  # None means: use the receipt in the row
        self.received_ms = received_ms  # when this client received the message, by the client's clock
        # The last state that this client knows. The lease may have ended since.
        self.is_leased = member is not None

    @property
    def topic(self) -> str:
        """The topic the message was sent to."""
        return self._row.topic

    @property
    def body(self) -> bytes:
        """The body, as the producer sent it."""
        return self._row.body

    @property
    def tag(self) -> str | None:
        """The tag, one word to filter by, as in RocketMQ. None if the message has none."""
        return self._row.tag

    @property
    def keys(self) -> list[str]:
        """The business keys, by which the message can be found and cancelled."""
        return self._row.keys

    @property
    def properties(self) -> dict[str, str]:
        """The properties that the producer set."""
        return self._row.properties

    @property
    def id(self) -> str | None:
        """The message id, which the sender's receipt contains. None if the producer gave the message no id."""
        return self._row.id

    @property
    def seq(self) -> int:
        """The sequence number of the row in the log. For a scheduled message it is the number of its release."""
        return self._row.seq

    @property
    def scheduled_seq(self) -> int | None:
        """The sequence number in the sender's receipt, for a scheduled message. None for other messages."""
        return self._row.scheduled_seq

    @property
    def queue_id(self) -> int:
        """The number of the message's queue in the topic."""
        return self._row.queue_id

    @property
    def queue_offset(self) -> int:
        """The offset of the message in its queue."""
        return self._row.queue_offset

    @property
    def born_ms(self) -> int | None:
        """The time when the producer made the message, by the producer's clock. None if unknown, as over HTTP."""
        return self._row.born_ms

    @property
    def store_ms(self) -> int:
        """The time when the message became visible, by the broker's clock."""
        return self._row.store_ms

    @property
    def due_ms(self) -> int | None:
        """The due time. None if the message was not scheduled."""
        return self._row.due_ms

    @property
    def lateness_ms(self) -> int | None:
        """The time from the due time until the message became visible, in milliseconds. Never negative.

        None if the message was not scheduled. If the due time had passed when the broker accepted the message, the
        lateness counts from the acceptance.
        """
        return self._row.lateness_ms

    @property
    def attempts(self) -> int:
        """The number of earlier attempts: how often the group received the message and did not acknowledge it."""
        return self._row.attempts

    @property
    def nack_reason(self) -> str | None:
        """The last reason that a consumer of the group gave for a nack. None if there is no reason."""
        return self.properties.get(NACK_REASON)

    # ---- answers to the group ---------------------------------------------------------------------------

    @property
    def lease(self) -> tuple[Member, str]:
        """The member that holds the lease, and the receipt.

        Raises RequestError for a browsed message, which has no lease.
        """
        if self._member is None:
            raise RequestError("this message was browsed and is leased to no group; pull it to answer")
        return self._member, self._receipt or self._row.receipt

    def update_receipt(self, receipt: str | None) -> None:
        """Store the new receipt of the lease, or None if the lease had ended."""
        self._receipt, self.is_leased = receipt or self._receipt, receipt is not None

    def _extend(self, lease_ms: int) -> bool:
        member, receipt = self.lease
        (new_receipt,) = member.change([receipt], lease_ms)
        self.update_receipt(new_receipt)
        return new_receipt is not None

    def _nack(self, after_ms: int | None, reason: str) -> bool:
        member, receipt = self.lease
        (new_receipt,) = member.change([receipt], after_ms, nack=True, reason=reason)
        self.update_receipt(new_receipt)
        return new_receipt is not None

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

    A message that a member of a group received is leased to this client. Answer with `ack`, `nack` or `dead_letter`
    before the lease ends, or extend the lease with `extend`. A message that was browsed has no lease, and the four
    methods raise RequestError.
    """

    __slots__ = ()

    def ack(self) -> bool:
        """Acknowledge the message.

        Returns False when the lease had already ended. The message is then delivered again.
        """
        return self._ack()

    def nack(self, after: After | None = None, *, reason: str = "") -> bool:
        """Give the message back as a failed attempt, to be delivered again later.

        Args:
            after: The delay until the next delivery. The default is the delay of the group's retry policy.
            reason: The reason, which the next delivery and the dead letter contain. At most 1,024 bytes are kept.

        Returns:
            False when the lease had already ended.
        """
        return self._nack(None if after is None else delay_ms(after), reason)

    def extend(self, lease: After) -> bool:
        """Extend the lease, so that it ends after the time `lease` from now.

        Returns False when it had already ended.
        """
        return self._extend(delay_ms(lease, "lease"))

    def dead_letter(self, *, reason: str = "") -> bool:
        """Give the message up: move it to the group's dead letters at once.

        Args:
            reason: The reason, which the dead letter contains. At most 1,024 bytes are kept.

        Returns:
            False when the lease had already ended.
        """
        return self._dead_letter(reason)


def reason_of(error: BaseException) -> str:
    """Format an exception as the reason of a nack: its type and its text."""
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _shortened(reason: str) -> str:
    # The broker keeps no more bytes of a reason. JSON cannot represent half of a surrogate pair, which an exception's
    # text may contain.
    return reason[: limits.NACK_REASON_BYTES_MAX].encode(errors="replace").decode()


def _chunks(receipts: Sequence[str], max_size: int) -> list[list[str]]:
    return [list(receipts[begin : begin + max_size]) for begin in range(0, len(receipts), max_size)]
