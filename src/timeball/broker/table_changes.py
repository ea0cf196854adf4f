"""Change the pending table: reserve, attach, compact, rewrite, one change at a time.

An attach is decided by its row in the log; the steps around it are in table/catalog.py. They run under one lock,
because each attach begins where the last one ended, and because a checkpoint cannot save the state between steps.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import numpy as np
import pyarrow as pa

from timeball import limits
from timeball.broker.appender import TailCount
from timeball.broker.components import Components, in_thread
from timeball.broker.memory import give_back
from timeball.broker.registry.campaigns import CampaignFacts
from timeball.broker.registry.meta import Change
from timeball.broker.tables import attach, compact, rewrite
from timeball.errors import OverLimit, RequestError, Unavailable
from timeball.message import Int64Array, Kind, build_rows
from timeball.schedule.locations import Waiting, take_promises
from timeball.table import attachment as att
from timeball.table.attachment import Attachment, FileEntry, within
from timeball.table.data_file import overlapping
from timeball.wire import Attached

logger = logging.getLogger(__name__)


class TableChanges:
    """The pending table's changes, one at a time. Belongs to the event loop."""

    def __init__(self, parts: Components, *, promises_since_watermark: int) -> None:
        self.parts = parts
        self._loop = asyncio.get_running_loop()
        self.lock = asyncio.Lock()
        # Held over the long work of compaction and rewriting; `lock` only over the short steps of an attach, so that
        # a bulk attach need not wait for a compaction.
        self._compact_lock = asyncio.Lock()
        self.tail_count = TailCount(parts.ledger.watermark, promises_since_watermark)
        self.outside_compactor_until_ms = 0
        self.compactions = compact.Figures(parts.clock.clock)
        # An attach is decided and the table may lack it. Recovery repeats only what stands behind the
        # checkpoint, so none may be saved now, and no later attach may pass this one.
        self.is_unfinished = False
        # Brings up a table that could not follow: the disk was full, or its object store did not answer.
        self.behind: Callable[[], object] | None = None

    async def reserve(self, rows: int) -> int:
        """Set sequence numbers aside for a bulk attach; returns the first."""
        self.parts.ledger.check_reserve(rows)
        body, now_ms = att.encode(att.Reservation(rows)), self.parts.clock.now_ms()
        row = build_rows(1, kind=int(Kind.TABLE), body=body, store_ms=now_ms)
        # Behind the row itself: its frame uses up the numbers, so no other row can get them.
        first_seq = self.parts.writer.next_seq + 1
        _, durable = self.parts.writer.append(
            row, span=1 + rows, on_durable=lambda: self.parts.ledger.reserve(first_seq, rows)
        )
        await durable
        return first_seq

    async def attach(self, attachment: Attachment) -> Attached:
        """Make files part of the pending table, atomically; see table/catalog.py for the order of steps."""
        attach.check_count(attachment)
        if attachment.job == "compact":
            self._check_compacts()
        # A task of its own: a caller who goes away must not leave an attach half done and unlocked.
        return await asyncio.shield(self._loop.create_task(self._attach(attachment)))

    async def _attach(self, attachment: Attachment) -> Attached:
        is_elsewhere = self.parts.file_replication is not None or self.parts.cache is not None
        if is_elsewhere and not self.parts.ledger.is_repeated(attachment):
            # Outside the lock, since it waits for other replicas, or a store; all is checked again below.
            await self._check_files(attachment, self.parts.clock.now_ms())
            await self._make_local(self.parts.hour_log.pending.entries(attachment.removes))
            await self._make_durable(attachment.files)
        async with self.lock:
            parts, ledger = self.parts, self.parts.ledger
            self._check_finished()
            # A job that was cut off between our row and its answer asks again: it is told the same, and nothing is
            # attached twice.
            if ledger.is_repeated(attachment):
                version = await in_thread(self.parts.table_thread, lambda: parts.catalog.version)
                return Attached(version=version, watermark=ledger.watermark, seq=0, repeated=True)
            live = {file.entry.path for file in parts.hour_log.pending.all()}
            now_ms = parts.clock.now_ms()
            parts.campaigns.check_attach(attachment)
            ledger.check(
                attachment, durable_seq=parts.reader.next_seq, is_live=live.__contains__, now_ms=now_ms
            )
            await self._check_files(attachment, now_ms)
            # Before the row: once the log says that a file is attached, a power cut must not take the file.
            await in_thread(parts.table_thread, parts.catalog.sync_data, attachment.files)
            state = parts.campaigns.attached(attachment, now_ms)
            return await self._attach_checked(attachment, now_ms, state)

    async def _check_files(self, attachment: Attachment, now_ms: int) -> None:
        await in_thread(self.parts.table_thread,
            attach.check_files, self.parts.files, attachment,
            now_ms=now_ms, delay_ms_max=self.parts.settings.delay_ms_max, cache=self.parts.cache,
        )  # fmt: skip

    async def _make_durable(self, entries: list[FileEntry]) -> None:
        """Return when the files are in the store, or on the disk, here and at enough other replicas; NotLeader."""
        await in_thread(self.parts.table_thread, self.parts.catalog.sync_data, entries)
        await self._make_local(entries)
        if self.parts.file_replication is not None and entries:
            paths = [entry.path for entry in entries]
            await asyncio.wrap_future(self.parts.file_replication.ship(paths))

    async def _attach_checked(
        self, attachment: Attachment, now_ms: int, state: Change | None = None, resumes: str = ""
    ) -> Attached:
        """Append the attach and, in one frame with it, what it means to a campaign; then bring the caches up to it."""
        parts = self.parts
        # Taken before the attach takes the files out: the Delta log must name them as removed.
        removed = parts.hour_log.pending.entries(attachment.removes)
        row = build_rows(1, kind=int(Kind.TABLE), body=att.encode(attachment), store_ms=now_ms)
        rows = row if state is None else pa.concat_batches([row, state.rows])
        seq = parts.writer.next_seq
        _, durable = parts.writer.append(rows, on_durable=lambda: parts.ledger.apply(attachment, seq, now_ms))
        if state is not None:
            state.keep()
        self.is_unfinished = True
        await durable
        await parts.writer.synced()  # the table must not know of a row that `async` durability may lose
        try:
            await parts.scheduler.attach(attachment, resumes, parts.clock.now_ms())
            version = await self._commit(partial(parts.catalog.commit, attachment, seq, removed, now_ms))
        except BaseException as error:
            # The log says that it has happened: only a recovery, which repeats these steps, may go on.
            parts.on_failure(error)
            raise
        if attachment.job == "compact":
            self.tail_count.drop_below(attachment.to_seq)
        self.compactions.attached(attachment, now_ms)
        return Attached(version=version, watermark=parts.ledger.watermark, seq=seq)

    async def _make_local(self, entries: Sequence[FileEntry]) -> None:
        """Fetch those that hold something due soon: what joins the table, and what must be opened before it leaves."""
        parts = self.parts
        if parts.cache is not None:
            await in_thread(parts.table_thread, parts.cache.keep_near, entries, parts.soon_ms())
            parts.hour_log.look_again()

    async def _commit(self, commit: Callable[[], int]) -> int:
        """Let the table follow the log; return its version. While a disk is full or a store away that is done later."""
        try:
            version = await in_thread(self.parts.table_thread, commit)
        except (Unavailable, OverLimit) as error:
            # No failure: the row is durable and the schedule has followed it. `catch_up` repeats the commit.
            logger.warning("pending table is behind the log reason=%s", error)
            self.behind = commit
            return self.parts.catalog.version
        self.is_unfinished = False
        return version

    def follow_later(self, bring_up: Callable[[], object]) -> None:
        """Begin with a table that may be behind the log, until `catch_up` has called this."""
        self.behind, self.is_unfinished = bring_up, True

    async def follow(self) -> None:
        """Bring up the table; while a disk is full, or its object store does not answer, that is done later."""
        try:
            await self.catch_up()
        except (Unavailable, OverLimit) as error:
            logger.warning("pending table is behind the log reason=%s", error)

    async def catch_up(self) -> None:
        """Bring up a table that could not follow the log; raise Unavailable or OverLimit when it still cannot."""
        async with self.lock:
            if self.behind is not None:
                await in_thread(self.parts.table_thread, self.behind)
                self.behind, self.is_unfinished = None, False

    def _check_finished(self) -> None:
        if self.behind is not None and self.parts.cache is None:
            raise OverLimit(
                "the pending table is behind the log until the disk has room; free some, then go on"
            )
        if self.behind is not None:
            raise Unavailable("the pending table is behind the log until its store answers; ask again later")
        if self.is_unfinished:
            raise Unavailable("an attach has failed half way and the broker stops; start it again")

    def _check_store(self) -> None:
        """Raise OverLimit or Unavailable when files that are written now could not join the table."""
        if self.behind is not None:
            self._check_finished()
        if self.parts.cache is not None and self.parts.cache.problem:
            raise Unavailable(self.parts.cache.problem)

    async def _attach_written(self, attachment: Attachment) -> Attached:
        """Attach files that this broker has written, or remove them."""
        try:
            return await self.attach(attachment)
        except (Unavailable, OverLimit):
            # Each try writes others under new names, and a store that is away for an hour would fill the disk.
            if self.behind is not None or not self.is_unfinished:
                await in_thread(self.parts.background, compact.remove, self.parts.files, attachment.files)
            raise

    def _check_compacts(self) -> None:
        schedule = self.parts.settings.strategy
        if schedule != "hour_log":
            raise RequestError(f"nothing is compacted with --strategy {schedule}: it has files of its own")

    async def adopt(self, waiting: Waiting) -> None:
        """Move promises that another schedule kept, and may have written again, to the pending table.

        Afterwards every promise is a row of the table, or one of the log behind the watermark, as `hour_log` has it.
        """
        parts, now_ms = self.parts, self.parts.clock.now_ms()
        from_seq, to_seq = parts.ledger.watermark, parts.reader.next_seq

        def write() -> list[FileEntry]:
            rows = take_promises(parts.reader, np.sort(waiting.row_seq))
            table = pa.Table.from_batches([compact.as_table_rows(rows)])
            return compact.write_files(parts.files, table, now_ms)

        entries = await self._loop.run_in_executor(parts.background, write)
        await self.attach(
            Attachment(
                job="compact", job_id=compact.JOB_ID, epoch=to_seq, files=entries, from_seq=from_seq, to_seq=to_seq,
            )
        )  # fmt: skip

    async def compact(self, *, even_without_promises: bool = False) -> Attached | None:
        """Move the tail's promises to the pending table; None when there is nothing to move.

        `even_without_promises` moves the watermark all the same, so that retention may let the rows before it go.
        """
        self._check_compacts()
        ledger, end_seq, attached = self.parts.ledger, self.parts.reader.next_seq, None
        try:
            # A run holds its rows in memory. What comes meanwhile is left for the next time.
            while ledger.watermark < end_seq:
                is_followed = ledger.watermark + compact.RUN_ROWS_MAX < end_seq
                found = await self._compact(even_without_promises=even_without_promises or is_followed)
                if found is None:
                    break
                attached = found
        except Exception:  # of any kind: counted, and raised again
            self.compactions.failures += 1
            raise
        return attached

    async def _compact(self, *, even_without_promises: bool) -> Attached | None:
        self._check_store()
        async with self._compact_lock:
            parts, began_ns = self.parts, self.parts.clock.clock.monotonic_ns()
            from_seq = parts.ledger.watermark
            to_seq = min(parts.reader.next_seq, from_seq + compact.RUN_ROWS_MAX)
            if to_seq <= from_seq:
                return None
            # Read after `to_seq` was durable: only then does it speak of every promise before it.
            settled_before_ms, now_ms = parts.scheduler.settled_before_ms, parts.clock.now_ms()
            settled = parts.scheduler.settled().seq
            attachment = await self._loop.run_in_executor(
                parts.background,
                lambda: compact.compact(
                    parts.files, parts.reader, settled=settled,
                    from_seq=from_seq, to_seq=to_seq, settled_before_ms=settled_before_ms, now_ms=now_ms,
                ),
            )  # fmt: skip
            try:
                if not attachment.files and not even_without_promises:
                    return None
                attached = await self._attach_written(attachment)
                self.compactions.durations.add(parts.clock.clock.monotonic_ns() - began_ns)
                return attached
            finally:
                await in_thread(parts.background, give_back)

    async def rewrite(self) -> Attached | None:
        """Merge or split files of the pending table where that is worth it; None when it is not."""
        self._check_store()
        async with self._compact_lock:
            parts, now_ms = self.parts, self.parts.clock.now_ms()
            pending = parts.hour_log.pending
            there = [entry for entry in pending.live_entries() if entry.path not in pending.missing]
            chosen = {entry.path for entry in rewrite.choose(there, now_ms)}
            if not chosen:
                return None
            # Asked after the choice, without a pause: no attach can have removed one of them in between.
            entries = [f.entry for f in parts.hour_log.pending.all() if f.entry.path in chosen]
            settled, settled_before_ms = parts.scheduler.settled(), parts.scheduler.settled_before_ms
            attachment = await self._loop.run_in_executor(
                parts.background,
                lambda: rewrite.rewrite(
                    parts.files, parts.whole_files, entries, settled.seq,
                    settled_before_ms=settled_before_ms, holds=parts.outcomes.holds, now_ms=now_ms,
                    epoch=parts.reader.next_seq,
                ),
            )  # fmt: skip
            try:
                return await self._attach_written(attachment)
            finally:
                await in_thread(parts.background, give_back)

    async def resume(self, campaign: str, facts: CampaignFacts, shift_ms: int) -> int:
        """Write what a paused campaign holds again, due later, and end the hold; return how many rows these are.

        The files are written while requests go on to cancel single promises; what these have ended is left out when
        they are looked at once more, with no such request at work.
        """
        # A task of its own, as for any attach.
        return await asyncio.shield(self._loop.create_task(self._resume(campaign, facts, shift_ms)))

    async def _resume(self, campaign: str, facts: CampaignFacts, shift_ms: int) -> int:
        parts = self.parts
        async with self._compact_lock:
            # What was handed out before the pause is settled when it is durable.
            await parts.writer.flushed()
            now_ms = parts.clock.now_ms()
            entries = [file.entry for file in overlapping(parts.hour_log.pending.all(), facts.ranges)]
            chosen = dict(enumerate(rewrite.runs(entries)))
            low_ms = min(parts.scheduler.settled_before_ms, parts.outcomes.holds.from_ms)
            # Before the first file, which may be one of thousands.
            await in_thread(
                parts.background, rewrite.check_resume, list(chosen.values()),
                low_ms=low_ms, shift_ms=shift_ms, now_ms=now_ms,
            )  # fmt: skip
            settled = parts.scheduler.settled().seq
            written: dict[int, list[FileEntry]] = {}
            begun: list[FileEntry] = []
            is_attaching = False
            try:
                await self._write_resumed(written, chosen, settled, facts, shift_ms, now_ms, begun)
                if parts.file_replication is not None or parts.cache is not None:
                    # Most of them now, while other requests go on; the few that are written anew follow below.
                    await self._make_durable(begun)
                async with parts.revoking.alone(), self.lock:
                    # Of others, whose instants stay, what was settled meanwhile is settled in the new files as well.
                    late = np.setdiff1d(parts.scheduler.settled().seq, settled)
                    late = late[within(late, facts.ranges)]
                    again = {at: run for at, run in chosen.items() if _may_hold(run, late)}
                    settled = np.union1d(settled, late)
                    await self._write_resumed(written, again, settled, facts, shift_ms, now_ms, begun)
                    removes = [entry.path for run in chosen.values() for entry in run]
                    if self.is_unfinished or len(parts.hour_log.pending.entries(removes)) < len(removes):
                        raise Unavailable("the pending table has changed meanwhile; resume again")
                    is_attaching = True
                    return await self._attach_resumed(campaign, facts, removes, written, now_ms)
            finally:
                # What has joined the table is kept, and all of it when the log may have the row that says so.
                if not (is_attaching and self.is_unfinished):
                    live = {entry.path for entry in parts.hour_log.pending.live_entries()}
                    left = [entry for entry in begun if entry.path not in live]
                    await in_thread(parts.background, compact.remove, parts.files, left)
                await in_thread(parts.background, give_back)

    async def _write_resumed(
        self,
        written: dict[int, list[FileEntry]],
        chosen: dict[int, list[FileEntry]],
        settled: Int64Array,
        facts: CampaignFacts,
        shift_ms: int,
        now_ms: int,
        begun: list[FileEntry],
    ) -> None:
        parts, settled_before_ms = self.parts, self.parts.scheduler.settled_before_ms
        for at, run in chosen.items():  # one at a time in memory
            parts.writer.check_room()
            written[at] = await in_thread(
                parts.background, rewrite.resume, parts.files, parts.whole_files, run, settled,
                ranges=facts.ranges, settled_before_ms=settled_before_ms, holds=parts.outcomes.holds,
                shift_ms=shift_ms, now_ms=now_ms, begun=begun,
            )  # fmt: skip

    async def _attach_resumed(
        self,
        campaign: str,
        facts: CampaignFacts,
        removes: list[str],
        written: dict[int, list[FileEntry]],
        now_ms: int,
    ) -> int:
        parts = self.parts
        entries = [entry for fresh in written.values() for entry in fresh]
        attachment = Attachment(
            job="rewrite", job_id=rewrite.JOB_ID, epoch=parts.reader.next_seq,
            files=entries, removes=removes, ranges=facts.ranges,
        )  # fmt: skip
        await self._make_durable(entries)
        mine = [e for e in entries if within(np.array([e.min_seq]), facts.ranges).all()]
        running = msgspec.structs.replace(
            facts, state="running", since_ms=now_ms, held_from_ms=None,
            last_due_ms=max((entry.max_due_ms for entry in mine), default=-1),
        )  # fmt: skip
        state = parts.campaigns.changed(campaign, running)
        await self._attach_checked(attachment, now_ms, state, resumes=campaign)
        return sum(entry.rows for entry in mine)

    def lease(self, lease_ms: int) -> None:
        """Leave the tail to a compactor outside until the lease runs out."""
        # Bounded: a compactor that dies leaves the tail alone for an hour at most.
        self.outside_compactor_until_ms = self.parts.clock.elapsed_ms() + min(lease_ms, limits.HOUR_MS)


def _may_hold(run: list[FileEntry], seq: Int64Array) -> bool:
    return any(((seq >= entry.min_seq) & (seq <= entry.max_seq)).any() for entry in run)
