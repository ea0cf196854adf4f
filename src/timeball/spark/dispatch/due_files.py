"""Find the rows of the pending table that are due within a window, as positions in files.

Files are sorted by due time, so the rows due within a window form one contiguous span of each file. The driver reads
only the column `due_ms` (8 bytes per row) of the row groups that the windows have reached. It drops the column of a row
group when a window begins after the group. A task gets *pointers* (file, first row, number of rows) and reads the whole
rows itself.
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
ROWS_SLACK = 1.5  # a task may have this many times the requested rows before it is cut further


@dataclass(frozen=True)
class Span:
    """Consecutive rows of one file and their due times, in ascending order."""

    uri: str
    first_row: int
    due_ms: Int64Array

    def slice_rows(self, begin: int, end: int) -> Span:
        """Cut out the rows begin <= i < end of this span."""
        return Span(self.uri, self.first_row + begin, self.due_ms[begin:end])


@dataclass
class _FileColumns:
    """The row groups of one file, and the column `due_ms` of those that were read."""

    starts: Int64Array  # first row of each group, and at the end the number of rows of the file
    low: Int64Array  # earliest due time of each group, in ms
    high: Int64Array  # latest due time of each group, in ms
    due_ms: dict[int, Int64Array] = field(default_factory=dict)  # row group -> its column `due_ms`


class DueFiles:
    """Finds due rows in the data files of one version of the table. Used only on the driver's side of a stream."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self._version: int | None = None
        self._live: list[TableFile] = []
        self._columns: dict[str, _FileColumns] = {}

    def use_version(self, version: int) -> None:
        """Switch to a version of the table. Keeps the columns of files that this version still has."""
        if version != self._version:
            self._live, self._version = table_files(self.uri, version), version
            live = {self._uri_of(file) for file in self._live}
            self._columns = {uri: columns for uri, columns in self._columns.items() if uri in live}

    def between(self, low_ms: int, high_ms: int) -> list[Span]:
        """Find the rows due at low_ms <= due_ms < high_ms, one span per file.

        Drops the columns of earlier row groups.
        """
        spans = []
        for file in self._live:
            if file.may_hold((low_ms, high_ms)):
                span = self._span(self._uri_of(file), low_ms, high_ms)
                if len(span.due_ms):
                    spans.append(span)
            elif not file.may_hold((low_ms, None)):
                # All its rows are earlier, and later windows do not go back.
                self._columns.pop(self._uri_of(file), None)
        return spans

    def _uri_of(self, file: TableFile) -> str:
        return f"{self.uri.rstrip('/')}/{file.path}"

    def _span(self, uri: str, low_ms: int, high_ms: int) -> Span:
        """Find the rows of one file that are due within the window.

        Reads missing columns, and drops those of earlier row groups.
        """
        columns = self._columns.get(uri)
        if columns is None:
            columns = self._columns[uri] = _read_footer(uri)
        for group in [group for group in columns.due_ms if columns.high[group] < low_ms]:
            del columns.due_ms[group]
        begin = int(np.searchsorted(columns.high, low_ms, side="left"))
        end = int(np.searchsorted(columns.low, high_ms, side="left"))
        missing = [group for group in range(begin, end) if group not in columns.due_ms]
        if missing:
            columns.due_ms.update(zip(missing, _read_due_ms(uri, missing), strict=True))
        due = np.concatenate([np.empty(0, np.int64), *(columns.due_ms[group] for group in range(begin, end))])
        first, last = np.searchsorted(due, [low_ms, high_ms], side="left")
        return Span(uri, int(columns.starts[begin]) + int(first), due[first:last])


def _read_footer(uri: str) -> _FileColumns:
    """Read the row groups of a file and the bounds of their due times from its footer."""
    files, path = storage_uris.arrow(uri)
    with files.open_input_file(path) as source:
        metadata = pq.ParquetFile(source).metadata
    column = metadata.schema.names.index("due_ms")
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    statistics = [group.column(column).statistics for group in groups]
    return _FileColumns(
        np.cumsum([0, *(group.num_rows for group in groups)]),
        np.array([bounds.min for bounds in statistics], np.int64),
        np.array([bounds.max for bounds in statistics], np.int64),
    )


def _read_due_ms(uri: str, groups: list[int]) -> Iterator[Int64Array]:
    """Read the column `due_ms` of these row groups."""
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


# ---- dividing rows among tasks ----------------------------------------------------------------------------


def count_rows(spans: Sequence[Span]) -> int:
    """Count the rows of all spans."""
    return sum(len(span.due_ms) for span in spans)


def window_end(spans: Sequence[Span], rows: int, high_ms: int) -> int:
    """Find the latest end of the window, at most `high_ms`, before which at most `rows` rows are due.

    Rows that are due in the same millisecond stay together. So the window always contains all rows of its first
    millisecond, even if they are more than `rows`.
    """
    if count_rows(spans) <= rows:
        return high_ms
    due = np.sort(np.concatenate([span.due_ms for span in spans]))
    return max(int(due[rows]), int(due[0]) + 1)


def cut_into_tasks(spans: Sequence[Span], rows: int) -> list[list[Span]]:
    """Divide the spans among tasks of about `rows` rows each. Returns the spans of each task, the earliest first.

    In this order messages are released in time although only a few tasks run at the same time.

    A single file is cut where row groups begin, because a task decodes whole row groups. Several files are cut at due
    times, so that a task has the rows of the same window from each file. If too many rows are due in one millisecond,
    they are cut by number of rows.
    """
    if not spans:
        return []
    if len(spans) == 1:
        return [[part] for part in _cut_at_row_groups(spans[0], rows)]
    due = np.sort(np.concatenate([span.due_ms for span in spans]))
    cuts = np.unique(due[rows::rows])
    tasks: list[list[Span]] = []
    for low_ms, high_ms in zip([None, *cuts.tolist()], [*cuts.tolist(), None], strict=True):
        task = _spans_within(spans, low_ms, high_ms)
        if count_rows(task) > rows * ROWS_SLACK:
            # There is a cut after every `rows` rows, so only the first millisecond of a task can have too many.
            crowded, task = _spans_within(task, low_ms, low_ms + 1), _spans_within(task, low_ms + 1, high_ms)
            tasks += [
                [span.slice_rows(begin, begin + rows)]
                for span in crowded
                for begin in range(0, len(span.due_ms), rows)
            ]
        if task:
            tasks.append(task)
    return tasks


def _spans_within(spans: Sequence[Span], low_ms: int | None, high_ms: int | None) -> list[Span]:
    """Select the rows due at low_ms <= due_ms < high_ms. Leaves out empty spans."""
    return [rows_within for span in spans if len((rows_within := _span_within(span, low_ms, high_ms)).due_ms)]


def _cut_at_row_groups(span: Span, rows: int) -> list[Span]:
    """Cut a span into spans of at most `rows` rows, where row groups begin if they have no more rows than that."""
    step = rows // ROW_GROUP_ROWS * ROW_GROUP_ROWS or rows
    cuts = [0, *range(step - span.first_row % step, len(span.due_ms), step), len(span.due_ms)]
    return [span.slice_rows(begin, end) for begin, end in itertools.pairwise(cuts)]


def _span_within(span: Span, low_ms: int | None, high_ms: int | None) -> Span:
    begin = 0 if low_ms is None else int(np.searchsorted(span.due_ms, low_ms))
    end = len(span.due_ms) if high_ms is None else int(np.searchsorted(span.due_ms, high_ms))
    return span.slice_rows(begin, end)


def encode_pointers(spans: Sequence[Span]) -> pa.RecordBatch:
    """Encode the spans of a task as a batch in POINTER_SCHEMA, one row per span."""
    columns = [[s.uri for s in spans], [s.first_row for s in spans], [len(s.due_ms) for s in spans]]
    return pa.RecordBatch.from_arrays(
        [pa.array(values, field.type) for values, field in zip(columns, POINTER_SCHEMA, strict=True)],
        schema=POINTER_SCHEMA,
    )
