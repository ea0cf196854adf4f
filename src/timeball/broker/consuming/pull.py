"""Reads by offset: from several queues at once, from one queue through a filter, and by time.

For a filter, the queue's index excludes most messages with a hash column, in vectorised form. Only the remaining ones
are read for the filter's exact decision. The answer contains the offset up to which the queue was searched, so a
consumer of a rare tag advances with every pull. One pull searches a bounded number of entries.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from timeball.broker.filters import Filter
from timeball.broker.registry.topics import Topic
from timeball.log.queue_index import QueueIndex
from timeball.log.reader import LogReader
from timeball.model import limits
from timeball.model.errors import NotFound, OutOfRange
from timeball.model.message import Int64Array


def locate(topic: Topic, offsets: dict[int, int], rows: int) -> Int64Array:
    """Find up to `rows` visible rows from each queue's offset on, with fair shares, and return their sequence numbers.

    Raise NotFound, OutOfRange.
    """
    rows = min(rows, limits.PULL_ROWS_MAX)
    left = {queue: offset for queue, offset in offsets.items() if _available(topic, queue, offset)}
    taken = []
    while left and rows > 0:
        # Equal shares, round after round, so that a full queue does not displace the others from the answer.
        share = max(1, rows // len(left))
        for queue, offset in sorted(left.items()):
            # Positions only: the rows are read afterwards, all together and in another thread.
            entries = topic.queues[queue].index.read(offset, min(share, rows))
            taken.append(entries["seq"].astype(np.int64))
            rows -= len(entries)
            # The queue has no more rows, so the others share its part in the next round.
            if len(entries) < share or rows == 0:
                del left[queue]
            else:
                left[queue] = offset + len(entries)
            if rows == 0:
                break
    return np.concatenate(taken) if taken else np.empty(0, np.int64)


def _available(topic: Topic, queue: int, offset: int) -> bool:
    if not 0 <= queue < len(topic.queues):
        raise NotFound(f"topic {topic.name!r} has no queue {queue}; it has {len(topic.queues)}")
    index = topic.queues[queue].index
    if not index.min_offset <= offset <= index.max_offset:
        raise OutOfRange(
            f"queue {queue} of {topic.name!r} keeps offsets {index.min_offset} to {index.max_offset}, not {offset}"
        )
    return offset < index.max_offset


def read(reader: LogReader, seqs: Int64Array) -> pa.RecordBatch:
    """Read as many of these rows as fit into one answer, at least one (reader thread)."""
    rows = reader.read_rows(seqs)
    while rows.num_rows > 1 and rows.nbytes > limits.PULL_BYTES_MAX:
        # Halved: row sizes differ, and adding them up costs more than the few rounds needed here.
        rows = rows.slice(0, rows.num_rows // 2)
    return rows


SCAN_ROWS_MAX = 16_384  # index entries searched by one pull: 320 KB


@dataclass(frozen=True, slots=True)
class FilteredPull:
    """The sequence numbers and offsets of the selected messages, and the offset up to which the queue was searched."""

    seqs: Int64Array
    offsets: Int64Array
    next_offset: int


def candidates(
    index: QueueIndex, offset: int, rows: int, wanted: Filter, *, bytes_max: int = 1 << 62
) -> FilteredPull:
    """Select up to `rows` messages from `offset` on that may match. Raise OutOfRange.

    Their sizes add up to at most `bytes_max`, unless the first one alone is larger.
    """
    # With a filter, a bounded range is searched, because most messages may not match.
    entries = index.read(offset, rows if wanted.matches_all else SCAN_ROWS_MAX)
    seqs, end = entries["seq"].astype(np.int64), offset + len(entries)
    if wanted.matches_all and entries["size"].sum(dtype=np.int64) <= bytes_max:
        return FilteredPull(seqs, np.arange(offset, end), end)
    at = np.arange(len(seqs)) if wanted.matches_all else np.flatnonzero(wanted.candidates(entries))
    ends = np.cumsum(entries["size"][at[:rows]], dtype=np.int64)
    # At least one, otherwise a message larger than the bound could never be pulled.
    fit = max(1, int(np.searchsorted(ends, bytes_max, side="right")))
    if len(at) > fit:
        at = at[:fit]
        return FilteredPull(seqs[at], offset + at, offset + int(at[-1]) + 1)
    return FilteredPull(seqs[at], offset + at, end)


def decide(selection: FilteredPull, reader: LogReader, wanted: Filter) -> FilteredPull:
    """Keep those candidates whose rows match the filter (reader thread)."""
    if wanted.matches_all or not len(selection.seqs):
        return selection
    keep = wanted.exact(reader.read_rows(selection.seqs))
    return FilteredPull(selection.seqs[keep], selection.offsets[keep], selection.next_offset)


# ---- by time -----------------------------------------------------------------------------------------------

# Store times grow along a queue, except where the clock was set back. Even then a bisection ends at a valid position.
# It reads one row in each step: about 17 for 100,000 messages.


def offset_at(reader: LogReader, index: QueueIndex, instant_ms: int, upper: bool = False) -> int:
    """Find the first offset stored at or after `instant_ms`, or the queue's end (reader thread).

    `upper`: find the last offset stored at or before it instead, as RocketMQ's boundary UPPER does.
    """
    low, high = index.min_offset, index.max_offset
    first, end = low, high
    while low < high:
        middle = (low + high) // 2
        # Read from the row, because index entries do not contain the store time.
        store_ms = _store_ms(reader, index, middle)
        if store_ms < instant_ms or (upper and store_ms == instant_ms):
            low = middle + 1
        else:
            high = middle
    if not upper:
        return low
    return max(first, low - 1) if low < end else max(first, end - 1) if end > first else end


def earliest_ms(reader: LogReader, index: QueueIndex) -> int:
    """Return the store time of the queue's first message, in milliseconds, or -1 if it is empty (reader thread)."""
    return _store_ms(reader, index, index.min_offset) if index.min_offset < index.max_offset else -1


def _store_ms(reader: LogReader, index: QueueIndex, offset: int) -> int:
    seqs = index.read(offset, 1)["seq"].astype(np.int64)
    return int(reader.read_rows(seqs).column("store_ms")[0].as_py())
