"""Cancel all pending messages in ranges of numbers, and count them. Used to cancel the messages of a bulk job together.

The messages of a bulk attach were never rows of the log, so no index contains their numbers. They are read from the
files of the pending table, row group by row group, starting with those due soonest. The event loop cancels a row group
within some milliseconds, and its CANCEL rows are durable before the next row group is read. A call that is interrupted
has cancelled the first row groups, and a repeated call continues. Each message is settled as in cancel.py.

The list of files is made once, between two changes of the table, so every message of the ranges is in one of the files.
Meanwhile compaction may write a scheduled message to another file, with the same due time and number, but the listed
files stay on disk until the call ends. A resume, which changes due times, waits for the call (waiters.py).

Numbers that are reserved but not attached yet are refused, because messages attached after the answer would stay
pending. Numbers of rows of the log are refused, because their messages may not be in the table yet.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor

import numpy as np
import pyarrow as pa

from timeball.broker.accepting.waiters import Gate
from timeball.broker.registry.campaigns import AttachState
from timeball.broker.registry.rates import Rates, Stat
from timeball.broker.registry.schedules import Schedules
from timeball.broker.registry.selections import CONDITION_COLUMNS, Described, Selected, reason_of
from timeball.io.clock import SchedulerClock
from timeball.io.threads import Threads, in_thread
from timeball.log.reader import LogReader
from timeball.log.row_encoder import pairs_of
from timeball.log.writer import CommitLog, LogWriter
from timeball.model.answers import RangesCancelled
from timeball.model.errors import NotFound, OutOfRange, RequestError
from timeball.model.message import CANCEL_REASON, Kind, build_rows, encode_properties, int64
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
    schedules: Schedules,
    only: Selected | None = None,
) -> RangesCancelled:
    """Cancel all pending messages with first_seq <= number < first_seq + rows, for each (first_seq, rows) of `ranges`.

    `reason`: stored in the CANCEL rows. `only`: cancel only messages that these selections have cancelled, with the
    selection as the reason. `attaching`: the lock that every change of the pending table holds. Durable on return.

    Raises RequestError for an invalid reason, OutOfRange for the number of an occurrence of a schedule, and the errors
    of `check_numbers` and `check_no_log_rows`.
    """
    if not reason.isprintable():
        # Control characters separate the properties of a row, so they could end this one too early.
        raise RequestError(f"reason {reason!r}: printable characters only")
    async with gate.passing():
        # During an attach the ranges count as attached, but the files are not part of the table yet.
        async with attaching:
            check_numbers(ranges, reader=log.reader, attach_state=attach_state)
            # The CANCEL row of an occurrence would have to continue its schedule. No bulk attach has occurrences.
            if within(schedules.occurrences.all(), ranges).any():
                raise OutOfRange("the numbers include an occurrence of a schedule; cancel these by number")
            files = overlapping(scheduling.hour_log.pending.all(), ranges)
        # The files of `hour_log` read only local copies, if there is a cache of them.
        if pending_table.cache is not None:
            files = [DataFile(pending_table.data_files, file.entry) for file in files]
        with pending_table.catalog.keeping([file.entry.path for file in files]):
            await in_thread(threads.reader, check_no_log_rows, log.reader, ranges)
            return await _cancel_all(
                files,
                ranges,
                reason,
                only,
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
    only: Selected | None,
    *,
    clock: SchedulerClock,
    writer: LogWriter,
    scheduler: Scheduler,
    outcomes: Outcomes,
    file_thread: Executor,
    rates: Rates,
) -> RangesCancelled:
    """Cancel the messages of the ranges file by file, and count them. The other parameters: as for `cancel_ranges`."""
    cancelled = already_cancelled = 0
    for file in files:
        # Only one row group is in memory, and reads of consumers run between two row groups.
        for group in range(await in_thread(file_thread, file.group_count)):
            for row_reason, rows in await in_thread(
                file_thread, _rows_to_cancel, file, group, ranges, reason, only
            ):
                due_ms, seq = pairs_of(rows)
                # Counted before the cancel below, because afterwards all of them are cancelled.
                already_cancelled += int(np.count_nonzero(outcomes.was_cancelled(due_ms, seq)))
                cancelled += await _cancel(
                    rows, row_reason, clock=clock, writer=writer, scheduler=scheduler, rates=rates
                )
    # RELEASE rows of messages that were released meanwhile may not be durable yet. A caller who looks them up next must
    # find them.
    await writer.flushed()
    total = sum(rows for _, rows in ranges)
    return RangesCancelled(total, cancelled, already_cancelled, total - cancelled)


async def _cancel(
    rows: pa.RecordBatch,
    reason: str,
    *,
    clock: SchedulerClock,
    writer: LogWriter,
    scheduler: Scheduler,
    rates: Rates,
) -> int:
    """Cancel the pending ones of these messages (ID_SCHEMA), durably. Returns their number."""
    now_ms = clock.now_ms()
    was_pending = scheduler.cancel(*pairs_of(rows))
    if not was_pending.any():
        return 0
    # No await since the decision: the CANCEL rows stand in the log before any later release.
    cancelled_rows = rows.filter(pa.array(was_pending))
    _, durable = writer.append(cancel_rows(cancelled_rows, now_ms, reason))
    await durable
    for topic_count in cancelled_rows.column("topic").value_counts().to_pylist():
        rates.add(Stat.CANCELLED_NUMS, topic_count["values"], topic_count["counts"])
    return int(np.count_nonzero(was_pending))


def check_numbers(ranges: Ranges, *, reader: LogReader, attach_state: AttachState) -> None:
    """Raise OutOfRange for numbers after the log's end or in two ranges, NotFound for reserved numbers.

    Reserved numbers belong to a bulk job that has not attached its files yet.
    """
    # Sorted, so that overlapping ranges are adjacent. A message that is named twice would be counted twice.
    ordered = sorted(ranges)
    next_first_seqs = [*(first_seq for first_seq, _ in ordered[1:]), 1 << 62]  # no range after the last one
    for (first_seq, rows), next_first_seq in zip(ordered, next_first_seqs, strict=True):
        if first_seq + rows > min(next_first_seq, reader.next_seq):
            raise OutOfRange(
                f"{rows} rows from seq {first_seq}: beyond the log's end, or the same numbers named twice"
            )
    reserved = list(attach_state.reserved.items())
    begins, counts = np.array(reserved, np.int64).reshape(-1, 2).T
    for index in np.flatnonzero(overlap(begins, begins + counts, ranges)).tolist():
        reserved_seq, rows = reserved[index]
        raise NotFound(
            f"{rows} rows from seq {reserved_seq} are set aside for a job that has not attached them yet"
        )


def check_no_log_rows(reader: LogReader, ranges: Ranges) -> None:
    """Raise OutOfRange if the log has rows with these numbers (reader thread)."""
    for first_seq, rows in ranges:
        # Numbers of a bulk attach have no rows in the log, so the caller has named other messages.
        begin_seq = max(first_seq, reader.first_seq)
        if next(reader.rows(begin_seq, max(begin_seq, first_seq + rows)), None) is not None:
            raise OutOfRange(
                f"{rows} rows from seq {first_seq}: not the range of a bulk attach; cancel these by number"
            )


def group_in_ranges(file: DataFile, group: int, ranges: Ranges) -> pa.RecordBatch:
    """Read the identifying columns (ID_SCHEMA) of those rows of a row group that are in the ranges (file thread)."""
    rows = file.identities(group)
    is_in_ranges = within(int64(rows.column("seq")), ranges)
    return rows if is_in_ranges.all() else rows.filter(pa.array(is_in_ranges))


def _rows_to_cancel(
    file: DataFile, group: int, ranges: Ranges, reason: str, only: Selected | None
) -> list[tuple[str, pa.RecordBatch]]:
    """Read the rows of a row group that are to be cancelled (file thread).

    Returns pairs of a reason and rows (ID_SCHEMA): one pair, or with `only` one for each selection. Empty without rows.
    """
    if only is None:
        rows = group_in_ranges(file, group, ranges)
        return [(reason, rows)] if rows.num_rows else []
    rows = file.identities(group)
    due_ms, seq = pairs_of(rows)
    index = np.flatnonzero(within(seq, ranges) & only.may_change(due_ms, seq))
    if not len(index):
        return []
    columns = file.read_group_rows(group, index, list(CONDITION_COLUMNS)).combine_chunks().to_batches()[0]
    rows = rows.take(pa.array(index))
    topic = rows.column("topic").cast(pa.string())
    # The version is also the number, because the messages of a bulk attach that are in the ranges were never moved.
    owner = only.states(Described(due_ms[index], seq[index], seq[index], topic, columns)).owner
    return [
        (reason_of(only.names[selection]), rows.filter(pa.array(owner == selection)))
        for selection in np.unique(owner[owner >= 0]).tolist()
    ]


def cancel_rows(rows: pa.RecordBatch, now_ms: int, reason: str) -> pa.RecordBatch:
    """Build CANCEL rows (LOG_SCHEMA) from the identifying columns (ID_SCHEMA) of scheduled messages."""
    return build_rows(
        rows.num_rows,
        kind=int(Kind.CANCEL),
        queue_id=-1,
        store_ms=now_ms,
        source_seq=rows.column("seq"),
        properties=encode_properties({CANCEL_REASON: reason}) if reason else None,
        **{name: rows.column(name) for name in ("topic", "unique_key", "keys", "due_ms", "accepted_ms")},
    )
