"""Append batches to the log: check them, assign queue offsets, and update the caches when the rows are durable.

After the checks an append has two steps, because some callers decide something between them: for example, whether a
scheduled message is still pending. `prepare` runs every check that may refuse the rows (a topic that may not be
created, a full backlog). `append` assigns the offsets and writes the rows. It fails only for a frame that is too large
or a log that has stopped. The caller makes its decision and calls `append` without an await in between. So a scheduled
message is never settled (released or cancelled) for a row that is not written.

A batch may hold rows of several kinds. Then all of them are in the log or none is. An example is a CANCEL row with the
row that replaces the cancelled message.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from timeball.broker.accepting import admission, durations
from timeball.broker.accepting.admission import ParsedSends, SendRuns
from timeball.broker.accepting.waiters import Waiters
from timeball.broker.policy import Policy
from timeball.broker.recurring.successors import Continuation
from timeball.broker.registry.meta import Change
from timeball.broker.registry.queue_offsets import QueueOffsets
from timeball.broker.registry.rates import TIMER_TOPIC, Rates
from timeball.broker.registry.topics import Placement, Topics
from timeball.broker.registry.zones import LOCAL_TIME_BYTES, Zones
from timeball.io.clock import SchedulerClock
from timeball.log.row_encoder import (
    EncodedRows,
    NumberedRows,
    Pairs,
    ReadRows,
    Rows,
    as_batch,
    build,
    numbered,
    pairs_of,
    stored_size,
)
from timeball.log.writer import LogWriter
from timeball.model.access import ANONYMOUS, Caller
from timeball.model.answers import SentState, UniqueMessage
from timeball.model.config import Settings
from timeball.model.message import (
    LOG_SCHEMA,
    SCHEDULE_TOPIC,
    SEND_NAMES,
    Int64Array,
    Kind,
    LogRow,
    SendBatch,
    codes_of,
    filled,
    stored_sizes,
    with_seq,
)
from timeball.model.time_parsing import LOCAL_TIME
from timeball.schedule.scheduler import Scheduling

# Column positions, looked up once because every append replaces these two columns.
_QUEUE_ID, _QUEUE_OFFSET = (LOG_SCHEMA.get_field_index(name) for name in ("queue_id", "queue_offset"))
_KIND, _TOPIC, _BODY, _PROPERTIES, _STORE_MS, _ACCEPTED_MS, _SOURCE_SEQ = (
    LOG_SCHEMA.get_field_index(name)
    for name in ("kind", "topic", "body", "properties", "store_ms", "accepted_ms", "source_seq")
)
BoolArray = npt.NDArray[np.bool_]
_TOPIC_OF, _PROPERTIES_OF = (itemgetter(SEND_NAMES.index(name)) for name in ("topic", "properties"))
_VISIBLE = [int(Kind.MESSAGE), int(Kind.RELEASE)]
# Builds additional META rows for the frame of a send, from the number of its first row and its store time in ms.
MakeChange = Callable[[int, int], Change]


class Appended(NamedTuple):
    """The rows that an append has written (LOG_SCHEMA), with their queue offsets.

    `first_seq` is the number of the first row. `durable` is done when all of them are durable.
    """

    first_seq: int
    rows: pa.RecordBatch
    durable: asyncio.Future[int]


class Sent(NamedTuple):
    """The outcome of a send with an idempotency key or a unique key (as in answers.SendAck)."""

    outcome: str
    states: list[SentState]  # of a repeated send: the current states of its messages
    pending: UniqueMessage | None = None  # of a send with a unique key: the message it has kept or replaced


class Accepted(msgspec.Struct, frozen=True):
    """A batch that is in the log. Its rows have the numbers first_seq, first_seq + 1, and so on."""

    first_seq: int
    rows: int
    store_ms: int
    # The rows, with queues and offsets, and perhaps META rows of the same frame after them. Empty for a repeated send,
    # because the first send has written the rows.
    written: Rows
    sent: Sent | None = None  # set for a repeated send, and for a send with a unique key

    @property
    def stored_rows(self) -> pa.RecordBatch:
        """The rows in their stored form (LOG_SCHEMA)."""
        return as_batch(self.written).slice(0, self.rows)

    def queues_and_offsets(self) -> tuple[list[int], list[int | None]]:
        """List the queue and the queue offset of each row. The offset of a scheduled message is None."""
        if isinstance(self.written, EncodedRows):
            return self.written.queue_ids, self.written.queue_offsets
        columns = self.written.columns
        offsets = columns[_QUEUE_OFFSET]
        # `to_numpy` takes a third of the time, but does not represent nulls.
        queue_offsets = offsets.to_pylist() if offsets.null_count else offsets.to_numpy().tolist()
        return columns[_QUEUE_ID].to_numpy().tolist(), queue_offsets


class TailCount:
    """Counts the scheduled messages in the log since the watermark, approximately, to decide when to compact."""

    STEP = 4_096  # upper bound of the error of `rows`

    def __init__(self, watermark: int, rows: int) -> None:
        """Start with `rows` scheduled messages, all counted as if they were just after the watermark."""
        self._marks: list[tuple[int, int]] = [(watermark, 0)]  # (seq, scheduled messages counted before it)
        self._total = rows
        self._end = watermark  # the number after the last row that was added

    @property
    def rows(self) -> int:
        """The number of scheduled messages since the watermark. The error is less than `STEP`."""
        return self._total - self._marks[0][1]

    def add(self, next_seq: int, rows: int) -> None:
        """Count `rows` more scheduled messages, all before `next_seq`."""
        self._total += rows
        self._end = next_seq
        # One mark per STEP messages, so the count after a move of the watermark is wrong by less than that.
        if self._total - self._marks[-1][1] >= self.STEP:
            self._marks.append((next_seq, self._total))

    def drop_below(self, watermark: int) -> None:
        """Count only the scheduled messages since a new watermark."""
        if watermark >= self._end:
            self._marks = [(watermark, self._total)]
        else:
            # From the last mark at or before the watermark on. A second item of 1 << 62 sorts after all counts.
            last_mark = bisect_right(self._marks, (watermark, 1 << 62)) - 1
            self._marks = self._marks[max(0, last_mark) :]


class Appender:
    """Admits, prepares and appends rows. Belongs to the event loop.

    `tail_count` counts the scheduled messages in the log's tail.
    """

    def __init__(
        self,
        policy: Policy,
        waiters: Waiters,
        tail_count: TailCount,
        *,
        settings: Settings,
        clock: SchedulerClock,
        writer: LogWriter,
        topics: Topics,
        zones: Zones,
        scheduling: Scheduling,
        rates: Rates,
    ) -> None:
        # True for the hour log. It stores scheduled messages unchanged, so they may take the faster paths.
        self._compacts, self._host = scheduling.compacts, settings.host
        self._policy, self._waiters, self._tail_count = policy, waiters, tail_count
        self._settings, self._clock, self._writer = settings, clock, writer
        self._topics, self._zones, self._scheduling = topics, zones, scheduling
        self._loaded = scheduling.scheduler.loaded.wheel
        self._rates = rates

    def send(self, sends: ParsedSends, caller: Caller = ANONYMOUS) -> tuple[Accepted, asyncio.Future[int]]:
        """Append a batch as a whole or not at all. The future is done when its rows are durable.

        The order of the calls is the order in the log. Raises the errors of `admission.admit` and `Policy.admit`, and
        OverLimit if the log accepts no new messages now or a backlog is full.
        """
        if isinstance(sends, list | pa.RecordBatch):
            batch: SendBatch = sends
        else:
            accepted = self._send_runs(sends, caller)
            if accepted is not None:
                return accepted
            batch = sends.batch()
        accepted = self._send_small_batch(batch, caller)
        if accepted is not None:
            return accepted
        rows, level, now_ms = self.admit(batch)
        self._policy.ensure_topics(codes_of(rows.column("topic"))[1], caller)
        return self._prepare_and_append(rows, level, now_ms)

    def _send_runs(self, runs: SendRuns, caller: Caller) -> tuple[Accepted, asyncio.Future[int]] | None:
        """Append sends that their edge has parsed and encodes itself.

        None if they must take one of the other paths (rows or columns), which also raise the errors.
        """
        # The edge has checked texts and bodies. Topics, the writer's capacity and due times are checked here.
        topics = self._policy.find_destinations(runs.topics, caller)
        if topics is None:  # a first message creates its topic on the path for columns
            return None
        now_ms = self._clock.now_ms()
        self._writer.check_admission()
        # Backlogs other than the hour log may refuse or change scheduled messages, which then take the path for
        # columns. With a `last_ms` of -1, `log_rows` refuses every scheduled message.
        last_ms = now_ms + self._settings.delay_ms_max if self._compacts else -1
        sends = runs.log_rows(topics, now_ms, last_ms, self._host)
        return None if sends is None else self._append_small_batch(sends, now_ms)

    def _send_small_batch(
        self, batch: SendBatch, caller: Caller, change: MakeChange | None = None
    ) -> tuple[Accepted, asyncio.Future[int]] | None:
        """Append a small batch of plain rows (admission.py), and the rows of a change in the same frame.

        None if the batch must take the path for columns, which also raises the errors.
        """
        small_rows = admission.rows_in(batch) if isinstance(batch, pa.RecordBatch) else batch
        now_ms = self._clock.now_ms()
        delay_ms_max, may_schedule = self._settings.delay_ms_max, self._compacts
        if small_rows is None or not admission.are_plain(
            small_rows, now_ms, delay_ms_max, may_schedule=may_schedule
        ):
            return None
        # The row of a new zone would come before the messages, but the change contains the number of the first one.
        if change is not None and any(LOCAL_TIME in (_PROPERTIES_OF(row) or "") for row in small_rows):
            return None
        self._writer.check_admission()
        topics = self._policy.find_destinations(set(map(_TOPIC_OF, small_rows)), caller)
        if topics is None:  # as in `_send_runs`
            return None
        # No await from here on, so that the change gets the number of the first row.
        if change is None:
            return self._append_small_batch(
                admission.log_rows(small_rows, topics, now_ms, self._host, build), now_ms
            )
        changed = change(self._writer.next_seq, now_ms)
        sends = admission.log_rows(
            small_rows, topics, now_ms, self._host, lambda rows: build([*rows, *changed.log_rows])
        )
        accepted, durable = self._append_small_batch(sends, now_ms)
        changed.apply()  # after the append, because it may refuse
        return msgspec.structs.replace(accepted, rows=len(small_rows)), durable

    def _append_small_batch(
        self, sends: admission.SmallBatch, now_ms: int
    ) -> tuple[Accepted, asyncio.Future[int]]:
        """Append a small batch whose queue offsets are chosen. The commit begins at once."""
        rows, queue_offsets, scheduled, scheduled_bytes = sends
        message = b""  # the encoded rows, if one is a scheduled message
        if scheduled:
            # Hardly any message has a RocketMQ timer or a local time, and searching the encoded bytes costs less than
            # decoding one row.
            message = rows.message if isinstance(rows.message, bytes) else rows.message.to_pybytes()
            if LOCAL_TIME_BYTES in message:
                # Before the rows, in the same commit. After a crash, a start knows the zone of each message it finds.
                self._zones.use_in(rows.batch)
        # No await between this line and the append: no other append may come between them.
        first_seq = self._writer.next_seq

        def on_durable() -> None:
            """Index the visible rows, and add the scheduled messages to the schedule."""
            if queue_offsets is not None:
                queue_offsets.index(first_seq)
                self._announce(queue_offsets)
            if scheduled:
                pending_rows = numbered(rows, [first_seq + index for index in scheduled], scheduled)
                duration_mask = (
                    durations.is_duration_small(pending_rows) if durations.TIMER_PREFIX in message else None
                )
                self._add_pending(
                    pending_rows,
                    pairs_of(pending_rows),
                    now_ms,
                    scheduled_bytes,
                    first_seq + rows.num_rows,
                    duration_mask,
                )

        _, durable = self._writer.append(rows, on_durable=on_durable)
        # After the append, which may fail. Without an await, so that no other row gets these offsets.
        if queue_offsets is not None:
            queue_offsets.reserve_offsets()
        if self._loaded.first_due_ms <= now_ms:
            self._scheduling.scheduler.on_commit()
        # Not left to the end of the loop's turn, which would cost as much as placing ten rows.
        self._writer.commit()
        return Accepted(first_seq, rows.num_rows, now_ms, rows), durable

    def send_again(self, batch: pa.RecordBatch) -> asyncio.Future[int]:
        """Append copies of accepted messages that return to a consumer group, and create their missing topics.

        The future is done when the rows are durable. Raises the errors of `admit` and OverLimit.
        """
        rows, level, now_ms = self.admit(batch)
        self.make_topics(rows)
        return self._prepare_and_append(rows, level, now_ms)[1]

    def send_with(
        self, batch: SendBatch, change: MakeChange, caller: Caller | None = None
    ) -> tuple[Accepted, asyncio.Future[int]]:
        """Append a batch, and the rows of a change in the same frame. Raises the errors of `send`.

        `change` is called after all checks, with the number of the first row and the store time in ms. Without a
        caller, the broker itself has chosen the topics: they are created without a check of permissions.
        """
        if caller is not None:
            accepted = self._send_small_batch(batch, caller, change)
            if accepted is not None:
                return accepted
        rows, level, now_ms = self.admit(batch)
        if caller is None:
            self.make_topics(rows)
        else:
            self._policy.ensure_topics(codes_of(rows.column("topic"))[1], caller)
        rows = self.prepare(rows, now_ms, level)
        # After all steps that may append rows themselves, such as the creation of topics.
        changed = change(self._writer.next_seq, now_ms)
        first_seq, written, durable = self.append(pa.concat_batches([rows, changed.rows]))
        changed.apply()  # after the append, because it may refuse
        return Accepted(first_seq, rows.num_rows, now_ms, written.slice(0, rows.num_rows)), durable

    def admit(self, batch: SendBatch) -> tuple[pa.RecordBatch, Int64Array | None, int]:
        """Check a batch and build its rows (LOG_SCHEMA, see `admission.admit`).

        Returns the rows, their delay levels (None if none has one), and the store time in ms. Raises the errors of
        `admission.admit`, and OverLimit if the log accepts no new messages now.
        """
        # The clock is read once: all rows of a batch share their store time, and delays count from it.
        now_ms = self._clock.now_ms()
        self._writer.check_admission()
        rows, level = admission.admit(
            admission.as_columns(batch),
            now_ms=now_ms,
            delay_ms_max=self._settings.delay_ms_max,
            host=self._host,
            table=self._scheduling.levels.table,
        )
        return rows, level, now_ms

    def prepare(self, rows: pa.RecordBatch, now_ms: int, level: Int64Array | None = None) -> pa.RecordBatch:
        """Convert admitted rows to the form that the log stores, still without queue offsets.

        `level` contains the delay levels from `admit`. The topics of scheduled messages must exist (see
        `make_topics`). Raises OverLimit if a backlog is full, InvalidMessage if the properties that a delay level adds
        are too long.
        """
        # The schedule topic is created at the first use of a delay level, so that a broker without levels does not show
        # it.
        if level is not None:
            self._topics.ensure(SCHEDULE_TOPIC, self._scheduling.levels.table.queues)
            rows = admission.into_level_queues(rows, level)
        if not self._compacts:
            # This is the last check that may refuse. From here on nothing may fail until the rows are appended.
            admission.check_capacity(self._scheduling.backlog, rows)
        return self.prepare_accepted(rows, now_ms)

    def prepare_accepted(self, rows: pa.RecordBatch, now_ms: int) -> pa.RecordBatch:
        """Prepare rows as `prepare`, without its checks: the messages were accepted before, so none may be refused."""
        # The row of a new zone comes before the messages, in the same commit.
        self._zones.use_in(rows)
        return self.encode_scheduled(rows, now_ms)

    def encode_scheduled(self, rows: pa.RecordBatch, now_ms: int) -> pa.RecordBatch:
        """Convert the scheduled messages among rows (LOG_SCHEMA) to the form that the log stores, without any check."""
        if self._compacts:
            return rows
        return admission.encode_for_backlog(self._scheduling.backlog, rows, now_ms)

    def make_topics(self, rows: pa.RecordBatch) -> None:
        """Create the missing topics of these rows, without a check of permissions. Raises OverLimit.

        Only for topics that no client has chosen. The topic of a scheduled message exists from the moment it is
        accepted, so tools can show it.
        """
        self.ensure_topics(codes_of(rows.column("topic"))[1])

    def ensure_topics(self, names: Iterable[str]) -> None:
        """Create the topics with these names that are missing, as `make_topics` does."""
        for name in names:
            self._topics.ensure(name)

    def _prepare_and_append(
        self, rows: pa.RecordBatch, level: Int64Array | None, now_ms: int
    ) -> tuple[Accepted, asyncio.Future[int]]:
        """Prepare admitted rows, and append them. Raises the errors of `prepare`."""
        first_seq, rows, durable = self.append(self.prepare(rows, now_ms, level))
        return Accepted(first_seq, rows.num_rows, now_ms, rows), durable

    def append(
        self,
        rows: pa.RecordBatch,
        then: Callable[[], None] | None = None,
        *,
        is_duration: bool = False,
        continuation: Continuation | None = None,
    ) -> Appended:
        """Assign queue offsets to prepared rows (all or some of the rows of `prepare`), and append them in one frame.

        `then` is called in log order when the rows are durable and the caches are up to date. `is_duration`: all
        scheduled messages among the rows are due after a duration, although their rows do not show it. The frame also
        contains the rows of `continuation`, which continue the schedules of occurrences that `rows` end.
        """
        kinds = rows.column("kind").to_numpy()
        offsets = rows.column("queue_offset")
        # Visible rows get an offset, and so do rows of a delay level, which `into_level_queues` gives offset 0.
        gets_offset = np.isin(kinds, _VISIBLE)
        if offsets.null_count < len(offsets):
            gets_offset |= np.asarray(offsets.is_valid())
        with_offset = np.flatnonzero(gets_offset)
        placement = None
        if len(with_offset):
            rows, placement = self._assign_offsets(rows, with_offset)
        # No await between this line and the append: no other append may come between them.
        first_seq = self._writer.next_seq
        added = None if continuation is None else continuation.rows(first_seq + rows.num_rows)

        def on_durable() -> None:
            """Update the caches with the rows and their continuation, then call `then`."""
            self._index_and_schedule(rows, first_seq, with_offset, placement, is_duration=is_duration)
            if added is not None:
                self.add_scheduled(added, first_seq + rows.num_rows)
            if then is not None:
                then()

        frame_rows = rows if added is None else pa.concat_batches([rows, added])
        _, durable = self._writer.append(frame_rows, on_durable=on_durable)
        if continuation is not None:
            continuation.apply()
        return Appended(first_seq, rows, durable)

    def append_few(self, values: list[LogRow]) -> asyncio.Future[int]:
        """Append a few rows, given as values, that are neither visible nor scheduled, such as cancels."""
        return self._writer.append(build(values))[1]

    @property
    def may_move_few(self) -> bool:
        """True if `append_moved` may be called: the backlog stores messages unchanged."""
        return self._compacts

    def append_moved(
        self, moved: list[LogRow], then: Callable[[], None], *, is_duration: bool
    ) -> asyncio.Future[int]:
        """Append MOVED rows, given as values, that give a few messages another due time.

        `then` and `is_duration`: as for `append`.
        """
        first_seq, now_ms = self._writer.next_seq, moved[0][_STORE_MS]
        size_bytes = sum([stored_size(row[_TOPIC], row[_BODY] or b"", row[_PROPERTIES]) for row in moved])

        def on_durable() -> None:
            """Add the moved messages to the schedule, then call `then`."""
            # The rows as `locations.as_scheduled` converts them: with `accepted_ms` as `store_ms`, and without
            # `accepted_ms`, `version_seq` and `from_due_ms`.
            rows = NumberedRows(
                [
                    (
                        first_seq + index, *row[:_STORE_MS], row[_ACCEPTED_MS], *row[_STORE_MS + 1 : _ACCEPTED_MS],
                        None, row[_SOURCE_SEQ], None, None,
                    )
                    for index, row in enumerate(moved)
                ]
            )  # fmt: skip
            mask = np.ones(len(moved), np.bool_) if is_duration else durations.is_duration_small(rows)
            self._add_pending(rows, rows.pairs, now_ms, size_bytes, first_seq + len(moved), mask)
            then()

        return self._writer.append(build(moved), on_durable=on_durable)[1]

    def _assign_offsets(self, rows: pa.RecordBatch, indexes: Int64Array) -> tuple[pa.RecordBatch, Placement]:
        """Assign queues and offsets to the rows at these indexes. The other rows have a null offset.

        Returns all rows, and the placement of the rows at `indexes`.
        """
        # Usually all rows get an offset. Then two columns are replaced, and no row is copied.
        if len(indexes) == rows.num_rows:
            placement = self._topics.place(rows)
            return _with_offsets(
                rows, pa.array(placement.queue_id.astype(np.int32)), pa.array(placement.queue_offset)
            ), placement
        # Only these rows: scheduled messages must not use up offsets of their topic.
        placement = self._topics.place(rows.take(pa.array(indexes)))
        # META rows have no queue, and keep their null.
        has_no_queue = np.asarray(rows.column("queue_id").is_null())
        queue_id = filled(rows.column("queue_id"), -1).to_numpy().copy()
        queue_offset = np.zeros(rows.num_rows, dtype=np.int64)
        no_offset = np.ones(rows.num_rows, dtype=np.bool_)
        queue_id[indexes], queue_offset[indexes], no_offset[indexes] = (
            placement.queue_id, placement.queue_offset, False,
        )  # fmt: skip
        queue_ids = pa.array(queue_id, mask=has_no_queue & no_offset)
        return _with_offsets(rows, queue_ids, pa.array(queue_offset, mask=no_offset)), placement

    def _index_and_schedule(
        self,
        rows: pa.RecordBatch,
        first_seq: int,
        with_offset: Int64Array,
        placement: Placement | None,
        *,
        is_duration: bool,
    ) -> None:
        """Index the rows of a durable batch at the indexes `with_offset`, and add its scheduled messages."""
        if placement is not None:
            placement.index(first_seq, first_seq + with_offset)
            self._announce(placement)
        self.add_scheduled(rows, first_seq, is_duration=is_duration)

    def add_scheduled(self, rows: pa.RecordBatch, first_seq: int, *, is_duration: bool = False) -> None:
        """Add the scheduled messages among durable rows (LOG_SCHEMA) to the schedule. `is_duration` as for `append`."""
        kinds = rows.column("kind").to_numpy()
        is_scheduled = (kinds == Kind.SCHEDULED) | (kinds == Kind.MOVED)
        if is_scheduled.any():
            self._add_scheduled(rows, first_seq, is_scheduled, is_duration=is_duration)

    def _announce(self, placement: Placement | QueueOffsets) -> None:
        """Count rows that became visible, and wake their consumers. Called after the rows are in the queue indexes."""
        self._waiters.wake_queues(placement.count(self._rates))

    def _add_scheduled(
        self, rows: pa.RecordBatch, first_seq: int, is_scheduled: BoolArray, *, is_duration: bool
    ) -> None:
        """Add the messages in the mask `is_scheduled` to the schedule: to the delay levels, or to the backlog."""
        scheduled_rows = with_seq(rows, first_seq)
        now_ms = rows.column("store_ms")[-1].as_py()
        # A scheduled message with a queue offset has a delay level. Only `levels` schedules it.
        is_level = is_scheduled & np.asarray(rows.column("queue_offset").is_valid())
        if is_level.any():
            level_rows = scheduled_rows.filter(pa.array(is_level))
            self._scheduling.scheduler.add(self._scheduling.levels, level_rows, pairs_of(level_rows), now_ms)
            is_scheduled = is_scheduled & ~is_level
        if is_scheduled.any():
            due_rows = scheduled_rows if is_scheduled.all() else scheduled_rows.filter(pa.array(is_scheduled))
            stored_bytes = int(stored_sizes(due_rows).sum())
            duration_mask = durations.is_duration(due_rows)
            if is_duration:
                duration_mask = np.ones(due_rows.num_rows, np.bool_)
            self._add_pending(
                due_rows, pairs_of(due_rows), now_ms, stored_bytes, first_seq + rows.num_rows, duration_mask
            )

    def _add_pending(
        self,
        scheduled_rows: ReadRows,
        pairs: Pairs,
        now_ms: int,
        stored_bytes: int,
        next_seq: int,
        duration_mask: BoolArray | None,
    ) -> None:
        """Add durable messages that have no delay level to the schedule.

        They were stored at `now_ms`, in rows before `next_seq`. `stored_bytes` is their size as RocketMQ would store
        them. `duration_mask` selects the messages that are due after a duration. None if no message is.
        """
        # RocketMQ counts messages with a due time under its timer's topic, and its tools look for them there.
        self._rates.count_arrived(TIMER_TOPIC, scheduled_rows.num_rows, stored_bytes)
        self._scheduling.scheduler.add(self._scheduling.backlog, scheduled_rows, pairs, now_ms, duration_mask)
        if self._compacts:
            self._tail_count.add(next_seq, scheduled_rows.num_rows)


def _with_offsets(rows: pa.RecordBatch, queue_id: pa.Array, queue_offset: pa.Array) -> pa.RecordBatch:
    """Replace the columns `queue_id` and `queue_offset` of rows."""
    columns = rows.columns
    columns[_QUEUE_ID], columns[_QUEUE_OFFSET] = queue_id, queue_offset
    return pa.RecordBatch.from_arrays(columns, schema=LOG_SCHEMA)
