"""Change the pending table: reserve, attach, compact, rewrite. One change at a time.

The row of an attach in the log decides it. The steps around the row are in table/catalog.py. They run under one lock,
because each attach begins at the end of the last one, and because a checkpoint cannot save the state between steps.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import numpy as np
import pyarrow as pa

from timeball.broker.accepting.appender import TailCount
from timeball.broker.accepting.gate import Gate
from timeball.broker.registry import attach
from timeball.broker.registry.attach import AttachState
from timeball.broker.registry.campaigns import CampaignFacts, Campaigns
from timeball.broker.registry.meta import Change
from timeball.broker.tables import compact, rewrite
from timeball.broker.tables.memory import give_back
from timeball.io.clock import SchedulerClock
from timeball.io.files import Files
from timeball.io.threads import Threads, in_thread
from timeball.log.disk_thread import FileReplication
from timeball.log.writer import CommitLog
from timeball.model import limits
from timeball.model.config import Settings
from timeball.model.errors import OverLimit, RequestError, Unavailable
from timeball.model.message import Int64Array, Kind, build_rows
from timeball.model.wire import Attached
from timeball.schedule.locations import Waiting, take_scheduled
from timeball.schedule.scheduler import Scheduling
from timeball.schedule.strategies import ahead_ms_of
from timeball.table import attachment as att
from timeball.table.attachment import Attachment, FileEntry, within
from timeball.table.data_file import overlapping
from timeball.table.pending_table import PendingTable

logger = logging.getLogger(__name__)


# An object store may be unreachable for one hour. The other 10 minutes are the time to fetch files ahead.
FETCH_AHEAD_MS = limits.HOUR_MS + 10 * limits.MINUTE_MS


def soon_ms(clock: SchedulerClock, settings: Settings) -> int:
    """Compute the due time in ms up to which files of a table in an object store are fetched ahead."""
    return clock.now_ms() + FETCH_AHEAD_MS + ahead_ms_of(settings)


class TableChanges:
    """The changes of the pending table, one at a time. Belongs to the event loop."""

    def __init__(
        self,
        *,
        scheduled_since_watermark: int,
        settings: Settings,
        files: Files,
        clock: SchedulerClock,
        log: CommitLog,
        campaigns: Campaigns,
        attach_state: AttachState,
        scheduling: Scheduling,
        pending_table: PendingTable,
        threads: Threads,
        gate: Gate,
        file_replication: FileReplication | None,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._settings, self._files, self._clock = settings, files, clock
        self._log, self._campaigns = log, campaigns
        self._attach_state, self._scheduling, self._pending_table = attach_state, scheduling, pending_table
        self._threads, self._gate = threads, gate
        self._file_replication, self._on_failure = file_replication, on_failure
        self._loop = asyncio.get_running_loop()
        self.lock = asyncio.Lock()
        # Held during the long work of compaction and rewriting. `lock` is held only during the short steps of an
        # attach, so a bulk attach need not wait for a compaction.
        self._compact_lock = asyncio.Lock()
        self.tail_count = TailCount(attach_state.watermark, scheduled_since_watermark)
        self.outside_compactor_until_ms = 0
        self.compactions = compact.Figures(clock.clock)
        # True while an attach is in the log but maybe not in the table. Recovery repeats only attaches after the
        # checkpoint, so no checkpoint may be saved now, and no later attach may overtake this one.
        self.is_unfinished = False
        # Updates a table that could not follow the log, because the disk was full or its object store did not answer.
        self.behind: Callable[[], object] | None = None

    async def reserve(self, rows: int) -> int:
        """Reserve sequence numbers for a bulk attach, and return the first."""
        self._attach_state.check_reserve(rows)
        body, now_ms = att.encode(att.Reservation(rows)), self._clock.now_ms()
        row = build_rows(1, kind=int(Kind.TABLE), body=body, store_ms=now_ms)
        # After the row itself: the span of its frame includes the numbers, so no other row can get them.
        first_seq = self._log.writer.next_seq + 1
        _, durable = self._log.writer.append(
            row, span=1 + rows, on_durable=lambda: self._attach_state.reserve(first_seq, rows)
        )
        await durable
        return first_seq

    async def attach(self, attachment: Attachment) -> Attached:
        """Attach files to the pending table atomically. See table/catalog.py for the order of the steps."""
        attach.check_count(attachment)
        if attachment.job == "compact":
            self._check_compacts()
        # A separate task: a caller that disconnects must not leave an attach half done and unlocked.
        return await asyncio.shield(self._loop.create_task(self._attach(attachment)))

    async def _attach(self, attachment: Attachment) -> Attached:
        is_elsewhere = self._file_replication is not None or self._pending_table.cache is not None
        if is_elsewhere and not self._attach_state.is_repeated(attachment):
            # Outside the lock, because these steps wait for other replicas or an object store. All checks are repeated
            # under the lock.
            await self._check_files(attachment, self._clock.now_ms())
            await self._make_local(self._scheduling.hour_log.pending.entries(attachment.removes))
            await self._make_durable(attachment.files)
        async with self.lock:
            ledger = self._attach_state
            self._check_finished()
            # A job that was interrupted between the row and its answer repeats the attach. It gets the same answer, and
            # nothing is attached twice.
            if ledger.is_repeated(attachment):
                version = await in_thread(self._threads.table, lambda: self._pending_table.catalog.version)
                return Attached(version=version, watermark=ledger.watermark, seq=0, repeated=True)
            live = {file.entry.path for file in self._scheduling.hour_log.pending.all()}
            now_ms = self._clock.now_ms()
            self._campaigns.check_attach(attachment)
            ledger.check(
                attachment, durable_seq=self._log.reader.next_seq, is_live=live.__contains__, now_ms=now_ms
            )
            await self._check_files(attachment, now_ms)
            # Before the row: when the log contains the attach, a power failure must not lose the file.
            await in_thread(self._threads.table, self._pending_table.catalog.sync_data, attachment.files)
            state = self._campaigns.attached(attachment, now_ms)
            return await self._attach_checked(attachment, now_ms, state)

    async def _check_files(self, attachment: Attachment, now_ms: int) -> None:
        await in_thread(self._threads.table,
            attach.check_files, self._files, attachment,
            now_ms=now_ms, delay_ms_max=self._settings.delay_ms_max, cache=self._pending_table.cache,
        )  # fmt: skip

    async def _make_durable(self, entries: list[FileEntry]) -> None:
        """Wait until the files are durable: in the store, or here and at enough replicas. Raises NotLeader."""
        await in_thread(self._threads.table, self._pending_table.catalog.sync_data, entries)
        await self._make_local(entries)
        if self._file_replication is not None and entries:
            paths = [entry.path for entry in entries]
            await asyncio.wrap_future(self._file_replication.ship(paths))

    async def _attach_checked(
        self, attachment: Attachment, now_ms: int, state: Change | None = None, resumes: str = ""
    ) -> Attached:
        """Append the attach, and in the same frame its change of a campaign. Then update the caches."""
        # Read before the attach removes the files, because the Delta log must name them as removed.
        removed = self._scheduling.hour_log.pending.entries(attachment.removes)
        row = build_rows(1, kind=int(Kind.TABLE), body=att.encode(attachment), store_ms=now_ms)
        rows = row if state is None else pa.concat_batches([row, state.rows])
        seq = self._log.writer.next_seq
        _, durable = self._log.writer.append(
            rows, on_durable=lambda: self._attach_state.apply(attachment, seq, now_ms)
        )
        if state is not None:
            state.keep()
        self.is_unfinished = True
        await durable
        await self._log.writer.synced()  # the table must not contain a row that `async` durability may lose
        try:
            await self._scheduling.scheduler.attach(attachment, resumes, self._clock.now_ms())
            version = await self._commit(
                partial(self._pending_table.catalog.commit, attachment, seq, removed, now_ms)
            )
        except BaseException as error:
            # The log contains the attach, so only a recovery, which repeats these steps, may continue.
            self._on_failure(error)
            raise
        if attachment.job == "compact":
            self.tail_count.drop_below(attachment.to_seq)
        self.compactions.attached(attachment, now_ms)
        return Attached(version=version, watermark=self._attach_state.watermark, seq=seq)

    async def _make_local(self, entries: Sequence[FileEntry]) -> None:
        """Fetch those of these files that have messages due soon.

        They are about to join the table, or must be opened before they leave it.
        """
        if self._pending_table.cache is not None:
            await in_thread(
                self._threads.table,
                self._pending_table.cache.keep_near,
                entries,
                soon_ms(self._clock, self._settings),
            )
            self._scheduling.hour_log.look_again()

    async def _commit(self, commit: Callable[[], int]) -> int:
        """Update the table and return its version. If a disk is full or a store unreachable, this is done later."""
        try:
            version = await in_thread(self._threads.table, commit)
        except (Unavailable, OverLimit) as error:
            # Not a failure: the row is durable and the schedule is up to date. `catch_up` repeats the commit.
            logger.warning("pending table is behind the log reason=%s", error)
            self.behind = commit
            return self._pending_table.catalog.version
        self.is_unfinished = False
        return version

    def follow_later(self, bring_up: Callable[[], object]) -> None:
        """Treat the table as behind the log until `catch_up` has called `bring_up`."""
        self.behind, self.is_unfinished = bring_up, True

    async def follow(self) -> None:
        """Update the table. If a disk is full or its object store does not answer, log this and leave it for later."""
        try:
            await self.catch_up()
        except (Unavailable, OverLimit) as error:
            logger.warning("pending table is behind the log reason=%s", error)

    async def catch_up(self) -> None:
        """Update a table that could not follow the log. Raises Unavailable or OverLimit if it still cannot."""
        async with self.lock:
            if self.behind is not None:
                await in_thread(self._threads.table, self.behind)
                self.behind, self.is_unfinished = None, False

    def _check_finished(self) -> None:
        if self.behind is not None and self._pending_table.cache is None:
            raise OverLimit(
                "the pending table is behind the log until the disk has room; free some, then go on"
            )
        if self.behind is not None:
            raise Unavailable("the pending table is behind the log until its store answers; ask again later")
        if self.is_unfinished:
            raise Unavailable("an attach has failed half way and the broker stops; start it again")

    def _check_store(self) -> None:
        """Raise OverLimit or Unavailable if files that are written now could not join the table."""
        if self.behind is not None:
            self._check_finished()
        if self._pending_table.cache is not None and self._pending_table.cache.problem:
            raise Unavailable(self._pending_table.cache.problem)

    async def _attach_written(self, attachment: Attachment) -> Attached:
        """Attach files that this broker has written, or delete them if that fails."""
        try:
            return await self.attach(attachment)
        except (Unavailable, OverLimit):
            # Each try writes new files under new names. If a store is unreachable for an hour, these would fill the
            # disk.
            if self.behind is not None or not self.is_unfinished:
                await in_thread(self._threads.background, compact.remove, self._files, attachment.files)
            raise

    def _check_compacts(self) -> None:
        schedule = self._settings.strategy
        if schedule != "hour_log":
            raise RequestError(f"nothing is compacted with --strategy {schedule}: it has files of its own")

    async def adopt(self, waiting: Waiting) -> None:
        """Move pending messages that another strategy stored, and may have rewritten, to the pending table.

        Afterwards every pending message is in the table or in the log after the watermark, as `hour_log` requires.
        """
        now_ms = self._clock.now_ms()
        from_seq, to_seq = self._attach_state.watermark, self._log.reader.next_seq

        def write() -> list[FileEntry]:
            rows = take_scheduled(self._log.reader, np.sort(waiting.row_seq))
            table = pa.Table.from_batches([compact.as_table_rows(rows)])
            return compact.write_files(self._files, table, now_ms)

        entries = await self._loop.run_in_executor(self._threads.background, write)
        await self.attach(
            Attachment(
                job="compact", job_id=compact.JOB_ID, epoch=to_seq, files=entries, from_seq=from_seq, to_seq=to_seq,
            )
        )  # fmt: skip

    async def compact(self, *, even_without_rows: bool = False) -> Attached | None:
        """Move the scheduled messages after the watermark from the log to the pending table. None if there are none.

        `even_without_rows`: advance the watermark even if there are none, so that retention may remove older rows.
        """
        self._check_compacts()
        ledger, end_seq, attached = self._attach_state, self._log.reader.next_seq, None
        try:
            # A run holds its rows in memory, so a long tail takes several runs. Rows that arrive meanwhile are left for
            # the next call.
            while ledger.watermark < end_seq:
                is_followed = ledger.watermark + compact.RUN_ROWS_MAX < end_seq
                found = await self._compact(even_without_rows=even_without_rows or is_followed)
                if found is None:
                    break
                attached = found
        except Exception:  # any error is counted and raised again
            self.compactions.failures += 1
            raise
        return attached

    async def _compact(self, *, even_without_rows: bool) -> Attached | None:
        self._check_store()
        async with self._compact_lock:
            began_ns = self._clock.clock.monotonic_ns()
            from_seq = self._attach_state.watermark
            to_seq = min(self._log.reader.next_seq, from_seq + compact.RUN_ROWS_MAX)
            if to_seq <= from_seq:
                return None
            # Read after `to_seq` is durable: only then does it cover every scheduled message before `to_seq`.
            settled_before_ms, now_ms = self._scheduling.scheduler.settled_before_ms, self._clock.now_ms()
            settled = self._scheduling.scheduler.settled().seq
            attachment = await self._loop.run_in_executor(
                self._threads.background,
                lambda: compact.compact(
                    self._files, self._log.reader, settled=settled,
                    from_seq=from_seq, to_seq=to_seq, settled_before_ms=settled_before_ms, now_ms=now_ms,
                ),
            )  # fmt: skip
            try:
                if not attachment.files and not even_without_rows:
                    return None
                attached = await self._attach_written(attachment)
                self.compactions.durations.add(self._clock.clock.monotonic_ns() - began_ns)
                return attached
            finally:
                await in_thread(self._threads.background, give_back)

    async def rewrite(self) -> Attached | None:
        """Merge or split files of the pending table if that is worth the cost. None if it is not."""
        self._check_store()
        async with self._compact_lock:
            now_ms = self._clock.now_ms()
            pending = self._scheduling.hour_log.pending
            there = [entry for entry in pending.live_entries() if entry.path not in pending.missing]
            chosen = {entry.path for entry in rewrite.choose(there, now_ms)}
            if not chosen:
                return None
            # Read after the choice, without an await in between, so that no attach can have removed one of the files.
            entries = [f.entry for f in self._scheduling.hour_log.pending.all() if f.entry.path in chosen]
            settled, settled_before_ms = (
                self._scheduling.scheduler.settled(),
                self._scheduling.scheduler.settled_before_ms,
            )
            attachment = await self._loop.run_in_executor(
                self._threads.background,
                lambda: rewrite.rewrite(
                    self._files, self._pending_table.whole_files, entries, settled.seq,
                    settled_before_ms=settled_before_ms, holds=self._scheduling.outcomes.holds, now_ms=now_ms,
                    epoch=self._log.reader.next_seq,
                ),
            )  # fmt: skip
            try:
                return await self._attach_written(attachment)
            finally:
                await in_thread(self._threads.background, give_back)

    async def resume(self, campaign: str, facts: CampaignFacts, shift_ms: int) -> int:
        """Rewrite the held messages of a paused campaign with later due times, and end the hold. Returns their number.

        Requests that cancel single messages continue while the files are written. Afterwards no such request may run.
        Then the files with messages that were cancelled meanwhile are written again without them.
        """
        # A separate task, as for any attach.
        return await asyncio.shield(self._loop.create_task(self._resume(campaign, facts, shift_ms)))

    async def _resume(self, campaign: str, facts: CampaignFacts, shift_ms: int) -> int:
        async with self._compact_lock:
            # Messages that were handed out before the pause are settled (released or cancelled) when their rows are
            # durable.
            await self._log.writer.flushed()
            now_ms = self._clock.now_ms()
            entries = [
                file.entry for file in overlapping(self._scheduling.hour_log.pending.all(), facts.ranges)
            ]
            chosen = dict(enumerate(rewrite.runs(entries)))
            low_ms = min(
                self._scheduling.scheduler.settled_before_ms, self._scheduling.outcomes.holds.from_ms
            )
            # Check all files before writing the first one, because there may be thousands.
            await in_thread(
                self._threads.background, rewrite.check_resume, list(chosen.values()),
                low_ms=low_ms, shift_ms=shift_ms, now_ms=now_ms,
            )  # fmt: skip
            settled = self._scheduling.scheduler.settled().seq
            written: dict[int, list[FileEntry]] = {}
            begun: list[FileEntry] = []
            is_attaching = False
            try:
                await self._write_resumed(written, chosen, settled, facts, shift_ms, now_ms, begun)
                if self._file_replication is not None or self._pending_table.cache is not None:
                    # Make most files durable now, while other requests continue. The few files that are written again
                    # follow below.
                    await self._make_durable(begun)
                async with self._gate.alone(), self.lock:
                    # `within`: only messages of the campaign change their due time. Other messages in these files keep
                    # their due time and number, so if they were settled meanwhile, they are also settled in the new
                    # files.
                    late = np.setdiff1d(self._scheduling.scheduler.settled().seq, settled)
                    late = late[within(late, facts.ranges)]
                    again = {at: run for at, run in chosen.items() if _may_hold(run, late)}
                    settled = np.union1d(settled, late)
                    await self._write_resumed(written, again, settled, facts, shift_ms, now_ms, begun)
                    removes = [entry.path for run in chosen.values() for entry in run]
                    if self.is_unfinished or len(self._scheduling.hour_log.pending.entries(removes)) < len(
                        removes
                    ):
                        raise Unavailable("the pending table has changed meanwhile; resume again")
                    is_attaching = True
                    return await self._attach_resumed(campaign, facts, removes, written, now_ms)
            finally:
                # Delete files that did not join the table. If the attach may be in the log, keep all files.
                if not (is_attaching and self.is_unfinished):
                    live = {entry.path for entry in self._scheduling.hour_log.pending.live_entries()}
                    left = [entry for entry in begun if entry.path not in live]
                    await in_thread(self._threads.background, compact.remove, self._files, left)
                await in_thread(self._threads.background, give_back)

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
        settled_before_ms = self._scheduling.scheduler.settled_before_ms
        for at, run in chosen.items():  # only one run is in memory at a time
            self._log.writer.check_room()
            written[at] = await in_thread(
                self._threads.background, rewrite.resume, self._files, self._pending_table.whole_files, run, settled,
                ranges=facts.ranges, settled_before_ms=settled_before_ms, holds=self._scheduling.outcomes.holds,
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
        entries = [entry for fresh in written.values() for entry in fresh]
        attachment = Attachment(
            job="rewrite", job_id=rewrite.JOB_ID, epoch=self._log.reader.next_seq,
            files=entries, removes=removes, ranges=facts.ranges,
        )  # fmt: skip
        await self._make_durable(entries)
        mine = [e for e in entries if within(np.array([e.min_seq]), facts.ranges).all()]
        running = msgspec.structs.replace(
            facts, state="running", since_ms=now_ms, held_from_ms=None,
            last_due_ms=max((entry.max_due_ms for entry in mine), default=-1),
        )  # fmt: skip
        state = self._campaigns.changed(campaign, running)
        await self._attach_checked(attachment, now_ms, state, resumes=campaign)
        return sum(entry.rows for entry in mine)

    def lease(self, lease_ms: int) -> None:
        """Leave the log's tail to an external compactor for `lease_ms`, at most one hour."""
        # Limited, so that after a compactor has died the tail grows for an hour at most.
        self.outside_compactor_until_ms = self._clock.elapsed_ms() + min(lease_ms, limits.HOUR_MS)


def _may_hold(run: list[FileEntry], seq: Int64Array) -> bool:
    return any(((seq >= entry.min_seq) & (seq <= entry.max_seq)).any() for entry in run)


# A periodic duty for the pending table: detect changes by other programs, and let the table follow the log.
#
# Once a second it checks whether another program has committed to the table, at the cost of two checks for a file name.
# If so, the catalog lets the table follow the log again (table/catalog.py). The schedule opens none of the files that
# are gone until they are put back. The duty also updates a table that fell behind the log because the disk was full.

LOOK_MS = 1_000


class TableWatch:
    """The periodic duty. Belongs to the event loop."""

    def __init__(
        self,
        mover: TableChanges,
        *,
        clock: SchedulerClock,
        scheduling: Scheduling,
        pending_table: PendingTable,
        threads: Threads,
    ) -> None:
        self._mover = mover
        self._clock, self._scheduling, self._pending_table = clock, scheduling, pending_table
        self._threads = threads

    async def watch_table(self) -> None:
        """Let the table follow the log. Raises OverLimit or Unavailable if it cannot now."""
        pending = self._scheduling.hour_log.pending
        if self._pending_table.cache is None:
            # For a table in an object store, `StoredTable` does this, because it first checks whether the store
            # answers.
            await self._mover.catch_up()
        await in_thread(self._threads.table, self._pending_table.catalog.look, self._clock.now_ms())
        # Another program may run VACUUM after its commit, so the catalog has checked all live files.
        gone = frozenset(entry.path for entry in self._pending_table.catalog.foreign.missing)
        back = [path for path in pending.missing - gone if await self._is_back(path)]
        if self._pending_table.cache is None:
            # Before the schedule tries to open them. For an object store, the local copies determine which files can be
            # opened.
            pending.miss(gone)
        if back:
            # Messages that are due by now are released at once, late.
            pending.found(back)
            self._scheduling.hour_log.look_again()
            self._scheduling.scheduler.on_earlier()

    async def _is_back(self, path: str) -> bool:
        return await in_thread(self._threads.reader, self._pending_table.catalog.data.put_back_one, path)
