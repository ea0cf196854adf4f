"""Compaction without Spark: the broker writes messages of its log to the table, with the functions of Spark's tasks.

One run reads the scheduled messages of [from_seq, to_seq) from the log, leaves out settled ones, sorts them, and writes
one file for each bucket. It runs in a separate thread, and has at most the rows of one run in memory. The attach that
follows is the same as for files of any other writer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from timeball.io.clock import Clock, Durations
from timeball.io.files import Files
from timeball.log.reader import LogReader
from timeball.model.errors import OverLimit
from timeball.model.message import TABLE_SCHEMA, Int64Array, Kind
from timeball.schedule.locations import KINDS, as_scheduled, versions_in
from timeball.table import layout, live_files
from timeball.table.attachment import Attachment, FileEntry
from timeball.table.file_keys import FileKeys, run_path
from timeball.table.key_index import write_pieces

JOB_ID = "broker"


class Figures:
    """Statistics of compactions since the start, by "broker" or "pipeline". Durations and failures: the broker's."""

    def __init__(self, clock: Clock) -> None:
        self.runs, self.rows, self.last_ms = Counter[str](), Counter[str](), dict[str, int]()
        self.durations, self.failures = Durations(clock), 0

    def attached(self, attachment: Attachment, now_ms: int) -> None:
        """Count an attach, if it completes a compaction."""
        if attachment.job == "compact":
            by = "broker" if attachment.job_id == JOB_ID else "pipeline"
            self.runs[by] += 1
            self.rows[by] += attachment.rows
            self.last_ms[by] = now_ms


_NONE: Int64Array = np.empty(0, np.int64)
# A frame with more rows is a batch of its own, a view of the mapped log. Joining frames would copy each body.
COALESCE_ROWS = 8_192
UNLOAD_ROWS = 131_072  # about 50 MB
# Sequence numbers in one run. Rows of small frames are all copied to memory, about 200 MB.
RUN_ROWS_MAX = 500_000


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
    """Write the files for a range of the log. The caller attaches them (background thread).

    `settled`: additional numbers to leave out, because they are settled. Most scheduled messages of leases are among
    them.
    """

    def unload() -> None:
        # Otherwise the pages read from the log would count as the broker's memory as long as the log has them.
        for segment in reader.segments.all:
            if segment.first_seq < to_seq and segment.next_seq > from_seq:
                files.unload(segment.buffer)

    rows = scheduled_rows(reader, from_seq, to_seq, settled_before_ms, settled, unload)
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
    """Sort rows of TABLE_SCHEMA and write one file for each bucket. Return the entries of the files.

    The attach makes the files durable and part of the table. A run of their keys is written too (table/key_index.py).

    `begun` gets the entry of each file before the file is created, for a caller who removes the files after a failure.
    `unload` is called after some rows have been copied, because they may be views of a mapped file. If the disk is
    full, all files written here are removed, because the next attempt writes others. Then OverLimit is raised.
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
        # The creation of the last one may have failed.
        if files.exists(f"{layout.FOLDER}/{entry.path}"):
            live_files.remove(files, entry.path)


def _write_files(
    files: Files, rows: pa.Table, now_ms: int, begun: list[FileEntry], unload: Callable[[], None]
) -> None:
    if rows.num_rows == 0:
        return
    keys = FileKeys()
    # Sorted, so that a release reads consecutive rows of one file (table/data_file.py).
    for entry, data in layout.sorted_files(rows, now_ms, keys, unload):
        name = f"{layout.FOLDER}/{entry.path}"
        files.make_dir(name.rpartition("/")[0])
        # Before the creation, so that a file that is only partly written is removed too.
        begun.append(entry)
        file = files.create(name)
        try:
            # Without a sync: the attach syncs each file before its row is written (catalog.sync_data).
            file.write_at(0, data)
        finally:
            file.close()
        # In several runs, so that the keys in memory are bounded.
        if keys.is_full:
            _write_keys(files, keys)
            keys.clear()
    _write_keys(files, keys)


def _write_keys(files: Files, keys: FileKeys) -> None:
    if keys.has_files:
        name = f"{layout.FOLDER}/{run_path()}"
        write_pieces(files, name, [keys.run().data])


def scheduled_rows(
    reader: LogReader,
    from_seq: int,
    to_seq: int,
    settled_before_ms: int,
    settled: Int64Array,
    unload: Callable[[], None],
) -> pa.Table:
    """Return TABLE_SCHEMA rows of the scheduled messages in a range of the log that may be pending."""
    parts, read_rows = [], 0
    for found in reader.coalesced(from_seq, to_seq, KINDS, COALESCE_ROWS):
        rows = as_scheduled(versions_in(found))
        # All scheduled messages due earlier are settled. Cancelled ones that are due later may be included: the log
        # settles them.
        waiting = rows.column("due_ms").to_numpy() >= settled_before_ms
        waiting &= ~np.isin(rows.column("seq").to_numpy(), settled)
        if waiting.any():
            parts.append(as_table_rows(rows.filter(pa.array(waiting)) if not np.all(waiting) else rows))
        read_rows += found.num_rows
        # Not after each frame, because unloading is a system call for each segment.
        if read_rows >= UNLOAD_ROWS:
            unload()
            read_rows = 0
    # With the schema, because there are no parts if all scheduled messages of the range are settled.
    return pa.Table.from_batches(parts, TABLE_SCHEMA)


def as_table_rows(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Convert READ_SCHEMA scheduled messages to rows of the pending table."""
    # The row of a moved scheduled message names the scheduled message's number. An original row is its own number.
    moved = rows.column("kind").to_numpy() == Kind.MOVED
    number = pc.if_else(pa.array(moved), rows.column("source_seq"), pa.scalar(None, pa.int64()))
    changed = {"accepted_ms": rows.column("store_ms"), "number": number}
    columns = [changed[name] if name in changed else rows.column(name) for name in TABLE_SCHEMA.names]
    return pa.RecordBatch.from_arrays(columns, schema=TABLE_SCHEMA)
