"""What consumers ask for, and what they get. No I/O.

A receipt names one lease of one message and holds all that is needed to settle it without a look into the log. So an
edge that turns one into text seals it: a number that was made up would settle another consumer's message.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import pyarrow as pa

from timeball.broker.filters import EVERYTHING, Filter
from timeball.broker.registry.groups import SubscriptionGroup
from timeball.broker.registry.topics import Topic
from timeball.log.few_rows import ReadRows, read_batch
from timeball.message import READ_SCHEMA


class Receipt(NamedTuple):
    """A lease kept in the log: the promise `seq`, first due at `due_ms`, brings the message back.

    It stays valid when the lease is given another time. `topic`: the one asked for.
    """

    group: str
    topic: str
    seq: int
    due_ms: int


class PositionReceipt(NamedTuple):
    """A lease kept in memory, of a position. `topic` is where the row stands: it may be a retry topic."""

    group: str
    topic: str
    queue_id: int
    offset: int
    pop_ms: int


AnyReceipt = Receipt | PositionReceipt


class Subscription(NamedTuple):
    """A group that may consume, a topic that may be read, and where the group's redelivered messages go."""

    group: SubscriptionGroup
    topic: Topic
    times_max: int  # how often a message is tried again
    again_name: str  # the group's retry topic for this topic; a retry topic's own name
    dead_name: str  # the topic of what has used up its attempts
    again: Topic | None  # None until a message has come back, and for a retry topic, which is its own


class ReceiveRequest(msgspec.Struct, frozen=True):
    """A consumer's request. `queue_id` -1: of any queue. `from_max`: a group that is new here begins at the end.

    `attempt_id`: in order, a request that is repeated with the same one gets again what may not have arrived.
    `in_log`: leases are kept as promises in the log and survive a crash, and the broker counts the attempts in order;
    else they are kept in memory, a crash hands the messages out again, and in order the client counts. In order a
    lease is always kept in memory: a copy behind the others would break the order.
    """

    group: str
    topic: str
    queue_id: int = -1
    rows: int = 32  # RocketMQ's batch
    invisible_ms: int = 60_000
    wanted: Filter = EVERYTHING  # rows of the retry topic pass any filter
    from_max: bool = False
    in_order: bool = False
    attempt_id: str = ""
    in_log: bool = False


NO_ROWS = pa.RecordBatch.from_pylist([], READ_SCHEMA)  # made once: it takes a third of a millisecond


class Received(msgspec.Struct, frozen=True):
    """Rows handed out at `pop_ms` (READ_SCHEMA), one receipt for each; the attempt is a row's reconsume_times + 1.

    `handed_out`: the rows as they were read, a few as values.
    `times`: how many leases of each position ended before, in order. `rest`: about how many rows the queues still hold.
    """

    handed_out: ReadRows
    receipts: list[AnyReceipt]
    pop_ms: int = 0
    times: list[int] = []
    rest: int = 0

    @property
    def rows(self) -> pa.RecordBatch:
        """Return the rows as a batch."""
        return read_batch(self.handed_out)
