"""Reading one queue by offset through a filter: which messages, from an offset on, it lets through.

The queue's index decides what it can (a hash column, as vectors); only what is left is opened for the filter's exact
word. The answer says how far the queue has been looked through, so a consumer of a rare tag moves on with every pull
instead of beginning again, and never further than a bounded stretch at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from timeball.broker.filters import Filter
from timeball.log.queue_index import QueueIndex
from timeball.log.reader import LogReader
from timeball.message import Int64Array

SCAN_ROWS_MAX = 16_384  # entries one pull looks at: 320 KB of index


@dataclass(frozen=True, slots=True)
class FilteredPull:
    """Sequence numbers and offsets of what was chosen, and the offset up to which all is decided."""

    seqs: Int64Array
    offsets: Int64Array
    next_offset: int


def candidates(
    index: QueueIndex, offset: int, rows: int, wanted: Filter, *, bytes_max: int = 1 << 62
) -> FilteredPull:
    """Up to `rows` messages from `offset` on that may match, of `bytes_max` together or one; raises OutOfRange."""
    entries = index.read(offset, rows if wanted.matches_all else SCAN_ROWS_MAX)
    seqs = entries["seq"].astype(np.int64)
    at = np.arange(len(seqs)) if wanted.matches_all else np.flatnonzero(wanted.candidates(entries))
    ends = np.cumsum(entries["size"][at[:rows]], dtype=np.int64)
    fit = max(1, int(np.searchsorted(ends, bytes_max, side="right")))
    if len(at) > fit:
        at = at[:fit]
        return FilteredPull(seqs[at], offset + at, offset + int(at[-1]) + 1)
    return FilteredPull(seqs[at], offset + at, offset + len(entries))


def decide(selection: FilteredPull, reader: LogReader, wanted: Filter) -> FilteredPull:
    """What is left of the candidates when the rows themselves have been looked at (reader thread)."""
    if wanted.matches_all or not len(selection.seqs):
        return selection
    keep = wanted.exact(reader.take(selection.seqs))
    return FilteredPull(selection.seqs[keep], selection.offsets[keep], selection.next_offset)
