"""Promises that must be written again to go on waiting, on their way from one place of the log to the next.

    waiting  --reader thread-->  ready, with bodies  --take-->  in flight  --moved-->  the strategy's again

A timer wheel rolls what is due beyond its ring, a cascade takes a hop; both rewrite the message. Here is what they
have in common: bodies are read in chunks, never more of them in memory than `chunk_bytes` or so; what has been
settled meanwhile is left out; and a *ticket* says when all promises of one `add` have arrived, which is when the
place they came from may be forgotten. A move that is not durable has not happened.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from timeball.log.reader import LogReader
from timeball.message import Int64Array
from timeball.schedule.places import take_promises
from timeball.schedule.settling import Settling

logger = logging.getLogger(__name__)

CHUNK_ROWS = 8_192
Dress = Callable[[pa.RecordBatch, Int64Array], pa.RecordBatch]


@dataclass(frozen=True, slots=True)
class Movers:
    """Promises on the move: instant, number, place, and a number of the strategy's own for each."""

    due_ms: Int64Array
    seq: Int64Array
    at: Int64Array
    note: Int64Array
    ticket: int

    def __len__(self) -> int:
        return len(self.seq)

    def part(self, chosen: slice | npt.NDArray[np.bool_]) -> Movers:
        """Some of them."""
        return Movers(self.due_ms[chosen], self.seq[chosen], self.at[chosen], self.note[chosen], self.ticket)


class Moves:
    """See the module. Belongs to the event loop."""

    def __init__(
        self,
        reader: LogReader,
        reader_thread: Executor,
        settling: Settling,
        *,
        chunk_bytes: int,
        on_change: Callable[[], None],
        on_failure: Callable[[BaseException], None],
        dress: Dress = lambda rows, note: rows,
    ) -> None:
        """`dress` makes of READ_SCHEMA promises and their notes what the new rows are to say (reader thread).

        `on_change` is called when `take` has something; `on_failure` when reading fails.
        """
        self._reader, self._thread, self._settling = reader, reader_thread, settling
        self._chunk_bytes, self._dress = chunk_bytes, dress
        self._on_change, self._on_failure = on_change, on_failure
        self._waiting: deque[Movers] = deque()
        self._loading: asyncio.Task[pa.RecordBatch] | None = None
        self._loading_movers: Movers | None = None
        self._ready: deque[tuple[Movers, pa.RecordBatch]] = deque()
        self._in_flight: deque[Movers] = deque()
        self._tickets = 0
        self._left: dict[int, int] = {}  # ticket -> promises that have not arrived

    def __len__(self) -> int:
        """Promises on the move."""
        return sum(self._left.values())

    @property
    def rows_in_memory(self) -> int:
        """Of those, how many have their bodies in memory."""
        loading = 0 if self._loading_movers is None else len(self._loading_movers)
        return loading + sum(len(movers) for movers, _ in self._ready)

    @property
    def busy(self) -> bool:
        """Whether the reader thread works for us, or `take` has something."""
        return self.loading or self.ready

    @property
    def loading(self) -> bool:
        """Whether the reader thread works for us."""
        return self._loading is not None

    @property
    def ready(self) -> bool:
        """Whether `take` has something."""
        return bool(self._ready)

    @property
    def first_due_ms(self) -> int | None:
        """The earliest instant of those on the move; what has been settled there holds up nothing any more."""
        all_movers = [*self._waiting, *(movers for movers, _ in self._ready), *self._in_flight]
        if self._loading_movers is not None:
            all_movers.append(self._loading_movers)
        found: int | None = None
        for movers in sorted(all_movers, key=lambda movers: int(movers.due_ms.min())):
            first = int(movers.due_ms.argmin())
            if found is not None and movers.due_ms[first] >= found:
                break
            # One look is nearly always enough; a thousand cancelled ones need another.
            if self._settling.is_settled(movers.due_ms[first : first + 1], movers.seq[first : first + 1])[0]:
                movers = movers.part(~self._settling.is_settled(movers.due_ms, movers.seq))
            if len(movers):
                first_ms = int(movers.due_ms.min())
                found = first_ms if found is None else min(found, first_ms)
        return found

    def add(self, due_ms: Int64Array, seq: Int64Array, at: Int64Array, note: Int64Array) -> int:
        """Move these; returns a ticket for `is_open`. `note` is the strategy's own, one a promise."""
        self._tickets += 1
        if len(seq):
            self._left[self._tickets] = len(seq)
            self._waiting.append(Movers(due_ms, seq, at, note, self._tickets))
            self._load_if_idle()
        return self._tickets

    def is_open(self, ticket: int) -> bool:
        """Whether promises of this `add` have neither arrived nor been settled on the way."""
        return ticket in self._left

    def take(self, limit: int) -> pa.RecordBatch | None:
        """As Strategy.moving."""
        while self._ready:
            movers, rows = self._ready.popleft()
            if len(movers) > limit:
                self._ready.appendleft((movers.part(slice(limit, None)), rows.slice(limit)))
                movers, rows = movers.part(slice(None, limit)), rows.slice(0, limit)
            self._load_if_idle()
            waits = self._waits(movers)
            movers, rows = movers.part(waits), rows if waits.all() else rows.filter(pa.array(waits))
            if len(movers):
                self._in_flight.append(movers)
                return rows
        return None

    def moved(self, seq: Int64Array, at: Int64Array) -> tuple[Movers, Int64Array]:
        """As Strategy.moved: those that have arrived, with their old places, and the new ones."""
        movers = self._in_flight.popleft()
        arrived = movers.part(slice(None, len(seq)))
        assert np.array_equal(arrived.seq, seq), "rows become durable in the order in which they were taken"
        if len(seq) < len(movers):
            self._in_flight.appendleft(movers.part(slice(len(seq), None)))
        self._close(movers.ticket, len(seq))
        return arrived, at

    async def close(self) -> None:
        """Wait for the reader thread to be done with us."""
        if self._loading is not None:
            await asyncio.wait([self._loading])

    # -- inside ----------------------------------------------------------------------------------------------

    def _close(self, ticket: int, count: int) -> None:
        self._left[ticket] -= count
        if not self._left[ticket]:
            del self._left[ticket]

    def _waits(self, movers: Movers) -> npt.NDArray[np.bool_]:
        """Which of them are still to be moved; the others have arrived, where the settled go."""
        waits = ~self._settling.is_settled(movers.due_ms, movers.seq)
        if not waits.all():
            self._close(movers.ticket, int((~waits).sum()))
        return np.asarray(waits)

    def _load_if_idle(self) -> None:
        # One chunk is ready while the one before it is written: more would only be memory.
        if self._loading is not None or self._ready:
            return
        while self._waiting:
            movers = self._waiting.popleft()
            row_bytes = max(1, self._reader.row_bytes(int(movers.at[0]), int(movers.at[0]) + 1))
            rows = max(1, min(CHUNK_ROWS, self._chunk_bytes // row_bytes))
            if len(movers) > rows:
                self._waiting.appendleft(movers.part(slice(rows, None)))
                movers = movers.part(slice(None, rows))
            movers = movers.part(self._waits(movers))
            if len(movers):
                self._loading_movers = movers
                self._loading = asyncio.get_running_loop().create_task(self._load(movers))
                self._loading.add_done_callback(self._loaded)
                return

    async def _load(self, movers: Movers) -> pa.RecordBatch:
        def read() -> pa.RecordBatch:
            return self._dress(take_promises(self._reader, movers.at), movers.note)

        return await asyncio.get_running_loop().run_in_executor(self._thread, read)

    def _loaded(self, task: asyncio.Task[pa.RecordBatch]) -> None:
        # Here and not in the task: who takes what is ready must find that nobody is reading, or nobody reads on.
        movers, self._loading, self._loading_movers = self._loading_movers, None, None
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            logger.critical("reading promises to write again failed reason=%s", error)
            self._on_failure(error)
            return
        assert movers is not None
        self._ready.append((movers, task.result()))
        self._on_change()
