"""From a batch to the log: admission and policy, places in queues, and the caches that learn of the rows after.

Decided rows take two steps, since a decision may stand between them. All refusals are in `prepare`: a topic that may
not be made, a backlog that is full. `append` refuses only a frame too large or a log that has stopped, gives out the
places, and is called without a pause after the decision; so a promise is never settled for a row that is not written.

Rows of several kinds may share a batch, and then all of them are in the log or none is: a CANCEL beside what takes
the place of the promise it names.
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

from timeball.access import ANONYMOUS, Caller
from timeball.answers import SentState
from timeball.broker import admission, durations, few_sends
from timeball.broker.components import Components
from timeball.broker.few_sends import SendRuns, Sends
from timeball.broker.policy import Policy
from timeball.broker.rates import TIMER_TOPIC
from timeball.broker.registry.few_places import FewPlaces
from timeball.broker.registry.meta import Change
from timeball.broker.registry.topics import Placement
from timeball.broker.waiters import Waiters
from timeball.log.few_rows import (
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
from timeball.message import (
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

# Looked up once: every append replaces these two columns.
_QUEUE_ID, _QUEUE_OFFSET = (LOG_SCHEMA.get_field_index(name) for name in ("queue_id", "queue_offset"))
_KIND, _TOPIC, _BODY, _PROPERTIES, _STORE_MS = (
    LOG_SCHEMA.get_field_index(name) for name in ("kind", "topic", "body", "properties", "store_ms")
)
BoolArray = npt.NDArray[np.bool_]
_TOPIC_OF = itemgetter(SEND_NAMES.index("topic"))
_VISIBLE = [int(Kind.MESSAGE), int(Kind.RELEASE)]
# From the number of a send's first row, and its store time, to what else changes in its frame.
MakeChange = Callable[[int, int], Change]


class Appended(NamedTuple):
    """Rows as they stand in the log (LOG_SCHEMA), the first one's number, and when they are durable."""

    first_seq: int
    rows: pa.RecordBatch
    durable: asyncio.Future[int]


class Sent(NamedTuple):
    """The outcome of a send that is repeated: `outcome` as in answers.SendAck, and the states of its messages now."""

    outcome: str
    states: list[SentState]


class Accepted(msgspec.Struct, frozen=True):
    """A batch is in the log: its rows are first_seq, first_seq + 1, …; those in a queue have their place there.

    `sent`: of a batch that was in the log before, its outcome; `written` is empty then.
    """

    first_seq: int
    rows: int
    store_ms: int
    written: Rows
    sent: Sent | None = None

    @property
    def kept(self) -> pa.RecordBatch:
        """Return the rows as they stand in the log (LOG_SCHEMA)."""
        return as_batch(self.written)

    def places(self) -> tuple[list[int], list[int | None]]:
        """Return queue and offset of each row; what waits for an instant has no offset yet."""
        if isinstance(self.written, EncodedRows):
            return self.written.queue_ids, self.written.queue_offsets
        columns = self.written.columns
        offsets = columns[_QUEUE_OFFSET]
        # By numpy where it can say it, at a third of the cost.
        given = offsets.to_pylist() if offsets.null_count else offsets.to_numpy().tolist()
        return columns[_QUEUE_ID].to_numpy().tolist(), given


class TailCount:
    """About how many promises stand in the log since the watermark: enough to decide whether to compact."""

    STEP = 4_096

    def __init__(self, watermark: int, rows: int) -> None:
        self._marks: list[tuple[int, int]] = [(watermark, 0)]  # (seq, promises counted before it)
        self._total = rows
        self._end = watermark  # after the last promise added

    @property
    def rows(self) -> int:
        """Return the promises since the watermark, to within `STEP`."""
        return self._total - self._marks[0][1]

    def add(self, next_seq: int, rows: int) -> None:
        """Count `rows` more promises, the last one before `next_seq`."""
        self._total += rows
        self._end = next_seq
        # A mark for each STEP promises: the count is wrong by less than that after the watermark has moved.
        if self._total - self._marks[-1][1] >= self.STEP:
            self._marks.append((next_seq, self._total))

    def drop_below(self, watermark: int) -> None:
        """Count from a watermark that has moved."""
        if watermark >= self._end:
            self._marks = [(watermark, self._total)]
        else:
            at = bisect_right(self._marks, (watermark, 1 << 62)) - 1
            self._marks = self._marks[max(0, at) :]


class Appender:
    """Admits, prepares and appends rows. Belongs to the event loop. `tail_count` counts the promises in the tail."""

    def __init__(self, parts: Components, policy: Policy, waiters: Waiters, tail_count: TailCount) -> None:
        self._compacts, self._host = parts.compacts, parts.settings.host
        self._build = builder_of(parts.settings.codec)
        self._parts, self._policy, self._waiters, self._tail_count = parts, policy, waiters, tail_count

    def send(self, sends: Sends, caller: Caller = ANONYMOUS) -> tuple[Accepted, asyncio.Future[int]]:
        """Accept a batch, whole or not at all; the order of calls is the order in the log."""
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
        """`send`, for what its edge can encode; None for what goes the other ways, or is refused there."""
        parts = self._parts
        # The texts and bodies were checked as they were read. What is left to decide: topics, room, and instants.
        topics = self._policy.destinations(runs.topics, caller)
        if topics is None:
            return None
        now_ms = parts.clock.now_ms()
        parts.writer.check_room()
        # What waits for an instant may be refused by its backlog, or changed: then it goes the way of columns.
        last_ms = now_ms + parts.settings.delay_ms_max if self._compacts else -1
        sends = runs.log_rows(topics, now_ms, last_ms, self._host)
        return None if sends is None else self._append_few(sends, now_ms)

    def _send_few(self, batch: SendBatch, caller: Caller) -> tuple[Accepted, asyncio.Future[int]] | None:
        """`send`, for a few plain rows; None for what goes the way of columns, or is refused there."""
        parts, few = self._parts, few_sends.rows_in(batch) if isinstance(batch, pa.RecordBatch) else batch
        now_ms = parts.clock.now_ms()
        delay_ms_max, may_wait = parts.settings.delay_ms_max, self._compacts
        if few is None or not few_sends.are_plain(few, now_ms, delay_ms_max, may_wait=may_wait):
            return None
        parts.writer.check_room()
        topics = self._policy.destinations(set(map(_TOPIC_OF, few)), caller)
        if topics is None:
            return None
        return self._append_few(few_sends.log_rows(few, topics, now_ms, self._host, self._build), now_ms)

    def _append_few(self, sends: few_sends.FewSends, now_ms: int) -> tuple[Accepted, asyncio.Future[int]]:
        """Append rows whose places are chosen; the commit begins at once."""
        parts, (rows, places, promised, promised_bytes) = self._parts, sends
        # Read right before the append, without a pause: no other append can come between.
        first_seq = parts.writer.next_seq

        def on_durable() -> None:
            if places is not None:
                places.index(first_seq)
                self._visible(places)
            if promised:
                waiting = numbered(rows, [first_seq + at for at in promised], promised)
                # To search the bytes of all costs less than to decode one row. Nearly always there is no timer.
                message = rows.message if isinstance(rows.message, bytes) else rows.message.to_pybytes()
                lasting = durations.lasting_of(waiting) if durations.TIMER_PREFIX in message else None
                self._wait(
                    waiting, pairs_of(waiting), now_ms, promised_bytes, first_seq + rows.num_rows, lasting
                )

        _, durable = parts.writer.append(rows, on_durable=on_durable)
        # Behind the append, which may refuse, and without a pause, so that no other row gets these places.
        if places is not None:
            places.give_out()
        parts.writer.commit()  # a turn of the loop costs as much as the placing of ten rows
        return Accepted(first_seq, rows.num_rows, now_ms, rows), durable

    def send_again(self, batch: pa.RecordBatch) -> asyncio.Future[int]:
        """Append copies of accepted messages that go back to a group; no client has chosen their topics."""
        rows, level, now_ms = self.admit(batch)
        self.make_topics(rows)
        return self._accept(rows, level, now_ms)[1]

    def send_with(
        self, batch: SendBatch, change: MakeChange, caller: Caller | None = None
    ) -> tuple[Accepted, asyncio.Future[int]]:
        """`send`, with the rows of a change in the same frame; without a caller, no client has chosen the topics.

        `change` is asked once nothing else may refuse.
        """
        rows, level, now_ms = self.admit(batch)
        if caller is None:
            self.make_topics(rows)
        else:
            self._policy.admit(codes_of(rows.column("topic"))[1], caller)
        rows = self.prepare(rows, now_ms, level)
        # Behind all that may append rows of its own: topics that are made.
        changed = change(self._parts.writer.next_seq, now_ms)
        first_seq, written, durable = self.append(pa.concat_batches([rows, changed.rows]))
        changed.keep()
        return Accepted(first_seq, rows.num_rows, now_ms, written.slice(0, rows.num_rows)), durable

    def admit(self, batch: SendBatch) -> tuple[pa.RecordBatch, Int64Array | None, int]:
        """Return the rows and levels of `admission.admit`, and their store time; raises what it raises."""
        # One reading of the clock for all rows of a batch: they share their store time, and delays count from it.
        parts, now_ms = self._parts, self._parts.clock.now_ms()
        parts.writer.check_room()
        rows, level = admission.admit(
            admission.as_columns(batch),
            now_ms=now_ms,
            delay_ms_max=parts.settings.delay_ms_max,
            host=self._host,
            table=parts.levels.table,
        )
        return rows, level, now_ms

    def prepare(self, rows: pa.RecordBatch, now_ms: int, level: Int64Array | None = None) -> pa.RecordBatch:
        """Return LOG_SCHEMA rows as the log will hold them, without places; `level` as `admission.admit` gives it.

        The topics of promises are there: see `make_topics`. Raises OverLimit when a backlog is full.
        """
        parts = self._parts
        # The topic of the levels is made only when a level is used: brokers without them have one topic less.
        if level is not None:
            parts.topics.ensure(SCHEDULE_TOPIC, parts.levels.table.queues)
            rows = admission.into_level_queues(rows, level)
        return rows if self._compacts else admission.kept_by(parts.backlog, rows, now_ms)

    def make_topics(self, rows: pa.RecordBatch) -> None:
        """Make the topics of these rows that are missing, which no client has chosen; raises OverLimit.

        A promise has its topic from the moment it is accepted, so that tools see what it is for.
        """
        for name in codes_of(rows.column("topic"))[1]:
            self._parts.topics.ensure(name)

    def _accept(
        self, rows: pa.RecordBatch, level: Int64Array | None, now_ms: int
    ) -> tuple[Accepted, asyncio.Future[int]]:
        first_seq, rows, durable = self.append(self.prepare(rows, now_ms, level))
        return Accepted(first_seq, rows.num_rows, now_ms, rows), durable

    def append(
        self, rows: pa.RecordBatch, then: Callable[[], None] | None = None, *, is_lasting: bool = False
    ) -> Appended:
        """Append rows that `prepare` has returned, or some of them.

        `then` is called in log order when they are durable, after the caches know them. `is_lasting`: all that are for
        later are durations, though their rows do not say so.
        """
        kinds = rows.column("kind").to_numpy()
        offsets = rows.column("queue_offset")
        # Visible rows, and promises of a level: `into_level_queues` has marked those with an offset, still 0.
        gets_place = np.isin(kinds, _VISIBLE)
        if offsets.null_count < len(offsets):
            gets_place |= np.asarray(offsets.is_valid())
        has_place = np.flatnonzero(gets_place)
        placement = None
        if len(has_place):
            rows, placement = self._place(rows, has_place)
        # Read right before the append, without a pause: no other append can come between.
        first_seq = self._parts.writer.next_seq

        def on_durable() -> None:
            self._landed(rows, first_seq, has_place, placement, is_lasting=is_lasting)
            if then is not None:
                then()

        _, durable = self._parts.writer.append(rows, on_durable=on_durable)
        return Appended(first_seq, rows, durable)

    def append_few(self, values: list[LogRow], then: Callable[[], None] | None = None) -> asyncio.Future[int]:
        """`append`, for a few rows as values; all need no place: promises for an instant, or cancels."""
        rows, writer = self._build(values), self._parts.writer
        first_seq = writer.next_seq
        promised = [at for at, row in enumerate(values) if row[_KIND] == Kind.PROMISE]
        stored_bytes = sum(
            stored_size(values[at][_TOPIC], values[at][_BODY] or b"", values[at][_PROPERTIES])
            for at in promised
        )

        def on_durable() -> None:
            if promised:
                now_ms, next_seq = values[-1][_STORE_MS], first_seq + len(values)
                waiting = numbered(rows, [first_seq + at for at in promised], promised)
                # Leases, all of them: sends have another way.
                lasting = np.ones(len(promised), np.bool_)
                self._wait(waiting, pairs_of(waiting), now_ms, stored_bytes, next_seq, lasting)
            if then is not None:
                then()

        _, durable = writer.append(rows, on_durable=on_durable)
        return durable

    def _place(self, rows: pa.RecordBatch, visible: Int64Array) -> tuple[pa.RecordBatch, Placement]:
        """Give the rows that are visible, or wait in a level's queue, their queue and offset."""
        # The usual batch has one kind of row; then its columns are replaced, and no row is copied.
        if len(visible) == rows.num_rows:
            placement = self._parts.topics.place(rows)
            return _with_places(
                rows, pa.array(placement.queue_id.astype(np.int32)), pa.array(placement.queue_offset)
            ), placement
        # Only the rows that get a place: promises for an instant must not use up offsets of their topic.
        placement = self._parts.topics.place(rows.take(pa.array(visible)))
        # META rows have none.
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
        is_lasting: bool,
    ) -> None:
        """Index the visible rows of a durable batch, and hand its promises to the schedule."""
        if placement is not None:
            placement.index(first_seq, first_seq + has_place)
            self._visible(placement)
        kinds = rows.column("kind").to_numpy()
        promised = (kinds == Kind.PROMISE) | (kinds == Kind.MOVED)
        if promised.any():
            self._promised(rows, first_seq, promised, is_lasting=is_lasting)

    def _visible(self, places: Placement | FewPlaces) -> None:
        """Count rows that are in their queues' indexes, and wake consumers: these must find the rows."""
        places.count(self._parts.rates)
        self._waiters.wake_queues(places.queues())

    def _promised(
        self, rows: pa.RecordBatch, first_seq: int, promised: BoolArray, *, is_lasting: bool
    ) -> None:
        """Hand the promises of a durable batch to the schedule."""
        parts, promises = self._parts, with_seq(rows, first_seq)
        now_ms = rows.column("store_ms")[-1].as_py()
        # A promise with a place in a queue waits for a delay level, and nowhere else.
        in_level = promised & np.asarray(rows.column("queue_offset").is_valid())
        if in_level.any():
            of_level = promises.filter(pa.array(in_level))
            parts.scheduler.add(parts.levels, of_level, pairs_of(of_level), now_ms)
            promised = promised & ~in_level
        if promised.any():
            of_instant = promises if promised.all() else promises.filter(pa.array(promised))
            stored_bytes = int(stored_sizes(of_instant).sum())
            lasting = durations.lasting_in(of_instant)
            if is_lasting:
                lasting = np.ones(of_instant.num_rows, np.bool_)
            self._wait(
                of_instant, pairs_of(of_instant), now_ms, stored_bytes, first_seq + rows.num_rows, lasting
            )

    def _wait(
        self,
        promises: ReadRows,
        pairs: Pairs,
        now_ms: int,
        stored_bytes: int,
        next_seq: int,
        lasting: BoolArray | None,
    ) -> None:
        """Hand durable promises for an instant, stored at `now_ms`, to the schedule; the last one before `next_seq`.

        `lasting`: which of them are durations; None: none.
        """
        # RocketMQ counts what waits for an instant under its timer's topic; its tools look for it there.
        self._parts.rates.put(TIMER_TOPIC, promises.num_rows, stored_bytes)
        self._parts.scheduler.add(self._parts.backlog, promises, pairs, now_ms, lasting)
        if self._compacts:
            self._tail_count.add(next_seq, promises.num_rows)


def _with_places(rows: pa.RecordBatch, queue_id: pa.Array, queue_offset: pa.Array) -> pa.RecordBatch:
    columns = rows.columns
    columns[_QUEUE_ID], columns[_QUEUE_OFFSET] = queue_id, queue_offset
    return pa.RecordBatch.from_arrays(columns, schema=LOG_SCHEMA)
