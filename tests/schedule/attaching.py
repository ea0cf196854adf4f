"""The part of `World` that writes files of the pending table and attaches them: compaction, rewriting, bulk jobs.

The `prepare_…` methods write files that no table refers to. `attach` makes them part of the table, and their messages
are pending from then on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from tests.schedule.stage import BEGINNING, Model, Rig
from tests.schedule.table_files import table_rows

from timeball.broker.tables import compact
from timeball.io.files import Files
from timeball.log.reader import LogReader
from timeball.log.writer import LogWriter
from timeball.model.message import Kind, build_rows
from timeball.schedule.backlog import Backlog
from timeball.schedule.outcomes import Holds
from timeball.schedule.scheduler import Scheduler
from timeball.table import attachment as att
from timeball.table import layout
from timeball.table.attachment import Attachment, FileEntry
from timeball.table.data_file import DataFile

T = TypeVar("T")


class Attaching:
    """A mixin of `World`, which sets the attributes."""

    rig: Rig
    files: Files
    loop: asyncio.AbstractEventLoop
    model: Model
    strategy: Scheduler
    backlog: Backlog
    reader: LogReader
    writer: LogWriter
    attached: list[tuple[int, Attachment]]
    watermark: int

    @property
    def now_ms(self) -> int:
        """See World."""
        raise NotImplementedError

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """See World."""
        raise NotImplementedError

    async def _pump(self, task: asyncio.Task[None] | None) -> None:
        raise NotImplementedError

    def live_files(self) -> list[DataFile]:
        """List the live files of the table."""
        return self.rig.live_files(self.backlog)

    def prepare_compact(self, share: float = 1.0) -> Attachment | None:
        """Write the files for the first `share` of the tail, without attaching them."""
        high = self.reader.next_seq
        to_seq = self.watermark + round((high - self.watermark) * share)
        if to_seq <= self.watermark:
            return None
        attachment = compact.compact(
            self.files, self.reader, from_seq=self.watermark, to_seq=to_seq,
            settled_before_ms=self.strategy.settled_before_ms, now_ms=self.now_ms,
        )  # fmt: skip
        return self._sync_files(attachment)

    def prepare_rewrite(self) -> Attachment | None:
        """Write the live files again without settled messages, without attaching them."""
        live_files = self.live_files()
        if not live_files:
            return None
        settled = self.strategy.settled()
        attachment = compact.rewrite(
            self.files, self.files, [file.entry for file in live_files], settled.seq,
            settled_before_ms=self.strategy.settled_before_ms, holds=Holds(), now_ms=self.now_ms,
            epoch=self.reader.next_seq,
        )  # fmt: skip
        return self._sync_files(attachment)

    def prepare_bulk(self, due_times: Sequence[int]) -> Attachment:
        """Write the files of a bulk job. Its scheduled messages are pending from the attach on."""
        first_seq = self.run(self._reserve(len(due_times)))
        sorted_due_times = np.sort(np.array(due_times, dtype=np.int64))
        seqs = np.arange(first_seq, first_seq + len(due_times), dtype=np.int64)
        rows = table_rows(sorted_due_times.tolist(), seqs.tolist(), self.now_ms)
        return self._sync_files(
            Attachment(
                job="bulk", job_id=f"bulk-{first_seq}", epoch=0, ranges=[(first_seq, len(due_times))],
                files=compact.write_files(self.files, rows, self.now_ms),
            )
        )  # fmt: skip

    async def _reserve(self, rows: int) -> int:
        row = build_rows(
            1, kind=int(Kind.TABLE), body=att.encode(att.Reservation(rows)), store_ms=self.now_ms
        )
        seq, durable = self.writer.append(row, span=1 + rows)
        await durable
        return seq + 1

    def _sync_files(self, attachment: Attachment) -> Attachment:
        for entry in attachment.files:
            self.files.sync_file(f"{layout.FOLDER}/{entry.path}")
            self.files.sync_dir(f"{layout.FOLDER}/{entry.path.rpartition('/')[0]}")
        return attachment

    def attach_now(self, attachment: Attachment | None) -> None:
        """Attach a prepared attachment, which must not be None."""
        assert attachment is not None
        self.attach(attachment)

    def attach(self, attachment: Attachment) -> None:
        """Append the TABLE row, wait until it is durable, and let the scheduler use the files."""
        self.run(self._attach(attachment))

    async def _attach(self, attachment: Attachment) -> None:
        bulk, accepted = {}, {}
        for entry in attachment.files if attachment.job == "bulk" else ():
            columns = rows_of(self.files, entry).select(["seq", "due_ms", "body", "accepted_ms"])
            for seq, due, body, accepted_ms in zip(*(column.to_pylist() for column in columns), strict=True):
                bulk[seq], accepted[seq] = (due, body), accepted_ms
        row = build_rows(1, kind=int(Kind.TABLE), body=att.encode(attachment), store_ms=self.now_ms)
        seq, durable = self.writer.append(row)
        await durable
        self.attached.append((seq, attachment))
        self.model.waiting.update(bulk)
        self.model.accepted.update(accepted)
        if attachment.job == "compact":
            self.watermark = attachment.to_seq
        await self._pump(self.loop.create_task(self.strategy.attach(attachment)))


def rows_of(files: Files, entry: FileEntry) -> pa.Table:
    """Read all rows of a data file."""
    return DataFile(files, entry).rows_between((BEGINNING, 0), (1 << 62, 0))
