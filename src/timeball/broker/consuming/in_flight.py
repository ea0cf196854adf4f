"""Leases across an orderly stop: receipts stay valid, and nothing is handed out twice because of it.

One META row for each queue, written when the broker stops and deleted before the next start serves, so that a crash
never finds an old one: after a crash everything from a group's stored offset on is handed out again. A queue whose
stored offset has changed by then (a crash in the middle of the stop, a group that was moved) is forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from timeball.broker.consuming.queue_leases import Lease, OpenCount, QueueLeases
from timeball.broker.registry.meta import MetaLog, MetaTable


class _Row(msgspec.Struct, array_like=True):
    offset: int
    seq: int
    size_bytes: int
    pop_ms: int
    deadline_ms: int
    in_order: bool
    times: int

    @classmethod
    def of(cls, offset: int, lease: Lease) -> _Row:
        return cls(
            offset, lease.seq, lease.size_bytes, lease.pop_ms, lease.deadline_ms, lease.in_order, lease.times
        )

    def lease(self) -> Lease:
        return Lease(self.seq, self.size_bytes, self.pop_ms, self.deadline_ms, self.in_order, self.times)


class SavedLeases(msgspec.Struct):
    """The leases of one group in one queue that was not idle."""

    group: str
    topic: str
    queue_id: int
    next_offset: int
    stored_offset: int
    last_pop_ms: int
    attempt_id: str
    in_flight: list[_Row]
    returned: list[_Row]
    acked_ahead: list[int]
    in_log: bool


class InFlight:
    """What the last stop has left in the log. Belongs to the event loop."""

    def __init__(self, meta: MetaLog) -> None:
        self._kept = MetaTable(meta, "in_flight", SavedLeases)

    def save(self, queues: Iterable[QueueLeases]) -> None:
        """Append the queues that are not idle."""
        named = ((f"{q.group}@{q.topic}@{q.queue_id}", q) for q in queues if not q.idle)
        self._kept.put((name, saved(queue)) for name, queue in named)

    def pop_leases(self, count: OpenCount) -> list[QueueLeases]:
        """Return what the last stop has left, and delete it from the log: the next start finds nothing."""
        found = [_restored(one, count) for one in self._kept.values.values()]
        self._kept.put([(name, None) for name in self._kept.values])
        return found


def saved(queue: QueueLeases) -> SavedLeases:
    """Return what is kept of one queue."""
    return SavedLeases(
        queue.group, queue.topic, queue.queue_id, queue.next_offset, queue.stored_offset,
        queue.last_pop_ms, queue.attempt_id, [_Row.of(*item) for item in queue.in_flight.items()],
        [_Row.of(*item) for item in queue.returned.items()], sorted(queue.acked_ahead), queue.in_log,
    )  # fmt: skip


def _restored(kept: SavedLeases, count: OpenCount) -> QueueLeases:
    queue = QueueLeases(
        kept.group, kept.topic, kept.queue_id, kept.next_offset, kept.stored_offset, count,
        last_pop_ms=kept.last_pop_ms, attempt_id=kept.attempt_id, in_log=kept.in_log,
    )  # fmt: skip
    in_flight, returned = (
        {row.offset: row.lease() for row in rows} for rows in (kept.in_flight, kept.returned)
    )
    queue.restore(in_flight, returned, set(kept.acked_ahead))
    return queue
