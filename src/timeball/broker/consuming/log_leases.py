"""Leases kept in the log: each message handed out becomes a scheduled message that its receipt names.

    handed out     a SCHEDULED row for the group's retry topic, or for its dead letters if this was the last attempt,
                   due when the lease ends; once it is durable, the consumer sees the message and the position is done
    acknowledged   the scheduled message is cancelled
    other time     the scheduled message is moved: a MOVED row of the same number, with the other due time; the receipt
                   stays valid
    given back     moved as well; the row contains the time and the reason, which the next delivery shows
    dead letter    the scheduled message is cancelled, and replaced by a message for the group's dead letters

If a message is not acknowledged, the schedule releases its scheduled message like any other: exactly once, also after a
crash. Messages that a group has received and not acknowledged take no memory here.

A CANCEL and the row that replaces its scheduled message are one append: both are in the log or none is. Like every
cancel, an answer to a lease is decided on the event loop, by the newest version of the scheduled message. After that
decision the append must not fail, so all checks that may refuse it run before.

An append costs nearly the same for one row as for a hundred, so requests that arrive together share one (AsyncBatcher).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from timeball.broker.accepting.appender import Appender
from timeball.broker.accepting.delivery import as_moved_rows
from timeball.broker.accepting.ingress import AsyncBatcher, Batcher, BegunBatch, settle
from timeball.broker.consuming import lookup, redelivery_rows, retry
from timeball.broker.consuming.leases import Leases, QueueLeases
from timeball.broker.consuming.redelivery_rows import FEW_ROWS, retry_topic
from timeball.broker.consuming.requests import Receipt, Received, ReceiveRequest, Subscription
from timeball.broker.consuming.selection import Selection
from timeball.broker.filters.tags import BoolArray
from timeball.broker.registry import groups
from timeball.broker.registry.groups import Parked
from timeball.broker.registry.lease_counts import LeaseCounts, topic_of
from timeball.broker.registry.tables import Tables
from timeball.io.clock import SchedulerClock
from timeball.io.threads import Threads, in_thread
from timeball.log.row_encoder import ReadRows, pairs_of, read_batch
from timeball.log.writer import CommitLog, LogWriter
from timeball.model import limits
from timeball.model.config import Settings
from timeball.model.errors import OutOfRange, OverLimit, RequestError
from timeball.model.message import (
    CANCEL_REASON,
    LOG_SCHEMA,
    Int64Array,
    Kind,
    LogRow,
    build_rows,
    encode_properties,
    int64,
)
from timeball.model.rows import cancel_row
from timeball.schedule.outcomes import Outcomes
from timeball.schedule.scheduler import Scheduler, Scheduling
from timeball.table.file_cache import FileCache

_TOPIC_OF = itemgetter(LOG_SCHEMA.get_field_index("topic"))  # of a row
_QUEUE_OF = itemgetter(0)  # of a leased position

DEAD = encode_properties({CANCEL_REASON: "dead letter"})

# As many bodies as fit into one request if all had the maximum size, because a turn writes each body once more.
MOVES_PER_TURN = limits.REQUEST_BYTES_MAX // (limits.BODY_BYTES_MAX + 64 * 1024)


class Change(NamedTuple):
    """A request to change the end of a lease.

    invisible_ms   the time from now to the end, or None for the delay of the group's retry policy
    counts         True if the lease counts as an attempt
    nack           the reason for which the message is given back, or None if its consumer keeps it
    first          the level at which the retry policy begins (see `retry_delay_ms`)
    """

    receipt: Receipt
    invisible_ms: int | None
    counts: bool = True
    nack: str | None = None
    first: int = groups.FIRST_LEVEL


class GivenUp(NamedTuple):
    """A message that a consumer puts into the dead letters, and its reason."""

    receipt: Receipt
    reason: str


class LogLeases:
    """Writes and settles leases kept in the log. Belongs to the event loop."""

    def __init__(
        self,
        appender: Appender,
        leases: Leases,
        *,
        settings: Settings,
        clock: SchedulerClock,
        log: CommitLog,
        tables: Tables,
        lease_counts: LeaseCounts,
        scheduling: Scheduling,
        cache: FileCache | None,
        threads: Threads,
    ) -> None:
        self._appender, self._leases = appender, leases
        self._settings, self._clock, self._log = settings, clock, log
        self._tables, self._lease_counts = tables, lease_counts
        self._scheduling, self._cache, self._threads = scheduling, cache, threads
        self._compacts = scheduling.compacts
        # The first sequence number of each append that is not durable yet -> the queues of its positions.
        self._under_way: dict[int, list[QueueLeases]] = {}
        self._acks = Acknowledgements(
            appender,
            clock=clock,
            writer=log.writer,
            lease_counts=lease_counts,
            scheduler=scheduling.scheduler,
            outcomes=scheduling.outcomes,
        )
        self._changes: AsyncBatcher[Change, Receipt | None] = AsyncBatcher(self._change, MOVES_PER_TURN)
        self._dead: AsyncBatcher[GivenUp, bool] = AsyncBatcher(self._dead_letter, MOVES_PER_TURN)

    # -- handing out ---------------------------------------------------------------------------------------------

    def write(
        self, request: ReceiveRequest, main: Subscription, rows: ReadRows, selection: Selection
    ) -> tuple[asyncio.Future[int], Received]:
        """Append scheduled messages for the rows handed out. Returns a future of their durability, and the answer.

        The positions are done once the scheduled messages are durable. If the log fails, they stay leased. Raises
        OverLimit.
        """
        now_ms = self._clock.now_ms()
        due_ms = now_ms + request.invisible_ms
        # A few rows are made as values: in columns, one row costs as much as a hundred.
        is_few = rows.num_rows <= FEW_ROWS and self._compacts
        make: Callable[..., Any] = redelivery_rows.few_handed_out if is_few else redelivery_rows.handed_out
        scheduled_rows = make(
            rows if is_few else read_batch(rows), group=request.group, topic=request.topic, main=main,
            now_ms=now_ms, due_ms=due_ms, host=self._settings.host,
        )  # fmt: skip
        topics = map(_TOPIC_OF, scheduled_rows) if is_few else scheduled_rows.column("topic").to_pylist()
        # Before a topic is made, which would be refused as well.
        self._log.writer.check_admission()
        for topic in set(topics):
            # Usually the subscription has already found the retry topic, so it exists.
            if main.retry is None or topic != main.retry_name:
                self._tables.topics.ensure(topic, 1)
        # Read right before the append, without an await between: the receipts contain these numbers.
        first_seq, queues = self._log.writer.next_seq, list(dict.fromkeys(map(_QUEUE_OF, selection.leased)))

        def on_durable() -> None:
            del self._under_way[first_seq]
            for queue in queues:
                queue.in_log = True
            numbers = np.arange(first_seq, first_seq + rows.num_rows)
            self._lease_counts.add(request.group, topic_of(request.group, request.topic), numbers)
            self._leases.finish(selection.leased)

        if is_few:
            durable = self._appender.append_few(scheduled_rows, on_durable)
        else:
            durable = self._appender.append(
                self._appender.prepare(scheduled_rows, now_ms), on_durable
            ).durable
        # Only after the append: an append that is refused leaves nothing under way.
        self._under_way[first_seq] = queues
        receipts = [
            Receipt(request.group, request.topic, first_seq + i, due_ms) for i in range(rows.num_rows)
        ]
        return durable, Received(rows, list(receipts), now_ms, rest=selection.rest)

    def parked(self) -> Parked:
        """Collect the state of these leases that is saved with the offsets. A start after a crash needs it."""
        # A group that was moved meanwhile begins again elsewhere, and its older scheduled messages do not count.
        live = self._leases.is_live
        under_way = [seq for seq, queues in self._under_way.items() if any(map(live, queues))]
        # These scheduled messages may become durable although the saved offsets do not count their positions as done.
        return Parked(min([self._log.writer.next_seq, *under_way]), self._leases.ahead())

    # -- receipts ------------------------------------------------------------------------------------------------

    async def acknowledge(self, receipts: Sequence[Receipt]) -> list[bool]:
        """End these leases, durably. The result is False for each receipt that is not valid. Raises OutOfRange."""
        if len(receipts) > limits.CANCELS_PER_REQUEST_MAX:
            raise OutOfRange(f"at most {limits.CANCELS_PER_REQUEST_MAX} receipts in one request; split it")
        return await self._acks.put(receipts) if receipts else []

    def was_ended(self, receipt: Receipt) -> bool:
        """Check whether its consumer has ended this lease. False when the schedule no longer remembers it."""
        due_ms, version = newest_versions([receipt], outcomes=self._scheduling.outcomes)
        return bool(self._scheduling.outcomes.was_cancelled(due_ms, version)[0])

    async def change(self, change: Change) -> Receipt | None:
        """Change the end of a lease, durably. Returns its receipt, or None if it is not valid (any more)."""
        return await self._changes.put(change)

    async def dead_letter(self, receipt: Receipt, reason: str) -> bool:
        """Write the message to the group's dead letters, durably. False if the receipt is not valid."""
        return await self._dead.put(GivenUp(receipt, reason))

    # -- batches of requests ----------------------------------------------------------------------------------------

    async def _change(self, changes: list[Change]) -> list[Receipt | None]:
        receipts = [change.receipt for change in changes]
        valid = await decide(
            receipts,
            lambda _, indexes: self._renew([changes[i] for i in indexes]),
            writer=self._log.writer,
            outcomes=self._scheduling.outcomes,
        )
        return [
            receipt if is_valid else None for receipt, is_valid in zip(receipts, valid.tolist(), strict=True)
        ]

    async def _dead_letter(self, given_up: list[GivenUp]) -> list[bool]:
        """Make dead letters of these messages. Returns for each whether its receipt was still valid."""
        receipts = [given.receipt for given in given_up]
        valid = await decide(
            receipts,
            lambda _, indexes: self._give_up([given_up[i] for i in indexes]),
            writer=self._log.writer,
            outcomes=self._scheduling.outcomes,
        )
        return [bool(is_valid) for is_valid in valid]

    async def _renew(self, changes: Sequence[Change]) -> BoolArray:
        """Move the messages of these leases to their new due times, durably.

        The result marks those that were pending.
        """
        rows, times, indexes = await self._read([change.receipt for change in changes])
        found_changes = [changes[i] for i in indexes.tolist()]
        now_ms = self._clock.now_ms()
        valid = np.zeros(len(changes), dtype=np.bool_)
        if not found_changes:
            return valid
        # The attempts before this lease, and this lease unless it does not count.
        times += np.array([change.counts for change in found_changes])
        due_ms = np.array(
            [
                now_ms + self._invisible_ms(change, attempts)
                for change, attempts in zip(found_changes, times.tolist(), strict=True)
            ],
            dtype=np.int64,
        )
        receipts = [change.receipt for change in found_changes]
        topics = [
            self._topic_after(receipt, attempts)
            for receipt, attempts in zip(receipts, times.tolist(), strict=True)
        ]
        nacked = np.array([change.nack is not None for change in found_changes])
        extra = [
            {} if change.nack is None else redelivery_rows.given_back(change.nack, now_ms)
            for change in found_changes
        ]
        new_rows = self._copies(rows, receipts, topics, times, now_ms, extra, due_ms=due_ms)
        valid[indexes] = await self._move(rows, new_rows, nacked, now_ms)
        return valid

    async def _give_up(self, given_up: Sequence[GivenUp]) -> BoolArray:
        """Write the messages of these leases to the dead letters, durably. The result marks those that were pending."""
        rows, times, indexes = await self._read([given.receipt for given in given_up])
        valid = np.zeros(len(given_up), dtype=np.bool_)
        if len(indexes):
            now_ms, existing = self._clock.now_ms(), [given_up[i] for i in indexes.tolist()]
            receipts = [given.receipt for given in existing]
            # One more attempt: the message was handed out, even if its consumer gives up at once.
            topics = [retry.dead_letter_topic(receipt.group) for receipt in receipts]
            extra = [redelivery_rows.given_up(given.reason) for given in existing]
            new_rows = self._copies(rows, receipts, topics, times + 1, now_ms, extra, kind=Kind.MESSAGE)
            valid[indexes] = await self._replace_by_dead_letters(receipts, rows, new_rows, now_ms)
        return valid

    async def _move(
        self, before: pa.RecordBatch, new_rows: pa.RecordBatch, nacked: BoolArray, now_ms: int
    ) -> BoolArray:
        """Append MOVED rows with the due times of `new_rows`, durably. The result marks those that were pending."""
        prepared = self._appender.prepare(new_rows, now_ms)  # runs every check that may refuse
        from_ms = int64(before.column("due_ms"))
        was_pending = settle_leases(
            from_ms, int64(before.column("seq")), scheduler=self._scheduling.scheduler
        )
        if not was_pending.any():
            return was_pending
        chosen = pa.array(was_pending)
        # Only those that were pending: the others are settled and must not be written again.
        rows = as_moved_rows(prepared.filter(chosen), before.filter(chosen))
        # Read without an await before the append, whose rows get these numbers.
        first_seq = self._log.writer.next_seq
        columns = int64(rows.column("due_ms")), int64(rows.column("source_seq")), from_ms[was_pending]
        moves = [
            (due, number, first_seq + i, from_due_ms)
            for i, (due, number, from_due_ms) in enumerate(
                zip(*(column.tolist() for column in columns), strict=True)
            )
        ]
        numbers = columns[1]

        def on_durable() -> None:
            # Only now: until the row is durable, a crash would leave the scheduled message at its old due time.
            self._scheduling.outcomes.moved.add(moves)
            self._lease_counts.change(numbers, nacked[was_pending])

        # No await since the decision, because after it the append must not fail.
        await self._appender.append(rows, on_durable).durable
        return was_pending

    # -- what they have in common ----------------------------------------------------------------------------------

    async def _replace_by_dead_letters(
        self, receipts: Sequence[Receipt], before: pa.RecordBatch, new_rows: pa.RecordBatch, now_ms: int
    ) -> BoolArray:
        """Cancel these messages and append `new_rows` in their place, durably. The result marks the pending ones."""
        prepared = self._appender.prepare(new_rows, now_ms)  # runs every check that may refuse
        versions = pairs_of(before)
        # Built before the decision too, and filtered after it.
        cancels = cancel_rows(receipts, *versions, DEAD, now_ms)
        was_pending = settle_leases(*versions, scheduler=self._scheduling.scheduler)
        count_ended(receipts, was_pending, lease_counts=self._lease_counts)
        if was_pending.any():
            # No await since the decision, and one append: a scheduled message is never gone without the row that
            # replaces it.
            chosen = pa.array(was_pending)
            rows = pa.concat_batches([cancels.filter(chosen), prepared.filter(chosen)])
            await self._appender.append(rows).durable
        return was_pending

    async def _read(self, receipts: Sequence[Receipt]) -> tuple[pa.RecordBatch, Int64Array, Int64Array]:
        """Read the scheduled messages of these receipts.

        Returns the rows that exist, the number of attempts of each message before this lease, and the indexes of their
        receipts. Raises OverLimit when the log accepts no more rows.
        """
        self._log.writer.check_admission()
        files = await lookup.local_files(
            *(versions := newest_versions(receipts, outcomes=self._scheduling.outcomes)),
            reader=self._log.reader,
            hour_log=self._scheduling.hour_log,
            cache=self._cache,
            lookup_thread=self._threads.lookup,
        )

        def read() -> tuple[pa.RecordBatch, Int64Array, Int64Array]:
            rows, indexes = lookup.scheduled_rows(self._log.reader, files, *versions)
            return rows, lookup.times_before(self._log.reader, rows), indexes

        # Both reads in one step, because each change of threads costs time.
        return await in_thread(self._threads.reader, read)

    def _copies(
        self,
        rows: pa.RecordBatch,
        receipts: Sequence[Receipt],
        topics: Sequence[str],
        times: Int64Array,
        now_ms: int,
        extra: Sequence[dict[str, str]],
        *,
        kind: Kind = Kind.SCHEDULED,
        due_ms: Int64Array | None = None,
    ) -> pa.RecordBatch:
        """Build rows for other topics from READ_SCHEMA messages.

        `extra` contains additional properties for each row.
        """
        properties = [
            redelivery_rows.added(receipt.group, receipt.topic, now_ms) | row_extra
            for receipt, row_extra in zip(receipts, extra, strict=True)
        ]
        return self._rows(
            rows, kind=kind, topics=topics,
            properties=redelivery_rows.properties_of_each(rows.column("properties"), properties),
            times=times, due_ms=due_ms, now_ms=now_ms,
        )  # fmt: skip

    def _rows(
        self,
        rows: pa.RecordBatch,
        *,
        kind: Kind = Kind.SCHEDULED,
        topics: Sequence[str],
        properties: pa.Array,
        times: Int64Array,
        due_ms: Int64Array | None,
        source_seq: pa.Array | None = None,
        now_ms: int,
    ) -> pa.RecordBatch:
        for topic in set(topics):
            self._tables.topics.ensure(topic, 1)
        return redelivery_rows.build(
            rows, kind=kind, topics=topics, properties=properties, times=times, due_ms=due_ms,
            source_seq=source_seq, now_ms=now_ms, host=self._settings.host,
        )  # fmt: skip

    def _topic_after(self, receipt: Receipt, times: int) -> str:
        times_max = self._tables.groups.times_max(receipt.group)
        retry_name, dead_letter_name = (
            retry_topic(receipt.group, receipt.topic),
            retry.dead_letter_topic(receipt.group),
        )
        return redelivery_rows.topics_after(retry_name, dead_letter_name, np.array([times]), times_max)[0]

    def _invisible_ms(self, change: Change, times: int) -> int:
        if change.invisible_ms is not None:
            return change.invisible_ms
        group = self._tables.groups.find_group(change.receipt.group)
        policy = group.group_retry_policy if group is not None else None
        # At least one attempt, even if the first one does not count.
        return groups.retry_delay_ms(policy, max(1, times), first=change.first)


# ---- acknowledgements: one append for many requests ----------------------------------------------------------
# Nearly all requests are decided and their rows appended within the turn of the loop that begins them, and the commit
# answers them. If a scheduled message was already settled or moved, a task decides again once the row of that change is
# durable.

ACKNOWLEDGED = encode_properties({CANCEL_REASON: "acknowledged"})
CALLS_PER_TURN = 4_096  # requests of one turn: the others wait for the next turn
ROWS_PER_APPEND = 65_536  # far below the limit of a frame

_Request = tuple[Sequence[Receipt], "asyncio.Future[list[bool]]"]


class Acknowledgements:
    """Ends leases kept in the log. Belongs to the event loop."""

    def __init__(
        self,
        appender: Appender,
        *,
        clock: SchedulerClock,
        writer: LogWriter,
        lease_counts: LeaseCounts,
        scheduler: Scheduler,
        outcomes: Outcomes,
    ) -> None:
        self._appender = appender
        self._clock, self._writer, self._lease_counts = clock, writer, lease_counts
        self._scheduler, self._outcomes = scheduler, outcomes
        self._batcher: Batcher[_Request] = Batcher(
            self._begin, _answer, _refuse, rows_max=CALLS_PER_TURN, is_pipelined=False
        )
        self._tasks: set[asyncio.Future[BoolArray]] = set()

    def put(self, receipts: Sequence[Receipt]) -> asyncio.Future[list[bool]]:
        """End these leases. When all rows are durable, the future states for each receipt whether it was valid."""
        future: asyncio.Future[list[bool]] = asyncio.get_running_loop().create_future()
        self._batcher.put((receipts, future))
        return future

    def _begin(self, requests: list[_Request]) -> BegunBatch:
        receipts = (
            requests[0][0] if len(requests) == 1 else [receipt for some, _ in requests for receipt in some]
        )
        versions = newest_versions(receipts, outcomes=self._outcomes)
        valid, durable = self._end(receipts, versions)
        # The usual case needs no task, and no turn of the loop beyond the commit.
        if durable is not None and valid.all():
            return valid, durable
        task = asyncio.ensure_future(self._decide_again(receipts, versions, valid, durable))
        self._tasks.add(task)  # the loop itself keeps no task alive
        task.add_done_callback(self._tasks.discard)
        return task, task

    def _end(
        self, receipts: Sequence[Receipt], versions: Versions
    ) -> tuple[BoolArray, asyncio.Future[int] | None]:
        """Cancel the scheduled messages of these receipts.

        Returns which were pending, and a future that is done when their rows are durable (None without rows).
        """
        valid, durable = np.zeros(len(receipts), dtype=np.bool_), None
        for begin in range(0, len(receipts), ROWS_PER_APPEND):
            chunk = receipts[begin : begin + ROWS_PER_APPEND]
            due_ms, version = (column[begin : begin + len(chunk)] for column in versions)
            # Decided by the newest version, between two awaits: a later release finds the scheduled message cancelled.
            now_ms = self._clock.now_ms()
            was_pending = valid[begin : begin + len(chunk)] = settle_leases(
                due_ms, version, scheduler=self._scheduler
            )
            count_ended(chunk, was_pending, lease_counts=self._lease_counts)
            if was_pending.any():
                # No await since the decision: the CANCEL rows stand in the log before any later release.
                durable = self._append(chunk, (due_ms, version), was_pending, now_ms)
        return valid, durable

    def _append(
        self, receipts: Sequence[Receipt], versions: Versions, was_pending: BoolArray, now_ms: int
    ) -> asyncio.Future[int]:
        if len(receipts) <= FEW_ROWS:
            values = few_cancel_rows(receipts, *versions, ACKNOWLEDGED, now_ms)
            return self._appender.append_few(
                [values[index] for index in np.flatnonzero(was_pending).tolist()]
            )
        rows = cancel_rows(receipts, *versions, ACKNOWLEDGED, now_ms)
        return self._appender.append(
            rows if was_pending.all() else rows.filter(pa.array(was_pending))
        ).durable

    async def _decide_again(
        self,
        receipts: Sequence[Receipt],
        versions: Versions,
        valid: BoolArray,
        durable: asyncio.Future[int] | None,
    ) -> BoolArray:
        """End the leases that another request has moved meanwhile. Returns which receipts were valid in the end."""
        if durable is not None:
            await durable  # the receipts that were valid are answered only when their rows are durable
        # The newest version is known only when the row that moved the scheduled message is durable.
        await self._writer.flushed()
        undecided = np.flatnonzero(
            ~valid & (newest_versions(receipts, outcomes=self._outcomes)[1] != versions[1])
        )
        if len(undecided):
            try:
                valid[undecided] = await decide(
                    [receipts[index] for index in undecided.tolist()],
                    self._attempt,
                    writer=self._writer,
                    outcomes=self._outcomes,
                )
            except (RequestError, OverLimit):
                if not valid.any():
                    raise
                # Others of these have ended. The rest is answered as not valid, and comes back when its leases end.
        return valid

    async def _attempt(self, receipts: Sequence[Receipt], _at: Sequence[int]) -> BoolArray:
        valid, durable = self._end(receipts, newest_versions(receipts, outcomes=self._outcomes))
        if durable is not None:
            await durable
        return valid


def _answer(requests: list[_Request], begun: Any) -> None:
    results = (begun.result() if isinstance(begun, asyncio.Future) else begun).tolist()
    begin = 0
    for receipts, future in requests:
        settle(future, results[begin : begin + len(receipts)])
        begin += len(receipts)


def _refuse(requests: list[_Request], error: BaseException) -> None:
    for _, future in requests:
        settle(future, error)


# ---- newest versions, and concurrent answers to a lease ------------------------------------------------------
# A receipt is no longer valid once the release of its scheduled message has begun, and a cancelled scheduled message is
# never released. If another request moved the scheduled message first, its newest version is looked up when that
# request's row is durable, and the answer is decided again.

Versions = tuple[Int64Array, Int64Array]  # due_ms and version: the key of a scheduled message in the schedule
# Settles or moves the scheduled messages of receipts, durably, and returns which of them were pending. The second
# argument contains the indexes of the receipts in the whole request.
Attempt = Callable[[Sequence[Receipt], Sequence[int]], Awaitable[BoolArray]]


def newest_versions(receipts: Sequence[Receipt], *, outcomes: Outcomes) -> Versions:
    """Find the current due times and versions of the scheduled messages of these receipts."""
    # The receipt contains the due time of the first version, and stays valid when the lease gets another.
    due_ms = np.array([receipt.due_ms for receipt in receipts], dtype=np.int64)
    number = np.array([receipt.seq for receipt in receipts], dtype=np.int64)
    return outcomes.moved.newest_of(due_ms, number)


def count_ended(receipts: Sequence[Receipt], ended: BoolArray, *, lease_counts: LeaseCounts) -> None:
    """Count the leases that were ended, which `ended` marks."""
    lease_counts.end(np.array([receipt.seq for receipt in receipts], dtype=np.int64)[ended])


def settle_leases(due_ms: Int64Array, version: Int64Array, *, scheduler: Scheduler) -> BoolArray:
    """Cancel those of these scheduled messages that are pending. The result marks them."""
    # The usual case, without duplicates: a set costs less than numpy's `unique`, even for many receipts.
    if len(set(version.tolist())) == len(version):
        return scheduler.cancel(due_ms, version)
    was_pending = np.zeros(len(version), dtype=np.bool_)
    # A receipt that occurs twice settles its scheduled message once.
    first_indexes = np.unique(version, return_index=True)[1]
    was_pending[first_indexes] = scheduler.cancel(due_ms[first_indexes], version[first_indexes])
    return was_pending


async def decide(
    receipts: list[Receipt], attempt: Attempt, *, writer: LogWriter, outcomes: Outcomes
) -> BoolArray:
    """Call `attempt` for these receipts, and again for those that another request moved meanwhile.

    Returns which of them were settled. Raises the errors of `attempt` (RequestError, OverLimit) only while none was.
    """
    valid = np.zeros(len(receipts), dtype=np.bool_)
    undecided = np.arange(len(receipts))
    while len(undecided):
        remaining = [receipts[index] for index in undecided.tolist()]
        version = newest_versions(remaining, outcomes=outcomes)[1]
        try:
            valid[undecided] = await attempt(remaining, undecided.tolist())
        except (RequestError, OverLimit):
            if not valid.any():
                raise
            # An earlier round has settled some of them, and the batcher must not begin those again. The others are
            # answered as not valid, and their messages come back when their leases end.
            break
        lost = ~valid[undecided]
        if not lost.any():
            break
        # The newest version is known only when the row that moved the scheduled message is durable.
        await writer.flushed()
        undecided = undecided[lost & (newest_versions(remaining, outcomes=outcomes)[1] != version)]
    return valid


# ---- the CANCEL rows that end leases -------------------------------------------------------------------------
# They are built as columns, or as values when they are few. `tests/broker/consuming/test_lease_ends.py` checks that
# both ways build the same rows. A row has no id, because the message's id belongs to its sender. It names the scheduled
# message that it ends. If that message was moved, it also names the row that gave it its current due time.


def cancel_rows(
    receipts: Sequence[Receipt], due_ms: Int64Array, version: Int64Array, reason: str, now_ms: int
) -> pa.RecordBatch:
    """Build LOG_SCHEMA rows that end these leases. `due_ms` and `version` are those of the newest versions."""
    number = np.array([receipt.seq for receipt in receipts], dtype=np.int64)
    return build_rows(
        len(receipts),
        kind=int(Kind.CANCEL),
        topic=[retry_topic(receipt.group, receipt.topic) for receipt in receipts],
        # A CANCEL row is not visible, so it has no queue.
        queue_id=-1,
        # All rows of a call have the same reason, which is encoded once.
        properties=reason,
        store_ms=now_ms,
        due_ms=due_ms,
        source_seq=number,
        # Null for a scheduled message that was never moved, as the number names it already.
        version_seq=pa.array(version, mask=version == number),
    )


def few_cancel_rows(
    receipts: Sequence[Receipt], due_ms: Int64Array, version: Int64Array, reason: str, now_ms: int
) -> list[LogRow]:
    """Build the rows of `cancel_rows` as values."""
    return [
        cancel_row(
            topic=retry_topic(receipt.group, receipt.topic), source_seq=receipt.seq, due_seq=seq, due_ms=due,
            store_ms=now_ms, properties=reason,
        )
        for receipt, due, seq in zip(receipts, due_ms.tolist(), version.tolist(), strict=True)
    ]  # fmt: skip
