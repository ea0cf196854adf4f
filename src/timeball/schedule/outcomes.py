"""The outcomes of scheduled messages (in flight, released, cancelled), moved and held messages, mark and cursor.

    pending -> in flight -> released          handed out in order, durable in the same order
    pending -> cancelled

A message is *settled* when it is released durably or cancelled.

A *pair* is (due time, number). A message that gets another due time becomes another pair, and its old pair counts as
settled.

The *mark* (S, N) states that all messages due before S with numbers below N are settled. So only settled messages that
the mark does not cover need a pair in memory. The mark excepts two kinds of messages: messages that a later
bulk attach adds under numbers that were reserved before (`late`), and messages of a paused campaign while they are held
(`Holds`), whose settled pairs stay in memory. The time T before which everything is settled moves back when a message
arrives whose due time has passed. The mark never moves back, so pairs that it covers can be removed. It advances again
when T has reached it.

The *cursor* is the progress of the releases: the latest second with a released message (the tick), and the number of
durable releases in that second (the local index). It is computed from the release records alone, so any node that has
the log can compute it. It never decreases and does not depend on the order of the records: a message that came too
late, or a clock that was set back, does not change it. The cursor does not identify messages, because cancelled
messages of the tick are not counted, and a late message may sort before counted ones. A restart finds the settled
messages by their pairs, so an older cursor repeats no release.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from timeball.model import limits
from timeball.model.message import Int64Array
from timeball.schedule.due_index import FAR_MS, DueIndex, Pairs, Run
from timeball.schedule.locations import FEW

# ---- moved messages: number -> newest (due_ms, version) ------------------------------------------------------
# The schedule identifies a message by due time and version, a caller by its number. For most messages version and
# number are equal. All others are stored here, each with its newest version. MOVED rows in the log contain the same
# data, but retention removes them, while the message may stay in a file of the pending table for months. An entry is
# removed when the last of all its due times has passed. Until then a file may contain an old row of the message, which
# only the entry shows to be outdated.

# Recent moves that are kept as Python objects before they become a run.
RECENT_MAX = 2_048
# Larger runs are not merged, because a merge of a million moves would hold the event loop for a tenth of a second.
MERGED_ROWS_MAX = 262_144

# A checkpoint merges the runs in parts of about so many entries, found by a sample of each so many.
PART_ROWS, SAMPLE_ROWS = 131_072, 4_096

_NONE = np.empty(0, np.int64)

Move = tuple[int, int, int]  # (due_ms, version, until_ms) of a number, as in MoveColumns


class MoveColumns(NamedTuple):
    """Moves, sorted by number, each number once."""

    number: Int64Array
    due_ms: Int64Array  # the present due time
    version: Int64Array
    until_ms: Int64Array  # the last of all due times that it has had: until then the entry is needed

    def part(self, index: slice | npt.NDArray[Any]) -> MoveColumns:
        """Select moves by a slice or by a mask."""
        return MoveColumns(*(column[index] for column in self))


_NO_MOVES = MoveColumns(_NONE, _NONE, _NONE, _NONE)


@dataclass(slots=True, eq=False)
class _MovedRun:
    """Moves, at least one, as columns that never change. A forgotten or replaced entry is no longer valid."""

    columns: MoveColumns
    # Entries with an earlier `until_ms` are forgotten. Moves that come later are in other runs.
    forgotten_ms: int = -FAR_MS
    # A mask of the entries whose messages have an entry in a later run or among the recent moves. Look-ups do not use
    # it, because they take the latest entry.
    is_replaced: npt.NDArray[np.bool_] = field(init=False)
    replaced_rows: int = field(init=False, default=0)
    first_until_ms: int = field(init=False)
    last_until_ms: int = field(init=False)
    # The lower quartile of `until_ms`: at least a quarter of the entries have this value or an earlier one.
    quarter_until_ms: int = field(init=False)

    def __post_init__(self) -> None:
        until_ms = self.columns.until_ms
        self.is_replaced = np.zeros(len(until_ms), np.bool_)
        quartile_index = (len(until_ms) - 1) // 4
        self.quarter_until_ms = int(np.partition(until_ms, quartile_index)[quartile_index])
        self.first_until_ms, self.last_until_ms = int(until_ms.min()), int(until_ms.max())

    def __len__(self) -> int:
        return len(self.columns.number)

    def find(self, number: Int64Array) -> tuple[Int64Array, npt.NDArray[np.bool_]]:
        """Find the indexes of these numbers, and a mask of the numbers with an entry that is not forgotten."""
        run_numbers, _, _, until_ms = self.columns
        indexes = np.minimum(np.searchsorted(run_numbers, number), len(run_numbers) - 1)
        return indexes, (run_numbers[indexes] == number) & (until_ms[indexes] >= self.forgotten_ms)

    def mark_replaced(self, indexes: Int64Array) -> None:
        """Count the entries at these indexes as replaced."""
        new = np.unique(indexes[~self.is_replaced[indexes]])
        self.is_replaced[new] = True
        self.replaced_rows += len(new)

    @property
    def is_wasteful(self) -> bool:
        """True if a quarter of the entries is forgotten, or a quarter is replaced. Else at least half are valid."""
        return 4 * self.replaced_rows >= len(self) or self.forgotten_ms > self.quarter_until_ms

    def valid_columns(self) -> MoveColumns:
        """Select the entries that are neither forgotten nor replaced."""
        if self.forgotten_ms > self.last_until_ms:
            return _NO_MOVES
        if not self.replaced_rows and self.forgotten_ms <= self.first_until_ms:
            return self.columns
        return self.columns.part(~self.is_replaced & (self.columns.until_ms >= self.forgotten_ms))


class Moved:
    """All stored moves. Belongs to the event loop. `newest` and `newest_of` may be called in any thread.

    This is a cache of the log and the checkpoint. It takes 33 bytes per entry. The latest entries are Python objects,
    because a move must not cost a pass over all earlier ones. All others are in runs, the oldest first. A number may be
    in several runs, of which the newest is right. A run with less than half valid entries is soon built again.
    """

    def __init__(self) -> None:
        # Replaced as a whole, and no columns change, so that another thread always reads columns of equal length.
        self._runs: tuple[_MovedRun, ...] = ()
        self._recent: dict[int, Move] = {}  # by number
        # No later than the earliest `until_ms`, the time from which an entry can be removed.
        self._first_until_ms = FAR_MS

    def add(self, rows: Iterable[tuple[int, int, int, int]]) -> None:
        """Store moves (due_ms, number, version, from_due_ms). The last move of a number replaces earlier ones."""
        moves = list(rows)
        if not moves:
            return
        due_ms, numbers, versions, from_due_ms = zip(*moves, strict=True)
        recent = self._recent
        # An old row may have any of the message's due times, so the entry is needed until the latest of them.
        until_ms = [
            max(times) for times in zip(due_ms, from_due_ms, self._mark_replaced(numbers), strict=True)
        ]
        if not recent.keys().isdisjoint(numbers) or len(set(numbers)) < len(numbers):
            # Some of the messages have moved recently, or move twice in these rows.
            for index, number in enumerate(numbers):
                if (earlier := recent.get(number)) is not None:
                    _, _, earlier_until_ms = earlier
                    until_ms[index] = max(until_ms[index], earlier_until_ms)
                recent[number] = due_ms[index], versions[index], until_ms[index]
        else:
            recent.update(zip(numbers, zip(due_ms, versions, until_ms, strict=True), strict=True))
        self._first_until_ms = min(self._first_until_ms, *until_ms)
        if len(recent) > RECENT_MAX:
            self._fold()

    def newest(self, number: int) -> tuple[int, int] | None:
        """Find the newest (due_ms, version) of a message. None if it was not moved, or if its entry was removed."""
        # In this order, because a fold replaces the runs first.
        recent, runs = self._recent.get(number), self._runs
        if recent is not None:
            return recent[:2]
        for run in reversed(runs):
            numbers, due_ms, versions, until_ms = run.columns
            index = int(numbers.searchsorted(number))
            if index < len(numbers) and numbers[index] == number:
                is_kept = until_ms[index] >= run.forgotten_ms
                return (int(due_ms[index]), int(versions[index])) if is_kept else None
        return None

    def last_due_ms(self, first: int, rows: int) -> int:
        """Find the latest current due time of the moved messages among the `rows` numbers from `first` on. 0: none."""
        parts = []
        for run in self._runs:
            begin, end = np.searchsorted(run.columns.number, [first, first + rows])
            if begin < end:
                part = run.columns.part(slice(begin, end))
                parts.append(part.part(part.until_ms >= run.forgotten_ms))
        recent = self._recent
        # The shorter of the range and the recent moves is scanned.
        candidates = range(first, first + rows) if rows < len(recent) else recent
        chosen = {
            number: recent[number]
            for number in candidates
            if number in recent and first <= number < first + rows
        }
        if chosen:
            parts.append(_columns_of(chosen))
        return int(_merged(parts).due_ms.max(initial=0))

    def newest_of(self, due_ms: Int64Array, number: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Find the current (due_ms, version) of many messages, given their numbers and first due times (any thread)."""
        due_ms, version = due_ms.copy(), number.copy()
        # In this order, because a fold replaces the runs first.
        recent, runs = self._recent, self._runs
        for run in runs:
            indexes, was_moved = run.find(number)
            due_ms[was_moved] = run.columns.due_ms[indexes[was_moved]]
            version[was_moved] = run.columns.version[indexes[was_moved]]
        for index, seq in enumerate(number.tolist()) if recent else ():
            if (entry := recent.get(seq)) is not None:
                due_ms[index], version[index], _ = entry
        return due_ms, version

    def forget_before(self, due_ms: int) -> None:
        """Remove the entries whose due times are all before `due_ms`: they are settled (released or cancelled)."""
        # Called at every step of the mark. In the usual case, with nothing to remove, it must cost one comparison.
        if self._first_until_ms >= due_ms:
            return
        # With the recent moves, because a move that comes later may be due before `due_ms`.
        self._fold()
        for run in self._runs:
            run.forgotten_ms = max(run.forgotten_ms, due_ms)
        self._runs = _tidied(self._runs)
        self._first_until_ms = min(
            (max(run.first_until_ms, run.forgotten_ms) for run in self._runs), default=FAR_MS
        )

    def restore(self, columns: Int64Array) -> None:
        """Start with the entries of a checkpoint and the later log.

        The rows of `columns` are due_ms, number, version and until_ms, sorted by number.
        """
        due_ms, number, version, until_ms = columns
        runs = list[_MovedRun]()
        for begin in range(0, len(number), MERGED_ROWS_MAX):
            part = slice(begin, begin + MERGED_ROWS_MAX)
            # Copies, because views would hold all columns.
            copies = (column[part].copy() for column in (number, due_ms, version, until_ms))
            runs.append(_MovedRun(MoveColumns(*copies)))
        self._runs = tuple(runs)
        self._first_until_ms = int(until_ms.min(initial=FAR_MS))

    def copied(self) -> Iterator[Int64Array]:
        """Copy all entries as of this call, in parts of about PART_ROWS, sorted by number.

        Each part is an array as for `restore`. Any thread may iterate over the parts, at any later time.
        """
        runs = [(run.columns, run.forgotten_ms) for run in self._runs]
        if self._recent:
            runs.append((_columns_of(self._recent), -FAR_MS))
        return _parts(runs)

    def _mark_replaced(self, numbers: Sequence[int]) -> list[int]:
        """Count the entries of these numbers in the runs as replaced.

        Returns the latest `until_ms` of the entries of each number. -FAR_MS if there are none.
        """
        wanted = np.array(numbers, np.int64)
        until_ms = np.full(len(wanted), -FAR_MS)
        for run in self._runs:
            indexes, is_in_run = run.find(wanted)
            if is_in_run.any():
                np.maximum(until_ms, run.columns.until_ms[indexes], out=until_ms, where=is_in_run)
                run.mark_replaced(indexes[is_in_run])
        result: list[int] = until_ms.tolist()
        return result

    def _fold(self) -> None:
        """Turn the recent moves into a run, and tidy the runs."""
        if self._recent:
            # In this order, so that another thread finds an entry in one of the two or in both, but never in neither.
            # For the same reason a run is built without its replaced entries only here: no entry is recent now.
            self._runs = _tidied((*self._runs, _MovedRun(_columns_of(self._recent))))
            self._recent = {}


def _tidied(runs: Iterable[_MovedRun]) -> tuple[_MovedRun, ...]:
    """Build wasteful runs again, up to a limit. Merge each run with an earlier one of at most twice its size."""
    tidied, built_rows = list[_MovedRun](), 0
    for run in runs:
        if run.is_wasteful and built_rows < MERGED_ROWS_MAX:
            # Limited, because it holds the event loop, and many runs may become wasteful at once. Later calls continue.
            columns = run.valid_columns()
            if len(columns.number):
                built_rows += len(run)
                tidied.append(_MovedRun(columns))
        else:
            tidied.append(run)
    for index in reversed(range(len(tidied) - 1)):
        pair = tidied[index : index + 2]
        earlier, later = len(pair[0]), len(pair[-1])
        if len(pair) == 2 and earlier <= 2 * later and earlier + later <= MERGED_ROWS_MAX:
            columns = _merged([run.valid_columns() for run in pair])
            tidied[index : index + 2] = [_MovedRun(columns)] if len(columns.number) else []
    return tuple(tidied)


def _parts(runs: Sequence[tuple[MoveColumns, int]]) -> Iterator[Int64Array]:
    """Merge runs, each given as (columns, forgotten_ms), and yield the result in parts (see `Moved.copied`)."""
    # A part begins at every nth sample of the numbers of all runs, so that each part takes some milliseconds.
    samples = np.sort(np.concatenate([_NONE, *(columns.number[::SAMPLE_ROWS] for columns, _ in runs)]))
    begins = np.unique(samples[:: PART_ROWS // SAMPLE_ROWS]).tolist()
    for low, high in pairwise([*begins, FAR_MS]):
        parts = []
        for columns, forgotten_ms in runs:
            part = columns.part(slice(*np.searchsorted(columns.number, [low, high])))
            parts.append(part.part(part.until_ms >= forgotten_ms))
        number, due_ms, version, until_ms = _merged(parts)
        yield np.stack([due_ms, number, version, until_ms])


def _columns_of(moves: Mapping[int, Move]) -> MoveColumns:
    """Build the columns of moves, which are given by number."""
    numbers = np.fromiter(moves, np.int64, len(moves))
    order = np.argsort(numbers)
    due_ms, version, until_ms = np.array(list(moves.values()), np.int64).reshape(-1, 3)[order].T
    return MoveColumns(numbers[order], due_ms, version, until_ms)


def _merged(runs: Sequence[MoveColumns]) -> MoveColumns:
    """Merge runs. If several contain a number, the entry of the last run is taken."""
    if not runs:
        return _NO_MOVES
    all_moves = MoveColumns(*(np.concatenate(columns) for columns in zip(*runs, strict=True)))
    order = np.argsort(all_moves.number, kind="stable")  # in linear time: it finds the sorted runs
    number = all_moves.number[order]
    is_last = np.append(number[1:] != number[:-1], [True])[: len(number)]  # cut, because there may be no rows
    return all_moves.part(order[is_last])


# ---- held messages of paused campaigns: ranges of numbers, each from a due time on ---------------------------
# A held message is pending, even if the mark covers it, and is not loaded. Messages due before `from_ms` of the hold
# were settled (released or cancelled) when it began. So a pause needs memory for its ranges but not for its rows, and
# the mark continues to advance.

# (first_seq, rows) of each range, and `from_ms`, the due time from which the hold applies.
Hold = tuple[Sequence[tuple[int, int]], int]


class Holds:
    """The current holds by name. Changed on the event loop. Any thread may call `contains` and read `from_ms`.

    This is a cache. The META rows of the campaigns contain the same data (broker/registry/campaigns.py).
    """

    def __init__(self) -> None:
        self._by_name: dict[str, Hold] = {}
        # (first_seq, end_seq, from_ms), sorted by first number. Each range is reserved once, so ranges do not overlap.
        self._bounds = (_NONE, _NONE, _NONE)
        # The earliest due time from which messages are held, FAR_MS if there are no holds. Stored, because another
        # thread must not pass through `_by_name` while it changes.
        self.from_ms = FAR_MS
        self.ended = 0  # the number of holds that have ended

    def __len__(self) -> int:
        return len(self._by_name)

    def add(self, name: str, ranges: Sequence[tuple[int, int]], from_ms: int) -> None:
        """Hold the pending messages of these ranges that are due at `from_ms` or later."""
        self._by_name[name] = ranges, from_ms
        self._update()

    def remove(self, name: str) -> None:
        """End the hold `name`. Does nothing if there is no such hold."""
        if self._by_name.pop(name, None) is not None:
            self.ended += 1
            self._update()

    def contains(self, due_ms: Int64Array, seq: Int64Array) -> npt.NDArray[np.bool_]:
        """Compute a mask of the messages that a hold covers. It ignores settled pairs: a settled message may be in it.

        Callable in any thread.
        """
        # Read the tuple once: the event loop may replace it while another thread is here.
        first_seq, end_seq, from_ms = self._bounds
        if not len(first_seq):
            return np.zeros(len(seq), np.bool_)
        # Ranges do not overlap, so only the last range that begins at or before a number can contain it.
        indexes = np.searchsorted(first_seq, seq, side="right") - 1
        return np.asarray((indexes >= 0) & (seq < end_seq[indexes]) & (due_ms >= from_ms[indexes]))

    def _update(self) -> None:
        """Build `_bounds` and `from_ms`, which other threads read, from all holds."""
        rows = sorted(
            (first_seq, first_seq + rows, from_ms)
            for ranges, from_ms in self._by_name.values()
            for first_seq, rows in ranges
        )
        first_seq, end_seq, from_ms = np.array(rows, np.int64).reshape(-1, 3).T
        self._bounds = first_seq, end_seq, from_ms
        self.from_ms = min((from_ms for _, from_ms in self._by_name.values()), default=FAR_MS)


# ---- settled pairs -------------------------------------------------------------------------------------------


# Pairs that a step of the mark compares with the holds, while the event loop waits. The next steps do the rest.
HELD_ROWS_MAX = 262_144


class SettledPairs:
    """Settled pairs that the mark does not cover: those of messages due later, and those of held messages."""

    def __init__(self) -> None:
        # The pairs of held messages due before the mark are separate until a hold ends, so that a step of the mark does
        # not pass through all of them again.
        self._index, self._held = DueIndex(), DueIndex()
        self._ended_holds = 0  # `Holds.ended` at the last `drop_before`

    def __len__(self) -> int:
        return len(self._index) + len(self._held)

    @property
    def first_due_ms(self) -> int:
        """The earliest due time of the pairs. FAR_MS if there are none."""
        return min(self._index.first_due_ms, self._held.first_due_ms)

    def add(self, due_ms: Int64Array, seq: Int64Array) -> None:
        """Add pairs in any order. None of them may be present."""
        self._index.add(due_ms, seq)

    def restore(self, due_ms: Int64Array, seq: Int64Array) -> None:
        """Add many pairs in any order. Not on the event loop, because ten million take seconds."""
        self._index.restore(due_ms, seq)

    def has(self, due_ms: int, seq: int) -> bool:
        """Check whether this pair is present."""
        return self._index.has(due_ms, seq) or (len(self._held) > 0 and self._held.has(due_ms, seq))

    def contains(self, due_ms: Int64Array, seq: Int64Array) -> npt.NDArray[np.bool_]:
        """Compute a mask of the pairs that are present."""
        present = self._index.contains(due_ms, seq)
        return present | self._held.contains(due_ms, seq) if len(self._held) else present

    def runs(self) -> list[Pairs]:
        """List the runs of pairs. No pair is copied: the columns of a run never change."""
        return [*self._index.runs(), *self._held.runs()]

    def drop_before(self, due_ms: int, holds: Holds) -> None:
        """Remove the pairs due before `due_ms`, except those of held messages.

        While there are holds, a call compares about HELD_ROWS_MAX pairs, and later calls continue.
        """
        if self._ended_holds != holds.ended:
            # Some of the separate pairs may belong to the hold that has ended, so all are compared again.
            self._ended_holds = holds.ended
            self._index.add_runs(self._held.take_before(FAR_MS, 0))
        if not len(holds):
            self._index.take_before(due_ms, 0)
            return
        for run in self._index.take_before(due_ms, 0, HELD_ROWS_MAX):
            is_held = holds.contains(run.due_ms, run.seq)
            if is_held.all():
                self._held.add_runs([run.compacted() if run.is_wasteful else run])
            elif is_held.any():
                self._held.add_runs([Run(run.due_ms[is_held], run.seq[is_held])])


# ---- outcomes, the mark and the cursor -----------------------------------------------------------------------


@dataclass(frozen=True)
class Settled:
    """All settled messages: the mark (`before_ms`, `before_seq`), and the pairs that it does not cover, in `runs`.

    All messages due before `before_ms` with numbers below `before_seq` are settled, except in the ranges `late`
    (first_seq, rows). A bulk attach added their messages after `before_seq`, under numbers that were reserved before.
    Of these only the messages with pairs in `runs` are settled.

    Runs never change, so a copy takes no time. `due_ms` and `seq` join them, which takes a moment for ten million
    pairs, so the event loop leaves it to the thread that needs the columns.
    """

    before_ms: int
    runs: tuple[Pairs, ...] = ()
    before_seq: int = 1 << 62
    late: tuple[tuple[int, int], ...] = ()
    released: int = 0  # the last `released` pairs were released; the others were cancelled or moved

    @cached_property
    def due_ms(self) -> Int64Array:
        """The due times of the pairs."""
        return np.concatenate([_NONE, *(due_ms for due_ms, _ in self.runs)])

    @cached_property
    def seq(self) -> Int64Array:
        """The numbers of the pairs, in the order of `due_ms`."""
        return np.concatenate([_NONE, *(seq for _, seq in self.runs)])

    def may_be_pending(self, seq: Int64Array) -> npt.NDArray[np.bool_]:
        """Compute a mask of the numbers that may be pending. All must belong to messages due before `before_ms`."""
        may_be_pending = np.asarray(seq >= self.before_seq)
        for first_seq, rows in self.late:
            may_be_pending |= (seq >= first_seq) & (seq < first_seq + rows)
        return may_be_pending

    def may_be_pending_in(self, min_seq: int, max_seq: int) -> bool:
        """Check whether `may_be_pending` can be true for a number in [min_seq, max_seq]."""
        late = any(min_seq < first_seq + rows and max_seq >= first_seq for first_seq, rows in self.late)
        return late or max_seq >= self.before_seq


NOTHING_SETTLED = Settled(-(1 << 62), before_seq=0)


@dataclass(frozen=True, slots=True, order=True)
class ReleaseCursor:
    """The progress of the releases. `tick_ms` is the start of the second. Both are 0 before the first release."""

    tick_ms: int = 0
    local_index: int = 0

    def after(self, due_ms: Int64Array) -> ReleaseCursor:
        """Compute the cursor after the release of messages with these due times (ms), which may have any order."""
        if len(due_ms) == 0:
            return self
        last_ms = int(due_ms[0]) if len(due_ms) == 1 else int(due_ms.max())
        tick_ms = last_ms - last_ms % limits.SECOND_MS
        # A message that came too late. The cursor never decreases, or a successor would repeat seconds that were
        # released.
        if tick_ms < self.tick_ms:
            return self
        released_in_tick = int(np.count_nonzero(due_ms >= tick_ms)) if len(due_ms) > 1 else 1
        return ReleaseCursor(tick_ms, released_in_tick + (self.local_index if tick_ms == self.tick_ms else 0))


NOTHING_SENT = ReleaseCursor()


class Outcomes:
    """The outcomes of all scheduled messages, the mark, the holds, the moves and the cursor.

    `len` counts the pairs in memory: 16 bytes each, 32 after a look-up. Masks have a value per message.
    """

    def __init__(self) -> None:
        # Hand-outs, oldest first: (due_ms, seq, recorded_ms), and the bytes of their bodies.
        self._in_flight: deque[tuple[Int64Array, Int64Array, Int64Array]] = deque()
        self._in_flight_sizes: deque[int] = deque()
        self.in_flight_rows = self.in_flight_bytes = 0
        # The number of scheduled messages that are not settled, in all places. The log alone determines it.
        self.waiting_rows = 0
        self._released, self._cancelled = SettledPairs(), SettledPairs()
        self._mark = NOTHING_SETTLED  # its pairs are in `_released` and `_cancelled`
        self.holds = Holds()
        self.moved = Moved()  # the messages that got another due time
        self.cursor = NOTHING_SENT  # the progress of the durable releases

    def __len__(self) -> int:
        return self.in_flight_rows + len(self._released) + len(self._cancelled)

    @property
    def cancelled_rows(self) -> int:
        """The number of cancelled messages that the mark does not cover."""
        return len(self._cancelled)

    @property
    def first_in_flight_ms(self) -> int | None:
        """The earliest due time of messages that are handed out but not durably released. None if there are none."""
        return min((int(due.min()) for due, _, _ in self._in_flight), default=None)

    # -- changes -------------------------------------------------------------------------------------------

    def hand_out(
        self, due_ms: Int64Array, seq: Int64Array, recorded_ms: Int64Array, body_bytes: int = 0
    ) -> None:
        """Move pending messages to "in flight". Their release records follow in this order.

        `recorded_ms` contains the due times that the records will state. They differ from `due_ms`, the original ones,
        if a clock step has shifted a delay level or a duration. `body_bytes` is the total of the bodies.
        """
        self._in_flight.append((due_ms, seq, recorded_ms))
        self._in_flight_sizes.append(body_bytes)
        self.in_flight_rows += len(seq)
        self.in_flight_bytes += body_bytes

    def released(self, seq: Int64Array, cancelled: npt.NDArray[np.bool_] | None = None) -> None:
        """Count the messages `seq` as released, because their release records are durable.

        They must be the first ones in flight, in order. `cancelled` is a mask of the messages that have a CANCEL or a
        MOVED row instead. None if there are none.
        """
        in_flight_due, in_flight_seq, recorded_ms = self._in_flight.popleft()
        count = len(seq)
        # Another order is a bug. To go on would lose a message or release it twice.
        assert in_flight_seq is seq or np.array_equal(in_flight_seq[:count], seq), (
            "releases become durable in the order in which they were handed out"
        )
        if count < len(in_flight_seq):  # with large bodies one hand-out becomes several frames
            self._in_flight.appendleft((in_flight_due[count:], in_flight_seq[count:], recorded_ms[count:]))
        else:
            self.in_flight_bytes -= self._in_flight_sizes.popleft()
        self.in_flight_rows -= count
        self.waiting_rows -= count
        due_ms, recorded_ms = in_flight_due[:count], recorded_ms[:count]
        if cancelled is not None and cancelled.any():
            self._cancelled.add(due_ms[cancelled], seq[cancelled])
            due_ms, seq, recorded_ms = due_ms[~cancelled], seq[~cancelled], recorded_ms[~cancelled]
        self._released.add(due_ms, seq)
        self.cursor = self.cursor.after(recorded_ms)

    def cancel(self, due_ms: Int64Array, seq: Int64Array) -> npt.NDArray[np.bool_]:
        """Cancel these messages, as far as they are pending. Returns a mask of the cancelled ones."""
        # A message in flight is not pending: its release record was decided first, so the cancel comes too late.
        if len(seq) == 1 and not len(self.holds):  # the usual case, checked without arrays
            if not self._is_pending(int(due_ms[0]), int(seq[0])):
                return np.zeros(1, np.bool_)
            self.waiting_rows -= 1
            self._cancelled.add(due_ms, seq)
            return np.ones(1, np.bool_)
        pending = self.are_pending(due_ms, seq)
        self.waiting_rows -= int(np.count_nonzero(pending))
        self._cancelled.add(due_ms[pending], seq[pending])
        return pending

    def add_settled(self, due_ms: Int64Array, seq: Int64Array) -> None:
        """Count pairs as released: their rows are no scheduled messages, or were released at another due time."""
        self._released.add(due_ms, seq)

    # -- queries -------------------------------------------------------------------------------------------

    def are_pending(self, due_ms: Int64Array, seq: Int64Array) -> npt.NDArray[np.bool_]:
        """Compute a mask of the pending messages: neither settled nor in flight."""
        if len(seq) <= FEW and not len(self.holds):  # the usual case for acknowledgements of consumers
            pairs = zip(due_ms.tolist(), seq.tolist(), strict=True)
            return np.array([self._is_pending(*pair) for pair in pairs], dtype=np.bool_)
        pending = ~self.is_settled(due_ms, seq)
        for _, in_flight_seq, _ in self._in_flight:
            # The number alone is enough: a message in flight has only one due time.
            pending &= ~np.isin(seq, in_flight_seq)
        return pending

    def may_load(self, due_ms: Int64Array, seq: Int64Array) -> npt.NDArray[np.bool_]:
        """Compute a mask of the messages that are pending and not held."""
        pending = self.are_pending(due_ms, seq)
        return pending & ~self.holds.contains(due_ms, seq) if len(self.holds) else pending

    def is_settled(self, due_ms: Int64Array, seq: Int64Array) -> npt.NDArray[np.bool_]:
        """Compute a mask of the messages that are cancelled or durably released."""
        # The mark comes first, since it covers most messages.
        settled = (due_ms < self._mark.before_ms) & ~self._mark.may_be_pending(seq)
        if len(self.holds):
            settled &= ~self.holds.contains(due_ms, seq)
        settled |= self._cancelled.contains(due_ms, seq)
        settled |= self._released.contains(due_ms, seq)
        return np.asarray(settled)

    def _is_pending(self, due_ms: int, seq: int) -> bool:
        """Check a single pair like `waits`, while no messages are held."""
        if due_ms < self._mark.before_ms and not self._mark.may_be_pending_in(seq, seq):
            return False
        if self._cancelled.has(due_ms, seq) or self._released.has(due_ms, seq):
            return False
        return not any(bool((in_flight_seq == seq).any()) for _, in_flight_seq, _ in self._in_flight)

    @property
    def first_cancelled_ms(self) -> int:
        """The earliest due time among the pairs of `was_cancelled`. FAR_MS if there are none."""
        return self._cancelled.first_due_ms

    def was_cancelled(self, due_ms: Int64Array, seq: Int64Array) -> npt.NDArray[np.bool_]:
        """Compute a mask of the messages that were cancelled or moved, except those that the mark covers."""
        return self._cancelled.contains(due_ms, seq)

    # -- the mark, and checkpoints -------------------------------------------------------------------------

    def move_mark(self, before_ms: int, next_seq: int) -> None:
        """Advance the mark: all messages due before `before_ms` with numbers below `next_seq` are settled.

        Nothing happens if `before_ms` is earlier than the mark.
        """
        # Both numbers move together. `next_seq` is the end of the log, so every message below it has been seen.
        if before_ms >= self._mark.before_ms:  # the mark never moves back
            self._mark = Settled(before_ms, before_seq=next_seq)
            # The mark covers these pairs from now on, so memory holds only pairs of the future and of the last second,
            # and those of held messages, which the mark does not cover.
            for pairs in (self._cancelled, self._released):
                pairs.drop_before(before_ms, self.holds)
            self.moved.forget_before(before_ms)

    def exclude_from_mark(self, ranges: Iterable[tuple[int, int]], new_rows: int = 0) -> None:
        """Exclude the messages of these ranges (first_seq, rows) from the mark: they may still be pending.

        Their numbers were reserved earlier, and a bulk attach adds the messages now. `new_rows` is the number of these
        messages that `waiting_rows` does not include yet.
        """
        self.waiting_rows += new_rows
        self._mark = replace(self._mark, late=(*self._mark.late, *ranges))

    def hold(self, name: str, ranges: Sequence[tuple[int, int]], settled_before_ms: int) -> int:
        """Hold the pending messages of these ranges. Returns the due time before which all of them are settled.

        All messages of the log that are due before `settled_before_ms` are settled.
        """
        # Messages that arrived after the mark may be due before it. All others that are due before it are settled.
        has_late = any(
            self._mark.may_be_pending_in(first_seq, first_seq + rows - 1) for first_seq, rows in ranges
        )
        from_ms = settled_before_ms if has_late else max(settled_before_ms, self._mark.before_ms)
        self.holds.add(name, ranges, from_ms)
        return from_ms

    def settled(self) -> Settled:
        """Collect all settled messages, the cancelled pairs before the released ones."""
        # Not as columns: ten million pairs would hold the event loop for a second.
        runs = *self._cancelled.runs(), *self._released.runs()
        return replace(self._mark, runs=runs, released=len(self._released))

    def restore(
        self, settled: Settled, cursor: ReleaseCursor = NOTHING_SENT, *, waiting_rows: int = 0
    ) -> None:
        """Start with the state of a checkpoint and the later log. `waiting_rows` is the number of pending messages.

        Ten million settled messages take seconds, so do not call this on the event loop.
        """
        self.cursor, self.waiting_rows = cursor, waiting_rows
        self._mark = replace(settled, runs=(), released=0)
        # The cancelled pairs come first, the released ones last (see `Settled.released`).
        cut = len(settled.seq) - settled.released
        self._cancelled.restore(settled.due_ms[:cut], settled.seq[:cut])
        self._released.restore(settled.due_ms[cut:], settled.seq[cut:])
