"""Leases kept in memory: positions stay in flight until their receipts come back or their time is over.

A crash forgets these leases, and the group's stored offset is the first position that is not done: so messages in
flight are handed out again after a crash, and none is lost. Their number is bounded: a full queue gives no more until
one comes back, and a lease that was made longer in a crowded queue is put into the log as a promise.

Nothing here waits for the disk, unless a message is written to its group again. No lock is taken: each decision is made
between two awaits.
"""

from __future__ import annotations

from collections.abc import Iterable

from timeball import limits
from timeball.broker.appender import Appender
from timeball.broker.components import Components
from timeball.broker.consuming import restart
from timeball.broker.consuming.leases import Lease, Leases, QueueLeases
from timeball.broker.consuming.redelivery import Redelivery
from timeball.broker.consuming.redelivery_rows import reason_text
from timeball.broker.consuming.requests import PositionReceipt
from timeball.broker.consuming.selection import Selection
from timeball.broker.rates import Stat, of_group
from timeball.broker.waiters import Waiters

ACKNOWLEDGED_MAX = 16_384  # of receipts that are remembered, some 300 bytes each


class MemoryLeases:
    """Settles leases of positions. Belongs to the event loop; `close` ends its task."""

    def __init__(self, parts: Components, appender: Appender, waiters: Waiters, leases: Leases) -> None:
        self._parts, self._waiters, self._leases = parts, waiters, leases
        self.redelivery = Redelivery(parts, appender, waiters, leases)
        # Receipts from before this are of an earlier life of the broker (`_ack_ahead`).
        self._started_ms = parts.clock.now_ms()
        # The last receipts that were acknowledged, the oldest first: a client whose answer was lost sends them again.
        self._acknowledged: dict[PositionReceipt, None] = {}
        # Leases that the last stop saved end when they would have ended without it.
        for queue in leases.all():
            for offset, lease in queue.in_flight.items():
                self.redelivery.expect(queue, [offset], lease.pop_ms, lease.deadline_ms)

    async def close(self) -> None:
        """Save the leases in flight: the next start accepts their receipts."""
        await self.redelivery.close()
        if self._parts.writer.failed is None:
            await self._parts.writer.flushed()  # rows under way to the log are done, and not in flight
            restart.save(self._parts.in_flight, self._leases.all(), self._parts.clock.as_wall)

    def hold(self, selection: Selection) -> None:
        """Bring the positions of a selection back at its deadline."""
        for queue, offsets in selection.offsets().items():
            self.redelivery.expect(queue, offsets, selection.pop_ms, selection.deadline_ms)

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
                self._acknowledged[receipt] = None
                self._parts.rates.add(Stat.GROUP_ACK_NUMS, of_group(receipt.topic, receipt.group), 1)
        self._leases.store_all(was_full)
        while len(self._acknowledged) > ACKNOWLEDGED_MAX:
            del self._acknowledged[next(iter(self._acknowledged))]
        # Consumers may be waiting for a queue that was full, or in order for the last lease to end.
        self._waiters.wake({q.topic for q, full in was_full.items() if full or not q.in_flight})
        return verdicts

    def was_acknowledged(self, receipt: PositionReceipt) -> bool:
        """Return whether this receipt was acknowledged before, as far as that is remembered."""
        return receipt in self._acknowledged

    async def change(self, receipt: PositionReceipt, invisible_ms: int) -> PositionReceipt | None:
        """Make a lease end `invisible_ms` from now; return the new receipt, None when the old one is not valid.

        In order the receipt stays as it is, as in RocketMQ, whose clients go on using it.
        """
        found = self._lease_of(receipt)
        if found is None:
            return None
        queue, lease = found
        now_ms = self._parts.clock.now_ms()
        lease.deadline_ms = self._parts.clock.elapsed_ms() + invisible_ms
        queue.held_again(receipt.offset)
        if not lease.in_order:
            # Always another number, or the old receipt would still be valid.
            lease.pop_ms = max(now_ms, receipt.pop_ms + 1)
        changed = receipt._replace(pop_ms=lease.pop_ms)
        # A long lease would keep its place in a bounded queue; as a promise it takes none.
        if not lease.in_order and queue.open_rows > limits.POP_HELD_PER_QUEUE_MAX // 2:
            await self.redelivery.write(queue, [receipt.offset], later=True)
        else:
            self.redelivery.expect(queue, [receipt.offset], lease.pop_ms, lease.deadline_ms)
        return changed

    async def nack(self, receipt: PositionReceipt, delay_ms: int, reason: str) -> PositionReceipt | None:
        """Give a message back for its next delivery in `delay_ms`, as `change` does; its lease remembers why."""
        changed = await self.change(receipt, delay_ms)
        found = None if changed is None else self._lease_of(changed)
        if found is not None:
            queue, lease = found
            queue.nack(receipt.offset, self._parts.clock.now_ms())
            lease.nack_reason = reason_text(reason)
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

    async def dead_letter(self, receipt: PositionReceipt, reason: str) -> bool:
        """Write the message to the group's dead letters; false when the receipt is not valid."""
        found = self._lease_of(receipt)
        if found is not None:
            found[1].nack_reason = reason_text(reason) or found[1].nack_reason
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
        topic = self._parts.topics.find_topic(receipt.topic)
        stored = self._parts.offsets.find_offset(receipt.group, receipt.topic, receipt.queue_id)
        if topic is None or stored is None or not 0 <= receipt.pop_ms < self._started_ms:
            return False
        (queue,) = self._leases.open(receipt.group, topic, [receipt.queue_id], from_max=False)
        return self._leases.ack_ahead(queue, receipt.offset)
