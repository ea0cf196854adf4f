"""Leases kept in the log: a message that is handed out is a promise to its group, and its receipt names the promise.

    handed out     a PROMISE for the group's retry topic, or for its dead letters if this was the last attempt, due
                   when the lease ends; the consumer sees the message, and the position is done, when it is durable
    acknowledged   the promise is cancelled
    other time     moved: a MOVED row of the same number, for the other instant; the receipt stays
    given back     moved as well; the row says when and why, and the next delivery shows it
    dead letter    cancelled, and a message for the group's dead letters in its place, with the reason

What is not acknowledged is released by the schedule that releases every promise, exactly once, also after a crash.
None of what a group has received and not acknowledged is kept in memory here.

A CANCEL and what takes its place are one append: both are in the log or none is. How an answer is decided says
lease_promises.py. After the decision the append must not fail, so all that may refuse runs before it.

An append costs nearly the same for one row as for a hundred, so requests that come together share one (AsyncBatcher).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from timeball import limits
from timeball.broker.appender import Appender
from timeball.broker.components import Components, in_thread
from timeball.broker.consuming import lookup, redelivery_rows, retry
from timeball.broker.consuming.acknowledgements import Acknowledgements
from timeball.broker.consuming.lease_ends import cancel_rows
from timeball.broker.consuming.lease_promises import count_ended, decide, newest_versions, settle_leases
from timeball.broker.consuming.leases import Leases, QueueLeases
from timeball.broker.consuming.redelivery_rows import FEW_ROWS, retry_topic
from timeball.broker.consuming.requests import Receipt, Received, ReceiveRequest, Subscription
from timeball.broker.consuming.selection import Selection
from timeball.broker.delivery import as_moves
from timeball.broker.filters.tags import BoolArray
from timeball.broker.ingress import AsyncBatcher
from timeball.broker.registry import groups
from timeball.broker.registry.lease_counts import topic_of
from timeball.broker.registry.offsets import Parked
from timeball.errors import OutOfRange
from timeball.log.few_rows import ReadRows, pairs_of, read_batch
from timeball.message import (
    CANCEL_REASON,
    LOG_SCHEMA,
    Int64Array,
    Kind,
    encode_properties,
    int64,
)

_TOPIC = LOG_SCHEMA.get_field_index("topic")

DEAD = encode_properties({CANCEL_REASON: "dead letter"})

# As many bodies as one request may have, were they all of the largest: each is written once more.
MOVES_PER_TURN = limits.REQUEST_BYTES_MAX // (limits.BODY_BYTES_MAX + 64 * 1024)


class Change(NamedTuple):
    """Another invisible time for a receipt. None: what the group's retry policy says. `counts`: as an attempt.

    `nack`: the reason for which the message is given back; None when its consumer keeps it. `first`: see
    `retry_delay_ms`.
    """

    receipt: Receipt
    invisible_ms: int | None
    counts: bool = True
    nack: str | None = None
    first: int = groups.FIRST_LEVEL


class GivenUp(NamedTuple):
    """A message for the dead letters, and why."""

    receipt: Receipt
    reason: str


class LogLeases:
    """Writes and settles leases that are promises. Belongs to the event loop."""

    def __init__(self, parts: Components, appender: Appender, leases: Leases) -> None:
        self._parts, self._appender, self._leases = parts, appender, leases
        self._compacts = parts.compacts
        # First row of promises not durable yet -> their queues.
        self._under_way: dict[int, list[QueueLeases]] = {}
        self._acks = Acknowledgements(parts, appender)
        self._changes: AsyncBatcher[Change, Receipt | None] = AsyncBatcher(self._change, MOVES_PER_TURN)
        self._dead: AsyncBatcher[GivenUp, bool] = AsyncBatcher(self._dead_letter, MOVES_PER_TURN)

    # -- handing out ---------------------------------------------------------------------------------------------

    def write(
        self, request: ReceiveRequest, main: Subscription, rows: ReadRows, selection: Selection
    ) -> tuple[asyncio.Future[int], Received]:
        """Append the rows handed out as promises; return when that is durable, and what was handed out.

        Their positions are done when they are durable, and stay leased when the log fails.
        """
        parts = self._parts
        parts.writer.check_room()
        now_ms = parts.clock.now_ms()
        due_ms = now_ms + request.invisible_ms
        # A few as values: by columns one row costs as much as a hundred.
        is_few = rows.num_rows <= FEW_ROWS and self._compacts
        make: Callable[..., Any] = redelivery_rows.few_handed_out if is_few else redelivery_rows.handed_out
        promises = make(
            rows if is_few else read_batch(rows), group=request.group, topic=request.topic, main=main,
            now_ms=now_ms, due_ms=due_ms, host=parts.settings.host,
        )  # fmt: skip
        topics = [row[_TOPIC] for row in promises] if is_few else promises.column("topic").to_pylist()
        for topic in set(topics):
            if main.again is None or topic != main.again_name:
                parts.topics.ensure(topic, 1)
        # Read right before the append, without a pause: the receipts name these numbers.
        first_seq, queues = parts.writer.next_seq, list({queue: None for queue, _, _ in selection.found})

        def on_durable() -> None:
            del self._under_way[first_seq]
            for queue in queues:
                queue.in_log = True
            numbers = np.arange(first_seq, first_seq + rows.num_rows)
            parts.lease_counts.add(request.group, topic_of(request.group, request.topic), numbers)
            self._leases.finish(selection.found)

        if is_few:
            durable = self._appender.append_few(promises, on_durable)
        else:
            durable = self._appender.append(self._appender.prepare(promises, now_ms), on_durable).durable
        self._under_way[first_seq] = queues
        receipts = [
            Receipt(request.group, request.topic, first_seq + i, due_ms) for i in range(rows.num_rows)
        ]
        return durable, Received(rows, list(receipts), now_ms, rest=selection.rest)

    def parked(self) -> Parked:
        """Return which positions are handed out, for a start after a crash, beside the offsets of this moment."""
        live = self._leases.is_live
        under_way = [seq for seq, queues in self._under_way.items() if any(map(live, queues))]
        return Parked(min([self._parts.writer.next_seq, *under_way]), self._leases.ahead())

    # -- receipts ------------------------------------------------------------------------------------------------

    async def acknowledge(self, receipts: Sequence[Receipt]) -> list[bool]:
        """End these leases, durably; false for a receipt that is not valid (any more). Raise OutOfRange."""
        if len(receipts) > limits.CANCELS_PER_REQUEST_MAX:
            raise OutOfRange(f"at most {limits.CANCELS_PER_REQUEST_MAX} receipts in one request; split it")
        return await self._acks.put(receipts) if receipts else []

    def was_ended(self, receipt: Receipt) -> bool:
        """Return whether this lease was ended by its consumer, while the schedule remembers it."""
        due_ms, version = newest_versions(self._parts, [receipt])
        return bool(self._parts.outcomes.was_cancelled(due_ms, version)[0])

    async def change(self, change: Change) -> Receipt | None:
        """Return the receipt, durably good for the new time; None when it is not valid (any more)."""
        return await self._changes.put(change)

    async def dead_letter(self, receipt: Receipt, reason: str) -> bool:
        """Write the message to the group's dead letters, durably; false when the receipt is not valid."""
        return await self._dead.put(GivenUp(receipt, reason))

    # -- one turn of each ----------------------------------------------------------------------------------------

    async def _change(self, changes: list[Change]) -> list[Receipt | None]:
        receipts = [change.receipt for change in changes]
        valid = await decide(self._parts, receipts, lambda _, at: self._renew([changes[i] for i in at]))
        return [receipt if won else None for receipt, won in zip(receipts, valid.tolist(), strict=True)]

    async def _dead_letter(self, asked: list[GivenUp]) -> list[bool]:
        receipts = [one.receipt for one in asked]
        valid = await decide(self._parts, receipts, lambda _, at: self._give_up([asked[i] for i in at]))
        return [bool(one) for one in valid]

    async def _renew(self, changes: Sequence[Change]) -> BoolArray:
        """Move the promises of these to their other instants, durably; return which still waited."""
        rows, times, at = await self._read([change.receipt for change in changes])
        asked = [changes[i] for i in at.tolist()]
        now_ms = self._parts.clock.now_ms()
        valid = np.zeros(len(changes), dtype=np.bool_)
        if not asked:
            return valid
        times += np.array([change.counts for change in asked])
        due_ms = np.array(
            [now_ms + self._invisible_ms(change, n) for change, n in zip(asked, times.tolist(), strict=True)],
            dtype=np.int64,
        )
        receipts = [change.receipt for change in asked]
        topics = [self._topic_after(receipt, n) for receipt, n in zip(receipts, times.tolist(), strict=True)]
        nacked = np.array([change.nack is not None for change in asked])
        saying = [
            {} if change.nack is None else redelivery_rows.given_back(change.nack, now_ms) for change in asked
        ]
        fresh = self._copies(rows, receipts, topics, times, now_ms, saying, due_ms=due_ms)
        valid[at] = await self._move(rows, fresh, nacked, now_ms)
        return valid

    async def _give_up(self, given_up: Sequence[GivenUp]) -> BoolArray:
        """Write the messages of these to their dead letters, durably; return which still waited."""
        rows, times, at = await self._read([one.receipt for one in given_up])
        valid = np.zeros(len(given_up), dtype=np.bool_)
        if len(at):
            now_ms, found = self._parts.clock.now_ms(), [given_up[i] for i in at.tolist()]
            asked = [one.receipt for one in found]
            # One more attempt: the message was handed out, even if its consumer gives it up at once.
            topics = [retry.dead_letter_topic(receipt.group) for receipt in asked]
            saying = [redelivery_rows.given_up(one.reason) for one in found]
            fresh = self._copies(rows, asked, topics, times + 1, now_ms, saying, kind=Kind.MESSAGE)
            valid[at] = await self._bury(asked, rows, fresh, now_ms)
        return valid

    async def _move(
        self, before: pa.RecordBatch, fresh: pa.RecordBatch, nacked: BoolArray, now_ms: int
    ) -> BoolArray:
        """Write these promises again, for the instants in `fresh`, durably; return which still waited."""
        prepared = self._appender.prepare(fresh, now_ms)  # all that may refuse
        from_ms = int64(before.column("due_ms"))
        won = settle_leases(self._parts, from_ms, int64(before.column("seq")))
        if not won.any():
            return won
        chosen = pa.array(won)
        rows = as_moves(prepared.filter(chosen), before.filter(chosen))
        first_seq = self._parts.writer.next_seq
        columns = int64(rows.column("due_ms")), int64(rows.column("source_seq")), from_ms[won]
        moves = [
            (due, number, first_seq + i, was)
            for i, (due, number, was) in enumerate(zip(*(column.tolist() for column in columns), strict=True))
        ]
        numbers = columns[1]

        def on_durable() -> None:
            self._parts.outcomes.moved.add(moves)
            self._parts.lease_counts.change(numbers, nacked[won])

        # No pause since the decision: after it the append must not fail.
        await self._appender.append(rows, on_durable).durable
        return won

    # -- what they have in common ----------------------------------------------------------------------------------

    async def _bury(
        self, receipts: Sequence[Receipt], before: pa.RecordBatch, fresh: pa.RecordBatch, now_ms: int
    ) -> BoolArray:
        """Cancel these promises and write `fresh` in their place; return which still waited."""
        prepared = self._appender.prepare(fresh, now_ms)  # all that may refuse
        versions = pairs_of(before)
        cancels = cancel_rows(receipts, *versions, DEAD, now_ms)
        won = settle_leases(self._parts, *versions)
        count_ended(self._parts, receipts, won)
        if won.any():
            # No pause since the decision, and one append: a promise is never gone without what takes its place.
            chosen = pa.array(won)
            rows = pa.concat_batches([cancels.filter(chosen), prepared.filter(chosen)])
            await self._appender.append(rows).durable
        return won

    async def _read(self, receipts: Sequence[Receipt]) -> tuple[pa.RecordBatch, Int64Array, Int64Array]:
        """Return the promises that are found, how often each was tried before it was handed out, and which they are."""
        parts = self._parts
        parts.writer.check_room()
        files = await lookup.local_files(parts, *(newest := newest_versions(parts, receipts)))

        def read() -> tuple[pa.RecordBatch, Int64Array, Int64Array]:
            rows, at = lookup.promises(parts.reader, files, *newest)
            return rows, lookup.times_before(parts.reader, rows), at

        return await in_thread(parts.reader_thread, read)

    def _copies(
        self,
        rows: pa.RecordBatch,
        receipts: Sequence[Receipt],
        topics: Sequence[str],
        times: Int64Array,
        now_ms: int,
        saying: Sequence[dict[str, str]],
        *,
        kind: Kind = Kind.PROMISE,
        due_ms: Int64Array | None = None,
    ) -> pa.RecordBatch:
        """Return READ_SCHEMA promises as rows for other topics, with what is to be said of each besides."""
        adding = [
            redelivery_rows.added(receipt.group, receipt.topic, now_ms) | said
            for receipt, said in zip(receipts, saying, strict=True)
        ]
        return self._rows(
            rows, kind=kind, topics=topics,
            properties=redelivery_rows.properties_of_each(rows.column("properties"), adding),
            times=times, due_ms=due_ms, now_ms=now_ms,
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
        source_seq: pa.Array | None = None,
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
        again, dead = retry_topic(receipt.group, receipt.topic), retry.dead_letter_topic(receipt.group)
        return redelivery_rows.topics_after(again, dead, np.array([times]), times_max)[0]

    def _invisible_ms(self, change: Change, times: int) -> int:
        if change.invisible_ms is not None:
            return change.invisible_ms
        group = self._parts.groups.find_group(change.receipt.group)
        policy = group.group_retry_policy if group is not None else None
        return groups.retry_delay_ms(policy, max(1, times), first=change.first)
