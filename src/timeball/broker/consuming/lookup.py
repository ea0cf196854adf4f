"""The row of the promise that a receipt names: in the log, in a file of the table, or at a later place of the log.

It is in the log nearly always, since receipts are young. An invisible time of hours may outlive the segment that its
promise was written to; then compaction has put it into the pending table, or the schedule has written it again (MOVED).
A promise that is found nowhere was settled long ago, and its receipt is not valid.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from timeball.broker.consuming.receipts import Receipt
from timeball.broker.consuming.redelivery_rows import times_of
from timeball.log.reader import LogReader
from timeball.message import Int64Array, Kind
from timeball.schedule.hour_log import pending
from timeball.schedule.locations import as_promises
from timeball.table.data_file import DataFile

_SCAN_ROWS = 65_536


def promises(
    reader: LogReader, files: Sequence[DataFile], receipts: Sequence[Receipt]
) -> tuple[pa.RecordBatch, Int64Array]:
    """Return READ_SCHEMA promises of the receipts whose promise is found, and which those are (reader thread)."""
    seqs = np.array([receipt.seq for receipt in receipts], dtype=np.int64)
    in_log = np.flatnonzero((seqs >= reader.first_seq) & (seqs < reader.next_seq))
    rows = reader.take(seqs[in_log])
    is_promise = rows.column("kind").to_numpy() == Kind.PROMISE
    found = [(rows if is_promise.all() else rows.filter(pa.array(is_promise)), in_log[is_promise])]
    for at in np.flatnonzero(seqs < reader.first_seq).tolist():
        row = _in_table(files, receipts[at]) or _moved(reader, receipts[at].seq)
        if row is not None:
            found.append((row, np.array([at], dtype=np.int64)))
    if len(found) == 1:
        return found[0]
    return pa.concat_batches([part for part, _ in found]), np.concatenate([at for _, at in found])


def times_before(reader: LogReader, rows: pa.RecordBatch) -> Int64Array:
    """Return how often the originals of these promises had been tried before this lease (reader thread).

    A promise counts the lease already, unless that was no attempt; the row it is a copy of tells. Where retention has
    removed that row, the lease is taken to be counted.
    """
    before = np.maximum(times_of(rows) - 1, 0)
    sources = rows.column("source_seq").fill_null(0).to_numpy()
    known = np.flatnonzero((sources >= reader.first_seq) & (sources < reader.next_seq))
    if len(known):
        before[known] = times_of(reader.take(sources[known]))
    return before


def _in_table(files: Sequence[DataFile], receipt: Receipt) -> pa.RecordBatch | None:
    """Return it from the file that holds it: sorted by instant, so that one row group is read."""
    due_ms, seq = receipt.due_ms, receipt.seq
    holding = [
        file
        for file in files
        if file.entry.min_seq <= seq <= file.entry.max_seq
        and file.entry.min_due_ms <= due_ms <= file.entry.max_due_ms
    ]
    return pending.load(holding, (due_ms, seq), (due_ms, seq + 1))


def _moved(reader: LogReader, seq: int) -> pa.RecordBatch | None:
    """Return its last place in the log. No index has it, and it is asked for rarely: so the log is read through."""
    last = None
    for rows in reader.coalesced(reader.first_seq, reader.next_seq, [Kind.MOVED], _SCAN_ROWS):
        mine = np.flatnonzero(rows.column("source_seq").to_numpy() == seq)
        if len(mine):
            last = rows.slice(int(mine[-1]), 1)
    return None if last is None else as_promises(last)
