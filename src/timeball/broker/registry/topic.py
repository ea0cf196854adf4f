"""One topic: its configuration and its queues.

The names and numbers of a configuration are RocketMQ's. A topic may show fewer queues than it has. A queue is never
removed, so that its messages can be read once it is shown again. `attributes` are set one by one with `+name=value`,
and removed with `-name`. Names and values that Timeball does not know or cannot fulfil are refused.

Most of a hundred thousand topics use only one of their queues, so each `Queue` object is created at its first use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, overload

import msgspec

from timeball.log.queue_index import QueueIndex, QueueIndexes
from timeball.model import limits
from timeball.model.errors import OutOfRange, RequestError

READ, WRITE, INHERIT = 4, 2, 1  # the bits of RocketMQ's PermName

# RocketMQ's TopicAttributes, with the values that have a meaning here.
MESSAGE_TYPE = "message.type"
PRIORITY_TYPE = "PRIORITY"
ATTRIBUTES: dict[str, frozenset[str]] = {
    MESSAGE_TYPE: frozenset({"UNSPECIFIED", "NORMAL", "FIFO", "DELAY", "TRANSACTION", "PRIORITY", "MIXED"}),
    "queue.type": frozenset({"SimpleCQ"}),
    "cleanup.policy": frozenset({"DELETE"}),
}


class TopicConfig(msgspec.Struct, frozen=True, omit_defaults=True):
    """The configuration that an operator chose. None as a number of queues means all queues of the topic."""

    read_queues: int | None = None
    write_queues: int | None = None
    perm: int = READ | WRITE
    order: bool = False
    sys_flag: int = 0
    attributes: dict[str, str] = {}


def check_config(config: TopicConfig) -> None:
    """Raise OutOfRange or RequestError if a topic cannot have this configuration."""
    for name, queues in (("readQueueNums", config.read_queues), ("writeQueueNums", config.write_queues)):
        if queues is not None and not 0 <= queues <= limits.QUEUES_PER_TOPIC_MAX:
            raise OutOfRange(f"{name} {queues}: between 0 and {limits.QUEUES_PER_TOPIC_MAX}")
    # One of the numbers may be 0. With both at 0, the topic would have no queue at all.
    if max(config.read_queues or 0, config.write_queues or 0) == 0 and config.read_queues is not None:
        raise OutOfRange("readQueueNums and writeQueueNums are 0: one of them at least is 1")
    if not 0 <= config.perm <= READ | WRITE | INHERIT:
        raise RequestError(f"perm {config.perm}: 2 is write, 4 is read, 6 is both")
    if not 0 <= config.sys_flag <= 3:
        raise RequestError(f"topicSysFlag {config.sys_flag}: between 0 and 3")


def at_least(config: TopicConfig, queues: int) -> TopicConfig:
    """Raise the read and write queues of a configuration to at least `queues`. None (all queues) stays None."""
    return msgspec.structs.replace(
        config,
        read_queues=None if config.read_queues is None else max(queues, config.read_queues),
        write_queues=None if config.write_queues is None else max(queues, config.write_queues),
    )


def altered_attributes(current: dict[str, str], changes: str) -> dict[str, str]:
    """Apply changes such as "+message.type=DELAY,-queue.type" to attributes. Raise RequestError."""
    # A copy: a later change in the same text may be refused, and then the topic must not change.
    result = dict(current)
    for change in filter(None, (part.strip() for part in changes.split(","))):
        sign, (name, equals, value) = change[0], change[1:].partition("=")
        known = ATTRIBUTES.get(name)
        if sign not in "+-" or (sign == "+") != bool(equals):
            raise RequestError(f"attribute {change[:80]!r}: +name=value sets one, -name takes it away")
        if known is None:
            raise RequestError(f"unsupported attribute {name[:80]!r}: there are {', '.join(ATTRIBUTES)}")
        if sign == "-":
            result.pop(name, None)
        elif value in known:
            result[name] = value
        else:
            raise RequestError(f"attribute {name}={value[:80]!r}: it is one of {', '.join(sorted(known))}")
    return result


FilterType = Literal["SINGLE_TAG", "MULTI_TAG"]  # RocketMQ's topicFilterType


class TopicFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """The stored form of a topic."""

    queues: int
    filter_type: FilterType = "SINGLE_TAG"
    config: TopicConfig = TopicConfig()
    deleted: bool = False
    # Rows with lower sequence numbers were deleted with the topic.
    emptied_before_seq: int = 0
    made_by: str = ""  # the account that first named the topic; "" while access is not controlled


@dataclass(slots=True)
class Queue:
    """One queue: its index, and the offset of the next message that is appended."""

    index: QueueIndex
    # Larger than the index while rows are not durable yet.
    next_offset: int


class Queues(Sequence[Queue]):
    """The queues of a topic, created at their first use."""

    __slots__ = ("_count", "_indexes", "_made", "_topic")

    def __init__(self, indexes: QueueIndexes, topic: str, count: int) -> None:
        self._indexes, self._topic, self._count = indexes, topic, count
        self._made: dict[int, Queue] = {}

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Queue: ...
    @overload
    def __getitem__(self, index: slice) -> list[Queue]: ...
    def __getitem__(self, index: int | slice) -> Queue | list[Queue]:
        if isinstance(index, slice):
            return [self[queue_id] for queue_id in range(self._count)[index]]
        # Created at the first use: a topic with a thousand queues, three of them in use, costs three.
        queue = self._made.get(index)
        if queue is None:
            if not 0 <= index < self._count:
                raise IndexError(f"queue {index} of {self._count}")
            queue_index = self._indexes.queue(self._topic, index)
            queue = self._made[index] = Queue(queue_index, queue_index.max_offset)
        return queue

    def widen(self, count: int) -> None:
        """Increase the number of queues to at least `count`."""
        # Never fewer, because a hidden queue may still contain messages.
        self._count = max(self._count, count)


class Topic:
    """One topic. `turn` is the next queue (round robin) for messages without a queue.

    A deleted topic is kept for its offsets. If a new topic of this name began at offset 0 again, a checkpoint or a
    consumer could mistake its messages for the old ones. Rows before `emptied_before_seq` were deleted with the topic.
    """

    __slots__ = (
        "config", "deleted", "emptied_before_seq", "filter_type", "made_by", "name", "queues", "read_queues", "turn",
        "write_queues",
    )  # fmt: skip

    def __init__(self, name: str, queues: Queues, facts: TopicFacts) -> None:
        self.name, self.queues, self.turn = name, queues, 0
        self.restore(facts)

    def restore(self, facts: TopicFacts) -> None:
        """Set the state to `facts`. The number of queues never shrinks."""
        self.configure(facts.config, facts.queues)
        self.filter_type: FilterType = facts.filter_type
        self.deleted, self.made_by = facts.deleted, facts.made_by
        self.emptied_before_seq = facts.emptied_before_seq

    def configure(self, config: TopicConfig, queues: int = 0) -> None:
        """Set the configuration that an operator chose, with at least `queues` queues."""
        self.queues.widen(queues)
        self.config, count = config, len(self.queues)
        # The first queues: so many are visible to consumers and producers.
        self.read_queues = count if config.read_queues is None else config.read_queues
        self.write_queues = count if config.write_queues is None else config.write_queues

    def facts(self) -> TopicFacts:
        """Build the stored form of the topic."""
        return TopicFacts(
            len(self.queues),
            self.filter_type,
            self.config,
            self.deleted,
            self.emptied_before_seq,
            self.made_by,
        )

    @property
    def perm(self) -> int:
        """RocketMQ's permission bits: read 4, write 2."""
        return self.config.perm
