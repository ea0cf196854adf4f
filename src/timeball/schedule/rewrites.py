"""Rewrites: messages that need a new row in the log to stay pending. Two backlogs rewrite messages: a timer wheel rolls
messages due beyond its ring, and a cascade begins the next hop.

    unread  --reader thread-->  ready, with bodies  --take_rows-->  in flight  --rewritten-->  back in their backlog

Bodies are read in chunks, so at most about `chunk_bytes` are in memory. Messages settled (released or cancelled)
meanwhile are skipped. Until its new row is durable, the location of a message is its old row.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from timeball.log.reader import LogReader
from timeball.model.message import Int64Array
from timeball.schedule.backlog import Backlog, Bools, Opened
from timeball.schedule.due_index import FAR_MS
from timeball.schedule.locations import take_scheduled
from timeball.schedule.outcomes import Outcomes

logger = logging.getLogger(__name__)

# This bounds the time of one read in the reader thread, which serves consumers between two reads.
CHUNK_ROWS = 8_192
# Messages opened and not being written yet, 40 bytes each. With more, backlogs are opened as late as possible.
ROWS_MAX = 1 << 17
# With this number of messages no backlog is opened, even if due messages are delayed by it.
FULL_ROWS = 8 * ROWS_MAX


@dataclass(frozen=True, slots=True)
class Batch:
    """Opened messages of one backlog."""

    backlog: Backlog
    opened: Opened

    def __len__(self) -> int:
        return len(self.opened)

    def split(self, rows: int) -> tuple[Batch, Batch]:
        """Split into the first `rows` messages and the others."""
        opened = self.opened
        return (
            Batch(self.backlog, opened.part(slice(None, rows))),
            Batch(self.backlog, opened.part(slice(rows, None))),
        )


class Rewrites:
    """The queue of all messages that must be rewritten. Belongs to the event loop."""

    def __init__(
        self,
        reader: LogReader,
        reader_thread: Executor,
        outcomes: Outcomes,
        *,
        chunk_bytes: int,
        on_change: Callable[[], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        """Call `on_change` when `take_rows` has rows, and `on_failure` with the exception when a read fails."""
        self._reader, self._thread, self._outcomes = reader, reader_thread, outcomes
        self._chunk_bytes, self._on_change, self._on_failure = chunk_bytes, on_change, on_failure
        self._unread: deque[Batch] = deque()
        self._loading: asyncio.Task[pa.RecordBatch] | None = None
        self._loading_batch: Batch | None = None
        self._ready: deque[tuple[Batch, pa.RecordBatch]] = deque()
        self._in_flight: deque[Batch] = deque()
        # The count of all messages here, and of those in flight. Stored, because the scheduler reads them at every
        # step.
        self.rows = self.in_flight_rows = 0

    @property
    def has_capacity(self) -> bool:
        """True if backlogs may open more messages that must be rewritten."""
        return self.rows - self.in_flight_rows < ROWS_MAX

    @property
    def is_full(self) -> bool:
        """True if no backlog may open more, even if due messages are delayed by that."""
        return self.rows - self.in_flight_rows >= FULL_ROWS

    @property
    def rows_in_memory(self) -> int:
        """The number of messages that have their bodies in memory and are not in flight."""
        loading = 0 if self._loading_batch is None else len(self._loading_batch)
        return loading + sum(len(batch) for batch, _ in self._ready)

    @property
    def is_loading(self) -> bool:
        """True while the reader thread reads bodies."""
        return self._loading is not None

    @property
    def is_ready(self) -> bool:
        """True if `take_rows` has rows."""
        return bool(self._ready)

    def first_due_ms(self) -> int:
        """Find the earliest due time of a message that is not settled. FAR_MS if there is none."""
        first_due_ms = FAR_MS
        # Sorted by first due time, so that the search ends at the first batch that begins after the result so far.
        for batch in sorted(self._all(), key=lambda batch: int(batch.opened.due_ms.min())):
            opened = batch.opened
            first_index = int(opened.due_ms.argmin())
            if opened.due_ms[first_index] >= first_due_ms:
                break
            # Usually the first message is not settled, and one check is enough. Otherwise the whole batch is checked.
            first = slice(first_index, first_index + 1)
            if self._outcomes.is_settled(opened.due_ms[first], opened.seq[first])[0]:
                opened = opened.part(self._unsettled(opened))
            if len(opened):
                first_due_ms = min(first_due_ms, int(opened.due_ms.min()))
        return first_due_ms

    def needed_seq(self) -> int | None:
        """Find the oldest row of the log that contains one of these messages. None if there are none."""
        return min((int(batch.opened.row_seq.min()) for batch in self._all()), default=None)

    def add(self, backlog: Backlog, opened: Opened) -> None:
        """Queue opened messages of a backlog for a rewrite."""
        if len(opened):
            self.rows += len(opened)
            self._unread.append(Batch(backlog, opened))
            self._load_if_idle()

    def take_rows(self, limit: int) -> pa.RecordBatch | None:
        """Take up to `limit` messages of one backlog in the form of their new rows. None if no rows are ready.

        They are in flight from now on, until `rewritten`. Settled messages are dropped.
        """
        while self._ready:
            batch, rows = self._ready.popleft()
            if len(batch) > limit:
                batch, remaining = batch.split(limit)
                self._ready.appendleft((remaining, rows.slice(limit)))
                rows = rows.slice(0, limit)
            # The next chunk is read while the rows of this one are written.
            self._load_if_idle()
            unsettled = self._unsettled(batch.opened)
            if not unsettled.all():
                self.rows -= len(batch) - int(unsettled.sum())
                batch, rows = (
                    Batch(batch.backlog, batch.opened.part(unsettled)),
                    rows.filter(pa.array(unsettled)),
                )
            if len(batch):
                # In the order in which the rows are appended, which is the order in which they become durable.
                self._in_flight.append(batch)
                self.in_flight_rows += len(batch)
                return rows
        return None

    def rewritten(self, seq: Int64Array) -> Batch:
        """Remove the messages `seq`, the first ones in flight, whose new rows are durable.

        Returns them with their old rows.
        """
        batch = self._in_flight.popleft()
        # One batch may have become several frames of the log, which become durable one after the other.
        durable, remaining = batch.split(len(seq))
        assert np.array_equal(durable.opened.seq, seq), (
            "rows become durable in the order in which they were taken"
        )
        if len(remaining):
            self._in_flight.appendleft(remaining)
        self.in_flight_rows -= len(seq)
        self.rows -= len(seq)
        return durable

    async def wait_idle(self) -> None:
        """Wait until the reader thread has finished its read."""
        if self._loading is not None:
            await asyncio.wait([self._loading])

    # -- internals -------------------------------------------------------------------------------------------

    def _all(self) -> list[Batch]:
        """List the batches in all states."""
        loading = [] if self._loading_batch is None else [self._loading_batch]
        return [*self._unread, *loading, *(batch for batch, _ in self._ready), *self._in_flight]

    def _unsettled(self, opened: Opened) -> Bools:
        """Compute a mask of the messages that are neither released nor cancelled."""
        return np.asarray(~self._outcomes.is_settled(opened.due_ms, opened.seq))

    def _load_if_idle(self) -> None:
        """Begin to read the next chunk of bodies, unless one is being read or is ready."""
        # One chunk is ready while the one before it is written. More chunks would only take memory.
        if self._loading is not None or self._ready:
            return
        while self._unread:
            batch = self._unread.popleft()
            row_seq = int(batch.opened.row_seq[0])
            # An estimate from the frame of the first row alone, since the rows are spread over the log.
            row_bytes = max(1, self._reader.row_bytes(row_seq, row_seq + 1))
            rows = max(1, min(CHUNK_ROWS, self._chunk_bytes // row_bytes))
            if len(batch) > rows:
                batch, remaining = batch.split(rows)
                self._unread.appendleft(remaining)
            unsettled = self._unsettled(batch.opened)
            self.rows -= len(batch) - int(unsettled.sum())
            batch = Batch(batch.backlog, batch.opened.part(unsettled))
            if len(batch):
                self._loading_batch = batch
                self._loading = asyncio.get_running_loop().create_task(self._load(batch))
                self._loading.add_done_callback(self._finish_loading)
                return

    async def _load(self, batch: Batch) -> pa.RecordBatch:
        """Read the messages of a batch in the reader thread, and build their new rows."""

        def read() -> pa.RecordBatch:
            opened = batch.opened
            return batch.backlog.encode_rewrite(take_scheduled(self._reader, opened.row_seq), opened.note)

        return await asyncio.get_running_loop().run_in_executor(self._thread, read)

    def _finish_loading(self, task: asyncio.Task[pa.RecordBatch]) -> None:
        """Store the rows of a finished read, or report its failure."""
        # Reset here and not in the task: otherwise `take_rows` would still see a running read and start no further one.
        batch, self._loading, self._loading_batch = self._loading_batch, None, None
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            logger.critical("reading scheduled messages to write again failed reason=%s", error)
            self._on_failure(error)
            return
        assert batch is not None
        self._ready.append((batch, task.result()))
        self._on_change()
