"""Cancel all that still waits of whole ranges of numbers: a bulk job's promises as one object, with a definite count.

The promises of a bulk attach never passed through the log one by one, so no index holds their numbers: they are read
from the files of the pending table, row group by row group, those due soonest first. Each group is decided on the
event loop, and its CANCEL rows are in the log before the next one is read. A call that is cut short has cancelled the
first groups, and goes on when it is repeated. What cancel.py says of single promises holds for each of these.

Refused: numbers that are set aside and not attached yet, because promises attached after the answer would go on
waiting; and numbers of rows of the log, whose promises may lie in its tail.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from timeball.broker.parts import Parts, in_thread
from timeball.errors import NotFound, OutOfRange, RequestError
from timeball.message import CANCEL_REASON, Kind, build_rows, encode_properties, int64
from timeball.table.attachment import Ranges, within
from timeball.table.data_file import DataFile
from timeball.wire import RangesCancelled


async def cancel_ranges(parts: Parts, ranges: Ranges, reason: str) -> RangesCancelled:
    """Settle all promises numbered first_seq <= seq < first_seq + rows, for each (first_seq, rows)."""
    total = check(parts, ranges)
    if not reason.isprintable():
        # It would stand among the properties of CANCEL rows, and end its own.
        raise RequestError(f"reason {reason!r}: printable characters only")
    cancelled = already = 0
    for file in overlapping(parts.hour_log.pending.all(), ranges):
        for group in range(await in_thread(parts.reader_thread, file.group_count)):
            rows = await in_thread(parts.reader_thread, group_in_ranges, file, group, ranges)
            if rows.num_rows:
                due_ms, seq = int64(rows.column("due_ms")), int64(rows.column("seq"))
                already += int(np.count_nonzero(parts.outcomes.was_cancelled(due_ms, seq)))
                cancelled += await _cancel(parts, rows, reason)
    # Releases on their way: a caller who asks next what became of the others finds them in the log.
    await parts.writer.flushed()
    return RangesCancelled(total, cancelled, already, total - cancelled)


async def _cancel(parts: Parts, rows: pa.RecordBatch, reason: str) -> int:
    now_ms = parts.clock.now_ms()
    chosen = parts.scheduler.cancel(int64(rows.column("due_ms")), int64(rows.column("seq")))
    if not chosen.any():
        return 0
    # No pause since the decision: the CANCEL rows stand in the log before any later release.
    _, durable = parts.writer.append(cancel_rows(rows.filter(pa.array(chosen)), now_ms, reason))
    await durable
    return int(np.count_nonzero(chosen))


def check(parts: Parts, ranges: Ranges) -> int:
    """Return how many numbers these are; raise unless all were given out for bulk attaches that have taken place."""
    ordered = sorted(ranges)
    for (first_seq, rows), (next_first, _) in zip(ordered, [*ordered[1:], (1 << 62, 0)], strict=True):
        if first_seq + rows > min(next_first, parts.reader.next_seq):
            raise OutOfRange(
                f"{rows} rows from seq {first_seq}: beyond the log's end, or the same numbers named twice"
            )
        for set_aside, count in parts.ledger.reserved.items():
            if first_seq < set_aside + count and set_aside < first_seq + rows:
                raise NotFound(
                    f"{count} rows from seq {set_aside} are set aside for a job that has not attached them yet"
                )
        begin = max(first_seq, parts.reader.first_seq)
        if next(parts.reader.rows(begin, max(begin, first_seq + rows)), None) is not None:
            raise OutOfRange(
                f"{rows} rows from seq {first_seq}: not the range of a bulk attach; cancel these by number"
            )
    return sum(rows for _, rows in ranges)


def overlapping(files: Sequence[DataFile], ranges: Ranges) -> list[DataFile]:
    """Return files that may hold such numbers, by their first instant."""
    found = [
        file
        for file in files
        if any(file.entry.min_seq < first + rows and first <= file.entry.max_seq for first, rows in ranges)
    ]
    return sorted(found, key=lambda file: file.entry.min_due_ms)


def group_in_ranges(file: DataFile, group: int, ranges: Ranges) -> pa.RecordBatch:
    """Return the rows of one row group that lie in the ranges (reader thread)."""
    rows = file.identities(group)
    inside = within(int64(rows.column("seq")), ranges)
    return rows if inside.all() else rows.filter(pa.array(inside))


def cancel_rows(rows: pa.RecordBatch, now_ms: int, reason: str) -> pa.RecordBatch:
    """Return LOG_SCHEMA cancel rows for promises given by their identifying columns."""
    return build_rows(
        rows.num_rows,
        kind=int(Kind.CANCEL),
        queue_id=-1,
        store_ms=now_ms,
        source_seq=rows.column("seq"),
        properties=encode_properties({CANCEL_REASON: reason}) if reason else None,
        **{name: rows.column(name) for name in ("topic", "unique_key", "keys", "due_ms", "accepted_ms")},
    )
