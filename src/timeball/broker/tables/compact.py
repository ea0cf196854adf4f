"""Compaction by the broker (without Spark): move scheduled messages from the log to files of the pending table.

One run reads the scheduled messages of [from_seq, to_seq) from the log, leaves out settled ones, sorts them, and writes
one file for each bucket of due times. It runs in a separate thread, and has at most the rows of one run in memory. The
attach that follows is the same as for files of any other writer.
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
    """Statistics of compactions since the start, by compactor: "broker" or "pipeline" (Spark).

    `durations` and `failures` count only the broker's own compactions.
    """

    def __init__(self, clock: Clock) -> None:
        self.runs, self.rows, self.last_ms = Counter[str](), Counter[str](), dict[str, int]()
        self.durations, self.failures = Durations(clock), 0

    def attached(self, attachment: Attachment, now_ms: int) -> None:
        """Count an attach, if it completes a compaction."""
        if attachment.job == "compact":
            compactor = "broker" if attachment.job_id == JOB_ID else "pipeline"
            self.runs[compactor] += 1
            self.rows[compactor] += attachment.rows
            self.last_ms[compactor] = now_ms


_NONE: Int64Array = np.empty(0, np.int64)
# Frames are joined up to this number of rows. Larger frames stay views of the mapped log, because joining copies
# bodies.
COALESCE_ROWS = 8_192
UNLOAD_ROWS = 131_072  # rows read between two calls of `unload`; about 50 MB
# Sequence numbers in one run. If all frames are small, their rows are copied to memory: about 200 MB.
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

    Messages due before `settled_before_ms`, and messages with a number in `settled`, are left out. Most messages in
    `settled` are leases that were acknowledged.
    """

    def unload() -> None:
        # Otherwise pages that were read from the mapped log would count as the broker's memory.
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
    created: list[FileEntry] | None = None,
    unload: Callable[[], None] = lambda: None,
) -> list[FileEntry]:
    """Sort rows of TABLE_SCHEMA and write one file for each bucket. Return the entries of the files.

    The attach makes the files durable and part of the table. A run of their keys is written too (table/key_index.py).

    `created` gets the entries of all files, also after a failure, so that the caller can remove the files.
    `unload` is called after some rows have been copied, because they may be views of a mapped file. If the disk is
    full, all files written here are removed, because the next attempt writes others. Then OverLimit is raised.
    """
    written: list[FileEntry] = []
    try:
        _write_files(files, rows, now_ms, written, unload)
    except OverLimit:
        remove(files, written)
        raise
    finally:
        if created is not None:
            created += written
    return written


def remove(files: Files, entries: list[FileEntry]) -> None:
    """Remove files that were written for an attach which did not take place (background thread)."""
    for entry in entries:
        # The last file of the list may not have been created.
        if files.exists(f"{layout.FOLDER}/{entry.path}"):
            live_files.remove(files, entry.path)


def _write_files(
    files: Files, rows: pa.Table, now_ms: int, created: list[FileEntry], unload: Callable[[], None]
) -> None:
    if rows.num_rows == 0:
        return
    keys = FileKeys()
    # Sorted, so that a release reads consecutive rows of one file (table/data_file.py).
    for entry, data in layout.sorted_files(rows, now_ms, keys, unload):
        name = f"{layout.FOLDER}/{entry.path}"
        files.make_dir(name.rpartition("/")[0])
        # Before the creation, so that a file that is only partly written is removed too.
        created.append(entry)
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
    """Read the scheduled messages of a range of the log that may be pending, as rows of TABLE_SCHEMA."""
    batches, rows_since_unload = [], 0
    for log_rows in reader.coalesced(from_seq, to_seq, KINDS, COALESCE_ROWS):
        rows = as_scheduled(versions_in(log_rows))
        # All messages due before the mark are settled. Cancelled messages that are due later may be included: the
        # CANCEL rows in the log still settle them.
        may_be_pending = rows.column("due_ms").to_numpy() >= settled_before_ms
        may_be_pending &= ~np.isin(rows.column("seq").to_numpy(), settled)
        if may_be_pending.any():
            batches.append(
                as_table_rows(rows.filter(pa.array(may_be_pending)) if not np.all(may_be_pending) else rows)
            )
        rows_since_unload += log_rows.num_rows
        # Not after each frame, because unloading is a system call for each segment.
        if rows_since_unload >= UNLOAD_ROWS:
            unload()
            rows_since_unload = 0
    # With the schema, because there may be no batch.
    return pa.Table.from_batches(batches, TABLE_SCHEMA)


def as_table_rows(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Convert READ_SCHEMA scheduled messages to rows of the pending table."""
    # A MOVED row contains the message's number in `source_seq`. The seq of any other row is the number (null here).
    is_moved = rows.column("kind").to_numpy() == Kind.MOVED
    number = pc.if_else(pa.array(is_moved), rows.column("source_seq"), pa.scalar(None, pa.int64()))
    replaced_columns = {"accepted_ms": rows.column("store_ms"), "number": number}
    columns = [
        replaced_columns[name] if name in replaced_columns else rows.column(name)
        for name in TABLE_SCHEMA.names
    ]
    return pa.RecordBatch.from_arrays(columns, schema=TABLE_SCHEMA)
