"""The requests of consumers, and the messages and receipts in the answers. No I/O.

A receipt names one lease of one message, and contains everything that is needed to settle it without a read of the log.
Therefore the protocols seal receipts when they turn them into text: an invented number would settle another consumer's
message.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import pyarrow as pa

from timeball.broker.filters import EVERYTHING, Filter
from timeball.broker.registry.groups import SubscriptionGroup
from timeball.broker.registry.topics import Topic
from timeball.log.row_encoder import ReadRows, read_batch
from timeball.model.message import READ_SCHEMA


class Receipt(NamedTuple):
    """A lease kept in the log: the scheduled message `seq`, first due at `due_ms`, brings the message back.

    The receipt stays valid when the end of the lease is changed. `topic`: the topic of the request.
    """

    group: str
    topic: str
    seq: int
    due_ms: int


class PositionReceipt(NamedTuple):
    """A lease of a position, kept in memory. `topic` is the topic of the row, which may be a retry topic."""

    group: str
    topic: str
    queue_id: int
    offset: int
    pop_ms: int


AnyReceipt = Receipt | PositionReceipt


class Subscription(NamedTuple):
    """A group that may consume, a topic that may be read, and the topics of the group's redelivered messages."""

    group: SubscriptionGroup
    topic: Topic
    times_max: int  # how often a message may be tried again
    again_name: str  # the group's retry topic for this topic, or this topic itself if it is a retry topic
    dead_name: str  # the topic of messages that have used up their attempts
    again: Topic | None  # None until a message has come back, and if this topic is itself a retry topic


class ReceiveRequest(msgspec.Struct, frozen=True):
    """A consumer's request for messages.

    `queue_id` -1: any queue. `from_max`: a group that is new here begins at the end. `attempt_id`: in order, a repeated
    request with the same id gets the same messages again, as they may not have arrived. `in_log`: the leases are
    scheduled messages in the log and survive a crash, and the broker counts the attempts in order. Otherwise they are
    kept in memory, a crash hands the messages out again, and the client counts in order. In-order leases are always
    kept in memory, because a copy after later messages would break the order.
    """

    group: str
    topic: str
    queue_id: int = -1
    rows: int = 32  # the batch size of RocketMQ
    invisible_ms: int = 60_000
    wanted: Filter = EVERYTHING  # rows of the retry topic pass any filter
    from_max: bool = False
    in_order: bool = False
    attempt_id: str = ""
    in_log: bool = False


NO_ROWS = pa.RecordBatch.from_pylist([], READ_SCHEMA)  # made once, because it takes a third of a millisecond


class Received(msgspec.Struct, frozen=True):
    """Rows handed out at `pop_ms` (READ_SCHEMA), with one receipt each. The attempt is a row's reconsume_times + 1.

    `handed_out`: the rows as they were read. A few are values. `times`: in order, the number of earlier leases of each
    position. `rest`: the approximate number of rows that the queues still contain.
    """

    handed_out: ReadRows
    receipts: list[AnyReceipt]
    pop_ms: int = 0
    times: list[int] = []
    rest: int = 0

    @property
    def rows(self) -> pa.RecordBatch:
        """The rows as a batch."""
        return read_batch(self.handed_out)
