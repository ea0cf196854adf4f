"""One topic: its configuration and its queues.

The words and numbers of a configuration are RocketMQ's. A topic may show fewer queues than it has: a queue is never
taken away, so what lies in it can still be read once it is shown again. `attributes` are set one by one, `+name=value`,
and taken away, `-name`; a name or value that Timeball knows nothing of, or cannot keep its word on, is refused.

Most of a hundred thousand topics use one of their queues, so a queue is made when it is first asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, overload

import msgspec

from timeball import limits
from timeball.errors import OutOfRange, RequestError
from timeball.log.queue_index import QueueIndex, QueueIndexes

READ, WRITE, INHERIT = 4, 2, 1  # RocketMQ's PermName

# RocketMQ's TopicAttributes, with the values that mean something here.
MESSAGE_TYPE = "message.type"
PRIORITY_TYPE = "PRIORITY"
ATTRIBUTES: dict[str, frozenset[str]] = {
    MESSAGE_TYPE: frozenset({"UNSPECIFIED", "NORMAL", "FIFO", "DELAY", "TRANSACTION", "PRIORITY", "MIXED"}),
    "queue.type": frozenset({"SimpleCQ"}),
    "cleanup.policy": frozenset({"DELETE"}),
}


class TopicConfig(msgspec.Struct, frozen=True, omit_defaults=True):
    """The configuration an operator chose; None for a number of queues is "all there are"."""

    read_queues: int | None = None
    write_queues: int | None = None
    perm: int = READ | WRITE
    order: bool = False
    sys_flag: int = 0
    attributes: dict[str, str] = {}


def check_config(config: TopicConfig) -> None:
    """Raise OutOfRange or RequestError when a topic cannot be like this."""
    for name, queues in (("readQueueNums", config.read_queues), ("writeQueueNums", config.write_queues)):
        if queues is not None and not 0 <= queues <= limits.QUEUES_PER_TOPIC_MAX:
            raise OutOfRange(f"{name} {queues}: between 0 and {limits.QUEUES_PER_TOPIC_MAX}")
    # One of them may be 0; with both at 0 the topic would have no queue at all.
    if max(config.read_queues or 0, config.write_queues or 0) == 0 and config.read_queues is not None:
        raise OutOfRange("readQueueNums and writeQueueNums are 0: one of them at least is 1")
    if not 0 <= config.perm <= READ | WRITE | INHERIT:
        raise RequestError(f"perm {config.perm}: 2 is write, 4 is read, 6 is both")
    if not 0 <= config.sys_flag <= 3:
        raise RequestError(f"topicSysFlag {config.sys_flag}: between 0 and 3")


def at_least(config: TopicConfig, queues: int) -> TopicConfig:
    """Return the same with so many queues shown, or more where more are."""
    return msgspec.structs.replace(
        config,
        read_queues=None if config.read_queues is None else max(queues, config.read_queues),
        write_queues=None if config.write_queues is None else max(queues, config.write_queues),
    )


def altered_attributes(current: dict[str, str], changes: str) -> dict[str, str]:
    """Return attributes after changes such as "+message.type=DELAY,-queue.type"; raises RequestError."""
    # A copy: a later change in the same text may be refused, and the topic must stay as it was.
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
    """A topic as the log keeps it."""

    queues: int
    filter_type: FilterType = "SINGLE_TAG"
    config: TopicConfig = TopicConfig()
    deleted: bool = False
    emptied_before_seq: int = 0
    made_by: str = ""  # the account that named it first; "" while access is not controlled


@dataclass(slots=True)
class Queue:
    """One queue: its index, and the offset the next appended row will have."""

    index: QueueIndex
    next_offset: int


class Queues(Sequence[Queue]):
    """The queues of a topic."""

    __slots__ = ("_count", "_indexes", "_made", "_topic")

    def __init__(self, indexes: QueueIndexes, topic: str, count: int) -> None:
        self._indexes, self._topic, self._count = indexes, topic, count
        self._made: dict[int, Queue] = {}

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, at: int) -> Queue: ...
    @overload
    def __getitem__(self, at: slice) -> list[Queue]: ...
    def __getitem__(self, at: int | slice) -> Queue | list[Queue]:
        if isinstance(at, slice):
            return [self[each] for each in range(self._count)[at]]
        # Made when first used: a topic with a thousand queues of which three are used costs three.
        queue = self._made.get(at)
        if queue is None:
            if not 0 <= at < self._count:
                raise IndexError(f"queue {at} of {self._count}")
            index = self._indexes.queue(self._topic, at)
            queue = self._made[at] = Queue(index, index.max_offset)
        return queue

    def widen(self, count: int) -> None:
        """Have at least `count` queues."""
        # Never fewer: messages may wait in a queue that is hidden now.
        self._count = max(self._count, count)


class Topic:
    """One topic; `turn` goes round its queues for rows that leave the choice to us.

    A deleted one is kept, for its offsets: were they given out again, a checkpoint or a consumer
    from before would take the new topic's messages for the old one's. Rows before `emptied_before_seq` went with it.
    """

    __slots__ = (
        "config", "deleted", "emptied_before_seq", "filter_type", "made_by", "name", "queues", "read_queues", "turn",
        "write_queues",
    )  # fmt: skip

    def __init__(self, name: str, queues: Queues, facts: TopicFacts) -> None:
        self.name, self.queues, self.turn = name, queues, 0
        self.restore(facts)

    def restore(self, facts: TopicFacts) -> None:
        """Be as `facts` says; a topic never loses queues."""
        self.configure(facts.config, facts.queues)
        self.filter_type: FilterType = facts.filter_type
        self.deleted, self.made_by = facts.deleted, facts.made_by
        self.emptied_before_seq = facts.emptied_before_seq

    def configure(self, config: TopicConfig, queues: int = 0) -> None:
        """Be as an operator says, with at least so many queues."""
        self.queues.widen(queues)
        self.config, count = config, len(self.queues)
        # How many of its queues consumers read, and producers write to.
        self.read_queues = count if config.read_queues is None else config.read_queues
        self.write_queues = count if config.write_queues is None else config.write_queues

    def facts(self) -> TopicFacts:
        """Return the topic as the log keeps it."""
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
        """Return RocketMQ's permission bits: read 4, write 2."""
        return self.config.perm
