"""Consumer groups and how far they have come, per topic and queue.

What has changed is a frame of META rows at most once a second; RocketMQ saves every five. After a crash a group may
see its last second again (G4, at least once), never miss anything: the rows stand behind the messages they speak of.

A group does not see again what was leased to it in the log (consuming/log_leases.py): `Parked` says from which row of
the log on such promises may be of positions that these offsets do not count as done, and which positions behind them
are. It is written in the same frame as the offsets it belongs to.

    offsets/<group>@<topic>   {queue: offset}
    offsets/parked            {"from_seq": row, "ahead": {group: {topic: {queue: [[begin, end], …]}}}}
"""

from __future__ import annotations

import msgspec

from timeball import limits
from timeball.broker.registry.meta import MetaLog
from timeball.broker.registry.topics import check_name
from timeball.errors import OutOfRange, OverLimit

PARKED = "parked"

STALE_ROWS = 200_000  # so many rows are looked through in some tenths of a second when a broker starts

Table = dict[str, dict[str, dict[int, int]]]  # group -> topic -> queue -> offset
Ahead = dict[str, dict[str, dict[int, list[tuple[int, int]]]]]  # … -> done, [begin, end), behind the offset


class Parked(msgspec.Struct, frozen=True):
    """What is promised of positions that the offsets do not count as done: `ahead`, and in the log `from_seq` on."""

    from_seq: int
    ahead: Ahead


class Offsets:
    """Stored offsets. Belongs to the event loop."""

    def __init__(self, meta: MetaLog) -> None:
        self._meta = meta
        self._table: Table = {}
        self._changed: set[tuple[str, str]] = set()  # (group, topic) since the last `save`
        self.parked = Parked(0, {})  # as last saved
        meta.register("offsets", self)

    def restore(self, name: str, value: bytes) -> None:
        """Take what the log says."""
        if name == PARKED:
            self.parked = msgspec.json.decode(value, type=Parked)
            return
        group, _, topic = name.partition("@")
        if value:
            self._table.setdefault(group, {})[topic] = msgspec.json.decode(value, type=dict[int, int])
        else:
            self._forget(group, topic)

    def get(self, group: str, topic: str) -> dict[int, int]:
        """Offsets of a group; empty when it has none yet."""
        return dict(self._table.get(group, {}).get(topic, {}))

    def find(self, group: str, topic: str, queue: int) -> int | None:
        """A group's offset in one queue, if it has one."""
        return self._table.get(group, {}).get(topic, {}).get(queue)

    def topics_of(self, group: str) -> list[str]:
        """Topics that a group has stored offsets of."""
        return list(self._table.get(group, {}))

    def groups_of(self, topic: str) -> list[str]:
        """Groups that have stored offsets of a topic."""
        return [group for group, topics in self._table.items() if topic in topics]

    def forget_group(self, group: str) -> None:
        """The group is deleted: its next member begins as a new one would."""
        for topic in self.topics_of(group):
            self._forget(group, topic)
            self._changed.add((group, topic))

    def forget_topic(self, topic: str) -> None:
        """The topic is deleted, and a new one of its name may begin elsewhere."""
        for group in self.groups_of(topic):
            self._forget(group, topic)
            self._changed.add((group, topic))

    def commit(self, group: str, topic: str, offsets: dict[int, int], queue_max: dict[int, int]) -> None:
        """Store offsets; raises OutOfRange for one beyond its queue's end (`queue_max`)."""
        check_name(group, limits.GROUP_BYTES_MAX, "group")
        if group not in self._table and len(self._table) >= limits.GROUPS_MAX:
            raise OverLimit(f"{limits.GROUPS_MAX} consumer groups exist; delete some first")
        for queue, offset in offsets.items():
            if not 0 <= offset <= queue_max.get(queue, -1):
                raise OutOfRange(
                    f"offset {offset} of queue {queue}: {topic!r} ends at {queue_max.get(queue)}"
                )
        self._table.setdefault(group, {}).setdefault(topic, {}).update(offsets)
        self._changed.add((group, topic))

    def save(self, parked: Parked) -> None:
        """Append what has changed to the log.

        `parked` belongs to these offsets: it was found without a pause before this call.
        """
        if self._changed or self._is_stale(parked):
            changed = ((f"offsets/{g}@{t}", self._table.get(g, {}).get(t)) for g, t in sorted(self._changed))
            self._meta.put([*changed, (f"offsets/{PARKED}", parked)])
            self._changed.clear()
            self.parked = parked

    def _is_stale(self, parked: Parked) -> bool:
        """Whether what is saved would have the next start look through too much of the log."""
        return parked.ahead != self.parked.ahead or parked.from_seq - self.parked.from_seq > STALE_ROWS

    def _forget(self, group: str, topic: str) -> None:
        topics = self._table.get(group, {})
        topics.pop(topic, None)
        if not topics:
            self._table.pop(group, None)
