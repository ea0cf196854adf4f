"""One queue of the cascade: messages that wait for the end of a hop, on disk, first in, first out.

    … done … | opened: near, or on the move | stretch: waits on disk | stretch: … |
             low                            next                                  end

    entry   | hop_end_ms | due_ms    | seq       | row_seq   | hops      | crc32c    |   48 bytes, little-endian
            +------------+-----------+-----------+-----------+-----------+-----------+

All messages of a queue wait equally long. So entries arrive sorted by the end of their hop, and those whose hop is over
are found by a search. Two events break this order: a clock that is set back, once per step, and after a restart
messages that are not in their original order in the log. Then the queue consists of several *stretches*, each sorted by
hop end and by row. None blocks another.

An opened entry stays until its message is settled (released or cancelled) or has a new entry. `low` is the first entry
for which that is not known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from timeball.io.files import Files
from timeball.model.message import Int64Array
from timeball.schedule import generations
from timeball.schedule.columns import CHUNK, Columns, leading, runs_of
from timeball.schedule.generations import LogBounds
from timeball.schedule.mapped_log import RecordArray, RecordType

RECORD = np.dtype(
    [
        ("hop_end_ms", "<i8"),  # the end of the hop
        ("due_ms", "<i8"),
        ("seq", "<i8"),  # the version of the message
        ("row_seq", "<i8"),  # the row of the log that contains it now
        ("hops", "<i8"),  # the levels left when the hop is over
    ]
)
RECORDS = RecordType(RECORD, file_records=1 << 17)  # 5 MB per file, for each of 65 queues

Mask = npt.NDArray[np.bool_]
IsSettled = Callable[[Int64Array, Int64Array], Mask]

_NONE = np.empty(0, np.int64)


class QueueState(msgspec.Struct, array_like=True):
    """One queue in a checkpoint."""

    number: int
    low: int
    end: int
    cuts: list[int]  # the ends of the stretches that end after `low`
    # (first, count) of the entries from `low` on whose messages have another entry.
    gone: list[tuple[int, int]]

    def bounds(self) -> LogBounds:
        """The queue's log, and its bounds."""
        return f"{self.number:02d}", RECORDS, self.low, self.end


@dataclass(slots=True)
class Stretch:
    """A part of the queue that is sorted. It ends at `end`, and its entries from `next` on wait on disk."""

    next: int
    end: int
    head_ms: int  # the hop end of entry `next`
    last_ms: int  # the hop end of the last entry
    last_row_seq: int


@dataclass(frozen=True, slots=True)
class Entries(Columns):
    """Some entries, with their indexes in the queue."""

    index: Int64Array
    due_ms: Int64Array
    seq: Int64Array
    row_seq: Int64Array
    hops: Int64Array


class HopQueue:
    """The entries of one queue, and which of them are opened. Belongs to the event loop."""

    def __init__(self, files: Files, folder: str, number: int, state: QueueState | None = None) -> None:
        """Open the part of a queue in `folder` that a checkpoint contains. None stands for an empty queue."""
        state = state or QueueState(number, 0, 0, [], [])
        self.number, self.low = number, state.low
        (self.log,) = generations.open_logs(files, folder, [state.bounds()])
        self.head_ms: int | None = None  # the earliest hop end among the entries that wait on disk
        self._stretches = [
            self._stretch(begin, end)
            for begin, end in zip([state.low, *state.cuts], state.cuts, strict=False)
        ]
        # Opened entries that are not known to be done, and the indexes of entries whose messages have another entry.
        self._opened: list[Entries] = []
        self._gone = np.concatenate([_NONE, *(np.arange(first, first + n) for first, n in state.gone)])
        self._find_head()

    @property
    def unopened_rows(self) -> int:
        """The number of entries that wait for the end of their hop."""
        rows = 0
        for stretch in self._stretches:
            gone = np.count_nonzero((self._gone >= stretch.next) & (self._gone < stretch.end))
            rows += stretch.end - stretch.next - int(gone)
        return rows

    @property
    def opened_rows(self) -> int:
        """The number of opened entries that are not known to be done, as of the last `advance`."""
        return sum(map(len, self._opened))

    def append(self, records: RecordArray) -> None:
        """Append entries whose hops all end at one time, sorted by row."""
        begin = self.log.append(records)
        hop_end_ms, first_at = int(records["hop_end_ms"][0]), int(records["row_seq"][0])
        last = self._stretches[-1] if self._stretches else None
        # By row as well: a checkpoint saves only the ends of stretches, and a restart relies on both orders within one.
        if last and last.last_ms <= hop_end_ms and last.last_row_seq < first_at:
            if last.next == last.end:
                last.head_ms = hop_end_ms
            last.end, last.last_ms, last.last_row_seq = self.log.end, hop_end_ms, int(records["row_seq"][-1])
        else:
            self._stretches.append(
                Stretch(begin, self.log.end, hop_end_ms, hop_end_ms, int(records["row_seq"][-1]))
            )
        self.head_ms = hop_end_ms if self.head_ms is None else min(self.head_ms, hop_end_ms)

    def take_due(self, until_ms: int, rows_max: int) -> Entries:
        """Take the first entries of the stretch with the earliest hop end: those that end at `until_ms` or before.

        The caller then passes those to `hold` whose messages are unsettled and have no other entry.
        """
        # After a clock was set back several stretches may wait. None may delay one that ends earlier.
        stretch = min((s for s in self._stretches if s.next < s.end), key=lambda s: s.head_ms)
        first, end = stretch.next, min(stretch.end, stretch.next + rows_max)
        records = leading(self.log.read, "hop_end_ms", first, end, until_ms + 1)
        stretch.next += len(records)
        if stretch.next < stretch.end:
            stretch.head_ms = int(self.log.read(stretch.next, stretch.next + 1)["hop_end_ms"][0])
        self._find_head()
        columns = (np.ascontiguousarray(records[name]) for name in ("due_ms", "seq", "row_seq", "hops"))
        entries = Entries(np.arange(first, stretch.next), *columns)
        return entries.part(~np.isin(entries.index, self._gone)) if len(self._gone) else entries

    def hold(self, entries: Entries) -> None:
        """Keep entries that were taken, because their messages are near or are being rewritten."""
        if len(entries):
            self._opened.append(entries)

    def forget(self, index: Int64Array) -> None:
        """Mark entries as gone that are not held: their messages have another entry."""
        self._gone = np.concatenate([self._gone, index])

    def find_entries(self, seq: Int64Array, begin: int) -> tuple[Int64Array, int]:
        """Find the entries of these messages in the next chunk from `begin` on. Return also the end of the chunk."""
        end = min(begin + CHUNK, self.log.end)
        found = begin + np.flatnonzero(np.isin(self.log.read(begin, end)["seq"], seq))
        return found[~np.isin(found, self._gone)], end

    def advance(self, is_settled: IsSettled, moved_from: Int64Array) -> None:
        """Remove entries that are done: settled, or rewritten from the rows `moved_from` after they were opened."""
        if self.low == self.log.end:
            return
        if self._opened:
            opened = Entries.joined(self._opened)
            # Entries of moved messages are listed as gone: they are not settled, and a restart must not enter them
            # twice.
            moved = np.isin(opened.row_seq, moved_from)
            done = moved | is_settled(opened.due_ms, opened.seq)
            self.forget(opened.index[moved])
            opened = opened.part(~done)
            self._opened = [opened] if len(opened) else []
        for stretch in self._stretches:
            self._pass_over(stretch, is_settled)
        self._find_head()
        waiting = [int(opened.index.min()) for opened in self._opened]
        waiting += [stretch.next for stretch in self._stretches if stretch.next < stretch.end]
        # Everything before `low` is done, so its files and its rows of the log may be removed.
        self.low = min(waiting, default=self.log.end)
        self._gone = self._gone[self._gone >= self.low]
        self._stretches = [stretch for stretch in self._stretches if stretch.end > self.low]
        self.log.drop_below(self.low)

    @property
    def first_row_seq(self) -> int | None:
        """Find the oldest row of a pending message as of the last `advance`, or an older one. None if there is none."""
        places = [int(opened.row_seq.min()) for opened in self._opened]
        heads = [stretch.next for stretch in self._stretches if stretch.next < stretch.end]
        if heads:
            places.append(int(self.log.at(np.array(heads))["row_seq"].min()))
        return min(places, default=None)

    def state(self) -> QueueState:
        """Build the state of the queue for a checkpoint. Call `advance` before."""
        cuts = [stretch.end for stretch in self._stretches]
        return QueueState(self.number, self.low, self.log.end, cuts, _ranges(np.sort(self._gone)))

    # -- inside ----------------------------------------------------------------------------------------------

    def _stretch(self, begin: int, end: int) -> Stretch:
        head, last = self.log.at(np.array([begin, end - 1]))
        return Stretch(begin, end, int(head["hop_end_ms"]), int(last["hop_end_ms"]), int(last["row_seq"]))

    def _pass_over(self, stretch: Stretch, is_settled: IsSettled) -> None:
        """Skip settled entries at the beginning of a stretch. They would protect rows of the log for hours."""
        begin, rows = stretch.next, 1  # one entry first: nearly always it is pending
        while stretch.next < stretch.end and stretch.next - begin < CHUNK:
            records = self.log.read(stretch.next, min(stretch.end, stretch.next + rows))
            due, seq = (np.ascontiguousarray(records[name]) for name in ("due_ms", "seq"))
            gone = np.isin(np.arange(stretch.next, stretch.next + len(records)), self._gone)
            waits = np.flatnonzero(~(gone | is_settled(due, seq)))
            stretch.next += int(waits[0]) if len(waits) else len(records)
            if len(waits):
                stretch.head_ms = int(records["hop_end_ms"][waits[0]])
                return
            rows = CHUNK  # one chunk per call, since the event loop waits meanwhile
        if begin < stretch.next < stretch.end:
            stretch.head_ms = int(self.log.read(stretch.next, stretch.next + 1)["hop_end_ms"][0])

    def _find_head(self) -> None:
        self.head_ms = min((s.head_ms for s in self._stretches if s.next < s.end), default=None)


def _ranges(index: Int64Array) -> list[tuple[int, int]]:
    """Convert sorted indexes to ranges (first, count)."""
    if len(index) == 0:
        return []
    begins, counts = runs_of(index - np.arange(len(index)))
    return list(zip(index[begins].tolist(), counts.tolist(), strict=True))
