"""The row of a promise that a receipt names, wherever it lies by now: the log, a file of the table, a later place.

The log nearly always, since receipts are young. An invisible time of hours may outlive the segment its promise was
written to; then compaction has put it into the pending table, or the schedule has written it again (MOVED).

What is not found anywhere was settled long ago: whoever asks gives the answer of a receipt that is not valid.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from timeball.broker.receipts import Receipt
from timeball.broker.receiving.parking import times_of
from timeball.log.reader import LogReader
from timeball.message import Int64Array, Kind
from timeball.schedule.hour_log import pending
from timeball.schedule.places import as_promises
from timeball.table.data_file import DataFile

_SCAN_ROWS = 65_536


def take(
    reader: LogReader, files: Sequence[DataFile], receipts: Sequence[Receipt]
) -> tuple[pa.RecordBatch, Int64Array]:
    """READ_SCHEMA promises of those receipts whose promise is found, and which those are (reader thread)."""
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
    """How often what these promises are copies of had been tried before it was handed out (reader thread).

    The promise counts this handing out already, unless it was told not to; the row it is a copy of knows. One that
    is not kept any more is believed to have been counted.
    """
    before = np.maximum(times_of(rows) - 1, 0)
    sources = rows.column("source_seq").fill_null(0).to_numpy()
    known = np.flatnonzero((sources >= reader.first_seq) & (sources < reader.next_seq))
    if len(known):
        before[known] = times_of(reader.take(sources[known]))
    return before


def _in_table(files: Sequence[DataFile], receipt: Receipt) -> pa.RecordBatch | None:
    """From the file that holds it: sorted by instant, so that one row group is read."""
    due_ms, seq = receipt.due_ms, receipt.seq
    holding = [
        file
        for file in files
        if file.entry.min_seq <= seq <= file.entry.max_seq
        and file.entry.min_due_ms <= due_ms <= file.entry.max_due_ms
    ]
    return pending.load(holding, (due_ms, seq), (due_ms, seq + 1))


def _moved(reader: LogReader, seq: int) -> pa.RecordBatch | None:
    """Its last place in the log: no index knows it, and nobody asks often."""
    last = None
    for rows in reader.coalesced(reader.first_seq, reader.next_seq, [Kind.MOVED], _SCAN_ROWS):
        mine = np.flatnonzero(rows.column("source_seq").to_numpy() == seq)
        if len(mine):
            last = rows.slice(int(mine[-1]), 1)
    return None if last is None else as_promises(last)
