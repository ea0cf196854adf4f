"""Reschedule: a pending scheduled message gets another due time, in one atomic step.

    MOVED    the same message under the same number, for the new due time; it settles the old due time

One row does both, so after a power failure the message has either the old due time or the new one. For the schedule,
one scheduled message was settled and another one was added, so it has no code for moves. The decision is the same as
for a cancel: a scheduled message that was handed out is `released`, and is not moved.

Bodies are read before the decision, because no await may come between decision and append. A body does not change while
its scheduled message is pending. The properties of an earlier delay (a level, a timer) are removed, because they no
longer apply.

If a send would refuse the due time, the disk is full, or a slot of the wheel is full, nothing changes. Many scheduled
messages are moved in several frames. A call that fails in between has moved the first ones, and may be repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from functools import partial

import numpy as np
import pyarrow as pa

from timeball.broker.accepting.appender import Appender
from timeball.broker.accepting.delivery import as_moves, in_frames
from timeball.broker.consuming.retry import SPENT
from timeball.broker.registry.rates import Rates, Stat
from timeball.broker.revoking import scheduled_lookup
from timeball.broker.revoking.cancel import settle, stop_waiting
from timeball.broker.revoking.look_ups import LookUps
from timeball.broker.revoking.scheduled_lookup import Candidate, Names
from timeball.io.clock import SchedulerClock
from timeball.io.threads import in_thread
from timeball.log.writer import CommitLog, LogWriter
from timeball.model import limits
from timeball.model.config import Settings
from timeball.model.errors import InvalidDelay, RequestError
from timeball.model.message import LOG_SCHEMA, Kind, decode_properties, encode_properties
from timeball.model.wire import Verdict
from timeball.schedule.delay_levels.levels import REAL_QUEUE
from timeball.schedule.outcomes import Outcomes
from timeball.schedule.scheduler import Scheduler, Scheduling
from timeball.table.key_index import TableKeys

REASON = "rescheduled"
ROWS_AT_ONCE = 64  # bodies in memory: at most 256 MiB


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
    rates: Rates,
) -> list[Verdict]:
    """Move the pending messages with these names to a due time, or to a delay from now. Return their verdicts.

    Raise InvalidDelay, RequestError, and the errors of a send.
    """
    instant_ms = _instant_ms(due_ms, delay_ms, settings=settings, clock=clock)
    return await settle(
        look_ups,
        names,
        partial(
            _move,
            appender,
            instant_ms,
            is_duration=delay_ms is not None,
            settings=settings,
            clock=clock,
            log=log,
            scheduling=scheduling,
            file_keys=file_keys,
            file_thread=file_thread,
            rates=rates,
        ),
    )


def _instant_ms(
    due_ms: int | None, delay_ms: int | None, *, settings: Settings, clock: SchedulerClock
) -> int:
    now_ms, delay_ms_max = clock.now_ms(), settings.delay_ms_max
    if (due_ms is None) == (delay_ms is None):
        raise RequestError("reschedule: give one of due_ms and delay_ms")
    # The delay is checked before the sum, because the sum might be a due time that has passed.
    if delay_ms is not None and not 0 <= delay_ms <= delay_ms_max:
        raise InvalidDelay(f"delay_ms {delay_ms}: between 0 and {delay_ms_max}")
    instant_ms = now_ms + delay_ms if delay_ms is not None else due_ms
    assert instant_ms is not None
    if 0 <= instant_ms < limits.DUE_MS_MIN <= now_ms:
        raise InvalidDelay(f"due_ms {instant_ms}: {limits.NO_MILLISECONDS}")
    if not 0 <= instant_ms <= now_ms + delay_ms_max:
        raise InvalidDelay(f"due_ms {instant_ms}: between 0 and {now_ms + delay_ms_max}")
    return instant_ms


async def _move(
    appender: Appender,
    due_ms: int,
    candidates: list[Candidate],
    *,
    is_duration: bool,
    settings: Settings,
    clock: SchedulerClock,
    log: CommitLog,
    scheduling: Scheduling,
    file_keys: TableKeys,
    file_thread: Executor,
    rates: Rates,
) -> dict[int, Verdict]:
    told: dict[int, Verdict] = {}
    for at in range(0, len(candidates), ROWS_AT_ONCE):
        # By version, because the rows that are read name it.
        chunk = {c.seq: c for c in candidates[at : at + ROWS_AT_ONCE]}
        # Read before the decision, because reading may fail or wait, and nothing after the decision may.
        rows = await in_thread(
            file_thread, scheduled_lookup.read,
            log.reader, file_keys, scheduling.hour_log.pending.live, list(chunk.values()),
        )  # fmt: skip
        for frame in in_frames(rows) if rows.num_rows else ():
            told |= await _move_frame(
                appender, due_ms, frame, [chunk[seq] for seq in frame.column("seq").to_pylist()],
                is_duration=is_duration,
                settings=settings, clock=clock, writer=log.writer, scheduler=scheduling.scheduler,
                outcomes=scheduling.outcomes, rates=rates,
            )  # fmt: skip
    return told


async def _move_frame(
    appender: Appender,
    due_ms: int,
    rows: pa.RecordBatch,
    candidates: list[Candidate],
    *,
    is_duration: bool,
    settings: Settings,
    clock: SchedulerClock,
    writer: LogWriter,
    scheduler: Scheduler,
    outcomes: Outcomes,
    rates: Rates,
) -> dict[int, Verdict]:
    writer.check_room()
    now_ms = clock.now_ms()
    due_ms = max(
        due_ms, now_ms
    )  # a due time in the past means now, so that the release does not count as late
    scheduled_rows = moved_scheduled_rows(
        rows, [c.topic for c in candidates], due_ms=due_ms, now_ms=now_ms, host=settings.host
    )
    # Topics may have been deleted since the send.
    appender.make_topics(scheduled_rows)
    scheduled_rows = appender.prepare(scheduled_rows, now_ms)
    # The race is decided here, on the event loop: a scheduled message that is being released meanwhile is no longer
    # pending.
    waited = stop_waiting(candidates, scheduler=scheduler)
    chosen = [c for c, was in zip(candidates, waited.tolist(), strict=True) if was]
    if not chosen:
        return {}
    # After `stop_waiting` the append must not fail or wait, so every check that may refuse runs before it.
    first_seq = writer.next_seq
    # The row of a move is the scheduled message's new version.
    moves = [(due_ms, c.number, first_seq + at, c.due_ms) for at, c in enumerate(chosen)]
    mask = pa.array(waited)
    appended = appender.append(
        as_moves(scheduled_rows.filter(mask), rows.filter(mask)), lambda: outcomes.moved.add(moves),
        is_duration=is_duration,
    )  # fmt: skip
    await appended.durable
    rates.add_each(Stat.RESCHEDULED_NUMS, (each.topic for each in chosen))
    return {c.number: Verdict("", REASON, c.number, now_ms, due_ms) for c in chosen}


def moved_scheduled_rows(
    rows: pa.RecordBatch, topics: Sequence[str], *, due_ms: int, now_ms: int, host: str
) -> pa.RecordBatch:
    """Build LOG_SCHEMA messages for another due time from READ_SCHEMA messages. `topics`: of their messages."""
    count = rows.num_rows
    said = [decode_properties(text or "") for text in rows.column("properties").to_pylist()]
    level = np.asarray(rows.column("queue_offset").is_valid())  # it is in the queue of a delay level
    # A scheduled message of a level becomes a normal one: it leaves the level's queue, and gets its topic and queue
    # back.
    queues = [
        int(properties[REAL_QUEUE]) if is_level else queue
        for properties, is_level, queue in zip(
            said, level.tolist(), rows.column("queue_id").to_pylist(), strict=True
        )
    ]
    nothing, now = pa.nulls(count, pa.int64()), pa.array(np.full(count, now_ms, dtype=np.int64))
    changed = {
        "kind": pa.array(np.full(count, Kind.SCHEDULED, dtype=np.int8)),
        "topic": pa.array(topics, pa.string()),
        "queue_id": pa.array(queues, pa.int32()),
        "queue_offset": nothing,
        "properties": pa.array([_unspent(properties) for properties in said], pa.string()),
        "store_ms": now,
        "store_host": pa.array([host] * count, pa.string()),
        "due_ms": pa.array(np.full(count, due_ms, dtype=np.int64)),
        "accepted_ms": nothing,
        "source_seq": nothing,
    }
    return pa.RecordBatch.from_arrays(
        [changed.get(name, rows.column(name)) for name in LOG_SCHEMA.names], schema=LOG_SCHEMA
    )


def _unspent(properties: dict[str, str]) -> str | None:
    # Properties of an earlier delay must not take effect again (consuming/retry.py).
    kept = {name: value for name, value in properties.items() if name not in SPENT}
    return encode_properties(kept) if kept else None
