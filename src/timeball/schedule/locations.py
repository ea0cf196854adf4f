"""Scheduled messages as columns, and their locations: the row of the log that contains a body now.

    number     the message's first row, for ever: the name of the message outside the broker
    version    the row that gave the message its present due time; the schedule uses (due time, version)
    location   the row that contains the body now

All three are the same row until the message is rewritten, by a row of kind MOVED. A reader gets the message from that
row with its version as `seq` and with the time at which it was accepted. So no other module depends on how often a
message has moved. If number and version differ, the kind stays MOVED and `source_seq` is the number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from timeball.log.reader import LogReader
from timeball.model.message import READ_SCHEMA, Int64Array, Kind, int64

# ---- columns: arrays of equal length, one per field, that are selected and joined together -------------------

CHUNK = 65_536  # records read at a time, a few MB
FEW = 16  # up to this many values, Python values cost less than columns
PROBE = 4_096  # records in the first read, which nearly always contains the last due record

Records = npt.NDArray[np.void]
Selection = npt.NDArray[np.bool_] | npt.NDArray[np.int64] | slice


class Columns:
    """The base of dataclasses with slots whose fields are arrays of equal length."""

    __slots__: tuple[str, ...] = ()

    def __init__(self, *columns: npt.NDArray[Any]) -> None:
        raise NotImplementedError  # each dataclass has its own constructor, with a name for each column

    def __len__(self) -> int:
        return len(getattr(self, self.__slots__[0]))

    def part(self, selection: Selection) -> Self:
        """Select rows by a mask, by indexes or by a slice. The result has the same class."""
        return type(self)(*(getattr(self, name)[selection] for name in self.__slots__))

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Join the rows of all parts, in their order. There must be at least one part."""
        if len(parts) == 1:
            return parts[0]
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in cls.__slots__))


class GrowingColumns:
    """Growing int64 columns. Rows are copied, so that no small arrays and no views of the log stay in memory."""

    def __init__(self, width: int) -> None:
        self._columns = np.empty((width, 0), np.int64)
        self._rows = 0

    def __len__(self) -> int:
        return self._rows

    def add(self, *columns: npt.ArrayLike) -> None:
        """Append rows. A single value fills a whole column. The first argument must be a whole column."""
        begin = self._rows
        end = begin + len(np.asarray(columns[0]))
        # The size is doubled, so that n rows are copied O(n) times.
        self._grow(end, 2 * begin)
        for index, column in enumerate(columns):
            self._columns[index, begin:end] = column
        self._rows = end

    def reserve(self, rows: int) -> None:
        """Allocate memory for `rows` more rows. Fewer may follow: unused memory is never touched."""
        self._grow(self._rows + rows, self._rows + rows)

    def _grow(self, needed_rows: int, capacity: int) -> None:
        """Allocate the larger of `needed_rows` and `capacity`, if there is less space than `needed_rows`."""
        if needed_rows > self._columns.shape[1]:
            new_columns = np.empty((len(self._columns), max(needed_rows, capacity)), np.int64)
            new_columns[:, : self._rows] = self._columns[:, : self._rows]
            self._columns = new_columns

    def columns(self) -> list[Int64Array]:
        """Build views of the columns. They are valid until the next change."""
        return [column[: self._rows] for column in self._columns]

    def replace(self, *columns: Int64Array) -> None:
        """Replace all rows."""
        self._columns, self._rows = np.stack(columns), len(columns[0])


def with_column(rows: pa.RecordBatch, name: str, values: pa.Array) -> pa.RecordBatch:
    """Replace the values of a column."""
    index = rows.schema.get_field_index(name)
    return rows.set_column(index, rows.schema.field(index), values)


def leading(read: Callable[[int, int], Records], field: str, begin: int, end: int, before_ms: int) -> Records:
    """Read the first records of [begin, end), up to the first whose `field` is at or after `before_ms`.

    The records are sorted by `field`. `read(begin, end)` returns the records of a range.
    """
    # The first part is empty, so that the result has the type of the records even if there are none.
    chunks, chunk_rows = [read(begin, begin)], PROBE
    while begin < end:
        records = read(begin, min(end, begin + chunk_rows))
        due_rows = int(np.searchsorted(records[field], before_ms))
        chunks.append(records[:due_rows])
        # The records are sorted, so the first record that is not due ends the search.
        if due_rows < len(records):
            break
        begin, chunk_rows = begin + due_rows, CHUNK
    return np.concatenate(chunks)


def runs_of(values: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Find the runs of equal values: return their begins and their lengths. The column must not be empty."""
    # The first run begins at 0, each other one where a value differs from the one before it.
    begins = np.concatenate(([0], np.flatnonzero(np.diff(values)) + 1))
    return begins, np.diff(np.append(begins, len(values)))


# ---- rows of the log as scheduled messages, and their locations ----------------------------------------------

_NONE = np.empty(0, np.int64)


KINDS = frozenset({Kind.SCHEDULED, Kind.MOVED})  # of rows that contain a scheduled message


@dataclass(frozen=True, slots=True)
class Waiting(Columns):
    """Pending messages and their locations, as columns: due time, version, row of the log."""

    due_ms: Int64Array
    seq: Int64Array
    row_seq: Int64Array


NOTHING = Waiting(_NONE, _NONE, _NONE)


def waiting_rows(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Select the rows that contain a scheduled message, without half messages and messages of delay levels."""
    mask = np.isin(rows.column("kind").to_numpy(), list(KINDS))
    # A half message has no due time. A message of a delay level has an offset in the queue of its level.
    mask &= np.asarray(rows.column("due_ms").is_valid()) & np.asarray(rows.column("queue_offset").is_null())
    return rows if mask.all() else rows.filter(pa.array(mask))


def versions_in(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Select the rows of `waiting_rows` that gave a message its due time: not those that only rewrote it."""
    rows = waiting_rows(rows)
    mask = rows.column("kind").to_numpy() == Kind.SCHEDULED
    mask |= np.asarray(rows.column("from_due_ms").is_valid())
    return rows if mask.all() else rows.filter(pa.array(mask))


def waiting_in(rows: pa.RecordBatch) -> Waiting:
    """Build the columns of the messages in READ_SCHEMA rows. All rows must have one of `KINDS`."""
    row_seq = int64(rows.column("seq"))
    moved = rows.column("kind").to_numpy() == Kind.MOVED
    seq = np.where(moved, moved_versions(rows), row_seq) if moved.any() else row_seq
    return Waiting(int64(rows.column("due_ms")), seq, row_seq)


def moved_versions(rows: pa.RecordBatch) -> Int64Array:
    """Compute the versions of MOVED rows. A row with a new due time is a version itself, others refer to one.

    The values for rows of other kinds have no meaning.
    """
    return np.where(
        np.asarray(rows.column("from_due_ms").is_valid()), int64(rows.column("seq")), versions(rows)
    )


def versions(rows: pa.RecordBatch) -> Int64Array:
    """Read the versions that rows of the kinds RELEASE, CANCEL and MOVED refer to. 0 if they refer to none.

    A row without `version_seq` refers to the version that equals the message's number (`source_seq`).
    """
    version_seq, number = rows.column("version_seq"), rows.column("source_seq")
    version_seq = number if version_seq.null_count == len(version_seq) else pc.coalesce(version_seq, number)
    return np.asarray(version_seq.fill_null(0).to_numpy(), dtype=np.int64)


def latest_locations(batches: Iterable[Waiting], from_seq: int) -> Waiting:
    """Find the last location of each message in rows from `from_seq` on, sorted by version.

    `batches` are in the order of the log.
    """
    columns = list(batches)
    if not columns:
        return NOTHING
    waiting = Waiting.joined(columns)
    if not (is_in_range := waiting.row_seq >= from_seq).all():
        waiting = waiting.part(is_in_range)
    # Each message occurs once and in order in nearly all cases, since few are rewritten.
    if (waiting.seq[1:] > waiting.seq[:-1]).all():
        return waiting
    # `unique` returns the first index of each number. In reverse order this is the row that came last.
    waiting = waiting.part(slice(None, None, -1))
    _, last_indexes = np.unique(waiting.seq, return_index=True)
    return waiting.part(last_indexes)


def take_scheduled(reader: LogReader, row_seq: Int64Array) -> pa.RecordBatch:
    """Read the messages in these rows, in the given order, in READ_SCHEMA (reader thread). Raise OutOfRange."""
    return as_scheduled(reader.read_rows(row_seq))


def as_scheduled(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Convert READ_SCHEMA rows of the kinds SCHEDULED and MOVED to the messages that they contain.

    A message has its version as `seq` and its first row's `store_ms`. It stays MOVED, with its number as `source_seq`,
    if number and version differ.
    """
    moved = rows.column("kind").to_numpy() == Kind.MOVED
    if not moved.any():
        return rows
    moved_mask, count = pa.array(moved), rows.num_rows
    nulls, number = pa.nulls(count, pa.int64()), rows.column("source_seq")
    seq = np.where(moved, moved_versions(rows), int64(rows.column("seq")))
    # A row that was rolled or hopped, but not rescheduled, reads like its first row: number and version are the same.
    keeps_number = moved & (seq != number.fill_null(0).to_numpy())
    # The fields about the history of the row are emptied, so that a message that was rolled ten times equals one that
    # was not.
    changed = {
        "seq": pa.array(seq),
        "kind": pa.array(np.where(keeps_number, Kind.MOVED, Kind.SCHEDULED).astype(np.int8)),
        "store_ms": pc.if_else(moved_mask, rows.column("accepted_ms"), rows.column("store_ms")),
        "accepted_ms": nulls,
        "source_seq": pc.if_else(pa.array(keeps_number), number, pa.scalar(None, pa.int64())),
        "version_seq": nulls,
        "from_due_ms": nulls,
    }
    columns = [changed.get(name, rows.column(name)) for name in READ_SCHEMA.names]
    return pa.RecordBatch.from_arrays(columns, schema=READ_SCHEMA)


class Locations:
    """The rows of messages that are not in the row of their version: version -> row, two int64 each."""

    def __init__(self) -> None:
        self._seq = self._row_seq = _NONE  # sorted by version

    def __len__(self) -> int:
        return len(self._seq)

    def add(self, seq: Int64Array, row_seq: Int64Array) -> None:
        """Store the rows of these messages. A message in the row of its version takes no memory."""
        # Nearly all messages are in the row of their version, so most calls store nothing.
        is_elsewhere = seq != row_seq
        if is_elsewhere.any():
            seqs = np.concatenate((self._seq, seq[is_elsewhere]))
            order = np.argsort(seqs, kind="stable")
            self._seq = seqs[order]
            self._row_seq = np.concatenate((self._row_seq, row_seq[is_elsewhere]))[order]

    def rows_of(self, seq: Int64Array) -> Int64Array:
        """Find the rows of these messages. A message that is not stored is in the row of its version."""
        indexes, is_stored = self._find(seq)
        return np.where(is_stored, self._row_seq[indexes], seq) if is_stored.any() else seq

    def pop(self, seq: Int64Array) -> Int64Array:
        """Find the rows of these messages as `rows_of`, and remove them."""
        row_seq, (indexes, is_stored) = self.rows_of(seq), self._find(seq)
        if is_stored.any():
            remains = np.ones(len(self._seq), dtype=np.bool_)
            remains[indexes[is_stored]] = False
            self._seq, self._row_seq = self._seq[remains], self._row_seq[remains]
        return row_seq

    def _find(self, seq: Int64Array) -> tuple[Int64Array, npt.NDArray[np.bool_]]:
        """Find the index of each message in the columns, and a mask of the messages that have one."""
        if not len(self._seq):
            return seq, np.zeros(len(seq), np.bool_)
        # A number after the last one would get an index out of range.
        indexes = np.minimum(np.searchsorted(self._seq, seq), len(self._seq) - 1)
        return indexes, self._seq[indexes] == seq
