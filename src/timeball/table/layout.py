"""The layout of the pending table: buckets, the order of rows, data files, and the seal of a file.

A file contains rows of one bucket, sorted by (due_ms, seq). Buckets are hours for the near future, days for the next
two months and months after that. One file per hour and run would be too many: two years have 17,520 hours, but only 48
hours + 60 days + 24 months = 132 buckets.

    due in         bucket            example
    < 48 h         an hour, UTC      2026-11-21T13
    < 60 days      a day, UTC        2026-12-24
    later          a month           2028-02

Readers never rely on the bucket: every file has a range of due times and is sorted, so a coarse bucket that has become
near is still read by binary search. Rewriting it into hours only keeps the number of open files small.

Parquet has checksums for pages but none for the footer, on which everything depends. One flipped bit in it could hide
row groups, hence scheduled messages, and a reader of a damaged footer may abort the process instead of raising. So each
file has a *seal*, and its footer is checked before it is parsed. Parquet readers find the footer from the end of the
file and never look between it and the last page. The seal is there, after the identities of the rows (identities.py):

        +------- … -------+----- … -----+-----------+----------+-------- … --------+--------+--------+
        | "PAR1", pages   | identities  | "TBSEAL1" | crc32c   | footer (thrift)   | length | "PAR1" |
        +------- … -------+----- … -----+-----------+----------+-------- … --------+--------+--------+
                                          8 bytes     8 bytes    length bytes        4        4
                                                                 `------------ covered by crc32c ----'

The functions are pure and work on column batches. The caller writes the bytes to a folder or an object store.
"""

from __future__ import annotations

import io
import itertools
import struct
import uuid
from collections.abc import Callable, Iterable, Iterator

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
# A read of a few rows opens the file, at some 15 us per row group, and decodes one group: 0.5 ms for 2,048 rows, 1.3 ms
# for 8,192. So larger files have larger groups. When tasks share a file, their slices begin at multiples of the larger
# size.
ROW_GROUP_ROWS, SMALL_GROUP_ROWS = 8_192, 2_048
SMALL_FILE_ROWS = 65_536
PART_ROWS = 32_768  # rows sorted and written at a time: some megabytes, held four times
PARTITION_COLUMN = "bucket"
FOLDER = "pending"  # below the data folder
KEYS_FOLDER = f"{FOLDER}/{KEYS}"


def sort_rows(rows: pa.Table | pa.RecordBatch) -> pa.Table:
    """Sort rows of TABLE_SCHEMA by (due_ms, seq)."""
    table = pa.Table.from_batches([rows]) if isinstance(rows, pa.RecordBatch) else rows
    table = table.combine_chunks()
    due, seq = _values(table, "due_ms"), _values(table, "seq")
    return table.take(pa.array(np.lexsort((seq, due))))


def bucket_starts(due_ms: Int64Array, now_ms: int) -> Int64Array:
    """Compute the start (ms) of each row's bucket, as seen at `now_ms`. `bucket_names` names it."""
    hours = due_ms - due_ms % limits.HOUR_MS
    days = due_ms - due_ms % limits.DAY_MS
    months = due_ms.astype("datetime64[ms]").astype("datetime64[M]").astype("datetime64[ms]").astype(np.int64)
    far = np.where(due_ms < now_ms + DAYS_AHEAD_MS, days, months)
    return np.asarray(np.where(due_ms < now_ms + HOURS_AHEAD_MS, hours, far), dtype=np.int64)


def bucket_names(due_ms: Int64Array, now_ms: int) -> list[str]:
    """Name the bucket of each of a few due times."""
    starts = bucket_starts(due_ms, now_ms).astype("datetime64[ms]")
    units = np.where(
        due_ms < now_ms + HOURS_AHEAD_MS, "h", np.where(due_ms < now_ms + DAYS_AHEAD_MS, "D", "M")
    )
    return [str(np.datetime_as_string(s, unit=u)) for s, u in zip(starts, units, strict=True)]


def sorted_files(
    rows: pa.Table, now_ms: int, keys: FileKeys | None = None, copied: Callable[[], None] = lambda: None
) -> Iterator[tuple[FileEntry, bytes]]:
    """Sort rows and yield their files as `cut_files` does, with some PART_ROWS rows and one file in memory at a time.

    `copied` is called each time a part of `rows` has been copied.
    """
    due, seq = (rows.column(name).to_numpy() for name in ("due_ms", "seq"))
    order = np.lexsort((seq, due))
    cuts = [*_bucket_cuts(due[order], now_ms).tolist(), len(order)]
    begin = 0
    for cut, following in itertools.pairwise([*cuts, len(order) + PART_ROWS + 1]):
        # Cut only between buckets, because each part of a bucket would be a file of its own.
        if following - begin <= PART_ROWS or cut == begin:
            continue
        positions = order[begin:cut]
        if len(positions) > PART_ROWS:  # a single bucket
            yield _large_file(rows, positions, now_ms, keys, copied)
        else:
            part = _rows_at(rows, positions)
            copied()
            yield from cut_files(part, now_ms, keys)
        begin = cut


def _large_file(
    rows: pa.Table, positions: Int64Array, now_ms: int, keys: FileKeys | None, copied: Callable[[], None]
) -> tuple[FileEntry, bytes]:
    """Build the entry and the content of the file of one bucket, encoding PART_ROWS rows at a time."""
    parts = (_rows_at(rows, positions[at : at + PART_ROWS]) for at in range(0, len(positions), PART_ROWS))
    places: list[pa.Table] = []

    def noted(part: pa.Table) -> pa.Table:
        copied()
        places.append(part.select(["due_ms", "seq", "unique_key", "keys"]))
        return part

    data = _encoded(map(noted, parts), len(positions))
    placed = pa.concat_tables(places)
    (bucket,) = bucket_names(_values(placed.slice(0, 1), "due_ms"), now_ms)
    return _described(bucket, placed, data, keys), data


def _rows_at(rows: pa.Table, positions: Int64Array) -> pa.Table:
    """Take the rows at these positions, which are distinct, in this order."""
    # Batch by batch, because `take` of a table first joins all its chunks.
    ascending = np.sort(positions)
    batches = rows.to_batches()
    ends = np.cumsum([batch.num_rows for batch in batches])
    parts = np.split(ascending, np.searchsorted(ascending, ends[:-1]))
    begins = ends - [batch.num_rows for batch in batches]
    found = [
        batch.take(pa.array(part - begin))
        for batch, part, begin in zip(batches, parts, begins, strict=True)
        if len(part)
    ]
    joined = pa.Table.from_batches(found, rows.schema).combine_chunks()
    return joined.take(pa.array(np.searchsorted(ascending, positions)))


def split_by_bucket(rows: pa.Table, now_ms: int) -> Iterator[tuple[str, pa.Table]]:
    """Yield slices of sorted `rows`, one per bucket, in order of due time.

    In rows sorted by due time, a bucket is one contiguous run: hours, days and months follow each other. A day that
    contains the 48 h border gives an hour run and then a day run.
    """
    due = _values(rows, "due_ms")
    cuts = _bucket_cuts(due, now_ms)
    names = bucket_names(due[cuts], now_ms)
    for name, begin, end in zip(names, cuts, [*cuts[1:], len(due)], strict=False):
        yield name, rows.slice(int(begin), int(end - begin))


def _bucket_cuts(due: Int64Array, now_ms: int) -> Int64Array:
    """Find the start index of each bucket in a sorted column, which may be empty."""
    starts = bucket_starts(due, now_ms)
    zone = np.searchsorted(due, [now_ms + HOURS_AHEAD_MS, now_ms + DAYS_AHEAD_MS])
    changed = np.flatnonzero(np.diff(starts)) + 1
    first = np.zeros(min(1, len(due)), np.int64)
    return np.unique(np.concatenate((first, changed, zone[zone < len(due)])))


def group_rows(rows: int) -> int:
    """Choose the rows per row group for a file of `rows` rows."""
    return ROW_GROUP_ROWS if rows > SMALL_FILE_ROWS else min(SMALL_GROUP_ROWS, ROW_GROUP_ROWS)


def encode_file(rows: pa.Table) -> bytes:
    """Encode sorted rows as a sealed Parquet file: zstd level 1, statistics on searched columns, identities."""
    return _encoded([rows], rows.num_rows)


def _encoded(parts: Iterable[pa.Table], rows: int) -> bytes:
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
        for part in parts:
            writer.write_table(part.select(TABLE_SCHEMA.names), row_group_size=group_rows(rows))
            ids.add(part)
    return _sealed(sink, ids.finish())


def describe(bucket: str, rows: pa.Table, size_bytes: int) -> FileEntry:
    """Build the entry for a new file with `rows`. Each call makes a new name, so a repeated task overwrites nothing."""
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
    """Yield entries and contents of the files for sorted `rows`, for compaction, bulk and rewrite jobs.

    `keys` collects the keys of the files, for a run that the caller writes after them.
    """
    for bucket, part in split_by_bucket(rows, now_ms):
        data = encode_file(part)
        yield _described(bucket, part, data, keys), data


def _described(bucket: str, rows: pa.Table, data: bytes, keys: FileKeys | None) -> FileEntry:
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
    return _sealed(io.BytesIO(data))


def _sealed(file: io.BytesIO, before: bytes = b"") -> bytes:
    """Seal a Parquet file. `before`: bytes to insert before the seal."""
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
    """Compute the length of a file's seal and footer from its last bytes. Meaningless for other files."""
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
        raise Corrupt("its end is not that of a Parquet file")
    ours, crc = SEAL.unpack_from(data, begin - SEAL.size)
    if ours != MAGIC:
        raise Corrupt("its footer has no seal: files of the pending table are written by layout.cut_files")
    if google_crc32c.value(data.slice(begin)) != crc:
        raise Corrupt("its footer does not match its checksum")
