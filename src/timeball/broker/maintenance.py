"""The broker's periodic duties: checkpoints, snapshots, compaction, key indexes, retention.

Each duty runs at its own interval. Releases do not depend on duties: if a duty is late, the log is longer and the next
start is slower, but nothing else changes. A duty that fails because the disk is full is tried again. Any other storage
error stops the broker.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from timeball.broker.consuming.retention import Retention
from timeball.broker.registry.rates import shares
from timeball.broker.service import Broker
from timeball.broker.tables import table_changes
from timeball.broker.tables.memory import give_back
from timeball.broker.tables.table_changes import StoredTable, TableWatch
from timeball.io.cycle_collection import CYCLES
from timeball.io.threads import in_thread
from timeball.log import checkpoint, recovery
from timeball.log.checkpoint import Facts
from timeball.log.format import SNAPSHOT
from timeball.log.queue_index import SEAL_ENTRIES, Lengths, first_offsets
from timeball.log.segment import Segment
from timeball.model import limits
from timeball.model.errors import MissingFile, OverLimit, RequestError, Unavailable
from timeball.model.message import Int64Array
from timeball.schedule.due_index import Pairs
from timeball.schedule.outcomes import Settled
from timeball.table.attachment import Attachment
from timeball.table.file_keys import FileSet

logger = logging.getLogger(__name__)

OFFSETS_INTERVAL_MS = 1_000
RETENTION_INTERVAL_MS = 60_000
COMPACT_CHECK_INTERVAL_MS = 1_000
# A cancel by key reads the keys of every data file, so the keys of a new file should be indexed before the first
# cancel.
KEYS_INTERVAL_MS = 1_000
SEAL_INTERVAL_MS = 1_000
BURST_INTERVAL_MS = 1_000
# From this many bytes of messages that are due within seconds, space for the log is prepared in advance.
BURST_BYTES_MIN = 16 * 1024 * 1024
CANCELS_INTERVAL_MS = 5_000
SELECTIONS_INTERVAL_MS = 1_000
WAKERS_PAUSE_MS = 10
IDEMPOTENCY_INTERVAL_MS = 10_000
SUBSCRIPTIONS_INTERVAL_MS = 1_000
CYCLES_INTERVAL_MS = 10_000
# Files whose messages are all settled are removed in groups of at least this size, because each removal is a row.
BEHIND_FILES_MIN = 64
REMOVE_JOB_ID = "broker-behind"


@dataclass(frozen=True, slots=True)
class _Columns:
    """The columns of a state, in parts, for `checkpoint.encoded_pieces`. No parts are joined on the event loop."""

    settled: Sequence[Pairs]
    moved: Iterator[Int64Array]
    woken: Sequence[Int64Array]


class Maintenance:
    """The periodic duties of one broker."""

    def __init__(self, broker: Broker, snapshot_seq: int, log_from_seq: int = 1) -> None:
        """Create the duties, which begin with `start`.

        `snapshot_seq` is the row of the last snapshot. `log_from_seq` is the first row that the log must keep,
        according to this snapshot.
        """
        self._broker = broker
        self._files, self._clock, self._threads = broker.files, broker.clock, broker.threads
        self._log, self._tables = broker.log, broker.tables
        self._scheduling, self._pending_table = broker.scheduling, broker.pending_table
        self._settings = broker.settings
        self._retention = Retention(settings=broker.settings, clock=broker.clock, tables=broker.tables)
        # A checkpoint on disk covers the rows below this number. -1: none was saved yet.
        self._checkpoint_seq = -1
        self._snapshot_seq = snapshot_seq
        self._saved_seqs: tuple[int, int] | None = None  # (seq, log_from_seq) of the last checkpoint
        # Never decreases, because another replica of this log may have removed older rows.
        self._log_from_seq = max(log_from_seq, broker.log.reader.first_seq)
        # The end of the log after the last retention pass, if retention alone had written since the pass before it.
        self._quiet_seq = -1
        self._is_burst = False  # True while many bytes are due within seconds
        self._indexed_files: FileSet | None = None  # the set of files whose keys are indexed
        self._tasks: list[asyncio.Task[None]] = []
        self._compacted_ms = broker.clock.elapsed_ms()
        self.watch = TableWatch(
            broker.mover, clock=broker.clock, scheduling=broker.scheduling, pending_table=broker.pending_table,
            threads=broker.threads,
        )  # fmt: skip

    def start(self) -> None:
        """Start all duties."""
        duties: list[tuple[int, Callable[[], Awaitable[None]]]] = [
            (OFFSETS_INTERVAL_MS, self.save_offsets),
            (self._settings.checkpoint_interval_ms, self.checkpoint),
            (RETENTION_INTERVAL_MS, self.apply_retention),
            (KEYS_INTERVAL_MS, self.index_keys),
            (SEAL_INTERVAL_MS, self.seal_queues),
            (BURST_INTERVAL_MS, self.prepare_log_space),
            (IDEMPOTENCY_INTERVAL_MS, self.drop_idempotency_keys),
            (SUBSCRIPTIONS_INTERVAL_MS, self._broker.consuming.subscriptions.drain),
            (CANCELS_INTERVAL_MS, self._broker.campaign_changes.finish_cancels),
            (SELECTIONS_INTERVAL_MS, self._broker.selections.count),
            (COMPACT_CHECK_INTERVAL_MS, self.compact_if_worth),
            (CYCLES_INTERVAL_MS, self.collect_cycles),
        ]
        broker = self._broker
        cache = broker.pending_table.cache
        watch_ms = table_changes.WATCH_EVERY_MS if cache is None else table_changes.FETCH_EVERY_MS
        # Less often for an object store, where each check costs two network requests.
        duties.append((watch_ms, self.watch.watch_table))
        if cache is not None:
            store_watch = StoredTable(
                cache, broker.mover, clock=broker.clock,
                scheduler=broker.scheduling.scheduler, hour_log=broker.scheduling.hour_log,
                table_thread=broker.threads.table,
            )  # fmt: skip
            duties.append((table_changes.FETCH_EVERY_MS, store_watch.update))
            # Also once at the start, because messages may be due before the first interval ends.
            self._tasks = [asyncio.create_task(store_watch.update())]
        duties += self._broker.duties
        self._tasks += [asyncio.create_task(self._repeat(ms, duty)) for ms, duty in duties]
        # This duty waits for its events itself: the messages of a selection may be due at once.
        self._tasks.append(
            asyncio.create_task(self._repeat(WAKERS_PAUSE_MS, self._broker.wakers.wait_and_wake))
        )

    async def stop(self, *, saves: bool = True) -> None:
        """End all duties, then save the offsets and a checkpoint.

        Call it without `saves` if a failure stops the broker. Then memory may be ahead of the files, and must not be
        saved: the next start reads the files again.
        """
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if saves and self._log.writer.failed is None:
            # Offsets first: they are rows of the log, which the checkpoint then covers.
            for duty in (self.save_offsets, self.checkpoint):
                try:
                    await duty()
                except OverLimit as error:
                    # The disk is full: the next start continues from the previous checkpoint.
                    logger.warning("not saved at the stop duty=%s reason=%s", duty.__name__, error)

    async def _repeat(self, interval_ms: int, duty: Callable[[], Awaitable[None]]) -> None:
        """Run a duty after each interval, until cancelled. Errors that may be temporary are logged."""
        # Without an object store, Unavailable means that this node no longer leads its group. That must stop the
        # broker, so it is not among the errors that are tried again.
        retried_errors: tuple[type[Exception], ...] = (
            () if self._pending_table.cache is None else (Unavailable,)
        )
        is_unreachable = False
        while True:
            # Sleep first, because the start has just done this work.
            await asyncio.sleep(interval_ms / 1000)
            try:
                await duty()
                is_unreachable = False
            # Retry: a full disk may get space, a missing file may be restored, and a table that changed during the duty
            # is read again.
            except (OverLimit, RequestError, MissingFile) as error:
                logger.warning("duty not done, trying again later duty=%s reason=%s", duty.__name__, error)
            except retried_errors as error:
                # Retry: an object store may be unreachable for an hour. Log one warning, not one per second.
                level = logging.DEBUG if is_unreachable else logging.WARNING
                logger.log(level, "duty not done duty=%s reason=%s", duty.__name__, error)
                is_unreachable = True
            except asyncio.CancelledError:
                raise
            except Exception as error:
                # No caller awaits this task, so an unexpected error must stop the broker.
                self._broker.on_failure(error)
                return

    async def collect_cycles(self) -> None:
        """Collect Python's reference cycles, if the broker is idle or many objects are new."""
        due_ms = self._scheduling.scheduler.next_due_ms()
        CYCLES.collect_if_due(None if due_ms is None else due_ms - self._clock.now_ms())

    async def save_offsets(self) -> None:
        """Append the changes of consumer offsets to the log. Durable on return."""
        self._log.writer.check_admission()
        await self._broker.consuming.saver.save_in_slices()
        await self._log.writer.flushed()

    async def checkpoint(self) -> None:
        """Save the state of the caches in a checkpoint, after syncing all files that it depends on."""
        # An attach to an object store that does not answer holds the lock below for long. No checkpoint may be saved
        # before the attach has ended, so do not wait for the lock.
        if self._pending_table.cache is not None and self._broker.mover.has_unfinished_attach:
            return
        if (
            checkpoint.log_bytes_from(self._log.reader.segments, self._snapshot_seq)
            >= checkpoint.SNAPSHOT_BYTES
        ):
            try:
                await self.snapshot()
            except OverLimit as error:  # the checkpoint, a file, has no limit
                logger.warning("no snapshot written, the log is kept reason=%s", error)
        # Under the lock, because between the steps of an attach the state is inconsistent.
        async with self._broker.mover.lock:
            seq, log_from_seq = self._log.reader.next_seq, self._log_from_seq
            # Either nothing has changed, or an attach is half done. A checkpoint would hide its row from recovery.
            if (seq, log_from_seq) == self._saved_seqs or self._broker.mover.has_unfinished_attach:
                return
            settled = self._scheduling.scheduler.settled()
            # Collected together with the facts, without an await, so that the thread below saves exactly this state.
            unsynced = self._scheduling.backlog.files_to_sync()
            state = (
                None
                if self._scheduling.compacts
                else self._scheduling.scheduler.state(self._scheduling.backlog)
            )
            facts = msgspec.structs.replace(
                self._facts(seq, settled),
                kept=None if state is None else msgspec.to_builtins(state),
            )
            queues, complete = self._tables.topics.indexes.flush(seq), self._completer()
            columns = self._columns(settled)

            def write() -> None:
                """Write the queue indexes, and sync the files in `unsynced` (reader thread)."""
                queues.write()
                for folder, files in unsynced:
                    for file in files:
                        file.sync()
                    if files:
                        self._files.sync_dir(folder)

            def save(payload: bytes) -> None:
                """Save the checkpoint, and then the indexes of sealed segments (reader thread)."""
                checkpoint.save(self._files, payload)
                recovery.save_sealed(self._files, self._log.reader.segments)

            try:
                await self._log.writer.synced()
                self._scheduling.backlog.rows_synced()
                # This order is required: the index, then the strategy's files, then the checkpoint that depends on
                # both.
                await in_thread(self._threads.reader, write)
                payload = await self._encoded(lambda: complete(facts, queues.lengths()), columns)
                await in_thread(self._threads.reader, save, payload)
            except BaseException:  # also a cancellation by the stop
                # The next checkpoint must sync the files of `unsynced` again.
                self._scheduling.backlog.sync_failed()
                raise
            self._tables.topics.indexes.finish(queues)
            # Only after the checkpoint is saved, because retention removes rows below this number.
            self._checkpoint_seq = seq
            self._saved_seqs = seq, log_from_seq

    async def snapshot(self) -> bool:
        """Append a snapshot: the state of the log so far. Durable on return. False while an attach is half done."""
        async with self._broker.mover.lock:
            if self._broker.mover.has_unfinished_attach:
                return False
            seq, settled = self._log.reader.next_seq, self._scheduling.scheduler.settled()
            facts, queues = self._facts(seq, settled), self._tables.topics.indexes.flush(seq)
            complete, columns = self._completer(), self._columns(settled)
            payload = await self._encoded(lambda: complete(facts, queues.lengths()), columns)
            row = checkpoint.snapshot_row(payload, self._clock.now_ms())
            # Rows may have been appended since `seq`, so a start reads the log from `seq` on.
            first_seq, durable = self._log.writer.append(row, flags=SNAPSHOT)
            await durable
            await self._log.writer.synced()
            self._snapshot_seq = first_seq
            return True

    async def _encoded(self, facts: Callable[[], Facts], columns: _Columns) -> bytes:
        """Encode a state in the reader thread, piece by piece, so that reads for releases are not delayed for long."""
        reader, moved = self._threads.reader, list[Int64Array]()
        while (part := await in_thread(reader, next, columns.moved, None)) is not None:
            moved.append(part)
        pieces = await in_thread(
            reader, lambda: checkpoint.encoded_pieces(facts(), columns.settled, moved, columns.woken)
        )
        encoded = []
        while (piece := await in_thread(reader, next, pieces, None)) is not None:
            encoded.append(piece)
        return await in_thread(reader, b"".join, encoded)

    def _facts(self, seq: int, settled: Settled) -> Facts:
        """Collect the state after the rows below `seq`.

        The caller adds the strategy's state, and `_completer` the lengths of the queues and the META values.
        """
        return Facts(
            seq=seq,
            settled_before_ms=settled.before_ms,
            settled_before_seq=settled.before_seq,
            late=list(settled.late),
            settled_released=settled.released,
            watermark=self._broker.attach_state.watermark,
            epochs=dict(self._broker.attach_state.epochs),
            jobs=dict(self._broker.attach_state.jobs),
            reserved=list(self._broker.attach_state.reserved.items()),
            waiting_rows=self._scheduling.outcomes.waiting_rows,
            redeliveries=self._broker.redeliveries.facts(),
            halves=self._broker.transactions.open(),
            levels=self._scheduling.levels.state(self._scheduling.scheduler.settled_ms).levels,
            tick=(
                self._scheduling.outcomes.cursor.tick_ms,
                self._scheduling.outcomes.cursor.local_index,
            ),
            schedule=self._settings.strategy,
            files=list(self._scheduling.hour_log.pending.live_entries()),
            attach_seq=self._broker.attach_state.attach_seq,
            log_from_seq=self._log_from_seq,
            snapshot_seq=self._snapshot_seq,
        )

    def _completer(self) -> Callable[[Facts, Lengths], Facts]:
        """Copy the META values. Returns a function, for any thread, that adds them and the queue lengths to facts."""
        meta = self._tables.meta.copied()
        return lambda facts, queues: msgspec.structs.replace(facts, queues=queues, meta=meta())

    def _columns(self, settled: Settled) -> _Columns:
        """Copy the columns of the state as of now."""
        moved, woken = self._scheduling.outcomes.moved.copied(), self._tables.selections.woken.copied()
        return _Columns(settled.runs, moved, woken)

    async def seal_queues(self) -> None:
        """Write new entries of the queue indexes to disk if there are many.

        Otherwise the next checkpoint writes them.
        """
        indexes = self._tables.topics.indexes
        if indexes.unsealed >= SEAL_ENTRIES:
            async with self._broker.mover.lock:  # under the lock, because a checkpoint writes the same files
                flush = indexes.flush(self._log.reader.next_seq)
                await self._log.writer.synced()
                await in_thread(self._threads.reader, flush.write)
                indexes.finish(flush)

    async def drop_idempotency_keys(self) -> None:
        """Append rows that delete expired idempotency keys."""
        self._log.writer.check_admission()
        before_ms = self._clock.now_ms() - self._settings.idempotency_ms
        self._tables.idempotency_keys.drop(before_ms, self._scheduling.outcomes.moved.last_due_ms)

    async def index_keys(self) -> None:
        """Index the keys of new data files, and merge the index's runs of keys."""
        live = self._scheduling.hour_log.pending.live
        if live is self._indexed_files:
            return
        await in_thread(self._threads.background, self._pending_table.file_keys.bring_up, live)
        while await in_thread(self._threads.background, self._pending_table.file_keys.merge, live):
            pass
        self._indexed_files = live
        # Building runs takes large, short-lived arrays, whose memory malloc would keep (memory.py).
        await in_thread(self._threads.background, give_back)

    async def prepare_log_space(self) -> None:
        """Prepare disk space for the log if many bytes are due within seconds. After the burst, free its memory."""
        size_bytes = self._scheduling.scheduler.loaded.size_bytes
        if size_bytes >= BURST_BYTES_MIN:
            self._is_burst = True
            await self._log.writer.next_segment.make_ready(size_bytes)
        elif self._is_burst:
            # The burst has freed hundreds of MB of bodies and frames, which malloc would keep (memory.py).
            self._is_burst = False
            await in_thread(self._threads.background, give_back)

    async def compact_if_worth(self) -> None:
        """Compact the tail of the log, unless it is short or an external compactor (a pipeline) has a lease.

        Afterwards rewrite data files if that is worth the cost. With `compact_rows` 0, do neither.
        """
        if not self._settings.compact_rows:
            return
        now_ms, rows = self._clock.elapsed_ms(), self._broker.mover.tail_count.rows
        may_compact = now_ms >= self._broker.mover.external_compactor_until_ms
        is_interval_over = now_ms - self._compacted_ms >= self._settings.compact_interval_ms
        if (
            self._scheduling.compacts
            and may_compact
            and (
                rows >= self._settings.compact_rows
                or (is_interval_over and rows >= self._settings.compact_early_rows)
            )
        ):
            # Move the watermark even if all messages of the tail are settled (released or cancelled). Otherwise each
            # call would read these rows again.
            await self._broker.mover.compact(even_without_rows=True)
            self._compacted_ms = now_ms
        await self._broker.mover.merge_in_background()

    async def apply_retention(self) -> None:
        """Remove log segments that are older than the retention, and data files whose messages are all settled."""
        is_quiet = self._log.writer.next_seq == self._quiet_seq
        has_ended = await self._end_old_segment(is_quiet=is_quiet)
        if await self._remove_segments():
            await self._remove_files()
        if is_quiet or has_ended:
            self._quiet_seq = self._log.writer.next_seq

    async def _end_old_segment(self, *, is_quiet: bool) -> bool:
        """Start a new segment if the current one is old, because the current segment cannot be removed.

        If all its rows are old, the log is idle, and no row would be written to the new segment soon. Then write a
        snapshot row into it, unless `is_quiet`. Returns whether a snapshot row was written.
        """
        retention_ms = self._settings.retention_ms
        current, now_ms = self._log.reader.segments.last, self._clock.now_ms()
        # At half the retention time, so that rows are removed after 1.5 times the retention, and segments stay few. The
        # other direction is a wrong clock: the age of a segment that begins in the future is known from the next one.
        if current.first_append_ms is None or abs(now_ms - current.first_append_ms) < retention_ms // 2:
            return False
        try:
            await self._log.writer.roll()
        except OverLimit as error:
            # Continue, because removing older segments may free space.
            logger.warning("the log stays in its old segment reason=%s", error)
            return False
        # The snapshot rows grow old too. Without `is_quiet`, retention would write to an unused log for ever.
        is_recent = now_ms - retention_ms < current.newest_append_ms <= now_ms
        return not is_quiet and not is_recent and await self.snapshot()

    async def _remove_segments(self) -> bool:
        """Remove old segments that no reader needs. False if the necessary snapshot cannot be written now."""
        oldest = self._log.reader.segments.all[0]
        if (
            self._scheduling.compacts
            and self._expired(self._settings.retention_ms, oldest.next_seq)
            and self._broker.attach_state.watermark < oldest.next_seq < self._log.reader.next_seq
        ):
            # The tail is too short for the usual compaction, but it keeps an old segment from being removed.
            await self._broker.mover.compact(even_without_rows=True)
            await self.checkpoint()
        # Strategies without compaction do not use the watermark: `needed_seq` covers the rows that they need.
        compacted_to = self._broker.attach_state.watermark if self._scheduling.compacts else None
        # The first row that a restart, an open transaction, the backlog, the table or a drain still reads.
        needed_seq = max(0, self._checkpoint_seq)
        for seq in (
            compacted_to,
            self._broker.transactions.oldest_seq,
            self._scheduling.scheduler.needed_seq(),
            self._tables.drains.needed_seq,
        ):
            needed_seq = needed_seq if seq is None else min(needed_seq, seq)
        expired = self._expired(self._settings.retention_ms, needed_seq)
        if expired:
            # Offsets are saved once a second. Save them now, so that messages that a group has just read do not count
            # as unread.
            self._broker.consuming.saver.save()
            stale_count = len(self._expired(self._settings.unread_retention_ms, expired[-1].next_seq))
            expired = await self._retention.select_removable(expired, stale_count)
        # Segments may be removed only after a snapshot, and none can be written while an attach is half done.
        if expired and not self._broker.mover.has_unfinished_attach:
            # Before the snapshot, because replicas remove segments as soon as they have applied it.
            await self._broker.dead_letters.repeat(expired[-1].next_seq)
            await self._retention.count_expired(expired[-1].next_seq)
            # First write a snapshot with the state of these rows. Its `log_from_seq` permits their removal: without it,
            # a start would refuse the shorter log. Then write a checkpoint, because a start ignores a checkpoint that
            # needs removed rows.
            self._log_from_seq = expired[-1].next_seq
            if not await self.snapshot():
                return False
            await self.checkpoint()
            await self._hide_offsets(self._log_from_seq)
            await in_thread(self._threads.reader, self._log.reader.segments.remove, self._files, expired)
            for name in self._tables.topics.indexes.forget_files(self._log_from_seq):
                await in_thread(self._threads.reader, self._files.remove, name)
            # Only the hour log compacts. With other strategies the watermark moves here: all pending messages are after
            # the removed rows.
            self._broker.attach_state.watermark = max(
                self._broker.attach_state.watermark, self._log.reader.first_seq
            )
        return True

    async def _hide_offsets(self, before_seq: int) -> None:
        """Hide the offsets of rows before `before_seq`, in shares of the queues.

        Call it before the rows are removed, so that no consumer is offered a removed row.
        """
        indexes = self._tables.topics.indexes
        # The list of tens of thousands of queues takes too long for the thread that reads for releases.
        async for share in shares(
            await in_thread(self._threads.background, indexes.find_queues_before, before_seq)
        ):
            offsets = await in_thread(self._threads.reader, first_offsets, share, before_seq)
            for index, offset in zip(share, offsets, strict=True):
                index.hide_before(offset)

    def _expired(self, retention_ms: int, needed_from_seq: int) -> list[Segment]:
        """List the oldest segments before row `needed_from_seq` that are at least `retention_ms` old."""
        return self._log.reader.segments.expired(
            now_ms=self._clock.now_ms(), retention_ms=retention_ms, needed_from_seq=needed_from_seq
        )

    async def _remove_files(self) -> None:
        """Remove the files of the pending table that no reader needs any more."""
        # Readers of an older version of the table may read its files as long as the log is kept, but at most a day.
        readable_ms = min(self._settings.retention_ms, limits.DAY_MS)
        replaced_before_ms = self._clock.now_ms() - readable_ms
        await in_thread(
            self._threads.table, self._pending_table.catalog.delete_removed_files, replaced_before_ms
        )
        if self._pending_table.catalog.foreign.commits:
            # Another program's VACUUM may run after the commits that the broker has seen, and deletes files without a
            # commit. So check that the files still exist.
            await in_thread(self._threads.table, self._pending_table.catalog.restore_missing_live_files)
        settled_files = self._scheduling.hour_log.pending.ending_before(
            min(
                self._scheduling.scheduler.settled_before_ms,
                self._scheduling.outcomes.holds.from_ms,
            )
        )
        if len(settled_files) >= BEHIND_FILES_MIN:
            epoch = self._log.reader.next_seq
            # An attach that only removes files. The log must record the removal, or a start would look for the files.
            removes = [entry.path for entry in settled_files[: limits.ATTACH_FILES_MAX]]
            await self._broker.attach(
                Attachment(job="rewrite", job_id=REMOVE_JOB_ID, epoch=epoch, removes=removes)
            )
            await in_thread(self._threads.table, lambda: self._pending_table.catalog.vacuum(limits.DAY_MS))
            await in_thread(self._threads.background, self._pending_table.file_keys.sweep)
