"""The newest visible rows of the log in memory, read on the event loop without a thread or a frame.

Most messages are read right after they become visible. Such a read from the log costs a hand-over to the reader thread
and back, a frame that is mapped, checked and opened, and a value from each of its columns. But the rows are still in
memory from their commit.

It is a cache with a bound in bytes: rows that it no longer contains are read from the log. It contains only durable
rows, so that no reader sees a row that a power cut could take back. Belongs to the event loop.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence

import pyarrow as pa

from timeball.log.few_rows import EncodedRows, Rows, as_message, numbered_value
from timeball.model.message import ReadRow

BYTES_MAX = 8 * 1024 * 1024  # of all rows, including the other memory that their batches hold
# Limit for one append. If a larger one were kept, the next append could not reuse its memory, and would take a tenth
# longer.
APPEND_BYTES_MAX = 1024 * 1024
# Appends kept at most: an append of one row takes some kilobytes of memory.
COMMITTED_MAX = 4_096


class NewestRows:
    """Rows by number. Appends must come in the order of their numbers."""

    def __init__(self) -> None:
        self._first_seqs: list[int] = []
        # (rows, number of rows, bytes) of each append. A batch is replaced by its message when one of its rows is first
        # read.
        self._committed: deque[tuple[Rows | bytes, int, int]] = deque()
        self._dropped = 0  # entries at the start of _first_seqs whose rows are gone
        self._size_bytes = 0

    def __len__(self) -> int:
        """The number of appends kept."""
        return len(self._committed)

    def add(self, first_seq: int, rows: Rows) -> None:
        """Keep the rows of a durable append."""
        if isinstance(rows, EncodedRows):
            size_bytes = len(rows.message) * (2 if rows.values else 1)
        else:
            size_bytes = rows.get_total_buffer_size()
        if size_bytes > APPEND_BYTES_MAX:
            return
        self._first_seqs.append(first_seq)
        self._committed.append((rows, rows.num_rows, size_bytes))
        self._size_bytes += size_bytes
        while self._size_bytes > BYTES_MAX or len(self._committed) > COMMITTED_MAX:
            self._size_bytes -= self._committed.popleft()[2]
            self._dropped += 1
        # Cut only when half of the list is unused: cutting at each append would move all entries each time.
        if self._dropped > len(self._committed) + 16:
            del self._first_seqs[: self._dropped]
            self._dropped = 0

    def values_of(self, seqs: Sequence[int]) -> list[ReadRow] | None:
        """Read the rows with these numbers, a value for each column, or None when one of them is no longer kept."""
        found: list[ReadRow] = []
        for seq in seqs:
            at = bisect_right(self._first_seqs, seq, lo=self._dropped) - 1
            if at < self._dropped:
                return None
            (rows, count, size_bytes), row = self._committed[at - self._dropped], seq - self._first_seqs[at]
            if row >= count:
                return None
            if isinstance(rows, pa.RecordBatch):
                rows = as_message(rows)
                self._committed[at - self._dropped] = rows, count, size_bytes
            found.append(numbered_value(rows, row, seq))
        return found
