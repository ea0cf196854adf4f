"""The scheduled messages in the log's tail while rows are applied: each at the last of its rows, three int64 each.

Rows are added in log order. They are folded from time to time: of a message that was written again, only the last row
stays, and settled messages (released or cancelled) and messages in the table are removed. So a follower that applies
rows for days holds the pending messages, and the messages since the last fold.

Compaction needs the number of scheduled messages since the watermark, including settled ones. They are counted in
blocks of sequence numbers. The block that contains the watermark is counted from the log.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from timeball.log.reader import LogReader
from timeball.model.message import Int64Array
from timeball.schedule import locations
from timeball.schedule.columns import GrowingColumns, runs_of
from timeball.schedule.locations import Waiting
from timeball.schedule.outcomes import Settled

COUNT_BLOCK = 4_096  # sequence numbers in a block
_COLUMNS = ("seq", "kind", "due_ms", "queue_offset", "source_seq", "version_seq", "from_due_ms")
_BATCH_ROWS = 65_536


class TailPromises:
    """The scheduled messages in rows from `from_seq` on. Belongs to the thread that applies the rows."""

    def __init__(self, from_seq: int) -> None:
        self.from_seq = from_seq
        # Columns as in `Waiting`; rows added since the last fold are in log order.
        self._held = GrowingColumns(3)
        self._folded_rows = 0
        self._counts: dict[int, int] = {}  # block of numbers -> scheduled messages accepted in it

    def __len__(self) -> int:
        return len(self._held)

    @property
    def unfolded_rows(self) -> int:
        """The number of rows that were added since the last fold."""
        return len(self._held) - self._folded_rows

    def reserve(self, rows: int) -> None:
        """Allocate space for `rows` messages. Growing step by step would copy the columns each time."""
        self._held.reserve(rows)

    def add(self, rows: pa.RecordBatch) -> None:
        """Add the scheduled messages of READ_SCHEMA rows. The rows must follow all rows added before."""
        # Select the columns first: filtering rows of all columns would copy every body.
        waiting = locations.waiting_in(locations.waiting_rows(rows.select(_COLUMNS)))
        self._held.add(waiting.due_ms, waiting.seq, waiting.row_seq)
        self._count(waiting)

    def extend_down(self, reader: LogReader, from_seq: int) -> None:
        """Read the scheduled messages of the rows from `from_seq` on that are not held yet. Blocking."""
        # Messages in rows that retention has removed were settled.
        from_seq = max(from_seq, reader.first_seq)
        if from_seq >= self.from_seq:
            return
        # Rows must be in log order, because the last row of a message counts.
        later = self._held
        self._held, self._folded_rows = GrowingColumns(3), 0
        for rows in reader.coalesced(from_seq, self.from_seq, locations.KINDS, _BATCH_ROWS, _COLUMNS):
            self.add(rows)
        self._held.add(*later.columns())
        self.from_seq = from_seq

    def fold(self, settled: Settled, from_seq: int) -> None:
        """Remove rows before `from_seq`, settled messages, and all rows of a message but its last one.

        Both parts of `settled`, the cancelled and the released pairs, are sorted by number.
        """
        waiting = self.waiting(settled, from_seq)
        # If all are pending, skip the copy: for a million messages it takes longer than the check.
        if len(waiting) < len(self._held):
            self._held.replace(waiting.due_ms, waiting.seq, waiting.row_seq)
        self._folded_rows = len(waiting)
        first = from_seq // COUNT_BLOCK
        for block in [block for block in self._counts if block < first]:
            del self._counts[block]

    def waiting(self, settled: Settled, from_seq: int) -> Waiting:
        """Find the pending messages, sorted by number, each at the last of its rows from `from_seq` on.

        The columns may be views of internal memory, which are valid until the next change.
        """
        tail = locations.latest([Waiting(*self._held.columns())], from_seq)
        waits = (tail.due_ms >= settled.before_ms) | settled.may_wait(tail.seq)
        cut = len(settled.seq) - settled.released
        # Compare numbers alone: a number is never reused, so the due time need not be compared.
        for seq in (settled.seq[:cut], settled.seq[cut:]):
            _drop(tail.seq, seq, waits)
        return tail if waits.all() else tail.part(waits)

    def count(self, reader: LogReader, from_seq: int) -> int:
        """Count the scheduled messages that were accepted in rows from `from_seq` on. Blocking."""
        from_seq = max(from_seq, self.from_seq)
        block = from_seq // COUNT_BLOCK
        found = sum(count for at, count in self._counts.items() if at > block)
        # Only the rest of one block is read: frames of ten rows are decoded in milliseconds.
        if block not in self._counts:
            return found
        end = (block + 1) * COUNT_BLOCK
        for rows in reader.coalesced(from_seq, end, locations.KINDS, _BATCH_ROWS, _COLUMNS):
            found += len(_new(locations.waiting_in(locations.waiting_rows(rows))))
        return found

    def _count(self, waiting: Waiting) -> None:
        blocks = _new(waiting) // COUNT_BLOCK
        if len(blocks):
            # Numbers ascend within the rows of one call, so the blocks ascend too. Usually there is only one.
            begins, counts = runs_of(blocks)
            for block, count in zip(blocks[begins].tolist(), counts.tolist(), strict=True):
                self._counts[block] = self._counts.get(block, 0) + count


def _new(waiting: Waiting) -> Int64Array:
    """Select the numbers of rows that gave a message its due time. Other rows were written again and counted before."""
    if waiting.row_seq is waiting.seq:
        return waiting.seq
    return waiting.part(waiting.seq == waiting.row_seq).seq


def _drop(tail: Int64Array, gone: Int64Array, waits: npt.NDArray[np.bool_]) -> None:
    """Set `waits` to False for the numbers in `tail` that are also in `gone`. Both are sorted."""
    if not len(tail) or not len(gone):
        return
    # Only numbers within the tail's range: most settled messages were in the table, or older.
    gone = gone[np.searchsorted(gone, tail[0]) : np.searchsorted(gone, tail[-1], side="right")]
    at = np.searchsorted(tail, gone)
    waits[at[tail[at] == gone]] = False
