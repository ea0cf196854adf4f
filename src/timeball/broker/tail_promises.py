"""The promises in the log's tail while its rows are applied: each in the last of its rows, three int64 each.

Rows are added in the order of the log. Now and then they are folded: of a promise that was written again only its last
row is kept, and those go that are settled or lie in the table. So a follower that applies for days holds the promises
that wait, and those that came since it last folded.

Compaction wants to know how many promises came since the watermark, settled ones included. They are counted by blocks
of numbers, and the block in which the watermark stands is counted from the log.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from timeball.log.reader import LogReader
from timeball.message import Int64Array
from timeball.schedule import locations
from timeball.schedule.columns import GrowingColumns, runs_of
from timeball.schedule.locations import Waiting
from timeball.schedule.outcomes import Settled

COUNT_BLOCK = 4_096  # numbers
_COLUMNS = ("seq", "kind", "due_ms", "queue_offset", "source_seq", "version_seq", "from_due_ms")
_BATCH_ROWS = 65_536


class TailPromises:
    """The promises of rows from `from_seq` on. Belongs to the thread that applies."""

    def __init__(self, from_seq: int) -> None:
        self.from_seq = from_seq
        self._held = GrowingColumns(3)  # as `Waiting`, in the order of the log behind the last fold
        self._folded_rows = 0
        self._counts: dict[int, int] = {}  # block of numbers -> promises that came in it

    def __len__(self) -> int:
        return len(self._held)

    @property
    def unfolded_rows(self) -> int:
        """Return how many rows were added since the last fold."""
        return len(self._held) - self._folded_rows

    def reserve(self, rows: int) -> None:
        """Make room for the promises of so many rows; to grow by and by copies them to memory that is new each time."""
        self._held.reserve(rows)

    def add(self, rows: pa.RecordBatch) -> None:
        """Add the promises of READ_SCHEMA rows that stand behind all others so far."""
        # Chosen first: to choose rows of all columns would copy every body.
        waiting = locations.waiting_in(locations.waiting_rows(rows.select(_COLUMNS)))
        self._held.add(waiting.due_ms, waiting.seq, waiting.row_seq)
        self._count(waiting)

    def extend_down(self, reader: LogReader, from_seq: int) -> None:
        """Read the promises of the rows from `from_seq` on that are not held; blocking."""
        # What retention has removed was settled.
        from_seq = max(from_seq, reader.first_seq)
        if from_seq >= self.from_seq:
            return
        # Rows must stand in the order of the log, or the last of a promise would not be the one that counts.
        later = self._held
        self._held, self._folded_rows = GrowingColumns(3), 0
        for rows in reader.coalesced(from_seq, self.from_seq, locations.KINDS, _BATCH_ROWS, _COLUMNS):
            self.add(rows)
        self._held.add(*later.columns())
        self.from_seq = from_seq

    def fold(self, settled: Settled, from_seq: int) -> None:
        """Forget rows before `from_seq`, settled promises, and all rows of a promise but its last one.

        The pairs of `settled` are sorted by number, each part of them.
        """
        waiting = self.waiting(settled, from_seq)
        # Of a million that all wait a copy takes longer than to look at them.
        if len(waiting) < len(self._held):
            self._held.replace(waiting.due_ms, waiting.seq, waiting.row_seq)
        self._folded_rows = len(waiting)
        first = from_seq // COUNT_BLOCK
        for block in [block for block in self._counts if block < first]:
            del self._counts[block]

    def waiting(self, settled: Settled, from_seq: int) -> Waiting:
        """Return the promises that wait, sorted by number, each in the last of its rows from `from_seq` on.

        They may be views of what is held, good until the next change.
        """
        tail = locations.latest([Waiting(*self._held.columns())], from_seq)
        waits = (tail.due_ms >= settled.before_ms) | settled.may_wait(tail.seq)
        cut = len(settled.seq) - settled.released
        # By number alone: numbers are never used twice, so the instant need not be compared.
        for seq in (settled.seq[:cut], settled.seq[cut:]):
            _drop(tail.seq, seq, waits)
        return tail if waits.all() else tail.part(waits)

    def count(self, reader: LogReader, from_seq: int) -> int:
        """Return how many promises came in the rows from `from_seq` on; blocking."""
        from_seq = max(from_seq, self.from_seq)
        block = from_seq // COUNT_BLOCK
        found = sum(count for at, count in self._counts.items() if at > block)
        # The rest of one block alone: frames of ten rows are decoded in milliseconds.
        if block not in self._counts:
            return found
        end = (block + 1) * COUNT_BLOCK
        for rows in reader.coalesced(from_seq, end, locations.KINDS, _BATCH_ROWS, _COLUMNS):
            found += len(_new(locations.waiting_in(locations.waiting_rows(rows))))
        return found

    def _count(self, waiting: Waiting) -> None:
        blocks = _new(waiting) // COUNT_BLOCK
        if len(blocks):
            # Numbers ascend within the rows of one call, so the blocks do, and mostly there is one.
            begins, counts = runs_of(blocks)
            for block, count in zip(blocks[begins].tolist(), counts.tolist(), strict=True):
                self._counts[block] = self._counts.get(block, 0) + count


def _new(waiting: Waiting) -> Int64Array:
    """Return the numbers of those that got an instant in their row: others were written again and counted before."""
    if waiting.row_seq is waiting.seq:
        return waiting.seq
    return waiting.part(waiting.seq == waiting.row_seq).seq


def _drop(tail: Int64Array, gone: Int64Array, waits: npt.NDArray[np.bool_]) -> None:
    """Clear the marks of those of the sorted numbers `tail` that are among the sorted numbers `gone`."""
    if not len(tail) or not len(gone):
        return
    # Only those within the tail's span: most of what is settled stood in the table, or came long before.
    gone = gone[np.searchsorted(gone, tail[0]) : np.searchsorted(gone, tail[-1], side="right")]
    at = np.searchsorted(tail, gone)
    waits[at[tail[at] == gone]] = False
