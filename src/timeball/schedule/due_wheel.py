"""The wheel of loaded messages: those due soon, with bodies in memory, in slots of one second.

The numbers of the used slots are also in a heap. So an empty second costs nothing, and the first slot of the heap has
the next due time. Rows arrive in batches, which become sorted runs in the slots. Small batches are first collected
until there are many rows or one of them is due, because splitting ten rows over ten slots costs as much as splitting a
thousand. The first hand-out from a slot merges its small runs. So the rows of each millisecond are a slice.

Messages that arrive a few at a time stay in the Arrow message of their commit. An *entry* refers to each of them. The
entries of each quarter of a second are a list, which is sorted when it becomes the first one. As columns, each step for
one message would cost as much as for a thousand. Entries become columns when they are due together with columns. If
there are very many entries, further messages are stored as columns.

Large bodies are not copied: a batch with many bytes is a run of its own, and only small runs are merged. A hand-out
ends after some bytes of bodies, so that the first message of a burst does not wait until all others are on disk.

A slot never rounds a due time. Rows keep their due time in ms, and the slot only selects the runs to search. So the
precision does not depend on the width of a slot.

The wheel refuses no message and uses neither the log nor the table. `loaded.py` decides which messages belong here.
"""

from __future__ import annotations

import heapq
import struct
from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from timeball.log.row_encoder import ROW_BYTES, Entry, NumberedRows, ReadRows, pairs_of
from timeball.model import limits
from timeball.model.message import READ_SCHEMA, Int64Array, int64
from timeball.schedule.due_index import FAR_MS
from timeball.schedule.locations import with_column
from timeball.table.data_file import Position, search

# A wider slot means more merges, a narrower one more slots. Deliveries do not depend on it (see the module docstring).
SLOT_MS = limits.SECOND_MS
ARRIVALS_MAX = 4_096  # rows collected before they are sorted into their slots
# Batches collected. Each takes about 10 KB of objects, with one row or with a thousand.
ARRIVAL_BATCHES_MAX = 256
ARRIVAL_BYTES_MAX = 4 * 1024 * 1024  # sorting them copies them, at about 1 ms per 2 MiB
# A run with fewer bytes and fewer than ARRIVALS_MAX rows is small: it may be merged with others, which copies it.
SMALL_RUN_BYTES = 512 * 1024
UNLIMITED_BYTES = 1 << 62
ENTRIES_MAX = 65_536  # messages stored as entries, of about 200 bytes each besides the message
ENTRY_SLOT_MS = 250
# For more entries of one slot, which may all be due at one time, columns cost less. Sorting them takes about 1 ms.
ENTRIES_OF_SLOT_MAX = 4_096
# Small runs of a slot. With more, most of them are merged, because each hand-out searches all runs.
RUNS_MAX = 24
OPEN_RUNS_MAX = 4  # the most runs of a slot from which rows have already been handed out

_TEXTS = [READ_SCHEMA.get_field_index(name) for name in ("body", "properties", "keys")]
_BODY, _DUE_MS = READ_SCHEMA.get_field_index("body"), READ_SCHEMA.get_field_index("due_ms")
_OFFSET = struct.Struct("<i")  # an offset of an Arrow text column
_OFFSET_MAX = (1 << 31) - 1


def slot_cuts(sorted_due_ms: Int64Array) -> tuple[list[int], list[int]]:
    """Split sorted due times, at least one. Returns (slots, cuts): the rows cuts[i]:cuts[i+1] belong to slots[i]."""
    first, last = int(sorted_due_ms[0]) // SLOT_MS, int(sorted_due_ms[-1]) // SLOT_MS
    if first == last:
        return [first], [0, len(sorted_due_ms)]
    slots = sorted_due_ms // SLOT_MS
    starts = np.concatenate(([0], np.flatnonzero(np.diff(slots)) + 1))
    return slots[starts].tolist(), [*starts.tolist(), len(sorted_due_ms)]


@dataclass(slots=True)
class Run:
    """Rows sorted by (due_ms, seq). Those before `cursor` have been handed out."""

    due_ms: Int64Array
    seq: Int64Array
    # The original due times. A row may count as due at another time (delay levels, shifted durations).
    original_due_ms: Int64Array
    rows: pa.RecordBatch
    cursor: int = 0

    @classmethod
    def from_batches(cls, batches: list[pa.RecordBatch]) -> Run:
        """Build one sorted run of these rows, which are due at their `due_ms`."""
        # A single batch, such as the result of a gather, is not copied.
        rows = batches[0] if len(batches) == 1 else pa.concat_batches(batches)
        due, seq = pairs_of(rows)
        if not _is_sorted(due, seq):
            order = np.lexsort((seq, due))
            due, seq, rows = due[order], seq[order], rows.take(pa.array(order))
        return cls(due, seq, due, rows)

    @classmethod
    def with_due_times(cls, due_ms: Int64Array, seq: Int64Array, rows: pa.RecordBatch) -> Run:
        """Build one sorted run of `rows`, in which the message with the number seq[i] is due at due_ms[i].

        `rows` may lack some of these messages and have any order.
        """
        # The reader may skip rows (no scheduled message, or settled), so due times are found by number, not by index.
        numbers = int64(rows.column("seq"))
        by_number = np.argsort(seq)
        due = due_ms[by_number[np.searchsorted(seq, numbers, sorter=by_number)]]
        if not _is_sorted(due, numbers):
            order = np.lexsort((numbers, due))
            due, numbers, rows = due[order], numbers[order], rows.take(pa.array(order))
        return cls(due, numbers, int64(rows.column("due_ms")), rows)

    @classmethod
    def joined(cls, runs: list[Run]) -> Run:
        """Join the rows of several runs that have not been handed out. Each row keeps its due time."""
        due, seq, original_due_ms = (
            np.concatenate([getattr(run, name)[run.cursor :] for run in runs])
            for name in ("due_ms", "seq", "original_due_ms")
        )
        rows = pa.concat_batches([run.rows.slice(run.cursor) for run in runs])
        if not _is_sorted(due, seq):
            order = np.lexsort((seq, due))
            due, seq, original_due_ms, rows = (
                due[order],
                seq[order],
                original_due_ms[order],
                rows.take(pa.array(order)),
            )
        return cls(due, seq, original_due_ms, rows)

    def part(self, begin: int, end: int) -> Run:
        """Build a view of the rows [begin, end), none of which has been handed out."""
        due, original_due_ms = self.due_ms[begin:end], self.original_due_ms
        # Stays the same object as the due times, so that `is_shifted` needs no comparison.
        original_due_ms = due if original_due_ms is self.due_ms else original_due_ms[begin:end]
        return Run(due, self.seq[begin:end], original_due_ms, self.rows.slice(begin, end - begin))

    def filtered(self, keep: npt.NDArray[np.bool_]) -> Run:
        """Select rows by a mask. None of the rows has been handed out."""
        return Run(
            self.due_ms[keep], self.seq[keep], self.original_due_ms[keep], self.rows.filter(pa.array(keep))
        )

    @property
    def body_bytes(self) -> int:
        """The total bytes of all bodies."""
        return _text_bytes(self.rows.column(_BODY))

    @property
    def last_original_due_ms(self) -> int:
        """The latest original due time."""
        return int(self.original_due_ms.max())

    @property
    def is_shifted(self) -> bool:
        """True if a row is due at another time than its original due time."""
        return self.original_due_ms is not self.due_ms and not np.array_equal(
            self.original_due_ms, self.due_ms
        )

    def rows_as_due(self) -> pa.RecordBatch:
        """Build the rows with `self.due_ms` as their due times. None of the rows has been handed out.

        `from_due_ms` is the original due time where it differs, else null.
        """
        rows = with_column(self.rows, "due_ms", pa.array(self.due_ms))
        return with_column(
            rows, "from_due_ms", pa.array(self.original_due_ms, mask=self.original_due_ms == self.due_ms)
        )


@dataclass(slots=True)
class ValuesRun:
    """Rows that were entries, sorted by (due_ms, seq). Each is due at its original due time."""

    is_shifted: ClassVar = False
    due_ms: Int64Array
    seq: Int64Array
    rows: NumberedRows
    body_bytes: int = 0  # approximate, and 0 after `filtered`

    @property
    def original_due_ms(self) -> Int64Array:
        """The due times, which are the original ones."""
        return self.due_ms

    def filtered(self, keep: npt.NDArray[np.bool_]) -> ValuesRun:
        """Select rows by a mask."""
        return ValuesRun(self.due_ms[keep], self.seq[keep], self.rows.filter(keep))

    @property
    def last_original_due_ms(self) -> int:
        """The latest due time."""
        return int(self.due_ms[-1])

    def rows_as_due(self) -> NumberedRows:
        """Return the rows, unchanged: none is due at another time than its original one."""
        return self.rows


class EntrySlots:
    """Entries in lists by due time. `len` counts them. An entry begins with (due_ms, seq, bytes of the body).

    One heap of all entries would cost a dozen comparisons for each of them, all over the memory.
    """

    def __init__(self) -> None:
        self._slots: dict[int, list[Entry]] = {}
        self._used: list[int] = []  # a heap of the slot numbers in `_slots`
        self._sorted = -FAR_MS  # the slot whose entries are sorted: the first one, as soon as it is read
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def has_capacity(self, due_ms: int) -> bool:
        """Check whether further entries due at this time may be added."""
        return (
            self._size < ENTRIES_MAX
            and len(self._slots.get(due_ms // ENTRY_SLOT_MS, ())) < ENTRIES_OF_SLOT_MAX
        )

    def add(self, entries: list[Entry]) -> None:
        """Add entries in any order."""
        for entry in entries:
            slot = entry[0] // ENTRY_SLOT_MS
            slot_entries = self._slots.get(slot)
            if slot_entries is None:
                self._slots[slot] = [entry]
                heapq.heappush(self._used, slot)
            elif slot == self._sorted:
                insort(slot_entries, entry)
            else:
                slot_entries.append(entry)
        self._size += len(entries)

    @property
    def first(self) -> Position:
        """The position (due_ms, seq) of the first entry. (FAR_MS, 0) if there are none."""
        return self._first_slot()[0][:2] if self._used else (FAR_MS, 0)

    def take(self, before: Position, limit: int, bytes_max: int) -> list[Entry]:
        """Remove and return up to `limit` entries that come before the position `before`, in order.

        Their bodies have at most `bytes_max` bytes, unless the first one alone has more.
        """
        taken: list[Entry] = []
        while self._used:
            entries = self._first_slot()
            # A position comes before the entry at this position, because the entry has more items.
            end = min(bisect_left(entries, before), limit - len(taken))
            for index, entry in enumerate(entries[:end]):
                bytes_max -= entry[2]
                if bytes_max < 0 and (taken or index):
                    end = index
                    break
            taken += entries[:end]
            del entries[:end]
            if entries:
                break
            del self._slots[heapq.heappop(self._used)]
        self._size -= len(taken)
        return taken

    def _first_slot(self) -> list[Entry]:
        """Return the sorted entries of the first slot."""
        slot = self._used[0]
        if slot != self._sorted:
            self._slots[slot].sort()
            self._sorted = slot
        return self._slots[slot]


class DueWheel:
    """Loaded rows by due second. `len` counts the rows that are not handed out."""

    def __init__(self) -> None:
        self._slots: dict[int, list[Run]] = {}
        # Invariant: a slot is in the heap exactly once, for as long as `_slots` contains it.
        self._used: list[int] = []  # a heap of the slot numbers in `_slots`
        self._latest_slot = -FAR_MS  # the latest slot from which rows have been handed out
        # Batches that are not sorted into slots yet, their row count, their bytes and their earliest due time.
        self._arrivals: list[pa.RecordBatch] = []
        self._arrival_rows = self._arrival_bytes = 0
        self._arrivals_first_ms = FAR_MS
        self._entries = EntrySlots()
        self._columns_first_ms = FAR_MS  # the earliest due time of rows in columns
        self._size = 0
        self.size_bytes = 0  # approximate memory of the rows that are not handed out
        # The earliest due time, FAR_MS if there are no rows. It is stored because the scheduler reads it at every step.
        self.first_due_ms = FAR_MS

    def __len__(self) -> int:
        return self._size

    def add(self, rows: ReadRows) -> None:
        """Add rows of READ_SCHEMA in any order. NumberedRows are stored as entries if there is capacity."""
        if isinstance(rows, NumberedRows):
            entries = rows.entries()
            # Only the slot of the first entry is checked, because the limit need not be exact.
            if self._entries.has_capacity(entries[0][0]):
                self._add_entries(entries)
                return
            rows = rows.batch
        if rows.num_rows == 0:
            return
        size_bytes = _bytes_of(rows)
        if size_bytes >= SMALL_RUN_BYTES:
            self.add_run(Run.from_batches([rows]))
            return
        self._size += rows.num_rows
        self.size_bytes += size_bytes
        # Not sorted into slots yet: a send of one row costs an append here, and its share of a sort when many have
        # arrived.
        self._arrivals.append(rows)
        self._arrival_rows += rows.num_rows
        self._arrival_bytes += size_bytes
        self._arrivals_first_ms = min(self._arrivals_first_ms, int(int64(rows.column("due_ms")).min()))
        self._note_columns_due(self._arrivals_first_ms)
        if (
            self._arrival_rows >= ARRIVALS_MAX
            or self._arrival_bytes >= ARRIVAL_BYTES_MAX
            or len(self._arrivals) >= ARRIVAL_BATCHES_MAX
        ):
            self._sort_arrivals()

    def add_run(self, run: Run | ValuesRun) -> None:
        """Add the rows of a sorted run, of which none has been handed out."""
        if isinstance(run, ValuesRun):
            self._add_entries(run.rows.entries())
            return
        if len(run.due_ms) == 0:
            return
        self._size += len(run.due_ms)
        self.size_bytes += _bytes_of(run.rows)
        self._note_columns_due(int(run.due_ms[0]))
        self._put_into_slots(run)

    def has_before(self, before: Position) -> bool:
        """Check whether a row comes before the position `before`."""
        if self.first_due_ms != before[0]:
            return self.first_due_ms < before[0]
        if before[1] == 0:
            return False
        # Sequence numbers decide only here, because the first due times are equal.
        if self._arrivals_first_ms == before[0]:
            self._sort_arrivals()
        first_runs = self._slots[self._used[0]] if self._used else []
        heads = [(int(run.due_ms[run.cursor]), int(run.seq[run.cursor])) for run in first_runs]
        return min([*heads, self._entries.first]) < before

    def take_due(
        self, before_ms: int, limit: int, bytes_max: int = UNLIMITED_BYTES, *, before_seq: int = 0
    ) -> Run | ValuesRun | None:
        """Remove and return up to `limit` rows before (before_ms, before_seq), in order. None if there are none.

        Their bodies have at most `bytes_max` bytes, unless the first row alone has more.
        """
        before = before_ms, before_seq
        # All rows before the position are due before this time.
        due_to_ms = before_ms + 1 if before_seq > 0 else before_ms
        if self._entries.first < before:
            if self._columns_first_ms >= due_to_ms:
                return self._take_entries(before, limit, bytes_max)
            # Entries are due together with columns. Convert only as many as are handed out, since there may be very
            # many.
            self.add_run(Run.from_batches([self._take_entries(before, limit, bytes_max).rows.batch]))
        # No row of a slot comes before a row that has stayed an entry.
        before = min(before, self._entries.first)
        # Arrivals must be in their slots if one of them is due, or belongs to the slot that is used next.
        last_slot = (due_to_ms - 1) // SLOT_MS
        if self._arrivals_first_ms < (
            due_to_ms if last_slot <= self._latest_slot else (last_slot + 1) * SLOT_MS
        ):
            self._sort_arrivals()
        taken: list[Run] = []
        taken_rows = taken_bytes = 0
        while self._used and taken_rows < limit:
            slot = self._used[0]
            due_run = self._take_from_slot(
                slot, before, limit - taken_rows, bytes_max - taken_bytes, rows_min=0 if taken else 1
            )
            # The first slot of the heap is the earliest, so no later slot contains rows that are due.
            if due_run is None:
                break
            taken.append(due_run)
            taken_rows += len(due_run.due_ms)
            taken_bytes += due_run.body_bytes
            # If the slot is still used, its next row is not due, or too large for this hand-out.
            if slot in self._slots:
                break
        if not taken:
            return None
        self._size -= taken_rows
        self.size_bytes -= sum(_bytes_of(run.rows) for run in taken)
        self._update_columns_first()
        if len(taken) == 1:
            return taken[0]
        return Run.joined(taken)

    def _take_from_slot(
        self, slot: int, before: Position, limit: int, bytes_max: int, *, rows_min: int
    ) -> Run | None:
        """Remove and return up to `limit` rows of a slot before the position `before`, in order, or None.

        Their bodies have at most `bytes_max` bytes, but at least `rows_min` of the due rows are returned.
        """
        runs = self._slots[slot]
        # All small runs are merged at the first hand-out from a slot. Later ones merge only if there are many runs,
        # because each message that arrives meanwhile adds one.
        runs = self._slots[slot] = _merge_small(runs) if slot > self._latest_slot else _merge_if_many(runs)
        self._latest_slot = max(self._latest_slot, slot)
        ends = [run.cursor + search(run.due_ms[run.cursor :], run.seq[run.cursor :], before) for run in runs]
        # More rows are due than may be handed out: take the first ones of all runs together, by (due_ms, seq).
        if sum(end - run.cursor for run, end in zip(runs, ends, strict=True)) > limit or (
            sum(_body_bytes(run, end) for run, end in zip(runs, ends, strict=True)) > bytes_max
        ):
            ends = _cut(runs, ends, limit, bytes_max, rows_min)
        due_runs = [
            run.part(run.cursor, end) for run, end in zip(runs, ends, strict=True) if end > run.cursor
        ]
        if not due_runs:
            return None
        for run, end in zip(runs, ends, strict=True):
            # Only the cursor moves: the remaining rows are not copied.
            run.cursor = end
        unfinished = [run for run in runs if run.cursor < len(run.due_ms)]
        if unfinished:
            self._slots[slot] = unfinished
        else:
            del self._slots[slot]
            heapq.heappop(self._used)
        # Only the rows to hand out are merged: merging the whole slot at each tick would copy it a thousand times.
        return due_runs[0] if len(due_runs) == 1 else Run.joined(due_runs)

    def _add_entries(self, entries: list[Entry]) -> None:
        """Store rows as entries."""
        self._entries.add(entries)
        self.size_bytes += ROW_BYTES * len(entries) + sum([entry[2] for entry in entries])
        self._size += len(entries)
        self._update_first_due()

    def _take_entries(self, before: Position, limit: int, bytes_max: int) -> ValuesRun:
        """Remove and return entries (`EntrySlots.take`). There must be at least one."""
        taken = self._entries.take(before, limit, bytes_max)
        due_ms, seqs, sizes, _, _ = zip(*taken, strict=True)
        self._size -= len(taken)
        self.size_bytes -= ROW_BYTES * len(taken) + sum(sizes)
        self._update_first_due()
        pairs = np.array(due_ms, dtype=np.int64), np.array(seqs, dtype=np.int64)
        return ValuesRun(*pairs, NumberedRows.gathered(taken, pairs), sum(sizes))

    def _update_first_due(self) -> None:
        self.first_due_ms = min(self._columns_first_ms, self._entries.first[0])

    def _note_columns_due(self, ms: int) -> None:
        """Record that rows in columns are due at `ms`."""
        self._columns_first_ms = min(self._columns_first_ms, ms)
        self._update_first_due()

    def _update_columns_first(self) -> None:
        """Find the earliest due time of rows in columns, after some have been handed out."""
        first_ms = self._arrivals_first_ms
        if self._used:
            # Slots do not overlap in time, so the first used slot contains the earliest due time.
            heads = (int(run.due_ms[run.cursor]) for run in self._slots[self._used[0]])
            first_ms = min(first_ms, *heads)
        self._columns_first_ms = first_ms
        self._update_first_due()

    def _sort_arrivals(self) -> None:
        """Sort all collected batches into their slots."""
        if self._arrivals:
            run = Run.from_batches(self._arrivals)
            self._arrivals, self._arrivals_first_ms = [], FAR_MS
            self._arrival_rows = self._arrival_bytes = 0
            self._put_into_slots(run)

    def _put_into_slots(self, run: Run) -> None:
        """Add the parts of a sorted run to their slots."""
        slots, cuts = slot_cuts(run.due_ms)
        for slot, begin, end in zip(slots, cuts, cuts[1:], strict=False):
            runs = self._slots.get(slot)
            if runs is None:
                runs = self._slots[slot] = []
                heapq.heappush(self._used, slot)
            runs.append(run.part(begin, end))
            if len(runs) > RUNS_MAX:
                self._slots[slot] = _merge_smallest(runs)


def _merge_smallest(runs: list[Run]) -> list[Run]:
    """Merge the smallest three quarters of the small runs if there are more than RUNS_MAX small ones.

    Each row is copied O(log n) times.
    """
    small = sorted((run for run in runs if _is_small(run)), key=_rows_left)
    if len(small) <= RUNS_MAX:
        return runs
    # Large runs have thousands of rows or large bodies. Merging them would copy every body again.
    large = [run for run in runs if not _is_small(run)]
    smallest = small[: len(small) * 3 // 4]
    return [*large, *small[len(smallest) :], Run.joined(smallest)]


def _rows_left(run: Run) -> int:
    """Count the rows of a run that have not been handed out."""
    return len(run.due_ms) - run.cursor


def _is_small(run: Run) -> bool:
    """Check whether the rows of a run that have not been handed out cost little to copy."""
    return _rows_left(run) < ARRIVALS_MAX and _body_bytes(run, len(run.due_ms)) < SMALL_RUN_BYTES


def _merge_small(runs: list[Run]) -> list[Run]:
    """Merge the small runs of a slot into one, so that the rows of each millisecond need no merge."""
    small = [run for run in runs if _is_small(run)]
    if len(small) < 2:
        return runs
    large = [run for run in runs if not _is_small(run)]
    return [Run.joined(small), *large]


def _merge_if_many(runs: list[Run]) -> list[Run]:
    """Merge the small runs of a slot if it has more than OPEN_RUNS_MAX runs."""
    return _merge_small(runs) if len(runs) > OPEN_RUNS_MAX else runs


def _cut(runs: list[Run], ends: list[int], limit: int, bytes_max: int, rows_min: int) -> list[int]:
    """Cut the due rows to the first ones of all runs together, by (due_ms, seq).

    `ends` contains the index in each run at which its due rows end. The result contains the reduced indexes: of at most
    `limit` rows together, whose bodies have at most `bytes_max` bytes, but of at least `rows_min` rows.
    """
    due, seq, body_bytes = [], [], []
    for run, run_end in zip(runs, ends, strict=True):
        offsets = _body_offsets(run, run_end)
        # The rows that may fit, and one more: the first row of all runs that is not handed out must be among them.
        # `last_offset` has the type of the column, because for any other type numpy would convert the whole column.
        last_offset = np.int32(min(int(offsets[0]) + bytes_max, _OFFSET_MAX))
        fitting = int(np.searchsorted(offsets, last_offset, side="right")) - 1
        end = min(run_end, run.cursor + max(rows_min, min(limit, fitting)) + 1)
        due.append(run.due_ms[run.cursor : end])
        seq.append(run.seq[run.cursor : end])
        body_bytes.append(np.diff(offsets[: end - run.cursor + 1]))
    all_due, all_seq = np.concatenate(due), np.concatenate(seq)
    order = np.lexsort((all_seq, all_due))
    total_bytes = np.cumsum(np.concatenate(body_bytes)[order], dtype=np.int64)
    count = min(limit, max(rows_min, int(np.searchsorted(total_bytes, bytes_max, side="right"))))
    if count >= len(order):
        return ends
    # Pairs are distinct, so exactly `count` of them come before the one at index `count`.
    first_left = int(all_due[order[count]]), int(all_seq[order[count]])
    return [run.cursor + search(run.due_ms[run.cursor :], run.seq[run.cursor :], first_left) for run in runs]


def _body_offsets(run: Run, end: int) -> Int64Array:
    """List the positions at which the bodies of the rows from the cursor to `end` begin, and the end of the last."""
    column = run.rows.column(_BODY)
    offsets = column.buffers()[1]
    if offsets is None:
        return np.zeros(end - run.cursor + 1, np.int64)
    return np.frombuffer(offsets, np.int32, end - run.cursor + 1, 4 * (column.offset + run.cursor))


def _body_bytes(run: Run, end: int) -> int:
    """Compute the total bytes of the bodies from the cursor of a run to `end`."""
    return _text_bytes(run.rows.column(_BODY).slice(run.cursor, end - run.cursor))


def _bytes_of(rows: pa.RecordBatch) -> int:
    """Estimate the memory of rows, in bytes. The estimates of parts add up to the estimate of the whole.

    `nbytes` is not used: a single row has a larger share of it than a row among others, so sums would drift. It also
    reads all columns, which for one row costs as much as releasing it.
    """
    size_bytes: int = ROW_BYTES * rows.num_rows
    for column_number in _TEXTS:
        size_bytes += _text_bytes(rows.column(column_number))
    return size_bytes


def _text_bytes(column: pa.Array) -> int:
    """Compute the total bytes of the texts of a column from its first and last offset."""
    ends = column.buffers()[1]
    if ends is None:
        return 0
    (first,), (last,) = (
        _OFFSET.unpack_from(ends, 4 * index) for index in (column.offset, column.offset + len(column))
    )
    return int(last - first)


def _is_sorted(due: Int64Array, seq: Int64Array) -> bool:
    """Check whether pairs are strictly sorted by (due_ms, seq)."""
    if len(due) < 2:
        return True
    step = np.diff(due)
    return bool(np.all((step > 0) | ((step == 0) & (np.diff(seq) > 0))))
