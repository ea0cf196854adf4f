"""Dead letters: messages that a consumer group has given up. Operators can list, resend or delete them.

A dead letter is a row of the topic `%DLQ%<group>`. RocketMQ's tools see all dead letters there. An operator sees only
the open ones: a resend or a delete records in the log that a position is resolved (registry/dead_letters.py).

    resend    appends a copy for this group alone, with the full number of attempts, in one frame with the row that
              marks the position as resolved
    delete    appends only that row: the message stays in the queue until retention removes it
    repeat    before retention removes the row of an open dead letter, a copy is appended at the end of the log: a MOVED
              row without a due time, in one frame with the META row that records its location (decision 0079); the
              handle of the dead letter stays the same

A resend appends its copy to the retry topic, from which the group receives its other attempts. No other group reads
that topic. A group that consumes in order reads no retry topic. Its copy goes to the end of the original topic,
where other groups also see it.

A *position* is the queue and the offset of a dead letter in its topic. A *handle* is its text, such as `0-15`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from timeball.broker.accepting.appender import Appender
from timeball.broker.consuming import retry
from timeball.broker.consuming.redelivery_rows import (
    FIRST_POP_TIME,
    POP_CK,
    pop_retry_topic,
)
from timeball.broker.consuming.retention import log_expired
from timeball.broker.filters import Filter
from timeball.broker.filters.compiler import SQL92, compile_filter
from timeball.broker.policy import Policy
from timeball.broker.registry.dead_letters import Expiry, GroupRun, Position, Run, join_spans, subtract_spans
from timeball.broker.registry.meta import Change, combined
from timeball.broker.registry.rates import shares
from timeball.broker.registry.selections import with_names
from timeball.broker.registry.tables import Tables
from timeball.broker.registry.topics import Topic
from timeball.io.clock import SchedulerClock
from timeball.io.threads import in_thread
from timeball.log.writer import CommitLog
from timeball.model import limits
from timeball.model.access import Caller, Verb
from timeball.model.answers import DeadLetterPage, DeadLetterRow, Resolved
from timeball.model.bodies import readable_body
from timeball.model.config import Settings
from timeball.model.errors import InvalidMessage, OutOfRange
from timeball.model.message import (
    DLQ_PREFIX,
    LOG_SCHEMA,
    NACK_REASON,
    NACK_TIME,
    ORIGIN_GROUP,
    READ_SCHEMA,
    RETRY_TOPIC,
    SEND_COLUMNS,
    Int64Array,
    Kind,
    decode_properties,
    encode_properties,
    stored_sizes,
)
from timeball.model.send_options import EXPIRY_NAMES, without_unique_key

CHUNK_ROWS = 1_000  # dead letters that are resent or deleted with one frame

# A copy begins with its first attempt, so it loses the properties of the earlier attempts. It may be pending in the
# original topic, and was in time, so it does not expire.
_DROPPED = retry.SPENT | {POP_CK, FIRST_POP_TIME, NACK_TIME, NACK_REASON} | EXPIRY_NAMES
_COPIED = ("body", "tag", "keys", "unique_key", "born_ms", "born_host", "flag", "sys_flag")


class Pace(NamedTuple):
    """When resent dead letters are delivered: the first one `after_ms` after the request, then `rate` per second.

    `rate` None: all at the same time.
    """

    after_ms: int = 0
    rate: float | None = None

    def check(self) -> None:
        """Raise OutOfRange unless both values are within their limits."""
        if not 0 <= self.after_ms <= limits.DELAY_MS_MAX:
            raise OutOfRange(f"after {self.after_ms} ms: 0 to {limits.DELAY_MS_MAX}")
        if self.rate is not None and not limits.RESEND_RATE_MIN <= self.rate <= limits.RESEND_RATE_MAX:
            raise OutOfRange(
                f"rate {self.rate}: {limits.RESEND_RATE_MIN} to {limits.RESEND_RATE_MAX} in a second"
            )

    def delays_ms(self, first: int, count: int) -> list[int] | None:
        """Compute the delays of `count` dead letters, after the `first` ones of the request. None for no delays."""
        if self.rate is None:
            return [self.after_ms] * count if self.after_ms else None
        # Each delay is computed from the number, so that rounding errors do not add up.
        step_ms = limits.SECOND_MS / self.rate
        return [self.after_ms + int(number * step_ms) for number in range(first, first + count)]


AT_ONCE = Pace()


class DeadLetters:
    """The operations on dead letters. Belongs to the event loop."""

    def __init__(
        self,
        appender: Appender,
        policy: Policy,
        *,
        settings: Settings,
        clock: SchedulerClock,
        log: CommitLog,
        tables: Tables,
        reader_thread: Executor,
    ) -> None:
        self._appender, self._policy = appender, policy
        self._settings, self._clock, self._log = settings, clock, log
        self._tables, self._reader_thread = tables, reader_thread

    def count(self, group: str) -> int:
        """Count the open dead letters of a group."""
        topic = self._topic(group)
        return 0 if topic is None else sum(end - begin for _, begin, end in self._open_spans(group, topic))

    async def page(self, group: str, rows: int, after: str | None, caller: Caller) -> DeadLetterPage:
        """List up to `rows` open dead letters: the first ones (`after` None), or those after the handle `after`.

        Raises Forbidden, GroupNotFound, InvalidMessage.
        """
        # The same permission as for receiving the messages, because the page shows bodies.
        self._policy.allow(caller, Verb.RECEIVE, group=group)
        topic = self._topic(group)
        if topic is None:
            self._check_known(group)
            return DeadLetterPage([])
        begin = (0, 0) if after is None else _next_position(position_of(after))
        # One position more than the page shows, to see whether there is a next page.
        positions = list(islice(self._positions(group, topic, begin), rows + 1))
        shown = positions[:rows]
        rows_read = await self._read(topic, shown)
        # In the reader thread, as bodies may have to be decompressed.
        letters = await in_thread(self._reader_thread, _answer_rows, shown, rows_read)
        return DeadLetterPage(letters, handle_of(shown[-1]) if len(positions) > rows else None)

    async def resend(
        self,
        group: str,
        handles: Sequence[str] | None,
        caller: Caller,
        pace: Pace = AT_ONCE,
        where: str = "",
    ) -> Resolved:
        """Send open dead letters to the group again: those of these handles, or all (None). Durable on return.

        With `where` (only without handles), those that meet this SQL condition. Copies with a delay are pending until
        the delay ends. Raises Forbidden, GroupNotFound, InvalidFilter, InvalidMessage, InvalidDelay, OutOfRange,
        OverLimit.
        """
        self._policy.allow(caller, Verb.ADMIN)
        pace.check()
        # The answer has only two outcomes for a handle: resent, or no open dead letter.
        if where and handles is not None:
            raise InvalidMessage("where: not for named dead letters, but for all of the group")
        condition = compile_filter(where, SQL92) if where else None
        return await self._resolve(group, handles, caller, pace, condition)

    async def delete(self, group: str, handles: Sequence[str] | None, caller: Caller) -> Resolved:
        """Mark open dead letters as resolved: those of these handles, or all (None). Durable on return.

        Raises Forbidden, GroupNotFound, InvalidMessage, OverLimit.
        """
        return await self._resolve(group, handles, caller, None)

    async def _resolve(
        self,
        group: str,
        handles: Sequence[str] | None,
        caller: Caller,
        pace: Pace | None,
        condition: Filter | None = None,
    ) -> Resolved:
        """Resend dead letters with a pace, or delete them without one, in chunks: those of `handles`, or all (None).

        With a `condition`, only those that meet it. Raises the errors of `resend`.
        """
        self._policy.allow(caller, Verb.ADMIN)
        # A handle may be listed twice, but its dead letter is sent once.
        requested = None if handles is None else dict.fromkeys(map(position_of, handles))
        topic, count, resolved_positions = self._topic(group), 0, set[Position]()
        if topic is None:
            self._check_known(group)
        else:
            # The generator reads the end of a queue when it reaches the queue. So it includes dead letters that arrive
            # meanwhile in later queues.
            remaining = self._positions(group, topic, (0, 0)) if requested is None else iter(requested)
            while positions := list(islice(remaining, CHUNK_ROWS)):
                if condition is not None:
                    positions = await self._matching(group, topic, positions, condition)
                resolved = await self._resolve_positions(group, topic, positions, count, pace)
                count += len(resolved)
                if requested is not None:
                    resolved_positions.update(resolved)
        return Resolved(
            count,
            [] if handles is None else [position_of(handle) in resolved_positions for handle in handles],
        )

    async def _resolve_positions(
        self, group: str, topic: Topic, positions: list[Position], resent: int, pace: Pace | None
    ) -> list[Position]:
        """Resend (with a pace) or delete the open dead letters at these positions. Returns their positions.

        `resent`: the number of dead letters that the request has resent before. Durable on return.
        """
        positions = [position for position in positions if self._is_open(group, topic, position)]
        rows = None if pace is None else await self._read(topic, positions)
        # Another request may have resolved some during the read. From here to the append there is no await.
        are_open = [self._is_open(group, topic, position) for position in positions]
        positions = [position for position, is_open in zip(positions, are_open, strict=True) if is_open]
        if not positions:
            return []
        # A delete needs no copies.
        if rows is None or pace is None:
            change = self._resolution(group, topic, positions)
            self._log.writer.append(change.rows)
            change.apply()  # after the append, which raises if the disk is full
            await self._log.writer.flushed()
        else:
            copies = self._copies(
                group, rows.filter(pa.array(are_open)), pace.delays_ms(resent, len(positions))
            )
            _, durable = self._appender.send_with(
                copies, lambda *_: self._resolution(group, topic, positions)
            )
            await durable
        return positions

    async def _matching(
        self, group: str, topic: Topic, positions: Sequence[Position], condition: Filter
    ) -> list[Position]:
        """Choose those of these positions that are open and whose dead letters meet the condition."""
        positions = [position for position in positions if self._is_open(group, topic, position)]
        rows = await self._read(topic, positions)
        mask = await in_thread(self._reader_thread, _matches, rows, condition)
        return [position for position, matches in zip(positions, mask, strict=True) if matches]

    def _resolution(self, group: str, topic: Topic, positions: Sequence[Position]) -> Change:
        """Build the META rows that mark these positions as resolved, and that forget the rows that repeat them."""
        # A position before the queue's first offset is open only through its repeated row. Without this row it is
        # resolved, so it need not be stored as resolved.
        min_offsets = {number: queue.index.min_offset for number, queue in enumerate(topic.queues)}
        in_queue = [(queue, offset) for queue, offset in positions if offset >= min_offsets[queue]]
        change = self._tables.resolved_dead_letters.build_change(group, in_queue, min_offsets)
        repeated = self._tables.repeated_dead_letters
        if all(repeated.find_seq(group, *position) is None for position in positions):
            return change
        return combined(change, repeated.build_change({group: positions}))

    def _copies(self, group: str, rows: pa.RecordBatch, delays_ms: list[int] | None) -> pa.RecordBatch:
        """Build the batch (SEND_COLUMNS) that resends these dead letters (READ_SCHEMA). `delays_ms`: of each row."""
        config = self._tables.groups.find_group(group)
        is_orderly = config is not None and config.consume_message_orderly
        topics, texts = [], []  # one topic per row: a group may have dead letters from several topics
        for text, name in zip(
            *(rows.column(name).to_pylist() for name in ("properties", "topic")), strict=True
        ):
            properties = decode_properties(text or "")
            origin = properties.get(RETRY_TOPIC, name)
            if is_orderly:
                topics.append(origin)
            elif ORIGIN_GROUP in properties:
                # The consuming engine redelivers through a topic per group and origin.
                topics.append(pop_retry_topic(group, origin))
            else:
                # A client returned it that receives its attempts from the retry topic of the group.
                topics.append(retry.retry_topic(group))
            texts.append(
                encode_properties({key: value for key, value in properties.items() if key not in _DROPPED})
            )
        columns = {"topic": topics, "properties": texts, "reconsume_times": [0] * rows.num_rows}
        columns |= {name: rows.column(name) for name in _COPIED}
        if delays_ms is not None:
            columns["delay_ms"] = delays_ms
            if is_orderly:
                # The copy is pending in the original topic, where a later send with the same unique key would end it.
                columns["keys"] = [without_unique_key(text) for text in rows.column("keys").to_pylist()]
        return pa.RecordBatch.from_pydict(
            columns, schema=pa.schema([(name, SEND_COLUMNS[name]) for name in columns])
        )

    # -- retention ----------------------------------------------------------------------------------------------

    async def repeat(self, before_seq: int) -> None:
        """Repeat the open dead letters in the rows before `before_seq`, which retention is about to remove.

        Durable on return. Dead letters that are older than their retention, and the oldest ones beyond `kept_bytes`,
        expire: they are not repeated, but counted and logged. Raises OverLimit if the disk is full.
        """
        names = [topic.name for topic in self._tables.topics.all() if topic.name.startswith(DLQ_PREFIX)]
        async for some_names in shares(names):
            for name in some_names:
                topic = self._tables.topics.find_topic(name)
                if topic is None:  # deleted while other topics were processed
                    continue
                for chunk in self._chunks(topic, self._spans_before(topic, before_seq)):
                    self._log.writer.check_admission()
                    await self._repeat_chunk(topic, chunk)

    def _spans_before(self, topic: Topic, before_seq: int) -> list[tuple[int, int, int]]:
        """List the spans (queue, begin, end) of the open dead letters that are stored only in rows before `before_seq`.

        `end` is the offset after the last one.
        """
        group, open_spans = topic.name.removeprefix(DLQ_PREFIX), list[tuple[int, int, int]]()
        for queue, begin, end in self._open_spans(group, topic):
            index = topic.queues[queue].index
            # Spans below `min_offset` are repeated dead letters, which have no queue entry. Of the others, those in
            # later segments need no repeat.
            if begin >= index.min_offset:
                end = min(end, index.first_offset_from_seq(before_seq, begin, hidden=True))
            # An earlier pass of retention, which was interrupted, may have repeated some of them.
            runs = self._tables.repeated_dead_letters.runs(group, queue)
            repeated = join_spans((run.offset, run.end) for run in runs if run.seq >= before_seq)
            open_spans += [(queue, *span) for span in subtract_spans((begin, end), repeated)]
        return open_spans

    def _chunks(self, topic: Topic, spans: Iterable[tuple[int, int, int]]) -> Iterator[list[Position]]:
        """Yield the positions of the spans in chunks that fit into a frame."""
        chunk, size_bytes, rows_max = list[Position](), 0, limits.DEAD_LETTERS_REPEATED_AT_ONCE
        for queue, first, last in spans:
            for begin in range(first, last, rows_max):
                end = min(last, begin + rows_max)
                for offset, row_bytes in zip(
                    range(begin, end), self._row_sizes(topic, queue, begin, end), strict=True
                ):
                    is_full = size_bytes + row_bytes > limits.DEAD_LETTERS_REPEATED_BYTES
                    if chunk and (is_full or len(chunk) == rows_max):
                        yield chunk
                        chunk, size_bytes = [], 0
                    chunk.append((queue, offset))
                    size_bytes += row_bytes
        if chunk:
            yield chunk

    def _row_sizes(self, topic: Topic, queue: int, begin: int, end: int) -> list[int]:
        """List the size in bytes of each dead letter at the offsets [begin, end) of a queue."""
        index = topic.queues[queue].index
        if begin >= index.min_offset:
            sizes: list[int] = index.read(begin, end - begin, hidden=True)["size"].tolist()
            return sizes
        # Repeated rows: the average size of their run. Positions that were resolved meanwhile count as 0.
        runs = self._tables.repeated_dead_letters.runs(topic.name.removeprefix(DLQ_PREFIX), queue)
        size_at = {
            offset: run.size_bytes // run.rows for run in runs for offset in range(run.offset, run.end)
        }
        return [size_at.get(offset, 0) for offset in range(begin, end)]

    async def _repeat_chunk(self, topic: Topic, chunk: Sequence[Position]) -> None:
        """Repeat the open dead letters at these positions, in one frame with the META rows that locate the copies.

        Dead letters that are too old, and the oldest ones beyond `kept_bytes`, expire instead. Durable on return.
        """
        group = topic.name.removeprefix(DLQ_PREFIX)
        chunk = [position for position in chunk if self._is_open(group, topic, position)]
        if not chunk:
            return
        rows = await self._read(topic, chunk)
        # Requests may have resolved some during the read. From here to the append there is no await.
        is_open = np.array([self._is_open(group, topic, position) for position in chunk], dtype=np.bool_)
        retention_ms = self._settings.dead_letter_retention_ms
        died_ms, now_ms = rows.column("store_ms").to_numpy(), self._clock.now_ms()
        # A retention of 0 keeps dead letters without a limit of age.
        is_repeated = is_open & ((died_ms > now_ms - retention_ms) if retention_ms else True)
        sizes = stored_sizes(rows)
        evicted = self._choose_evicted(
            group, chunk, int(sizes[is_repeated].sum()), int(died_ms[is_repeated].max(initial=0))
        )
        # None: the dead letters that would have to be evicted are newer than this chunk. So this chunk itself expires.
        if evicted is None:
            is_repeated[:], evicted = False, []
        runs = _build_runs(
            chunk, np.flatnonzero(is_repeated).tolist(), self._log.writer.next_seq, sizes, died_ms
        )
        expired = [chunk[index] for index in np.flatnonzero(is_open & ~is_repeated).tolist()]
        expiries = self._count_expired(group, topic, expired)
        # The new runs replace all earlier runs of the chunk.
        dropped: dict[str, list[Position]] = {group: list(chunk)}
        for evicted_group, queue, run in evicted:
            positions = [(queue, offset) for offset in range(run.offset, run.end)]
            dropped.setdefault(evicted_group, []).extend(positions)
            expiries.append(Expiry(evicted_group, DLQ_PREFIX + evicted_group, run.rows, {}))
        changes = [
            self._tables.repeated_dead_letters.build_change(
                dropped, [(group, queue, run) for queue, run in runs]
            )
        ]
        if expiries:
            changes.append(self._tables.expired.build_change(expiries, now_ms))
        change = combined(*changes)
        copies = [_repeated_rows(rows.filter(pa.array(is_repeated)))] if runs else []
        _, durable = self._log.writer.append(pa.concat_batches([*copies, change.rows]))
        change.apply()
        await durable  # only one chunk is in memory at a time
        log_expired(expiries, are_dead_letters=True)

    def _choose_evicted(
        self, group: str, chunk: Sequence[Position], size_bytes: int, died_ms: int
    ) -> list[GroupRun] | None:
        """Choose the oldest runs to evict, so that a chunk of `size_bytes` fits into `kept_bytes` with the other runs.

        None if runs would have to go that are newer than the chunk, whose newest dead letter is from `died_ms`.
        """
        bytes_max, repeated = self._settings.kept_bytes, self._tables.repeated_dead_letters
        excess_bytes = repeated.size_bytes + size_bytes - bytes_max
        if not bytes_max or excess_bytes <= 0:
            return []
        chunk_positions, other_runs, evicted = set(chunk), list[GroupRun](), list[GroupRun]()
        for entry in repeated.by_age():
            queue, run = entry.queue, entry.run
            ends = (queue, run.offset), (queue, run.end - 1)
            # Runs of the chunk's own dead letters are replaced, so their bytes become free. The chunk contains the
            # first or the last position of such a run.
            if entry.group == group and not chunk_positions.isdisjoint(ends):
                excess_bytes -= run.size_bytes
            else:
                other_runs.append(entry)
        for entry in other_runs:
            if excess_bytes > 0 and entry.run.died_ms <= died_ms:
                evicted.append(entry)
                excess_bytes -= entry.run.size_bytes
        return evicted if excess_bytes <= 0 else None

    def _count_expired(self, group: str, topic: Topic, expired: Sequence[Position]) -> list[Expiry]:
        """Count the dead letters that expire at these positions. Returns one Expiry, or none if none is counted."""
        # After a crash, retention examines the same rows again. `counted_to` prevents a second count.
        counted_to = self._tables.expired.counted_to(group, topic.name)
        rows, counted_ends = 0, dict[int, int]()
        for queue, offset in expired:
            if offset < topic.queues[queue].index.min_offset:
                rows += 1  # no second count: the same frame drops its repeated row, which is the last one
            elif offset >= counted_to.get(queue, 0):
                rows += 1
                counted_ends[queue] = offset + 1
        return [Expiry(group, topic.name, rows, counted_ends)] if rows else []

    def _check_known(self, group: str) -> None:
        """Raise GroupNotFound if a group never existed. Otherwise a typing error would look like an empty result."""
        # A deleted group may still have offsets.
        if not self._tables.offsets.topics_of(group):
            self._tables.groups.get(group)

    # -- positions ----------------------------------------------------------------------------------------------

    def _topic(self, group: str) -> Topic | None:
        """Find the topic of a group's dead letters. None if the group has never had one."""
        return self._tables.topics.find_topic(retry.dead_letter_topic(group))

    def _open_spans(
        self, group: str, topic: Topic, from_position: Position = (0, 0)
    ) -> Iterator[tuple[int, int, int]]:
        """Yield the spans (queue, begin, end) of open positions, from the position `from_position` on."""
        for number in range(from_position[0], len(topic.queues)):
            index, low = topic.queues[number].index, from_position[1] if number == from_position[0] else 0
            # Before the queue's first offset only repeated dead letters are open. `repeated_dead_letters` no longer
            # contains those that are resolved.
            for run in self._tables.repeated_dead_letters.runs(group, number):
                begin, end = max(low, run.offset), min(run.end, index.min_offset)
                if begin < end:
                    yield number, begin, end
            # `end_offset`: includes dead letters that the topic's limit per second does not show to consumers yet.
            begin = max(index.min_offset, low)
            for span in self._tables.resolved_dead_letters.open_spans(group, number, begin, index.end_offset):
                yield number, *span

    def _positions(self, group: str, topic: Topic, from_position: Position) -> Iterator[Position]:
        """Yield the open positions from `from_position` on, in their order."""
        for queue, begin, end in self._open_spans(group, topic, from_position):
            for offset in range(begin, end):
                yield queue, offset

    def _is_open(self, group: str, topic: Topic, position: Position) -> bool:
        """Check whether an open dead letter is at this position. False for a position that does not exist."""
        queue, offset = position
        # A handle may contain any queue number.
        if queue >= len(topic.queues):
            return False
        index = topic.queues[queue].index
        if offset < index.min_offset:
            return self._tables.repeated_dead_letters.find_seq(group, queue, offset) is not None
        end = min(offset + 1, index.end_offset)
        return any(True for _ in self._tables.resolved_dead_letters.open_spans(group, queue, offset, end))

    async def _read(self, topic: Topic, positions: Sequence[Position]) -> pa.RecordBatch:
        """Read the rows at these positions, in READ_SCHEMA."""
        if not positions:
            return pa.RecordBatch.from_pylist([], READ_SCHEMA)
        group, find_seq = topic.name.removeprefix(DLQ_PREFIX), self._tables.repeated_dead_letters.find_seq
        # Prefer the repeated row, because retention may remove the row in the queue at any moment. -1: there is none.
        seqs: Int64Array = np.array(
            [find_seq(group, *position) or -1 for position in positions], dtype=np.int64
        )
        queues = np.array([queue for queue, _ in positions])
        offsets: Int64Array = np.array([offset for _, offset in positions], dtype=np.int64)
        for queue in set(queues[seqs < 0].tolist()):
            in_queue = (queues == queue) & (seqs < 0)
            seqs[in_queue] = topic.queues[queue].index.at(offsets[in_queue])["seq"]
        return await in_thread(self._reader_thread, self._log.reader.read_rows, seqs)


def _build_runs(
    chunk: Sequence[Position],
    repeated_indexes: Sequence[int],
    first_seq: int,
    sizes: Int64Array,
    died_ms: Int64Array,
) -> list[tuple[int, Run]]:
    """Join consecutive positions of `chunk` to runs. Returns (queue, run) for each.

    `repeated_indexes` are the indexes of the positions that are repeated. Their rows get the numbers from `first_seq`
    on. `sizes` (bytes) and `died_ms` are parallel to `chunk`.
    """
    runs = list[tuple[int, Run]]()
    for row_index, index in enumerate(repeated_indexes):
        (queue, offset), size_bytes, row_died_ms = chunk[index], int(sizes[index]), int(died_ms[index])
        if runs and runs[-1][0] == queue and runs[-1][1].end == offset:
            run = runs[-1][1]
            runs[-1] = (
                queue,
                Run(
                    run.offset,
                    run.seq,
                    run.rows + 1,
                    run.size_bytes + size_bytes,
                    max(run.died_ms, row_died_ms),
                ),
            )
        else:
            runs.append((queue, Run(offset, first_seq + row_index, 1, size_bytes, row_died_ms)))
    return runs


def _repeated_rows(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Convert dead letters (READ_SCHEMA) to the MOVED rows that repeat them (LOG_SCHEMA).

    These rows count neither as visible messages nor as scheduled messages.
    """
    kinds, seq, source_seq = (rows.column(name) for name in ("kind", "seq", "source_seq"))
    is_repeated = pc.equal(kinds, int(Kind.MOVED))
    changed = {
        "kind": pa.array(np.full(rows.num_rows, Kind.MOVED, np.int8)),
        "source_seq": pc.if_else(is_repeated, source_seq, seq),
        # A row with a queue offset would be a message, and one with a due time a scheduled message.
        **dict.fromkeys(
            ("queue_offset", "due_ms", "accepted_ms", "version_seq", "from_due_ms"),
            pa.nulls(rows.num_rows, pa.int64()),
        ),
    }
    columns = [changed[name] if name in changed else rows.column(name) for name in LOG_SCHEMA.names]
    return pa.RecordBatch.from_arrays(columns, schema=LOG_SCHEMA)


def _matches(rows: pa.RecordBatch, condition: Filter) -> list[bool]:
    """Compute which dead letters (READ_SCHEMA) meet a condition.

    Beside properties, the condition may name `topic` (the original one), `keys`, `tag`, `died_ms` and `attempts`.
    """
    if not rows.num_rows:
        return []
    texts = zip(rows.column("topic").to_pylist(), rows.column("properties").to_pylist(), strict=True)
    topics = [decode_properties(text or "").get(RETRY_TOPIC, topic) for topic, text in texts]
    values = {
        "topic": lambda: pa.array(topics, pa.string()),
        "keys": lambda: rows.column("keys"),
        "tag": lambda: rows.column("tag"),
        "died_ms": lambda: pc.cast(rows.column("store_ms"), pa.string()),
        "attempts": lambda: pc.cast(pc.fill_null(rows.column("reconsume_times"), 0), pa.string()),
    }
    mask: list[bool] = condition.exact(with_names(rows, values)).tolist()
    return mask


def handle_of(position: Position) -> str:
    """Format the position of a dead letter as a handle, such as '0-15'."""
    return f"{position[0]}-{position[1]}"


def position_of(handle: str) -> Position:
    """Parse a handle. Raises InvalidMessage."""
    queue, dash, offset = handle.partition("-")
    is_handle = dash and handle.isascii() and queue.isdecimal() and offset.isdecimal()
    if not is_handle or len(handle) > limits.DEAD_LETTER_HANDLE_CHARACTERS_MAX:
        raise InvalidMessage(
            f"dead letter {handle[:40]!r}: use a handle from the list of dead letters, such as '0-15'"
        )
    return int(queue), int(offset)


def _next_position(position: Position) -> Position:
    return position[0], position[1] + 1


def _answer_rows(positions: list[Position], rows: pa.RecordBatch) -> list[DeadLetterRow]:
    """Convert the READ_SCHEMA rows at these positions to the answer of a page."""
    return [_answer_row(position, row) for position, row in zip(positions, rows.to_pylist(), strict=True)]


def _answer_row(position: Position, row: dict[str, Any]) -> DeadLetterRow:
    """Convert a READ_SCHEMA row to the answer of a page. The body is cut to SHOWN_BODY_BYTES_MAX."""
    properties = decode_properties(row["properties"] or "")
    body = readable_body(row["body"] or b"", row["sys_flag"])
    return DeadLetterRow(
        dead_letter=handle_of(position),
        id=row["unique_key"],
        topic=properties.get(RETRY_TOPIC, row["topic"]),
        died_ms=row["store_ms"],
        attempts=row["reconsume_times"] or 0,
        body=body[: limits.SHOWN_BODY_BYTES_MAX],
        size_bytes=len(body),
        tag=row["tag"],
        keys=(row["keys"] or "").split(),
        properties=properties,
        # Without ORIGIN_GROUP, a client has set the properties, so the reason in them is not from a nack.
        reason=properties.get(NACK_REASON) if ORIGIN_GROUP in properties else None,
    )
