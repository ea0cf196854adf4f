"""One topic: its configuration and its queues.

Most of a hundred thousand topics use one of their queues, so a queue is made when it is first asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, overload

import msgspec

from timeball.broker.registry.topic_config import TopicConfig
from timeball.log.queue_index import QueueIndex, QueueIndexes

FilterType = Literal["SINGLE_TAG", "MULTI_TAG"]  # RocketMQ's topicFilterType


class TopicFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is saved of a topic."""

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
        queue = self._made.get(at)
        if queue is None:
            if not 0 <= at < self._count:
                raise IndexError(f"queue {at} of {self._count}")
            index = self._indexes.queue(self._topic, at)
            queue = self._made[at] = Queue(index, index.max_offset)
        return queue

    def widen(self, count: int) -> None:
        """Have at least `count` queues."""
        self._count = max(self._count, count)


class Topic:
    """One topic; `turn` goes round its queues for rows that leave the choice to us.

    A deleted one is kept, for its offsets: were they given out again, a checkpoint or a consumer
    from before would take the new topic's messages for the old one's. Rows before `emptied_before_seq` went with it.
    """

    __slots__ = (
        "config", "deleted", "emptied_before_seq", "filter_type", "made_by", "name", "queues", "turn",
    )  # fmt: skip

    def __init__(self, name: str, queues: Queues, facts: TopicFacts) -> None:
        self.name, self.queues, self.turn = name, queues, 0
        self.restore(facts)

    def restore(self, facts: TopicFacts) -> None:
        """Be as `facts` says; a topic never loses queues."""
        self.queues.widen(facts.queues)
        self.filter_type: FilterType = facts.filter_type
        self.config, self.deleted = facts.config, facts.deleted
        self.emptied_before_seq, self.made_by = facts.emptied_before_seq, facts.made_by

    def facts(self) -> TopicFacts:
        """Return what is saved of it."""
        return TopicFacts(
            len(self.queues),
            self.filter_type,
            self.config,
            self.deleted,
            self.emptied_before_seq,
            self.made_by,
        )

    @property
    def read_queues(self) -> int:
        """How many of its queues consumers read."""
        return len(self.queues) if self.config.read_queues is None else self.config.read_queues

    @property
    def write_queues(self) -> int:
        """How many of its queues producers write to."""
        return len(self.queues) if self.config.write_queues is None else self.config.write_queues

    @property
    def perm(self) -> int:
        """RocketMQ's permission bits: read 4, write 2."""
        return self.config.perm
