"""What the broker does for itself, besides requests: save, compact, let go.

Each duty runs on its own interval and none is needed for a promise to be kept: when one of them lags, the log
is longer and the next start slower, no more. A duty that fails because the disk is full is tried again; any
other storage error stops the broker.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import msgspec
import pyarrow as pa

from timeball import limits
from timeball.broker import stored_table, table_watch
from timeball.broker.components import in_thread, rollback_on_error
from timeball.broker.memory import give_back
from timeball.broker.retention import Retention
from timeball.broker.service import Broker
from timeball.broker.stored_table import StoredTable
from timeball.broker.table_watch import TableWatch
from timeball.errors import MissingFile, OverLimit, RequestError, Unavailable
from timeball.log import checkpoint, frame_index
from timeball.log.checkpoint import Checkpoint, Facts
from timeball.log.format import SNAPSHOT
from timeball.log.queue_index import SEAL_ENTRIES
from timeball.schedule.outcomes import Settled
from timeball.table.attachment import Attachment
from timeball.table.file_set import FileSet

logger = logging.getLogger(__name__)

OFFSETS_INTERVAL_MS = 1_000
RETENTION_INTERVAL_MS = 60_000
COMPACT_LOOK_MS = 1_000
# A cancel by key asks for the keys of every data file, so a new one should have its own before the first cancel.
KEYS_INTERVAL_MS = 1_000
SEAL_LOOK_MS = 1_000
ROOM_LOOK_MS = 1_000
ROOM_BYTES_MIN = 16 * 1024 * 1024
CANCELS_INTERVAL_MS = 5_000
IDEMPOTENCY_INTERVAL_MS = 10_000
SUBSCRIPTIONS_INTERVAL_MS = 1_000
BEHIND_FILES_MIN = 64  # files wholly behind the present before they are removed: each removal is a row
REMOVE_JOB_ID = "broker-behind"


class Upkeep:
    """The duties of one broker."""

    def __init__(self, broker: Broker, snapshot_seq: int, log_from_seq: int = 1) -> None:
        """`snapshot_seq`, `log_from_seq`: the last snapshot's row, and from where on it says that the log is kept."""
        self._broker = broker
        self._parts = broker.parts
        self._settings = broker.parts.settings
        self._retention = Retention(broker.parts)
        self._checkpoint_seq = -1
        self._snapshot_seq = snapshot_seq
        self._saved: tuple[int, int] | None = None  # seq, log_from_seq of the last checkpoint
        # It never goes back: another replica of this log may have removed what stands below it.
        self._log_from_seq = max(log_from_seq, broker.parts.reader.first_seq)
        self._quiet_seq = -1  # the log's end when nothing but retention has written since the last look
        self._is_burst = False  # much is due within seconds
        self._keys_of: FileSet | None = None  # the files whose keys are indexed
        self._tasks: list[asyncio.Task[None]] = []
        self._compacted_ms = broker.parts.clock.elapsed_ms()
        self.watch = TableWatch(broker.parts, broker.mover)

    def start(self) -> None:
        """Begin all duties."""
        duties: list[tuple[int, Callable[[], Awaitable[None]]]] = [
            (OFFSETS_INTERVAL_MS, self.save_offsets),
            (self._settings.checkpoint_interval_ms, self.checkpoint),
            (RETENTION_INTERVAL_MS, self.apply_retention),
            (KEYS_INTERVAL_MS, self.index_keys),
            (SEAL_LOOK_MS, self.seal_queues),
            (ROOM_LOOK_MS, self.make_room),
            (IDEMPOTENCY_INTERVAL_MS, self.drop_idempotency_keys),
            (SUBSCRIPTIONS_INTERVAL_MS, self._broker.consuming.subscriptions.drain),
            (CANCELS_INTERVAL_MS, self._broker.campaign_changes.finish_cancels),
        ]
        # Without a pipeline. With one, the compactor outside takes a lease, and the broker keeps off the tail.
        if self._settings.compact_self:
            duties.append((COMPACT_LOOK_MS, self.compact_if_worth))
        look_ms = table_watch.LOOK_MS if self._parts.cache is None else stored_table.LOOK_MS
        # A store is asked over the network, and a look there costs two requests.
        duties.append((look_ms, self.watch.watch_table))
        if self._parts.cache is not None:
            stored = StoredTable(self._parts, self._parts.cache, self._broker.mover)
            duties.append((stored_table.LOOK_MS, stored.look))
            self._tasks = [
                asyncio.create_task(stored.look())
            ]  # what is due now need not wait for the first turn
        duties += self._broker.duties
        self._tasks += [asyncio.create_task(self._repeat(ms, duty)) for ms, duty in duties]

    async def stop(self, *, saves: bool = True) -> None:
        """End all duties, then save once more; not `saves` when a failure stops the broker.

        What failed may have left memory ahead of the files: only a start, which reads them anew, may go on.
        """
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if saves and self._parts.writer.failed is None:
            # Offsets first: they are rows, which the checkpoint then covers.
            for duty in (self.save_offsets, self.checkpoint):
                try:
                    await duty()
                except OverLimit as error:
                    # A full disk: the next start goes on from what was saved before.
                    logger.warning("not saved at the stop duty=%s reason=%s", duty.__name__, error)

    async def _repeat(self, interval_ms: int, duty: Callable[[], Awaitable[None]]) -> None:
        # Without a table in an object store it is a node of a cluster that leads no more, and that stops it.
        waits_for: tuple[type[Exception], ...] = () if self._parts.cache is None else (Unavailable,)
        is_away = False
        while True:
            # First: a start has just done what these duties do.
            await asyncio.sleep(interval_ms / 1000)
            try:
                await duty()
                is_away = False
            # A full disk passes, a file that is gone may be put back, and a table that changed meanwhile is looked at
            # again with the next turn.
            except (OverLimit, RequestError, MissingFile) as error:
                logger.warning("duty not done, trying again later duty=%s reason=%s", duty.__name__, error)
            except waits_for as error:
                # So does an object store that is away, maybe for an hour: one line, and not one a second.
                level = logging.DEBUG if is_away else logging.WARNING
                logger.log(level, "duty not done duty=%s reason=%s", duty.__name__, error)
                is_away = True
            except asyncio.CancelledError:
                raise
            except Exception as error:
                # No caller awaits this task: a duty that breaks must stop the broker, and not just end.
                self._parts.on_failure(error)
                return

    async def save_offsets(self) -> None:
        """Append how far consumer groups have come; durable on return."""
        self._parts.writer.check_room()
        self._broker.save_offsets()
        await self._parts.writer.flushed()

    async def checkpoint(self) -> None:
        """Save how far the caches have got, after syncing what the checkpoint vouches for."""
        parts = self._parts
        # A commit that an object store does not answer holds the lock; and until it has ended nothing may be saved.
        if parts.cache is not None and self._broker.mover.is_unfinished:
            return
        if checkpoint.bytes_behind(parts.reader.segments, self._snapshot_seq) >= checkpoint.SNAPSHOT_BYTES:
            await self.snapshot()
        async with self._broker.mover.lock:  # between the steps of an attach there is no state to save
            seq, log_from_seq = parts.reader.next_seq, self._log_from_seq
            # Nothing new to save; or an attach is half done, and a checkpoint would hide it from recovery.
            if (seq, log_from_seq) == self._saved or self._broker.mover.is_unfinished:
                return
            settled = parts.scheduler.settled()
            # Taken on the loop, in one step with the facts: the thread below syncs and saves exactly this state.
            dirty = parts.backlog.files_to_sync()
            state = None if parts.compacts else parts.scheduler.state(parts.backlog)
            facts = msgspec.structs.replace(
                self._facts(seq, settled),
                kept=None if state is None else msgspec.to_builtins(state),
            )
            queues = parts.topics.indexes.flush(seq)

            # The order is the guarantee: index, then the strategy's files, then the checkpoint that vouches for both.
            def save() -> None:
                queues.write()
                for folder, files in dirty:
                    for file in files:
                        file.sync()
                    if files:
                        parts.files.sync_dir(folder)
                known = msgspec.structs.replace(facts, queues=queues.lengths())
                checkpoint.save(parts.files, Checkpoint(known, settled.due_ms, settled.seq))
                frame_index.save_sealed(parts.files, parts.reader.segments)

            with rollback_on_error(parts.backlog.sync_failed):
                await parts.writer.synced()
                await in_thread(self._parts.reader_thread, save)
            parts.topics.indexes.finish(queues)
            # Only after the file is there: retention counts on the rows below being covered.
            self._checkpoint_seq = seq
            self._saved = seq, log_from_seq

    async def snapshot(self) -> bool:
        """Append what still counts of the log so far; durable on return. False while an attach has failed half way."""
        parts = self._parts
        async with self._broker.mover.lock:
            if self._broker.mover.is_unfinished:
                return False
            seq, settled = parts.reader.next_seq, parts.scheduler.settled()
            facts, queues = self._facts(seq, settled), parts.topics.indexes.flush(seq)

            def encoded() -> pa.RecordBatch:
                known = msgspec.structs.replace(facts, queues=queues.lengths())
                state = Checkpoint(known, settled.due_ms, settled.seq)
                return checkpoint.snapshot_row(state, parts.clock.now_ms())

            row = await in_thread(parts.reader_thread, encoded)
            # Rows may have come since `seq`; a start reads from there on.
            first_seq, durable = parts.writer.append(row, flags=SNAPSHOT)
            await durable
            await parts.writer.synced()
            self._snapshot_seq = first_seq
            return True

    def _facts(self, seq: int, settled: Settled) -> Facts:
        """Return the facts of the rows below `seq`; the caller adds the strategy's state and the queues' lengths."""
        parts = self._parts
        return Facts(
            seq=seq,
            settled_before_ms=settled.before_ms,
            settled_before_seq=settled.before_seq,
            late=list(settled.late),
            settled_released=settled.released,
            watermark=parts.ledger.watermark,
            epochs=dict(parts.ledger.epochs),
            jobs=dict(parts.ledger.jobs),
            reserved=list(parts.ledger.reserved.items()),
            waiting_rows=parts.outcomes.waiting_rows,
            leases=parts.lease_counts.facts(),
            halves=self._broker.transactions.open(),
            levels=parts.levels.state(parts.scheduler.settled_ms).levels,
            tick=(parts.outcomes.cursor.tick_ms, parts.outcomes.cursor.local_index),
            moved=parts.outcomes.moved.rows(),
            schedule=parts.settings.strategy,
            files=list(parts.hour_log.pending.live_entries()),
            attach_seq=parts.ledger.attach_seq,
            log_from_seq=self._log_from_seq,
            snapshot_seq=self._snapshot_seq,
            meta=dict(parts.meta.values),
        )

    async def seal_queues(self) -> None:
        """Write the newest entries of the queues when they are many; else they wait for the checkpoint."""
        parts, indexes = self._parts, self._parts.topics.indexes
        if indexes.unsealed >= SEAL_ENTRIES:
            async with self._broker.mover.lock:  # a checkpoint writes the same file
                flush = indexes.flush(parts.reader.next_seq)
                await parts.writer.synced()
                await in_thread(parts.reader_thread, flush.write)
                indexes.finish(flush)

    async def drop_idempotency_keys(self) -> None:
        """Append which idempotency keys have expired."""
        parts = self._parts
        parts.writer.check_room()
        before_ms = parts.clock.now_ms() - self._settings.idempotency_ms
        parts.idempotency_keys.drop(before_ms, parts.outcomes.moved.last_due_ms)

    async def index_keys(self) -> None:
        """Let the keys of new data files be found, and merge runs of keys."""
        parts, live = self._parts, self._parts.hour_log.pending.live
        if live is self._keys_of:
            return
        await in_thread(parts.background, parts.file_keys.bring_up, live)
        while await in_thread(parts.background, parts.file_keys.merge, live):
            pass
        self._keys_of = live
        # Runs are made of large, short-lived arrays, which malloc would keep (memory.py).
        await in_thread(parts.background, give_back)

    async def make_room(self) -> None:
        """Let the log be ready for what is due within seconds, when that is much, and give memory back behind it."""
        size_bytes = self._parts.scheduler.loaded.size_bytes
        if size_bytes >= ROOM_BYTES_MIN:
            self._is_burst = True
            await self._parts.writer.next_segment.make_ready(size_bytes)
        elif self._is_burst:
            # Bodies and frames of hundreds of megabytes have been freed, which malloc would keep (memory.py).
            self._is_burst = False
            await in_thread(self._parts.background, give_back)

    async def compact_if_worth(self) -> None:
        """Compact the tail, unless a compactor outside does or there is too little of it."""
        now_ms, rows = self._parts.clock.elapsed_ms(), self._broker.mover.tail_count.rows
        ours = now_ms >= self._broker.mover.outside_compactor_until_ms
        waited = now_ms - self._compacted_ms >= self._settings.compact_interval_ms
        if (
            self._parts.compacts
            and ours
            and (rows >= self._settings.compact_rows or (waited and rows >= self._settings.compact_rows_min))
        ):
            # Also when all are settled, as receipts nearly always are: or it would look at them again and again.
            await self._broker.mover.compact(even_without_promises=True)
            self._compacted_ms = now_ms
        await self._broker.mover.rewrite()

    async def apply_retention(self) -> None:
        """Remove old segments, and table files whose promises are all settled."""
        is_quiet = self._parts.writer.next_seq == self._quiet_seq
        has_ended = await self._end_old_segment(is_quiet=is_quiet)
        await self._remove_old()
        if is_quiet or has_ended:
            self._quiet_seq = self._parts.writer.next_seq

    async def _end_old_segment(self, *, is_quiet: bool) -> bool:
        """Let the log go on in a new segment when the newest one is old: while it is written to it cannot go.

        Return whether a row of retention's own has begun the new one, since no other came; none does while `is_quiet`.
        """
        parts, retention_ms = self._parts, self._settings.retention_ms
        last, now_ms = parts.reader.segments.last, parts.clock.now_ms()
        # At half the retention, so that rows are gone at one and a half times of it, and segments stay few.
        if last.first_append_ms is None or last.first_append_ms > now_ms - retention_ms // 2:
            return False
        try:
            await parts.writer.roll()
        except OverLimit as error:
            # The segments before it may go all the same, and make room.
            logger.warning("the log stays in its old segment reason=%s", error)
            return False
        # Its own rows grow old as well: without a look at them a log that is not used would be written to for ever.
        return not is_quiet and last.last_append_ms <= now_ms - retention_ms and await self.snapshot()

    async def _remove_old(self) -> None:
        parts = self._parts
        oldest = parts.reader.segments.all[0]
        old = oldest.last_append_ms <= parts.clock.now_ms() - self._settings.retention_ms
        if parts.compacts and old and parts.ledger.watermark < oldest.next_seq < parts.reader.next_seq:
            # The tail was too short to be compacted, but it keeps a segment from going.
            await self._broker.mover.compact(even_without_promises=True)
            await self.checkpoint()
        # With another strategy no promise waits for the table: its own files say what it needs (`needed_seq`).
        kept_from = parts.ledger.watermark if parts.compacts else None
        # The least of all that a restart, an open transaction, a backlog, the table or a drain still reads.
        needed = max(0, self._checkpoint_seq)
        for seq in (
            kept_from,
            self._broker.transactions.oldest_seq,
            parts.scheduler.needed_seq(),
            parts.drains.needed_seq,
        ):
            needed = needed if seq is None else min(needed, seq)
        gone = parts.reader.segments.expired(
            now_ms=parts.clock.now_ms(),
            retention_ms=self._settings.retention_ms,
            needed_from_seq=needed,
        )
        if gone:
            # Engines store offsets once a second: a group must not lose messages that it has read.
            self._broker.save_offsets()
            gone = await self._retention.may_go(gone)
        # Without a snapshot no segment may go, and none can be written while an attach is half done.
        if gone and not self._broker.mover.is_unfinished:
            # Before the snapshot: replicas remove segments as soon as they have applied it.
            await self._broker.dead_letters.repeat(gone[-1].next_seq)
            await self._retention.count_expired(gone[-1].next_seq)
            # First a snapshot says what they said, and that they may be gone: else a start refuses a log that lacks
            # them. The checkpoint follows, or it would not be believed.
            self._log_from_seq = gone[-1].next_seq
            if not await self.snapshot():
                return
            await self.checkpoint()
            await in_thread(self._parts.reader_thread, parts.reader.segments.remove, parts.files, gone)
            for name in parts.topics.indexes.forget(parts.reader.first_seq):
                await in_thread(self._parts.reader_thread, parts.files.remove, name)
            # Only the hour log compacts: what still waits lies behind what has gone.
            parts.ledger.watermark = max(parts.ledger.watermark, parts.reader.first_seq)
        # Readers of an older version of the table have as long as the log is kept, and a day at most.
        readable_ms = min(self._settings.retention_ms, limits.DAY_MS)
        left_ms = parts.clock.now_ms() - readable_ms
        await in_thread(self._parts.table_thread, parts.catalog.remove_left, left_ms)
        if parts.catalog.foreign.commits:
            # A VACUUM may go on for a while behind the commit that it was planned with, and leave none of its own.
            await in_thread(self._parts.table_thread, parts.catalog.look_for_missing)
        behind = parts.hour_log.pending.behind(
            min(parts.scheduler.settled_before_ms, parts.outcomes.holds.from_ms)
        )
        if len(behind) >= BEHIND_FILES_MIN:
            epoch = parts.reader.next_seq
            # An attach that only removes: the log must say that the files went, or a start would miss them.
            removes = [entry.path for entry in behind[: limits.ATTACH_FILES_MAX]]
            await self._broker.attach(
                Attachment(job="rewrite", job_id=REMOVE_JOB_ID, epoch=epoch, removes=removes)
            )
            await in_thread(self._parts.table_thread, lambda: parts.catalog.vacuum(limits.DAY_MS))
            await in_thread(parts.background, parts.file_keys.sweep)
