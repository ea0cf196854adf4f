"""Find the scheduled message that a receipt names: in the log, in a data file, or moved within the log.

It is nearly always in the log, because receipts are young. With an invisible time of hours, retention may have removed
its segment. By then compaction has written the message to the pending table, or the schedule has written its row again
(MOVED). If the end of the lease was changed, the scheduled message has a new version (schedule/outcomes.py), and the
look-up uses this version. A scheduled message that is found nowhere was settled long ago, and its receipt is not valid.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor

import numpy as np
import pyarrow as pa

from timeball.broker.consuming.redelivery_rows import times_of
from timeball.io.threads import in_thread
from timeball.log.reader import LogReader
from timeball.model.message import Int64Array, Kind
from timeball.schedule import hour_log
from timeball.schedule.hour_log import HourLog
from timeball.schedule.locations import KINDS, as_scheduled, moved_versions
from timeball.table.data_file import DataFile
from timeball.table.file_cache import FileCache

_SCAN_ROWS = 65_536


def scheduled_rows(
    reader: LogReader, files: Sequence[DataFile], due_ms: Int64Array, version: Int64Array
) -> tuple[pa.RecordBatch, Int64Array]:
    """Read the scheduled messages of these versions (READ_SCHEMA). Also list the indexes of those that exist.

    Runs in the reader thread.
    """
    # One read for all versions that the log still has. The others are rare, and are read one by one.
    in_log = np.flatnonzero((version >= reader.first_seq) & (version < reader.next_seq))
    rows = reader.read_rows(version[in_log])
    # A row of another kind is no scheduled message, and counts as not found.
    is_scheduled_row = np.isin(rows.column("kind").to_numpy(), list(KINDS))
    scheduled = rows if is_scheduled_row.all() else rows.filter(pa.array(is_scheduled_row))
    pieces = [(as_scheduled(scheduled), in_log[is_scheduled_row])]
    for index in np.flatnonzero(version < reader.first_seq).tolist():
        # Its row has left the log: it was compacted into a file, or written again by a wheel or a cascade.
        row = _read_from_table(files, int(due_ms[index]), int(version[index])) or _find_moved_row(
            reader, int(version[index])
        )
        if row is not None:
            pieces.append((row, np.array([index], dtype=np.int64)))
    if len(pieces) == 1:
        return pieces[0]
    return pa.concat_batches([piece for piece, _ in pieces]), np.concatenate([index for _, index in pieces])


async def local_files(
    due_ms: Int64Array,
    version: Int64Array,
    *,
    reader: LogReader,
    hour_log: HourLog,
    cache: FileCache | None,
    lookup_thread: Executor,
) -> list[DataFile]:
    """List all files of the table. With an object store, first download those that may contain these versions."""
    files = hour_log.pending.all()
    if cache is None:
        return files
    not_in_log = np.flatnonzero(version < reader.first_seq).tolist()
    paths = {
        file.entry.path
        for index in not_in_log
        for file in _files_containing(files, int(due_ms[index]), int(version[index]))
    }
    # Now, because the reader thread must not wait for an object store.
    if paths:
        await in_thread(lookup_thread, cache.fetch_all, paths)
    return files


def times_before(reader: LogReader, rows: pa.RecordBatch) -> Int64Array:
    """Count the attempts of each message before its lease, from the scheduled message of the lease (reader thread).

    The first row's count includes the lease. The count of a MOVED row may not include it, so the first row is read if
    the log still has it. If retention has removed it, the MOVED row is assumed to include the lease.
    """
    times = times_of(rows)
    was_moved = rows.column("kind").to_numpy() == Kind.MOVED
    if was_moved.any():
        first_seqs = rows.column("source_seq").fill_null(0).to_numpy()
        in_log = np.flatnonzero(was_moved & (first_seqs >= reader.first_seq))
        times[in_log] = times_of(reader.read_rows(first_seqs[in_log]))
    # Minus the lease itself.
    return np.maximum(times - 1, 0)


def _read_from_table(files: Sequence[DataFile], due_ms: int, version: int) -> pa.RecordBatch | None:
    """Read the message from the file that contains it. Files are sorted by due time, so one row group is read."""
    # A half-open range of positions with exactly one version.
    return hour_log.load(_files_containing(files, due_ms, version), (due_ms, version), (due_ms, version + 1))


def _files_containing(files: Sequence[DataFile], due_ms: int, version: int) -> list[DataFile]:
    return [
        file
        for file in files
        if file.entry.min_seq <= version <= file.entry.max_seq
        and file.entry.min_due_ms <= due_ms <= file.entry.max_due_ms
    ]


def _find_moved_row(reader: LogReader, version: int) -> pa.RecordBatch | None:
    """Find the last MOVED row of this version. No index has it and the case is rare, so the whole log is read."""
    last = None
    for rows in reader.coalesced(reader.first_seq, reader.next_seq, [Kind.MOVED], _SCAN_ROWS):
        matches = np.flatnonzero(moved_versions(rows) == version)
        if len(matches):
            # The log is in order, so the last row is the newest.
            last = rows.slice(int(matches[-1]), 1)
    return None if last is None else as_scheduled(last)
