"""Append batches to the log: admission and policy, queue offsets, and updates of the caches when rows are durable.

A batch that passed all checks takes two steps, because the caller may have to make a decision between them. `prepare`
makes all refusals: a topic that may not be created, or a full backlog. `append` assigns the offsets and writes the
rows. It refuses only a frame that is too large or a log that has stopped. The caller calls it without an await after
the decision, so a scheduled message is never settled (released or cancelled) for a row that is not written.

A batch may hold rows of several kinds. Then all of them are in the log or none is. An example is a CANCEL row with the
row that replaces the cancelled message.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Callable
from operator import itemgetter
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from timeball.broker.accepting import admission, durations, small_batch
from timeball.broker.accepting.small_batch import SendRuns, Sends
from timeball.broker.accepting.waiters import Waiters
from timeball.broker.policy import Policy
from timeball.broker.registry.meta import Change
from timeball.broker.registry.queue_offsets import FewPlaces
from timeball.broker.registry.rates import TIMER_TOPIC, Rates
from timeball.broker.registry.topics import Placement, Topics
from timeball.io.clock import SchedulerClock
from timeball.log.row_encoder import (
    EncodedRows,
    Pairs,
    ReadRows,
    Rows,
    as_batch,
    builder_of,
    numbered,
    pairs_of,
    stored_size,
)
from timeball.log.writer import LogWriter
from timeball.model.access import ANONYMOUS, Caller
from timeball.model.answers import SentState
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
from timeball.schedule.scheduler import Scheduling

# Looked up once, because every append replaces these two columns.
_QUEUE_ID, _QUEUE_OFFSET = (LOG_SCHEMA.get_field_index(name) for name in ("queue_id", "queue_offset"))
_KIND, _TOPIC, _BODY, _PROPERTIES, _STORE_MS = (
    LOG_SCHEMA.get_field_index(name) for name in ("kind", "topic", "body", "properties", "store_ms")
)
BoolArray = npt.NDArray[np.bool_]
_TOPIC_OF = itemgetter(SEND_NAMES.index("topic"))
_VISIBLE = [int(Kind.MESSAGE), int(Kind.RELEASE)]
# Arguments: the number of the send's first row, and its store time in ms. Result: other changes in the same frame.
MakeChange = Callable[[int, int], Change]


class Appended(NamedTuple):
    """Rows in their stored form (LOG_SCHEMA).

    `first_seq` is the number of the first row. `durable` is done when all of them are durable.
    """

    first_seq: int
    rows: pa.RecordBatch
    durable: asyncio.Future[int]


class Sent(NamedTuple):
    """The result of a repeated send: `outcome` as in answers.SendAck, and the current states of its messages."""

    outcome: str
    states: list[SentState]


class Accepted(msgspec.Struct, frozen=True):
    """A batch that is in the log. Its rows have the numbers first_seq, first_seq + 1, and so on.

    Visible rows have their queue and offset. `sent` is set if an earlier send had already written the batch. Then
    `written` is empty.
    """

    first_seq: int
    rows: int
    store_ms: int
    written: Rows
    sent: Sent | None = None

    @property
    def kept(self) -> pa.RecordBatch:
        """The rows in their stored form (LOG_SCHEMA)."""
        return as_batch(self.written)

    def places(self) -> tuple[list[int], list[int | None]]:
        """List the queue and the offset of each row. Messages that wait for a due time have no offset yet."""
        if isinstance(self.written, EncodedRows):
            return self.written.queue_ids, self.written.queue_offsets
        columns = self.written.columns
        offsets = columns[_QUEUE_OFFSET]
        # `to_numpy` takes a third of the time, but does not represent nulls.
        given = offsets.to_pylist() if offsets.null_count else offsets.to_numpy().tolist()
        return columns[_QUEUE_ID].to_numpy().tolist(), given


class TailCount:
    """The approximate number of scheduled messages in the log since the watermark. Decides when to compact."""

    STEP = 4_096  # upper bound of the error of `rows`

    def __init__(self, watermark: int, rows: int) -> None:
        self._marks: list[tuple[int, int]] = [(watermark, 0)]  # (seq, scheduled messages counted before it)
        self._total = rows
        self._end = watermark  # after the last scheduled message added

    @property
    def rows(self) -> int:
        """The number of scheduled messages since the watermark. The error is less than `STEP`."""
        return self._total - self._marks[0][1]

    def add(self, next_seq: int, rows: int) -> None:
        """Count `rows` more scheduled messages. The last one is before `next_seq`."""
        self._total += rows
        self._end = next_seq
        # One mark per STEP messages. After a move of the watermark the count is wrong by less than that.
        if self._total - self._marks[-1][1] >= self.STEP:
            self._marks.append((next_seq, self._total))

    def drop_below(self, watermark: int) -> None:
        """Restart the count from a new watermark."""
        if watermark >= self._end:
            self._marks = [(watermark, self._total)]
        else:
            # the last mark at or before the watermark
            at = bisect_right(self._marks, (watermark, 1 << 62)) - 1
            self._marks = self._marks[max(0, at) :]


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
        scheduling: Scheduling,
        rates: Rates,
    ) -> None:
        # True for the hour log. It stores scheduled messages as they are, so they may take the fast paths.
        self._compacts, self._host = scheduling.compacts, settings.host
        self._build = builder_of(settings.codec)
        self._policy, self._waiters, self._tail_count = policy, waiters, tail_count
        self._settings, self._clock, self._writer = settings, clock, writer
        self._topics, self._scheduling = topics, scheduling
        self._rates = rates

    def send(self, sends: Sends, caller: Caller = ANONYMOUS) -> tuple[Accepted, asyncio.Future[int]]:
        """Accept a batch as a whole or not at all. The order of calls is the order in the log."""
        if isinstance(sends, list | pa.RecordBatch):
            batch: SendBatch = sends
        else:
            accepted = self._send_runs(sends, caller)
            if accepted is not None:
                return accepted
            batch = sends.batch()
        accepted = self._send_few(batch, caller)
        if accepted is not None:
            return accepted
        rows, level, now_ms = self.admit(batch)
        self._policy.admit(codes_of(rows.column("topic"))[1], caller)
        return self._accept(rows, level, now_ms)

    def _send_runs(self, runs: SendRuns, caller: Caller) -> tuple[Accepted, asyncio.Future[int]] | None:
        """`send` for sends that their edge can encode.

        The result is None if the batch must take another path, as rows or columns. Those paths also raise the refusals.
        """
        # The edge has checked texts and bodies. Topics, the writer's capacity and due times are still to be checked.
        topics = self._policy.destinations(runs.topics, caller)
        if topics is None:  # a first message creates its topic on the path for columns
            return None
        now_ms = self._clock.now_ms()
        self._writer.check_room()
        # Backlogs other than the hour log may refuse or change scheduled messages. These then take the path for
        # columns.
        last_ms = now_ms + self._settings.delay_ms_max if self._compacts else -1
        sends = runs.log_rows(topics, now_ms, last_ms, self._host)
        return None if sends is None else self._append_few(sends, now_ms)

    def _send_few(self, batch: SendBatch, caller: Caller) -> tuple[Accepted, asyncio.Future[int]] | None:
        """`send` for a few plain rows.

        The result is None if the batch must take the path for columns, which also raises the refusals.
        """
        few = small_batch.rows_in(batch) if isinstance(batch, pa.RecordBatch) else batch
        now_ms = self._clock.now_ms()
        delay_ms_max, may_wait = self._settings.delay_ms_max, self._compacts
        if few is None or not small_batch.are_plain(few, now_ms, delay_ms_max, may_wait=may_wait):
            return None
        self._writer.check_room()
        topics = self._policy.destinations(set(map(_TOPIC_OF, few)), caller)
        if topics is None:  # as in `_send_runs`
            return None
        return self._append_few(small_batch.log_rows(few, topics, now_ms, self._host, self._build), now_ms)

    def _append_few(self, sends: small_batch.SmallBatch, now_ms: int) -> tuple[Accepted, asyncio.Future[int]]:
        """Append rows with chosen queue offsets. The commit begins at once."""
        rows, places, scheduled, scheduled_bytes = sends
        # No await between this line and the append: no other append may come between them.
        first_seq = self._writer.next_seq

        def on_durable() -> None:
            if places is not None:
                places.index(first_seq)
                self._visible(places)
            if scheduled:
                waiting = numbered(rows, [first_seq + at for at in scheduled], scheduled)
                # Searching the bytes of all rows costs less than decoding one row. Hardly any message has a timer.
                message = rows.message if isinstance(rows.message, bytes) else rows.message.to_pybytes()
                lasting = durations.is_duration_small(waiting) if durations.TIMER_PREFIX in message else None
                self._wait(
                    waiting, pairs_of(waiting), now_ms, scheduled_bytes, first_seq + rows.num_rows, lasting
                )

        _, durable = self._writer.append(rows, on_durable=on_durable)
        # After the append, because it may refuse. Without an await, so that no other row gets these offsets.
        if places is not None:
            places.give_out()
        self._writer.commit()  # waiting for the end of the loop's turn costs as much as placing ten rows
        return Accepted(first_seq, rows.num_rows, now_ms, rows), durable

    def send_again(self, batch: pa.RecordBatch) -> asyncio.Future[int]:
        """Append copies of accepted messages that return to a consumer group. No client has chosen their topics."""
        rows, level, now_ms = self.admit(batch)
        self.make_topics(rows)
        return self._accept(rows, level, now_ms)[1]

    def send_with(
        self, batch: SendBatch, change: MakeChange, caller: Caller | None = None
    ) -> tuple[Accepted, asyncio.Future[int]]:
        """`send` with additional rows of a change in the same frame.

        `change` is called when nothing else can refuse. Without a caller, no client has chosen the topics.
        """
        rows, level, now_ms = self.admit(batch)
        if caller is None:
            self.make_topics(rows)
        else:
            self._policy.admit(codes_of(rows.column("topic"))[1], caller)
        rows = self.prepare(rows, now_ms, level)
        # After all steps that may append rows themselves, such as the creation of topics.
        changed = change(self._writer.next_seq, now_ms)
        first_seq, written, durable = self.append(pa.concat_batches([rows, changed.rows]))
        changed.keep()  # after the append, because it may refuse
        return Accepted(first_seq, rows.num_rows, now_ms, written.slice(0, rows.num_rows)), durable

    def admit(self, batch: SendBatch) -> tuple[pa.RecordBatch, Int64Array | None, int]:
        """Admit a batch. Returns the rows and levels of `admission.admit`, and the store time in ms.

        Raises the errors of `admission.admit`.
        """
        # The clock is read once: all rows of a batch share their store time, and delays count from it.
        now_ms = self._clock.now_ms()
        self._writer.check_room()
        rows, level = admission.admit(
            admission.as_columns(batch),
            now_ms=now_ms,
            delay_ms_max=self._settings.delay_ms_max,
            host=self._host,
            table=self._scheduling.levels.table,
        )
        return rows, level, now_ms

    def prepare(self, rows: pa.RecordBatch, now_ms: int, level: Int64Array | None = None) -> pa.RecordBatch:
        """Bring LOG_SCHEMA rows to the form that the log stores, still without queue offsets.

        `level` is the second result of `admission.admit`. The topics of scheduled messages must exist (see
        `make_topics`). Raises OverLimit if a backlog is full.
        """
        # The schedule topic is created at the first use of a level, so other brokers do not have it.
        if level is not None:
            self._topics.ensure(SCHEDULE_TOPIC, self._scheduling.levels.table.queues)
            rows = admission.into_level_queues(rows, level)
        return rows if self._compacts else admission.kept_by(self._scheduling.backlog, rows, now_ms)

    def make_topics(self, rows: pa.RecordBatch) -> None:
        """Create the missing topics of these rows. For topics that no client has chosen. Raises OverLimit.

        The topic of a scheduled message exists from the moment it is accepted, so tools can show it.
        """
        for name in codes_of(rows.column("topic"))[1]:
            self._topics.ensure(name)

    def _accept(
        self, rows: pa.RecordBatch, level: Int64Array | None, now_ms: int
    ) -> tuple[Accepted, asyncio.Future[int]]:
        first_seq, rows, durable = self.append(self.prepare(rows, now_ms, level))
        return Accepted(first_seq, rows.num_rows, now_ms, rows), durable

    def append(
        self, rows: pa.RecordBatch, then: Callable[[], None] | None = None, *, is_duration: bool = False
    ) -> Appended:
        """Append rows that `prepare` returned, or some of them.

        `then` is called in log order when the rows are durable and the caches are up to date. `is_duration` marks all
        scheduled messages among them as due after a duration, though their rows do not state it.
        """
        kinds = rows.column("kind").to_numpy()
        offsets = rows.column("queue_offset")
        # Visible rows get an offset, and so do rows of a delay level. `into_level_queues` has set the offset of the
        # latter to 0.
        gets_place = np.isin(kinds, _VISIBLE)
        if offsets.null_count < len(offsets):
            gets_place |= np.asarray(offsets.is_valid())
        has_place = np.flatnonzero(gets_place)
        placement = None
        if len(has_place):
            rows, placement = self._place(rows, has_place)
        # No await between this line and the append: no other append may come between them.
        first_seq = self._writer.next_seq

        def on_durable() -> None:
            self._landed(rows, first_seq, has_place, placement, is_duration=is_duration)
            if then is not None:
                then()

        _, durable = self._writer.append(rows, on_durable=on_durable)
        return Appended(first_seq, rows, durable)

    def append_few(self, values: list[LogRow], then: Callable[[], None] | None = None) -> asyncio.Future[int]:
        """`append` for a few rows given as values.

        None may need an offset: scheduled messages with a due time, or cancels.
        """
        rows, writer = self._build(values), self._writer
        first_seq = writer.next_seq
        scheduled = [at for at, row in enumerate(values) if row[_KIND] == Kind.SCHEDULED]
        stored_bytes = sum(
            stored_size(values[at][_TOPIC], values[at][_BODY] or b"", values[at][_PROPERTIES])
            for at in scheduled
        )

        def on_durable() -> None:
            if scheduled:
                now_ms, next_seq = values[-1][_STORE_MS], first_seq + len(values)
                waiting = numbered(rows, [first_seq + at for at in scheduled], scheduled)
                # All of them are leases, which are durations. Sends do not pass here.
                lasting = np.ones(len(scheduled), np.bool_)
                self._wait(waiting, pairs_of(waiting), now_ms, stored_bytes, next_seq, lasting)
            if then is not None:
                then()

        _, durable = writer.append(rows, on_durable=on_durable)
        return durable

    def _place(self, rows: pa.RecordBatch, visible: Int64Array) -> tuple[pa.RecordBatch, Placement]:
        """Assign queue and offset to the rows at the positions `visible`: visible rows, and rows of a delay level."""
        # Usually all rows get an offset. Then two columns are replaced, and no row is copied.
        if len(visible) == rows.num_rows:
            placement = self._topics.place(rows)
            return _with_places(
                rows, pa.array(placement.queue_id.astype(np.int32)), pa.array(placement.queue_offset)
            ), placement
        # Only these rows: scheduled messages must not use up offsets of their topic.
        placement = self._topics.place(rows.take(pa.array(visible)))
        # META rows have no queue
        queue_id = filled(rows.column("queue_id"), -1).to_numpy().copy()
        queue_offset = np.zeros(rows.num_rows, dtype=np.int64)
        hidden = np.ones(rows.num_rows, dtype=np.bool_)
        queue_id[visible], queue_offset[visible], hidden[visible] = (
            placement.queue_id, placement.queue_offset, False,
        )  # fmt: skip
        return _with_places(rows, pa.array(queue_id), pa.array(queue_offset, mask=hidden)), placement

    def _landed(
        self,
        rows: pa.RecordBatch,
        first_seq: int,
        has_place: Int64Array,
        placement: Placement | None,
        *,
        is_duration: bool,
    ) -> None:
        """Index the visible rows of a durable batch, and add its scheduled messages to the schedule."""
        if placement is not None:
            placement.index(first_seq, first_seq + has_place)
            self._visible(placement)
        kinds = rows.column("kind").to_numpy()
        scheduled = (kinds == Kind.SCHEDULED) | (kinds == Kind.MOVED)
        if scheduled.any():
            self._scheduled(rows, first_seq, scheduled, is_duration=is_duration)

    def _visible(self, places: Placement | FewPlaces) -> None:
        """Count rows that are in the queue indexes, and wake the consumers, which must find the rows there."""
        places.count(self._rates)
        self._waiters.wake_queues(places.queues())

    def _scheduled(
        self, rows: pa.RecordBatch, first_seq: int, scheduled: BoolArray, *, is_duration: bool
    ) -> None:
        """Add the scheduled messages of a durable batch to the schedule."""
        scheduled_rows = with_seq(rows, first_seq)
        now_ms = rows.column("store_ms")[-1].as_py()
        # A scheduled message with a queue offset waits for a delay level, and only in `levels`.
        in_level = scheduled & np.asarray(rows.column("queue_offset").is_valid())
        if in_level.any():
            of_level = scheduled_rows.filter(pa.array(in_level))
            self._scheduling.scheduler.add(self._scheduling.levels, of_level, pairs_of(of_level), now_ms)
            scheduled = scheduled & ~in_level
        if scheduled.any():
            of_instant = scheduled_rows if scheduled.all() else scheduled_rows.filter(pa.array(scheduled))
            stored_bytes = int(stored_sizes(of_instant).sum())
            lasting = durations.is_duration(of_instant)
            if is_duration:
                lasting = np.ones(of_instant.num_rows, np.bool_)
            self._wait(
                of_instant, pairs_of(of_instant), now_ms, stored_bytes, first_seq + rows.num_rows, lasting
            )

    def _wait(
        self,
        scheduled_rows: ReadRows,
        pairs: Pairs,
        now_ms: int,
        stored_bytes: int,
        next_seq: int,
        lasting: BoolArray | None,
    ) -> None:
        """Add durable messages with a due time to the schedule.

        They were stored at `now_ms`, the last one before `next_seq`. `lasting` marks those that are due after a
        duration. None means that there are none.
        """
        # RocketMQ counts messages with a due time under its timer's topic, and its tools look for them there.
        self._rates.put(TIMER_TOPIC, scheduled_rows.num_rows, stored_bytes)
        self._scheduling.scheduler.add(self._scheduling.backlog, scheduled_rows, pairs, now_ms, lasting)
        if self._compacts:
            self._tail_count.add(next_seq, scheduled_rows.num_rows)


def _with_places(rows: pa.RecordBatch, queue_id: pa.Array, queue_offset: pa.Array) -> pa.RecordBatch:
    columns = rows.columns
    columns[_QUEUE_ID], columns[_QUEUE_OFFSET] = queue_id, queue_offset
    return pa.RecordBatch.from_arrays(columns, schema=LOG_SCHEMA)
