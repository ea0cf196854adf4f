"""Leases kept in memory: positions stay in flight until their receipts come back or their time is over.

A crash forgets these leases, and the group's stored offset is the first position that is not done: so a crash hands
out again what was in flight and loses nothing. What is in flight is bounded: a queue gives no more until something
comes back, and a lease that was made longer in a crowded queue is put into the log as a promise.

Nothing here waits for the disk, unless a message is written to its group again. No lock is taken: each decision is made
between two awaits.
"""

from __future__ import annotations

from collections.abc import Iterable

from timeball import limits
from timeball.broker.appending import Appending
from timeball.broker.consuming.leases import Leases
from timeball.broker.consuming.pull import Waiters
from timeball.broker.consuming.queue_leases import Lease, QueueLeases
from timeball.broker.consuming.receipts import PositionReceipt
from timeball.broker.consuming.redelivery import Redelivery
from timeball.broker.consuming.selection import Found, Selection
from timeball.broker.parts import Parts
from timeball.broker.rates import Stat, of_group


class MemoryLeases:
    """Settles leases of positions. Belongs to the event loop; `close` ends its task."""

    def __init__(self, parts: Parts, appending: Appending, waiters: Waiters, leases: Leases) -> None:
        self._parts, self._waiters, self._leases = parts, waiters, leases
        self.redelivery = Redelivery(parts, appending, waiters, leases)
        self._started_ms = parts.clock.now_ms()
        for queue in leases.all():
            for offset, lease in queue.in_flight.items():
                self.redelivery.expect(queue, [offset], lease.pop_ms, lease.deadline_ms)

    async def close(self) -> None:
        """Save what is in flight: the next start accepts its receipts."""
        await self.redelivery.close()
        if self._parts.writer.failed is None:
            await self._parts.writer.flushed()  # rows under way to the log are done, and not in flight
            self._leases.save()

    # -- positions of a selection --------------------------------------------------------------------------------

    def hold(self, selection: Selection) -> None:
        """Bring the positions of a selection back at its deadline."""
        for queue, offsets in selection.offsets().items():
            self.redelivery.expect(queue, offsets, selection.pop_ms, selection.deadline_ms)

    def finish(self, found: list[Found]) -> None:
        """End leases whose positions are done, and tell who waits for room in a queue that was full."""
        was_full = {queue: queue.open_rows >= limits.POP_HELD_PER_QUEUE_MAX for queue, _, _ in found}
        for queue, offset, lease in found:
            if queue.in_flight.get(offset) is lease:
                queue.done(offset)
        self.store(was_full)
        self._waiters.wake({queue.topic for queue, full in was_full.items() if full})

    def give_up(self, selection: Selection) -> None:
        """Return a selection that no consumer has seen: it is the next to be handed out."""
        for queue, offset, lease in selection.found:
            if queue.lease_of(offset, selection.pop_ms) is lease:
                queue.give_back(offset)
        self._waiters.wake({queue.topic for queue, _, _ in selection.found})

    def store(self, queues: Iterable[QueueLeases]) -> None:
        """Store how far the group has come in these queues."""
        for queue in queues:
            if self._leases.store(queue):
                self.redelivery.narrow(queue)

    # -- receipts ------------------------------------------------------------------------------------------------

    def acknowledge(self, receipts: Iterable[PositionReceipt]) -> list[bool]:
        """End these leases; false for a receipt that is not valid (any more)."""
        verdicts: list[bool] = []
        was_full: dict[QueueLeases, bool] = {}
        for receipt in receipts:
            found = self._lease_of(receipt)
            if found is not None:
                queue, _ = found
                was_full.setdefault(queue, queue.open_rows >= limits.POP_HELD_PER_QUEUE_MAX)
                queue.done(receipt.offset)
            verdicts.append(found is not None or self._ack_ahead(receipt))
            if verdicts[-1]:
                self._parts.rates.add(Stat.GROUP_ACK_NUMS, of_group(receipt.topic, receipt.group), 1)
        self.store(was_full)
        # Consumers may be waiting for a queue that was full, or in order for the last lease to end.
        self._waiters.wake({q.topic for q, full in was_full.items() if full or not q.in_flight})
        return verdicts

    async def change(self, receipt: PositionReceipt, invisible_ms: int) -> PositionReceipt | None:
        """Make a lease end `invisible_ms` from now; return the new receipt, None when the old one is not valid.

        In order the receipt stays as it is, as in RocketMQ, whose clients go on using it.
        """
        found = self._lease_of(receipt)
        if found is None:
            return None
        queue, lease = found
        now_ms = self._parts.clock.now_ms()
        lease.deadline_ms = now_ms + invisible_ms
        if not lease.in_order:
            lease.pop_ms = max(now_ms, receipt.pop_ms + 1)
        changed = receipt._replace(pop_ms=lease.pop_ms)
        if not lease.in_order and queue.open_rows > limits.POP_HELD_PER_QUEUE_MAX // 2:
            await self.redelivery.write(queue, [receipt.offset], later=True)
        else:
            self.redelivery.expect(queue, [receipt.offset], lease.pop_ms, lease.deadline_ms)
        return changed

    def give_back(self, receipts: Iterable[PositionReceipt]) -> None:
        """Return messages whose consumer was gone before it had them: they are the next to be handed out."""
        topics = set()
        for receipt in receipts:
            found = self._lease_of(receipt)
            if found is not None:
                found[0].give_back(receipt.offset)
                topics.add(receipt.topic)
        self._waiters.wake(topics)

    async def dead_letter(self, receipt: PositionReceipt) -> bool:
        """Write the message to the group's dead letters; false when the receipt is not valid."""
        found = self._lease_of(receipt)
        if found is not None:
            await self.redelivery.write(found[0], [receipt.offset], dead=True)
        return found is not None

    def _lease_of(self, receipt: PositionReceipt) -> tuple[QueueLeases, Lease] | None:
        if receipt.pop_ms < 0:  # NO_RECEIPT is below: it marks positions for which no receipt is valid
            return None
        queue = self._leases.get(receipt.group, receipt.topic, receipt.queue_id)
        lease = queue.lease_of(receipt.offset, receipt.pop_ms) if queue is not None else None
        return (queue, lease) if queue is not None and lease is not None else None

    def _ack_ahead(self, receipt: PositionReceipt) -> bool:
        """Accept a receipt of before a crash: a consumer that has worked through it need not do so again."""
        topic = self._parts.topics.find(receipt.topic)
        stored = self._parts.offsets.find(receipt.group, receipt.topic, receipt.queue_id)
        if topic is None or stored is None or not 0 <= receipt.pop_ms < self._started_ms:
            return False
        queue = self._leases.open(receipt.group, topic, receipt.queue_id, from_max=False)
        return self._leases.ack_ahead(queue, topic.queues[receipt.queue_id].index, receipt.offset)
