"""Lookup of the message that a receipt names: in the log, in a file of the pending table, or moved within the log.

It is nearly always in the log, because receipts are young. With an invisible time of hours, retention may have removed
the segment that contains the scheduled message. By then compaction has written it to the pending table, or the schedule
has written it again (MOVED). A lease whose end was changed is the same scheduled message in another version
(schedule/moved.py), and the lookup is by this version. A scheduled message that is found nowhere was settled long ago,
and its receipt is not valid.
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
from timeball.schedule.hour_log import pending
from timeball.schedule.hour_log.backlog import HourLog
from timeball.schedule.locations import KINDS, as_scheduled, moved_versions
from timeball.table.data_file import DataFile
from timeball.table.file_cache import FileCache

_SCAN_ROWS = 65_536


def scheduled_rows(
    reader: LogReader, files: Sequence[DataFile], due_ms: Int64Array, version: Int64Array
) -> tuple[pa.RecordBatch, Int64Array]:
    """Read the READ_SCHEMA messages of these versions. Return those found, and their indexes (reader thread)."""
    # All versions that the log still has take one read. The others are rare and read one by one.
    in_log = np.flatnonzero((version >= reader.first_seq) & (version < reader.next_seq))
    rows = reader.read_rows(version[in_log])
    # A row of another kind is no scheduled message, and counts as not found.
    is_scheduled_row = np.isin(rows.column("kind").to_numpy(), list(KINDS))
    kept = rows if is_scheduled_row.all() else rows.filter(pa.array(is_scheduled_row))
    found = [(as_scheduled(kept), in_log[is_scheduled_row])]
    for at in np.flatnonzero(version < reader.first_seq).tolist():
        # Its row has left the log: it was compacted into a file, or written again by a wheel or a cascade.
        row = _in_table(files, int(due_ms[at]), int(version[at])) or _moved(reader, int(version[at]))
        if row is not None:
            found.append((row, np.array([at], dtype=np.int64)))
    if len(found) == 1:
        return found[0]
    return pa.concat_batches([part for part, _ in found]), np.concatenate([at for _, at in found])


async def local_files(
    due_ms: Int64Array,
    version: Int64Array,
    *,
    reader: LogReader,
    hour_log: HourLog,
    cache: FileCache | None,
    lookup_thread: Executor,
) -> list[DataFile]:
    """Return all files of the table, after a download of those that may contain these versions (object store)."""
    files = hour_log.pending.all()
    if cache is None:
        return files
    gone = np.flatnonzero(version < reader.first_seq).tolist()
    paths = {file.entry.path for at in gone for file in _holding(files, int(due_ms[at]), int(version[at]))}
    # Downloaded before, because the reader thread must not wait for an object store.
    if paths:
        await in_thread(lookup_thread, cache.fetch_all, paths)
    return files


def times_before(reader: LogReader, rows: pa.RecordBatch) -> Int64Array:
    """Return the attempts of each scheduled message's message before this lease (reader thread).

    The first row of a scheduled message already counts the lease. A later row does not if the change of its time was no
    attempt. If retention has removed the first row, the lease is assumed to be counted.
    """
    times = times_of(rows)
    was_moved = rows.column("kind").to_numpy() == Kind.MOVED
    if was_moved.any():
        number = rows.column("source_seq").fill_null(0).to_numpy()
        known = np.flatnonzero(was_moved & (number >= reader.first_seq))
        # `number` is the scheduled message's first row.
        times[known] = times_of(reader.read_rows(number[known]))
    # Without the lease that the scheduled message stands for.
    return np.maximum(times - 1, 0)


def _in_table(files: Sequence[DataFile], due_ms: int, version: int) -> pa.RecordBatch | None:
    """Read the message from the file that contains it. Files are sorted by due time, so one row group is read."""
    # A half-open range of positions with exactly one version.
    return pending.load(_holding(files, due_ms, version), (due_ms, version), (due_ms, version + 1))


def _holding(files: Sequence[DataFile], due_ms: int, version: int) -> list[DataFile]:
    return [
        file
        for file in files
        if file.entry.min_seq <= version <= file.entry.max_seq
        and file.entry.min_due_ms <= due_ms <= file.entry.max_due_ms
    ]


def _moved(reader: LogReader, version: int) -> pa.RecordBatch | None:
    """Find the last MOVED row of this version. No index has it and the case is rare, so the whole log is read."""
    last = None
    for rows in reader.coalesced(reader.first_seq, reader.next_seq, [Kind.MOVED], _SCAN_ROWS):
        mine = np.flatnonzero(moved_versions(rows) == version)
        if len(mine):
            # The log is in order, so the last row is the newest.
            last = rows.slice(int(mine[-1]), 1)
    return None if last is None else as_scheduled(last)
