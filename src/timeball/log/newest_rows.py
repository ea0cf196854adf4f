"""The newest visible rows of the log, as they were written: read on the event loop, without a thread or a frame.

Most messages are read right after they became visible. From the log such a read costs a hand-over to the reader thread
and back, a frame that is mapped, checked and opened, and a value from each of its columns; the rows themselves are
still in memory, from their commit.

A cache with a bound in bytes: what it does not hold the log says. It holds durable rows alone, so that no reader sees
one that a power cut could take back. Belongs to the event loop.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence

import pyarrow as pa

from timeball.log.few_rows import EncodedRows, Rows, as_message, numbered_value
from timeball.message import ReadRow

BYTES_MAX = 8 * 1024 * 1024  # of all rows, with what their batches keep in memory besides
# Of one append: larger ones would be kept from the memory that the next one is made in, which costs it a tenth.
APPEND_BYTES_MAX = 1024 * 1024
COMMITTED_MAX = 4_096  # appends whose rows are held: of one row each takes some kilobytes


class NewestRows:
    """Rows by number. Appends come in the order of their numbers."""

    def __init__(self) -> None:
        self._first_seqs: list[int] = []
        # How many they are, and their bytes. Columns become their message when one of them is asked for.
        self._committed: deque[tuple[Rows | bytes, int, int]] = deque()
        self._dropped = 0  # of the first numbers, those whose rows are gone
        self._size_bytes = 0

    def __len__(self) -> int:
        """Return how many appends are held."""
        return len(self._committed)

    def add(self, first_seq: int, rows: Rows) -> None:
        """Hold the rows of an append that is durable."""
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
        # Cut when half of the list is of no use, or each row would move all of them.
        if self._dropped > len(self._committed) + 16:
            del self._first_seqs[: self._dropped]
            self._dropped = 0

    def values_of(self, seqs: Sequence[int]) -> list[ReadRow] | None:
        """Return the rows with these numbers, each a value for each column; None when one of them is not held."""
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
