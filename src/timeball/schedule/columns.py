"""Columns of equal length that are chosen from, joined and cut together: promises as arrays, a field each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from timeball.message import Int64Array

CHUNK = 65_536  # records looked at in one go: some megabytes
FEW = 16  # values that cost less one by one
PROBE = 4_096  # records looked at first: nearly always the last of those that are due is among them

Records = npt.NDArray[np.void]
Chosen = npt.NDArray[np.bool_] | npt.NDArray[np.int64] | slice


class Columns:
    """The base of dataclasses with slots whose fields are arrays of one length."""

    __slots__: tuple[str, ...] = ()

    def __init__(self, *columns: npt.NDArray[Any]) -> None:
        raise NotImplementedError  # each dataclass has its own, with a name for each column

    def __len__(self) -> int:
        return len(getattr(self, self.__slots__[0]))

    def part(self, chosen: Chosen) -> Self:
        """Return some of the rows."""
        return type(self)(*(getattr(self, name)[chosen] for name in self.__slots__))

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Return the rows of all parts, one at least, in their order."""
        if len(parts) == 1:
            return parts[0]
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in cls.__slots__))


class GrowingColumns:
    """Columns of int64 that rows are added to, as copies: no list of small arrays, and no views of the log."""

    def __init__(self, width: int) -> None:
        self._columns = np.empty((width, 0), np.int64)
        self._rows = 0

    def __len__(self) -> int:
        return self._rows

    def add(self, *columns: npt.ArrayLike) -> None:
        """Add rows behind those there are; a single value stands for a whole column of it, but not the first."""
        begin = self._rows
        end = begin + len(np.asarray(columns[0]))
        # Doubled, so that n rows are copied O(n) times.
        self._make_room(end, 2 * begin)
        for place, column in enumerate(columns):
            self._columns[place, begin:end] = column
        self._rows = end

    def reserve(self, rows: int) -> None:
        """Make room for so many more rows, or fewer: memory that they do not need is never touched."""
        self._make_room(self._rows + rows, self._rows + rows)

    def _make_room(self, needed_rows: int, room: int) -> None:
        if needed_rows > self._columns.shape[1]:
            grown = np.empty((len(self._columns), max(needed_rows, room)), np.int64)
            grown[:, : self._rows] = self._columns[:, : self._rows]
            self._columns = grown

    def columns(self) -> list[Int64Array]:
        """Return views of the columns, good until the next change."""
        return [column[: self._rows] for column in self._columns]

    def replace(self, *columns: Int64Array) -> None:
        """Hold these rows and no others."""
        self._columns, self._rows = np.stack(columns), len(columns[0])


def with_column(rows: pa.RecordBatch, name: str, values: pa.Array) -> pa.RecordBatch:
    """Return the rows with other values in a column."""
    place = rows.schema.get_field_index(name)
    return rows.set_column(place, rows.schema.field(place), values)


def leading(read: Callable[[int, int], Records], field: str, begin: int, end: int, before_ms: int) -> Records:
    """Return those of the records [begin, end), sorted by the instant in `field`, that come before `before_ms`."""
    # Begins with an empty part, so that the result has the records' type when there are none.
    parts, step = [read(begin, begin)], PROBE
    while begin < end:
        records = read(begin, min(end, begin + step))
        cut = int(np.searchsorted(records[field], before_ms))
        parts.append(records[:cut])
        # Sorted, so the first record that is not due ends the search.
        if cut < len(records):
            break
        begin, step = begin + cut, CHUNK
    return np.concatenate(parts)


def runs_of(values: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return where each run of equal values begins in a column that has any, and how many they are."""
    # The first run begins at 0, and another one wherever a value differs from the one before it.
    begins = np.concatenate(([0], np.flatnonzero(np.diff(values)) + 1))
    return begins, np.diff(np.append(begins, len(values)))
