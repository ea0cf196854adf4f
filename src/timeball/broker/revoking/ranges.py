"""Cancel of all pending messages in whole ranges of numbers: those of a bulk job as one object, with a definite count.

The scheduled messages of a bulk attach never passed through the log one by one, so no index contains their numbers.
They are read from the files of the pending table, row group by row group, starting with those due soonest. Each group
is decided on the event loop, in some milliseconds, and its CANCEL rows are in the log before the next group is read. A
call that is interrupted has cancelled the first groups, and a repeated call continues. Each scheduled message is
settled as in cancel.py.

The list of files is made once, between two changes of the table, so every scheduled message of the ranges is in one of
them. Meanwhile compaction may write a scheduled message to another file, with the same due time and number, but the
listed files stay on disk until the call ends. A resume, which changes due times, waits for the call (gate.py).

Refused: numbers that are reserved but not attached yet, because scheduled messages attached after the answer would stay
pending. Also refused: numbers of rows of the log, whose scheduled messages may not be in the table yet.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor

import numpy as np
import pyarrow as pa

from timeball.broker.accepting.gate import Gate
from timeball.broker.registry.attach import AttachState
from timeball.broker.registry.rates import Rates, Stat
from timeball.io.clock import SchedulerClock
from timeball.io.threads import Threads, in_thread
from timeball.log.reader import LogReader
from timeball.log.row_encoder import pairs_of
from timeball.log.writer import CommitLog, LogWriter
from timeball.model.errors import NotFound, OutOfRange, RequestError
from timeball.model.message import CANCEL_REASON, Kind, build_rows, encode_properties, int64
from timeball.model.wire import RangesCancelled
from timeball.schedule.outcomes import Outcomes
from timeball.schedule.scheduler import Scheduler, Scheduling
from timeball.table.attachment import Ranges, overlap, within
from timeball.table.data_file import DataFile, overlapping
from timeball.table.pending_table import PendingTable


async def cancel_ranges(
    attaching: asyncio.Lock,
    ranges: Ranges,
    reason: str,
    *,
    clock: SchedulerClock,
    log: CommitLog,
    attach_state: AttachState,
    scheduling: Scheduling,
    pending_table: PendingTable,
    threads: Threads,
    rates: Rates,
    gate: Gate,
) -> RangesCancelled:
    """Cancel all scheduled messages with first_seq <= number < first_seq + rows, for each (first_seq, rows).

    `attaching` is locked during each change of the pending table. Raise RequestError, OutOfRange, NotFound.
    """
    if not reason.isprintable():
        # Other characters could end the property in the CANCEL row too early.
        raise RequestError(f"reason {reason!r}: printable characters only")
    async with gate.passing():
        # Otherwise numbers may be used up while their files are not yet part of the table.
        async with attaching:
            check(ranges, reader=log.reader, attach_state=attach_state)
            files = overlapping(scheduling.hour_log.pending.all(), ranges)
        if pending_table.cache is not None:  # separate from the files of the reader thread, which are local
            files = [DataFile(pending_table.data_files, file.entry) for file in files]
        with pending_table.catalog.keeping([file.entry.path for file in files]):
            await in_thread(threads.reader, check_bulk, log.reader, ranges)
            return await _cancel_all(
                files,
                ranges,
                reason,
                clock=clock,
                writer=log.writer,
                scheduler=scheduling.scheduler,
                outcomes=scheduling.outcomes,
                file_thread=threads.files,
                rates=rates,
            )


async def _cancel_all(
    files: list[DataFile],
    ranges: Ranges,
    reason: str,
    *,
    clock: SchedulerClock,
    writer: LogWriter,
    scheduler: Scheduler,
    outcomes: Outcomes,
    file_thread: Executor,
    rates: Rates,
) -> RangesCancelled:
    cancelled = already = 0
    for file in files:
        # One row group at a time: only one is in memory, and reads of consumers run in between.
        for group in range(await in_thread(file_thread, file.group_count)):
            rows = await in_thread(file_thread, group_in_ranges, file, group, ranges)
            if rows.num_rows:
                due_ms, seq = pairs_of(rows)
                # Counted before the cancel, which would make all of them cancelled.
                already += int(np.count_nonzero(outcomes.was_cancelled(due_ms, seq)))
                cancelled += await _cancel(
                    rows, reason, clock=clock, writer=writer, scheduler=scheduler, rates=rates
                )
    # Releases may be on their way to the disk. A caller who looks the others up next must find them in the log.
    await writer.flushed()
    total = sum(rows for _, rows in ranges)
    return RangesCancelled(total, cancelled, already, total - cancelled)


async def _cancel(
    rows: pa.RecordBatch,
    reason: str,
    *,
    clock: SchedulerClock,
    writer: LogWriter,
    scheduler: Scheduler,
    rates: Rates,
) -> int:
    now_ms = clock.now_ms()
    chosen = scheduler.cancel(*pairs_of(rows))
    if not chosen.any():
        return 0
    # No await since the decision: the CANCEL rows stand in the log before any later release.
    cancelled = rows.filter(pa.array(chosen))
    _, durable = writer.append(cancel_rows(cancelled, now_ms, reason))
    await durable
    for found in cancelled.column("topic").value_counts().to_pylist():
        rates.add(Stat.CANCELLED_NUMS, found["values"], found["counts"])
    return int(np.count_nonzero(chosen))


def check(ranges: Ranges, *, reader: LogReader, attach_state: AttachState) -> None:
    """Raise unless all these numbers were given out, and none is still reserved for a future bulk attach."""
    # Sorted, so that overlapping ranges are adjacent: a scheduled message named twice would make the count wrong.
    ordered = sorted(ranges)
    for (first_seq, rows), (next_first, _) in zip(ordered, [*ordered[1:], (1 << 62, 0)], strict=True):
        if first_seq + rows > min(next_first, reader.next_seq):
            raise OutOfRange(
                f"{rows} rows from seq {first_seq}: beyond the log's end, or the same numbers named twice"
            )
    reserved = list(attach_state.reserved.items())
    begin, count = np.array(reserved, np.int64).reshape(-1, 2).T
    for at in np.flatnonzero(overlap(begin, begin + count, ranges)).tolist():
        set_aside, rows = reserved[at]
        raise NotFound(
            f"{rows} rows from seq {set_aside} are set aside for a job that has not attached them yet"
        )


def check_bulk(reader: LogReader, ranges: Ranges) -> None:
    """Raise OutOfRange if these are numbers of rows in the log (reader thread)."""
    for first_seq, rows in ranges:
        # Numbers of a bulk attach have no rows in the log. A row here means that the caller named other scheduled
        # messages.
        begin = max(first_seq, reader.first_seq)
        if next(reader.rows(begin, max(begin, first_seq + rows)), None) is not None:
            raise OutOfRange(
                f"{rows} rows from seq {first_seq}: not the range of a bulk attach; cancel these by number"
            )


def group_in_ranges(file: DataFile, group: int, ranges: Ranges) -> pa.RecordBatch:
    """Read the rows of one row group that are in the ranges (file thread)."""
    rows = file.identities(group)
    inside = within(int64(rows.column("seq")), ranges)
    return rows if inside.all() else rows.filter(pa.array(inside))


def cancel_rows(rows: pa.RecordBatch, now_ms: int, reason: str) -> pa.RecordBatch:
    """Build LOG_SCHEMA cancel rows for scheduled messages given by their identifying columns."""
    return build_rows(
        rows.num_rows,
        kind=int(Kind.CANCEL),
        queue_id=-1,
        store_ms=now_ms,
        source_seq=rows.column("seq"),
        properties=encode_properties({CANCEL_REASON: reason}) if reason else None,
        **{name: rows.column(name) for name in ("topic", "unique_key", "keys", "due_ms", "accepted_ms")},
    )
