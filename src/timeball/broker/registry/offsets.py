"""The stored offsets of consumer groups, per topic and queue.

Changed offsets are appended as one frame of META rows, at most once a second (RocketMQ: every five seconds). After a
crash a group may see the messages of its last second again (G4, at least once). It never misses any, because the rows
of offsets stand after the messages that they cover.

A group does not see messages again that were leased to it in the log (consuming/log_leases.py). For this purpose
`Parked` is written in the same frame as the offsets that it belongs to. It lists the positions after these offsets that
are done. It also names a row of the log (`from_seq`): later rows may contain leases of further positions.

    offsets/<group>@<topic>   {queue: offset}
    offsets/parked            {"from_seq": row, "ahead": {group: {topic: {queue: [[begin, end], …]}}}}
"""

from __future__ import annotations

import msgspec

from timeball.broker.registry.meta import MetaLog
from timeball.broker.registry.topics import check_name
from timeball.model import limits
from timeball.model.errors import OutOfRange, OverLimit

PARKED = "parked"

STALE_ROWS = 200_000  # rows that a start may have to read, which takes some tenths of a second

Table = dict[str, dict[str, dict[int, int]]]  # group -> topic -> queue -> offset
# group -> topic -> queue -> done positions [begin, end) after the offset
Ahead = dict[str, dict[str, dict[int, list[tuple[int, int]]]]]


class Parked(msgspec.Struct, frozen=True):
    """Positions done after the offsets: those in `ahead`, and those of messages in the log from `from_seq` on."""

    from_seq: int
    ahead: Ahead


class Offsets:
    """The stored offsets of all groups. Belongs to the event loop."""

    def __init__(self, meta: MetaLog) -> None:
        self._meta = meta
        self.table: Table = {}  # read-only outside; changes go through `commit`
        self._changed: set[tuple[str, str]] = set()  # (group, topic) changed since the last `save`
        self.parked = Parked(0, {})  # as last saved
        meta.register("offsets", self)

    def restore(self, name: str, value: bytes) -> None:
        """Recovery: apply a row of offsets from the log."""
        if name == PARKED:
            self.parked = msgspec.json.decode(value, type=Parked)
            return
        group, _, topic = name.partition("@")
        if value:
            self.table.setdefault(group, {})[topic] = msgspec.json.decode(value, type=dict[int, int])
        else:
            self._forget(group, topic)

    def get(self, group: str, topic: str) -> dict[int, int]:
        """Copy the offsets of a group in a topic, by queue. Empty if it has none."""
        return dict(self.table.get(group, {}).get(topic, {}))

    def find_offset(self, group: str, topic: str, queue: int) -> int | None:
        """Find a group's offset in one queue, or None if it has none."""
        return self.table.get(group, {}).get(topic, {}).get(queue)

    def topics_of(self, group: str) -> list[str]:
        """List the topics in which a group has stored offsets."""
        return list(self.table.get(group, {}))

    def groups_of(self, topic: str) -> list[str]:
        """List the groups that have stored offsets in a topic."""
        return [group for group, topics in self.table.items() if topic in topics]

    def forget_group(self, group: str) -> None:
        """Forget the offsets of a deleted group. Its next member begins like a member of a new group."""
        for topic in self.topics_of(group):
            self._forget(group, topic)
            self._changed.add((group, topic))

    def forget_topic(self, topic: str) -> None:
        """Forget the offsets in a deleted topic. In a new topic with this name, all groups begin anew."""
        for group in self.groups_of(topic):
            self._forget(group, topic)
            self._changed.add((group, topic))

    def commit(self, group: str, topic: str, offsets: dict[int, int], queue_max: dict[int, int]) -> None:
        """Store offsets in memory until the next `save`. `queue_max`: the end offset of each queue.

        Raise OutOfRange for an offset beyond its queue's end, and InvalidName or OverLimit for a new group.
        """
        if group not in self.table:
            check_name(group, limits.GROUP_BYTES_MAX, "group")
            if len(self.table) >= limits.GROUPS_MAX:
                raise OverLimit(f"{limits.GROUPS_MAX} consumer groups exist; delete some first")
        for queue, offset in offsets.items():
            # With an offset beyond the end, the group would skip future messages.
            if not 0 <= offset <= queue_max.get(queue, -1):
                raise OutOfRange(
                    f"offset {offset} of queue {queue}: {topic!r} ends at {queue_max.get(queue)}"
                )
        self.table.setdefault(group, {}).setdefault(topic, {}).update(offsets)
        self._changed.add((group, topic))

    def save(self, parked: Parked) -> None:
        """Append changed offsets to the log.

        `parked` belongs to these offsets: the caller computes it without an await before this call.
        """
        # In most seconds of a quiet broker nothing has changed, and no row is written.
        if self._changed or self._is_stale(parked):
            changed_values = (
                (f"offsets/{g}@{t}", self.table.get(g, {}).get(t)) for g, t in sorted(self._changed)
            )
            # One frame, so that offsets and `parked` match. Otherwise a crash could repeat a position or lose it.
            self._meta.put([*changed_values, (f"offsets/{PARKED}", parked)])
            self._changed.clear()
            self.parked = parked

    def _is_stale(self, parked: Parked) -> bool:
        """Check whether `parked` must be saved: `ahead` changed, or a start would have to read too much of the log."""
        return parked.ahead != self.parked.ahead or parked.from_seq - self.parked.from_seq > STALE_ROWS

    def _forget(self, group: str, topic: str) -> None:
        topics = self.table.get(group, {})
        topics.pop(topic, None)
        if not topics:
            self.table.pop(group, None)
