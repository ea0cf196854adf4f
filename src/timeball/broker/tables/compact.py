"""Writes of the pending table by the broker (without Spark): compaction of the log, and rewrites of files.

A compaction moves scheduled messages from the log to files of the table. One run reads the scheduled messages of
[from_seq, to_seq) from the log, leaves out settled ones, sorts them, and writes files by buckets of due times.

A rewrite merges or splits files, so that reads of the schedule open few and small files. A resume of a campaign writes
its files again with new due times.

All of them run in a separate thread, and have at most the rows of one run in memory. The attach that follows is the
same as for files of any other writer.
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
from timeball.model import limits
from timeball.model.errors import OverLimit
from timeball.model.message import TABLE_SCHEMA, Int64Array, Kind
from timeball.schedule.durations import is_in
from timeball.schedule.locations import KINDS, as_scheduled, versions_in
from timeball.schedule.outcomes import Holds, Settled
from timeball.table import layout, live_files
from timeball.table.attachment import Attachment, FileEntry, Ranges, within
from timeball.table.data_file import DataFile, DataFiles
from timeball.table.file_keys import FileKeys, run_path
from timeball.table.key_index import write_pieces
from timeball.table.merging import RawBytes

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
# Small frames are joined up to this number of rows. Larger frames stay views of the mapped log, because joining copies
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
    """Write the scheduled messages in the rows [from_seq, to_seq) to files. The caller attaches them.

    Messages due before `settled_before_ms`, and messages with a version in `settled`, are left out. Most messages in
    `settled` are leases that were acknowledged. Raises OverLimit if the disk is full. Runs in the background thread.
    """

    def unload() -> None:
        """Unload the mapped segments of these rows. Otherwise their pages would count as the broker's memory."""
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
    size_bytes: int | None = None,
) -> list[FileEntry]:
    """Sort rows of TABLE_SCHEMA and write them to files, cut by layout.py. Returns the entries of the files.

    The attach makes the files durable and part of the table. A run of their keys is written too (table/key_index.py).

    `created` gets the entries of all files, also after a failure, so that the caller can remove the files. `unload` is
    called after some rows have been copied, because they may be views of a mapped file. `size_bytes` is an estimate of
    the size of all files, by default that of the rows in memory. If the disk is full, all files written here are
    removed, and OverLimit is raised.
    """
    written: list[FileEntry] = []
    try:
        _write_files(files, rows, now_ms, written, unload, size_bytes)
    except OverLimit:
        remove(files, written)
        raise
    finally:
        if created is not None:
            created += written
    return written


def remove(files: Files, entries: list[FileEntry]) -> None:
    """Remove files that were written for an attach that did not take place (background thread)."""
    for entry in entries:
        # The last file of the list may not have been created.
        if files.exists(f"{layout.FOLDER}/{entry.path}"):
            live_files.remove(files, entry.path)


def _write_files(
    files: Files,
    rows: pa.Table,
    now_ms: int,
    created: list[FileEntry],
    unload: Callable[[], None],
    size_bytes: int | None,
) -> None:
    """Write the files of `write_files`. The entry of each file is added to `created` before the file is created."""
    if rows.num_rows == 0:
        return
    keys = FileKeys()
    # Sorted, so that a release reads consecutive rows of one file (table/data_file.py).
    for entry, data in layout.sorted_files(rows, now_ms, keys, unload, size_bytes):
        name = f"{layout.FOLDER}/{entry.path}"
        files.make_dir(name.rpartition("/")[0])
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
    """Write a run of the keys of the files so far, if there are any."""
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
    """Read the scheduled messages in the rows [from_seq, to_seq) that may be pending, as rows of TABLE_SCHEMA.

    `unload` is called now and then, because the rows read may be views of a mapped file.
    """
    settled = np.sort(settled)  # once, for the searches of all parts
    batches, rows_since_unload = [], 0
    for log_rows in reader.coalesced(from_seq, to_seq, KINDS, COALESCE_ROWS):
        rows = as_scheduled(versions_in(log_rows))
        # Messages that were cancelled after `settled` was read are included. The CANCEL rows in the log settle them.
        may_be_pending = rows.column("due_ms").to_numpy() >= settled_before_ms
        may_be_pending &= ~is_in(settled, rows.column("seq").to_numpy())
        if may_be_pending.any():
            rows = rows if may_be_pending.all() else rows.filter(pa.array(may_be_pending))
            batches.append(as_table_rows(rows))
        rows_since_unload += log_rows.num_rows
        # Not after each frame, because unloading is a system call for each segment.
        if rows_since_unload >= UNLOAD_ROWS:
            unload()
            rows_since_unload = 0
    # With the schema, because there may be no batch.
    return pa.Table.from_batches(batches, TABLE_SCHEMA)


def as_table_rows(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Convert scheduled messages (READ_SCHEMA, as `as_scheduled` returns them) to rows of TABLE_SCHEMA."""
    # A MOVED row contains the message's number in `source_seq`. For other rows, whose `seq` is the number, it is null.
    is_moved = rows.column("kind").to_numpy() == Kind.MOVED
    number = pc.if_else(pa.array(is_moved), rows.column("source_seq"), pa.scalar(None, pa.int64()))
    replaced_columns = {"accepted_ms": rows.column("store_ms"), "number": number}
    columns = [
        replaced_columns[name] if name in replaced_columns else rows.column(name)
        for name in TABLE_SCHEMA.names
    ]
    return pa.RecordBatch.from_arrays(columns, schema=TABLE_SCHEMA)


# ---- rewrite: merge and split files, postpone the rows of a campaign -----------------------------------------
# A rewrite reads some files (table/merging.py chooses them) and writes new ones without settled messages. A message
# that is cancelled meanwhile stays cancelled, although it is in a new file, because its pair is settled. The schedule
# does not load rows again that it has already loaded.

REWRITE_JOB_ID = "broker-rewrite"
# Bounds of a run, the files of a campaign that are read together for a resume: their rows, their bytes on disk, and
# their bytes without compression.
REWRITE_ROWS_MAX, REWRITE_BYTES_MAX, REWRITE_RAW_BYTES_MAX = 500_000, 64 * 1024 * 1024, 256 * 1024 * 1024


def rewrite(
    files: Files,
    data: DataFiles,
    entries: list[FileEntry],
    settled_seq: Int64Array,
    *,
    settled_before_ms: int,
    holds: Holds,
    now_ms: int,
    epoch: int,
) -> Attachment:
    """Write the pending rows of these files to new files. The caller attaches the result (background thread).

    `data` reads the table's files, `files` creates new ones. `settled_seq` contains the versions of settled messages.
    `epoch` is the attachment's. Raises OverLimit if the disk is full.
    """
    rows = pa.concat_tables([_read_pending_rows(data, entry, settled_before_ms, holds) for entry in entries])
    rows = _without_settled(rows, np.sort(settled_seq))
    # Estimated by bytes on disk, as for the choice of the files. Otherwise the new files might be chosen again.
    stored_rows, stored_bytes = (
        sum(entry.rows for entry in entries),
        sum(entry.size_bytes for entry in entries),
    )
    size_bytes = stored_bytes * rows.num_rows // stored_rows
    return Attachment(
        job="rewrite",
        job_id=REWRITE_JOB_ID,
        epoch=epoch,
        files=write_files(files, rows, now_ms, size_bytes=size_bytes),
        removes=[entry.path for entry in entries],
    )


def runs(entries: list[FileEntry], raw_bytes: RawBytes) -> list[list[FileEntry]]:
    """Group the files of a campaign, sorted by first due time, into runs within REWRITE_ROWS_MAX and the byte limits.

    A run has at least one file, of any size. Its rows are sorted together and cut into files, so the number of files
    may change. `raw_bytes` finds the size of a file without compression. Runs in the background thread.
    """
    grouped: list[list[FileEntry]] = []
    bounds = np.array([REWRITE_ROWS_MAX, REWRITE_BYTES_MAX, REWRITE_RAW_BYTES_MAX])
    total = np.zeros(len(bounds), np.int64)
    for entry in sorted(entries, key=lambda entry: entry.min_due_ms):
        sizes = np.array([entry.rows, entry.size_bytes, raw_bytes(entry)])
        total += sizes
        if not grouped or (total > bounds).any():
            grouped.append([])  # a new run, which begins with this file
            total = sizes
        grouped[-1].append(entry)
    return grouped


def check_resume(runs: list[list[FileEntry]], *, earliest_due_ms: int, shift_ms: int, now_ms: int) -> None:
    """Raise OverLimit if a resume of these runs might write more files than one attach may name.

    Rows due before `earliest_due_ms` are not written again.
    """
    new_files = 0
    for run in runs:
        # `resume` writes the rows of the campaign, which are shifted, and the others to separate files. Each file is
        # within one bucket of due times.
        spans = [(max(earliest_due_ms, entry.min_due_ms), entry.max_due_ms) for entry in run]
        shifted_spans = [
            (max(now_ms, first_ms + shift_ms), max(now_ms, last_ms + shift_ms)) for first_ms, last_ms in spans
        ]
        rows = sum(entry.rows for entry in run)
        new_files += min(rows, _bucket_count(spans, now_ms)) + min(rows, _bucket_count(shifted_spans, now_ms))
    removed_files = sum(len(run) for run in runs)
    # Each number has its own bound, because the TABLE row contains only the paths of removed files.
    if max(new_files, removed_files) > limits.ATTACH_FILES_MAX:
        raise OverLimit(
            f"a resume would write up to {new_files} files in place of {removed_files}; "
            f"at most {limits.ATTACH_FILES_MAX}"
        )


def _bucket_count(spans: list[tuple[int, int]], now_ms: int) -> int:
    """Estimate the maximum number of buckets of layout.py for due times in these spans (first, last).

    No bucket is shorter than an hour.
    """
    hourly_times = [
        np.append(np.arange(first_ms, last_ms, limits.HOUR_MS), last_ms)
        for first_ms, last_ms in spans
        if first_ms <= last_ms
    ]
    if not hourly_times:
        return 0
    # Two more, because the borders between hour, day and month buckets may divide an hour and a day.
    return len(np.unique(layout.bucket_starts(np.concatenate(hourly_times), now_ms))) + 2


def settled_in(settled: Settled, entries: list[FileEntry]) -> Int64Array:
    """List the versions of the settled messages that these files may contain, sorted (background thread)."""
    low = min((entry.min_seq for entry in entries), default=0)
    high = max((entry.max_seq for entry in entries), default=-1)
    parts = [seq[(seq >= low) & (seq <= high)] for _, seq in settled.runs]
    return np.sort(np.concatenate([_NONE, *parts]))


def settled_since(known_seq: Int64Array, settled: Settled, ranges: Ranges) -> tuple[Int64Array, Int64Array]:
    """Find the settled messages in a campaign's ranges whose versions are not in `known_seq` (background thread).

    Returns all these versions together with `known_seq`, and the new ones alone. All three are sorted.
    """
    parts = [seq[within(seq, ranges)] for _, seq in settled.runs]
    new_seq = np.concatenate([_NONE, *parts])
    new_seq = np.sort(new_seq[~is_in(known_seq, new_seq)])
    return np.insert(known_seq, np.searchsorted(known_seq, new_seq), new_seq), new_seq


def resume(
    files: Files,
    data: DataFiles,
    run: list[FileEntry],
    settled_seq: Int64Array,
    *,
    ranges: Ranges,
    settled_before_ms: int,
    holds: Holds,
    shift_ms: int,
    now_ms: int,
    created: list[FileEntry],
) -> list[FileEntry]:
    """Write the pending rows of these files to new files. Rows in a campaign's ranges are postponed by `shift_ms`.

    The postponed rows go into separate files, with due times not before now. The caller attaches the files, or removes
    the files in `created`, also after an error. `settled_seq` contains the versions of settled messages, sorted. Raises
    OverLimit if the disk is full. Runs in the background thread.
    """
    rows = pa.concat_tables([_read_pending_rows(data, entry, settled_before_ms, holds) for entry in run])
    rows = _without_settled(rows, settled_seq)
    in_campaign = within(rows.column("seq").to_numpy(), ranges)
    campaign_rows = rows.filter(pa.array(in_campaign))
    due_ms = np.maximum(campaign_rows.column("due_ms").to_numpy() + shift_ms, now_ms)
    due_index = TABLE_SCHEMA.get_field_index("due_ms")
    campaign_rows = campaign_rows.set_column(due_index, TABLE_SCHEMA.field(due_index), pa.array(due_ms))
    return [
        *write_files(files, rows.filter(pa.array(~in_campaign)), now_ms, created),
        *write_files(files, campaign_rows, now_ms, created),
    ]


def _read_pending_rows(data: DataFiles, entry: FileEntry, settled_before_ms: int, holds: Holds) -> pa.Table:
    """Read the rows of a file that are held, or due at `settled_before_ms` or later."""
    # Opened separately: the schedule's files belong to the reader thread, and Arrow's reader is not thread-safe.
    from_ms = min(settled_before_ms, holds.from_ms)
    rows = DataFile(data, entry).rows_between((from_ms, 0), (1 << 62, 0))  # to the end of the file
    if from_ms == settled_before_ms:
        return rows
    due_ms, seq = (rows.column(name).to_numpy() for name in ("due_ms", "seq"))
    return rows.filter(pa.array((due_ms >= settled_before_ms) | holds.contains(due_ms, seq)))


def _without_settled(rows: pa.Table, settled_seq: Int64Array) -> pa.Table:
    """Remove the rows with a version in `settled_seq`, which is sorted."""
    return rows.filter(pa.array(~is_in(settled_seq, rows.column("seq").to_numpy())))
