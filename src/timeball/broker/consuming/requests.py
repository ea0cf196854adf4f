"""What consumers ask for, and what they get."""

from __future__ import annotations

from dataclasses import dataclass, field

import pyarrow as pa

from timeball.broker.consuming.receipts import AnyReceipt
from timeball.broker.filters import Filter
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
