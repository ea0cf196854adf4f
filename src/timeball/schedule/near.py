"""Promises whose turn is near, whatever keeps the far ones: bodies loaded ahead, handed out once, in order.

    far structure (ring, queues)  --expect-->  index: two int64 a promise  --gather-->  second wheel: bodies
    a promise just accepted       --admit--------------------------------------------->

There is no horizon. What may be handed out is what is earlier than every promise whose body is not in memory, and
earlier than what the far structure has not given up yet; so the order holds whatever arrives when, and a clock
that is set back changes nothing. Bodies are loaded `ahead_ms` before their instant as long as memory allows, and
at the instant whether it allows or not: what has no room would never be kept.

Refuses nothing. Every promise here is either in the index, in a gather, in the wheel, or handed out (`Settling`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor

import numpy as np
import pyarrow as pa

from timeball.log.reader import LogReader
from timeball.message import Int64Array, int64
from timeball.schedule.due_index import DueIndex
from timeball.schedule.places import Places, take_promises
from timeball.schedule.settling import Settling
from timeball.schedule.wheel import Run, SecondWheel

logger = logging.getLogger(__name__)

ROW_BYTES_GUESS = 512  # before anything has been gathered
FAR_MS = 1 << 62


class Near:
    """See the module. Belongs to the event loop."""

    def __init__(
        self,
        reader: LogReader,
        reader_thread: Executor,
        settling: Settling,
        *,
        ahead_ms: int,
        gather_bytes: int,
        on_change: Callable[[], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        """`on_change` is called when `next_due_ms` may have become earlier; `on_failure` when a gather fails."""
        self._reader, self._thread, self._settling = reader, reader_thread, settling
        self._ahead_ms, self._gather_bytes = ahead_ms, gather_bytes
        self._on_change, self._on_failure = on_change, on_failure
        self._index, self._places = DueIndex(), Places()
        self._wheel = SecondWheel()
        self._gathering: asyncio.Task[None] | None = None
        self._gathering_ms = FAR_MS  # the earliest instant on its way into memory
        self._gathering_rows = 0
        self._row_bytes = ROW_BYTES_GUESS

    def __len__(self) -> int:
        """Promises that have not been handed out."""
        return len(self._index) + len(self._wheel) + self._gathering_rows

    @property
    def wheel_rows(self) -> int:
        """Promises whose bodies are in memory."""
        return len(self._wheel)

    @property
    def busy(self) -> bool:
        """Whether the reader thread works for us."""
        return self._gathering is not None

    def admit(self, promises: pa.RecordBatch, now_ms: int) -> None:
        """Keep these, which lie in their first rows; READ_SCHEMA."""
        due, seq = int64(promises.column("due_ms")), int64(promises.column("seq"))
        soon = due <= now_ms + self._ahead_ms if self._has_room() else np.zeros(len(due), dtype=np.bool_)
        if soon.any():
            rows = promises if soon.all() else promises.filter(pa.array(soon))
            self._wheel.add(rows)
        self._index.add(due[~soon], seq[~soon])

    def expect(self, due_ms: Int64Array, seq: Int64Array, at: Int64Array) -> None:
        """Keep these, whose bodies are in the log at these places."""
        self._index.add(due_ms, seq)
        self._places.add(seq, at)

    def due(self, now_ms: int, limit: int, below_ms: int) -> pa.RecordBatch | None:
        """As Strategy.due, but nothing due at or after `below_ms`: the far structure may hold what comes before it."""
        self._gather_if_needed(now_ms)
        high_ms = min(now_ms + 1, below_ms, self._unloaded_ms())
        while (run := self._wheel.take_due((high_ms, 0), limit)) is not None:
            keep = ~self._settling.is_settled(run.due, run.seq)
            if not keep.any():
                continue
            self._settling.hand_out(run.due[keep], run.seq[keep])
            return run.rows if keep.all() else run.rows.filter(pa.array(keep))
        return None

    def next_due_ms(self, below_ms: int) -> int | None:
        """When `due` will next have something, or wants to load more; for what is due before `below_ms`."""
        near = self._wheel.next_due_ms()
        if near is not None and near >= min(below_ms, self._gathering_ms):
            near = None  # a gather's end is told, and so is the opening of what is far
        head = self._index.min_due_ms()
        if head is None or self._gathering is not None:
            return near
        # Without room for more bodies, what is in memory makes room when it is due.
        load_ms = head - self._ahead_ms // 2 if self._has_room() else head
        return load_ms if near is None else min(near, load_ms)

    @property
    def first_due_ms(self) -> int | None:
        """The earliest instant of those not handed out."""
        candidates = (self._wheel.next_due_ms(), self._unloaded_ms())
        first = min(ms for ms in (*candidates, FAR_MS) if ms is not None)
        return None if first == FAR_MS else first

    async def close(self) -> None:
        """Wait for the reader thread to be done with us."""
        if self._gathering is not None:
            await asyncio.wait([self._gathering])

    # -- gathering -----------------------------------------------------------------------------------------------

    def _has_room(self) -> bool:
        return self._wheel.size_bytes < self._gather_bytes // 2

    def _unloaded_ms(self) -> int:
        """The earliest instant of a promise whose body is not in memory."""
        head = self._index.min_due_ms()
        return min(self._gathering_ms, FAR_MS if head is None else head)

    def _gather_if_needed(self, now_ms: int) -> None:
        head = self._index.min_due_ms()
        if self._gathering is not None or head is None or head - self._ahead_ms // 2 > now_ms:
            return
        if not self._has_room() and head > now_ms:
            return
        until_ms = max(now_ms + self._ahead_ms, head + 1)
        # Half of what may be in memory; at least one, however large.
        rows_max = max(1, self._gather_bytes // 2 // self._row_bytes)
        due, seq = self._index.between((-FAR_MS, 0), (until_ms, 0))
        cut = (until_ms, 0) if len(due) <= rows_max else (int(due[rows_max]), int(seq[rows_max]))
        due, seq = self._index.pop_before(*cut)
        at = self._places.pop(seq)
        waits = ~self._settling.is_settled(due, seq)
        self._gathering_ms, self._gathering_rows = int(due[0]), len(due)
        self._gathering = asyncio.get_running_loop().create_task(self._gather(at[waits]))
        self._gathering.add_done_callback(self._gathered)

    async def _gather(self, at: Int64Array) -> None:
        run = await asyncio.get_running_loop().run_in_executor(self._thread, self._load, at)
        self._wheel.add_run(run)

    def _load(self, at: Int64Array) -> Run:
        """Bodies from the log (reader thread), sorted by instant."""
        run = Run.of([take_promises(self._reader, np.sort(at))])
        self._row_bytes = max(64, run.rows.nbytes // max(1, len(run.due)))
        return run

    def _gathered(self, task: asyncio.Task[None]) -> None:
        self._gathering, self._gathering_ms, self._gathering_rows = None, FAR_MS, 0
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            logger.critical("gathering due promises failed reason=%s", error)
            self._on_failure(error)
            return
        self._on_change()
