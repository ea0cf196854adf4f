"""Change the pending table: reserve numbers, attach files, compact the log, rewrite files, undo changes by others.

One change at a time. An attach takes effect with its TABLE row in the log. Steps before and after the row (see
table/catalog.py) run under one lock, because each attach begins where the previous one ended, and no checkpoint may be
saved between the steps.

`TableWatch` makes the table match the log again, after a commit of another program or a failed commit of this broker.
`StoredTable` fetches files from an object store before their messages are due.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import lru_cache, partial

import msgspec
import numpy as np
import pyarrow as pa

from timeball.broker.accepting.appender import TailCount
from timeball.broker.accepting.waiters import Gate
from timeball.broker.registry import campaigns
from timeball.broker.registry.campaigns import AttachState, CampaignFacts, Campaigns
from timeball.broker.registry.meta import Change
from timeball.broker.tables import compact
from timeball.broker.tables.memory import give_back
from timeball.io.clock import SchedulerClock
from timeball.io.files import Files
from timeball.io.threads import Threads, in_thread
from timeball.log.disk_thread import FileReplication
from timeball.log.writer import CommitLog
from timeball.model import limits
from timeball.model.answers import Attached
from timeball.model.config import Settings
from timeball.model.errors import Corrupt, NotFound, OverLimit, RequestError, Unavailable
from timeball.model.message import Int64Array, Kind, build_rows
from timeball.schedule.due_index import FAR_MS
from timeball.schedule.hour_log import HourLog
from timeball.schedule.loaded import AHEAD_MS
from timeball.schedule.locations import Waiting, take_scheduled
from timeball.schedule.scheduler import Scheduler, Scheduling
from timeball.table import attachment as att
from timeball.table import merging
from timeball.table.attachment import Attachment, FileEntry, within
from timeball.table.data_file import DataFile, overlapping
from timeball.table.object_store import THREADS, FileCache
from timeball.table.pending_table import PendingTable

logger = logging.getLogger(__name__)


# An object store may be unreachable for one hour. The other 10 minutes are left to fetch the files.
FETCH_AHEAD_MS = limits.HOUR_MS + 10 * limits.MINUTE_MS


# Merges are postponed during a *burst*: while this many messages are due within AHEAD_MS, about the time of a long
# merge, which means 2,000 releases a second. They are not postponed for more than POSTPONED_MS_MAX, because reads of a
# table with ever more files delay releases too.
BURST_ROWS_MIN = 20_000
POSTPONED_MS_MAX = 10 * limits.MINUTE_MS
CHOICE_INTERVAL_MS = 1_000
RAW_SIZES_MAX = 16_384  # sizes of files that are kept in memory, about 5 MB


def soon_ms(clock: SchedulerClock) -> int:
    """Compute the due time in ms up to which files of a table in an object store are fetched ahead."""
    return clock.now_ms() + FETCH_AHEAD_MS + AHEAD_MS


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
        """`scheduled_since_watermark`: number of scheduled messages in the tail. `on_failure` stops the broker."""
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
        self.external_compactor_until_ms = 0  # the end of the lease of an external compactor, in elapsed ms
        # From this time on (in elapsed ms) the budget of merges allows the next one.
        self._next_merge_ms = 0
        self._burst_from_ms = FAR_MS  # the time at which the current burst was noticed
        # Read from the footer of each file once.
        self._raw_bytes = lru_cache(RAW_SIZES_MAX)(
            lambda entry: DataFile(pending_table.data_files, entry).raw_bytes()
        )
        self.compactions = compact.Figures(clock.clock)
        # True while an attach is in the log but maybe not in the table. Recovery repeats only attaches after the
        # checkpoint, so no checkpoint may be saved now, and no later attach may overtake this one.
        self.has_unfinished_attach = False
        # A function that makes the table match the log. Set while the table is behind, because the disk was full or
        # the object store did not answer.
        self.behind: Callable[[], object] | None = None

    async def reserve(self, rows: int) -> int:
        """Reserve `rows` sequence numbers for a bulk attach, and return the first.

        The reservation is durable on return. Raises the errors of `AttachState.make_room_for`.
        """
        self._attach_state.make_room_for(rows)
        body, now_ms = att.encode(att.Reservation(rows)), self._clock.now_ms()
        row = build_rows(1, kind=int(Kind.TABLE), body=body, store_ms=now_ms)
        # The numbers follow the row's own number. The span of its frame includes them, so no other row gets them.
        first_seq = self._log.writer.next_seq + 1
        _, durable = self._log.writer.append(
            row, span=1 + rows, on_durable=lambda: self._attach_state.reserve(first_seq, rows)
        )
        await durable
        return first_seq

    async def attach(self, attachment: Attachment) -> Attached:
        """Attach files to the pending table atomically. table/catalog.py describes the steps.

        A repeated attach changes nothing and gets the same answer. Raises RequestError or OverLimit if a check refuses
        the attachment, and Unavailable while the table is behind the log.
        """
        campaigns.check_count(attachment)
        if attachment.job == "compact":
            self._check_compacts()
        # A separate task: a caller that disconnects must not leave an attach half done and unlocked.
        return await asyncio.shield(self._loop.create_task(self._attach(attachment)))

    async def _attach(self, attachment: Attachment) -> Attached:
        """Check an attachment, make its files durable, and attach them."""
        has_remote_copies = self._file_replication is not None or self._pending_table.cache is not None
        if has_remote_copies and not self._attach_state.is_repeated(attachment):
            # Before the lock is taken, because these steps wait for replicas or an object store. All checks are
            # repeated under the lock.
            await self._check_files(attachment, self._clock.now_ms())
            await self._make_local(self._scheduling.hour_log.pending.entries(attachment.removes))
            await self._make_durable(attachment.files)
        async with self.lock:
            attach_state = self._attach_state
            self._check_not_behind()
            # A job that did not receive the answer repeats the attach.
            if attach_state.is_repeated(attachment):
                version = await in_thread(self._threads.table, lambda: self._pending_table.catalog.version)
                return Attached(version=version, watermark=attach_state.watermark, seq=0, repeated=True)
            live_paths = {file.entry.path for file in self._scheduling.hour_log.pending.all()}
            now_ms = self._clock.now_ms()
            self._campaigns.check_attach(attachment)
            attach_state.check(
                attachment,
                durable_seq=self._log.reader.next_seq,
                is_live=live_paths.__contains__,
                now_ms=now_ms,
            )
            await self._check_files(attachment, now_ms)
            # Before the row: when the log contains the attach, a power failure must not lose the file.
            await in_thread(self._threads.table, self._pending_table.catalog.sync_data, attachment.files)
            campaign_change = self._campaigns.attached(attachment, now_ms)
            return await self._attach_checked(attachment, now_ms, campaign_change)

    async def _check_files(self, attachment: Attachment, now_ms: int) -> None:
        """Open and check the files of an attachment (`campaigns.check_files`), in the table's thread."""
        await in_thread(self._threads.table,
            campaigns.check_files, self._files, attachment,
            now_ms=now_ms, delay_ms_max=self._settings.delay_ms_max, cache=self._pending_table.cache,
        )  # fmt: skip

    async def _make_durable(self, entries: list[FileEntry]) -> None:
        """Wait until the files are durable: in the object store, or on this disk and at enough replicas.

        Raises NotLeader.
        """
        await in_thread(self._threads.table, self._pending_table.catalog.sync_data, entries)
        await self._make_local(entries)
        if self._file_replication is not None and entries:
            paths = [entry.path for entry in entries]
            await asyncio.wrap_future(self._file_replication.ship(paths))

    async def _attach_checked(
        self, attachment: Attachment, now_ms: int, campaign_change: Change | None = None, resumes: str = ""
    ) -> Attached:
        """Append the attach and the change of its campaign in one frame. Then update the schedule and the Delta table.

        `resumes` is the campaign whose hold ends with this attach, or "". If a step after the row fails, calls
        `on_failure`, which stops the broker. The next start repeats the steps.
        """
        # Read before the schedule forgets the removed files, because the Delta commit must name them.
        removed = self._scheduling.hour_log.pending.entries(attachment.removes)
        row = build_rows(1, kind=int(Kind.TABLE), body=att.encode(attachment), store_ms=now_ms)
        rows = row if campaign_change is None else pa.concat_batches([row, campaign_change.rows])
        seq = self._log.writer.next_seq
        _, durable = self._log.writer.append(
            rows, on_durable=lambda: self._attach_state.apply(attachment, seq, now_ms)
        )
        if campaign_change is not None:
            campaign_change.apply()
        self.has_unfinished_attach = True
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
        """Fetch local copies of the files among these that have messages due soon. Only for a table in an object store.

        The files are about to join the table, or must be opened before they leave it. Raises Unavailable.
        """
        if self._pending_table.cache is not None:
            await in_thread(
                self._threads.table,
                self._pending_table.cache.fetch_and_pin_due_soon,
                entries,
                soon_ms(self._clock),
            )
            self._scheduling.hour_log.refresh_local_files()

    async def _commit(self, commit: Callable[[], int]) -> int:
        """Commit to the Delta table and return its version.

        If a disk or the store fails now, `catch_up` repeats the commit later. The attach has succeeded nevertheless,
        because its row is durable and the schedule is up to date.
        """
        try:
            version = await in_thread(self._threads.table, commit)
        except (Unavailable, OverLimit) as error:
            logger.warning("pending table is behind the log reason=%s", error)
            self.behind = commit
            return self._pending_table.catalog.version
        self.has_unfinished_attach = False
        return version

    def mark_behind_log(self, bring_up: Callable[[], object]) -> None:
        """Mark the table as behind the log. The next `catch_up` calls `bring_up` to update it."""
        self.behind, self.has_unfinished_attach = bring_up, True

    async def follow(self) -> None:
        """Call `catch_up`, and log a failure. Later calls try again."""
        try:
            await self.catch_up()
        except (Unavailable, OverLimit) as error:
            logger.warning("pending table is behind the log reason=%s", error)

    async def catch_up(self) -> None:
        """Update a table that is behind the log. Raises Unavailable or OverLimit if that still fails."""
        async with self.lock:
            if self.behind is not None:
                await in_thread(self._threads.table, self.behind)
                self.behind, self.has_unfinished_attach = None, False

    def _check_not_behind(self) -> None:
        """Raise OverLimit or Unavailable while the table is behind the log or an attach is unfinished."""
        if self.behind is not None and self._pending_table.cache is None:
            raise OverLimit(
                "the pending table is behind the log until the disk has room; free some, then go on"
            )
        if self.behind is not None:
            raise Unavailable("the pending table is behind the log until its store answers; ask again later")
        if self.has_unfinished_attach:
            raise Unavailable("an attach failed in the middle, and the broker stops; start it again")

    def _check_store(self) -> None:
        """Raise OverLimit or Unavailable if files that are written now could not be attached."""
        if self.behind is not None:
            self._check_not_behind()
        if self._pending_table.cache is not None and self._pending_table.cache.problem:
            raise Unavailable(self._pending_table.cache.problem)

    async def _attach_or_delete(self, attachment: Attachment) -> Attached:
        """Attach files that this broker has written. Delete them if the attach was refused, and raise its error."""
        try:
            return await self.attach(attachment)
        except (RequestError, Unavailable, OverLimit):
            # Each attempt writes files with new names, which would fill the disk. The files stay if the attach may be
            # in the log.
            if self.behind is not None or not self.has_unfinished_attach:
                await in_thread(self._threads.background, compact.remove, self._files, attachment.files)
            raise

    def _check_compacts(self) -> None:
        """Raise RequestError if the strategy does not use the pending table."""
        strategy = self._settings.strategy
        if strategy != "hour_log":
            raise RequestError(f"nothing is compacted with --strategy {strategy}: it has files of its own")

    async def move_from_other_strategy(self, waiting: Waiting) -> None:
        """Write the pending messages of another strategy to the table, and move the watermark to the end of the log.

        Afterwards every pending message is in the table or in the log after the watermark, as `hour_log` requires.
        `waiting` contains their rows: the other strategy may have written them to the log again. Raises the errors of
        `attach`, and OverLimit if the disk is full.
        """
        now_ms = self._clock.now_ms()
        from_seq, to_seq = self._attach_state.watermark, self._log.reader.next_seq

        def write() -> list[FileEntry]:
            """Read the rows from the log, and write them to files (background thread)."""
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
        """Move the scheduled messages after the watermark from the log to the pending table. Returns the last attach.

        None if there are no messages to move. `even_without_rows`: advance the watermark also without messages, so that
        retention may remove older rows. Raises RequestError with another strategy, and the errors of `attach`.
        """
        self._check_compacts()
        attach_state, end_seq, last_attach = self._attach_state, self._log.reader.next_seq, None
        try:
            # All rows of a run are in memory, so a long tail takes several runs. Rows that arrive meanwhile are left
            # for the next call.
            while attach_state.watermark < end_seq:
                has_next_run = attach_state.watermark + compact.RUN_ROWS_MAX < end_seq
                result = await self._compact(even_without_rows=even_without_rows or has_next_run)
                if result is None:
                    break
                last_attach = result
        except Exception:  # any error is counted and raised again
            self.compactions.failures += 1
            raise
        return last_attach

    async def _compact(self, *, even_without_rows: bool) -> Attached | None:
        """Move the messages of one run of rows. None if there are none and the watermark need not move."""
        self._check_store()
        async with self._compact_lock:
            began_ns = self._clock.clock.monotonic_ns()
            from_seq = self._attach_state.watermark
            to_seq = min(self._log.reader.next_seq, from_seq + compact.RUN_ROWS_MAX)
            if to_seq <= from_seq:
                return None
            # Read after `to_seq`: all rows before it are durable, so the mark covers their messages.
            settled_before_ms, now_ms = self._scheduling.scheduler.settled_before_ms, self._clock.now_ms()
            settled = self._scheduling.scheduler.settled()
            attachment = await self._loop.run_in_executor(
                self._threads.background,
                lambda: compact.compact(
                    self._files, self._log.reader, settled=settled.seq,
                    from_seq=from_seq, to_seq=to_seq, settled_before_ms=settled_before_ms, now_ms=now_ms,
                ),
            )  # fmt: skip
            try:
                if not attachment.files and not even_without_rows:
                    return None
                attached = await self._attach_or_delete(attachment)
                self.compactions.durations.add(self._clock.clock.monotonic_ns() - began_ns)
                return attached
            finally:
                await in_thread(self._threads.background, give_back)

    async def merge_in_background(self) -> Attached | None:
        """Call `rewrite` if the budget of table/merging.py allows it, and not during a burst or while the disk is full.

        None if nothing was rewritten.
        """
        # Replaced files stay for readers of older versions, so a merge would use the space that is left for releases.
        if self._log.writer.no_room:
            return None
        now_ms, scheduler = self._clock.elapsed_ms(), self._scheduling.scheduler
        is_burst = scheduler.is_full or scheduler.loaded.wheel_rows >= BURST_ROWS_MIN
        self._burst_from_ms = min(self._burst_from_ms, now_ms) if is_burst else FAR_MS
        if now_ms < self._next_merge_ms or (is_burst and now_ms < self._burst_from_ms + POSTPONED_MS_MAX):
            return None
        return await self.rewrite()

    async def rewrite(self) -> Attached | None:
        """Merge or split some files of the pending table. None if no rewrite is worth its cost (table/merging.py).

        Raises the errors of `attach`.
        """
        self._check_store()
        async with self._compact_lock:
            now_ms = self._clock.now_ms()
            pending = self._scheduling.hour_log.pending
            available = [entry for entry in pending.live_entries() if entry.path not in pending.missing]
            # In a thread, because there may be thousands of files.
            merge = await in_thread(
                self._threads.background, merging.choose, available, now_ms, self._raw_bytes
            )
            # Also without files to merge, because each choice reads the list of all files.
            self._next_merge_ms = self._clock.elapsed_ms() + max(merge.cost_ms, CHOICE_INTERVAL_MS)
            if not merge.files:
                return None
            settled, settled_before_ms = (
                self._scheduling.scheduler.settled(),
                self._scheduling.scheduler.settled_before_ms,
            )
            attachment = await self._loop.run_in_executor(
                self._threads.background,
                lambda: compact.rewrite(
                    self._files, self._pending_table.whole_files, merge.files, settled.seq,
                    settled_before_ms=settled_before_ms, holds=self._scheduling.outcomes.holds, now_ms=now_ms,
                    epoch=self._log.reader.next_seq,
                ),
            )  # fmt: skip
            try:
                return await self._attach_or_delete(attachment)
            finally:
                await in_thread(self._threads.background, give_back)

    async def resume(self, campaign: str, facts: CampaignFacts, shift_ms: int) -> int:
        """Rewrite the held messages of a paused campaign `shift_ms` later, and end the hold. Returns their number.

        Requests that cancel or move single messages continue while the files are written. Then they are blocked, and
        files with messages that were settled meanwhile are written again without these messages. Raises OverLimit if
        there would be too many files, and Unavailable if the table has changed meanwhile.
        """
        # A separate task, as for any attach.
        return await asyncio.shield(self._loop.create_task(self._resume(campaign, facts, shift_ms)))

    async def _resume(self, campaign: str, facts: CampaignFacts, shift_ms: int) -> int:
        """Write the files of a campaign again, twice where messages were settled meanwhile, and attach them."""
        async with self._compact_lock:
            # Messages whose release or cancel began before the pause count as settled when their rows are durable.
            await self._log.writer.flushed()
            now_ms, scheduler = self._clock.now_ms(), self._scheduling.scheduler
            background = self._threads.background
            entries = [
                file.entry for file in overlapping(self._scheduling.hour_log.pending.all(), facts.ranges)
            ]
            runs = dict(enumerate(await in_thread(background, compact.runs, entries, self._raw_bytes)))
            earliest_due_ms = min(scheduler.settled_before_ms, self._scheduling.outcomes.holds.from_ms)
            # Check all files before writing the first one, because there may be thousands.
            await in_thread(
                background, compact.check_resume, list(runs.values()),
                earliest_due_ms=earliest_due_ms, shift_ms=shift_ms, now_ms=now_ms,
            )  # fmt: skip
            settled = await in_thread(background, compact.settled_in, scheduler.settled(), entries)
            written_files: dict[int, list[FileEntry]] = {}
            created_files: list[FileEntry] = []
            is_attaching = False
            try:
                await self._write_resumed(
                    written_files, runs, settled, facts, shift_ms, now_ms, created_files
                )
                if self._file_replication is not None or self._pending_table.cache is not None:
                    # Make most files durable now, while other requests continue. `_attach_resumed` does it for files
                    # that are written again.
                    await self._make_durable(created_files)
                async with self._gate.alone(), self.lock:
                    # Only settled messages of the campaign matter: their due times are changed, so their settled pairs
                    # do not match the new rows. Other messages in these files keep their due times and numbers.
                    settled, settled_meanwhile = await in_thread(
                        background, compact.settled_since, settled, scheduler.settled(), facts.ranges
                    )
                    runs_to_repeat = {
                        index: run for index, run in runs.items() if _may_contain(run, settled_meanwhile)
                    }
                    await self._write_resumed(
                        written_files, runs_to_repeat, settled, facts, shift_ms, now_ms, created_files
                    )
                    removes = [entry.path for run in runs.values() for entry in run]
                    if self.has_unfinished_attach or len(
                        self._scheduling.hour_log.pending.entries(removes)
                    ) < len(removes):
                        raise Unavailable("the pending table has changed meanwhile; resume again")
                    is_attaching = True
                    return await self._attach_resumed(campaign, facts, removes, written_files, now_ms)
            finally:
                # Delete files that did not join the table. If the attach may be in the log, keep all files.
                if not (is_attaching and self.has_unfinished_attach):
                    live_paths = {entry.path for entry in self._scheduling.hour_log.pending.live_entries()}
                    unused_files = [entry for entry in created_files if entry.path not in live_paths]
                    await in_thread(self._threads.background, compact.remove, self._files, unused_files)
                await in_thread(self._threads.background, give_back)

    async def _write_resumed(
        self,
        written_files: dict[int, list[FileEntry]],
        runs: dict[int, list[FileEntry]],
        settled: Int64Array,
        facts: CampaignFacts,
        shift_ms: int,
        now_ms: int,
        created_files: list[FileEntry],
    ) -> None:
        """Write the new files of these runs, given by index.

        Stores the files of each run in `written_files`, by the same index, and adds all files to `created_files`, also
        if a write fails. `settled` contains the versions of settled messages, sorted. Raises OverLimit.
        """
        settled_before_ms = self._scheduling.scheduler.settled_before_ms
        for index, run in runs.items():  # only one run is in memory at a time
            self._log.writer.check_admission()
            written_files[index] = await in_thread(
                self._threads.background, compact.resume, self._files, self._pending_table.whole_files, run, settled,
                ranges=facts.ranges, settled_before_ms=settled_before_ms, holds=self._scheduling.outcomes.holds,
                shift_ms=shift_ms, now_ms=now_ms, created=created_files,
            )  # fmt: skip

    async def _attach_resumed(
        self,
        campaign: str,
        facts: CampaignFacts,
        removes: list[str],
        written_files: dict[int, list[FileEntry]],
        now_ms: int,
    ) -> int:
        """Attach the rewritten files of a resumed campaign, and end its hold. Returns the number of its messages."""
        entries = [entry for run_files in written_files.values() for entry in run_files]
        attachment = Attachment(
            job="rewrite", job_id=compact.REWRITE_JOB_ID, epoch=self._log.reader.next_seq,
            files=entries, removes=removes, ranges=facts.ranges,
        )  # fmt: skip
        await self._make_durable(entries)
        campaign_files = [entry for entry in entries if within(np.array([entry.min_seq]), facts.ranges).all()]
        running = msgspec.structs.replace(
            facts, state="running", since_ms=now_ms, held_from_ms=None,
            last_due_ms=max((entry.max_due_ms for entry in campaign_files), default=-1),
        )  # fmt: skip
        campaign_change = self._campaigns.build_change(campaign, running)
        await self._attach_checked(attachment, now_ms, campaign_change, resumes=campaign)
        return sum(entry.rows for entry in campaign_files)

    def lease(self, lease_ms: int) -> None:
        """Leave compaction to an external compactor for `lease_ms`, at most one hour."""
        # Limited, because the tail grows until the end of the lease if the compactor has died.
        self.external_compactor_until_ms = self._clock.elapsed_ms() + min(lease_ms, limits.HOUR_MS)


def _may_contain(run: list[FileEntry], numbers: Int64Array) -> bool:
    """Check whether files of this run may contain one of these numbers."""
    return any(((numbers >= entry.min_seq) & (numbers <= entry.max_seq)).any() for entry in run)


# ---- watch the table: undo changes by other programs, update a table behind the log --------------------------
# Once a second the task checks whether another program has committed to the Delta table, which costs two checks for a
# file name. If so, the catalog commits the state of the log again (table/catalog.py). The schedule does not open data
# files that the other program deleted until they are restored.

WATCH_EVERY_MS = 1_000


class TableWatch:
    """The periodic task that watches the table. Belongs to the event loop."""

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
        """Make the table match the log, and find deleted and restored data files.

        Raises OverLimit or Unavailable if a change of the table fails now.
        """
        pending = self._scheduling.hour_log.pending
        if self._pending_table.cache is None:
            # For a table in an object store `StoredTable` does this, after a check that the store answers.
            await self._mover.catch_up()
        await in_thread(
            self._threads.table, self._pending_table.catalog.check_foreign_commits, self._clock.now_ms()
        )
        # Another program may run VACUUM after its commit, so the catalog has checked all live files.
        missing_paths = frozenset(entry.path for entry in self._pending_table.catalog.foreign.missing)
        restored_paths = [path for path in pending.missing - missing_paths if await self._try_restore(path)]
        if self._pending_table.cache is None:
            # Before the schedule tries to open the files. With an object store it opens local copies, so a file that is
            # missing in the store does not matter.
            pending.mark_missing(missing_paths)
        if restored_paths:
            # Messages of these files that are due by now are released at once, late.
            pending.mark_restored(restored_paths)
            self._scheduling.hour_log.refresh_local_files()
            self._scheduling.scheduler.on_earlier()

    async def _try_restore(self, path: str) -> bool:
        """Restore a deleted data file if a copy is left. True if the file exists again."""
        return await in_thread(
            self._threads.reader, self._pending_table.catalog.live_files.restore_file, path
        )


# ---- a table in an object store -------------------------------------------------------------------------------
# Every few seconds, files with messages due within FETCH_AHEAD_MS are pinned in the cache, so that they are not
# evicted. Missing files are fetched, the earliest due first. So no message is late if the store is unreachable for one
# hour. If a file cannot be fetched in time, only its messages are late. They delay no others, none of them counts as
# settled (released or cancelled), and they are released once the file is local.

FETCH_EVERY_MS = 5_000


class StoredTable:
    """The periodic task that fetches files and updates the Delta table. Belongs to the event loop."""

    def __init__(
        self,
        cache: FileCache,
        mover: TableChanges,
        *,
        clock: SchedulerClock,
        scheduler: Scheduler,
        hour_log: HourLog,
        table_thread: Executor,
    ) -> None:
        self._cache, self._mover = cache, mover
        self._clock, self._scheduler = clock, scheduler
        self._hour_log, self._table_thread = hour_log, table_thread
        self._unreadable: set[str] = set()  # files that were logged already

    async def update(self) -> None:
        """Fetch the files that are due soon. Then update a Delta table that is behind the log, if the store answers."""
        due_soon = self._due_soon()
        # Before the first fetch, because a fetch may evict other files to free space.
        self._cache.pin(entry.path for entry in due_soon)
        # Two separate steps: a file that can never be fetched must not prevent updates of the Delta table.
        for step in (partial(self._fetch, due_soon), self._update_delta_table):
            try:
                await step()
            except Unavailable:
                # The cache counts, logs and shows this error. The next call tries again.
                continue
        self._cache.missing_files = sum(not self._cache.is_local(entry.path) for entry in due_soon)

    async def _update_delta_table(self) -> None:
        """Update the Delta table if it is behind the log. Raises Unavailable if the store does not answer."""
        await in_thread(self._table_thread, self._cache.probe)
        await self._mover.catch_up()

    def _due_soon(self) -> list[FileEntry]:
        """List the files with messages that are due until `soon_ms`, the earliest due first."""
        return self._hour_log.pending.due_between(self._scheduler.settled_before_ms, soon_ms(self._clock))

    async def _fetch(self, due_soon: Sequence[FileEntry]) -> None:
        """Fetch the files that are not local, several at a time, until the store does not answer.

        A file that cannot be read is logged, and does not end the fetches.
        """
        missing = [entry.path for entry in due_soon if not self._cache.is_local(entry.path)]
        for begin in range(0, len(missing), THREADS):
            paths = missing[begin : begin + THREADS]
            fetches = (in_thread(self._cache.threads, self._cache.fetch, path) for path in paths)
            errors = await asyncio.gather(*fetches, return_exceptions=True)
            # After each group of files: the first file may be due now, and the last one in an hour.
            self.refresh_local_files()
            for path, error in zip(paths, errors, strict=True):
                if isinstance(error, Corrupt | NotFound):
                    self._log_unreadable(path, error)
                elif error is not None and not isinstance(error, Unavailable):
                    raise error
            # If all fetches fail, the store is unreachable. If some succeed, only these files have a problem.
            if all(isinstance(error, Unavailable) for error in errors):
                return
        self.refresh_local_files()

    def refresh_local_files(self) -> None:
        """Let the schedule open files that have become local."""
        self._hour_log.refresh_local_files()
        self._scheduler.on_earlier()

    def _log_unreadable(self, path: str, error: BaseException) -> None:
        """Log a file that cannot be fetched, once. Its messages wait until an administrator restores it."""
        if path not in self._unreadable:
            self._unreadable.add(path)
            logger.error("data file cannot be fetched file=%s reason=%s", path, error)
