"""The verbs that every edge calls, and the order in which a decision becomes bytes.

Everything here runs on one event loop and takes no lock on the way of a message: validate, append to the log
(which fixes the order), and let the commit's callback bring the caches up to date before anyone is told.
Only attaches are serialised among themselves, since each begins where the last one ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from timeball import limits
from timeball.broker import admission, cancelling, delivery, pulling, transactions
from timeball.broker.cancelling import Verdict
from timeball.broker.moving import Mover
from timeball.broker.parts import Parts, in_thread, undone
from timeball.broker.topics import Placement
from timeball.errors import NotFound, OutOfRange
from timeball.broker.transactions import Half, Transactions
from timeball.log.format import with_seq
from timeball.message import LOG_SCHEMA, READ_SCHEMA, Int64Array, Kind, int64
from timeball.schedule.ticker import Ticker
from timeball.table.attachment import Attached, Attachment


@dataclass(frozen=True, slots=True)
class Accepted:
    """A batch is in the log: its rows are first_seq, first_seq + 1, …; those in a queue have their place there."""

    first_seq: int
    rows: int
    store_ms: int
    kept: pa.RecordBatch  # the rows as they stand in the log (LOG_SCHEMA)


class Broker:
    """See the module's docstring. All async methods belong to the event loop."""

    def __init__(
        self, parts: Parts, *, promises_since_watermark: int = 0, halves: Iterable[Half] = ()
    ) -> None:
        self.parts = parts
        self._loop = asyncio.get_running_loop()
        self._host = parts.settings.host
        self.ticker = Ticker(parts.schedule, parts.clock, self._release)
        self.waiters = pulling.Waiters()
        self.lateness = delivery.Lateness()
        self.mover = Mover(parts, promises_since_watermark=promises_since_watermark)

    # -- producing ---------------------------------------------------------------------------------------
        self.transactions = Transactions(parts, self._publish, halves)

    async def send(self, batch: pa.RecordBatch) -> Accepted:
        """Accept a batch of admission.SEND_COLUMNS, whole or not at all; returns when it is durable."""
        accepted, durable = self.send_nowait(batch)
        await durable
        return accepted

    def send_nowait(
        self, batch: pa.RecordBatch, *, half_seq: int | None = None
    ) -> tuple[Accepted, asyncio.Future[int]]:
        """As `send`, for an edge that pipelines: the order of calls is the order in the log.

        `half_seq`: the half message that this row publishes.
        """
        parts = self.parts
        rows, now_ms = self._admit(batch)
        if half_seq is not None:
            rows = transactions.ending_rows(rows, half_seq)
        is_message = rows.column("kind").to_numpy() == Kind.MESSAGE
        placement = None
        if is_message.any():
            rows, placement = self._place_messages(rows, np.flatnonzero(is_message))
        for name in [] if placement else admission.topic_names(rows):
            parts.topics.ensure(name)
        first_seq = parts.writer.next_seq

        def on_durable() -> None:
            self._sent(rows, first_seq, is_message, placement)
            if half_seq is not None:
                self.transactions.ended(half_seq)

        _, durable = parts.writer.append(rows, on_durable=on_durable)
        return Accepted(first_seq, rows.num_rows, now_ms, rows), durable

    def _place_messages(self, rows: pa.RecordBatch, visible: Int64Array) -> tuple[pa.RecordBatch, Placement]:
        """Give the rows that are visible at once their queue and offset."""
    def prepare_nowait(self, batch: pa.RecordBatch) -> tuple[Accepted, asyncio.Future[int]]:
        """As `send_nowait`, but nobody sees the messages before `transactions.end`; their delays begin then."""
        rows, now_ms = self._admit(transactions.half_batch(batch))
        for name in admission.topic_names(rows):
            self.parts.topics.ensure(name)
        rows = transactions.half_rows(rows)
        first_seq, durable = self.transactions.prepare(rows)
        return Accepted(first_seq, rows.num_rows, now_ms, rows), durable

    def _publish(self, batch: pa.RecordBatch, half_seq: int) -> asyncio.Future[int]:
        return self.send_nowait(batch, half_seq=half_seq)[1]

    def _admit(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, int]:
        parts, now_ms = self.parts, self.parts.clock.now_ms()
        parts.writer.check_room()
        delay_ms_max = parts.settings.delay_ms_max
        return admission.admit(batch, now_ms=now_ms, delay_ms_max=delay_ms_max, host=self._host), now_ms

        placement = self.parts.topics.place(
            rows if len(visible) == rows.num_rows else rows.take(pa.array(visible))
        )
        queue_id = rows.column("queue_id").to_numpy().copy()
        queue_offset = np.zeros(rows.num_rows, dtype=np.int64)
        hidden = np.ones(rows.num_rows, dtype=np.bool_)
        queue_id[visible], queue_offset[visible], hidden[visible] = (
            placement.queue_id, placement.queue_offset, False,
        )  # fmt: skip
        rows = rows.set_column(
            LOG_SCHEMA.get_field_index("queue_id"), LOG_SCHEMA.field("queue_id"), pa.array(queue_id)
        )
        offsets = pa.array(queue_offset, mask=hidden)
        return rows.set_column(
            LOG_SCHEMA.get_field_index("queue_offset"), LOG_SCHEMA.field("queue_offset"), offsets
        ), placement

    def _sent(
        self, rows: pa.RecordBatch, first_seq: int, is_message: np.ndarray, placement: Placement | None
    ) -> None:
        """The batch is durable: show what is for now, keep what is for later."""
        if placement is not None:
            placement.index(first_seq, first_seq + np.flatnonzero(is_message))
            self.waiters.wake(placement.topics())
        later = rows.num_rows - int(is_message.sum())
        if later:
            self.mover.tail_count.add(first_seq + rows.num_rows, later)
            promises = with_seq(rows, first_seq)
            self.parts.schedule.admit(
                promises if later == rows.num_rows else promises.filter(pa.array(~is_message))
            )

    def _release(self, promises: pa.RecordBatch, now_ms: int) -> None:
        """What is due goes to its queue (called by the ticker)."""
        for part in delivery.in_frames(promises):
            self._release_frame(part, now_ms)

    def _release_frame(self, promises: pa.RecordBatch, now_ms: int) -> None:
        parts = self.parts
        placement = parts.topics.place(promises)
        rows = delivery.release_rows(
            promises, now_ms=now_ms, queue_id=placement.queue_id, queue_offset=placement.queue_offset
        )
        first_seq = parts.writer.next_seq
        self.ticker.in_flight_rows += rows.num_rows
        parts.writer.append(rows, on_durable=lambda: self._released(promises, first_seq, placement))

    def _released(self, promises: pa.RecordBatch, first_seq: int, placement: Placement) -> None:
        due_ms, seq = int64(promises.column("due_ms")), int64(promises.column("seq"))
        placement.index(first_seq)
        self.parts.schedule.released(due_ms, seq)
        self.waiters.wake(placement.topics())
        self.lateness.add(np.maximum(0, self.parts.clock.now_ms() - due_ms))
        was_full = self.ticker.in_flight_rows >= limits.RELEASE_ROWS_IN_FLIGHT_MAX
        self.ticker.in_flight_rows -= promises.num_rows
        if was_full:
            self.ticker.wake()

    # -- cancelling --------------------------------------------------------------------------------------

    async def cancel(
        self, *, ids: Sequence[str] = (), keys: Sequence[str] = (), seqs: Sequence[int] = ()
    ) -> list[Verdict]:
        """Settle these promises if they still wait; one definite verdict each (see cancelling.py)."""
        parts = self.parts
        if len(ids) + len(keys) + len(seqs) > limits.CANCELS_PER_REQUEST_MAX:
            raise OutOfRange(f"at most {limits.CANCELS_PER_REQUEST_MAX} cancels in one request; split it")

        def look_up() -> cancelling.Found:
            files = parts.schedule.pending.all()
            return cancelling.look_up(parts.reader, parts.key_index, files, ids=ids, keys=keys, seqs=seqs)

        found = await in_thread(self.parts.reader_thread, look_up)
        await parts.schedule.quiet()
        cancelled, now_ms = await self._cancel_waiting(found)
        unknown = [c for c in found.candidates if c.seq not in cancelled and c.seq not in found.settled]
        if unknown:
            # Settled between the look-up and now, or handed out and on its way to the disk: then look again.
            await parts.writer.flushed()
            found.settled.update((await in_thread(self.parts.reader_thread, look_up)).settled)
            self._recall_cancels(found, [c for c in unknown if c.seq not in found.settled])
        return cancelling.verdicts([*ids, *keys, *map(str, seqs)], found, cancelled, now_ms)

    def _recall_cancels(self, found: cancelling.Found, unknown: list[cancelling.Candidate]) -> None:
        """Retention may have let a CANCEL row go while its promise still lies in the table: the schedule knows."""
        due = np.array([c.due_ms for c in unknown], dtype=np.int64)
        seq = np.array([c.seq for c in unknown], dtype=np.int64)
        for candidate, was in zip(unknown, self.parts.schedule.was_cancelled(due, seq), strict=True):
            if was:
                found.settled[candidate.seq] = ("already_cancelled", None)

    async def _cancel_waiting(self, found: cancelling.Found) -> tuple[set[int], int]:
        """Settle the candidates that still wait; returns when the CANCEL rows are durable."""
        parts, now_ms = self.parts, self.parts.clock.now_ms()
        by_seq = {c.seq: c for c in found.candidates if c.seq not in found.settled}
        if not by_seq:
            return set(), now_ms
        candidates = list(by_seq.values())
        due = np.array([c.due_ms for c in candidates], dtype=np.int64)
        seq = np.array([c.seq for c in candidates], dtype=np.int64)
        chosen = [c for c, was in zip(candidates, parts.schedule.cancel(due, seq), strict=True) if was]
        if chosen:
            # No pause since the decision: the CANCEL rows stand in the log before any later release.
            _, durable = parts.writer.append(cancelling.cancel_rows(chosen, now_ms))
            await durable
        return {c.seq for c in chosen}, now_ms

    # -- consuming ---------------------------------------------------------------------------------------

    async def pull(self, topic: str, offsets: dict[int, int], rows: int, wait_ms: int) -> pa.RecordBatch:
        """Up to `rows` visible rows from these queues' offsets on; waits up to `wait_ms` for the first one."""
        deadline = self._loop.time() + min(wait_ms, limits.PULL_WAIT_MS_MAX) / 1000
        while True:
            known = self.parts.topics.ensure(topic)
            seqs = pulling.locate(known, offsets, rows)
            if len(seqs):
                return await in_thread(self.parts.reader_thread, pulling.read, self.parts.reader, seqs)
            left = deadline - self._loop.time()
            if left <= 0 or not await self.waiters.wait(topic, left):
                return pa.RecordBatch.from_pylist([], READ_SCHEMA)

    async def read_queue(self, topic: str, queue_id: int, offset: int, rows: int) -> pa.RecordBatch:
        """Up to `rows` rows of one queue from `offset` on."""
        self.parts.topics.get(topic)
        return await self.pull(topic, {queue_id: offset}, rows, 0)

    def read_log(
        self, from_seq: int, to_seq: int, kinds: Iterable[int] | None = None, coalesce_rows: int = 65_536
    ) -> Iterator[pa.RecordBatch]:
        """Rows of the log; any thread."""
        return self.parts.reader.coalesced(from_seq, to_seq, kinds, coalesce_rows)

    def topics(self) -> dict[str, dict[str, int]]:
        """Topics and their numbers of queues."""
        return {t.name: {"queues": len(t.queues)} for t in self.parts.topics.all()}

    async def create_topic(self, name: str, queues: int | None = None) -> None:
        """Create a topic, or give it more queues; durable on return."""
        if queues is not None and not 1 <= queues <= limits.QUEUES_PER_TOPIC_MAX:
            raise OutOfRange(f"queues {queues}: between 1 and {limits.QUEUES_PER_TOPIC_MAX}")
        self.parts.topics.ensure(name, queues or self.parts.settings.queues_per_topic)
        await self.save_topics()

    def queues(self, topic: str) -> dict[int, tuple[int, int]]:
        """(min_offset, max_offset) of each queue."""
        queues = self.parts.topics.get(topic).queues
        return {i: (q.index.min_offset, q.index.max_offset) for i, q in enumerate(queues)}

    def offsets(self, group: str, topic: str) -> dict[int, int]:
        """A group's stored offsets."""
        return self.parts.offsets.get(group, topic)

    async def commit_offsets(self, group: str, topic: str, offsets: dict[int, int]) -> None:
        """Store a group's offsets; durable within about a second."""
        if topic not in self.topics():
            raise NotFound(f"topic {topic!r} does not exist")
        self.parts.offsets.commit(
            group, topic, offsets, {q: high for q, (_, high) in self.queues(topic).items()}
        )

    # -- moving what waits (see moving.py) -----------------------------------------------------------------

    async def reserve(self, rows: int) -> int:
        """Set sequence numbers aside for a bulk attach; returns the first."""
        return await self.mover.reserve(rows)

    async def attach(self, attachment: Attachment) -> Attached:
        """Make files part of the pending table, atomically."""
        return await self.mover.attach(attachment)

    async def compact(self) -> Attached | None:
        """Move the tail's promises to the pending table; None when there is nothing to move."""
        return await self.mover.compact()

    def compactor_lease(self, lease_ms: int) -> None:
        """Somebody outside moves the tail; the broker does not until the lease runs out."""
        self.mover.lease(lease_ms)

    # -- people ------------------------------------------------------------------------------------------

    def status(self) -> dict[str, object]:
        """Figures for people and for jobs; see docs/flight.md."""
        parts = self.parts
        segments = parts.reader.segments
        return {
            "now_ms": parts.clock.now_ms(),
            "log": {
                "first_seq": segments.first_seq,
                "next_seq": parts.writer.next_seq,
                "durable_seq": segments.next_seq,
                "bytes": segments.size_bytes,
                "commits": parts.writer.statistics.commits,
                "rows": parts.writer.statistics.rows,
            },
            "watermark": parts.ledger.watermark,
            "settled_before_ms": parts.schedule.settled_before_ms,
            "schedule": parts.schedule.statistics(),
            "table": {"uri": parts.catalog.uri, "version": parts.catalog.version},
            "lateness": self.lateness.summary(),
            "clock_suspect": parts.clock.suspect,
        }

    async def save_topics(self) -> None:
        """Write the list of topics when it has changed."""
        topics, data = self.parts.topics, self.parts.topics.save()
        if data is not None:
            with undone(topics.unsaved):
                await in_thread(self.parts.reader_thread, self.parts.files.replace, "topics.json", data)

    async def save_groups(self) -> None:
        """Write the list of consumer groups when it has changed."""
        groups, data = self.parts.groups, self.parts.groups.save()
        if data is not None:
            with undone(groups.unsaved):
                await in_thread(self.parts.reader_thread, self.parts.files.replace, "groups.json", data)
