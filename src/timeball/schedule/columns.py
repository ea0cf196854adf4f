"""Messages as columns: arrays of equal length, one per field, that are selected and joined together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from timeball.model.message import Int64Array

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
    """Growing int64 columns. Rows are copied in, so they keep neither many small arrays nor views of the log alive."""

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
        """If there is less space than `needed_rows`, allocate that many rows, or `capacity` rows if that is more."""
        if needed_rows > self._columns.shape[1]:
            grown = np.empty((len(self._columns), max(needed_rows, capacity)), np.int64)
            grown[:, : self._rows] = self._columns[:, : self._rows]
            self._columns = grown

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
    """Read the first records of [begin, end): those whose time in `field` is before `before_ms`.

    The records are sorted by that time. `read` returns the records of a range.
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
