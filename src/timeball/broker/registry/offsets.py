"""Consumer groups and how far they have come, per topic and queue.

Small state, saved as a whole once a second when it has changed, as RocketMQ does every five: after a crash a
group may see its last second again (G4, at least once), never miss anything.

What was handed out as a promise in the log (receiving/) it does not see again: the file says from which row of the log
on such promises may be of positions that these offsets do not count as done, and which positions behind them are.

    {"offsets": {group: {topic: {queue: offset}}},
     "parked": {"from_seq": row, "ahead": {group: {topic: {queue: [[begin, end], …]}}}}}
"""

from __future__ import annotations

import msgspec

from timeball import documents, limits
from timeball.broker.registry.topics import check_name
from timeball.errors import OutOfRange, OverLimit
from timeball.files import Files

NAME = "offsets.json"

STALE_ROWS = 200_000  # so many rows are looked through in some tenths of a second when a broker starts

Table = dict[str, dict[str, dict[int, int]]]  # group -> topic -> queue -> offset
Ahead = dict[str, dict[str, dict[int, list[tuple[int, int]]]]]  # … -> done, [begin, end), behind the offset


class Parked(msgspec.Struct, frozen=True):
    """What is promised of positions that the offsets do not count as done: `ahead`, and in the log `from_seq` on."""

    from_seq: int
    ahead: Ahead


class _File(msgspec.Struct):
    offsets: Table
    parked: Parked


class Offsets:
    """Stored offsets. Belongs to the event loop; only the bytes of `save` leave it."""

    def __init__(self, files: Files) -> None:
        self._table: Table = {}
        self._dirty = False
        self.parked: Parked | None = None  # as last saved; None: by nobody who knew of it
        kept = documents.load(files, NAME, _File)
        if kept is not None:
            self._table, self.parked = kept.offsets, kept.parked

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
        self._dirty |= self._table.pop(group, None) is not None

    def forget_topic(self, topic: str) -> None:
        """The topic is deleted, and a new one of its name may begin elsewhere."""
        for group in self.groups_of(topic):
            del self._table[group][topic]
            self._dirty = True

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
        self._dirty = True

    def save(self, parked: Parked | None = None) -> bytes | None:
        """The file's new content when something has changed; the caller writes it, off the loop.

        `parked` belongs to these offsets: it was found without a pause before this call.
        """
        parked = parked or Parked(0, {})
        if not self._dirty and not self._is_stale(parked):
            return None
        self._dirty, self.parked = False, parked
        return documents.encode(_File(self._table, parked))

    def _is_stale(self, parked: Parked) -> bool:
        """Whether what is saved would have the next start look through too much of the log."""
        saved = self.parked or Parked(0, {})
        return parked.ahead != saved.ahead or parked.from_seq - saved.from_seq > STALE_ROWS

    def unsaved(self) -> None:
        """What `save` gave out was not written."""
        self._dirty = True
