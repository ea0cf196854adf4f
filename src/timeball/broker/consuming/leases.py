"""The leases of all groups in all queues: where a group begins, how far it has come, how much is leased.

What is known of one queue is a cache: without it a group goes on from its stored offset. So idle queues are dropped
when there are too many, and a stored offset that was changed elsewhere (by an administrator, by a consumer that pulls)
wins: the leases of that queue are forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable

from timeball import limits
from timeball.broker.consuming.queue_leases import OpenCount, QueueLeases
from timeball.broker.parts import Parts
from timeball.broker.registry.offsets import Ahead
from timeball.broker.registry.topics import Topic
from timeball.errors import OverLimit
from timeball.log.queue_index import QueueIndex

Key = tuple[str, str, int]  # group, topic, queue


class Leases:
    """QueueLeases by group and queue. Belongs to the event loop."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.count = OpenCount()
        self.has_new_groups = False  # a group has begun in a queue, and its offset there is not saved yet
        kept = parts.in_flight.pop_leases(self.count)
        self._queues: dict[Key, QueueLeases] = {(q.group, q.topic, q.queue_id): q for q in kept}

    @property
    def room(self) -> int:
        """How many more positions may be leased."""
        return limits.POP_HELD_MAX - self.count.rows

    def get(self, group: str, topic: str, queue_id: int) -> QueueLeases | None:
        """Return the leases of a group in a queue, if it has been there."""
        return self._queues.get((group, topic, queue_id))

    def all(self) -> list[QueueLeases]:
        """Return those of all groups and queues."""
        return list(self._queues.values())

    def open(self, group: str, topic: Topic, queue_id: int, *, from_max: bool) -> QueueLeases:
        """Return those of a group in a queue. `from_max`: where the group begins when it has no stored offset."""
        key = (group, topic.name, queue_id)
        queue, offset = self._queues.get(key), self._parts.offsets.find(*key)
        if queue is not None:
            if queue.stored_offset == offset:
                return queue
            self._forget(key, queue)
        self._make_room()
        index = topic.queues[queue_id].index
        if offset is None:
            offset, self.has_new_groups = _first_offset(index, from_max), True
            self._parts.offsets.commit(group, topic.name, {queue_id: offset}, {queue_id: index.max_offset})
        start = min(max(offset, index.min_offset), index.max_offset)
        queue = self._queues[key] = QueueLeases(group, topic.name, queue_id, start, offset, self.count)
        return queue

    def is_live(self, queue: QueueLeases) -> bool:
        """Whether the group still goes on from here: its stored offset was not changed elsewhere."""
        key = (queue.group, queue.topic, queue.queue_id)
        return self._queues.get(key) is queue and self._parts.offsets.find(*key) == queue.stored_offset

    def ahead(self) -> Ahead:
        """Return what is done behind the stored offsets, of queues that promises in the log speak of."""
        found: Ahead = {}
        for queue in self._queues.values():
            if queue.in_log and not queue.idle and self.is_live(queue) and (done := queue.ahead()):
                found.setdefault(queue.group, {}).setdefault(queue.topic, {})[queue.queue_id] = done
        return found

    def skip_done(self, group: str, topic: Topic, queue_id: int, offsets: Iterable[int]) -> None:
        """Count positions as done that were handed out before a crash, as if the stored offset said so."""
        index = topic.queues[queue_id].index
        queue = self.open(group, topic, queue_id, from_max=False)
        queue.in_log = True
        queue.skip_done(sorted({o for o in offsets if queue.next_offset <= o < index.max_offset}))
        self.store(queue)

    def ack_ahead(self, queue: QueueLeases, index: QueueIndex, offset: int) -> bool:
        """Accept a receipt of before a restart, as long as its message has not been handed out again."""
        is_ahead = max(queue.next_offset, index.min_offset) <= offset < index.max_offset
        if not is_ahead or len(queue.acked_ahead) >= limits.POP_HELD_PER_QUEUE_MAX or self.room <= 0:
            return False
        queue.ack_ahead(offset)
        return True

    def save(self) -> None:
        """Save the leases for the next start."""
        self._parts.in_flight.save(self._queues.values())

    def store(self, queue: QueueLeases) -> bool:
        """Store how far the group has come; return whether its open positions span too wide a stretch."""
        group, topic, queue_id = key = (queue.group, queue.topic, queue.queue_id)
        if self._queues.get(key) is not queue:
            return False
        offsets = self._parts.offsets
        if offsets.find(group, topic, queue_id) != queue.stored_offset:
            self._forget(key, queue)
            return False
        first = queue.first_open
        if first != queue.stored_offset:
            offsets.commit(group, topic, {queue_id: first}, {queue_id: queue.next_offset})
            queue.stored_offset = first
        return queue.next_offset - first > limits.POP_SPAN_MAX

    def _forget(self, key: Key, queue: QueueLeases) -> None:
        queue.forget()
        del self._queues[key]

    def _make_room(self) -> None:
        if len(self._queues) < limits.POP_WINDOWS_MAX:
            return
        self._queues = {key: queue for key, queue in self._queues.items() if not queue.idle}
        if len(self._queues) >= limits.POP_WINDOWS_MAX:
            raise OverLimit(f"{len(self._queues)} queues have messages in flight; acknowledge some first")


def _first_offset(index: QueueIndex, from_max: bool) -> int:
    """Return where a new group begins.

    "The end" is the last message, as in RocketMQ; or the first one while the queue still has its very first, so that
    a group that starts a moment after the first send misses nothing.
    """
    if not from_max or index.min_offset == 0:
        return index.min_offset
    return max(index.min_offset, index.max_offset - 1)
