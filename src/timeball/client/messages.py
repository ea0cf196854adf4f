"""A received message and the answers to it: acknowledge, give back, extend the lease, or dead-letter.

A receipt is an opaque text by which the broker recognises a lease.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from timeball.client.http_calls import HttpCalls
from timeball.client.http_codec import Operation, acknowledge, dead_letter, extend, nack
from timeball.client.network import run
from timeball.model import limits
from timeball.model.errors import RequestError
from timeball.model.time_parsing import After, delay_ms
from timeball.model.values import NACK_REASON


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
    """A member of a consumer group, which answers for messages of one topic by their receipts. Thread safe.

    Each method returns for each message, in order, the receipt of its lease from now on. None means that the lease had
    ended: the message is delivered again, or was answered before.
    """

    def __init__(self, calls: HttpCalls, topic: str, group: str) -> None:
        self._calls = calls
        self.topic = topic
        self.group = group

    async def ack(self, receipts: Sequence[str]) -> list[str | None]:
        """Acknowledge messages."""
        return await self._answer(receipts, lambda chunk: acknowledge(self.topic, self.group, chunk))

    async def nack(
        self, receipts: Sequence[str], after_ms: int | None, reason: str, *, counts: bool = True
    ) -> list[str | None]:
        """Give messages back as failed attempts, for `reason`. They are delivered again after `after_ms`.

        `after_ms` None means the delay of the group's retry policy. `counts`: count the attempt.
        """
        short = _shorten(reason)
        return await self._answer(
            receipts, lambda chunk: nack(self.topic, self.group, chunk, after_ms, short, counts=counts)
        )

    async def extend(
        self, receipts: Sequence[str], lease_ms: int, *, counts: bool = True
    ) -> list[str | None]:
        """Make leases end `lease_ms` from now. `counts`: count the lease as an attempt."""
        return await self._answer(
            receipts, lambda chunk: extend(self.topic, self.group, chunk, lease_ms, counts=counts)
        )

    async def dead_letter(self, receipts: Sequence[str], reason: str = "") -> list[str | None]:
        """Move messages to the group's dead letters, for `reason`."""
        short = _shorten(reason)
        return await self._answer(receipts, lambda chunk: dead_letter(self.topic, self.group, chunk, short))

    async def _answer(
        self, receipts: Sequence[str], operation: Callable[[list[str]], Operation[list[str | None]]]
    ) -> list[str | None]:
        """Answer for any number of messages. `operation` builds a request for at most POP_ROWS_MAX receipts."""
        answered: list[str | None] = []
        for begin in range(0, len(receipts), limits.POP_ROWS_MAX):
            part = await self._calls.run_async(operation([*receipts[begin : begin + limits.POP_ROWS_MAX]]))
            answered += part
        return answered


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

    # `Message` and `AsyncMessage` document these methods. They return False if the lease had ended.

    async def _extend(self, lease_ms: int) -> bool:
        """Let the lease end `lease_ms` from now, and store the new receipt."""
        member, receipt = self.lease
        (new_receipt,) = await member.extend([receipt], lease_ms)
        self.update_receipt(new_receipt)
        return new_receipt is not None

    async def _nack(self, after_ms: int | None, reason: str, counted: bool) -> bool:
        """Give the message back. None as `after_ms` means the delay of the retry policy."""
        member, receipt = self.lease
        (new_receipt,) = await member.nack([receipt], after_ms, reason, counts=counted)
        self.update_receipt(new_receipt)
        return new_receipt is not None

    async def _ack(self) -> bool:
        member, receipt = self.lease
        return (await member.ack([receipt]))[0] is not None

    async def _dead_letter(self, reason: str) -> bool:
        member, receipt = self.lease
        return (await member.dead_letter([receipt], reason))[0] is not None

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
        return run(self._ack())

    def nack(self, after: After | None = None, *, reason: str = "", counted: bool = True) -> bool:
        """Give the message back as a failed attempt, to be delivered again later.

        Args:
            after: The delay until the next delivery, as long as that of a send may be, or at most 12 h in a group that
                consumes in order. The default is the delay of the group's retry policy.
            reason: The reason, which the next delivery and the dead letter contain. At most 1,024 bytes are kept.
            counted: With False, this is no attempt: the message cannot be handled yet. The group limits how often.

        Returns:
            False when the lease had already ended.
        """
        return run(self._nack(None if after is None else delay_ms(after), reason, counted))

    def extend(self, lease: After) -> bool:
        """Extend the lease, so that it ends after the time `lease` from now.

        Returns False when it had already ended.
        """
        return run(self._extend(delay_ms(lease, "lease")))

    def dead_letter(self, *, reason: str = "") -> bool:
        """Give the message up: move it to the group's dead letters at once.

        Args:
            reason: The reason, which the dead letter contains. At most 1,024 bytes are kept.

        Returns:
            False when the lease had already ended.
        """
        return run(self._dead_letter(reason))


def reason_of(error: BaseException) -> str:
    """Format an exception as the reason of a nack: its type and its text."""
    try:
        text = str(error)
    except Exception:  # of the program's own `__str__`
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _shorten(reason: str) -> str:
    """Cut a reason to as many characters as the broker keeps bytes. Replace characters that JSON cannot represent.

    The text of an exception may contain half of a surrogate pair.
    """
    return reason[: limits.NACK_REASON_BYTES_MAX].encode(errors="replace").decode()
