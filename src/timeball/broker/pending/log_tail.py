"""The pending scheduled messages of the log, sorted by due time, and kept between two reads.

A page needs the scheduled messages that are due next, but the log is in the order of arrival. So its scheduled messages
are kept sorted, 29 bytes each, as long as a client reads pages. `ROWS_MAX` bounds their number. If there are more,
those due first are kept, up to some due time, and a page after that time reads the log again.

Rows that only write a scheduled message again (hops, rolls) count when the row that set its due time has left the log.
Of several such rows, the last one counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from timeball.broker.pending.pages import FIRST, LAST, Position
from timeball.broker.pending.snapshot import Snapshot
from timeball.log.reader import LogReader
from timeball.model.errors import OutOfRange
from timeball.model.message import Int64Array, Kind, int64
from timeball.schedule.backlog import Bools
from timeball.schedule.columns import Columns
from timeball.schedule.delay_levels.levels import restored
from timeball.schedule.locations import KINDS, moved_versions
from timeball.table.data_file import search

# 29 bytes each, and up to twice as many during a read.
ROWS_MAX = 4_000_000
_SCAN_ROWS = 65_536
Codes = npt.NDArray[np.int32]
_COLUMNS = ["seq", "kind", "topic", "queue_offset", "due_ms", "source_seq", "version_seq", "from_due_ms"]


class TopicCodes:
    """Topics as small numbers, assigned at their first use. Belongs to the background thread."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._codes: dict[str, int] = {}

    def encode(self, topics: pa.Array) -> Codes:
        """Return the number of each of these topics."""
        # A frame has only a few topics, and each is looked up once.
        coded = topics if pa.types.is_dictionary(topics.type) else topics.dictionary_encode()
        of = np.array([self._code(name) for name in coded.dictionary.to_pylist()], dtype=np.int32)
        return of[coded.indices.to_numpy(zero_copy_only=False)] if len(of) else np.empty(0, np.int32)

    def _code(self, name: str) -> int:
        found = self._codes.setdefault(name, len(self.names))
        if found == len(self.names):
            self.names.append(name)
        return found


@dataclass(frozen=True, slots=True)
class Logged(Columns):
    """Messages in the log: due time, version, row, topic, and whether they are in the queue of a delay level."""

    due_ms: Int64Array
    seq: Int64Array
    row_seq: Int64Array
    topic: Codes
    is_level: Bools

    def sorted(self) -> Logged:
        """Sort them by due time and version, and keep the last row of each version."""
        # The sort puts the last row of each version first.
        order = np.lexsort((-self.row_seq, self.seq, self.due_ms))
        found = self.part(order)
        is_first = np.ones(len(found), np.bool_)
        is_first[1:] = found.seq[1:] != found.seq[:-1]
        return found if is_first.all() else found.part(is_first)


_NONE = np.empty(0, np.int64)
NOTHING = Logged(_NONE, _NONE, _NONE, np.empty(0, np.int32), np.empty(0, np.bool_))


def scan(reader: LogReader, snapshot: Snapshot, from_seq: int, codes: TopicCodes) -> Iterator[Logged]:
    """Yield the scheduled messages in the rows of the log from `from_seq` on, also settled ones (background thread)."""
    begin = max(from_seq, reader.first_seq)
    while True:
        try:
            batches = reader.coalesced(begin, snapshot.to_seq, KINDS, _SCAN_ROWS, _COLUMNS)
            first = next(batches, None)
            break
        except OutOfRange:
            if reader.first_seq <= begin:
                raise
            # Retention has removed a segment since then, so nothing in it is pending.
            begin = reader.first_seq
    while first is not None:
        found = _scheduled_rows(reader, first, snapshot.watermark, codes)
        if len(found):
            yield found
        first = next(batches, None)


def _scheduled_rows(reader: LogReader, rows: pa.RecordBatch, watermark: int, codes: TopicCodes) -> Logged:
    row_seq, is_level = int64(rows.column("seq")), np.asarray(rows.column("queue_offset").is_valid())
    # A half message has no due time. Rows before the watermark are in the table, except those of delay levels.
    keep = np.asarray(rows.column("due_ms").is_valid()) & ((row_seq >= watermark) | is_level)
    if not keep.all():
        rows, row_seq, is_level = rows.filter(pa.array(keep)), row_seq[keep], is_level[keep]
    if not len(row_seq):
        return NOTHING
    is_moved = rows.column("kind").to_numpy() == Kind.MOVED
    # The schedule identifies a scheduled message by the row that set its due time.
    seq = np.where(is_moved, moved_versions(rows), row_seq) if is_moved.any() else row_seq
    topic = codes.encode(rows.column("topic"))
    if is_level.any():
        # They are stored under the topic of their level's queue. The properties contain the real topic.
        topic[is_level] = codes.encode(restored(reader.read_rows(row_seq[is_level])).column("topic"))
    return Logged(int64(rows.column("due_ms")), seq, row_seq, topic, is_level)


class LogTail:
    """The sorted scheduled messages of the log between two positions. Belongs to the background thread."""

    def __init__(self, reader: LogReader, codes: TopicCodes, rows_max: int = ROWS_MAX) -> None:
        self._reader, self._codes, self._rows_max = reader, codes, rows_max
        self.forget()

    def forget(self) -> None:
        """Drop all scheduled messages."""
        self._rows, self._next_seq = NOTHING, -1
        self._low, self._high = FIRST, FIRST  # the scheduled messages in [low, high) are kept

    def after(self, snapshot: Snapshot, low: Position, high: Position, rows: int) -> tuple[Logged, Position]:
        """Return scheduled messages in [low, high), sorted, and the position up to which all are examined.

        One call examines the next `rows` scheduled messages. It leaves out settled ones, and those that an attach has
        moved to the table.
        """
        if not self._low <= low < self._high:
            # Start with the first scheduled message. Only if there are too many to keep them all, start at `low`.
            self.forget()
            self._high = LAST
            self._read(snapshot)
            if low >= self._high:
                self.forget()
                self._low, self._high = low, LAST
                self._read(snapshot)
        elif self._next_seq < snapshot.to_seq:
            self._read(snapshot)
        # Two searches in sorted columns, so that earlier scheduled messages do not make a page slower.
        held = self._rows
        begin = search(held.due_ms, held.seq, low)
        end = search(held.due_ms, held.seq, high)
        found = held.part(slice(begin, min(end, begin + rows)))
        if begin + rows < end:
            # The position after the last scheduled message examined.
            upto = int(found.due_ms[-1]), int(found.seq[-1]) + 1
        else:
            upto = min(high, self._high)
        keep = snapshot.waits(found.due_ms, found.seq) & _is_logged(found, snapshot)
        return (found if keep.all() else found.part(keep)), upto

    def _read(self, snapshot: Snapshot) -> None:
        """Read the rest of the log, up to the end of the snapshot."""
        begin = snapshot.from_seq if self._next_seq < 0 else self._next_seq
        kept = self._rows.part(_is_logged(self._rows, snapshot))
        parts, count = [kept], len(kept)
        for found in scan(self._reader, snapshot, begin, self._codes):
            is_in = (found.due_ms >= self._low[0]) & (found.due_ms <= self._high[0])
            is_in &= snapshot.waits(found.due_ms, found.seq)
            if is_in.any():
                parts.append(found.part(is_in))
                count += len(parts[-1])
            # Not after each part, because a cut sorts everything that is kept.
            if count > 2 * self._rows_max:
                parts = [self._cut(Logged.joined(parts))]
                count = len(parts[0])
        self._rows = self._cut(Logged.joined(parts))
        self._next_seq = snapshot.to_seq

    def _cut(self, rows: Logged) -> Logged:
        """Return the messages that may be kept, sorted. If there are too many, lower the end of the kept range."""
        rows = rows.sorted()
        rows = rows.part(
            slice(search(rows.due_ms, rows.seq, self._low), search(rows.due_ms, rows.seq, self._high))
        )
        if len(rows) > self._rows_max:
            self._high = int(rows.due_ms[self._rows_max]), int(rows.seq[self._rows_max])
            rows = rows.part(slice(0, self._rows_max))
        return rows


def _is_logged(rows: Logged, snapshot: Snapshot) -> Bools:
    """Return which of these are not in the table."""
    return np.asarray((rows.row_seq >= snapshot.watermark) | rows.is_level)
