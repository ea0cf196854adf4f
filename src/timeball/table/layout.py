"""The layout of the pending table: buckets, the order of rows, data files, and the seal of a file.

A file contains rows of one bucket, sorted by (due_ms, seq). Buckets are hours for the near future, days for the next
two months and months after that. One file per hour and run would be too many: two years have 17,520 hours, but only 48
hours + 60 days + 24 months = 132 buckets. Consecutive buckets of a month share a file if it stays small (FILE_ROWS,
FILE_BYTES). Its bucket is then the day or the month that contains all of them.

    due in         bucket            example
    < 48 h         an hour, UTC      2026-11-21T13
    < 60 days      a day, UTC        2026-12-24
    later          a month           2028-02

Readers never rely on the bucket: every file has a range of due times and is sorted, so a coarse bucket that has become
near is still read by binary search. Only a large file is split into hours (merging.py).

Parquet has checksums for pages but none for the footer, which says where everything is. One flipped bit in the footer
could hide row groups with scheduled messages. A reader of a damaged footer may also abort the process instead of
raising an error. So each file has a *seal*, a checksum of its footer, which is checked before the footer is parsed.
Parquet readers find the footer from the end of the file and never read between the last page and the footer. The seal
is in this gap, after the identities of the rows (identities.py):

        +------- … -------+----- … -----+-----------+----------+-------- … --------+--------+--------+
        | "PAR1", pages   | identities  | "TBSEAL1" | crc32c   | footer (thrift)   | length | "PAR1" |
        +------- … -------+----- … -----+-----------+----------+-------- … --------+--------+--------+
                                          8 bytes     8 bytes    length bytes        4        4
                                                                 `------------ covered by crc32c ----'

The functions are pure and work on column batches. The caller writes the resulting bytes to a folder or an object store.
"""

from __future__ import annotations

import io
import struct
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import google_crc32c
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from timeball.model import limits
from timeball.model.errors import Corrupt
from timeball.model.message import TABLE_SCHEMA, Int64Array, int64
from timeball.table import identities
from timeball.table.attachment import FileEntry
from timeball.table.file_keys import KEYS, FileKeys

HOURS_AHEAD_MS = 48 * limits.HOUR_MS
DAYS_AHEAD_MS = 60 * limits.DAY_MS
# Rows per row group. A read of a few rows parses the footer (15 us per row group) and decodes one group (0.5 ms for
# 2,048 rows, 1.3 ms for 8,192). So large files have large groups. Spark tasks that share a file begin their slices at
# multiples of ROW_GROUP_ROWS.
ROW_GROUP_ROWS, SMALL_GROUP_ROWS = 8_192, 2_048
SMALL_FILE_ROWS = 65_536
# Consecutive buckets with few rows share a file of up to this size. A file of FILE_ROWS has small row groups, so a read
# of a few of its rows costs the same as in a smaller file. FILE_BYTES bounds the memory of a writer, and the download
# of a file in an object store of which few rows are due soon.
FILE_ROWS, FILE_BYTES = SMALL_FILE_ROWS, 32 * 1024 * 1024
PART_ROWS = 32_768  # rows copied and encoded at a time: some megabytes, in memory four times
DAY_NAME_LENGTH, MONTH_NAME_LENGTH = len("2026-12-24"), len("2026-12")
PARTITION_COLUMN = "bucket"
FOLDER = "pending"  # relative to the data folder
KEYS_FOLDER = f"{FOLDER}/{KEYS}"


def sort_rows(rows: pa.Table | pa.RecordBatch) -> pa.Table:
    """Sort rows of TABLE_SCHEMA by (due_ms, seq)."""
    table = pa.Table.from_batches([rows]) if isinstance(rows, pa.RecordBatch) else rows
    table = table.combine_chunks()
    due, seq = _values(table, "due_ms"), _values(table, "seq")
    return table.take(pa.array(np.lexsort((seq, due))))


def bucket_starts(due_ms: Int64Array, now_ms: int) -> Int64Array:
    """Compute the start (ms) of each row's bucket. `now_ms` decides whether the bucket is an hour, a day or a month."""
    hours = due_ms - due_ms % limits.HOUR_MS
    days = due_ms - due_ms % limits.DAY_MS
    months = due_ms.astype("datetime64[ms]").astype("datetime64[M]").astype("datetime64[ms]").astype(np.int64)
    far = np.where(due_ms < now_ms + DAYS_AHEAD_MS, days, months)
    return np.asarray(np.where(due_ms < now_ms + HOURS_AHEAD_MS, hours, far), dtype=np.int64)


def bucket_names(due_ms: Int64Array, now_ms: int) -> list[str]:
    """Format the name of each due time's bucket. Slow for many due times, because it formats them one by one."""
    starts = bucket_starts(due_ms, now_ms).astype("datetime64[ms]")
    units = np.where(
        due_ms < now_ms + HOURS_AHEAD_MS, "h", np.where(due_ms < now_ms + DAYS_AHEAD_MS, "D", "M")
    )
    return [str(np.datetime_as_string(start, unit=unit)) for start, unit in zip(starts, units, strict=True)]


class _FileCut(NamedTuple):
    """The rows begin <= i < end of a sorted column, which become one file with this bucket."""

    bucket: str
    begin: int
    end: int


def sorted_files(
    rows: pa.Table,
    now_ms: int,
    keys: FileKeys | None = None,
    on_copied: Callable[[], None] = lambda: None,
    size_bytes: int | None = None,
) -> Iterator[tuple[FileEntry, bytes]]:
    """Sort rows and yield the files that `cut_files` would yield, with about PART_ROWS rows and one file in memory.

    `rows` may be in any order. `keys`: see `cut_files`. `on_copied` is called each time PART_ROWS rows have been copied
    to memory. `size_bytes`: see `_file_cuts`.
    """
    due, seq = (rows.column(name).to_numpy() for name in ("due_ms", "seq"))
    order = np.lexsort((seq, due))
    for bucket, begin, end in _file_cuts(due[order], now_ms, size_bytes or rows.nbytes):
        described_columns: list[pa.Table] = []
        data = _encode_chunks(
            _copied_parts(rows, order[begin:end], described_columns, on_copied), end - begin
        )
        yield _describe_with_keys(bucket, pa.concat_tables(described_columns), data, keys), data


def _copied_parts(
    rows: pa.Table, positions: Int64Array, described_columns: list[pa.Table], on_copied: Callable[[], None]
) -> Iterator[pa.Table]:
    """Copy the rows at these positions, and yield them in parts of PART_ROWS rows.

    Adds the columns of each part that the file's entry and its keys need to `described_columns`.
    """
    for begin in range(0, len(positions), PART_ROWS):
        part = _take_rows(rows, positions[begin : begin + PART_ROWS])
        on_copied()
        described_columns.append(part.select(["due_ms", "seq", "unique_key", "keys"]))
        yield part


def _take_rows(rows: pa.Table, positions: Int64Array) -> pa.Table:
    """Copy the rows at these distinct positions, in the order of `positions`."""
    # Batch by batch, because `take` of a table first copies the whole table into one chunk.
    ascending = np.sort(positions)
    batches = rows.to_batches()
    ends = np.cumsum([batch.num_rows for batch in batches])
    positions_by_batch = np.split(ascending, np.searchsorted(ascending, ends[:-1]))
    begins = ends - [batch.num_rows for batch in batches]
    taken = [
        batch.take(pa.array(batch_positions - begin))
        for batch, batch_positions, begin in zip(batches, positions_by_batch, begins, strict=True)
        if len(batch_positions)
    ]
    ascending_rows = pa.Table.from_batches(taken, rows.schema).combine_chunks()
    return ascending_rows.take(pa.array(np.searchsorted(ascending, positions)))


def split_by_file(rows: pa.Table, now_ms: int) -> Iterator[tuple[str, pa.Table]]:
    """Yield (bucket, rows) for each file of sorted `rows`, in order of due time. The rows are slices, not copies."""
    for bucket, begin, end in _file_cuts(_values(rows, "due_ms"), now_ms, rows.nbytes):
        yield bucket, rows.slice(begin, end - begin)


def _file_cuts(due: Int64Array, now_ms: int, size_bytes: int) -> list[_FileCut]:
    """Choose the files of a sorted column of due times (ms), in this order.

    A file has one bucket, or several consecutive buckets of a month with at most FILE_ROWS rows and about FILE_BYTES
    bytes together. `size_bytes`: an estimate for all rows, from their mean size.
    """
    if not len(due):
        return []
    rows_max = max(1, min(FILE_ROWS, FILE_BYTES * len(due) // max(1, size_bytes)))
    cuts = _bucket_cuts(due, now_ms)
    months = due[cuts].astype("datetime64[ms]").astype("datetime64[M]")
    names = bucket_names(due[cuts], now_ms)
    files: list[_FileCut] = []
    month = None
    for name, bucket_month, begin, end in zip(
        names, months, cuts.tolist(), [*cuts[1:].tolist(), len(due)], strict=True
    ):
        if files and bucket_month == month and end - files[-1].begin <= rows_max:
            # The bucket joins the previous file, whose bucket becomes the day or the month of all its rows.
            previous = files[-1]
            is_one_day = (
                len(name) >= DAY_NAME_LENGTH and name[:DAY_NAME_LENGTH] == previous.bucket[:DAY_NAME_LENGTH]
            )
            common = name[: DAY_NAME_LENGTH if is_one_day else MONTH_NAME_LENGTH]
            files[-1] = _FileCut(common, previous.begin, end)
        else:
            files.append(_FileCut(name, begin, end))
        month = bucket_month
    return files


def _bucket_cuts(due: Int64Array, now_ms: int) -> Int64Array:
    """Find the start index of each bucket in a sorted column of due times, which may be empty."""
    starts = bucket_starts(due, now_ms)
    # An hour and a day, or a day and a month, may have the same start. So the borders between them are cuts, too.
    borders = np.searchsorted(due, [now_ms + HOURS_AHEAD_MS, now_ms + DAYS_AHEAD_MS])
    changes = np.flatnonzero(np.diff(starts)) + 1
    first = np.zeros(min(1, len(due)), np.int64)
    return np.unique(np.concatenate((first, changes, borders[borders < len(due)])))


def group_rows(rows: int) -> int:
    """Choose the rows per row group for a file of `rows` rows."""
    # `min` is for tests, which set ROW_GROUP_ROWS to a few rows.
    return ROW_GROUP_ROWS if rows > SMALL_FILE_ROWS else min(SMALL_GROUP_ROWS, ROW_GROUP_ROWS)


def encode_file(rows: pa.Table) -> bytes:
    """Encode sorted rows as a sealed Parquet file: zstd level 1, statistics on searched columns, identities."""
    return _encode_chunks([rows], rows.num_rows)


def _encode_chunks(chunks: Iterable[pa.Table], rows: int) -> bytes:
    """Encode a file as `encode_file` does, from sorted chunks with `rows` rows in all."""
    sink, ids = io.BytesIO(), identities.Encoder()
    with pq.ParquetWriter(
        sink,
        TABLE_SCHEMA,
        compression="zstd",
        compression_level=1,
        use_dictionary=["topic", "tag", "born_host"],
        write_statistics=["due_ms", "seq", "topic"],
        write_page_checksum=True,  # a damaged page raises an error when it is read
    ) as writer:
        for chunk in chunks:
            writer.write_table(chunk.select(TABLE_SCHEMA.names), row_group_size=group_rows(rows))
            ids.add(chunk)
    return _seal_in_place(sink, ids.finish())


def describe(bucket: str, rows: pa.Table, size_bytes: int) -> FileEntry:
    """Build the entry for a new file with these sorted rows.

    The file's name is random, so a repeated task overwrites nothing.
    """
    due, seq = _values(rows, "due_ms"), _values(rows, "seq")
    return FileEntry(
        path=f"{PARTITION_COLUMN}={bucket}/{uuid.uuid4().hex}.parquet",
        bucket=bucket,
        rows=len(due),
        size_bytes=size_bytes,
        min_due_ms=int(due[0]),
        max_due_ms=int(due[-1]),
        min_seq=int(seq.min()),
        max_seq=int(seq.max()),
    )


def cut_files(rows: pa.Table, now_ms: int, keys: FileKeys | None = None) -> Iterator[tuple[FileEntry, bytes]]:
    """Yield the (entry, content) of each file for sorted `rows` of TABLE_SCHEMA, in order of due time.

    `keys` collects the keys of the files, for a key run that the caller writes after them.
    """
    for bucket, file_rows in split_by_file(rows, now_ms):
        data = encode_file(file_rows)
        yield _describe_with_keys(bucket, file_rows, data, keys), data


def _describe_with_keys(bucket: str, rows: pa.Table, data: bytes, keys: FileKeys | None) -> FileEntry:
    """Build the entry of a file with the content `data`, and add its keys to `keys`."""
    entry = describe(bucket, rows, len(data))
    if keys is not None:
        keys.add(entry.path, rows.column("unique_key"), rows.column("keys"))
    return entry


def _values(table: pa.Table, name: str) -> Int64Array:
    column = table.column(name)
    return int64(column.combine_chunks() if column.num_chunks != 1 else column.chunk(0))


# ---- the seal -------------------------------------------------------------------------------------------------


MAGIC = b"TBSEAL1\x00"
SEAL = struct.Struct("<8sQ")
TRAILER = struct.Struct("<I4s")
PARQUET_MAGIC = b"PAR1"


def seal(data: bytes) -> bytes:
    """Seal a finished Parquet file."""
    return _seal_in_place(io.BytesIO(data))


def _seal_in_place(file: io.BytesIO, before: bytes = b"") -> bytes:
    """Insert `before` and the seal between the pages and the footer of a Parquet file. Returns the sealed file."""
    # In place: a file may have hundreds of megabytes, so copies would be expensive.
    with file.getbuffer() as view:
        length, magic = TRAILER.unpack_from(view, len(view) - TRAILER.size)
        begin = len(view) - TRAILER.size - length
        assert magic == PARQUET_MAGIC and begin > 0, "only a whole Parquet file can be sealed"
        footer = bytes(view[begin:])
    file.seek(begin)
    file.write(before + SEAL.pack(MAGIC, google_crc32c.value(footer)) + footer)
    return file.getvalue()


def sealed_bytes(end: pa.Buffer) -> int:
    """Compute the total size of a file's seal, footer and Parquet trailer from the last bytes of the file.

    The result is meaningless for a file without a seal, and 0 if there are too few bytes.
    """
    if end.size < TRAILER.size:
        return 0
    length, _ = TRAILER.unpack_from(end, end.size - TRAILER.size)
    return int(SEAL.size + length + TRAILER.size)


def check_seal(data: pa.Buffer) -> None:
    """Raise Corrupt unless `data`, a file or its end, has a seal that matches its footer."""
    if data.size < SEAL.size + TRAILER.size:
        raise Corrupt("it is shorter than a footer")
    length, magic = TRAILER.unpack_from(data, data.size - TRAILER.size)
    begin = data.size - TRAILER.size - length
    if magic != PARQUET_MAGIC or begin < SEAL.size:
        raise Corrupt("it does not end as a Parquet file")
    seal_magic, stored_crc = SEAL.unpack_from(data, begin - SEAL.size)
    if seal_magic != MAGIC:
        raise Corrupt("its footer has no seal: files of the pending table are written by layout.cut_files")
    if google_crc32c.value(data.slice(begin)) != stored_crc:
        raise Corrupt("its footer does not match its checksum")
