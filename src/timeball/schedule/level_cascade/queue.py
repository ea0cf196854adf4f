"""One queue of the cascade: messages that wait for the end of a hop, on disk, first in, first out.

    … done … | opened: near, or on the move | stretch: waits on disk | stretch: … |
             low                            next                                  end

    entry   | hop_end_ms | due_ms    | seq       | row_seq   | hops      | crc32c    |   48 bytes, little-endian
            +------------+-----------+-----------+-----------+-----------+-----------+

All messages of a queue wait equally long. So entries arrive sorted by the end of their hop, and a search finds those
whose hop is over. Two events break this order: a clock that is set back, and after a restart messages that are not in
their original order in the log. Then the queue consists of several *stretches*, each sorted by hop end and by row. None
blocks another.

An opened entry ("near, or on the move" in the figure) stays until its message is settled (released or cancelled) or has
a new entry, in which case the old one is *superseded*. `low` is the first entry that may still be needed.
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
    # (first, count) of the superseded entries from `low` on: their messages have another entry.
    gone: list[tuple[int, int]]

    def bounds(self) -> LogBounds:
        """The queue's log, and its bounds."""
        return f"{self.number:02d}", RECORDS, self.low, self.end


@dataclass(slots=True)
class Stretch:
    """A sorted part of the queue. It ends at `end`, and its entries from `next` on are not opened."""

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
            self._read_stretch(begin, end)
            for begin, end in zip([state.low, *state.cuts], state.cuts, strict=False)
        ]
        # Opened entries that are not known to be done, and the indexes of superseded entries.
        self._opened: list[Entries] = []
        self._superseded = np.concatenate([_NONE, *(np.arange(first, first + n) for first, n in state.gone)])
        self._update_head()

    @property
    def unopened_rows(self) -> int:
        """The number of entries that wait for the end of their hop."""
        rows = 0
        for stretch in self._stretches:
            is_within = (self._superseded >= stretch.next) & (self._superseded < stretch.end)
            rows += stretch.end - stretch.next - int(np.count_nonzero(is_within))
        return rows

    @property
    def opened_rows(self) -> int:
        """The number of opened entries that are not known to be done, as of the last `advance`."""
        return sum(map(len, self._opened))

    def append(self, records: RecordArray) -> None:
        """Append entries whose hops all end at one time, sorted by row."""
        begin = self.log.append(records)
        hop_end_ms, first_row_seq = int(records["hop_end_ms"][0]), int(records["row_seq"][0])
        last = self._stretches[-1] if self._stretches else None
        # By row as well: a checkpoint saves only the ends of stretches, and a restart relies on both orders within one.
        if last and last.last_ms <= hop_end_ms and last.last_row_seq < first_row_seq:
            if last.next == last.end:
                last.head_ms = hop_end_ms
            last.end, last.last_ms, last.last_row_seq = self.log.end, hop_end_ms, int(records["row_seq"][-1])
        else:
            self._stretches.append(
                Stretch(begin, self.log.end, hop_end_ms, hop_end_ms, int(records["row_seq"][-1]))
            )
        self.head_ms = hop_end_ms if self.head_ms is None else min(self.head_ms, hop_end_ms)

    def take_due(self, until_ms: int, rows_max: int) -> Entries:
        """Take up to `rows_max` entries whose hops end by `until_ms`, from the stretch with the earliest hop end.

        The caller then passes those of unsettled messages to `keep_opened`.
        """
        # After a clock was set back there may be several stretches with unopened entries.
        stretch = min(
            (each for each in self._stretches if each.next < each.end), key=lambda each: each.head_ms
        )
        first, end = stretch.next, min(stretch.end, stretch.next + rows_max)
        records = leading(self.log.read, "hop_end_ms", first, end, until_ms + 1)
        stretch.next += len(records)
        if stretch.next < stretch.end:
            stretch.head_ms = int(self.log.read(stretch.next, stretch.next + 1)["hop_end_ms"][0])
        self._update_head()
        columns = (np.ascontiguousarray(records[name]) for name in ("due_ms", "seq", "row_seq", "hops"))
        entries = Entries(np.arange(first, stretch.next), *columns)
        return entries.part(~np.isin(entries.index, self._superseded)) if len(self._superseded) else entries

    def keep_opened(self, entries: Entries) -> None:
        """Keep opened entries until their messages are settled or rewritten."""
        if len(entries):
            self._opened.append(entries)

    def mark_superseded(self, index: Int64Array) -> None:
        """Mark entries as superseded: their messages have another entry."""
        self._superseded = np.concatenate([self._superseded, index])

    def find_entries(self, seq: Int64Array, begin: int) -> tuple[Int64Array, int]:
        """Find the entries of these messages in a chunk from `begin` on. Returns their indexes and the chunk's end."""
        end = min(begin + CHUNK, self.log.end)
        indexes = begin + np.flatnonzero(np.isin(self.log.read(begin, end)["seq"], seq))
        return indexes[~np.isin(indexes, self._superseded)], end

    def advance(self, is_settled: IsSettled, moved_from: Int64Array) -> None:
        """Remove entries that are done: settled, or rewritten from the rows `moved_from` after they were opened."""
        if self.low == self.log.end:
            return
        if self._opened:
            opened = Entries.joined(self._opened)
            # Entries of rewritten messages are listed as superseded, because a restart must not open both entries.
            moved = np.isin(opened.row_seq, moved_from)
            done = moved | is_settled(opened.due_ms, opened.seq)
            self.mark_superseded(opened.index[moved])
            opened = opened.part(~done)
            self._opened = [opened] if len(opened) else []
        for stretch in self._stretches:
            self._skip_settled(stretch, is_settled)
        self._update_head()
        first_indexes = [int(opened.index.min()) for opened in self._opened]
        first_indexes += [stretch.next for stretch in self._stretches if stretch.next < stretch.end]
        # Everything before `low` is done, so its files and its rows of the log may be removed.
        self.low = min(first_indexes, default=self.log.end)
        self._superseded = self._superseded[self._superseded >= self.low]
        self._stretches = [stretch for stretch in self._stretches if stretch.end > self.low]
        self.log.drop_below(self.low)

    @property
    def first_row_seq(self) -> int | None:
        """A row of the log below which no entry needs a row, as of the last `advance`. None if there are no entries."""
        row_seqs = [int(opened.row_seq.min()) for opened in self._opened]
        heads = [stretch.next for stretch in self._stretches if stretch.next < stretch.end]
        if heads:
            row_seqs.append(int(self.log.at(np.array(heads))["row_seq"].min()))
        return min(row_seqs, default=None)

    def state(self) -> QueueState:
        """Build the state of the queue for a checkpoint. Call `advance` before."""
        cuts = [stretch.end for stretch in self._stretches]
        return QueueState(self.number, self.low, self.log.end, cuts, _ranges(np.sort(self._superseded)))

    # -- internals -------------------------------------------------------------------------------------------

    def _read_stretch(self, begin: int, end: int) -> Stretch:
        """Read the bounds of a saved stretch from its first and its last entry."""
        head, last = self.log.at(np.array([begin, end - 1]))
        return Stretch(begin, end, int(head["hop_end_ms"]), int(last["hop_end_ms"]), int(last["row_seq"]))

    def _skip_settled(self, stretch: Stretch, is_settled: IsSettled) -> None:
        """Skip settled entries at the beginning of a stretch. Otherwise the log would keep their rows for hours."""
        begin, chunk_rows = stretch.next, 1  # one entry first: nearly always it is pending
        while stretch.next < stretch.end and stretch.next - begin < CHUNK:
            records = self.log.read(stretch.next, min(stretch.end, stretch.next + chunk_rows))
            due, seq = (np.ascontiguousarray(records[name]) for name in ("due_ms", "seq"))
            is_superseded = np.isin(np.arange(stretch.next, stretch.next + len(records)), self._superseded)
            pending = np.flatnonzero(~(is_superseded | is_settled(due, seq)))
            stretch.next += int(pending[0]) if len(pending) else len(records)
            if len(pending):
                stretch.head_ms = int(records["hop_end_ms"][pending[0]])
                return
            chunk_rows = CHUNK  # at most one chunk per call, because the event loop is blocked meanwhile
        if begin < stretch.next < stretch.end:
            stretch.head_ms = int(self.log.read(stretch.next, stretch.next + 1)["hop_end_ms"][0])

    def _update_head(self) -> None:
        """Store the earliest hop end of the unopened entries."""
        self.head_ms = min((s.head_ms for s in self._stretches if s.next < s.end), default=None)


def _ranges(index: Int64Array) -> list[tuple[int, int]]:
    """Convert sorted indexes to ranges (first, count)."""
    if len(index) == 0:
        return []
    begins, counts = runs_of(index - np.arange(len(index)))
    return list(zip(index[begins].tolist(), counts.tolist(), strict=True))
