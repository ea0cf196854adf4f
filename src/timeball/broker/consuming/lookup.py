"""The row of the promise that a receipt names: in the log, in a file of the table, or at a later place of the log.

It is in the log nearly always, since receipts are young. An invisible time of hours may outlive the segment that its
promise was written to; then compaction has put it into the pending table, or the schedule has written it again (MOVED).
A lease that was given another time is the same promise in another version (schedule/moved.py), which is looked for.
A promise that is found nowhere was settled long ago, and its receipt is not valid.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from timeball.broker.components import Components, in_thread
from timeball.broker.consuming.redelivery_rows import times_of
from timeball.log.reader import LogReader
from timeball.message import Int64Array, Kind
from timeball.schedule.hour_log import pending
from timeball.schedule.locations import KINDS, as_promises, moved_versions
from timeball.table.data_file import DataFile

_SCAN_ROWS = 65_536


def promises(
    reader: LogReader, files: Sequence[DataFile], due_ms: Int64Array, version: Int64Array
) -> tuple[pa.RecordBatch, Int64Array]:
    """Return READ_SCHEMA promises of these versions that are found, and which those are (reader thread)."""
    # All that the log still has in one read; the others one by one, since they are rare.
    in_log = np.flatnonzero((version >= reader.first_seq) & (version < reader.next_seq))
    rows = reader.read_rows(version[in_log])
    is_promise = np.isin(rows.column("kind").to_numpy(), list(KINDS))
    kept = rows if is_promise.all() else rows.filter(pa.array(is_promise))
    found = [(as_promises(kept), in_log[is_promise])]
    for at in np.flatnonzero(version < reader.first_seq).tolist():
        # Its row has left the log: it was compacted into a file, or written again by a wheel or a cascade.
        row = _in_table(files, int(due_ms[at]), int(version[at])) or _moved(reader, int(version[at]))
        if row is not None:
            found.append((row, np.array([at], dtype=np.int64)))
    if len(found) == 1:
        return found[0]
    return pa.concat_batches([part for part, _ in found]), np.concatenate([at for _, at in found])


async def local_files(parts: Components, due_ms: Int64Array, version: Int64Array) -> list[DataFile]:
    """Return all files; those in an object store in which some of these versions may lie are made local before."""
    files = parts.hour_log.pending.all()
    if parts.cache is None:
        return files
    gone = np.flatnonzero(version < parts.reader.first_seq).tolist()
    paths = {file.entry.path for at in gone for file in _holding(files, int(due_ms[at]), int(version[at]))}
    if paths:
        await in_thread(parts.lookup_thread, parts.cache.fetch_all, paths)
    return files


def times_before(reader: LogReader, rows: pa.RecordBatch) -> Int64Array:
    """Return how often the originals of these promises had been tried before this lease (reader thread).

    A promise's first row counts the lease already; a later one does not when a change of its time was no attempt. Where
    retention has removed the first row, the lease is taken to be counted.
    """
    times = times_of(rows)
    was_moved = rows.column("kind").to_numpy() == Kind.MOVED
    if was_moved.any():
        number = rows.column("source_seq").fill_null(0).to_numpy()
        known = np.flatnonzero(was_moved & (number >= reader.first_seq))
        times[known] = times_of(reader.read_rows(number[known]))
    return np.maximum(times - 1, 0)


def _in_table(files: Sequence[DataFile], due_ms: int, version: int) -> pa.RecordBatch | None:
    """Return it from the file that holds it: sorted by instant, so that one row group is read."""
    return pending.load(_holding(files, due_ms, version), (due_ms, version), (due_ms, version + 1))


def _holding(files: Sequence[DataFile], due_ms: int, version: int) -> list[DataFile]:
    return [
        file
        for file in files
        if file.entry.min_seq <= version <= file.entry.max_seq
        and file.entry.min_due_ms <= due_ms <= file.entry.max_due_ms
    ]


def _moved(reader: LogReader, version: int) -> pa.RecordBatch | None:
    """Return its last place in the log. No index has it, and it is asked for rarely: so the log is read through."""
    last = None
    for rows in reader.coalesced(reader.first_seq, reader.next_seq, [Kind.MOVED], _SCAN_ROWS):
        mine = np.flatnonzero(moved_versions(rows) == version)
        if len(mine):
            last = rows.slice(int(mine[-1]), 1)
    return None if last is None else as_promises(last)
