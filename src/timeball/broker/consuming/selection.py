"""Selection of the positions for one request, queue by queue, within the bounds on rows, bytes and leases.

It runs between two awaits, so it is atomic for all other requests: a position is leased before another consumer can see
it. Selection takes the first row even if it exceeds the bound on bytes, because a large message must not be stuck
forever.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor

import numpy as np
import pyarrow as pa

from timeball.broker.consuming.leases import NO_RECEIPT, Found, QueueLeases
from timeball.broker.consuming.redelivery_rows import FEW_ROWS, is_of
from timeball.broker.consuming.requests import ReceiveRequest
from timeball.broker.filters import Filter
from timeball.broker.filters.tags import BoolArray
from timeball.log.reader import LogReader
from timeball.log.row_encoder import NumberedRows, ReadRows
from timeball.log.writer import LogWriter
from timeball.model import limits
from timeball.model.errors import OutOfRange
from timeball.model.message import READ_SCHEMA, Int64Array

SCAN_ENTRIES = 4_096  # index entries searched at once, for a filter that matches few


class Selection:
    """The positions that one request has leased. `pop_ms` is for the receipts (NO_RECEIPT: leases in the log)."""

    def __init__(self, rows: int, pop_ms: int, deadline_ms: int, *, in_order: bool, attempt_id: str) -> None:
        self._room = rows  # how many more rows the answer takes
        self._bytes = limits.POP_BYTES_MAX  # how many more bytes the answer takes, apart from its first row
        self.pop_ms, self.deadline_ms = pop_ms, deadline_ms
        self._in_order, self._attempt_id = in_order, attempt_id
        self.found: list[Found] = []
        self.queues: list[QueueLeases] = []  # the queues that were searched
        self.unseen = False  # whether a queue has entries that were not searched yet
        self.rest = 0  # approximate number of rows that the queues still contain

    def offsets(self) -> dict[QueueLeases, list[int]]:
        """Return the leased positions by queue."""
        found: dict[QueueLeases, list[int]] = {}
        for queue, offset, _ in self.found:
            found.setdefault(queue, []).append(offset)
        return found

    def split_unwanted(self, keep: BoolArray) -> list[Found]:
        """Remove the positions that the filter does not match, and return them."""
        both = list(zip(self.found, keep.tolist(), strict=True))
        self.found = [one for one, is_wanted in both if is_wanted]
        return [one for one, is_wanted in both if not is_wanted]

    def lease(self, queue: QueueLeases, wanted: Filter) -> list[int]:
        """Lease the available positions of this queue within the bounds, and return them."""
        if not queue.returned and queue.next_offset >= queue.index.max_offset and not self._in_order:
            return []  # the usual case: most queues of a topic have no new rows
        if self._room <= 0 and not self._in_order:
            return []  # earlier queues have filled the answer
        self.queues.append(queue)
        if self._in_order and not self._may_lease_in_order(queue):
            return []
        offsets = self._lease_returned(queue)
        if not queue.returned:  # positions that came back go before new ones
            offsets += self._lease_next(queue, wanted)
        self.found += [(queue, offset, queue.in_flight[offset]) for offset in offsets]
        if offsets:
            queue.last_pop_ms = max(queue.last_pop_ms, self.pop_ms)
            queue.attempt_id = self._attempt_id
        return offsets

    def _may_lease_in_order(self, queue: QueueLeases) -> bool:
        """Return whether the queue may hand out in order: no lease is open, or the request is a repeated one."""
        if not queue.in_flight:
            return True
        if (
            not self._attempt_id
            or queue.attempt_id != self._attempt_id
            or any(one.pop_ms == NO_RECEIPT or not one.in_order for one in queue.in_flight.values())
        ):
            return False
        # The answer was lost, so the consumer gets the same messages again and not the next ones.
        for offset in list(queue.in_flight):
            queue.give_back(offset)
        return True

    def _lease_returned(self, queue: QueueLeases) -> list[int]:
        if not queue.returned:
            return []
        room = self._room_in(len(queue.in_flight))
        fit = self._fit([queue.returned[offset].size_bytes for offset in sorted(queue.returned)[:room]])
        return queue.lease_returned(fit, self.pop_ms, self.deadline_ms, in_order=self._in_order)

    def _lease_next(self, queue: QueueLeases, wanted: Filter) -> list[int]:
        index, room = queue.index, self._room_in(len(queue.in_flight) + len(queue.returned))
        start = max(queue.next_offset, index.min_offset)
        if room <= 0 or start >= index.max_offset:
            return []
        if wanted.matches_all:
            # Some entries more, because positions that were acknowledged before a restart are skipped.
            entries = index.read(start, room + len(queue.acked_ahead), is_kept=False)
            at = list(range(len(entries)))
        else:
            entries = index.read(start, SCAN_ENTRIES, is_kept=False)
            at = np.flatnonzero(wanted.candidates(entries)).tolist()
        if queue.acked_ahead:
            # Acknowledged before a restart: done, although they were not leased since.
            at = [i for i in at if start + i not in queue.acked_ahead]
        is_all = len(at) == len(entries) <= room
        chosen = entries if is_all else entries[np.array(at[:room], dtype=np.int64)]
        fit = self._fit(chosen["size"].tolist())
        offsets = [start + i for i in at[:fit]]
        queue.lease_next(offsets, chosen[:fit], self.pop_ms, self.deadline_ms, in_order=self._in_order)
        # Everything before the first remaining candidate has been searched.
        queue.advance(start + (at[fit] if fit < len(at) else len(entries)))
        self.unseen |= not offsets and queue.next_offset < index.max_offset and self._room > 0
        return offsets

    def _room_in(self, open_rows: int) -> int:
        return max(0, min(self._room, limits.POP_HELD_PER_QUEUE_MAX - open_rows))

    def _fit(self, sizes_bytes: list[int]) -> int:
        """Return how many of these rows, in their order, fit into the answer, and subtract them from its bounds."""
        fit, total_bytes = len(sizes_bytes), sum(sizes_bytes)
        while fit and total_bytes > self._bytes and (fit > 1 or self.found):
            fit -= 1
            total_bytes -= sizes_bytes[fit]
        self._bytes -= total_bytes
        self._room -= fit
        return fit


def check(request: ReceiveRequest) -> None:
    """Raise OutOfRange for a request with invalid numbers."""
    if not 1 <= request.rows <= limits.POP_ROWS_MAX:
        raise OutOfRange(f"rows {request.rows}: between 1 and {limits.POP_ROWS_MAX}")
    if request.queue_id < -1:
        raise OutOfRange(f"queue {request.queue_id}: -1 (any) or one that the topic has")
    check_invisible(request.invisible_ms, 1)


def check_invisible(invisible_ms: int, least_ms: int) -> None:
    """Raise OutOfRange unless the invisible time is between `least_ms` and INVISIBLE_MS_MAX."""
    if not least_ms <= invisible_ms <= limits.INVISIBLE_MS_MAX:
        raise OutOfRange(f"invisible for {invisible_ms} ms: between {least_ms} and {limits.INVISIBLE_MS_MAX}")


# The rows of the positions that a request has leased: from memory while they are new, otherwise from the log.

_TOPIC = READ_SCHEMA.get_field_index("topic")


async def selected_rows(
    request: ReceiveRequest, seqs: list[int], *, writer: LogWriter, reader: LogReader, reader_thread: Executor
) -> tuple[ReadRows, BoolArray | None]:
    """Read those of these rows that are for this consumer. Also return a mask of them, or None for all."""
    # Rows that have just become visible are still in memory, and a read of the log would be the largest cost.
    values = writer.newest.values_of(seqs) if len(seqs) <= FEW_ROWS else None
    if (
        values is not None
        and request.wanted.matches_all
        and {row[_TOPIC] for row in values} == {request.topic}
    ):
        return NumberedRows(values), None
    # A filter needs whole rows, and rows of a shared retry topic may be for another group.
    rows, keep = await asyncio.get_running_loop().run_in_executor(
        reader_thread, _read, reader, request, np.array(seqs, dtype=np.int64)
    )
    return (rows, None) if keep.all() else (rows.filter(pa.array(keep)), keep)


def _read(reader: LogReader, request: ReceiveRequest, seqs: Int64Array) -> tuple[pa.RecordBatch, BoolArray]:
    """Read the rows. Also return a mask of those that are for this consumer (reader thread)."""
    rows = reader.read_rows(seqs)
    keep = np.ones(len(seqs), dtype=np.bool_)
    main = np.array([name == request.topic for name in rows.column("topic").to_pylist()])
    if not request.wanted.matches_all:
        # Rows of the retry topic passed the filter at their first delivery.
        keep &= ~main | request.wanted.exact(rows)
    texts = rows.column("properties")
    for at in np.flatnonzero(~main).tolist():
        # `%RETRY%a_b_c` is the retry topic of group a for topic b_c, and also of group a_b for topic c.
        keep[at] = is_of(request.group, texts[at].as_py())
    return rows, keep
