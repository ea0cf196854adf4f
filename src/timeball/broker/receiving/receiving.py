"""The verbs: receive, acknowledge, change the time, dead letter, give back.

Positions are taken from the group's windows as a pop takes them, on the event loop and in one step, so that no
position is taken twice. Then their rows are read and written to the log as promises; when that is durable the
positions are done and the consumer is answered. So what is in hand of a window is what is on its way to the disk, and
however much a group has received and not acknowledged, nothing of it is kept in memory here.

When reading or writing fails the positions come back at once, nobody has seen their rows. A consumer that goes away
after that has its messages given back, and the attempt is not counted.

In order, positions stay in hand and nothing is promised (popper.py); a message that has used up its attempts goes to
the dead letters instead of being handed out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from timeball.broker.parts import in_thread
from timeball.broker.popping import popper as popping
from timeball.broker.popping.popper import Ask
from timeball.broker.popping.taking import Taking
from timeball.broker.popping.window import Window
from timeball.broker.rates import Stat, of_group
from timeball.broker.receipts import AnyReceipt, Receipt
from timeball.broker.receiving import parking, positions
from timeball.broker.receiving.answers import Answers, Change
from timeball.broker.receiving.receipts import Received
from timeball.broker.registry.offsets import Parked
from timeball.errors import TimeballError
from timeball.message import READ_SCHEMA, int64

if TYPE_CHECKING:
    from timeball.broker.service import Broker

logger = logging.getLogger(__name__)

_NOTHING = Received(pa.RecordBatch.from_pylist([], READ_SCHEMA), [])
_RECONSUME_TIMES = READ_SCHEMA.get_field_index("reconsume_times")


class Receiving:
    """See the module. Belongs to the event loop; `close` ends its tasks."""

    def __init__(self, broker: Broker) -> None:
        self._broker, self._parts, self._popper = broker, broker.parts, broker.popper
        self._answers = Answers(broker.parts, broker.appending)
        self._under_way: dict[
            int, list[Window]
        ] = {}  # first row of promises that are not durable yet -> whose
        self._tasks: set[asyncio.Task[None]] = set()

    async def restore(self) -> None:
        """After a crash: what the promises in the log say was handed out is not handed out again."""
        parts = self._parts
        found = await in_thread(parts.reader_thread, positions.find, parts.reader, parts.offsets.parked)
        positions.restore(parts, self._popper.windows, found)

    async def close(self) -> None:
        """Wait for what is given back for consumers that have gone."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- receiving ---------------------------------------------------------------------------------------------

    async def receive(self, ask: Ask, wait_ms: int) -> Received:
        """Up to `ask.rows` rows; waits up to `wait_ms` for the first. Raises NotFound, OutOfRange, OverLimit."""
        self._popper.check(ask)
        if not self._parts.receipt_secret.is_made:
            self._parts.receipt_secret.get()
            await self._parts.writer.flushed()  # a receipt must not outlive the secret that sealed it
        until_s = popping.until_s(wait_ms)
        if ask.in_order:
            return await self._receive_in_order(ask, until_s)
        while True:
            taking = await self._popper.take(ask, until_s)
            if taking.found:
                received = await self._park(ask, taking)
                if received.receipts:
                    return received
            elif not taking.unseen:
                return _NOTHING
            await asyncio.sleep(0)  # the filter passes few: others get their turn between two looks

    async def _park(self, ask: Ask, taking: Taking) -> Received:
        """Read what was taken, promise it to the group again, and hand it out when that is durable."""
        try:
            self._begin()
            rows, keep = await in_thread(self._parts.reader_thread, self._popper.read_rows, ask, taking.seqs)
            if not keep.all():
                rows = rows.filter(pa.array(keep))
                self._popper.leave_out(taking, keep)
            if not taking.found:
                return _NOTHING
            durable, receipts = self._append(ask, rows, taking)
        except BaseException:  # also a consumer that has gone away: nobody has seen these rows
            self._popper.give_up(taking)
            raise
        try:
            await durable
        except asyncio.CancelledError:
            self.not_seen(receipts)
            raise
        sizes = [held.size_bytes for _, _, held in taking.found]
        self._parts.rates.got(ask.topic, ask.group, rows.num_rows, sum(sizes))
        return Received(rows, list(receipts))

    def _append(
        self, ask: Ask, rows: pa.RecordBatch, taking: Taking
    ) -> tuple[asyncio.Future[int], list[Receipt]]:
        parts, count = self._parts, rows.num_rows
        parts.writer.check_room()
        now_ms = parts.clock.now_ms()
        due_ms = now_ms + ask.invisible_ms
        times = parking.times_after(rows)
        topics = parking.topics_after(ask.group, ask.topic, times, parts.groups.times_max(ask.group))
        for topic in set(topics):
            parts.topics.ensure(topic, 1)
        promises = parking.parked(
            rows,
            topics=topics,
            properties=parking.dressed(rows.column("properties"), ask.group, ask.topic, now_ms),
            times=times,
            due_ms=np.full(count, due_ms, dtype=np.int64),
            source_seq=pa.array(int64(rows.column("seq"))),
            now_ms=now_ms,
            host=parts.settings.host,
        )
        first_seq, windows = parts.writer.next_seq, list({window for window, _, _ in taking.found})

        def on_durable() -> None:
            del self._under_way[first_seq]
            self._popper.finish(taking)

        appended = self._broker.appending.append(self._broker.appending.prepare(promises, now_ms), on_durable)
        self._under_way[first_seq] = windows
        return appended.durable, [Receipt(ask.group, ask.topic, first_seq + i, due_ms) for i in range(count)]

    def _begin(self) -> None:
        """Append where a group begins ahead of what it is handed: it must not begin elsewhere after a crash."""
        if self._popper.windows.fresh:
            self._popper.windows.fresh = False
            self._broker.save_offsets()

    def parked(self) -> Parked:
        """What a crash must know of what was handed out, beside the offsets of this moment."""
        windows = self._popper.windows
        under_way = [seq for seq, mine in self._under_way.items() if any(map(windows.is_live, mine))]
        return Parked(min([self._parts.writer.next_seq, *under_way]), windows.ahead())

    # -- in order ----------------------------------------------------------------------------------------------

    async def _receive_in_order(self, ask: Ask, until_s: float) -> Received:
        times_max = self._parts.groups.times_max(ask.group)
        while True:
            popped = await self._popper.pop(ask, popping.left_ms(until_s))
            receipts = popped.receipts(ask.group)
            times = parking.times_of(popped.rows) + np.array(popped.times, dtype=np.int64)
            late = times > times_max
            rows = popped.rows.set_column(
                _RECONSUME_TIMES, READ_SCHEMA.field(_RECONSUME_TIMES), pa.array(times.astype(np.int32))
            )
            if not late.any():
                return Received(rows, list(receipts))
            await self._give_up(receipts, late.tolist())
            if not late.all():
                left = [one for one, is_late in zip(receipts, late, strict=True) if not is_late]
                return Received(rows.filter(pa.array(~late)), list(left))

    async def _give_up(self, receipts: list[popping.Receipt], late: list[bool]) -> None:
        """Those that are `late` go to the dead letters; when one cannot, nobody has seen the others."""
        try:
            for receipt, is_late in zip(receipts, late, strict=True):
                if is_late:
                    await self._popper.dead_letter(receipt)
        except BaseException:  # also a consumer that has gone away
            self._popper.give_back(receipts)
            raise

    # -- answers -----------------------------------------------------------------------------------------------

    async def acknowledge(self, receipts: Sequence[AnyReceipt]) -> list[bool]:
        """These are done with, durably; false for a receipt that is not valid (any more). Raises OutOfRange."""
        promised = [one for one in receipts if isinstance(one, Receipt)]
        settled = await self._answers.acknowledge(promised)
        for one, is_valid in zip(promised, settled, strict=True):
            if is_valid:
                self._parts.rates.add(Stat.GROUP_ACK_NUMS, of_group(one.topic, one.group), 1)
        verdicts = iter(settled)
        in_order = iter(self._popper.ack([one for one in receipts if not isinstance(one, Receipt)]))
        return [next(verdicts if isinstance(one, Receipt) else in_order) for one in receipts]

    async def change(
        self, receipt: AnyReceipt, invisible_ms: int | None, *, counts: bool = True
    ) -> AnyReceipt | None:
        """Invisible until `invisible_ms` from now, durably; the new receipt, or None when the old one is not valid.

        None: for as long as the group's retry policy says after this attempt (in order: not at all).
        Without `counts` this handing out is no attempt (RocketMQ's `suspend`); in order it is one all the same.
        """
        popping.check_invisible(invisible_ms or 0, 0)
        if not isinstance(receipt, Receipt):
            return await self._popper.change_invisible(receipt, invisible_ms or 0)
        return await self._answers.change(Change(receipt, invisible_ms, counts))

    async def dead_letter(self, receipt: AnyReceipt) -> bool:
        """Put the message into the group's dead letters now; false when the receipt is not valid (any more)."""
        if not isinstance(receipt, Receipt):
            return await self._popper.dead_letter(receipt)
        return await self._answers.dead_letter(receipt)

    async def give_back(self, receipts: Sequence[AnyReceipt]) -> None:
        """Their consumer has gone and will not answer: they come again as after an attempt that failed."""
        self._popper.give_back([one for one in receipts if not isinstance(one, Receipt)])
        await self._change_all([Change(one, None) for one in receipts if isinstance(one, Receipt)])

    def not_seen(self, receipts: Sequence[AnyReceipt]) -> None:
        """Their consumer was gone before it had them: they come again at once, and it was no attempt."""
        self._popper.give_back([one for one in receipts if not isinstance(one, Receipt)])
        changes = [Change(one, 0, counts=False) for one in receipts if isinstance(one, Receipt)]
        if changes:
            task = asyncio.create_task(self._change_all(changes))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _change_all(self, changes: Sequence[Change]) -> None:
        try:
            await self._parts.writer.flushed()  # no promise is changed before it is there
            await asyncio.gather(*map(self._answers.change, changes))
        except TimeballError as error:
            # Their promises stand as they were: they come when their time is over.
            logger.warning("messages not given back early messages=%d reason=%s", len(changes), error)
