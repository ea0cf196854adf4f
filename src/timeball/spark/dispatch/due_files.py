"""Find the rows of the pending table that are due within a window, as positions in files.

Files are sorted by due time, so the rows due within a window form one contiguous span of each file. The driver reads
only the column `due_ms`. It keeps this column, 8 bytes per row, of the row groups that the windows have reached, and
drops it when a window begins after the group. A task gets *pointers* (file, first row, rows) and reads the whole rows
itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from timeball.model import storage_uris
from timeball.model.message import Int64Array, int64
from timeball.spark.table_store import TableFile, table_files
from timeball.table.layout import ROW_GROUP_ROWS

POINTER_SCHEMA = pa.schema([("uri", pa.string()), ("first_row", pa.int64()), ("rows", pa.int64())])
ROWS_SLACK = 1.5  # a piece may have this many times the rows of a task before it is cut further


@dataclass(frozen=True)
class Span:
    """Consecutive rows of one file and their due times, in ascending order."""

    uri: str
    first_row: int
    due_ms: Int64Array

    def part(self, begin: int, end: int) -> Span:
        """Cut out the rows begin <= i < end of this span."""
        return Span(self.uri, self.first_row + begin, self.due_ms[begin:end])


@dataclass
class _File:
    """The row groups of one file, and the due times of those that were read."""

    starts: Int64Array  # first row of each group, and at the end the number of rows of the file
    low: Int64Array  # earliest due time of each group, in ms
    high: Int64Array  # latest due time of each group, in ms
    due_ms: dict[int, Int64Array] = field(default_factory=dict)  # number of a group -> its column


class DueFiles:
    """The data files of one version of the table at a time. Used on the driver's side of a stream only."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self._version: int | None = None
        self._live: list[TableFile] = []
        self._known: dict[str, _File] = {}

    def use_version(self, version: int) -> None:
        """Switch to a version of the table. Column data of files that are still live is kept."""
        if version != self._version:
            self._live, self._version = table_files(self.uri, version), version
            live = {self._uri_of(file) for file in self._live}
            self._known = {uri: known for uri, known in self._known.items() if uri in live}

    def between(self, low_ms: int, high_ms: int) -> list[Span]:
        """Find the rows due at low_ms <= due_ms < high_ms, one span per file. Drops the column data of earlier rows."""
        found = []
        for file in self._live:
            if file.may_hold((low_ms, high_ms)):
                span = self._span(self._uri_of(file), low_ms, high_ms)
                if len(span.due_ms):
                    found.append(span)
            elif not file.may_hold((low_ms, None)):  # all its rows are earlier, and windows only move forward
                self._known.pop(self._uri_of(file), None)
        return found

    def _uri_of(self, file: TableFile) -> str:
        return f"{self.uri.rstrip('/')}/{file.path}"

    def _span(self, uri: str, low_ms: int, high_ms: int) -> Span:
        known = self._known.get(uri)
        if known is None:
            known = self._known[uri] = _footer(uri)
        for group in [group for group in known.due_ms if known.high[group] < low_ms]:
            del known.due_ms[group]
        begin = int(np.searchsorted(known.high, low_ms, side="left"))
        end = int(np.searchsorted(known.low, high_ms, side="left"))
        missing = [group for group in range(begin, end) if group not in known.due_ms]
        if missing:
            known.due_ms.update(zip(missing, _instants(uri, missing), strict=True))
        due = np.concatenate([np.empty(0, np.int64), *(known.due_ms[group] for group in range(begin, end))])
        first, last = np.searchsorted(due, [low_ms, high_ms], side="left")
        return Span(uri, int(known.starts[begin]) + int(first), due[first:last])


def _footer(uri: str) -> _File:
    files, path = storage_uris.arrow(uri)
    with files.open_input_file(path) as source:
        metadata = pq.ParquetFile(source).metadata
    column = metadata.schema.names.index("due_ms")
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    statistics = [group.column(column).statistics for group in groups]
    return _File(
        np.cumsum([0, *(group.num_rows for group in groups)]),
        np.array([each.min for each in statistics], np.int64),
        np.array([each.max for each in statistics], np.int64),
    )


def _instants(uri: str, groups: list[int]) -> Iterator[Int64Array]:
    files, path = storage_uris.arrow(uri)
    with files.open_input_file(path) as source:
        parquet = pq.ParquetFile(source)
        for group in groups:
            yield int64(parquet.read_row_group(group, columns=["due_ms"]).column(0).combine_chunks())


def read_rows(uri: str, first_row: int, rows: int, columns: Sequence[str]) -> pa.Table:
    """Read rows of a file, starting at `first_row`. Only the row groups with these rows are read. Raises OSError."""
    files, path = storage_uris.arrow(uri)
    with files.open_input_file(path) as source:
        parquet = pq.ParquetFile(source)
        counts = [parquet.metadata.row_group(i).num_rows for i in range(parquet.metadata.num_row_groups)]
        starts = np.cumsum([0, *counts])
        begin = int(np.searchsorted(starts, first_row, side="right")) - 1
        end = int(np.searchsorted(starts, first_row + rows, side="left"))
        table = parquet.read_row_groups(list(range(begin, end)), columns=list(columns))
    return table.slice(first_row - int(starts[begin]), rows)


# ---- what a task gets -------------------------------------------------------------------------------------


def count(spans: Sequence[Span]) -> int:
    """Count the rows of all spans."""
    return sum(len(span.due_ms) for span in spans)


def end_of(spans: Sequence[Span], rows: int, high_ms: int) -> int:
    """Find the latest end of the window, at most `high_ms`, before which at most `rows` rows are due.

    Rows that are due in the same millisecond stay together. So the window always contains all rows of its first
    millisecond, even if they are more than `rows`.
    """
    if count(spans) <= rows:
        return high_ms
    due = np.sort(np.concatenate([span.due_ms for span in spans]))
    return max(int(due[rows]), int(due[0]) + 1)


def tasks(spans: Sequence[Span], rows: int) -> list[list[Span]]:
    """Cut the spans into one piece per task, of about `rows` rows each, the earliest piece first.

    With this order messages are released in time although only a few tasks run at the same time.

    A single file is cut where row groups begin, because a task decodes whole row groups. Several files are cut at due
    times, so that a piece has rows of the same window from each file. If too many rows are due in one millisecond, they
    are cut by number of rows.
    """
    if not spans:
        return []
    if len(spans) == 1:
        return [[part] for part in _by_groups(spans[0], rows)]
    due = np.sort(np.concatenate([span.due_ms for span in spans]))
    cuts = np.unique(due[rows::rows])
    found: list[list[Span]] = []
    for low, high in zip([None, *cuts.tolist()], [*cuts.tolist(), None], strict=True):
        piece = _all_within(spans, low, high)
        if count(piece) > rows * ROWS_SLACK:
            # There is a cut after every `rows` rows, so only the first millisecond of a piece can have too many.
            crowd, piece = _all_within(piece, low, low + 1), _all_within(piece, low + 1, high)
            found += [[span.part(at, at + rows)] for span in crowd for at in range(0, len(span.due_ms), rows)]
        if piece:
            found.append(piece)
    return found


def _all_within(spans: Sequence[Span], low_ms: int | None, high_ms: int | None) -> list[Span]:
    return [part for span in spans if len((part := _within(span, low_ms, high_ms)).due_ms)]


def _by_groups(span: Span, rows: int) -> list[Span]:
    step = rows // ROW_GROUP_ROWS * ROW_GROUP_ROWS or rows
    cuts = [0, *range(step - span.first_row % step, len(span.due_ms), step), len(span.due_ms)]
    return [span.part(begin, end) for begin, end in itertools.pairwise(cuts)]


def _within(span: Span, low_ms: int | None, high_ms: int | None) -> Span:
    begin = 0 if low_ms is None else int(np.searchsorted(span.due_ms, low_ms))
    end = len(span.due_ms) if high_ms is None else int(np.searchsorted(span.due_ms, high_ms))
    return span.part(begin, end)


def pointers(spans: Sequence[Span]) -> pa.RecordBatch:
    """Encode spans as the batch that a task receives: POINTER_SCHEMA, one row per span."""
    columns = [[s.uri for s in spans], [s.first_row for s in spans], [len(s.due_ms) for s in spans]]
    return pa.RecordBatch.from_arrays(
        [pa.array(values, field.type) for values, field in zip(columns, POINTER_SCHEMA, strict=True)],
        schema=POINTER_SCHEMA,
    )
