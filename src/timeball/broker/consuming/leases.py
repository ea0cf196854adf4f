"""The leases of consumer groups: the positions of a queue that are in flight, and where each group continues.

The positions of one queue, as one group sees them:

    done … done | in_flight, returned, parked, done … | next …
                ^ first_open                          ^ next_offset

A request first gets positions of `returned`, then positions from `next_offset` on. The group's stored offset never
passes `first_open`, the first position that is not done. Only open positions take memory: a position before
`next_offset` is done if it is in none of `in_flight`, `returned` and `parked`.

The state of a queue follows in the log within some milliseconds (lease_saver.py). An idle queue has no state but its
stored offset. Therefore idle queues are dropped when there are too many. If an administrator or a consumer that pulls
has changed the stored offset, the group continues there, and the leases of the queue are forgotten.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import insort
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from timeball.broker.accepting.waiters import Waiters
from timeball.broker.registry.groups import Offsets
from timeball.broker.registry.topics import Topic
from timeball.log.queue_index import QueueIndex
from timeball.model import limits
from timeball.model.errors import OverLimit

NO_RECEIPT = -1
SWEEP_POSITIONS_MIN = 1_024
FREE_PART = 64  # waiting consumers are served again when so small a part of all positions is free
PART_POSITIONS = 1_024  # positions of a queue that are saved together: a part
DROPPED_QUEUES = 1_024  # idle queues that are dropped at once


class Lease(msgspec.Struct):
    """One open position: in flight (held, or its message is being written to the log again), returned or parked."""

    seq: int
    size_bytes: int
    pop_ms: int  # identifies the receipt. NO_RECEIPT for a returned or parked position
    deadline_ms: int  # on the clock of `SchedulerClock.elapsed_ms`
    since_ms: int  # when the deadline was set, by the scheduler's clock
    in_order: bool = False
    counts: bool = True  # False: it is no attempt when it ends without an acknowledgement
    times: int = 0  # ordered group: how many leases of this position have ended without an acknowledgement
    nacked_ms: int | None = None  # ordered group: when a member gave it back; None after its next delivery
    nack_reason: str = ""  # ordered group: the last reason that a member gave
    is_void: bool = False  # its receipt is not valid, because its message is being written to the log again
    is_written: bool = False  # that row is appended: the position is done when it is durable
    on_end: Callable[[], None] | None = None  # called once when the consumer holds it no more (credit.py)
    key: str = ""  # the key of which it has a slot (key_limits.py)

    def end(self) -> None:
        """Tell the consumer's credit that it holds this position no more."""
        if self.on_end is not None:
            self.on_end()
            self.on_end = None


def lease_ends(group: str, topic: str) -> str:
    """Name the ends of a group's leases in a topic, as if they were a topic of `Waiters`.

    No topic has such a name. So an end wakes the consumers of its own group, and no other consumers of the topic.
    """
    return f"{group}@{topic}"


class OpenCount:
    """The positions that all queues keep in memory, and the queues that have changed since their leases were saved.

    `rows` counts open positions, and those in `acked_ahead`. `on_change` is called with the first change of a queue.
    """

    def __init__(self) -> None:
        self.rows = 0
        # The `pop_ms` of the newest receipt that ended although its position was not done. The next receipts have a
        # larger one, so that no old receipt is valid again.
        self.ended_pop_ms = 0
        self.changed: dict[QueueLeases, None] = {}
        self.on_change: Callable[[], None] = lambda: None
        # True if a consumer waits because no position was free. `on_free` is called when some are free again.
        self.was_exhausted = False
        self.on_free: Callable[[], None] = lambda: None
        # Called with a group and a key when a lease that has a slot of the key ends (key_limits.py).
        self.free_slot: Callable[[str, str], None] = lambda group, key: None

    def free(self, rows: int) -> None:
        """Take positions out of the count."""
        self.rows -= rows
        # Not with the first free position: all waiting consumers would search for it, and only one would get it.
        if self.was_exhausted and self.rows <= limits.POP_HELD_MAX - max(1, limits.POP_HELD_MAX // FREE_PART):
            self.was_exhausted = False
            self.on_free()

    def add_changed(self, queue: QueueLeases) -> None:
        """Mark a queue whose leases must be saved."""
        self.changed[queue] = None
        self.on_change()


@dataclass(slots=True, eq=False)
class QueueLeases:
    """The leases of one group in one queue. Belongs to the event loop."""

    group: str
    topic: str
    queue_id: int
    index: QueueIndex
    next_offset: int  # no position from here on has been leased
    # The last offset that this object has stored. A different stored offset was set by an administrator or a puller.
    stored_offset: int
    count: OpenCount  # shared by all queues, because one limit holds for their memory
    in_flight: dict[int, Lease] = field(default_factory=dict)  # leased, and disjoint from `returned`
    returned: dict[int, Lease] = field(default_factory=dict)  # came back: leased again before new ones
    parked: dict[int, Lease] = field(default_factory=dict)  # wait for a slot of their key (key_limits.py)
    # Positions at or after `next_offset` that are done already.
    acked_ahead: set[int] = field(default_factory=set)
    nacked: set[int] = field(default_factory=set)  # the positions of `in_flight` that a member has given back
    last_pop_ms: int = 0  # of the newest receipt. In an ordered group, the next one must be larger
    attempt_id: str = ""  # of the last request. In an ordered group, its repetition gets the same positions
    changed_parts: set[int] = field(default_factory=set)  # parts that must be saved (lease_saver.py)
    saved_parts: set[int] = field(default_factory=set)  # parts with a row in the log
    _order: list[int] = field(default_factory=list)  # heap of open positions, and done ones not removed yet
    # The offsets of `returned`, sorted. A selection by key takes thousands of them one after another.
    _returned_order: list[int] = field(default_factory=list)

    @property
    def ends(self) -> str:
        """The name under which consumers of this group wait for the ends of its leases."""
        return lease_ends(self.group, self.topic)

    @property
    def first_open(self) -> int:
        """The first position that is not done. Removes done positions from the front of the heap."""
        # Removed here and not when they are done: positions become done in any order, and a heap finds only its first.
        order = self._order
        while order and not (
            order[0] in self.in_flight or order[0] in self.returned or order[0] in self.parked
        ):
            heapq.heappop(order)
        return min(order[0], self.next_offset) if order else self.next_offset

    @property
    def first_seq(self) -> int | None:
        """The sequence number of the message that is leased next. None if there is no message."""
        if self.returned:
            return self.returned[self._returned_order[0]].seq
        start = max(self.next_offset, self.index.min_offset)
        return self.index.read_numbers(start, 1)[0][0] if start < self.index.max_offset else None

    @property
    def open_rows(self) -> int:
        """The number of positions that are leased, have come back, or wait for a slot."""
        return len(self.in_flight) + len(self.returned) + len(self.parked)

    @property
    def held_rows(self) -> int:
        """The number of positions that members hold."""
        return len(self.in_flight) - len(self.nacked)

    @property
    def is_idle(self) -> bool:
        """True if the stored offset is the only state of this queue."""
        return not (self.in_flight or self.returned or self.parked or self.acked_ahead)

    def mark_changed(self, first: int, last: int) -> None:
        """Mark the parts that contain the positions from `first` to `last` as changed, so that they are saved."""
        first_part, last_part = first // PART_POSITIONS, last // PART_POSITIONS
        if first_part == last_part and first_part in self.changed_parts:
            return
        if not self.changed_parts:
            self.count.add_changed(self)
        self.changed_parts.update(range(first_part, last_part + 1))

    def returned_sizes(self, rows: int) -> list[int]:
        """Return the sizes (bytes) of the lowest `rows` positions that have come back, in their order."""
        return [self.returned[offset].size_bytes for offset in self._returned_order[:rows]]

    def lease_returned(
        self, rows: int, pop_ms: int, deadline_ms: int, *, since_ms: int, in_order: bool
    ) -> list[int]:
        """Lease the lowest `rows` positions that have come back. Returns their offsets, ascending."""
        offsets = self._returned_order[:rows]
        del self._returned_order[:rows]
        for offset in offsets:
            lease = self.in_flight[offset] = self.returned.pop(offset)
            lease.pop_ms, lease.deadline_ms, lease.since_ms, lease.in_order = (
                pop_ms, deadline_ms, since_ms, in_order,
            )  # fmt: skip
            lease.nacked_ms, lease.counts = None, True
            self.mark_changed(offset, offset)
        return offsets

    def lease_next(
        self,
        offsets: Sequence[int],
        seqs: Sequence[int],
        sizes_bytes: Sequence[int],
        pop_ms: int,
        deadline_ms: int,
        *,
        since_ms: int,
        in_order: bool,
    ) -> None:
        """Lease new positions at or after `next_offset`, ascending. Does not move `next_offset` (`advance`).

        `seqs` and `sizes_bytes` are parallel to `offsets`, and may be longer.
        """
        for offset, seq, size in zip(offsets, seqs, sizes_bytes, strict=False):
            self.in_flight[offset] = Lease(seq, size, pop_ms, deadline_ms, since_ms, in_order)
            heapq.heappush(self._order, offset)
        if offsets:
            self.count.rows += len(offsets)
            self.mark_changed(offsets[0], offsets[-1])
        if len(self._order) > SWEEP_POSITIONS_MIN + 2 * self.open_rows:
            # Sweep: a position that stays open would keep the heap entries of all done positions after it.
            self._order = sorted([*self.in_flight, *self.returned, *self.parked])

    def ack_ahead(self, offset: int) -> None:
        """Mark a position at or after `next_offset` as done: it was leased before a restart."""
        # The same receipt may arrive twice, but its position counts once.
        self.count.rows += offset not in self.acked_ahead
        self.acked_ahead.add(offset)
        self.mark_changed(offset, offset)

    def advance(self, next_offset: int) -> None:
        """Move `next_offset` forward: every position before it has been leased or skipped."""
        if next_offset > self.next_offset and not self.is_idle:
            self.mark_changed(next_offset - 1, next_offset - 1)
        self.next_offset = next_offset
        if self.acked_ahead:
            # `next_offset` has passed these positions, which already marks them as done.
            passed = {offset for offset in self.acked_ahead if offset < next_offset}
            self.acked_ahead -= passed
            self.count.free(len(passed))

    def lease_of(self, offset: int, pop_ms: int) -> Lease | None:
        """Find the lease that belongs to a receipt. None if the receipt is not, or no longer, valid."""
        lease = self.in_flight.get(offset)
        return lease if lease is not None and lease.pop_ms == pop_ms and not lease.is_void else None

    def mark_done(self, offset: int) -> None:
        """End a lease, so that the position is done for this group. Ignores a position that is not leased."""
        lease = self.in_flight.pop(offset, None)
        if lease is not None:
            lease.end()
            self.count.free(1)
            self.nacked.discard(offset)
            self.mark_changed(offset, offset)
            self._free_slot(lease)

    def park(self, offset: int) -> None:
        """Let a leased position, which no consumer has seen, wait for a slot of its key."""
        lease = self.parked[offset] = self.in_flight.pop(offset)
        lease.pop_ms = NO_RECEIPT
        self.mark_changed(offset, offset)

    def unpark(self, offset: int) -> None:
        """Let a parked position, which has a slot now, be leased before new positions."""
        self.returned[offset] = self.parked.pop(offset)
        insort(self._returned_order, offset)
        self.mark_changed(offset, offset)

    def _free_slot(self, lease: Lease) -> None:
        """Give back the slot of a lease that has ended, if it has one."""
        key, lease.key = lease.key, ""
        if key:
            self.count.free_slot(self.group, key)

    def give_back(self, offset: int) -> None:
        """End a lease, so that its position is leased again before new positions. It keeps its slot."""
        lease = self.returned[offset] = self.in_flight.pop(offset)
        insort(self._returned_order, offset)
        self.nacked.discard(offset)
        # The old receipt is void from now on. The next lease has another receipt.
        self.count.ended_pop_ms = max(self.count.ended_pop_ms, lease.pop_ms)
        lease.pop_ms = NO_RECEIPT
        lease.end()
        self.mark_changed(offset, offset)

    def nack(self, offset: int, now_ms: int) -> None:
        """Mark a leased position as given back: no member holds it until its next delivery."""
        self.in_flight[offset].nacked_ms = now_ms
        self.in_flight[offset].end()
        self.nacked.add(offset)
        self.mark_changed(offset, offset)

    def prolong(self, offset: int, deadline_ms: int, now_ms: int, *, counts: bool) -> None:
        """Change the deadline of a leased position. It is held again if it was given back."""
        lease = self.in_flight[offset]
        lease.deadline_ms, lease.since_ms, lease.counts, lease.nacked_ms = deadline_ms, now_ms, counts, None
        self.nacked.discard(offset)
        self.mark_changed(offset, offset)

    def drop_before(self, first_seq: int) -> None:
        """Forget returned and parked positions whose rows retention has removed (rows before `first_seq`).

        Leased positions stay until their leases end.
        """
        for positions in (self.parked, self.returned):
            removed = [offset for offset, lease in positions.items() if lease.seq < first_seq]
            self.count.free(len(removed))
            for offset in removed:
                lease = positions.pop(offset)
                self.mark_changed(offset, offset)
                self._free_slot(lease)
            if removed and positions is self.returned:
                self._returned_order = sorted(positions)

    def restore(
        self,
        in_flight: dict[int, Lease],
        returned: dict[int, Lease],
        acked_ahead: set[int],
        saved_parts: set[int],
    ) -> None:
        """Set the leases to those that the log contains, in the rows of the parts `saved_parts`."""
        self.in_flight, self.returned, self.acked_ahead = in_flight, returned, acked_ahead
        self.saved_parts = saved_parts
        self.nacked = {offset for offset, lease in in_flight.items() if lease.nacked_ms is not None}
        self._order = sorted([*in_flight, *returned])
        self._returned_order = sorted(returned)
        self.count.rows += self.open_rows + len(acked_ahead)

    def forget(self) -> None:
        """Void all receipts and forget all positions, so that none comes back."""
        self.count.free(self.open_rows + len(self.acked_ahead))
        leases = [*self.in_flight.values(), *self.returned.values()]
        for lease in self.in_flight.values():
            self.count.ended_pop_ms = max(self.count.ended_pop_ms, lease.pop_ms)
            lease.end()
        self.in_flight.clear()
        self.nacked.clear()
        self.returned.clear()
        self._returned_order.clear()
        self.parked.clear()
        self.acked_ahead.clear()
        for lease in leases:  # at the end: otherwise a slot could go to a parked position of this queue
            self._free_slot(lease)


Key = tuple[str, str, int]  # group, topic, queue number
LeasedPosition = tuple[QueueLeases, int, Lease]  # a queue, a position of it, and the position's lease


class Leases:
    """All `QueueLeases`, by group and queue. Belongs to the event loop.

    `saved_queues` are the queues whose leases the log contains. `orphaned_parts` are rows of leases whose topic, queue
    or group no longer exists.
    """

    def __init__(
        self,
        offsets: Offsets,
        waiters: Waiters,
        count: OpenCount,
        saved_queues: Iterable[QueueLeases] = (),
        orphaned_parts: Mapping[Key, set[int]] | None = None,
    ) -> None:
        self._offsets, self._waiters, self.count = offsets, waiters, count
        # The units (group, topic) whose first offsets are not in the log yet: no message may be handed out for them.
        self.new_units: set[tuple[str, str]] = set()
        # Parts of forgotten queues whose rows must be deleted from the log. Each save deletes them first.
        self.orphaned_parts = dict(orphaned_parts or {})
        self._queues: dict[Key, QueueLeases] = {}
        self._by_topic: dict[tuple[str, str], set[int]] = {}  # the queues of each group and topic
        for queue in saved_queues:
            self._add((queue.group, queue.topic, queue.queue_id), queue)

    @property
    def free_positions(self) -> int:
        """The number of positions that may still be leased, over all queues."""
        return limits.POP_HELD_MAX - self.count.rows

    def get(self, group: str, topic: str, queue_id: int) -> QueueLeases | None:
        """Find the leases of a group in a queue. None if the group has no state there."""
        return self._queues.get((group, topic, queue_id))

    def all(self) -> list[QueueLeases]:
        """List the leases of all groups and queues."""
        return list(self._queues.values())

    def open(
        self,
        group: str,
        topic: Topic,
        queue_ids: Iterable[int],
        *,
        from_max: bool,
        queues_in_use: Collection[QueueLeases] = (),
    ) -> list[QueueLeases]:
        """Find or create the leases of a group in these queues of a topic, in the order of `queue_ids`.

        With `from_max`, a group without a stored offset begins at the end of a queue, otherwise at its beginning.
        `queues_in_use` are the caller's queues, which are not dropped even if they are idle. Raises OverLimit.
        """
        if len(self._queues) >= limits.POP_WINDOWS_MAX:
            self._drop_idle_queues(queues_in_use)  # first, so that it drops none of the queues opened here
        stored = self._offsets.table.get(group, {}).get(topic.name, {})
        queues: list[QueueLeases] = []
        for queue_id in queue_ids:
            queue = self._queues.get((group, topic.name, queue_id))
            if queue is None or queue.stored_offset != stored.get(queue_id):
                queue = self._begin(group, topic, queue_id, stored.get(queue_id), from_max=from_max)
            queues.append(queue)
        return queues

    def _begin(
        self, group: str, topic: Topic, queue_id: int, offset: int | None, *, from_max: bool
    ) -> QueueLeases:
        """Create the leases of a queue that has none, or replace them because the stored offset was changed.

        `offset`: the stored offset. None for a new group, whose first offset is stored here. Raises OverLimit.
        """
        key = (group, topic.name, queue_id)
        if key in self._queues:
            self._forget(key, self._queues[key])
        # `open` drops idle queues only once for all queues of a topic, so the limit may be exceeded by their number.
        if len(self._queues) >= limits.POP_WINDOWS_MAX + limits.QUEUES_PER_TOPIC_MAX:
            raise OverLimit(f"{len(self._queues)} queues have messages in flight; acknowledge some first")
        index = topic.queues[queue_id].index
        if offset is None:
            # Stored at once: otherwise the group could begin elsewhere after a crash before the first answer.
            offset = _first_offset(index, from_max)
            self.new_units.add((group, topic.name))
            self._offsets.commit(group, topic.name, {queue_id: offset}, {queue_id: index.max_offset})
        # The stored offset may be out of range: retention has removed rows, or an administrator stored another number.
        start = min(max(offset, index.min_offset), index.max_offset)
        queue = QueueLeases(group, topic.name, queue_id, index, start, offset, self.count)
        self._add(key, queue)
        return queue

    def is_live(self, queue: QueueLeases) -> bool:
        """Check whether this state is current. It is outdated if the stored offset was changed elsewhere."""
        key = (queue.group, queue.topic, queue.queue_id)
        return self._queues.get(key) is queue and self._offsets.find_offset(*key) == queue.stored_offset

    def forget_moved(self, group: str, topic: str) -> None:
        """Forget the queues of a topic in which the group's stored offset was changed elsewhere."""
        for queue_id in sorted(self._by_topic.get((group, topic), ())):
            key = group, topic, queue_id
            if not self.is_live(self._queues[key]):
                self._forget(key, self._queues[key])

    def ack_ahead(self, queue: QueueLeases, offset: int) -> bool:
        """Accept an acknowledgement of a lease that a restart has lost. Returns whether it was accepted.

        False if the position is before `next_offset` (leased again, or done) or not in the queue, or if a limit of
        leases is reached.
        """
        # Limited like leases, because old receipts may name any number of positions.
        is_ahead = max(queue.next_offset, queue.index.min_offset) <= offset < queue.index.max_offset
        if (
            not is_ahead
            or len(queue.acked_ahead) >= limits.POP_HELD_PER_QUEUE_MAX
            or self.free_positions <= 0
        ):
            return False
        queue.ack_ahead(offset)
        return True

    def finish(self, positions: list[LeasedPosition]) -> None:
        """End these leases: their positions are done.

        Stores the group's offset in each queue (`store`), and wakes consumers that wait because a queue was full.
        """
        was_full = {queue: queue.open_rows >= limits.POP_HELD_PER_QUEUE_MAX for queue, _, _ in positions}
        for queue, offset, lease in positions:
            # No lease is found if it ended meanwhile, for example because the queue was forgotten (`forget`).
            if queue.in_flight.get(offset) is lease:
                queue.mark_done(offset)
        self.store_all(was_full.keys())
        if any(was_full.values()):
            self._waiters.wake({queue.ends for queue, is_full in was_full.items() if is_full})

    def give_up(self, positions: list[LeasedPosition], pop_ms: int) -> None:
        """End the leases with this `pop_ms`, whose consumer has not seen the messages. Their positions are leased next.

        A position that was settled or leased again meanwhile stays as it is.
        """
        for queue, offset, lease in positions:
            if queue.lease_of(offset, pop_ms) is lease:
                queue.give_back(offset)
        self._waiters.wake({queue.ends for queue, _, _ in positions})

    def store_all(self, queues: Iterable[QueueLeases]) -> None:
        """Store the group's offset in each of these queues (`store`)."""
        for queue in queues:
            self.store(queue)

    def store(self, queue: QueueLeases) -> None:
        """Store the first open position of a queue as the group's offset.

        If the stored offset was changed elsewhere, the queue is forgotten instead.
        """
        group, topic, queue_id = key = (queue.group, queue.topic, queue.queue_id)
        if self._queues.get(key) is not queue:
            return
        if self._offsets.table.get(group, {}).get(topic, {}).get(queue_id) != queue.stored_offset:
            self._forget(key, queue)
            return
        first_open = queue.first_open
        if first_open != queue.stored_offset:
            self._offsets.advance(group, topic, queue_id, first_open)
            queue.stored_offset = first_open

    def _add(self, key: Key, queue: QueueLeases) -> None:
        """Add a queue to both indexes."""
        self._queues[key] = queue
        self._by_topic.setdefault(key[:2], set()).add(key[2])

    def _remove(self, key: Key) -> None:
        """Remove a queue from both indexes."""
        del self._queues[key]
        queue_ids = self._by_topic[key[:2]]
        queue_ids.discard(key[2])
        if not queue_ids:
            del self._by_topic[key[:2]]

    def _forget(self, key: Key, queue: QueueLeases) -> None:
        """Remove a queue, void its receipts, and let the next save delete its rows."""
        queue.forget()
        self._remove(key)
        if queue.saved_parts:
            self.orphaned_parts[key] = self.orphaned_parts.get(key, set()) | queue.saved_parts
        self.count.changed.pop(queue, None)

    def _drop_idle_queues(self, queues_in_use: Collection[QueueLeases]) -> None:
        """Drop up to DROPPED_QUEUES idle queues that are not in `queues_in_use`.

        An idle queue has no state but its stored offset. Raises OverLimit if there is no queue to drop.
        """
        idle_queues = (
            (key, queue)
            for key, queue in self._queues.items()
            if queue.is_idle and queue not in queues_in_use
        )
        dropped_queues = list(itertools.islice(idle_queues, DROPPED_QUEUES))
        for key, queue in dropped_queues:
            self._forget(key, queue)
        if not dropped_queues:
            raise OverLimit(f"{len(self._queues)} queues have messages in flight; acknowledge some first")


def _first_offset(index: QueueIndex, from_max: bool) -> int:
    """Find the offset where a new group begins: the first message, or with `from_max` the end.

    The end is the last message, as in RocketMQ. While the queue still has its very first message, the end is that first
    message, so that a group that starts a moment after the first send misses nothing.
    """
    if not from_max or index.min_offset == 0:
        return index.min_offset
    return max(index.min_offset, index.max_offset - 1)
