"""Settle leases: acknowledge messages, change the end of leases, give messages back, or make them dead letters.

Positions stay in flight until their receipts come back or their leases end. The number of leases is limited: a full
queue hands out no more messages until a lease ends. In a queue that is more than half full, a lease that a client of
POP prolongs is replaced by a scheduled message in the log.

An acknowledgement changes memory only, and lease_saver.py saves it soon. A message that goes back to its group, or to
the dead letters, is written to the log before the answer (redelivery.py). No lock is necessary, because each decision
is made between two awaits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from timeball.broker.accepting.ingress import AsyncBatcher
from timeball.broker.accepting.waiters import Waiters
from timeball.broker.consuming.lease_saver import LeaseSaver
from timeball.broker.consuming.leases import Lease, Leases, QueueLeases
from timeball.broker.consuming.redelivery import Redelivery, Return, Returning
from timeball.broker.consuming.redelivery_rows import reason_text
from timeball.broker.consuming.requests import Receipt
from timeball.broker.registry.rates import Rates, Stat, of_group
from timeball.broker.registry.redeliveries import topic_of
from timeball.broker.registry.tables import Tables
from timeball.io.clock import SchedulerClock
from timeball.log.writer import CommitLog
from timeball.model import limits
from timeball.model.errors import InvalidDelay, TimeballError

ENDED_MAX = 16_384  # receipts remembered, about 300 bytes each
RETURNS_PER_TURN = 1_024  # messages that requests give back together, with one append


class _Request(NamedTuple):
    """A request to return the message of a receipt to its group."""

    receipt: Receipt
    how: Return


class Settling:
    """Settles leases. Belongs to the event loop, and `close` ends its tasks."""

    def __init__(
        self,
        waiters: Waiters,
        leases: Leases,
        redelivery: Redelivery,
        saver: LeaseSaver,
        *,
        clock: SchedulerClock,
        log: CommitLog,
        tables: Tables,
        rates: Rates,
        nack_ms_max: int,
    ) -> None:
        """`nack_ms_max`: the longest delay of a message that is given back, unless it is leased in order."""
        self._waiters, self._leases, self._saver = waiters, leases, saver
        self._clock, self._log, self._tables, self._rates = clock, log, tables, rates
        self._nack_ms_max = nack_ms_max
        self.redelivery = redelivery
        # Receipts with an earlier time are from before the last restart (`_ack_ahead`).
        self._started_ms = clock.now_ms()
        # The last receipts that were acknowledged or became dead letters, oldest first: a client that lost the answer
        # sends them again.
        self._ended: OrderedDict[Receipt, None] = OrderedDict()
        self._returns: AsyncBatcher[_Request, bool] = AsyncBatcher(self._return, RETURNS_PER_TURN)
        # Leases that the log contained end at the same time as they would have without the restart.
        for queue in leases.all():
            for offset, lease in queue.in_flight.items():
                self.redelivery.add_deadline(queue, [offset], lease.pop_ms, lease.deadline_ms)

    async def close(self) -> None:
        """Save the leases, so that the next start continues with them."""
        await self.redelivery.close()
        self._saver.close()
        if self._log.writer.failed is None:
            # Positions whose rows are still being written become done first.
            await self._log.writer.flushed()
            self._saver.save()

    def acknowledge(self, receipts: Iterable[Receipt]) -> list[bool]:
        """End these leases. The result is False for each receipt that is not, or no longer, valid."""
        results: list[bool] = []
        was_full: dict[QueueLeases, bool] = {}
        acknowledged: dict[tuple[str, str], int] = {}
        for receipt in receipts:
            queue_and_lease = self._lease_of(receipt)
            if queue_and_lease is not None:
                queue, _ = queue_and_lease
                if queue not in was_full:
                    was_full[queue] = queue.open_rows >= limits.POP_HELD_PER_QUEUE_MAX
                queue.mark_done(receipt.offset)
            # A consumer that finished its message before a crash still holds a receipt from then.
            is_valid = queue_and_lease is not None or self._ack_ahead(receipt)
            results.append(is_valid)
            if is_valid:
                self._remember(receipt)
                key = receipt.group, receipt.topic
                acknowledged[key] = acknowledged.get(key, 0) + 1
        for (group, topic), rows in acknowledged.items():
            self._rates.add(Stat.GROUP_ACK_NUMS, of_group(topic_of(group, topic), group), rows)
        self._leases.store_all(was_full)
        # Consumers may wait for space in a full queue, or in an ordered group for the end of its last lease.
        self._waiters.wake(
            [queue.ends for queue, is_full in was_full.items() if is_full or not queue.in_flight]
        )
        return results

    def was_ended(self, receipt: Receipt) -> bool:
        """Check whether this receipt is among the last ENDED_MAX ones that were acknowledged or became dead letters."""
        return receipt in self._ended

    def _remember(self, receipt: Receipt) -> None:
        """Remember a receipt for `was_ended`, and forget the oldest one beyond ENDED_MAX."""
        self._ended[receipt] = None
        if len(self._ended) > ENDED_MAX:
            self._ended.popitem(last=False)  # a dict would search for its first entry behind all deleted ones

    async def change(
        self, receipt: Receipt, invisible_ms: int, *, counts: bool, new_receipt: bool
    ) -> Receipt | None:
        """Make a lease end `invisible_ms` from now. Returns its receipt, or None if `receipt` is not valid.

        With `new_receipt` a new receipt replaces the old one, as in RocketMQ's POP. In an ordered group the receipt
        stays the same, because RocketMQ's clients go on using it. Without `counts`, the lease is no attempt, unless the
        group is ordered.

        In two cases the message of an unordered group is given back, and the returned receipt is not valid any more:
        with 0 ms without `counts`, and with `new_receipt` when many positions of the queue are open.
        """
        queue_and_lease = self._lease_of(receipt)
        if queue_and_lease is None:
            return None
        queue, lease = queue_and_lease
        if not (lease.in_order or counts or invisible_ms):
            self.give_back([receipt])
            return receipt
        # POP's clients also use this call for failures. A long lease would occupy one of the queue's limited positions.
        # A scheduled message in the log occupies none.
        is_crowded = queue.open_rows > limits.POP_HELD_PER_QUEUE_MAX // 2
        if new_receipt and invisible_ms and not lease.in_order and is_crowded:
            lease.counts = counts
            return receipt if await self._returns.put(_Request(receipt, Return(invisible_ms))) else None
        if new_receipt and not lease.in_order:
            # Always a different number, otherwise the old receipt would still be valid.
            lease.pop_ms = max(self._clock.now_ms(), receipt.pop_ms + 1)
        now_ms, deadline_ms = self._clock.now_ms(), self._clock.elapsed_ms() + invisible_ms
        queue.prolong(receipt.offset, deadline_ms, now_ms, counts=counts or lease.in_order)
        self.redelivery.add_deadline(queue, [receipt.offset], lease.pop_ms, lease.deadline_ms)
        return receipt._replace(pop_ms=lease.pop_ms)

    async def give_up(self, receipt: Receipt, how: Return, *, counts: bool = True) -> bool:
        """Return a message to its group, or move it to the dead letters, durably. False if the receipt is not valid.

        In an ordered group, the lease ends after the delay, and its queue hands out nothing before. Raises
        InvalidDelay, OverLimit.
        """
        queue_and_lease = self._lease_of(receipt)
        if queue_and_lease is None:
            return False
        queue, lease = queue_and_lease
        self._check_delay(lease, how.delay_ms or 0)
        if lease.in_order and not how.is_dead:
            lease.nack_reason = reason_text(how.reason or "")
            now_ms = self._clock.now_ms()
            queue.prolong(receipt.offset, self._clock.elapsed_ms() + (how.delay_ms or 0), now_ms, counts=True)
            queue.nack(receipt.offset, now_ms)
            self.redelivery.add_deadline(queue, [receipt.offset], lease.pop_ms, lease.deadline_ms)
            await self._saver.save_and_wait([queue])
            return True
        # A nack without a delay that is no attempt: the position itself is leased again, and no row is written.
        if not (counts or how.is_dead) and how.delay_ms == 0:
            self.give_back([receipt])
            return True
        lease.counts = counts
        is_valid = await self._returns.put(_Request(receipt, how))
        if is_valid and how.is_dead:
            self._remember(receipt)
        return is_valid

    def _check_delay(self, lease: Lease, delay_ms: int) -> None:
        """Raise InvalidDelay unless a leased message may be given back with this delay."""
        # A message that is leased in order stays leased for the delay, so it has the limit of leases. For any other
        # message the delay is that of a scheduled message.
        ms_max, scope = self._nack_ms_max, ""
        if lease.in_order:
            ms_max, scope = limits.INVISIBLE_MS_MAX, " for a message that is leased in order"
        if not 0 <= delay_ms <= ms_max:
            raise InvalidDelay(f"after={delay_ms} ms: between 0 and {ms_max} ms{scope}")

    def give_back(self, receipts: Iterable[Receipt]) -> None:
        """End leases that are no attempt: the consumer disconnected before it received the messages, or gave them back.

        Their positions are handed out next. Receipts that are not valid are ignored.
        """
        ended = set()
        for receipt in receipts:
            queue_and_lease = self._lease_of(receipt)
            if queue_and_lease is not None:
                queue_and_lease[0].give_back(receipt.offset)
                ended.add(queue_and_lease[0].ends)
        self._waiters.wake(ended)

    async def _return(self, requests: list[_Request]) -> Sequence[bool | TimeballError]:
        """Write the messages of these requests to their groups again, durably.

        The result for each request is True, False if its receipt is not valid, or the error of its write.
        """
        returning: list[Returning | None] = []
        for request in requests:
            queue_and_lease = self._lease_of(request.receipt)
            # Void from here on, so that the second of two equal receipts is not valid.
            returning.append(
                None
                if queue_and_lease is None
                else self.redelivery.begin_return(queue_and_lease[0], request.receipt.offset, request.how)
            )
        valid = [position for position in returning if position is not None]
        results = iter(await self.redelivery.write_apart(valid))
        return [False if position is None else next(results) for position in returning]

    def _lease_of(self, receipt: Receipt) -> tuple[QueueLeases, Lease] | None:
        """Find the queue and the lease of a receipt. None if it is not, or no longer, valid."""
        if receipt.pop_ms < 0:  # NO_RECEIPT is negative and marks positions without a valid receipt
            return None
        queue = self._leases.get(receipt.group, receipt.topic, receipt.queue_id)
        lease = queue.lease_of(receipt.offset, receipt.pop_ms) if queue is not None else None
        return (queue, lease) if queue is not None and lease is not None else None

    def _ack_ahead(self, receipt: Receipt) -> bool:
        """Accept an acknowledgement with a receipt from before a restart. Returns whether it was accepted.

        So the consumer need not process the message again.
        """
        topic = self._tables.topics.find_topic(receipt.topic)
        stored = self._tables.offsets.find_offset(receipt.group, receipt.topic, receipt.queue_id)
        if topic is None or stored is None or not 0 <= receipt.pop_ms < self._started_ms:
            return False
        (queue,) = self._leases.open(receipt.group, topic, [receipt.queue_id], from_max=False)
        return self._leases.ack_ahead(queue, receipt.offset)
