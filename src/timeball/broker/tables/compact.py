"""Compaction without Spark: the broker moves its own tail, with the functions Spark's tasks use.

One run reads the promises of [from_seq, to_seq) from the log, leaves out those already settled, sorts them and
writes a file a bucket. It runs in a thread of its own and holds one run's rows at most; the attach that follows is the
one for files of any writer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from timeball.clock import Clock, Durations
from timeball.errors import OverLimit
from timeball.files import Files
from timeball.log.reader import LogReader
from timeball.message import TABLE_SCHEMA, Int64Array, Kind
from timeball.schedule.locations import KINDS, as_promises, versions_in
from timeball.table import layout, live_files
from timeball.table.attachment import Attachment, FileEntry
from timeball.table.file_keys import FileKeys, run_path
from timeball.table.key_index import write_pieces

JOB_ID = "broker"


class Figures:
    """Compactions since the start, by whom: "broker" or "pipeline". Durations and failures are the broker's own."""

    def __init__(self, clock: Clock) -> None:
        self.runs, self.rows, self.last_ms = Counter[str](), Counter[str](), dict[str, int]()
        self.durations, self.failures = Durations(clock), 0

    def attached(self, attachment: Attachment, now_ms: int) -> None:
        """Count an attach, if it ends a compaction."""
        if attachment.job == "compact":
            by = "broker" if attachment.job_id == JOB_ID else "pipeline"
            self.runs[by] += 1
            self.rows[by] += attachment.rows
            self.last_ms[by] = now_ms


_NONE: Int64Array = np.empty(0, np.int64)
# A frame with more rows is a batch as it is, a view of the mapped log: joining would copy every body.
COALESCE_ROWS = 8_192
UNLOAD_ROWS = 131_072  # some 50 MB
RUN_ROWS_MAX = 500_000  # sequence numbers in one run; those of small frames are all in memory, some 200 MB


def compact(
    files: Files,
    reader: LogReader,
    *,
    from_seq: int,
    to_seq: int,
    settled_before_ms: int,
    now_ms: int,
    settled: Int64Array = _NONE,
) -> Attachment:
    """Write the files for a range of the log; the caller attaches them (background thread).

    `settled`: numbers that are left out besides, as they need not wait any more. Most receipts are among them.
    """

    def unload() -> None:
        # Pages of the log that were read would count as the broker's memory until their segment goes.
        for segment in reader.segments.all:
            if segment.first_seq < to_seq and segment.next_seq > from_seq:
                files.unload(segment.buffer)

    rows = promises(reader, from_seq, to_seq, settled_before_ms, settled, unload)
    entries = write_files(files, rows, now_ms, unload=unload)
    unload()
    return Attachment(
        job="compact", job_id=JOB_ID, epoch=to_seq, files=entries, from_seq=from_seq, to_seq=to_seq
    )


def write_files(
    files: Files,
    rows: pa.Table,
    now_ms: int,
    begun: list[FileEntry] | None = None,
    unload: Callable[[], None] = lambda: None,
) -> list[FileEntry]:
    """Sort rows of TABLE_SCHEMA and write a file a bucket; an attach makes them durable and part of the table.

    A run of their keys is written besides (table/key_index.py).

    `begun` gets the entry of each file before it is there, for a caller who removes them after a failure. `unload` is
    called when some rows have been copied, which may be views of a mapped file. On a full disk it removes what it has
    written, since the next try writes others.
    """
    mine: list[FileEntry] = []
    try:
        _write_files(files, rows, now_ms, mine, unload)
    except OverLimit:
        remove(files, mine)
        raise
    finally:
        if begun is not None:
            begun += mine
    return mine


def remove(files: Files, entries: list[FileEntry]) -> None:
    """Remove files that were written for an attach which did not take place (background thread)."""
    for entry in entries:
        if files.exists(f"{layout.FOLDER}/{entry.path}"):
            live_files.remove(files, entry.path)


def _write_files(
    files: Files, rows: pa.Table, now_ms: int, begun: list[FileEntry], unload: Callable[[], None]
) -> None:
    if rows.num_rows == 0:
        return
    keys = FileKeys()
    # A file a bucket, sorted: a release then reads one run of rows (table/data_file.py).
    for entry, data in layout.sorted_files(rows, now_ms, keys, unload):
        name = f"{layout.FOLDER}/{entry.path}"
        files.make_dir(name.rpartition("/")[0])
        begun.append(entry)
        file = files.create(name)
        try:
            # Without a sync: the attach syncs each file before its row is written (catalog.sync_data).
            file.write_at(0, data)
        finally:
            file.close()
        if keys.is_full:
            _write_keys(files, keys)
            keys.clear()
    _write_keys(files, keys)


def _write_keys(files: Files, keys: FileKeys) -> None:
    if keys.has_files:
        name = f"{layout.FOLDER}/{run_path()}"
        write_pieces(files, name, [keys.run().data])


def promises(
    reader: LogReader,
    from_seq: int,
    to_seq: int,
    settled_before_ms: int,
    settled: Int64Array,
    unload: Callable[[], None],
) -> pa.Table:
    """Return TABLE_SCHEMA rows of the promises in a range of the log that may still wait."""
    parts, read_rows = [], 0
    for found in reader.coalesced(from_seq, to_seq, KINDS, COALESCE_ROWS):
        rows = as_promises(versions_in(found))
        # Promises due before that are settled. Cancelled ones of later instants may go along: the log settles them.
        waiting = rows.column("due_ms").to_numpy() >= settled_before_ms
        waiting &= ~np.isin(rows.column("seq").to_numpy(), settled)
        if waiting.any():
            parts.append(as_table_rows(rows.filter(pa.array(waiting)) if not np.all(waiting) else rows))
        read_rows += found.num_rows
        if read_rows >= UNLOAD_ROWS:
            unload()
            read_rows = 0
    # With the schema, as there may be no parts: a tail whose promises are all settled.
    return pa.Table.from_batches(parts, TABLE_SCHEMA)


def as_table_rows(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return READ_SCHEMA promises as rows of the pending table."""
    moved = rows.column("kind").to_numpy() == Kind.MOVED
    number = pc.if_else(pa.array(moved), rows.column("source_seq"), pa.scalar(None, pa.int64()))
    changed = {"accepted_ms": rows.column("store_ms"), "number": number}
    columns = [changed[name] if name in changed else rows.column(name) for name in TABLE_SCHEMA.names]
    return pa.RecordBatch.from_arrays(columns, schema=TABLE_SCHEMA)
