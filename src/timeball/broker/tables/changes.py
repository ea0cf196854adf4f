"""Change the pending table: reserve, attach, compact, rewrite, one change at a time.

An attach is decided by its row in the log; the steps around it are in table/catalog.py. They run under one lock,
because each attach begins where the last one ended, and because a checkpoint cannot save the state between steps.
"""

from __future__ import annotations

import asyncio
import logging

import numpy as np
import pyarrow as pa

from timeball import limits
from timeball.broker.memory import give_back
from timeball.broker.parts import Parts, in_thread
from timeball.broker.tables import attach, compact, rewrite
from timeball.errors import RequestError, Unavailable
from timeball.message import Kind, build_rows
from timeball.schedule.locations import Waiting, take_promises
from timeball.table import attachment as att
from timeball.table.attachment import Attachment, FileEntry
from timeball.wire import Attached

logger = logging.getLogger(__name__)


class TableChanges:
    """The pending table's changes, one at a time. Belongs to the event loop."""

    def __init__(self, parts: Parts, *, promises_since_watermark: int) -> None:
        self.parts = parts
        self._loop = asyncio.get_running_loop()
        self.lock = asyncio.Lock()
        self._compact_lock = asyncio.Lock()
        self.tail_count = compact.TailCount(parts.ledger.watermark, promises_since_watermark)
        self.outside_compactor_until_ms = 0
        # An attach is decided and the table may lack it. Recovery repeats only what stands behind the
        # checkpoint, so none may be saved now, and no later attach may pass this one.
        self.is_unfinished = False

    async def reserve(self, rows: int) -> int:
        """Set sequence numbers aside for a bulk attach; returns the first."""
        self.parts.ledger.check_reserve(rows)
        row = build_rows(
            1,
            kind=int(Kind.TABLE),
            body=att.encode(att.Reservation(rows)),
            store_ms=self.parts.clock.now_ms(),
        )
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
        async with self.lock:
            parts, ledger = self.parts, self.parts.ledger
            if self.is_unfinished:
                raise Unavailable("an attach has failed half way and the broker stops; start it again")
            if ledger.is_repeated(attachment):
                version = await in_thread(self.parts.reader_thread, lambda: parts.catalog.version)
                return Attached(version=version, watermark=ledger.watermark, seq=0, repeated=True)
            live = {file.entry.path for file in parts.hour_log.pending.all()}
            now_ms = parts.clock.now_ms()
            ledger.check(
                attachment, durable_seq=parts.reader.next_seq, is_live=live.__contains__, now_ms=now_ms
            )
            await in_thread(self.parts.reader_thread,
                attach.check_files, parts.files, attachment,
                now_ms=now_ms, delay_ms_max=parts.settings.delay_ms_max,
            )  # fmt: skip
            await in_thread(self.parts.reader_thread, parts.catalog.sync_data, attachment)
            return await self._attach_checked(attachment, now_ms)

    async def _attach_checked(self, attachment: Attachment, now_ms: int) -> Attached:
        parts = self.parts
        removed = parts.hour_log.pending.entries(attachment.removes)
        row = build_rows(1, kind=int(Kind.TABLE), body=att.encode(attachment), store_ms=now_ms)
        seq = parts.writer.next_seq
        _, durable = parts.writer.append(row, on_durable=lambda: parts.ledger.apply(attachment, seq, now_ms))
        self.is_unfinished = True
        await durable
        await parts.writer.synced()  # the table must not know of a row that `async` durability may lose
        try:
            await parts.scheduler.attach(attachment)
            version = await in_thread(
                self.parts.reader_thread, parts.catalog.commit, attachment, seq, removed, now_ms
            )
        except BaseException as error:
            # The log says that it has happened: only a recovery, which repeats these steps, may go on.
            parts.on_failure(error)
            raise
        self.is_unfinished = False
        if attachment.job == "compact":
            self.tail_count.drop_below(attachment.to_seq)
        return Attached(version=version, watermark=parts.ledger.watermark, seq=seq)

    def _check_compacts(self) -> None:
        schedule = self.parts.settings.strategy
        if schedule != "hour_log":
            raise RequestError(
                f"nothing is compacted with --strategy {schedule}: it keeps promises in files of its own"
            )

    async def adopt(self, waiting: Waiting) -> None:
        """Move promises that another schedule kept, and may have written again, to the pending table.

        Afterwards every promise is a row of the table, or one of the log behind the watermark, as `hour_log` has it.
        """
        parts, now_ms = self.parts, self.parts.clock.now_ms()
        from_seq, to_seq = parts.ledger.watermark, parts.reader.next_seq

        def write() -> list[FileEntry]:
            rows = take_promises(parts.reader, np.sort(waiting.row_seq))
            return compact.write_files(
                parts.files, pa.Table.from_batches([compact.as_table_rows(rows)]), now_ms
            )

        entries = await self._loop.run_in_executor(parts.background, write)
        await self.attach(
            Attachment(
                job="compact",
                job_id=compact.JOB_ID,
                epoch=to_seq,
                files=entries,
                from_seq=from_seq,
                to_seq=to_seq,
            )
        )

    async def compact(self, *, even_without_promises: bool = False) -> Attached | None:
        """Move the tail's promises to the pending table; None when there is nothing to move.

        `even_without_promises` moves the watermark all the same, so that retention may let the rows before it go.
        """
        self._check_compacts()
        async with self._compact_lock:
            parts = self.parts
            from_seq, to_seq = parts.ledger.watermark, parts.reader.next_seq
            to_seq = min(to_seq, from_seq + compact.RUN_ROWS_MAX)
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
                return await self.attach(attachment)
            finally:
                await in_thread(parts.background, give_back)

    async def rewrite(self) -> Attached | None:
        """Merge or split files of the pending table where that is worth it; None when it is not."""
        async with self._compact_lock:
            parts, now_ms = self.parts, self.parts.clock.now_ms()
            chosen = {entry.path for entry in rewrite.choose(parts.hour_log.pending.live_entries(), now_ms)}
            if not chosen:
                return None
            entries = [f.entry for f in parts.hour_log.pending.all() if f.entry.path in chosen]
            settled, settled_before_ms = parts.scheduler.settled(), parts.scheduler.settled_before_ms
            attachment = await self._loop.run_in_executor(
                parts.background,
                lambda: rewrite.rewrite(
                    parts.files, entries, settled.seq,
                    settled_before_ms=settled_before_ms, now_ms=now_ms, epoch=parts.reader.next_seq,
                ),
            )  # fmt: skip
            try:
                return await self.attach(attachment)
            finally:
                await in_thread(parts.background, give_back)

    def lease(self, lease_ms: int) -> None:
        """Leave the tail to a compactor outside until the lease runs out."""
        self.outside_compactor_until_ms = self.parts.clock.now_ms() + min(lease_ms, limits.HOUR_MS)
