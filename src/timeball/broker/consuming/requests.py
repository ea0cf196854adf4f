"""What consumers ask for, and what they get."""

from __future__ import annotations

from dataclasses import dataclass, field

import pyarrow as pa

from timeball import limits
from timeball.broker.consuming import retry
from timeball.broker.consuming.receipts import AnyReceipt
from timeball.broker.consuming.redelivery_rows import retry_topic
from timeball.broker.filters import Filter
from timeball.broker.registry.topics import check_name, check_topic
from timeball.errors import OutOfRange
from timeball.message import READ_SCHEMA


@dataclass(frozen=True, slots=True)
class ReceiveRequest:
    """What a consumer wants. `queue_id` -1: of any queue. `from_max`: where a group begins that is new here.

    `attempt_id`: in order, a request that is repeated with the same one gets again what may not have arrived.
    `in_log`: leases are kept as promises in the log and survive a crash, and the broker counts the attempts in order;
    else they are kept in memory, a crash hands the messages out again, and in order the client counts. In order a
    lease is always kept in memory: a copy behind the others would break the order.
    """

    group: str
    topic: str
    queue_id: int = -1
    rows: int = 32
    invisible_ms: int = 60_000
    wanted: Filter | None = None
    from_max: bool = False
    in_order: bool = False
    attempt_id: str = ""
    in_log: bool = False

    def check(self) -> None:
        """Raise OutOfRange, InvalidName for what cannot be asked."""
        check_name(self.group, limits.GROUP_BYTES_MAX, "group")
        if not 1 <= self.rows <= limits.POP_ROWS_MAX:
            raise OutOfRange(f"rows {self.rows}: between 1 and {limits.POP_ROWS_MAX}")
        if self.queue_id < -1:
            raise OutOfRange(f"queue {self.queue_id}: -1 (any) or one that the topic has")
        check_invisible(self.invisible_ms, 1)
        # The topics that redelivered messages go to must have valid names too.
        for name in (self.topic, *self.topics(), retry.dead_letter_topic(self.group)):
            check_topic(name)

    def topics(self) -> list[str]:
        """Return the topic and, unless in order, the retry topic of the group."""
        again = retry_topic(self.group, self.topic)
        return [self.topic] if self.in_order or again == self.topic else [self.topic, again]


NO_ROWS = pa.RecordBatch.from_pylist([], READ_SCHEMA)  # made once: it takes a third of a millisecond


@dataclass(frozen=True, slots=True)
class Received:
    """Rows handed out (READ_SCHEMA), one receipt for each; the attempt is a row's reconsume_times + 1.

    `times`: how many leases of each position ended before, in order. `rest`: about how many rows the queues still hold.
    """

    rows: pa.RecordBatch
    receipts: list[AnyReceipt]
    pop_ms: int = 0
    times: list[int] = field(default_factory=list)
    rest: int = 0


def check_invisible(invisible_ms: int, least_ms: int) -> None:
    """Raise OutOfRange unless a message may be invisible for so long."""
    if not least_ms <= invisible_ms <= limits.INVISIBLE_MS_MAX:
        raise OutOfRange(f"invisible for {invisible_ms} ms: between {least_ms} and {limits.INVISIBLE_MS_MAX}")
