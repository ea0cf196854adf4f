"""An index of messages as pairs (due_ms, seq) of int64. The pairs are in sorted runs, which are merged as they grow.

The tail of `hour_log` and the set of cancelled messages are such indexes. New pairs form small runs. When there are too
many runs, the smaller ones are merged, so each pair is sorted O(log n) times, always as part of a column.

A look-up of pairs searches by sequence number first and then compares the due time. The reason: consumers acknowledge
a few messages at a time, with due times anywhere in the next minutes, and a search through all pairs in that span would
take 1 ms each. The pairs sorted by number take 16 more bytes a pair, but only in runs that a look-up has searched.

Pairs that arrive one by one are first stored as Python values. As a column, one pair would cost as much as a thousand,
on arrival and in every look-up. When there are many, they become a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from timeball.model.message import Int64Array
from timeball.schedule.locations import FEW
from timeball.table.data_file import Position, search

RUNS_MAX = 24  # a compromise: each look-up searches all runs, and merging costs a sort
# Larger runs are not merged, because to sort a million pairs would hold the event loop for a tenth of a second.
MERGED_ROWS_MAX = 262_144
NEWEST_MAX = 1_024  # pairs stored as values, of about 170 bytes each
# Columns shorter than this are sorted by `lexsort` (see `_sorted`).
PACK_ROWS_MIN = 4_096
FAR_MS = 1 << 62  # later than every due time; adding a lead time to it does not overflow 64 bits

_EMPTY = np.empty(0, np.int64)
Pairs = tuple[Int64Array, Int64Array]  # columns (due_ms, seq)


@dataclass(slots=True)
class Run:
    """Pairs sorted by (due_ms, seq). There is at least one."""

    due_ms: Int64Array
    seq: Int64Array
    # The pairs sorted by number, after the first look-up. They may include pairs that were cut off at the beginning.
    _by_number: Pairs = field(default_factory=lambda: (_EMPTY, _EMPTY))

    def __len__(self) -> int:
        return len(self.due_ms)

    def has(self, due_ms: int, seq: int) -> bool:
        """Check whether the run contains this pair."""
        if not self.due_ms[0] <= due_ms <= self.due_ms[-1]:
            return False
        due_times, numbers = self._sorted_by_number()
        index = int(numbers.searchsorted(seq))
        while index < len(numbers) and numbers[index] == seq:  # a number may occur with several due times
            if due_times[index] == due_ms:
                # A pair that was cut off is before the first remaining pair. It does not count.
                return bool(due_ms > self.due_ms[0] or seq >= self.seq[0])
            index += 1
        return False

    def before(self, cut: int) -> Run:
        """Build the run of its first `cut` pairs, without a copy of them."""
        return self if cut == len(self) else Run(self.due_ms[:cut], self.seq[:cut])

    def after(self, cut: int) -> Run:
        """Build the run without its first `cut` pairs, without a copy of the others."""
        return Run(self.due_ms[cut:], self.seq[cut:], self._by_number)

    @property
    def is_wasteful(self) -> bool:
        """True if the run holds the memory of more than twice its pairs."""
        # A view keeps its whole base alive. A few remaining pairs must not hold the memory of a million.
        base = self.due_ms.base
        is_small_view = base is not None and 2 * self.due_ms.nbytes < base.nbytes
        return is_small_view or 2 * len(self) < len(self._by_number[1])

    def compacted(self) -> Run:
        """Build the same run without the memory of the pairs that were cut off."""
        due_times, numbers = self._by_number
        # Selected and not sorted again, because a look-up after it would sort many runs at once.
        is_left = (due_times > self.due_ms[0]) | ((due_times == self.due_ms[0]) & (numbers >= self.seq[0]))
        return Run(self.due_ms.copy(), self.seq.copy(), (due_times[is_left], numbers[is_left]))

    def contains(self, due_ms: Int64Array, seq: Int64Array) -> npt.NDArray[np.bool_]:
        """Compute a mask of the pairs that the run contains."""
        due_times, numbers = self._sorted_by_number()
        present = np.zeros(len(seq), np.bool_)
        # Usual in a large cancel: it cancels in the order of the numbers, and its earlier parts are runs of their own.
        if numbers[-1] < seq.min() or numbers[0] > seq.max():
            return present
        indexes = np.searchsorted(numbers, seq)
        while True:  # once, unless a number occurs with several due times
            # For numbers after the last one, `indexes` is one too far. The comparison with `len` excludes these.
            in_range = np.minimum(indexes, len(numbers) - 1)
            same_number = (indexes < len(numbers)) & (numbers[in_range] == seq)
            present |= same_number & (due_times[in_range] == due_ms)
            remaining = same_number & ~present
            if not remaining.any():
                break
            indexes = indexes + remaining
        # Pairs that were cut off are before the first remaining pair. They do not count.
        if len(numbers) != len(self):
            first_due, first_seq = self.due_ms[0], self.seq[0]
            present &= (due_ms > first_due) | ((due_ms == first_due) & (seq >= first_seq))
        return present

    def _sorted_by_number(self) -> Pairs:
        """Sort the pairs by number, at the first call only. Later calls return the same columns."""
        if not len(self._by_number[1]):
            numbers, due_times = _sorted(self.seq, self.due_ms)
            self._by_number = due_times, numbers
        return self._by_number


class DueIndex:
    """A set of (due_ms, seq) pairs."""

    def __init__(self) -> None:
        self._runs: list[Run] = []
        self._newest: set[tuple[int, int]] = set()  # in no run yet
        self._size = 0
        # The earliest due time, FAR_MS if the set is empty. It is stored because the scheduler reads it at every step.
        self.first_due_ms = FAR_MS

    def __len__(self) -> int:
        return self._size

    def add(self, due_ms: Int64Array, seq: Int64Array) -> None:
        """Add pairs in any order. None of them may be present."""
        if len(due_ms) == 0:
            return
        self._size += len(due_ms)
        if len(due_ms) <= FEW:
            due_times = due_ms.tolist()
            self._newest.update(zip(due_times, seq.tolist(), strict=True))
            self.first_due_ms = min(self.first_due_ms, *due_times)
            if len(self._newest) >= NEWEST_MAX:
                self._fold_newest()
        else:
            self._add_run(Run(*_sorted(due_ms, seq)))

    def _add_run(self, run: Run) -> None:
        """Add a run. Merge runs if there are too many."""
        self._runs.append(run)
        self.first_due_ms = min(self.first_due_ms, int(run.due_ms[0]))
        if len(self._runs) > RUNS_MAX:
            self._merge()

    def _fold_newest(self) -> None:
        """Turn the newest pairs into a run."""
        if self._newest:
            due, seq = np.array(list(self._newest), dtype=np.int64).T
            self._newest.clear()
            self._add_run(Run(*_sorted(due, seq)))

    def count_before(self, due_ms: int) -> int:
        """Count the pairs with due times before `due_ms`."""
        self._fold_newest()
        return sum(int(np.searchsorted(run.due_ms, due_ms)) for run in self._runs)

    def first(self) -> Position:
        """Find the first pair, or (FAR_MS, 0) if the set is empty."""
        self._fold_newest()
        return min(((int(run.due_ms[0]), int(run.seq[0])) for run in self._runs), default=(FAR_MS, 0))

    def pop_before(self, due_ms: int, seq: int) -> Pairs:
        """Remove and return all pairs < (due_ms, seq), sorted by (due_ms, seq)."""
        return _merge_sorted([(run.due_ms, run.seq) for run in self.take_before(due_ms, seq)])

    def take_before(self, due_ms: int, seq: int, rows: int = 1 << 62) -> list[Run]:
        """Remove and return pairs < (due_ms, seq) as runs. No pair is sorted.

        Once `rows` pairs or more have been taken, the other runs stay as they are.
        """
        if self.first_due_ms > due_ms:  # the usual case, in which the newest pairs need no sort
            return []
        self._fold_newest()
        taken, remaining = list[Run](), list[Run]()
        for run in self._runs:
            # Each run is cut with a binary search. No pair is copied.
            cut = search(run.due_ms, run.seq, (due_ms, seq)) if rows > 0 else 0
            rows -= cut
            if cut:
                taken.append(run.before(cut))
            if cut < len(run):
                remaining.append(run.after(cut) if cut else run)
        if taken:
            self._runs = remaining
            self._size -= sum(len(run) for run in taken)
            self._compact()
            self._update_first_due()
        return taken

    def add_runs(self, runs: Iterable[Run]) -> None:
        """Add runs, such as those that `take_before` of another index returned. None of the pairs may be present."""
        for run in runs:
            self._size += len(run)
            self._add_run(run)

    def restore(self, due_ms: Int64Array, seq: Int64Array) -> None:
        """Add many pairs in any order, in runs of at most MERGED_ROWS_MAX pairs, sorted by pair and by number.

        Ten million take seconds, so do not call this on the event loop. Later look-ups sort none of them.
        """
        if (seq[1:] < seq[:-1]).any():
            order = np.argsort(seq, kind="stable")
            due_ms, seq = due_ms[order], seq[order]
        for begin in range(0, len(seq), MERGED_ROWS_MAX):
            # Copies, because views would hold all columns.
            part = slice(begin, begin + MERGED_ROWS_MAX)
            by_number = due_ms[part].copy(), seq[part].copy()
            self.add_runs([Run(*_sorted(*by_number), by_number)])

    def between(self, low: Position, high: Position) -> Pairs:
        """List the pairs in [low, high), sorted. They stay in the set."""
        self._fold_newest()
        slices = []
        for run in self._runs:
            begin, end = search(run.due_ms, run.seq, low), search(run.due_ms, run.seq, high)
            # These are views. `_merge_sorted` copies them only if there are several.
            slices.append((run.due_ms[begin:end], run.seq[begin:end]))
        return _merge_sorted(slices)

    def drop_seqs_below(self, seq: int) -> None:
        """Remove the pairs with sequence numbers below `seq`."""
        self.drop(lambda seqs: seqs < seq)

    def drop(self, is_removed: Callable[[Int64Array], npt.NDArray[np.bool_]]) -> None:
        """Remove the pairs whose sequence numbers the mask of `is_removed` selects."""
        self._fold_newest()
        runs = []
        for run in self._runs:
            # Runs are not sorted by number, so every pair is tested. That is cheap enough for attaches, which are rare.
            removed = is_removed(run.seq)
            if removed.any():
                run = Run(run.due_ms[~removed], run.seq[~removed])
            if len(run):
                runs.append(run)
        self._runs = runs
        self._size = sum(len(run) for run in runs)
        self._update_first_due()

    def contains(self, due_ms: Int64Array, seq: Int64Array) -> npt.NDArray[np.bool_]:
        """Compute a mask of the pairs that are present."""
        present = np.zeros(len(seq), dtype=np.bool_)
        if self._size == 0 or len(seq) == 0:
            return present
        if len(seq) <= FEW:
            for index, pair in enumerate(zip(due_ms.tolist(), seq.tolist(), strict=True)):
                present[index] = self.has(*pair)
            return present
        self._fold_newest()
        # A run whose due times do not overlap those of the pairs needs no look-up.
        low, high = int(due_ms.min()), int(due_ms.max())
        for run in self._runs:
            if run.due_ms[0] <= high and run.due_ms[-1] >= low:
                present |= run.contains(due_ms, seq)
        return present

    def has(self, due_ms: int, seq: int) -> bool:
        """Check whether this pair is in the set."""
        return (due_ms, seq) in self._newest or any(run.has(due_ms, seq) for run in self._runs)

    def numbers(self) -> Int64Array:
        """List the sequence numbers of all pairs, in any order."""
        self._fold_newest()
        return np.concatenate([_EMPTY, *(run.seq for run in self._runs)])

    def runs(self) -> list[Pairs]:
        """List the runs of pairs, each of them sorted. No pair is copied: the columns of a run never change."""
        self._fold_newest()
        return [(run.due_ms, run.seq) for run in self._runs]

    def pairs(self) -> Pairs:
        """List all pairs, sorted."""
        return _merge_sorted(self.runs())

    def _update_first_due(self) -> None:
        self.first_due_ms = min((int(run.due_ms[0]) for run in self._runs), default=FAR_MS)

    def _compact(self) -> None:
        """Release the memory of pairs that were cut off, of at most about MERGED_ROWS_MAX remaining pairs per call."""
        rows = 0
        for index, run in enumerate(self._runs):
            if run.is_wasteful:
                self._runs[index] = run.compacted()
                rows += len(run)
                # Limited, because many runs may become wasteful at once, for example after a restart.
                if rows >= MERGED_ROWS_MAX:
                    break

    def _merge(self) -> None:
        """Merge the smallest runs into one of at most about MERGED_ROWS_MAX pairs, if more than RUNS_MAX are small."""
        large = [run for run in self._runs if len(run) >= MERGED_ROWS_MAX]
        small = sorted((run for run in self._runs if len(run) < MERGED_ROWS_MAX), key=len)
        if len(small) <= RUNS_MAX:
            return
        # The small runs are merged and the largest ones stay, so that each pair is sorted O(log n) times.
        sizes = np.cumsum([len(run) for run in small[: len(small) - RUNS_MAX // 4]])
        count = max(2, int(np.searchsorted(sizes, MERGED_ROWS_MAX, side="right")))
        merged = Run(*_merge_sorted([(run.due_ms, run.seq) for run in small[:count]]))
        self._runs = [merged, *small[count:], *large]


def _sorted(due: Int64Array, seq: Int64Array) -> Pairs:
    """Sort pairs by (due_ms, seq). The result consists of copies."""
    if len(due) >= PACK_ROWS_MIN and (packed := _sorted_packed(due, seq)) is not None:
        return packed
    # `lexsort` sorts by its last key first: by due time, and then by number.
    order = np.lexsort((seq, due))
    return due[order], seq[order]


def _sorted_packed(due: Int64Array, seq: Int64Array) -> Pairs | None:
    """Sort pairs as integers: the due time in the high bits, the number in the low ones. None if 63 bits are too few.

    Both are relative to their minimum.
    """
    low_ms, low_seq = int(due.min()), int(seq.min())
    bits = (int(seq.max()) - low_seq).bit_length()
    if bits > 62 or (int(due.max()) - low_ms) >> (63 - bits):
        return None
    # Faster than `lexsort`: sorting these keys takes a tenth of the time.
    keys = (due - low_ms) << bits | (seq - low_seq)
    keys.sort()
    return (keys >> bits) + low_ms, (keys & ((1 << bits) - 1)) + low_seq


def _merge_sorted(runs: list[Pairs]) -> Pairs:
    """Merge runs of sorted pairs. A single run is returned without a copy."""
    if not runs:
        return _EMPTY, _EMPTY
    if len(runs) == 1:
        return runs[0]
    return _sorted(np.concatenate([due for due, _ in runs]), np.concatenate([seq for _, seq in runs]))
