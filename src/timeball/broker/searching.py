"""Searching a queue by time: the offset of the first message stored at or after an instant.

Store times grow along a queue, except where somebody has set the clock back; a bisection then still ends at
one of the places that fit. It opens one row a step: some seventeen for a hundred thousand messages.
"""

from __future__ import annotations

import numpy as np

from timeball.log.queue_index import QueueIndex
from timeball.log.reader import LogReader


def offset_at(reader: LogReader, index: QueueIndex, instant_ms: int, upper: bool = False) -> int:
    """The first offset stored at or after `instant_ms`, else the queue's end (reader thread).

    `upper`: the last one stored at or before it instead, as RocketMQ's boundary UPPER.
    """
    low, high = index.min_offset, index.max_offset
    first, end = low, high
    while low < high:
        middle = (low + high) // 2
        store_ms = _store_ms(reader, index, middle)
        if store_ms < instant_ms or (upper and store_ms == instant_ms):
            low = middle + 1
        else:
            high = middle
    if not upper:
        return low
    return max(first, low - 1) if low < end else max(first, end - 1) if end > first else end


def earliest_ms(reader: LogReader, index: QueueIndex) -> int:
    """When the first message kept was stored; -1 for an empty queue (reader thread)."""
    return _store_ms(reader, index, index.min_offset) if index.min_offset < index.max_offset else -1


def _store_ms(reader: LogReader, index: QueueIndex, offset: int) -> int:
    seqs = index.read(offset, 1)["seq"].astype(np.int64)
    return int(reader.take(seqs).column("store_ms")[0].as_py())
