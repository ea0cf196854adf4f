"""Reads by offset: from several queues at once, from one queue through a filter, and by time.

A pull with a filter has two steps. The tag hashes in the queue's index exclude most messages without reading them
(`candidates`). The rows of the remaining messages are read for the exact decision (`decide`). The answer contains the
offset up to which the queue was searched, so a consumer of a rare tag advances with every pull. One pull searches a
limited number of index entries.
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


def find_seqs(topic: Topic, offsets: dict[int, int], rows: int) -> Int64Array:
    """Find the sequence numbers of up to `rows` visible rows, from each queue's offset on, with equal shares.

    Raises NotFound, OutOfRange.
    """
    rows = min(rows, limits.PULL_ROWS_MAX)
    open_offsets = {queue: offset for queue, offset in offsets.items() if _has_rows(topic, queue, offset)}
    chunks = []
    while open_offsets and rows > 0:
        # Equal shares, round after round, so that a full queue does not displace the others from the answer.
        share = max(1, rows // len(open_offsets))
        for queue, offset in sorted(open_offsets.items()):
            # Index entries only: the rows are read afterwards, all together and in another thread.
            entries = topic.queues[queue].index.read(offset, min(share, rows))
            chunks.append(entries["seq"].astype(np.int64))
            rows -= len(entries)
            # A queue without more rows leaves its share of the next round to the others.
            if len(entries) < share or rows == 0:
                del open_offsets[queue]
            else:
                open_offsets[queue] = offset + len(entries)
            if rows == 0:
                break
    return np.concatenate(chunks) if chunks else np.empty(0, np.int64)


def _has_rows(topic: Topic, queue: int, offset: int) -> bool:
    """Check whether a queue has rows from an offset on. Raises NotFound, OutOfRange."""
    if not 0 <= queue < len(topic.queues):
        raise NotFound(f"topic {topic.name!r} has no queue {queue}; it has {len(topic.queues)}")
    index = topic.queues[queue].index
    if not index.min_offset <= offset <= index.max_offset:
        raise OutOfRange(
            f"queue {queue} of {topic.name!r} keeps offsets {index.min_offset} to {index.max_offset}, not {offset}"
        )
    return offset < index.max_offset


def read(reader: LogReader, seqs: Int64Array) -> pa.RecordBatch:
    """Read as many of these rows as fit into one answer, but at least one (reader thread)."""
    rows = reader.read_rows(seqs)
    while rows.num_rows > 1 and rows.nbytes > limits.PULL_BYTES_MAX:
        # Halve the rows: their sizes differ, and adding up sizes costs more than the few rounds here.
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
    """Select up to `rows` messages from `offset` on that may match the filter, by the index. Raises OutOfRange.

    Their sizes add up to at most `bytes_max`, unless the first message alone is larger.
    """
    # With a filter, search a limited range that is larger than `rows`, because most messages may not match.
    entries = index.read(offset, rows if wanted.matches_all else SCAN_ROWS_MAX)
    seqs, end = entries["seq"].astype(np.int64), offset + len(entries)
    if wanted.matches_all and entries["size"].sum(dtype=np.int64) <= bytes_max:
        return FilteredPull(seqs, np.arange(offset, end), end)
    matches = np.arange(len(seqs)) if wanted.matches_all else np.flatnonzero(wanted.candidates(entries))
    end_bytes = np.cumsum(entries["size"][matches[:rows]], dtype=np.int64)
    # At least one, otherwise a message larger than the limit could never be pulled.
    fitting = max(1, int(np.searchsorted(end_bytes, bytes_max, side="right")))
    if len(matches) > fitting:
        matches = matches[:fitting]
        return FilteredPull(seqs[matches], offset + matches, offset + int(matches[-1]) + 1)
    return FilteredPull(seqs[matches], offset + matches, end)


def decide(selection: FilteredPull, reader: LogReader, wanted: Filter) -> FilteredPull:
    """Read the rows of the candidates, and keep those that match the filter (reader thread)."""
    if wanted.matches_all or not len(selection.seqs):
        return selection
    keep = wanted.exact(reader.read_rows(selection.seqs))
    return FilteredPull(selection.seqs[keep], selection.offsets[keep], selection.next_offset)


# ---- by time -----------------------------------------------------------------------------------------------

# A bisection over a queue, whose store times grow except where the clock was set back. Even then it ends at a valid
# position. It reads one row in each step: about 17 for 100,000 messages.


def offset_at(reader: LogReader, index: QueueIndex, time_ms: int, upper: bool = False) -> int:
    """Find the first offset stored at or after `time_ms`, or the queue's end (reader thread).

    With `upper`, find the last offset stored at or before `time_ms`, as RocketMQ's boundary UPPER does.
    """
    low, high = index.min_offset, index.max_offset
    min_offset, max_offset = low, high
    while low < high:
        middle = (low + high) // 2
        # Read from the row, because index entries do not contain the store time.
        store_ms = _store_ms(reader, index, middle)
        if store_ms < time_ms or (upper and store_ms == time_ms):
            low = middle + 1
        else:
            high = middle
    if not upper:
        return low
    return (
        max(min_offset, low - 1)
        if low < max_offset
        else max(min_offset, max_offset - 1)
        if max_offset > min_offset
        else max_offset
    )


def earliest_ms(reader: LogReader, index: QueueIndex) -> int:
    """Find the store time of the queue's first message in ms, or -1 if the queue is empty (reader thread)."""
    return _store_ms(reader, index, index.min_offset) if index.min_offset < index.max_offset else -1


def _store_ms(reader: LogReader, index: QueueIndex, offset: int) -> int:
    seqs = index.read(offset, 1)["seq"].astype(np.int64)
    return int(reader.read_rows(seqs).column("store_ms")[0].as_py())
