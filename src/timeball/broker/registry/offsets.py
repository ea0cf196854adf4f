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
    """Positions done beyond the offsets: listed in `ahead`, and by promises in the log from `from_seq` on."""

    from_seq: int
    ahead: Ahead


class Offsets:
    """Stored offsets. Belongs to the event loop."""

    def __init__(self, meta: MetaLog) -> None:
        self._meta = meta
        self.table: Table = {}  # to be read; changes go through `commit`
        self._changed: set[tuple[str, str]] = set()  # (group, topic) since the last `save`
        self.parked = Parked(0, {})  # as last saved
        meta.register("offsets", self)

    def restore(self, name: str, value: bytes) -> None:
        """Set the offsets that a row of the log holds."""
        if name == PARKED:
            self.parked = msgspec.json.decode(value, type=Parked)
            return
        group, _, topic = name.partition("@")
        if value:
            self.table.setdefault(group, {})[topic] = msgspec.json.decode(value, type=dict[int, int])
        else:
            self._forget(group, topic)

    def get(self, group: str, topic: str) -> dict[int, int]:
        """Return the offsets of a group; empty when it has none yet."""
        return dict(self.table.get(group, {}).get(topic, {}))

    def find_offset(self, group: str, topic: str, queue: int) -> int | None:
        """Return a group's offset in one queue, if it has one."""
        return self.table.get(group, {}).get(topic, {}).get(queue)

    def topics_of(self, group: str) -> list[str]:
        """Return the topics that a group has stored offsets of."""
        return list(self.table.get(group, {}))

    def groups_of(self, topic: str) -> list[str]:
        """Return the groups that have stored offsets of a topic."""
        return [group for group, topics in self.table.items() if topic in topics]

    def forget_group(self, group: str) -> None:
        """Forget the offsets of a deleted group: its next member begins as a new one would."""
        for topic in self.topics_of(group):
            self._forget(group, topic)
            self._changed.add((group, topic))

    def forget_topic(self, topic: str) -> None:
        """Forget the offsets of a deleted topic: a new one of its name may begin elsewhere."""
        for group in self.groups_of(topic):
            self._forget(group, topic)
            self._changed.add((group, topic))

    def commit(self, group: str, topic: str, offsets: dict[int, int], queue_max: dict[int, int]) -> None:
        """Store offsets; raises OutOfRange for one beyond its queue's end (`queue_max`)."""
        if group not in self.table:
            check_name(group, limits.GROUP_BYTES_MAX, "group")
            if len(self.table) >= limits.GROUPS_MAX:
                raise OverLimit(f"{limits.GROUPS_MAX} consumer groups exist; delete some first")
        for queue, offset in offsets.items():
            # Beyond the end the group would pass over messages that are still to come.
            if not 0 <= offset <= queue_max.get(queue, -1):
                raise OutOfRange(
                    f"offset {offset} of queue {queue}: {topic!r} ends at {queue_max.get(queue)}"
                )
        self.table.setdefault(group, {}).setdefault(topic, {}).update(offsets)
        self._changed.add((group, topic))

    def save(self, parked: Parked) -> None:
        """Append changed offsets to the log.

        `parked` belongs to these offsets: it was found without a pause before this call.
        """
        # Nothing has changed in most seconds of a quiet broker, and then no row is written.
        if self._changed or self._is_stale(parked):
            changed = ((f"offsets/{g}@{t}", self.table.get(g, {}).get(t)) for g, t in sorted(self._changed))
            # One frame: offsets and `parked` fit together, or after a crash a position would be done twice or never.
            self._meta.put([*changed, (f"offsets/{PARKED}", parked)])
            self._changed.clear()
            self.parked = parked

    def _is_stale(self, parked: Parked) -> bool:
        """Return whether a start from the saved state would look through too much of the log."""
        return parked.ahead != self.parked.ahead or parked.from_seq - self.parked.from_seq > STALE_ROWS

    def _forget(self, group: str, topic: str) -> None:
        topics = self.table.get(group, {})
        topics.pop(topic, None)
        if not topics:
            self.table.pop(group, None)
