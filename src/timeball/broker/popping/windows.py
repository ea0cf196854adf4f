"""All windows of the broker: where a group begins, what is stored of how far it has come, and how much is in hand.

A window is a cache: without it a group goes on from its stored offset. So idle ones are let go when there are too
many, and a stored offset that somebody else has changed (an administrator, a consumer that pulls) counts: what
was in hand is forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable

from timeball import limits
from timeball.broker.parts import Parts
from timeball.broker.popping.window import Count, Window
from timeball.broker.registry.offsets import Ahead
from timeball.broker.registry.topics import Topic
from timeball.errors import OverLimit
from timeball.log.queue_index import QueueIndex

Key = tuple[str, str, int]


class Windows:
    """See the module. Belongs to the event loop."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.count = Count()
        self.fresh = False  # a group has begun somewhere, and that is not saved yet
        kept = parts.in_flight.pop_windows(self.count)
        self._windows: dict[Key, Window] = {(w.group, w.topic, w.queue_id): w for w in kept}

    @property
    def room(self) -> int:
        """How many more rows may be in hand."""
        return limits.POP_HELD_MAX - self.count.rows

    def find(self, group: str, topic: str, queue_id: int) -> Window | None:
        """The window, if there is one."""
        return self._windows.get((group, topic, queue_id))

    def all(self) -> list[Window]:
        """All windows."""
        return list(self._windows.values())

    def open(self, group: str, topic: Topic, queue_id: int, *, from_max: bool) -> Window:
        """The window of a queue. `from_max`: where the group begins when it has no stored offset."""
        key = (group, topic.name, queue_id)
        window, offset = self._windows.get(key), self._parts.offsets.find(*key)
        if window is not None:
            if window.stored_offset == offset:
                return window
            self._forget(key, window)
        self._make_room()
        index = topic.queues[queue_id].index
        if offset is None:
            offset, self.fresh = self._first_offset(index, from_max), True
            self._parts.offsets.commit(group, topic.name, {queue_id: offset}, {queue_id: index.max_offset})
        start = min(max(offset, index.min_offset), index.max_offset)
        window = self._windows[key] = Window(group, topic.name, queue_id, start, offset, self.count)
        return window

    def is_live(self, window: Window) -> bool:
        """Whether the group still goes on from here: nobody else has said where it stands."""
        key = (window.group, window.topic, window.queue_id)
        return self._windows.get(key) is window and self._parts.offsets.find(*key) == window.stored_offset

    def ahead(self) -> Ahead:
        """What is done behind the stored offsets, of windows that promises in the log speak of."""
        found: Ahead = {}
        for window in self._windows.values():
            if window.promised and not window.idle and self.is_live(window) and (done := window.ahead()):
                found.setdefault(window.group, {}).setdefault(window.topic, {})[window.queue_id] = done
        return found

    def done_already(self, group: str, topic: Topic, queue_id: int, offsets: Iterable[int]) -> None:
        """These positions were handed out before a crash: the group goes on as if its offset said so."""
        index = topic.queues[queue_id].index
        window = self.open(group, topic, queue_id, from_max=False)
        window.promised = True
        window.done_already(sorted({o for o in offsets if window.next_offset <= o < index.max_offset}))
        self.store(window)

    def finish_ahead(self, window: Window, index: QueueIndex, offset: int) -> bool:
        """A receipt of before a restart counts, as long as its message has not been handed out again."""
        is_ahead = max(window.next_offset, index.min_offset) <= offset < index.max_offset
        if not is_ahead or len(window.done_ahead) >= limits.POP_HELD_PER_QUEUE_MAX or self.room <= 0:
            return False
        window.finish_ahead(offset)
        return True

    def save(self) -> None:
        """Keep what is in hand for the next start."""
        self._parts.in_flight.save(self._windows.values())

    def store(self, window: Window) -> bool:
        """Store how far the group has come; true when what is open has become too wide a stretch."""
        group, topic, queue_id = key = (window.group, window.topic, window.queue_id)
        if self._windows.get(key) is not window:
            return False
        offsets = self._parts.offsets
        if offsets.find(group, topic, queue_id) != window.stored_offset:
            self._forget(key, window)
            return False
        first = window.first_open
        if first != window.stored_offset:
            offsets.commit(group, topic, {queue_id: first}, {queue_id: window.next_offset})
            window.stored_offset = first
        return window.next_offset - first > limits.POP_SPAN_MAX

    def _forget(self, key: Key, window: Window) -> None:
        """Somebody else says where the group stands, or its topic is no more."""
        window.forget()
        del self._windows[key]

    def _first_offset(self, index: QueueIndex, from_max: bool) -> int:
        """Where a new group begins. "The end" is the last message, as in RocketMQ; or the first one while the queue
        still has its very first, so that a group that starts a moment after the first send misses nothing.
        """
        if not from_max or index.min_offset == 0:
            return index.min_offset
        return max(index.min_offset, index.max_offset - 1)

    def _make_room(self) -> None:
        if len(self._windows) < limits.POP_WINDOWS_MAX:
            return
        self._windows = {key: window for key, window in self._windows.items() if not window.idle}
        if len(self._windows) >= limits.POP_WINDOWS_MAX:
            raise OverLimit(f"{len(self._windows)} queues have messages in hand; acknowledge some first")
