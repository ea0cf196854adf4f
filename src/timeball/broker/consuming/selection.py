"""Select and lease the positions for one request, queue by queue, within the limits on rows, bytes and leases.

A selection contains no await, so it is atomic for all other requests: a position is leased before another consumer can
see it. It takes the first row even if this row exceeds the limit on bytes, because a large message must not be stuck
forever.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Sequence
from concurrent.futures import Executor

import numpy as np
import pyarrow as pa

from timeball.broker.consuming.key_limits import Turn
from timeball.broker.consuming.leases import LeasedPosition, QueueLeases
from timeball.broker.consuming.redelivery_rows import is_for_group
from timeball.broker.consuming.requests import ReceiveRequest
from timeball.broker.filters import Filter
from timeball.broker.filters.tags import BoolArray
from timeball.log.queue_index import QueueIndex
from timeball.log.reader import LogReader
from timeball.log.row_encoder import NumberedRows, ReadRows
from timeball.log.writer import LogWriter
from timeball.model import limits
from timeball.model.errors import OutOfRange
from timeball.model.message import READ_SCHEMA, Int64Array

SCAN_ENTRIES = 4_096  # index entries that a filter searches at once
FEW_ROWS = 256  # up to this number, rows that are still in memory are handed out as values


class Selection:
    """The positions that one request has leased. `pop_ms` identifies the receipts. It may be after `now_ms`."""

    def __init__(
        self, rows: int, pop_ms: int, deadline_ms: int, *, now_ms: int, in_order: bool, attempt_id: str
    ) -> None:
        """`rows`: the most positions to lease. `deadline_ms`: the end of the leases, by elapsed time.

        `in_order`: for an ordered group. `attempt_id`: that of the request (requests.py).
        """
        self._free_rows = rows  # how many more rows fit into the answer
        self._free_bytes = limits.POP_BYTES_MAX  # how many more bytes fit, apart from the first row
        self.pop_ms, self.deadline_ms, self._now_ms = pop_ms, deadline_ms, now_ms
        self._in_order, self._attempt_id = in_order, attempt_id
        self.leased: list[LeasedPosition] = []
        self.queues: list[QueueLeases] = []  # the queues that were searched
        self.examined_queues = 0  # number of queues that were examined, including those without new rows
        self.has_unsearched = False  # True if a queue has entries that were not searched yet
        self.has_more = False  # True if another request may find rows in these queues
        self.rest = 0  # approximate number of rows that the queues still contain
        self.turn: Turn | None = None  # in a group with a limit of leases for each key

    def offsets(self) -> dict[QueueLeases, list[int]]:
        """Group the leased positions by queue."""
        by_queue: dict[QueueLeases, list[int]] = {}
        for queue, offset, _ in self.leased:
            by_queue.setdefault(queue, []).append(offset)
        return by_queue

    def split_unwanted(self, is_wanted: BoolArray) -> list[LeasedPosition]:
        """Remove the positions for which the mask `is_wanted` is False, and return them."""
        flags = is_wanted.tolist()
        unwanted = [position for position, flag in zip(self.leased, flags, strict=True) if not flag]
        self.leased = [position for position, flag in zip(self.leased, flags, strict=True) if flag]
        return unwanted

    def lease(self, queue: QueueLeases, wanted: Filter) -> list[int]:
        """Lease the available positions of this queue within the limits. Returns the leased offsets."""
        if not queue.returned and queue.next_offset >= queue.index.max_offset and not self._in_order:
            return []  # the usual case: most queues of a topic have no new rows
        if self._free_rows <= 0 and not self._in_order:
            self.has_more = True
            return []  # earlier queues have filled the answer
        self.queues.append(queue)
        if self._in_order and not self._may_lease_in_order(queue):
            return []
        offsets = self._lease_returned(queue)
        if not queue.returned:  # positions that came back go before new ones
            offsets += self._lease_next(queue, wanted)
        self.leased += [(queue, offset, queue.in_flight[offset]) for offset in offsets]
        self.has_more |= bool(queue.returned) or queue.next_offset < queue.index.max_offset
        if offsets:
            queue.last_pop_ms = max(queue.last_pop_ms, self.pop_ms)
            queue.attempt_id = self._attempt_id
        return offsets

    def lease_in_log_order(
        self, queues: Sequence[QueueLeases], wanted: Filter, *, only_returned: bool
    ) -> None:
        """Lease from these queues like `lease`, but one message after another, in the order of the log.

        With `only_returned`, only positions that came back.
        """

        def first_seq(queue: QueueLeases) -> int | None:
            return queue.first_seq if queue.returned or not only_returned else None

        # A heap of (number of the queue's next message, index of the queue).
        heads = [(seq, index) for index, queue in enumerate(queues) if (seq := first_seq(queue)) is not None]
        heapq.heapify(heads)
        free_rows = self._free_rows
        while heads and free_rows > 0:
            _, index = heapq.heappop(heads)
            self._free_rows = 1  # `lease` takes one message
            # A queue without a result is full, or its next entries do not match the filter. It is left out.
            if self.lease(queues[index], wanted):
                free_rows -= 1
                if (seq := first_seq(queues[index])) is not None:
                    heapq.heappush(heads, (seq, index))
        self._free_rows = free_rows
        self.has_more |= bool(heads)
        self.queues = list(dict.fromkeys(self.queues))  # `lease` has added each queue once per call

    def _may_lease_in_order(self, queue: QueueLeases) -> bool:
        """Check whether an ordered group may lease here: no position is leased, or the request is a repetition.

        A repeated request ends the leases of the first one, so that it gets the same positions.
        """
        if not queue.in_flight:
            return True
        if (
            not self._attempt_id
            or queue.attempt_id != self._attempt_id
            or any(lease.is_void or not lease.in_order for lease in queue.in_flight.values())
        ):
            return False
        # The answer was lost, so the consumer gets the same messages again and not the next ones.
        for offset in list(queue.in_flight):
            queue.give_back(offset)
        return True

    def _lease_returned(self, queue: QueueLeases) -> list[int]:
        """Lease positions that have come back. Returns their offsets."""
        if not queue.returned:
            return []
        # Parked positions do not count: a returned one may have the slot that they wait for, so it must be handed out.
        row_count = self._free_rows_in(len(queue.in_flight))
        fitting = self._take_fitting(queue.returned_sizes(row_count))
        return queue.lease_returned(
            fitting, self.pop_ms, self.deadline_ms, since_ms=self._now_ms, in_order=self._in_order
        )

    def _lease_next(self, queue: QueueLeases, wanted: Filter) -> list[int]:
        """Lease new positions that may match the filter, by the index, and advance the queue. Returns their offsets."""
        open_rows = len(queue.in_flight) + len(queue.returned) + len(queue.parked)
        index, row_count = queue.index, self._free_rows_in(open_rows)
        start = max(queue.next_offset, index.min_offset)
        if row_count <= 0 or start >= index.max_offset:
            return []
        # The usual case: consecutive positions, without numpy.
        if wanted.matches_all and not queue.acked_ahead:
            seqs, sizes_bytes = index.read_numbers(start, row_count)
            fitting = self._take_fitting(sizes_bytes)
            queue.lease_next(
                range(start, start + fitting), seqs, sizes_bytes, self.pop_ms, self.deadline_ms,
                since_ms=self._now_ms, in_order=self._in_order,
            )  # fmt: skip
            queue.advance(start + fitting)
            return list(range(start, start + fitting))
        if wanted.matches_all:
            # More entries than needed, because positions that were acknowledged before a restart are skipped.
            entries = index.read(start, row_count + len(queue.acked_ahead), is_kept=False)
            matches = list(range(len(entries)))
        else:
            entries = index.read(start, SCAN_ENTRIES, is_kept=False)
            matches = np.flatnonzero(wanted.candidates(entries)).tolist()
        if queue.acked_ahead:
            # Acknowledged before a restart, so they are done although they were not leased since.
            matches = [match for match in matches if start + match not in queue.acked_ahead]
        takes_all = len(matches) == len(entries) <= row_count
        chosen = entries if takes_all else entries[np.array(matches[:row_count], dtype=np.int64)]
        sizes_bytes = chosen["size"].tolist()
        fitting = self._take_fitting(sizes_bytes)
        offsets = [start + match for match in matches[:fitting]]
        queue.lease_next(
            offsets,
            chosen["seq"].tolist(),
            sizes_bytes,
            self.pop_ms,
            self.deadline_ms,
            since_ms=self._now_ms,
            in_order=self._in_order,
        )
        # All entries before the first remaining candidate have been searched.
        queue.advance(start + (matches[fitting] if fitting < len(matches) else len(entries)))
        self.has_unsearched |= not offsets and queue.next_offset < index.max_offset and self._free_rows > 0
        return offsets

    def _free_rows_in(self, open_rows: int) -> int:
        """Compute how many rows may still be leased from a queue with `open_rows` open positions."""
        return max(0, min(self._free_rows, limits.POP_HELD_PER_QUEUE_MAX - open_rows))

    def _take_fitting(self, sizes_bytes: list[int]) -> int:
        """Compute how many of these rows, in their order, fit into the answer, and reduce the free rows and bytes."""
        fitting, total_bytes = len(sizes_bytes), sum(sizes_bytes)
        while fitting and total_bytes > self._free_bytes and (fitting > 1 or self.leased):
            fitting -= 1
            total_bytes -= sizes_bytes[fitting]
        self._free_bytes -= total_bytes
        self._free_rows -= fitting
        return fitting


def check_request(request: ReceiveRequest) -> None:
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


# ---- the rows of the leased positions: from memory while they are new, otherwise from the log ----------------

_TOPIC = READ_SCHEMA.get_field_index("topic")


async def selected_rows(
    request: ReceiveRequest, seqs: list[int], *, writer: LogWriter, reader: LogReader, reader_thread: Executor
) -> tuple[ReadRows, BoolArray | None]:
    """Read the rows with the numbers `seqs`. Returns the rows for this consumer, and the mask of these (None: all).

    Excluded are rows that do not match the filter, and rows of a shared retry topic that are for another group.
    """
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
    """Read these rows, and compute the mask of the rows that are for this consumer (reader thread).

    Excluded are rows that do not match the filter, and rows of a shared retry topic that are for another group.
    """
    rows = reader.read_rows(seqs)
    keep = np.ones(len(seqs), dtype=np.bool_)
    is_main = np.array([name == request.topic for name in rows.column("topic").to_pylist()])
    if not request.wanted.matches_all:
        # Rows of the retry topic passed the filter at their first delivery.
        keep &= ~is_main | request.wanted.exact(rows)
    texts = rows.column("properties")
    for row in np.flatnonzero(~is_main).tolist():
        # `%RETRY%a_b_c` is the retry topic of group a for topic b_c, and also of group a_b for topic c.
        keep[row] = is_for_group(request.group, texts[row].as_py())
    return rows, keep


# ---- messages that a filter excludes, without leases --------------------------------------------------------


def find_readable(index: QueueIndex, start: int) -> Int64Array:
    """Find the numbers of the messages from offset `start` on that one read may have: at most POP_BYTES_MAX in all.

    The first message may be larger.
    """
    entries = index.read(start, SCAN_ENTRIES, is_kept=False)
    end_bytes = np.cumsum(entries["size"], dtype=np.int64)
    fitting = max(1, int(np.searchsorted(end_bytes, limits.POP_BYTES_MAX, side="right")))
    return entries["seq"][:fitting].astype(np.int64)


def count_unmatched(reader: LogReader, wanted: Filter, seqs: Int64Array) -> int:
    """Count the messages of `seqs` before the first one that matches the filter (reader thread)."""
    matches = np.flatnonzero(wanted.exact(reader.read_rows(seqs)))
    return int(matches[0]) if len(matches) else len(seqs)
