"""Counts of the messages that retention has removed before a group read them, as META rows.

expired/<group>    {"topics": {topic: {"rows", "at_ms", "counted_to": {queue: offset}}}, "is_deleted"}

The row is appended before the messages are removed. After a crash between the two, retention examines the same messages
again, and `counted_to` shows which of them have been counted. Dead letters are counted under the topic `%DLQ%<group>`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from timeball.broker.registry.meta import Change, MetaLog, MetaTable
from timeball.model import limits


class ExpiredTopic(msgspec.Struct, frozen=True, omit_defaults=True):
    """The expired messages of one topic: their number, the time of the last expiry, and the offsets counted so far."""

    rows: int
    at_ms: int  # of the last expiry
    counted_to: dict[int, int] = {}


class ExpiredFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """The expired messages of a group. `is_deleted`: an operator deleted the group, but kept its offsets."""

    topics: dict[str, ExpiredTopic] = {}
    is_deleted: bool = False


class Expiry(NamedTuple):
    """Messages that expire now. `counted_to` contains, by queue, the offset after the last of them."""

    group: str
    topic: str
    rows: int
    counted_to: Mapping[int, int]  # only queues with messages that expire now


class ExpiredMessages:
    """Counts of expired messages. Belongs to the event loop."""

    def __init__(self, meta: MetaLog) -> None:
        self._table = MetaTable(meta, "expired", ExpiredFacts)

    def groups(self) -> dict[str, ExpiredFacts]:
        """List all groups that lost messages, by name. The result is read-only."""
        return self._table.values

    def topics(self, group: str) -> dict[str, ExpiredTopic]:
        """List the topics in which a group lost messages, by name. The result is read-only."""
        facts = self._table.values.get(group)
        return {} if facts is None else facts.topics

    def counted_to(self, group: str, topic: str) -> dict[int, int]:
        """Find, by queue, the offset up to which the expired messages of a group have been counted."""
        known = self.topics(group).get(topic)
        return {} if known is None else known.counted_to

    def is_deleted(self, group: str) -> bool:
        """Check whether an operator deleted this group but kept its offsets."""
        facts = self._table.values.get(group)
        return facts is not None and facts.is_deleted

    def changed(self, expiries: Iterable[Expiry], now_ms: int) -> Change:
        """Build the rows that count these messages, for a frame with other rows."""
        return self._table.changed(self._updated_values(expiries, now_ms))

    def add(self, expiries: Iterable[Expiry], now_ms: int) -> None:
        """Append the rows that count these messages, in a frame of their own."""
        self._table.put(self._updated_values(expiries, now_ms))

    def note_deleted(self, group: str, *, keeps_offsets: bool) -> None:
        """Forget the counts of a group that an operator has deleted."""
        # `is_deleted` makes retention ignore the kept offsets until the group is created again.
        if keeps_offsets or group in self._table.values:
            self._table.put([(group, ExpiredFacts(is_deleted=True) if keeps_offsets else None)])

    def _updated_values(
        self, expiries: Iterable[Expiry], now_ms: int
    ) -> list[tuple[str, ExpiredFacts | None]]:
        changed: dict[str, dict[str, ExpiredTopic]] = {}
        for group, topic, rows, counted_to in expiries:
            # A copy, because a refused append must not change the state in memory.
            topics = changed.setdefault(group, dict(self.topics(group)))
            known = topics.get(topic, ExpiredTopic(0, 0))
            # Offsets never decrease: a topic that is deleted and created again continues with the next offset.
            topics[topic] = ExpiredTopic(known.rows + rows, now_ms, {**known.counted_to, **counted_to})
        return [
            (group, ExpiredFacts(_drop_oldest(topics), self.is_deleted(group)))
            for group, topics in changed.items()
        ]


def _drop_oldest(topics: dict[str, ExpiredTopic]) -> dict[str, ExpiredTopic]:
    """Drop the oldest counts beyond the limit, because each change writes all topics of the group."""
    # Sorted by the time of the last change, oldest first.
    names = sorted(topics, key=lambda name: topics[name].at_ms)
    return {name: topics[name] for name in names[-limits.EXPIRED_TOPICS_MAX :]}
