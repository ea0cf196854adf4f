"""Promises that must be written again to go on waiting, on their way from one row of the log to the next.

    waiting  --reader thread-->  ready, with bodies  --take-->  in flight  --rewritten-->  their backlog's again

A timer wheel rolls promises due beyond its ring, a cascade takes a hop. Bodies are read in chunks, with about
`chunk_bytes` in memory at most; promises settled meanwhile are left out. Until its new row is durable, a promise counts
as standing in the old one.
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
from timeball.message import Int64Array
from timeball.schedule.backlog import Backlog, Bools, Opened
from timeball.schedule.due_index import FAR_MS
from timeball.schedule.locations import take_promises
from timeball.schedule.outcomes import Outcomes

logger = logging.getLogger(__name__)

# Bounds the time of one read in the reader thread, which serves consumers between two of them.
CHUNK_ROWS = 8_192
ROWS_MAX = 1 << 17  # opened and not written yet, 40 bytes each; beyond it backlogs wait as long as they can
FULL_ROWS = 8 * ROWS_MAX


@dataclass(frozen=True, slots=True)
class Batch:
    """Promises of one backlog."""

    backlog: Backlog
    promises: Opened

    def __len__(self) -> int:
        return len(self.promises)

    def split(self, rows: int) -> tuple[Batch, Batch]:
        """Return the first `rows`, and the others."""
        promises = self.promises
        return (
            Batch(self.backlog, promises.part(slice(None, rows))),
            Batch(self.backlog, promises.part(slice(rows, None))),
        )


class Rewrites:
    """Belongs to the event loop."""

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
        """Call `on_change` when `take_rows` has something, `on_failure` when reading fails."""
        self._reader, self._thread, self._outcomes = reader, reader_thread, outcomes
        self._chunk_bytes, self._on_change, self._on_failure = chunk_bytes, on_change, on_failure
        self._waiting: deque[Batch] = deque()
        self._loading: asyncio.Task[pa.RecordBatch] | None = None
        self._loading_batch: Batch | None = None
        self._ready: deque[tuple[Batch, pa.RecordBatch]] = deque()
        self._in_flight: deque[Batch] = deque()
        # Kept, as the scheduler reads them at every step: all promises here, and those of them in flight.
        self.rows = self.in_flight_rows = 0

    @property
    def has_room(self) -> bool:
        """Return whether backlogs may give up more to be written again."""
        return self.rows - self.in_flight_rows < ROWS_MAX

    @property
    def is_full(self) -> bool:
        """Return whether there are so many that no backlog may give up more, even if due promises wait for it."""
        return self.rows - self.in_flight_rows >= FULL_ROWS

    @property
    def rows_in_memory(self) -> int:
        """Return how many have their bodies in memory and are not in flight."""
        loading = 0 if self._loading_batch is None else len(self._loading_batch)
        return loading + sum(len(batch) for batch, _ in self._ready)

    @property
    def is_loading(self) -> bool:
        """Return whether the reader thread works for this."""
        return self._loading is not None

    @property
    def is_ready(self) -> bool:
        """Return whether `take_rows` has something."""
        return bool(self._ready)

    def first_due_ms(self) -> int:
        """Return the earliest instant of those that are not settled, FAR_MS without any."""
        found = FAR_MS
        # By their first instants, so that the search ends with the first batch that begins behind what was found.
        for batch in sorted(self._all(), key=lambda batch: int(batch.promises.due_ms.min())):
            promises = batch.promises
            first = int(promises.due_ms.argmin())
            if promises.due_ms[first] >= found:
                break
            # One look is nearly always enough; a thousand cancelled ones need another.
            if self._outcomes.is_settled(promises.due_ms[first : first + 1], promises.seq[first : first + 1])[
                0
            ]:
                promises = promises.part(~self._outcomes.is_settled(promises.due_ms, promises.seq))
            if len(promises):
                found = min(found, int(promises.due_ms.min()))
        return found

    def needed_seq(self) -> int | None:
        """Return the oldest row of the log that holds one of them."""
        return min((int(batch.promises.row_seq.min()) for batch in self._all()), default=None)

    def add(self, backlog: Backlog, promises: Opened) -> None:
        """Write these again, which a backlog has given up."""
        if len(promises):
            self.rows += len(promises)
            self._waiting.append(Batch(backlog, promises))
            self._load_if_idle()

    def take_rows(self, limit: int) -> pa.RecordBatch | None:
        """Return up to `limit` promises to be written, as their new rows are to say; None when none are ready."""
        while self._ready:
            batch, rows = self._ready.popleft()
            if len(batch) > limit:
                batch, rest = batch.split(limit)
                self._ready.appendleft((rest, rows.slice(limit)))
                rows = rows.slice(0, limit)
            self._load_if_idle()
            waits = self._waits(batch.promises)
            if not waits.all():
                self.rows -= len(batch) - int(waits.sum())
                batch, rows = Batch(batch.backlog, batch.promises.part(waits)), rows.filter(pa.array(waits))
            if len(batch):
                # In the order in which the rows are appended, and so in the order in which they become durable.
                self._in_flight.append(batch)
                self.in_flight_rows += len(batch)
                return rows
        return None

    def rewritten(self, seq: Int64Array) -> Batch:
        """Return those of the oldest taken whose new rows are durable, with their old rows."""
        batch = self._in_flight.popleft()
        # One batch may have become several frames of the log, which become durable one by one.
        arrived, rest = batch.split(len(seq))
        assert np.array_equal(arrived.promises.seq, seq), (
            "rows become durable in the order in which they were taken"
        )
        if len(rest):
            self._in_flight.appendleft(rest)
        self.in_flight_rows -= len(seq)
        self.rows -= len(seq)
        return arrived

    async def wait_idle(self) -> None:
        """Return when the reader thread is done with this."""
        if self._loading is not None:
            await asyncio.wait([self._loading])

    # -- inside ----------------------------------------------------------------------------------------------

    def _all(self) -> list[Batch]:
        loading = [] if self._loading_batch is None else [self._loading_batch]
        return [*self._waiting, *loading, *(batch for batch, _ in self._ready), *self._in_flight]

    def _waits(self, promises: Opened) -> Bools:
        return np.asarray(~self._outcomes.is_settled(promises.due_ms, promises.seq))

    def _load_if_idle(self) -> None:
        # One chunk is ready while the one before it is written: more would only be memory.
        if self._loading is not None or self._ready:
            return
        while self._waiting:
            batch = self._waiting.popleft()
            row_seq = int(batch.promises.row_seq[0])
            # From the frame of the first row alone: a guess, since the rows lie all over the log.
            row_bytes = max(1, self._reader.row_bytes(row_seq, row_seq + 1))
            rows = max(1, min(CHUNK_ROWS, self._chunk_bytes // row_bytes))
            if len(batch) > rows:
                batch, rest = batch.split(rows)
                self._waiting.appendleft(rest)
            waits = self._waits(batch.promises)
            self.rows -= len(batch) - int(waits.sum())
            batch = Batch(batch.backlog, batch.promises.part(waits))
            if len(batch):
                self._loading_batch = batch
                self._loading = asyncio.get_running_loop().create_task(self._load(batch))
                self._loading.add_done_callback(self._loaded)
                return

    async def _load(self, batch: Batch) -> pa.RecordBatch:
        def read() -> pa.RecordBatch:
            promises = batch.promises
            return batch.backlog.encode_rewrite(take_promises(self._reader, promises.row_seq), promises.note)

        return await asyncio.get_running_loop().run_in_executor(self._thread, read)

    def _loaded(self, task: asyncio.Task[pa.RecordBatch]) -> None:
        # Here and not in the task: `take_rows` must find that nothing is being read, or nothing reads on.
        batch, self._loading, self._loading_batch = self._loading_batch, None, None
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            logger.critical("reading promises to write again failed reason=%s", error)
            self._on_failure(error)
            return
        assert batch is not None
        self._ready.append((batch, task.result()))
        self._on_change()
