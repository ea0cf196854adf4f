"""Delivery: when a scheduled message is due, append its release record, which is the visible message.

The release is exactly once, because it is a single write: no second write can be lost or doubled. The release record
names its scheduled message, so a restart that finds the record knows that the scheduled message is settled (released
or cancelled). This module checks once more, independently of the schedule, that no message is early (guarantee G2).
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from timeball.broker.accepting.expiry import REASON as EXPIRED
from timeball.broker.accepting.expiry import Expired, find_expired
from timeball.broker.accepting.wake_ups import WakeUps, build_wake_ups, without_base
from timeball.broker.recurring.successors import Positions, Successors
from timeball.broker.registry.queue_offsets import QueueOffsets
from timeball.broker.registry.rates import Rates, Stat
from timeball.broker.registry.redeliveries import Redeliveries
from timeball.broker.registry.selections import CONDITION_COLUMNS, Described, Selections, States
from timeball.broker.registry.topics import Placement, Topics, check_topic
from timeball.io.clock import SchedulerClock
from timeball.log.row_encoder import (
    Build,
    EncodedRows,
    NumberedRows,
    Pairs,
    ReadRows,
    build,
    pairs_of,
    read_batch,
    stored_size,
)
from timeball.log.writer import LogWriter
from timeball.model import limits
from timeball.model.config import Settings
from timeball.model.errors import OutOfRange, OverLimit
from timeball.model.message import (
    BASE,
    CANCEL_REASON,
    LOG_SCHEMA,
    READ_SCHEMA,
    Int64Array,
    Kind,
    LogRow,
    ReadRow,
    build_rows,
    encode_properties,
    int64,
    release_row,
)
from timeball.model.send_options import EXPIRED_PREFIX, EXPIRES
from timeball.schedule.backlog import Bools
from timeball.schedule.hour_log import scheduled_from_table
from timeball.schedule.level_cascade import NAME as TIMING_LIST
from timeball.schedule.level_cascade import without_list
from timeball.schedule.locations import FEW, with_column
from timeball.schedule.scheduler import Scheduler
from timeball.schedule.ticker import HOLD_NS, OCCURRENCE_NS_MIN, IndexingTime

FEW_ROWS = 64  # for more rows, columns cost less
FEW_BYTES = limits.REQUEST_BYTES_MAX // 64
_BODY, _PROPERTIES, _DUE_MS, _STORE_MS = map(
    READ_SCHEMA.get_field_index, ("body", "properties", "due_ms", "store_ms")
)


@dataclass(frozen=True, slots=True)
class Brought:
    """The result of a dispatcher's batch."""

    released: int  # rows that were released durably
    left: int  # rows that were not released, because their messages were not pending


class Delivery:
    """Appends the release records of due messages. Also writes rows of pending messages again (`rewrite`)."""

    def __init__(
        self,
        *,
        on_visible: Callable[[list[tuple[str, int]]], None],
        lateness: Lateness,
        clock: SchedulerClock,
        writer: LogWriter,
        topics: Topics,
        redeliveries: Redeliveries,
        scheduler: Scheduler,
        rates: Rates,
        observers: list[Callable[[pa.RecordBatch, int], None]],
        successors: Successors,
        selections: Selections,
        add_scheduled: Callable[[pa.RecordBatch, int], None],
        encode_scheduled: Callable[[pa.RecordBatch, int], pa.RecordBatch],
        settings: Settings,
    ) -> None:
        """Create the delivery.

        It calls `on_visible` with the queues that have new messages, as (topic, queue number). It calls the `observers`
        with the rows (READ_SCHEMA) that were released, and the time in ms. `successors` continues the schedules of
        released occurrences. `add_scheduled` adds durable rows to the schedule (`Appender.add_scheduled`). `selections`
        may cancel or delay messages that the schedule hands out. `encode_scheduled` converts rows of delayed messages
        to the form that the log stores (`Appender.encode_scheduled`).
        """
        self._clock, self._writer, self._topics = clock, writer, topics
        self._redeliveries, self._scheduler = redeliveries, scheduler
        self._rates = rates
        self._on_visible, self._lateness, self.observers = on_visible, lateness, observers
        self._successors, self._add_scheduled = successors, add_scheduled
        self._occurrences, self._selections = successors.occurrences, selections
        self._all_selections = selections.values
        self._encode_scheduled, self._host = encode_scheduled, settings.host
        self._hold_ms = settings.delay_ms_max  # the delay of the wake-up of a held message
        self.indexing = IndexingTime()
        # Called when a few releases were appended: rows that wait for a commit may join theirs.
        self.append_callbacks: list[Callable[[], None]] = []

    def release(self, scheduled_rows: ReadRows, now_ms: int) -> asyncio.Future[int]:
        """Append release records for messages that are due at `now_ms`, or CANCEL or MOVED rows (`_release_or_cancel`).

        The ticker calls this. The future is done when all rows are durable.
        """
        pairs = pairs_of(scheduled_rows)
        # No call if there are no schedules and no selections, because each release comes here.
        has_occurrences = self._occurrences.count and self._successors.has_any(pairs[1])
        states = self._states(scheduled_rows, now_ms) if self._all_selections else None
        # The estimate shrinks without a measurement. Otherwise one slow rule would limit the hand-outs for ever.
        if not has_occurrences:
            self.indexing.occurrence_ns = max(self.indexing.occurrence_ns // 2, OCCURRENCE_NS_MIN)
        if has_occurrences or states is not None:
            begin = 0
            # In half frames, because the successors in the same frame have the same bodies.
            for frame_rows in split_into_frames(read_batch(scheduled_rows), parts=2):
                end = begin + frame_rows.num_rows
                durable = self._release_or_cancel(
                    frame_rows, now_ms, None if states is None else states.part(slice(begin, end))
                )
                begin = end
            # The future of the last frame is enough: frames become durable in the order of their appends.
            return durable
        values = values_if_few(scheduled_rows)
        if values is not None:
            return self._release_few(scheduled_rows, values, pairs, now_ms)
        for frame_rows in split_into_frames(read_batch(scheduled_rows)):
            durable = self._release_frame(frame_rows, now_ms)
        return durable

    def _release_few(
        self, scheduled_rows: ReadRows, values: Sequence[ReadRow], pairs: Pairs, now_ms: int
    ) -> asyncio.Future[int]:
        """Append the releases of a few messages, row by row.

        `values` are their rows as values, `pairs` their due times and numbers.
        """
        releases, queue_offsets = build_few_releases(values, self._topics, now_ms, build)
        first_seq = self._writer.next_seq
        # Lateness counts from the acceptance if the due time had already passed then, because the broker did not miss
        # that due time.
        begin_ms = np.array([max(row[_DUE_MS], row[_STORE_MS]) for row in values], dtype=np.int64)
        durable = self._writer.append(
            releases,
            on_durable=lambda: self._on_durable(scheduled_rows, pairs, begin_ms, first_seq, queue_offsets),
        )[1]
        queue_offsets.reserve_offsets()  # without an await after the append, so that no other row gets these offsets
        for callback in self.append_callbacks[:]:
            callback()
        return durable

    def _release_frame(self, scheduled_rows: pa.RecordBatch, now_ms: int) -> asyncio.Future[int]:
        """Append the releases of one frame of messages. If some have expired, `_release_or_cancel` appends all rows."""
        if find_expired(scheduled_rows, now_ms) is not None:
            return self._release_or_cancel(scheduled_rows, now_ms, None)
        rows, placement = self._place(scheduled_rows, now_ms)
        first_seq, pairs = self._writer.next_seq, pairs_of(scheduled_rows)
        begin_ms = np.maximum(pairs[0], int64(scheduled_rows.column("store_ms")))  # as in `_release_few`
        return self._writer.append(
            rows, on_durable=lambda: self._on_durable(scheduled_rows, pairs, begin_ms, first_seq, placement)
        )[1]

    def _place(self, scheduled_rows: pa.RecordBatch, now_ms: int) -> tuple[pa.RecordBatch, Placement]:
        """Choose queue offsets, and build the release records. The caller appends them without an await in between."""
        # First, because the index and the rates count the bytes of the properties that a consumer gets.
        scheduled_rows = without_base(without_timing_lists(scheduled_rows))
        # Without an await from here to the append, so that offsets grow in the order of the log.
        placement = self._topics.place(scheduled_rows)
        rows = release_rows(
            scheduled_rows, now_ms=now_ms, queue_id=placement.queue_id, queue_offset=placement.queue_offset
        )
        return rows, placement

    def _states(self, scheduled_rows: ReadRows, now_ms: int) -> States | None:
        """Compute the states that selections give to these messages. None if all are to be released unchanged."""
        selected = self._selections.selected
        _, seq = pairs_of(scheduled_rows)
        # The usual case: all were sent after the selections.
        if not len(selected.woken) and int(seq.min()) >= selected.end_seq:
            return None
        rows = read_batch(scheduled_rows)
        # Selections compare with the due times in log and table, without the steps of the clock.
        due_ms = original_due_ms(rows)
        index = np.flatnonzero(selected.may_change(due_ms, seq))
        if not len(index):
            return None
        chosen = rows.select(["topic", *CONDITION_COLUMNS]).take(pa.array(index))
        numbers = names(rows)[0].to_numpy()[index]
        states = selected.states(
            Described(due_ms[index], seq[index], numbers, chosen.column("topic"), chosen)
        )
        # Add the steps of the clock again: a shifted duration stays shifted.
        states.due_ms[:] += (int64(rows.column("due_ms")) - due_ms)[index]
        is_same = (states.owner < 0) & (states.holder < 0) & (states.mover < 0)
        if bool((is_same & (states.due_ms == int64(rows.column("due_ms"))[index])).all()):
            return None
        return states.among(int64(rows.column("due_ms")), index)

    def _release_or_cancel(
        self, scheduled_rows: pa.RecordBatch, now_ms: int, states: States | None
    ) -> asyncio.Future[int]:
        """Append one row for each message of a frame, and the rows that continue the schedules of its occurrences.

        A message gets a CANCEL row for the first of these reasons that applies: a selection has cancelled it, it is a
        missed or overlapping occurrence, or it has expired and is not to be moved. If a selection holds or delays it,
        it gets a wake-up (a MOVED row). Any other message is released: an expired message into another topic.
        """
        began_ns = self._clock.clock.monotonic_ns()
        seq = int64(scheduled_rows.column("seq"))
        selection_cancels, must_wait = _split_by_state(scheduled_rows, now_ms, states)
        rerouted_rows = scheduled_rows if states is None else self._into_topics(scheduled_rows, states)
        expired = _find_expired(rerouted_rows, now_ms, states)
        # A selection decides first: a message that it cancels or delays is not among the expired messages.
        no_message = np.zeros(len(seq), np.bool_)
        is_expired = no_message if expired is None else expired.any_of & ~(selection_cancels | must_wait)
        # An occurrence that waits leaves its schedule, as if it was rescheduled.
        continuation = self._successors.after_release(seq, now_ms, selection_cancels | must_wait, is_expired)
        if continuation.occurrences:
            self._measure_rules(began_ns, continuation.occurrences)
        # The reasons of the cancels below. "" for all other messages, also for messages that selections cancel.
        reasons = np.full(len(seq), "", object)
        for index, reason in continuation.cancelled.items():
            reasons[index] = reason
        # An occurrence that was also missed is not delivered at all, so it is not moved either.
        is_expired = is_expired & (reasons == "")
        released, parts, placement = rerouted_rows, list[pa.RecordBatch](), None
        if expired is not None:
            moved = self._can_move(rerouted_rows, expired.moved & is_expired)
            reasons[is_expired & ~moved] = EXPIRED
            released = _into_expired_topics(rerouted_rows, moved)
        not_released = selection_cancels | must_wait | (reasons != "")
        if not_released.any():
            released = released.filter(pa.array(~not_released))
        if released.num_rows:
            rows, placement = self._place(released, now_ms)
            parts.append(rows)  # the queue index expects the released rows first
        for reason in sorted(set(reasons) - {""}):
            rows = scheduled_rows.filter(pa.array(reasons == reason))
            parts.append(cancel_rows(rows, now_ms, encode_properties({CANCEL_REASON: reason})))
        cancelled = (
            [] if states is None else self._cancels_by_id(scheduled_rows, now_ms, states, selection_cancels)
        )
        parts += [rows for _, rows in cancelled]
        woken = None
        if must_wait.any() and states is not None:
            woken = self._wake_ups(scheduled_rows.filter(pa.array(must_wait)), states.part(must_wait), now_ms)
            parts.append(woken.rows)
        # Read only now, because the creation of topics above appends rows.
        first_seq = self._writer.next_seq
        positions = (
            None if placement is None else _positions(placement, ~not_released, scheduled_rows, rerouted_rows)
        )
        # Each due message has exactly one row in `parts`, so these rows follow after that many.
        added, added_seq = continuation.rows(first_seq + len(seq), positions), first_seq + len(seq)
        begin_ms = np.maximum(int64(released.column("due_ms")), int64(released.column("store_ms")))
        expired_topics = _topics_in(rerouted_rows, is_expired)

        def on_durable() -> None:
            """Update the caches: all rows of the frame are durable."""
            pairs = pairs_of(scheduled_rows)
            self._on_durable(released, pairs, begin_ms, first_seq, placement, not_released)
            for selection_id, rows in cancelled:
                self._selections.ended(selection_id, rows.num_rows)
            self._rates.add_each(Stat.EXPIRED_NUMS, expired_topics)
            if woken is not None:
                woken_seq = added_seq - woken.rows.num_rows
                woken.remember(woken_seq, self._scheduler.outcomes.moved, self._selections.woken)
                self._add_scheduled(woken.rows, woken_seq)
            self._add_scheduled(added, added_seq)

        durable = self._writer.append(pa.concat_batches([*parts, added]), on_durable=on_durable)[1]
        continuation.apply()
        return durable

    def _wake_ups(self, scheduled_rows: pa.RecordBatch, states: States, now_ms: int) -> WakeUps:
        """Build the wake-ups of messages that are not to be released yet."""
        # A held message is due as late as possible. If no resume comes before, it then gets another wake-up.
        due_ms = np.where(states.holder >= 0, now_ms + self._hold_ms, states.due_ms)
        return build_wake_ups(
            scheduled_rows, due_ms, references=names(scheduled_rows), from_due_ms=original_due_ms(scheduled_rows),
            woken=self._selections.woken, now_ms=now_ms, host=self._host, encode=self._encode_scheduled,
        )  # fmt: skip

    def _into_topics(self, scheduled_rows: pa.RecordBatch, states: States) -> pa.RecordBatch:
        """Set the topics to which selections have moved messages. A topic that is missing is created."""
        facts, mover = self._selections.selected.facts, states.mover.copy()
        for index in np.unique(mover[mover >= 0]).tolist():
            try:
                self._topics.ensure(facts[index].to_topic)
            # The topic was deleted, and there may be no more topics. A release must not fail, so the messages stay in
            # their own topics.
            except OverLimit:
                mover[mover == index] = -1
        if not (mover >= 0).any():
            return scheduled_rows
        topics = self._selections.selected.topics(scheduled_rows.column("topic"), mover)
        rows = with_column(scheduled_rows, "topic", topics)
        # Any queue: the other topic may have fewer queues.
        is_moved = pa.array(mover >= 0)
        queues = pc.if_else(is_moved, pa.scalar(-1, pa.int32()), scheduled_rows.column("queue_id"))
        return with_column(rows, "queue_id", queues)

    def _measure_rules(self, began_ns: int, occurrences: int) -> None:
        """Measure the time that the rule of an occurrence took, on average since `began_ns`, for the ticker.

        Called before the frame is built: its cost would make small hand-outs smaller and smaller. A higher time counts
        at once, because the next rules may be like these. A lower one halves the estimate at most.
        """
        measured_ns = min((self._clock.clock.monotonic_ns() - began_ns) // occurrences, HOLD_NS)
        self.indexing.occurrence_ns = max(measured_ns, self.indexing.occurrence_ns // 2, OCCURRENCE_NS_MIN)

    def _cancels_by_id(
        self, scheduled_rows: pa.RecordBatch, now_ms: int, states: States, selection_cancels: Bools
    ) -> list[tuple[str, pa.RecordBatch]]:
        """Build the CANCEL rows of each selection, and count their messages. Returns (selection id, rows)."""
        selected, parts = self._selections.selected, list[tuple[str, pa.RecordBatch]]()
        # A message that must wait has no owner here, although a selection may have cancelled it.
        owner = np.where(selection_cancels, states.owner, -1)
        for index in np.unique(owner[owner >= 0]).tolist():
            name, facts = selected.names[index], selected.facts[index]
            rows = scheduled_rows.filter(pa.array(owner == index))
            for topic_count in rows.column("topic").value_counts().to_pylist():
                self._rates.add(Stat.CANCELLED_NUMS, topic_count["values"], topic_count["counts"])
            parts.append((name, cancel_rows(rows, now_ms, facts.reason_properties(name))))
        return parts

    def _can_move(self, scheduled_rows: pa.RecordBatch, is_moved: Bools) -> Bools:
        """Create the %EXPIRED% topics of the messages in the mask `is_moved`. Returns a mask of messages that have one.

        A topic is missing if it cannot be created (OverLimit).
        """
        can_move, topics = is_moved.copy(), scheduled_rows.column("topic")
        for name in topics.filter(pa.array(is_moved)).unique().to_pylist():
            try:
                self._topics.ensure(EXPIRED_PREFIX + name)
            except OverLimit:  # a release must not fail, so the message is cancelled
                can_move &= ~pc.equal(topics, name).to_numpy(zero_copy_only=False)
        return can_move

    def rewrite(self, scheduled_rows: pa.RecordBatch, now_ms: int) -> None:
        """Append the rows of pending messages again, because the schedule needs newer rows. The ticker calls this."""
        for frame_rows in split_into_frames(scheduled_rows):
            self._rewrite_frame(frame_rows, now_ms)

    def _rewrite_frame(self, scheduled_rows: pa.RecordBatch, now_ms: int) -> None:
        """Append MOVED rows with the same due times. When they are durable, give the messages back to the schedule."""
        first_seq, rows = self._writer.next_seq, scheduled_rows.num_rows

        def on_durable() -> None:
            row_seq = np.arange(first_seq, first_seq + rows)
            # Only when durable: until then the message is pending in its old row, where a restart would find it.
            self._scheduler.rewritten(int64(scheduled_rows.column("seq")), row_seq, self._clock.now_ms())

        self._writer.append(moved_rows(scheduled_rows, now_ms=now_ms), on_durable=on_durable)

    def _on_durable(
        self,
        scheduled_rows: ReadRows,
        pairs: Pairs,
        begin_ms: Int64Array,
        first_seq: int,
        placement: Placement | QueueOffsets | None,
        not_released: Bools | None = None,
    ) -> None:
        """Update the caches and wake consumers: the rows of a hand-out are durable.

        `pairs` are the due times and numbers of all messages of the hand-out. `not_released` is a mask of messages that
        got a CANCEL or MOVED row, None if there are none. `scheduled_rows` are the released messages, with queue
        offsets in `placement` (None without released messages), and `begin_ms` contains the times from which their
        lateness counts.
        """
        began_ns = self._clock.clock.monotonic_ns()
        seq = pairs[1]
        queues = list[tuple[str, int]]()
        if placement is not None:
            placement.index(first_seq)
            queues = placement.count(self._rates, released=True)
        now_ms = self._clock.now_ms()
        # After the index: consumers must find the message before it counts as released.
        self._scheduler.released(seq, not_released)
        if self._redeliveries.waiting_rows:
            # Messages in NumberedRows were never moved, so their `seq` is their number.
            numbers = seq if isinstance(scheduled_rows, NumberedRows) else names(scheduled_rows)[0].to_numpy()
            self._redeliveries.end(numbers)
        self._on_visible(queues)
        self._lateness.add(np.maximum(0, now_ms - begin_ms))
        for observe in self.observers if placement is not None else ():
            observe(read_batch(scheduled_rows), now_ms)
        self.indexing.total_ns += self._clock.clock.monotonic_ns() - began_ns

    # -- releases by an external dispatcher, which reads due messages from the files of the pending table --------------

    def lease_to_dispatcher(self, lease_ms: int) -> None:
        """Leave the messages in data files to a dispatcher for `lease_ms`, at most one hour. 0 ends the lease now."""
        self._scheduler.lease(self._clock.now_ms(), lease_ms)

    async def release_dispatched(self, rows: pa.RecordBatch) -> Brought:
        """Release the rows of a dispatcher (TABLE_SCHEMA) that are still pending. The releases are durable on return.

        Messages that were cancelled, brought before, or already loaded by the broker because they were late are not
        released again. So a dispatcher may repeat any call. The bodies are trusted, like the bodies of attached files.
        Raises OutOfRange if a row is not due yet: the dispatcher may bring it again later. Raises the errors of
        `check_topic` for a missing topic with an invalid name.
        """
        # Ordinary releases have the same limit: neither path may fill the memory faster than the disk writes.
        while self._scheduler.in_flight_rows >= limits.RELEASE_ROWS_IN_FLIGHT_MAX:
            await self._writer.flushed()
        now_ms = self._clock.now_ms()
        last_ms = int(int64(rows.column("due_ms")).max())
        # Only the broker's clock counts: a dispatcher whose clock is ahead must not release early (G2).
        if last_ms > now_ms:
            raise OutOfRange(
                f"a row is due at {last_ms}, and the broker's clock shows {now_ms}: send it then"
            )
        for name in rows.column("topic").unique().to_pylist():
            if self._topics.find_topic(name) is None:
                check_topic(name)  # raises for an invalid name, so before any row is in flight
        # No await from here on: rows in flight must be in the log in the same order.
        scheduled_rows = self._scheduler.hand_out_dispatched(
            scheduled_from_table(pa.Table.from_batches([rows]))
        )
        if scheduled_rows is None:
            return Brought(0, rows.num_rows)
        # Shielded: the rows are in flight. If the dispatcher disconnects, the commit, which other rows share, goes on.
        await asyncio.shield(self.release(scheduled_rows, now_ms))
        return Brought(scheduled_rows.num_rows, rows.num_rows - scheduled_rows.num_rows)


def _split_by_state(
    scheduled_rows: pa.RecordBatch, now_ms: int, states: States | None
) -> tuple[Bools, Bools]:
    """Compute masks of messages that selections cancel now and of messages that must wait. They do not overlap."""
    if states is None:
        return np.zeros(scheduled_rows.num_rows, np.bool_), np.zeros(scheduled_rows.num_rows, np.bool_)
    # Cancelled messages are cancelled for good when they are due. A held one waits once, so that an undo restores it.
    has_waited = int64(scheduled_rows.column("due_ms")) > states.due_ms
    must_wait = (states.due_ms > now_ms) | ((states.holder >= 0) & ~((states.owner >= 0) & has_waited))
    return ~must_wait & (states.owner >= 0), must_wait


def _find_expired(scheduled_rows: pa.RecordBatch, now_ms: int, states: States | None) -> Expired | None:
    """Find the expired messages, by the due times of their states. None if there are none."""
    if states is not None:
        scheduled_rows = with_column(scheduled_rows, "due_ms", pa.array(states.due_ms))
    return find_expired(scheduled_rows, now_ms)


def split_into_frames(scheduled_rows: pa.RecordBatch, parts: int = 1) -> Iterator[pa.RecordBatch]:
    """Yield the rows in slices that each fit into a frame: a thousand large bodies may be due in one millisecond.

    A slice has at most 1/`parts` of the bytes that a frame may have, or one row.
    """
    bytes_max = limits.REQUEST_BYTES_MAX // parts
    # Not `nbytes`, which reads each column and takes as long as releasing a row.
    if scheduled_rows.num_rows == 1 or pa.ipc.get_record_batch_size(scheduled_rows) <= bytes_max:
        yield scheduled_rows
        return
    # Halve by rows, and again while a half is too large. A single row always fits (limits.BODY_BYTES_MAX).
    half = scheduled_rows.num_rows // 2
    yield from split_into_frames(scheduled_rows.slice(0, half), parts)
    yield from split_into_frames(scheduled_rows.slice(half), parts)


def names(scheduled_rows: pa.RecordBatch) -> tuple[pa.Array, pa.Array]:
    """Compute the columns `source_seq` and `version_seq` of rows that refer to these scheduled messages.

    `source_seq` is the number of the scheduled message. `version_seq` is its version if that differs from the number,
    else null.
    """
    is_moved = scheduled_rows.column("kind").to_numpy() == Kind.MOVED
    # Almost always no message was moved, so the columns are used as they are.
    if not is_moved.any():
        return scheduled_rows.column("seq"), scheduled_rows.column("version_seq")  # all values are null
    mask, seq = pa.array(is_moved), scheduled_rows.column("seq")
    return pc.if_else(mask, scheduled_rows.column("source_seq"), seq), pc.if_else(
        mask, seq, pa.scalar(None, pa.int64())
    )


def without_timing_lists(scheduled_rows: pa.RecordBatch) -> pa.RecordBatch:
    """Remove the timing list, a property in which a level cascade stores its levels.

    The delivery does this and not the backlog, because another strategy or a data file may have taken over a message
    together with its list.
    """
    properties = scheduled_rows.column("properties")
    if not pc.any(pc.match_substring(properties, TIMING_LIST)).as_py():  # usually no row has a list
        return scheduled_rows
    return with_column(scheduled_rows, "properties", without_list(properties))


def release_rows(
    scheduled_rows: pa.RecordBatch, *, now_ms: int, queue_id: Int64Array, queue_offset: Int64Array
) -> pa.RecordBatch:
    """Build LOG_SCHEMA release records for READ_SCHEMA scheduled messages, in the same order."""
    due_ms = int64(scheduled_rows.column("due_ms"))
    # Guarantee G2 is checked once more here, because everything before this line is a cache.
    assert len(due_ms) and int(due_ms.max()) <= now_ms, (
        "a scheduled message must never be released before its due time"
    )
    number, version = names(scheduled_rows)
    changed = {
        "kind": pa.array(np.full(len(due_ms), Kind.RELEASE, dtype=np.int8)),
        "queue_id": pa.array(queue_id.astype(np.int32)),
        "queue_offset": pa.array(queue_offset),
        "store_ms": pa.array(np.full(len(due_ms), now_ms, dtype=np.int64)),
        "accepted_ms": scheduled_rows.column("store_ms"),
        "source_seq": number,
        "version_seq": version,
    }
    return pa.RecordBatch.from_arrays(
        [changed.get(name, scheduled_rows.column(name)) for name in LOG_SCHEMA.names], schema=LOG_SCHEMA
    )


def original_due_ms(scheduled_rows: pa.RecordBatch) -> Int64Array:
    """Compute the due times that the messages have in log and table, without the steps of the clock since then."""
    due_ms, from_due = scheduled_rows.column("due_ms").to_numpy(), scheduled_rows.column("from_due_ms")
    if from_due.null_count == len(from_due):  # usually the clock was not set
        return np.asarray(due_ms, np.int64)
    return np.asarray(np.where(np.asarray(from_due.is_valid()), from_due.fill_null(0).to_numpy(), due_ms))


def cancel_rows(scheduled_rows: pa.RecordBatch, now_ms: int, properties: str) -> pa.RecordBatch:
    """Build CANCEL rows (LOG_SCHEMA) for messages (READ_SCHEMA) that are due, but not delivered."""
    number, version = names(scheduled_rows)
    return build_rows(
        scheduled_rows.num_rows,
        kind=int(Kind.CANCEL),
        queue_id=-1,
        store_ms=now_ms,
        accepted_ms=scheduled_rows.column("store_ms"),
        source_seq=number,
        version_seq=version,
        due_ms=original_due_ms(scheduled_rows),
        properties=properties,
        **{name: scheduled_rows.column(name) for name in ("topic", "unique_key", "keys")},
    )


def _positions(
    placement: Placement, is_released: Bools, scheduled_rows: pa.RecordBatch, rerouted_rows: pa.RecordBatch
) -> Positions:
    """List the queue and the offset of each message of a frame. Both are -1 for a message that is not released.

    The queue is also -1 for a message that a selection has moved to another topic.
    """
    queues, offsets = (np.full(len(is_released), -1, np.int64) for _ in range(2))
    # A value for every message of the frame, because a continuation knows messages by their index in it.
    queues[is_released], offsets[is_released] = placement.queue_id, placement.queue_offset
    if rerouted_rows is not scheduled_rows:
        is_moved = pc.not_equal(rerouted_rows.column("topic"), scheduled_rows.column("topic"))
        queues[is_moved.to_numpy(zero_copy_only=False)] = -1
    return queues, offsets


def _into_expired_topics(scheduled_rows: pa.RecordBatch, is_moved: Bools) -> pa.RecordBatch:
    """Set the topics of the messages in the mask `is_moved` to %EXPIRED%<topic>."""
    if not is_moved.any():
        return scheduled_rows
    mask, topics, queue_ids = (
        pa.array(is_moved),
        scheduled_rows.column("topic"),
        scheduled_rows.column("queue_id"),
    )
    # As columns: a hand-out may have a hundred thousand of them.
    expired_topics = pc.binary_join_element_wise(EXPIRED_PREFIX, topics, "")
    rows = with_column(scheduled_rows, "topic", pc.if_else(mask, expired_topics, topics))
    # Any queue: the topic of the expired messages may have fewer queues than that of their send.
    return with_column(rows, "queue_id", pc.if_else(mask, pa.scalar(-1, pa.int32()), queue_ids))


def _topics_in(scheduled_rows: pa.RecordBatch, is_expired: Bools) -> list[str]:
    """List the topic of each message in the mask `is_expired`."""
    if not is_expired.any():
        return []
    topics: list[str] = scheduled_rows.column("topic").filter(pa.array(is_expired)).to_pylist()
    return topics


def values_if_few(scheduled_rows: ReadRows) -> list[ReadRow] | None:
    """Convert scheduled messages (READ_SCHEMA) to values, so that they can be released row by row.

    None if they must be released as columns: more than FEW_ROWS rows, FEW_BYTES bytes or more, or a row with an expiry,
    with the timing list of a level cascade, or with the property of a wake-up.
    """
    if scheduled_rows.num_rows > FEW_ROWS:
        return None
    if isinstance(scheduled_rows, NumberedRows):
        values = scheduled_rows.values
    elif pa.ipc.get_record_batch_size(scheduled_rows) >= FEW_BYTES:
        return None
    else:
        values = list(zip(*(column.to_pylist() for column in scheduled_rows.columns), strict=True))
    size_bytes = 0
    for row in values:
        # The length in characters is exact enough: UTF-8 needs at most four times as many bytes, and FEW_BYTES is far
        # below the limit of a frame.
        body, properties = row[_BODY], row[_PROPERTIES]
        size_bytes += len(body or b"")
        if properties:
            size_bytes += len(properties)
            if TIMING_LIST in properties or EXPIRES in properties or BASE in properties:
                return None
    return values if size_bytes < FEW_BYTES else None


def build_few_releases(
    scheduled_rows: Sequence[ReadRow], topics: Topics, now_ms: int, build: Build
) -> tuple[EncodedRows, QueueOffsets]:
    """Choose queue offsets and build the release records of a few scheduled messages (READ_SCHEMA), row by row.

    The caller must call `QueueOffsets.reserve_offsets` after the append. Under a steady load, a tick releases one or a
    few messages. As columns (`Topics.place` and `release_rows`), one message costs 0.5 ms, as much as many do (decision
    0037). `tests/broker/test_few_releases.py` checks that both ways give the same rows.
    """
    queue_offsets = QueueOffsets()
    built: list[LogRow] = []
    for index, row in enumerate(scheduled_rows):
        (
            seq, kind, topic, queue_id, _, tag, keys, unique_key, body, properties, born_ms, born_host, store_ms,
            store_host, flag, sys_flag, reconsume_times, due_ms, _, source_seq, version_seq, from_due_ms,
        ) = row  # fmt: skip
        # Guarantee G2, as in `release_rows`.
        assert due_ms <= now_ms, "a scheduled message must never be released before its due time"
        # The same rule as in `names`.
        number, version = (source_seq, seq) if kind == Kind.MOVED else (seq, version_seq)
        queue_id, offset = queue_offsets.choose(
            topics.find_topic(topic) or topics.ensure(topic),
            index, -1 if queue_id is None else queue_id, stored_size(topic, body, properties), tag, properties,
        )  # fmt: skip
        built.append(
            release_row(
                topic=topic, queue_id=queue_id, queue_offset=offset, tag=tag, keys=keys, unique_key=unique_key,
                body=body, properties=properties, born_ms=born_ms, born_host=born_host, store_ms=now_ms,
                store_host=store_host, flag=flag, sys_flag=sys_flag, reconsume_times=reconsume_times, due_ms=due_ms,
                accepted_ms=store_ms, source_seq=number, version_seq=version, from_due_ms=from_due_ms,
            )
        )  # fmt: skip
    return build(built), queue_offsets


def moved_rows(scheduled_rows: pa.RecordBatch, *, now_ms: int) -> pa.RecordBatch:
    """Build MOVED rows (LOG_SCHEMA) that replace the rows of scheduled messages (READ_SCHEMA), in the same order.

    The messages keep their due times and versions.
    """
    count, (number, version) = scheduled_rows.num_rows, names(scheduled_rows)
    changed = {
        "kind": pa.array(np.full(count, Kind.MOVED, dtype=np.int8)),
        "store_ms": pa.array(np.full(count, now_ms, dtype=np.int64)),
        "accepted_ms": scheduled_rows.column("store_ms"),
        "source_seq": number,
        "version_seq": version,
    }
    return pa.RecordBatch.from_arrays(
        [changed.get(name, scheduled_rows.column(name)) for name in LOG_SCHEMA.names], schema=LOG_SCHEMA
    )


def as_moved_rows(scheduled_rows: pa.RecordBatch, before: pa.RecordBatch) -> pa.RecordBatch:
    """Convert new SCHEDULED rows (LOG_SCHEMA) to MOVED rows that reschedule the messages `before` (READ_SCHEMA).

    Both are in the same order.
    """
    number, version = names(before)
    changed = {
        "kind": pa.array(np.full(scheduled_rows.num_rows, Kind.MOVED, dtype=np.int8)),
        "accepted_ms": before.column("store_ms"),
        "source_seq": number,
        "version_seq": version,
        "from_due_ms": before.column("due_ms"),
    }
    return pa.RecordBatch.from_arrays(
        [changed.get(name, scheduled_rows.column(name)) for name in LOG_SCHEMA.names], schema=LOG_SCHEMA
    )


class Lateness:
    """A histogram of the lateness of releases in ms, with a count per bound. Cheap enough for every batch."""

    BOUNDS = (0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 60_000)

    def __init__(self) -> None:
        self._edges = np.array(self.BOUNDS, dtype=np.int64)
        self.counts = np.zeros(len(self.BOUNDS) + 1, dtype=np.int64)  # the last one: above all bounds
        self.released = 0
        self.max_ms = self.sum_ms = 0

    def add(self, late_ms: Int64Array) -> None:
        """Count the releases of a batch. `late_ms` is the lateness of each."""
        self.released += len(late_ms)
        if len(late_ms) <= FEW:
            for ms in late_ms.tolist():
                self.counts[bisect_left(self.BOUNDS, ms)] += 1
                self.sum_ms += ms
                self.max_ms = max(self.max_ms, ms)
            return
        self.counts += np.bincount(np.searchsorted(self._edges, late_ms), minlength=len(self.counts))
        self.sum_ms += int(late_ms.sum())
        self.max_ms = max(self.max_ms, int(late_ms.max()))

    def summary(self) -> dict[str, int | dict[str, int]]:
        """Summarize the histogram for `status`. A bucket counts from above the previous bound up to its own bound."""
        buckets = {
            f"<={bound}ms": int(count)
            for bound, count in zip(self.BOUNDS, self.counts, strict=False)
            if count
        }
        if self.counts[-1]:
            buckets[f">{self.BOUNDS[-1]}ms"] = int(self.counts[-1])
        return {"released": self.released, "max_ms": self.max_ms, "buckets": buckets}
