"""The wheel of loaded messages: those due soon, with bodies in memory, in slots of one second.

The numbers of the used slots are also in a heap (the delay queue of the design). So an empty second costs nothing, and
the first slot of the heap has the next due time. Rows arrive in batches and stay sorted runs. Small batches are
collected until there are many rows or one of them is due, because splitting ten rows over ten slots costs as much as
splitting a thousand. When a slot comes into use its runs are merged, so each millisecond hands out a slice.

Messages that arrive a few at a time stay in the Arrow message of their commit, with an entry in a second heap. As
columns, each step for one message would cost as much as for a thousand. They become columns when they are due together
with columns. If the heap is very large, further messages are stored as columns.

A slot never rounds a due time. Rows keep their millisecond, and the slot only selects the runs to search, so the
precision does not depend on the width of a slot.

The wheel refuses no message and uses neither the log nor the table. `loaded.py` decides which messages belong here.
"""

from __future__ import annotations

import heapq
import struct
from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from timeball.log.row_encoder import ROW_BYTES, Entry, NumberedRows, ReadRows, pairs_of
from timeball.model import limits
from timeball.model.message import READ_SCHEMA, Int64Array, int64
from timeball.schedule.columns import with_column
from timeball.schedule.due_index import FAR_MS
from timeball.table.data_file import search

# A wider slot means more merges, a narrower one more slots. Deliveries do not depend on it (see the module docstring).
SLOT_MS = limits.SECOND_MS
ARRIVALS_MAX = 4_096  # rows collected before they are sorted into their slots
# Batches collected. Each takes about 10 KB of objects, with one row or with a thousand.
ARRIVAL_BATCHES_MAX = 256
FEW_MAX = 65_536  # rows in the heap, of about 200 bytes each besides their messages
FEW_OF_SLOT_MAX = 12_288  # of one slot; with more rows, which may all be due at one time, columns cost less
RUNS_MAX = 24  # small runs of a slot before most of them are merged, because each step looks at all runs
OPEN_RUNS_MAX = 4  # runs that may arrive in the slot in use before they are merged

_TEXTS = [READ_SCHEMA.get_field_index(name) for name in ("body", "properties", "keys")]
_DUE_MS = READ_SCHEMA.get_field_index("due_ms")
_END = struct.Struct("<i")


def slot_cuts(sorted_due_ms: Int64Array) -> tuple[list[int], list[int]]:
    """Cut a sorted run by slot. Return (slots, cuts): rows cuts[i]:cuts[i+1] belong to slots[i]."""
    first, last = int(sorted_due_ms[0]) // SLOT_MS, int(sorted_due_ms[-1]) // SLOT_MS
    if first == last:
        return [first], [0, len(sorted_due_ms)]
    slots = sorted_due_ms // SLOT_MS
    starts = np.concatenate(([0], np.flatnonzero(np.diff(slots)) + 1))
    return slots[starts].tolist(), [*starts.tolist(), len(sorted_due_ms)]


@dataclass(slots=True)
class Run:
    """Rows sorted by (due_ms, seq). Those before `cursor` have been handed out."""

    due: Int64Array
    seq: Int64Array
    # The original due times. A row may count as due at another time (delay levels, shifted durations).
    promised_ms: Int64Array
    rows: pa.RecordBatch
    cursor: int = 0

    @classmethod
    def of(cls, batches: list[pa.RecordBatch]) -> Run:
        """Build one sorted run of these rows."""
        # A single batch is not copied. A gather is a single batch.
        rows = batches[0] if len(batches) == 1 else pa.concat_batches(batches)
        due, seq = pairs_of(rows)
        if not _is_sorted(due, seq):
            order = np.lexsort((seq, due))
            due, seq, rows = due[order], seq[order], rows.take(pa.array(order))
        return cls(due, seq, due, rows)

    @classmethod
    def at(cls, due_ms: Int64Array, seq: Int64Array, rows: pa.RecordBatch) -> Run:
        """Build one sorted run of these rows, with the due times `due_ms` that belong to the sequence numbers `seq`."""
        # The reader may skip rows (no scheduled message, or settled), so due times are found by number, not by
        # position.
        numbers = int64(rows.column("seq"))
        by_number = np.argsort(seq)
        due = due_ms[by_number[np.searchsorted(seq, numbers, sorter=by_number)]]
        if not _is_sorted(due, numbers):
            order = np.lexsort((numbers, due))
            due, numbers, rows = due[order], numbers[order], rows.take(pa.array(order))
        return cls(due, numbers, int64(rows.column("due_ms")), rows)

    @classmethod
    def joined(cls, runs: list[Run]) -> Run:
        """Join the rows of several runs that have not been handed out. Each keeps the due time of its run."""
        due, seq, promised_ms = (
            np.concatenate([getattr(run, name)[run.cursor :] for run in runs])
            for name in ("due", "seq", "promised_ms")
        )
        rows = pa.concat_batches([run.rows.slice(run.cursor) for run in runs])
        if not _is_sorted(due, seq):
            order = np.lexsort((seq, due))
            due, seq, promised_ms, rows = (
                due[order],
                seq[order],
                promised_ms[order],
                rows.take(pa.array(order)),
            )
        return cls(due, seq, promised_ms, rows)

    def part(self, begin: int, end: int) -> Run:
        """Build a view of the rows [begin, end), none of which has been handed out."""
        # The cursor of the new run is 0: rows that were handed out of the old run are outside [begin, end).
        due, promised_ms = self.due[begin:end], self.promised_ms
        promised_ms = due if promised_ms is self.due else promised_ms[begin:end]
        return Run(due, self.seq[begin:end], promised_ms, self.rows.slice(begin, end - begin))

    def filtered(self, keep: npt.NDArray[np.bool_]) -> Run:
        """Select rows by a mask. None of the rows has been handed out."""
        return Run(self.due[keep], self.seq[keep], self.promised_ms[keep], self.rows.filter(pa.array(keep)))

    @property
    def last_promised_ms(self) -> int:
        """The latest original due time."""
        return int(self.promised_ms.max())

    @property
    def is_shifted(self) -> bool:
        """True if a row is due at another time than its original due time."""
        return self.promised_ms is not self.due and not np.array_equal(self.promised_ms, self.due)

    def rows_as_due(self) -> pa.RecordBatch:
        """Build the rows with the due times at which they count as due. `from_due_ms` contains the original ones."""
        rows = with_column(self.rows, "due_ms", pa.array(self.due))
        return with_column(rows, "from_due_ms", pa.array(self.promised_ms, mask=self.promised_ms == self.due))


@dataclass(slots=True)
class FewRun:
    """Rows as values, sorted by (due_ms, seq). Each is due at its original due time."""

    is_shifted: ClassVar = False
    due: Int64Array
    seq: Int64Array
    rows: NumberedRows

    @property
    def promised_ms(self) -> Int64Array:
        """The due times, which are the original ones."""
        return self.due

    def filtered(self, keep: npt.NDArray[np.bool_]) -> FewRun:
        """Select rows by a mask."""
        return FewRun(self.due[keep], self.seq[keep], self.rows.filter(keep))

    @property
    def last_promised_ms(self) -> int:
        """The latest due time."""
        return int(self.due[-1])

    def rows_as_due(self) -> NumberedRows:
        """The rows, unchanged: none is due at another time than its original one."""
        return self.rows


class DueWheel:
    """Loaded rows by due second. `len` counts the rows that are not handed out."""

    def __init__(self) -> None:
        self._slots: dict[int, list[Run]] = {}
        # Invariant: a slot is in the heap exactly once, for as long as `_slots` contains it.
        self._used: list[int] = []  # a heap of the slot numbers in `_slots`
        self._opened = -FAR_MS  # the latest slot from which rows have been handed out
        # Batches that are not sorted into slots yet, their row count and their earliest due time.
        self._arrivals: list[pa.RecordBatch] = []
        self._arrival_rows = 0
        self._arrivals_first_ms = FAR_MS
        # A heap by (due_ms, seq) of rows as values. An entry has the row's size in bytes and the location of the row.
        self._few: list[Entry] = []
        self._few_of: Counter[int] = Counter()  # slot -> entries of the heap in that slot
        self._columns_first_ms = FAR_MS  # the earliest due time of rows in columns
        self._size = 0
        self.size_bytes = 0  # approximate memory of the rows that are not handed out
        # The earliest due time, FAR_MS if there are no rows. It is stored because the scheduler reads it at every step.
        self.first_due_ms = FAR_MS

    def __len__(self) -> int:
        return self._size

    def add(self, rows: ReadRows) -> None:
        """Add READ_SCHEMA rows in any order."""
        if isinstance(rows, NumberedRows):
            entries = rows.entries()
            if len(self._few) < FEW_MAX and self._few_of[entries[0][0] // SLOT_MS] < FEW_OF_SLOT_MAX:
                self._add_few(entries)
                return
            rows = rows.batch
        if rows.num_rows == 0:
            return
        self._size += rows.num_rows
        self.size_bytes += _bytes_of(rows)
        # Not sorted into slots yet: a send of one row costs an append here, and its share of a sort when many have
        # arrived.
        self._arrivals.append(rows)
        self._arrival_rows += rows.num_rows
        self._arrivals_first_ms = min(self._arrivals_first_ms, int(int64(rows.column("due_ms")).min()))
        self._expect_columns(self._arrivals_first_ms)
        if self._arrival_rows >= ARRIVALS_MAX or len(self._arrivals) >= ARRIVAL_BATCHES_MAX:
            self._place_arrivals()

    def add_run(self, run: Run | FewRun) -> None:
        """Add rows that are already sorted, such as those of a gather."""
        if isinstance(run, FewRun):
            self._add_few(run.rows.entries())
            return
        if len(run.due) == 0:
            return
        self._size += len(run.due)
        self.size_bytes += _bytes_of(run.rows)
        self._expect_columns(int(run.due[0]))
        self._place(run)

    def take_due(self, before_ms: int, limit: int) -> Run | FewRun | None:
        """Remove and return up to `limit` rows due before `before_ms`, in order. None if there are none."""
        if self._few and self._few[0][0] < before_ms:
            if self._columns_first_ms >= before_ms:
                return self._take_few(before_ms, limit)
            # Rows as values are due together with columns. Convert only as many as are handed out, since the heap may
            # be very large.
            self.add_run(Run.of([self._take_few(before_ms, limit).rows.batch]))
        # An arrival may be due, or may belong to the slot that comes into use. Only then must it be in its slot.
        slot = (before_ms - 1) // SLOT_MS
        if self._arrivals_first_ms < (before_ms if slot <= self._opened else (slot + 1) * SLOT_MS):
            self._place_arrivals()
        taken: list[Run] = []
        count = 0
        while self._used and count < limit:
            part = self._take_from_slot(self._used[0], before_ms, limit - count)
            # The first slot of the heap is the earliest, so no later slot contains rows that are due.
            if part is None:
                break
            taken.append(part)
            count += len(part.due)
        if not taken:
            return None
        self._size -= count
        self.size_bytes -= sum(_bytes_of(run.rows) for run in taken)
        self._keep_columns_first()
        if len(taken) == 1:
            return taken[0]
        return Run.joined(taken)

    def _take_from_slot(self, slot: int, before_ms: int, limit: int) -> Run | None:
        runs = self._slots[slot]
        # An earlier slot may come into use again, and this slot once more after it. Only the first time is all of it
        # merged.
        runs = self._slots[slot] = _opened(runs) if slot > self._opened else _fewer(runs)
        self._opened = max(self._opened, slot)
        ends = [run.cursor + int(np.searchsorted(run.due[run.cursor :], before_ms)) for run in runs]
        # Several runs are due together. The limit applies to all of them by (due_ms, seq), else the order would break.
        if sum(end - run.cursor for run, end in zip(runs, ends, strict=True)) > limit:
            cutoff = _cutoff(runs, ends, limit)
            ends = [run.cursor + search(run.due[run.cursor :], run.seq[run.cursor :], cutoff) for run in runs]
        parts = [run.part(run.cursor, end) for run, end in zip(runs, ends, strict=True) if end > run.cursor]
        if not parts:
            return None
        for run, end in zip(runs, ends, strict=True):
            # Only the cursor moves: the rows behind it are not copied.
            run.cursor = end
        left = [run for run in runs if run.cursor < len(run.due)]
        if left:
            self._slots[slot] = left
        else:
            del self._slots[slot]
            heapq.heappop(self._used)
        # Only the rows that are handed out are merged: merging the whole slot at each tick would copy it a thousand
        # times.
        return parts[0] if len(parts) == 1 else Run.joined(parts)

    def _add_few(self, entries: list[Entry]) -> None:
        for entry in entries:
            heapq.heappush(self._few, entry)
            self._few_of[entry[0] // SLOT_MS] += 1
            self.size_bytes += ROW_BYTES + entry[2]
        self._size += len(entries)
        self._keep_first()

    def _take_few(self, before_ms: int, limit: int) -> FewRun:
        few = self._few
        taken: list[Entry] = []
        while few and few[0][0] < before_ms and len(taken) < limit:
            taken.append(heapq.heappop(few))
        due_ms, seqs, sizes, _, _ = zip(*taken, strict=True)
        for slot, count in Counter(ms // SLOT_MS for ms in due_ms).items():
            self._few_of[slot] -= count
            if not self._few_of[slot]:
                del self._few_of[slot]
        self._size -= len(taken)
        self.size_bytes -= ROW_BYTES * len(taken) + sum(sizes)
        self._keep_first()
        pairs = np.array(due_ms, dtype=np.int64), np.array(seqs, dtype=np.int64)
        return FewRun(*pairs, NumberedRows.gathered(taken, pairs))

    def _keep_first(self) -> None:
        self.first_due_ms = min(self._columns_first_ms, self._few[0][0] if self._few else FAR_MS)

    def _expect_columns(self, ms: int) -> None:
        self._columns_first_ms = min(self._columns_first_ms, ms)
        self._keep_first()

    def _keep_columns_first(self) -> None:
        first_ms = self._arrivals_first_ms
        if self._used:
            # Slots do not overlap in time, so the first used slot contains the earliest due time.
            heads = (int(run.due[run.cursor]) for run in self._slots[self._used[0]])
            first_ms = min(first_ms, *heads)
        self._columns_first_ms = first_ms
        self._keep_first()

    def _place_arrivals(self) -> None:
        if self._arrivals:
            run = Run.of(self._arrivals)
            self._arrivals, self._arrival_rows, self._arrivals_first_ms = [], 0, FAR_MS
            self._place(run)

    def _place(self, run: Run) -> None:
        slots, cuts = slot_cuts(run.due)
        for slot, begin, end in zip(slots, cuts, cuts[1:], strict=False):
            runs = self._slots.get(slot)
            if runs is None:
                runs = self._slots[slot] = []
                heapq.heappush(self._used, slot)
            runs.append(run.part(begin, end))
            if len(runs) > RUNS_MAX:
                self._slots[slot] = _with_small_ones_merged(runs)


def _with_small_ones_merged(runs: list[Run]) -> list[Run]:
    """Merge the three quarters of the small runs that are smallest, so that each row is copied O(log n) times."""
    small = sorted((run for run in runs if _left(run) < ARRIVALS_MAX), key=_left)
    if len(small) <= RUNS_MAX:
        return runs
    # Large runs are gathers of thousands of rows. Merging them would copy every body again.
    large = [run for run in runs if _left(run) >= ARRIVALS_MAX]
    merged = small[: len(small) * 3 // 4]
    return [*large, *small[len(merged) :], Run.joined(merged)]


def _left(run: Run) -> int:
    return len(run.due) - run.cursor


def _opened(runs: list[Run]) -> list[Run]:
    """Merge the small runs of a slot into one, so that the rows of each millisecond need no merge."""
    small = [run for run in runs if _left(run) < ARRIVALS_MAX]
    if len(small) < 2:
        return runs
    large = [run for run in runs if _left(run) >= ARRIVALS_MAX]
    return [Run.joined(small), *large]


def _fewer(runs: list[Run]) -> list[Run]:
    """Merge all runs but the largest if there are too many. Each row is copied O(log n) times."""
    if len(runs) <= OPEN_RUNS_MAX:
        return runs
    runs = sorted(runs, key=_left)
    largest = [] if _left(runs[-1]) < ARRIVALS_MAX else [runs.pop()]
    return [Run.joined(runs), *largest]


def _cutoff(runs: list[Run], ends: list[int], limit: int) -> tuple[int, int]:
    """Find the (due_ms, seq) before which exactly `limit` of the due rows are."""
    due = np.concatenate([run.due[run.cursor : end] for run, end in zip(runs, ends, strict=True)])
    seq = np.concatenate([run.seq[run.cursor : end] for run, end in zip(runs, ends, strict=True)])
    # Pairs are distinct, so exactly `limit` of them come before the one at index `limit`.
    at = np.lexsort((seq, due))[limit]
    return int(due[at]), int(seq[at])


def _bytes_of(rows: pa.RecordBatch) -> int:
    """Estimate the memory of rows, in bytes. The estimates of parts add up to exactly that of the whole.

    `nbytes` is not used: a single row has a larger share of it than a row among others, so sums would drift. It also
    reads all columns, which for one row costs as much as releasing it.
    """
    size_bytes: int = ROW_BYTES * rows.num_rows
    for at in _TEXTS:
        size_bytes += _text_bytes(rows.column(at))
    return size_bytes


def _text_bytes(column: pa.Array) -> int:
    ends = column.buffers()[1]
    if ends is None:
        return 0
    (first,), (last,) = (
        _END.unpack_from(ends, 4 * at) for at in (column.offset, column.offset + len(column))
    )
    return int(last - first)


def _is_sorted(due: Int64Array, seq: Int64Array) -> bool:
    if len(due) < 2:
        return True
    step = np.diff(due)
    return bool(np.all((step > 0) | ((step == 0) & (np.diff(seq) > 0))))
