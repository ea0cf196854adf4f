"""Reschedule: a pending scheduled message gets another due time, in one atomic step.

The log gets one MOVED row, with the number of the message and its new due time. The row also ends the old due time, so
after a power failure the message has either the old due time or the new one. The schedule needs no code for moves: for
it, one scheduled message is settled and another one is added. The decision is the same as for a cancel: a message whose
release has begun gets the verdict `released`, and is not moved.

An occurrence of a recurring schedule leaves its schedule. The next occurrence of the schedule is in the same frame.

Bodies are read before the decision, because no await may come between decision and append. A body does not change while
its scheduled message is pending. The properties of an earlier delay (a level, a timer) are removed, because they no
longer apply.

If a send would refuse the due time, the disk is full, or a slot of the wheel is full, nothing changes. Many scheduled
messages are moved in slices. A call that fails in between has moved the first slices, and may be repeated. The next
slice is read while the previous one is written. A slice ends at SLICE_ROWS messages, so that other requests do not
wait, or with the read with which its rows reach SLICE_BYTES.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial

import numpy as np
import pyarrow as pa

from timeball.broker.accepting.appender import Appender
from timeball.broker.accepting.delivery import as_moved_rows, split_into_frames
from timeball.broker.consuming.retry import SPENT
from timeball.broker.recurring.successors import Successors
from timeball.broker.registry.meta import Change
from timeball.broker.registry.rates import Rates, Stat
from timeball.broker.revoking import scheduled_lookup
from timeball.broker.revoking.cancel import FEW_ROWS, cancel_pending, settle
from timeball.broker.revoking.scheduled_lookup import Candidate, LookUps, Names
from timeball.io.clock import SchedulerClock
from timeball.io.threads import SLICE_ROWS, in_thread
from timeball.log.reader import LogReader
from timeball.log.writer import CommitLog, LogWriter
from timeball.model import limits
from timeball.model.answers import Verdict
from timeball.model.config import Settings
from timeball.model.errors import InvalidDelay, RequestError
from timeball.model.message import (
    LOG_SCHEMA,
    READ_SCHEMA,
    Int64Array,
    Kind,
    LogRow,
    decode_properties,
    encode_properties,
)
from timeball.model.time_parsing import LOCAL_TIME
from timeball.schedule.delay_levels import REAL_QUEUE
from timeball.schedule.outcomes import Outcomes
from timeball.schedule.scheduler import Scheduler, Scheduling
from timeball.table.file_keys import FileSet
from timeball.table.key_index import TableKeys

REASON = "rescheduled"
# Rows of the log that are read at once: at most 256 MiB of bodies, whose sizes are not known before.
READ_ROWS = 64
SLICE_BYTES = 4 * 1024 * 1024  # a slice ends with the read that reaches this size
FRAMES_IN_FLIGHT_MAX = 1  # frames that wait for the disk while the next one is built


async def reschedule(
    look_ups: LookUps,
    appender: Appender,
    names: Names,
    *,
    due_ms: int | None,
    delay_ms: int | None,
    settings: Settings,
    clock: SchedulerClock,
    log: CommitLog,
    scheduling: Scheduling,
    file_keys: TableKeys,
    file_thread: Executor,
    successors: Successors,
    rates: Rates,
) -> list[Verdict]:
    """Move the pending messages with these names to `due_ms`, or to `delay_ms` from now, durably.

    Returns verdicts as `settle` does. Raises InvalidDelay, RequestError, and the errors of `settle` and of a send.
    """
    new_due_ms = _check_due_ms(due_ms, delay_ms, settings=settings, clock=clock)
    return await settle(
        look_ups,
        names,
        partial(
            _move,
            appender,
            new_due_ms,
            is_duration=delay_ms is not None,
            settings=settings,
            clock=clock,
            log=log,
            scheduling=scheduling,
            file_keys=file_keys,
            file_thread=file_thread,
            successors=successors,
            rates=rates,
        ),
    )


def _check_due_ms(
    due_ms: int | None, delay_ms: int | None, *, settings: Settings, clock: SchedulerClock
) -> int:
    """Compute the new due time in ms, and check it as a send would.

    Raises RequestError unless exactly one of `due_ms` and `delay_ms` is set, InvalidDelay for a value out of range.
    """
    now_ms, delay_ms_max = clock.now_ms(), settings.delay_ms_max
    if (due_ms is None) == (delay_ms is None):
        raise RequestError("reschedule: give one of due_ms and delay_ms")
    # The delay is checked before the sum, because the sum might be a due time that has passed.
    if delay_ms is not None and not 0 <= delay_ms <= delay_ms_max:
        raise InvalidDelay(f"delay_ms {delay_ms}: between 0 and {delay_ms_max}")
    new_due_ms = now_ms + delay_ms if delay_ms is not None else due_ms
    assert new_due_ms is not None
    # The last comparison: a manual clock may show a time before DUE_MS_MIN, and then such a due time is right.
    if 0 <= new_due_ms < limits.DUE_MS_MIN <= now_ms:
        raise InvalidDelay(f"due_ms {new_due_ms}: {limits.NOT_MILLISECONDS_TEXT}")
    if not 0 <= new_due_ms <= now_ms + delay_ms_max:
        raise InvalidDelay(f"due_ms {new_due_ms}: between 0 and {now_ms + delay_ms_max}")
    return new_due_ms


async def _move(
    appender: Appender,
    new_due_ms: int,
    candidates: Sequence[Candidate],
    verdicts: dict[int, Verdict],
    *,
    is_duration: bool,
    settings: Settings,
    clock: SchedulerClock,
    log: CommitLog,
    scheduling: Scheduling,
    file_keys: TableKeys,
    file_thread: Executor,
    successors: Successors,
    rates: Rates,
) -> None:
    """Move the pending ones of these messages, durably (an `Act`). A message that is not pending gets no verdict.

    `is_duration`: the request had a delay, not a due time.
    """
    commits: deque[asyncio.Future[int]] = deque()
    begin = 0
    while begin < len(candidates):
        part = candidates[begin : begin + SLICE_ROWS]
        if appender.may_move_few and _are_few(part, successors):
            durable = _move_few(
                appender, new_due_ms, part, verdicts, is_duration=is_duration, host=settings.host, clock=clock,
                writer=log.writer, scheduling=scheduling, rates=rates,
            )  # fmt: skip
            begin += len(part)
            commits += [durable] if durable is not None else []
            continue
        # Read before the decision, because reading may fail or wait, and nothing after the decision may.
        rows, read_count = await in_thread(
            file_thread, read_slice, log.reader, file_keys, scheduling.hour_log.pending.live, part
        )
        begin += read_count
        # Keyed by version, because the rows contain the version (`seq`).
        by_version = {candidate.seq: candidate for candidate in part[:read_count]}
        frames = split_into_frames(rows) if rows.num_rows else ()
        for frame, frame_candidates in _frame_parts(frames, by_version, successors):
            durable = move_frame(
                appender, np.full(frame.num_rows, new_due_ms), frame, frame_candidates, verdicts,
                is_duration=is_duration, settings=settings, clock=clock, writer=log.writer,
                scheduler=scheduling.scheduler, outcomes=scheduling.outcomes, successors=successors, rates=rates,
            )  # fmt: skip
            if durable is not None:
                commits.append(durable)
            # Frames may have large bodies, so at most FRAMES_IN_FLIGHT_MAX wait: other requests need the disk, too.
            while len(commits) > FRAMES_IN_FLIGHT_MAX:
                await commits.popleft()
    for durable in commits:
        await durable


def _frame_parts(
    frames: Iterable[pa.RecordBatch], by_version: Mapping[int, Candidate], successors: Successors
) -> Iterator[tuple[pa.RecordBatch, list[Candidate]]]:
    """Divide frames, so that no part has many occurrences of schedules. Yields each part with its messages."""
    for frame in frames:
        candidates = [by_version[seq] for seq in frame.column("seq").to_pylist()]
        for part in successors.parts([candidate.number for candidate in candidates]):
            yield frame.slice(part.start, part.stop - part.start), candidates[part]


def _are_few(candidates: Sequence[Candidate], successors: Successors) -> bool:
    """Check whether these messages are few, and their rows need only the changes of `_moved_row`."""
    # The look-up must have read the row. Messages that selections have changed, of delay levels and of redeliveries,
    # and occurrences of schedules need more changes.
    return (
        len(candidates) <= FEW_ROWS
        and all(
            candidate.row is not None
            and candidate.change is None
            and not candidate.is_level
            and not scheduled_lookup.is_on_its_way_back(candidate.topic)
            for candidate in candidates
        )
        and not successors.has_any([candidate.number for candidate in candidates])
    )


def _move_few(
    appender: Appender,
    due_ms: int,
    candidates: Sequence[Candidate],
    verdicts: dict[int, Verdict],
    *,
    is_duration: bool,
    host: str,
    clock: SchedulerClock,
    writer: LogWriter,
    scheduling: Scheduling,
    rates: Rates,
) -> asyncio.Future[int] | None:
    """Move the pending ones of a few messages as `move_frame` does, but as values, which cost less than columns.

    `host`: the node, stored in the rows. The future is done when the rows are durable. None if no message is pending.
    """
    writer.check_admission()
    now_ms = clock.now_ms()
    due_ms = max(due_ms, now_ms)
    appender.ensure_topics({candidate.topic for candidate in candidates})
    was_pending = cancel_pending(candidates, scheduler=scheduling.scheduler).tolist()
    moved = [candidate for candidate, is_moved in zip(candidates, was_pending, strict=True) if is_moved]
    if not moved:
        return None
    first_seq, outcomes = writer.next_seq, scheduling.outcomes
    moves = [
        (due_ms, candidate.number, first_seq + index, candidate.due_ms)
        for index, candidate in enumerate(moved)
    ]
    durable = appender.append_moved(
        [_moved_row(candidate, due_ms=due_ms, now_ms=now_ms, host=host) for candidate in moved],
        lambda: outcomes.moved.add(moves),
        is_duration=is_duration,
    )
    rates.add_each(Stat.RESCHEDULED_NUMS, (candidate.topic for candidate in moved))
    for candidate in moved:
        verdicts[candidate.number] = Verdict("", REASON, candidate.number, now_ms, due_ms)
    return durable


def _moved_row(candidate: Candidate, *, due_ms: int, now_ms: int, host: str) -> LogRow:
    """Build the MOVED row of a message (values of LOG_SCHEMA) from its row in the log (`candidate.row`)."""
    assert candidate.row is not None
    row = dict(zip(READ_SCHEMA.names, candidate.row, strict=True))
    row.update(
        kind=int(Kind.MOVED), queue_offset=None, properties=_without_spent(row["properties"]),
        accepted_ms=row["accepted_ms"] if row["kind"] == Kind.MOVED else row["store_ms"], store_ms=now_ms,
        store_host=host, due_ms=due_ms, source_seq=candidate.number,
        version_seq=None if candidate.seq == candidate.number else candidate.seq, from_due_ms=candidate.due_ms,
    )  # fmt: skip
    del row["seq"]
    return tuple(row.values())


def read_slice(
    reader: LogReader, file_keys: TableKeys, live_files: FileSet, candidates: Sequence[Candidate]
) -> tuple[pa.RecordBatch, int]:
    """Read the rows (READ_SCHEMA) of the first candidates, until they have SLICE_BYTES (file thread).

    Also returns the number of these candidates. Candidates that are in neither log nor table have no row.
    """
    batches, count, size_bytes = [], 0, 0
    while count < len(candidates) and size_bytes < SLICE_BYTES:
        part = candidates[count : count + READ_ROWS]
        # A file is read by row groups of thousands of rows of any size, so all rows in files are read at once.
        if all(candidate.at_seq is None for candidate in candidates[count:]):
            part = candidates[count:]
        rows = scheduled_lookup.read_scheduled_rows(reader, file_keys, live_files, part)
        count += len(part)
        size_bytes += rows.nbytes
        batches.append(rows)
    return pa.concat_batches(batches), count


def move_frame(
    appender: Appender,
    due_ms: Int64Array,
    rows: pa.RecordBatch,
    candidates: Sequence[Candidate],
    verdicts: dict[int, Verdict],
    *,
    is_duration: bool,
    settings: Settings,
    clock: SchedulerClock,
    writer: LogWriter,
    scheduler: Scheduler,
    outcomes: Outcomes,
    successors: Successors,
    rates: Rates,
    keeps_local_time: bool = False,
    also: Callable[[Sequence[Candidate]], Change] | None = None,
) -> asyncio.Future[int] | None:
    """Move the pending messages among `candidates` in one frame, and add their verdicts.

    `due_ms` and `rows` (READ_SCHEMA) have the new due time and the row of each candidate. `also` builds META rows for
    the frame from the messages that move. With `keeps_local_time` the property LOCAL_TIME stays, because the new due
    time follows from it. The future is done when the frame is durable. None if no message is pending. Raises the errors
    of a send, before anything has changed.
    """
    writer.check_admission()
    now_ms = clock.now_ms()
    # A past due time becomes now, so that the release does not count as late.
    due_ms = np.maximum(due_ms, now_ms)
    scheduled_rows = moved_scheduled_rows(
        rows, [candidate.shown_topic for candidate in candidates], due_ms=due_ms, now_ms=now_ms, host=settings.host,
        keeps_local_time=keeps_local_time,
    )  # fmt: skip
    # Topics may have been deleted since the send.
    appender.make_topics(scheduled_rows)
    scheduled_rows = appender.prepare(scheduled_rows, now_ms)
    # This call decides the race: a message whose release has begun is no longer pending.
    was_pending = cancel_pending(candidates, scheduler=scheduler)
    moved = [
        candidate for candidate, is_moved in zip(candidates, was_pending.tolist(), strict=True) if is_moved
    ]
    if not moved:
        return None
    # After `cancel_pending` the append must not fail or wait, so every check that may refuse runs before it.
    first_seq = writer.next_seq
    # The MOVED row is the message's new version.
    new_due_ms = due_ms[was_pending].tolist()
    moves = [
        (new_ms, candidate.number, first_seq + index, candidate.due_ms)
        for index, (new_ms, candidate) in enumerate(zip(new_due_ms, moved, strict=True))
    ]
    if not was_pending.all():  # a filter copies the bodies
        moved_mask = pa.array(was_pending)
        scheduled_rows, rows = scheduled_rows.filter(moved_mask), rows.filter(moved_mask)
    change = None if also is None else also(moved)
    moved_rows = as_moved_rows(scheduled_rows, rows)
    appended = appender.append(
        moved_rows if change is None else pa.concat_batches([moved_rows, change.rows]),
        lambda: outcomes.moved.add(moves), is_duration=is_duration,
        continuation=successors.after_end([candidate.number for candidate in moved], now_ms),
    )  # fmt: skip
    if change is not None:
        change.apply()
    rates.add_each(Stat.RESCHEDULED_NUMS, (candidate.topic for candidate in moved))
    for candidate, new_ms in zip(moved, new_due_ms, strict=True):
        verdicts[candidate.number] = Verdict("", REASON, candidate.number, now_ms, new_ms)
    return appended.durable


def moved_scheduled_rows(
    rows: pa.RecordBatch,
    topics: Sequence[str],
    *,
    due_ms: Int64Array,
    now_ms: int,
    host: str,
    keeps_local_time: bool = False,
) -> pa.RecordBatch:
    """Build SCHEDULED rows (LOG_SCHEMA) of these messages (READ_SCHEMA) with other due times.

    `topics`: the topic to which each message will be released. `host`: the node, stored in the rows.
    """
    row_count, row_properties = rows.num_rows, rows.column("properties").to_pylist()
    in_level_queue = np.asarray(rows.column("queue_offset").is_valid())  # of a delay level
    # A message of a delay level leaves the level's queue. Its properties contain its real topic and queue.
    queues = [
        int(decode_properties(properties)[REAL_QUEUE]) if is_in_level else queue_id
        for properties, is_in_level, queue_id in zip(
            row_properties, in_level_queue.tolist(), rows.column("queue_id").to_pylist(), strict=True
        )
    ]
    # A message that a selection has moved to another topic gets no queue (-1), because that topic may have fewer
    # queues.
    queues = [
        queue_id if is_in_level or topic == before else -1
        for queue_id, is_in_level, topic, before in zip(
            queues, in_level_queue.tolist(), topics, rows.column("topic").to_pylist(), strict=True
        )
    ]
    null_column, now_column = (
        pa.nulls(row_count, pa.int64()),
        pa.array(np.full(row_count, now_ms, dtype=np.int64)),
    )
    changed = {
        "kind": pa.array(np.full(row_count, Kind.SCHEDULED, dtype=np.int8)),
        "topic": pa.array(topics, pa.string()),
        "queue_id": pa.array(queues, pa.int32()),
        "queue_offset": null_column,
        "properties": pa.array(
            [_without_spent(properties, keeps_local_time=keeps_local_time) for properties in row_properties],
            pa.string(),
        ),
        "store_ms": now_column,
        "store_host": pa.array([host] * row_count, pa.string()),
        "due_ms": pa.array(due_ms),
        "accepted_ms": null_column,
        "source_seq": null_column,
    }
    return pa.RecordBatch.from_arrays(
        [changed.get(name, rows.column(name)) for name in LOG_SCHEMA.names], schema=LOG_SCHEMA
    )


_HAS_SPENT = re.compile("|".join(map(re.escape, SPENT))).search


def _without_spent(properties: str | None, *, keeps_local_time: bool = False) -> str | None:
    """Remove the properties of an earlier delay (`retry.SPENT`), which must not take effect again.

    None if none remain.
    """
    # Most messages have none of them.
    if not properties or not _HAS_SPENT(properties):
        return properties or None
    remaining = {
        name: value
        for name, value in decode_properties(properties).items()
        if name not in SPENT or (keeps_local_time and name == LOCAL_TIME)
    }
    return encode_properties(remaining) if remaining else None
