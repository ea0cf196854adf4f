"""The requests of consumers, and the messages and receipts in the answers. No I/O.

A receipt names one lease of one message. The protocols seal receipts when they convert them to text: a receipt with an
invented number would settle the message of another consumer.
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
    """One lease of a queue position. `topic` is the topic of the queue, which may be the group's retry topic."""

    group: str
    topic: str
    queue_id: int
    offset: int
    pop_ms: int


class Subscription(NamedTuple):
    """A group and a topic that it may consume, with the topics of the group's redelivered messages and dead letters."""

    group: SubscriptionGroup
    topic: Topic
    times_max: int  # how often a message may be tried again
    max_per_key: int | None  # the limit of leases with the same key
    retry_name: str  # the group's retry topic for this topic, or this topic itself if it is a retry topic
    dead_letter_name: str  # the group's topic of dead letters, the messages that have used up their attempts
    retry: Topic | None  # None until a message has come back, and if this topic is itself a retry topic


class ReceiveRequest(msgspec.Struct, frozen=True):
    """A consumer's request for messages.

    queue_id      -1: any queue
    from_max      a group without an offset begins at the end of a queue
    attempt_id    ordered groups: a repeated request with the same id gets the same messages again, because the first
                  answer may have been lost
    counts_times  ordered groups: the broker counts the attempts, and a message that has used them up is a dead letter.
                  Otherwise the client counts (RocketMQ's POP)
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
    counts_times: bool = False


NO_ROWS = pa.RecordBatch.from_pylist([], READ_SCHEMA)  # made once, because it takes a third of a millisecond


class Received(msgspec.Struct, frozen=True):
    """Rows handed out at `pop_ms` (READ_SCHEMA), with one receipt each. The attempt is a row's reconsume_times + 1.

    handed_out    the rows as they were read: Python values if they are few, otherwise columns
    times         for an ordered group: the number of earlier leases of each position, empty if the rows count them
    rest          the approximate number of rows that the queues still contain
    """

    handed_out: ReadRows
    receipts: list[Receipt]
    pop_ms: int = 0
    times: list[int] = []
    rest: int = 0

    @property
    def rows(self) -> pa.RecordBatch:
        """The rows as a batch."""
        return read_batch(self.handed_out)
