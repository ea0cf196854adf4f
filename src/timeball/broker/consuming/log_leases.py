"""Leases kept in the log: a message that is handed out is a promise to its group, and its receipt names the promise.

    handed out     a PROMISE for the group's retry topic, or for its dead letters if this was the last attempt, due
                   when the lease ends; the consumer sees the message, and the position is done, when it is durable
    acknowledged   the promise is cancelled
    other time     cancelled, and a promise for the other instant in its place
    dead letter    cancelled, and a message for the group's dead letters in its place

What is not acknowledged is released by the schedule that releases every promise, exactly once, also after a crash.
However much a group has received and not acknowledged, none of it is kept in memory here.

A CANCEL and what takes its place are one append: both are in the log or none is. Each is decided on the event loop as
every cancel is: a receipt whose promise is being released is not valid any more, and a promise that was cancelled is
never released. After that decision the append must not fail, so all that may refuse runs before it.

An append costs nearly the same for one row as for a hundred, so requests that come together share one (AsyncBatcher).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from timeball import limits
from timeball.broker.appending import Appending
from timeball.broker.consuming import lookup, redelivery_rows, retry, retry_policy
from timeball.broker.consuming.leases import Leases
from timeball.broker.consuming.queue_leases import QueueLeases
from timeball.broker.consuming.receipts import Receipt
from timeball.broker.consuming.redelivery_rows import retry_topic
from timeball.broker.consuming.requests import ReceiveRequest
from timeball.broker.consuming.selection import Selection
from timeball.broker.filters.filter import BoolArray
from timeball.broker.ingress import AsyncBatcher
from timeball.broker.parts import Parts, in_thread
from timeball.broker.registry.offsets import Parked
from timeball.errors import OutOfRange
from timeball.message import CANCEL_REASON, Int64Array, Kind, build_rows, encode_properties, int64

ACKNOWLEDGED = encode_properties({CANCEL_REASON: "acknowledged"})
CHANGED = encode_properties({CANCEL_REASON: "invisible time changed"})
DEAD = encode_properties({CANCEL_REASON: "dead letter"})

CALLS_PER_TURN = 4_096
ROWS_PER_APPEND = 65_536  # far below what a frame may hold; the next ones wait no longer than for a commit
# As many bodies as one request may have, were they all of the largest: each is written once more.
MOVES_PER_TURN = limits.REQUEST_BYTES_MAX // (limits.BODY_BYTES_MAX + 64 * 1024)


class Change(NamedTuple):
    """Another invisible time for a receipt. None: what the group's retry policy says. `counts`: as an attempt."""

    receipt: Receipt
    invisible_ms: int | None
    counts: bool = True


class LogLeases:
    """Writes and settles leases that are promises. Belongs to the event loop."""

    def __init__(self, parts: Parts, appending: Appending, leases: Leases) -> None:
        self._parts, self._appending, self._leases = parts, appending, leases
        self._under_way: dict[
            int, list[QueueLeases]
        ] = {}  # first row of promises not durable yet -> their queues
        self._acks: AsyncBatcher[Sequence[Receipt], list[bool]] = AsyncBatcher(
            self._acknowledge, CALLS_PER_TURN
        )
        self._changes: AsyncBatcher[Change, Receipt | None] = AsyncBatcher(self._change, MOVES_PER_TURN)
        self._dead: AsyncBatcher[Receipt, bool] = AsyncBatcher(self._dead_letter, MOVES_PER_TURN)

    # -- handing out ---------------------------------------------------------------------------------------------

    def write(
        self, request: ReceiveRequest, rows: pa.RecordBatch, selection: Selection, then: Callable[[], None]
    ) -> tuple[asyncio.Future[int], list[Receipt]]:
        """Append the rows handed out as promises; return when that is durable, and the receipts.

        `then` is called when they are durable, and not at all when the log fails.
        """
        parts, count = self._parts, rows.num_rows
        parts.writer.check_room()
        now_ms = parts.clock.now_ms()
        due_ms = now_ms + request.invisible_ms
        times = redelivery_rows.times_after(rows)
        times_max = parts.groups.times_max(request.group)
        promises = self._rows(
            rows,
            topics=redelivery_rows.topics_after(request.group, request.topic, times, times_max),
            properties=redelivery_rows.properties_for(
                rows.column("properties"), request.group, request.topic, now_ms
            ),
            times=times,
            due_ms=np.full(count, due_ms, dtype=np.int64),
            source_seq=pa.array(int64(rows.column("seq"))),
            now_ms=now_ms,
        )
        first_seq, queues = parts.writer.next_seq, list(selection.offsets())

        def on_durable() -> None:
            del self._under_way[first_seq]
            for queue in queues:
                queue.in_log = True
            then()

        appended = self._appending.append(self._appending.prepare(promises, now_ms), on_durable)
        self._under_way[first_seq] = queues
        receipts = [Receipt(request.group, request.topic, first_seq + i, due_ms) for i in range(count)]
        return appended.durable, receipts

    def parked(self) -> Parked:
        """Return what a crash must know of what was handed out, beside the offsets of this moment."""
        live = self._leases.is_live
        under_way = [seq for seq, queues in self._under_way.items() if any(map(live, queues))]
        return Parked(min([self._parts.writer.next_seq, *under_way]), self._leases.ahead())

    # -- receipts ------------------------------------------------------------------------------------------------

    async def acknowledge(self, receipts: Sequence[Receipt]) -> list[bool]:
        """End these leases, durably; false for a receipt that is not valid (any more). Raise OutOfRange."""
        if len(receipts) > limits.CANCELS_PER_REQUEST_MAX:
            raise OutOfRange(f"at most {limits.CANCELS_PER_REQUEST_MAX} receipts in one request; split it")
        return await self._acks.put(receipts) if receipts else []

    async def change(self, change: Change) -> Receipt | None:
        """Return the receipt for the new time, durable; None when the old one is not valid (any more)."""
        return await self._changes.put(change)

    async def dead_letter(self, receipt: Receipt) -> bool:
        """Write the message to the group's dead letters, durably; false when the receipt is not valid."""
        return await self._dead.put(receipt)

    # -- one turn of each ----------------------------------------------------------------------------------------

    async def _acknowledge(self, asked: list[Sequence[Receipt]]) -> list[list[bool]]:
        receipts = [receipt for some in asked for receipt in some]
        valid = np.zeros(len(receipts), dtype=np.bool_)
        durable = None
        for begin in range(0, len(receipts), ROWS_PER_APPEND):
            part = receipts[begin : begin + ROWS_PER_APPEND]
            now_ms = self._parts.clock.now_ms()
            won = valid[begin : begin + len(part)] = self._settle(part)
            if won.any():
                # No pause since the decision: the CANCEL rows stand in the log before any later release.
                rows = _cancel_rows(part, ACKNOWLEDGED, now_ms)
                durable = self._appending.append(rows if won.all() else rows.filter(pa.array(won))).durable
        if durable is not None:
            await durable
        verdicts = iter(valid.tolist())
        return [[next(verdicts) for _ in some] for some in asked]

    async def _change(self, changes: list[Change]) -> list[Receipt | None]:
        rows, times, at = await self._read([change.receipt for change in changes])
        asked = [changes[i] for i in at.tolist()]
        now_ms = self._parts.clock.now_ms()
        if not asked:
            return [None] * len(changes)
        times += np.array([change.counts for change in asked])
        due_ms = np.array(
            [now_ms + self._invisible_ms(change, n) for change, n in zip(asked, times.tolist(), strict=True)],
            dtype=np.int64,
        )
        receipts = [change.receipt for change in asked]
        topics = [self._topic_after(receipt, n) for receipt, n in zip(receipts, times.tolist(), strict=True)]
        fresh = self._copies(
            rows, receipts, topics, times, now_ms, due_ms=due_ms, source_seq=rows.column("source_seq")
        )
        won, first_seq = await self._replace(receipts, CHANGED, fresh, now_ms)
        seqs = first_seq + np.cumsum(won) - 1
        found: list[Receipt | None] = [None] * len(changes)
        for i, place in enumerate(at.tolist()):
            if won[i]:
                found[place] = receipts[i]._replace(seq=int(seqs[i]), due_ms=int(due_ms[i]))
        return found

    async def _dead_letter(self, receipts: list[Receipt]) -> list[bool]:
        rows, times, at = await self._read(receipts)
        valid = np.zeros(len(receipts), dtype=np.bool_)
        if len(at):
            now_ms, asked = self._parts.clock.now_ms(), [receipts[i] for i in at.tolist()]
            topics = [retry.dead_letter_topic(receipt.group) for receipt in asked]
            fresh = self._copies(rows, asked, topics, times + 1, now_ms, kind=Kind.MESSAGE)
            valid[at], _ = await self._replace(asked, DEAD, fresh, now_ms)
        return [bool(one) for one in valid]

    # -- what they have in common ----------------------------------------------------------------------------------

    def _settle(self, receipts: Sequence[Receipt]) -> BoolArray:
        """Cancel the promises of these that still wait; return which did."""
        due_ms, seq = (
            np.array([getattr(receipt, name) for receipt in receipts], dtype=np.int64)
            for name in ("due_ms", "seq")
        )
        won = np.zeros(len(receipts), dtype=np.bool_)
        _, first = np.unique(seq, return_index=True)  # a receipt that is there twice settles once
        won[first] = self._parts.scheduler.cancel(due_ms[first], seq[first])
        return won

    async def _replace(
        self, receipts: Sequence[Receipt], reason: str, fresh: pa.RecordBatch, now_ms: int
    ) -> tuple[BoolArray, int]:
        """Cancel these and write `fresh` in their place; return which were valid, and the first new row's number."""
        prepared = self._appending.prepare(fresh, now_ms)  # all that may refuse
        cancels = _cancel_rows(receipts, reason, now_ms)
        won = self._settle(receipts)
        if not won.any():
            return won, 0
        # No pause since the decision, and one append: a promise is never gone without what takes its place.
        chosen = pa.array(won)
        appended = self._appending.append(
            pa.concat_batches([cancels.filter(chosen), prepared.filter(chosen)])
        )
        await appended.durable
        return won, appended.first_seq + int(np.count_nonzero(won))

    async def _read(self, receipts: Sequence[Receipt]) -> tuple[pa.RecordBatch, Int64Array, Int64Array]:
        """Return the promises that are found, how often each was tried before it was handed out, and which they are."""
        parts = self._parts
        parts.writer.check_room()
        files = parts.hour_log.pending.all()

        def read() -> tuple[pa.RecordBatch, Int64Array, Int64Array]:
            rows, at = lookup.promises(parts.reader, files, receipts)
            return rows, lookup.times_before(parts.reader, rows), at

        return await in_thread(parts.reader_thread, read)

    def _copies(
        self,
        rows: pa.RecordBatch,
        receipts: Sequence[Receipt],
        topics: Sequence[str],
        times: Int64Array,
        now_ms: int,
        *,
        kind: Kind = Kind.PROMISE,
        due_ms: Int64Array | None = None,
        source_seq: pa.Array | None = None,
    ) -> pa.RecordBatch:
        adding = [redelivery_rows.added(receipt.group, receipt.topic, now_ms) for receipt in receipts]
        return self._rows(
            rows, kind=kind, topics=topics,
            properties=redelivery_rows.properties_of_each(rows.column("properties"), adding),
            times=times, due_ms=due_ms, source_seq=source_seq, now_ms=now_ms,
        )  # fmt: skip

    def _rows(
        self,
        rows: pa.RecordBatch,
        *,
        kind: Kind = Kind.PROMISE,
        topics: Sequence[str],
        properties: pa.Array,
        times: Int64Array,
        due_ms: Int64Array | None,
        source_seq: pa.Array | None,
        now_ms: int,
    ) -> pa.RecordBatch:
        for topic in set(topics):
            self._parts.topics.ensure(topic, 1)
        return redelivery_rows.build(
            rows, kind=kind, topics=topics, properties=properties, times=times, due_ms=due_ms,
            source_seq=source_seq, now_ms=now_ms, host=self._parts.settings.host,
        )  # fmt: skip

    def _topic_after(self, receipt: Receipt, times: int) -> str:
        times_max = self._parts.groups.times_max(receipt.group)
        return redelivery_rows.topics_after(receipt.group, receipt.topic, np.array([times]), times_max)[0]

    def _invisible_ms(self, change: Change, times: int) -> int:
        if change.invisible_ms is not None:
            return change.invisible_ms
        group = self._parts.groups.find(change.receipt.group)
        return retry_policy.delay_ms(group.group_retry_policy if group is not None else None, max(1, times))


def _cancel_rows(receipts: Sequence[Receipt], reason: str, now_ms: int) -> pa.RecordBatch:
    """Return LOG_SCHEMA cancel records. They have no id: the message's own belongs to its sender."""
    return build_rows(
        len(receipts),
        kind=int(Kind.CANCEL),
        topic=[retry_topic(receipt.group, receipt.topic) for receipt in receipts],
        queue_id=-1,
        properties=reason,
        store_ms=now_ms,
        due_ms=[receipt.due_ms for receipt in receipts],
        source_seq=[receipt.seq for receipt in receipts],
    )
